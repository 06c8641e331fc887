"""Random jagged batches with a plain-Python model beside them."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from recsys.sparse import KeyedJaggedTensor

Bags = list[list[int]]


@dataclass
class Batch:
    """A KeyedJaggedTensor and its expected content: the bags of each feature."""

    kjt: KeyedJaggedTensor
    bags: dict[str, Bags]
    is_weighted: bool


@st.composite
def batches(draw, prefix="f", stride=None, is_weighted=None, dtype=None, variable=None) -> Batch:
    num_keys = draw(st.integers(1, 4))
    variable = draw(st.booleans()) if variable is None else variable
    stride = draw(st.integers(0, 3)) if stride is None else stride
    strides = [draw(st.integers(0, 3)) if variable else stride for _ in range(num_keys)]
    bag = st.lists(st.integers(0, 9), max_size=3)
    bags = {f"{prefix}{i}": [draw(bag) for _ in range(strides[i])] for i in range(num_keys)}
    is_weighted = draw(st.booleans()) if is_weighted is None else is_weighted
    length_dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    values = torch.tensor(
        [v for feature in bags.values() for bag in feature for v in bag],
        dtype=dtype or draw(st.sampled_from([torch.int32, torch.int64, torch.float32])),
    )
    lengths = torch.tensor(
        [len(bag) for feature in bags.values() for bag in feature], dtype=length_dtype
    )
    by_offsets = draw(st.booleans())
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=length_dtype), (1, 0))
    kjt = KeyedJaggedTensor(
        list(bags),
        values,
        weights_of(values) if is_weighted else None,
        lengths=None if by_offsets else lengths,
        offsets=offsets if by_offsets else None,
        stride_per_key=strides if variable else None,
        stride=None if variable else stride,
    )
    return Batch(kjt, bags, is_weighted)


def weights_of(values: Tensor) -> Tensor:
    """Return weights that identify their values."""
    return values.float() + 0.5


def check_equals(kjt: KeyedJaggedTensor, bags: dict[str, Bags], is_weighted: bool) -> None:
    """Check every way to read a KeyedJaggedTensor against the model."""
    assert kjt.keys() == list(bags)
    assert kjt.stride_per_key() == [len(feature) for feature in bags.values()]
    assert kjt.length_per_key() == [sum(map(len, feature)) for feature in bags.values()]
    assert kjt.offset_per_key()[-1] == len(kjt.values())
    as_dict = kjt.to_dict()
    assert list(as_dict) == list(bags)
    for key, feature in bags.items():
        for jt in (as_dict[key], kjt[key]):
            assert [bag.tolist() for bag in jt.to_dense()] == feature
            assert jt.lengths().tolist() == [len(bag) for bag in feature]
            assert len(jt.offsets()) == len(feature) + 1
            assert (jt.weights_or_none() is not None) == is_weighted
            if is_weighted:
                assert torch.equal(jt.weights(), weights_of(jt.values()))
    kjt.validate()
