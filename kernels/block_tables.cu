// One step's inputs for the attention kernels of all groups: rows of the block tables in batch order (gather), and the
// slot of each token (slot mapping). Which of both is done, and for how much, stands in one descriptor, `Step`.
//
//     fetch_step             brings a step's UVA slot (descriptor, then inputs of the host) to the device: one bus read
//     prepare_step           works from a descriptor in device memory, and fences the slot it came from
//     prepare_step_by_value  works from a descriptor in its arguments: what a captured graph holds
//
// Addresses and row strides of the tables are read from `targets`, at a fixed place: graphs see an exchanged table. The
// last table holds the counts, kernel blocks of each request, which the apply launch writes.
//
// Work is cut into units, one a warp: 32 tokens of up to GROUPS_PER_UNIT groups, or GATHER_COLUMNS cells of one row. Any
// one-dimensional grid of whole warps does it. Nothing in a step may lead outside the buffers: see `find_row`.

#define GROUPS_PER_UNIT 4    // groups that a lane maps a token for: their reads are in flight together
#define GATHER_COLUMNS 512   // cells of a row that a warp gathers: the chunk table on the host has the same number
#define IN_FLIGHT 4          // cells that a lane reads before it stores
#define OUT_GROUPS 16        // addresses in the descriptor itself, for arrays that the caller gave

// Facts of a group, i64 each. Spans and sizes are below 2^31.
#define SPAN 0          // tokens of the sequence that one KV block stands for on all ranks together
#define RANKS 1         // ranks that share it, 1 where the group is not sharded
#define RANK 2          // this one
#define INTERLEAVE 3    // tokens in a row on one rank
#define SPLIT 4         // kernel blocks in a KV block
#define KERNEL_BLOCK 5  // tokens in a kernel block
#define COLUMNS 6       // KV blocks that a row has room for; 0 where slot mapping is off
#define WIDTH 7         // kernel blocks that a row has room for
#define FACTS 8

struct Step {
    u64 sequence;                // what the fence word gets
    const int* idx_mapping;      // [num_reqs] device: row of each request, or padding
    const int* query_start_loc;  // [num_reqs + 1] device: first token of each request
    const i64* positions;        // [num_positions] device
    u64 num_reqs;
    u64 num_rows;                // rows to gather, with padding; 0 gathers nothing
    u64 num_positions;
    i64* slots;                  // [num_groups, slots_length] device, rows `slots_stride` apart
    u64 slots_stride;            // elements
    u64 slots_length;            // 0 maps nothing
    const u64* gathered;         // [num_groups] device: addresses of [num_rows, width] int32; or null: see `out`
    const u64* targets;          // [2, num_tables] device: base addresses, then row strides in bytes
    const i64* facts;            // [num_groups, FACTS] device
    const u64* chunks;           // [num_chunks] device: group << 40 | first column
    u64 num_groups;
    u64 num_tables;
    u64 max_num_reqs;            // rows of each table
    u64 num_chunks;              // chunks of one row over all groups
    u64 first_group;             // group of out[0]
    u64 out[OUT_GROUPS];
};

// x / y, with the rest in `rest`; y is below 2^31. A 64-bit division costs four times a 32-bit one.
static __device__ __forceinline__ u64 divide(u64 x, u32 y, u32* rest) {
    if (x >> 32 == 0) {
        const u32 quotient = (u32)x / y;
        *rest = (u32)x - quotient * y;
        return quotient;
    }
    const u64 quotient = x / y;
    *rest = (u32)(x - quotient * y);
    return quotient;
}

// Row of the request that owns `token`, and -1 if none does. The result is an index into every table, or -1.
static __device__ __forceinline__ i64 find_row(const Step& step, u64 token) {
    const int* __restrict__ starts = step.query_start_loc;
    u64 low = 0, high = step.num_reqs;  // the last request that starts at or before the token, if any does, is in [low, high)
    while (high - low > 1) {
        const u64 middle = (low + high) / 2;
        if ((i64)starts[middle] <= (i64)token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    if ((i64)starts[low] > (i64)token) return -1;
    const i64 row = step.idx_mapping[low];
    return row < (i64)step.max_num_reqs ? row : -1;
}

// How many kernel blocks `row` (inside the table) has in `group`.
static __device__ __forceinline__ i64 count_of(const Step& step, u64 group, u64 row) {
    return ((const int*)step.targets[step.num_tables - 1])[group * step.max_num_reqs + row];
}

// Where the KV of a request's token goes in a group, or -1. `row` lies inside the table.
static __device__ __forceinline__ i64 slot_of(const Step& step, u64 group, u64 row, u64 position) {
    const i64* __restrict__ facts = step.facts + group * FACTS;
    u32 offset, kernel_offset;
    const u64 kv_column = divide(position, (u32)facts[SPAN], &offset);
    if (kv_column >= (u64)facts[COLUMNS]) return -1;
    const u32 ranks = (u32)facts[RANKS];
    if (ranks > 1) {
        const u32 interleave = (u32)facts[INTERLEAVE];
        const u32 turn = offset / interleave, round = turn / ranks;
        if (turn - round * ranks != (u32)facts[RANK]) return -1;
        offset = round * interleave + (offset - turn * interleave);
    }
    const u32 kernel_block = (u32)facts[KERNEL_BLOCK];
    const u64 column = kv_column * (u64)facts[SPLIT] + divide(offset, kernel_block, &kernel_offset);
    const char* table_row = (const char*)step.targets[group] + row * step.targets[step.num_tables + group];
    const i64 block = ((const int*)table_row)[column];  // inside the row: both reads are in flight together
    if ((i64)column >= count_of(step, group, row) || block < 0) return -1;
    return block * (i64)kernel_block + kernel_offset;
}

// One warp writes the slots of tokens 32 * tile and on, for GROUPS_PER_UNIT groups; -1 for tokens that nobody owns.
static __device__ __forceinline__ void map_tokens(const Step& step, u64 tile, u64 part, u32 lane) {
    const u64 token = tile * 32 + lane;
    if (token >= step.slots_length) return;
    i64 row = -1, position = -1;
    if (step.num_reqs > 0) {
        const i64 end = step.query_start_loc[step.num_reqs];
        if ((i64)token < end && token < step.num_positions) {
            position = step.positions[token];
            row = find_row(step, token);
        }
    }
#pragma unroll
    for (u32 i = 0; i < GROUPS_PER_UNIT; ++i) {
        const u64 group = part * GROUPS_PER_UNIT + i;
        if (group >= step.num_groups) break;
        i64 slot = -1;
        if (row >= 0 && position >= 0) slot = slot_of(step, group, (u64)row, (u64)position);
        step.slots[group * step.slots_stride + token] = slot;
    }
}

// One warp gathers one chunk of one row of the batch: the request's blocks, then zeros.
static __device__ __forceinline__ void gather_columns(const Step& step, u64 unit, u32 lane) {
    const u64 index = unit / step.num_chunks;
    const u64 chunk = step.chunks[unit - index * step.num_chunks];
    const u64 group = chunk >> 40, first = chunk & 0xffffffffffull;
    const u64 width = (u64)step.facts[group * FACTS + WIDTH];
    const u64 end = first + GATHER_COLUMNS < width ? first + GATHER_COLUMNS : width;
    i64 row = index < step.num_reqs ? step.idx_mapping[index] : -1;
    u64 owned = 0;  // never past the width
    if (row >= 0 && row < (i64)step.max_num_reqs) {
        const u64 count = (u64)count_of(step, group, (u64)row);
        owned = count < width ? count : width;
    } else {
        row = 0;
    }
    const int* __restrict__ from = (const int*)((const char*)step.targets[group] + row * step.targets[step.num_tables + group]);
    int* __restrict__ to = (int*)(step.gathered ? step.gathered[group] : step.out[group - step.first_group]) + index * width;
    for (u64 column = first + lane; column < end; column += 32 * IN_FLIGHT) {
        int blocks[IN_FLIGHT];
#pragma unroll
        for (u32 k = 0; k < IN_FLIGHT; ++k) {
            blocks[k] = column + 32 * k < owned ? from[column + 32 * k] : 0;
        }
#pragma unroll
        for (u32 k = 0; k < IN_FLIGHT; ++k) {
            if (column + 32 * k < end) to[column + 32 * k] = blocks[k] > 0 ? blocks[k] : 0;
        }
    }
}

static __device__ __forceinline__ void prepare(const Step& step) {
    const u32 lane = threadIdx.x % 32;
    const u64 warps = (u64)gridDim.x * (blockDim.x / 32);
    const u64 tiles = (step.slots_length + 31) / 32;
    const u64 token_units = tiles * ((step.num_groups + GROUPS_PER_UNIT - 1) / GROUPS_PER_UNIT);
    const u64 units = token_units + step.num_rows * step.num_chunks;
    for (u64 unit = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; unit < units; unit += warps) {
        if (unit < token_units) {  // neighbours take neighbouring tiles: real tokens, and padding, fall on all blocks
            map_tokens(step, unit % tiles, unit / tiles, lane);
        } else {
            gather_columns(step, unit - token_units, lane);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) fetch_step(
    const Cell* __restrict__ slot,  // [num_cells] UVA
    Cell* __restrict__ twin,        // [num_cells] device
    u64 num_cells
) {
    const u64 threads = (u64)gridDim.x * blockDim.x;
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < num_cells; at += threads) twin[at] = slot[at];
}

extern "C" __global__ void __launch_bounds__(256) prepare_step(
    const Step* __restrict__ step,  // [1] device
    u32* ticket,                    // [1] device: blocks that are done, back to 0 after the last
    volatile u64* done              // [1] UVA or device: receives the step's sequence when all is written
) {
    prepare(*step);
    BLOCK_SYNC();
    if (threadIdx.x == 0) {
        FENCE_DEVICE();  // this block's reads and stores before its ticket
        if (TICKET(ticket, gridDim.x - 1) == gridDim.x - 1) {
            FENCE_SYSTEM();  // everybody's before the host may reuse the slot
            *done = step->sequence;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) prepare_step_by_value(
    const Step step
) {
    prepare(step);
}
