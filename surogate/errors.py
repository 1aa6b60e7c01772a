"""A user's mistake is one message: where, what was found, what was expected, the smallest fix."""

from __future__ import annotations


class UserError(Exception):
    """A mistake that the user can mend. The command line prints it without a traceback and exits with 2.

    Args:
        what: what was found, in one sentence.
        where: file, ``file:line:column``, ``file:row`` or config key. Empty where there is no place to name.
        expected: what would have been right. May be empty.
        fix: the smallest thing that mends it. May be empty.
    """

    def __init__(self, what: str, *, where: str = "", expected: str = "", fix: str = "") -> None:
        self.what, self.where, self.expected, self.fix = what, where, expected, fix
        super().__init__(self.render())

    def render(self) -> str:
        """Return the message as the command line prints it, one part a line."""
        head = f"{self.where}: {self.what}" if self.where else self.what
        parts = [head]
        if self.expected:
            parts.append(f"  expected: {self.expected}")
        if self.fix:
            parts.append(f"  fix: {self.fix}")
        return "\n".join(parts)


class Terminated(KeyboardInterrupt):
    """A run that SIGTERM has stopped. Exit code 143."""


class TrainingFailed(Exception):
    """A run that cannot go on, through no mistake in its inputs that we could name. Exit code 1."""
