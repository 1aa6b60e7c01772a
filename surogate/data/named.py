"""Chat templates that ship with Surogate, for models whose tokenizer has none."""

from __future__ import annotations

from pathlib import Path

from surogate.errors import UserError

_FOLDER = Path(__file__).parent / "templates"


def named_templates() -> list[str]:
    """Return the names of the templates that ship with Surogate, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.jinja"))


def read_template(choice: str) -> tuple[str, str]:
    """Find the chat template that the configuration names.

    Args:
        choice: a name of :func:`named_templates`, or the path of a Jinja file.

    Returns:
        Jinja text, and where it is from.

    Raises:
        UserError: there is neither such a name nor such a file.
    """
    if choice in named_templates():
        return (_FOLDER / f"{choice}.jinja").read_text("utf-8"), f"chat template {choice}"
    path = Path(choice).expanduser()
    if not path.is_file():
        raise UserError(
            f"there is no chat template {choice!r}",
            where="chat_template",
            expected=f"one of {', '.join(named_templates())}, or the path of a Jinja file",
        )
    return path.read_text("utf-8"), str(path)
