"""Several batches as one."""

from __future__ import annotations

import torch

from recsys.base.streamable import Multistreamable
from recsys.sparse import KeyedJaggedTensor, KeyedTensor
from recsys.sparse.kjt_list import KJTList
from tests.pretended_cuda import PretendedCuda


def batch(id_: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor([id_]), lengths=torch.tensor([1]))


def test_it_is_a_list() -> None:
    batches = KJTList([batch(1), batch(2)])
    assert len(batches) == 2
    assert batches[1].values().tolist() == [2]
    batches[0] = batch(7)
    assert [b.values().item() for b in batches] == [7, 2]
    assert isinstance(batches, Multistreamable)


def test_it_moves_as_a_whole() -> None:
    batches = KJTList([batch(1), batch(2)])
    moved = batches.to(torch.device("meta"))
    assert [b.device().type for b in moved] == ["meta", "meta"]
    assert [b.device().type for b in batches] == ["cpu", "cpu"]


def test_it_is_pinned_as_a_whole() -> None:
    with PretendedCuda():
        pinned = KJTList([batch(1), batch(2)]).pin_memory()
        assert [b.values().is_pinned() for b in pinned] == [True, True]
        assert KeyedTensor(["k"], [2], torch.ones(1, 2)).pin_memory().values().is_pinned()


def test_every_batch_is_kept_on_the_stream() -> None:
    seen: list[object] = []

    class Seen(KeyedJaggedTensor):
        def record_stream(self, stream: torch.Stream) -> None:
            seen.append(stream)

    stream = object()
    parts = torch.tensor([1]), torch.tensor([1])
    KJTList([Seen(["f"], parts[0], lengths=parts[1]) for _ in range(3)]).record_stream(stream)  # type: ignore[arg-type]
    assert seen == [stream] * 3
