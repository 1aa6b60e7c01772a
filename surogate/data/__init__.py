"""Rows to token shards, and to the order in which they are trained.

``prepare`` reads data sets, renders and tokenises every row once, and keeps the result in a cache of memory-mapped
shards; ``epoch_order`` packs the rows of a shard into sequences. The way of a row: ``sources`` (files, folders, hub) ▶
``formats`` (what the row is) ▶ ``template`` (one rendering) ▶ ``turns`` (which characters are trained) ▶ ``encode``
(tokens and mask) ▶ ``shards`` ▶ ``order``.
"""

from surogate.data.options import DataOptions, DatasetSpec
from surogate.data.order import Order, epoch_order, max_documents
from surogate.data.prepare import Prepared, prepare
from surogate.data.report import DataReport, DatasetReport
from surogate.data.shards import Shard
from surogate.data.tokenizer import Tokenizer

__all__ = [
    "DataOptions", "DataReport", "DatasetReport", "DatasetSpec", "Order", "Prepared", "Shard", "Tokenizer",
    "epoch_order", "max_documents", "prepare",
]  # fmt: skip
