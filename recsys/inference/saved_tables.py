"""Tables of a checkpoint, read in blocks of rows without a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import final

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from recsys.distributed.checkpoint import CheckpointError
from recsys.distributed.checkpoint.read import SavedValues

__all__ = ["SavedTables"]

_COLLECTIONS = ("embedding_bags", "embeddings")


@final
class SavedTables:
    """The tables of a checkpoint.

    Args:
        checkpoint: As `path` of `read_checkpoint`.

    Attributes:
        values: All values of the model in the checkpoint.

    Raises:
        CheckpointError: It is not a checkpoint, or is damaged.
    """

    def __init__(self, checkpoint: str | Path) -> None:
        self.values = SavedValues.find(Path(checkpoint))

    def find(self, table: str) -> str:
        """Return the full name of a table's values.

        Args:
            table: The name of a table, or a full name such as `ebc.embedding_bags.films.weight`.

        Raises:
            CheckpointError: The checkpoint has no such table, or several.
        """
        ends = tuple(f".{kind}.{table}.weight" for kind in _COLLECTIONS)
        names = [n for n in self.values.values if n == table or f".{n}".endswith(ends)]
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

    def check_size(self, name: str, rows: int, dim: int) -> None:
        """Check that a table has enough rows, and the width.

        Raises:
            CheckpointError: It has fewer rows or another width.
        """
        value = self.values.values[name]
        size = tuple(value.size) if isinstance(value, TensorStorageMetadata) else ()
        if len(size) != 2 or size[0] < rows or size[1] != dim:
            raise CheckpointError(
                f"{name!r} of {self.values.folder} must have {rows} rows or more and {dim} "
                f"columns; received {size}. Pass the checkpoint of this model."
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
