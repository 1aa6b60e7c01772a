"""The order of a whole run's sequences, fixed before the first step, and feeders that follow it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from surogate.train.setup import Duration, duration

if TYPE_CHECKING:
    from surogate import _native
    from surogate.config.schema import TrainConfig
    from surogate.data import Shard


@dataclass(frozen=True)
class RunOrder:
    """Pieces and sequences of every epoch, one after the other (docs/architecture.md, "Tokens")."""

    shard: Shard
    pieces: np.ndarray  # int64 [pieces, 3]
    sequences: np.ndarray  # int64 [sequences + 1]
    max_documents: int  # of a micro-batch, padding included
    duration: Duration


def fingerprint(shard: Shard) -> str:
    """Names the rows and their tokens: equal for two runs that train on the same data, by whatever version or from
    whatever files it was tokenised."""
    digest = hashlib.blake2b(shard.digest.encode(), digest_size=16)
    digest.update(np.ascontiguousarray(shard.index).tobytes())
    digest.update(repr(shard.sets).encode())
    return digest.hexdigest()


def training_order(shard: Shard, config: TrainConfig) -> RunOrder:
    """Order of all epochs that the run needs."""
    from surogate.data import epoch_order, max_documents

    batch = config.effective_batch_size
    orders = []

    def steps(epoch: int) -> int:
        order = epoch_order(
            shard, sequence_len=config.sequence_len, packing=config.sample_packing, seed=config.seed, epoch=epoch,
            global_batch=batch,
        )  # fmt: skip
        orders.append(order)
        return (len(order.sequences) - 1) // batch

    length = duration(steps, config.num_train_epochs, config.max_steps)
    documents = max(max_documents(o, config.per_device_train_batch_size) for o in orders)
    pieces = np.concatenate([o.pieces for o in orders])
    ends, shift = [np.zeros(1, np.int64)], 0
    for order in orders:
        ends.append(order.sequences[1:] + shift)
        shift += len(order.pieces)
    return RunOrder(shard, pieces, np.concatenate(ends), documents, length)


def evaluation_order(shard: Shard, config: TrainConfig) -> RunOrder:
    """Order of one pass over validation rows."""
    from surogate.data import epoch_order, max_documents

    batch = config.eval_batch_size
    together = batch * config.ranks
    order = epoch_order(
        shard, sequence_len=config.sequence_len, packing=config.sample_packing, seed=config.seed, epoch=0,
        global_batch=together,
    )  # fmt: skip
    passes = (len(order.sequences) - 1) // together
    return RunOrder(shard, order.pieces, order.sequences, max_documents(order, batch), Duration((passes,), passes))


def feeder(
    order: RunOrder, *, batch: int, sequence_len: int, pad_id: int, cursor: int = 0, rank: int = 0, ranks: int = 1
) -> _native.Feeder:
    """A native feeder over the order, from sequence ``cursor`` on; of several ranks, one that hands out its own."""
    from surogate import _native

    return _native.Feeder(
        str(order.shard.tokens_path), str(order.shard.mask_path), order.pieces, order.sequences, batch, sequence_len,
        order.max_documents, pad_id, cursor, rank=rank, ranks=ranks,
    )  # fmt: skip
