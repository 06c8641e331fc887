"""Ranks of a node, which share its GPUs and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.base.arguments import setting, whole
from recsys.base.checked import checked
from recsys.base.lazy import moved_names
from recsys.distributed.ranks.env import ShardingEnv, node_size_of


@checked
def get_local_size(world_size: int | None = None) -> int:
    """Return the number of ranks on a node.

    This is `LOCAL_WORLD_SIZE`, which torchrun sets; all ranks if it is not set. For another number
    of ranks than the job's, it is used if it divides them; otherwise all are on one node.

    Args:
        world_size: Number of ranks; None for the default process group.

    Raises:
        ValueError: `LOCAL_WORLD_SIZE` is not a positive number, or does not divide the ranks of the
            job.

    Example:
        >>> get_local_size(world_size=4)
        4
    """
    world_size = ShardingEnv.default().world_size if world_size is None else world_size
    return node_size_of(whole("get_local_size: world_size", world_size))


@checked
def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Return this process's rank within its node, which is also its GPU.

    This is `LOCAL_RANK`, which torchrun sets. If it is not set, nodes are assumed to hold
    consecutive ranks.

    Args:
        world_size: Number of ranks; None for the default process group.
        rank: Rank of this process; None for its rank in the default process group.

    Raises:
        ValueError: `LOCAL_RANK` is not a number from 0.

    Example:
        >>> get_local_rank(world_size=4, rank=3)
        3
    """
    local_rank = setting("LOCAL_RANK", least=0)
    if local_rank is not None:
        return local_rank
    rank = ShardingEnv.default().rank if rank is None else rank
    return whole("get_local_rank: rank", rank, least=0) % get_local_size(world_size)


if not TYPE_CHECKING:  # a type checker reports unknown names
    __getattr__ = moved_names(__name__)
