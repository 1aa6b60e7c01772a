"""The driver: a model and options become the programs of a run and one memory plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from surogate.adapters import lora as lora_pass
from surogate.adapters.lora import LoraOptions, LoraResult
from surogate.compile import collectives
from surogate.compile.autodiff import accumulate, differentiate
from surogate.compile.emit import Placed, Target, emit, place_temporaries
from surogate.compile.fuse import fuse_accumulate, fuse_forward
from surogate.compile.groups import Group, Optimizer, gradient_slot, in_parts
from surogate.compile.layout import Layout
from surogate.compile.memory import Memory, Spread
from surogate.compile.pack import pack
from surogate.compile.program import Program, TensorRef
from surogate.compile.quantize import Quantized, quantize
from surogate.compile.recompute import Mode, recompute
from surogate.dsl import Batch, CausalLM, Tensor, trace
from surogate.graph import Graph, GraphError, Type, Value
from surogate.objectives.causal_lm import causal_lm
from surogate.recipes import Recipe

Objective = Callable[[CausalLM, Batch], Tensor]
SCALARS = {"lr": "f32", "bias_correction1": "f32", "bias_correction2": "f32", "loss_scale": "f32", "clip_scale": "f32",
           "grad_norm": "f32", "loss": "f64", "seed": "i64"}  # fmt: skip


@dataclass(frozen=True)
class CompileOptions:
    """What the compiler needs beside the model.

    ``batch`` sequences of ``sequence_len`` tokens make a micro-batch, with at most ``max_documents`` documents; the
    same with ``eval_batch`` and ``eval_documents`` for evaluation (0: no evaluation program). ``device``: ``cpu`` or
    ``cuda``, then with the compute capability ``sm``. ``deterministic``: no kernel whose bits change from run to run.
    ``quantization``: how frozen weights of linear layers are stored, ``off`` (as the recipe says) or ``nf4``.
    ``ranks`` engines share a global batch; ``zero_level`` says what of the training state each keeps a part of alone:
    0 nothing, 1 the optimizer's states.
    """

    batch: int
    sequence_len: int
    max_documents: int
    recipe: Recipe
    eval_batch: int = 0
    eval_documents: int = 0
    lora: LoraOptions | None = None
    optimizer: Optimizer | None = None  # needed to train
    recompute: Mode = "off"
    threads: int = 1
    train: bool = True
    device: str = "cpu"
    sm: int = 0
    deterministic: bool = False
    quantization: str = "off"
    ranks: int = 1
    zero_level: int = 0

    @property
    def activation(self) -> str:
        """Dtype of activations: the CPU computes in f32 whatever the recipe says."""
        return "f32" if self.device == "cpu" else self.recipe.activation


@dataclass(frozen=True)
class Weight:
    """A weight by its Hugging Face name. ``initial``: how it starts when no file has it. ``quantized``: where its parts
    are; ``ref`` is then that of the codes."""

    name: str
    ref: TensorRef
    initial: str
    trainable: bool
    quantized: Quantized | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's own shape, however it is stored."""
        return self.ref.shape if self.quantized is None else self.quantized.shape


@dataclass
class Compiled:
    """Programs of a run over one memory plan. ``batch``: sequences that one run of ``micro_step`` takes."""

    programs: dict[str, Program]
    memory: Memory
    weights: dict[str, Weight]
    groups: list[Group]
    adapters: LoraResult | None
    graphs: dict[str, Graph]
    constants: dict[str, bytes]
    batch: int
    states: tuple[str, ...] = ()  # prefixes of what the optimizer keeps of a weight
    ranked: tuple[dict[str, Program], ...] = ()  # programs by rank, where there are several; `programs` is rank 0's

    def of_rank(self, rank: int) -> Compiled:
        """What one rank runs. Memory is the same for all."""
        return replace(self, programs=self.ranked[rank]) if self.ranked else self

    @property
    def digest(self) -> str:
        """Changes when any program does."""
        return "-".join(p.digest[:12] for p in self.programs.values())

    @property
    def trainable_parameters(self) -> int:
        return sum(_count(w) for w in self.weights.values() if w.trainable)

    @property
    def parameters(self) -> int:
        """All parameters, adapters included."""
        return sum(_count(w) for w in self.weights.values())


def _count(weight: Weight) -> int:
    n = 1
    for d in weight.shape:
        n *= d
    return n


def compile_model(
    model: CausalLM,
    options: CompileOptions,
    stored_dtype: Callable[[str], str] = lambda name: "f32",
    objective: Objective = causal_lm,
) -> Compiled:
    """Compile training and evaluation of a model.

    Args:
        model: from ``surogate.models.build``.
        options: sizes, adapters, optimizer, recompute.
        stored_dtype: dtype of a weight in its file (``f32``, ``bf16``, ``f16``), for recipes that keep it.
        objective: what a micro-batch computes.

    Raises:
        UserError: a LoRA target that matches nothing.
        GraphError: a fault in a model file or a pass.
    """
    graphs: dict[str, Graph] = {}
    quantized: dict[str, Quantized] = {}
    adapters: LoraResult | None = None
    if options.train:
        g, adapters = _forward(model, options, stored_dtype, objective, "micro_step", quantized)
        accumulate(g, differentiate(g))
        fuse_accumulate(g)
        recompute(g, options.recompute)
        graphs["micro_step"] = g
    if options.eval_batch:
        g, adapters = _forward(
            model, options, stored_dtype, objective, "eval_step", quantized, graphs.get("micro_step")
        )
        _keep_result(g)
        graphs["eval_step"] = g

    memory = Memory()
    _reserve_inputs(memory, graphs, options)
    groups = _reserve_weights(memory, graphs, options)
    slots = {n: {s: _slot_of(s, n, memory) for s in g.sources} for n, g in graphs.items()}
    if options.train:
        o = options.optimizer
        if o is None:
            raise ValueError("training needs an optimizer")
        graphs |= _step_end(memory, groups, options, 0, slots)
    if options.ranks > 1 and "eval_step" in graphs:
        graphs["eval_end"], slots["eval_end"] = collectives.sum_of_losses(memory)
    # cuDNN's backward pass wants q and dq with one row stride: there q is not rotated inside the packed qkv.
    windows = options.device == "cpu"
    target = Target(options.device, options.threads, options.sm)
    placed = {
        n: place_temporaries(Layout(g, memory, slots[n], reuse_windows=windows), target) for n, g in graphs.items()
    }
    base = memory.top["device"]
    _account(memory, list(placed.values()))
    programs = {n: emit(p, base, _symbols(n, graphs[n], memory)) for n, p in placed.items()}
    ranked: list[dict[str, Program]] = []
    for rank in range(options.ranks if options.ranks > 1 else 0):
        ends: dict[str, Program] = {}
        if options.train:
            for n, g in _step_end(memory, groups, options, rank, slots).items():
                ends[n] = emit(place_temporaries(Layout(g, memory, slots[n]), target), base, _symbols(n, g, memory))
        ranked.append(collectives.of_rank({**programs, **ends}, memory, groups, rank, options.zero_level))
    if ranked:
        programs = ranked[0]
    return Compiled(
        programs, memory, _weights(memory, graphs, quantized), groups, adapters if options.lora else None, graphs,
        {n: a.tobytes() for g in graphs.values() for n, a in g.constants.items()}, options.batch,
        options.optimizer.states if options.optimizer is not None else (), tuple(ranked),
    )  # fmt: skip


def _step_end(
    memory: Memory, groups: list[Group], o: CompileOptions, rank: int, slots: dict[str, dict[Value, str]]
) -> dict[str, Graph]:
    """The graphs after the last micro-step, as one rank runs them; ``slots`` gets those of their sources."""
    assert o.optimizer is not None
    own = [g.part(rank) for g in groups]
    graphs: dict[str, Graph] = {}
    graphs["norm_step"], slots["norm_step"] = o.optimizer.norm_graph(memory, own, o.ranks)
    updated = own if o.zero_level else groups
    graphs["optimizer_step"], slots["optimizer_step"] = o.optimizer.update_graph(memory, updated)
    return graphs


def _forward(
    model: CausalLM,
    o: CompileOptions,
    stored: Callable[[str], str],
    objective: Objective,
    name: str,
    quantized: dict[str, Quantized],
    like: Graph | None = None,
) -> tuple[Graph, LoraResult | None]:
    """Trace, adapt, choose dtypes, pack (as ``like`` is packed), quantise and fuse: what training and evaluation share.
    ``quantized`` gets what is said of quantised weights."""
    training = name == "micro_step"
    batch, documents = (o.batch, o.max_documents) if training else (o.eval_batch, o.eval_documents)
    g = trace(
        model, objective, tokens=batch * o.sequence_len, max_documents=documents, name=name, activation=o.activation
    )
    adapters = None
    if o.lora is not None:
        adapters = lora_pass.apply(g, o.lora, training=training)
    else:
        for source in g.params:
            source.trainable = True
    model_weights = [s for s in g.params if not (o.lora is not None and s.trainable)]
    for source in model_weights:
        dtype = o.recipe.trained if source.trainable else o.recipe.frozen
        if dtype == "checkpoint":
            # A GPU multiplies operands of one dtype; the CPU widens bf16 weights as it goes.
            keeps = o.device == "cpu" or o.activation == "bf16"
            dtype = "bf16" if keeps and stored(source.name) == "bf16" else "f32"
        source.type = Type(source.shape, dtype)
    if o.activation == "bf16":
        # Adapters are multiplied in bf16 as everything is; their updates go to f32 copies.
        for source in g.params:
            if o.lora is not None and source.trainable:
                source.type = Type(source.shape, "bf16")
    if o.device == "cuda":
        for node in g.nodes:
            if node.op == "attention":
                node.attrs["max_length"] = o.sequence_len  # a document never leaves its sequence
                if o.deterministic:
                    node.attrs["deterministic"] = True
    pack(g, like)
    if o.quantization != "off":
        quantized |= quantize(g)
    fuse_forward(g)
    return g, adapters


def _keep_result(g: Graph) -> None:
    """Give the result a place that the host reads: a loss adds to the state ``loss``, anything else is ``result``."""
    out = g.outputs[0]
    node = out.producer
    assert node is not None
    is_loss = node.op == "lm_head_loss"
    held = g.source("loss" if is_loss else "result", out.type, "state")
    if is_loss:
        node.inputs[3] = held
    g.updates[held], g.outputs = out, []
    g.verify()


def _reserve_inputs(memory: Memory, graphs: dict[str, Graph], o: CompileOptions) -> None:
    for name, dtype in SCALARS.items():
        memory.add(name, Type((1,), dtype), "inputs")
    for name, g in graphs.items():
        for source in g.sources:
            if source.kind == "const" and source.name not in memory.slots:
                memory.add(source.name, source.type, "inputs")
            elif (source.kind == "input" and source.name not in SCALARS) or source.name == "result":
                memory.add(f"{name}:{source.name}", source.type, "inputs")


def _reserve_weights(memory: Memory, graphs: dict[str, Graph], o: CompileOptions) -> list[Group]:
    """Frozen weights, then for each group of trained ones the weights, gradients and optimizer states."""
    params: dict[str, Value] = {}
    for g in graphs.values():
        if params and {s.name for s in g.params} != set(params):
            raise GraphError(f"{g.name}: its weights are laid out otherwise than those of the programs before it")
        for source in g.params:
            params.setdefault(source.name, source)
    for param in params.values():
        if not param.trainable:
            memory.add(param.name, param.type, "weights")
    groups: list[Group] = []
    alike: dict[tuple[bool, str, str], list[str]] = {}
    for p in (p for p in params.values() if p.trainable):
        rule = o.optimizer.kind(p.name, _shapes(p, graphs)) if o.optimizer is not None else ""
        alike.setdefault((len(p.shape) > 1, p.dtype, rule), []).append(p.name)
    for (decay, dtype, rule), names in sorted(
        alike.items(), key=lambda item: (not item[0][0], item[0][1] != "f32", item[0][2])
    ):
        name = "-".join(filter(None, ("decay" if decay else "no-decay", dtype, rule)))
        if o.ranks == 1:
            groups.append(Group(name, tuple(names), decay, dtype, rule, len(groups)))
            continue
        for index, bucket in enumerate(collectives.buckets(names, {n: params[n].type.numel for n in names})):
            groups.append(Group(f"{name}.{index}", bucket, decay, dtype, rule, len(groups), o.ranks, o.zero_level > 0))
    for group in groups:
        for name in group.slots:
            memory.add(name, params[name].type, "weights")
        in_parts(memory, group, f"weight:{group.name}", group.slots, "weights")
    if o.train and o.optimizer is not None:
        for group in groups:
            for name in group.slots:
                memory.add(gradient_slot(name), Type(params[name].shape), "gradients")
            in_parts(memory, group, f"grad:{group.name}", [gradient_slot(n) for n in group.slots], "gradients")
        for group in groups:
            # Adapters always have f32 copies: they are small, and rounding would be all they see of an update.
            o.optimizer.reserve(memory, group, o.recipe.master or o.lora is not None)
    for g in graphs.values():
        for whole, parts in g.packed.items():
            for name, start, rows in parts if g.find(whole) is not None else []:  # else they are stored one by one
                memory.parts[name] = (whole, start, rows)
                if o.train and gradient_slot(whole) in memory.slots:
                    memory.parts[gradient_slot(name)] = (gradient_slot(whole), start, rows)
                for prefix in o.optimizer.states if o.optimizer is not None else ():
                    _part_of_state(memory, prefix, whole, name, start, rows)
    return groups


def _shapes(param: Value, graphs: dict[str, Graph]) -> list[tuple[int, ...]]:
    """Shapes of the weights that a parameter holds: those that are packed into it, or its own."""
    packed = [parts for g in graphs.values() for whole, parts in g.packed.items() if whole == param.name]
    return [(rows, *param.shape[1:]) for _, _, rows in packed[0]] if packed else [param.shape]


def _part_of_state(memory: Memory, prefix: str, whole: str, name: str, start: int, rows: int) -> None:
    """The state of a weight that is packed into another: rows of it, or of numbers of which each serves many rows'."""
    state = f"{prefix}.{whole}"
    if state in memory.slots:
        memory.parts[f"{prefix}.{name}"] = (state, start, rows)
    elif state in memory.parts:
        holder, first, count = memory.parts[state]
        each = memory.slots[whole].type.shape[0]
        memory.parts[f"{prefix}.{name}"] = (holder, first + count * start // each, count * rows // each)
    elif state in memory.spread:
        spread = memory.spread[state]
        each = memory.slots[whole].type.shape[0]
        numel = Type(spread.shape).numel
        shape = (spread.shape[0] * rows // each, *spread.shape[1:])
        memory.spread[f"{prefix}.{name}"] = Spread(spread.slot, spread.first + numel * start // each, shape)


def _slot_of(source: Value, program: str, memory: Memory) -> str:
    return f"{program}:{source.name}" if f"{program}:{source.name}" in memory.slots else source.name


def _account(memory: Memory, placed: list[Placed]) -> None:
    """The region that the programs share, split by purpose at the fullest moment of the largest program."""
    if not placed:
        return
    largest = max(placed, key=lambda p: p.height)
    memory.temporary = largest.height
    memory.floor = largest.floor
    workspace = min(largest.peak_workspace, largest.height)
    memory.peak_by_purpose = {"workspace": workspace, "activations": largest.height - workspace}


def _symbols(program: str, g: Graph, memory: Memory) -> dict[str, str]:
    """What the host reads and writes by name in this program."""
    found = {}
    for source in g.sources:
        if f"{program}:{source.name}" in memory.slots:
            found[source.name] = f"{program}:{source.name}"
        elif source.name in SCALARS:
            found[source.name] = source.name
    return found


def _weights(memory: Memory, graphs: dict[str, Graph], quantized: dict[str, Quantized]) -> dict[str, Weight]:
    found: dict[str, Weight] = {}
    inside = {slot for q in quantized.values() for slot in q.slots}
    for g in graphs.values():
        for name, q in ((n, q) for n, q in quantized.items() if n in g.initial):
            found[name] = Weight(name, memory.ref(q.slots[0]), g.initial[name], False, q)
        for param in (p for p in g.params if p.name not in inside):
            for name in [n for n, _, _ in g.packed.get(param.name, [])] or [param.name]:
                if name not in found:
                    found[name] = Weight(name, memory.ref(name), g.initial[name], param.trainable)
    return found
