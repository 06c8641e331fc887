import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.kernels import ops
from tests.needs_triton import needs_triton

INTS = st.sampled_from([torch.int32, torch.int64])
DTYPES = st.sampled_from([torch.int32, torch.int64, torch.float32, torch.float64, torch.float16])
WEIGHT_DTYPES = st.sampled_from([None, torch.float32, torch.float64, torch.bfloat16])
SHARED = settings(deadline=None, max_examples=60, derandomize=True)

needs_fbgemm = pytest.mark.skipif(
    not ops.HAS_FBGEMM, reason="fbgemm_gpu, the other side of the comparison, is not installed"
)


def both(function, *args, **kwargs):
    """Run with FBGEMM and without; check that every output is equal; return one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "FBGEMM_DEVICES", {"cpu"})
        fast = function(*args, **kwargs)
        patch.setattr(ops, "FBGEMM_DEVICES", set())
        plain = function(*args, **kwargs)
    pair = zip(fast, plain, strict=True) if isinstance(fast, tuple) else [(fast, plain)]
    for a, b in pair:
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    return plain


@st.composite
def jagged(draw):
    """Lengths [F, B], values [N] that equal their position, weights [N] or None."""
    num_features, batch = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    lengths = draw(
        st.lists(st.integers(0, 3), min_size=num_features * batch, max_size=num_features * batch)
    )
    lengths_FB = torch.tensor(lengths, dtype=draw(INTS)).view(num_features, batch)
    values = torch.arange(sum(lengths)).to(draw(DTYPES))
    weight_dtype = draw(WEIGHT_DTYPES)
    weights = None if weight_dtype is None else (torch.arange(sum(lengths)) / 8).to(weight_dtype)
    return lengths_FB, values, weights


@needs_fbgemm
@SHARED
@given(jagged())
def test_cumsum_and_segment_sum(batch):
    lengths_FB, _, _ = batch
    offsets = both(ops.complete_cumsum, lengths_FB.flatten())
    assert offsets.tolist() == [0, *itertools.accumulate(lengths_FB.flatten().tolist())]

    stride = lengths_FB.shape[1]
    rows = torch.arange(len(lengths_FB) + 1) * stride
    per_feature = both(ops.segment_sum, lengths_FB.flatten(), rows)
    assert per_feature.tolist() == lengths_FB.sum(1).tolist()


@needs_fbgemm
@SHARED
@given(jagged(), st.data())
def test_segments_move_where_their_plan_says(batch, data):
    lengths_FB, values, _ = batch
    sizes = lengths_FB.flatten().long().numpy()
    segments = torch.split(values, sizes.tolist())
    pick = st.lists(st.integers(0, len(sizes) - 1), max_size=6) if len(sizes) else st.just([])
    order = np.array(data.draw(pick), dtype=np.int32)
    expected = torch.cat([values[:0], *[segments[i] for i in order]])
    assert torch.equal(both(ops.move_segments, values, order, sizes), expected)
    plan, total = ops.plan_of_moves(order, sizes)
    begins, shifts = np.split(plan, 2)
    assert total == len(expected)
    for begin, shift, segment in zip(begins, shifts, order, strict=True):
        assert torch.equal(values[begin + shift :][: sizes[segment]], segments[segment])
        assert torch.equal(expected[begin:][: sizes[segment]], segments[segment])


@SHARED
@given(jagged())
def test_segments_swap_and_swap_back(batch):
    lengths_FB, values, _ = batch
    sizes = lengths_FB.long().numpy()
    segments = torch.split(values, sizes.ravel().tolist())
    places = np.arange(sizes.size).reshape(sizes.shape)
    expected = torch.cat([values[:0], *[segments[place] for place in places.T.ravel()]])
    swapped = ops.swap_segments(values, sizes)
    assert torch.equal(swapped, expected)
    assert torch.equal(ops.swap_segments(swapped, sizes.T), values)


@needs_fbgemm
@SHARED
@given(jagged(), st.data())
def test_permutes(batch, data):
    lengths_FB, values, weights = batch
    pick = st.lists(st.integers(0, len(lengths_FB) - 1), max_size=6)
    permute = torch.tensor(data.draw(pick), dtype=data.draw(INTS))
    segments = torch.split(values, lengths_FB.sum(1).tolist())
    expected = torch.cat([values[:0], *[segments[i] for i in permute.tolist()]])
    total = data.draw(st.sampled_from([None, len(expected)]))

    lengths, picked, _ = both(ops.permute_2d, permute, lengths_FB, values, weights, total)
    assert torch.equal(picked, expected)
    assert torch.equal(lengths, lengths_FB[permute])

    segment_lengths = lengths_FB.sum(1, dtype=lengths_FB.dtype)
    _, picked, _ = both(ops.permute_1d, permute, segment_lengths, values, weights, total)
    assert torch.equal(picked, expected)


@pytest.mark.parametrize("use_fbgemm", [True, False])
def test_permute_is_differentiable_and_takes_rows(monkeypatch, use_fbgemm):
    monkeypatch.setattr(ops, "FBGEMM_DEVICES", {"cpu"} if use_fbgemm and ops.HAS_FBGEMM else set())
    permute, lengths = torch.tensor([1, 1]), torch.tensor([1, 2])
    weights = torch.ones(3, requires_grad=True)
    _, _, picked_weights = ops.permute_1d(permute, lengths, torch.arange(3), weights)
    (3 * picked_weights.sum()).backward()
    assert weights.grad.tolist() == [0, 6, 6]

    rows = torch.arange(6.0).view(3, 2).requires_grad_()
    _, picked, _ = ops.permute_1d(permute, lengths, rows)
    assert picked.tolist() == [[2, 3], [4, 5], [2, 3], [4, 5]]
    picked.sum().backward()
    assert rows.grad.tolist() == [[0, 0], [2, 2], [2, 2]]


@needs_fbgemm
@SHARED
@given(st.data())
def test_block_bucketize(data):
    num_features, num_buckets = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    variable = data.draw(st.booleans())
    batch_sizes = data.draw(
        st.lists(st.integers(0, 3), min_size=num_features, max_size=num_features)
        if variable
        else st.integers(0, 3).map(lambda size: [size] * num_features)
    )
    starts = [  # first row of each bucket, and the number of rows
        data.draw(
            st.lists(st.integers(0, 9), min_size=num_buckets - 1, max_size=num_buckets - 1).map(
                lambda inner: [0, *sorted(inner), 10]
            )
        )
        for _ in range(num_features)
    ]
    uneven = data.draw(st.booleans())
    if not uneven:
        sizes = [data.draw(st.integers(1, 4)) for _ in range(num_features)]
        starts = [[w * size for w in range(num_buckets + 1)] for size in sizes]

    bags = [
        (f, data.draw(st.lists(st.integers(0, starts[f][-1] - 1), max_size=3)))
        for f, size in enumerate(batch_sizes)
        for _ in range(size)
    ]
    id_dtype, length_dtype = data.draw(INTS), data.draw(INTS)
    ids = torch.tensor([i for _, bag in bags for i in bag], dtype=id_dtype)
    weight_dtype = data.draw(WEIGHT_DTYPES)
    weights = None if weight_dtype is None else (torch.arange(len(ids)) / 8).to(weight_dtype)
    lengths, local_ids, new_weights, positions = both(
        ops.block_bucketize,
        torch.tensor([len(bag) for _, bag in bags], dtype=length_dtype),
        ids,
        weights,
        torch.tensor([1] * num_features if uneven else sizes, dtype=id_dtype),
        num_buckets,
        boundaries=[torch.tensor(s, dtype=id_dtype) for s in starts] if uneven else None,
        return_positions=True,
        batch_size_per_feature=torch.tensor(batch_sizes, dtype=id_dtype) if variable else None,
        max_batch_size=max(batch_sizes) if variable else None,
    )

    expected_ids, expected_lengths = [], []
    for w in range(num_buckets):
        for f, bag in bags:
            mine = [i - starts[f][w] for i in bag if starts[f][w] <= i < starts[f][w + 1]]
            expected_ids += mine
            expected_lengths.append(len(mine))
    assert local_ids.tolist() == expected_ids
    assert lengths.tolist() == expected_lengths
    assert sorted(positions.tolist()) == list(range(len(ids)))
    if weights is not None:
        assert torch.equal(new_weights[positions.long()], weights)


def test_block_bucketize_keeps_weight_gradients():
    weights = torch.ones(2, requires_grad=True)
    _, _, routed, _ = ops.block_bucketize(
        torch.tensor([2]), torch.tensor([5, 0]), weights, torch.tensor([5]), 2
    )
    (routed * torch.tensor([2.0, 3.0])).sum().backward()
    assert weights.grad.tolist() == [3.0, 2.0]


def test_block_bucketize_refuses_empty_blocks():
    # FBGEMM would answer with id modulo num_buckets.
    with pytest.raises(ValueError, match=r"1 row; received \[3, 0\]"):
        ops.block_bucketize(
            torch.tensor([1, 1]), torch.tensor([0, 1]), None, torch.tensor([3, 0]), 2
        )


@needs_fbgemm
@SHARED
@given(jagged(), st.integers(0, 4), st.booleans())
def test_jagged_to_padded_dense(batch, max_length, rows):
    lengths_FB, values, _ = batch
    offsets = ops.complete_cumsum(lengths_FB.flatten())
    if rows:
        values = torch.stack([values, -values], 1)
    padded = both(ops.jagged_to_padded_dense, values, offsets, max_length, -1.0)
    for row, segment in zip(padded, values.split(lengths_FB.flatten().tolist()), strict=True):
        kept = segment[:max_length]
        assert torch.equal(row[: len(kept)], kept)
        assert (row[len(kept) :] == -1).all()


@pytest.mark.parametrize("use_fbgemm", [True, False])
def test_padding_is_differentiable(monkeypatch, use_fbgemm):
    monkeypatch.setattr(ops, "FBGEMM_DEVICES", {"cpu"} if use_fbgemm and ops.HAS_FBGEMM else set())
    values = torch.ones(3, 2, requires_grad=True)
    ops.jagged_to_padded_dense(values, torch.tensor([0, 2, 3]), 1).sum().backward()
    assert values.grad.tolist() == [[1, 1], [0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("failure", "warning"),
    [
        ("ModuleNotFoundError('absent', name='fbgemm_gpu')", ""),
        ("OSError('undefined symbol')", "cannot be loaded (undefined symbol); using the slower"),
    ],
)
def test_works_without_fbgemm(tmp_path, failure, warning):
    package = tmp_path / "fbgemm_gpu"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {failure}")
    script = (
        "import recsys.kernels.ops as ops, torch; print(ops.HAS_FBGEMM, list(ops.FBGEMM_DEVICES), "
    )
    script += "ops.complete_cumsum(torch.tensor([1, 2])).tolist())"
    search_path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": search_path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False [] [0, 1, 3]"
    assert warning in done.stderr
    assert bool(done.stderr) == bool(warning)


SEES_TRITON = """
import sysconfig, warnings
{change}
import torch
from recsys.kernels import ops
from recsys.kernels.support import choose_backend
from recsys.kernels.types import LookupSettings, PoolingType, UpdateMode
settings = LookupSettings(
    device=torch.device("cuda"), dims=[4], feature_table_map=[0], pooling=PoolingType.SUM,
    optimizer=None, update_mode=UpdateMode.GRADIENT,
)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    choose_backend(settings)
print(ops.HAS_TRITON, ops.WHY_TRITON_FAILS, *(str(w.message) for w in said), sep="|")
"""


@needs_triton
@pytest.mark.parametrize(
    ("variables", "change", "why"),
    [
        ({"CC": "cc"}, "", ""),
        ({"PATH": "", "TRITON_INTERPRET": "1"}, "", ""),
        ({"PATH": ""}, "", "no C compiler; install gcc"),
        (
            {"CC": "cc"},
            "sysconfig.get_path = lambda *names: '/nowhere'",
            "no /nowhere/Python.h; install Python's headers",
        ),
    ],
)
def test_triton_is_used_where_it_can_compile(variables, change, why):
    unset = ("CC", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SEES_TRITON.format(change=change)],
        env=environment | variables | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    is_used, found, *said = done.stdout.strip().split("|")
    assert is_used == str(not why)
    assert why in found
    assert len(said) == bool(why)
    assert all(why in text for text in said)
