"""The shape of the code: imports point downwards, every folder says its idea, files stay small, every knob is read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "surogate"
FILES = sorted(PACKAGE.rglob("*.py"))

# What a folder (or file) may import of the package, besides itself; docs/architecture.md has the same table in words.
_GRAPH = {"graph", "errors"}
_MODEL = _GRAPH | {"ops", "dsl"}
_COMPILER = _MODEL | {"models", "objectives", "adapters", "recipes", "compile"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "graph": {"ops"},  # looked up when nodes are emitted, never at import
    "ops": _GRAPH,
    "dsl": _GRAPH | {"ops"},
    "models": _MODEL,
    "objectives": _MODEL,
    "adapters": _GRAPH | {"ops"},
    "recipes": set(),
    "optim": _GRAPH | {"ops", "compile"},
    "compile": _COMPILER,
    "config": {"errors", "data"},  # the names of data formats
    "io": {"errors"},
    "data": {"errors", "io"},
    "export": {"errors", "io"},
    "track": {"errors", "config"},
    "train": _COMPILER | {"optim", "config", "io", "data", "export", "track", "_native", "cuda"},
    "cuda": {"errors"},
}


def imports(path: Path) -> set[str]:
    """Names of the package's folders and files that a file imports, at the top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module] if node.module != "surogate" else [f"surogate.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("surogate.")}
    return found - {"__version__"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part in ("cli", "__init__", "__main__"):
        return
    beyond = imports(path) - ALLOWED[part] - {part}
    assert not beyond, f"{path.relative_to(ROOT)} imports {', '.join(sorted(beyond))}"


def test_every_folder_states_its_idea() -> None:
    for folder in sorted({f.parent for f in FILES}):
        init = folder / "__init__.py"
        assert init.is_file() and ast.get_docstring(ast.parse(init.read_text())), folder


def test_files_stay_small() -> None:
    sources = [*FILES, *(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.cu"), *(ROOT / "csrc").rglob("*.h")]
    long = {str(p.relative_to(ROOT)): n for p in sources if (n := len(p.read_text().splitlines())) > 650}
    assert not long


def test_every_public_function_is_documented() -> None:
    bare = []
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            is_public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if is_public and not ast.get_docstring(node):
                bare.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert not bare


def test_every_key_of_the_configuration_is_read() -> None:
    from surogate.config.schema import DatasetConfig, TrainConfig

    read = set()
    for path in FILES:
        if path.parent.name == "config":
            continue
        read |= {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
    fields = set(TrainConfig.model_fields) | {f for f in DatasetConfig.model_fields if not f.endswith("_field")}
    fields -= {"per_device_eval_batch_size"}  # by eval_batch_size
    assert not fields - read


def test_no_environment_variable_is_a_knob() -> None:
    """Only places that the system defines are read: caches and colour."""
    allowed = {"XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HOME", "NO_COLOR", "COLUMNS"}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            is_get = isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv")
            if is_get and node.args and isinstance(node.args[0], ast.Constant):
                assert node.args[0].value in allowed, path
