"""Surogate: trains large language models. Python compiles, native code runs."""

__version__ = "0.1.0"
