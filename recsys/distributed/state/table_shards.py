"""Shards of one table on a rank: parameters, state dict entry, filling with values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor, nn

from recsys.distributed.placement.layout import PlacedTable, Rect
from recsys.distributed.ranks import comm
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.stages.lookup import GroupSettings, LocalShard
from recsys.distributed.state.sharded_table import ShardedTable
from recsys.modules.hashed_ids import HashedIds
from recsys.modules.ids.table_index import TableIndex, row_states_of
from recsys.modules.tables.embedding_init import seed_of_ids
from recsys.modules.tables.embedding_tables import TableCollection
from recsys.optim.clipping import mark_part

_STATE_DIMS = {"element": 2, "row": 1, "table": 0}  # one value per element, row or table
_BLOCK_BYTES = 64 << 20  # how much of a table is broadcast at a time


@final
class TableShards(nn.Module):
    """Module in place of a table's, which keeps the unsharded name: `embedding_bags["t"].weight`.

    `weight` is a parameter if this rank holds one shard of the table, the common case. A rank with
    several separate shards has `weight`, `weight_1`, ..., and a rank without a shard has no
    parameter. The state dict entry is always one `ShardedTable` (a plain tensor for a replicated
    table) under the unsharded name.

    Args:
        table: The placed table.
        dtype: Dtype of the weights.
        device: Device of the shards.
        env: The ranks.
        shards: Shards of this rank.
        rules: Rules of hashed ids; None if ids are row numbers.
    """

    def __init__(
        self,
        table: PlacedTable,
        dtype: torch.dtype,
        device: torch.device,
        env: ShardingEnv,
        shards: Sequence[LocalShard],
        rules: HashedIds | None,
    ) -> None:
        super().__init__()
        self.table: PlacedTable
        self.dtype: torch.dtype
        self.device: torch.device
        self.env: ShardingEnv
        self.shards: tuple[LocalShard, ...]
        self.rules: HashedIds | None
        # nn.Module.__setattr__ is slow, and models have thousands of tables
        self.__dict__.update(table=table, dtype=dtype, device=device, env=env, rules=rules)
        self.__dict__["shards"] = tuple(shards)
        for i, shard in enumerate(shards):
            self.register_parameter(f"weight_{i}" if i else "weight", shard.parameter)
            if table.rects and env.world_size > 1:
                mark_part(shard.parameter)

    def whole(self) -> Tensor:
        """Return the table's live weights as in a state dict."""
        self.flush()
        return self._view([(s, s.parameter) for s in self.shards], self.dtype, dims=2)

    def flush(self) -> None:
        """Write rows of a device cache back to the table (`fused_uvm_caching`)."""
        for shard in self.shards:
            shard.kernel.flush()

    def states(self) -> dict[str, Tensor]:
        """Return the live optimizer state as in a state dict."""
        group = self.table.group
        assert isinstance(group, GroupSettings)
        if group.optimizer is None:
            return {}
        result: dict[str, Tensor] = {}
        for name, kind in group.optimizer.rule.state.items():
            held = [(shard, shard.states[name]) for shard in self.shards]
            if kind == "row" and group.splits_row_state:
                # the name contains the columns, so that a load fails if they are split differently
                for start, end in sorted({(r.col_start, r.col_end) for r in self.table.rects}):
                    column_states = [(s, state) for s, state in held if s.rect.col_start == start]
                    rects = [rect for rect in self.table.rects if rect.col_start == start]
                    result[f"{name}_of_columns_{start}_to_{end}"] = self._view(
                        column_states, torch.float32, _STATE_DIMS[kind], rects
                    )
            else:
                result[name] = self._view(held, torch.float32, _STATE_DIMS[kind])
        return result

    def check_can_load(self) -> None:
        """Check that no gradients wait that a load of other ids would apply to these.

        Raises:
            ValueError: They do, and the table has hashed ids.
        """
        group = self.table.group
        assert isinstance(group, GroupSettings)
        if (
            self.rules is not None
            and group.deferred
            and any(shard.kernel.deferred.exist for shard in self.shards)
        ):
            raise ValueError(
                f"Gradients of table {self.table.name!r} with HashedIds wait for a step, and would "
                "go to the ids of a load. Call step() or zero_grad() before the load."
            )

    def indexes(self) -> list[TableIndex]:
        """Return the indexes of this rank's shards, if the table has hashed ids."""
        return [shard.index for shard in self.shards if shard.index is not None]

    def index_states(self) -> dict[str, Tensor]:
        """Return the live index as in a state dict, by the names of `TableIndex`; {} without one.

        All are a `ShardedTable`: values per row, and one value per table.
        """
        if self.rules is None:
            return {}
        held = [(shard, shard.index) for shard in self.shards if shard.index is not None]
        states = {
            name: self._view([(s, getattr(index, name)) for s, index in held], torch.int64, 0)
            for name in ("steps", "init_seed")
        }
        for name, (dtype, width) in row_states_of(self.rules).items():
            shape = (self.table.num_rows, *([width] if width > 1 else []))
            zeros = (0,) * (len(shape) - 1)
            states[name] = ShardedTable(
                torch.Size(shape),
                [((s.rect.row_start, *zeros), getattr(index, name)) for s, index in held],
                dtype=dtype,
                device=self.device,
                group=self.env.process_group,
                rects=[replace(r, col_start=0, col_end=width) for r in self.table.rects],
                node_size=self.env.node_size,
            )
        return states

    def _view(
        self,
        held: Sequence[tuple[LocalShard, Tensor]],
        dtype: torch.dtype,
        dims: int,
        rects: Sequence[Rect] = (),
    ) -> Tensor:
        if not self.table.rects:
            return held[0][1].detach()
        return ShardedTable(
            self.table.shape[:dims],
            [(shard.rect.offsets[:dims], tensor) for shard, tensor in held],
            dtype=dtype,
            device=self.device,
            group=self.env.process_group,
            rects=rects or self.table.rects,
            node_size=self.env.node_size,
        )

    @torch.no_grad()
    def fill(self, rows: slice, values: Tensor) -> None:
        """Copy `values` (whole width) of a range of rows into the shards of this rank."""
        for shard in self.shards:
            first, last = max(rows.start, shard.rect.row_start), min(rows.stop, shard.rect.row_end)
            if first < last:
                shard_rows = slice(first - shard.rect.row_start, last - shard.rect.row_start)
                columns = slice(shard.rect.col_start, shard.rect.col_end)
                block = values[first - rows.start : last - rows.start, columns]
                shard.parameter.data[shard_rows].copy_(block)

    @torch.no_grad()
    def copy_from(self, other: TableShards) -> None:
        """Copy weights and optimizer state from the same shards elsewhere."""
        other.flush()
        for mine, theirs in zip(self.shards, other.shards, strict=True):
            mine.parameter.copy_(theirs.parameter)
            for name, state in mine.states.items():
                state.copy_(theirs.states[name])
            if mine.index is not None and theirs.index is not None:
                mine.index.load_state_dict(theirs.index.state_dict())

    _names = SimpleNamespace(weight=None)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Return the attribute for names that exist on every rank, also without a shard.

        `torch.distributed.checkpoint.state_dict` resolves names through it.
        """
        return {"weight": "_names"}

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination[prefix + "weight"] = self.whole()
        for index in self.indexes():
            index.write_counters()
        for name, state in self.index_states().items():
            destination[f"{prefix}index.{name}"] = state

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
        of_index = {f"{prefix}index.{name}": v for name, v in self.index_states().items()}
        known = {*of_index, *(prefix + name for name in (*self._parameters, "weight"))}
        keys = (name for name in (state_dict if strict else ()) if name.startswith(prefix))
        unexpected_keys += [name for name in keys if name not in known]
        if key not in state_dict:
            if self.shards:  # the error of one rank is raised on all
                missing_keys.append(key)
            return
        try:
            self.check_can_load()
            with torch.no_grad():
                _copy(self.whole(), state_dict[key])
            for shard in self.shards:
                shard.kernel.drop_cache()
                if shard.index is not None:
                    shard.index.counter.was_loaded = True
            self._load_index(of_index, state_dict, missing_keys)
        except (ValueError, RuntimeError) as error:
            error_msgs.append(f"{key}: {error}")

    def _load_index(
        self, own: Mapping[str, Tensor], given: Mapping[str, Any], missing_keys: list[str]
    ) -> None:
        lacking = [key for key in own if key not in given]
        missing_keys += lacking if self.shards else []
        if lacking or not own:
            return
        with torch.no_grad():
            for key, value in own.items():
                _copy(value, given[key])
        for index in self.indexes():
            index.restore()


def _copy(own: Tensor, given: Tensor) -> None:
    if isinstance(given, ShardedTable) and not isinstance(own, ShardedTable):
        raise ValueError(
            f"source must be a whole table; received {given}. To load under another "
            "plan, save and load with torch.distributed.checkpoint."
        )
    own.copy_(given if isinstance(given, ShardedTable) else given.detach())


def load_tables(
    tables: Mapping[str, TableShards], module: TableCollection, env: ShardingEnv, seed: int
) -> None:
    """Fill the shards with the values of the unsharded module; rank 0's if ranks differ.

    Tables on the `meta` device are initialized block by block, so that no rank ever holds a whole
    table. Their values depend on the seed and the row, not on the plan. They come last, after all
    exchanges, because a user's `init_fn` may fail on one rank only.

    Args:
        tables: This rank's shards, in the module's order.
        module: The unsharded collection.
        env: The ranks.
        seed: Rank 0's seed of the initial values.
    """
    module.init_seed = seed
    _load_indexes(tables, module, env, seed)
    weights = [weight.detach() for weight in module.table_weights().values()]
    parts = list(tables.values())
    for blocks in _batches(
        (table, weight, rows)
        for table, weight in zip(parts, weights, strict=True)
        if not weight.is_meta
        for rows in _row_blocks(table, weight)
    ):
        _load(blocks, env)
    for index, (table, weight) in enumerate(zip(parts, weights, strict=True)):
        if weight.is_meta and table.shards:
            for rows in _row_blocks(table, weight):
                rects = (shard.rect for shard in table.shards)
                if any(r.row_start < rows.stop and rows.start < r.row_end for r in rects):
                    values = module.initial_rows(index, rows.start, rows.stop, table.device)
                    table.fill(rows, values)


def _load_indexes(
    tables: Mapping[str, TableShards], module: TableCollection, env: ShardingEnv, seed: int
) -> None:
    """Fill the indexes of tables with hashed ids from rank 0's; no ids for `meta` tables."""
    for t, (name, table) in enumerate(tables.items()):
        if table.rules is None:
            continue
        source = module.table(name).index
        if source.ids.is_meta:
            for index in table.indexes():
                index.clear(seed_of_ids(seed, t))
            continue
        values = {key: value.to(table.device) for key, value in source.state_dict().items()}
        for value in values.values() if env.world_size > 1 else ():
            comm.broadcast(env, ExchangeName.TABLE_VALUES, value)
        for shard in table.shards:
            assert shard.index is not None
            shard_rows = slice(shard.rect.row_start, shard.rect.row_end)
            shard.index.load_state_dict(
                {key: value[shard_rows] if value.dim() else value for key, value in values.items()}
            )


_Block = tuple[TableShards, Tensor, slice]
"""Shards of a table, its unsharded weight, and a range of its rows."""


def _batches(blocks: Iterable[_Block]) -> Iterator[list[_Block]]:
    """Yield blocks of one dtype that are broadcast in one exchange, for many small tables."""
    batch: list[_Block] = []
    num_bytes = 0
    for block in blocks:
        _, weight, rows = block
        size = (rows.stop - rows.start) * weight.shape[1] * weight.element_size()
        if batch and (num_bytes + size > _BLOCK_BYTES or weight.dtype is not batch[0][1].dtype):
            yield batch
            batch, num_bytes = [], 0
        batch.append(block)
        num_bytes += size
    if batch:
        yield batch


def _load(blocks: Sequence[_Block], env: ShardingEnv) -> None:
    values = [weight[rows] for _, weight, rows in blocks]
    if env.world_size > 1:
        sizes = [value.numel() for value in values]
        device = blocks[0][0].device
        if env.rank == 0:
            flat = torch.cat([value.reshape(-1) for value in values]).to(device)
        else:
            flat = torch.empty(sum(sizes), dtype=values[0].dtype, device=device)
        comm.broadcast(env, ExchangeName.TABLE_VALUES, flat)
        received = zip(flat.split(sizes), values, strict=True)
        values = [part.view(value.shape) for part, value in received]
    for (table, _, rows), value in zip(blocks, values, strict=True):
        table.fill(rows, value)


def _row_blocks(table: TableShards, weight: Tensor) -> Iterator[slice]:
    row_bytes = max(table.table.dim * weight.element_size(), 1)
    step = max(_BLOCK_BYTES // row_bytes, 1)
    for start in range(0, table.table.num_rows, step):
        yield slice(start, min(start + step, table.table.num_rows))
