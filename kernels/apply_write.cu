// Carries one packed slot of staged writes into its targets: `apply_write` for one target, `apply_write_groups` for many
// through an array of base addresses. UNIT_BYTES (1, 2, 4, 8) is the width of one stored element.
//
// The slot is a row of lines of `cells_per_line` 16-byte cells; one warp takes one line and finds all it needs there, so
// that a small apply costs one bus read. Cell 0 is the header {sequence, lines | cells << 32}; the others are
//     values  x = count << 60 | group << 48 | offset,  y = up to 8 bytes of values        (count 1 to 8 elements)
//     run     x = 15    << 60 | group << 48 | offset,  y = elements << 40 | byte offset   (contents lie behind the lines)
//     direct  x = 14    << 60 | group << 48 | offset,  y = elements << 48 | address       (contents lie in UVA memory)
// with the offset counted in elements from the target's base: row and stride were multiplied in 64 bits by the packer.
// A run's contents lie at the same address modulo 16 as its destination, so both sides move in 16-byte steps.
//
// Grid: any number of one-dimensional blocks of whole warps; every line up to the number of warps has a valid header.
// The last block to finish writes the sequence into `done` (UVA memory): the slot was read, the host may rewrite it.

#if UNIT_BYTES == 1
typedef unsigned char unit;
#elif UNIT_BYTES == 2
typedef unsigned short unit;
#elif UNIT_BYTES == 4
typedef u32 unit;
#else
typedef u64 unit;
#endif

#define OFFSET_MASK 0xffffffffffffull  // 48 bits
#define SOURCE_MASK 0xffffffffffull    // 40 bits
#define RUN_KIND 15u
#define DIRECT_KIND 14u
#define PER_CELL (16 / UNIT_BYTES)     // elements in one 16-byte step
#define IN_FLIGHT 8                    // 16-byte reads a lane keeps in flight: 4 KiB a warp hides the bus latency

// Element `i` of the eight bytes in `bytes`.
static __device__ __forceinline__ unit element_of(u64 bytes, u32 i) {
    return (unit)(bytes >> (8 * UNIT_BYTES * i));
}

// One warp copies `count` elements; `from` and `to` are equal modulo 16. Only whole steps inside the run are stored wide.
static __device__ __forceinline__ void copy_run(unit* to, const char* from, u64 count, u32 lane) {
    const u64 head = ((u64)to & 15) / UNIT_BYTES;  // elements of the first step that lie before the run
    const u64 end = head + count;
    const u64 steps = (end + PER_CELL - 1) / PER_CELL;
    const Cell* source = (const Cell*)(from - head * UNIT_BYTES);
    unit* target = to - head;
    for (u64 first = lane; first < steps; first += 32 * IN_FLIGHT) {
        Cell piece[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) {
            if (first + 32 * k < steps) piece[k] = source[first + 32 * k];
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) {
            const u64 at = (first + 32 * k) * PER_CELL;
            if (at >= head && at + PER_CELL <= end) {
                *(Cell*)(target + at) = piece[k];
            } else if (at < end) {
                for (u32 i = 0; i < PER_CELL; ++i) {
                    const u64 half = i < PER_CELL / 2 ? piece[k].x : piece[k].y;
                    if (at + i >= head && at + i < end) target[at + i] = element_of(half, i % (PER_CELL / 2));
                }
            }
        }
    }
}

// `find(group)` gives a target's base; see the head of this file for grid and lines.
template <typename Find>
static __device__ __forceinline__ void apply_lines(const char* slot, u32 cells_per_line, u32* ticket, volatile u64* done,
                                                   Find find) {
    const u32 lane = threadIdx.x % 32;
    const u64 warps = (u64)gridDim.x * (blockDim.x / 32);
    u64 line = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    u64 sequence, lines;
    do {
        Cell cell = {0, 0};
        if (lane < cells_per_line) cell = ((const Cell*)slot)[line * cells_per_line + lane];
        sequence = WARP_BROADCAST(cell.x, 0);
        const u64 sizes = WARP_BROADCAST(cell.y, 0);
        lines = sizes & 0xffffffffu;
        const bool mine = lane > 0 && lane <= (u32)(sizes >> 32);
        const u32 kind = mine ? (u32)(cell.x >> 60) : 0;
        if (kind != 0 && kind < DIRECT_KIND) {
            unit* to = find((u32)(cell.x >> 48) & 0xfff) + (cell.x & OFFSET_MASK);
            for (u32 i = 0; i < kind; ++i) to[i] = element_of(cell.y, i);
        }
        u32 runs = WARP_BALLOT(kind >= DIRECT_KIND);
        while (runs) {
            const u32 owner = LOWEST_BIT(runs);
            runs &= runs - 1;
            const u64 x = WARP_BROADCAST(cell.x, owner);
            const u64 y = WARP_BROADCAST(cell.y, owner);
            const bool direct = (x >> 60) == DIRECT_KIND;
            const char* from = direct ? (const char*)(y & OFFSET_MASK) : slot + (y & SOURCE_MASK);
            copy_run(find((u32)(x >> 48) & 0xfff) + (x & OFFSET_MASK), from, direct ? y >> 48 : y >> 40, lane);
        }
        line += warps;
    } while (line < lines);

    BLOCK_SYNC();
    if (threadIdx.x == 0) {
        bool last = true;
        if (gridDim.x > 1) {
            FENCE_DEVICE();  // this block's reads and stores before its ticket
            last = TICKET(ticket, gridDim.x - 1) == gridDim.x - 1;
        }
        // No fence here: it would cost 0.5 us, a quarter of a small apply, and `done` says only that the slot was read.
        // Every value was in a register before its thread came to the barrier; targets are kept alive by an event.
        if (last) *done = sequence;
    }
}

extern "C" __global__ void __launch_bounds__(256) apply_write(
    const char* __restrict__ slot,  // [bytes] UVA or device memory: lines, then contents
    u32 cells_per_line,             // 32, or 2 where each line holds one run
    u32* ticket,                    // [1] device: blocks that are done, back to 0 after the last
    volatile u64* done,             // [1] UVA or device: receives the slot's sequence
    unit* target,                   // group 0: base of the table
    unit* counts                    // group 1: base of the second table, or null
) {
    apply_lines(slot, cells_per_line, ticket, done, [=](u32 group) { return group == 0 ? target : counts; });
}

extern "C" __global__ void __launch_bounds__(256) apply_write_groups(
    const char* __restrict__ slot,    // [bytes] UVA or device memory: lines, then contents
    u32 cells_per_line,               // 32, or 2 where each line holds one run
    u32* ticket,                      // [1] device: blocks that are done, back to 0 after the last
    volatile u64* done,               // [1] UVA or device: receives the slot's sequence
    const u64* __restrict__ targets   // [num_groups] device: base address of each group's table
) {
    apply_lines(slot, cells_per_line, ticket, done, [=](u32 group) { return (unit*)targets[group]; });
}
