"""One test for each way to get a configuration wrong: exact place, what was found, and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from surogate.config import ConfigErrors, load_config, make_config
from surogate.errors import UserError

GOOD = "model: m\ndatasets: [{path: d.jsonl}]\n"


def errors(tmp_path: Path, text: str, overrides: list[str] | None = None, **environment: str) -> list[UserError]:
    """Load ``text``, which must fail; places come without the folder."""
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_config(str(path), overrides or [], environment=environment)
    found = caught.value.errors if isinstance(caught.value, ConfigErrors) else [caught.value]
    for error in found:
        error.where = error.where.replace(f"{tmp_path}/", "")
    return found


def only(tmp_path: Path, text: str, overrides: list[str] | None = None, **environment: str) -> UserError:
    found = errors(tmp_path, text, overrides, **environment)
    assert len(found) == 1, [e.render() for e in found]
    return found[0]


# text below GOOD (so its first line is line 3) -> place, part of the message, part of the fix
WRONG = {
    "unknown key, nearest": ("learning_rat: 1e-4", "3:1", "unknown key 'learning_rat'", "learning_rate: 1e-4"),
    "unknown key, far": ("banana: 1", "3:1", "unknown key 'banana'", "leave the line out"),
    "dashes": ("output-dir: x", "3:1", "unknown key 'output-dir'", "write output_dir: x"),
    "capitals": ("Learning_Rate: 1e-3", "3:1", "unknown key 'Learning_Rate'", "write learning_rate: 1e-3"),
    "key of an entry": ("split: train", "3:1", "unknown key 'split'", "in an entry of datasets"),
    "merge key": ("<<: {seed: 1}", "3:1", "unknown key '<<'", "write the keys out"),
    "word for a truth value": ("chat_template_kwargs: {a: no}", "3:24", "a is no, which is", "write false, or"),
    "unknown role": ("train_on: [gpt]", "3:12", "train_on.0 is 'gpt'", ""),
    "text for a number": ("learning_rate: fast", "3:16", "learning_rate is 'fast' (text)", ""),
    "quoted number": ('sequence_len: "512"', "3:15", "sequence_len is '512' (text)", "sequence_len: 512 (without"),
    "underscored number": ("sequence_len: 1_024", "3:15", "'1_024'", "write sequence_len: 1024"),
    "fraction for a whole": ("lora: true\nlora_rank: 2.5", "4:12", "lora_rank is 2.5 (number)", ""),
    "2.0 for a whole": ("seed: 2.0", "3:7", "seed is 2.0 (number)", "write seed: 2"),
    "truth value for a number": ("seed: true", "3:7", "seed is true (truth value)", ""),
    "number for a truth value": ("lora: 1", "3:7", "lora is 1 (whole number)", ""),
    "quoted truth value": ("lora: 'yes'", "3:7", "lora is 'yes' (text)", ""),
    "list for a number": ("seed: [1]", "3:7", "seed is a list", ""),
    "mapping for text": ("output_dir: {a: b}", "3:13", "output_dir is a mapping", ""),
    "nothing": ("seed:", "3:6", "seed is nothing", "leave the line out"),
    "empty text": ("output_dir: ''", "3:13", "output_dir is '' (text)", ""),
    "too small": ("sequence_len: 1", "3:15", "sequence_len is 1", ""),
    "zero batch": ("per_device_train_batch_size: 0", "3:30", "per_device_train_batch_size is 0", ""),
    "negative": ("weight_decay: -0.1", "3:15", "weight_decay is -0.1", ""),
    "infinite": ("learning_rate: .inf", "3:16", "learning_rate is .inf", ""),
    "not a number": ("learning_rate: .nan", "3:16", "learning_rate is .nan", ""),
    "beta of one": ("adam_beta2: 1.0", "3:13", "adam_beta2 is 1.0", ""),
    "near choice": ("lr_scheduler_type: cosin", "3:20", "'cosin'", "write lr_scheduler_type: cosine"),
    "recompute true": ("recompute: true", "3:12", "recompute is true", ""),
    "text for a list": (
        "lora: true\nlora_target_modules: q_proj,v_proj",
        "4:22",
        "'q_proj,v_proj'",
        "[q_proj, v_proj]",
    ),
    "all for all-linear": ("lora: true\nlora_target_modules: all", "4:22", "'all'", "lora_target_modules: all-linear"),
    "empty list": ("lora: true\nlora_target_modules: []", "4:22", "an empty list", ""),
    "number in a list": ("lora: true\nlora_target_modules: [q_proj, [k]]", "4:31", "is a list", ""),
    "fp8_hybrid": ("recipe: fp8_hybrid", "3:9", "'fp8_hybrid'", "not in this version"),
    "fp8-hybrid": ("recipe: fp8-hybrid", "3:9", "'fp8-hybrid'", "not in this version"),
    "nvfp4": ("recipe: nvfp4", "3:9", "'nvfp4'", "not in this version"),
    "paged optimizer": ("optim: paged_adamw_8bit", "3:8", "'paged_adamw_8bit'", "write optim: adamw_8bit"),
    "HF's optimizer": ("optim: adamw_torch", "3:8", "'adamw_torch'", "write optim: adamw"),
    "max_steps 0": ("max_steps: 0", "3:12", "nothing would be trained", ""),
    "two warm-ups": ("warmup_steps: 3\nwarmup_ratio: 0.1", "4:15", "both warmup_steps (3) and warmup_ratio (0.1)", ""),
    "constant with warm-up": (
        "lr_scheduler_type: constant\nwarmup_steps: 3",
        "4:15",
        "warmup_steps would do nothing",
        "constant_with_warmup",
    ),
    "wsd without wsd": ("wsd_decay_ratio: 0.2", "3:18", "would do nothing", "lr_scheduler_type: wsd"),
    "wsd too long": ("lr_scheduler_type: wsd\nwsd_decay_ratio: 0.9\nwarmup_ratio: 0.2", "4:18", "is 1.1", ""),
    "constant with floor": ("lr_scheduler_type: constant\nmin_lr_ratio: 0.1", "4:15", "would do nothing", ""),
    "nothing to evaluate": ("eval_steps: 10", "3:13", "nothing to evaluate on", "validation_split_ratio: 0.05"),
    "two validations": (
        "validation_split_ratio: 0.1\nvalidation_datasets: [{path: v}]",
        "3:25",
        "both validation_datasets",
        "",
    ),
    "LoRA keys alone": ("lora_rank: 8", "3:12", "lora_rank is given and lora is not", "lora: true"),
    "scratch with LoRA": ("lora: true\nfrom_scratch: true", "4:15", "random weights", ""),
    "fp32 master": ("recipe: fp32\nmaster_weights: true", "4:17", "would do nothing", ""),
    "duplicate": ("seed: 1\nseed: 2", "4:1", "the key 'seed' is given twice; the first is in line 3", "leave one"),
    "tag": ("run_name: !!python/name:os.system x", "3:11", "the tag", "delete it"),
    "no space after colon": ("seed:3", "3:6", "no space after the colon", "seed: 3"),
    "open quote": ("run_name: 'abc\nseed: 3", "3:11", "never closed", "closing quote"),
    "open bracket": ("lora_target_modules: [q_proj\nseed: 3", "4:5", "found", "close the bracket"),
    "two colons": ("run_name: a: b", "3:12", "a second 'key:'", "in quotes"),
    "indentation": ("lora: true\n  seed: 3", "4:7", "a second 'key:'", "indent"),
    "unset variable": ("output_dir: ${NOWHERE}/x", "3:13", "NOWHERE is not set", "export NOWHERE="),
    "no variable": ("output_dir: ${a b}", "3:13", "names no environment variable", "$${"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_value(tmp_path: Path, case: str) -> None:
    text, place, what, fix = WRONG[case]
    error = only(tmp_path, GOOD + text + "\n")
    assert error.where == f"c.yaml:{place}", error.render()
    assert what in error.what
    assert fix in error.fix


FOREIGN = {
    "base_model": ("x", "model: x"),
    "model_name_or_path": ("x", "model: x"),
    "micro_batch_size": ("4", "per_device_train_batch_size: 4"),
    "cutoff_len": ("2048", "sequence_len: 2048"),
    "max_seq_length": ("2048", "sequence_len: 2048"),
    "lora_r": ("8", "lora_rank: 8"),
    "lora_target": ("all", "lora_target_modules: all"),
    "num_epochs": ("3", "num_train_epochs: 3"),
    "epochs": ("3", "num_train_epochs: 3"),
    "lr": ("1e-4", "learning_rate: 1e-4"),
    "optimizer": ("adamw", "optim: adamw"),
    "bf16": ("true", "recipe: bf16"),
    "fp16": ("true", "recipe: bf16"),
    "gradient_checkpointing": ("true", "recompute: block"),
    "packing": ("true", "sample_packing: true"),
    "finetuning_type": ("lora", "lora: true"),
    "adapter": ("lora", "lora: true"),
    "val_set_size": ("0.1", "validation_split_ratio: 0.1"),
    "train_on_inputs": ("false", "train_on: assistant"),
    "mask_history": ("true", "train_on: last_turn"),
    "template": ("qwen", "chat_template: qwen"),
    "preprocessing_num_workers": ("4", "dataset_num_workers: 4"),
    "dataset": ("x", "datasets: [{path:"),
    "eval_strategy": ("steps", "eval_steps: STEPS"),
    "load_in_4bit": ("true", "quantization: nf4"),
    "load_in_8bit": ("true", "not in this version"),
    "flash_attention": ("true", "leave the line out"),
    "deepspeed": ("ds.json", "not in this version"),
    "report_to": ("wandb", "events.jsonl"),
    "wandb_project": ("x", "events.jsonl"),
    "dataset_text_field": ("content", "text_field: content in an entry of datasets"),
}


@pytest.mark.parametrize("key", FOREIGN)
def test_foreign_key_is_answered_by_ours(tmp_path: Path, key: str) -> None:
    value, fix = FOREIGN[key]
    error = only(tmp_path, f"{GOOD}{key}: {value}\n")
    assert error.where == "c.yaml:3:1"
    assert error.what == f"unknown key '{key}'"
    assert fix in error.fix


def test_foreign_switch_that_is_off_needs_no_key(tmp_path: Path) -> None:
    for line in ("gradient_checkpointing: false", "bf16: false", "eval_strategy: 'no'"):
        assert only(tmp_path, f"{GOOD}{line}\n").fix == "leave the line out"
    assert only(tmp_path, f"{GOOD}finetuning_type: full\n").fix == "write lora: false"


ENTRIES = {
    "unknown key": ("- path: d\n    splitt: train", "3:5", "unknown key 'splitt'", "write split: train"),
    "foreign key": ("- path: d\n    field_output: a", "3:5", "unknown key 'field_output'", "output_field: a"),
    "top-level key": ("- path: d\n    sequence_len: 3", "3:5", "unknown key 'sequence_len'", "at the top level"),
    "no path": ("- split: train", "2:5", "the key 'path' is missing", "add path: data.jsonl"),
    "text entry": ("- d.jsonl", "2:5", "datasets.0 is 'd.jsonl' (text)", "write - path: d.jsonl"),
    "sharegpt": ("- path: d\n    type: sharegpt", "3:11", "no data format 'sharegpt'", "type: conversation"),
    "axolotl's chat_template": ("- path: d\n    type: chat_template", "3:11", "no data format", "type: conversation"),
    "wrong samples": ("- path: d\n    samples: many", "3:14", "samples is 'many' (text)", ""),
    "duplicate": ("- path: d\n    path: e", "3:5", "'path' is given twice; the first is in line 2", ""),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_wrong_entry(tmp_path: Path, case: str) -> None:
    text, place, what, fix = ENTRIES[case]
    error = only(tmp_path, f"datasets:\n  {text}\nmodel: m\n")
    assert error.where == f"c.yaml:{place}", error.render()
    assert what in error.what
    assert fix in error.fix


def test_datasets_of_another_shape(tmp_path: Path) -> None:
    error = only(tmp_path, "model: m\ndatasets: d.jsonl\n")
    assert (error.where, error.fix) == ("c.yaml:2:11", "write datasets: [{path: d.jsonl}]")
    error = only(tmp_path, "model: m\ndatasets:\n  path: d.jsonl\n")
    assert error.where == "c.yaml:3:3" and "put '- ' before" in error.fix
    error = only(tmp_path, "model: m\ndatasets: []\n")
    assert error.where == "c.yaml:2:11" and "an empty list" in error.what


def test_missing_keys(tmp_path: Path) -> None:
    found = errors(tmp_path, "seed: 3\n")
    assert [e.where for e in found] == ["c.yaml", "c.yaml"]
    assert [e.fix for e in found] == ["add model: Qwen/Qwen3-0.6B", "add datasets: [{path: data.jsonl}]"]


def test_all_errors_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    found = errors(tmp_path, "seed: x\nlora_r: 3\nmodel: m\nsequence_len: 0\ndatasets: [{path: d, foo: 1}]\n")
    assert [e.where.split(":", 1)[1] for e in found] == ["1:7", "2:1", "4:15", "5:22"]
    message = ConfigErrors(found).render()
    assert message.count("\n  fix: ") >= 2 and "unknown key 'foo'" in message


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("", "", "the file is empty"),
        ("# nothing\n", "", "the file is empty"),
        ("- a\n", ":1:1", "found a list"),
        ("hello\n", ":1:1", "found text"),
        ("model:m\n", ":1:7", "no space after the colon"),
        ("a: 1\n---\nb: 2\n", ":2:1", "a second document"),
        ("a: \x07\n", ":1:4", "U+0007"),
        ("a: &x [*x]\n", ":1:4", "aliases that contain one another"),
        ("? [a]\n: b\n", ":1:3", "a key that is no word"),
    ],
)
def test_no_mapping(tmp_path: Path, text: str, place: str, what: str) -> None:
    error = only(tmp_path, text)
    assert error.where == f"c.yaml{place}"
    assert what in error.what


def test_aliases_that_explode(tmp_path: Path) -> None:
    levels = "\n".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 9))
    assert "aliases" in only(tmp_path, f"l0: &l0 [x]\n{levels}\n").what


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_config(str(tmp_path / "none.yaml"))
    assert caught.value.where == f"{tmp_path}/none.yaml" and caught.value.what == "no such file"
    with pytest.raises(UserError, match="cannot be read"):
        load_config(str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"model: m\nrun_name: caf\xe9\n")
    with pytest.raises(UserError) as caught:
        load_config(str(tmp_path / "latin.yaml"))
    assert caught.value.where == f"{tmp_path}/latin.yaml:2" and "0xe9 is not UTF-8" in caught.value.what


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("seed", "an override without '='"),
        ("=3", "an override without '='"),
        ("sed=3", "unknown key 'sed'"),
        ("seed=x", "seed is 'x' (text)"),
        ("datasets.2.path=x", "'datasets.2' is no place in a list of 1"),
        ("datasets.first.path=x", "'datasets.first' is no place"),
        ("model.name=x", "goes into something that is no list and no mapping"),
        ("datasets.0.pth=x", "unknown key 'pth'"),
        ("lora_target_modules=[q_proj", "found '<stream end>'"),
    ],
)
def test_wrong_override(tmp_path: Path, override: str, what: str) -> None:
    error = only(tmp_path, GOOD, [override])
    assert error.where.startswith("command line")
    assert what in error.what


def test_override_pasted_from_a_page(tmp_path: Path) -> None:
    error = only(tmp_path, GOOD, ["lora_target_modules=[“q_proj”]"])
    assert 'lora_target_modules=["q_proj"]' in error.fix or '["q_proj"]' in error.fix


def test_python_values_get_the_same_messages() -> None:
    with pytest.raises(ConfigErrors) as caught:
        make_config({"model": "m", "datasets": [{"path": "d"}], "lora_r": 3, "seed": "x"})
    assert {e.where for e in caught.value.errors} == {"lora_r", "seed"}
