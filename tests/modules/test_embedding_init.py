from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recsys.modules import embedding_init
from recsys.modules.embedding_configs import DataType, EmbeddingBagConfig
from recsys.modules.embedding_init import BLOCK_ROWS, init_rows
from tests.pretended_cuda import CUDA, PretendedCuda

ROWS = 2 * BLOCK_ROWS + 7
CONFIG = EmbeddingBagConfig(ROWS, 3, "t", feature_names=["f"])


def test_any_range_of_rows_is_that_of_the_whole_table() -> None:
    whole = init_rows(5, 1, 0, ROWS, 3, CONFIG)
    for start, end in [(0, 1), (BLOCK_ROWS - 2, BLOCK_ROWS + 2), (10, ROWS), (7, 7)]:
        assert torch.equal(init_rows(5, 1, start, end, 3, CONFIG), whole[start:end])


def test_values_depend_on_seed_table_and_block() -> None:
    first = init_rows(5, 0, 0, 10, 3, CONFIG)
    assert not torch.equal(first, init_rows(6, 0, 0, 10, 3, CONFIG))
    assert not torch.equal(first, init_rows(5, 1, 0, 10, 3, CONFIG))
    assert not torch.equal(first, init_rows(5, 0, BLOCK_ROWS, BLOCK_ROWS + 10, 3, CONFIG))


def test_half_tables_are_the_rounded_fp32_ones() -> None:
    half = EmbeddingBagConfig(ROWS, 3, "t", DataType.BF16, ["f"])
    expected = init_rows(5, 0, 0, 10, 3, CONFIG).bfloat16()
    assert torch.equal(init_rows(5, 0, 0, 10, 3, half), expected)


def test_init_fn_fills_blocks_and_leaves_the_global_generator_alone() -> None:
    seen: list[torch.Size] = []

    def fill(values: Tensor) -> None:
        seen.append(values.shape)
        values.normal_()

    config = EmbeddingBagConfig(ROWS, 3, "t", feature_names=["f"], init_fn=fill)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    first = init_rows(5, 0, 0, ROWS, 3, config)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, init_rows(5, 0, 0, ROWS, 3, config))
    assert seen[:3] == [(BLOCK_ROWS, 3), (BLOCK_ROWS, 3), (7, 3)]


def test_init_fn_may_return_the_values() -> None:
    config = EmbeddingBagConfig(4, 3, "t", feature_names=["f"], init_fn=torch.ones_like)
    assert init_rows(5, 0, 0, 4, 3, config).eq(1).all()


def _splitmix(start: int, number: int) -> int:
    """Word `number` of SplitMix64, in Python's integers."""
    z = (start + number * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def test_values_are_those_of_splitmix() -> None:
    assert _splitmix(1234567, 1) == 6457827717110365317  # the reference implementation's
    for dim in (1, 4, 7):
        config = EmbeddingBagConfig(
            ROWS, dim, "t", weight_init_min=-0.25, weight_init_max=0.75, feature_names=["f"]
        )
        found = init_rows(5, 2, 0, ROWS, dim, config)
        start, words = embedding_init._seed_of(5, 2), -(-dim // 2)
        for row in (0, 1, 4095, ROWS - 1):
            for col in range(dim):
                word = _splitmix(start, row * words + col // 2 + 1)
                bits = (word >> 32 * (col % 2)) % 2**32 >> 8
                assert found[row, col] == bits / 2**24 - 0.25


@pytest.mark.parametrize("dim", [1, 2, 5, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_how_much_is_drawn_at_once_changes_no_value(
    monkeypatch: pytest.MonkeyPatch, dim: int, dtype: torch.dtype
) -> None:
    config = EmbeddingBagConfig(
        ROWS, dim, "t", weight_init_min=-0.3, weight_init_max=0.7, feature_names=["f"]
    )
    whole = init_rows(5, 1, 0, 700, dim, config, torch.empty(700, dim, dtype=dtype))
    for words in (1, 7, 1000, 2**15, 2**21):
        monkeypatch.setattr(embedding_init, "_WORDS_ON_CPU", words)
        for start, end in [(0, 700), (1, 2), (3, 698), (450, 450)]:
            out = torch.empty(end - start, dim, dtype=dtype)
            assert torch.equal(init_rows(5, 1, start, end, dim, config, out), whole[start:end])


class _Draws(TorchDispatchMode):
    """Counts the goes in which values are drawn, and the largest one's words."""

    def __init__(self) -> None:
        super().__init__()
        self.goes = self.words = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if str(func).startswith("aten.arange"):
            self.goes, self.words = self.goes + 1, max(self.words, out.numel())
        return out


def test_a_device_draws_much_at_once_where_the_rows_are() -> None:
    rows, dim = 40_000, 9  # of five words each
    config = EmbeddingBagConfig(rows, dim, "t", feature_names=["f"])
    expected = init_rows(5, 1, 0, rows, dim, config)
    with PretendedCuda() as cuda, _Draws() as draws:
        out = torch.empty(rows, dim, device=CUDA)
        found = init_rows(5, 1, 0, rows, dim, config, out)
        assert cuda.notes == []
        assert cuda.is_on_device(found)
    assert torch.equal(found, expected)
    assert (draws.goes, draws.words) == (1, rows * 5)
    with _Draws() as draws:
        init_rows(5, 1, 0, rows, dim, config)
    assert draws.words <= 2**15


def test_values_look_uniform_and_independent() -> None:
    config = EmbeddingBagConfig(
        50_000, 8, "t", weight_init_min=-1, weight_init_max=1, feature_names=["f"]
    )
    values = init_rows(5, 0, 0, 50_000, 8, config).double()
    counts = torch.histc(values, 64, -1, 1)
    expected = values.numel() / 64
    assert (counts - expected).square().sum() / expected < 120  # chi square, 63 degrees of freedom
    of_rows = torch.stack([values[:-1].flatten(), values[1:].flatten()])
    assert torch.corrcoef(of_rows)[0, 1].abs() < 0.01
    others = init_rows(5, 1, 0, 50_000, 8, config).double()
    by_column = torch.corrcoef(torch.cat([values, others], 1).T) - torch.eye(16)
    assert by_column.abs().max() < 0.03


def test_the_values_are_pinned() -> None:
    """A checkpoint-free restart must give the same tables in every later version."""
    assert embedding_init._seed_of(1, 2, 3) == 1138364116778193076
