"""Several ranks in one process: a thread and an engine each, all running the same programs on shares of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from surogate import _native
from surogate.compile.compiler import Compiled
from surogate.compile.memory import Spread
from surogate.compile.program import TensorRef
from surogate.errors import TrainingFailed
from surogate.train.runtime import Runtime

T = TypeVar("T")


class Ranks(Runtime):
    """The ranks of a run, as one runtime: it trains and evaluates on all of them, writes to all, and reads what they
    share from the first, what each has a part of from all."""

    def __init__(self, compiled: Compiled, threads: int, *, check_nan: bool = False) -> None:
        """
        Args:
            compiled: with the programs of every rank.
            threads: of each engine.
            check_nan: see :class:`Runtime`.
        """
        count = len(compiled.ranked)
        group = _native.thread_group(count)
        # One executor a rank, so that an engine always meets the same thread.
        self._threads = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(count)]
        self.members = self._on_all(
            lambda rank: Runtime(
                compiled.of_rank(rank), threads, check_nan=check_nan, communicator=group[rank]
            )
        )  # fmt: skip
        first = self.members[0]
        self.compiled, self.threads, self.on_gpu, self.engine = compiled, threads, first.on_gpu, first.engine

    @property
    def ranks(self) -> int:
        """Engines that train together."""
        return len(self.members)

    def allocated(self) -> dict[str, int]:
        """Bytes really taken, a space; of all ranks."""
        found: dict[str, int] = {}
        for member in self.members:
            for space, nbytes in member.allocated().items():
                found[space] = found.get(space, 0) + nbytes
        return found

    def fill(self, ref: TensorRef, put: Callable[[np.ndarray], None]) -> None:
        """Let ``put`` write a dense tensor, once, and copy it to every rank."""
        self.members[0].fill(ref, put)
        written = self.members[0].read(ref)
        for member in self.members[1:]:
            member.write(ref, written)

    def array(self, name: str) -> np.ndarray:
        """A tensor by name; one that the ranks share out is put together from their parts, as a copy."""
        spread = self.compiled.memory.spread.get(name)
        if spread is None:
            return super().array(name)
        parts = [m.read(ref)[first:last] for m, ref, first, last in self._parts(spread)]
        return np.concatenate(parts).reshape(spread.shape)

    def put(self, name: str, values: np.ndarray) -> None:
        """Copy values to what :meth:`array` reads, on every rank that has a part of it."""
        spread = self.compiled.memory.spread.get(name)
        if spread is None:
            super().put(name, values)
            return
        flat, done = values.reshape(-1), 0
        for member, ref, first, last in self._parts(spread):
            held = member.read(ref).copy()
            held[first:last] = flat[done : done + last - first]
            member.write(ref, held)
            done += last - first

    def _parts(self, spread: Spread) -> list[tuple[Runtime, TensorRef, int, int]]:
        """The ranks that hold a tensor's numbers: rank, its slot, first and last number there."""
        ref = self.compiled.memory.slots[spread.slot].ref
        size = int(ref.shape[0])
        begin, end = spread.first, spread.first + int(np.prod(spread.shape))
        return [
            (member, ref, max(begin - r * size, 0), min(end - r * size, size))
            for r, member in enumerate(self.members)
            if begin < (r + 1) * size and end > r * size
        ]

    def train_step(
        self, feeder: Any, accumulation: int, scalars: dict[str, float], seed: int, step: int
    ) -> dict[str, Any]:
        """One optimizer step on all ranks; ``feeder``: one a rank. Numbers are those of the whole batch."""
        feeders: Sequence[Any] = feeder
        return self._on_all(
            lambda rank: self.members[rank].train_step(feeders[rank], accumulation, scalars, seed, step)
        )[0]

    def evaluate(self, feeder: Any, batches: int) -> dict[str, Any]:
        """Summed loss and targets of all ranks; ``feeder``: one a rank, ``batches``: of each."""
        feeders: Sequence[Any] = feeder
        return self._on_all(lambda rank: self.members[rank].evaluate(feeders[rank], batches))[0]

    def _on_all(self, work: Callable[[int], T]) -> list[T]:
        """Call ``work(rank)`` on every rank's thread; raise what stopped the first of them to fail, not that others
        were told of it."""
        futures = [thread.submit(work, rank) for rank, thread in enumerate(self._threads)]
        errors = [(rank, future.exception()) for rank, future in enumerate(futures)]
        found = [(rank, error) for rank, error in errors if error is not None]
        causes = [(rank, error) for rank, error in found if not isinstance(error, _native.RankStopped)]
        if not found:
            return [future.result() for future in futures]
        rank, cause = (causes or found)[0]
        if isinstance(cause, RuntimeError | TrainingFailed):
            raise TrainingFailed(f"rank {rank} of {len(futures)} has stopped: {cause}") from cause
        raise cause
