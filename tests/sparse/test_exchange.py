import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.sparse import KeyedJaggedTensor
from tests.sparse.strategies import check_equals, weights_of

SHARED = settings(deadline=None, max_examples=60, derandomize=True)
BAG = st.lists(st.integers(0, 9), max_size=3)


def build(bags, is_weighted, variable):
    flat = [bag for feature in bags.values() for bag in feature]
    values = torch.tensor([v for bag in flat for v in bag], dtype=torch.int64)
    return KeyedJaggedTensor(
        list(bags),
        values,
        weights_of(values) if is_weighted else None,
        lengths=torch.tensor([len(bag) for bag in flat], dtype=torch.int32),
        stride_per_key=[len(feature) for feature in bags.values()] if variable else None,
    )


@SHARED
@given(st.data(), st.booleans(), st.sampled_from(["even", "uneven", "variable"]))
def test_what_ranks_send_each_other_comes_together(data, is_weighted, mode):
    num_ranks, num_keys = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    key_splits = [num_keys // num_ranks] * num_ranks
    key_splits[0] += num_keys % num_ranks
    stride = data.draw(st.integers(0, 2))

    sent = []
    for _ in range(num_ranks):
        size = data.draw(st.integers(0, 3)) if mode == "uneven" else stride
        sizes = [data.draw(st.integers(0, 3)) if mode == "variable" else size] * num_keys
        bags = {f"f{i}": [data.draw(BAG) for _ in range(n)] for i, n in enumerate(sizes)}
        sent.append(bags)
    kjts = [build(bags, is_weighted, mode == "variable") for bags in sent]
    labels = kjts[0].dist_labels()
    assert ("weights" in labels, "strides" in labels) == (is_weighted, mode == "variable")

    for rank in range(num_ranks):
        parts = []  # per tensor, the part of each rank for this one
        for label in range(len(labels)):
            pieces = [
                kjt.dist_tensors()[label].split(kjt.dist_splits(key_splits)[label])[rank]
                for kjt in kjts
            ]
            parts.append(torch.cat(pieces))
        first = sum(key_splits[:rank])
        keys = [f"f{i}" for i in range(first, first + key_splits[rank])]
        strides = [kjt.stride() for kjt in kjts]
        segments = torch.arange(num_ranks * len(keys)).view(num_ranks, len(keys)).T.flatten()
        if mode == "uneven" and len(set(strides)) > 1:  # then single bags are permuted
            sizes = torch.tensor(strides).repeat_interleave(len(keys)).tolist()
            bags_of = torch.arange(sum(sizes)).split(sizes)
            segments = torch.cat([bags_of[i] for i in segments.tolist()] or [segments])
        got = KeyedJaggedTensor.dist_init(
            keys,
            parts,
            variable_stride_per_key=mode == "variable",
            num_workers=num_ranks,
            recat=None if num_ranks == 1 else segments.int(),
            stride_per_rank=None if mode == "variable" else strides,
        )
        expected = {key: [bag for bags in sent for bag in bags[key]] for key in keys}
        check_equals(got, expected, is_weighted)
        if mode == "variable":
            per_rank = [[len(bags[key]) for bags in sent] for key in keys]
            assert got.stride_per_key_per_rank() == per_rank
        else:
            assert got.stride() == sum(strides)


def test_batch_sizes_must_be_known():
    with pytest.raises(ValueError, match="each of 2 ranks; received None"):
        KeyedJaggedTensor.dist_init(
            ["a"], [torch.tensor([1, 1]), torch.arange(2)], False, 2, None, None
        )


def test_recat_must_fit():
    with pytest.raises(ValueError, match="received 4 positions for 2 parts"):
        KeyedJaggedTensor.dist_init(
            ["a"], [torch.ones(4).int(), torch.arange(4)], False, 2, torch.arange(4), [2, 2]
        )
