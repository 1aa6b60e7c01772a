"""Configuration: one strict schema, errors that name file, line and column.

One idea: every key is declared once, in :mod:`surogate.config.schema`, with its type, default, help and the names that
other trainers give it. The loader's messages, the JSON Schema and ``docs/config.md`` are made from that declaration.
"""

from surogate.config.loader import (
    ConfigErrors,
    Provenance,
    check_mode,
    load_config,
    make_config,
    resolved_yaml,
)
from surogate.config.schema import DatasetConfig, TrainConfig, json_schema

__all__ = [
    "ConfigErrors",
    "DatasetConfig",
    "Provenance",
    "TrainConfig",
    "check_mode",
    "json_schema",
    "load_config",
    "make_config",
    "resolved_yaml",
]
