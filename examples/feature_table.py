"""A feature server: a table too large for the GPU stays in UVA memory, takes a stream of updates, and is read in place.

Each step a batch of new feature vectors comes in from outside, and a batch of queries asks for the mean vector of a few
items. The kernel reads only the rows that it needs, over the bus; nothing else of the table ever travels. The same
program runs on the host in NumPy.
"""

import numpy as np

import cupy_staged as cs

ITEMS, FEATURES, STEPS = 50_000, 32, 50
UPDATES, QUERIES, ITEMS_A_QUERY = 64, 16, 8

SOURCE = r"""
extern "C" __global__ void mean_features(
    const float* __restrict__ table,  // [items, features], UVA memory
    const int* __restrict__ items,    // [queries, items_a_query]
    int features, int items_a_query,
    float* __restrict__ means)        // [queries, features]
{
    // One block a query, one thread a feature: the threads of a warp read one stretch of a row.
    const int* mine = items + (long long)blockIdx.x * items_a_query;
    for (int feature = threadIdx.x; feature < features; feature += blockDim.x) {
        float sum = 0;
        for (int i = 0; i < items_a_query; ++i) sum += table[(long long)mine[i] * features + feature];
        means[(long long)blockIdx.x * features + feature] = sum / items_a_query;
    }
}
"""


def main() -> None:
    """Serve, and compare every answer with a plain NumPy table."""
    table = cs.StagedWriteTensor((ITEMS, FEATURES), "float32", uva_instead_of_gpu=True)
    queries = cs.UvaBufferPool((QUERIES, ITEMS_A_QUERY), "int32")
    on_gpu = not isinstance(table.gpu, np.ndarray)
    if on_gpu:
        import cupy

        kernel = cupy.RawKernel(SOURCE, "mean_features")

        def answer(items):
            means = cupy.empty((QUERIES, FEATURES), np.float32)
            kernel((QUERIES,), (FEATURES,), (table.gpu, items, np.int32(FEATURES), np.int32(ITEMS_A_QUERY), means))
            return means
    else:

        def answer(items):
            return table.gpu[items].mean(axis=1)

    model = np.zeros((ITEMS, FEATURES), np.float32)
    rng = np.random.default_rng(0)
    known = np.zeros(0, np.int64)
    answers = []
    for _ in range(STEPS):
        changed = rng.integers(0, ITEMS, UPDATES)  # an item may come twice: the later vector stays
        vectors = rng.random((UPDATES, FEATURES), np.float32)
        starts, ends = np.zeros(UPDATES, np.int64), np.arange(1, UPDATES + 1) * FEATURES
        table.stage_writes(changed, starts, vectors.reshape(-1), ends)
        table.apply_write()
        known = np.union1d(known, changed)
        for item, vector in zip(changed, vectors, strict=True):
            model[item] = vector

        asked = rng.choice(known, (QUERIES, ITEMS_A_QUERY)).astype(np.int32)
        means = answer(queries.copy_to_uva(asked))  # the kernel reads the item numbers in place, too
        queries.fence()  # it is launched: its buffer may be used again when it is done
        answers.append((means, model[asked].mean(axis=1)))

    for means, expected in answers:
        np.testing.assert_allclose(means.get() if on_gpu else means, expected, rtol=1e-5)
    where = "host memory" if table.backend.id is None else "UVA memory" if table.np is not None else "device memory"
    print(f"{STEPS} steps: {table.stats.writes} vectors written to {where}, {STEPS * QUERIES} answers as by NumPy")


if __name__ == "__main__":
    main()
