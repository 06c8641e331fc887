import pytest
import torch

from recsys.modules.sequences.positions import PositionEmbedding
from recsys.sparse import JaggedTensor


@pytest.mark.parametrize(
    ("from_end", "targets", "places"),
    [(False, None, [0, 1, 2, 0]), (True, None, [2, 1, 0, 0]), (False, [2, 0], [0, 1, 1, 0])],
)
def test_rows_of_positions(from_end, targets, places):
    module = PositionEmbedding(4, 3, from_end=from_end)
    rows = torch.randn(4, 4)
    x = JaggedTensor(rows, lengths=torch.tensor([3, 1]))
    found = module(x, None if targets is None else torch.tensor(targets)).values()
    torch.testing.assert_close(found, rows * 2 + module.positions.weight[places])


def test_errors():
    with pytest.raises(ValueError, match="max_length"):
        PositionEmbedding(4, 0)
    x = JaggedTensor(torch.zeros(5, 4), lengths=torch.tensor([4, 1]))
    with pytest.raises(ValueError, match=r"most max_length=3 values; received 4\."):
        PositionEmbedding(4, 3)(x)
