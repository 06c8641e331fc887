from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recsys.kernels import ops, quantized_lookup
from recsys.kernels.backend import POOLING_CODES
from recsys.kernels.quantize import quantize_rows
from recsys.kernels.quantized import dequantize_rows
from recsys.kernels.quantized_lookup import QuantizedLookup
from recsys.kernels.types import PoolingType


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_values_are_within_half_a_step(bits: int) -> None:
    weight = torch.randn(20, 16, generator=torch.Generator().manual_seed(0))
    restored = dequantize_rows(quantize_rows(weight, bits), bits)
    steps = (weight.amax(1) - weight.amin(1)) / (2**bits - 1)
    # scale and bias are fp16: eleven significant bits
    bound = steps / 2 + 2**-10 * weight.abs().amax(1)
    assert bool(((restored - weight).abs().amax(1) <= bound).all())


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_equal_values_are_kept(bits: int) -> None:
    weight = torch.tensor([[0.5], [0.0], [-2.0]]).expand(3, 4)
    torch.testing.assert_close(dequantize_rows(quantize_rows(weight, bits), bits), weight)


def test_what_cannot_be_quantized_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[32, 16, 8, 4, 2\] .*bits=3"):
        quantize_rows(torch.zeros(1, 2), 3)
    for bits, multiple in ((4, 2), (2, 4)):
        with pytest.raises(ValueError, match=f"is divisible by {multiple}; received 3"):
            quantize_rows(torch.zeros(1, 3), bits)
    with pytest.raises(ValueError, match="received NaN or infinity"):
        quantize_rows(torch.tensor([[float("nan"), 0.0]]), 8)
    with pytest.raises(ValueError, match=r"65504; received .*from 0 to 70000\."):
        quantize_rows(torch.tensor([[7e4, 0.0]]), 16)


def test_16_bits_are_fp16() -> None:
    weight = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    rows = quantize_rows(weight, 16)
    assert rows.shape == (20, 10)
    assert torch.equal(dequantize_rows(rows, 16), weight.half().float())


def test_32_bits_are_fp32() -> None:
    weight = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(dequantize_rows(quantize_rows(weight, 32), 32), weight)


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_a_single_row_of_an_odd_width_is_read(bits: int) -> None:
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    rows = quantize_rows(weight, bits)
    assert torch.equal(dequantize_rows(rows[1:2], bits), dequantize_rows(rows, bits)[1:2])


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("pooling", POOLING_CODES)
@pytest.mark.parametrize("bits", [[8, 8], [4, 4], [8, 4], [16, 16], [16, 4], [32, 2]])
@pytest.mark.parametrize("output", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("row_alignment", [1, 16])
def test_fbgemm_and_torch_agree(
    monkeypatch: pytest.MonkeyPatch,
    bits: list[int],
    pooling: PoolingType,
    is_weighted: bool,
    output: torch.dtype,
    row_alignment: int,
) -> None:
    if is_weighted and pooling is PoolingType.NONE:
        return
    generator = torch.Generator().manual_seed(0)
    tables = [
        quantize_rows(torch.randn(10, dim, generator=generator), b)
        for dim, b in zip((16 if pooling is PoolingType.NONE else 6, 16), bits, strict=True)
    ]
    settings: Any = {"output_dtype": output, "row_alignment": row_alignment}
    lengths = torch.tensor([2, 0, 1, 3, 1, 1])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    indices = torch.randint(0, 10, (8,), generator=generator)
    weights = torch.rand(8, generator=generator) if is_weighted else None
    lookup = QuantizedLookup(tables, bits, [0, 1, 1], pooling, **settings)
    received = lookup(indices, offsets, weights)
    assert received.dtype is output
    monkeypatch.setattr(ops, "FBGEMM_DEVICES", set())
    reference = QuantizedLookup(tables, bits, [0, 1, 1], pooling, **settings)
    torch.testing.assert_close(received, reference(indices, offsets, weights))
    none = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    assert lookup(*none, None).shape == reference(*none, None).shape


def _lookup() -> QuantizedLookup:
    generator = torch.Generator().manual_seed(0)
    tables = [
        quantize_rows(torch.randn(10, dim, generator=generator), bits)
        for dim, bits in ((6, 8), (16, 4))
    ]
    return QuantizedLookup(tables, [8, 4], [0, 1], PoolingType.SUM)


def test_a_move_to_another_kind_of_device_lays_the_rows_out_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookup = _lookup()
    batch = (torch.tensor([1, 9, 3]), torch.tensor([0, 2, 3]), None)
    expected, rows = lookup(*batch), [lookup.table_rows(t).clone() for t in range(2)]
    # no GPU here: the tables move to this CPU, which reads a CUDA layout
    monkeypatch.setitem(quantized_lookup._ROW_ALIGNMENT, "cpu", 16)
    lookup.device_type = "elsewhere"
    lookup.to("cpu")
    assert lookup.device_type == "cpu"
    assert lookup.row_alignment == 16
    assert lookup.weights.numel() == 2 * 256  # 10 rows of 16 bytes, to the next 128
    torch.testing.assert_close(lookup(*batch), expected, rtol=0, atol=0)
    for table in range(2):
        assert torch.equal(lookup.table_rows(table), rows[table])


class _Calls(TorchDispatchMode):
    """Keeps the arguments of FBGEMM's lookup by name."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[dict[str, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if "int_nbit_split_embedding_codegen_lookup" in func._schema.name:
            names = [argument.name for argument in func._schema.arguments]
            self.arguments.append(dict(zip(names, args, strict=False)) | (kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not ops.HAS_FBGEMM, reason="FBGEMM is missing")
@pytest.mark.parametrize("scripted", [False, True])
def test_says_that_there_is_no_cache_as_fbgemms_cuda_kernel_wants_it(scripted: bool) -> None:
    # the shapes and dtypes of FBGEMM's own module; its CPU kernel does not look at them
    lookup = torch.jit.script(_lookup()) if scripted else _lookup()
    with _Calls() as calls:
        lookup(torch.tensor([1, 9]), torch.tensor([0, 1, 2]), None)
    (arguments,) = calls.arguments
    expected = {
        "uvm_weights": (torch.uint8, (0,)),
        "lxu_cache_weights": (torch.uint8, (0, 0)),
        "lxu_cache_locations": (torch.int32, (0,)),
    }
    assert {n: (arguments[n].dtype, tuple(arguments[n].shape)) for n in expected} == expected


def test_only_the_rows_are_in_the_state_dict() -> None:
    # the rest depends on the device, and on nothing that was learned
    assert list(_lookup().state_dict()) == ["weights"]


def test_a_scripted_lookup_refuses_another_kind_of_device() -> None:
    lookup = _lookup()
    lookup.device_type = "cuda"
    with pytest.raises(torch.jit.Error, match=r"exported for cuda; .*on cpu"):
        torch.jit.script(lookup)(torch.tensor([1, 9]), torch.tensor([0, 1, 2]), None)


def test_lookups_that_cannot_be_are_refused() -> None:
    rows = quantize_rows(torch.zeros(2, 4), 8), quantize_rows(torch.zeros(2, 8), 8)
    with pytest.raises(ValueError, match=r"NONE needs .*received \[4, 8\]"):
        QuantizedLookup(rows, [8, 8], [0, 1], PoolingType.NONE)
    with pytest.raises(ValueError, match="needs at least one table"):
        QuantizedLookup([], [], [], PoolingType.SUM)
    with pytest.raises(ValueError, match=r"received torch\.float64"):
        QuantizedLookup(rows, [8, 8], [0, 1], PoolingType.SUM, output_dtype=torch.float64)


def test_a_lookup_that_was_emptied_knows_its_tables_again() -> None:
    lookup = _lookup()
    batch = (torch.tensor([1, 9, 3]), torch.tensor([0, 2, 3]), None)
    expected, state = lookup(*batch), lookup.state_dict()
    other = _lookup().to_empty(device="cpu")
    other.load_state_dict(state)
    torch.testing.assert_close(other(*batch), expected, rtol=0, atol=0)


def test_a_pooling_without_a_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(POOLING_CODES, PoolingType.NONE)
    with pytest.raises(ValueError, match="one of SUM, MEAN; received NONE"):
        QuantizedLookup([quantize_rows(torch.ones(2, 4), 8)], [8], [0], PoolingType.NONE)


@pytest.mark.skipif(not ops.HAS_FBGEMM, reason="fbgemm_gpu is not installed")
def test_ids_stay_long_where_a_table_needs_it() -> None:
    rows = quantize_rows(torch.randn(9, 4), 8)
    lookup = QuantizedLookup([rows], [8], [0], PoolingType.SUM)
    assert not lookup.has_long_ids
    ids, offsets = torch.tensor([8, 0, 8]), torch.tensor([0, 2, 3])
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "int_nbit" in str(func):
                seen.append({tensor.dtype for tensor in (args[12], args[13])})
            return func(*args, **(kwargs or {}))

    with Seen():
        expected = lookup(ids, offsets, None)
        lookup.has_long_ids = True
        assert torch.equal(lookup(ids.int(), offsets.int(), None), expected)
    assert seen == [{torch.int32}, {torch.int64}]
