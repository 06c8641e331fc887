import numpy as np
import pytest
import torch

from recsys.sparse import KeyedJaggedTensor, KeyedTensor, kjt_is_equal
from recsys.sparse.conversions import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    pad_vbe_kjt_lengths,
    permute_multi_embedding,
    regroup_kts,
)


@pytest.mark.parametrize("weighted", [False, True])
def test_there_and_back(weighted):
    weights = torch.rand(5) if weighted else None
    kjt = KeyedJaggedTensor(
        ["a", "b"], torch.arange(5), weights, lengths=torch.tensor([1, 0, 3, 1])
    )
    by_key = ComputeKJTToJTDict()(kjt)
    assert {key: jt.values().tolist() for key, jt in by_key.items()} == {
        "a": [0],
        "b": [1, 2, 3, 4],
    }
    assert by_key["b"].lengths().tolist() == [3, 1]
    assert (by_key["b"].weights_or_none() is not None) == weighted
    assert kjt_is_equal(ComputeJTDictToKJT()(by_key), kjt)


@pytest.mark.parametrize("regroup", [regroup_kts, permute_multi_embedding])
def test_regroups_with_gradients(regroup):
    first = torch.arange(6.0).reshape(2, 3).requires_grad_()
    second = (torch.arange(4.0).reshape(2, 2) + 10).requires_grad_()
    sources = [KeyedTensor(["a", "b"], [1, 2], first), KeyedTensor(["c"], [2], second)]
    found = regroup(sources, [["c", "b"], ["b"]])
    x, y = first.detach().numpy(), second.detach().numpy()
    np.testing.assert_array_equal(found[0].detach(), np.concatenate([y, x[:, 1:]], axis=1))
    np.testing.assert_array_equal(found[1].detach(), x[:, 1:])
    sum((part.sum() for part in found), torch.zeros(())).backward()
    assert first.grad.tolist() == [[0, 2, 2], [0, 2, 2]]  # b serves two groups
    assert second.grad.tolist() == [[1, 1], [1, 1]]
    with pytest.raises(KeyError, match="nothing"):
        regroup(sources, [["nothing"]])


def test_pads_batches_of_several_sizes():
    sizes = {"a": [[1, 2], [3]], "b": [[4]], "c": [[], [5, 6, 7], []]}
    flat = [id for bags in sizes.values() for bag in bags for id in bag]
    kjt = KeyedJaggedTensor(
        list(sizes),
        torch.tensor(flat),
        torch.tensor(flat) / 10,
        lengths=torch.tensor([len(bag) for bags in sizes.values() for bag in bags]),
        stride_per_key_per_rank=[[2], [1], [3]],
    )
    padded = pad_vbe_kjt_lengths(kjt)
    padded.validate()
    assert padded.stride_per_key() == [3, 3, 3]
    for key, jt in padded.to_dict().items():
        expected = sizes[key] + [[]] * (3 - len(sizes[key]))
        assert [bag.tolist() for bag in jt.to_dense()] == expected
        assert torch.equal(jt.weights() * 10, jt.values().float())
    assert pad_vbe_kjt_lengths(padded) is padded
