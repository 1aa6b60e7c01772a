"""The native engine: programs over arenas, and the feeder of token shards (docs/architecture.md)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Ref = tuple[str, int, str, tuple[int, ...], tuple[int, ...]]

def sgemm_rate(threads: int, m: int, n: int, k: int) -> float:
    """Measured rate of float32 products [m,k] x [n,k]^T on this machine, flop/s."""

def quantize_4bit(
    values: np.ndarray[Any, Any],
    dtype: str,
    numbers: np.ndarray[Any, Any],
    block: int,
    codes: _Bytes,
    absmax: np.ndarray[Any, Any],
    threads: int,
) -> None:
    """Quantise n weights (``dtype`` f32, or bf16 as bits) to the nearest of 16 ascending numbers a block.

    ``codes``: uint8[(n+1)/2], written; ``absmax``: float32[ceil(n/block)], written. See ``surogate.ops.nf4``.
    """

def quantize_8bit(
    values: np.ndarray[Any, Any],
    table: np.ndarray[Any, Any],
    index: _Bytes,
    absmax: np.ndarray[Any, Any],
    threads: int,
) -> None:
    """Quantise float32[n] in blocks of 256; ``table``: of ``surogate.ops.blockwise8``; ``index`` and ``absmax`` are
    written."""

def blas_name() -> str:
    """Name and configuration of the BLAS library."""

def micro_seed(seed: int, step: int, micro: int) -> int:
    """The seed that a micro-batch of a step draws its randomness from."""

class Feeder:
    """Micro-batches from memory-mapped token shards, prepared ahead on a thread of its own.

    ``pieces``: int64[n, 3], rows (start, length, continues). ``sequences``: int64[m+1]. ``vocab_size`` > 0: a token
    outside [0, vocab_size) is a ValueError of the call that would hand it out; 0: not checked. ``rank`` of ``ranks``:
    which micro-batches of those that the ranks deal out in turn. Raises ValueError for
    files, pieces or sequences that do not fit together.
    """

    def __init__(
        self,
        tokens: str,
        mask: str,
        pieces: np.ndarray[Any, np.dtype[np.int64]],
        sequences: np.ndarray[Any, np.dtype[np.int64]],
        batch: int,
        sequence_len: int,
        max_documents: int,
        pad_id: int,
        cursor: int = 0,
        vocab_size: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None: ...
    @property
    def cursor(self) -> int:
        """Sequences taken so far, by all ranks."""

    def next(self) -> dict[str, np.ndarray[Any, np.dtype[np.int32]]]:
        """The next micro-batch: ids, targets, positions, cu_seqlens. IndexError at the end of the order."""

class RankStopped(RuntimeError):
    """Another rank has failed; the message names it and its cause."""

class Communicator:
    """A rank's end of a group."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    def barrier(self) -> None:
        """Until all ranks are here. :class:`RankStopped` when one has failed."""

    def abort(self, reason: str) -> None:
        """This rank has failed: all others stop."""

def thread_group(ranks: int) -> list[Communicator]:
    """Communicators of a group whose ranks are engines on threads of this process."""

class Engine:
    """Arenas, loaded programs, and whole training steps. The GIL is released while it works.

    Calls from several threads take turns.
    """

    def __init__(self, backend: str, threads: int = 1, device: int = 0, plugin: str = "", config: str = "") -> None: ...
    def join(self, communicator: Communicator) -> None:
        """Become one rank of a group, before programs are loaded."""

    def abort(self, reason: str) -> None:
        """This rank has failed: the others stop."""

    def kernels(self) -> list[str]:
        """Names of the ops that this backend has."""

    def allocate(self, space: str, nbytes: int) -> None:
        """Make the arena of a space: once, zero filled."""

    def allocated(self) -> dict[str, int]:
        """Bytes really taken, a space."""

    def memory(self, space: str, offset: int, nbytes: int) -> _Bytes:
        """Arena bytes without a copy, writable. ValueError where the host cannot reach them."""

    def write(self, space: str, offset: int, data: np.ndarray[Any, Any]) -> None:
        """Copy a contiguous array's bytes into an arena."""

    def read(self, space: str, offset: int, nbytes: int) -> _Bytes:
        """A copy of an arena's bytes."""

    def load(self, name: str, instructions: Sequence[tuple[Any, ...]], symbols: dict[str, _Ref], events: int) -> None:
        """Parse a program, find its kernels, check every tensor against the arenas. ValueError says what is wrong."""

    def run(self, name: str) -> None:
        """Run a program to its end. RuntimeError names program, instruction and op."""

    def train_step(
        self, feeder: Feeder, accumulation: int, scalars: dict[str, float], seed: int, step: int
    ) -> dict[str, Any]:
        """One optimizer step: loss_sum, loss, targets, tokens, grad_norm, applied, seconds, data_wait_seconds.

        Runs micro_step ``accumulation`` times, norm_step (where one is loaded) and optimizer_step. The last is left
        out, and ``applied`` False, when the loss or the norm is not finite: weights and gradients stay as they are.
        ``scalars``: values of f32 or f64 symbols; names that no program has are skipped.
        """

    def evaluate(self, feeder: Feeder, batches: int) -> dict[str, Any]:
        """Run eval_step over micro-batches: loss_sum, targets, tokens, seconds."""

    def inject_delays(self, seed: int, max_microseconds: int) -> None:
        """Delay instructions on all streams but compute, so that a missing dependency shows."""

    def profile(self, on: bool) -> None:
        """Time every instruction from now on."""

    def profile_report(self) -> list[tuple[str, int, str, int, float]]:
        """(program, instruction, op, calls, seconds) of all that was timed."""
