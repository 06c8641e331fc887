"""Initial values of tables, which depend only on seed, table, row and column.

Value `c` of row `r` is half `c % 2` of word `r * ceil(dim / 2) + c // 2 + 1` of SplitMix64, started
at a hash of seed and table. Each word is a function of its number, so a rank draws only its own
rows. The values are the same on CPU and GPU, under every plan and world size, and in every dtype
except for rounding.

SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from recsys.kernels import ops
from recsys.kernels.hashed import build, native
from recsys.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype

__all__ = ["BLOCK_ROWS", "draw_seed", "init_ids", "init_new_rows", "init_rows", "seed_of_ids"]

BLOCK_ROWS = 4096
"""Rows per call of an `init_fn`; the position of the block is part of the seed."""

# Words per step: on a CPU they fit a core's cache; on a device a step takes about ten kernel
# launches and 24 bytes per word, 48 MiB.
_WORDS_ON_CPU, _WORDS_ON_DEVICE = 2**15, 2**21
# of SplitMix64, as signed numbers
_STEP, *_FACTORS = (
    number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


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
        seed: Seed of the collection, equal on all ranks.
        table_index: Position of the table in its collection.
        row_start: First row.
        row_end: One past the last row.
        dim: Columns of the table.
        config: The table's config, with the range or the `init_fn`.
        out: [row_end - row_start, dim] of any dtype and device, filled in place; None: allocated in
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
    if config.init_fn is None or not out.shape[0]:
        _draw(seed, table_index, row_start, config, out)
        return out
    for block in range(row_start // BLOCK_ROWS, -(-row_end // BLOCK_ROWS)):
        first = block * BLOCK_ROWS
        num_rows = min(BLOCK_ROWS, config.num_embeddings - first)
        values = _call_init_fn(_seed_of(seed, table_index, block), num_rows, dim, config.init_fn)
        start, end = max(row_start, first), min(row_end, first + num_rows)
        out[start - row_start : end - row_start].copy_(values[start - first : end - first])
    return out


@torch.no_grad()
def init_ids(seed: int, ids: Tensor, step: int, config: BaseEmbeddingConfig) -> Tensor:
    """Return the initial values of rows with new ids, which depend on seed, id and column.

    An `init_fn` fills all rows at once, in the order of the ids.

    Args:
        seed: Seed of the table, from `seed_of_ids`.
        ids: int64 [N], distinct.
        step: Training batch, part of the seed of an `init_fn`.
        config: The table's config.

    Returns:
        fp32 [N, embedding_dim].

    Example:
        >>> config = BaseEmbeddingConfig(10, 2, "t")
        >>> both = init_ids(1, torch.tensor([-5, 2**62]), 1, config)
        >>> torch.equal(init_ids(1, torch.tensor([2**62]), 9, config), both[1:])
        True
    """
    dim = config.embedding_dim
    if config.init_fn is not None:
        order = ids.argsort()
        drawn = _call_init_fn(_seed_of(seed, step), len(ids), dim, config.init_fn)
        values = torch.empty_like(drawn, device=ids.device)
        values[order] = drawn.to(ids.device)
        return values.float()
    return _values_of_ids(ids, seed, dim, *_range_of(config))


@torch.no_grad()
def init_new_rows(
    weights: Tensor,
    rows: Tensor,
    ids: Tensor,
    sizes: Sequence[int],
    seeds: Sequence[int],
    columns: Sequence[slice],
    step: int,
    configs: Sequence[BaseEmbeddingConfig],
) -> None:
    """Write the initial values of rows with new ids of several tables; see `init_ids`.

    Args:
        weights: [rows, D] the tables, one below the other.
        rows: int64 [K] rows of `weights`, ordered by table.
        ids: int64 [K], distinct in each table.
        sizes: Number of rows of each table.
        seeds: Seed of each table.
        columns: The columns of each table that `weights` has.
        step: Training batch.
        configs: Config of each table.
    """
    draws_alike = all(config.init_fn is None for config in configs)
    if draws_alike and weights.is_cpu and weights.dtype is torch.float32:
        library = build.library()
        if library is not None:
            draws = [
                (table_columns.start or 0, seed, *_range_of(config))
                for table_columns, seed, config in zip(columns, seeds, configs, strict=True)
            ]
            native.init_rows(library, weights, rows, ids, sizes, draws)
            return
    dim = configs[0].embedding_dim
    if draws_alike and all(
        (config.embedding_dim, table_columns) == (dim, columns[0])
        for config, table_columns in zip(configs, columns, strict=True)
    ):
        seed_K = ops.upload(np.repeat(np.array(seeds, dtype=np.int64), sizes), ids.device)
        ranges = np.array([_range_of(config) for config in configs], dtype=np.float32)
        low_K, scale_K = ops.upload(np.repeat(ranges, sizes, axis=0), ids.device).unbind(1)
        values = _values_of_ids(ids, seed_K, dim, low_K[:, None], scale_K[:, None])
        weights.index_copy_(0, rows, values[:, columns[0]].to(weights.dtype))
        return
    parts = rows.split(list(sizes)), ids.split(list(sizes))
    for own_rows, own_ids, seed, table_columns, config in zip(
        *parts, seeds, columns, configs, strict=True
    ):
        if own_ids.numel():
            values = init_ids(seed, own_ids, step, config)[:, table_columns]
            weights.index_copy_(0, own_rows, values.to(weights.dtype))


def seed_of_ids(seed: int, table_index: int) -> int:
    """Return the seed of the initial values of a table with hashed ids.

    Args:
        seed: Seed of the collection.
        table_index: Position of the table in its collection.
    """
    return _seed_of(seed, table_index, "ids")


def _draw(
    seed: int, table_index: int, row_start: int, config: BaseEmbeddingConfig, out: Tensor
) -> None:
    """Fill the rows from `row_start` with uniform values."""
    low, scale = _range_of(config)
    num_rows, dim = out.shape
    words_per_row = -(-dim // 2)
    start = _seed_of(seed, table_index)
    words_at_once = _WORDS_ON_CPU if out.is_cpu else _WORDS_ON_DEVICE
    step = max(words_at_once // max(words_per_row, 1), 1)
    for first in range(0, num_rows, step):
        rows = out[first : first + step]
        number = (row_start + first) * words_per_row + 1
        last = number + len(rows) * words_per_row
        words = torch.arange(number, last, device=out.device).mul_(_STEP).add_(start)
        rows.copy_(_uniform(words, low, scale).view(len(rows), -1)[:, :dim])


def _range_of(config: BaseEmbeddingConfig) -> tuple[float, float]:
    """Return the lower end of the range of initial values, and the range divided by 2^24."""
    low, high = config.get_weight_init_min(), config.get_weight_init_max()
    return low, (high - low) / 2**24


def _values_of_ids(
    ids: Tensor, seed: int | Tensor, dim: int, low: float | Tensor, scale: float | Tensor
) -> Tensor:
    """Return fp32 [N, dim]; seeds are [N] or one, ranges [N, 1] or one."""
    starts = _mix(ids ^ seed)
    columns = torch.arange(1, -(-dim // 2) + 1, device=ids.device).mul_(_STEP)
    words = starts[:, None] + columns
    return _uniform(words, low, scale).view(len(ids), -1)[:, :dim]


def _uniform(words: Tensor, low: float | Tensor, scale: float | Tensor) -> Tensor:
    """Return two values per state of SplitMix64; overwrites the states."""
    _mix(words)
    # each half has more than the 24 bits of precision of a float32
    bits = words.view(torch.int32).bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)
    return bits.float().mul_(scale).add_(low)


def _mix(words: Tensor) -> Tensor:
    """Finalize states of SplitMix64 in place."""
    for shift, factor in ((30, _FACTORS[0]), (27, _FACTORS[1]), (31, 1)):
        words.bitwise_xor_((words >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return words


def _seed_of(*numbers: int | str) -> int:
    text = "/".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _call_init_fn(
    seed: int, num_rows: int, dim: int, init_fn: Callable[[Tensor], Tensor | None]
) -> Tensor:
    values = torch.empty(num_rows, dim, dtype=torch.float32, device="cpu")
    # the user's function draws from the global generator, which is restored afterwards
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        returned = init_fn(values)
    return values if returned is None else returned
