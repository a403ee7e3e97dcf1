// Runs one launch of a kernel on the CPU. Blocks run one after the other in a chosen order; inside a block each lane is
// a fiber that gives way where it must wait for its warp (WARP_*) or block (BLOCK_SYNC). Reported as an error, with
// block, thread and place, and never as a hang or a crash:
//   - divergence: lanes of a warp (threads of a block) that come to different steps, or end while others wait;
//   - an access outside the buffers given, a store to one that is read only, a misaligned access;
//   - a race: two threads touch a byte, one of them stores, and no BLOCK_SYNC (or drawn ticket) lies between;
//   - a ticket or a volatile store that is not behind a fence of the stores which it announces;
//   - undefined arithmetic (the compiler's hooks), and a launch that does not end.

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include <algorithm>
#include <random>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>

#include "cuda_shim.h"

extern const ShimKernel shim_kernels[];
extern const unsigned shim_num_kernels;

ShimIndex threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kMaxBlock = 1024;
constexpr size_t kStackBytes = 64 << 10;
constexpr unsigned kMany = ~0u;

struct Shadow {  // who touched a byte last; thread 0 is nobody
    unsigned writer, write_epoch, reader, read_epoch;
};

struct Region {
    uintptr_t base;
    size_t bytes;
    unsigned access;  // 1 read, 2 write
    const char* name;
    Shadow* shadow;
};

struct Report {
    char message[1024];
    uint64_t loads[5];             // by log2 of the width in bytes
    uint64_t stores[5];
    uint64_t num_published;        // volatile stores
    uint64_t published_at[16];
    uint64_t accesses_after_publish; // plain loads and stores behind the last volatile store
};

enum class State { ready, in_warp_step, in_block_step, ended };

struct Lane {
    ucontext_t context;
    State state;
    ShimSite site;
    bool dirty;          // stored since the last fence or block step
    bool drew_ticket;
    unsigned step;       // picks one of two exchange rows: a fast lane must not overwrite what a slow one has to read
};

struct Warp {
    unsigned waiting;
    alignas(16) char values[2][kWarp][16];
};

ucontext_t scheduler;
Lane lanes[kMaxBlock];
Warp warps[kMaxBlock / kWarp];
char* stacks;
Lane* current;
bool failed;
unsigned block_waiting, block_epoch;
bool block_dirty, block_drew, block_drew_last;
uint64_t budget;
Report* report;
std::vector<Region> regions;
const ShimKernel* kernel;
void* const* arguments;

unsigned thread_of(const Lane* lane) { return (unsigned)(lane - lanes); }

// Ends the launch: the fiber that called is never resumed.
void fail(const char* format, ...) {
    if (!failed) {
        failed = true;
        int used = 0;
        if (current) {
            used = snprintf(report->message, sizeof report->message, "%s: block %u thread %u: ", kernel->name,
                            blockIdx.x, thread_of(current));
        }
        va_list list;
        va_start(list, format);
        vsnprintf(report->message + used, sizeof report->message - used, format, list);
        va_end(list);
    }
    if (current) {
        Lane* lane = current;
        current = nullptr;
        swapcontext(&lane->context, &scheduler);
        __builtin_unreachable();
    }
}

void spend() {
    if (budget-- == 0) fail("the launch does not end");
}

void give_way() {
    Lane* lane = current;
    current = nullptr;
    swapcontext(&lane->context, &scheduler);
}

Warp& own_warp() { return warps[thread_of(current) / kWarp]; }

void check_mates(const ShimSite& site, State want) {
    const unsigned first = thread_of(current) / kWarp * kWarp;
    for (unsigned i = first; i < first + kWarp && i < blockDim.x; ++i) {
        const Lane& mate = lanes[i];
        if (&mate == current) continue;
        if (mate.state == State::ended) {
            fail("divergence: waits in %s (%s:%d), but thread %u of its warp has ended", site.step, site.file,
                 site.line, i);
        }
        if (mate.state != State::ready && (mate.state != want || mate.site.id != site.id)) {
            fail("divergence: waits in %s (%s:%d), thread %u of its warp in %s (%s:%d)", site.step, site.file,
                 site.line, i, mate.site.step, mate.site.file, mate.site.line);
        }
    }
}

// Returns the values of all lanes of the warp once each has brought its own.
const char (*meet_warp(const ShimSite& site, const void* mine, unsigned bytes))[16] {
    spend();
    if (bytes > 16) fail("%s of %u bytes", site.step, bytes);
    Warp& warp = own_warp();
    Lane* self = current;
    const unsigned first = thread_of(self) / kWarp * kWarp;
    if (first + kWarp > blockDim.x) {
        fail("%s (%s:%d) in a warp of fewer than 32 threads", site.step, site.file, site.line);
    }
    check_mates(site, State::in_warp_step);
    const unsigned row = self->step++ & 1;
    memcpy(warp.values[row][thread_of(self) - first], mine, bytes);
    self->site = site;
    self->state = State::in_warp_step;
    if (++warp.waiting == kWarp) {
        warp.waiting = 0;
        for (unsigned i = first; i < first + kWarp; ++i) lanes[i].state = State::ready;
    } else {
        give_way();
    }
    return warp.values[row];
}

bool holds(uintptr_t base, size_t bytes, uintptr_t at, size_t n) { return at >= base && at + n <= base + bytes; }

void check_race(Region& region, uintptr_t at, size_t n, bool store) {
    const unsigned me = blockIdx.x * blockDim.x + thread_of(current) + 1;
    const auto ordered = [&](unsigned other, unsigned epoch) {
        if (other == 0 || other == me || current->drew_ticket) return true;
        return other != kMany && (other - 1) / blockDim.x == blockIdx.x && epoch < block_epoch;
    };
    for (size_t i = at - region.base; i < at - region.base + n; ++i) {
        Shadow& byte = region.shadow[i];
        if (!ordered(byte.writer, byte.write_epoch)) {
            fail("race: %s byte %zu of %s, which block %u thread %u stored to", store ? "stores to" : "reads", i,
                 region.name, (byte.writer - 1) / blockDim.x, (byte.writer - 1) % blockDim.x);
        }
        if (store) {
            if (!ordered(byte.reader, byte.read_epoch)) {
                fail("race: stores to byte %zu of %s, which another read", i, region.name);
            }
            byte.writer = me;
            byte.write_epoch = block_epoch;
        } else {
            const bool alone = byte.reader == 0 || byte.reader == me || ordered(byte.reader, byte.read_epoch);
            byte.reader = alone ? me : kMany;
            byte.read_epoch = block_epoch;
        }
    }
}

Region* find(uintptr_t at, size_t n) {
    const auto before = [](uintptr_t a, const Region& region) { return a < region.base; };
    const auto after = std::upper_bound(regions.begin(), regions.end(), at, before);
    if (after == regions.begin()) return nullptr;
    Region& region = *(after - 1);
    return holds(region.base, region.bytes, at, n) ? &region : nullptr;
}

void outside(uintptr_t at, size_t n, bool store) {
    const Region* nearest = nullptr;
    long long offset = 0, least = INT64_MAX;
    for (const Region& region : regions) {
        const long long from_start = (long long)(at - region.base);
        const long long past = from_start < 0 ? -from_start : from_start - (long long)region.bytes;
        if (past < least) least = past, nearest = &region, offset = from_start;
    }
    if (!nearest) fail("%s %zu bytes at %p: no buffer was given", store ? "stores" : "reads", n, (void*)at);
    fail("out of bounds: %s %zu bytes at byte %lld of %s, which holds %zu", store ? "stores" : "reads", n, offset,
         nearest->name, nearest->bytes);
}

void touch(const void* address, size_t n, bool store, bool is_volatile) {
    if (!current) return;
    spend();
    const uintptr_t at = (uintptr_t)address;
    if (holds((uintptr_t)stacks + thread_of(current) * kStackBytes, kStackBytes, at, n)) return;
    for (const ShimIndex* index : {&threadIdx, &blockIdx, &blockDim, &gridDim}) {
        if (!store && holds((uintptr_t)index, sizeof *index, at, n)) return;
    }
    Region* region = find(at, n);
    if (!region) outside(at, n, store);
    if (!(region->access & (store ? 2 : 1))) {
        fail("%s byte %zu of %s, which it may not", store ? "stores to" : "reads", (size_t)(at - region->base),
             region->name);
    }
    const size_t inside = at - region->base;
    if (n <= 16 && at % n) fail("misaligned: %zu bytes at byte %zu of %s", n, inside, region->name);
    const unsigned width = n <= 16 ? __builtin_ctz((unsigned)n) : 4;
    ++(store ? report->stores : report->loads)[width];
    if (is_volatile) {
        if (store) {
            if (report->num_published < 16) report->published_at[report->num_published] = at;
            ++report->num_published;
            report->accesses_after_publish = 0;
        }
        return;
    }
    ++report->accesses_after_publish;
    if (region->shadow) check_race(*region, at, n, store);
    if (store) {
        if (block_drew && !block_drew_last) fail("stores to %s after its block drew a ticket", region->name);
        current->dirty = true;
    }
}

void run_lane() {
    kernel->call(kernel->entry, arguments);
    const unsigned first = thread_of(current) / kWarp * kWarp;
    for (unsigned i = first; i < first + kWarp && i < blockDim.x; ++i) {
        if (lanes[i].state == State::in_warp_step) {
            fail("divergence: ends, but thread %u of its warp waits in %s (%s:%d)", i, lanes[i].site.step,
                 lanes[i].site.file, lanes[i].site.line);
        }
    }
    if (block_waiting) fail("divergence: ends, but threads of its block wait in BLOCK_SYNC");
    current->state = State::ended;
    give_way();
}

void run_block(std::mt19937& random, unsigned order) {
    const unsigned n = blockDim.x;
    for (unsigned i = 0; i < n; ++i) {
        Lane& lane = lanes[i];
        getcontext(&lane.context);
        lane.context.uc_stack.ss_sp = stacks + i * kStackBytes;
        lane.context.uc_stack.ss_size = kStackBytes;
        lane.context.uc_link = nullptr;
        makecontext(&lane.context, run_lane, 0);
        lane.state = State::ready;
        lane.dirty = lane.drew_ticket = false;
        lane.step = 0;
    }
    for (Warp& warp : warps) warp.waiting = 0;
    block_waiting = block_epoch = 0;
    block_dirty = block_drew = block_drew_last = false;
    std::vector<unsigned> turn(n);
    for (unsigned i = 0; i < n; ++i) turn[i] = order == 1 ? n - 1 - i : i;
    for (bool moved = true; moved;) {
        moved = false;
        if (order > 1) std::shuffle(turn.begin(), turn.end(), random);
        for (unsigned i : turn) {
            if (lanes[i].state != State::ready) continue;
            moved = true;
            current = &lanes[i];
            threadIdx = {i, 0, 0};
            swapcontext(&scheduler, &lanes[i].context);
            current = nullptr;
            if (failed) return;
        }
    }
    for (unsigned i = 0; i < n; ++i) {
        if (lanes[i].state == State::ended) continue;
        fail("%s: block %u: threads are stuck, thread %u in %s (%s:%d)", kernel->name, blockIdx.x, i,
             lanes[i].site.step, lanes[i].site.file, lanes[i].site.line);
        return;
    }
}

void add_regions(const Region* given, unsigned count) {
    regions.assign(given, given + count);
    std::stable_sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) { return a.base < b.base; });
    std::vector<Region> kept;
    for (const Region& region : regions) {
        if (!region.bytes) continue;
        if (!kept.empty() && region.base < kept.back().base + kept.back().bytes) {
            if (region.base != kept.back().base || region.bytes != kept.back().bytes) {
                fail("buffers %s and %s overlap", kept.back().name, region.name);
                return;
            }
            kept.back().access |= region.access;
            continue;
        }
        kept.push_back(region);
    }
    regions.swap(kept);
    for (Region& region : regions) {
        region.shadow = nullptr;
        if (!(region.access & 2)) continue;
        void* shadow = mmap(nullptr, region.bytes * sizeof(Shadow), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (shadow == MAP_FAILED) {
            fail("no memory to watch %s", region.name);
            return;
        }
        region.shadow = (Shadow*)shadow;
    }
}

}  // namespace

void shim_exchange(ShimSite site, const void* mine, unsigned bytes, unsigned lane, void* theirs) {
    const auto values = meet_warp(site, mine, bytes);
    memcpy(theirs, values[lane % kWarp], bytes);
}

unsigned shim_ballot(ShimSite site, bool predicate) {
    const auto values = meet_warp(site, &predicate, 1);
    unsigned mask = 0;
    for (unsigned i = 0; i < kWarp; ++i) mask |= (unsigned)(values[i][0] != 0) << i;
    return mask;
}

void shim_block_sync(ShimSite site) {
    spend();
    check_mates(site, State::in_block_step);
    for (unsigned i = 0; i < blockDim.x; ++i) {
        if (lanes[i].state == State::ended) {
            fail("divergence: waits in BLOCK_SYNC, but thread %u of its block has ended", i);
        }
        if (lanes[i].state == State::in_block_step && lanes[i].site.id != site.id) {
            fail("divergence: waits in BLOCK_SYNC at line %d, thread %u at line %d", site.line, i, lanes[i].site.line);
        }
    }
    current->site = site;
    current->state = State::in_block_step;
    block_dirty |= current->dirty;  // from here on a fence by any thread of the block covers these stores
    current->dirty = false;
    if (++block_waiting < blockDim.x) return give_way();
    block_waiting = 0;
    ++block_epoch;
    for (unsigned i = 0; i < blockDim.x; ++i) lanes[i].state = State::ready;
}

void shim_fence() {
    spend();
    current->dirty = false;
    if (!block_waiting) block_dirty = false;
}

unsigned shim_ticket(ShimSite site, unsigned* counter, unsigned last) {
    spend();
    Region* region = find((uintptr_t)counter, sizeof *counter);
    if (!region) outside((uintptr_t)counter, sizeof *counter, true);
    if ((region->access & 3) != 3) fail("%s on %s, which it may not change", site.step, region->name);
    bool unfenced = block_dirty;
    for (unsigned i = 0; i < blockDim.x; ++i) unfenced |= lanes[i].dirty;
    if (unfenced) fail("draws a ticket (%s:%d) while stores of its block are not fenced", site.file, site.line);
    const unsigned drawn = *counter;
    *counter = drawn >= last ? 0 : drawn + 1;
    current->drew_ticket = block_drew = true;
    block_drew_last = drawn == last;
    return drawn;
}

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const ShimKernel* shim_find(const char* name) {
    for (unsigned i = 0; i < shim_num_kernels; ++i) {
        if (!strcmp(shim_kernels[i].name, name)) return &shim_kernels[i];
    }
    return nullptr;
}

// order: 0 blocks and lanes first to last, 1 last to first, else the seed of a shuffle. Returns whether all went well.
EXPORT int shim_run(const ShimKernel* which, unsigned grid, unsigned block, unsigned order, void* const* params,
                    const Region* given, unsigned num_regions, uint64_t max_steps, Report* result) {
    memset(result, 0, sizeof *result);
    report = result;
    kernel = which;
    arguments = params;
    budget = max_steps;
    current = nullptr;
    failed = false;
    if (!stacks) {
        void* memory = mmap(nullptr, kMaxBlock * kStackBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return fail("no memory for stacks"), 0;
        stacks = (char*)memory;
    }
    if (!grid || !block || block > kMaxBlock) return fail("%u blocks of %u threads", grid, block), 0;
    gridDim = {grid, 1, 1};
    blockDim = {block, 1, 1};
    add_regions(given, num_regions);
    std::mt19937 random(order);
    std::vector<unsigned> blocks(grid);
    for (unsigned i = 0; i < grid; ++i) blocks[i] = order == 1 ? grid - 1 - i : i;
    if (order > 1) std::shuffle(blocks.begin(), blocks.end(), random);
    for (size_t i = 0; i < blocks.size() && !failed; ++i) {
        blockIdx = {blocks[i], 0, 0};
        run_block(random, order);
    }
    for (const Region& region : regions) {
        if (region.shadow) munmap(region.shadow, region.bytes * sizeof(Shadow));
    }
    regions.clear();
    return !failed;
}

// What the compiler calls around every access of a kernel (its thread sanitizer hooks).
#define HOOKS(n)                                                                                 \
    extern "C" void __tsan_read##n(void* at) { touch(at, n, false, false); }                     \
    extern "C" void __tsan_write##n(void* at) { touch(at, n, true, false); }                     \
    extern "C" void __tsan_unaligned_read##n(void* at) { touch(at, n, false, false); }           \
    extern "C" void __tsan_unaligned_write##n(void* at) { touch(at, n, true, false); }           \
    extern "C" void __tsan_volatile_read##n(void* at) { touch(at, n, false, true); }             \
    extern "C" void __tsan_volatile_write##n(void* at) { touch(at, n, true, true); }             \
    extern "C" void __tsan_unaligned_volatile_read##n(void* at) { touch(at, n, false, true); }   \
    extern "C" void __tsan_unaligned_volatile_write##n(void* at) { touch(at, n, true, true); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
extern "C" void __tsan_read_range(void* at, size_t n) { touch(at, n, false, false); }
extern "C" void __tsan_write_range(void* at, size_t n) { touch(at, n, true, false); }
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}

// And where it finds undefined behaviour; each record begins with its place.
struct UndefinedAt {
    const char* file;
    unsigned line, column;
};
#define UNDEFINED(what)                                                                    \
    extern "C" void __ubsan_handle_##what(const UndefinedAt* at, const void*, const void*) { \
        fail("undefined: " #what " (%s:%u)", at->file, at->line);                          \
    }
UNDEFINED(type_mismatch_v1)
UNDEFINED(add_overflow)
UNDEFINED(sub_overflow)
UNDEFINED(mul_overflow)
UNDEFINED(negate_overflow)
UNDEFINED(divrem_overflow)
UNDEFINED(shift_out_of_bounds)
UNDEFINED(out_of_bounds)
UNDEFINED(load_invalid_value)
UNDEFINED(pointer_overflow)
UNDEFINED(builtin_unreachable)
UNDEFINED(missing_return)
UNDEFINED(invalid_builtin)
UNDEFINED(nonnull_arg)
UNDEFINED(vla_bound_not_positive)
