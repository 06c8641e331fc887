"""Fewer bytes between ranks: what arrives is within the stated bound, and the bytes are counted.

What becomes of models that train over each wire: tests/conformance/.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.ranks.wire import (
    EXACT,
    CommOp,
    CommType,
    QCommsConfig,
    QuantizedCommCodecs,
    WireFormat,
    codecs_for,
    get_qcomm_codecs_registry,
)
from recsys.distributed.types import ShardingType
from tests.distributed.cases import Case, EachType, Narrow, counted_collectives, shard, whole_state
from tests.ranks import RankPool

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {
    "fp16": WireFormat(precision=CommType.FP16),
    "fp16 scaled": WireFormat(precision=CommType.FP16, loss_scale=1024.0),
    "bf16": WireFormat(precision=CommType.BF16),
    "e4m3": WireFormat(precision=CommType.FP8, block=32, fp8_dtype=E4M3),
    "e5m2": WireFormat(precision=CommType.FP8, block=32, fp8_dtype=E5M2),
    "int8": WireFormat(precision=CommType.INT8, block=32),
}


def _bound(name: str, x: Tensor, largest: Tensor) -> Tensor:
    """The error that the module's table allows."""
    a = x.abs()
    return {
        "fp16": torch.maximum(a * 2**-11, torch.tensor(2.0**-25)),
        "fp16 scaled": torch.maximum(a * 2**-11, torch.tensor(2.0**-35)),
        "bf16": a * 2**-8,
        "e4m3": a * 2**-4 + largest * 2**-18,
        "e5m2": a * 2**-3 + largest * 2**-32,
        "int8": largest / 254,
    }[name]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("magnitude", [1e-6, 1e-3, 1.0, 30.0])
def test_error_is_within_the_stated_bound(name: str, magnitude: float) -> None:
    wire = FORMATS[name]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64 * 32, generator=generator) * magnitude
    sizes = [32 * 20, 0, 32 * 44]
    if wire.loss_scale:
        values = values.clamp(-60, 60)  # beyond fp16's range once scaled
    encoded, _ = wire.encode(values, sizes)
    arrived = wire.decode(encoded, sizes)
    largest = values.view(-1, 32).abs().amax(1, keepdim=True).expand(-1, 32).reshape(-1)
    error = (arrived - values).abs()
    assert (error <= _bound(name, values, largest) * 1.0001).all()
    assert error.max() > 0


@pytest.mark.parametrize("name", ["e4m3", "int8"])
def test_stretches_that_end_within_a_block(name: str) -> None:
    sizes = [7, 0, 32, 33]
    values = torch.arange(1.0, 73.0)
    encoded, encoded_sizes = FORMATS[name].encode(values, sizes)
    assert encoded_sizes == FORMATS[name].encoded_sizes(sizes) == [36, 0, 36, 72]
    assert encoded.numel() == sum(encoded_sizes)
    torch.testing.assert_close(FORMATS[name].decode(encoded, sizes), values, rtol=0.07, atol=0.3)


@pytest.mark.parametrize("name", ["e4m3", "int8"])
@pytest.mark.parametrize("block", [1, 5, 33, 35])
def test_a_single_block_of_any_width(name: str, block: int) -> None:
    wire = replace(FORMATS[name], block=block)
    values = torch.linspace(-1, 1, block)
    encoded, sizes = wire.encode(values, [block])
    assert sizes == [block + 4]
    torch.testing.assert_close(wire.decode(encoded, [block]), values, rtol=0.07, atol=0.01)


def _outputs_and_gradients(case: Case) -> list[Tensor]:
    model = shard(case)
    before = whole_state(model)
    outputs, _ = model(case.batches(1)[dist.get_rank()])
    (outputs * outputs.detach().sin()).sum().backward()
    after = whole_state(model)
    return [outputs.detach(), *(after[name] - before[name] for name in after)]


@pytest.mark.parametrize("wire", CommType)
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_tables_of_few_columns_travel_in_any_format(
    ranks: RankPool, wire: CommType, pooled: bool
) -> None:
    for kind, width in itertools.product((ShardingType.TABLE_WISE, ShardingType.ROW_WISE), (1, 3)):
        case = Narrow(3, 2, types=(kind,), width=width, pooled=pooled)
        exact = ranks(2, _outputs_and_gradients, case)
        for found, expected in zip(
            ranks(2, _outputs_and_gradients, replace(case, wire=wire)), exact, strict=True
        ):
            for value, other in zip(found, expected, strict=True):
                largest = float(other.abs().max()) if other.numel() else 0.0
                torch.testing.assert_close(value, other, rtol=0, atol=0.25 * largest)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_does_not_become_one(name: str, bad: float) -> None:
    values = torch.ones(64)
    values[3] = bad
    encoded, _ = FORMATS[name].encode(values, [64])
    arrived = FORMATS[name].decode(encoded, [64])
    assert not arrived[3].isfinite()
    assert (arrived[32:] == 1).all()  # another block


def test_zeros_stay_zeros() -> None:
    for wire in FORMATS.values():
        encoded, _ = wire.encode(torch.zeros(64), [64])
        assert (wire.decode(encoded, [64]) == 0).all()


def test_blocks_fit_the_columns() -> None:
    wire = WireFormat(precision=CommType.INT8)
    assert [wire.fitted(chunk).block for chunk in (4, 12, 32, 64, 48)] == [32, 36, 32, 64, 48]
    assert WireFormat(precision=CommType.INT8, block=16).fitted(64).block == 16


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"forward_precision must be .*FP32, FP16"):
        QCommsConfig(forward_precision="fp16")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"fp8_quantize_dim must be an int.*7\.5"):
        QCommsConfig(fp8_quantize_dim=7.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backward_loss_scale must be positive and finite"):
        QCommsConfig(backward_loss_scale=0.0)
    half = QuantizedCommCodecs(FORMATS["fp16"], FORMATS["fp16"])
    registry = {
        "POOLED_EMBEDDINGS_ALL_TO_ALL": half,
        "POOLED_EMBEDDINGS_REDUCE_SCATTER": QuantizedCommCodecs(),
    }
    ops = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER
    with pytest.raises(ValueError, match="must have one precision"):
        codecs_for(registry, *ops)
    assert codecs_for({"POOLED_EMBEDDINGS_REDUCE_SCATTER": half}, *ops) == half
    assert codecs_for(None, *ops).forward.fitted(4) is EXACT


def _sharders(config: QCommsConfig) -> list[Any]:
    registry = get_qcomm_codecs_registry(config)
    return [
        EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry),
        EmbeddingCollectionSharder(qcomm_codecs_registry=registry),
    ]


def _bytes_of_a_step(case: Case, config: QCommsConfig) -> tuple[int, int]:
    """Bytes this rank sends to others for outputs, forward and backward."""
    model = shard(case, sharders=_sharders(config))
    with counted_collectives() as calls:
        values, _ = model(case.batches(3)[dist.get_rank()])
        values.sum().backward()
    _, _, forward, backward = (given for _, given, *_ in calls.arguments["all_to_all_single"])
    return forward.numel() * forward.element_size(), backward.numel() * backward.element_size()


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_bytes_on_the_wire(ranks: RankPool, pooled: bool) -> None:
    kinds = (ShardingType.TABLE_WISE, ShardingType.ROW_WISE)
    case = EachType(0, 2, types=kinds, pooled=pooled, optimizer=torch.optim.SGD)
    whole = ranks(2, _bytes_of_a_step, case, QCommsConfig())
    assert all(min(sizes) > 0 for sizes in whole)
    for precision in (CommType.FP16, CommType.BF16):
        config = QCommsConfig(forward_precision=precision, backward_precision=precision)
        for sizes, half in zip(whole, ranks(2, _bytes_of_a_step, case, config), strict=True):
            assert [2 * size for size in half] == list(sizes)
    config = QCommsConfig(
        forward_precision=CommType.INT8,
        backward_precision=CommType.FP8,
        fp8_quantize_dim=8,
        fp8_quantize_dim_bwd=8,
    )
    for sizes, small in zip(whole, ranks(2, _bytes_of_a_step, case, config), strict=True):
        assert [12 * (size // 32) for size in sizes] == list(small)  # 8 bytes and a scale
