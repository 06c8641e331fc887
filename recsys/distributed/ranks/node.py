"""Ranks of a node, which share its GPUs and memory."""

from __future__ import annotations

import torch

from recsys.base.arguments import setting, whole
from recsys.base.checked import checked
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


def intra_and_cross_node_pg(
    device: torch.device | None = None, backend: str | None = None
) -> tuple[torch.distributed.ProcessGroup | None, torch.distributed.ProcessGroup | None]:
    """Return the process group of this rank's node, and of its peers on all nodes.

    Peers have the same local rank. Every rank must call it; groups are made once. Nodes hold
    consecutive ranks, `get_local_size` each.

    Args:
        device: On `meta` there are no groups; otherwise ignored.
        backend: Backend of the groups, such as "gloo"; None for the default group's.

    Returns:
        The two groups, or None twice on `meta`.

    Raises:
        ValueError: There is no default process group, or nodes have different sizes.
    """
    if device is not None and device.type == "meta":
        return None, None
    env = ShardingEnv.default()
    if env.process_group is None:
        raise ValueError(
            "intra_and_cross_node_pg needs the default process group; received a process without "
            "one. Call torch.distributed.init_process_group first."
        )
    size = env.node_size
    local_rank = env.rank % size
    first = env.rank - local_rank
    return (
        env.group_of(range(first, first + size), backend),
        env.group_of(range(local_rank, env.world_size, size), backend),
    )
