// One thread answers the host: it reads `request` (UVA memory that the host wrote after it was mapped) and writes what it
// read, with all bits flipped, into `answer` (UVA memory that the host then reads).

extern "C" __global__ void uva_probe(
    const volatile u64* request,  // [1] UVA
    volatile u64* answer          // [1] UVA
) {
    if (threadIdx.x == 0 && blockIdx.x == 0) *answer = ~*request;
}
