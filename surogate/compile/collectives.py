"""What several ranks say to one another, as instructions: where they stand, and on which events streams wait.

Gradients are reduced bucket by bucket on the stream ``comm``, each as soon as the backward pass of the last micro-step
has written the last of it. A bucket is a group of weights (``surogate.compile.groups``), cut into one part a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from surogate.compile.groups import Group
from surogate.compile.memory import Memory
from surogate.compile.program import Instruction, Program, TensorRef
from surogate.graph import Graph, Type, Value
from surogate.ops.collectives import COLLECTIVES

#: Bytes of float32 gradients that are reduced at once: enough to fill a link, few enough to begin early.
BUCKET_BYTES = 64 << 20


def buckets(names: Sequence[str], numel: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Cut a list of weights into runs of about ``BUCKET_BYTES`` of gradients; no weight is cut."""
    found: list[list[str]] = []
    filled = 0
    for name in names:
        nbytes = 4 * numel[name]
        if not found or filled + nbytes > BUCKET_BYTES:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += nbytes
    return [tuple(bucket) for bucket in found]


def sum_of_losses(memory: Memory) -> tuple[Graph, dict[Value, str]]:
    """Graph ``eval_end``: the state ``loss`` becomes the sum over the ranks; and the slot of its source."""
    g = Graph("eval_end")
    loss = g.source("loss", Type((1,), "f64"), "state")
    g.updates[loss] = g.one("all_reduce", [loss])
    return g, {loss: "loss"}


def of_rank(
    programs: Mapping[str, Program], memory: Memory, groups: Sequence[Group], rank: int, zero_level: int
) -> dict[str, Program]:
    """The programs of one rank, complete with collectives, streams and events.

    ``last_micro_step`` is ``micro_step`` with the reduction of gradients: all of them on every rank, or (``zero_level``
    1) each rank's part. After the update of a part the ranks gather the whole weights.
    """
    done = dict(programs)
    if "micro_step" in done:
        done["last_micro_step"] = _reduce(
            done["micro_step"], memory, groups, "reduce_scatter" if zero_level else "all_reduce"
        )
    if zero_level and "optimizer_step" in done:
        done["optimizer_step"] = _gather(done["optimizer_step"], memory, groups, rank)
    return {name: on_streams(program) for name, program in done.items()}


def _reduce(program: Program, memory: Memory, groups: Sequence[Group], op: str) -> Program:
    """Each bucket's reduction after the last instruction that writes to it."""
    after: dict[int, list[Instruction]] = {}
    for group in groups:
        ref = memory.aliases[f"grad:{group.name}"].ref
        last = max(
            (n for n, i in enumerate(program.instructions) if any(_meet(o, ref) for o in i.outputs if o is not None)),
            default=-1,
        )
        after.setdefault(last, []).append(_collective(op, ref, f"gradients of {group.name}"))
    instructions = list(after.get(-1, []))
    for n, instruction in enumerate(program.instructions):
        instructions += [instruction, *after.get(n, [])]
    return replace(program, name="last_micro_step", instructions=instructions)


def _gather(program: Program, memory: Memory, groups: Sequence[Group], rank: int) -> Program:
    """Whole weights, and zeros in the other ranks' parts of the gradients, after the update of one part."""
    instructions = list(program.instructions)
    for group in groups:
        for part in range(group.parts):
            if part != rank:
                ref = memory.aliases[f"grad:{group.name}/{part}"].ref
                attrs = {"value": 0.0, "shape": ref.shape, "dtype": ref.dtype}
                instructions.append(Instruction("fill", [], [ref], None, attrs, scope=group.name, phase="update"))
        ref = memory.aliases[f"weight:{group.name}"].ref
        instructions.append(_collective("all_gather", ref, f"weights of {group.name}"))
    return replace(program, instructions=instructions)


def _collective(op: str, ref: TensorRef, scope: str) -> Instruction:
    nbytes = ref.end - ref.offset
    return Instruction(op, [ref], [ref], None, {}, scope=scope, phase="communication", nbytes=2 * nbytes)


def _meet(a: TensorRef, b: TensorRef) -> bool:
    return a.space == b.space and a.offset < b.end and b.offset < a.end


def on_streams(program: Program) -> Program:
    """Put collectives on ``comm``, and let streams wait for one another wherever they touch the same bytes.

    An instruction waits for the latest earlier one of the other stream that writes what it touches, or touches what it
    writes; those before it in that stream are done then as well.
    """
    instructions = [replace(i, stream="comm", waits=[], signal=-1) if i.op in COLLECTIVES else replace(i, waits=[])
                    for i in program.instructions]  # fmt: skip
    waited = {"comm": -1, "compute": -1}  # by each stream, the latest instruction of the other
    earlier: dict[str, list[int]] = {"comm": [], "compute": []}
    events = 0
    for index, instruction in enumerate(instructions):
        own = instruction.stream
        other = "compute" if own == "comm" else "comm"
        for before in reversed(earlier[other]):
            if before <= waited[own]:
                break
            if _conflict(instructions[before], instruction):
                if instructions[before].signal < 0:
                    instructions[before].signal = events
                    events += 1
                instruction.waits.append(instructions[before].signal)
                waited[own] = before
                break
        earlier[own].append(index)
    return replace(program, instructions=instructions, events=events)


def _conflict(a: Instruction, b: Instruction) -> bool:
    """Whether the order of two instructions matters: one writes what the other reads or writes."""

    def touched(i: Instruction) -> tuple[list[TensorRef], list[TensorRef]]:
        written = [r for r in [*i.outputs, i.workspace] if r is not None]
        return written, [*written, *(r for r in i.inputs if r is not None)]

    (written_a, all_a), (written_b, all_b) = touched(a), touched(b)
    return any(_meet(x, y) for x in written_a for y in all_b) or any(_meet(x, y) for x in written_b for y in all_a)
