import copy
import pickle

import pytest
import torch

from recsys.sparse import JaggedTensor, jt_is_equal


@pytest.fixture
def jt() -> JaggedTensor:
    return JaggedTensor(torch.tensor([1.0, 2.0, 3.0]), lengths=torch.tensor([1, 0, 2]))


def test_lengths_and_offsets_derive_from_each_other_once(jt):
    assert jt.offsets_or_none() is None
    assert jt.offsets().tolist() == [0, 1, 1, 3]
    assert jt.offsets() is jt.offsets_or_none()

    by_offsets = JaggedTensor(jt.values(), offsets=torch.tensor([0, 1, 1, 3], dtype=torch.int32))
    assert by_offsets.lengths_or_none() is None
    assert by_offsets.lengths().tolist() == [1, 0, 2]
    assert by_offsets.lengths() is by_offsets.lengths_or_none()
    assert by_offsets.lengths().dtype is torch.int32


def test_to_dense(jt):
    assert [bag.tolist() for bag in jt.to_dense()] == [[1], [], [2, 3]]
    assert jt.to_dense_weights() is None
    weighted = JaggedTensor(jt.values(), jt.values() * 2, jt.lengths())
    assert [bag.tolist() for bag in weighted.to_dense_weights()] == [[2], [], [4, 6]]


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (None, [[1, 7], [7, 7], [2, 3]]),
        (1, [[1], [7], [2]]),
        (3, [[1, 7, 7], [7, 7, 7], [2, 3, 7]]),
    ],
)
def test_to_padded_dense(jt, length, expected):
    assert jt.to_padded_dense(length, 7.0).tolist() == expected
    assert jt.to_padded_dense_weights(length) is None
    weighted = JaggedTensor(jt.values(), jt.values(), jt.lengths())
    assert weighted.to_padded_dense_weights(length, 7.0).tolist() == expected


def test_padded_rows_keep_their_gradient():
    rows = torch.ones(3, 2, requires_grad=True)
    JaggedTensor(rows, lengths=torch.tensor([1, 2])).to_padded_dense().sum().backward()
    assert rows.grad.tolist() == [[1, 1]] * 3


def test_from_dense(jt):
    bags = [torch.tensor([1.0]), torch.empty(0), torch.tensor([2.0, 3.0])]
    built = JaggedTensor.from_dense(bags, weights=bags)
    assert built.values().tolist() == [1, 2, 3]
    assert built.weights().tolist() == [1, 2, 3]
    assert built.lengths().tolist() == [1, 0, 2]
    with pytest.raises(ValueError, match="at least one bag; received an"):
        JaggedTensor.from_dense([])
    with pytest.raises(ValueError, match=r"weights .*lengths \[2, 0, 1\] for"):
        JaggedTensor.from_dense(bags, weights=bags[::-1])


def test_from_dense_lengths():
    padded = torch.tensor([[1, 2], [3, 4]])
    built = JaggedTensor.from_dense_lengths(padded, torch.tensor([1, 2]), padded * 10)
    assert built.values().tolist() == [1, 3, 4]
    assert built.weights().tolist() == [10, 30, 40]
    with pytest.raises(ValueError, match="width of values, 2; received 3"):
        JaggedTensor.from_dense_lengths(padded, torch.tensor([1, 3]))
    with pytest.raises(ValueError, match=r"\[M, width, ...\] and lengths \[M\]"):
        JaggedTensor.from_dense_lengths(padded, torch.tensor([1]))


def test_empty():
    empty = JaggedTensor.empty(is_weighted=True, values_dtype=torch.int64)
    assert empty.values().dtype is torch.int64
    assert empty.weights().numel() == 0
    assert empty.offsets().tolist() == [0]
    assert empty.to_dense() == []
    assert empty.to_padded_dense().shape == (0, 0)
    model = JaggedTensor(torch.ones(2, 3), lengths=torch.tensor([2]))
    assert JaggedTensor.empty_like(model).values().shape == (0, 3)


def test_missing_weights(jt):
    with pytest.raises(ValueError, match=r"has no weights\. Ask with weights_or_none"):
        jt.weights()


def test_device_moves_keep_everything(jt):
    jt.offsets()
    meta = jt.to("meta")
    assert meta.device().type == "meta"
    assert meta.lengths().is_meta
    assert meta.offsets_or_none().is_meta
    assert jt.device().type == "cpu"
    assert jt.size_in_bytes() == 3 * 4 + 3 * 8 + 4 * 8


def test_copy_in_place(jt):
    jt.offsets()
    jt.copy_(JaggedTensor(torch.tensor([4.0, 5, 6]), lengths=torch.tensor([3, 0, 0])))
    assert [bag.tolist() for bag in jt.to_dense()] == [[4, 5, 6], [], []]
    assert jt.offsets().tolist() == [0, 3, 3, 3]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_independent(jt, clone):
    twin = clone(jt)
    assert jt_is_equal(jt, twin)
    twin.values().zero_()
    assert jt.values().tolist() == [1, 2, 3]


def test_on_the_meta_device_what_needs_no_values_works():
    lengths = torch.empty(3, dtype=torch.int64, device="meta")
    jt = JaggedTensor(torch.empty(5, 2, device="meta"), lengths=lengths)
    assert jt.to_padded_dense(4).shape == (3, 4, 2)
    padded = torch.empty(3, 4, device="meta")
    for call in (
        jt.to_dense,
        jt.to_padded_dense,
        lambda: jt.to("cpu"),
        jt.validate,
        lambda: JaggedTensor.from_dense_lengths(padded, lengths),
    ):
        with pytest.raises(ValueError, match=r"JaggedTensor.* needs .*meta device"):
            call()
