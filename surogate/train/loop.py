"""The run: from a configuration to a trained adapter or model.

Python acts between steps: it asks the engine for one whole step, reports it, and evaluates or saves where that is due.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate.config import check_mode
from surogate.config.schema import TrainConfig
from surogate.errors import TrainingFailed
from surogate.track.machine import cpu_name
from surogate.train import resume, signals
from surogate.train.order import RunOrder, evaluation_order, feeder, training_order
from surogate.train.plan import step_work
from surogate.train.ranks import Ranks
from surogate.train.result import check_replaceable, clear_unfinished, publish
from surogate.train.runtime import Runtime
from surogate.train.schedule import Schedule
from surogate.train.setup import (
    ModelFiles,
    check_gpu_memory,
    check_memory,
    choose_device,
    compile_config,
    default_cache,
    load_weights,
    open_model,
    prepare_data,
    threads_of,
)
from surogate.train.state import Exporter, restore, trained_state

if TYPE_CHECKING:
    from surogate.compile.compiler import Compiled
    from surogate.data import Prepared
    from surogate.data.tokenizer import Tokenizer
    from surogate.track.events import Events


@dataclass
class Run:
    """A finished run. ``result``: folder of the adapter or model. ``history``: one record a step, and an ``eval_loss``
    where there was an evaluation."""

    output_dir: Path
    result: Path
    history: list[dict[str, Any]] = field(default_factory=list)


def run(config: TrainConfig, mode: str = "sft", config_path: str | None = None) -> Run:
    """Train.

    Args:
        config: validated configuration.
        mode: ``sft`` or ``pt``.
        config_path: where the configuration came from, for the report.

    Raises:
        UserError: anything the user can mend: files, data, keys, room on the disk.
        TrainingFailed: the loss or the gradient is no longer finite.
        KeyboardInterrupt: SIGINT came, or (:class:`~surogate.errors.Terminated`) SIGTERM; a checkpoint was written.
    """
    from surogate.track import start

    check_mode(config, mode)
    check_replaceable(config)
    with start(config, mode) as events:
        return Trainer(config, mode, events).train(config_path)


class Trainer:
    """Holds the parts of a run."""

    def __init__(self, config: TrainConfig, mode: str, events: Events) -> None:
        self.config, self.mode, self.events = config, mode, events
        self.output_dir = Path(config.output_dir)
        self.history: list[dict[str, Any]] = []
        self.files: ModelFiles
        self.prepared: Prepared
        self.tokenizer: Tokenizer
        self.order: RunOrder
        self.evaluation: RunOrder | None = None
        self.compiled: Compiled
        self.runtime: Runtime
        self.exporter: Exporter

    # -- preparation ------------------------------------------------------------------------------------------------

    def prepare(self, config_path: str | None) -> None:
        """Everything before the first step. Reports in the order that users know (R14)."""
        from surogate.train.checkpoint import CheckpointWriter, check_output_dir

        c, started = self.config, time.monotonic()
        check_output_dir(self.output_dir, 0)
        resume.check_wanted(c)
        self.events.emit("config", path=config_path, config=c.model_dump(mode="json"))
        threads = threads_of(c)
        device = choose_device(c)
        if device.why_not:
            self._warn(f"the GPU is not used: {device.why_not}")
        name = cpu_name() if device.gpu is None else device.gpu.name
        self.events.emit("device", kind=device.kind, name=name, threads=threads)
        self.files = open_model(c, with_weights=True)
        self.prepared, self.tokenizer = prepare_data(
            c, self.mode, lambda line: self.events.emit("progress", message=line), self.files
        )
        self.order = training_order(self.prepared.train, c)
        if self.prepared.validation is not None:
            self.evaluation = evaluation_order(self.prepared.validation, c)
        self.compiled = compile_config(
            c,
            self.files,
            device,
            max_documents=self.order.max_documents,
            eval_documents=self.evaluation.max_documents if self.evaluation else 0,
        )  # fmt: skip
        if device.gpu is None:
            check_memory(self.compiled, self._warn)
        check_gpu_memory(self.compiled, device)
        cache = Path(c.cache_dir) if c.cache_dir else default_cache()
        gpu = device.engine_arguments(c, cache)
        if c.ranks > 1:
            self.runtime = Ranks(self.compiled, threads, check_nan=c.debug == "check_nan")
        else:
            self.runtime = Runtime(self.compiled, threads, gpu, check_nan=c.debug == "check_nan")
        load_weights(self.runtime, self.files, c.seed)
        self.exporter = Exporter(self.runtime, c, self.files, self.tokenizer)
        clear_unfinished(self.output_dir)
        self.checkpoints = CheckpointWriter(self.output_dir, c.save_total_limit or None)
        check_output_dir(self.output_dir, self.exporter.nbytes())
        self._report(time.monotonic() - started)

    def _report(self, seconds: float) -> None:
        c, compiled = self.config, self.compiled
        adapter = compiled.trainable_parameters if compiled.adapters is not None else 0
        self.events.emit(
            "model", name=c.model, architecture=(self.files.config.get("architectures") or ["?"])[0],
            parameters=compiled.parameters - adapter, trainable=compiled.trainable_parameters, seconds=seconds,
        )  # fmt: skip
        if compiled.adapters is not None:
            self.events.emit(
                "adapter", kind="lora", rank=c.lora_rank, alpha=c.lora_alpha, dropout=c.lora_dropout,
                modules=compiled.adapters.names, count=len(compiled.adapters.modules),
                trainable=compiled.trainable_parameters, parameters=compiled.parameters,
            )  # fmt: skip
        from surogate.data import Order

        report, order = self.prepared.report, Order(self.order.pieces, self.order.sequences, c.sequence_len)
        self.events.emit(
            "data", rows_in=report.rows_in, rows=report.rows, tokens=report.tokens, targets=report.targets,
            dropped={cause: rows.count for cause, rows in report.dropped.items()},
            positions_used=order.used, lines=[f"whole run: {order}"],
        )  # fmt: skip
        self.events.emit(
            "batch", effective=c.effective_batch_size, per_device=c.per_device_train_batch_size,
            accumulation=c.gradient_accumulation_steps, ranks=c.ranks, sequence_len=c.sequence_len,
            tokens=c.effective_batch_size * c.sequence_len, steps=self.order.duration.total,
            epochs=self.order.duration.epochs,
        )  # fmt: skip
        table = compiled.memory.table()
        self.events.emit("memory", table=table, total=sum(table.values()))

    def _resume(self) -> int:
        """Put the newest (or named) checkpoint back; returns the step it was written after."""
        path = resume.find(self.config, self._warn)
        if path is None:
            return 0
        total = self.order.duration.total
        step, arrays = resume.load(path, self.config, self.prepared.train, total, self._warn)
        restore(self.runtime, arrays, str(path))
        self.events.emit("resume", path=str(path), step=step)
        return step

    def _warn(self, message: str) -> None:
        self.events.emit("warning", message=message)

    # -- the run ----------------------------------------------------------------------------------------------------

    def train(self, config_path: str | None) -> Run:
        self.prepare(config_path)
        c, total = self.config, self.order.duration.total
        schedule = make_schedule(c, total)
        done = self._resume()
        feed = self._feed(self.order, self.compiled.batch, done * c.effective_batch_size)
        self.passes = c.effective_batch_size // c.ranks // self.compiled.batch
        self.flops, _ = step_work(self.compiled, self.passes)
        self.rate = self._measure_rate()
        with signals.listening() as stop:
            return self._steps(done, total, feed, schedule, stop)

    def _steps(self, done: int, total: int, feed: Any, schedule: Schedule, stop: signals.StopRequest) -> Run:
        """The steps after ``done``, with evaluations and checkpoints where they are due, and the result."""
        c, evaluated = self.config, -1
        for step in range(done + 1, total + 1):
            self._step(step, feed, schedule)
            if self.evaluation and not stop and c.eval_steps and step % c.eval_steps == 0:
                self._evaluate(step)
                evaluated = step
            due = bool(c.save_steps) and step % c.save_steps == 0
            if step < total and (due or stop):
                asked = bool(stop)
                self._save(step)
                if asked:
                    raise stop.error(step)
        if self.evaluation and evaluated != total:
            self._evaluate(total)
        return self._finish(total)

    def _feed(self, order: RunOrder, batch: int, cursor: int = 0) -> Any:
        """A feeder; of several ranks a list with one for each."""
        n = self.runtime.ranks
        found = [
            feeder(
                order, batch=batch, sequence_len=self.config.sequence_len, pad_id=self.tokenizer.pad_id or 0,
                cursor=cursor, rank=rank, ranks=n,
            )
            for rank in range(n)
        ]  # fmt: skip
        return found[0] if n == 1 else found

    def _measure_rate(self) -> float:
        """The machine's matrix product, flop/s: what the share of the speed of light is measured against."""
        from surogate import _native
        from surogate.train.bench import product_rate

        if self.runtime.on_gpu:
            return product_rate(self.runtime)
        hidden, inner = int(self.files.config["hidden_size"]), int(self.files.config["intermediate_size"])
        tokens = self.compiled.batch * self.config.sequence_len
        return _native.sgemm_rate(self.runtime.threads, min(tokens, 2048), inner, hidden)

    def _step(self, step: int, feed: Any, schedule: Schedule) -> None:
        c = self.config
        lr = schedule.at(step)
        scalars = {
            "lr": lr,
            "bias_correction1": 1.0 - c.adam_beta1**step,
            "bias_correction2": 1.0 - c.adam_beta2**step,
        }
        r = self.runtime.train_step(feed, self.passes, scalars, c.seed, step)
        record = {
            "step": step,
            "epoch": self.order.duration.epoch_of(step),
            "loss": r["loss"],
            "grad_norm": r["grad_norm"],
            "lr": lr,
            "tokens": r["tokens"],
            "targets": r["targets"],
            "seconds": r["seconds"],
            "tokens_per_second": r["tokens"] / r["seconds"],
            "speed_of_light": self.flops / r["seconds"] / self.rate,
            "data_wait_seconds": r["data_wait_seconds"],
        }
        if not r["applied"]:
            raise TrainingFailed(
                f"loss {r['loss']} and gradient norm {r['grad_norm']} at step {step} are not finite; "
                "weights are as they were before this step, nothing was saved over. Lower learning_rate, add "
                "warmup_steps, or look at the rows of this step; debug: check_nan finds where a NaN begins"
            )
        if r["grad_norm"] == 0 and r["loss"] > 0:
            # Weights so large that squares overflow make norms give zeros: all is finite, and nothing learns any more.
            raise TrainingFailed(
                f"the gradient at step {step} is exactly zero while the loss is {r['loss']:.4f}: the weights have left "
                "the range that the model can compute with. Lower learning_rate, or add warmup_steps"
            )
        self.history.append(record)
        self.events.emit("step", total=self.order.duration.total, epochs=self.order.duration.epochs, **record)

    def _evaluate(self, step: int) -> None:
        assert self.evaluation is not None
        c, started = self.config, time.monotonic()
        feed = self._feed(self.evaluation, c.eval_batch_size)
        r = self.runtime.evaluate(feed, self.evaluation.duration.total)
        loss = r["loss_sum"] / r["targets"] if r["targets"] else float("nan")
        if self.history:
            self.history[-1]["eval_loss"] = loss
        self.events.emit("eval", step=step, loss=loss, targets=r["targets"], seconds=time.monotonic() - started)

    def _save(self, step: int) -> None:
        started = time.monotonic()
        state = resume.state_of(step, self.config, self.prepared.train, self.compiled.digest)
        path = self.checkpoints.save(
            step, self.exporter.write, state, dict(trained_state(self.runtime)), write_bytes=self.exporter.nbytes()
        )
        self.events.emit("checkpoint", step=step, path=str(path), seconds=time.monotonic() - started)

    def _finish(self, total: int) -> Run:
        if self.config.save_steps:
            self._save(total)
        kind = "adapter" if self.compiled.adapters is not None else "model"
        publish(self.output_dir, self.exporter.write)
        folder = str(self.output_dir)
        self.events.emit("run_end", status="done", steps=total, kind=kind, path=folder, output_dir=folder)
        return Run(self.output_dir, self.output_dir, self.history)


def make_schedule(c: TrainConfig, total: int) -> Schedule:
    """The learning-rate schedule of a configuration."""
    warmup = c.warmup_steps or int(-(-total * c.warmup_ratio // 1))
    decay = max(1, round(total * c.wsd_decay_ratio)) if c.lr_scheduler_type == "wsd" else 0
    return Schedule(c.lr_scheduler_type, c.learning_rate, total, warmup, decay, c.min_lr_ratio)
