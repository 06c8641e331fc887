"""Tables of a checkpoint, read in blocks of rows without a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import final

from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from recsys.distributed.checkpoint import CheckpointError
from recsys.distributed.checkpoint.read import SavedValues
from recsys.modules.tables.embedding_tables import TableCollection

__all__ = ["SavedTables", "with_saved_values"]

_COLLECTIONS = ("embedding_bags", "embeddings")


@final
class SavedTables:
    """The tables of a checkpoint.

    Args:
        checkpoint: As `path` of `read_checkpoint`.

    Attributes:
        values: All values of the model in the checkpoint.

    Raises:
        CheckpointError: It is not a checkpoint, is damaged, or has rows of
            `HashedIds.overflow`.
    """

    def __init__(self, checkpoint: str | Path) -> None:
        self.values = SavedValues.find(Path(checkpoint))
        self.values.refuse_logs("A checkpoint to serve")

    def find(self, table: str, path: str | None = None) -> str:
        """Return the full name of a table's values.

        Args:
            table: The name of a table.
            path: The path of its module in the saved model; None: any module.

        Raises:
            CheckpointError: The checkpoint has no such table, or several.
        """
        ends = tuple(f".{kind}.{table}.weight" for kind in _COLLECTIONS)
        start = f"{path}." if path else ""
        names = [n for n in self.values.values if f".{n}".endswith(ends) and n.startswith(start)]
        if len(names) != 1:
            known = [name for name in self.values.values if self.is_table(name)]
            raise CheckpointError(
                f"{self.values.folder} must have one table {table!r}; received {names or known}. "
                "Pass the checkpoint of this model."
            )
        return names[0]

    @staticmethod
    def is_table(name: str) -> bool:
        """Return whether a full name is the name of a table of an embedding collection."""
        parts = name.split(".")
        return len(parts) >= 3 and parts[-1] == "weight" and parts[-3] in _COLLECTIONS

    @staticmethod
    def is_index(name: str) -> bool:
        """Return whether a full name is the name of a part of a table's index of hashed ids."""
        parts = name.split(".")
        return len(parts) >= 4 and parts[-2] == "index" and parts[-4] in _COLLECTIONS

    def index_of(self, name: str, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return the hashed id of each row, int64, and whether the row has one, bool.

        Args:
            name: Full name of the table.
            num_rows: The number of rows.

        Raises:
            CheckpointError: The table has no hashed ids, or another number of rows.
        """
        parts = [f"{name.removesuffix('weight')}index.{key}" for key in ("ids", "last_used")]
        known = self.values.values
        sizes = [tuple(getattr(known.get(part), "size", ())) for part in parts]
        if sizes != [(num_rows,)] * 2:
            raise CheckpointError(
                f"{name!r} of {self.values.folder} must have hashed ids in {num_rows} rows; "
                f"received {sizes}. Pass the checkpoint of this model."
            )
        found = self.values.read(dict.fromkeys(parts))
        return found[parts[0]], found[parts[1]] > 0

    def check_size(self, name: str, rows: range, dim: int) -> None:
        """Check the size of a table.

        Raises:
            CheckpointError: Its number of rows is not in the range, or its width differs.
        """
        value = self.values.values[name]
        size = tuple(value.size) if isinstance(value, TensorStorageMetadata) else ()
        more = ", or more rows" if len(rows) > 1 else ""
        if len(size) != 2 or size[0] not in rows or size[1] != dim:
            raise CheckpointError(
                f"{name!r} of {self.values.folder} must have {rows[0]} rows and {dim} "
                f"columns{more}; received {size}. Pass the checkpoint of this model."
            )

    def blocks(self, name: str, num_rows: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the first rows of a table in blocks: the first row, and `[R, D]` floats.

        Args:
            name: Full name of the table.
            num_rows: The number of rows.
        """
        for rows in self.values.row_ranges(name):
            if rows is not None and rows.start < num_rows:
                yield rows.start, self.read(name, rows.start, min(rows.stop, num_rows))

    def read(self, name: str, start: int, end: int) -> Tensor:
        """Return rows of a table, `[end - start, D]`."""
        found: Tensor = self.values.read({name: range(start, end)})[name]
        return found


def with_saved_values(model: nn.Module, saved: SavedTables) -> nn.Module:
    """Load all values of a checkpoint but the tables into a model, in place.

    Args:
        model: An unsharded model whose tables are on the `meta` device.
        saved: The checkpoint.

    Raises:
        CheckpointError: The checkpoint lacks a value, or has one of another shape.
        ValueError: A table is not on the `meta` device.
    """
    own = model.state_dict()
    tables = {
        f"{path}.{name}" if path else name
        for path, child in model.named_modules()
        if isinstance(child, TableCollection)
        for name in child.state_dict()
    }
    weights = [name for name in tables if SavedTables.is_table(name)]
    allocated = sorted(name for name in weights if not own[name].is_meta)
    if allocated:
        raise ValueError(
            f"Tables must be on the meta device, as the checkpoint has their rows; received "
            f"{allocated[:5]} in memory. Build the model with device=torch.device('meta')."
        )
    others = [name for name in own if name not in tables]
    folder = saved.values.folder
    missing = [name for name in others if name not in saved.values.values]
    if missing:
        raise CheckpointError(
            f"{folder} must have all values of the model; received none for {missing[:5]}. Pass "
            "the checkpoint of this model."
        )
    read = saved.values.read(dict.fromkeys(others))
    for name in others:
        if isinstance(read[name], Tensor) and own[name].shape != read[name].shape:
            raise CheckpointError(
                f"{name!r} of {folder} must have the shape {tuple(own[name].shape)}; received "
                f"{tuple(read[name].shape)}. Pass the checkpoint of this model."
            )
    on_meta = {name: value for name, value in read.items() if own[name].is_meta}
    model.load_state_dict(on_meta, strict=False, assign=True)
    model.load_state_dict({n: v for n, v in read.items() if n not in on_meta}, strict=False)
    return model
