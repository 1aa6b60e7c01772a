"""A batch goes through the model in passes of whole sequences: less memory, the same training."""

from __future__ import annotations

from pathlib import Path

import pytest

from surogate.config import make_config
from surogate.train.setup import Device, compile_config, open_model, pass_batch
from tests.train.support import config_for, same_files, train, write_model, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("batch", "sequence_len", "sequences"),
    [(4, 512, 2), (8, 512, 2), (1, 64, 1), (2, 2048, 1), (16, 100, 16), (16, 128, 8), (3, 512, 3), (7, 1024, 1)],
)
def test_a_pass_is_the_fewest_sequences_that_keep_the_processor_busy(
    tmp_path: Path, batch: int, sequence_len: int, sequences: int
) -> None:
    changes = {"per_device_train_batch_size": batch, "sequence_len": sequence_len}
    config = make_config(config_for(tmp_path, tmp_path, tmp_path, **changes))
    assert pass_batch(config, Device()) == sequences


def test_a_batch_in_passes_trains_as_the_same_batch_accumulated(tmp_path: Path, model: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", rows=60)
    results = []
    for batch, accumulation in ((4, 1), (2, 2)):
        folder = tmp_path / str(batch)
        changes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        config = config_for(folder, model, rows, sequence_len=512, sample_packing=False, max_steps=2, **changes)
        results.append(train(config).result)
    assert same_files(*results)


def test_activations_do_not_grow_with_the_batch(tmp_path: Path, model: Path) -> None:
    sizes = []
    for batch in (2, 8):
        config = make_config(config_for(tmp_path, model, tmp_path, sequence_len=512, per_device_train_batch_size=batch))
        compiled = compile_config(config, open_model(config, with_weights=False), Device(), max_documents=16)
        sizes.append(compiled.memory.size("device"))
    assert sizes[0] == sizes[1]
