"""A toy decode loop over a paged KV cache: `BlockTables` says where KV lies, and a raw kernel attends over it.

Requests of different length share one cache of blocks. Each step, a request that fills its last block gets another one,
one launch prepares block tables and slot mapping, one kernel stores the new keys and values at their slots, and one
attends over the blocks of each request. Requests that are done give up their row and blocks to new ones. Every output
is checked against plain NumPy attention over unpaged histories. The same loop runs on the host in NumPy.
"""

import numpy as np

import cupy_staged as cs

BLOCK, NUM_BLOCKS, MAX_REQS, MAX_LENGTH = 16, 64, 6, 128
HEADS, DIM, NUM_REQUESTS = 4, 32, 14

SOURCE = r"""
extern "C" __global__ void store_kv(
    const float* __restrict__ new_k,    // [tokens, heads * dim]
    const float* __restrict__ new_v,    // [tokens, heads * dim]
    const long long* __restrict__ slots,  // [tokens], -1 is padding
    int width,                          // heads * dim
    float* __restrict__ k_cache,        // [num_blocks * block, heads * dim]
    float* __restrict__ v_cache)
{
    long long slot = slots[blockIdx.x];
    if (slot < 0) return;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        k_cache[slot * width + i] = new_k[(long long)blockIdx.x * width + i];
        v_cache[slot * width + i] = new_v[(long long)blockIdx.x * width + i];
    }
}

// One warp a request and head: grid [requests, heads], 32 threads, and DIM = 32 so that a thread holds one dimension.
// The softmax is taken in one pass: when a larger score comes, what was summed so far is scaled down.
extern "C" __global__ void paged_attention(
    const float* __restrict__ queries,    // [requests, heads, dim]
    const float* __restrict__ k_cache,    // [num_blocks * block, heads, dim]
    const float* __restrict__ v_cache,
    const int* __restrict__ block_table,  // [requests, table_width]
    const int* __restrict__ lengths,      // [requests] tokens to attend over
    int table_width, int block,
    float* __restrict__ out)              // [requests, heads, dim]
{
    int request = blockIdx.x, head = blockIdx.y, heads = gridDim.y, lane = threadIdx.x;
    float query = queries[(request * heads + head) * 32 + lane];
    float largest = -1e30f, sum = 0, mixed = 0;
    for (int token = 0; token < lengths[request]; ++token) {
        long long id = block_table[(long long)request * table_width + token / block];
        long long slot = id * block + token % block;
        long long at = (slot * heads + head) * 32 + lane;
        float score = query * k_cache[at];
        for (int other = 16; other > 0; other /= 2) score += __shfl_xor_sync(0xffffffffu, score, other);
        score *= rsqrtf(32.0f);
        float larger = fmaxf(largest, score), keep = expf(largest - larger), weight = expf(score - larger);
        sum = sum * keep + weight;
        mixed = mixed * keep + weight * v_cache[at];
        largest = larger;
    }
    out[(request * heads + head) * 32 + lane] = mixed / sum;
}
"""


def attention(query, keys, values):
    """Plain attention of one token: query ``[heads, dim]``, keys and values ``[tokens, heads, dim]``."""
    scores = np.einsum("hd,thd->ht", query, keys) / np.sqrt(DIM)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values)


class HostKernels:
    """The two kernels in NumPy; like theirs, its only way to a key is through the block table."""

    def __init__(self) -> None:
        self.k_cache, self.v_cache = np.zeros((2, NUM_BLOCKS * BLOCK, HEADS, DIM), np.float32)

    def step(self, new_k, new_v, queries, slots, block_table, lengths):
        """Store the new keys and values, attend, and return ``[requests, heads, dim]``."""
        real = slots >= 0
        self.k_cache[slots[real]], self.v_cache[slots[real]] = new_k[real], new_v[real]
        out = np.empty_like(queries)
        for i, length in enumerate(lengths):
            at = (block_table[i, : -(-length // BLOCK), None] * BLOCK + np.arange(BLOCK)).reshape(-1)[:length]
            out[i] = attention(queries[i], self.k_cache[at], self.v_cache[at])
        return out


class CudaKernels:
    """The two kernels, and the pools that their inputs travel in; a model would make keys and values on the device."""

    def __init__(self) -> None:
        import cupy

        module = cupy.RawModule(code=SOURCE)
        self.store_kv, self.attend = module.get_function("store_kv"), module.get_function("paged_attention")
        self.k_cache, self.v_cache = cupy.zeros((2, NUM_BLOCKS * BLOCK, HEADS, DIM), np.float32)
        self.to_gpu = cs.UvaBufferPool((MAX_REQS * MAX_LENGTH, HEADS, DIM), "float32").copy_to_gpu
        self.lengths = cs.UvaBufferPool(MAX_REQS, "int32")
        self.out = cupy.empty((MAX_REQS, HEADS, DIM), np.float32)

    def step(self, new_k, new_v, queries, slots, block_table, lengths):
        """Enqueue both kernels and read the result back, which waits: only the check needs it."""
        new_k, new_v, queries = self.to_gpu(new_k), self.to_gpu(new_v), self.to_gpu(queries)
        width = np.int32(HEADS * DIM)
        self.store_kv((len(slots),), (128,), (new_k, new_v, slots, width, self.k_cache, self.v_cache))
        table_width, block, n = np.int32(block_table.shape[1]), np.int32(BLOCK), len(lengths)
        args = (queries, self.k_cache, self.v_cache, block_table, self.lengths.copy_to_uva(lengths), table_width, block)
        self.attend((n, HEADS), (32,), (*args, self.out))
        self.lengths.fence()
        return self.out[:n].get()


def main() -> None:
    """Serve all requests, checking each token."""
    rng = np.random.default_rng(0)
    max_blocks = MAX_LENGTH // BLOCK
    tables = cs.BlockTables([BLOCK], MAX_REQS, MAX_REQS * MAX_LENGTH, [max_blocks])
    kernels = HostKernels() if isinstance(tables.slot_mappings, np.ndarray) else CudaKernels()
    waiting = [(int(rng.integers(5, 40)), int(rng.integers(4, 60))) for _ in range(NUM_REQUESTS)]  # prompt, output
    free_blocks, free_rows = rng.permutation(NUM_BLOCKS).tolist(), list(range(MAX_REQS))
    running = {}  # row: tokens so far, tokens in the end, blocks, history of keys, of values
    steps = checked = 0
    while waiting or running:
        tokens = dict.fromkeys(running, 1)
        while waiting and free_rows and len(free_blocks) >= max_blocks * (len(running) + 1):
            row, (prompt, output) = free_rows.pop(), waiting.pop(0)
            running[row] = [0, prompt + output, [], *np.zeros((2, 0, HEADS, DIM), np.float32)]
            tokens[row] = prompt  # all of the prompt in its first step
        for row, n in tokens.items():
            length, _, blocks = running[row][:3]
            new = [free_blocks.pop() for _ in range(-(-(length + n) // BLOCK) - len(blocks))]
            if new:
                tables.append_block_ids(row, [new], overwrite=not blocks)
            blocks += new
        tables.apply_staged_writes()

        rows = np.array([*tokens], np.int32)
        counts = np.array([*tokens.values()])
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        before = np.array([running[row][0] for row in tokens])
        positions = np.arange(starts[-1]) + np.repeat(before - starts[:-1], counts)
        (block_table,), slots = tables.prepare_step(rows, starts, positions, len(rows), int(starts[-1]))

        new_k, new_v = rng.standard_normal((2, starts[-1], HEADS, DIM)).astype(np.float32)
        queries = rng.standard_normal((len(rows), HEADS, DIM)).astype(np.float32)
        out = kernels.step(new_k, new_v, queries, slots[0], block_table, (before + counts).astype(np.int32))

        for i, row in enumerate(tokens):
            request = running[row]
            request[0] += tokens[row]
            request[3] = np.concatenate([request[3], new_k[starts[i] : starts[i + 1]]])
            request[4] = np.concatenate([request[4], new_v[starts[i] : starts[i + 1]]])
            np.testing.assert_allclose(out[i], attention(queries[i], request[3], request[4]), rtol=1e-3, atol=1e-4)
            checked += 1
            if request[0] >= request[1]:
                free_blocks += running.pop(row)[2]
                free_rows.append(row)
        steps += 1
    print(f"{NUM_REQUESTS} requests in {steps} steps, {checked} outputs of {HEADS} heads checked against NumPy")


if __name__ == "__main__":
    main()
