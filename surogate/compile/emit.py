"""Emit: a graph whose values have storage becomes a program."""

from __future__ import annotations

from dataclasses import dataclass

from surogate.compile.layout import Layout, Root
from surogate.compile.memory import Lifetime, aligned, live_bytes, place
from surogate.compile.program import Instruction, Program, TensorRef
from surogate.errors import UserError
from surogate.graph import Node, Type, Value
from surogate.ops import get_op


@dataclass(frozen=True)
class Target:
    """What a program is compiled for. ``sm``: a GPU's compute capability, 90 for 9.0."""

    device: str = "cpu"
    threads: int = 1
    sm: int = 0


@dataclass
class Placed:
    """Offsets of one graph's temporaries, from the base of the region that all programs share."""

    layout: Layout
    roots: dict[Root, int]
    workspaces: dict[int, tuple[int, int]]  # node index -> (offset, bytes)
    height: int
    floor: int
    peak_workspace: int


def place_temporaries(layout: Layout, target: Target) -> Placed:
    """Find offsets for the buffers and workspaces of a graph."""
    roots, lifetimes = layout.lifetimes()
    indices, scratch = [], []
    for index, node in enumerate(layout.graph.nodes):
        n = _workspace(node, target)
        if n:
            indices.append(index)
            scratch.append(Lifetime(n, index, index))
    buffers = [*lifetimes, *scratch]
    offsets, height = place(buffers)
    alive = live_bytes(buffers)
    floor = int(alive.max(initial=0))
    peak = int(alive.argmax()) if len(alive) else 0
    at_peak = next((aligned(s.nbytes) for s in scratch if s.first == peak), 0)
    return Placed(
        layout,
        dict(zip(roots, offsets[: len(roots)], strict=True)),
        {i: (o, s.nbytes) for i, o, s in zip(indices, offsets[len(roots) :], scratch, strict=True)},
        height,
        floor,
        at_peak,
    )


def emit(placed: Placed, base: int, symbols: dict[str, str]) -> Program:
    """The program of a graph; ``base``: first byte of the shared region; ``symbols``: name to memory slot."""
    layout, g = placed.layout, placed.layout.graph
    for root, offset in placed.roots.items():
        root.offset = base + offset
    instructions: list[Instruction] = []
    for index, node in enumerate(g.nodes):
        op = get_op(node.op)
        if op.view:
            instructions += _copies(layout, node)
            continue
        inputs = [None if i is None else layout.ref(i) for i in node.inputs]
        outputs = [None if o is None else layout.ref(o) for o in node.outputs]
        workspace = None
        if index in placed.workspaces:
            offset, nbytes = placed.workspaces[index]
            workspace = TensorRef("device", base + offset, "u8", (nbytes,), (1,))
        cost = op.cost(_types(node.inputs), _types(node.outputs), node.attrs)
        instructions.append(
            Instruction(
                node.op,
                inputs,
                outputs,
                workspace,
                node.attrs,
                scope=node.scope,
                phase=node.phase,
                flops=cost.flops,
                nbytes=cost.nbytes,
            )  # fmt: skip
        )
    return Program(g.name, instructions, {n: layout.memory.slot(s).ref for n, s in symbols.items()})


def check_kernels(programs: list[Program], available: set[str], device: str) -> None:
    """Every op must have a kernel on the device; a message here instead of a failure at run time."""
    missing = sorted({i.op for p in programs for i in p.instructions} - available)
    if missing:
        raise UserError(
            f"no {device} kernel for {', '.join(missing)}", where="device", fix="choose another device or model"
        )


def _types(values: list[Value | None]) -> list[Type | None]:
    return [None if v is None else v.type for v in values]


def _workspace(node: Node, target: Target) -> int:
    op = get_op(node.op)
    if op.view:
        return 0
    types = _types(node.inputs), _types(node.outputs)
    if target.device == "cuda":
        return op.workspace_cuda(*types, node.attrs, target.sm)
    return op.workspace(*types, node.attrs, target.threads)


def _copies(layout: Layout, concat: Node) -> list[Instruction]:
    """Copies of the operands of a ``concat`` that could not be computed in place."""
    found = []
    out, column = concat.outputs[0], 0
    for index, value in enumerate(concat.inputs):
        assert value is not None and out is not None
        if (concat, index) in layout.copies:
            whole, source = layout.ref(out), layout.ref(value)
            size = value.type.nbytes // value.type.numel
            target = TensorRef(whole.space, whole.offset + column * size, whole.dtype, value.shape, whole.strides)
            found.append(
                Instruction(
                    "copy",
                    [source],
                    [target],
                    None,
                    {},
                    scope=concat.scope,
                    phase=concat.phase,
                    nbytes=2 * value.type.nbytes,
                )
            )
        column += value.shape[-1]
    return found
