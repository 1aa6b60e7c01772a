"""Long texts in stretches that are encoded one by one, with the same ids as the whole."""

from __future__ import annotations

from collections.abc import Iterator

LONG_TEXT = 1 << 17
"""Characters from which a text is encoded stretch by stretch: the library needs some 100 bytes for every token."""

STRETCH = 1 << 15
"""Characters in a stretch, at most."""

SEGMENT = 1 << 19
"""Characters of a long file that are read and handed over at once, at most."""

CONTEXT = 256
"""Characters that are encoded on either side of a stretch, so that its edge tokens are those of the whole text."""


def stretches(text: str, length: int) -> Iterator[tuple[int, int]]:
    """Cut a long text into stretches of at most ``length`` characters, at ends of lines or else between words."""
    first = 0
    while first < len(text):
        last = min(len(text), first + length)
        if last < len(text):
            last = cut_before(text, first + length // 2, last)
        yield first, last
        first = last


def cut_before(text: str, earliest: int, latest: int) -> int:
    """Return the last good place to cut in ``(earliest, latest]``: after a line, before a space, else ``latest``."""
    at = text.rfind("\n", earliest, latest - 1)
    while at != -1 and text[at + 1].isspace():
        at = text.rfind("\n", earliest, at)
    if at != -1:
        return at + 1
    at = text.rfind(" ", earliest + 1, latest)
    return at if at != -1 else latest
