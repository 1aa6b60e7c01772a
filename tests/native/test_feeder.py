"""The feeder against a plain-Python reading of docs/architecture.md, "Tokens"."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate import _native


def write_shard(folder: Path, tokens: np.ndarray, mask: np.ndarray) -> tuple[str, str]:
    tokens.astype("<i4").tofile(folder / "tokens.bin")
    mask.astype(np.uint8).tofile(folder / "mask.bin")
    return str(folder / "tokens.bin"), str(folder / "mask.bin")


def oracle(tokens, mask, pieces, sequences, first: int, batch: int, length: int, documents: int, pad: int) -> dict:
    """One micro-batch, token by token."""
    ids, targets, positions, bounds = [], [], [], [0]
    for s in range(first, first + batch):
        start_of_row = len(ids)
        for start, n, continues in pieces[sequences[s] : sequences[s + 1]]:
            for i in range(n):
                at = start + i
                ids.append(int(tokens[at]))
                positions.append(i)
                has_next = i + 1 < n or continues
                targets.append(int(tokens[at + 1]) if has_next and mask[at + 1] else -100)
            bounds.append(len(ids))
        rest = length - (len(ids) - start_of_row)
        if rest:
            ids += [pad] * rest
            targets += [-100] * rest
            positions += range(rest)
            bounds.append(len(ids))
    bounds += [batch * length] * (documents + 1 - len(bounds))
    return {"ids": ids, "targets": targets, "positions": positions, "cu_seqlens": bounds}


@st.composite
def orders(draw):
    """Documents, cut into pieces, laid into sequences with room left over here and there."""
    length = draw(st.integers(1, 12))
    lengths = draw(st.lists(st.integers(1, 25), min_size=1, max_size=12))
    total = sum(lengths)
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    tokens, mask = rng.integers(0, 1000, total), rng.random(total) < 0.6
    pieces, at = [], 0
    for n in lengths:
        for start in range(0, n, length):
            size = min(length, n - start)
            pieces.append((at + start, size, int(start + size < n)))
        at += n
    pieces = [pieces[i] for i in rng.permutation(len(pieces))]
    sequences, used = [0], 0
    for i, (_, size, _) in enumerate(pieces):
        if used + size > length or (used and rng.random() < 0.3):
            sequences.append(i)
            used = 0
        used += size
    sequences.append(len(pieces))
    batch = draw(st.integers(1, 4))
    sequences += [len(pieces)] * (-(len(sequences) - 1) % batch)
    return tokens, mask, np.array(pieces, np.int64), np.array(sequences, np.int64), batch, length


@given(orders())
@settings(deadline=None, max_examples=120)
def test_every_micro_batch(tmp_path_factory, order) -> None:
    tokens, mask, pieces, sequences, batch, length = order
    files = write_shard(tmp_path_factory.mktemp("shard"), tokens, mask)
    documents = batch * (length + 1)
    feeder = _native.Feeder(*files, pieces, sequences, batch, length, documents, 7)
    for first in range(0, len(sequences) - 1, batch):
        found = feeder.next()
        expected = oracle(tokens, mask, pieces.tolist(), sequences, first, batch, length, documents, 7)
        assert {n: v.tolist() for n, v in found.items()} == expected
        assert feeder.cursor == first + batch
    with pytest.raises(IndexError):
        feeder.next()


def small(folder: Path, **changes):
    files = write_shard(folder, np.arange(40), np.ones(40))
    pieces = np.array([[i * 5, 5, 0] for i in range(8)], np.int64)
    arguments = {
        "tokens": files[0], "mask": files[1], "pieces": pieces, "sequences": np.arange(9, dtype=np.int64), "batch": 2,
        "sequence_len": 6, "max_documents": 4, "pad_id": 0,
    }  # fmt: skip
    return _native.Feeder(**(arguments | changes))


def test_a_cursor_goes_on_where_it_stood(tmp_path) -> None:
    whole = small(tmp_path)
    batches = [whole.next() for _ in range(4)]
    resumed = small(tmp_path, cursor=4)
    for expected in batches[2:]:
        found = resumed.next()
        assert all((found[n] == expected[n]).all() for n in found)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": "/nowhere/tokens.bin"}, "No such file"),
        ({"tokens": "/"}, "not a file|Is a directory"),
        ({"pieces": np.array([[38, 5, 0]] * 8, np.int64)}, "outside the shard"),
        ({"pieces": np.array([[35, 5, 1]] * 8, np.int64)}, "continues behind"),
        ({"pieces": np.array([[0, 0, 0]] * 8, np.int64)}, "outside the shard"),
        ({"sequence_len": 4}, "more than 4"),
        ({"max_documents": 3}, "more than 3 documents"),
        ({"sequences": np.array([0, 8], np.int64)}, "whole micro-batches"),
        ({"sequences": np.array([0, 3, 2, 8, 8], np.int64), "sequence_len": 40}, "must not fall"),
        ({"sequences": np.array([0, 1, 2], np.int64)}, "number of pieces"),
        ({"sequences": np.array([0, 99, 8], np.int64), "sequence_len": 500}, "pass the number of pieces"),
        ({"pieces": np.arange(24, dtype=np.int64)}, r"shape \[n, 3\]"),
        ({"pieces": np.zeros((3, 8), np.int64)}, r"shape \[n, 3\]"),
        ({"sequence_len": 2**31, "batch": 1}, "more than 2"),
        ({"cursor": 3}, "no boundary"),
        ({"cursor": -2}, "no boundary"),
        ({"cursor": 10}, "no boundary"),
        ({"pad_id": -1}, "pad_id -1"),
        ({"pad_id": 40, "vocab_size": 40}, "pad_id 40"),
        ({"batch": 0}, "at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        small(tmp_path, **changes)


def test_a_truncated_shard_is_refused(tmp_path) -> None:
    files = write_shard(tmp_path, np.arange(40), np.ones(39))
    with pytest.raises(ValueError, match="do not belong together"):
        _native.Feeder(*files, np.array([[0, 5, 0]], np.int64), np.array([0, 1], np.int64), 1, 6, 2, 0)


def test_a_token_outside_the_vocabulary_is_an_error_where_it_would_be_used(tmp_path) -> None:
    assert small(tmp_path, vocab_size=40).next()["ids"].max() == 9
    feeder = small(tmp_path, vocab_size=30)  # tokens 0 to 39: the fourth micro-batch begins with 30
    for _ in range(3):
        assert feeder.next()["ids"].max() < 30
    with pytest.raises(ValueError, match="token 30 of the shard is 30, outside a vocabulary of 30"):
        feeder.next()
    assert feeder.cursor == 6


def test_a_target_behind_a_piece_is_checked_too(tmp_path) -> None:
    pieces = np.array([[0, 5, 1]], np.int64)
    order = {"pieces": pieces, "sequences": np.array([0, 1], np.int64), "batch": 1, "vocab_size": 5}
    with pytest.raises(ValueError, match="token 5 of the shard is 5"):
        small(tmp_path, **order).next()


def test_several_takers_share_one_order(tmp_path) -> None:
    """Every micro-batch goes to exactly one of them."""
    n = 400
    files = write_shard(tmp_path, np.arange(n), np.ones(n))
    pieces = np.array([[i, 1, 0] for i in range(n)], np.int64)
    feeder = _native.Feeder(*files, pieces, np.arange(n + 1, dtype=np.int64), 1, 1, 2, 0)
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda _: int(feeder.next()["ids"][0]), range(n)))
    assert sorted(taken) == list(range(n)) and feeder.cursor == n
