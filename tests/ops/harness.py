"""What the tests of ops share: samples as stored operands, native runs of one op, gradients held to differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from surogate.graph import DTYPE_BYTES, Graph, Type, Value
from surogate.ops import Op, Sample
from surogate.ops.interpret import interpret

_STORED = {"f32": np.float32, "f64": np.float64, "bf16": np.uint16, "i32": np.int32, "i64": np.int64, "u8": np.uint8}
_FLOATS = ("f32", "f64", "bf16")
_GUARD = 64  # bytes around every tensor that nothing may write
_POISON = 0xFF  # a NaN in every floating dtype


def to_storage(array: np.ndarray, dtype: str) -> np.ndarray:
    """The array as ``dtype`` is stored; bf16 (rounded to nearest, ties to even) as uint16."""
    if dtype != "bf16":
        return np.ascontiguousarray(array, _STORED[dtype])
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_storage(array: np.ndarray, dtype: str) -> np.ndarray:
    """Stored floating values as float64; integers as they are."""
    if dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64) if dtype in _FLOATS else array


@dataclass
class Case:
    """A sample with its operands rounded to their storage dtypes."""

    op: Op
    sample: Sample
    types: list[Type | None]
    stored: list[np.ndarray | None]

    @property
    def attrs(self) -> dict[str, Any]:
        return self.sample.attrs

    def operands(self) -> list[np.ndarray | None]:
        """Operands as the reference takes them."""
        return [
            None if s is None or t is None else from_storage(s, t.dtype)
            for s, t in zip(self.stored, self.types, strict=True)
        ]


def make_case(op: Op, sample: Sample) -> Case:
    types: list[Type | None] = []
    stored: list[np.ndarray | None] = []
    for index, array in enumerate(sample.inputs):
        if array is None:
            types.append(None)
            stored.append(None)
            continue
        array = np.asarray(array)
        dtype = sample.dtypes[index] if sample.dtypes else None
        dtype = dtype or ("f32" if array.dtype.kind == "f" else "i32")
        types.append(Type(array.shape, dtype))
        stored.append(to_storage(array, dtype))
    return Case(op, sample, types, stored)


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: byte offset, strides in elements."""

    offset: int
    strides: tuple[int, ...]


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


def _window(memory: np.ndarray, place: Place, t: Type) -> np.ndarray:
    size = DTYPE_BYTES[t.dtype]
    return np.ndarray(
        t.shape, _STORED[t.dtype], buffer=memory, offset=place.offset, strides=[s * size for s in place.strides]
    )


@dataclass(frozen=True)
class Target:
    """Where an op runs: the engine's arguments, and the compute capability of a GPU (0: the CPU)."""

    sm: int = 0
    arguments: dict[str, Any] = field(default_factory=lambda: {"backend": "cpu", "threads": 1})


def run_native(
    case: Case,
    *,
    threads: int = 1,
    strided: bool | str = False,
    reuse: Mapping[int, int] | None = None,
    target: Target | None = None,
    runs: int = 1,
) -> list[np.ndarray | None]:
    """Run the case's op on the native engine.

    Args:
        threads: of the CPU engine; the workspace is planned for them.
        strided: every tensor of two or more dimensions is a column window of a wider buffer. ``bf16``: those of that
            dtype alone, by whole multiples of 16 bytes, as the windows of a model are.
        reuse: output -> input whose storage it takes, besides what ``Op.inplace`` demands.
        target: the CPU if left out.
        runs: run so often, from the same memory each time; the last run's results count. On a GPU the second run is
            captured as a graph, and the third replays it.

    Returns:
        The results as float64 (integers as they are).

    Raises:
        AssertionError: the kernel wrote outside its results and its workspace.
    """
    from surogate._native import Engine

    op, types = case.op, case.types
    out_types = op.infer(types, case.attrs)
    shared = {o: i for o, i in op.inplace.items() if i < len(types) and types[i] is not None}
    shared.update(reuse or {})

    top = 0

    def place(t: Type) -> Place:
        nonlocal top
        strides = _dense(t.shape)
        if not strided or len(t.shape) < 2 or strided not in (True, t.dtype):
            offset = top + _GUARD
            top = offset + t.nbytes + _GUARD
        else:
            size, row = DTYPE_BYTES[t.dtype], t.numel // max(t.shape[0], 1)
            before, after = (5, 8) if strided is True else (8, 16)
            width = row + before + after
            strides = (width, *strides[1:])
            offset = top + _GUARD + before * size
            top += _GUARD + t.shape[0] * width * size + _GUARD
        top += -top % 64
        return Place(offset, strides)

    in_places = [None if t is None else place(t) for t in types]
    out_places = [
        None if t is None else in_places[shared[o]] if o in shared else place(t) for o, t in enumerate(out_types)
    ]
    target = target or Target(arguments={"backend": "cpu", "threads": threads})
    if target.sm:
        nbytes = op.workspace_cuda(types, out_types, case.attrs, target.sm)
    else:
        nbytes = op.workspace(types, out_types, case.attrs, threads)
    workspace = Place(top + _GUARD, (1,))
    top += 2 * _GUARD + nbytes

    engine = Engine(**target.arguments)
    engine.allocate("device", top)
    image = np.full(top, _POISON, np.uint8)
    for t, p, stored in zip(types, in_places, case.stored, strict=True):
        if t is not None and p is not None:
            _window(image, p, t)[...] = stored

    def ref(t: Type | None, p: Place | None) -> tuple[Any, ...] | None:
        return None if t is None or p is None else ("device", p.offset, t.dtype, t.shape, p.strides)

    instruction = (
        op.name,
        [ref(t, p) for t, p in zip(types, in_places, strict=True)],
        [ref(t, p) for t, p in zip(out_types, out_places, strict=True)],
        ref(Type((nbytes,), "u8"), workspace) if nbytes else None,
        {k: v for k, v in case.attrs.items() if not isinstance(v, tuple)},  # tuples are shapes, which tensors carry
        "compute",
        [],
        -1,
    )
    engine.load("test", [instruction], {}, 0)
    for _ in range(runs):
        engine.write("device", 0, image)
        engine.run("test")
    memory = engine.read("device", 0, top)

    results: list[np.ndarray | None] = []
    for t, p in zip(out_types, out_places, strict=True):
        if t is None or p is None:
            results.append(None)
            continue
        window = _window(memory, p, t)
        results.append(from_storage(window.copy(), t.dtype))
        window[...] = _window(image, p, t)
    memory[workspace.offset : workspace.offset + nbytes] = _POISON
    assert np.array_equal(memory, image), f"{op.name} wrote outside its results and its workspace"
    return results


def run_reference(case: Case) -> list[np.ndarray | None]:
    return case.op.reference(case.operands(), case.attrs)


def assert_close(case: Case, found: Sequence[np.ndarray | None], wanted: Sequence[np.ndarray | None]) -> None:
    """Results agree within the sample's tolerance; integers exactly."""
    for index, (f, w) in enumerate(zip(found, wanted, strict=True)):
        assert (f is None) == (w is None), f"{case.op.name}: result {index} is there in one and not in the other"
        if f is not None and w is not None:
            exact = f.dtype.kind != "f"
            rtol, atol = (0.0, 0.0) if exact else (case.sample.rtol, case.sample.atol)
            np.testing.assert_allclose(f, w, rtol=rtol, atol=atol, err_msg=f"{case.op.name}: result {index}")


def check_gradient(op: Op, sample: Sample, rng: np.random.Generator, *, probes: int = 6) -> None:
    """Hold the gradient rule to central differences of the reference, both in float64.

    The loss is a random weighting of all results that have a cotangent; its gradient, computed by interpreting the
    graph that the rule emits, must give the slope along random directions and along single elements.
    """
    case = make_case(op, sample)
    inputs = [None if a is None else np.asarray(a, np.float64) if a.dtype.kind == "f" else a for a in sample.inputs]

    graph = Graph(f"{op.name} gradient")
    sources: dict[str, np.ndarray] = {}

    def source(name: str, t: Type, array: np.ndarray) -> Value:
        sources[name] = array
        return graph.source(name, t, "input")

    operands = [
        None if t is None or a is None else source(f"in{i}", t, a)
        for i, (t, a) in enumerate(zip(case.types, inputs, strict=True))
    ]
    results = graph.emit(op.name, operands, **sample.attrs)
    node = graph.nodes[-1]
    cotangents: list[Value | None] = []
    weights: list[np.ndarray | None] = []
    for o, value in enumerate(results):
        if value is None or o in op.auxiliary or value.dtype not in _FLOATS:
            cotangents.append(None)
            weights.append(None)
        else:
            weights.append(rng.normal(size=value.shape))
            cotangents.append(source(f"d{o}", value.type, weights[-1]))

    needs = [i in sample.differentiable for i in range(len(operands))]
    gradients = op.gradient(graph, node, cotangents, needs)
    assert len(gradients) == len(operands), f"{op.name}: one cotangent an input, None where it is not needed"
    for i, gradient in enumerate(gradients):
        if not needs[i]:
            assert gradient is None, f"{op.name}: cotangent of input {i} was not asked for"
        else:
            assert gradient is not None, f"{op.name}: no cotangent of input {i}"
            assert gradient.shape == operands[i].shape
            graph.outputs.append(gradient)
    graph.verify()
    values = interpret(graph, sources)

    def loss(changed: int, array: np.ndarray) -> float:
        arrays = [array if i == changed else a for i, a in enumerate(inputs)]
        found = op.reference(arrays, sample.attrs)
        return sum(float((w * r).sum()) for w, r in zip(weights, found, strict=True) if w is not None)

    for i in sample.differentiable:
        x, gradient = inputs[i], values[gradients[i]]
        directions = [rng.normal(size=x.shape) for _ in range(probes)]
        for flat in rng.choice(x.size, min(x.size, 2 * probes), replace=False):
            directions.append(np.zeros(x.shape))
            directions[-1].flat[flat] = 1.0
        for direction in directions:
            step = 1e-5
            slope = (loss(i, x + step * direction) - loss(i, x - step * direction)) / (2 * step)
            want = float((gradient * direction).sum())
            scale = np.abs(gradient * direction).sum() + 1e-3
            assert abs(slope - want) <= 2e-6 * scale, f"{op.name}: input {i}: slope {slope}, gradient rule {want}"
