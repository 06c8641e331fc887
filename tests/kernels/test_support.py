"""The table of facts about FBGEMM, measured again: each claimed limit is real, and no other."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch

from recsys.kernels import ops, support, tbe_fbgemm, tbe_fbgemm_module
from recsys.kernels.backend import POOLING_CODES
from recsys.kernels.lookup_batch import LookupBatch
from recsys.kernels.quantized import QuantizedInFbgemm, QuantizedInTorch
from recsys.kernels.support import (
    BACKENDS,
    choose_backend,
    fbgemm_element_type,
)
from recsys.kernels.tbe_fbgemm import FUSED_ON_CPU, FbgemmCpuKernel, has_cpu_ops
from recsys.kernels.tbe_fbgemm_module import FbgemmCudaKernel, FbgemmCudaLookup
from recsys.kernels.tbe_layout import StorageLayout
from recsys.kernels.tbe_torch import TorchKernel
from recsys.kernels.tbe_triton import TritonKernel
from recsys.kernels.types import (
    EmbeddingLocation,
    EmbOptimType,
    LookupSettings,
    OptimizerSpec,
    PoolingType,
    TableSpec,
    UpdateMode,
    WeightDecayMode,
)

CPU = torch.device("cpu")
FBGEMM_NAMES = {
    EmbOptimType.ADAM: "adam",
    EmbOptimType.PARTIAL_ROWWISE_ADAM: "partial_rowwise_adam",
    EmbOptimType.LAMB: "lamb",
    EmbOptimType.PARTIAL_ROWWISE_LAMB: "partial_rowwise_lamb",
    EmbOptimType.LARS_SGD: "lars_sgd",
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
needs_fbgemm = pytest.mark.skipif(not has_cpu_ops(), reason="fbgemm_gpu is not installed")


def settings(
    *,
    device: str = "cpu",
    weights: torch.dtype = torch.float32,
    output: torch.dtype = torch.float32,
    dims: tuple[int, ...] = (4, 4),
    features: tuple[int, ...] = (0, 0, 1),
    pooling: PoolingType = PoolingType.SUM,
    optimizer: OptimizerSpec | None = None,
    mode: UpdateMode = UpdateMode.FUSED,
) -> LookupSettings:
    return LookupSettings(
        device=torch.device(device),
        weights_dtype=weights,
        output_dtype=output,
        dims=dims,
        feature_table_map=features,
        pooling=pooling,
        optimizer=optimizer or OptimizerSpec(algorithm=EmbOptimType.SGD),
        update_mode=mode,
        location=EmbeddingLocation.HOST if device == "cpu" else EmbeddingLocation.DEVICE,
    )


def kernels_agree(s: LookupSettings) -> bool:
    """Return True if FBGEMM's CPU kernels, forced, give the torch kernels' results."""
    assert s.optimizer is not None
    if s.optimizer.algorithm not in FUSED_ON_CPU:
        name = FBGEMM_NAMES.get(s.optimizer.algorithm)
        return hasattr(torch.ops.fbgemm, f"split_embedding_backward_codegen_{name}_cpu")
    results = []
    for kernel_class in (FbgemmCpuKernel, TorchKernel):
        tables = [TableSpec(name=str(i), num_rows=6, dim=d) for i, d in enumerate(s.dims)]
        layout = StorageLayout(tables, s.feature_table_map, CPU)
        generator = torch.Generator().manual_seed(0)
        storage = torch.randn(layout.num_elements, generator=generator).to(s.weights_dtype)
        kernel = kernel_class(layout, s, storage)
        kernel.use_rates((0.1,) * len(tables))
        num_features = layout.num_features
        indices = torch.tensor([1, 1, 3, 0, 5, 3] * num_features)
        offsets = torch.arange(2 * num_features + 1) * 3
        try:
            out = kernel.lookup(LookupBatch(indices, offsets))
            grad = torch.randn(out.shape, generator=generator).to(out.dtype)
            for _ in range(2):
                kernel.update(grad, LookupBatch(indices, offsets))
        except (RuntimeError, AssertionError):
            return False
        results.append((out.float(), storage.float()))
    tolerance = 1e-4 if s.weights_dtype is s.output_dtype is torch.float32 else 1e-2
    return all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(*results, strict=True)
    )


def measured_settings() -> list[LookupSettings]:
    found = [settings(weights=w, output=o) for w, o in itertools.product(DTYPES, DTYPES)]
    for algorithm, decay in itertools.product(EmbOptimType, (0.0, 0.5)):
        spec = OptimizerSpec(algorithm=algorithm, weight_decay=decay)
        found.append(settings(optimizer=spec))
    for algorithm, dims in itertools.product(FUSED_ON_CPU, ((3, 3), (1, 1), (5, 4), (4, 12))):
        found.append(settings(dims=dims, optimizer=OptimizerSpec(algorithm=algorithm)))
    for algorithm, pooling in itertools.product(FUSED_ON_CPU, POOLING_CODES):
        found.append(settings(pooling=pooling, optimizer=OptimizerSpec(algorithm=algorithm)))
    rowwise = OptimizerSpec(algorithm=EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    found.extend(
        settings(features=features, optimizer=rowwise)
        for features in ((0, 1, 0), (1, 0), (1, 1, 0), (1, 0, 1), (0,))
    )
    return found


def describe(s: LookupSettings) -> str:
    assert s.optimizer is not None
    name = s.optimizer.algorithm.name + ("-decay" if s.optimizer.weight_decay else "")
    dtypes = f"{s.weights_dtype}-{s.output_dtype}".replace("torch.", "")
    return f"{name}-{s.pooling.name}-{dtypes}-{s.dims}-{s.feature_table_map}".replace(" ", "")


@needs_fbgemm
@pytest.mark.parametrize("case", measured_settings(), ids=describe)
def test_the_cpu_rows_of_the_table_are_what_is_measured(case: LookupSettings) -> None:
    choice = choose_backend(case)
    assert (choice.backend == "fbgemm") is kernels_agree(case), choice.reason


def tiny_updates(kernel_class: type[TorchKernel]) -> torch.Tensor:
    """Ones in fp16 after an update by a fifth of the step of the dtype, rounded at random."""
    layout = StorageLayout([TableSpec(name="t", num_rows=1000, dim=4)], (0,), CPU)
    storage = torch.ones(layout.num_elements, dtype=torch.float16)
    spec = OptimizerSpec(algorithm=EmbOptimType.SGD, stochastic_rounding=True)
    of_one = settings(weights=torch.float16, dims=(4,), features=(0,), optimizer=spec)
    kernel = kernel_class(layout, of_one, storage)
    kernel.use_rates(2**-11 / 5)
    torch.manual_seed(0)
    kernel.update(torch.ones(1000, 4), LookupBatch(torch.arange(1000), torch.arange(1001)))
    return storage.float()


def test_torch_rounds_stochastically() -> None:
    after = tiny_updates(TorchKernel)
    assert set(after.tolist()) == {1.0, 1 - 2**-11}
    assert abs((after < 1).float().mean().item() - 0.2) < 0.03


@needs_fbgemm
def test_cpu_kernels_ignore_stochastic_rounding() -> None:
    # FBGEMM's own switch, on: when it starts to work, the limit in the table can go
    with mock.patch.object(tbe_fbgemm, "_ROUND_STOCHASTICALLY", True):
        assert set(tiny_updates(FbgemmCpuKernel).tolist()) == {1.0}
    spec = OptimizerSpec(algorithm=EmbOptimType.SGD, stochastic_rounding=True)
    choice = choose_backend(settings(weights=torch.float16, optimizer=spec))
    assert (choice.backend, "stochastic" in choice.reason) == ("torch", True)


def test_lookups_are_shared_across_learning_rates_except_in_a_fused_update_on_cuda() -> None:
    specs = [OptimizerSpec(algorithm=EmbOptimType.SGD, learning_rate=r) for r in (0.1, 0.2)]
    for device, mode, shared in (
        ("cpu", UpdateMode.FUSED, True),
        ("cuda", UpdateMode.DEFERRED, True),
        ("cuda", UpdateMode.FUSED, False),
    ):
        keys = {support.shared_optimizer(s, torch.device(device), mode) for s in specs}
        assert (len(keys) == 1) is shared


@needs_fbgemm
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dims": (4, 6)}, "divisible by 4"),
        ({"weights": torch.bfloat16}, "fp32 and fp16"),
        ({"output": torch.bfloat16}, None),
        ({"mode": UpdateMode.DEFERRED}, "fused update only"),
        ({"optimizer": OptimizerSpec(algorithm=EmbOptimType.ADAM)}, None),
        (
            {"optimizer": OptimizerSpec(algorithm=EmbOptimType.SGD, weight_decay=0.1)},
            "ignores this weight decay",
        ),
        (
            {
                "optimizer": OptimizerSpec(
                    algorithm=EmbOptimType.ADAM,
                    weight_decay=0.1,
                    weight_decay_mode=WeightDecayMode.L2,
                )
            },
            "ignores this weight decay",
        ),
    ],
)
def test_cuda_choices(
    changes: dict[str, object], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tbe_fbgemm_module, "has_cuda_ops", lambda: True)
    monkeypatch.setattr(ops, "HAS_TRITON", False)
    choice = choose_backend(settings(device="cuda", **changes))  # type: ignore[arg-type]
    assert choice.backend == ("fbgemm" if reason is None else "torch")
    assert reason is None or reason in choice.reason


@needs_fbgemm
@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize(
    "algorithm", [EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.PARTIAL_ROWWISE_LAMB]
)
def test_on_cuda_fbgemm_looks_up_in_every_mode(
    mode: UpdateMode, algorithm: EmbOptimType, triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tbe_fbgemm_module, "has_cuda_ops", lambda: True)
    monkeypatch.setattr(ops, "HAS_TRITON", triton)
    served = settings(device="cuda", mode=mode, optimizer=OptimizerSpec(algorithm=algorithm))
    is_fused = mode is UpdateMode.FUSED and algorithm is EmbOptimType.EXACT_ROWWISE_ADAGRAD
    assert choose_backend(served, "lookup").kernel is (
        FbgemmCudaKernel if is_fused else FbgemmCudaLookup
    )
    is_deferred_adagrad = (
        mode is UpdateMode.DEFERRED and algorithm is EmbOptimType.EXACT_ROWWISE_ADAGRAD
    )
    updates = TritonKernel if triton and is_deferred_adagrad else TorchKernel
    assert choose_backend(served, "update").kernel is (FbgemmCudaKernel if is_fused else updates)
    thin = settings(device="cuda", mode=mode, dims=(4, 6))
    assert choose_backend(thin, "lookup").kernel is TorchKernel


@needs_fbgemm
@pytest.mark.parametrize("triton", [False, True])
def test_on_cuda_updates_are_deterministic_where_asked_for(
    triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tbe_fbgemm_module, "has_cuda_ops", lambda: True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(ops, "HAS_TRITON", triton)
    fused = settings(
        device="cuda", optimizer=OptimizerSpec(algorithm=EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    )
    choice = choose_backend(fused)
    assert choice.kernel is (TritonKernel if triton else TorchKernel)
    assert "not fbgemm: its CUDA update adds up in no fixed order" in choice.reason
    assert ("not triton: Triton is not installed" in choice.reason) is not triton
    assert choose_backend(fused, "lookup").kernel is FbgemmCudaLookup
    with pytest.raises(ValueError, match=r"backend='fbgemm' cannot serve .*no fixed order"):
        choose_backend(fused, wanted="fbgemm")
    adam = replace(fused, optimizer=OptimizerSpec(algorithm=EmbOptimType.ADAM))
    assert choose_backend(adam).kernel is TorchKernel


SGD = OptimizerSpec(algorithm=EmbOptimType.SGD)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"optimizer": SGD}, None),
        ({"optimizer": replace(SGD, weight_decay=0.1), "mode": UpdateMode.DEFERRED}, None),
        ({"weights": torch.bfloat16, "dims": (1, 2047)}, None),
        ({"mode": UpdateMode.GRADIENT}, "SGD and row-wise Adagrad only"),
        ({"optimizer": OptimizerSpec(algorithm=EmbOptimType.ADAM)}, "SGD and row-wise"),
        (
            {"weights": torch.float16, "optimizer": replace(SGD, stochastic_rounding=True)},
            "round stochastically",
        ),
        ({"weights": torch.float64}, "fp32, fp16 and bf16 only"),
        ({"dims": (4, 2049)}, "at most 2048 columns"),
    ],
)
def test_what_triton_updates(
    changes: dict[str, object], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tbe_fbgemm_module, "has_cuda_ops", lambda: False)
    monkeypatch.setattr(ops, "HAS_TRITON", True)
    given = settings(device="cuda", **changes)  # type: ignore[arg-type]
    choice = choose_backend(given)
    assert choice.kernel is (TritonKernel if reason is None else TorchKernel)
    assert reason is None or reason in choice.reason
    assert choose_backend(given, "lookup").kernel is TorchKernel
    in_cache = replace(given, location=EmbeddingLocation.MANAGED_CACHING)
    assert choose_backend(in_cache).kernel is TorchKernel


def test_a_backend_that_does_not_exist_is_no_choice() -> None:
    with pytest.raises(ValueError, match="backend='mkl' cannot serve this lookup"):
        choose_backend(settings(), wanted="mkl")
    with pytest.raises(ValueError, match=r"backend='triton' .*no kernels for 'cpu'"):
        choose_backend(settings(), wanted="triton")
    with pytest.raises(ValueError, match=r"backend='triton' .*: not triton: it"):
        choose_backend(settings(device="cuda"), "lookup", "triton")


def test_other_devices_and_a_missing_fbgemm_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    if has_cpu_ops():
        assert "no kernels for device 'mps'" in choose_backend(settings(device="mps")).reason
    monkeypatch.setattr(ops, "FBGEMM_DEVICES", set())
    choice = choose_backend(settings())
    assert choice.kernel is TorchKernel
    assert choice.reason == "not fbgemm: fbgemm_gpu is not installed, or RECSYS_KERNELS=torch"


def test_quantized_tables_have_backends_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    of_floats = settings(mode=UpdateMode.GRADIENT)
    quantized = replace(of_floats, bits=[8, 4])
    if ops.HAS_FBGEMM:
        assert choose_backend(quantized, "lookup").kernel is QuantizedInFbgemm
        cuda = replace(quantized, device=torch.device("cuda"), location=None)
        refused = choose_backend(cuda, "lookup")
        if "cuda" not in ops.FBGEMM_DEVICES:
            assert refused.kernel is QuantizedInTorch
            assert "has no kernels for this device" in refused.reason
    assert choose_backend(quantized, "lookup", "torch").kernel is QuantizedInTorch
    assert choose_backend(of_floats, "lookup", "torch").kernel is TorchKernel
    monkeypatch.setattr(ops, "FBGEMM_DEVICES", set())
    choice = choose_backend(quantized, "lookup")
    assert choice.kernel is QuantizedInTorch
    assert choice.reason == "not fbgemm: fbgemm_gpu is not installed, or RECSYS_KERNELS=torch"
    with pytest.raises(ValueError, match="quantized tables are not trained"):
        choose_backend(quantized, "update")


def test_a_changed_op_signature_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {**tbe_fbgemm._CPU_OPS, "split_embedding_codegen_forward_cpu": "weights"}
    monkeypatch.setattr(tbe_fbgemm, "_CPU_OPS", changed)
    assert not has_cpu_ops()


def test_every_limit_says_why_and_torch_has_none() -> None:
    assert TorchKernel.lookup_limits == TorchKernel.update_limits == {}
    for backend in BACKENDS:
        limits = (*backend.lookup_limits, *backend.update_limits)
        assert all(len(reason) > 10 for reason in limits)


def test_element_types_of_fbgemm() -> None:
    sparse_type = pytest.importorskip("fbgemm_gpu.split_embedding_configs").SparseType
    assert fbgemm_element_type("INT4") is sparse_type.INT4
    assert fbgemm_element_type(torch.float16) is sparse_type.FP16
    with pytest.raises(ValueError, match="int64"):
        fbgemm_element_type("INT64")


def test_fbgemm_refuses_a_pooling_it_has_no_number_of(monkeypatch: pytest.MonkeyPatch) -> None:
    mean = settings(features=(0, 1), pooling=PoolingType.MEAN)
    assert choose_backend(mean).backend == "fbgemm"
    monkeypatch.delitem(POOLING_CODES, PoolingType.MEAN)
    assert choose_backend(mean)[:2] == ("torch", "not fbgemm: it has no kernels of this pooling")
