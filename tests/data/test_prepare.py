"""From files to shards: exact tokens, lengths, reports, refusals, and a cache that is whole or not there."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate.data import (
    DataOptions,
    DatasetSpec,
    Prepared,
    Tokenizer,
    cache,
    encode,
    json_rows,
    prepare,
    readers,
    workers,
)
from surogate.errors import UserError
from tests.data.samples import STYLES, chat, marked, write_rows, write_tokenizer

QA = [chat(f"user: ask {i}", f"assistant: {'word ' * (i % 7)}answer {i}") for i in range(40)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer(STYLES["chatml"].write(tmp_path / "tokenizer"))


def run(tmp_path: Path, tokenizer: Tokenizer, path: Path | str, **changes: Any) -> Prepared:
    spec = {key: changes.pop(key) for key in ("type", "samples", "weight", "fields") if key in changes}
    chosen: dict[str, Any] = {"cache_dir": tmp_path / "cache", "sequence_len": 64, "num_workers": 1, **changes}
    said: list[str] = changes.pop("said", [])
    chosen.pop("said", None)
    return prepare(DataOptions([DatasetSpec(str(path), **spec)], **chosen), tokenizer, said.append)


def rows_of(prepared: Prepared) -> list[tuple[list[int], list[int]]]:
    return [tuple(part.tolist() for part in prepared.train.row(i)) for i in range(prepared.train.rows)]  # type: ignore


def test_shards_hold_the_rows_in_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_rows(tmp_path / "a.jsonl", QA)
    prepared = run(tmp_path, tokenizer, path)
    train = prepared.train
    assert train.rows == 40 and prepared.validation is None
    for i, row in enumerate(QA):
        ids, mask = train.row(i)
        assert ids.dtype == np.int32 and mask.dtype == np.uint8
        assert ids.tolist() == tokenizer.encode(tokenizer.render_chat(row["messages"])).ids
        assert f"⟦{row['messages'][1]['content']}<|im_end|>⟧" in marked(tokenizer, ids, mask)
    assert train.tokens_path.stat().st_size == 4 * train.offsets[-1] == 4 * prepared.report.tokens
    assert train.mask_path.stat().st_size == train.offsets[-1]
    assert np.fromfile(train.directory / "offsets.bin", np.int64).tolist() == train.offsets.tolist()
    assert train.origin(7) == f"{path}:8"
    assert prepared.report.targets == int(np.fromfile(train.mask_path, np.uint8).sum())


def test_text_ends_as_the_tokenizer_ends_texts(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "hello <|endoftext|> world"}])
    special = ("<|endoftext|>", "<s>")
    plain = Tokenizer(write_tokenizer(tmp_path / "1", special=special, eos="<|endoftext|>"))
    ids, mask = run(tmp_path, plain, path, objective="pt").train.row(0)
    assert plain.decode(ids) == "hello <|endoftext|> world<|endoftext|>"
    assert mask.tolist() == [0] + [1] * (len(ids) - 1)
    bos = Tokenizer(write_tokenizer(tmp_path / "2", special=special, eos="<|endoftext|>", bos="<s>", adds_bos=True))
    both, mask = run(tmp_path, bos, path, objective="pt").train.row(0)
    assert both.tolist() == [bos.bos_id, *ids.tolist()] and mask.tolist() == [0] + [1] * len(ids)


def test_prompt_and_completion_are_joined_without_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "Say", "completion": " hello"}])
    ids, mask = run(tmp_path, tokenizer, path).train.row(0)
    assert marked(tokenizer, ids, mask) == "Say⟦ hello<|im_end|>⟧"
    ids, mask = run(tmp_path, tokenizer, path, train_on="all").train.row(0)
    assert mask.tolist() == [0] + [1] * (len(ids) - 1)


def test_pretokenized_rows_pass_unchanged(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"input_ids": [9, 8, 7], "labels": [9, -100, 7]}])
    assert rows_of(run(tmp_path, tokenizer, path)) == [([9, 8, 7], [0, 0, 1])]


@pytest.mark.parametrize(("truncation", "kept"), [("left", slice(-20, None)), ("right", slice(None, 20))])
def test_truncation_cuts_one_side(truncation: str, kept: slice, tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [chat("user: a", "assistant: " + "0 1 2 3 4 5 6 7 8 9 " * 4), chat("user: b", "assistant: c")]
    path = write_rows(tmp_path / "a.jsonl", rows)
    whole = rows_of(run(tmp_path, tokenizer, path, sequence_len=1000))
    cut = run(tmp_path, tokenizer, path, sequence_len=20, truncation=truncation)
    ids, mask = cut.train.row(0)
    assert ids.tolist() == whole[0][0][kept]
    assert mask.tolist() == [0, *whole[0][1][kept][1:]]
    assert cut.report.datasets[0].cut == 1 and rows_of(cut)[1] == whole[1]


def test_long_rows_are_dropped_or_split_as_asked(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_rows(tmp_path / "a.jsonl", [chat("user: a", "assistant: " + "0 1 2 3 4 5 6 7 8 9 " * 9), *QA[:2]])
    said: list[str] = []
    dropped = run(tmp_path, tokenizer, path, said=said)
    assert dropped.train.rows == 2
    assert any(f"left out 1: longer than sequence_len; for example {path}:1 (" in line for line in said)
    split = run(tmp_path, tokenizer, path, truncation="split")
    assert split.train.rows == 3 and split.train.lengths[0] > 64


def test_several_data_sets_follow_one_another(tmp_path: Path, tokenizer: Tokenizer) -> None:
    one = write_rows(tmp_path / "a.jsonl", QA[:3])
    two = write_rows(tmp_path / "b.jsonl", [{"instruction": "i", "output": "o"}] * 2)
    options = DataOptions(
        [DatasetSpec(str(one), weight=2.0), DatasetSpec(str(two))],
        tmp_path / "cache",
        validation_datasets=[DatasetSpec(str(two))],
        num_workers=1,
    )
    prepared = prepare(options, tokenizer, lambda line: None)
    assert [tuple(entry) for entry in prepared.train.sets] == [(0, 3, 2.0), (3, 5, 1.0)]
    assert prepared.train.origin(4) == f"{two}:2"
    assert prepared.validation is not None and prepared.validation.rows == 2
    assert [part.format for part in prepared.report.datasets] == ["conversation", "instruction"]


def test_processes_change_nothing(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "a.jsonl", [*QA, chat("user: no answer")] * 20)
    alone = run(tmp_path, tokenizer, path)
    monkeypatch.setattr(json_rows, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(workers, "_ALONE", 2)
    here = count_encodings(monkeypatch)
    several = run(tmp_path, tokenizer, path, num_workers=2, cache_dir=tmp_path / "other")
    assert not here
    assert rows_of(alone) == rows_of(several)
    assert alone.report == several.report
    assert alone.report.dropped["nothing to train on"].count == 20


def test_long_texts_have_the_ids_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"The fox {i} said: hello wörld 😀,  and\n\n  so on {i * 7919 % 10007}\n" for i in range(400))
    row = chat("user: a", f"assistant: {text}", "user: b", "assistant: c")
    paths = [
        write_rows(tmp_path / "text.jsonl", [{"text": text}]),
        write_rows(tmp_path / "chat.jsonl", [row]),
        tmp_path / "text.txt",
    ]
    paths[2].write_text(text)
    for kind in ("chatml", "mistral"):  # byte-level with a pre-tokenizer, and SentencePiece-like without
        tokenizer = Tokenizer(STYLES[kind].write(tmp_path / kind))
        whole = [rows_of(run(tmp_path, tokenizer, path, truncation="split")) for path in paths]
        with monkeypatch.context() as patch:
            patch.setattr(encode, "LONG_TEXT", 1000)
            patch.setattr(encode, "STRETCH", 500)
            patch.setattr(readers, "SEGMENT", 900)
            other = {"cache_dir": tmp_path / "in stretches", "truncation": "split"}
            assert [rows_of(run(tmp_path, tokenizer, path, **other)) for path in paths] == whole
            for truncation in ("left", "right"):
                long = {"cache_dir": tmp_path / truncation, "truncation": truncation, "sequence_len": 300}
                for path, rows in zip(paths, whole, strict=True):
                    kept = slice(-300, None) if truncation == "left" else slice(300)
                    ids, mask = rows_of(run(tmp_path, tokenizer, path, **long))[0]
                    assert (ids, mask[1:]) == (rows[0][0][kept], rows[0][1][kept][1:])
            with pytest.raises(UserError, match="more than 300 tokens, sequence_len is 300"):
                run(tmp_path, tokenizer, paths[1], sequence_len=300)
            # As training text, a file is read stretch by stretch.
            assert rows_of(run(tmp_path, tokenizer, paths[2], objective="pt", **other)) == whole[2]


def test_vocabulary_larger_than_the_embedding(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_rows(tmp_path / "a.jsonl", [*QA[:2], chat("user: x", "assistant: 😀")])
    largest = max(max(ids) for ids, _ in rows_of(run(tmp_path, tokenizer, path)))
    run(tmp_path, tokenizer, path, vocab_size=largest + 1)
    with pytest.raises(UserError, match=rf"a\.jsonl:\d: token {largest}(.|\n)*ids below {largest}"):
        run(tmp_path, tokenizer, path, vocab_size=largest)


def test_base_model_without_template_names_the_choices(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "base"))
    path = write_rows(tmp_path / "a.jsonl", QA)
    with pytest.raises(UserError, match="no chat template(.|\n)*chat_template to one of alpaca, chatml"):
        run(tmp_path, tokenizer, path)
    prepared = run(tmp_path, tokenizer, path, chat_template="chatml")
    assert prepared.train.rows == 40
    tokenizer.save(tmp_path / "saved")
    assert Tokenizer(tmp_path / "saved").render_chat(QA[0]["messages"]) == tokenizer.render_chat(QA[0]["messages"])
    with pytest.raises(UserError, match="there is no chat template 'chatmll'"):
        run(tmp_path, tokenizer, path, chat_template="chatmll")
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    with pytest.raises(UserError, match=r"broken\.jinja:2: not a valid Jinja template"):
        run(tmp_path, tokenizer, path, chat_template=str(broken))


@pytest.mark.parametrize(
    ("rows", "changes", "words"),
    [
        ([], {}, "the file is empty"),
        ([""], {"type": "text"}, "row is no object"),
        ([{"text": "x"}], {"type": "alpaca"}, "no data format 'alpaca'"),
        ([{"text": "x"}], {"type": "instruction"}, "none of the 1 rows(.|\n)*no field 'instruction'"),
        ([{"text": "x"}] * 3, {"max_invalid_share": 0.0, "type": "conversation"}, "none of the 3 rows"),
        ([{"text": "x"}, *QA[:3]], {"max_invalid_share": 0.0}, "1 of 4 rows cannot be read as conversation"),
        (
            [chat("user: " + "x " * 400, "assistant: y")],
            {"sequence_len": 16},
            "none of the 1 rows(.|\n)*raise sequence_len",
        ),
        (
            [chat("user: " + "x " * 400, "assistant: y")],
            {"sequence_len": 16, "truncation": "right"},
            "cut off by truncation(.|\n)*truncation: left",
        ),
        ([chat("user: " + "x " * 4000, "assistant:  ")], {"sequence_len": 9999}, "tokens are trained"),
        ([chat("user: \ud83d", "assistant: x")], {}, "half of a surrogate pair"),
    ],
)
def test_refusals(rows: list, changes: dict, words: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=words):
        run(tmp_path, tokenizer, path, **changes)
    assert not [p for p in (tmp_path / "cache" / "tokens").iterdir() if p.is_dir()]


def test_blank_lines_alone_are_no_rows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n \n")
    with pytest.raises(UserError, match="there are no rows"):
        run(tmp_path, tokenizer, tmp_path / "a.jsonl")


# The cache


def count_encodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    original = encode.RowEncoder.encode

    def counting(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        return original(self, *arguments)

    monkeypatch.setattr(encode.RowEncoder, "encode", counting)
    return calls


def test_what_changes_tokens_tokenises_again_and_nothing_else(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_encodings(monkeypatch)
    path = write_rows(tmp_path / "a.jsonl", QA)

    def again(**changes: Any) -> bool:
        before = len(calls)
        run(tmp_path, changes.pop("tokenizer", tokenizer), changes.pop("path", path), **changes)
        return len(calls) > before

    assert again()
    assert not again()
    for same in ({"seed": 1}, {"packing": False}, {"validation_split_ratio": 0.5}, {"weight": 2.0}, {"num_workers": 2}):
        assert not again(**same), same
    assert not again(path=write_rows(tmp_path / "copy.jsonl", QA))
    for other in (
        {"sequence_len": 50},
        {"truncation": "right"},
        {"train_on": "all"},
        {"objective": "pt"},
        {"samples": 3},
        {"chat_template_kwargs": {"x": 1}},
        {"fields": {"messages_field": "messages"}},
        {"path": write_rows(tmp_path / "more.jsonl", QA[:-1])},
    ):
        assert again(**other), other
    (tokenizer.directory / "chat_template.jinja").write_text(STYLES["chatml"].template.replace("user", "User"))
    assert not again()  # this tokenizer read its template before
    (tokenizer.directory / "chat_template.jinja").write_text(STYLES["chatml"].template + "{# changed #}")
    assert again(tokenizer=Tokenizer(tokenizer.directory))
    assert again(chat_template="zephyr")
    monkeypatch.setattr(cache, "code_version", lambda: "another version")
    assert again(tokenizer=Tokenizer(tokenizer.directory))


def test_a_change_of_the_file_that_keeps_its_size_is_seen(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_rows(tmp_path / "a.jsonl", [chat("user: a", "assistant: b")])
    old = time.time() - 3600
    os.utime(path, (old, old))  # old enough for its hash to be remembered
    first = rows_of(run(tmp_path, tokenizer, path))
    write_rows(path, [chat("user: a", "assistant: c")])
    assert rows_of(run(tmp_path, tokenizer, path)) != first


@pytest.mark.parametrize("name", ["tokens.bin", "mask.bin", "offsets.bin", "origins.bin", "meta.json"])
def test_a_damaged_shard_is_built_again(name: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_rows(tmp_path / "a.jsonl", QA)
    whole = run(tmp_path, tokenizer, path)
    expected = rows_of(whole)
    file = whole.train.directory / name
    file.write_bytes(file.read_bytes()[:-1])
    assert rows_of(run(tmp_path, tokenizer, path)) == expected


def test_a_run_that_dies_leaves_nothing_half_valid(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_rows(tmp_path / "a.jsonl", QA)
    script = (
        "import os, sys; from pathlib import Path; from surogate.data import *; from surogate.data import shards\n"
        "shards.ShardWriter.finish = lambda *_: os._exit(9)\n"
        "prepare(DataOptions([DatasetSpec(sys.argv[1])], Path(sys.argv[2]), sequence_len=64, num_workers=1),"
        " Tokenizer(sys.argv[3]), print)"
    )
    arguments = [sys.executable, "-c", script, str(path), str(tmp_path / "cache"), str(tokenizer.directory)]
    assert subprocess.run(arguments, capture_output=True).returncode == 9
    tokens = tmp_path / "cache" / "tokens"
    assert len(list(tokens.glob("*.tmp-*"))) == 1
    assert run(tmp_path, tokenizer, path).train.rows == 40
    assert not list(tokens.glob("*.tmp-*"))


def _prepare_elsewhere(tmp_path: Path, path: Path, directory: Path, queue: Any) -> None:
    said: list[str] = []
    prepared = run(tmp_path, Tokenizer(directory), path, said=said)
    queue.put((rows_of(prepared), any(line.startswith("tokenising") for line in said)))


def test_two_runs_at_once_do_the_work_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_rows(tmp_path / "a.jsonl", QA * 50)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=_prepare_elsewhere, args=(tmp_path, path, tokenizer.directory, queue)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    results = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert results[0][0] == results[1][0]
    assert sorted(worked for _, worked in results) == [False, True]


def test_cache_that_cannot_be_written(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_rows(tmp_path / "a.jsonl", QA)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cache cannot be written(.|\n)*cache_dir"):
        run(tmp_path, tokenizer, path, cache_dir=tmp_path / "file" / "cache")


def test_a_full_disk_is_said_so(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_rows(tmp_path / "a.jsonl", QA)
    from surogate.data.shards import ShardWriter

    original = ShardWriter.__enter__

    def onto_full_disk(self: ShardWriter) -> ShardWriter:
        original(self)
        self._files["tokens.bin"].close()
        self._files["tokens.bin"] = open("/dev/full", "wb")
        return self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, "__enter__", onto_full_disk)
        with pytest.raises(UserError, match="no space left"):
            run(tmp_path, tokenizer, path)


def test_a_cached_start_is_light(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_rows(tmp_path / "a.jsonl", QA)
    run(tmp_path, tokenizer, path)
    script = (
        "import sys; from pathlib import Path; from surogate.data import *\n"
        "options = DataOptions([DatasetSpec(sys.argv[1])], Path(sys.argv[2]), sequence_len=64)\n"
        "prepare(options, Tokenizer(sys.argv[3]), print)\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'jinja2', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    arguments = [sys.executable, "-c", script, str(path), str(tmp_path / "cache"), str(tokenizer.directory)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tokens found in the cache" in done.stdout
