"""The wrapper of FBGEMM's module, as far as a CPU goes; tests/gpu has the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recsys.kernels.row_update import STATE_KINDS
from recsys.kernels.tbe_fbgemm import FUSED_ON_CPU, has_cpu_ops
from recsys.kernels.tbe_fbgemm_module import FbgemmModule
from recsys.kernels.tbe_layout import StorageLayout
from recsys.kernels.types import (
    EmbeddingLocation,
    EmbOptimType,
    OptimizerSpec,
    PoolingMode,
    UpdateMode,
)
from tests.kernels.lookup_cases import output_gradient
from tests.kernels.test_tbe import SMALL, train

pytestmark = pytest.mark.skipif(not has_cpu_ops(), reason="fbgemm_gpu is not installed")


def build(spec: OptimizerSpec, cache_load_factor: float | None = None) -> FbgemmModule:
    layout = StorageLayout(SMALL.specs, SMALL.feature_table_map, torch.device("cpu"))
    module = FbgemmModule(
        layout,
        None,
        PoolingMode.SUM,
        torch.float32,
        torch.float32,
        spec,
        EmbeddingLocation.HOST,
        cache_load_factor,
    )
    for weight, value in zip(module.weights, SMALL.init(), strict=True):
        weight.copy_(value)
    return module


@pytest.mark.parametrize("algorithm", list(FUSED_ON_CPU))
def test_the_module_trains_as_our_own_kernel(algorithm: EmbOptimType) -> None:
    spec = OptimizerSpec(algorithm=algorithm, learning_rate=0.1)
    module, tbe = build(spec), SMALL.build(spec, UpdateMode.FUSED)
    module.set_learning_rate(0.3)
    tbe.set_learning_rate(0.3)
    for step in range(2):
        indices, offsets, _ = SMALL.batch(step)
        out = module.forward(indices, offsets, None)
        out.backward(output_gradient(SMALL, step, out.shape))
    train(tbe, SMALL, steps=2)
    for a, b in zip(module.weights, tbe.weights, strict=True):
        torch.testing.assert_close(a, b)
    for mine, theirs in zip(module.states, tbe.states, strict=True):
        assert mine.keys() == theirs.keys() == STATE_KINDS[algorithm].keys()
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name])
    module.flush()


def test_weights_and_states_are_views_of_the_flat_buffers_in_our_layout() -> None:
    module = build(OptimizerSpec(algorithm=EmbOptimType.EXACT_ROWWISE_ADAGRAD))
    layout = StorageLayout(SMALL.specs, SMALL.feature_table_map, torch.device("cpu"))
    for mine, expected in zip(module.weights, layout.table_views(module.storage), strict=True):
        assert mine.data_ptr() == expected.data_ptr()
    for states, row_state in zip(
        module.states, layout.row_views(module.flat_states["sum"]), strict=True
    ):
        assert states["sum"].data_ptr() == row_state.data_ptr()


def test_features_follow_the_storage_order_of_their_tables() -> None:
    module = build(OptimizerSpec(algorithm=EmbOptimType.SGD))
    tbe = SMALL.build(OptimizerSpec(algorithm=EmbOptimType.SGD), UpdateMode.FUSED)
    indices, offsets, _ = SMALL.batch(0)
    with torch.no_grad():
        assert torch.equal(module.forward(indices, offsets, None), tbe.forward(indices, offsets))


@pytest.mark.parametrize(("asked", "given"), [(None, 0.2), (0.5, 0.5)])
def test_the_share_of_rows_in_the_cache_is_handed_on(
    monkeypatch: pytest.MonkeyPatch, asked: float | None, given: float
) -> None:
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as training

    seen = []

    class Recorder(training.SplitTableBatchedEmbeddingBagsCodegen):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            seen.append(named["cache_load_factor"])
            super().__init__(*arguments, **named)

    monkeypatch.setattr(training, "SplitTableBatchedEmbeddingBagsCodegen", Recorder)
    build(OptimizerSpec(algorithm=EmbOptimType.SGD), asked)
    assert seen == [given]
