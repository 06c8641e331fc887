"""The index of one table with hashed ids, as a module: buffers that are saved with the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor, nn

from recsys.kernels.hashed.index import COUNTS, IdIndex, geometry
from recsys.modules.embedding_configs import BaseEmbeddingConfig
from recsys.modules.hashed_ids import LFU, AtLeast, DistanceLFU, HashedIds
from recsys.modules.ids.row_log import RowLog

__all__ = ["HashedIdStats", "TableIndex", "index_row_bytes", "logs_are_saved", "row_states_of"]

_LOGS_ARE_SAVED: ContextVar[bool] = ContextVar("logs of tables are saved", default=False)

_ROW_STATES = ("ids", "last_used", "seen", "sketch")


@final
class HashedIdStats(NamedTuple):
    """Counts of ids that training reads, admits and evicts in a table, since the module was made.

    Attributes:
        rows: Rows that an id can have.
        used: Rows that have an id.
        hits: Ids of batches that had a row.
        admitted: Ids that got a row.
        evicted: Ids that lost their row to another id.
        refused: Ids that were admitted and got no row, as all rows of their bucket were in use by
            batches in flight, or as nothing is evicted.
        unknown: Ids of batches that had no row, each time they occurred.
    """

    rows: int
    used: int
    hits: int
    admitted: int
    evicted: int
    refused: int
    unknown: int


def row_states_of(rules: HashedIds) -> dict[str, tuple[torch.dtype, int]]:
    """Return dtype and values per row of each array that an index saves."""
    states = {"ids": (torch.int64, 1), "last_used": (torch.int32, 1)}
    if isinstance(rules.eviction, LFU | DistanceLFU):
        states["seen"] = torch.int32, 1
    if isinstance(rules.admission, AtLeast):
        states["sketch"] = torch.uint8, 4
    return states


def index_row_bytes(rules: HashedIds) -> int:
    """Return the bytes that an index has for each row: saved arrays, and a digest."""
    arrays = row_states_of(rules).values()
    return 1 + sum(dtype.itemsize * values for dtype, values in arrays)


@contextmanager
def logs_are_saved() -> Iterator[None]:
    """Allow state dicts of tables whose logs have rows: the caller saves these as well."""
    token = _LOGS_ARE_SAVED.set(True)
    try:
        yield
    finally:
        _LOGS_ARE_SAVED.reset(token)


@final
@dataclass(slots=True)
class StepCounter:
    """Number of training batches of a table; also whether its rows were loaded.

    `was_loaded` is set by each load, and cleared by the lookup.
    """

    step: int
    was_loaded: bool


@final
class TableIndex(nn.Module):
    """Id index of a table or shard: the row of each id, and its last use.

    Args:
        config: The table, with `ids`.
        device: Device of the rows.
        rows: Range of the rows, which starts and ends with a region; None: all rows.

    Attributes:
        ids: int64 `[rows]`, the id of each row; without a meaning where `last_used` is 0.
        last_used: int32 `[rows]`, the last training batch that had the id; 0: the row is free.
        seen: int32 `[rows]`, counts of the frequency rules; `[0]` for others.
        sketch: uint8 `[rows, 4]`, counters of `AtLeast`; `[0]` for others.
        steps: int64 `[]`, training batches, when it was saved; `step` is current.
        counter: Has `step`, to be set without the checks of a module, and `was_loaded`.
        counts: int64 `[5]` on the CPU, sums of `Mapped.counts`.
        log: The rows that ids lost, on the disk; None before the first training batch or load.
        init_seed: int64 `[]`, seed of the initial values.
    """

    ids: Tensor
    last_used: Tensor
    seen: Tensor
    sketch: Tensor
    steps: Tensor
    init_seed: Tensor
    digests: Tensor

    def __init__(
        self, config: BaseEmbeddingConfig, device: torch.device, rows: range | None = None
    ) -> None:
        super().__init__()
        assert config.ids is not None
        self.rules: HashedIds = config.ids
        self._name = config.name
        of_table, regions = geometry(config.num_embeddings, config.ids.num_regions)
        self._region_rows = of_table // regions
        shard_rows = range(of_table) if rows is None else rows
        first, last = shard_rows.start // self._region_rows, shard_rows.stop // self._region_rows
        self._index = IdIndex.empty(
            config.ids.settings(), of_table, regions, first, last, config.ids.seed, device
        )
        for name in _ROW_STATES:
            values = getattr(self._index, name)
            if name == "sketch":
                values = values.view(-1, 4)
            self.register_buffer(name, values, persistent=values.numel() > 0)
        # not saved: `restore` computes the digests from the ids
        self.register_buffer("digests", self._index.digests, persistent=False)
        for name in ("steps", "init_seed"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64, device="cpu"))
        self.counter, self.init_seed_number = StepCounter(0, False), 0
        self.counts = torch.zeros(len(COUNTS), dtype=torch.int64, device="cpu")
        self.log: RowLog | None = None

    @property
    def step(self) -> int:
        """Training batches so far."""
        return self.counter.step

    @step.setter
    def step(self, step: int) -> None:
        self.counter.step = step

    @property
    def index(self) -> IdIndex:
        """The index over the buffers."""
        old, new = self._index, self._buffers
        if old.ids is not new["ids"] or old.digests is not new["digests"]:  # the module was moved
            self._index = IdIndex(
                settings=old.settings, num_regions=old.num_regions, first_region=old.first_region,
                last_region=old.last_region, lines=old.lines, seed=old.seed, ids=self.ids,
                last_used=self.last_used, seen=self.seen, digests=self.digests,
                sketch=self.sketch.view(-1),
            )  # fmt: skip
        return self._index

    def clear(self, init_seed: int) -> None:
        """Free all rows."""
        for name in (*_ROW_STATES, "digests"):
            getattr(self, name).zero_()
        self.step, self.init_seed_number = 0, init_seed
        self.counts.zero_()
        self.clear_log()

    def free(self, ids: Tensor) -> Tensor:
        """Take the rows of ids, also of ids whose time to live has ended or that are on the disk.

        Args:
            ids: int64 `[N]`, distinct; ids that this index does not have are left out.

        Returns:
            int64 `[K]`, the rows that are free now; their weights and states are still there.
        """
        is_given = torch.isin(self.ids, ids.to(self.ids.device)) & (self.last_used > 0)
        rows = is_given.nonzero().flatten()
        for name in ("ids", "last_used", "seen", "digests"):
            values = getattr(self, name)
            if values.numel():
                values[rows] = 0
        if self.log is not None:
            self.log.remove(ids.cpu())
        return rows

    def clear_log(self) -> None:
        """Forget the rows that ids lost."""
        if self.log is not None:
            self.log.clear()

    def shared_rows(self) -> Tensor:
        """Return the row of each region that unknown ids read."""
        return torch.arange(0, self.ids.numel(), self._region_rows, device=self.ids.device)

    def are_shared(self, rows: Tensor) -> Tensor:
        """Return whether rows of this index are shared by unknown ids; bool `[N]`."""
        return rows % self._region_rows == 0

    def stats(self) -> HashedIdStats:
        """Return counts since the module was made; waits for the device."""
        # the first row of each region is for unknown ids
        rows = self.ids.numel() - self.ids.numel() // self._region_rows
        used = int((self.last_used > 0).sum())
        return HashedIdStats(rows, used, *self.counts.tolist())

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return the ids that have a row, ascending, and their rows; int64 `[used]` each."""
        rows = self.last_used.nonzero().flatten()
        ids, order = self.ids[rows].sort()
        return ids, rows[order]

    def __prepare_scriptable__(self) -> NoReturn:
        raise ValueError(
            "Tables with HashedIds cannot be compiled by TorchScript; received table "
            f"'{self._name}'. Compile the part of the model after the lookup."
        )

    def write_counters(self) -> None:
        """Set the buffers `steps` and `init_seed` to the current values, for a state dict.

        Raises:
            ValueError: The state dict would lack rows in the log.
        """
        if self.log is not None and not _LOGS_ARE_SAVED.get():
            self.log.check_empty("A state dict")
        self._write_counters()

    def _write_counters(self) -> None:
        self.steps.fill_(self.step)
        self.init_seed.fill_(self.init_seed_number)

    def _save_to_state_dict(self, *args: Any) -> None:
        self.write_counters()
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        is_own = prefix + "steps" in state_dict
        if not is_own:  # the state of other modules
            self._write_counters()
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.ids.is_meta:
            return
        for name in ("seen", "sketch", "digests"):  # not loaded, after `assign=True` into `meta`
            if getattr(self, name).is_meta:
                setattr(self, name, torch.zeros_like(getattr(self, name), device=self.ids.device))
        self.restore(keeps_log=not is_own)

    def restore(self, *, keeps_log: bool = False) -> None:
        """Take over arrays that were written, such as by a load.

        Args:
            keeps_log: Whether the rows that ids lost stay in the log.

        Raises:
            ValueError: Ids have other rows than the hash gives them.
        """
        self.step, self.init_seed_number = int(self.steps), int(self.init_seed)
        self.counter.was_loaded = True
        if not keeps_log:
            self.clear_log()
        if not self.index.rebuild():
            raise ValueError(
                f"Table '{self._name}' must be loaded with the seed and num_regions of its "
                "HashedIds with which it was saved; received ids in other rows. Use these, or pass "
                f"resize=['{self._name}'] to load_checkpoint."
            )
