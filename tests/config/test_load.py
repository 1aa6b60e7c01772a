"""What a right configuration becomes: defaults, YAML's scalars, overrides, variables, places, round trip."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from surogate.config import TrainConfig, check_mode, json_schema, load_config, make_config, resolved_yaml
from surogate.config.docs import page
from surogate.config.schema import note, raw_schema
from surogate.errors import UserError

GOOD = "model: m\ndatasets: [{path: d.jsonl}]\n"
R12 = """\
model: Qwen/Qwen3-0.6B
output_dir: ./outputs/qwen3-0.6b-lora-demo
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
sequence_len: 2048
learning_rate: 2.0e-4
num_train_epochs: 3
logging_steps: 10
lora: true
lora_rank: 16
lora_alpha: 32
lora_target_modules: ["q_proj", "k_proj", "v_proj", "o_proj"]
recipe: bf16
datasets:
  - path: "mlabonne/FineTome-100k"
    type: auto
    split: "train"
"""


def load(tmp_path: Path, text: str, *overrides: str, **environment: str) -> TrainConfig:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(str(path), overrides, environment=environment)[0]


def test_the_keys_that_users_already_write(tmp_path: Path) -> None:
    c = load(tmp_path, R12)
    assert (c.model, c.output_dir) == ("Qwen/Qwen3-0.6B", "./outputs/qwen3-0.6b-lora-demo")
    assert (c.effective_batch_size, c.eval_batch_size, c.sequence_len) == (32, 4, 2048)
    assert (c.learning_rate, c.num_train_epochs, c.max_steps) == (2e-4, 3.0, -1)
    assert c.lora and c.lora_target_modules == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert (c.datasets[0].path, c.datasets[0].type, c.datasets[0].split) == ("mlabonne/FineTome-100k", "auto", "train")


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("learning_rate: 2e-4", "learning_rate", 2e-4),
        ("learning_rate: 1", "learning_rate", 1.0),
        ("learning_rate: .5", "learning_rate", 0.5),
        ("seed: 010", "seed", 10),
        ("seed: 0x10", "seed", 16),
        ("lora: yes", "lora", True),
        ("lora: On", "lora", True),
        ("lora: no", "lora", False),
        ("recompute: off", "recompute", "off"),
        ("recompute: no", "recompute", "off"),
        ("recompute: false", "recompute", "off"),
        ("recompute: 'off'", "recompute", "off"),
        ("run_name: 007", "run_name", "007"),
        ("run_name: 2024-01-02", "run_name", "2024-01-02"),
        ("run_name: true", "run_name", "true"),
        ("run_name: ~", "run_name", None),
        ("output_dir: 1.50", "output_dir", "1.50"),
        ("resume_from_checkpoint: yes", "resume_from_checkpoint", True),
        ("resume_from_checkpoint: out/checkpoint-3", "resume_from_checkpoint", "out/checkpoint-3"),
        ("max_steps: -1", "max_steps", -1),
        ("num_train_epochs: 0.25", "num_train_epochs", 0.25),
        ("per_device_eval_batch_size: null", "per_device_eval_batch_size", None),
    ],
)
def test_scalars(tmp_path: Path, line: str, key: str, value: object) -> None:
    found = getattr(load(tmp_path, GOOD + line + "\n"), key)
    assert found == value and type(found) is type(value)


def test_overrides(tmp_path: Path) -> None:
    c = load(
        tmp_path,
        GOOD,
        "learning_rate=1e-4",
        "datasets.0.path=x.jsonl",
        "datasets.0.samples=5",
        "datasets.1.path=y.jsonl",
        "validation_datasets.0.path=v.jsonl",
        "lora=true",
        "lora_target_modules=[q_proj, v_proj]",
        "run_name=007",
        "output_dir=a=b: c # d",
        "model='quoted'",
    )
    assert c.learning_rate == 1e-4
    assert [(d.path, d.samples) for d in c.datasets] == [("x.jsonl", 5), ("y.jsonl", None)]
    assert c.validation_datasets[0].path == "v.jsonl"
    assert c.lora_target_modules == ("q_proj", "v_proj")
    assert (c.run_name, c.output_dir, c.model) == ("007", "a=b: c # d", "quoted")
    assert load(tmp_path, GOOD, "datasets=[{path: 12}]").datasets[0].path == "12"
    assert load(tmp_path, GOOD + "run_name: x\n", "run_name=").run_name is None


def test_later_override_wins_and_mends_the_file(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD + "seed: x\n", "seed=1", "seed=2").seed == 2


def test_lora_can_be_switched_off(tmp_path: Path) -> None:
    assert not load(tmp_path, R12, "lora=false").lora


def test_environment(tmp_path: Path) -> None:
    text = GOOD + "learning_rate: ${LR}\noutput_dir: ${OUT:-here}/$${x}\nrun_name: '${LR}'\n"
    c = load(tmp_path, text, "cache_dir=${OUT:-there}", LR="1e-3")
    assert (c.learning_rate, c.output_dir, c.run_name, c.cache_dir) == (1e-3, "here/${x}", "1e-3", "there")


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load(tmp_path, GOOD + "output_dir: ~/out\n").output_dir == "/home/someone/out"


def test_places(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(GOOD + "lora: true\n")
    config, provenance = load_config(str(path), ["seed=3", "datasets.1.path=x"])
    assert config.where("model") == f"{path}:1:8"
    assert config.where("datasets.0.path") == f"{path}:2:19"
    assert config.where("datasets.0.split") == f"{path}:2:12"  # not given: the entry
    assert config.where("seed") == "command line: seed=3"
    assert config.where("datasets.1.path") == "command line: datasets.1.path=x"
    assert config.where("max_steps") == f"{path}: max_steps"
    assert provenance.overrides == ("seed=3", "datasets.1.path=x")
    assert TrainConfig(model="m", datasets=[{"path": "d"}]).where("seed") == "seed"  # type: ignore[list-item]


@pytest.mark.parametrize(
    "more",
    [
        "",
        "recipe: fp32\n",
        "lr_scheduler_type: wsd\nwsd_decay_ratio: 0.3\n",
        "lora: true\nlora_target_modules: [q_proj]\nrun_name: 007\noutput_dir: '$${x} ：“y”'\n",
        "validation_datasets: [{path: v, samples: 3, text_field: 't'}]\nresume_from_checkpoint: true\nrecompute: off\n",
    ],
)
def test_resolved_yaml_is_read_back_unchanged(tmp_path: Path, more: str) -> None:
    config = load(tmp_path, GOOD + more)
    again = load(tmp_path, resolved_yaml(config))
    assert again == config
    assert set(again.model_fields_set) >= set(config.model_fields_set)


def test_resolved_yaml_of_pretraining_passes_its_own_check(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD)
    check_mode(load(tmp_path, resolved_yaml(config, "pt")), "pt")


def test_mode(tmp_path: Path) -> None:
    check_mode(load(tmp_path, GOOD + "from_scratch: true\n"), "pt")
    with pytest.raises(UserError) as caught:
        check_mode(load(tmp_path, GOOD + "from_scratch: true\n"), "sft")
    assert caught.value.where == f"{tmp_path}/c.yaml:3:15"
    with pytest.raises(UserError) as caught:
        check_mode(load(tmp_path, GOOD + "train_on: last_turn\n"), "pt")
    assert caught.value.where == f"{tmp_path}/c.yaml:3:11"


def test_frozen() -> None:
    config = make_config({"model": "m", "datasets": [{"path": "d"}]})
    with pytest.raises(ValidationError):
        config.seed = 3  # type: ignore[misc]


def test_every_default_obeys_its_own_rule() -> None:
    """A default is not validated when it is used, so validate all of them once."""
    defaults = make_config({"model": "m", "datasets": [{"path": "d"}]}).model_dump()
    del defaults["wsd_decay_ratio"]
    assert make_config(defaults).model_dump()["seed"] == 42


def test_every_key_says_what_it_is() -> None:
    schema = raw_schema()
    for field in [*schema["properties"].values(), *schema["properties"]["datasets"]["items"]["properties"].values()]:
        assert field["description"].endswith((".", "`")) and len(field["description"]) > 8


def test_no_name_of_ours_is_taken_for_a_foreign_one() -> None:
    properties = raw_schema()["properties"]
    foreign = [w for f in properties.values() for w in [*note(f)["also"], *note(f)["instead"]]]
    assert not set(foreign) & set(properties)
    assert len(foreign) == len(set(foreign)), "a foreign name with two answers"


def test_json_schema_is_plain() -> None:
    text = json.dumps(json_schema())
    assert "x-surogate" not in text and "$ref" not in text
    schema = json_schema()
    assert schema["required"] == ["model", "datasets"] and schema["additionalProperties"] is False
    assert schema["properties"]["lora_rank"] == {
        "default": 16,
        "description": "Rank of the adapters.",
        "minimum": 1,
        "title": "Lora Rank",
        "type": "integer",
    }


def test_reference_page_is_current() -> None:
    written = (Path(__file__).parents[2] / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == page(), "run: python -m surogate.config.docs"


def test_quantisation_needs_adapters() -> None:
    base = {"model": "m", "datasets": [{"path": "d.jsonl"}]}
    assert make_config({**base, "lora": True, "quantization": "qlora_bnb"}).quantization == "nf4"
    with pytest.raises(UserError, match="cannot be trained themselves"):
        make_config({**base, "quantization": "nf4"})
