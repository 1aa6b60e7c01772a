"""What an op is: shape rule, NumPy reference, gradient rule, cost, storage rules and samples for its tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from surogate.graph import Graph, GraphError, Node, Type, Value

Types = Sequence[Type | None]
Arrays = Sequence[np.ndarray | None]
Attrs = Mapping[str, Any]


class Cost(NamedTuple):
    """Work of one call: floating-point operations, and the fewest bytes that must move through memory."""

    flops: int
    nbytes: int


@dataclass
class Sample:
    """One case for the parity tests.

    ``inputs`` are float64 arrays for floating operands (the harness rounds them to ``dtypes``), integer arrays for
    others, ``None`` for operands left out. ``differentiable``: the indices of inputs whose gradient rule is checked by
    central differences.
    """

    inputs: list[np.ndarray | None]
    attrs: dict[str, Any] = field(default_factory=dict)
    dtypes: list[str | None] | None = None  # storage dtype an operand; None: f32 for floats, i32 for integers
    differentiable: tuple[int, ...] = ()
    rtol: float = 2e-5
    atol: float = 2e-5


class Op:
    """Base class of ops. Subclasses are stateless; the graph refers to them by ``name``.

    ``inplace[out] = in``: where operand ``in`` is present, result ``out`` takes its storage. For accumulators this
    means ``out = operand + result``; their outputs are listed in ``accumulates``.
    ``may_reuse[out] = (in, ...)``: the kernel is right when ``out`` takes the storage of one of these operands, if it
    dies there.
    ``auxiliary``: results that only the backward pass reads (a norm's rstd); they have no cotangent.
    ``cheap``: recomputing the op in the backward pass costs less than keeping its result (selective recompute).
    ``transient``: results are never kept from the forward to the backward pass, nor from one reader to the next.
    ``view``: no kernel; the result is a window on an operand (see ``surogate.compile.layout``).
    """

    name: ClassVar[str] = ""
    inplace: ClassVar[dict[int, int]] = {}
    accumulates: ClassVar[frozenset[int]] = frozenset()
    may_reuse: ClassVar[dict[int, tuple[int, ...]]] = {}
    auxiliary: ClassVar[frozenset[int]] = frozenset()
    cheap: ClassVar[bool] = False
    transient: ClassVar[bool] = False
    view: ClassVar[bool] = False

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        """Types of the results. Raises :class:`GraphError` for operands that do not fit."""
        raise NotImplementedError

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        """The op's meaning, in NumPy float64 (integers as they are). One array a result."""
        raise NotImplementedError

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        """Emit into ``g`` the cotangents of the inputs.

        Args:
            g: where to emit.
            node: the forward node (its inputs and outputs may be read).
            d: cotangents of the outputs; ``None`` is zero.
            needs: which inputs need a cotangent; others must be ``None`` in the result.
        """
        raise GraphError(f"{self.name} has no gradient rule")

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        """Default: one flop a result element; every operand read and every result written once."""
        moved = sum(t.nbytes for t in [*inputs, *outputs] if t is not None)
        return Cost(sum(t.numel for t in outputs if t is not None), moved)

    def workspace(self, inputs: Types, outputs: Types, attrs: Attrs, threads: int) -> int:
        """Bytes of scratch that the CPU kernel needs, planned like any other memory."""
        return 0

    def workspace_cuda(self, inputs: Types, outputs: Types, attrs: Attrs, sm: int) -> int:
        """Bytes of scratch that the CUDA kernel needs on a device of compute capability ``sm`` (90: 9.0)."""
        return 0

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        """Cases for the parity tests: odd shapes, optional operands present and absent."""
        return iter(())


def expect(condition: bool, op: Op, message: str) -> None:
    """Raise :class:`GraphError` in the op's name."""
    if not condition:
        raise GraphError(f"{op.name}: {message}")


def typed(value: Type | None, op: Op, what: str) -> Type:
    """The operand's type; an operand that must be there and is not raises."""
    if value is None:
        raise GraphError(f"{op.name}: {what} is missing")
    return value


def activation(value: Type | None, op: Op, what: str) -> Type:
    """The type of an activation or of its gradient that must be there: f32, or bf16 on devices that compute in it."""
    found = typed(value, op, what)
    expect(found.dtype in ("f32", "bf16"), op, f"{what} is {found}, neither f32 nor bf16")
    return found


def f32(value: Type | None, op: Op, what: str) -> Type:
    """The type of an operand that must be there and be f32 (gradients of weights, moments, statistics, scalars)."""
    found = typed(value, op, what)
    expect(found.dtype == "f32", op, f"{what} is {found}, not f32")
    return found


def weight(value: Type | None, op: Op, what: str) -> Type:
    """The type of an operand that must be there and be stored as weights are: f32 or bf16."""
    found = typed(value, op, what)
    expect(found.dtype in ("f32", "bf16"), op, f"{what} is {found}, neither f32 nor bf16")
    return found


def accumulator(value: Type | None, result: Type, op: Op) -> None:
    """Hold that an optional "acc" operand has the type of the result that takes its storage."""
    expect(value is None or value == result, op, f"cannot accumulate {result} into {value}")


def array(value: np.ndarray | None) -> np.ndarray:
    """The operand of a reference that must be there."""
    assert value is not None
    return value


Reference = Callable[[Arrays, Attrs], list[np.ndarray | None]]
