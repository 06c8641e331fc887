"""Header of a batch: flags, batch size and id counts, which ranks exchange before the ids.

The header for one destination is `[flag, batch size, ids per stream]` as int64. The flag has the
bits of `Flag`; bits 8 to 31 identify the module, so that ranks that call different modules raise
an error. If features have their own batch sizes, the word of a stream also has its number of bags.

Shapes: `R` ranks, `S` streams of this rank, `H` words that this rank receives from each rank,
`G` segments of this rank's batch, `K` features of this rank's batch.
"""

from __future__ import annotations

from typing import NamedTuple, final
from zlib import crc32

import numpy as np

from recsys.distributed.stages.streams import Streams


class Flag:
    """Bits of a header's flag."""

    FAILED = 1 << 0  # the batch has an error: every rank raises it
    WARNED = 1 << 1  # the batch has bad ids: its rank warns
    WEIGHTS_NEED_GRAD = 1 << 2  # gradients of the weights return to this rank
    IS_LAST = 1 << 3  # the rank has no batch after this one
    TRAINS = 1 << 4  # a backward pass follows
    VARIABLE = 1 << 5  # features have their own batch sizes
    SHORT = 1 << 6  # bags of row-split tables have few ids
    ABSENT = 1 << 7  # the batch lacks the module's features
    MODULE = 0xFFFFFF << 8  # the bits that identify the module
    ADMITS = 1 << 32  # new ids get rows of tables with hashed ids
    STOPS = 1 << 33  # the scheduler has asked this rank to end


COUNT_BITS = 40
"""Bits of the id count in the word of a stream. Above them is the number of bags (`VARIABLE`)."""
_COUNT = (1 << COUNT_BITS) - 1
_NO_FLAGS = np.zeros(0, dtype=np.int64)
_paths: dict[int, str] = {}  # bits that identify a module -> its path


def module_bits(path: str) -> int:
    """Return the flag bits that identify the module of a path."""
    # hash() of a string differs between processes. Two paths may share their 24 bits:
    # check_same_call then misses a difference
    bits = (crc32(path.encode()) & 0xFFFFFF) << 8
    _paths[bits] = path
    return bits


@final
class FeaturesAbsentError(ValueError):
    """A batch lacks a module's features.

    No error is raised if the batches of all ranks lack them.
    """


def failure_flag(error: Exception) -> int:
    """Return the flag of a batch with an error."""
    return Flag.FAILED | Flag.ABSENT if isinstance(error, FeaturesAbsentError) else Flag.FAILED


@final
class EndOfData:
    """End-of-data status, exchanged in the headers of an epoch.

    Attributes:
        is_last: Whether this rank's next batch is its last one.
        errors: The exception that this rank's data raised instead of a batch, if any.
        flags_R: `[R]` flags of the last headers; empty before them.
    """

    def __init__(self) -> None:
        self.is_last = False
        self.errors: list[Exception] = []
        self.flags_R: np.ndarray = _NO_FLAGS

    def pop(self) -> np.ndarray:
        """Return `[R]` bool, whether each rank has had its last batch, and forget it.

        Empty if no header was received since the last call.
        """
        is_last_R: np.ndarray = (self.flags_R & Flag.IS_LAST) != 0
        self.flags_R = _NO_FLAGS
        return is_last_R


@final
class BatchHeader(NamedTuple):
    """Received headers of one module, and the counts of this rank's batch, on the host.

    Attributes:
        flags_R: `[R]` flags.
        batch_sizes_R: `[R]` batch sizes.
        words_RS: `[R, S]` words of the streams: ids, and bags if `VARIABLE`.
        counts_G: `[G]` ids of each segment of this rank's batch; empty if the host does not know
            them.
        given_counts_K: `[K]` ids of each feature before deduplication; empty without it.
    """

    flags_R: np.ndarray
    batch_sizes_R: np.ndarray
    words_RS: np.ndarray
    counts_G: np.ndarray
    given_counts_K: np.ndarray


def check_same_call(flags_R: np.ndarray) -> None:
    """Check that all ranks call the same module in the same mode.

    Raises:
        ValueError: On every rank, if they do not.
    """
    calls_R = flags_R & (Flag.MODULE | Flag.TRAINS)
    (others,) = np.nonzero(calls_R != calls_R[0])
    if not others.size:
        return
    calls = [
        f"rank {rank} calls {_paths.get(int(calls_R[rank] & Flag.MODULE), 'another module')!r} "
        f"{'with' if calls_R[rank] & Flag.TRAINS else 'without'} gradients"
        for rank in (0, int(others[0]))
    ]
    raise ValueError(
        "All ranks must call the sharded modules of a model in one order, and all with "
        f"gradients or all without; {', '.join(calls)}. Look for a call that depends on the "
        "rank or on its batch, such as an evaluation on rank 0 alone."
    )


@final
class BatchShape(NamedTuple):
    """Sizes of one batch's exchange, on the host. `D` is the streams of all destinations.

    A lookup returns one row per bag. A batch is ragged if streams have different numbers of bags.
    Either features have their own batch sizes, or bags of row-split tables have few ids, and each
    id becomes a bag (`by_id`).

    Attributes:
        batch_sizes_R: `[R]` batch size of each rank.
        ids_received_RS: `[R, S]` ids received from each rank for each stream.
        bags_received_RS: `[R, S]` bags to look up.
        lengths_received_RS: `[R, S]` bag lengths received. Bags of one id have none.
        ids_sent_D: `[D]` ids sent; empty if the host does not know them.
        bags_sent_D: `[D]` bags sent, which return as rows.
        lengths_sent_D: `[D]` bag lengths sent.
        by_id_RS: `[R, S]` whether each received id is a bag; empty unless `is_by_id`.
        by_id_D: `[D]` whether each sent id is a bag; empty unless `is_by_id`.
        is_ragged: Whether streams have different numbers of bags.
        is_by_id: Whether the ids of any rank may be bags.
    """

    batch_sizes_R: np.ndarray
    ids_received_RS: np.ndarray
    bags_received_RS: np.ndarray
    lengths_received_RS: np.ndarray
    ids_sent_D: np.ndarray
    bags_sent_D: np.ndarray
    lengths_sent_D: np.ndarray
    by_id_RS: np.ndarray
    by_id_D: np.ndarray
    is_ragged: bool
    is_by_id: bool


def ragged_shape(fixed: BatchShape, header: BatchHeader, streams: Streams) -> BatchShape:
    """Return the shape of a batch if the flags of any rank are `VARIABLE`, or of all `SHORT`.

    Args:
        fixed: The shape of the batch otherwise, with the bags that this rank sends.
        header: The batch's headers.
        streams: The module's streams.
    """
    is_by_id = bool((header.flags_R & Flag.SHORT).all())
    is_variable_R = (header.flags_R & Flag.VARIABLE) != 0
    words_RS, sent_D, ids_D = header.words_RS, fixed.bags_sent_D, fixed.ids_sent_D
    bags_RS = np.where(is_variable_R[:, None], words_RS >> COUNT_BITS, fixed.bags_received_RS)
    ids_RS = words_RS & _COUNT
    # sender and owner compare the same two counts, so both find the same streams
    # docs/decisions/row_split.md, "Short bags: rows return by id"
    by_id_RS = is_by_id & streams.own_is_split & (ids_RS < bags_RS)
    by_id_D = is_by_id & streams.is_split & (ids_D < sent_D)
    return BatchShape(
        batch_sizes_R=fixed.batch_sizes_R,
        ids_received_RS=ids_RS,
        bags_received_RS=np.where(by_id_RS, ids_RS, bags_RS),
        lengths_received_RS=np.where(by_id_RS, 0, bags_RS),
        ids_sent_D=ids_D,
        bags_sent_D=np.where(by_id_D, ids_D, sent_D),
        lengths_sent_D=np.where(by_id_D, 0, sent_D),
        by_id_RS=by_id_RS,
        by_id_D=by_id_D,
        is_ragged=True,
        is_by_id=is_by_id,
    )
