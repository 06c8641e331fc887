"""Triton's kernels lay columns out as loops and as PyTorch do; on a CPU by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.compiled import num_compiled
from tests.needs_triton import HAS_TRITON, NEEDS_TRITON

if not HAS_TRITON:
    pytest.skip(NEEDS_TRITON, allow_module_level=True)

from recsys.distributed.ranks.wire import CommType, WireFormat
from recsys.distributed.stages.column_gather import ColumnGather, MeanSlot
from recsys.kernels.output_triton import gather, scatter_grad

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GUARD = 64  # values around a buffer that must stay as they are, and must not be read
Blocks = list[list[tuple[int, int]]]


def _in_guards(values: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """Return a copy of values with NaN around it, and a function that checks this NaN."""
    around = torch.full((values.numel() + 2 * GUARD,), torch.nan, dtype=values.dtype).to(DEVICE)
    inner = around[GUARD : GUARD + values.numel()].view(values.shape).copy_(values)
    return inner, lambda: bool(around[:GUARD].isnan().all() and around[-GUARD:].isnan().all())


def _guarded(kernel: Callable[[], Any]) -> Any:
    """Return a kernel's result, NaN where it wrote nothing; check that it wrote nothing beside."""
    checks = []

    def empty(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert device.type == DEVICE.type
        inner, is_untouched = _in_guards(torch.full(size, torch.nan, dtype=dtype))
        checks.append(is_untouched)
        return inner

    with mock.patch("recsys.kernels.output_triton.torch.empty", empty):
        found = kernel()
    assert checks
    assert all(check() for check in checks)
    return found.cpu() if isinstance(found, Tensor) else [part.cpu() for part in found]


def _case(seed: int) -> tuple[Blocks, int, list[MeanSlot]]:
    """Blocks that hold every column, some of them often; widths are multiples of 1 to 48."""
    rng = np.random.default_rng(seed)
    step, number = [1, 3, 48, 4, 64, 6][seed % 6], int(rng.integers(1, 9))
    stretches = [(i * step, i * step + step) for i in range(number)]
    blocks: Blocks = [[] for _ in range(6)]  # some stay empty
    for stretch in stretches:
        times = 1 if seed % 2 else int(rng.integers(1, 5))
        for block in rng.choice(5, times, replace=False):
            blocks[block].append(stretch)
    for block in blocks:
        rng.shuffle(block)
    is_mean = rng.random(number) < 0.6 * (seed % 3 > 0)
    slots = [(int(rng.integers(0, 3)), *stretches[i]) for i in np.flatnonzero(is_mean)]
    if slots and step > 1:  # slots end within chunks, too
        place, start, end = slots.pop()
        slots += [(place, start, start + 1), ((place + 1) % 3, start + 1, end)]
    return blocks, number * step, slots


def _parts(blocks: Blocks, flat: np.ndarray, batch_size: int) -> list[tuple[slice, np.ndarray]]:
    """The output's columns of each stretch of each block, and views of where it is in a buffer."""
    parts, at = [], 0
    for block in blocks:
        width, first = sum(end - start for start, end in block), 0
        rows = flat[at : at + batch_size * width].reshape(batch_size, width)
        at += batch_size * width
        for start, end in block:
            parts.append((slice(start, end), rows[:, first : first + end - start]))
            first += end - start
    assert at == flat.size
    return parts


def _divisors(slots: list[MeanSlot], counts: np.ndarray, width: int) -> np.ndarray:
    divisors = np.ones((counts.shape[1], width))
    for place, start, end in slots:
        divisors[:, start:end] = np.maximum(counts[place], 1)[:, None]
    return divisors


WIRES = [
    None,
    WireFormat(precision=CommType.FP16, loss_scale=3.0),
    WireFormat(precision=CommType.BF16),
]


@pytest.mark.parametrize("batch_size", [1, 5, 40])
@pytest.mark.parametrize("seed", range(18))
def test_columns_are_laid_out_and_back_as_by_loops(seed: int, batch_size: int) -> None:
    blocks, width, slots = _case(seed)
    rng = np.random.default_rng(seed)
    sizes = [batch_size * sum(end - start for start, end in block) for block in blocks]
    size, travels = sum(sizes), sum(sizes[: int(rng.integers(0, len(sizes) + 1))])
    buffer = torch.from_numpy(rng.standard_normal(size, dtype=np.float32))
    counts = torch.from_numpy(rng.integers(0, 5, (3, batch_size)))
    counts = counts.to([torch.int32, torch.int64][seed // 2 % 2])
    divisors = _divisors(slots, counts.numpy(), width)
    twin = ColumnGather(blocks, width, CPU, slots)
    columns = ColumnGather(blocks, width, DEVICE, slots).columns
    wire = WIRES[seed // 3 % 3]
    narrow: tuple[Any, ...] = ()
    guards = []
    if wire is not None:  # the first blocks are not in the buffer
        encoded, _ = wire.encode(buffer[:travels], [travels])
        wire.decode(encoded, [travels], buffer[:travels])
        inner, is_untouched = _in_guards(encoded)
        narrow, guards = (inner, wire.loss_scale), [is_untouched]
    given, is_untouched = _in_guards(buffer)
    if wire is not None:
        given[:travels] = torch.nan
    found = _guarded(lambda: gather(given, batch_size, columns, counts.to(DEVICE), *narrow))
    sums = np.zeros((batch_size, width))
    for where, part in _parts(blocks, buffer.numpy().astype(np.float64), batch_size):
        sums[:, where] += part
    np.testing.assert_allclose(found.numpy(), sums / divisors, rtol=1e-5, atol=1e-6)
    assert torch.equal(found, twin.gather(buffer, batch_size, counts))
    assert all(check() for check in [*guards, is_untouched])

    grad = torch.from_numpy(rng.standard_normal((batch_size, width), dtype=np.float32))
    inner, is_untouched = _in_guards(grad)
    formats = () if wire is None else (wire.cast, wire.loss_scale)
    scale = counts.to(DEVICE), 1 / 3, travels
    returned, sent = _guarded(lambda: scatter_grad(inner, columns, *scale, *formats))
    expected = np.full(size, np.nan)
    for where, part in _parts(blocks, expected, batch_size):
        part[:] = (grad.numpy() / divisors)[:, where]
    expected[:travels] /= 3
    by_twin, sent_by_twin = twin.scatter_grad(grad, counts, 1 / 3, travels)
    if wire is not None:
        assert returned[:travels].isnan().all()
        returned, by_twin, expected = returned[travels:], by_twin[travels:], expected[travels:]
        sent_by_twin, _ = wire.encode(sent_by_twin, [travels])
    np.testing.assert_allclose(returned.numpy(), expected, rtol=1e-6)
    assert torch.equal(returned, by_twin)
    assert sent.dtype is sent_by_twin.dtype
    if sent.dtype is torch.bfloat16 and DEVICE.type == "cpu":  # Triton's interpreter does not round
        torch.testing.assert_close(sent, sent_by_twin, rtol=2**-7, atol=0)
    else:
        assert torch.equal(sent, sent_by_twin)
    assert torch.equal(inner.cpu(), grad)
    assert is_untouched()


@pytest.mark.parametrize("blocks", [[[(0, 6)]], [[(0, 6)], [(2, 6)]]], ids=["once", "twice"])
def test_gradients_are_read_with_any_strides(blocks: Blocks) -> None:
    def gradients(device: torch.device) -> list[Tensor]:
        wide = torch.arange(60.0, device=device).view(5, 12)
        turned = wide.view(-1)[:30].view(6, 5).t()
        return [
            wide[:, 3:9],
            wide[:, ::2],
            turned,
            wide[1, 1].expand(5, 6),
            wide[:, 4:5].expand(5, 6),
        ]

    gather, columns = ColumnGather(blocks, 6, CPU), ColumnGather(blocks, 6, DEVICE).columns
    for grad, on_device in zip(gradients(CPU), gradients(DEVICE), strict=True):
        found, _ = scatter_grad(on_device, columns, None, 1.0, 0)
        assert torch.equal(found.cpu(), gather.scatter_grad(grad)[0])


def test_what_is_no_number_stays_visible() -> None:
    columns = ColumnGather([[(0, 4)], [(0, 2)]], 4, DEVICE, [(0, 0, 2)]).columns
    buffer = torch.tensor([torch.inf, 1, torch.nan, 2, -1, 3], device=DEVICE)
    counts = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    found = gather(buffer, 1, columns, counts).cpu()
    expected = torch.tensor([[torch.inf, 4, torch.nan, 2]])
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


COMPILES = """
for chunk, dtype in ((64, None), (1, torch.bfloat16)):
    width = 4 * chunk
    is_full = dtype is not None
    columns = output_triton.GatherColumns(
        empty((4, 7)),
        empty(5) if is_full else None,
        empty(4, torch.int32) if is_full else None,
        width,
        chunk,
        min(chunk, 32),
    )
    counts = empty((3, 5)) if is_full else None
    arrived = empty(60, dtype) if is_full else None
    output_triton.gather(empty(500, torch.float32), 5, columns, counts, arrived, 3.0)
    grad = empty((5, width), torch.float32)
    output_triton.scatter_grad(grad, columns, counts, 0.5, 60, dtype, 3.0)
    print("bf16 rounded", ("cvt.rn.bf16" in built[-1].asm["ptx"]) is is_full)
"""


def test_they_compile_for_a_gpu_without_one(tmp_path: Path) -> None:
    assert num_compiled(COMPILES, tmp_path) == 6
