import pytest
import torch
from hypothesis import given, settings
from torch.utils import _pytree as pytree

from recsys.datasets.utils import Batch
from recsys.sparse import (
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    jt_is_equal,
    kjt_is_equal,
)
from recsys.sparse.kjt_list import KJTList
from tests.sparse.strategies import batches

NONE = torch.zeros(0, dtype=torch.int64)
WITHOUT_KEYS = KeyedJaggedTensor([], NONE, lengths=NONE, stride=5)
LARGER_STRIDE = KeyedJaggedTensor(
    ["a", "b"], torch.arange(3), lengths=torch.tensor([1, 0, 2]), stride_per_key=[1, 2], stride=7
)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(batches())
def test_keyed_jagged_round_trip(batch):
    leaves, spec = pytree.tree_flatten(batch.kjt)
    assert len(leaves) == 6
    assert kjt_is_equal(pytree.tree_unflatten(leaves, spec), batch.kjt)
    assert not pytree.tree_map(lambda leaf: leaf is None, batch.kjt).values()

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
    assert len(leaves) == 6
    assert leaves[4].tolist() == [[1, 0]]
    assert leaves[5].tolist() == [[0, 0]]
    rebuilt = pytree.tree_unflatten(leaves, spec)
    assert kjt_is_equal(rebuilt, kjt)
    assert rebuilt.stride() == 2


def test_structure_does_not_depend_on_what_was_derived_or_on_batch_size():
    kjt = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 2]))
    spec = pytree.tree_structure(kjt)
    kjt.sync().offsets()
    assert pytree.tree_structure(kjt) == spec
    assert pytree.tree_leaves(kjt)[3] is None
    larger = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 1, 1]))
    assert pytree.tree_structure(larger) == spec
    assert pytree.tree_structure(kjt.to_dict()["a"]) == pytree.tree_structure(kjt["a"])


def test_leaves_are_named():
    kjt = KeyedJaggedTensor(["a"], torch.arange(2), torch.ones(2), torch.tensor([2]))
    jt, kt = kjt["a"], KeyedTensor(["x"], [2], torch.ones(1, 2))
    names = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path([kjt, jt, kt])[0]]
    jagged = ["._values", "._weights", "._lengths", "._offsets"]
    keyed = [*jagged, "._stride_per_key_per_rank", "._inverse_indices"]
    assert names == [f"[0]{n}" for n in keyed] + [f"[1]{n}" for n in jagged] + ["[2]._values"]


def test_offsets_are_a_leaf_where_lengths_are_not_there():
    offsets = torch.tensor([0, 1, 2, 3])
    kjt = KeyedJaggedTensor(["a"], torch.arange(3), offsets=offsets)
    leaves, spec = pytree.tree_flatten(kjt)
    assert leaves[2] is None
    assert leaves[3] is offsets
    rebuilt = pytree.tree_unflatten(leaves, spec)
    assert rebuilt.stride() == 3
    assert kjt_is_equal(rebuilt, kjt)


def test_keyed_round_trip():
    kt = KeyedTensor(["x", "y"], [1, 2], torch.ones(3, 2), key_dim=0)
    doubled = pytree.tree_map(lambda leaf: leaf * 2, kt)
    assert doubled.keys() == kt.keys()
    assert doubled.key_dim() == 0
    assert doubled["y"].tolist() == [[2, 2], [2, 2]]


def test_jagged_with_other_leaves():
    jt = JaggedTensor(torch.ones(2), lengths=torch.tensor([2]))
    assert pytree.tree_map(lambda leaf: leaf is None, jt).weights_or_none() is True
    kjt = KeyedJaggedTensor(["a"], torch.ones(2), lengths=torch.tensor([2]))
    assert pytree.tree_map(lambda leaf: leaf is None, kjt).stride() == 0


@pytest.mark.parametrize(("kjt", "stride"), [(WITHOUT_KEYS, 5), (LARGER_STRIDE, 7)])
def test_a_batch_size_that_no_tensor_implies_stays(kjt, stride):
    leaves, spec = pytree.tree_flatten(kjt)
    for structure in (spec, pytree.treespec_loads(pytree.treespec_dumps(spec))):
        rebuilt = pytree.tree_unflatten(leaves, structure)
        assert rebuilt.stride() == stride
        assert kjt_is_equal(rebuilt, kjt)
        assert structure == pytree.tree_structure(rebuilt)
    assert pytree.tree_map(lambda leaf: None, kjt).stride() == stride
    assert torch.compile(lambda given: given, backend="eager")(kjt).stride() == stride


def _batch():
    ids = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 2]))
    return Batch(torch.ones(2, 1), ids, torch.zeros(2), ["age"], "liked")


def test_batches_of_several_parts():
    batch = _batch()
    leaves, spec = pytree.tree_flatten_with_path([batch, KJTList([batch.sparse_features])])
    names = [pytree.keystr(path) for path, _ in leaves]
    parts = "_values", "_weights", "_lengths", "_offsets"
    parts += "_stride_per_key_per_rank", "_inverse_indices"
    assert names == [
        "[0].dense_features",
        *(f"[0].sparse_features.{part}" for part in parts),
        "[0].labels",
        *(f"[1].features[0].{part}" for part in parts),
    ]
    loaded = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert loaded == spec
    rebuilt, batches = pytree.tree_unflatten([leaf for _, leaf in leaves], loaded)
    assert (rebuilt.dense_names, rebuilt.label_name) == (("age",), "liked")
    assert kjt_is_equal(rebuilt.sparse_features, batch.sparse_features)
    assert kjt_is_equal(batches[0], batch.sparse_features)
    assert pytree.tree_map(lambda leaf: None, batch).labels is None


def test_a_program_takes_a_batch():
    class Model(torch.nn.Module):
        def forward(self, batch: Batch) -> torch.Tensor:
            return batch.dense_features.sum() + batch.sparse_features.values().sum()

    program = torch.export.export(Model(), (_batch(),)).module()
    assert program(_batch()).item() == 5


def test_the_other_implementation_of_pytrees():
    pytest.importorskip("optree")
    from torch.utils import _cxx_pytree

    for kjt in (WITHOUT_KEYS, LARGER_STRIDE):
        leaves, spec = _cxx_pytree.tree_flatten(kjt)
        assert kjt_is_equal(_cxx_pytree.tree_unflatten(leaves, spec), kjt)
    assert _cxx_pytree.tree_map(lambda leaf: leaf, _batch()).dense_names == ("age",)
