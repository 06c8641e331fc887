"""Conversion of the state dict of a sharded model to tensors of one process.

In the state dict of a sharded model, a sharded table is a `ShardedTable`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recsys.base.arguments import MissingKeyError
from recsys.base.checked import checked
from recsys.distributed.ranks.comm import gather_objects
from recsys.distributed.state.sharded_table import ShardedTable


@checked
def state_dict_gather(src: Mapping[str, Tensor], dst: Mapping[str, Tensor]) -> None:
    """Copy the state of a sharded model to an unsharded model, on every rank.

    Every rank must call it, with the same names in `dst`. One gathered table at a time is held in
    addition.

    Args:
        src: State dict of the sharded model.
        dst: State dict of the unsharded model, filled in place; it may have fewer values.

    Raises:
        KeyError: `src` lacks a value of `dst`.
        ValueError: A shape differs, or ranks pass different names.

    Example:
        >>> whole = {"weight": torch.zeros(2)}
        >>> state_dict_gather({"weight": torch.ones(2), "bias": torch.ones(1)}, whole)
        >>> whole
        {'weight': tensor([1., 1.])}
    """
    missing = sorted(dst.keys() - src.keys())
    if missing:
        raise MissingKeyError(f"src must have all values of dst; it lacks {missing}.")
    shapes = {name: (tuple(src[name].shape), tuple(dst[name].shape)) for name in dst}
    odd = {name: both for name, both in shapes.items() if both[0] != both[1]}
    if odd:
        raise ValueError(f"src and dst must have values of the same shapes; received {odd}.")
    sharded = [name for name in dst if isinstance(src[name], ShardedTable)]
    if sharded:
        table = src[sharded[0]]
        assert isinstance(table, ShardedTable)
        asked = gather_objects(table.group, "agree on the tables to gather", sorted(sharded))
        if any(names != asked[0] for names in asked):
            raise ValueError(
                f"Every rank must gather the same tables; received {asked}. Pass the same names in "
                "dst on all ranks."
            )
    for name in sorted(dst):  # the same order on every rank
        dst[name].detach().copy_(src[name].detach())


def state_dict_all_gather_keys(
    state_dict: Mapping[str, Any], pg: torch.distributed.ProcessGroup
) -> list[str]:
    """Return the sorted names in the state dicts of all ranks. Every rank must call it.

    Args:
        state_dict: State dict of this rank.
        pg: The ranks.
    """
    names = gather_objects(pg, "gather the names of a state dict", list(state_dict))
    return sorted({name for of_rank in names for name in of_rank})


@checked
def state_dict_to_device(
    state_dict: Mapping[str, Tensor],
    pg: torch.distributed.ProcessGroup | None,
    device: torch.device,
) -> dict[str, Tensor]:
    """Copy a state dict to another device; sharded tables stay sharded.

    Args:
        state_dict: State dict of this rank.
        pg: Process group of the new sharded tables, such as a gloo group for the CPU; None for one
            process.
        device: The new device.

    Returns:
        A new dict; it shares values that are on `device` already.

    Example:
        >>> state_dict_to_device({"bias": torch.ones(1)}, None, torch.device("meta"))["bias"].device
        device(type='meta')
    """
    moved: dict[str, Tensor] = {}
    for name, value in state_dict.items():
        if isinstance(value, ShardedTable):
            parts = [(part.offsets, part.tensor.to(device)) for part in value.local_shards()]
            moved[name] = ShardedTable(
                value.shape, parts, dtype=value.dtype, device=device, group=pg
            )
        else:
            moved[name] = value.detach().to(device)
    return moved
