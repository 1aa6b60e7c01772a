"""Layout: which storage every value takes, and proof that no result is overwritten before its last reader.

A *root* is one contiguous buffer; every value is a window of a root: a byte offset, a row stride for its first
dimension, dense behind that. Views (``split``, ``reshape``) are windows of their operand; the operands of ``concat``
are written straight into its storage where they can be; an op that works in place gives its result the window of the
operand.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from surogate.compile.memory import Lifetime, Memory
from surogate.compile.program import TensorRef, dense_strides
from surogate.graph import DTYPE_BYTES, Graph, GraphError, Node, Value
from surogate.ops import get_op


@dataclass(eq=False)
class Root:
    """A buffer. ``slot``: the name of the memory slot, or empty for one that lives within the program."""

    nbytes: int
    slot: str = ""
    values: list[Value] = field(default_factory=list)
    offset: int = -1
    purpose: str = "activations"


@dataclass(frozen=True)
class Window:
    """Where a value lies in a root; ``row`` is the stride of the first dimension in elements."""

    root: Root
    offset: int
    row: int


class Layout:
    """Windows of all values of one graph. ``copies``: nodes of ``concat`` whose operands need a copy."""

    def __init__(self, g: Graph, memory: Memory, slots: dict[Value, str], *, reuse_windows: bool = True) -> None:
        """
        Args:
            g: the graph.
            memory: where the slots are.
            slots: for every source its slot.
            reuse_windows: a result may take the storage of an operand that is a window of something wider.
        """
        self.reuse_windows = reuse_windows
        self.graph, self.memory = g, memory
        self.windows: dict[Value, Window] = {}
        self.copies: dict[tuple[Node, int], Value] = {}
        self._place_of = {id(n): i for i, n in enumerate(g.nodes)}
        self._last = self._last_reads()
        self._targets = self._concat_targets()
        for source in g.sources:
            root = Root(source.type.nbytes, slots[source])
            self._put(source, Window(root, 0, _row(source.shape)))
        self._pinned = self._pinned_values()
        for node in g.nodes:
            self._node(node)
        self._check()

    # -- windows ----------------------------------------------------------------------------------------------------

    def _put(self, value: Value, window: Window) -> None:
        self.windows[value] = window
        window.root.values.append(value)

    def _fresh(self, value: Value) -> Window:
        """A buffer of the value's own, or its place in the ``concat`` that it was computed for."""
        target = self._targets.get(value)
        if target is None:
            return Window(Root(value.type.nbytes), 0, _row(value.shape))
        concat, column = target
        whole = self.windows.get(concat)
        if whole is None:
            whole = self._fresh(concat)
            self._put(concat, whole)
        return Window(whole.root, whole.offset + column * DTYPE_BYTES[value.dtype], whole.row)

    def _node(self, node: Node) -> None:
        op = get_op(node.op)
        if op.view:
            self._view(node)
            return
        for index, out in enumerate(node.outputs):
            if out is None:
                continue
            source = self._inplace(node, index)
            if source is not None:
                self._put(out, self.windows[source])
            elif out not in self.windows:
                self._put(out, self._reused(node, index, out) or self._fresh(out))

    def _inplace(self, node: Node, index: int) -> Value | None:
        """The operand whose storage this result must take."""
        op = get_op(node.op)
        slot = op.inplace.get(index)
        if slot is not None and slot < len(node.inputs) and node.inputs[slot] is not None:
            return node.inputs[slot]
        state = self._pinned.get(node.outputs[index])  # type: ignore[arg-type]
        if state is not None:
            for i in op.may_reuse.get(index, ()):
                operand = node.inputs[i]
                if operand is not None and self.windows[operand].root is self.windows[state].root:
                    return operand
            return state  # written anew; _check proves that nobody still needs what was there
        return None

    def _reused(self, node: Node, index: int, out: Value) -> Window | None:
        """Storage of an operand that dies here, for kernels that allow it."""
        if out in self._targets:
            return None
        here = self._place_of[id(node)]
        for i in get_op(node.op).may_reuse.get(index, ()):
            operand = node.inputs[i]
            if operand is None or operand.kind != "temp" or operand.type != out.type:
                continue
            window = self.windows[operand]
            if window.root.slot or sum(1 for x in node.inputs if x is operand) > 1 or operand in self.graph.outputs:
                continue
            if not self.reuse_windows and (window.root.nbytes != out.type.nbytes or window.row != _row(out.shape)):
                continue
            sharing = self._sharing(operand)
            if all(self._last.get(v, -1) <= here for v in sharing) and not self._taken(node, operand, sharing):
                return window
        return None

    def _sharing(self, value: Value) -> list[Value]:
        """Values of the same root that lie where this one does, itself included."""
        first, last = self._columns(value)
        spans = ((v, *self._columns(v)) for v in self.windows[value].root.values)
        return [v for v, start, end in spans if start < last and end > first]

    def _taken(self, node: Node, operand: Value, sharing: list[Value]) -> bool:
        """Whether another result of the node already lies there."""
        return any(v is not operand and v in sharing for v in node.outputs if v is not None)

    def _view(self, node: Node) -> None:
        if node.op == "concat":
            self._concat(node)
            return
        source = node.inputs[0]
        assert source is not None
        window = self.windows[source]
        column = 0
        for out in node.outputs:
            if out is None:
                continue
            if node.op == "split":
                self._put(out, Window(window.root, window.offset + column * DTYPE_BYTES[out.dtype], window.row))
                column += out.shape[-1]
            elif out.shape[0] == source.shape[0]:
                self._put(out, window)
            elif window.row == _row(source.shape):
                self._put(out, Window(window.root, window.offset, _row(out.shape)))
            else:
                raise GraphError(f"{self.graph.name}: {node.format()}: rows of a window cannot be reshaped")

    def _concat(self, node: Node) -> None:
        out = node.outputs[0]
        assert out is not None
        if out not in self.windows:
            self._put(out, self._fresh(out))
        whole, column = self.windows[out], 0
        for index, value in enumerate(node.inputs):
            assert value is not None
            window = self.windows[value]
            offset = whole.offset + column * DTYPE_BYTES[value.dtype]
            if window.root is not whole.root or window.offset != offset:
                self.copies[(node, index)] = value
            column += value.shape[-1]

    def _concat_targets(self) -> dict[Value, tuple[Value, int]]:
        """Values that can be computed straight into the storage of a ``concat``: whole results of a kernel, seen
        through reshapes that keep the rows."""
        targets: dict[Value, tuple[Value, int]] = {}
        for node in self.graph.nodes:
            if node.op != "concat":
                continue
            out, column = node.outputs[0], 0
            assert out is not None
            for value in node.inputs:
                assert value is not None
                root: Value | None = value
                while root is not None and root.producer is not None and root.producer.op == "reshape":
                    before = root.producer.inputs[0]
                    root = before if before is not None and before.shape[0] == root.shape[0] else None
                while root is not None and root.producer is not None:
                    slot = get_op(root.producer.op).inplace.get(root.index)
                    before = root.producer.inputs[slot] if slot is not None else None
                    if before is None:
                        break
                    root = before  # the storage is decided where the chain of in-place results begins
                if (
                    root is not None
                    and root.kind == "temp"
                    and root.producer is not None
                    and not get_op(root.producer.op).view
                    and root.type.numel == value.type.numel
                    and root not in targets
                    and len(out.shape) == 2
                ):
                    targets[root] = (out, column)
                column += value.shape[-1]
        return targets

    def _pinned_values(self) -> dict[Value, Value]:
        """Results that must end in the storage of a state: the last of its versions and those before it."""
        pinned: dict[Value, Value] = {}
        for state, value in self.graph.updates.items():
            current: Value | None = value
            while current is not None and current is not state:
                pinned[current] = state
                node = current.producer
                if node is None:
                    raise GraphError(f"{self.graph.name}: {state} is replaced by another source")
                op = get_op(node.op)
                slot = op.inplace.get(current.index)
                before = node.inputs[slot] if slot is not None else None
                if before is None:
                    reuse = [node.inputs[i] for i in op.may_reuse.get(current.index, ())]
                    before = next((i for i in reuse if i is not None and self._leads_to(i, state)), None)
                current = before
        return pinned

    def _leads_to(self, value: Value, state: Value) -> bool:
        """Whether the value is a version of the state: a chain of in-place results that begins there."""
        current: Value | None = value
        while current is not None and current.producer is not None:
            op = get_op(current.producer.op)
            before = [op.inplace.get(current.index), *op.may_reuse.get(current.index, ())]
            slot = next((i for i in before if i is not None), None)
            current = None if slot is None else current.producer.inputs[slot]
        return current is state

    # -- reading ----------------------------------------------------------------------------------------------------

    def _last_reads(self) -> dict[Value, int]:
        last: dict[Value, int] = {}
        for index, node in enumerate(self.graph.nodes):
            for value in node.inputs:
                if value is not None:
                    last[value] = index
        end = len(self.graph.nodes)
        for value in [*self.graph.outputs, *self.graph.updates.values()]:
            last[value] = end
        return last

    def lifetimes(self) -> tuple[list[Root], list[Lifetime]]:
        """Roots that live within the program, and when."""
        born: dict[Root, int] = {}
        dies: dict[Root, int] = {}
        for index, node in enumerate(self.graph.nodes):
            for value in [*node.inputs, *node.outputs]:
                if value is not None and not (root := self.windows[value].root).slot:
                    born.setdefault(root, index)
                    dies[root] = index
        for value in self.graph.outputs:
            dies[self.windows[value].root] = len(self.graph.nodes)
        roots = list(born)
        return roots, [Lifetime(r.nbytes, born[r], dies[r]) for r in roots]

    def ref(self, value: Value) -> TensorRef:
        """The value's tensor, once roots have offsets."""
        window = self.windows[value]
        strides = dense_strides(value.shape)
        strides = (window.row, *strides[1:]) if len(strides) > 1 else strides
        if not window.root.slot:
            return TensorRef("device", window.root.offset + window.offset, value.dtype, value.shape, strides)
        slot = self.memory.slot(window.root.slot)
        return TensorRef(slot.space, slot.offset + window.offset, value.dtype, value.shape, strides)

    # -- proof ------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """No value is read after an overlapping window of its root was written by something computed later."""
        written: dict[Root, list[tuple[int, int, int, int]]] = {}  # root -> (time, first column, last column, rows)
        content: dict[Value, int] = dict.fromkeys(self.graph.sources, -1)
        for time, node in enumerate(self.graph.nodes):
            for value in node.inputs:
                if value is not None:
                    self._check_read(node, value, content[value], written)
            view = get_op(node.op).view
            if view and node.op != "concat":
                for out in node.outputs:
                    if out is not None and node.inputs[0] is not None:
                        content[out] = content[node.inputs[0]]
                continue
            for out in node.outputs:
                if out is None:
                    continue
                content[out] = time
                if not view:
                    first, last = self._columns(out)
                    written.setdefault(self.windows[out].root, []).append((time, first, last, out.shape[0]))
            for (concat, _), value in self.copies.items():
                if concat is node:
                    content[value] = content.get(value, time)

    def _columns(self, value: Value) -> tuple[int, int]:
        """Bytes of a row of the root that the value covers."""
        window = self.windows[value]
        size = DTYPE_BYTES[value.dtype]
        if len(value.shape) < 2 or window.row == _row(value.shape) and value.type.nbytes == window.root.nbytes:
            return 0, window.root.nbytes
        pitch = window.row * size
        return window.offset % pitch, window.offset % pitch + _row(value.shape) * size

    def _check_read(
        self, node: Node, value: Value, since: int, written: dict[Root, list[tuple[int, int, int, int]]]
    ) -> None:
        first, last = self._columns(value)
        for time, start, end, _ in written.get(self.windows[value].root, ()):
            if time > since and start < last and end > first:
                writer = self.graph.nodes[time].format()
                raise GraphError(f"{self.graph.name}: {node.format()} reads {value}, overwritten by {writer}")


def _row(shape: tuple[int, ...]) -> int:
    n = 1
    for d in shape[1:]:
        n *= d
    return n
