"""The wrapper of FBGEMM's module, as far as a CPU goes; tests/gpu has the rest."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch

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


def build(
    spec: OptimizerSpec,
    cache_load_factor: float | None = None,
    pooling: PoolingMode = PoolingMode.SUM,
) -> FbgemmModule:
    layout = StorageLayout(SMALL.specs, SMALL.feature_table_map, torch.device("cpu"))
    module = FbgemmModule(
        layout,
        None,
        pooling,
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
        assert mine.keys() == theirs.keys() == spec.rule.state.keys()
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name])
    module.flush()


class _Forwards:
    """Stands for FBGEMM's module of an optimizer that it has on CUDA only."""

    def __init__(self) -> None:
        self.iter, self.iter_cpu = torch.zeros(1), torch.zeros(1)
        self.steps: list[int] = []

    def __call__(self, *batch: Any) -> torch.Tensor:
        self.steps.append(int(self.iter_cpu) + 1)
        return torch.ones(1, requires_grad=True) * 2


def test_each_backward_is_a_step_of_its_own() -> None:
    module = build(OptimizerSpec(algorithm=EmbOptimType.SGD))
    fake = module.module = _Forwards()
    module._counts_steps = True
    batch = SMALL.batch(0)
    first, second = module.forward(*batch), module.forward(*batch)
    (first + second).backward()
    module.forward(*batch).backward()
    module.forward(*batch)  # evaluated with gradients enabled, and dropped
    with torch.no_grad():
        module.forward(*batch)
    module.forward(*batch).backward()
    assert fake.steps == [1, 2, 3, 4, 4, 4]
    assert module.steps_T.tolist() == [4.0] * len(module.weights)


def test_weights_of_a_mean_get_their_share_of_the_gradient() -> None:
    spec = OptimizerSpec(algorithm=EmbOptimType.SGD, learning_rate=0.0)
    module = build(spec, pooling=PoolingMode.MEAN)
    tables = [weight.double() for weight in module.weights]
    indices, offsets, _ = SMALL.batch(0)
    weights = torch.rand(indices.numel(), requires_grad=True)
    with torch.no_grad():
        evaluated = module.forward(indices, offsets, weights)
    out = module.forward(indices, offsets, weights)
    assert torch.equal(out, evaluated)
    factors = output_gradient(SMALL, 0, out.shape)
    out.backward(factors)
    found = weights.grad
    oracle = weights.detach().double().requires_grad_()
    num_bags = len(factors)
    pieces = []
    for feature, table in enumerate(SMALL.feature_table_map):
        bags = offsets[feature * num_bags : (feature + 1) * num_bags + 1].tolist()
        pieces.append(
            torch.stack(
                [
                    (tables[table][indices[a:b]] * oracle[a:b, None]).sum(0) / max(b - a, 1)
                    for a, b in itertools.pairwise(bags)
                ]
            )
        )
    torch.cat(pieces, 1).backward(factors.double())
    torch.testing.assert_close(found, oracle.grad.float())


@pytest.mark.parametrize("name", ["lookup_adam", "lookup_lamb", "lookup_lars_sgd"])
def test_fbgemms_note_on_its_optimizers_is_no_error(name: str) -> None:
    build(OptimizerSpec(algorithm=EmbOptimType.SGD))
    invoker = importlib.import_module(f"fbgemm_gpu.split_embedding_codegen_lookup_invokers.{name}")
    # warnings are errors here, and the note comes first
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute"):
        invoker.invoke(*[None] * 5)


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
    module = training.SplitTableBatchedEmbeddingBagsCodegen
    construct = module.__init__

    def record(self: Any, *arguments: Any, **named: Any) -> None:
        seen.append(named["cache_load_factor"])
        construct(self, *arguments, **named)

    monkeypatch.setattr(module, "__init__", record)
    build(OptimizerSpec(algorithm=EmbOptimType.SGD), asked)
    assert seen == [given]
