import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.sparse import JaggedTensor, ops


@given(
    st.lists(st.lists(st.integers(0, 7), max_size=9), min_size=1, max_size=6), st.integers(0, 99)
)
def test_no_bag_has_its_negatives(bags, seed):
    bags = [bag if len({*bag}) < 8 else bag[:1] for bag in bags]
    ids = torch.tensor([id for bag in bags for id in bag], dtype=torch.int64)
    x = JaggedTensor(ids, lengths=torch.tensor([len(bag) for bag in bags]))
    generator = torch.Generator().manual_seed(seed)
    drawn = ops.sample_negatives(x, 8, 50, generator)
    assert drawn.shape == (len(bags), 50)
    for bag, ids in zip(bags, drawn.tolist(), strict=True):
        assert not {*bag} & {*ids}
        assert {*ids} <= {*range(8)}


def test_each_other_id_is_equally_likely():
    bags = [[5, 0, 5], [], [9, 8, 7, 6, 5, 4, 3, 2, 1]]
    ids = torch.tensor([id for bag in bags for id in bag])
    x = JaggedTensor(ids, lengths=torch.tensor([len(bag) for bag in bags]))
    drawn = ops.sample_negatives(x, 10, 20_000, torch.Generator().manual_seed(0))
    for bag, row in zip(bags, drawn, strict=True):
        others = 10 - len({*bag})
        shares = torch.bincount(row, minlength=10) / 20_000
        expected = torch.tensor([0.0 if id in bag else 1 / others for id in range(10)])
        torch.testing.assert_close(shares, expected, atol=0.015, rtol=0.0)


def test_errors():
    x = JaggedTensor(torch.tensor([0, 1, 2]), lengths=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"from 0 to 1; .*to 2"):
        ops.sample_negatives(x, 2, 1)
    full = JaggedTensor(torch.tensor([0, 1, 0]), lengths=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="bag 1 has all 2"):
        ops.sample_negatives(full, 2, 1)
