"""Initial values of tables that depend on seed, table and row, and on nothing else.

Rows come in blocks of fixed size, each drawn over the whole width from its own seed, in fp32 on
the CPU. So a rank can draw exactly the rows it owns, and the values are those of the unsharded
table, whatever the plan, the world size, the device and the dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from recsys.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype

__all__ = ["BLOCK_ROWS", "draw_seed", "init_rows"]

BLOCK_ROWS = 4096
"""Rows drawn from one seed. Part of the definition of the initial values."""


def draw_seed() -> int:
    """Draw a seed for all tables of a collection, from the global generator of the CPU.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> first = draw_seed()
        >>> _ = torch.manual_seed(0)
        >>> first == draw_seed()
        True
    """
    return int(torch.randint(0, 2**62, (), device="cpu", dtype=torch.int64))


@torch.no_grad()
def init_rows(
    seed: int,
    table_index: int,
    row_start: int,
    row_end: int,
    dim: int,
    config: BaseEmbeddingConfig,
    out: Tensor | None = None,
) -> Tensor:
    """Return the initial values of some rows of a table.

    Args:
        seed: Of the collection, the same on all ranks.
        table_index: Number of the table in its collection.
        row_start: First row.
        row_end: One past the last row.
        dim: Whole width of the table.
        config: Gives the range or the `init_fn`.
        out: [row_end - row_start, dim] any dtype and device, filled in place; None: allocated, in
            the dtype of the config, on the CPU.

    Returns:
        `out`.

    Example:
        >>> config = BaseEmbeddingConfig(10, 2, "t")
        >>> whole = init_rows(1, 0, 0, 10, 2, config)
        >>> torch.equal(init_rows(1, 0, 4, 7, 2, config), whole[4:7])
        True
    """
    if out is None:
        dtype = data_type_to_dtype(config.data_type)
        out = torch.empty(row_end - row_start, dim, dtype=dtype, device="cpu")
    for block in _blocks(row_start, row_end):
        first = block * BLOCK_ROWS
        num_rows = min(BLOCK_ROWS, config.num_embeddings - first)
        values = _draw_block(_block_seed(seed, table_index, block), num_rows, dim, config)
        start, end = max(row_start, first), min(row_end, first + num_rows)
        out[start - row_start : end - row_start].copy_(values[start - first : end - first])
    return out


def _blocks(row_start: int, row_end: int) -> Iterator[int]:
    if row_end > row_start:
        yield from range(row_start // BLOCK_ROWS, (row_end - 1) // BLOCK_ROWS + 1)


def _block_seed(seed: int, table_index: int, block: int) -> int:
    text = f"{seed}/{table_index}/{block}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _draw_block(seed: int, num_rows: int, dim: int, config: BaseEmbeddingConfig) -> Tensor:
    values = torch.empty(num_rows, dim, dtype=torch.float32, device="cpu")
    if config.init_fn is None:
        generator = torch.Generator().manual_seed(seed)
        low, high = config.get_weight_init_min(), config.get_weight_init_max()
        return values.uniform_(low, high, generator=generator)
    # The user's function draws from the global generator: lend it ours, and give the old one back.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        returned = config.init_fn(values)
    return values if returned is None else returned
