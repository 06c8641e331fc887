"""Headers that need no exchange, and memory that outlives the use on another stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from recsys.distributed.stages.batch import (
    BatchContext,
    LookupInput,
    PreparedBatch,
    ReceivedBatch,
    Segments,
    known_header,
)
from recsys.distributed.stages.header import EndOfData, Flag
from recsys.modules.tables.batch_checker import NO_FAULTS, CheckedBatch
from recsys.sparse import KeyedJaggedTensor


def _context(length_per_key: list[int] | None, *, reads_whole: bool = False) -> BatchContext:
    batch = KeyedJaggedTensor(
        ["f", "g"],
        torch.arange(5),
        lengths=torch.tensor([1, 2, 0, 2]),
        length_per_key=length_per_key,
    )
    routes: Any = SimpleNamespace(segments=np.array([1, 0]), reads_whole=reads_whole)
    stage: Any = SimpleNamespace(module=SimpleNamespace(is_pooled=True))
    ctx = BatchContext(stage)
    bags, counts, none = batch.parts(), torch.tensor([3, 2]), np.zeros(0, dtype=np.int64)
    ctx.given, ctx.end_of_data = batch, EndOfData()
    limits: Any = None
    ctx.routes = routes
    ctx.checked = CheckedBatch(batch, batch, bags, bags, counts, limits, NO_FAULTS, False)
    segments = Segments([bags.lengths], [bags.values], [], [], [])
    ctx.prepared = PreparedBatch(
        bags, segments, counts, counts[:0], counts[:0], none, counts[:0], bags.offsets, False, False
    )
    return ctx


def test_the_host_knows_the_header_if_it_knows_the_sizes() -> None:
    ctx = _context([3, 2])
    ctx.end_of_data = EndOfData()
    ctx.end_of_data.is_last = True
    header = known_header(ctx)
    assert header is not None
    assert header.flags_R.tolist() == [Flag.IS_LAST]
    assert header.batch_sizes_R.tolist() == [2]
    assert header.words_RS.tolist() == [[2, 3]]
    assert header.counts_G.tolist() == [3, 2]


@pytest.mark.parametrize("reads_whole", [False, True])
def test_without_sizes_lookups_must_read_the_whole_batch(reads_whole: bool) -> None:
    header = known_header(_context(None, reads_whole=reads_whole))
    assert (header is not None) is reads_whole
    if header is not None:
        assert header.words_RS.shape == (1, 0)
        assert header.counts_G.size == 0


def test_an_error_needs_no_sizes() -> None:
    ctx = _context(None)
    ctx.is_good, ctx.flag = False, Flag.FAILED | Flag.ABSENT
    header = known_header(ctx)
    assert header is not None
    assert header.flags_R.tolist() == [Flag.FAILED | Flag.ABSENT]


def test_all_tensors_of_all_phases_are_recorded() -> None:
    ctx = _context([3, 2])
    bags = LookupInput(torch.arange(3), torch.arange(2), torch.rand(3))
    ctx.received = ReceivedBatch([bags], [bags._replace(indices=torch.arange(4))], (), ())
    ctx.pending_headers = [(Any, [ctx], ([torch.ones(1)], torch.ones(1), None))]  # type: ignore[assignment]
    seen: list[Tensor] = []
    with mock.patch.object(Tensor, "record_stream", lambda tensor, _: seen.append(tensor)):
        ctx.record_stream(Any)
    places = {tensor.data_ptr() for tensor in seen}
    assert bags.weights is not None
    for tensor in (
        ctx.checked.given.values(),
        ctx.prepared.counts_G,
        *bags[:3],
        ctx.received.replicas[0].indices,
        ctx.pending_headers[0][2][0][0],
    ):
        assert tensor.data_ptr() in places
