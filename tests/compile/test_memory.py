"""The memory planner: no two buffers that live at one time overlap, and the arena is never below what is alive."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from surogate.compile.memory import ALIGN, Lifetime, Memory, aligned, live_bytes, place
from surogate.graph import Type

LIFETIMES = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 40), st.integers(0, 12)).map(
        lambda t: Lifetime(t[0], t[1], t[1] + t[2])
    ),
    max_size=60,
)


@given(LIFETIMES)
@settings(deadline=None, max_examples=200)
def test_placement(buffers: list[Lifetime]) -> None:
    offsets, height = place(buffers)
    for i, a in enumerate(buffers):
        assert offsets[i] % ALIGN == 0 and offsets[i] + a.nbytes <= height
        for j in range(i):
            b = buffers[j]
            if a.first <= b.last and b.first <= a.last:
                assert offsets[i] + a.nbytes <= offsets[j] or offsets[j] + b.nbytes <= offsets[i]
    alive = [sum(aligned(b.nbytes) for b in buffers if b.first <= t <= b.last) for t in range(60)]
    assert height >= max(alive)
    assert max(live_bytes(buffers), default=0) == max(alive)


def test_stack_shaped_lifetimes_are_placed_without_loss() -> None:
    """Forward values that die in reverse order, with temporaries in between, as a training step has them."""
    n = 50
    buffers = [Lifetime(640, t, 2 * n - t) for t in range(n)] + [Lifetime(1280, t, t) for t in range(2 * n)]
    _, height = place(buffers)
    assert height == int(live_bytes(buffers).max())


def test_slots_of_several_dtypes_keep_their_distances_in_elements() -> None:
    memory = Memory()
    shapes = {"a": (3, 7), "b": (130,), "c": (1, 1)}
    for prefix, dtype in (("", "bf16"), ("grad.", "f32")):
        for name, shape in shapes.items():
            memory.add(prefix + name, Type(shape, dtype), "weights")
    whole, gradients = memory.alias("all", list(shapes)), memory.alias("g", [f"grad.{n}" for n in shapes])
    assert whole.type.shape == gradients.type.shape
    for name in shapes:
        ours = (memory.slots[name].offset - whole.offset) // 2
        assert ours == (memory.slots[f"grad.{name}"].offset - gradients.offset) // 4
    assert sum(memory.table().values()) == memory.size("device")
