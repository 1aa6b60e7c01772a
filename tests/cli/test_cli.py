"""The command line: help, exit codes, messages. What a verb calls is replaced; its own tests are elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from surogate import cli
from surogate.errors import TrainingFailed, UserError
from tests.data.samples import write_tokenizer

CONFIG = "model: m\noutput_dir: {out}\ndatasets: [{{path: d.jsonl}}]\n"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.format(out=tmp_path / "out"))
    return str(path)


def replace(monkeypatch: pytest.MonkeyPatch, module: str, name: str, function: Any) -> None:
    """Put a module with one function where a verb will import it from."""
    import types

    fake = types.ModuleType(module)
    setattr(fake, name, function)
    monkeypatch.setitem(sys.modules, module, fake)


def test_every_file_is_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    files = {p.stem for p in Path(cli.__file__).parent.glob("[!_]*.py")}
    assert set(cli.verbs()) == files >= {"sft", "pt", "plan", "merge", "tokenize", "config", "doctor"}
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in files)


@pytest.mark.parametrize("verb", sorted(p.stem for p in Path(cli.__file__).parent.glob("[!_]*.py")))
def test_help_of_a_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([verb, "--help"])
    assert stopped.value.code == 0
    assert f"usage: surogate {verb}" in capsys.readouterr().out


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    """Best of five, of the whole process (other tests run beside it); the light imports are what keeps it so."""
    heavy = ["numpy", "pydantic", "yaml", "rich", "transformers", "torch", "datasets", "surogate._native"]
    code = f"import sys, surogate.cli as c\nc.parser()\nprint([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "surogate", "--help"], check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.3


def test_no_command_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: surogate" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("surogate ")


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["stf", "c.yaml"])
    assert stopped.value.code == 2
    assert "sft" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--learning_rate", "1e-4"], ["--learning-rate=1e-4"]])
def test_a_key_as_an_option(words: list[str], config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["sft", config, *words])
    assert stopped.value.code == 2
    assert "learning_rate=1e-4" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["sft", "pt"])
def test_training_gets_config_mode_and_path(verb: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    replace(monkeypatch, "surogate.train", "run", lambda c, mode, config_path: calls.append((c, mode, config_path)))
    assert cli.main([verb, config, "seed=7", "datasets.0.path=x.jsonl"]) == 0
    ((c, mode, path),) = calls
    assert (c.seed, c.datasets[0].path, mode, path) == (7, "x.jsonl", verb, config)


def test_users_mistake_is_one_message(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sft", config, "sed=7"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "command line: sed=7: unknown key 'sed'\n  fix: write seed: 7\n"


def test_mistakes_found_later(config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(c: Any, mode: str, config_path: str) -> None:
        raise UserError("no such file", where=c.where("datasets.0.path"), fix="check the path")

    replace(monkeypatch, "surogate.train", "run", run)
    assert cli.main(["sft", config]) == 2
    assert capsys.readouterr().err == f"{config}:3:19: no such file\n  fix: check the path\n"


def test_failed_training(config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(c: Any, mode: str, config_path: str) -> None:
        raise TrainingFailed("loss nan at step 3")

    replace(monkeypatch, "surogate.train", "run", run)
    assert cli.main(["sft", config]) == 1
    assert capsys.readouterr().err == "surogate: loss nan at step 3\n"


@pytest.mark.parametrize("latest", [None, "out/checkpoint-20"])
def test_interrupted(
    latest: str | None, config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(c: Any, mode: str, config_path: str) -> None:
        raise KeyboardInterrupt

    replace(monkeypatch, "surogate.train", "run", run)
    replace(monkeypatch, "surogate.train.checkpoint", "find_latest", lambda folder, report: latest and Path(latest))
    assert cli.main(["sft", config, "seed=1", "resume_from_checkpoint=x"]) == 130
    shown = capsys.readouterr().err
    if latest:
        assert f"the newest checkpoint is {latest}" in shown
        assert f"surogate sft {config} seed=1 resume_from_checkpoint=true" in shown
    else:
        assert "there is no complete checkpoint" in shown


def test_what_we_did_not_foresee_keeps_its_traceback(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(c: Any, mode: str, config_path: str) -> None:
        raise RuntimeError("x")

    replace(monkeypatch, "surogate.train", "run", run)
    with pytest.raises(RuntimeError):
        cli.main(["sft", config])


def test_from_scratch_is_for_pretraining(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sft", config, "from_scratch=true"]) == 2
    assert "use surogate pt" in capsys.readouterr().err


def test_plan(config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    replace(monkeypatch, "surogate.train.plan", "plan", lambda c, dump: f"plan of {c.model}, {dump}")
    assert cli.main(["plan", config, "--dump", "model=x"]) == 0
    assert capsys.readouterr().out == "plan of x, True\n"


@pytest.mark.parametrize("mode", ["sft", "pt"])
def test_tokenize(tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str) -> None:
    """Rows as the model sees them; what is trained stands in [[ ]]."""
    model = write_tokenizer(tmp_path / "model")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 420, **sizes}))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"instruction": "red or blue?", "output": "blue it is"}) + "\n")
    path = tmp_path / "c.yaml"
    lines = [f"model: {model}", f"cache_dir: {tmp_path / 'cache'}", "chat_template: chatml", "sequence_len: 64"]
    path.write_text("\n".join([*lines, f"datasets: [{{path: {tmp_path / 'rows.jsonl'}}}]"]) + "\n")
    assert cli.main(["tokenize", str(path), "--show", "3", *(["--pt"] if mode == "pt" else [])]) == 0
    shown = capsys.readouterr().out
    assert "red or blue?" in shown and "blue it is" in shown
    assert cli.main(["tokenize", str(path), "--show", "-1"]) == 2


def test_merge(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[Any] = []
    replace(monkeypatch, "surogate.export.merge", "merge_adapter", lambda *a: calls.append(a) or Path(a[2]))
    assert cli.main(["merge", "a", "o"]) == 0
    assert cli.main(["merge", "a", "o", "--base", "b", "--dtype", "bfloat16"]) == 0
    assert calls == [(None, "a", "o", None), ("b", "a", "o", "bfloat16")]
    assert "The merged model is in o" in capsys.readouterr().out


def test_config_prints_what_it_reads(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", config, "seed=3"]) == 0
    first = capsys.readouterr().out
    assert "seed: 3\n" in first
    again = tmp_path / "again.yaml"
    again.write_text(first)
    assert cli.main(["config", str(again)]) == 0
    assert capsys.readouterr().out == first


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--schema"]) == 0
    assert "lora_rank" in json.loads(capsys.readouterr().out)["properties"]
    assert cli.main(["config"]) == 2


def test_nobody_reads() -> None:
    """The reader closes the pipe before anything is written; there is no traceback, and the code says why."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "surogate", "config", "--schema"], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_file_that_is_missing_in_a_real_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "surogate", "sft", "none.yaml"],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("none.yaml: no such file\n") and "Traceback" not in done.stderr
