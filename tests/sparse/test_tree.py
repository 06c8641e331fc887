import torch
from hypothesis import given, settings
from torch.utils import _pytree as pytree

from recsys.sparse import (
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    jt_is_equal,
    kjt_is_equal,
)
from tests.sparse.strategies import batches


@settings(deadline=None, max_examples=40, derandomize=True)
@given(batches())
def test_keyed_jagged_round_trip(batch):
    leaves, spec = pytree.tree_flatten(batch.kjt)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert kjt_is_equal(pytree.tree_unflatten(leaves, spec), batch.kjt)
    assert not pytree.tree_map(lambda leaf: leaf.numel() < 0, batch.kjt).values()

    for jt in batch.kjt.to_dict().values():
        leaves, spec = pytree.tree_flatten(jt)
        assert jt_is_equal(pytree.tree_unflatten(leaves, spec), jt)


def test_inverse_indices_are_leaves():
    kjt = KeyedJaggedTensor(
        ["a"],
        torch.arange(1),
        torch.ones(1),
        torch.tensor([1]),
        stride_per_key_per_rank=[[1, 0]],
        inverse_indices=(["a"], torch.tensor([[0, 0]])),
    )
    leaves, spec = pytree.tree_flatten(kjt)
    assert len(leaves) == 4
    rebuilt = pytree.tree_unflatten(leaves, spec)
    assert kjt_is_equal(rebuilt, kjt)
    assert rebuilt.stride() == 2


def test_structure_does_not_depend_on_what_was_derived_or_on_batch_size():
    kjt = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 2]))
    spec = pytree.tree_structure(kjt)
    kjt.sync().offsets()
    assert pytree.tree_structure(kjt) == spec
    larger = KeyedJaggedTensor(["a"], torch.arange(3), offsets=torch.tensor([0, 1, 2, 3]))
    assert pytree.tree_structure(larger) == spec
    assert pytree.tree_structure(kjt.to_dict()["a"]) == pytree.tree_structure(kjt["a"])


def test_leaves_are_named():
    kjt = KeyedJaggedTensor(["a"], torch.arange(2), torch.ones(2), torch.tensor([2]))
    jt, kt = kjt["a"], KeyedTensor(["x"], [2], torch.ones(1, 2))
    names = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path([kjt, jt, kt])[0]]
    jagged = [".values", ".lengths", ".weights"]
    assert names == [f"[{i}]{n}" for i in (0, 1) for n in jagged] + ["[2].values"]


def test_keyed_round_trip():
    kt = KeyedTensor(["x", "y"], [1, 2], torch.ones(3, 2), key_dim=0)
    doubled = pytree.tree_map(lambda leaf: leaf * 2, kt)
    assert doubled.keys() == kt.keys()
    assert doubled.key_dim() == 0
    assert doubled["y"].tolist() == [[2, 2], [2, 2]]


def test_jagged_with_other_leaves():
    jt = JaggedTensor(torch.ones(2), lengths=torch.tensor([2]))
    assert pytree.tree_map(lambda leaf: leaf.shape, jt).values() == (2,)
