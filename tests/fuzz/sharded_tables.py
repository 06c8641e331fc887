"""Random tables in random parts through random operations: results equal the whole table's."""

from __future__ import annotations

import copy
import pickle
import random
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.utils import _pytree as pytree

from recsys.distributed.ranks.comm import LazyAwaitable
from recsys.distributed.state.sharded_table import ShardedTable
from tests.saved import through_torch_save

Part = tuple[tuple[int, ...], Tensor]


def _parts(rng: random.Random, whole: Tensor) -> list[Part]:
    """Cuts rows and columns at random places; some parts may be empty, some repeat."""
    parts: list[Part] = [((0,) * whole.dim(), whole)]
    for dim, size in enumerate(whole.shape):
        cut: list[Part] = []
        for offsets, part in parts:
            at = rng.randint(0, size) if rng.random() < 0.7 else size
            place = list(offsets)
            place[dim] += at
            cut += [(offsets, part.narrow(dim, 0, at))]
            cut += [(tuple(place), part.narrow(dim, at, size - at))] if at < size else []
        parts = cut
    parts = [(offsets, part.clone()) for offsets, part in parts]
    rng.shuffle(parts)
    if rng.random() < 0.2:
        offsets, part = rng.choice(parts)
        parts.append((offsets, part if rng.random() < 0.5 else part.clone()))
    return parts


def _pinned(value: Any) -> Any:
    with (
        mock.patch.object(Tensor, "is_pinned", return_value=False),
        mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor.clone()),
    ):
        return value.pin_memory()


def _staged(value: Any) -> Any:
    return StateDictStager().stage({"value": value})["value"]


def _offloaded(value: Any) -> Any:
    if value.dim() == 0:  # which torch makes a plain tensor
        return value
    made = _create_cpu_state_dict({"value": value})
    return _copy_state_dict({"value": value}, made)["value"]


KEPT: list[Callable[[Any], Any]] = [
    copy.copy,
    copy.deepcopy,
    lambda table: pickle.loads(pickle.dumps(table)),
    lambda table: copy.deepcopy(LazyAwaitable(lambda: [table])).wait()[0],
    lambda table: pickle.loads(pickle.dumps(LazyAwaitable(lambda: [table])))[0],
    through_torch_save,
    _staged,
    _offloaded,
    _pinned,
    lambda table: table.to("cpu"),
    lambda table: table.detach(),
    lambda table: table.contiguous(),
    lambda table: pytree.tree_map(torch.clone, [table])[0],
    lambda table: table.new_empty(table.shape).copy_(table),
    lambda table: table.to(torch.float64).to(table.dtype),
]
BY_ELEMENT: list[Callable[[Any, Tensor], Any]] = [
    lambda table, other: table + other,
    lambda table, other: other - table,
    lambda table, other: table * 2 + table,
    lambda table, other: table.clone().mul_(3).sub_(other),
    lambda table, other: torch.where(table > other, table, other),
    lambda table, other: table.clamp(-1, 1),
    lambda table, other: (table / other).nan_to_num(),
    lambda table, other: torch.full_like(table, 2) - table.new_ones(table.shape),
    lambda table, other: torch.add(table, other, out=torch.empty_like(table)),
    lambda table, other: table.clone().zero_().add_(other),
    lambda table, other: table.clone().copy_(other.expand(table.shape)),
]
REDUCED: list[Callable[[Any], Any]] = [
    lambda table: table.sum(),
    lambda table: table.mean(),
    lambda table: table.norm(),
    lambda table: table.norm(p=1),
    lambda table: torch.isfinite(table).all(),
    lambda table: (table > 0).any(),
    lambda table: table.max() if table.numel() else 0,
    lambda table: table.amin() if table.numel() else 0,
    lambda table: torch.equal(table, table.clone()),
    lambda table: torch.allclose(table, table + 1),
]


def complaint_about(seed: int) -> str | None:
    """Return the error in the case of a seed, or None."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.float32, torch.float64])
    shape = [rng.randint(0, 5) for _ in range(rng.choice([0, 1, 2, 2, 2]))]
    whole = torch.randn(shape, dtype=dtype)
    parts = _parts(rng, whole)
    table = ShardedTable(shape, parts, dtype=dtype, device=whole.device)
    done = ""
    try:
        for _ in range(rng.randint(1, 6)):
            if rng.random() < 0.6:
                place = rng.randrange(len(KEPT))
                done = f"KEPT[{place}]"
                before, table = table, KEPT[place](table)
                _check(before, whole)
            else:
                place = rng.randrange(len(BY_ELEMENT))
                done = f"BY_ELEMENT[{place}]"
                other = torch.randn(shape[-1:] if rng.random() < 0.3 else shape, dtype=dtype)
                before, table = table, BY_ELEMENT[place](table, other)
                _check(before, whole)
                whole = BY_ELEMENT[place](whole, other)
            _check(table, whole)
        place = rng.randrange(len(REDUCED))
        done = f"REDUCED[{place}]"
        close = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}
        torch.testing.assert_close(REDUCED[place](table), REDUCED[place](whole), **close)
        done = "meta"
        meta = table.to("meta")
        for value in (meta, meta.clone(), meta.full_tensor()):
            assert (value.shape, value.dtype, value.is_meta) == (whole.shape, dtype, True)
    except Exception:
        return f"{done} of a table of {shape} in {table}: {traceback.format_exc(limit=-3)}"
    return None


def _check(table: Any, whole: Tensor) -> None:
    assert isinstance(table, ShardedTable), type(table)
    assert (table.shape, table.dtype) == (whole.shape, whole.dtype)
    torch.testing.assert_close(table.full_tensor(), whole, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert [shard.tensor.dtype for shard in table.local_shards()] == [whole.dtype] * len(
        table.local_shards()
    )
