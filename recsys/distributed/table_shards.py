"""The parts of one table that a rank holds: parameters, state dict entry, filling with values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed import comm
from recsys.distributed.layout import PlacedTable
from recsys.distributed.lookup import GroupSettings, LocalShard
from recsys.distributed.sharded_table import ShardedTable
from recsys.distributed.types import ShardingEnv
from recsys.kernels.row_update import STATE_KINDS
from recsys.modules.embedding_tables import TableCollection
from recsys.optim.clipping import mark_part

_STATE_DIMS = {"element": 2, "row": 1, "table": 0}  # one value per element, row or table
_BLOCK_BYTES = 64 << 20  # how much of a table is broadcast at a time


@final
class TableShards(nn.Module):
    """Stands where the unsharded collection has the table's module: ``embedding_bags["t"].weight``.

    ``weight`` is a parameter if this rank holds one part of the table, the common case; a rank
    that holds several separate parts has ``weight``, ``weight_1``, ... and one that holds none
    has no parameter. The state dict entry is always one :class:`ShardedTable` (a plain tensor for
    a replicated table) under the unsharded name.

    Args:
        table: the placed table.
        dtype: of the weights.
        device: of the parts.
        env: the ranks.
        shards: the parts of this rank.
    """

    def __init__(
        self,
        table: PlacedTable,
        dtype: torch.dtype,
        device: torch.device,
        env: ShardingEnv,
        shards: Sequence[LocalShard],
    ) -> None:
        super().__init__()
        self.table = table
        self.dtype = dtype
        self.device = device
        self.env = env
        self.shards = tuple(shards)
        for i, shard in enumerate(shards):
            self.register_parameter(f"weight_{i}" if i else "weight", shard.parameter)
            if table.rects and env.world_size > 1:
                mark_part(shard.parameter)

    def whole(self) -> Tensor:
        """Returns the table's weights as they appear in a state dict; live."""
        self.flush()
        return self._view([(s, s.parameter) for s in self.shards], self.dtype, dims=2)

    def flush(self) -> None:
        """Writes rows that a device cache holds back to the table (``fused_uvm_caching``)."""
        for shard in self.shards:
            shard.kernel.flush()

    def states(self) -> dict[str, Tensor]:
        """Returns the optimizer's state as it appears in a state dict; live."""
        group = self.table.group
        assert isinstance(group, GroupSettings)
        if group.optimizer is None:
            return {}
        result: dict[str, Tensor] = {}
        for name, kind in STATE_KINDS[group.optimizer.algorithm].items():
            held = [(shard, shard.states[name]) for shard in self.shards]
            if kind == "row" and group.splits_row_state:
                # named by its columns, so that a load where they are split otherwise must fail
                for start, end in sorted({(r.col_start, r.col_end) for r in self.table.rects}):
                    own = [(s, state) for s, state in held if s.rect.col_start == start]
                    result[f"{name}_of_columns_{start}_to_{end}"] = self._view(
                        own, torch.float32, _STATE_DIMS[kind]
                    )
            else:
                result[name] = self._view(held, torch.float32, _STATE_DIMS[kind])
        return result

    def _view(
        self, held: Sequence[tuple[LocalShard, Tensor]], dtype: torch.dtype, dims: int
    ) -> Tensor:
        if not self.table.rects:
            return held[0][1].detach()
        size = (self.table.num_rows, self.table.dim)
        shards = [
            ((shard.rect.row_start, shard.rect.col_start)[:dims], tensor) for shard, tensor in held
        ]
        return ShardedTable(
            size[:dims],
            shards,
            dtype=dtype,
            device=self.device,
            group=self.env.process_group,
        )

    @torch.no_grad()
    def fill(self, rows: slice, values: Tensor) -> None:
        """Copies ``values`` (whole width) of a stretch of rows into the parts that lie there."""
        for shard in self.shards:
            first, last = max(rows.start, shard.rect.row_start), min(rows.stop, shard.rect.row_end)
            if first < last:
                own = slice(first - shard.rect.row_start, last - shard.rect.row_start)
                columns = slice(shard.rect.col_start, shard.rect.col_end)
                given = values[first - rows.start : last - rows.start, columns]
                shard.parameter.data[own].copy_(given)

    @torch.no_grad()
    def copy_from(self, other: TableShards) -> None:
        """Copies weights and optimizer state from the same parts elsewhere."""
        other.flush()
        for mine, theirs in zip(self.shards, other.shards, strict=True):
            mine.parameter.copy_(theirs.parameter)
            for name, state in mine.states.items():
                state.copy_(theirs.states[name])

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination[prefix + "weight"] = self.whole()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        if key not in state_dict:
            missing_keys.append(key)
            return
        try:
            with torch.no_grad():
                _copy(self.whole(), state_dict[key])
            for shard in self.shards:
                shard.kernel.drop_cache()
        except (ValueError, RuntimeError) as error:
            error_msgs.append(f"{key}: {error}")


def _copy(own: Tensor, given: Tensor) -> None:
    if isinstance(given, ShardedTable) and not isinstance(own, ShardedTable):
        raise ValueError(
            f"This table lies whole on every rank; the source is {given}. To load under another "
            "plan, save and load with torch.distributed.checkpoint."
        )
    own.copy_(given if isinstance(given, ShardedTable) else given.detach())


def load_tables(
    tables: Mapping[str, TableShards], module: TableCollection, env: ShardingEnv
) -> None:
    """Gives the shards the values of the unsharded module, rank 0's where ranks differ.

    Tables on the ``meta`` device are initialised block by block, so that no rank ever holds a
    whole table; the values depend on the seed and the row, not on the plan.
    """
    module.init_seed = comm.broadcast_int(env, module.init_seed, _device_of(tables))
    weights = module.table_weights()
    for index, (name, table) in enumerate(tables.items()):
        weight = weights[name].detach()
        for rows in _row_blocks(table, weight):
            if weight.is_meta:
                wanted = [
                    s
                    for s in table.shards
                    if s.rect.row_start < rows.stop and rows.start < s.rect.row_end
                ]
                if wanted:
                    table.fill(rows, module.initial_rows(index, rows.start, rows.stop))
            else:
                values = weight[rows]
                if env.world_size > 1:
                    values = values.to(table.device, copy=True).contiguous()
                    dist.broadcast(values, group=env.process_group, group_src=0)
                table.fill(rows, values)


def _device_of(tables: Mapping[str, TableShards]) -> torch.device:
    return next(iter(tables.values())).device


def _row_blocks(table: TableShards, weight: Tensor) -> Iterator[slice]:
    row_bytes = max(table.table.dim * weight.element_size(), 1)
    step = max(_BLOCK_BYTES // row_bytes, 1)
    for start in range(0, table.table.num_rows, step):
        yield slice(start, min(start + step, table.table.num_rows))
