"""The wrapper of FBGEMM's module, as far as a CPU goes; tests/gpu has the rest."""

from __future__ import annotations

import importlib
import inspect
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recsys.kernels import tbe_fbgemm_module
from recsys.kernels.lookup_batch import LookupBatch
from recsys.kernels.tbe_fbgemm import FUSED_ON_CPU, has_cpu_ops
from recsys.kernels.tbe_fbgemm_module import FbgemmCudaKernel, FbgemmCudaLookup, _sizes_of
from recsys.kernels.tbe_layout import StorageLayout
from recsys.kernels.tbe_torch import TorchKernel
from recsys.kernels.types import (
    EmbeddingLocation,
    EmbOptimType,
    LookupSettings,
    OptimizerSpec,
    PoolingType,
    UpdateMode,
)
from tests.allocations import Allocations
from tests.kernels.lookup_cases import Case, output_gradient
from tests.kernels.test_tbe import SMALL, train

pytestmark = pytest.mark.skipif(not has_cpu_ops(), reason="fbgemm_gpu is not installed")


SEQUENCES = replace(
    SMALL,
    rows=(7, 5, 0, 9),
    dims=(4,) * 4,
    feature_table_map=(3, 0, 1, 1),
    pooling=PoolingType.NONE,
)


def build(
    spec: OptimizerSpec,
    cache_load_factor: float | None = None,
    pooling: PoolingType = PoolingType.SUM,
    case: Case = SMALL,
) -> FbgemmCudaKernel:
    layout = StorageLayout(case.specs, case.feature_table_map, torch.device("cpu"))
    settings = LookupSettings(
        device=layout.device,
        dims=case.dims,
        feature_table_map=case.feature_table_map,
        pooling=pooling,
        optimizer=spec,
        update_mode=UpdateMode.FUSED,
        cache_load_factor=cache_load_factor,
    )
    module = FbgemmCudaKernel(layout, settings)
    for weight, value in zip(weights_of(module), case.init(), strict=True):
        weight.copy_(value)
    return module


def weights_of(kernel: FbgemmCudaKernel) -> list[torch.Tensor]:
    return kernel.layout.table_views(kernel.storage)


def states_of(kernel: FbgemmCudaKernel) -> list[dict[str, torch.Tensor]]:
    return kernel.layout.split_states(kernel.optimizer, kernel.states)


def forward(kernel: FbgemmCudaKernel, *batch: torch.Tensor | None) -> torch.Tensor:
    out = kernel.look_up_and_update(LookupBatch(*batch))  # type: ignore[arg-type]
    assert out is not None
    return out


@pytest.mark.parametrize("case", [SMALL, SEQUENCES], ids=["pooled", "sequences"])
@pytest.mark.parametrize("algorithm", list(FUSED_ON_CPU))
def test_the_module_trains_as_our_own_kernel(algorithm: EmbOptimType, case: Case) -> None:
    spec = OptimizerSpec(algorithm=algorithm, learning_rate=0.1)
    module = build(spec, pooling=case.pooling, case=case)
    tbe = case.build(spec, UpdateMode.FUSED)
    module.use_rates(0.3)
    tbe.set_learning_rate(0.3)
    for step, expected in enumerate(train(tbe, case, steps=2)):
        indices, offsets, _ = case.batch(step)
        out = forward(module, indices, offsets)
        torch.testing.assert_close(out, expected)
        out.backward(output_gradient(case, step, out.shape))
    for a, b in zip(weights_of(module), tbe.weights, strict=True):
        torch.testing.assert_close(a, b)
    for mine, theirs in zip(states_of(module), tbe.states, strict=True):
        assert mine.keys() == theirs.keys() == spec.rule.state.keys()
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name])
    module.flush()


def test_a_bag_of_a_sequence_is_one_id_however_many_there_are() -> None:
    module = build(
        OptimizerSpec(algorithm=EmbOptimType.SGD), pooling=PoolingType.NONE, case=SEQUENCES
    )
    seen, inner = [], module.module

    def call(indices: torch.Tensor, offsets: torch.Tensor, weights: None) -> torch.Tensor:
        seen.append((indices, offsets))
        return inner(indices, offsets, weights)  # type: ignore[no-any-return]

    module.module = call
    indices, offsets, _ = SEQUENCES.batch(0)
    forward(module, indices, offsets)
    (rows, bags), count = seen[0], indices.numel()
    assert rows.max() > max(SEQUENCES.rows)  # of all tables, end to end
    assert torch.equal(bags, torch.arange(count + 1))
    assert forward(module, indices[:0], offsets * 0).shape == (0, 4)


def test_ids_widen_where_the_rows_of_all_tables_need_it() -> None:
    module = build(OptimizerSpec(algorithm=EmbOptimType.SGD))
    seen = []

    def call(indices: torch.Tensor, offsets: torch.Tensor, weights: None) -> torch.Tensor:
        seen.append((indices.dtype, offsets.dtype))
        return torch.zeros(1)

    module.module = call
    batch = [given.int() for given in SMALL.batch(0)[:2]]
    forward(module, *batch)
    module.layout.num_rows = 2**31
    forward(module, *batch)
    assert seen == [(torch.int32, torch.int32), (torch.int64, torch.int64)]


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
    first, second = forward(module, *batch), forward(module, *batch)
    (first + second).backward()
    forward(module, *batch).backward()
    forward(module, *batch)  # evaluated with gradients enabled, and dropped
    with torch.no_grad():
        forward(module, *batch)
    forward(module, *batch).backward()
    assert fake.steps == [1, 2, 3, 4, 4, 4]
    assert module.steps_T.tolist() == [4.0] * len(SMALL.rows)


def test_weights_of_a_mean_get_their_share_of_the_gradient() -> None:
    spec = OptimizerSpec(algorithm=EmbOptimType.SGD, learning_rate=0.0)
    module = build(spec, pooling=PoolingType.MEAN)
    tables = [weight.double() for weight in weights_of(module)]
    indices, offsets, _ = SMALL.batch(0)
    weights = torch.rand(indices.numel(), requires_grad=True)
    with torch.no_grad():
        evaluated = forward(module, indices, offsets, weights)
    out = forward(module, indices, offsets, weights)
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


def test_weights_and_states_are_those_of_the_module_in_our_layout() -> None:
    kernel = build(OptimizerSpec(algorithm=EmbOptimType.EXACT_ROWWISE_ADAGRAD))
    order = kernel.layout.storage_order
    theirs = zip(
        kernel.module.split_embedding_weights(), kernel.module.split_optimizer_states(), strict=True
    )
    for table, (weight, (state,)) in zip(order, theirs, strict=True):
        assert weights_of(kernel)[table].data_ptr() == weight.data_ptr()
        assert states_of(kernel)[table]["sum"].data_ptr() == state.data_ptr()


def test_features_follow_the_storage_order_of_their_tables() -> None:
    module = build(OptimizerSpec(algorithm=EmbOptimType.SGD))
    tbe = SMALL.build(OptimizerSpec(algorithm=EmbOptimType.SGD), UpdateMode.FUSED)
    indices, offsets, _ = SMALL.batch(0)
    with torch.no_grad():
        assert torch.equal(forward(module, indices, offsets), tbe.forward(indices, offsets))


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


@pytest.mark.parametrize(
    ("pooling", "weighted"),
    [
        *itertools.product((PoolingType.SUM, PoolingType.MEAN), (False, True)),
        (PoolingType.NONE, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_cuda_lookup_equals_torchs(
    pooling: PoolingType, weighted: bool, dtype: torch.dtype
) -> None:
    """Its op has a CPU twin of the same arguments."""
    specs = SMALL.specs if pooling is not PoolingType.NONE else SMALL.specs[:1]
    features = SMALL.feature_table_map if pooling is not PoolingType.NONE else (0, 0, 0, 0)
    layout = StorageLayout(specs, features, torch.device("cpu"))
    settings = LookupSettings(
        device=layout.device,
        weights_dtype=dtype,
        dims=[spec.dim for spec in specs],
        feature_table_map=features,
        pooling=pooling,
        optimizer=None,
        update_mode=UpdateMode.GRADIENT,
    )
    plain = TorchKernel(layout, settings)
    plain.storage.normal_()
    kernel = FbgemmCudaLookup(layout, settings, plain.storage, plain.states)
    indices, offsets, _ = SMALL.batch(0)
    indices = indices % 5
    weights = torch.rand(indices.numel()) if weighted else None
    with torch.no_grad():
        for batch in (
            LookupBatch(indices, offsets, weights),
            LookupBatch(indices[:0], offsets * 0),
        ):
            torch.testing.assert_close(kernel.lookup(batch), plain.lookup(batch))


LARGE = replace(SEQUENCES, rows=(70_000, 50_000, 1, 90_000), feature_table_map=(3, 0, 1, 2))
ROWS, ELEMENTS = sum(LARGE.rows), 4 * sum(LARGE.rows)


def _on_device(spec: OptimizerSpec, weights: torch.Tensor | None, pooling: PoolingType) -> Any:
    """Builds the kernel in its form for CUDA, on `meta`; also how many bytes that allocates."""
    layout = StorageLayout(LARGE.specs, LARGE.feature_table_map, torch.device("meta"))
    settings = LookupSettings(
        device=torch.device("cuda"),
        dims=LARGE.dims,
        feature_table_map=LARGE.feature_table_map,
        pooling=pooling,
        optimizer=spec,
        update_mode=UpdateMode.FUSED,
        location=EmbeddingLocation.DEVICE,
    )
    with Allocations(*([] if weights is None else [weights])) as allocated:
        kernel = FbgemmCudaKernel(layout, settings, weights)
    return kernel, allocated.num_bytes


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.NONE])
@pytest.mark.parametrize(
    ("algorithm", "num_states"),
    [
        (EmbOptimType.SGD, 0),
        (EmbOptimType.EXACT_ADAGRAD, ELEMENTS),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, ROWS),
        (EmbOptimType.ADAM, 2 * ELEMENTS),
        (EmbOptimType.PARTIAL_ROWWISE_ADAM, ELEMENTS + ROWS),
        (EmbOptimType.LAMB, 2 * ELEMENTS),
    ],
)
def test_weights_that_are_adopted_are_not_allocated_a_second_time(
    algorithm: EmbOptimType, num_states: int, pooling: PoolingType
) -> None:
    spec, few = OptimizerSpec(algorithm=algorithm), 2000  # bytes of index tensors
    own, num_bytes = _on_device(spec, None, pooling)
    assert 0 <= num_bytes - 4 * (ELEMENTS + num_states) < few
    weights = torch.empty(ELEMENTS, device="meta")
    kernel, num_bytes = _on_device(spec, weights, pooling)
    assert 0 <= num_bytes - 4 * num_states < few
    assert kernel.module.weights_dev is weights
    assert kernel.storage.shape == (ELEMENTS,)
    states = {name: state.shape for name, state in kernel.states.items()}
    assert states == {name: state.shape for name, state in own.states.items()}
    for name, value in vars(own.module).items():
        if name.startswith("weights_"):  # where tables begin
            assert getattr(kernel.module, name) == value
    mine, theirs = dict(kernel.module.named_buffers()), dict(own.module.named_buffers())
    assert {n: (t.shape, t.dtype) for n, t in mine.items()} == {
        n: (t.shape, t.dtype) for n, t in theirs.items()
    }


def test_weights_are_adopted_on_the_device_only() -> None:
    layout = StorageLayout(SMALL.specs, SMALL.feature_table_map, torch.device("cpu"))
    settings = LookupSettings(
        device=layout.device,
        dims=SMALL.dims,
        feature_table_map=SMALL.feature_table_map,
        pooling=PoolingType.SUM,
        optimizer=OptimizerSpec(algorithm=EmbOptimType.SGD),
        update_mode=UpdateMode.FUSED,
    )
    with pytest.raises(ValueError, match="on the device only; received location"):
        FbgemmCudaKernel(layout, settings, torch.empty(layout.num_elements))


RAGGED = replace(SMALL, bags=(3, 0, 5, 2))
FEW = {"none": (0, 0, 0, 0), "one": (0, 1, 0, 0), "fewer than features": (1, 0, 2, 0)}


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("bags", [(3, 0, 5, 2), (2, 2, 2, 2), *FEW.values()], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("algorithm", list(FUSED_ON_CPU))
def test_the_module_trains_features_with_bags_of_their_own(
    algorithm: EmbOptimType,
    pooling: PoolingType,
    weighted: bool,
    bags: tuple[int, ...],
    num_ranks: int,
) -> None:
    # On a CPU, FBGEMM 1.8 copies int32 offsets of batches of variable size as if they were int64,
    # and writes past their end; and it forgets the length of bags that are weighted and averaged.
    dtype = torch.int32 if algorithm is EmbOptimType.EXACT_ADAGRAD else torch.int64
    case = replace(
        SMALL,
        bags=bags,
        num_ranks=num_ranks,
        pooling=pooling,
        weighted=weighted,
        index_dtype=dtype,
    )
    is_right = pooling is PoolingType.SUM or not weighted
    spec = OptimizerSpec(algorithm=algorithm, learning_rate=0.1 if is_right else 0.0)
    module, tbe = build(spec, pooling=pooling, case=case), case.build(spec, UpdateMode.FUSED)
    expected = iter(train(tbe, case, steps=2))
    for step in range(2):
        indices, offsets, weights = case.batch(step)
        if weights is not None:
            weights.requires_grad_()
        out = module.look_up_and_update(
            LookupBatch(indices, offsets, weights, case.bags_F, case.by_rank)
        )
        assert out is not None
        torch.testing.assert_close(out, next(expected))
        out.backward(output_gradient(case, step, out.shape))
        if weights is not None:
            torch.testing.assert_close(weights.grad, next(expected))
    for a, b in zip(weights_of(module), tbe.weights, strict=True):
        torch.testing.assert_close(a, b)
    for mine, theirs in zip(states_of(module), tbe.states, strict=True):
        for name, value in mine.items() if is_right else ():
            torch.testing.assert_close(value, theirs[name])


def test_features_without_ids_have_bags_of_their_own() -> None:
    module = build(OptimizerSpec(algorithm=EmbOptimType.SGD))
    before = module.storage.clone()
    ids, offsets = torch.empty(0, dtype=torch.int64), torch.zeros(11, dtype=torch.int64)
    out = module.look_up_and_update(LookupBatch(ids, offsets, None, RAGGED.bags_F))
    assert out is not None
    assert torch.equal(out, torch.zeros(3 * 4 + 5 * 8 + 2 * 4))
    out.sum().backward()
    assert torch.equal(module.storage, before)


def test_bags_of_several_ranks_train_at_each_tables_rate() -> None:
    """The module has one rate for all: PyTorch looks up and updates instead."""
    spec = OptimizerSpec(algorithm=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.1)
    case = replace(RAGGED, num_ranks=3)
    pair = [case.build(spec, UpdateMode.FUSED) for _ in range(2)]
    pair[1]._updater = pair[1]._looker = module = build(spec, case=case)
    found = []
    for tbe in pair:
        tbe.learning_rates = [0.1, 0.5, 0.1]
        found.append(train(tbe, case))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(pair[0].weights, weights_of(module), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("bags", FEW.values(), ids=str)
def test_the_module_is_given_as_many_bags_as_features(
    bags: tuple[int, ...], num_ranks: int
) -> None:
    """Its CUDA kernels take fewer for none, and write nothing."""
    case = replace(SMALL, bags=bags, num_ranks=num_ranks)
    module = build(OptimizerSpec(algorithm=EmbOptimType.SGD))
    seen, inner = [], module.module

    def call(*batch: Any, batch_size_per_feature_per_rank: list[list[int]]) -> torch.Tensor:
        seen.append((batch[1], batch_size_per_feature_per_rank))
        return inner(  # type: ignore[no-any-return]
            *batch, batch_size_per_feature_per_rank=batch_size_per_feature_per_rank
        )

    module.module = call
    indices, offsets, _ = case.batch(0)
    module.look_up_and_update(LookupBatch(indices, offsets, None, case.bags_F, case.by_rank))
    ((given, sizes),) = seen
    assert sizes.bags_FR.sum(1).tolist() == [n for (n,) in sizes]  # type: ignore[attr-defined]
    assert sizes == [[bags[0]], [bags[1]], [bags[2]], [bags[3] + 4 - sum(bags)]]
    assert torch.equal(given, torch.cat([offsets, offsets[-1:].expand(4 - sum(bags))]))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_is_said_of_bags_is_uploaded_once_without_waiting(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, uploads = build(OptimizerSpec(algorithm=EmbOptimType.SGD)), []

    def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
        uploads.append(device.type)
        return torch.from_numpy(values.copy())

    monkeypatch.setattr(tbe_fbgemm_module, "upload", upload)
    inner, case = module.module, replace(RAGGED, num_ranks=num_ranks)
    bags = case.given_bags.reshape(4, num_ranks).tolist()  # type: ignore[union-attr]
    plain = type(inner).__mro__[1]._generate_vbe_metadata(inner, torch.zeros(11), bags)
    sizes = _sizes_of(LookupBatch(torch.zeros(0), torch.zeros(11), None, case.bags_F, case.by_rank))
    inner.current_device = torch.device("meta")
    (bag_sizes,) = sizes.values()
    made = inner._generate_vbe_metadata(torch.zeros(11), bag_sizes)
    assert uploads == ["meta"]
    for found, expected in zip(made, plain, strict=True):
        assert type(found) is type(expected)
        torch.testing.assert_close(found, expected)
    inner._generate_vbe_metadata(torch.zeros(11), None)
    assert uploads == ["meta"]


@pytest.mark.parametrize("algorithm", list(FUSED_ON_CPU))
def test_bags_are_prefetched_as_they_are_looked_up(algorithm: EmbOptimType) -> None:
    module = build(OptimizerSpec(algorithm=algorithm))
    module.settings = SimpleNamespace(location=EmbeddingLocation.MANAGED_CACHING)  # type: ignore[assignment]
    inner, seen = module.module, []

    class Recorder:
        def __call__(self, indices: Any, offsets: Any, weights: Any, **sizes: Any) -> Any:
            seen.append((indices, offsets, sizes))
            return inner(indices, offsets, weights, **sizes)

        def prefetch(self, *batch: Any, **sizes: Any) -> None:
            inspect.signature(inner.prefetch).bind(*batch, **sizes)
            seen.append((*batch, sizes))

    module.module = Recorder()
    indices, offsets, _ = RAGGED.batch(0)
    batch = LookupBatch(indices, offsets, None, RAGGED.bags_F)
    module.prefetch(batch)
    module.look_up_and_update(batch)
    for a, b in zip(*seen, strict=True):
        torch.testing.assert_close(a, b)
    has_sizes = seen[0][2] == {"batch_size_per_feature_per_rank": [[3], [0], [5], [2]]}
    assert has_sizes is (algorithm is not EmbOptimType.EXACT_ADAGRAD)


@pytest.mark.parametrize("dims", [(4, 4, 4), (4, 8, 4)])
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("bags", [(3, 0, 5, 2), *FEW.values()], ids=str)
def test_the_cuda_lookup_reads_bags_of_their_own(
    bags: tuple[int, ...], pooling: PoolingType, dims: tuple[int, ...]
) -> None:
    case = replace(SMALL, dims=dims, bags=bags, pooling=pooling, weighted=True)
    layout = StorageLayout(case.specs, case.feature_table_map, torch.device("cpu"))
    settings = LookupSettings(
        device=layout.device,
        dims=dims,
        feature_table_map=case.feature_table_map,
        pooling=pooling,
        optimizer=None,
        update_mode=UpdateMode.GRADIENT,
    )
    plain = TorchKernel(layout, settings)
    for weight, value in zip(layout.table_views(plain.storage), case.init(), strict=True):
        weight.copy_(value)
    kernel = FbgemmCudaLookup(layout, settings, plain.storage, plain.states)
    batch = LookupBatch(*case.batch(0), case.bags_F)
    with torch.no_grad():
        torch.testing.assert_close(kernel.lookup(batch), plain.lookup(batch))
