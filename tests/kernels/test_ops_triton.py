"""Triton's kernel moves segments as a loop over them does; on a CPU by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from recsys.kernels import ops
from tests.kernels.compiled import num_compiled
from tests.needs_triton import HAS_TRITON, NEEDS_TRITON

if not HAS_TRITON:
    pytest.skip(NEEDS_TRITON, allow_module_level=True)

from recsys.kernels import ops_triton
from recsys.kernels.bounds import NO_LIMIT, are_bags_bad, find_bad_ids, safe_lengths
from recsys.kernels.ops_triton import (
    build_header,
    complete_cumsum,
    make_safe,
    move_segments,
    pack,
    places_of_bags,
    row_ids,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

GUARD = 64  # values around a buffer that must stay as they are


def _case(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the picked segments, and the sizes of all; some are empty, some long."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, [3, 40, 900][seed % 3], rng.integers(1, 60))
    sizes *= rng.random(sizes.size) < 0.7
    order = rng.integers(0, sizes.size, rng.integers(0, 80)).astype(np.int32)
    return order, sizes


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "number", [0, 1, 7, 4095, 4096, 4097, 50_000, *[30_000_000] * (DEVICE == "cuda")]
)
def test_lengths_add_up_to_offsets(number: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(number)
    lengths = rng.integers(-3, 2**31 if dtype is torch.int64 else 9, number)
    given = torch.from_numpy(np.repeat(lengths, 2)).to(dtype).to(DEVICE)[::2]
    found = complete_cumsum(given)
    assert found.dtype is dtype
    expected = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
    assert torch.equal(found.cpu(), expected.to(dtype))


def test_blocks_of_sums_are_added_up_in_several_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_triton, "_SCANNED", 16)  # of 150 blocks, 16 are read at once
    lengths = torch.arange(16 * 150 - 5, device=DEVICE)
    assert torch.equal(complete_cumsum(lengths)[1:], lengths.cumsum(0))


def test_what_is_traced_or_fake_is_not_given_to_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_CUDA", frozenset((torch.device(DEVICE).type,)))
    lengths = torch.tensor([1, 2], device=DEVICE)
    traced = torch.jit.trace(ops.complete_cumsum, lengths, check_trace=False)
    assert traced(lengths.flip(0)).tolist() == [0, 2, 3]
    exact = torch.compile(ops.complete_cumsum, backend="eager", fullgraph=True)
    assert exact(lengths).tolist() == [0, 1, 3]
    with FakeTensorMode():
        assert ops.complete_cumsum(torch.ones(4, dtype=torch.int64, device=DEVICE)).shape == (5,)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float16])
@pytest.mark.parametrize("seed", range(12))
def test_it_moves_as_a_loop_does(seed: int, dtype: torch.dtype) -> None:
    order, sizes = _case(seed)
    generator = torch.Generator().manual_seed(seed)
    number = int(sizes.sum())
    around = torch.randint(1, 10**6, (number + 2 * GUARD,), generator=generator).to(dtype)
    around = around.to(DEVICE)
    before, source = around.clone(), around[GUARD : GUARD + number]
    plan, total = ops.plan_of_moves(order, sizes)
    found = move_segments(source, torch.from_numpy(plan).to(DEVICE), total)
    parts = source.split(sizes.tolist())
    expected = torch.cat([source[:0], *(parts[i] for i in order)])
    assert found.dtype is dtype
    assert torch.equal(found, expected)
    assert torch.equal(ops.move_segments(source, order, sizes), expected)
    assert torch.equal(around, before)


def test_tensors_with_gaps_are_read_without_them() -> None:
    order, sizes = np.array([1, 0], dtype=np.int32), np.array([2, 3])
    plan, total = ops.plan_of_moves(order, sizes)
    on_device = torch.from_numpy(plan).to(DEVICE)
    one = torch.ones((), device=DEVICE).expand(5)
    assert move_segments(one, on_device, total).tolist() == [1.0] * 5
    odd = torch.arange(10, device=DEVICE)[1::2]
    assert move_segments(odd, on_device, total).tolist() == [5, 7, 9, 1, 3]
    lengths = torch.tensor([2, 9, 3, 9], device=DEVICE)[::2]
    rows = torch.tensor([4, 8], device=DEVICE)
    found, *_, ids, counts = make_safe(lengths, ops.complete_cumsum(lengths), odd, rows)
    assert found.tolist() == [0, 1]
    assert ids.tolist() == [1, 3, 5, 7, 0]
    assert counts.tolist() == [2, 3]


def test_blocks_of_the_kernel_meet_within_segments_and_between_them() -> None:
    sizes = np.array([1024, 0, 1023, 1, 2049, 0, 0, 1])
    for order in ([0, 2, 3, 4], [4, 0], [1, 5, 6], [7, 1, 0, 7], list(range(8))[::-1]):
        order_P = np.array(order, dtype=np.int32)
        source = torch.arange(int(sizes.sum()), device=DEVICE)
        plan, total = ops.plan_of_moves(order_P, sizes)
        parts = source.split(sizes.tolist())
        found = move_segments(source, torch.from_numpy(plan).to(DEVICE), total)
        assert torch.equal(found, torch.cat([parts[i] for i in order]))


@pytest.mark.parametrize("weights_dtype", [None, torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", range(6))
def test_a_payload_is_packed_as_by_copies(
    seed: int, dtype: torch.dtype, weights_dtype: torch.dtype | None
) -> None:
    rng = np.random.default_rng(seed)
    given_dtypes = [torch.int32, torch.int64][:: 1 if seed % 2 else -1]
    num_features, num_bags = int(rng.integers(1, 9)), [1, 7, 400][seed % 3]
    lengths = rng.integers(0, 5, (num_features, num_bags)) * (seed != 5)
    counts = lengths.sum(1)
    ids = torch.from_numpy(rng.integers(0, 2**31, counts.sum())).to(given_dtypes[0])
    weights = None if weights_dtype is None else torch.rand(ids.numel()).to(weights_dtype)
    words = [torch.from_numpy(lengths).flatten().to(dtype), ids.to(dtype)]
    sizes = [np.full(num_features, num_bags), counts]
    if weights is not None:
        words.append(weights.to([torch.float32, torch.float64][dtype is torch.int64]).view(dtype))
        sizes.append(counts)
    sizes_M = np.concatenate(sizes)
    order = rng.permutation(sizes_M.size)[: -1 if seed % 2 else None].astype(np.int32)
    plan, total = ops.plan_of_moves(order, sizes_M)
    sources = [torch.from_numpy(lengths).flatten().to(given_dtypes[1]), ids, weights]
    on_device = [None if t is None else t.to(DEVICE) for t in (*sources, torch.from_numpy(plan))]
    found = pack(*on_device, total, dtype).cpu()  # type: ignore[arg-type]
    assert found.dtype is dtype
    assert torch.equal(found, ops.move_segments(torch.cat(words), order, sizes_M))


FAULTS = "none", "negative length", "wrong sum", "offsets differ"


@pytest.mark.parametrize(
    ("fault", "is_known"),
    [*((fault, known) for fault in FAULTS for known in (False, True)), ("known wrong", True)],
)
@pytest.mark.parametrize("dtypes", [(torch.int32, torch.int64), (torch.int64, torch.int32)])
@pytest.mark.parametrize("seed", range(6))
def test_batches_are_made_safe_as_by_pytorch(
    seed: int, dtypes: tuple[torch.dtype, torch.dtype], fault: str, is_known: bool
) -> None:
    rng = np.random.default_rng(seed)
    num_features, num_bags = int(rng.integers(1, 9)), [1, 7, 400][seed % 3]
    rows = torch.from_numpy(rng.integers(1, 90, num_features))
    if seed % 2:
        rows[0] = NO_LIMIT
    lengths = torch.from_numpy(rng.integers(0, 5, num_features * num_bags)).to(dtypes[0])
    ids = torch.from_numpy(rng.integers(-1 if seed > 2 else 0, 91, int(lengths.sum())))
    ids = ids.to(dtypes[1])
    offsets = ops.complete_cumsum(lengths)
    known, starts = None, offsets[::num_bags].long()
    if fault == "known wrong":
        lengths[-1] = 8
        ids = torch.zeros(int(lengths.sum()), dtype=dtypes[1])
        offsets = ops.complete_cumsum(lengths)
        starts = torch.tensor([0] * num_features + [ids.numel()])
    if fault == "negative length":
        lengths[-1] = -1
    elif fault == "wrong sum":
        lengths[0] += 1
        offsets = ops.complete_cumsum(lengths)
    elif fault == "offsets differ":
        offsets = offsets + 1
    given = [t.to(DEVICE) for t in (lengths, offsets, ids, rows)]
    if is_known:
        given.append(starts.to(DEVICE))
        known = torch.arange(num_features) * num_bags, starts.diff()
    found, safe, safe_offsets, safe_ids, counts = (t.cpu() for t in make_safe(*given))
    is_bad = are_bags_bad(lengths, offsets, ids.numel())
    assert bool(is_bad) is (fault not in ("none", "known wrong"))
    is_bad |= torch.tensor(fault == "known wrong")
    expected = safe_lengths(lengths, is_bad, ids.numel(), known)
    assert torch.equal(safe, expected)
    assert torch.equal(safe_offsets, ops.complete_cumsum(expected))
    bad_ids = find_bad_ids(ids, offsets, rows) if fault == "none" else torch.ones_like(ids).bool()
    assert torch.equal(safe_ids, ids.masked_fill(bad_ids, 0))
    assert torch.equal(counts, expected.view(num_features, -1).sum(1))
    limits = rows.repeat_interleave(counts)
    matters = bool((bad_ids & (limits != NO_LIMIT)).any()) and fault == "none"
    assert found.tolist() == [bool(is_bad), matters]


@pytest.mark.parametrize("found", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("number", [1, 40, 3000])
def test_headers_say_what_was_found(number: int, found: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(number)
    counts = torch.randint(0, 2**40, (number,), generator=generator)
    places = torch.randint(0, number + 2, (2 * number,), generator=generator)
    places[0], places[-1] = 0, 1
    given = (t.to(DEVICE) for t in (places, counts, torch.tensor(found, dtype=torch.int32)))
    flag = (0xABCDEF << 8) | 4
    words = build_header(*given, flag, 17, 1, 2).cpu()
    said = flag | found[0] | 2 * found[1]
    assert torch.equal(words, torch.cat([torch.tensor([said, 17]), counts])[places])


@pytest.mark.parametrize("dtypes", [(torch.int32, torch.int64), (torch.int64, torch.int32)])
@pytest.mark.parametrize("seed", range(6))
def test_rows_of_tables_end_to_end(seed: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    rng = np.random.default_rng(seed)
    num_features, num_bags = int(rng.integers(1, 9)), [1, 7, 400][seed % 3]
    lengths = rng.integers(0, 5, (num_features, num_bags)) * (rng.random((num_features, 1)) < 0.7)
    lengths[0, 0] += 1
    ids, base = rng.integers(0, 90, lengths.sum()), rng.integers(0, 2**33, num_features)
    expected = ids + np.repeat(base, lengths.sum(1))
    offsets = np.concatenate([[0], lengths.cumsum()])
    given = [torch.from_numpy(ids).to(dtypes[0]), torch.from_numpy(offsets).to(dtypes[1])]
    found = row_ids(*(t.to(DEVICE) for t in (*given, torch.from_numpy(base))))
    assert torch.equal(found.cpu(), torch.from_numpy(expected))
    bags = np.arange(lengths.size).reshape(num_bags, num_features).T.reshape(-1)
    places = places_of_bags(given[1].to(DEVICE), ids.size, num_features)
    assert torch.equal(places.cpu(), torch.from_numpy(np.repeat(bags, lengths.reshape(-1))))


COMPILES = """
i32, i64 = torch.int32, torch.int64
for dtype in (i32, i64):
    ops_triton.complete_cumsum(empty(5000, dtype))
ops_triton.move_segments(empty(2000, i32), empty(600), 2000)
ops_triton.move_segments(empty(2000, torch.float16), empty(2), 2000)
for ids, lengths, known in ((i64, i32, empty(6)), (i32, i64, None)):
    batch = empty(500, lengths), empty(501, lengths), empty(3000, ids), empty(5), known
    ops_triton.make_safe(*batch, None if known is None else (batch[0], batch[1]))
ops_triton.build_header(empty(7), empty(5), empty(2, i32), 1, 2, 3, 4)
for ids, offsets in ((i32, i32), (i64, i64)):
    ops_triton.row_ids(empty(700, ids), empty(51, offsets), empty(5))
ops_triton.places_of_bags(empty(51, i32), 700, 5)
for weights, dtype in ((torch.float32, i32), (torch.float16, i64), (None, i32)):
    weights = None if weights is None else empty(70, weights)
    ops_triton.pack(empty(50, i32), empty(70, dtype), weights, empty(12), 190, dtype)
"""


def test_they_compile_for_a_gpu_without_one(tmp_path: Path) -> None:
    assert num_compiled(COMPILES, tmp_path) == 18
