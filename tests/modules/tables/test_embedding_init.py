from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recsys.modules.embedding_configs import DataType, EmbeddingBagConfig
from recsys.modules.tables import embedding_init
from recsys.modules.tables.embedding_init import BLOCK_ROWS, init_rows
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


def ids_case(rng: random.Random, num_tables: int, *, alike: bool) -> dict[str, Any]:
    """Arguments of `init_new_rows` for tables whose shards have `dim` columns."""
    dim = rng.choice([1, 3, 4, 64, 131, 300])
    configs, columns = [], []
    for number in range(num_tables):
        first = 0 if alike else rng.choice([0, 1, 2, 5])
        low = rng.choice([None, -3.0, 0.0])
        config = EmbeddingBagConfig(
            10 + number, first + dim + rng.choice([0, 3]) * (not alike), f"t{number}",
            feature_names=["f"], weight_init_min=low, weight_init_max=low and low + 0.7,
        )  # fmt: skip
        configs.append(config)
        columns.append(slice(None) if alike else slice(first, first + dim))
    sizes = [rng.choice([0, 1, 7]) for _ in configs]
    bits = [rng.randrange(-(2**63), 2**63) for _ in range(sum(sizes))]
    return {
        "rows": torch.tensor(rng.sample(range(40), sum(sizes)), dtype=torch.int64),
        "ids": torch.tensor(bits, dtype=torch.int64),
        "sizes": sizes,
        "seeds": [rng.randrange(2**63) for _ in configs],
        "columns": columns,
        "step": 5,
        "configs": configs,
    }


def expected_of(case: dict[str, Any], weights: Tensor) -> Tensor:
    """The rows of each id, one by one, from Python's integers."""
    expected, numbers = weights.clone(), iter(zip(case["rows"], case["ids"], strict=True))
    for size, seed, own, config in zip(
        case["sizes"], case["seeds"], case["columns"], case["configs"], strict=True
    ):
        low, high = config.get_weight_init_min(), config.get_weight_init_max()
        for row, id_ in (next(numbers) for _ in range(size)):
            start = splitmix_mix((int(id_) ^ seed) % 2**64)
            values = []
            for column in range(config.embedding_dim)[own]:
                word = splitmix_mix((start + (column // 2 + 1) * 0x9E3779B97F4A7C15) % 2**64)
                bits = (word >> 32 * (column % 2)) % 2**32 >> 8
                scaled = np.float32(bits) * np.float32((high - low) / 2**24)
                values.append(scaled + np.float32(low))
            expected[row] = torch.tensor(np.array(values)).to(weights.dtype)
    return expected


def splitmix_mix(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


@pytest.mark.parametrize("kind", ["C", "torch", "bf16"])
def test_rows_of_new_ids_are_functions_of_seed_and_id(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "torch":
        monkeypatch.setattr("recsys.kernels.hashed.build.library", lambda: None)
    rng = random.Random(1)
    for number in range(30):
        case = ids_case(rng, num_tables=4, alike=number % 2 == 0)
        dim = len(range(case["configs"][0].embedding_dim)[case["columns"][0]])
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        weights = torch.full((40, dim), 9.0, dtype=dtype)
        expected = expected_of(case, weights)
        embedding_init.init_new_rows(weights, **case)
        assert torch.equal(weights, expected)


def test_rows_of_new_ids_of_an_init_fn_are_filled_in_the_order_of_ids() -> None:
    config = EmbeddingBagConfig(10, 3, "t", feature_names=["f"], init_fn=torch.nn.init.normal_)
    ids = torch.tensor([5, -(2**63), 0, 7])
    weights = torch.zeros(8, 2)
    columns, rows = slice(1, 3), torch.tensor([7, 0, 3, 2])
    embedding_init.init_new_rows(
        weights, rows, ids, [0, 4], [1, 2], [slice(0, 2), columns], 6, [CONFIG, config]
    )
    expected = embedding_init.init_ids(2, ids.sort().values, 6, config)[:, columns]
    assert torch.equal(weights[[0, 3, 7, 2]], expected)
    assert not weights[[1, 4, 5, 6]].any()
