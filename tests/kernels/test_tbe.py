from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recsys.kernels.lookup_batch import RankedBags
from recsys.kernels.row_update import update_rows
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.kernels.tbe_fbgemm import FUSED_ON_CPU, has_cpu_ops
from recsys.kernels.tbe_layout import DimGroup
from recsys.kernels.tbe_torch import TorchKernel
from recsys.kernels.types import (
    EmbeddingLocation,
    EmbOptimType,
    OptimizerSpec,
    PoolingType,
    TableSpec,
    UpdateMode,
    WeightDecayMode,
)
from tests.kernels.lookup_cases import (
    CPU,
    CPU_BACKENDS,
    Case,
    cases,
    flat_of_padded,
    output_gradient,
    padded_offsets,
    ragged_oracle,
    reference_lookup,
)

few = settings(max_examples=25, deadline=None, derandomize=True)
needs_fbgemm = pytest.mark.skipif(not has_cpu_ops(), reason="fbgemm_gpu is not installed")

SMALL = Case(
    rows=(7, 5, 9),
    dims=(4, 8, 4),
    feature_table_map=(0, 1, 1, 2),
    pooling=PoolingType.SUM,
    weighted=False,
    index_dtype=torch.int64,
    batch_size=3,
    seed=0,
)


def spec_of(algorithm: EmbOptimType, **kwargs: float) -> OptimizerSpec:
    return OptimizerSpec(algorithm=algorithm, learning_rate=0.1, **kwargs)


def train(
    tbe: TableBatchedEmbedding,
    case: Case,
    steps: int = 3,
    parameters: list[Tensor] | None = None,
    *,
    padded: bool = False,
) -> list[Tensor]:
    """Outputs and gradients of per-sample weights of some training steps."""
    seen = []
    for step in range(steps):
        indices, offsets, weights = case.batch(step)
        if weights is not None:
            weights.requires_grad_()
        if padded:
            out = tbe.forward(indices, padded_offsets(case, offsets), weights, parameters)
            out = flat_of_padded(case, out)
        else:
            out = tbe.forward(indices, offsets, weights, parameters, bags=case.given_bags)
        if out.requires_grad:
            out.backward(output_gradient(case, step, out.shape).to(out.dtype))
        seen.append(out.detach())
        if weights is not None:
            assert weights.grad is not None
            seen.append(weights.grad)
        if tbe.update_mode is UpdateMode.DEFERRED:
            tbe.deferred.step()
    return seen


def assert_same(
    a: TableBatchedEmbedding, b: TableBatchedEmbedding, rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    for x, y in zip(a.weights, b.weights, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol)
    for state_a, state_b in zip(a.states, b.states, strict=True):
        assert state_a.keys() == state_b.keys()
        for name in state_a:
            torch.testing.assert_close(state_a[name], state_b[name], rtol=rtol, atol=atol)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@few
@given(case=cases(neighbours=True))
def test_forward_and_gradients_equal_a_loop_over_bags(backend: str, case: Case) -> None:
    tbe = case.build(None, UpdateMode.GRADIENT, backend)
    parameters = [w.detach().requires_grad_() for w in tbe.weights]
    tables = [w.clone().requires_grad_() for w in case.init()]
    indices, offsets, weights = case.batch(0)
    mine = None if weights is None else weights.clone().requires_grad_()
    theirs = None if weights is None else weights.clone().requires_grad_()
    out = tbe.forward(indices, offsets, mine, parameters)
    expected = reference_lookup(case, tables, indices, offsets, theirs)
    torch.testing.assert_close(out, expected)
    grad = output_gradient(case, 0, out.shape)
    out.backward(grad)
    expected.backward(grad)
    for parameter, table in zip(parameters, tables, strict=True):
        reference = torch.zeros_like(table) if table.grad is None else table.grad
        torch.testing.assert_close(parameter.grad, reference)
    if mine is not None and theirs is not None:
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("backend", [name for name in CPU_BACKENDS if name != "torch"])
@few
@given(case=cases(neighbours=True), algorithm=st.sampled_from(list(EmbOptimType)))
def test_backends_train_as_torch_does(backend: str, case: Case, algorithm: EmbOptimType) -> None:
    spec = spec_of(algorithm)
    if backend == "fbgemm" and algorithm not in FUSED_ON_CPU:
        with pytest.raises(ValueError, match="its CPU kernels fuse only SGD"):
            case.build(spec, UpdateMode.FUSED, backend)
        return
    other = case.build(spec, UpdateMode.FUSED, backend)
    assert other.backend == backend
    plain = case.build(spec, UpdateMode.FUSED, "torch")
    for a, b in zip(train(other, case), train(plain, case), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert_same(other, plain)


@few
@given(case=cases(), algorithm=st.sampled_from(list(EmbOptimType)))
def test_deferred_equals_fused(case: Case, algorithm: EmbOptimType) -> None:
    fused = case.build(spec_of(algorithm), UpdateMode.FUSED)
    deferred = case.build(spec_of(algorithm), UpdateMode.DEFERRED)
    train(fused, case)
    train(deferred, case)
    assert_same(fused, deferred)


# torch.optim.Adagrad builds sparse tensors and sets no `check_invariants`
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("mode", [UpdateMode.FUSED, UpdateMode.DEFERRED])
@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [
        (EmbOptimType.SGD, torch.optim.SGD),
        (EmbOptimType.EXACT_ADAGRAD, torch.optim.Adagrad),
        # touches only rows with a gradient, as a table's own Adam does
        (EmbOptimType.ADAM, torch.optim.SparseAdam),
    ],
)
def test_own_optimizer_equals_torch_optim(
    mode: UpdateMode, algorithm: EmbOptimType, optimizer: type[torch.optim.Optimizer]
) -> None:
    eps = {} if algorithm is EmbOptimType.SGD else {"eps": 1e-10}
    own = SMALL.build(spec_of(algorithm, **eps), mode)
    train(own, SMALL)
    plain = SMALL.build(None, UpdateMode.GRADIENT, sparse_grad=True)
    parameters = [w.detach().requires_grad_() for w in plain.weights]
    torch_optimizer = optimizer(parameters, lr=0.1, **eps)  # type: ignore[call-arg]
    for step in range(3):
        indices, offsets, _ = SMALL.batch(step)
        torch_optimizer.zero_grad()
        out = plain.forward(indices, offsets, None, parameters)
        out.backward(output_gradient(SMALL, step, out.shape))
        torch_optimizer.step()
    for a, b in zip(own.weights, plain.weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", list(EmbOptimType))
@pytest.mark.parametrize("weights_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_half_tables_and_outputs(
    algorithm: EmbOptimType, weights_dtype: torch.dtype, output_dtype: torch.dtype
) -> None:
    half = SMALL.build(
        spec_of(algorithm),
        UpdateMode.FUSED,
        weights_dtype=weights_dtype,
        output_dtype=output_dtype,
    )
    full = SMALL.build(spec_of(algorithm), UpdateMode.FUSED)
    for a, b in zip(full.weights, half.weights, strict=True):
        a.copy_(b)
    out_half, *_ = train(half, SMALL, steps=1)
    out_full, *_ = train(full, SMALL, steps=1)
    assert out_half.dtype is output_dtype
    torch.testing.assert_close(out_half.float(), out_full, rtol=2e-2, atol=2e-2)
    for a, b in zip(half.weights, full.weights, strict=True):
        assert a.dtype is weights_dtype
        torch.testing.assert_close(a.float(), b, rtol=2e-2, atol=2e-2)
    assert all(s.dtype is torch.float32 for state in half.states for s in state.values())


@pytest.mark.parametrize("algorithm", list(EmbOptimType))
def test_weight_decay_is_never_ignored(algorithm: EmbOptimType) -> None:
    plain = SMALL.build(spec_of(algorithm), UpdateMode.FUSED)
    decayed = SMALL.build(spec_of(algorithm, weight_decay=0.5), UpdateMode.FUSED)
    deferred = SMALL.build(spec_of(algorithm, weight_decay=0.5), UpdateMode.DEFERRED)
    for tbe in (plain, decayed, deferred):
        train(tbe, SMALL, steps=2)
    assert not torch.allclose(plain.weights[0], decayed.weights[0])
    assert_same(decayed, deferred)


def test_weight_decay_leaves_rows_alone_that_were_not_looked_up() -> None:
    spec = spec_of(EmbOptimType.SGD, weight_decay=0.5)
    tbe = SMALL.build(spec, UpdateMode.FUSED)
    before = [w.clone() for w in tbe.weights]
    tbe.forward(torch.tensor([2]), torch.tensor([0, 1] + [1] * 11), None).sum().backward()
    changed = (tbe.weights[0] != before[0]).any(1)
    assert changed.tolist() == [i == 2 for i in range(7)]


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_frozen_tables_do_not_move_and_the_others_do(mode: UpdateMode) -> None:
    optimizer = None if mode is UpdateMode.GRADIENT else spec_of(EmbOptimType.ADAM)
    tbe = SMALL.build(optimizer, mode)
    free = SMALL.build(optimizer, mode)
    before = [w.clone() for w in tbe.weights]
    parameters = [w.detach().requires_grad_(t != 1) for t, w in enumerate(tbe.weights)]
    train(tbe, SMALL, parameters=parameters)
    train(free, SMALL, parameters=[w.detach().requires_grad_() for w in free.weights])
    assert parameters[1].grad is None
    assert torch.equal(tbe.weights[1], before[1])
    if mode is UpdateMode.GRADIENT:
        assert parameters[0].grad is not None
        return
    assert torch.equal(tbe.states[1]["exp_avg"], torch.zeros_like(before[1]))
    assert torch.equal(tbe.weights[0], free.weights[0])
    assert not torch.equal(tbe.weights[0], before[0])


def test_all_tables_frozen_means_no_graph() -> None:
    tbe = SMALL.build(spec_of(EmbOptimType.SGD), UpdateMode.FUSED)
    indices, offsets, _ = SMALL.batch(0)
    frozen = [w.detach() for w in tbe.weights]
    assert not tbe.forward(indices, offsets, None, frozen).requires_grad
    assert tbe.forward(indices, offsets).requires_grad
    with torch.no_grad():
        assert not tbe.forward(indices, offsets).requires_grad


def test_no_grad_forward_does_not_count_as_a_step() -> None:
    tbe = SMALL.build(spec_of(EmbOptimType.ADAM), UpdateMode.FUSED)
    indices, offsets, _ = SMALL.batch(0)
    with torch.no_grad():
        tbe.forward(indices, offsets)
    assert tbe.states[0]["step"] == 0
    tbe.forward(indices, offsets).sum().backward()
    assert [state["step"].item() for state in tbe.states] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("mode", [UpdateMode.FUSED, UpdateMode.DEFERRED])
def test_adam_counts_a_step_without_ids(mode: UpdateMode) -> None:
    tbe = SMALL.build(spec_of(EmbOptimType.ADAM), mode)
    before = [w.clone() for w in tbe.weights]
    empty = torch.empty(0, dtype=torch.int64)
    tbe.forward(empty, torch.zeros(13, dtype=torch.int64)).sum().backward()
    tbe.deferred.step()
    assert [state["step"].item() for state in tbe.states] == [1.0, 1.0, 1.0]
    assert all(torch.equal(a, b) for a, b in zip(tbe.weights, before, strict=True))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("mode", list(UpdateMode))
def test_a_batch_of_no_samples(mode: UpdateMode, backend: str) -> None:
    optimizer = None if mode is UpdateMode.GRADIENT else spec_of(EmbOptimType.EXACT_ADAGRAD)
    tbe = SMALL.build(optimizer, mode, backend)
    parameters = [w.detach().requires_grad_() for w in tbe.weights]
    weights = torch.empty(0, requires_grad=True)
    out = tbe.forward(
        torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), weights, parameters
    )
    assert out.shape == (0, 24)
    out.sum().backward()
    assert weights.grad is not None


def test_row_gradients_are_duplicate_free_and_add_up() -> None:
    tbe = SMALL.build(spec_of(EmbOptimType.SGD), UpdateMode.DEFERRED)
    assert tbe.deferred.by_table == [None, None, None]
    tables = [w.clone().requires_grad_() for w in SMALL.init()]
    for step in range(2):
        indices, offsets, _ = SMALL.batch(step)
        out = tbe.forward(indices, offsets)
        grad = output_gradient(SMALL, step, out.shape)
        out.backward(grad)
        reference_lookup(SMALL, tables, indices, offsets, None).backward(grad)
    for found, table in zip(tbe.deferred.by_table, tables, strict=True):
        assert found is not None
        assert table.grad is not None
        rows, grads = found
        assert rows.unique().numel() == rows.numel()
        dense = torch.zeros_like(table).index_add(0, rows, grads)
        torch.testing.assert_close(dense, table.grad)
    tbe.deferred.drop()
    before = [w.clone() for w in tbe.weights]
    tbe.deferred.step()
    assert all(torch.equal(a, b) for a, b in zip(tbe.weights, before, strict=True))


def test_step_takes_row_moments_of_the_whole_row() -> None:
    spec = spec_of(EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    tbe = SMALL.build(spec, UpdateMode.DEFERRED)
    indices, offsets, _ = SMALL.batch(0)
    tbe.forward(indices, offsets).sum().backward()
    expected = [w.clone() for w in tbe.weights]
    moments = []
    for weight, found in zip(expected, tbe.deferred.by_table, strict=True):
        assert found is not None
        rows, grads = found
        moments.append(torch.full((rows.numel(),), 4.0))
        state = {"sum": torch.zeros(weight.shape[0])}
        update_rows(spec, weight, state, rows, grads, 0.1, row_moment=moments[-1])
    tbe.deferred.step(moments)
    for a, b in zip(tbe.weights, expected, strict=True):
        torch.testing.assert_close(a, b)


@needs_fbgemm
@few
@given(case=cases(neighbours=True))
def test_moments_in_the_fused_update_equal_moments_with_row_gradients(case: Case) -> None:
    """The shortcut that needs no row gradients, beside the road through them."""
    spec = spec_of(EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    fused, reduced = (case.build(spec, UpdateMode.DEFERRED, "fbgemm") for _ in range(2))
    fused.deferred.keeps_batch = True
    for step in range(3):
        indices, offsets, weights = case.batch(step)
        statistics = []
        for tbe in (fused, reduced):
            out = tbe.forward(indices, offsets, weights)
            out.backward(output_gradient(case, step, out.shape))
            if tbe is reduced:
                assert tbe.deferred.by_table
            statistics.append(tbe.deferred.row_statistics())
        for a, b in zip(*statistics, strict=True):
            torch.testing.assert_close(a, b)
        # twice the statistics of the columns here: as if another rank had as much
        for tbe in (fused, reduced):
            tbe.deferred.step(
                [2 * s / d.dim for s, d in zip(statistics[1], tbe.layout.tables, strict=True)]
            )
    for a, b in zip(fused.weights, reduced.weights, strict=True):
        torch.testing.assert_close(a, b)
    for mine, theirs in zip(fused.states, reduced.states, strict=True):
        torch.testing.assert_close(mine["sum"], theirs["sum"])


@needs_fbgemm
@pytest.mark.parametrize("residue", [1e-15, 1e-9])
def test_a_row_whose_gradients_cancel_out_keeps_its_weights(residue: float) -> None:
    """Rounding leaves a rest of the gradients in the statistics, and the kernel then finds zero."""
    spec = spec_of(EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    case = replace(SMALL, rows=(4,), dims=(8,), feature_table_map=(0,))
    tbe = case.build(spec, UpdateMode.DEFERRED, "fbgemm")
    tbe.deferred.keeps_batch = True
    before = tbe.weights[0].clone()
    out = tbe.forward(torch.tensor([1, 2, 1, 3]), torch.arange(5))
    out.backward(torch.tensor([1.0, 1.0, -1.0, 2.0]).view(4, 1).expand(4, 8))
    (statistic,) = tbe.deferred.row_statistics()
    torch.testing.assert_close(statistic, torch.tensor([0.0, 8.0, 32.0]))
    statistic[0] = residue
    tbe.deferred.step([statistic / 16])  # other columns have no gradient

    expected = before.clone()
    expected[2:] -= 0.1 * torch.tensor([[1.0], [2.0]]) / torch.tensor([[0.5], [2.0]]).sqrt()
    torch.testing.assert_close(tbe.weights[0], expected)
    torch.testing.assert_close(tbe.states[0]["sum"], torch.tensor([0, residue / 16, 0.5, 2.0]))


@needs_fbgemm
def test_rows_whose_gradients_do_not_cancel_out_are_updated_whatever_rounding_does() -> None:
    """The state is below 0 meanwhile, and comes back to a little more or less than it must be."""
    spec = spec_of(EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    case = replace(SMALL, rows=(100,), dims=(8,), feature_table_map=(0,))
    tbe = case.build(spec, UpdateMode.DEFERRED, "fbgemm")
    tbe.deferred.keeps_batch = True
    before, grad = tbe.weights[0].clone(), torch.randn(100, 8)
    tbe.forward(torch.arange(100), torch.arange(101)).backward(grad)
    (statistic,) = tbe.deferred.row_statistics()
    tbe.deferred.step([statistic / 16])
    expected = before - 0.1 * grad / (grad.square().sum(1, keepdim=True) / 16).sqrt()
    torch.testing.assert_close(tbe.weights[0], expected, rtol=1e-4, atol=1e-5)


@needs_fbgemm
@pytest.mark.parametrize(("found", "moves"), [(0.1, False), (0.2, False), (0.3, True), (0.5, True)])
def test_a_row_moves_where_the_kernel_finds_a_quarter_of_its_state(
    found: float, moves: bool
) -> None:
    """Less is what rounding leaves: divided by the root of it, a step would be too long."""
    spec = spec_of(EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    case = replace(SMALL, rows=(4,), dims=(8,), feature_table_map=(0,))
    tbe = case.build(spec, UpdateMode.DEFERRED, "fbgemm")
    tbe.deferred.keeps_batch = True
    before = tbe.weights[0].clone()
    out = tbe.forward(torch.tensor([1, 1]), torch.arange(3))
    rest = 0.125
    out.backward(torch.tensor([[1.0], [rest - 1.0]]).expand(2, 8))
    (statistic,) = tbe.deferred.row_statistics()
    moment = rest**2 / (1 + found)  # the kernel adds rest^2, after twice the moment was taken
    statistic[0] = 2 * 8 * moment
    tbe.deferred.step([torch.full((1,), moment)])

    expected = before.clone()
    if moves:
        expected[1] -= 0.1 * rest / (found * moment) ** 0.5
    torch.testing.assert_close(tbe.weights[0], expected)
    torch.testing.assert_close(tbe.states[0]["sum"], torch.tensor([0, moment, 0, 0]))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_two_backward_passes_before_a_step_add_up_where_batches_are_kept(backend: str) -> None:
    """A model that calls a module twice must not lose the first batch's gradients."""
    spec = spec_of(EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    kept, reduced = (SMALL.build(spec, UpdateMode.DEFERRED, backend) for _ in range(2))
    kept.deferred.keeps_batch = True
    statistics = []
    for tbe in (kept, reduced):
        for step in range(2):
            indices, offsets, _ = SMALL.batch(step)
            out = tbe.forward(indices, offsets)
            out.backward(output_gradient(SMALL, step, out.shape))
        statistics.append(tbe.deferred.row_statistics())
        tbe.deferred.step(
            [s / d.dim for s, d in zip(statistics[-1], tbe.layout.tables, strict=True)]
        )
    for a, b in zip(*statistics, strict=True):
        torch.testing.assert_close(a, b)
    assert_same(kept, reduced)


@pytest.mark.parametrize("algorithm", [EmbOptimType.SGD, EmbOptimType.ADAM])
def test_learning_rate_takes_effect_at_the_next_update(algorithm: EmbOptimType) -> None:
    tbe = SMALL.build(spec_of(algorithm), UpdateMode.FUSED)
    assert set(tbe.learning_rates) == {0.1}
    before = [w.clone() for w in tbe.weights]
    tbe.set_learning_rate(0.0)
    train(tbe, SMALL, steps=1)
    assert all(torch.equal(a, b) for a, b in zip(tbe.weights, before, strict=True))
    tbe.set_learning_rate(0.5)
    train(tbe, SMALL, steps=1)
    assert not torch.equal(tbe.weights[0], before[0])


@few
@given(
    case=cases(neighbours=True),
    algorithm=st.sampled_from([*FUSED_ON_CPU, EmbOptimType.ADAM, EmbOptimType.LARS_SGD]),
    mode=st.sampled_from([UpdateMode.FUSED, UpdateMode.DEFERRED]),
    backend=st.sampled_from([None, "torch"]),
    levels=st.integers(2, 3),
)
def test_each_table_has_its_own_learning_rate(
    case: Case, algorithm: EmbOptimType, mode: UpdateMode, backend: str | None, levels: int
) -> None:
    """One lookup with a rate per table, beside one lookup at each rate: equal to the bit."""
    rates = [0.1 * (1 + t % levels) for t in range(len(case.rows))]
    mixed = case.build(spec_of(algorithm), mode, backend)
    mixed.learning_rates = rates
    run(mixed, case, mode)
    for table, rate in enumerate(rates):
        alone = case.build(spec_of(algorithm), mode, backend)
        alone.set_learning_rate(rate)
        run(alone, case, mode)
        assert torch.equal(mixed.weights[table], alone.weights[table])
        for name, value in alone.states[table].items():
            assert torch.equal(mixed.states[table][name], value)


def run(tbe: TableBatchedEmbedding, case: Case, mode: UpdateMode) -> None:
    for step in range(3):
        indices, offsets, weights = case.batch(step)
        out = tbe.forward(indices, offsets, weights)
        out.backward(output_gradient(case, step, out.shape))
        if mode is UpdateMode.DEFERRED:
            tbe.deferred.step()


def test_learning_rates_must_be_one_per_table() -> None:
    tbe = SMALL.build(spec_of(EmbOptimType.SGD), UpdateMode.FUSED)
    with pytest.raises(ValueError, match=r"one per table; .*1 for 3"):
        tbe.learning_rates = [0.1]


def test_gradient_values_are_live_and_independent_of_the_batch() -> None:
    tbe, expected = (SMALL.build(spec_of(EmbOptimType.SGD), UpdateMode.DEFERRED) for _ in range(2))
    for each in (tbe, expected):
        indices, offsets, _ = SMALL.batch(0)
        out = each.forward(indices, offsets)
        out.backward(output_gradient(SMALL, 0, out.shape))
        indices.zero_()  # the caller uses its memory for something else
    for values in tbe.deferred.values:
        values.mul_(2.0)
    tbe.deferred.step()
    expected.set_learning_rate(0.2)
    expected.deferred.step()
    assert_same(tbe, expected)


@pytest.mark.parametrize("algorithm", [EmbOptimType.EXACT_ADAGRAD, EmbOptimType.ADAM])
def test_states_are_live(algorithm: EmbOptimType) -> None:
    whole = SMALL.build(spec_of(algorithm), UpdateMode.FUSED)
    train(whole, SMALL, steps=2)
    resumed = SMALL.build(spec_of(algorithm), UpdateMode.FUSED)
    train(resumed, SMALL, steps=1)
    copy = SMALL.build(spec_of(algorithm), UpdateMode.FUSED)
    for a, b in zip(copy.weights, resumed.weights, strict=True):
        a.copy_(b)
    for state_a, state_b in zip(copy.states, resumed.states, strict=True):
        for name, value in state_b.items():
            state_a[name].copy_(value)
    indices, offsets, _ = SMALL.batch(1)
    out = copy.forward(indices, offsets)
    out.backward(output_gradient(SMALL, 1, out.shape))
    assert_same(copy, whole, rtol=0, atol=0)


def test_weights_can_be_given_and_are_the_storage() -> None:
    first = SMALL.build(None, UpdateMode.GRADIENT)
    second = TableBatchedEmbedding(
        SMALL.specs,
        feature_table_map=SMALL.feature_table_map,
        pooling=SMALL.pooling,
        optimizer=spec_of(EmbOptimType.SGD),
        update_mode=UpdateMode.FUSED,
        device=CPU,
        weights=first.storage,
    )
    before = first.weights[0].clone()
    train(second, SMALL, steps=1)
    assert not torch.equal(first.weights[0], before)


def test_meta_device_gives_shapes() -> None:
    tbe = TableBatchedEmbedding(
        SMALL.specs,
        feature_table_map=SMALL.feature_table_map,
        pooling=PoolingType.SUM,
        optimizer=spec_of(EmbOptimType.ADAM),
        update_mode=UpdateMode.FUSED,
        device=torch.device("meta"),
    )
    out = tbe.forward(
        torch.empty(5, dtype=torch.int64, device="meta"),
        torch.empty(13, dtype=torch.int64, device="meta"),
    )
    assert out.shape == (3, 24)
    assert tbe.weights[1].shape == (5, 8)
    assert tbe.states[1]["exp_avg"].is_meta


def test_repr_names_the_backend_and_why() -> None:
    decayed = SMALL.build(spec_of(EmbOptimType.SGD, weight_decay=0.1), UpdateMode.FUSED)
    assert "backend=torch" in repr(decayed)
    if has_cpu_ops():
        assert "ignore weight decay" in repr(decayed)
        assert "backend=fbgemm" in repr(SMALL.build(None, UpdateMode.GRADIENT))


@needs_fbgemm
@pytest.mark.parametrize("mode", [UpdateMode.FUSED, UpdateMode.DEFERRED])
def test_fbgemm_looks_up_what_torch_updates(mode: UpdateMode) -> None:
    """One backend for the values, another for the update: to the bit what torch alone does."""
    tbe = SMALL.build(spec_of(EmbOptimType.ADAM), mode)
    plain = SMALL.build(spec_of(EmbOptimType.ADAM), mode, "torch")
    assert "lookup=fbgemm" in repr(tbe)
    assert "lookup=torch" in repr(plain)
    if mode is UpdateMode.FUSED:
        assert tbe.backend == "torch"
    for a, b in zip(train(tbe, SMALL), train(plain, SMALL), strict=True):
        assert torch.equal(a, b)
    assert_same(tbe, plain, rtol=0, atol=0)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_rows_that_are_reset_train_as_at_first(backend: str) -> None:
    tbe = SMALL.build(spec_of(EmbOptimType.EXACT_ROWWISE_ADAGRAD), UpdateMode.FUSED, backend)
    fresh = SMALL.build(spec_of(EmbOptimType.EXACT_ROWWISE_ADAGRAD), UpdateMode.FUSED, backend)
    train(tbe, SMALL)
    before, state = tbe.weights[0].clone(), tbe.states[0]["sum"].clone()
    rows = torch.tensor([4, 1])
    values = fresh.weights[0][rows]
    sizes = [2, *[0] * (len(tbe.weights) - 1)]
    tbe.reset_rows(sizes, rows, lambda group, weights, at: weights.index_copy_(0, at, values))
    assert torch.equal(tbe.weights[0][rows], fresh.weights[0][rows])
    kept = torch.tensor([0, 2, 3, 5, 6])
    assert torch.equal(tbe.weights[0][kept], before[kept])
    assert state[rows].all()
    assert torch.equal(tbe.states[0]["sum"], state.index_fill(0, rows, 0.0))
    ids, offsets = torch.tensor([1, 4]), torch.tensor([0, 2, *[2] * 11])
    for each in (tbe, fresh):
        each.prefetch(ids, offsets)  # nothing to do on a CPU
        each.forward(ids, offsets).sum().backward()
        each.flush()
    assert torch.equal(tbe.weights[0][rows], fresh.weights[0][rows])
    assert torch.equal(tbe.states[0]["sum"][rows], fresh.states[0]["sum"][rows])


def test_a_reset_row_keeps_its_tables_count_of_updates() -> None:
    tbe = SMALL.build(spec_of(EmbOptimType.ADAM), UpdateMode.FUSED)
    train(tbe, SMALL, steps=2)
    tbe.reset_rows(
        [0, 1, 0], torch.tensor([0]), lambda group, weights, rows: weights.index_fill_(0, rows, 0.0)
    )
    assert tbe.states[1]["step"] == 2
    assert not tbe.states[1]["exp_avg"][0].any()
    assert tbe.states[1]["exp_avg"][1:].any()


@needs_fbgemm
def test_scattered_features_are_left_to_torch() -> None:
    scattered = Case(**{**SMALL.__dict__, "feature_table_map": (1, 0, 1, 2)})
    tbe = scattered.build(spec_of(EmbOptimType.EXACT_ADAGRAD), UpdateMode.FUSED)
    assert tbe.backend == "torch"
    assert "neighbours" in tbe.backend_reason


def build_badly(**changes: object) -> None:
    arguments: dict[str, object] = {
        "feature_table_map": [0],
        "pooling": PoolingType.SUM,
        "update_mode": UpdateMode.GRADIENT,
        "device": CPU,
    }
    tables = [TableSpec(name="a", num_rows=3, dim=4), TableSpec(name="b", num_rows=3, dim=8)]
    TableBatchedEmbedding(tables, **{**arguments, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"update_mode": UpdateMode.FUSED}, "needs an optimizer; received None"),
        ({"pooling": PoolingType.NONE}, r"needs equal dims; received \[4, 8\]"),
        ({"feature_table_map": [2]}, r"numbers in \[0, 2\); received \[2\]"),
        ({"feature_table_map": []}, "one table and one feature"),
        ({"location": EmbeddingLocation.DEVICE}, "does not fit device cpu"),
        ({"weights": torch.zeros(3)}, r"contiguous \[36\] tensor"),
        ({"weights_dtype": torch.int8}, "weights_dtype must be floating"),
        (
            {
                "update_mode": UpdateMode.FUSED,
                "optimizer": OptimizerSpec(algorithm=EmbOptimType.SGD, stochastic_rounding=True),
            },
            "stochastic_rounding is for tables of torch.float16",
        ),
        ({"weights_dtype": torch.bfloat16, "backend": "fbgemm"}, "cannot serve this lookup"),
    ],
)
def test_contradictory_settings_raise(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_badly(**changes)


def test_weighted_sequence_lookup_raises() -> None:
    tbe = TableBatchedEmbedding(
        [TableSpec(name="a", num_rows=3, dim=4)],
        feature_table_map=[0],
        pooling=PoolingType.NONE,
        update_mode=UpdateMode.GRADIENT,
        device=CPU,
    )
    with pytest.raises(ValueError, match="takes no per_sample_weights"):
        tbe.forward(torch.tensor([0]), torch.tensor([0, 1]), torch.ones(1))


def test_l2_and_decoupled_decay_differ() -> None:
    tables = []
    for mode in WeightDecayMode:
        spec = OptimizerSpec(
            algorithm=EmbOptimType.EXACT_ADAGRAD,
            learning_rate=0.1,
            weight_decay=0.3,
            weight_decay_mode=mode,
        )
        tbe = SMALL.build(spec, UpdateMode.FUSED)
        train(tbe, SMALL)
        tables.append(tbe.weights[0])
    assert not torch.allclose(*tables)


RAGGED = replace(SMALL, bags=(3, 0, 5, 2), weighted=True)
ragged_cases = cases(neighbours=True, ragged=True)


def train_padded(
    tbe: TableBatchedEmbedding, case: Case, parameters: list[Tensor] | None = None
) -> list[Tensor]:
    """Return the result of `train` for a ragged case, filled up to a rectangle by empty bags."""
    return train(tbe, case, parameters=parameters, padded=True)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("sparse_grad", [False, True])
@few
@given(case=ragged_cases)
def test_features_with_bags_of_their_own_equal_a_loop_over_them(
    backend: str, sparse_grad: bool, case: Case
) -> None:
    tbe = case.build(None, UpdateMode.GRADIENT, backend, sparse_grad=sparse_grad)
    parameters = [w.detach().requires_grad_() for w in tbe.weights]
    indices, offsets, weights = case.batch(0)
    if weights is not None:
        weights.requires_grad_()
    out = tbe.forward(indices, offsets, weights, parameters, bags=case.given_bags)
    grad = output_gradient(case, 0, out.shape)
    out.backward(grad)
    oracle = ragged_oracle(case, case.init(), case.batch(0), grad)
    np.testing.assert_allclose(out.detach(), oracle.out, rtol=1e-5, atol=1e-6)
    for parameter, expected in zip(parameters, oracle.of_tables, strict=True):
        assert parameter.grad is not None
        found = parameter.grad.to_dense() if sparse_grad else parameter.grad
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    if weights is not None:
        np.testing.assert_allclose(weights.grad, oracle.of_weights, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("mode", [UpdateMode.FUSED, UpdateMode.DEFERRED])
@few
@given(case=ragged_cases)
def test_features_with_bags_of_their_own_train_as_in_float64(
    backend: str, mode: UpdateMode, case: Case
) -> None:
    spec = spec_of(EmbOptimType.EXACT_ROWWISE_ADAGRAD, eps=1e-3)
    tbe = case.build(spec, mode, backend)
    expected = [w.double() for w in case.init()]
    sums = [torch.zeros(len(w), dtype=torch.float64) for w in expected]
    out = train(tbe, case, steps=2)[:: 2 if case.weighted else 1]
    for step in range(2):
        grad = output_gradient(case, step, out[step].shape)
        oracle = ragged_oracle(case, expected, case.batch(step), grad)
        np.testing.assert_allclose(out[step], oracle.out, rtol=1e-4, atol=1e-5)
        for table, rows in enumerate(oracle.touched):
            for row in rows:
                gradient = torch.from_numpy(oracle.of_tables[table][row])
                sums[table][row] += gradient.square().mean()
                expected[table][row] -= 0.1 * gradient / (sums[table][row].sqrt() + 1e-3)
    for found, of_table in zip(tbe.weights, expected, strict=True):
        torch.testing.assert_close(found.double(), of_table, rtol=1e-4, atol=1e-5)


@few
@given(
    case=ragged_cases,
    algorithm=st.sampled_from(EmbOptimType),
    mode=st.sampled_from(UpdateMode),
    backend=st.sampled_from([None, "torch"]),
    keeps_batch=st.booleans(),
    levels=st.integers(1, 2),
    frozen=st.integers(0, 3),
)
def test_features_with_bags_of_their_own_train_as_with_empty_bags_behind_them(
    case: Case,
    algorithm: EmbOptimType,
    mode: UpdateMode,
    backend: str | None,
    keeps_batch: bool,
    levels: int,
    frozen: int,
) -> None:
    spec = None if mode is UpdateMode.GRADIENT else spec_of(algorithm)
    pair = [case.build(spec, mode, backend) for _ in range(2)]
    found = []
    for tbe, steps in zip(pair, (train, train_padded), strict=True):
        if spec is not None:
            tbe.learning_rates = [0.1 * (1 + t % levels) for t in range(len(case.rows))]
        tbe.deferred.keeps_batch = keeps_batch
        parameters = [w.detach().requires_grad_(t != frozen) for t, w in enumerate(tbe.weights)]
        found.append(steps(tbe, case, parameters=parameters))
        if mode is UpdateMode.GRADIENT:
            found[-1] += [p.grad for p in parameters if p.grad is not None]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert_same(*pair, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@few
@given(case=ragged_cases)
def test_row_moments_of_features_with_bags_of_their_own(backend: str, case: Case) -> None:
    spec = spec_of(EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    pair = [case.build(spec, UpdateMode.DEFERRED, backend) for _ in range(2)]
    for tbe, is_ragged in zip(pair, (True, False), strict=True):
        tbe.deferred.keeps_batch = True
        for step in range(2):
            indices, offsets, weights = case.batch(step)
            if is_ragged:
                out = tbe.forward(indices, offsets, weights, bags=case.given_bags)
            else:
                out = tbe.forward(indices, padded_offsets(case, offsets), weights)
                out = flat_of_padded(case, out)
            out.backward(output_gradient(case, step, out.shape))
            statistics = tbe.deferred.row_statistics()
            tbe.deferred.step(
                [2 * s / d.dim for s, d in zip(statistics, tbe.layout.tables, strict=True)]
            )
    assert_same(*pair, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dims", [(4, 4, 4), (4, 8, 4)])
def test_bags_of_their_own_of_half_tables_and_outputs(
    weights_dtype: torch.dtype, output_dtype: torch.dtype, dims: tuple[int, ...]
) -> None:
    case = replace(RAGGED, dims=dims)
    spec = spec_of(EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    pair = [
        case.build(spec, UpdateMode.FUSED, weights_dtype=weights_dtype, output_dtype=output_dtype)
        for _ in range(2)
    ]
    for a, b in zip(train(pair[0], case), train_padded(pair[1], case), strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b)
    assert_same(*pair)


APART = replace(
    RAGGED,
    dims=(4, 4, 4),
    feature_table_map=(0, 1, 2),
    bags=(9, 4, 5),
    num_ranks=3,
    weighted=False,
)
"""Tables of one width, each read by one feature: a kernel may read them rank by rank."""
RATES = {"one": (0.1, 0.1, 0.1), "several": (0.1, 0.5, 0.2)}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("before", RATES)
@pytest.mark.parametrize("after", RATES)
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_bags_of_several_ranks_train_at_rates_that_change_between_forward_and_backward(
    pooling: PoolingType, after: str, before: str, backend: str
) -> None:
    case = replace(APART, pooling=pooling)
    tbe = case.build(spec_of(EmbOptimType.SGD), UpdateMode.FUSED, backend)
    tbe.learning_rates = RATES[before]
    indices, offsets, _ = case.batch(0)
    out = tbe.forward(indices, offsets, bags=case.given_bags)
    tbe.learning_rates = RATES[after]
    grad = output_gradient(case, 0, out.shape)
    out.backward(grad)
    oracle = ragged_oracle(case, case.init(), case.batch(0), grad)
    np.testing.assert_allclose(out.detach(), oracle.out, rtol=1e-5, atol=1e-6)
    rates = zip(tbe.weights, case.init(), oracle.of_tables, RATES[after], strict=True)
    for weight, initial, gradient, rate in rates:
        np.testing.assert_allclose(weight, initial.numpy() - rate * gradient, rtol=1e-5, atol=1e-5)


@needs_fbgemm
@pytest.mark.parametrize("mode", UpdateMode)
def test_a_batch_in_the_order_of_ranks_is_kept_no_longer_than_it_is_read(
    mode: UpdateMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, init = list[RankedBags](), RankedBags.__init__

    def noted(bags: RankedBags, bags_FR: np.ndarray) -> None:
        init(bags, bags_FR)
        kept.append(bags)

    monkeypatch.setattr(RankedBags, "__init__", noted)
    optimizer = None if mode is UpdateMode.GRADIENT else spec_of(EmbOptimType.SGD)
    tbe = APART.build(optimizer, mode, "fbgemm")
    parameters = [w.detach().requires_grad_() for w in tbe.weights]
    indices, offsets, _ = APART.batch(0)
    out = tbe.forward(indices, offsets, None, parameters, bags=APART.given_bags)
    of_forward = kept[-1]
    assert (of_forward.in_order is not None) is (mode is UpdateMode.FUSED)
    out.backward(torch.ones_like(out))
    assert of_forward.in_order is None


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("mode", [UpdateMode.FUSED, UpdateMode.DEFERRED])
def test_bags_of_several_ranks_leave_frozen_tables_alone(mode: UpdateMode, backend: str) -> None:
    tbe = APART.build(spec_of(EmbOptimType.SGD), mode, backend)
    parameters = [w.detach().requires_grad_(i != 1) for i, w in enumerate(tbe.weights)]
    indices, offsets, _ = APART.batch(0)
    out = tbe.forward(indices, offsets, None, parameters, bags=APART.given_bags)
    grad = output_gradient(APART, 0, out.shape)
    out.backward(grad)
    tbe.deferred.step()
    oracle = ragged_oracle(APART, APART.init(), APART.batch(0), grad)
    for i, (weight, initial) in enumerate(zip(tbe.weights, APART.init(), strict=True)):
        wanted = initial.numpy() - 0.1 * (i != 1) * oracle.of_tables[i]
        np.testing.assert_allclose(weight, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dims", [(4, 4, 4), (4, 8, 4)])
@pytest.mark.parametrize("bags", [(0, 0, 0, 0), (0, 2, 0, 0), (2, 0, 1, 3)])
@pytest.mark.parametrize("mode", UpdateMode)
def test_bags_of_their_own_without_ids(
    mode: UpdateMode, bags: tuple[int, ...], dims: tuple[int, ...], backend: str
) -> None:
    optimizer = None if mode is UpdateMode.GRADIENT else spec_of(EmbOptimType.EXACT_ADAGRAD)
    tbe = replace(SMALL, dims=dims).build(optimizer, mode, backend)
    before = tbe.storage.clone()
    parameters = [w.detach().requires_grad_() for w in tbe.weights]
    weights = torch.empty(0, requires_grad=True)
    offsets = torch.zeros(sum(bags) + 1, dtype=torch.int64)
    out = tbe.forward(
        torch.empty(0, dtype=torch.int64), offsets, weights, parameters, bags=np.array(bags)
    )
    size = sum(count * dims[table] for count, table in zip(bags, (0, 1, 1, 2), strict=True))
    assert torch.equal(out, torch.zeros(size))
    out.sum().backward()
    tbe.deferred.step()
    assert weights.grad is not None
    assert torch.equal(tbe.storage, before)


@needs_fbgemm
@pytest.mark.parametrize("dims", [(4, 4, 4), (4, 8, 4)])
def test_fbgemm_serves_bags_of_their_own(
    dims: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(RAGGED, dims=dims)
    tbe = case.build(spec_of(EmbOptimType.SGD), UpdateMode.FUSED, "fbgemm")
    for name in ("lookup", "update", "row_gradients", "weight_gradients"):
        monkeypatch.delattr(TorchKernel, name)
    train(tbe, case)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_gradient_that_is_one_value_for_all_bags(backend: str) -> None:
    """The gradient of `sum()`, which takes the memory of one number."""
    case = replace(RAGGED, dims=(4, 4, 4), weighted=False)
    pair = [case.build(spec_of(EmbOptimType.SGD), UpdateMode.FUSED, backend) for _ in range(2)]
    indices, offsets, _ = case.batch(0)
    pair[0].forward(indices, offsets, bags=case.given_bags).sum().backward()
    pair[1].forward(indices, padded_offsets(case, offsets)).sum().backward()
    assert_same(*pair)


def test_bags_are_one_number_per_feature_that_add_up() -> None:
    tbe = RAGGED.build(None, UpdateMode.GRADIENT)
    indices, offsets, _ = RAGGED.batch(0)
    for bags in ([3, 0, 5], [3, 0, 5, 3], [[3, 0, 5, 2]]):
        with pytest.raises(ValueError, match="bags must have shape"):
            tbe.forward(indices, offsets, bags=np.array(bags))


def test_sequences_take_no_bags() -> None:
    tbe = replace(SMALL, dims=(4,) * 3, pooling=PoolingType.NONE).build(None, UpdateMode.GRADIENT)
    with pytest.raises(ValueError, match=r"NONE.*\[1, 0, 0, 0\]"):
        tbe.forward(torch.tensor([0]), torch.tensor([0, 1]), bags=np.array([1, 0, 0, 0]))


def test_meta_device_gives_the_size_of_bags_of_their_own() -> None:
    tbe = TableBatchedEmbedding(
        SMALL.specs,
        feature_table_map=SMALL.feature_table_map,
        pooling=PoolingType.SUM,
        update_mode=UpdateMode.GRADIENT,
        device=torch.device("meta"),
    )
    ids, offsets = (torch.empty(n, dtype=torch.int64, device="meta") for n in (5, 11))
    assert tbe.forward(ids, offsets, bags=RAGGED.bags_F).shape == (3 * 4 + 5 * 8 + 2 * 4,)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dims", [(4, 4, 4), (4, 8, 4)])
def test_bags_of_their_own_are_updated_at_each_tables_rate(
    dims: tuple[int, ...], backend: str
) -> None:
    case = replace(RAGGED, dims=dims)
    spec = spec_of(EmbOptimType.EXACT_ADAGRAD)
    pair = [case.build(spec, UpdateMode.FUSED, backend) for _ in range(2)]
    for tbe, steps in zip(pair, (train, train_padded), strict=True):
        tbe.learning_rates = [0.1, 0.5, 0.1]
        steps(tbe, case)
    assert_same(*pair, rtol=1e-5, atol=1e-6)


def test_bags_are_prefetched() -> None:
    tbe, seen = RAGGED.build(None, UpdateMode.GRADIENT), []
    tbe._updater.prefetch = seen.append  # type: ignore[method-assign]
    indices, offsets, _ = RAGGED.batch(0)
    tbe.prefetch(indices, offsets, RAGGED.bags_F)
    assert seen[0].bags.tolist() == [3, 0, 5, 2]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_bags_may_be_written_to_before_backward(backend: str) -> None:
    """And may be of another integer dtype."""
    pair = [RAGGED.build(spec_of(EmbOptimType.SGD), UpdateMode.FUSED, backend) for _ in range(2)]
    indices, offsets, _ = RAGGED.batch(0)
    for tbe, value in zip(pair, (None, 0), strict=True):
        bags = np.array(RAGGED.bags, dtype=np.int32)
        out = tbe.forward(indices, offsets, bags=bags)
        if value is not None:
            bags.fill(value)
        out.sum().backward()
    assert_same(*pair, rtol=0, atol=0)


@needs_fbgemm
@pytest.mark.parametrize("features", [(0, 1, 1, 2), (0, 1, 2)])
@pytest.mark.parametrize("dims", [(4, 4, 4), (4, 8, 4)])
@pytest.mark.parametrize(("seed", "num_ranks"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_fbgemm_trains_bags_of_their_own_to_the_bits_of_a_rectangle(
    seed: int, num_ranks: int, dims: tuple[int, ...], features: tuple[int, ...]
) -> None:
    """Also where features share a table, whose gradients it adds up in the rectangle's order."""
    case = replace(
        RAGGED,
        dims=dims,
        seed=seed,
        feature_table_map=features,
        bags=(9, 4, 9, 5)[: len(features)],
        num_ranks=num_ranks,
    )
    spec = spec_of(EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    pair = [case.build(spec, UpdateMode.FUSED, "fbgemm") for _ in range(2)]
    for a, b in zip(train(pair[0], case), train_padded(pair[1], case), strict=True):
        assert torch.equal(a, b)
    assert_same(*pair, rtol=0, atol=0)


def test_rows_of_tables_of_several_dims_are_reset_together() -> None:
    dims, num_rows, rng = [8, 4, 8, 12, 4], [5, 7, 3, 9, 4], random.Random(0)
    tbe = TableBatchedEmbedding(
        [
            TableSpec(name=str(i), num_rows=rows, dim=dim)
            for i, (rows, dim) in enumerate(zip(num_rows, dims, strict=True))
        ],
        feature_table_map=range(5),
        pooling=PoolingType.SUM,
        optimizer=spec_of(EmbOptimType.ADAM),
        update_mode=UpdateMode.FUSED,
        device=torch.device("cpu"),
    )
    for _ in range(20):
        sizes = [rng.randint(0, rows) for rows in num_rows]
        rows = [rng.sample(range(of), size) for of, size in zip(num_rows, sizes, strict=True)]
        values = [torch.randn(size, dim) for size, dim in zip(sizes, dims, strict=True)]
        states = [state for of in tbe.states for state in of.values()]
        for tensor in (*tbe.weights, *states):
            tensor.fill_(1.0)

        def write(group: DimGroup, weights: Tensor, at: Tensor) -> None:
            weights.index_copy_(0, at, torch.cat([values[t] for t in group.tables]))  # noqa: B023

        tbe.reset_rows(sizes, torch.tensor([row for own in rows for row in own]), write)
        for t, own in enumerate(rows):
            expected = torch.ones(num_rows[t], dims[t])
            expected[own] = values[t]
            assert torch.equal(tbe.weights[t], expected)
            for name, state in tbe.states[t].items():
                ones = torch.ones_like(state)
                if name != "step":
                    ones[own] = 0.0
                assert torch.equal(state, ones)
