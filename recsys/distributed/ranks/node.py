"""Which ranks share a node, and with it the numbers of its GPUs and its memory."""

from __future__ import annotations

import torch

from recsys.distributed.ranks.env import ShardingEnv, node_size_of
from recsys.kernels.arguments import setting, whole
from recsys.kernels.checked import checked


@checked
def get_local_size(world_size: int | None = None) -> int:
    """Return the number of ranks on a node.

    That is `LOCAL_WORLD_SIZE`, which torchrun sets; all ranks where it is not set. For fewer or
    more ranks than the job has it is taken where it divides them, else all are on one node.

    Args:
        world_size: the number of ranks; those of the default process group if None.

    Raises:
        ValueError: if `LOCAL_WORLD_SIZE` is no positive number, or does not divide the ranks of
            the job.

    Example:
        >>> get_local_size(world_size=4)
        4
    """
    world_size = ShardingEnv.default().world_size if world_size is None else world_size
    return node_size_of(whole("get_local_size: world_size", world_size))


@checked
def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Return this process's place among the ranks of its node, which is also its GPU.

    That is `LOCAL_RANK`, which torchrun sets; where it is not set, nodes are taken to hold
    consecutive ranks.

    Args:
        world_size: the number of ranks; those of the default process group if None.
        rank: of this process; its rank in the default process group if None.

    Raises:
        ValueError: if `LOCAL_RANK` is no number from 0 on.

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
    """Return the process group of this rank's node, and that of its peers on all nodes.

    Peers have the same place on their node. Every rank must call it; groups are made once. Nodes
    hold consecutive ranks, `get_local_size` each.

    Args:
        device: on `meta` there are no groups; else it makes no difference.
        backend: of the groups, such as "gloo"; that of the default group if None.

    Returns:
        The two groups, or twice None on `meta`.

    Raises:
        ValueError: if there is no default process group, or nodes are not equally large.
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
    place = env.rank % size
    first = env.rank - place
    return (
        env.group_of(range(first, first + size), backend),
        env.group_of(range(place, env.world_size, size), backend),
    )
