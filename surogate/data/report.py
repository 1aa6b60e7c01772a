"""What became of the rows: printed before the first step, kept beside the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from surogate.errors import UserError

if TYPE_CHECKING:
    from surogate.data.encode import ChunkResult

_CAUSES = 50  # told apart; messages of templates may differ from row to row
_BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass
class DroppedRows:
    """Rows left out for one cause.

    Attributes:
        count: how many.
        example: ``file:row`` of the first.
        detail: what was found in that one; may be empty.
        invalid: the rows cannot be read as meant; false where only length or mask is the cause.
    """

    count: int
    example: str
    detail: str
    invalid: bool


@dataclass
class DatasetReport:
    """What became of the rows of one data set.

    Attributes:
        path: as in the configuration.
        format: name of the format.
        reason: by what it was recognised; empty where the configuration names it.
        rows_in: rows read.
        rows: rows kept.
        cut: kept rows that were cut to the sequence length.
        dropped: by cause.
        tokens: of kept rows.
        targets: tokens of kept rows that are trained.
        lengths: kept rows by length: entry i counts lengths from ``2**i`` to ``2**(i+1) - 1`` tokens.
        longest: tokens of the longest kept row.
        notes: remarks.
    """

    path: str
    format: str
    reason: str
    rows_in: int = 0
    rows: int = 0
    cut: int = 0
    dropped: dict[str, DroppedRows] = field(default_factory=dict)
    tokens: int = 0
    targets: int = 0
    lengths: list[int] = field(default_factory=list)
    longest: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, result: ChunkResult, lengths: np.ndarray, targets: int, files: Sequence[str]) -> None:
        """Count a chunk: its result, the lengths of the rows it made whole, its targets."""
        self.rows_in += result.rows_in
        self.cut += result.cut
        for cause, drop in result.dropped.items():
            example = f"{files[result.file]}:{drop.row}"
            if cause not in self.dropped and len(self.dropped) >= _CAUSES:
                cause = "another cause"
            entry = self.dropped.setdefault(cause, DroppedRows(0, example, drop.detail, drop.invalid))
            entry.count += drop.count
        self.notes += sorted(result.notes - set(self.notes))
        self.rows += len(lengths)
        self.tokens += len(result.tokens)
        self.targets += targets
        if len(lengths):
            self.longest = max(self.longest, int(lengths.max()))
            counts = np.bincount(np.floor(np.log2(lengths)).astype(np.int64))
            self.lengths += [0] * (len(counts) - len(self.lengths))
            for size, count in enumerate(counts.tolist()):
                self.lengths[size] += count

    @property
    def supervised(self) -> float:
        """Share of the kept tokens that are trained."""
        return self.targets / self.tokens if self.tokens else 0.0

    def lines(self) -> Iterator[str]:
        """Yield the report as lines of text."""
        reason = f" ({self.reason})" if self.reason else ""
        yield f"{self.path}: {self.format}{reason}"
        cut = f", {self.cut:,} of them cut to sequence_len" if self.cut else ""
        yield f"  rows {self.rows_in:,}, kept {self.rows:,}{cut}"
        yield from self.losses()
        if self.tokens:
            share = f"trained {self.targets:,} ({self.supervised:.1%})"
            yield f"  tokens {self.tokens:,}, {share}; longest row {self.longest:,}"
            yield f"  row lengths {self._histogram()}"
        for note in self.notes:
            yield f"  note: {note}"

    def losses(self) -> Iterator[str]:
        """Yield a line for each cause of loss, the commonest first."""
        for cause, drop in sorted(self.dropped.items(), key=lambda item: (item[0] == "another cause", -item[1].count)):
            detail = f" ({drop.detail})" if drop.detail else ""
            yield f"  left out {drop.count:,}: {cause}; for example {drop.example}{detail}"

    def _histogram(self) -> str:
        first = next((i for i, count in enumerate(self.lengths) if count), 0)
        most = max(self.lengths)
        bars = "".join(_BLOCKS[-(-count * 8 // most)] for count in self.lengths[first:])
        return f"{2**first} {bars} {2 ** len(self.lengths) - 1}"

    def check(self, min_supervised_share: float, max_invalid_share: float) -> None:
        """Refuse what cannot be meant.

        Raises:
            UserError: no row; no row kept; too many rows that cannot be read; too few trained tokens.
        """
        if not self.rows_in:
            raise UserError("there are no rows", where=self.path, expected="at least one row")
        worst = max(self.dropped.items(), key=lambda item: item[1].count, default=None)
        invalid = {cause: drop for cause, drop in self.dropped.items() if drop.invalid}
        lost = sum(drop.count for drop in invalid.values())
        table = "\n".join(self.losses())
        if worst is not None and not self.rows:
            raise UserError(
                f"none of the {self.rows_in:,} rows can be trained:\n{table}",
                where=worst[1].example,
                expected=f"rows of the format {self.format} with something to train on",
                fix=_remedy(worst[0], self.format),
            )
        if lost > max_invalid_share * self.rows_in:
            cause, drop = max(invalid.items(), key=lambda item: item[1].count)
            raise UserError(
                f"{lost:,} of {self.rows_in:,} rows cannot be read as {self.format}:\n{table}",
                where=drop.example,
                expected=f"at most {max_invalid_share:.0%} such rows",
                fix=_remedy(cause, self.format),
            )
        if self.supervised < min_supervised_share:
            raise UserError(
                f"only {self.targets:,} of {self.tokens:,} tokens are trained",
                where=self.path,
                expected=f"at least {min_supervised_share:.1%}",
                fix="check type, train_on and the chat template",
            )


def _remedy(cause: str, form: str) -> str:
    if "sequence_len" in cause:
        return "raise sequence_len, or set truncation: right or split"
    if "cut off by truncation" in cause:
        return "raise sequence_len, or set truncation: left"
    if "nothing to train on" in cause:
        return "check the roles of the turns, or set train_on: all"
    if "the chat template refuses" in cause:
        return "mend the order of roles in the data, or set chat_template to one that takes it"
    if "hides where" in cause:
        return "set chat_template to a template with {% generation %} marks, or train_on: all"
    if "no field" in cause:
        return f"set type (now {form}), or name the fields: messages_field, instruction_field, output_field, text_field"
    return "mend the rows named above"


@dataclass
class DataReport:
    """What became of all rows.

    Attributes:
        datasets: of the training data.
        validation: of the validation data sets.
        held_back: training rows that were held back for evaluation.
    """

    datasets: list[DatasetReport]
    validation: list[DatasetReport] = field(default_factory=list)
    held_back: int = 0

    @property
    def rows_in(self) -> int:
        """Training rows read."""
        return sum(part.rows_in for part in self.datasets)

    @property
    def rows(self) -> int:
        """Training rows kept, held-back ones included."""
        return sum(part.rows for part in self.datasets)

    @property
    def dropped(self) -> dict[str, DroppedRows]:
        """Training rows left out, by cause, over all data sets."""
        total: dict[str, DroppedRows] = {}
        for part in self.datasets:
            for cause, drop in part.dropped.items():
                if cause in total:
                    total[cause].count += drop.count
                else:
                    total[cause] = DroppedRows(**asdict(drop))
        return total

    @property
    def tokens(self) -> int:
        """Tokens of the training rows kept."""
        return sum(part.tokens for part in self.datasets)

    @property
    def targets(self) -> int:
        """Trained tokens among them."""
        return sum(part.targets for part in self.datasets)

    def lines(self) -> Iterator[str]:
        """Yield the report as lines of text."""
        for part in self.datasets:
            yield from part.lines()
        for part in self.validation:
            yield from (f"validation: {line}" if not line.startswith(" ") else line for line in part.lines())
        if self.held_back:
            yield f"held back for evaluation: {self.held_back:,} of {self.rows:,} rows"


def reports_to_plain(reports: Sequence[DatasetReport]) -> list[dict[str, Any]]:
    """Return plain data that :func:`reports_from_plain` reads."""
    return [asdict(part) for part in reports]


def reports_from_plain(plain: Sequence[dict[str, Any]]) -> list[DatasetReport]:
    """Return what :func:`reports_to_plain` was given."""
    reports = []
    for part in plain:
        dropped = {cause: DroppedRows(**drop) for cause, drop in part["dropped"].items()}
        reports.append(DatasetReport(**{**part, "dropped": dropped}))
    return reports
