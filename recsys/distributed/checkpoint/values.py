"""Tables whose rows stand for fitted values: a load moves each row to the place of its value."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from recsys.distributed.checkpoint.blocks import BlockReader
from recsys.distributed.checkpoint.errors import CheckpointError, failures_named
from recsys.distributed.checkpoint.hashed import SavedIds, copy_rows, name_of
from recsys.distributed.checkpoint.read import CompleteLoadPlanner, SavedValues
from recsys.distributed.checkpoint.safe_pickle import decode
from recsys.distributed.checkpoint.state import parts_of_value, values_with_rows
from recsys.distributed.checkpoint.versions import Manifest, chain_of
from recsys.distributed.model_parallel import get_unwrapped_module
from recsys.distributed.ranks.env import ShardingEnv
from recsys.modules.embedding_configs import BaseEmbeddingConfig
from recsys.modules.tables.fingerprints import (
    SPECS,
    check_spec,
    configs_by_weight,
    moved_values,
)

if TYPE_CHECKING:
    from recsys.features import FeatureSpec

__all__ = [
    "SPEC",
    "MovedTables",
    "NewRows",
    "converted_tables",
    "fingerprints_of",
    "index_of",
    "saved_spec",
]

NewRows: TypeAlias = Literal["init", "mean", "unknown"]
"""Values of rows that the checkpoint lacks: the model's, the mean of the saved rows of values, or
the saved row of unknown values."""
SPEC = "spec"
"""Name of the spec among the values of a checkpoint."""
_UNKNOWN = 1  # row of unknown values in tables with a vocabulary


def fingerprints_of(model: nn.Module) -> dict[str, str]:
    """Return the fingerprints of the tables that have one, by the name of the weight."""
    return {
        name: config.fingerprint
        for name, config in configs_by_weight(get_unwrapped_module(model))
        if config.fingerprint is not None
    }


def converted_tables(model: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """Return the weights of tables with hashed ids in either the model or the checkpoint.

    Args:
        model: The model.
        saved: Values in the checkpoint.
    """
    return [
        weight
        for weight, config in configs_by_weight(get_unwrapped_module(model))
        if f"model.{weight}" in saved
        and (config.ids is None) == (f"model.{index_of(weight)}ids" in saved)
    ]


def index_of(weight: str) -> str:
    """Return the start of the names of the index of a table, given the name of its weight."""
    return f"{weight.removesuffix('weight')}index."


def saved_spec(folder: Path, manifest: Manifest | None) -> FeatureSpec | None:
    """Return the spec that was saved with a version; None: there is none.

    A delta has the spec of its base.

    Args:
        folder: Folder of the version.
        manifest: Its manifest; None for a folder without one.

    Raises:
        CheckpointError: A file is damaged.
    """
    if manifest is None or not SPECS:
        return None
    reader = BlockReader(*chain_of(folder, manifest)[0])
    if SPEC not in reader.read_metadata().state_dict_metadata:
        return None
    state: dict[str, Any] = {SPEC: b""}
    with failures_named(f"{folder} cannot be read.", ShardingEnv.from_local(), "read a spec"):
        load(state, storage_reader=reader, planner=CompleteLoadPlanner(), no_dist=True)
        return SPECS[0].restore(decode(f"The spec of {folder}", state[SPEC]))


@final
class _Table(NamedTuple):
    """A table whose rows move, on this rank."""

    name: str
    """Name of the table, for messages."""
    values: dict[tuple[str, ...], Tensor]
    """Weight and row states, by their keys in the state."""
    sources: Tensor
    """int64 [rows here], the saved row of each row; -1: there is none."""
    is_value: Tensor
    """bool [rows in the checkpoint], whether a row there stands for a value."""
    unknown_row: int
    """Row of unknown values in the checkpoint."""


@final
class MovedTables:
    """Tables of another fit than saved, which a load fills value by value instead of row by row.

    Args:
        folder: Folder of the version.
        manifest: Its manifest; None for a folder without one.
        model: The model.
        state: Its live state. The values of the tables are taken out.
        saved: Values in the checkpoint.
        specs: The spec of the model's tables, and the spec of the checkpoint; None: not given.
        new_rows: Values of rows that the checkpoint lacks.
        allow_partial: Whether states that the checkpoint lacks keep their values.

    Raises:
        CheckpointError: A table is of another fit and the specs are not given, or a spec is not the
            one of the model or the checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest | None,
        model: nn.Module,
        state: dict[str, Any],
        saved: Mapping[str, STORAGE_TYPES],
        specs: tuple[FeatureSpec | None, FeatureSpec | None],
        new_rows: NewRows,
        allow_partial: bool,
    ) -> None:
        self._folder, self._manifest, self._state, self._saved = folder, manifest, state, saved
        self._specs, self._new_rows, self._allow_partial = specs, new_rows, allow_partial
        if specs[0] is not None:
            check_spec("load_checkpoint.spec", specs[0], model)
        self._tables: list[_Table] = []
        self.hashed: dict[str, SavedIds] = {}
        self._taken: list[tuple[BaseEmbeddingConfig, str]] = []
        fingerprints = (manifest or {}).get("fingerprints")
        unchecked, converted = list[str](), converted_tables(model, saved)
        for weight, config in configs_by_weight(get_unwrapped_module(model)):
            value, saved_value = state["model"].get(weight), saved.get(f"model.{weight}")
            if value is None or not isinstance(saved_value, TensorStorageMetadata):
                continue
            before = (fingerprints or {}).get(weight)
            is_resized = saved_value.size[:1] != value.shape[:1]
            if weight in converted:
                self._move(weight, config, before, is_converted=True)
                continue
            if config.ids is not None:
                continue
            if config.fingerprint == before and before is not None:
                continue
            if config.fingerprint is None:
                if before is not None and is_resized:
                    raise CheckpointError(self._differs(weight, config, before))
                if before is not None:
                    self._taken.append((config, before))
                continue
            if before is None and specs[1] is None and not is_resized:
                unchecked.append(config.name)
                continue
            self._move(weight, config, before, is_converted=False)
        if unchecked:
            warnings.warn(
                f"The checkpoint {folder} has no fingerprints of the tables {unchecked[:10]}, as "
                "it was saved without FeatureSpec.tables or by an older recsys: whether their rows "
                "stand for the same values is not checked. The next save has them.",
                UserWarning,
                stacklevel=7,
            )

    @property
    def names(self) -> list[str]:
        """Names of the tables."""
        return [table.name for table in self._tables]

    def _move(
        self, weight: str, config: BaseEmbeddingConfig, before: str | None, *, is_converted: bool
    ) -> None:
        spec, old = self._specs
        if spec is None:
            raise CheckpointError(self._differs(weight, config, before))
        if old is None:
            old = saved_spec(self._folder, self._manifest)
            self._specs = spec, old  # read once for all tables
        if old is None:
            raise CheckpointError(
                f"The checkpoint {self._folder} has no spec, and table {config.name!r} is of "
                "another fit than here. Pass saved_spec, the spec of the job that saved it."
            )
        of_table = [entry for entry in spec.features() if entry.name in config.feature_names]
        if not of_table:
            raise CheckpointError(
                f"spec must have a feature of table {config.name!r}, {config.feature_names}; it "
                "has none."
            )
        table, num_rows = of_table[0].table, self._state["model"][weight].shape[0]
        prints = old.fingerprints()
        saved = {prints.get(entry.name) for entry in old.features() if entry.table == table}
        if before is not None and before not in saved:
            raise CheckpointError(
                f"saved_spec must be the spec of the checkpoint, {self._folder}; table {table!r} "
                "is of another fit in it."
            )
        saved_rows = self._saved[f"model.{weight}"].size[0]  # type: ignore[union-attr]
        is_value, unknown_row = torch.arange(saved_rows) >= of_table[0].special_rows, _UNKNOWN
        try:
            if not is_converted:
                sources = torch.from_numpy(SPECS[0].row_sources(spec, old, table))
            elif config.ids is None:
                ids, rows = map(torch.from_numpy, SPECS[0].hashed_values(spec, old, table))
                index = SavedValues(self._folder, self._manifest)
                sources, is_value = _rows_in_index(index, weight, ids, rows, of_table[0].rows)
                unknown_row = 0
            else:
                ids, rows = map(torch.from_numpy, SPECS[0].hashed_values(old, spec, table))
                self.hashed[weight] = SavedIds(ids, rows, _UNKNOWN)
                return
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"Table {config.name!r} cannot take its rows from {self._folder}: {error}"
            ) from None
        if num_rows < len(sources):
            raise CheckpointError(
                f"Table {config.name!r} must have the {len(sources)} rows of spec; received "
                f"{num_rows}. Make it by spec.tables."
            )
        sources = torch.cat([sources, sources.new_full((num_rows - len(sources),), -1)])
        values = values_with_rows(weight, self._state)
        self._tables.append(_Table(config.name, values, sources, is_value, unknown_row))
        for key in values:
            *path, name = key
            holder = self._state
            for part in path:
                holder = holder[part]
            del holder[name]

    def _differs(self, weight: str, config: BaseEmbeddingConfig, before: str | None) -> str:
        """Return the message for a table of another fit."""
        old = self._specs[1] or saved_spec(self._folder, self._manifest)
        if old is not None:
            old.fingerprints()  # which makes its vocabularies known
        moved = moved_values(str(config.fingerprint), str(before))
        what = "its rows stand for other values"
        if config.ids is not None:
            what = "it has hashed ids here only"
        elif f"model.{index_of(weight)}ids" in self._saved:
            what = "it has hashed ids there only"
        elif moved is not None:
            what = f"{moved[0]:,} of its {moved[1]:,} values have another row, or none"
        return (
            f"Table {config.name!r} of the checkpoint {self._folder} is of another fit than here: "
            f"{what}. Pass spec, the spec of the model, to move each row to its value"
            f"{'' if old is not None else ', and saved_spec, that of the checkpoint'}; or make the "
            "model by the spec of the checkpoint."
        )

    @torch.no_grad()
    def fill(self, saved: SavedValues) -> None:
        """Fill the tables, and put their values back into the state.

        Args:
            saved: The checkpoint, with optimizer state.

        Raises:
            CheckpointError: It lacks a value of a table, or the table has other columns in it.
        """
        for table in self._tables:
            for key, value in table.values.items():
                self._fill(table, key, value, saved)
                set_element(self._state, key, value)

    def finish(self) -> None:
        """Give tables without a fingerprint the one with which they were saved."""
        for config, fingerprint in self._taken:
            config.fingerprint = fingerprint

    def _fill(self, table: _Table, key: tuple[str, ...], value: Tensor, saved: SavedValues) -> None:
        name, parts = name_of(key), parts_of_value(value)
        saved_value = saved.values.get(name)
        if not isinstance(saved_value, TensorStorageMetadata):
            if self._allow_partial:
                return
            raise CheckpointError(
                f"The checkpoint {saved.folder} lacks {name!r} of table {table.name!r}. Load "
                "without the optimizer."
            )
        most = int(table.sources.max()) + 1
        if saved_value.size[1:] != value.shape[1:] or saved_value.size[0] < most:
            raise CheckpointError(
                f"The checkpoint {saved.folder} has {name!r} of shape {tuple(saved_value.size)}; "
                f"table {table.name!r} needs at least {most} rows of shape "
                f"{tuple(value.shape[1:])}. Only another number of rows can be loaded."
            )
        sources, is_weight = table.sources, key[0] == "model"
        if is_weight and self._new_rows == "unknown":
            sources = sources.where(sources >= 0, table.unknown_row)
        copy_rows(saved, name, parts, _rows_of(sources, parts))
        has_values = bool(table.is_value.any())
        if is_weight and self._new_rows == "mean" and has_values and bool((sources < 0).any()):
            mean = _mean(saved, name, table.is_value)
            for offsets, part in parts:
                is_new = sources[offsets[0] : offsets[0] + len(part)] < 0
                columns = mean[offsets[1] : offsets[1] + part.shape[1]]
                part[is_new.to(part.device)] = columns.to(part.device, part.dtype)


def _rows_in_index(
    saved: SavedValues, weight: str, ids: Tensor, rows: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    """Return the rows that values have in a saved index of hashed ids.

    Args:
        saved: The checkpoint.
        weight: Name of the weight of the table.
        ids: int64 [V], the ids of the values.
        rows: int64 [V], their rows in the table.
        num_rows: Number of rows of the table.

    Returns:
        int64 [num_rows], the saved row of each row: for unknown values, the row that unknown ids of
        the first region have; -1 for a new value. And bool [saved rows], whether a row has an id.
    """
    ids, order = ids.sort()
    sources, used = torch.full((num_rows,), -1), list[Tensor]()
    sources[_UNKNOWN] = 0
    names = [f"{index_of(weight)}{name}" for name in ("ids", "last_used")]
    for block in saved.row_ranges(names[0]):
        assert block is not None
        read = saved.read(dict.fromkeys(names, block))
        used.append(read[names[1]] > 0)
        at = used[-1].nonzero().flatten()
        saved_ids = read[names[0]][at]
        if len(ids):
            places = torch.searchsorted(ids, saved_ids).clamp(max=len(ids) - 1)
            is_known = ids[places] == saved_ids
            sources[rows[order[places[is_known]]]] = at[is_known] + block.start
    return sources, torch.cat(used)


def _rows_of(
    sources: Tensor, parts: Sequence[tuple[tuple[int, ...], Tensor]]
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the rows of each part that are in the checkpoint, and their rows there."""
    rows: dict[int, tuple[Tensor, Tensor]] = {}
    for (first, *_), part in parts:
        of_part = sources[first : first + len(part)]
        new_rows = (of_part >= 0).nonzero().flatten()
        rows[first] = new_rows.to(part.device), of_part[new_rows].to(part.device)
    return rows


def _mean(saved: SavedValues, name: str, is_value: Tensor) -> Tensor:
    """Return the mean of the saved rows of values, float64 [columns]."""
    total, count = torch.zeros(1, dtype=torch.float64), 0
    for rows in saved.row_ranges(name):
        if rows is not None:
            block = saved.read({name: rows})[name][is_value[rows.start : rows.stop]]
            total = total + block.double().sum(0)
            count += len(block)
    return total / max(count, 1)
