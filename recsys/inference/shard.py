"""A quantized model whose tables are on several devices of one process."""

from __future__ import annotations

import copy

import torch
from torch import nn

from recsys.distributed.placement.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ShardingType,
)
from recsys.distributed.placement.plan_json import ShardingPlan
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.inference.quantized_collection import QuantizedCollection
from recsys.inference.quantized_tables import rows_left


def shard_quant_model(
    model: nn.Module,
    world_size: int = 1,
    compute_device: str | torch.device = "cuda",
    sharding_device: str | torch.device = "meta",
    *,
    sharding_plan: ShardingPlan | None = None,
) -> tuple[nn.Module, ShardingPlan]:
    """Spread the tables of a quantized model over the devices of one process.

    Each device looks up its own tables; the outputs are gathered where the ids came from. One
    process serves the whole model, so nothing is exchanged between processes.

    Args:
        model: as `quantize_embeddings` returns it; left as it is.
        world_size: the number of devices; on "cpu" all shards are in host memory.
        compute_device: "cuda" or "cpu".
        sharding_device: "meta", "cuda" or "cpu", and all the same: each table goes straight to the
            device that looks it up.
        sharding_plan: table-wise placements by module path and table; the tables are spread by
            size if None.

    Returns:
        The sharded model and its plan.

    Raises:
        ValueError: if the model has no quantized collection, a device does not exist, or a plan
            misses a table, is not table-wise, or uses another device.

    Example:
        >>> from recsys.inference import quantize_embeddings
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> tables = [EmbeddingBagConfig(10, 4, name, feature_names=[name]) for name in "ab"]
        >>> model = nn.Sequential(EmbeddingBagCollection(tables=tables))
        >>> sharded, plan = shard_quant_model(quantize_embeddings(model), 2, "cpu")
        >>> [plan.plan["0"][table].ranks for table in "ab"]
        [[0], [1]]
    """
    found = {
        path: child
        for path, child in model.named_modules()
        if isinstance(child, QuantizedCollection)
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no quantized collection to shard. Call "
            "quantize_embeddings first."
        )
    compute_device, sharding_device = (
        device.type if isinstance(device, torch.device) else device
        for device in (compute_device, sharding_device)
    )
    if compute_device not in ("cuda", "cpu"):
        raise ValueError(f"compute_device must be 'cuda' or 'cpu'; received {compute_device!r}.")
    if sharding_device not in ("meta", "cuda", "cpu"):
        raise ValueError(
            f"sharding_device must be 'meta', 'cuda' or 'cpu'; received {sharding_device!r}."
        )
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1; received {world_size}.")
    if compute_device == "cuda" and world_size > torch.cuda.device_count():
        raise ValueError(
            f"world_size must not exceed the CUDA devices, {torch.cuda.device_count()} here; "
            f"received {world_size}. With compute_device='cpu' all shards are in host memory."
        )
    plan = sharding_plan or _spread(found, world_size, compute_device)
    sharded: dict[int, nn.Module] = {}
    for path, child in found.items():
        module_plan = plan.get_plan_for_module(path) or EmbeddingModuleShardingPlan()
        devices = []
        for config in child.configs():
            entry = module_plan.get(config.name)
            ranks = entry.ranks if entry is not None else None
            if entry is None or entry.sharding_type != ShardingType.TABLE_WISE.value or not ranks:
                raise ValueError(
                    f"A quantized model is sharded table_wise, each table with its rank; the plan "
                    f"has {entry} for table {config.name!r} of module {path!r}."
                )
            if not 0 <= ranks[0] < world_size:
                raise ValueError(
                    f"The plan places table {config.name!r} on device {ranks[0]}; there are "
                    f"{world_size} devices (0..{world_size - 1})."
                )
            name = f"cuda:{ranks[0]}" if compute_device == "cuda" else compute_device
            devices.append((ranks[0], torch.device(name)))
        sharded[id(child)] = child.on_devices(devices)
    return copy.deepcopy(model, dict(sharded)), plan


def _spread(
    found: dict[str, QuantizedCollection], world_size: int, compute_device: str
) -> ShardingPlan:
    """Give each table, the largest first, to the device that holds least."""
    load = [0] * world_size
    rank_of: dict[tuple[str, str], int] = {}
    sized = [
        (size, path, config.name)
        for path, child in found.items()
        for config, size in zip(child.configs(), child.table_bytes(), strict=True)
    ]
    for size, path, name in sorted(sized, key=lambda item: (-item[0], item[1], item[2])):
        rank = load.index(min(load))
        load[rank] += size
        rank_of[path, name] = rank
    plan = ShardingPlan()
    for path, child in found.items():
        plan.plan[path] = EmbeddingModuleShardingPlan(
            {
                config.name: parameter_sharding(
                    ShardingType.TABLE_WISE,
                    rows_left(config),
                    config.embedding_dim,
                    [rank_of[path, config.name]],
                    device_type=compute_device,
                    compute_kernel=EmbeddingComputeKernel.QUANT,
                )
                for config in child.configs()
            }
        )
    return plan
