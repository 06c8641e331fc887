import pytest
import torch
from hypothesis import given

from recsys.sparse import ops
from tests.sparse.ops.cases import cases


@given(cases())
def test_there_and_back(case):
    x, bags = case
    nested = ops.to_nested(x)
    assert all(map(torch.equal, nested.unbind(), bags))
    back = ops.from_nested(nested)
    assert torch.equal(back.values(), torch.cat(bags))
    assert back.values().data_ptr() == nested.values().data_ptr()
    assert back.lengths().tolist() == [len(bag) for bag in bags]


def test_gaps():
    padded = torch.arange(12.0).view(3, 4)
    nested = torch.nested.narrow(
        padded, 1, torch.tensor([1, 0, 2]), torch.tensor([2, 0, 1]), layout=torch.jagged
    )
    found = ops.from_nested(nested).to_dense()
    assert [bag.tolist() for bag in found] == [[1.0, 2.0], [], [10.0]]


def test_other_tensors():
    with pytest.raises(TypeError, match=r"layout torch\.jagged; .*layout torch\.strided"):
        ops.from_nested(torch.ones(2, 3))
