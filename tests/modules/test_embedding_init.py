from __future__ import annotations

import torch
from torch import Tensor

from recsys.modules import embedding_init
from recsys.modules.embedding_configs import DataType, EmbeddingBagConfig
from recsys.modules.embedding_init import BLOCK_ROWS, init_rows

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


def test_the_values_are_pinned() -> None:
    """A checkpoint-free restart must give the same tables in every later version."""
    assert embedding_init._block_seed(1, 2, 3) == 1138364116778193076
