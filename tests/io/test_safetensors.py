"""Our reader and writer against the safetensors package; damaged files against the promise of one clear message."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate.errors import UserError
from surogate.io.dtypes import NUMPY_DTYPES, bf16_to_f32
from surogate.io.safetensors_file import SafetensorsFile
from surogate.io.safetensors_writer import array_tensor, write_safetensors, write_sharded
from surogate.io.weights import INDEX, checkpoint_dtype, open_weights

safetensors = pytest.importorskip("safetensors.numpy")
rng = np.random.default_rng(0)
WEIGHTS = {
    "model.embed_tokens.weight": rng.standard_normal((7, 3), np.float32),
    "model.norm.weight": rng.standard_normal(3, np.float32).astype(np.float16),
    "lm_head.weight": rng.integers(0, 1 << 15, (5, 3), np.uint16),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.array(2.5, np.float64),
}


def described() -> list[Any]:
    return [array_tensor(n, a, "bf16" if a.dtype == np.uint16 else None) for n, a in WEIGHTS.items()]


def raw_file(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


# -- writing ----------------------------------------------------------------------------------------------------------


def test_the_package_reads_what_we_write(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    write_safetensors(tmp_path / "x.safetensors", described())
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == WEIGHTS.keys()
    for name, array in WEIGHTS.items():
        if array.dtype == np.uint16:
            assert read[name].dtype == torch.bfloat16
            np.testing.assert_array_equal(read[name].float().numpy(), bf16_to_f32(array))
        else:
            assert read[name].numpy().dtype == array.dtype and read[name].shape == array.shape
            np.testing.assert_array_equal(read[name].numpy(), array)
    with safetensors_open(tmp_path / "x.safetensors") as file:
        assert file.metadata() == {"format": "pt"}


def safetensors_open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, "np")


def test_every_tensor_is_aligned_to_its_element(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", described())
    for entry in SafetensorsFile(tmp_path / "x.safetensors").entries.values():
        assert entry.start % NUMPY_DTYPES[entry.dtype].itemsize == 0


def test_a_tensor_is_asked_for_only_when_the_one_before_is_written(tmp_path: Path) -> None:
    alive: list[str] = []

    def get(name: str) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            alive.append(name)
            return np.zeros(3, np.float32)

        return read

    def tensors() -> Any:
        for name in "abc":
            yield name, "f32", (3,), get(name)
        assert not alive  # the header is made without any data

    write_safetensors(tmp_path / "x.safetensors", tensors())
    assert alive == ["a", "b", "c"]


def test_strided_and_memoryview_data(tmp_path: Path) -> None:
    column = np.arange(12, dtype=np.float32).reshape(4, 3)[:, 1]
    view = memoryview(np.arange(3, dtype=np.int64))
    tensors = [array_tensor("column", column), ("view", "i64", (3,), lambda: view)]
    write_safetensors(tmp_path / "x.safetensors", tensors)
    read = safetensors.load_file(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(read["column"], [1, 4, 7, 10])
    np.testing.assert_array_equal(read["view"], [0, 1, 2])


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, [array_tensor("a", np.ones(2, np.float32))])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="8 bytes for f32"):
        write_safetensors(path, [("a", "f32", (3,), lambda: np.ones(2, np.float32))])
    with pytest.raises(ValueError, match="named 'a'"):
        write_safetensors(path, [array_tensor("a", np.ones(2))] * 2)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_shards_are_read_by_transformers_rules_and_by_us(tmp_path: Path) -> None:
    tensors = [array_tensor(f"t{i}", np.full((4, 8), i, np.float32)) for i in range(5)]  # 128 bytes each
    paths = write_sharded(tmp_path, tensors, max_shard_bytes=300)
    assert [p.name for p in paths] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 640
    for name, shard in index["weight_map"].items():
        assert safetensors.load_file(tmp_path / shard)[name][0, 0] == int(name[1:])
    source = open_weights(tmp_path)
    out = np.empty((4, 8), np.float32)
    source.read_into("t3", out, "f32")
    assert (out == 3).all() and sorted(source.names()) == sorted(index["weight_map"])

    write_sharded(tmp_path, tensors[:2])  # a smaller model takes the place of the larger one
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert open_weights(tmp_path).names() == ["t0", "t1"]


# -- reading ----------------------------------------------------------------------------------------------------------


def test_we_read_what_the_package_writes(tmp_path: Path) -> None:
    arrays = {n: a for n, a in WEIGHTS.items() if a.dtype != np.uint16}
    safetensors.save_file(arrays, tmp_path / "model.safetensors")
    source = open_weights(tmp_path)
    assert set(source.names()) == set(arrays)
    for name, array in arrays.items():
        assert source.shape(name) == array.shape
        typed, raw = np.empty(array.shape, np.float32), np.empty(array.size * 4, np.uint8)
        source.read_into(name, typed, "f32")
        source.read_into(name, raw, "f32")
        np.testing.assert_array_equal(typed, array.astype(np.float32))
        np.testing.assert_array_equal(raw.view(np.float32), typed.reshape(-1))


def test_a_destination_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", described())
    source = open_weights(tmp_path)
    for wrong in (np.empty(6, np.float32), np.empty((6, 3), np.float32)[::2]):
        with pytest.raises(ValueError, match="contiguous"):
            source.read_into("model.norm.weight", wrong, "f32")


def test_checkpoint_dtype_is_that_of_most_elements(tmp_path: Path) -> None:
    for dtype, expected in (("bf16", "bf16"), ("f16", "bf16"), ("f32", "f32")):
        held = np.zeros((64, 64), NUMPY_DTYPES[dtype])
        norms = [array_tensor(f"norm{i}", np.ones(64, np.float32)) for i in range(9)]
        write_safetensors(tmp_path / "model.safetensors", [array_tensor("w", held, dtype), *norms])
        assert checkpoint_dtype(open_weights(tmp_path)) == expected


def test_loading_adds_little_to_the_resident_size(tmp_path: Path) -> None:
    """96 MB of bf16 into 192 MB of f32: beside the destination, a few megabytes."""
    tensor = np.zeros((12, 1 << 22), np.uint16)
    write_safetensors(tmp_path / "model.safetensors", [array_tensor("w", tensor, "bf16")])
    script = """
import resource, sys
import numpy as np
from surogate.io.weights import open_weights
source = open_weights(sys.argv[1])
out = np.ones((12, 1 << 22), np.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
source.read_into("w", out, "f32")
assert not out.any()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 16 << 10  # KiB


# -- damage -----------------------------------------------------------------------------------------------------------


def test_every_truncation_is_found_with_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, described())
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError) as error:
            open_weights(tmp_path)
        assert "model.safetensors" in str(error.value) and "download the file again" in str(error.value)
        if size:
            assert f"{size} bytes found" in str(error.value) and " bytes\n  fix" in str(error.value)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


ATTACKS: dict[str, tuple[Any, bytes, str]] = {
    "offsets beyond the end": ({"a": entry(shape=(4,), offsets=(0, 16))}, bytes(8), "incomplete"),
    "offsets backwards": ({"a": entry(offsets=(8, 0))}, bytes(8), "occupies -8 bytes"),
    "negative": ({"a": entry(offsets=(-8, 0))}, bytes(8), "malformed"),
    "size and shape disagree": ({"a": entry(shape=(3,))}, bytes(8), "occupies 8 bytes"),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), "overlaps"),
    "hole": ({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20), "unused bytes"),
    "too long": ({"a": entry()}, bytes(9), "more than the header describes"),
    "twice": (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}', bytes(8), "names 'a' twice"),
    "unknown dtype": ({"a": entry(dtype="F4")}, bytes(8), "dtype 'F4'"),
    "shape of floats": ({"a": entry(shape=(2.0,))}, bytes(8), "malformed"),
    "no object": ([1, 2], b"", "not a JSON object"),
    "not JSON": (b"\xff\xfe{", b"", "not valid JSON"),
    "deep": (b"[" * 100_000, b"", "not valid JSON"),
    "record is text": ({"a": "x"}, b"", "malformed"),
}


@pytest.mark.parametrize("case", ATTACKS)
def test_broken_headers(case: str, tmp_path: Path) -> None:
    header, data, message = ATTACKS[case]
    with pytest.raises(UserError, match=message) as error:
        SafetensorsFile(raw_file(tmp_path / "x.safetensors", header, data))
    assert "x.safetensors" in str(error.value)


def test_other_files_are_not_taken_for_safetensors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match="not a safetensors file"):
        open_weights(tmp_path)


def test_quantised_weights_are_refused_when_read(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", [array_tensor("w", np.zeros(4, np.int8))])
    source = open_weights(tmp_path)
    assert source.dtype("w") == "i8"
    with pytest.raises(UserError, match="stored as I8"):
        source.read_into("w", np.empty(4, np.float32), "f32")


def sharded(tmp_path: Path) -> dict[str, Any]:
    write_sharded(tmp_path, [array_tensor(n, np.ones(8, np.float32)) for n in "abc"], max_shard_bytes=32)
    document: dict[str, Any] = json.loads((tmp_path / INDEX).read_text())
    return document


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match="names model-00002-of-00003.safetensors, which does not exist"):
        open_weights(tmp_path)


def test_an_index_that_disagrees_with_its_shards(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    index["weight_map"]["b"] = index["weight_map"]["a"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match="'b' in model-00001-of-00003.safetensors, which lacks it"):
        open_weights(tmp_path)
    index["weight_map"]["b"] = "../model.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match="outside the directory"):
        open_weights(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weights": {}}))
    with pytest.raises(UserError, match="no weight_map"):
        open_weights(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": ')
    with pytest.raises(UserError, match=r"index.json:1:16: not valid JSON"):
        open_weights(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    both = [array_tensor(n, np.ones(8, np.float32)) for n in "ab"]
    write_safetensors(tmp_path / "model-00002-of-00003.safetensors", both)
    with pytest.raises(UserError, match="tensor 'a' is also in model-00001"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["pytorch_model.bin"], "save_pretrained"),
        (["x-Q8_0.gguf"], "name the file itself"),
        (["adapter_config.json", "adapter_model.safetensors"], "surogate merge"),
        (["model-00001-of-00002.safetensors"], "without an index"),
        ([], "no weights"),
    ],
)
def test_a_directory_without_weights_says_what_to_do(files: list[str], message: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=message):
        open_weights(tmp_path)
