"""Find out what the rows of a data set are, and say by what it was found."""

from __future__ import annotations

from collections.abc import Sequence

from surogate.data.formats import formats
from surogate.data.formats._base import Fields, Format, Row
from surogate.errors import UserError


def choose(rows: Sequence[Row], fields: Fields, where: str) -> tuple[Format, str]:
    """Choose the format of a data set from some of its first rows.

    The format that knows most of the rows is taken; among equals the first in rank.

    Args:
        rows: the first rows, at least one.
        fields: names of columns that the user gave.
        where: the data set, for messages.

    Returns:
        The format, and by what it was recognised.

    Raises:
        UserError: no format knows any of the rows.
    """
    best: tuple[int, Format, str] | None = None
    for entry in formats():
        reasons = [reason for row in rows if (reason := entry.recognise(row, fields)) is not None]
        if reasons and (best is None or len(reasons) > best[0]):
            best = (len(reasons), entry, reasons[0])
    if best is None:
        columns = list(dict.fromkeys(str(name) for row in rows for name in row))
        known = "; ".join(f"{entry.name}: {entry.summary}" for entry in formats())
        preference = {"chosen", "rejected"} <= set(columns)
        raise UserError(
            "these rows are preference pairs, which cannot be trained on yet"
            if preference
            else "the format of these rows is not recognised",
            where=where,
            expected=known + (f" (found: {', '.join(columns)})" if columns else " (found: no fields at all)"),
            fix="rename the fields, or name them in the data set: messages_field, instruction_field, output_field, "
            "prompt_field, completion_field, text_field",
        )
    return best[1], best[2]
