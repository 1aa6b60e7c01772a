"""Token ids made elsewhere."""

from __future__ import annotations

from typing import Any

from surogate.data.formats._base import BadRow, Example, Fields, Format, Row, Tokens, kind, shorten
from surogate.data.formats._turns import from_json

_MASKS = ("assistant_masks", "completion_mask", "loss_mask")


class Pretokenized(Format):
    """``input_ids``, with ``labels`` (-100 where nothing is trained, else the id itself: not shifted) or a mask.

    Positions whose ``attention_mask`` is 0 are padding and are taken out. Without labels and mask all is trained.
    """

    name = "pretokenized"
    summary = "input_ids, and perhaps labels"
    rank = 0

    def recognise(self, row: Row, fields: Fields) -> str | None:
        return "field input_ids" if "input_ids" in row else None

    def convert(self, row: Row, fields: Fields) -> Example:
        ids = _numbers(row, "input_ids")
        if not ids:
            raise BadRow("'input_ids' is empty")
        if min(ids) < 0:
            raise BadRow("'input_ids' has a negative id", f"position {ids.index(min(ids))}: {min(ids)}")
        targets = [True] * len(ids)
        mask = next((name for name in _MASKS if row.get(name) is not None), None)
        if row.get("labels") is not None:
            labels = _numbers(row, "labels", len(ids))
            for position, (index, label) in enumerate(zip(ids, labels, strict=True)):
                if label not in (-100, index):
                    raise BadRow(
                        "'labels' differ from 'input_ids' (are they shifted?)",
                        f"position {position}: id {index}, label {label}; expected the id or -100",
                    )
            targets = [label != -100 for label in labels]
        elif mask is not None:
            targets = [bool(value) for value in _numbers(row, mask, len(ids))]
        if row.get("attention_mask") is not None:
            seen = [bool(value) for value in _numbers(row, "attention_mask", len(ids))]
            ids = [index for index, kept in zip(ids, seen, strict=True) if kept]
            targets = [target for target, kept in zip(targets, seen, strict=True) if kept]
        return Tokens(ids, targets)


def _numbers(row: Row, name: str, length: int | None = None) -> list[int]:
    value: Any = from_json(row.get(name))
    if not isinstance(value, list):
        raise BadRow(f"{name!r} is {kind(value)}, not a list of numbers")
    wrong = next((v for v in value if not isinstance(v, int)), None)
    if wrong is not None:
        raise BadRow(f"{name!r} holds {kind(wrong)}, not whole numbers", shorten(wrong))
    if length is not None and len(value) != length:
        raise BadRow(f"{name!r} is not as long as 'input_ids'", f"{len(value)} against {length}")
    return value


FORMAT = Pretokenized()
