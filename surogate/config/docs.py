"""Write the reference page of all keys: ``python -m surogate.config.docs [FILE]`` (default ``docs/config.md``)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from surogate.config.messages import describe, flow
from surogate.config.schema import NOT_NEEDED, note, raw_schema

_HEAD = """\
<!-- Made by `python -m surogate.config.docs` from surogate/config/schema.py; edit that file. -->

# Configuration

`surogate sft`, `surogate pt`, `surogate plan` and `surogate tokenize` read one YAML file:

```yaml
model: Qwen/Qwen3-0.6B
output_dir: ./outputs/qwen3-lora
lora: true
datasets:
  - path: data.jsonl
```

- **Overrides** follow the file on the command line: `surogate sft config.yaml learning_rate=1e-4
  datasets.0.path=other.jsonl lora_target_modules=[q_proj,v_proj]`.
- **Relative paths** are taken from the current directory, not from the file's.
- **`${NAME}`** in a value is replaced by the environment variable; `${NAME:-default}` gives a default, and `$${` is a
  plain `${`.
- Unknown keys, wrong types and keys that would do nothing are errors, with line and column. Names that other trainers
  use are answered by the key of ours (see the end of this page).
- Scalars are those of YAML 1.2: `2e-4` is a number, `010` is ten. Truth values may be written `true`/`false`,
  `yes`/`no` or `on`/`off`.
- `surogate config --schema` prints the JSON Schema, for editors; `surogate config FILE` prints the whole configuration
  with every default.

Keys in **bold** must be given.
"""


def page() -> str:
    """Return ``docs/config.md``."""
    schema = raw_schema()
    return _HEAD + "".join(_keys(schema)) + "".join(_foreign(schema))


def _keys(schema: Mapping[str, Any]) -> Iterator[str]:
    for key, field in schema["properties"].items():
        if section := note(field)["section"]:
            yield f"\n## {section}\n\n| key | value | default | |\n|---|---|---|---|\n"
        yield _row(key, field, schema["required"])
    entry = schema["properties"]["datasets"]["items"]
    yield "\n## An entry of `datasets` and `validation_datasets`\n\n| key | value | default | |\n|---|---|---|---|\n"
    for key, field in entry["properties"].items():
        yield _row(key, field, entry["required"])


def _row(key: str, field: Mapping[str, Any], required: list[str]) -> str:
    name = f"**`{key}`**" if key in required else f"`{key}`"
    default = "" if field.get("default") is None else f"`{flow(field['default'])}`"
    return f"| {name} | {describe(field)} | {default} | {field['description']} |\n"


def _foreign(schema: Mapping[str, Any]) -> Iterator[str]:
    yield "\n## Coming from another trainer\n\n| there | here |\n|---|---|\n"
    rows: dict[str, str] = {}
    for key, field in schema["properties"].items():
        rows |= {word: f"`{key}`" for word in note(field)["also"]}
        rows |= {word: _lines(line) for word, line in note(field)["instead"].items()}
    rows |= {word: reason for word, reason in NOT_NEEDED.items() if word != "<<"}
    for word in sorted(rows):
        yield f"| `{word}` | {rows[word]} |\n"
    yield "\nIn an entry of `datasets`:\n\n| there | here |\n|---|---|\n"
    rows = {}
    for key, field in schema["properties"]["datasets"]["items"]["properties"].items():
        rows |= {word: f"`{key}`" for word in note(field)["also"]}
        rows |= {word: _lines(line) for word, line in note(field)["instead"].items()}
    for word in sorted(rows):
        yield f"| `{word}` | {rows[word]} |\n"


def _lines(line: str) -> str:
    """Render ``A | B (remark)``: code for what is written, plain text for a remark."""
    parts = []
    for part in line.split(" | "):
        code, bracket, remark = part.partition(" (")
        parts.append(f"`{code}`{bracket}{remark}" if ": " in code else part)
    return " or ".join(parts)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/config.md")
    target.write_text(page(), encoding="utf-8")
    print(f"wrote {target}")
