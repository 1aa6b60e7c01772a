"""``debug`` and ``deterministic``: what they find, and that they change nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from surogate.config import make_config
from surogate.cuda import Gpu
from surogate.errors import TrainingFailed, UserError
from surogate.train.setup import Device, compile_config, open_model
from tests.train.support import config_for, same_files, train, write_model, write_rows

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen3")


def test_a_nan_is_traced_to_its_layer(tmp_path, rows) -> None:
    from safetensors.torch import load_file, save_file

    broken = write_model(tmp_path / "model", "qwen3")
    file = broken / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(weights, file, {"format": "pt"})
    base = config_for(tmp_path, broken, rows, max_steps=1)
    with pytest.raises(TrainingFailed, match="debug: check_nan"):
        train(base)
    where = (
        r"matmul of model\.layers\.1\.mlp\.down_proj, forward pass \(micro_step, instruction \d+\): result 0 has a NaN"
    )
    with pytest.raises(TrainingFailed, match=where):
        train({**base, "debug": "check_nan"})


@pytest.mark.parametrize("change", [{"debug": "eager"}, {"debug": "check_nan"}, {"deterministic": True}], ids=str)
def test_numbers_stay_the_same(tmp_path, model, rows, change) -> None:
    found = [train(config_for(tmp_path / str(i), model, rows, max_steps=2, **c)) for i, c in enumerate(({}, change))]
    assert [h["loss"] for h in found[0].history] == [h["loss"] for h in found[1].history]
    assert same_files(found[0].result, found[1].result)


def _compiled(tmp_path, model, rows, sm: int, **changes):
    config = make_config(config_for(tmp_path, model, rows, device="cuda", **changes))
    files = open_model(config, with_weights=False)
    return compile_config(config, files, Device(Gpu(0, "some GPU", sm, 100, 16 << 30)), max_documents=5)


def test_deterministic_attention_is_compiled_and_planned(tmp_path, model, rows) -> None:
    plain, fixed = (
        [i for i in _compiled(tmp_path, model, rows, 90, deterministic=d).programs["micro_step"].instructions]
        for d in (False, True)
    )
    for a, b in zip(plain, fixed, strict=True):
        if a.op == "attention_backward":
            assert b.attrs["deterministic"] and "deterministic" not in a.attrs
            # dP of every document and head, in bf16
            assert b.workspace.shape[0] > max(a.workspace.shape[0], 2 * 5 * 6 * 128 * 128)
    assert [i.op for i in plain] == [i.op for i in fixed]


def test_deterministic_is_refused_where_cudnn_has_it_not(tmp_path, model, rows) -> None:
    for sm in (80, 86, 89, 120, 121):
        with pytest.raises(UserError, match="same bits each time") as found:
            _compiled(tmp_path, model, rows, sm, deterministic=True)
        assert found.value.where == "deterministic" and "recipe: fp32" in found.value.fix
    _compiled(tmp_path, model, rows, 80, deterministic=True, recipe="fp32")


def test_the_engine_looks_at_results_alone() -> None:
    """A NaN between the rows of a result is none of it; one in an operand that disappears is not found."""
    from surogate import _native

    engine = _native.Engine("cpu", 1, config="check_nan=1")
    engine.allocate("device", 4096)
    memory = engine.memory("device", 0, 4096)
    x = np.array([[1, 2, np.nan, 3], [4, 5, np.nan, 6]], np.float32)
    memory[: x.nbytes] = x.view(np.uint8).reshape(-1)
    window, whole = ("device", 0, "f32", (2, 2), (4, 1)), ("device", 0, "f32", (2, 3), (4, 1))
    results = {
        "good": (window, ("device", 256, "f32", (2, 2), (2, 1))),
        "bad": (whole, ("device", 512, "bf16", (2, 3), (3, 1))),
    }
    for name, (source, target) in results.items():
        engine.load(name, [("copy", [source], [target], None, {}, "compute", [], -1)], {}, 0)
    engine.run("good")
    with pytest.raises(RuntimeError, match=r"bad, instruction 0 \(copy\): result 0 has a NaN"):
        engine.run("bad")
    with pytest.raises(ValueError, match="check_nan=0 or check_nan=1"):
        _native.Engine("cpu", 1, config="eager=1")
