"""Updates by Triton equal updates by PyTorch; on a CPU by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.needs_triton import HAS_TRITON, NEEDS_TRITON

if not HAS_TRITON:
    pytest.skip(NEEDS_TRITON, allow_module_level=True)

from recsys.kernels.deferred import DeferredGradients
from recsys.kernels.lookup_batch import LookupBatch
from recsys.kernels.row_marks import RowMarks
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.kernels.tbe_layout import StorageLayout
from recsys.kernels.tbe_torch import TorchKernel
from recsys.kernels.tbe_triton import TritonKernel
from recsys.kernels.types import (
    EmbOptimType,
    LookupSettings,
    OptimizerSpec,
    PoolingType,
    UpdateMode,
    WeightDecayMode,
)
from tests.fast_scans import fast_scans
from tests.kernels.lookup_cases import Case, cases, output_gradient
from tests.pretended_cuda import CUDA, PretendedCuda

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ADAGRAD, SGD = EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.SGD
few = settings(max_examples=15, deadline=None, derandomize=True)


@pytest.fixture(autouse=True, scope="module")
def _fast() -> Iterator[None]:
    with fast_scans():
        yield


class Trained:
    """Tables that a kernel updates, and the output's gradient of a batch."""

    def __init__(self, kernel: type[TorchKernel], case: Case, spec: OptimizerSpec) -> None:
        layout = StorageLayout(case.specs, case.feature_table_map, DEVICE)
        served = LookupSettings(
            device=DEVICE,
            dims=case.dims,
            feature_table_map=case.feature_table_map,
            pooling=case.pooling,
            optimizer=spec,
            update_mode=UpdateMode.FUSED,
        )
        self.case, self.kernel = case, kernel(layout, served)
        self.weights = layout.table_views(self.kernel.storage)
        for weight, value in zip(self.weights, case.init(), strict=True):
            weight.copy_(value)

    def given(self, step: int) -> tuple[Tensor, LookupBatch]:
        given = [None if t is None else t.to(DEVICE) for t in self.case.batch(step)]
        batch = LookupBatch(*given, self.case.bags_F)  # type: ignore[arg-type]
        grad = output_gradient(self.case, step, self.kernel.lookup(batch).shape)
        return grad.to(DEVICE), batch


def assert_same(a: Trained, b: Trained) -> None:
    torch.testing.assert_close(a.kernel.storage, b.kernel.storage, rtol=1e-4, atol=1e-5)
    assert a.kernel.states.keys() == b.kernel.states.keys()
    for name, state in a.kernel.states.items():
        torch.testing.assert_close(state, b.kernel.states[name], rtol=1e-4, atol=1e-5)


specs = st.builds(
    OptimizerSpec,
    algorithm=st.sampled_from([ADAGRAD, SGD]),
    weight_decay=st.sampled_from([0.0, 0.3]),
    weight_decay_mode=st.sampled_from(WeightDecayMode),
)


any_cases = cases() | cases(ragged=True)


@few
@given(case=any_cases, spec=specs, own_rates=st.booleans())
def test_it_updates_as_pytorch_does(case: Case, spec: OptimizerSpec, own_rates: bool) -> None:
    pair = [Trained(kernel, case, spec) for kernel in (TritonKernel, TorchKernel)]
    for trained in pair:
        number = len(case.rows)
        trained.kernel.use_rates(tuple(0.1 * t for t in range(number)) if own_rates else 0.1)
        for step in range(2):
            trained.kernel.update(*trained.given(step))
    assert_same(*pair)


@few
@given(case=any_cases, spec=specs.filter(lambda spec: spec.algorithm is ADAGRAD))
def test_statistics_are_made_with_the_gradients(case: Case, spec: OptimizerSpec) -> None:
    pair = [Trained(kernel, case, spec) for kernel in (TritonKernel, TorchKernel)]
    for step in range(2):
        statistics = []
        deferred = [
            DeferredGradients(t.kernel, RowMarks(t.kernel.layout, []), keeps_batch=True)
            for t in pair
        ]
        for trained, gradients in zip(pair, deferred, strict=True):
            count = len(case.rows)
            gradients.add(*trained.given(step), [True] * count, None)
            statistics.append(gradients.row_statistics())
        for mine, theirs in zip(*statistics, strict=True):  # entries that repeat a row have 0
            torch.testing.assert_close(mine[mine != 0], theirs[theirs != 0], rtol=1e-4, atol=1e-5)
        for gradients, found in zip(deferred, statistics, strict=True):
            gradients.step([2 * s / d for s, d in zip(found, case.dims, strict=True)])
    assert_same(*pair)


HOT = Case(
    rows=(30, 3),
    dims=(8, 8),
    feature_table_map=(0, 1, 0),
    pooling=PoolingType.SUM,
    weighted=True,
    index_dtype=torch.int64,
    batch_size=80,
    seed=1,
)


def _build_on_pretended(
    backend: str | None, mode: UpdateMode = UpdateMode.FUSED
) -> TableBatchedEmbedding:
    tbe = TableBatchedEmbedding(
        HOT.specs,
        feature_table_map=HOT.feature_table_map,
        pooling=HOT.pooling,
        optimizer=OptimizerSpec(algorithm=ADAGRAD, learning_rate=0.1),
        update_mode=mode,
        device=CUDA,
        backend=backend,
    )
    for weight, value in zip(tbe.weights, HOT.init(), strict=True):
        weight.copy_(value)
    return tbe


def _train_on_pretended(backend: str | None) -> TableBatchedEmbedding:
    tbe = _build_on_pretended(backend)
    for step in range(2):
        indices, offsets, weights = (t.to(CUDA) for t in HOT.batch(step))  # type: ignore[union-attr]
        out = tbe.forward(indices, offsets, weights)
        out.backward(output_gradient(HOT, step, out.shape).to(CUDA))
    return tbe


@pytest.mark.skipif(DEVICE.type == "cuda", reason="pretends to be on a device")
def test_it_is_chosen_on_a_device_without_an_update_by_fbgemm() -> None:
    with PretendedCuda(triton=True):
        mine, again = _train_on_pretended(None), _train_on_pretended(None)
        assert "backend=triton: it supports these settings on cuda; not fbgemm: " in repr(mine)
        plain = _train_on_pretended("torch")
        assert torch.equal(mine.storage, again.storage)
        torch.testing.assert_close(mine.storage, plain.storage, rtol=1e-4, atol=1e-5)
        assert not torch.equal(mine.storage, torch.cat([v.flatten() for v in HOT.init()]).to(CUDA))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="pretends to be on a device")
@pytest.mark.parametrize("mode", [UpdateMode.FUSED, UpdateMode.DEFERRED])
@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize("has_triton", [True, False])
def test_the_host_waits_for_no_features_with_bags_of_their_own(
    has_triton: bool, backend: str | None, mode: UpdateMode
) -> None:
    case = replace(HOT, bags=(80, 0, 21))
    plain = case.build(OptimizerSpec(algorithm=ADAGRAD, learning_rate=0.1), UpdateMode.FUSED)
    with PretendedCuda(triton=has_triton) as cuda:
        tbe = _build_on_pretended(backend, mode)
        for step in range(2):
            given = case.batch(step)
            indices, offsets, weights = (t.to(CUDA) for t in given)  # type: ignore[union-attr]
            weights.requires_grad_()
            grad = output_gradient(case, step, torch.Size([101 * 8]))
            plain.forward(*given, bags=case.bags_F).backward(grad)
            grad = grad.to(CUDA)
            cuda.forget()
            tbe.forward(indices, offsets, weights, bags=case.bags_F).backward(grad)
            tbe.deferred.step()
            assert cuda.notes == [] or step == 0  # where tables begin is uploaded once
            assert weights.grad is not None
        torch.testing.assert_close(tbe.storage.cpu(), plain.storage, rtol=1e-4, atol=1e-5)
