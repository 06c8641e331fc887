"""Shapes of batches from headers made by hand, against loops over streams."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from recsys.distributed.stages.header import (
    COUNT_BITS,
    BatchHeader,
    BatchShape,
    EndOfData,
    FeaturesAbsentError,
    Flag,
    check_same_call,
    failure_flag,
    module_bits,
    ragged_shape,
)
from recsys.distributed.stages.routes import COUNTS
from recsys.distributed.stages.streams import Streams, streams_of
from tests.distributed.cases import Case, shard
from tests.ranks import RankPool


def _streams(own_is_split: np.ndarray, is_split: np.ndarray) -> Any:
    class Two:
        pass

    two: Any = Two()
    two.own_is_split, two.is_split = own_is_split, is_split
    return two


def _by_loops(
    bags: np.ndarray, ids: np.ndarray, is_split: np.ndarray, is_by_id: bool
) -> dict[str, list[Any]]:
    """Return the counts of lookups and of lengths, and the by-id flags, stream by stream."""
    found: dict[str, list[Any]] = {"bags": [], "lengths": [], "by_id": []}
    flat = zip(bags.ravel().tolist(), ids.ravel().tolist(), is_split.ravel().tolist(), strict=True)
    for num_bags, num_ids, split in flat:
        by_id = is_by_id and split and num_ids < num_bags
        found["bags"].append(num_ids if by_id else num_bags)
        found["lengths"].append(0 if by_id else num_bags)
        found["by_id"].append(by_id)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_shape_of_a_ragged_batch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, received, sent = (int(n) for n in rng.integers(1, 5, 3))
    own_is_split, is_split = rng.random(received) < 0.5, rng.random(sent) < 0.5
    sizes_R = rng.integers(0, 5, ranks)
    ids_RS, ids_D = rng.integers(0, 6, (ranks, received)), rng.integers(0, 6, sent)
    is_variable_R = rng.random(ranks) < 0.5
    all_short = bool(rng.random() < 0.5) or not is_variable_R.any()
    flags_R = np.where(is_variable_R, Flag.VARIABLE, 0)
    flags_R[: ranks if all_short else ranks - 1] |= Flag.SHORT
    own_bags_RS = rng.integers(0, 5, (ranks, received))
    bags_RS = np.where(is_variable_R[:, None], own_bags_RS, sizes_R[:, None])
    words_RS = np.where(is_variable_R[:, None], ids_RS + (own_bags_RS << COUNT_BITS), ids_RS)
    bags_D = rng.integers(0, 5, sent)
    fixed_RS = np.repeat(sizes_R[:, None], received, 1)
    none = np.zeros(0, dtype=bool)
    fixed = BatchShape(
        sizes_R, words_RS, fixed_RS, fixed_RS, ids_D, bags_D, bags_D, none, none, False, False
    )
    header = BatchHeader(flags_R, sizes_R, words_RS, ids_D, ids_D[:0])
    shape = ragged_shape(fixed, header, _streams(own_is_split, is_split))
    assert shape.is_ragged
    assert shape.is_by_id == all_short
    assert shape.ids_received_RS.tolist() == ids_RS.tolist()
    every = np.broadcast_to(own_is_split, ids_RS.shape)
    for found, expected in [
        (
            (shape.bags_received_RS, shape.lengths_received_RS, shape.by_id_RS),
            _by_loops(bags_RS, ids_RS, every, all_short),
        ),
        (
            (shape.bags_sent_D, shape.lengths_sent_D, shape.by_id_D),
            _by_loops(bags_D, ids_D, is_split, all_short),
        ),
    ]:
        assert [array.ravel().tolist() for array in found] == list(expected.values())


def test_ranks_must_make_the_same_call() -> None:
    users, items = module_bits("model.users"), module_bits("model.items")
    assert users & ~Flag.MODULE == 0
    check_same_call(np.array([users | Flag.TRAINS | Flag.FAILED, users | Flag.TRAINS]))
    for flags, text in [
        ([users, users, items], "rank 0 calls 'model.users' without gradients, rank 2 calls "
         "'model.items' without"),
        ([users | Flag.TRAINS, users], "rank 0 calls 'model.users' with gradients, rank 1 calls "
         "'model.users' without"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=text):
            check_same_call(np.array(flags))


def test_flags_have_bits_of_their_own() -> None:
    bits = [value for name, value in vars(Flag).items() if name.isupper() and name != "MODULE"]
    assert Counter(bits).most_common(1)[0][1] == 1
    assert all(bit.bit_count() == 1 and not bit & Flag.MODULE for bit in bits)
    assert failure_flag(ValueError()) == Flag.FAILED
    assert failure_flag(FeaturesAbsentError()) == Flag.FAILED | Flag.ABSENT


def test_the_end_of_data_is_read_once() -> None:
    status = EndOfData()
    assert not status.pop().size
    status.flags_R = np.array([Flag.IS_LAST | Flag.TRAINS, Flag.TRAINS])
    assert status.pop().tolist() == [True, False]
    assert not status.pop().size


def _own_streams(case: Case) -> tuple[Streams, list[int]]:
    stage = shard(case).module.ebc.input_stage
    again = streams_of(stage.module)
    assert again.header_sizes == stage.streams.header_sizes
    return stage.streams, [len(streams) for streams in stage.module.layout.streams]


@pytest.mark.parametrize("seed", range(4))
def test_both_ends_of_an_exchange_agree_on_its_streams(ranks: RankPool, seed: int) -> None:
    found = ranks(2, _own_streams, Case(seed, 2))
    for rank, (streams, counts) in enumerate(found):
        assert np.diff(streams.edges).tolist() == counts
        assert streams.num_received == counts[rank] == streams.header_width - COUNTS
        assert [other.header_sizes[rank] for other, _ in found] == [streams.header_width] * 2
        own = slice(*streams.edges[rank : rank + 2])
        assert streams.own_dims.tolist() == streams.dims_D[own].tolist()
        assert streams.by_rank[streams.reading].tolist() == list(range(2 * counts[rank]))
        counted = np.zeros(sum(streams.header_sizes), dtype=bool)
        counted[streams.count_words] = True  # all words but the flag and the batch size
        starts = np.cumsum([0, *streams.header_sizes[:-1]])
        assert not counted[np.concatenate([starts, starts + 1])].any()
        assert counted.sum() == len(counted) - 2 * COUNTS
