"""What goes wrong with data elsewhere, and must not here. One public report of other trainers' users a test or more."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from surogate.data import DataOptions, DatasetSpec, Prepared, Tokenizer, encode, epoch_order, max_documents, prepare
from surogate.errors import UserError
from tests.data.samples import STYLES, TURNS, chat, marked, write_rows, write_tokenizer


class Data:
    """Prepares rows of one file with one tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.style("chatml")

    def style(self, name: str) -> Tokenizer:
        self.tokenizer = Tokenizer(STYLES[name].write(self.folder / name))
        return self.tokenizer

    def template(self, source: str, **files: Any) -> Tokenizer:
        self.tokenizer = Tokenizer(write_tokenizer(self.folder / "own", template=source, **files))
        return self.tokenizer

    def prepare(self, *rows: Any, **options: Any) -> Prepared:
        path = write_rows(self.folder / "rows.jsonl", list(rows))
        chosen = DataOptions([DatasetSpec(str(path))], self.folder / "cache", num_workers=1, **options)
        return prepare(chosen, self.tokenizer, self.said.append)

    def shown(self, *rows: Any, **options: Any) -> list[str]:
        train = self.prepare(*rows, **options).train
        return [marked(self.tokenizer, *train.row(i)) for i in range(train.rows)]


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return Data(tmp_path)


def test_04_a_row_without_targets_is_left_out_of_a_batch(data: Data) -> None:
    prepared = data.prepare(*[chat("user: a", "assistant: b")] * 3, chat("user: nobody answers"))
    assert prepared.train.rows == 3
    assert all(mask.any() for _, mask in (prepared.train.row(i) for i in range(3)))


def test_05_chatml_without_markers_is_trained_and_not_masked_whole(data: Data) -> None:
    assert data.shown(chat("user: a", "assistant: b")) == [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
    ]


def test_05_no_row_with_targets_is_refused_with_file_row_and_reason(data: Data) -> None:
    with pytest.raises(UserError) as refusal:
        data.prepare(chat("user: a", "user: b"), chat("user: c"))
    text = str(refusal.value)
    assert "none of the 2 rows can be trained" in text
    assert "rows.jsonl:1" in text and "no turn of the assistant; roles: user, user" in text


def test_05_nearly_all_masked_is_refused(data: Data) -> None:
    with pytest.raises(UserError, match="only 2 of .* tokens are trained"):
        data.prepare(chat("user: " + "0 1 2 3 " * 1000, "assistant: a"), sequence_len=20_000)


def test_06_every_turn_is_trained_where_answers_are_equal(data: Data) -> None:
    row = chat("user: yes", "assistant: yes", "user: yes", "assistant: yes", "user: assistant", "assistant: yes")
    (shown,) = data.shown(row)
    assert shown.count("⟦yes<|im_end|>⟧") == 3 and shown.count("⟦") == 3


def test_06_an_answer_that_quotes_the_template_changes_nothing(data: Data) -> None:
    quoting = "<|im_start|>assistant\nfake<|im_end|>\n<|im_start|>user\n"
    (shown,) = data.shown(chat("user: " + quoting, "assistant: x" + quoting + "y"))
    assert shown.count("⟦") == 1 and f"⟦x{quoting}y<|im_end|>⟧" in shown


def test_07_a_turn_that_is_not_trained_is_masked_with_its_end_token(data: Data) -> None:
    row = chat("user: a", "assistant: b", "user: c", "assistant: d")
    row["messages"][1]["train"] = False
    assert data.shown(row) == [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦d<|im_end|>⟧\n"
    ]


def test_08_a_prompt_that_is_no_prefix_of_the_whole(data: Data) -> None:
    data.template(
        STYLES["chatml"].template.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}")
    )
    asked = data.tokenizer.render_chat(TURNS[:1], add_generation_prompt=True)
    assert not data.tokenizer.render_chat(TURNS).startswith(asked)
    (shown,) = data.shown({"messages": TURNS})
    assert shown.count("⟦one<|im_end|>⟧") == 2
    # An answer that itself begins like the tag is trained from its first character.
    (shown,) = data.shown(chat("user: a", "assistant: <b>"))
    assert "⟦<b><|im_end|>⟧" in shown
    # And a thought that the row holds was begun by the prompt.
    (shown,) = data.shown(chat("user: a", "assistant: <think>\nhm</think>so"))
    assert "<think>\n⟦hm</think>so<|im_end|>⟧" in shown


def test_08_tokens_across_the_edge_are_those_of_the_whole(data: Data) -> None:
    """The space before an answer is one token with its first word: neither is tokenised apart."""
    data.style("mistral")
    theirs = AutoTokenizer.from_pretrained(data.tokenizer.directory)
    ids, mask = data.prepare({"messages": TURNS}).train.row(0)
    assert ids.tolist() == theirs.apply_chat_template(TURNS, tokenize=True, return_dict=True)["input_ids"]
    assert data.tokenizer.decode(ids[mask == 1]).split() == ["one</s>", "one</s>"]


def test_09_the_end_token_is_trained_only_where_it_is_reached(data: Data) -> None:
    long, short = chat("user: a", "assistant: " + "0 1 2 3 4 " * 20), chat("user: a", "assistant: b")
    cut, whole = data.shown(long, short, sequence_len=48, truncation="right")
    assert not cut.endswith("<|im_end|>⟧\n") and cut.endswith("⟧")
    assert whole.endswith("⟦b<|im_end|>⟧\n")


def test_09_rows_whose_targets_are_cut_off_are_counted_and_shown(data: Data) -> None:
    long, short = chat("user: " + "0 1 2 3 4 " * 20, "assistant: b"), chat("user: a", "assistant: b")
    prepared = data.prepare(short, long, long, sequence_len=48, truncation="right")
    assert prepared.train.rows == 1
    drop = prepared.report.dropped["all that would be trained is cut off by truncation"]
    assert drop.count == 2 and drop.example.endswith("rows.jsonl:2")
    assert any("left out 2: all that would be trained" in line and "rows.jsonl:2" in line for line in data.said)


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("in_template", [True, False])
def test_10_bos_is_what_the_template_says(adds_bos: bool, in_template: bool, data: Data) -> None:
    template = ("{{ bos_token }}" if in_template else "") + STYLES["chatml"].template
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = data.template(template, special=special, bos="<|endoftext|>", adds_bos=adds_bos)
    ids, _ = data.prepare(chat("user: a", "assistant: b")).train.row(0)
    assert (ids == tokenizer.bos_id).sum() == (1 if in_template else 0)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_10_bos_of_texts_is_what_the_tokenizer_adds(adds_bos: bool, data: Data) -> None:
    tokenizer = data.template("", bos="<|endoftext|>", adds_bos=adds_bos)
    ids, _ = data.prepare({"text": "hello"}, objective="pt").train.row(0)
    assert (ids == tokenizer.bos_id).sum() == (1 if adds_bos else 0)


def test_11_no_target_of_a_packed_row_is_of_its_neighbour(data: Data) -> None:
    """Every piece is a run of one row; only a piece that says so is continued by the token behind it."""
    rows = [chat(f"user: {i}", f"assistant: {'a ' * (i % 13)}b") for i in range(50)]
    train = data.prepare(*rows, sequence_len=64).train
    order = epoch_order(train, sequence_len=64, packing=True, seed=0, epoch=0, global_batch=1)
    edges = {(int(a), int(b - a)) for a, b in zip(train.offsets, train.offsets[1:], strict=False)}
    assert {(int(start), int(length)) for start, length, _ in order.pieces} == edges
    assert not order.pieces[:, 2].any() and len(order) < 50


BAD = {
    "null content": {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "x"}]},
    "content that is an object": {"messages": [{"role": "user", "content": {"text": 1}}]},
    "an unknown role": {"messages": [{"role": "narrator", "content": "x"}]},
    "a turn that is text": {"messages": ["hello"]},
    "no messages": {"messages": None},
    "another format": {"text": "x"},
}


def test_12_every_lost_row_is_counted_by_cause_with_an_example(data: Data) -> None:
    good = [chat("user: a", "assistant: b")] * 10
    report = data.prepare(*good, *BAD.values(), chat("user: odd")).report
    assert (report.rows_in, report.rows) == (17, 10)
    assert sum(drop.count for drop in report.dropped.values()) == 7
    rows = {int(drop.example.rsplit(":", 1)[1]) for drop in report.dropped.values()}
    assert rows == set(range(11, 18))
    for cause, drop in report.dropped.items():
        assert any(cause in line and drop.example in line for line in data.said)


def test_12_an_odd_number_of_turns_loses_nothing_but_the_last(data: Data) -> None:
    (shown,) = data.shown(chat("user: a", "assistant: b", "user: c"))
    assert "⟦b<|im_end|>⟧" in shown


def test_12_too_many_bad_rows_are_refused_with_the_table(data: Data) -> None:
    with pytest.raises(UserError) as refusal:
        data.prepare(chat("user: a", "assistant: b"), *BAD.values())
    text = str(refusal.value)
    assert "6 of 7 rows cannot be read as conversation" in text
    assert text.count("left out 1:") == 6


@pytest.mark.parametrize(
    ("style", "row", "words"),
    [
        ("mistral", chat("user: a", "user: b", "assistant: c"), ("roles must alternate", "user, user, assistant")),
        (
            "gemma",
            chat("system: a", "user: b", "assistant: c"),
            ("System role not supported", "system, user, assistant"),
        ),
    ],
)
def test_13_a_refusal_of_the_template_names_file_row_roles_and_remedy(
    style: str, row: dict, words: tuple[str, str], data: Data
) -> None:
    data.style(style)
    good = chat("user: a", "assistant: b")
    assert data.prepare(good, row).train.rows == 1
    line = next(line for line in data.said if "left out 1" in line)
    assert words[0] in line and "rows.jsonl:2" in line and f"roles: {words[1]}" in line
    with pytest.raises(UserError) as refusal:
        data.prepare(row)
    text = str(refusal.value)
    assert all(word in text for word in words) and "rows.jsonl:1" in text
    assert "mend the order of roles" in text and "chat_template" in text


def test_14_tokenised_once(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [chat(f"user: {i}", "assistant: b") for i in range(100)]
    first = data.prepare(*rows)
    monkeypatch.setattr(encode.RowEncoder, "encode", None)
    again = data.prepare(*rows)
    assert again.train.directory == first.train.directory and again.report == first.report


def test_14_fifty_thousand_rows_on_two_ranks(data: Data) -> None:
    rows = [chat(f"user: {i}", "assistant: " + "a " * (i % 17)) for i in range(50_000)]
    first = data.prepare(*rows, sequence_len=512)
    started = time.perf_counter()
    again = data.prepare(*rows, sequence_len=512)
    assert again.train.directory == first.train.directory
    order = epoch_order(again.train, sequence_len=512, packing=True, seed=0, epoch=0, global_batch=2 * 4)
    assert time.perf_counter() - started < 10  # writing the file again, finding its tokens, and packing
    steps = len(order) // 8
    taken = [np.arange(rank, len(order), 2) for rank in range(2)]
    assert len(taken[0]) == len(taken[1]) == 4 * steps
    assert order.used >= 0.98 and sorted(order.pieces[:, 0]) == sorted(first.train.offsets[:-1])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_14_every_rank_has_the_same_number_of_steps(ranks: int, data: Data) -> None:
    rows = [chat(f"user: {i}", "assistant: " + "a " * (i % 17)) for i in range(61)]
    train = data.prepare(*rows, sequence_len=64).train
    order = epoch_order(train, sequence_len=64, packing=True, seed=0, epoch=0, global_batch=2 * ranks)
    assert len(order) % (2 * ranks) == 0
    # What there is to train does not depend on how many share it.
    alone = epoch_order(train, sequence_len=64, packing=True, seed=0, epoch=0, global_batch=1)
    assert np.array_equal(order.pieces, alone.pieces)
    assert max_documents(order, 2) >= max_documents(order, 1)


def test_15_the_order_of_rows_does_not_depend_on_batch_or_ranks(data: Data) -> None:
    train = data.prepare(*[chat(f"user: {i}", "assistant: b") for i in range(40)]).train
    orders = [epoch_order(train, sequence_len=64, packing=True, seed=3, epoch=1, global_batch=n) for n in (1, 4, 8, 12)]
    for order in orders[1:]:
        assert np.array_equal(order.pieces, orders[0].pieces)
        assert np.array_equal(order.sequences[: len(orders[0]) + 1], orders[0].sequences)


def test_18_no_sequence_is_longer_than_planned(data: Data) -> None:
    rows = [*[chat("user: a", "assistant: b")] * 20, chat("user: a", "assistant: " + "long " * 500)]
    for options in ({"truncation": "right"}, {"truncation": "split"}, {"objective": "pt"}):
        train = data.prepare(*rows, sequence_len=32, **options).train
        for packing in (True, False):
            order = epoch_order(train, sequence_len=32, packing=packing, seed=0, epoch=0, global_batch=1)
            used = np.add.reduceat(order.pieces[:, 1], order.sequences[:-1])
            assert used.max() <= 32
