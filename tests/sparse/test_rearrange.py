import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.sparse import JaggedTensor, KeyedJaggedTensor, kjt_is_equal
from tests.sparse.strategies import batches, check_equals, weights_of

SHARED = settings(deadline=None, max_examples=60, derandomize=True)


@pytest.fixture
def kjt() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], torch.arange(5), lengths=torch.tensor([2, 0, 1, 2]))


@SHARED
@given(batches(), st.data())
def test_permute(batch, data):
    if data.draw(st.booleans()):
        batch.kjt.sync()
    order = data.draw(st.permutations(range(len(batch.bags))))
    order = order[: data.draw(st.integers(0, len(order)))]
    permuted = batch.kjt.permute(order)
    keys = batch.kjt.keys()
    check_equals(permuted, {keys[i]: batch.bags[keys[i]] for i in order}, batch.is_weighted)
    as_tensor = batch.kjt.permute(order, torch.tensor(order, dtype=torch.int64))
    assert kjt_is_equal(permuted, as_tensor)


def test_permute_may_repeat_features(kjt):
    permuted = kjt.permute([1, 0, 1])
    assert permuted.keys() == ["b", "a", "b"]
    assert permuted.values().tolist() == [2, 3, 4, 0, 1, 2, 3, 4]
    assert permuted.lengths().tolist() == [1, 2, 2, 0, 1, 2]
    assert permuted["b"].values().tolist() == [2, 3, 4]


@pytest.mark.parametrize("bad", [2, -1])
def test_permute_out_of_range(kjt, bad):
    with pytest.raises(IndexError, match=rf"must be in 0..1; received \[{bad}\]"):
        kjt.permute([0, bad])


def test_permute_does_not_read_floats_as_positions(kjt):
    with pytest.raises(TypeError, match=r"indices_tensor must be int32 .*torch\.float32"):
        kjt.permute([0, 1], torch.tensor([0.5, -1.0]))


def test_permute_does_not_read_past_the_end(kjt):
    with pytest.raises(ValueError, match="up to 9 for 3"):
        KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([9])).permute([0])
    with pytest.raises(ValueError, match="received 3 entries for 2"):
        kjt.permute([0, 1], torch.tensor([0, 1, 1]))


def test_permuted_weights_keep_their_gradient():
    weights = torch.ones(3, requires_grad=True)
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(3), weights, torch.tensor([1, 2]))
    (kjt.permute([1, 0]).weights() * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert weights.grad.tolist() == [3, 1, 2]


@SHARED
@given(batches(), st.data())
def test_split(batch, data):
    keys = batch.kjt.keys()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(keys)), max_size=3)))
    bounds = [0, *cuts, len(keys)]
    parts = batch.kjt.split([b - a for a, b in itertools.pairwise(bounds)])
    for part, (start, end) in zip(parts, itertools.pairwise(bounds), strict=True):
        part_keys = keys[start:end]
        check_equals(part, {key: batch.bags[key] for key in part_keys}, batch.is_weighted)
    rejoined = KeyedJaggedTensor.concat(parts)
    assert kjt_is_equal(rejoined, batch.kjt)


@pytest.mark.parametrize("segments", [[1], [1, 2], [3, -1], []])
def test_split_must_cover_every_key(kjt, segments):
    # The peer drops the keys that are left over.
    with pytest.raises(ValueError, match="the number of keys, 2; received"):
        kjt.split(segments)


@SHARED
@given(st.data(), st.booleans())
def test_concat(data, is_weighted):
    stride = data.draw(st.integers(0, 3))
    shared = {"stride": stride, "is_weighted": is_weighted, "dtype": torch.int64}
    batch_1, batch_2 = data.draw(batches("a", **shared)), data.draw(batches("b", **shared))
    joined = KeyedJaggedTensor.concat([batch_1.kjt, batch_2.kjt])
    check_equals(joined, batch_1.bags | batch_2.bags, is_weighted)
    known = KeyedJaggedTensor.concat([batch_1.kjt.sync(), batch_2.kjt.sync()])
    assert known.length_per_key_or_none() == joined.length_per_key()


def test_concat_joins_inverse_indices():
    def build(key):
        return KeyedJaggedTensor(
            [key],
            torch.arange(1),
            lengths=torch.tensor([1]),
            stride_per_key=[1],
            inverse_indices=([key], torch.tensor([[0, 0]])),
        )

    joined = KeyedJaggedTensor.concat([build("a"), build("b")])
    assert joined.inverse_indices()[0] == ["a", "b"]
    assert joined.inverse_indices()[1].tolist() == [[0, 0], [0, 0]]
    assert joined.stride() == 2
    plain = KeyedJaggedTensor(["c"], torch.arange(1), lengths=torch.tensor([1]), stride_per_key=[1])
    with pytest.raises(ValueError, match=r"inverse indices .*received \[\(1, 2\), None\]"):
        KeyedJaggedTensor.concat([build("a"), plain])


def test_concat_leaves_out_inverse_indices_of_features_that_a_split_left_elsewhere():
    values, lengths = torch.arange(4), torch.tensor([1, 1, 1, 1])
    rows = torch.tensor([[0, 0, 0], [0, 0, 0]])
    both = KeyedJaggedTensor(
        ["a", "b"], values, lengths=lengths, inverse_indices=(["a", "b"], rows)
    )
    only_a, _ = both.split([1, 1])
    new_b = KeyedJaggedTensor(
        ["b"], values[:2], lengths=lengths[:2], inverse_indices=(["b"], torch.tensor([[1, 0, 1]]))
    )
    keys, indices = KeyedJaggedTensor.concat([new_b, only_a]).inverse_indices()
    assert (keys, indices.tolist()) == (["b", "a"], [[1, 0, 1], [0, 0, 0]])


@pytest.mark.parametrize("strides", [None, [1, 3]])
def test_on_the_meta_device_what_needs_no_values_works(strides):
    values, lengths = torch.empty(5, dtype=torch.int64), torch.empty(4, dtype=torch.int64)
    parts = ["a", "b"], values.to("meta"), None, lengths.to("meta")
    kjt = KeyedJaggedTensor(*parts, stride_per_key=strides)
    permuted = kjt.permute([1, 0, 1, 0])
    assert (permuted.keys(), permuted.stride()) == (["b", "a", "b", "a"], kjt.stride())
    assert (permuted.values().shape, permuted.lengths().shape) == ((10,), (8,))
    assert kjt.permute([]).values().shape == (0,)
    assert [part.values().shape for part in kjt.split([2, 0])] == [(5,), (0,)]
    assert KeyedJaggedTensor.concat([kjt]).to("meta").offsets().shape == (5,)
    needing = kjt.to_dict, kjt.sync, lambda: kjt["a"], lambda: kjt.permute([0])
    for call in (*needing, lambda: kjt.split([1, 1])):
        with pytest.raises(
            ValueError, match=r"KeyedJaggedTensor.length_per_key needs .*meta device"
        ):
            call()
    for call in (lambda: kjt.to("cpu"), kjt.validate, lambda: kjt_is_equal(kjt, kjt)):
        with pytest.raises(ValueError, match=r"KeyedJaggedTensor.* needs .*meta device"):
            call()
    known = KeyedJaggedTensor(*parts, stride_per_key=strides, length_per_key=[2, 3])
    assert known.to_dict()["b"].values().shape == (3,)
    assert known.split([1, 1])[0].values().shape == (2,)
    assert known.permute([1]).values().shape == (3,)


def test_concat_of_parts_that_do_not_fit(kjt):
    other = KeyedJaggedTensor(["c"], torch.arange(1), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"\(batch size\); received \[2, 1\]"):
        KeyedJaggedTensor.concat([kjt, other])
    with pytest.raises(ValueError, match=r"concat.keys must be unique; .*\['a', 'b'\]"):
        KeyedJaggedTensor.concat([kjt, kjt])
    with pytest.raises(ValueError, match="at least one part; received none"):
        KeyedJaggedTensor.concat([])
    weighted = KeyedJaggedTensor(["c"], torch.arange(1), torch.ones(1), torch.tensor([1, 0]))
    with pytest.raises(ValueError, match=r"have weights, or none; .*\[False, True\]"):
        KeyedJaggedTensor.concat([kjt, weighted])
    narrow = KeyedJaggedTensor(["c"], torch.arange(1).int(), lengths=torch.tensor([1, 0]))
    with pytest.raises(ValueError, match=r"same dtype; received \['torch.int32', 'torch.int64'\]"):
        KeyedJaggedTensor.concat([kjt, narrow])


def test_concat_ignores_parts_without_keys(kjt):
    joined = KeyedJaggedTensor.concat([KeyedJaggedTensor.empty(), kjt])
    assert kjt_is_equal(joined, kjt)


@SHARED
@given(batches())
def test_from_jt_dict(batch):
    built = KeyedJaggedTensor.from_jt_dict(batch.kjt.to_dict())
    check_equals(built, batch.bags, batch.is_weighted)


def test_from_jt_dict_with_a_batch_size_per_feature():
    jt = JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 2]))
    built = KeyedJaggedTensor.from_jt_dict({"a": jt, "b": jt}, force_variable_stride=True)
    assert built.variable_stride_per_key()
    assert built.stride_per_key() == [2, 2]
    assert not KeyedJaggedTensor.from_jt_dict({"a": jt, "b": jt}).variable_stride_per_key()


def test_from_jt_dict_of_nothing():
    with pytest.raises(ValueError, match="from_jt_dict needs at least one part"):
        KeyedJaggedTensor.from_jt_dict({})


def test_sync_constructors():
    values, weights = torch.arange(3), weights_of(torch.arange(3))
    by_lengths = KeyedJaggedTensor.from_lengths_sync(
        ["a", "b"], values, torch.tensor([1, 2]), weights
    )
    by_offsets = KeyedJaggedTensor.from_offsets_sync(
        ["a", "b"], values, torch.tensor([0, 1, 3]), weights
    )
    for kjt in (by_lengths, by_offsets):
        assert kjt.length_per_key_or_none() == [1, 2]
        check_equals(kjt, {"a": [[0]], "b": [[1, 2]]}, is_weighted=True)
    with pytest.raises(ValueError, match="up to 4 for 3"):
        KeyedJaggedTensor.from_lengths_sync(["a", "b"], values, torch.tensor([1, 3]))


def test_empty():
    empty = KeyedJaggedTensor.empty(is_weighted=True, values_dtype=torch.int64)
    assert empty.stride() == 0
    assert empty.keys() == []
    assert empty.weights().numel() == 0
    assert empty.offsets().tolist() == [0]
    assert empty.to_dict() == {}
    assert empty.permute([]).keys() == []
    assert empty.split([]) == []


def test_empty_like_keeps_dtypes_and_stride(kjt):
    empty = KeyedJaggedTensor.empty_like(kjt)
    assert empty.keys() == []
    assert empty.stride() == 2
    assert empty.values().dtype is torch.int64


def test_unknown_key(kjt):
    with pytest.raises(KeyError, match=r"no key 'zz'; .*\['a', 'b'\]"):
        kjt["zz"]


def test_views_share_memory(kjt):
    for jt in (kjt["b"], kjt.to_dict()["b"]):
        assert isinstance(jt, JaggedTensor)
        assert jt.values().data_ptr() == kjt.values()[2:].data_ptr()


def test_views_keep_their_gradient():
    values = torch.ones(3, requires_grad=True)
    kjt = KeyedJaggedTensor(["a", "b"], values, lengths=torch.tensor([1, 2]))
    kjt.to_dict()["b"].values().sum().backward()
    assert values.grad.tolist() == [0, 1, 1]
