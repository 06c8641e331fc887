"""Row updates of a serving package: files of changed rows, which servers apply while they serve.

A delta is a safetensors file in `deltas/` of a version, numbered from 1 without gaps. Its metadata
has the sequence number, the SHA-256 of the version's manifest, and a checksum of the whole file. A
writer locks the folder, writes `.part-<random>`, and renames it. A killed writer leaves such a
file, which the next writer removes.

Shapes: `R` updated rows, `D` columns.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, final

import torch
from torch import Tensor

from recsys.base.checked import checked
from recsys.distributed.placement.file_checks import list_of, object_of, parse_json
from recsys.inference.packages.delta_files import DeltaHeader, Rows, Update, header_of, parse
from recsys.inference.packages.indexes import empty_index
from recsys.inference.packages.manifest_rules import read_table
from recsys.inference.quant.sources import SavedTables
from recsys.kernels.hashed.twin import LINE, locate
from recsys.kernels.quantize import quantize_rows
from recsys.kernels.quantized import row_bytes

__all__ = ["Delta", "read_delta", "read_deltas", "write_delta", "write_delta_between"]

_BITS = {"int8": 8, "int4": 4, "int2": 2, "float16": 16, "float32": 32}
DELTA_NAME = re.compile(r"(\d{12})\.delta")
_PART = ".part-"


@final
@dataclass(frozen=True)
class Delta:
    """Changed rows of one delta file."""

    sequence: int
    """The number of the delta, from 1."""
    base: str
    """SHA-256 of the manifest of its version, as hexadecimal digits."""
    tables: Mapping[str, Rows]
    """Row numbers, int64 `[R]`, ascending, and quantized rows, uint8 `[R, row bytes]`, by table
    name. For a table with hashed ids also the id of each row, int64 `[R]`, and its digest, uint8
    `[R]`, which is 0 for a row without an id."""


@checked
def write_delta(version: str | Path, tables: Mapping[str, tuple[Tensor, ...]]) -> Path:
    """Write changed rows of a published version, which its servers apply while they serve.

    The file appears whole or not at all. Writers in several processes take turns.

    Args:
        version: The folder of a version of a package, such as `movies/1`.
        tables: By table name: ids, int64 or int32 `[R]`, each once, in any order; and their rows,
            floats `[R, D]`, which are quantized to the table's dtype, or uint8 `[R, row bytes]`.
            For a table with hashed ids: row numbers and rows, then the id of each row, int64 `[R]`,
            and whether it has one, bool `[R]`.

    Returns:
        The file.

    Raises:
        FileNotFoundError: The folder is not a version of a package.
        ValueError: The package has no such table, an id repeats or is outside its table, or rows
            have another shape or dtype or cannot be quantized. Or the hash does not give a hashed
            id its row, or the folder of deltas has a gap.

    Example:
        >>> import json, tempfile
        >>> films = {
        ...     "name": "films", "rows": 9, "dim": 4, "dtype": "int8", "row_bytes": 8, "index": None
        ... }
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "manifest.json").write_text(json.dumps({"tables": [films]}))
        ...     file = write_delta(folder, {"films": (torch.tensor([3, 1]), torch.ones(2, 4))})
        ...     file.name, read_delta(file).tables["films"][0]
        ('000000000001.delta', tensor([1, 3]))
    """
    manifest = _Manifest.read(Path(version))
    if not tables:
        raise ValueError("write_delta.tables must have one table or more; received none.")
    return _publish(manifest, [manifest.update(name, *rows) for name, rows in tables.items()])


@checked
def write_delta_between(version: str | Path, before: str | Path, after: str | Path) -> Path | None:
    """Write the rows that differ between two checkpoints, as `write_delta`.

    Rows are compared after quantization, block by block. A delta updates rows of tables only: other
    values of the model, such as dense layers, stay as published. If they differ, a warning names
    them. Publish a new version to serve them.

    Args:
        version: As for `write_delta`.
        before: The checkpoint of the rows that are served: as `path` of `read_checkpoint`.
        after: The checkpoint of the new rows.

    Returns:
        The file; None if all rows are equal.

    Raises:
        CheckpointError: A checkpoint cannot be read, or lacks a table of the package.
        FileNotFoundError: The folder is not a version of a package.
        ValueError: Rows cannot be quantized, the folder of deltas has a gap, or a table of the
            checkpoints is of another fit.

    Example:
        >>> write_delta_between("movies/1", "runs/step-1", "runs/step-2")  # doctest: +SKIP
        PosixPath('movies/1/deltas/000000000001.delta')
    """
    manifest = _Manifest.read(Path(version))
    old, new = SavedTables(before), SavedTables(after)
    changed = _changed_values(old, new)
    if changed:
        warnings.warn(
            f"A delta updates rows of tables only; {changed[:5]} of {len(changed)} other values "
            "differ between the checkpoints. Publish a new version to serve them.",
            UserWarning,
            stacklevel=2,
        )
    changes = [_update_between(table, old, new) for table in manifest.tables.values()]
    updates = [update for update in changes if len(update.ids)]
    return _publish(manifest, updates) if updates else None


@checked
def read_delta(file: str | Path) -> Delta:
    """Read and verify a delta of a version.

    Args:
        file: A file in the folder `deltas` of a version.

    Raises:
        FileNotFoundError: There is no such file, or its folder is not part of a version.
        ValueError: The file is damaged, has the name of another sequence number, belongs to another
            version, or does not match the tables of its version.
    """
    file = Path(file)
    return read_delta_named(file, file.name)


def read_delta_named(file: Path, name: str) -> Delta:
    """Read and verify a delta that will be renamed to `name`, as `read_delta`."""
    manifest = _Manifest.read(file.parent.parent)
    header, tensors = parse(file)
    match = DELTA_NAME.fullmatch(name)
    if match is None or int(match[1]) != header.sequence:
        raise ValueError(
            f"{file} must be named after its sequence number, {header.sequence:012}.delta. It was "
            "renamed or copied. Write the delta again."
        )
    if header.base != manifest.base:
        raise ValueError(
            f"{file} must be a delta of {manifest.folder}, whose manifest has the SHA-256 "
            f"{manifest.base}; received a delta of the base {header.base}."
        )
    for table_name, (ids, rows, *index) in tensors.items():
        try:
            table = manifest.table(table_name)
            _check_ids(table_name, ids, table.rows)
            table.check_index(len(index) == 2)
            if not bool((ids[1:] > ids[:-1]).all()):
                raise ValueError(f"Ids of table {table_name!r} must be ascending.")
            if rows.shape[1] != table.row_bytes:
                raise ValueError(
                    f"Rows of table {table_name!r} must have {table.row_bytes} bytes; received "
                    f"{rows.shape[1]}."
                )
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
    return Delta(header.sequence, header.base, tensors)


@checked
def read_deltas(version: str | Path, after: int = 0) -> Iterator[Delta]:
    """Read the deltas of a version in their order.

    Args:
        version: As for `write_delta`.
        after: The sequence number of the last delta that was applied.

    Yields:
        Each later delta.

    Raises:
        FileNotFoundError: The folder is not a version of a package.
        ValueError: A sequence number is missing, or as for `read_delta`.
    """
    folder = _Manifest.read(Path(version)).deltas
    for sequence in _sequences(folder):
        if sequence > after:
            yield read_delta(folder / f"{sequence:012}.delta")


# -- tables of a version ---------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class _Table:
    """A table of a manifest."""

    name: str
    rows: int
    dim: int
    dtype: str
    row_bytes: int
    index: Mapping[str, Any] | None
    """The manifest's entry of hashed ids."""

    def check_index(self, is_given: bool) -> None:
        """Raise ValueError unless hashed ids are given just for a table with hashed ids."""
        if is_given != (self.index is not None):
            wanted = "row numbers, rows" + ", hashed ids and their use" * (not is_given)
            raise ValueError(
                f"Changes of table {self.name!r} must have {wanted}; it has "
                f"{'no ' * (not is_given)}hashed ids."
            )

    def digests(self, rows: Tensor, ids: Tensor, is_used: Tensor) -> Tensor:
        """Return the digests of ids, uint8 `[R]`; 0 where a row has no id."""
        assert self.index is not None
        places = locate(empty_index(self.rows, self.index), ids)
        if bool(((places.lines != rows // LINE) & is_used).any()):
            raise ValueError(
                f"Table {self.name!r} must have the seed and regions of the package; received "
                "hashed ids in other rows. Publish a new version."
            )
        return places.digests.where(is_used, 0)

    def quantize(self, floats: Tensor) -> Tensor:
        """Return the stored rows of floats, uint8 `[R, row bytes]`."""
        if self.dtype not in _BITS:
            raise ValueError(
                f"Table {self.name!r} must have one of the dtypes {[*_BITS]}; received "
                f"{self.dtype!r}. Write the package again."
            )
        bits = _BITS[self.dtype]
        stored = torch.zeros(len(floats), self.row_bytes, dtype=torch.uint8)
        try:
            quantize_rows(floats, bits, stored[:, : row_bytes(self.dim, bits)])
        except ValueError as error:
            raise ValueError(f"Table {self.name!r}: {error}") from error
        return stored


@final
class _Manifest(NamedTuple):
    """The part of a version's manifest that deltas need."""

    folder: Path
    base: str
    tables: dict[str, _Table]

    @staticmethod
    def read(folder: Path) -> _Manifest:
        file = folder / "manifest.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{folder} must be the folder of a version of a package, such as movies/1; there "
                "is no manifest.json in it."
            )
        text = file.read_bytes()
        try:
            keys = tuple(field.name for field in fields(_Table))
            entries = object_of("the manifest", parse_json(text.decode(), "the manifest"))
            tables = [
                _Table(**read_table(f"tables[{i}]", entry, keys))
                for i, entry in enumerate(list_of("tables", entries.get("tables")))
            ]
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{file} must describe tables; {error} Copy the package again."
            ) from error
        base = hashlib.sha256(text).hexdigest()
        return _Manifest(folder, base, {table.name: table for table in tables})

    @property
    def deltas(self) -> Path:
        return self.folder / "deltas"

    def table(self, name: str) -> _Table:
        if name not in self.tables:
            raise ValueError(
                f"A delta must name tables of the package, {sorted(self.tables)}; received "
                f"{name!r}."
            )
        return self.tables[name]

    def update(self, name: str, ids: Tensor, rows: Tensor, *hashed: Tensor) -> Update:
        """Check and sort changed rows of a table."""
        table = self.table(name)
        table.check_index(len(hashed) == 2)
        if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"Ids of table {name!r} must be int64 or int32 with one dim; received {ids.dtype} "
                f"of {list(ids.shape)}."
            )
        width = table.dim if rows.is_floating_point() else table.row_bytes
        is_known = rows.is_floating_point() or rows.dtype is torch.uint8
        if not is_known or rows.shape != (len(ids), width):
            raise ValueError(
                f"Rows of table {name!r} must be floats of {[len(ids), table.dim]} or uint8 of "
                f"{[len(ids), table.row_bytes]}; received {rows.dtype} of {list(rows.shape)}."
            )
        ids, order = ids.detach().cpu().long().sort()
        _check_ids(name, ids, table.rows)
        repeated = ids[1:][ids[1:] == ids[:-1]]
        if len(repeated):
            raise ValueError(
                f"Ids of table {name!r} must not repeat; received {int(repeated[0])} twice."
            )
        rows = rows.detach().cpu()[order]
        if rows.is_floating_point():
            rows = table.quantize(rows)
        index = {}
        if hashed:
            hashed_ids, is_used = (tensor.detach().cpu()[order] for tensor in hashed)
            digests = table.digests(ids, hashed_ids, is_used)
            index = {"hashed_ids": hashed_ids, "digests": digests}
        return Update(name, ids, index, table.row_bytes, partial(iter, [rows]))


def _check_ids(name: str, ids: Tensor, rows: int) -> None:
    bad = ids[(ids < 0) | (ids >= rows)]
    if len(bad):
        raise ValueError(
            f"Ids of table {name!r} must be from 0 to {rows - 1}; received {int(bad[0])}."
        )


# -- differences between checkpoints ---------------------------------------------------------------


def _changed_values(old: SavedTables, new: SavedTables) -> list[str]:
    """Return the names of values that are not tables and differ."""
    changed = []
    before, after = old.values, new.values
    names = {*before.values, *after.values}
    of_tables = {n for n in names if SavedTables.is_table(n) or SavedTables.is_index(n)}
    for name in sorted(names - of_tables):
        if name not in before.values or name not in after.values:
            changed.append(name)
            continue
        left, right = before.read({name: None})[name], after.read({name: None})[name]
        both = isinstance(left, Tensor) and isinstance(right, Tensor)
        if not (torch.equal(left, right) if both else left == right):
            changed.append(name)
    return changed


def _update_between(table: _Table, old: SavedTables, new: SavedTables) -> Update:
    """Return the rows of a table that differ after quantization."""
    names = old.find(table.name), new.find(table.name)
    for saved, name in zip((old, new), names, strict=True):
        saved.check_size(name, range(table.rows, sys.maxsize), table.dim)
    fits = {saved.values.fingerprint_of(n) for saved, n in zip((old, new), names, strict=True)}
    if len(fits - {None}) > 1:
        raise ValueError(
            f"after must be of the fit of before; rows of table {table.name!r} stand for other "
            "values. Write a new version of the package."
        )
    parts = [ids for ids, _ in _changed_blocks(table, old, new, names)]
    ids = torch.cat([torch.zeros(0, dtype=torch.int64), *parts])
    index = {}
    if table.index is not None:
        hashed_ids, is_used = (values[ids] for values in new.index_of(names[1], table.rows))
        digests = table.digests(ids, hashed_ids, is_used)
        index = {"hashed_ids": hashed_ids, "digests": digests}

    def blocks() -> Iterator[Tensor]:
        for _, rows in _changed_blocks(table, old, new, names):
            yield rows

    return Update(table.name, ids, index, table.row_bytes, blocks)


def _changed_blocks(
    table: _Table, old: SavedTables, new: SavedTables, names: tuple[str, str]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids and quantized rows of changed rows, in blocks."""
    has_other_id = torch.zeros(table.rows, dtype=torch.bool)
    if table.index is not None:
        has_other_id = _have_other_ids(table, old, new, names)
    for start, after in new.blocks(names[1], table.rows):
        end = start + len(after)
        before = old.read(names[0], start, end)
        if table.index is not None and table.index["unknown"] == "zero":
            step = table.rows // table.index["regions"]
            after[-start % step :: step] = before[-start % step :: step] = 0
        ids = ((before != after).any(1) | has_other_id[start:end]).nonzero().flatten()
        left, right = table.quantize(before[ids]), table.quantize(after[ids])
        is_changed = (left != right).any(1) | has_other_id[start:end][ids]
        yield ids[is_changed] + start, right[is_changed]


def _have_other_ids(
    table: _Table, old: SavedTables, new: SavedTables, names: tuple[str, str]
) -> Tensor:
    """Return whether the hashed id of a row differs, bool `[rows]`."""
    before, was_used = old.index_of(names[0], table.rows)
    after, is_used = new.index_of(names[1], table.rows)
    return (was_used != is_used) | (is_used & (before != after))


# -- the folder of deltas --------------------------------------------------------------------------


def _sequences(folder: Path) -> range:
    """Return the sequence numbers of a folder of deltas.

    Raises:
        ValueError: A number is missing.
    """
    names = os.listdir(folder) if folder.is_dir() else []
    numbers = sorted(int(match[1]) for name in names if (match := DELTA_NAME.fullmatch(name)))
    for wanted, number in enumerate(numbers, 1):
        if number != wanted:
            raise ValueError(
                f"{folder} must have the deltas 1 to {numbers[-1]}; {wanted:012}.delta is missing. "
                "Copy it again, or publish a new version."
            )
    return range(1, len(numbers) + 1)


def _publish(manifest: _Manifest, updates: Iterable[Update]) -> Path:
    """Write the next delta of a version."""
    folder = manifest.deltas
    folder.mkdir(exist_ok=True)
    with _locked(folder):
        for name in os.listdir(folder):
            if name.startswith(_PART):  # of a killed writer, as this one has the lock
                (folder / name).unlink(missing_ok=True)
        sequence = len(_sequences(folder)) + 1
        header = header_of(sequence, manifest.base, list(updates))
        file, part = folder / f"{sequence:012}.delta", folder / f"{_PART}{secrets.token_hex(8)}"
        try:
            with part.open("xb") as out:
                _write(out, header)
            os.rename(part, file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return file


def _write(out: BinaryIO, header: DeltaHeader) -> None:
    """Write a delta, then its checksum into the place of the zeros."""
    digest = hashlib.sha256()
    for data in header.data():
        digest.update(data)
        out.write(data)
    out.seek(header.checksum_at)
    out.write(digest.hexdigest().encode())
    out.flush()
    os.fsync(out.fileno())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder until the end or the death of this process; wait for other writers."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a filesystem without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
