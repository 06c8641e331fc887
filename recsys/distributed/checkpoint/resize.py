"""Tables with more or fewer rows than saved: a load fills the rows in both."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from recsys.distributed.checkpoint.errors import CheckpointError
from recsys.distributed.checkpoint.read import is_named
from recsys.distributed.state.sharded_table import ShardedTable

Resized = list[tuple[Any, Tensor]]
"""Path in the state, and the replaced value."""


def fit_rows(
    folder: Path,
    state: dict[str, Any],
    saved: Mapping[str, STORAGE_TYPES],
    resize: Collection[str],
) -> Resized:
    """Load the rows that exist in both the checkpoint and the table; keep the rest.

    Args:
        folder: Folder of the checkpoint, for errors.
        state: Live state. A table with another number of rows than saved is replaced by a table
            with the saved number.
        saved: Values in the checkpoint.
        resize: Tables that may have another number of rows.

    Returns:
        The replaced values, for `restore`.

    Raises:
        CheckpointError: A shape differs from the saved one in more than the rows of such a table,
            or the model has no such table.
    """
    values, places = flatten_state_dict(state)
    for table in resize:
        if not any(is_named(name, table) for name in values if name.startswith("model.")):
            raise CheckpointError(f"resize must name tables of the model; received {table!r}.")
    replaced: Resized = []
    resized: list[str] = []
    for name, value in values.items():
        saved_value = saved.get(name)
        if not isinstance(value, Tensor) or not isinstance(saved_value, TensorStorageMetadata):
            continue
        if saved_value.size == value.shape:
            continue
        differs = (
            f"The checkpoint {folder} has {name.removeprefix('model.')!r} of shape "
            f"{tuple(saved_value.size)}; here it has shape {tuple(value.shape)}."
        )
        if not (saved_value.size and value.dim() and saved_value.size[1:] == value.shape[1:]):
            raise CheckpointError(f"{differs} Only another number of rows can be loaded.")
        if name.startswith("optimizer.") and not any(
            name.startswith(f"optimizer.state.{param}.") for param in resized
        ):
            raise CheckpointError(
                f"{differs} The parameter has the same shape in both: this is the state of another "
                "optimizer, or of some of the columns. Load without the optimizer."
            )
        if not any(is_named(name, table) for table in resize):
            table = name.removesuffix(".weight").split(".")[-1]
            raise CheckpointError(
                f"{differs} To load the rows that both have, pass resize=[{table!r}]: other rows "
                "of the table keep their values, and other saved rows are ignored."
            )
        resized.append(name.removeprefix("model."))
        set_element(state, places[name], _first_rows(value, saved_value.size))
        replaced.append((places[name], value))
    return replaced


def restore(state: dict[str, Any], replaced: Resized) -> None:
    """Put the values that `fit_rows` replaced back, after the load has filled them."""
    for place, value in replaced:
        set_element(state, place, value)


def _first_rows(value: Tensor, size: Any) -> ShardedTable:
    whole = [((0,) * value.dim(), value)]
    parts = value.local_shards() if isinstance(value, ShardedTable) else whole
    kept = [(offsets, part[: max(size[0] - offsets[0], 0)]) for offsets, part in parts]
    shards = [(offsets, part) for offsets, part in kept if part.numel()]
    return ShardedTable(size, shards, dtype=value.dtype, device=value.device)
