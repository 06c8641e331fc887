"""Positions of tables in the flat storage of a lookup, and index tensors derived from them.

Tables are stored ordered by dim (stable), so that tables of one dim form one [rows, dim] matrix: a
`DimGroup`. A lookup over F features of one dim is then a lookup into one matrix with shifted ids,
for any number of tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import final

import numpy as np
import torch
from torch import Tensor

from recsys.kernels.huge_pages import new_array
from recsys.kernels.types import OptimizerSpec, TableSpec


@final
@dataclass(frozen=True, kw_only=True)
class DimGroup:
    """The tables of one dim. Row numbers here are rows of the group's own matrix."""

    number: int
    """Index in the layout's groups."""
    dim: int
    tables: tuple[int, ...]
    """Table numbers, in storage order."""
    table_rows: tuple[int, ...]
    """Rows of each of `tables`."""
    features: tuple[int, ...]
    """Features that read these tables, ascending."""
    row_base_F: Tensor
    """[len(features)] int64: the group's row at which each feature's table begins."""
    first_element: int
    """First element of the matrix in the storage."""
    first_row: int
    """First of its rows in row-wise optimizer state."""
    device: torch.device

    @property
    def num_rows(self) -> int:
        """Rows of all tables of the group."""
        return sum(self.table_rows)

    @cached_property
    def row_starts(self) -> Tensor:
        """[tables + 1] int64: first row of each table, and the end."""
        return torch.tensor([0, *accumulate(self.table_rows)], device=self.device)

    @cached_property
    def first_rows(self) -> np.ndarray:
        """[tables] int64, on the host: first row of each table."""
        return np.array([0, *accumulate(self.table_rows[:-1])], dtype=np.int64)

    def select(self, items: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the items of the group's tables, in storage order.

        Args:
            items: [N] items of all tables of the lookup, ordered by table.
            sizes: Number of items of each table of the lookup.
        """
        if len(self.tables) == len(sizes):  # of one dim, and so in order
            return items
        parts = items.split(list(sizes))
        return torch.cat([parts[t] for t in self.tables])

    @cached_property
    def feature_numbers(self) -> Tensor:
        """[len(features)] int64."""
        return torch.tensor(self.features, device=self.device)

    def table_of_row(self, rows: Tensor) -> Tensor:
        """Return the table of each row of the group's matrix: [K] indices into `tables`."""
        # `right`: an empty table starts at the same row as the table after it, which has the row
        return torch.searchsorted(self.row_starts, rows, right=True).sub_(1)

    def matrix(self, storage: Tensor) -> Tensor:
        """Return the group's [num_rows, dim] view of the flat storage."""
        size = self.num_rows * self.dim
        return storage.narrow(0, self.first_element, size).view(self.num_rows, self.dim)

    def rows(self, row_state: Tensor) -> Tensor:
        """Return the group's [num_rows] view of a flat one-value-per-row tensor."""
        return row_state.narrow(0, self.first_row, self.num_rows)


@final
class StorageLayout:
    """Memory layout of tables, and the table of each feature.

    Args:
        tables: The tables, in the caller's order.
        feature_table_map: [F] table number of each feature.
        device: Device of the index tensors.
    """

    def __init__(
        self, tables: Sequence[TableSpec], feature_table_map: Sequence[int], device: torch.device
    ) -> None:
        self.tables = tuple(tables)
        self.feature_table_map = tuple(feature_table_map)
        self.device = device
        num_tables = len(self.tables)
        if not self.tables or not self.feature_table_map:
            raise ValueError(
                "A lookup needs at least one table and one feature; received "
                f"{num_tables} tables and {len(self.feature_table_map)} features."
            )
        bad = [t for t in self.feature_table_map if not 0 <= t < num_tables]
        if bad:
            raise ValueError(
                f"feature_table_map must hold table numbers in [0, {num_tables}); received {bad}."
            )
        order = sorted(range(num_tables), key=lambda t: self.tables[t].dim)
        self.storage_order = tuple(order)
        """Table numbers in storage order."""
        sizes = [self.tables[t].num_rows * self.tables[t].dim for t in order]
        rows = [self.tables[t].num_rows for t in order]
        self.first_element = dict(zip(order, accumulate(sizes, initial=0), strict=False))
        self.first_row = dict(zip(order, accumulate(rows, initial=0), strict=False))
        self.num_elements, self.num_rows = sum(sizes), sum(rows)
        self.feature_dims = tuple(self.tables[t].dim for t in self.feature_table_map)
        self.num_features = len(self.feature_dims)
        self.total_dim = sum(self.feature_dims)
        self.groups = tuple(
            self._group(i, dim) for i, dim in enumerate(sorted({t.dim for t in self.tables}))
        )

    def _group(self, number: int, dim: int) -> DimGroup:
        members = tuple(t for t in self.storage_order if self.tables[t].dim == dim)
        first_row = self.first_row[members[0]]
        features = tuple(f for f, d in enumerate(self.feature_dims) if d == dim)
        bases = [self.first_row[self.feature_table_map[f]] - first_row for f in features]
        return DimGroup(
            number=number,
            dim=dim,
            tables=members,
            table_rows=tuple(self.tables[t].num_rows for t in members),
            features=features,
            row_base_F=torch.tensor(bases, dtype=torch.int64, device=self.device),
            first_element=self.first_element[members[0]],
            first_row=first_row,
            device=self.device,
        )

    @cached_property
    def used_groups(self) -> tuple[DimGroup, ...]:
        """Groups that some feature reads."""
        return tuple(group for group in self.groups if group.features)

    @cached_property
    def shares_tables(self) -> bool:
        """True if several features read one table."""
        return len(set(self.feature_table_map)) < self.num_features

    @cached_property
    def dims_F(self) -> np.ndarray:
        """[F] int64, on the host: columns of each feature."""
        return np.array(self.feature_dims, dtype=np.int64)

    def table_views(self, flat: Tensor) -> list[Tensor]:
        """Return each table's [rows, dim] view of a flat per-element tensor, in caller order."""
        return [
            flat.narrow(0, self.first_element[t], spec.num_rows * spec.dim).view(
                spec.num_rows, spec.dim
            )
            for t, spec in enumerate(self.tables)
        ]

    def row_views(self, flat: Tensor) -> list[Tensor]:
        """Return each table's [rows] view of a flat per-row tensor, in caller order."""
        return [
            flat.narrow(0, self.first_row[t], spec.num_rows) for t, spec in enumerate(self.tables)
        ]

    def new_states(self, optimizer: OptimizerSpec | None) -> dict[str, Tensor]:
        """Allocate flat optimizer state by name, zeros; per-table state is on the host."""
        sizes = {"element": self.num_elements, "row": self.num_rows, "table": len(self.tables)}
        # steps are on the host, where an update reads them without a wait
        host = torch.device("cpu") if self.device.type != "meta" else self.device
        return {
            name: torch.zeros(sizes[kind], device=host)
            if kind == "table"
            else new_array(sizes[kind], torch.float32, self.device).zero_()
            for name, kind in ({} if optimizer is None else optimizer.rule.state).items()
        }

    def split_states(
        self, optimizer: OptimizerSpec | None, flat_states: Mapping[str, Tensor]
    ) -> list[dict[str, Tensor]]:
        """Return each table's views of flat optimizer states, in caller order."""
        split: Mapping[str, Callable[[Tensor], Sequence[Tensor]]] = {
            "element": self.table_views,
            "row": self.row_views,
            "table": Tensor.unbind,
        }
        kinds = {} if optimizer is None else optimizer.rule.state
        parts = {name: split[kind](flat_states[name]) for name, kind in kinds.items()}
        return [{n: part[t] for n, part in parts.items()} for t in range(len(self.tables))]

    def check_storage(self, weights: Tensor, dtype: torch.dtype) -> None:
        """Raise ValueError unless the weights can be adopted as storage."""
        # types of devices only: `cuda` has no index, the device of a tensor has one
        if (
            weights.shape != (self.num_elements,)
            or weights.dtype is not dtype
            or weights.device.type != self.device.type
            or not weights.is_contiguous()
        ):
            raise ValueError(
                f"weights must be a contiguous [{self.num_elements}] tensor of {dtype} on "
                f"{self.device}; received {list(weights.shape)} of {weights.dtype} on "
                f"{weights.device}."
            )

    @cached_property
    def group_of_feature(self) -> Tensor:
        """[F] int64: index of the group that a feature reads."""
        number = {group.dim: group.number for group in self.groups}
        return torch.tensor([number[d] for d in self.feature_dims], device=self.device)
