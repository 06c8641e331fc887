"""Which ranks share a node, and with it the numbers of its GPUs and its memory."""

from __future__ import annotations

import os

from recsys.distributed.types import ShardingEnv


def get_local_size(world_size: int | None = None) -> int:
    """Returns the number of ranks on a node.

    That is ``LOCAL_WORLD_SIZE``, which torchrun sets; all ranks where it is not set or does not
    divide them, as when the ranks are a part of a job.

    Args:
        world_size: the number of ranks; those of the default process group if None.

    Example:
        >>> get_local_size(world_size=4)
        4
    """
    world_size = ShardingEnv.default().world_size if world_size is None else world_size
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return local_size if local_size > 0 and world_size % local_size == 0 else world_size


def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Returns this process's place among the ranks of its node, which is also its GPU.

    That is ``LOCAL_RANK``, which torchrun sets; where it is not set, nodes are taken to hold
    consecutive ranks.

    Args:
        world_size: the number of ranks; those of the default process group if None.
        rank: of this process; its rank in the default process group if None.

    Example:
        >>> get_local_rank(world_size=4, rank=3)
        3
    """
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is not None:
        return int(local_rank)
    rank = ShardingEnv.default().rank if rank is None else rank
    return rank % get_local_size(world_size)
