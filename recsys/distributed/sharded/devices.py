"""Device of a rank: its default, and whether the ranks can exchange tensors of it."""

from __future__ import annotations

import torch

from recsys.base.arguments import setting
from recsys.distributed.ranks.env import ShardingEnv


def canonical_device(device: torch.device | str) -> torch.device:
    """Return the device as tensors name it: `cuda:0`, not `cuda`."""
    return torch.empty(0, device=device).device


def default_device(env: ShardingEnv) -> torch.device:
    """Return the default device of a rank: a GPU under NCCL, else the CPU.

    The GPU is the one the process group is bound to, or the current one. If the current one is
    GPU 0, as in a process that has not chosen one, it is the GPU of `LOCAL_RANK`.
    """
    group = env.process_group
    # a group without a named backend serves both kinds of device
    if group is not None and torch.distributed.get_backend(group) in ("gloo", "mpi"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # set by init_process_group(device_id=...)
    bound = getattr(group, "bound_device_id", None)
    if bound is not None:
        return torch.device(bound)
    current = torch.cuda.current_device()
    local_rank = setting("LOCAL_RANK", least=0) or 0
    # a launcher may show each process one GPU, which is GPU 0 for every local rank
    chosen = current == 0 and local_rank < torch.cuda.device_count()
    return torch.device("cuda", local_rank if chosen else current)


def resolve_device(env: ShardingEnv, device: torch.device | None) -> torch.device:
    """Return the device of this rank, the default one for None.

    With several ranks a GPU becomes the current one, because torch exchanges objects there.

    Raises:
        ValueError: If the ranks cannot exchange tensors of the device.
    """
    device = canonical_device(device or default_device(env))
    obstacle = why_no_exchange(env, device)
    if obstacle:
        raise ValueError(obstacle)
    if device.type == "cuda" and env.world_size > 1 and env.process_group is not None:
        torch.cuda.set_device(device)
    return device


def why_no_exchange(env: ShardingEnv, device: torch.device) -> str:
    """Return why the ranks cannot exchange tensors of a device; empty if they can."""
    if env.world_size == 1 or env.process_group is None:
        return ""
    config = str(torch.distributed.get_backend_config(env.process_group))  # "cpu:gloo,cuda:nccl"
    if any(entry.startswith(f"{device.type}:") for entry in config.split(",")):
        return ""
    return (
        "The process group must exchange tensors of the model's device; received a model on "
        f"{device} and the backends {config}. Move the model to a device of these backends, or "
        "initialize torch.distributed with a backend for each, such as 'cpu:gloo,cuda:nccl'."
    )


def local_devices(kind: str, world_size: int) -> list[torch.device]:
    """Return the devices of one process, by rank.

    Args:
        kind: "cuda", or "cpu" for host memory on all ranks.
        world_size: Number of devices.

    Raises:
        ValueError: There are fewer devices.
    """
    if kind == "cuda" and world_size > torch.cuda.device_count():
        raise ValueError(
            f"world_size must not exceed the CUDA devices, {torch.cuda.device_count()} here; "
            f"received {world_size}. With compute_device='cpu', all shards are in host memory."
        )
    if kind != "cuda":
        return [torch.device(kind)] * world_size
    return [torch.device(kind, i) for i in range(world_size)]
