// Lets a kernel source compile as plain C++17 and run on the CPU, one fiber a lane (run_kernels.cpp has the scheduler).
// The build puts this file in front of warp.cuh. Memory accesses of the kernel are seen through the compiler's thread
// sanitizer hooks, so that bounds, alignment and races are checked without any sanitizer library.
//
// A new warp step is one macro here: exchange values with SHIM_EXCHANGE, or write a function beside shim_ballot.

#pragma once

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct ShimIndex {
    unsigned x, y, z;
};
extern ShimIndex threadIdx, blockIdx, blockDim, gridDim;

// Where a step stands in the source: lanes that meet in one step must have come to the same place.
struct ShimSite {
    const char* step;
    const char* file;
    int line;
    int id;  // tells two steps of one line apart
};

void shim_exchange(ShimSite site, const void* mine, unsigned bytes, unsigned lane, void* theirs);
unsigned shim_ballot(ShimSite site, bool predicate);
void shim_block_sync(ShimSite site);
void shim_fence();
unsigned shim_ticket(ShimSite site, unsigned* counter, unsigned last);

template <typename T>
T shim_exchanged(ShimSite site, T mine, unsigned lane) {
    T theirs;
    shim_exchange(site, &mine, sizeof(T), lane, &theirs);
    return theirs;
}

#define SHIM_SITE(step) (ShimSite{step, __FILE__, __LINE__, __COUNTER__})
#define SHIM_EXCHANGE(step, value, lane) shim_exchanged(SHIM_SITE(step), (value), (unsigned)(lane))

#define WARP_BROADCAST(value, lane) SHIM_EXCHANGE("WARP_BROADCAST", value, lane)
#define WARP_SHUFFLE(value, lane) SHIM_EXCHANGE("WARP_SHUFFLE", value, lane)
#define WARP_SHUFFLE_UP(value, delta) \
    SHIM_EXCHANGE("WARP_SHUFFLE_UP", value, \
                  threadIdx.x % 32 >= (unsigned)(delta) ? threadIdx.x % 32 - (unsigned)(delta) : threadIdx.x % 32)
#define WARP_SHUFFLE_DOWN(value, delta) \
    SHIM_EXCHANGE("WARP_SHUFFLE_DOWN", value, \
                  threadIdx.x % 32 + (unsigned)(delta) < 32 ? threadIdx.x % 32 + (unsigned)(delta) : threadIdx.x % 32)
#define WARP_SHUFFLE_XOR(value, mask) SHIM_EXCHANGE("WARP_SHUFFLE_XOR", value, threadIdx.x % 32 ^ (unsigned)(mask))
#define WARP_BALLOT(predicate) shim_ballot(SHIM_SITE("WARP_BALLOT"), (predicate))
#define WARP_SYNC() ((void)shim_ballot(SHIM_SITE("WARP_SYNC"), false))
#define BLOCK_SYNC() shim_block_sync(SHIM_SITE("BLOCK_SYNC"))
#define FENCE_DEVICE() shim_fence()
#define FENCE_SYSTEM() shim_fence()
#define TICKET(counter, last) shim_ticket(SHIM_SITE("TICKET"), (counter), (last))
#define LOWEST_BIT(mask) (__ffs(mask) - 1)

inline int __ffs(int mask) { return __builtin_ffs(mask); }
inline int __popc(unsigned mask) { return __builtin_popcount(mask); }
template <typename T>
constexpr T min(T a, T b) { return b < a ? b : a; }
template <typename T>
constexpr T max(T a, T b) { return a < b ? b : a; }

// The table of kernels, which the build appends to the source; `params` are addresses of arguments, as for
// cuLaunchKernel.
struct ShimKernel {
    const char* name;
    void (*entry)();
    void (*call)(void (*entry)(), void* const* params);
    unsigned num_params;
    const unsigned* param_bytes;
    const unsigned char* param_kinds;  // 0 a value, 1 a pointer to const, 3 a pointer
};

template <typename T>
struct ShimKind { static constexpr unsigned char value = 0; };
template <typename T>
struct ShimKind<T*> { static constexpr unsigned char value = 3; };
template <typename T>
struct ShimKind<const T*> { static constexpr unsigned char value = 1; };
template <typename T>
struct ShimKind<T* __restrict__> : ShimKind<T*> {};

template <typename... P>
struct ShimCall {
    static constexpr unsigned bytes[sizeof...(P) + 1] = {sizeof(P)..., 0};
    static constexpr unsigned char kinds[sizeof...(P) + 1] = {ShimKind<P>::value..., 0};

    // Arguments lie in the caller's memory, which no kernel may touch: leave them out of the checks.
    template <unsigned... I>
    struct Order {};
    template <unsigned N, unsigned... I>
    struct Count : Count<N - 1, N - 1, I...> {};
    template <unsigned... I>
    struct Count<0, I...> { using type = Order<I...>; };
    template <unsigned... I>
    __attribute__((no_sanitize_thread)) static void spread(void (*entry)(), void* const* params, Order<I...>) {
        ((void (*)(P...))entry)(*(P*)params[I]...);
    }
    static void call(void (*entry)(), void* const* params) {
        spread(entry, params, typename Count<sizeof...(P)>::type{});
    }
};

template <typename... P>
constexpr ShimKernel shim_kernel(const char* name, void (*entry)(P...)) {
    return {name, (void (*)())entry, ShimCall<P...>::call, sizeof...(P), ShimCall<P...>::bytes, ShimCall<P...>::kinds};
}
