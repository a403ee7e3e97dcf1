// Put in front of every kernel source by the loader (sources include nothing): short types, the one 16-byte vector, and
// the few warp and memory steps that a CPU build replaces (define CUPY_STAGED_SHIM and supply the macros).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct __align__(16) Cell {  // one 16-byte access
    u64 x;
    u64 y;
};

#ifndef CUPY_STAGED_SHIM
#define WARP_BROADCAST(value, lane) __shfl_sync(0xffffffffu, (value), (lane))
#define WARP_BALLOT(predicate) __ballot_sync(0xffffffffu, (predicate))
#define BLOCK_SYNC() __syncthreads()
#define FENCE_DEVICE() __threadfence()
#define FENCE_SYSTEM() __threadfence_system()
#define TICKET(counter, last) atomicInc((counter), (last))
#define LOWEST_BIT(mask) (__ffs(mask) - 1)
#endif
