"""A continuous-batching scheduler on a serving trace: which request gets which row and which KV blocks, step by step.

Pure Python and NumPy: no device, no clock, and the same steps for the same trace and seed. The scheduler owns the block
ids; whoever iterates over it owns the arrays of the steps.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Request", "Scheduler", "Step", "generate_trace", "read_trace"]

HEADER: Final = "TIMESTAMP,ContextTokens,GeneratedTokens"
_MAX_ID: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace; lengths in tokens. `line` counts from 1, the header."""

    line: int
    context_tokens: int
    generated_tokens: int

    @property
    def kv_tokens(self) -> int:
        """The tokens whose KV is ever computed: the last generated one is sampled and never fed back."""
        return self.context_tokens + max(self.generated_tokens, 1) - 1


def read_trace(path: str | os.PathLike[str]) -> Iterator[Request]:
    """Read a trace line by line: `TIMESTAMP,ContextTokens,GeneratedTokens`, in order of arrival.

    Parameters
    ----------
    path
        A text file with that header. Timestamps are ISO 8601, contexts are at least 1 token, outputs at least 0.

    Raises
    ------
    ValueError
        At the first bad line, naming its number and the bad value; also when there is no request at all.
    OSError
        The file cannot be read.
    """
    # Bytes that are no UTF-8 become lone surrogates, so that they are reported as a bad value of a numbered line.
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        header = file.readline().rstrip("\n")
        if header != HEADER:
            raise ValueError(f"line 1: expected the header {HEADER}, got {_shown(header)}")
        number, last = 1, ""
        latest: datetime | None = None
        for number, line in enumerate(file, start=2):
            fields = line.rstrip("\n").split(",")
            if len(fields) != 3:
                raise ValueError(f"line {number}: expected 3 fields, got {len(fields)}: {_shown(line.rstrip())}")
            try:
                arrival = datetime.fromisoformat(fields[0])
                backwards = latest is not None and arrival < latest
            except (ValueError, TypeError):  # TypeError: one of the two has a time zone
                raise ValueError(f"line {number}: bad TIMESTAMP {_shown(fields[0])}") from None
            if backwards:
                raise ValueError(
                    f"line {number}: TIMESTAMP {_shown(fields[0])} is before {_shown(last)}; sort the trace"
                )
            latest, last = arrival, fields[0]
            context = _token_count(fields[1], "ContextTokens", 1, number)
            yield Request(number, context, _token_count(fields[2], "GeneratedTokens", 0, number))
        if number == 1:
            raise ValueError("line 2: expected a request, got the end of the file")


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 60 else text[:57] + "...")


def _token_count(text: str, name: str, at_least: int, line: int) -> int:
    # int() alone would also take "+1", " 1", "1_0" and digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) >= at_least):
        raise ValueError(f"line {line}: {name} must be an integer from {at_least} to 999999999, got {_shown(text)}")
    return int(text)


def generate_trace(num_requests: int, seed: int = 0) -> Iterator[Request]:
    """Generate requests with the lengths of a chat service: log-normal contexts (median 600) and outputs (median 120).

    Raises
    ------
    ValueError
        `num_requests` is less than 1.
    """
    if num_requests < 1:
        raise ValueError(f"num_requests must be at least 1, got {num_requests}")
    rng = np.random.default_rng(seed)
    contexts = np.clip(rng.lognormal(np.log(600), 1.0, num_requests), 2, 8000).astype(int).tolist()
    outputs = np.clip(rng.lognormal(np.log(120), 0.8, num_requests), 1, 1000).astype(int).tolist()
    for i, (context, output) in enumerate(zip(contexts, outputs, strict=True)):
        yield Request(i + 2, context, output)


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one step. All arrays are host memory and belong to the receiver.

    Attributes
    ----------
    index
        The step's number, from 0.
    rows
        `[num_appends] int32`: the rows that get new blocks, each once.
    new_block_ids
        A group each: `[total] int32`, KV block ids of all rows, one after the other.
    cu_num_blocks
        A group each: `[num_appends] int32`, inclusive running totals of `new_block_ids`.
    overwrite
        `[num_appends] bool`: True for the first blocks of an admitted request, whose row may have had another owner.
    idx_mapping, query_start_loc, positions
        `[num_reqs] int32`, `[num_reqs + 1] int32`, `[num_tokens] int64`: the batch, in order of admission.
    num_finished
        Requests that are done after this step, since the start.
    """

    index: int
    rows: NDArray[np.int32]
    new_block_ids: list[NDArray[np.int32]]
    cu_num_blocks: list[NDArray[np.int32]]
    overwrite: NDArray[np.bool_]
    idx_mapping: NDArray[np.int32]
    query_start_loc: NDArray[np.int32]
    positions: NDArray[np.int64]
    num_finished: int


class _FreeList:
    """The free block ids of one group, last freed first: reuse at once is what shows a former owner's leftovers.

    Ids run from 1, since block 0 is what padding points to.
    """

    def __init__(self, num_blocks: int, rng: np.random.Generator) -> None:
        self._ids = rng.permutation(np.arange(1, num_blocks + 1, dtype=np.int32))
        self.num_free = num_blocks

    def take(self, count: int) -> NDArray[np.int32]:
        self.num_free -= count
        return self._ids[self.num_free : self.num_free + count].copy()

    def give_back(self, ids: NDArray[np.int32]) -> None:
        self._ids[self.num_free : self.num_free + len(ids)] = ids
        self.num_free += len(ids)


class Scheduler:
    """Continuous batching over a trace: iterate over it, once, to get each `Step`.

    All requests count as arrived, in the order of the trace: a step has no duration here. Each step, the running
    requests get one token each, or what is left of their prompt, in order of admission and up to `max_tokens` together.
    When blocks run out, the request admitted last gives up its row and blocks, and is the next to be admitted again,
    with its whole context to compute anew. Otherwise requests are admitted while there is a row, a token of budget, and
    enough blocks for all of the prompt; a prompt longer than the budget is continued in the next step.

    Parameters
    ----------
    requests
        In order of arrival; read as they are needed.
    block_sizes, num_blocks
        Tokens a block (under context parallelism: on all ranks together) and blocks in the pool, a group each.
    max_reqs, max_tokens
        Rows, and tokens a step; each running request must get one.
    max_model_len
        Tokens of the longest request.
    seed
        Shuffles the pools' first ids.

    Raises
    ------
    ValueError
        A parameter out of range, a pool that is too small for one request; while iterating, a request longer than
        `max_model_len`, naming its line.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        *,
        block_sizes: Sequence[int],
        num_blocks: Sequence[int],
        max_reqs: int,
        max_tokens: int,
        max_model_len: int,
        seed: int = 0,
    ) -> None:
        if max_reqs < 1 or max_model_len < 1 or seed < 0:
            raise ValueError(f"need max_reqs >= 1, max_model_len >= 1, seed >= 0: {max_reqs}, {max_model_len}, {seed}")
        if max_tokens < max_reqs:
            raise ValueError(f"max_tokens {max_tokens} is less than max_reqs {max_reqs}: one token a running request")
        if not block_sizes or min(block_sizes) < 1 or len(num_blocks) != len(block_sizes):
            raise ValueError(f"need block sizes >= 1 and a num_blocks each: {list(block_sizes)}, {list(num_blocks)}")
        self.max_blocks_per_group = [-(-max_model_len // size) for size in block_sizes]
        for size, pool, needed in zip(block_sizes, num_blocks, self.max_blocks_per_group, strict=True):
            if not needed <= pool <= _MAX_ID:
                wanted = f"{needed} (one request of {max_model_len} tokens) to {_MAX_ID}"
                raise ValueError(f"num_blocks must be {wanted} for blocks of {size} tokens, got {pool}")
        rng = np.random.default_rng(seed)
        self.num_preemptions = 0
        self.num_finished = 0
        self._max_tokens, self._max_model_len = max_tokens, max_model_len
        self._sizes = np.array(block_sizes, np.int64)[:, np.newaxis]
        self._free = [_FreeList(count, rng) for count in num_blocks]
        self._free_rows = list(range(max_reqs - 1, -1, -1))
        self._arriving = iter(requests)
        self._waiting: deque[tuple[Request, int]] = deque()  # with the tokens known so far
        # By row: the request, and how many of its tokens have their KV, are known, and will ever be computed.
        self._requests: dict[int, Request] = {}
        self._computed, self._known, self._total = (np.zeros(max_reqs, np.int64) for _ in range(3))
        self._owned = [np.zeros((max_reqs, width), np.int32) for width in self.max_blocks_per_group]
        self._num_owned = np.zeros((len(block_sizes), max_reqs), np.int64)
        self._running: NDArray[np.int64] = np.zeros(0, np.int64)  # rows, in order of admission

    def __iter__(self) -> Iterator[Step]:
        index = 0
        while True:
            rows, tokens, need = self._schedule()
            if not len(rows):
                return
            step = self._allocate(index, rows, tokens, need)
            self._advance(rows, tokens)
            yield step
            index += 1

    def _schedule(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows of this step, the tokens of each, and the new blocks that each needs in each group."""
        rows = self._running
        tokens = self._tokens_of(rows)
        need = self._new_blocks(rows, tokens)
        free = np.array([pool.num_free for pool in self._free])
        preempted = False
        while (need.sum(axis=1) > free).any():
            # Only the last row can be inside its prompt, so the tokens of the others stay as they are.
            free += self._num_owned[:, rows[-1]]
            self._preempt(int(rows[-1]))
            rows, tokens, need, preempted = rows[:-1], tokens[:-1], need[:, :-1], True
        if not preempted:
            admitted = self._admit(self._max_tokens - int(tokens.sum()), free - need.sum(axis=1))
            if admitted:
                rows = np.concatenate([rows, np.array(admitted)])
                tokens = self._tokens_of(rows)
                need = self._new_blocks(rows, tokens)
        return rows, tokens, need

    def _tokens_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        pending = self._known[rows] - self._computed[rows]
        return np.diff(np.minimum(np.cumsum(pending), self._max_tokens), prepend=0)

    def _new_blocks(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-(self._computed[rows] + tokens) // self._sizes) - self._num_owned[:, rows]

    def _admit(self, budget: int, free: NDArray[np.int64]) -> list[int]:
        admitted: list[int] = []
        while budget and self._free_rows and self._has_waiting():
            request, known = self._waiting[0]
            if (-(-known // self._sizes[:, 0]) > free).any():
                break
            self._waiting.popleft()
            row = self._free_rows.pop()
            self._requests[row] = request
            self._computed[row], self._known[row], self._total[row] = 0, known, request.kv_tokens
            chunk = min(known, budget)
            budget -= chunk
            free = free - -(-chunk // self._sizes[:, 0])
            admitted.append(row)
        return admitted

    def _has_waiting(self) -> bool:
        if not self._waiting and (request := next(self._arriving, None)) is not None:
            if request.context_tokens + request.generated_tokens > self._max_model_len:
                length = f"{request.context_tokens} + {request.generated_tokens} tokens"
                raise ValueError(f"line {request.line}: {length} exceed max_model_len {self._max_model_len}")
            self._waiting.append((request, request.context_tokens))
        return bool(self._waiting)

    def _preempt(self, row: int) -> None:
        self._waiting.appendleft((self._requests[row], int(self._known[row])))
        self._release(row)
        self.num_preemptions += 1

    def _release(self, row: int) -> None:
        for pool, owned, count in zip(self._free, self._owned, self._num_owned[:, row], strict=True):
            pool.give_back(owned[row, :count])
        self._num_owned[:, row] = 0
        del self._requests[row]
        self._free_rows.append(row)

    def _allocate(self, index: int, rows: NDArray[Any], tokens: NDArray[Any], need: NDArray[Any]) -> Step:
        grows = need.any(axis=0)
        growing, need = rows[grows], need[:, grows]
        had = self._num_owned[:, growing]
        ends = np.cumsum(need, axis=1)
        ids = []
        for g, pool in enumerate(self._free):
            total = int(need[g].sum())
            ids.append(pool.take(total))
            columns = np.arange(total) + np.repeat(had[g] - ends[g] + need[g], need[g])
            self._owned[g][np.repeat(growing, need[g]), columns] = ids[g]
        self._num_owned[:, growing] += need
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(tokens)])
        positions = np.arange(starts[-1]) + np.repeat(self._computed[rows] - starts[:-1], tokens)
        finished = int((self._computed[rows] + tokens >= self._total[rows]).sum())
        return Step(
            index=index,
            rows=growing.astype(np.int32),
            new_block_ids=ids,
            cu_num_blocks=list(ends.astype(np.int32)),
            overwrite=had[0] == 0,
            idx_mapping=rows.astype(np.int32),
            query_start_loc=starts.astype(np.int32),
            positions=positions,
            num_finished=self.num_finished + finished,
        )

    def _advance(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        self._computed[rows] += tokens
        done = self._computed[rows] >= self._total[rows]
        sampled = rows[self._computed[rows] == self._known[rows]]
        self._known[sampled] += 1
        for row in rows[done]:
            self._release(int(row))
        self.num_finished += int(done.sum())
        self._running = rows[~done]
