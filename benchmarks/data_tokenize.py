"""Tokenising: ours beside ``datasets.map`` with transformers' fast tokenizer; and the memory it takes.

    python benchmarks/data_tokenize.py speed  --output benchmarks/results/data-tokenize-speed.json
    python benchmarks/data_tokenize.py memory --output benchmarks/results/data-tokenize-memory.json

``speed``: tokens/s of both with the same number of processes, on rows of chat (chat template and assistant mask: theirs
by ``apply_chat_template(return_dict=True, return_assistant_tokens_mask=True)`` on batches, with a template that has
generation marks) and on rows of raw text. The sides take turns; medians. Each measurement is a fresh process and begins
when libraries are imported. Processor seconds of all processes are there too: on a machine that others use they tell
more. Theirs is ``map`` alone, rows already in Arrow; ours is all of it, from the JSON Lines file
to shards on disk. ``bound`` is the ``tokenizers`` library alone on the same texts, in one process and thread.
Rows are made of paragraphs of the Python standard library's sources: real words, the same on every machine.

``memory``: peak resident memory of all processes together while files of these sizes are tokenised: a text file
(``surogate pt``), one JSON list, one JSON row. ``rss`` counts pages that processes share, such as the code of
libraries and the file that is read, in each of them; ``private`` leaves them out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
)
SIDES = ("surogate", "datasets")


def paragraphs() -> list[str]:
    """Paragraphs of the standard library's sources, in a fixed order."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if not {"site-packages", "test"} & set(path.parts):
            text = path.read_text("utf-8", "ignore")
            found += [part.strip("\n") for part in text.split("\n\n") if 20 < len(part) < 1500]
    return found


def chats(megabytes: float) -> Iterator[dict[str, Any]]:
    """Conversations of one to three questions below one system turn."""
    parts, rng, size = paragraphs(), random.Random(0), 0
    while size < megabytes * 1e6:
        messages = [{"role": "system", "content": "You are a helpful assistant. Say where you are not sure."}]
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            messages.append({"role": "user", "content": rng.choice(parts)})
            answer = "\n\n".join(rng.choice(parts) for _ in range(rng.randint(1, 3)))
            messages.append({"role": "assistant", "content": answer})
        size += sum(len(m["content"]) + 40 for m in messages)
        yield {"messages": messages}


def texts(megabytes: float) -> Iterator[dict[str, Any]]:
    """Documents of some thousand characters."""
    parts, rng, size = paragraphs(), random.Random(1), 0
    while size < megabytes * 1e6:
        text = "\n\n".join(rng.choice(parts) for _ in range(rng.randint(2, 20)))
        size += len(text) + 14
        yield {"text": text}


WORKLOADS = {"chat": chats, "text": texts}


def write_rows(path: Path, workload: str, megabytes: float) -> None:
    """Write a workload as JSON Lines."""
    with path.open("w") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in WORKLOADS[workload](megabytes))


class Stopwatch:
    """Seconds, and processor seconds of this process and of those that it started and that have ended."""

    def __init__(self) -> None:
        self.started, self.used = time.perf_counter(), self._used()

    @staticmethod
    def _used() -> float:
        usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    def stop(self) -> dict[str, float]:
        return {"seconds": time.perf_counter() - self.started, "processor_seconds": self._used() - self.used}


# The two sides: each prints one JSON object


def ours(path: Path, workload: str, tokenizer: Path, processes: int) -> dict[str, float]:
    """File to shards, by ``surogate.data.prepare``."""
    from surogate.data import DataOptions, DatasetSpec, Tokenizer, prepare

    with tempfile.TemporaryDirectory() as scratch:
        template = Path(scratch) / "marked.jinja"
        template.write_text(MARKED)
        options = DataOptions(
            [DatasetSpec(str(path))], Path(scratch) / "cache", sequence_len=1 << 20, num_workers=processes,
            chat_template=str(template), objective="pt" if workload == "text" else "sft",
        )  # fmt: skip
        watch = Stopwatch()
        report = prepare(options, Tokenizer(tokenizer), lambda line: None).report
        spent = watch.stop()
    # Ours ends every document of raw text with EOS, and its first token is no target.
    return {**spent, "rows": report.rows, "tokens": report.tokens, "targets": report.targets}


def theirs(path: Path, workload: str, tokenizer: Path, processes: int) -> dict[str, float]:
    """``datasets.map`` over rows that are already loaded."""
    import datasets
    import pyarrow.compute as pc
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tok = AutoTokenizer.from_pretrained(tokenizer)
    tok.chat_template = MARKED

    def text(batch: dict[str, Any]) -> Any:
        return tok(batch["text"], return_attention_mask=False)

    def chat(batch: dict[str, Any]) -> Any:
        return tok.apply_chat_template(
            batch["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_attention_mask": False},
        )  # fmt: skip

    with tempfile.TemporaryDirectory() as scratch:
        rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=scratch)
        watch = Stopwatch()
        done = rows.map(chat if workload == "chat" else text, batched=True, num_proc=processes,
                        remove_columns=rows.column_names)  # fmt: skip
        spent = watch.stop()
        tokens = pc.sum(pc.list_value_length(done.data["input_ids"])).as_py()
        masks = done.data["assistant_masks"] if workload == "chat" else None
        targets = pc.sum(pc.list_flatten(masks)).as_py() if masks is not None else tokens
        return {**spent, "rows": len(done), "tokens": tokens, "targets": targets}


def bound(path: Path, workload: str, tokenizer: Path, processes: int) -> dict[str, float]:
    """The library's own encoding alone, texts ready in memory, with the ranges of tokens where a mask needs them."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from surogate.data import Tokenizer
    from surogate.data.template import ChatTemplate

    tok = Tokenizer(tokenizer)
    rows = [json.loads(line) for line in path.open()]
    template = ChatTemplate(MARKED)
    ready = [row["text"] if workload == "text" else template.render(row["messages"], {}).text for row in rows]
    encode = tok.backend.encode_batch_fast if workload == "text" else tok.backend.encode_batch
    encode(ready[:20], add_special_tokens=False)
    watch, tokens = Stopwatch(), 0
    for first in range(0, len(ready), 500):
        encodings = encode(ready[first : first + 500], add_special_tokens=False)
        tokens += sum(map(len, encodings))
    return {**watch.stop(), "tokens": tokens}


def measure(side: str, path: Path, workload: str, tokenizer: Path, processes: int) -> dict[str, float]:
    """Run one side in a process of its own."""
    arguments = [sys.executable, __file__, "side", side, workload, str(path), str(tokenizer), str(processes)]
    result = subprocess.run(arguments, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


def speed(tokenizer: Path, processes: int, megabytes: float, rounds: int) -> dict[str, Any]:
    """Both sides in turn, several times; medians."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for workload in WORKLOADS:
            path = Path(folder) / f"{workload}.jsonl"
            write_rows(path, workload, megabytes)
            runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
            for _ in range(rounds):
                for side in SIDES:
                    runs[side].append(measure(side, path, workload, tokenizer, processes))
            alone = measure("bound", path, workload, tokenizer, 1)
            results[workload] = {}
            for unit in ("seconds", "processor_seconds"):
                rates = {side: statistics.median(r["tokens"] / r[unit] for r in runs[side]) for side in SIDES}
                rates["library alone, one process"] = alone["tokens"] / alone[unit]
                results[workload][f"tokens per {unit[:-1].replace('_', ' ')}"] = {
                    **{side: round(rate) for side, rate in rates.items()},
                    "ratio": round(rates["surogate"] / rates["datasets"], 2),
                }
                results[workload][unit] = {side: [round(r[unit], 2) for r in runs[side]] for side in SIDES}
            counts = {side: {k: runs[side][0][k] for k in ("rows", "tokens", "targets")} for side in SIDES}
            results[workload]["counts"] = counts
            print(json.dumps({workload: results[workload]}), file=sys.stderr)
    return results


# Memory


class Peak:
    """Peak resident bytes of a process and its descendants, seen 20 times a second."""

    def __init__(self, pid: int) -> None:
        import psutil

        self.process, self.rss, self.private, self.processes = psutil.Process(pid), 0, 0, 0
        self._error = psutil.Error
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            rss, private, count = 0, 0, 0
            try:
                for process in [self.process, *self.process.children(recursive=True)]:
                    try:
                        memory = process.memory_info()
                        rss, private, count = rss + memory.rss, private + memory.rss - memory.shared, count + 1
                    except self._error:
                        pass
            except self._error:
                return
            self.rss, self.private = max(self.rss, rss), max(self.private, private)
            self.processes = max(self.processes, count)

    def stop(self) -> None:
        self._done.set()
        self._thread.join()


def tokenize(folder: Path, data: Path, tokenizer: Path, processes: int, *options: str) -> dict[str, Any]:
    """``surogate tokenize`` on one file; its peak memory."""
    model = folder / "model"
    if not model.exists():
        model.mkdir()
        for file in tokenizer.iterdir():
            if file.suffix in (".json", ".jinja") and "index" not in file.name:
                (model / file.name).write_bytes(file.read_bytes())
    config = folder / "config.yaml"
    config.write_text(
        f"model: {model}\ncache_dir: {folder / 'cache'}\nsequence_len: 2048\ndatasets: [{{path: {data}}}]\n"
        f"dataset_num_workers: {processes}\ntruncation: split\n"
    )
    started = time.perf_counter()
    command = [sys.executable, "-m", "surogate", "tokenize", str(config), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peak = Peak(process.pid)
    output, _ = process.communicate()
    peak.stop()
    return {
        "file_bytes": data.stat().st_size, "exit_code": process.returncode, "processes": peak.processes,
        "peak_rss": peak.rss, "peak_private": peak.private, "seconds": round(time.perf_counter() - started, 1),
        "report": [line.strip() for line in output.splitlines() if "tokens" in line or "sequences" in line],
    }  # fmt: skip


def memory(tokenizer: Path, processes: int, megabytes: float) -> dict[str, Any]:
    """Each file in turn; the text file has ``megabytes``, the list a quarter, the row a twentieth of that."""
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        text, listed, row = folder / "text.txt", folder / "list.json", folder / "row.jsonl"
        with text.open("w") as file:
            for document in texts(megabytes):
                file.write(document["text"] + "\n\n")
        results["text file"] = tokenize(folder, text, tokenizer, processes, "--pt")
        text.unlink()
        with listed.open("w") as file:
            for number, conversation in enumerate(chats(megabytes / 4)):
                file.write(("[" if not number else ",\n") + json.dumps(conversation))
            file.write("]\n")
        results["JSON list"] = tokenize(folder, listed, tokenizer, processes)
        listed.unlink()
        row.write_text(json.dumps({"text": "\n\n".join(part["text"] for part in texts(megabytes / 20))}) + "\n")
        results["one JSON row"] = tokenize(folder, row, tokenizer, processes)
    for result in results.values():
        print(json.dumps(result), file=sys.stderr)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, megabytes in (("speed", 50.0), ("memory", 2000.0)):
        sub = verbs.add_parser(verb)
        sub.add_argument("--tokenizer", type=Path, help="a model's folder (default: SmolLM2-135M-Instruct)")
        sub.add_argument("--processes", type=int, default=2)
        sub.add_argument("--megabytes", type=float, default=megabytes)
        sub.add_argument("--rounds", type=int, default=3)
        sub.add_argument("--output", type=Path)
    side = verbs.add_parser("side")
    side.add_argument("arguments", nargs=5)
    args = parser.parse_args()
    if args.verb == "side":
        name, workload, path, tokenizer, processes = args.arguments
        run = {"surogate": ours, "datasets": theirs, "bound": bound}[name]
        print(json.dumps(run(Path(path), workload, Path(tokenizer), int(processes))))
        return
    if args.tokenizer is None:
        from surogate.io.fixtures import fetch_smollm2

        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        args.tokenizer = fetch_smollm2(base / "surogate-tests" / "SmolLM2-135M-Instruct")
    if args.verb == "speed":
        results = speed(args.tokenizer, args.processes, args.megabytes, args.rounds)
    else:
        results = memory(args.tokenizer, args.processes, args.megabytes)
    record = {**about(), "processes": args.processes, "megabytes": args.megabytes, "results": results}
    text = json.dumps(record, indent=2)
    if args.output:
        args.output.write_text(text + "\n")
    print(text)


def about() -> dict[str, Any]:
    """What was run, of which version, on what."""
    from importlib.metadata import version

    from surogate.track.machine import Machine

    root = Path(__file__).parents[1]
    git = ["git", "-C", str(root)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "surogate/data"], capture_output=True, text=True).stdout
    machine = Machine.here()
    return {
        "command": f"python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}",
        "commit": commit + (" with changes" if changed else ""),
        "device": f"{machine.name}, {os.cpu_count()} cores, {machine.memory / 2**30:.0f} GiB",
        "versions": {name: version(name) for name in ("tokenizers", "transformers", "datasets", "jinja2")},
    }


if __name__ == "__main__":
    main()
