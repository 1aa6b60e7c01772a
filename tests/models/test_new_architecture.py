"""docs/adding-a-model.md, followed to the letter: its file goes into the folder of models and trains."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import surogate.models
from surogate.adapters.lora import LoraOptions
from surogate.ops.interpret import interpret
from tests.support import Rows, gradient, make_runtime, micro_step

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-model.md"


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The page's example as a file that the package finds."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert code
    (tmp_path / "toy.py").write_text(code.group(1))
    monkeypatch.setattr(surogate.models, "__path__", [*surogate.models.__path__, str(tmp_path)])
    yield importlib.import_module("surogate.models.toy")
    sys.modules.pop("surogate.models.toy", None)


@pytest.mark.parametrize("lora", [None, LoraOptions(rank=2, targets=("query", "up"))])
def test_one_file_is_enough(toy, lora) -> None:
    runtime = make_runtime(toy.TINY, batch=1, sequence_len=16, max_documents=3, lora=lora)
    rng = np.random.default_rng(0)
    for name in runtime.compiled.weights:
        target = runtime.array(name)
        target[...] = rng.normal(size=target.shape) * 0.3
    rows = Rows([[rng.integers(0, 61, 9).tolist(), rng.integers(0, 61, 5).tolist()]], 16)
    arrays = rows.arrays(3)
    loss = micro_step(runtime, arrays, 1.0)

    # The forward graph in float64, and central differences along a random direction of each weight.
    from surogate.compile.compiler import CompileOptions, compile_model
    from surogate.recipes import get_recipe

    options = CompileOptions(1, 16, 3, get_recipe("fp32"), 1, 3, lora, train=False)
    graph = compile_model(toy.build(toy.TINY), options).graphs["eval_step"]
    weights = {s.name: runtime.array(s.name).astype(np.float64) for s in graph.params}

    def forward(changed: dict[str, np.ndarray]) -> float:
        values = interpret(graph, {**arrays, **weights, **changed, "loss": np.zeros(1)})
        return float(values[next(iter(graph.updates.values()))][0])

    assert loss == pytest.approx(forward({}), rel=1e-6)
    checked = 0
    for source in graph.params:
        if not source.trainable:
            continue
        direction = rng.normal(size=source.shape)
        eps = 1e-5
        up, down = (forward({source.name: weights[source.name] + s * eps * direction}) for s in (1, -1))
        slope = float((gradient(runtime, source.name) * direction).sum())
        assert slope == pytest.approx((up - down) / (2 * eps), rel=2e-3, abs=2e-3), source.name
        checked += 1
    assert checked >= 4
