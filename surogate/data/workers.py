"""Chunks to tokens, in this process or in several; results come in the order of the chunks either way."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import chain, islice
from multiprocessing import connection
from pathlib import Path

from surogate.data.chunks import Chunk
from surogate.data.encode import ChunkResult, RowEncoder
from surogate.data.formats import get_format
from surogate.data.options import DataOptions
from surogate.data.tokenizer import Tokenizer
from surogate.errors import UserError

_ALONE = 8
"""Chunks up to which starting other processes takes longer than it saves."""


@dataclass(frozen=True)
class Job:
    """A chunk, and how its rows are to be read.

    Attributes:
        dataset: index of the data set.
        chunk: its rows.
        form: name of the format.
        fields: names of columns that the user gave.
    """

    dataset: int
    chunk: Chunk
    form: str
    fields: Mapping[str, str]


def encode_jobs(jobs: Iterable[Job], tokenizer: Tokenizer, options: DataOptions) -> Iterator[tuple[int, ChunkResult]]:
    """Yield data set and result of every job, in order.

    Args:
        jobs: read one after the other, no more than a few ahead.
        tokenizer: with the template that is used.
        options: ``num_workers`` among them.

    Raises:
        UserError: from reading or encoding, or when a process dies.
    """
    workers = options.num_workers or len(os.sched_getaffinity(0))
    stream = iter(jobs)
    head = list(islice(stream, _ALONE + 1)) if workers > 1 else []
    if len(head) <= _ALONE:
        encoder = RowEncoder(tokenizer, options)
        for job in chain(head, stream):
            yield job.dataset, encoder.encode(job.chunk, get_format(job.form), job.fields)
        return
    plain = replace(options, datasets=(), validation_datasets=(), num_workers=1)
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(tokenizer.directory, tokenizer.template_choice, plain),
    )
    waiting: deque[tuple[int, Future[ChunkResult]]] = deque()
    try:
        for job in chain(head, stream):
            waiting.append((job.dataset, pool.submit(_encode, job)))
            if len(waiting) > 2 * workers:
                dataset, future = waiting.popleft()
                yield dataset, future.result()
        while waiting:
            dataset, future = waiting.popleft()
            yield dataset, future.result()
    except BrokenProcessPool:
        raise UserError(
            "a process that tokenised died; most often memory ran out",
            fix="set dataset_num_workers to a smaller number (1: no other processes)",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_encoder: RowEncoder  # of this worker process; made once by _start


def _start(directory: Path, template: str | None, options: DataOptions) -> None:
    global _encoder
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library's own threads: here the processes are the parallelism
    tokenizer = Tokenizer(directory)
    if template is not None:
        tokenizer.use_chat_template(template)
    _encoder = RowEncoder(tokenizer, options)


def _end_with_parent() -> None:
    """End this process when its parent is gone: killed, it tells nobody, and the queue would be waited on for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _encode(job: Job) -> ChunkResult:
    return _encoder.encode(job.chunk, get_format(job.form), job.fields)
