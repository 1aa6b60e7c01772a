"""Surogate trains language models: Python compiles, native code runs. See ``docs/architecture.md``."""

__version__ = "0.1.0"
