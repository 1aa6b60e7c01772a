"""From data sets of the configuration to shards and a report, by way of the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np

from surogate.data.cache import Cache, make_key
from surogate.data.chunks import Chunk, Segment
from surogate.data.options import DataOptions, DatasetSpec
from surogate.data.report import DataReport, DatasetReport, reports_from_plain, reports_to_plain
from surogate.data.shards import Shard, ShardWriter, open_shard, read_meta
from surogate.data.shuffle import keys
from surogate.data.sources import Source
from surogate.data.tokenizer import Tokenizer
from surogate.errors import UserError

Say = Callable[[str], None]
Progress = Callable[[str, float], None]

_LOOK_AT = 64  # first rows that decide about the format
_HOLD_BACK = 4  # salt
_SAY_EVERY = 15.0  # seconds


@dataclass(frozen=True)
class Prepared:
    """Data that are ready to be trained on.

    Attributes:
        train: training rows.
        validation: rows for evaluation, if the options ask for any.
        report: what became of the rows.
    """

    train: Shard
    validation: Shard | None
    report: DataReport


def prepare(options: DataOptions, tokenizer: Tokenizer, report: Say, progress: Progress | None = None) -> Prepared:
    """Tokenise the data sets, or find them in the cache, and hold rows back for evaluation.

    Args:
        options: what, and how.
        tokenizer: of the model. If ``options.chat_template`` is given, it is set in the tokenizer too, so that
            :meth:`Tokenizer.save` writes the template that was trained with.
        report: gets lines of text: what is being done, and at the end the report.
        progress: gets the data set that is tokenised and the share done, many times; for a progress bar. ``None``:
            ``report`` gets a line every 15 seconds.

    Returns:
        Shards and report. The tokens do not depend on ``seed``, ``validation_split_ratio``, weights or ``packing``,
        so changing these tokenises nothing again.

    Raises:
        UserError: something in the data or the options that cannot be meant.
    """
    if options.chat_template is not None:
        tokenizer.use_chat_template(options.chat_template)
    cache = Cache(options.cache_dir)
    work = _Work(options, tokenizer, cache, report, progress or _in_words(report))
    train, train_reports = work.shard(options.datasets, "datasets")
    validation: Shard | None = None
    validation_reports: list[DatasetReport] = []
    held_back = 0
    if options.validation_datasets:
        validation, validation_reports = work.shard(options.validation_datasets, "validation_datasets")
    elif options.validation_split_ratio > 0:
        train, validation = hold_back(train, options.validation_split_ratio, options.seed)
        held_back = validation.rows
    data_report = DataReport(train_reports, validation_reports, held_back)
    for line in data_report.lines():
        report(line)
    return Prepared(train, validation, data_report)


def _in_words(say: Say) -> Progress:
    said = time.monotonic()

    def progress(name: str, share: float) -> None:
        nonlocal said
        if time.monotonic() - said > _SAY_EVERY and share:
            said = time.monotonic()
            say(f"tokenising {name}: {share:.0%}")

    return progress


def hold_back(shard: Shard, ratio: float, seed: int) -> tuple[Shard, Shard]:
    """Split off a share of the rows, at least one. Which ones depends on the seed; a larger share only adds rows.

    Raises:
        UserError: there are fewer than two rows.
    """
    if shard.rows < 2:
        raise UserError(
            "there is one row only, and none can be held back for evaluation",
            where="validation_split_ratio",
            fix="give validation_datasets, or leave validation_split_ratio out",
        )
    count = min(shard.rows - 1, max(1, round(ratio * shard.rows)))
    chosen = np.zeros(shard.rows, bool)
    chosen[np.argsort(keys(shard.rows, seed, _HOLD_BACK), kind="stable")[:count]] = True
    sets = [(first, last, 1.0) for first, last, _ in shard.sets]  # evaluation sees every row once
    return replace(shard, index=shard.index[~chosen]), replace(shard, index=shard.index[chosen], sets=sets)


@dataclass
class _Work:
    options: DataOptions
    tokenizer: Tokenizer
    cache: Cache
    say: Say
    progress: Progress

    def shard(self, specs: Sequence[DatasetSpec], where: str) -> tuple[Shard, list[DatasetReport]]:
        """Find or build the shard of some data sets, and refuse it if it cannot be meant."""
        if not specs:
            raise UserError("no data set is given", where=where, expected="at least one entry with a path")
        sources = [Source(spec, f"{where}.{index}") for index, spec in enumerate(specs)]
        key = make_key(
            [
                [source.key(self.cache.hash_file) for source in sources],
                self.tokenizer.fingerprint(),
                _what_rows_depend_on(self.options),
            ]
        )
        path = self.cache.path(key)
        meta = read_meta(path)
        if meta is None:
            waiting = lambda: self.say("another run is tokenising the same data; waiting for it")  # noqa: E731
            with self.cache.building(key, lambda found: read_meta(found) is not None, waiting) as folder:
                if folder is not None:
                    _Builder(self, sources).build(folder)
            meta = read_meta(path)
            if meta is None:
                raise UserError("the tokenised data are not whole", where=str(path), fix="delete that folder")
        else:
            self.say(f"tokens found in the cache ({path})")
        reports = reports_from_plain(meta["reports"])
        for part in reports:
            part.check(self.options.min_supervised_share, self.options.max_invalid_share)
        meta = {**meta, "files": [name for source in sources for name in source.names()]}
        weights = [spec.weight if where == "datasets" else None for spec in specs]
        shard = open_shard(path, meta, weights)
        self._check_vocabulary(shard, meta["max_id"])
        return shard, reports

    def _check_vocabulary(self, shard: Shard, largest: int) -> None:
        size = self.options.vocab_size
        if not size or largest < size:
            return
        tokens = np.memmap(shard.tokens_path, "<i4", "r")
        step = 1 << 22
        for start in range(0, len(tokens), step):
            beyond = np.flatnonzero(tokens[start : start + step] >= size)
            if len(beyond):
                at = start + int(beyond[0])
                break
        token = int(tokens[at])
        raise UserError(
            f"token {token} ({self.tokenizer.decode([token])!r}) is beyond the model's embedding",
            where=shard.origin(shard.stored_row_at(at)),
            expected=f"ids below {size}, the vocab_size of the model",
            fix="use the tokenizer that belongs to the model, or enlarge the model's embedding",
        )


def _what_rows_depend_on(options: DataOptions) -> dict[str, Any]:
    splits = options.splits_rows
    train_on = options.train_on if isinstance(options.train_on, str) else sorted(options.train_on)
    return {
        "objective": options.objective,
        "train_on": "all" if options.objective == "pt" else train_on,
        "sequence_len": None if splits else options.sequence_len,
        "truncation": "split" if splits else options.truncation,
        "chat_template_kwargs": dict(options.chat_template_kwargs),
    }


class _Builder:
    """Tokenises sources into one shard."""

    def __init__(self, work: _Work, sources: Sequence[Source]) -> None:
        self.work, self.sources = work, sources
        self.reports: list[DatasetReport] = []

    def build(self, folder: Any) -> None:
        from surogate.data.workers import encode_jobs

        bases = np.cumsum([0, *(len(source.names()) for source in self.sources)])
        sets = [[0, 0] for _ in self.sources]
        done, sizes = 0, [source.size() for source in self.sources]
        current = -1
        with ShardWriter(folder) as writer:
            for index, result in encode_jobs(self._jobs(), self.work.tokenizer, self.work.options):
                if index != current:
                    current, done = index, 0
                    sets[index] = [writer.rows, writer.rows]
                lengths, targets = writer.add(result, int(bases[index]))
                sets[index][1] = writer.rows
                source = self.sources[index]
                self.reports[index].add(result, lengths, targets, source.names())
                done += result.size
                self.work.progress(source.spec.path, min(1.0, done / sizes[index]) if sizes[index] else 0.0)
            for part in self.reports:
                part.check(self.work.options.min_supervised_share, self.work.options.max_invalid_share)
            writer.finish({"sets": sets, "reports": reports_to_plain(self.reports)})

    def _jobs(self) -> Iterator[Any]:
        from surogate.data.workers import Job

        for index, source in enumerate(self.sources):
            spec = source.spec
            chunks = source.chunks(self.work.options.splits_rows)
            form, reason, chunks = self._choose(source, chunks)
            self.reports.append(DatasetReport(spec.path, form, reason, notes=list(source.notes)))
            size = f" ({source.size() / 1e6:.1f} MB)" if source.size() else ""
            self.work.say(f"tokenising {spec.path}{size} as {form}" + (f": {reason}" if reason else ""))
            for chunk in chunks:
                yield Job(index, chunk, form, spec.fields)

    def _choose(self, source: Source, chunks: Iterator[Chunk]) -> tuple[str, str, Iterator[Chunk]]:
        """Decide the format, by the configuration or by the first rows; return it, the reason, and all chunks."""
        from surogate.data.formats import format_names
        from surogate.data.formats.auto import choose

        spec = source.spec
        if spec.type not in ("auto", "json"):
            if spec.type not in format_names():
                raise UserError(
                    f"there is no data format {spec.type!r}",
                    where=f"{source.where}.type",
                    expected=f"auto, json, {', '.join(format_names())}",
                )
            return spec.type, "", chunks
        seen: list[Chunk] = []
        rows: list[Any] = []
        for chunk in chunks:
            seen.append(chunk)
            if isinstance(chunk, Segment):
                return "text", "a text file is one document", chain(seen, chunks)
            rows += [row for _, row in islice(chunk.rows(), _LOOK_AT) if isinstance(row, dict)]
            if len(rows) >= _LOOK_AT:
                break
        if not rows:
            if any(True for chunk in seen for _ in chunk.rows()):
                raise UserError("the rows are no objects", where=spec.path, expected="one JSON object a row")
            raise UserError("there are no rows", where=spec.path, expected="at least one row")
        form, reason = choose(rows[:_LOOK_AT], spec.fields, spec.path)
        return form.name, reason, chain(seen, chunks)
