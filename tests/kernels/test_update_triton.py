"""Triton's sums by row and updates beside float64 numpy; on a CPU by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.compiled import num_compiled
from tests.needs_triton import HAS_TRITON, NEEDS_TRITON

if not HAS_TRITON:
    pytest.skip(NEEDS_TRITON, allow_module_level=True)

from recsys.kernels import update_triton
from recsys.kernels.types import EmbOptimType, OptimizerSpec, WeightDecayMode
from recsys.kernels.update_triton import (
    RowUpdate,
    sum_and_update,
    sum_by_row,
    sum_into,
    update_entries,
)
from tests.fast_scans import fast_scans

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GUARD = 64  # values around a buffer that must stay as they are
ROWS = 50  # of all tables
TABLES = (0, 20, 20, 45, ROWS)  # where each begins; the second has no rows
KINDS = {  # how many ids, and how many different rows they are of
    "none": (0, ROWS),
    "one": (1, ROWS),
    "few": (7, ROWS),
    "a block": (8, 3),
    "duplicates": (60, ROWS),
    "hot": (160, 4),
    "one row": (100, 1),
}


@pytest.fixture(autouse=True, scope="module")
def _fast() -> Iterator[None]:
    with fast_scans():
        yield


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 entries, so that few ids make many, and rows in more than 8 of them hot."""
    for name, value in {"_TILE": 1, "_LEAST": 4, "_MOST": 4, "_FEW_BLOCKS": 8}.items():
        monkeypatch.setattr(update_triton, name, value)


@dataclass(frozen=True)
class Batch:
    """Ids of a batch, gradients of its bags, and the expected sums in float64."""

    rows: np.ndarray
    source: np.ndarray
    scale: np.ndarray | None
    gradients: np.ndarray

    @staticmethod
    def of(kind: str, dim: int, seed: int, scaled: bool) -> Batch:
        rng = np.random.default_rng(seed)
        number, different = KINDS[kind]
        some = rng.permutation(ROWS)[:different]
        rows, bags = rng.choice(some, number), 9
        scale = rng.random(number, np.float32) if scaled else None
        gradients = rng.standard_normal((bags, dim), np.float32)
        return Batch(rows, rng.integers(0, bags, number), scale, gradients)

    def given(self, dtype: torch.dtype = torch.int64) -> tuple[Tensor, ...]:
        rows, order = torch.sort(torch.from_numpy(self.rows).to(dtype), stable=True)
        scale = None if self.scale is None else torch.from_numpy(self.scale)
        rest = torch.from_numpy(self.gradients), torch.from_numpy(self.source), scale
        return tuple(t if t is None else t.to(DEVICE) for t in (rows, order, *rest))  # type: ignore[return-value]

    @property
    def sums(self) -> np.ndarray:
        """[R, D] the gradient of the tables."""
        found = np.zeros((ROWS, self.gradients.shape[1]))
        scale = 1.0 if self.scale is None else self.scale[:, None].astype(np.float64)
        np.add.at(found, self.rows, self.gradients[self.source].astype(np.float64) * scale)
        return found


def _guarded(values: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor between values that must stay; and both together."""
    flat = values.flatten()
    around = torch.full((flat.numel() + 2 * GUARD,), 7.0, dtype=values.dtype, device=DEVICE)
    around[GUARD:-GUARD] = flat
    return around[GUARD:-GUARD].view(values.shape), around


def _assert_kept(around: Tensor) -> None:
    assert (around[:GUARD] == 7).all()
    assert (around[-GUARD:] == 7).all()


def _close(found: Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found.cpu().numpy(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dim", [1, 3, 20, 130])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_added_up_by_row(kind: str, dim: int, scaled: bool) -> None:
    batch = Batch.of(kind, dim, dim, scaled)
    rows, sums, squares = sum_by_row(*batch.given(torch.int32), True)
    assert rows.dtype is torch.int64
    assert np.array_equal(rows.cpu().numpy(), np.sort(batch.rows))
    first = np.flatnonzero(np.diff(np.sort(batch.rows), prepend=-1))
    expected = np.zeros((batch.rows.size, dim))
    expected[first] = batch.sums[np.unique(batch.rows)]
    _close(sums, expected)
    _close(squares, (expected**2).sum(1))
    assert sum_by_row(*batch.given())[2].numel() == 0

    dense, around = _guarded(torch.zeros(ROWS, dim))
    sum_into(dense, *batch.given())
    _close(dense, batch.sums)
    _assert_kept(around)


ADAGRAD, SGD = EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.SGD
DECAYS = {
    "none": {},
    "l2": {"weight_decay": 0.3, "weight_decay_mode": WeightDecayMode.L2},
    "decouple": {"weight_decay": 0.3, "weight_decay_mode": WeightDecayMode.DECOUPLE},
}
RATES = np.array([0.5, 9.0, 0.25, 0.125], np.float32)


@dataclass
class Tables:
    """Weights and state of tables, and the expected results of an update in float64."""

    spec: OptimizerSpec
    rates: np.ndarray | None
    weight: np.ndarray
    state: np.ndarray

    @staticmethod
    def of(algorithm: EmbOptimType, decay: str, dim: int, own_rates: bool) -> Tables:
        rng = np.random.default_rng(3)
        own = {"eps": 1e-3} if algorithm is ADAGRAD else {}
        spec = OptimizerSpec(algorithm=algorithm, **own, **DECAYS[decay])  # type: ignore[arg-type]
        weight, state = rng.standard_normal((ROWS, dim), np.float32), rng.random(ROWS, np.float32)
        return Tables(spec, RATES if own_rates else None, weight, state)

    def after(
        self, rows: np.ndarray, sums: np.ndarray, moments: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        weight, state = self.weight.astype(np.float64), self.state.astype(np.float64)
        tables = np.searchsorted(TABLES, np.arange(ROWS), side="right") - 1
        rates = np.full(ROWS, 0.5) if self.rates is None else self.rates[tables].astype(np.float64)
        decay, is_l2 = self.spec.weight_decay, self.spec.weight_decay_mode is WeightDecayMode.L2
        for row in rows:
            grad = sums[row] + (decay * weight[row] if is_l2 else 0)
            if self.spec.algorithm is ADAGRAD:
                state[row] += (grad**2).mean() if moments is None else moments[row]
                grad = grad / (np.sqrt(state[row]) + self.spec.eps)
            weight[row] -= rates[row] * (grad + (0 if is_l2 else decay * weight[row]))
        return weight, state


class OnDevice:
    """Tables on the device, between values that must stay."""

    def __init__(self, tables: Tables, dtype: torch.dtype = torch.float32) -> None:
        self.weight, self._around = _guarded(torch.from_numpy(tables.weight).to(dtype))
        self.state, self._around_state = _guarded(torch.from_numpy(tables.state))
        rate = 0.5 if tables.rates is None else torch.from_numpy(tables.rates).to(DEVICE)
        keeps = tables.spec.algorithm is ADAGRAD
        starts = torch.tensor(TABLES, device=DEVICE)
        self.update = RowUpdate(
            tables.spec, self.weight, self.state if keeps else None, rate, starts
        )

    def check(self, weight: np.ndarray, state: np.ndarray) -> None:
        _close(self.state, state)
        found = self.weight.float().cpu().numpy()
        step = {torch.float32: 2e-5, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # of one value
        if self.weight.dtype is torch.bfloat16 and DEVICE == "cpu":
            step[torch.bfloat16] *= 2  # the interpreter cuts bits off
        size = step[self.weight.dtype]
        np.testing.assert_allclose(found, weight, rtol=1.01 * size, atol=2e-5)
        for around in (self._around, self._around_state):
            _assert_kept(around)


@pytest.mark.parametrize("own_rates", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("algorithm", [ADAGRAD, SGD])
@pytest.mark.parametrize("kind", ["none", "one", "duplicates", "hot"])
def test_rows_are_updated(kind: str, algorithm: EmbOptimType, decay: str, own_rates: bool) -> None:
    dim = {"duplicates": 3, "hot": 20}.get(kind, 130)
    batch, tables = Batch.of(kind, dim, 1, True), Tables.of(algorithm, decay, dim, own_rates)
    touched = np.unique(batch.rows)
    expected = tables.after(touched, batch.sums, None)
    fused = OnDevice(tables)
    sum_and_update(fused.update, *batch.given(torch.int32))
    fused.check(*expected)

    by_entries = OnDevice(tables)
    rows, sums, _ = sum_by_row(*batch.given())
    update_entries(by_entries.update, rows, sums, None)
    by_entries.check(*expected)


def test_moments_are_those_of_whole_rows() -> None:
    batch, tables = Batch.of("hot", 20, 1, False), Tables.of(ADAGRAD, "decouple", 20, True)
    moments = np.random.default_rng(0).random(ROWS)
    on_device = OnDevice(tables)
    rows, sums, _ = sum_by_row(*batch.given())
    of_entries = torch.from_numpy(moments).float().to(DEVICE)[rows]
    of_entries[1:][rows.diff() == 0] = 1e9  # first entries count
    update_entries(on_device.update, rows, sums, of_entries)
    on_device.check(*tables.after(np.unique(batch.rows), batch.sums, moments))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["duplicates", "hot"])
def test_narrow_tables(kind: str, dtype: torch.dtype) -> None:
    batch, tables = Batch.of(kind, 3, 2, False), Tables.of(ADAGRAD, "l2", 3, False)
    tables.weight = torch.from_numpy(tables.weight).to(dtype).float().numpy()
    on_device = OnDevice(tables, dtype)
    sum_and_update(on_device.update, *batch.given())
    on_device.check(*tables.after(np.unique(batch.rows), batch.sums, None))


def test_gradients_with_gaps_and_of_other_dtypes_are_read() -> None:
    rows, order = torch.tensor([2, 2, 4]), torch.tensor([1, 0, 2])
    source = torch.tensor([0, 1, 1])
    ones = torch.ones((), device=DEVICE).half().expand(2, 3)
    rows, order, source = (t.to(DEVICE) for t in (rows, order, source))
    expected = [[2.0] * 3, [0.0] * 3, [1.0] * 3]
    assert sum_by_row(rows, order, ones, source, None)[1].tolist() == expected
    odd = torch.arange(12.0, device=DEVICE).view(2, 6)[:, ::2]
    expected = [[6.0, 10.0, 14.0], [0.0] * 3, [6.0, 8.0, 10.0]]
    assert sum_by_row(rows, order, odd, source, None)[1].tolist() == expected


def test_a_gradient_that_is_no_number_stays_with_its_row() -> None:
    batch = Batch.of("duplicates", 3, 0, False)
    rows, sums, _ = sum_by_row(*batch.given())
    bad = int(batch.rows[0])
    batch.source[batch.rows == bad] = 0
    batch.source[(batch.rows != bad) & (batch.source == 0)] = 1
    batch.gradients[0, 0] = np.nan
    _, sums, _ = sum_by_row(*batch.given())
    is_bad = (rows == bad) & (torch.diff(rows, prepend=rows.new_tensor([-1])) != 0)
    assert torch.equal(sums.isnan().any(1), is_bad)


def _run_in_order(monkeypatch: pytest.MonkeyPatch, order: str) -> list[Tensor]:
    """Results on bits, the interpreter taking programs in some order."""
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.set_grid_idx

    def in_order(builder: object, x: int, y: int, z: int) -> None:
        number = builder.grid_dim[0]  # type: ignore[attr-defined]
        shuffled = np.random.default_rng(number).permutation(number)
        place = {"usual": x, "backwards": number - 1 - x, "shuffled": int(shuffled[x])}[order]
        plain(builder, place, y, z)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", in_order)
    batch, tables = Batch.of("hot", 3, 1, True), Tables.of(ADAGRAD, "none", 3, True)
    on_device = OnDevice(tables)
    sum_and_update(on_device.update, *batch.given())
    _, sums, squares = sum_by_row(*batch.given(), True)
    return [on_device.weight, on_device.state, sums, squares]


@pytest.mark.skipif(DEVICE == "cuda", reason="the device takes its own order")
@pytest.mark.parametrize("order", ["backwards", "shuffled"])
def test_bits_do_not_depend_on_the_order_of_programs(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as own:
        expected = _run_in_order(own, "usual")
    found = _run_in_order(monkeypatch, order)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["duplicates", "hot", "one row"])
def test_bits_are_the_same_in_every_run(kind: str) -> None:
    runs = []
    for _ in range(2):
        on_device = OnDevice(Tables.of(ADAGRAD, "none", 20, False))
        sum_and_update(on_device.update, *Batch.of(kind, 20, 0, True).given())
        runs.append((on_device.weight, on_device.state))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_blocks_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for dim, sizes in {
        1: (1, 64, 1),
        20: (32, 64, 2),
        128: (128, 32, 4),
        2000: (2048, 8, 8),
    }.items():
        found = update_triton._sizes(dim)
        assert tuple(found[name] for name in ("WIDTH", "BLOCK", "num_warps")) == sizes
    batch, tables = Batch.of("hot", 20, 1, True), Tables.of(ADAGRAD, "none", 20, True)
    on_device = OnDevice(tables)
    sum_and_update(on_device.update, *batch.given())
    on_device.check(*tables.after(np.unique(batch.rows), batch.sums, None))


COMPILES = """
from recsys.kernels.types import EmbOptimType, OptimizerSpec, WeightDecayMode

update_triton._FEW_BLOCKS = 1
for dim, row, dtype, mode, is_scaled in (
    (130, torch.int64, torch.float16, WeightDecayMode.L2, True),
    (20, torch.int32, torch.bfloat16, WeightDecayMode.DECOUPLE, False),
    (1, torch.int32, torch.float32, None, True),
):
    float32, number = torch.float32, 10_000
    gradients, scale = empty((9, dim), float32), empty(number, float32) if is_scaled else None
    given = empty(number, row), empty(number), gradients, empty(number), scale
    update_triton.sum_by_row(*given, is_scaled)
    update_triton.sum_into(empty((50, dim), float32), *given)
    adagrad = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    decay = 0.0 if mode is None else 0.1
    spec = OptimizerSpec(algorithm=adagrad, weight_decay=decay, weight_decay_mode=mode)
    for state in (empty(50, float32), None):
        for rate in (0.5, empty(4, float32)):
            weight = empty((50, dim), dtype)
            update = update_triton.RowUpdate(spec, weight, state, rate, empty(5))
            update_triton.sum_and_update(update, *given)
            entries = empty(number), empty((number, dim), float32)
            moments = empty(number, float32) if is_scaled else None
            update_triton.update_entries(update, *entries, moments)
"""


def test_they_compile_for_a_gpu_without_one(tmp_path: Path) -> None:
    assert num_compiled(COMPILES, tmp_path) == 66
