import copy
import pickle

import pytest
import torch
from hypothesis import given, settings

from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor, kjt_is_equal
from recsys.sparse.kjt_list import KJTList
from tests.pretended_cuda import CUDA, PretendedCuda
from tests.sparse.strategies import batches, check_equals

SHARED = settings(deadline=None, max_examples=50, derandomize=True)


@pytest.fixture
def kjt() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], torch.arange(5), lengths=torch.tensor([2, 0, 1, 2]))


@pytest.fixture
def variable() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(5),
        lengths=torch.tensor([2, 0, 1, 2]),
        stride_per_key_per_rank=[[1, 2], [1, 0]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 1, 2, 0], [0, 0, 0, 0]])),
    )


@SHARED
@given(batches())
def test_reads_what_was_put_in(batch):
    check_equals(batch.kjt, batch.bags, batch.is_weighted)


def test_numbers_derive_lazily_and_once(kjt):
    assert kjt.length_per_key_or_none() is None
    assert kjt.offset_per_key_or_none() is None
    assert kjt.offsets_or_none() is None
    assert kjt.sync() is kjt
    assert kjt.length_per_key_or_none() == [2, 3]
    assert kjt.offset_per_key_or_none() == [0, 2, 5]
    assert kjt.offsets() is kjt.offsets_or_none()
    assert kjt.unsync().length_per_key_or_none() is None
    assert kjt.index_per_key() == {"a": 0, "b": 1}
    assert kjt.lengths_offset_per_key() == [0, 2, 4]
    assert kjt.stride_per_key_per_rank() == []


def test_known_numbers_are_taken():
    kjt = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(3),
        lengths=torch.tensor([1, 2]),
        lengths_offset_per_key=[0, 1, 2],
        offset_per_key=[0, 1, 3],
        index_per_key={"a": 0, "b": 1},
    )
    assert kjt.length_per_key_or_none() == [1, 2]
    assert kjt["b"].values().tolist() == [1, 2]
    again = KeyedJaggedTensor(
        ["a", "b"], kjt.values(), lengths=kjt.lengths(), jt_dict=kjt.to_dict()
    )
    assert again["b"].values().tolist() == [1, 2]


def test_known_numbers_that_do_not_fit_are_refused():
    parts = ["a", "b"], torch.arange(3), None, torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"\[0, 1, 2\]; .*\[0, 1, 3\]"):
        KeyedJaggedTensor(*parts, lengths_offset_per_key=[0, 1, 3])
    with pytest.raises(ValueError, match=r"jt_dict must .*\['a', 'b'\]; rec.* \[\]"):
        KeyedJaggedTensor(*parts, jt_dict={})


def test_lengths_by_key_and_sample_are_flattened():
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(5), lengths=torch.tensor([[2, 0], [1, 2]]))
    assert kjt.flatten_lengths().lengths().tolist() == [2, 0, 1, 2]
    assert kjt.stride() == 2


def test_features_with_different_batch_sizes(variable):
    assert variable.variable_stride_per_key()
    assert variable.stride_per_key() == [3, 1]
    assert variable.stride_per_key_per_rank() == [[1, 2], [1, 0]]
    assert variable.stride() == 4  # samples that the inverse indices cover
    assert variable.lengths_offset_per_key() == [0, 3, 4]
    assert variable.inverse_indices()[0] == ["a", "b"]
    as_tensor = KeyedJaggedTensor(
        ["a", "b"],
        variable.values(),
        lengths=variable.lengths(),
        stride_per_key_per_rank=torch.tensor([[1, 2], [1, 0]]),
    )
    assert as_tensor.stride_per_key_per_rank() == [[1, 2], [1, 0]]
    assert as_tensor.stride() == 3
    assert as_tensor.inverse_indices_or_none() is None


def test_inverse_indices_over_equal_batch_sizes():
    kjt = KeyedJaggedTensor(
        ["a"],
        torch.arange(2),
        lengths=torch.tensor([1, 1]),
        inverse_indices=(["a"], torch.tensor([[0, 1, 1]])),
    )
    assert kjt.stride() == 3
    assert kjt.stride_per_key() == [2]
    assert kjt["a"].lengths().tolist() == [1, 1]


def test_missing_parts(kjt):
    with pytest.raises(ValueError, match=r"has no weights\. Ask with weights_or_none"):
        kjt.weights()
    with pytest.raises(ValueError, match=r"no inverse indices\. Ask with inverse_indices"):
        kjt.inverse_indices()


def test_device_moves_keep_what_is_known(variable):
    variable.sync().offsets()
    meta = variable.to("meta")
    assert meta.device().type == "meta"
    assert meta.offsets_or_none().is_meta
    assert meta.inverse_indices()[1].is_meta
    assert meta.length_per_key_or_none() == [3, 2]
    assert meta.stride_per_key_per_rank() == variable.stride_per_key_per_rank()


def _tensors(kjt):
    inverse = kjt.inverse_indices_or_none()
    held = [kjt.values(), kjt.weights(), kjt.lengths_or_none(), kjt.offsets_or_none()]
    return held + ([] if inverse is None else [inverse[1]])


def test_a_copy_without_blocking_waits_for_no_tensor_pinned_or_not(variable):
    weighted = KeyedJaggedTensor(
        variable.keys(),
        variable.values(),
        torch.rand(5),
        variable.lengths(),
        stride_per_key_per_rank=variable.stride_per_key_per_rank(),
        inverse_indices=variable.inverse_indices(),
    )
    weighted.offsets()
    with PretendedCuda() as cuda:
        weighted.to(CUDA)
        assert [kind for kind, _, _ in cuda.notes] == ["upload"] * 5
        pinned = weighted.pin_memory()
        assert [part.is_pinned() for part in _tensors(pinned)] == [True] * 5
        for given in (weighted, pinned):
            cuda.forget()
            moved = given.to("cuda", non_blocking=True)
            assert cuda.notes == []
            assert all(map(cuda.is_on_device, _tensors(moved)))
            assert len(_tensors(moved)) == 5
            for mine, theirs in zip(_tensors(moved), _tensors(weighted), strict=True):
                assert mine.tolist() == theirs.tolist()
        cuda.forget()
        again = moved.to(CUDA, non_blocking=True)
        jagged = JaggedTensor(torch.ones(2), torch.ones(2), torch.tensor([2]))
        jagged.to(CUDA, non_blocking=True)
        KeyedTensor(["a"], [1], torch.ones(2, 1)).to(CUDA, non_blocking=True)
        KJTList([weighted]).to(CUDA, non_blocking=True)
        assert cuda.notes == []
        assert again.values().data_ptr() == moved.values().data_ptr()


def test_weights_that_train_keep_their_gradient_on_a_device(kjt):
    weights = torch.ones(5, requires_grad=True)
    weighted = KeyedJaggedTensor(kjt.keys(), kjt.values(), weights, kjt.lengths())
    with PretendedCuda():
        weighted.to(CUDA, non_blocking=True).weights().sum().backward()
    assert weights.grad.tolist() == [1.0] * 5


def test_to_changes_the_dtype_of_weights_only():
    kjt = KeyedJaggedTensor(["a"], torch.arange(2), torch.ones(2), torch.tensor([2]))
    moved = kjt.to(torch.device("cpu"), dtype=torch.float64)
    assert moved.weights().dtype is torch.float64
    assert moved.values().dtype is torch.int64


def test_copy_in_place(kjt):
    kjt.sync().offsets()
    other = KeyedJaggedTensor(["a", "b"], torch.arange(5) + 5, lengths=torch.tensor([1, 1, 1, 2]))
    kjt.copy_(other)
    check_equals(kjt, {"a": [[5], [6]], "b": [[7], [8, 9]]}, is_weighted=False)
    with pytest.raises(ValueError, match="keys and strides must be equal"):
        kjt.copy_(KeyedJaggedTensor(["a"], torch.arange(1), lengths=torch.tensor([1])))


def test_storage(kjt):
    assert kjt.size_in_bytes() == 5 * 8 + 4 * 8
    assert kjt.clear_storage() == 72
    assert kjt.values().untyped_storage().size() == 0


@SHARED
@given(batches())
def test_copies_are_equal_and_independent(batch):
    for twin in (copy.deepcopy(batch.kjt), pickle.loads(pickle.dumps(batch.kjt))):
        assert kjt_is_equal(batch.kjt, twin)
        twin.values().zero_()
    check_equals(batch.kjt, batch.bags, batch.is_weighted)


def test_views_survive_deepcopy_and_pickle(kjt):
    for clone in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        as_dict = clone(kjt.to_dict())
        assert as_dict["b"].values().tolist() == [2, 3, 4]
        assert as_dict["b"].lengths().tolist() == [1, 2]


@pytest.mark.parametrize("part", ["lengths", "offsets"])
def test_parts_are_what_from_parts_takes(part):
    bags = {"lengths": torch.tensor([1, 0, 2]), "offsets": torch.tensor([0, 1, 1, 3])}
    kjt = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([4, 5, 6]),
        torch.ones(3),
        **{part: bags[part]},
        stride_per_key_per_rank=[[1], [2]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 0], [1, 0]])),
    )
    parts = kjt.parts()
    assert parts.lengths.tolist() == [1, 0, 2]
    assert parts.offsets is kjt.offsets_or_none()
    keys, values, weights, lengths, offsets, *rest = parts
    again = KeyedJaggedTensor.from_parts(
        keys, values, weights, lengths, offsets, **dict(zip(parts._fields[5:], rest, strict=True))
    )
    assert kjt_is_equal(again, kjt)
    assert again.stride() == 2


def test_parts_refuse_bags_that_do_not_fit():
    kjt = KeyedJaggedTensor(["a"], torch.ones(2), lengths=torch.tensor([3, -1]))
    with pytest.raises(ValueError, match="received length -1 at bag 1"):
        kjt.parts()


def test_other_values_take_the_place_of_the_values_only():
    ones = torch.ones(2, dtype=torch.int64)
    kjt = KeyedJaggedTensor(["a"], ones, ones, ones)  # one tensor in three roles
    replaced = kjt.with_values(ones * 7)
    assert replaced.values().tolist() == [7, 7]
    assert replaced.weights().tolist() == replaced.lengths().tolist() == [1, 1]
