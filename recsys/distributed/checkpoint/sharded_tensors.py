"""State dicts whose tables are torch's `ShardedTensor`, for tools that save no other sharded class.

`torch.distributed.checkpoint` does not need them: it saves and loads a `ShardedTable`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata as TorchShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as TorchProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as TorchShard
from torch.utils import _pytree as pytree

from recsys.distributed.placement.plan import ShardMetadata
from recsys.distributed.state.sharded_table import ShardedTable

__all__ = ["WithShardedTensors", "to_sharded_tensor"]


class _HasState(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@final
class WithShardedTensors:
    """Model or optimizer whose state has `ShardedTensor`s instead of `ShardedTable`s.

    torchsnapshot saves and restores it, also under another plan. Give model and optimizer a
    snapshot each: `Snapshot.take(path, {"model": WithShardedTensors(model)})`. A table that is
    data-parallel when saved must be data-parallel when restored: torchsnapshot leaves other tables
    unfilled, without an error.

    Args:
        part: A model or an optimizer of sharded tables.

    Example:
        >>> WithShardedTensors(torch.nn.Linear(2, 1)).state_dict().keys()
        odict_keys(['weight', 'bias'])
    """

    def __init__(self, part: _HasState) -> None:
        self.part = part

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Its tables are views: writing to them changes the model."""
        state = self.part.state_dict()
        return pytree.tree_map_only(ShardedTable, to_sharded_tensor, state)  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of the same plan; every rank must call it."""
        self.part.load_state_dict(pytree.tree_map_only(ShardedTensor, _to_table, dict(state_dict)))


def to_sharded_tensor(table: ShardedTable) -> Tensor:
    """Return a table as torch's `ShardedTensor`, which shares this rank's memory.

    Every rank must call it, after `init_process_group`.

    Args:
        table: A table of a state dict.

    Returns:
        The `ShardedTensor`; for a scalar a copy, as a plain tensor.

    Raises:
        ValueError: Shards repeat, as in row-wise states of tables that are split by column.

    Example:
        >>> table = model.state_dict()["ebc.embedding_bags.film.weight"]  # doctest: +SKIP
        >>> to_sharded_tensor(table).local_tensor().shape  # doctest: +SKIP
        torch.Size([500, 8])
    """
    if table.dim() == 0:
        return table.full_tensor()
    whole = table.metadata()
    if sum(math.prod(part.shard_sizes) for part in whole.shards_metadata) > table.numel():
        raise ValueError(
            f"table must have no parts that repeat; received {table}, such as state of a row-wise "
            "optimizer of a table split by column. Save it by torch.distributed.checkpoint."
        )
    properties = TorchProperties(dtype=table.dtype)
    sharded: Tensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        [
            TorchShard(shard.tensor, _torch_metadata(shard.metadata))
            for shard in table.local_shards()
        ],
        ShardedTensorMetadata(
            [_torch_metadata(part) for part in whole.shards_metadata], table.shape, properties
        ),
        process_group=table.group,
    )
    return sharded


def _torch_metadata(part: ShardMetadata) -> TorchShardMetadata:
    return TorchShardMetadata(list(part.shard_offsets), list(part.shard_sizes), str(part.placement))


def _to_table(sharded: Any) -> ShardedTable:
    shards = sharded.local_shards()
    return ShardedTable(
        sharded.metadata().size,
        [(tuple(shard.metadata.shard_offsets), shard.tensor) for shard in shards],
        dtype=sharded.metadata().tensor_properties.dtype,
        device=shards[0].tensor.device if shards else torch.device("cpu"),
    )
