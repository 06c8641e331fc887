"""Our batches count as pipelineable; the classes are abstract."""

from __future__ import annotations

import pytest
import torch

from recsys.base.streamable import Multistreamable, Pipelineable
from recsys.datasets.random import RandomRecDataset
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor


def test_our_batches_are_pipelineable() -> None:
    ids = JaggedTensor(torch.tensor([1]), lengths=torch.tensor([1]))
    [batch] = RandomRecDataset(["f"], 2, hash_size=9, num_batches=1)
    made = [
        ids,
        KeyedJaggedTensor.from_jt_dict({"f": ids}),
        KeyedTensor(["x"], [1], torch.ones(1, 1)),
    ]
    for one in [*made, batch]:
        assert isinstance(one, Pipelineable)
        assert isinstance(one, Multistreamable)
    assert not isinstance(torch.ones(1), Pipelineable)


def test_a_class_of_ones_own_must_say_how() -> None:
    class Half(Pipelineable):
        def record_stream(self, stream: torch.Stream) -> None:
            """Do nothing."""

    with pytest.raises(TypeError, match="to"):
        Half()  # type: ignore[abstract]
