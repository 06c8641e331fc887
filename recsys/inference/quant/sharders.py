"""Sharders that place quantized collections on the devices of one process.

Quantized tables are read-only, so processes exchange nothing. Each device looks up its shards and
sends the rows to the device of the ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from recsys.base.checked import checked
from recsys.distributed.default_sharders import add_default_sharder
from recsys.distributed.placement.layout import PlacedTable, Rect
from recsys.distributed.placement.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingType,
)
from recsys.distributed.placement.strategies import MIN_COLUMNS, check_plan_covers, rects_of
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.sharded.devices import canonical_device, default_device
from recsys.distributed.sharded.sharder import ModuleSharder
from recsys.inference.quant.collection import QuantizedCollection
from recsys.inference.quant.lookup import rows_left
from recsys.inference.quant.modules import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    QuantFeatureProcessedEmbeddingBagCollection,
)
from recsys.kernels.types import BoundsCheckMode
from recsys.modules.embedding_configs import DATA_TYPE_NUM_BITS, BaseEmbeddingConfig

__all__ = [
    "QuantEmbeddingBagCollectionSharder",
    "QuantEmbeddingCollectionSharder",
    "QuantFeatureProcessedEmbeddingBagCollectionSharder",
    "QuantizedSharder",
]

_TYPES = (ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE)
_TRAINED = (EmbeddingComputeKernel.FUSED, EmbeddingComputeKernel.DENSE)
"""Default kernels in plans; for quantized tables they mean device memory."""


class QuantizedSharder(ModuleSharder[QuantizedCollection]):
    """Base of sharders that place the tables of quantized collections on devices of one process.

    Args:
        fused_params: Must be empty: the options of the lookup are fixed at quantization.
        shardable_params: Names of tables, either all tables of a collection or none. A collection
            with none of them is not sharded. None: all tables.

    Raises:
        ValueError: `fused_params` is not empty.
    """

    replaces: type[QuantizedCollection]
    """The class of modules that this sharder replaces."""

    @checked
    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        shardable_params: Sequence[str] | None = None,
    ) -> None:
        if fused_params:
            raise ValueError(
                f"{type(self).__name__}.fused_params must be empty, as quantized tables are not "
                "trained, and output_dtype and row_alignment are fixed at quantization; received "
                f"{dict(fused_params)}. Leave it out."
            )
        self._names = None if shardable_params is None else set(shardable_params)

    @property
    def module_type(self) -> type[nn.Module]:
        """The module type this sharder replaces."""
        return self.replaces

    def shard(
        self,
        module: Any,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> QuantizedCollection:
        """Return the same collection with each shard on its owner's device.

        Args:
            module: The quantized collection; not changed.
            params: Placement by table: table_wise, row_wise or column_wise.
            env: One rank per device: `ShardingEnv.from_local(number of devices)`.
            device: One of the devices, whose kind is used; None: the default device.
            module_fqn: The module's path in the model, for messages.

        Raises:
            ValueError: The plan does not match the tables or the devices, or there are several
                processes.
        """
        if env.process_group is not None and env.world_size > 1:
            raise ValueError(
                "A quantized model is sharded over the devices of one process; received "
                f"{env.world_size} processes. Pass env=ShardingEnv.from_local(number of devices)."
            )
        first = canonical_device(device or default_device(env))
        devices = [first] if env.world_size == 1 else devices_of(first.type, env.world_size)
        path = type(module).__name__ if module_fqn is None else module_fqn
        configs = module.configs()
        check_plan_covers(
            path, EmbeddingModuleShardingPlan(params), [config.name for config in configs]
        )
        shards = [_shards_of(c, params[c.name], env.world_size, module) for c in configs]
        collection: QuantizedCollection = module.placed(shards, devices.__getitem__)
        return collection

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """Return a placeholder of each table's rows on `meta`, `[rows, columns]`, by table name.

        Raises:
            ValueError: `shardable_params` has some of the collection's tables, but not all.
        """
        names = [config.name for config in module.configs()]
        chosen = [name for name in names if self._names is None or name in self._names]
        if chosen and chosen != names:
            raise ValueError(
                f"shardable_params must name all tables of a collection, or none; received "
                f"{chosen} of {names}. Add the other tables, or move them to another collection."
            )
        return {config.name: _placeholder(config) for config in module.configs() if chosen}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the supported sharding types."""
        return [kind.value for kind in _TYPES]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the supported compute kernel."""
        return [EmbeddingComputeKernel.QUANT.value]


class QuantEmbeddingBagCollectionSharder(QuantizedSharder):
    """Sharder of `QuantEmbeddingBagCollection`; arguments as for `QuantizedSharder`."""

    replaces = QuantEmbeddingBagCollection


class QuantFeatureProcessedEmbeddingBagCollectionSharder(QuantizedSharder):
    """Sharder of `QuantFeatureProcessedEmbeddingBagCollection`, as `QuantizedSharder`."""

    replaces = QuantFeatureProcessedEmbeddingBagCollection


class QuantEmbeddingCollectionSharder(QuantizedSharder):
    """Sharder of `QuantEmbeddingCollection`; arguments as for `QuantizedSharder`."""

    replaces = QuantEmbeddingCollection


for _kind in (
    QuantEmbeddingBagCollectionSharder,
    QuantFeatureProcessedEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
):
    add_default_sharder(_kind)


def devices_of(kind: str, world_size: int) -> list[torch.device]:
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


def _placeholder(config: BaseEmbeddingConfig) -> nn.Parameter:
    bits = DATA_TYPE_NUM_BITS[config.data_type]
    dtype = {32: torch.float32, 16: torch.float16}.get(bits, torch.uint8)
    rows = torch.empty(rows_left(config), config.embedding_dim, dtype=dtype, device="meta")
    return nn.Parameter(rows, requires_grad=False)


def _shards_of(
    config: BaseEmbeddingConfig,
    entry: ParameterSharding,
    world_size: int,
    module: QuantizedCollection,
) -> tuple[Rect, ...]:
    """Return the rectangles of a table in a plan.

    Raises:
        ValueError: The rectangles are invalid, or quantized tables do not support an option of the
            entry.
    """
    name, rows, dim = config.name, rows_left(config), config.embedding_dim
    kind, kernel = ShardingType(entry.sharding_type), EmbeddingComputeKernel(entry.compute_kernel)
    is_unsupported = {
        "compute_kernel": kernel not in (EmbeddingComputeKernel.QUANT, *_TRAINED),
        "cache_params": entry.cache_params is not None,
        "stochastic_rounding": bool(entry.stochastic_rounding),
        "bounds_check_mode": entry.bounds_check_mode not in (None, BoundsCheckMode.FATAL),
        "output_dtype": entry.output_dtype not in (None, module.output_dtype()),
    }
    if kind not in _TYPES or any(is_unsupported.values()):
        bad = [key for key, is_bad in is_unsupported.items() if is_bad] or ["sharding_type"]
        raise ValueError(
            f"A quantized table must be sharded {', '.join(kind.value for kind in _TYPES)}, in "
            "device memory, with the output_dtype of its collection and bounds_check_mode FATAL; "
            f"received {bad[0]}={getattr(entry, bad[0])!r} for table {name!r}."
        )
    rects = rects_of(name, rows, dim, entry, world_size)
    # raises an error for gaps and overlaps
    PlacedTable(name=name, num_rows=rows, dim=dim, features=(), group=None, rects=rects)
    odd = [rect.col_start for rect in rects if rect.col_start % MIN_COLUMNS]
    if odd:
        raise ValueError(
            f"Columns of a quantized table must be split at multiples of {MIN_COLUMNS}; received "
            f"column {odd[0]} of table {name!r}."
        )
    return rects
