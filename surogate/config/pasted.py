"""Characters that come along when YAML is pasted from a web page or typed with a Chinese or Japanese keyboard.

``“q_proj”`` is not a quoted string to YAML but a plain one that *contains* the quotes, and ``lr：2`` is one word; both
would be read, silently, as something else. So they are looked for before YAML reads the text, wherever they cannot be
meant: outside comments, strings in straight quotes, and block scalars (``|``, ``>``).
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

_QUOTES = dict.fromkeys("“”„‟«»″＂", '"') | dict.fromkeys("‘’‚‛′＇", "'")
_DASHES = dict.fromkeys("‐‑‒–—−", "-")
_PUNCTUATION = {"、": ",", "。": ".", "【": "[", "】": "]", "〔": "[", "〕": "]", "「": '"', "」": '"'}
_NOTHING = dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad", "")  # zero width, soft hyphen
_MENDED = _QUOTES | _DASHES | _PUNCTUATION | _NOTHING

_BLOCK_SCALAR = re.compile(r"(?:^|[\s:-])[|>][+-]?[1-9]?[+-]?\s*(?:#.*)?$")


@dataclass(frozen=True)
class Pasted:
    """One line that holds such characters. ``line`` and ``column`` (of the first) count from 1."""

    line: int
    column: int
    text: str
    mended: str
    character: str

    @property
    def ascii(self) -> str:
        """The character that was meant; empty for one that should not be there at all."""
        return mend(self.character) or ""

    @property
    def name(self) -> str:
        """Say what was found, e.g. ``curly quote “ (U+201C)``."""
        c = self.character
        if c == "\t":
            return "tab"
        code = f"(U+{ord(c):04X})"
        if c in "“”„‟‘’‚‛":
            return f"curly quote {c} {code}"
        if c == "\u00a0":
            return f"non-breaking space {code}"
        if c == "\u3000":
            return f"full-width space {code}"
        if 0xFF01 <= ord(c) <= 0xFF5E:
            kind = {"：": "colon", "，": "comma"}.get(c, "character")
            return f"full-width {kind} {c} {code}"
        shown = c if c.isprintable() and not c.isspace() else ""
        return " ".join(filter(None, [unicodedata.name(c, "unusual character").lower(), shown, code]))


def mend(character: str) -> str | None:
    """Return what ``character`` stands for in YAML; None if it is nothing to mend. Tabs depend on where they are."""
    if character in _MENDED:
        return _MENDED[character]
    if 0xFF01 <= ord(character) <= 0xFF5E:  # the full-width forms repeat ASCII, in order
        return chr(ord(character) - 0xFEE0)
    if character != " " and (unicodedata.category(character) in ("Zs", "Zl", "Zp") or character == "\x85"):
        return " "
    return None


def find(text: str) -> list[Pasted]:
    """Return the lines of a YAML text with such characters (and tabs, which YAML does not take for spaces)."""
    found: list[Pasted] = []
    lines = text.split("\n")
    quote, opened = "", 0  # the straight quote that is open, and the line where it was opened
    block: int | None = None  # indentation of the line that opened a block scalar
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip(" "))
        if block is not None:
            if not line.strip() or indent > block:
                continue
            block = None
        before = quote
        bad, quote = _scan(line, quote)
        if quote and not before:
            opened = number
        if bad:
            found.append(_pasted(number, line, bad))
        if not quote and _BLOCK_SCALAR.search(line):
            block = indent
    if quote:  # “never closed” often means: closed by a curly one
        line = lines[opened]
        bad = [i for i, c in enumerate(line) if c in _QUOTES]
        if bad and not any(p.line == opened + 1 for p in found):
            found.append(_pasted(opened, line, bad))
    return sorted(found, key=lambda p: p.line)


def _scan(line: str, quote: str) -> tuple[list[int], str]:
    """Return the places of bad characters in ``line``, and the quote that is open at its end."""
    bad: list[int] = []
    last = ""  # the last character that is not a space, outside strings; "" at the start of the line
    spaced = True  # whether a space precedes
    i = 0
    while i < len(line):
        c = line[i]
        if quote:
            if quote == '"' and c == "\\":
                i += 1
            elif c == quote:
                if quote == "'" and line[i + 1 : i + 2] == "'":
                    i += 1
                else:
                    quote, last, spaced = "", c, False
            i += 1
            continue
        if c == "#" and spaced:
            break
        if c in "\"'" and (last in ("", "[", "{", ",") or (spaced and last in (":", "-", "?"))):
            quote = c
        elif c == "\t" or mend(c) is not None:
            bad.append(i)
        # A mended space still parts words, so that a comment after it is seen as one.
        space = c in " \t\r" or mend(c) == " "
        if not space and not quote:
            last = mend(c) or c
        spaced = space
        i += 1
    return bad, quote


def _pasted(number: int, line: str, bad: list[int]) -> Pasted:
    out: list[str] = []
    places = set(bad)
    for i, c in enumerate(line):
        if i not in places:
            out.append(c)
        elif c == "\t":
            out.append("  " if not line[:i].strip() else " ")
        else:
            good = mend(c) or ""
            # A full-width colon or comma brings its own space; an ASCII colon without one is no separator to YAML.
            glued = good in (":", ",") and i + 1 < len(line) and not line[i + 1].isspace()
            out.append(good + " " if glued else good)
    return Pasted(number + 1, bad[0] + 1, line, "".join(out).rstrip(), line[bad[0]])


def excerpt(line: int, column: int, text: str) -> str:
    """Return the line with its number, and a caret below ``column`` (from 1); wide characters count as two cells."""
    head = f"  {line} | "
    before = text[: column - 1].replace("\t", " ")
    cells = sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if c in _NOTHING else 1 for c in before)
    return f"{head}{text}".replace("\t", " ") + "\n" + " " * (len(head) - 2) + "| " + " " * cells + "^"
