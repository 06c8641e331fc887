"""`find_values`: lists the files that have given values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.base.arguments import path_of
from recsys.base.checked import checked_but
from recsys.datasets.sources import read_parts
from recsys.datasets.tables import files_of, unify_types
from recsys.distributed.checkpoint.chain import rows_of_delta
from recsys.distributed.checkpoint.read import SavedValues
from recsys.distributed.checkpoint.values import saved_spec
from recsys.distributed.checkpoint.versions import MANIFEST, open_version, step_of
from recsys.features.arrow import read_keys, read_values
from recsys.features.columns import Column
from recsys.features.save import NAME
from recsys.features.spec import FeatureSpec
from recsys.features.vocabulary import Vocabulary
from recsys.inference.deletion.values import TableValues, rows_of, values_by_table
from recsys.inference.packages.columns import FOLDER, load_spec
from recsys.inference.packages.deltas import read_deltas
from recsys.inference.packages.manifest import read_manifest

__all__ = ["FoundValues", "ValuesReport", "find_values"]

_Array: TypeAlias = np.ndarray[Any, Any]
_TABLES = (".parquet", ".pq", ".csv", ".tsv", ".arrow", ".feather", ".ipc")
_ERRORS = (OSError, ValueError, TypeError, KeyError, RuntimeError, pa.ArrowException)


@final
class FoundValues(NamedTuple):
    """Values of a table that a file or folder has."""

    path: str
    what: str
    """"spec", "checkpoint", "delta checkpoint", "package", "delta of a package", "prepared file" or
    "table", which is raw data or a record of requests."""
    table: str
    num_values: int
    """Number of the given values that it has."""

    def __str__(self) -> str:
        return f"{self.path}: {self.what}, {self.num_values:,} values of table {self.table!r}"


@final
class ValuesReport(NamedTuple):
    """The files that have given values; as text, a line per file and table."""

    found: list[FoundValues]
    unknown: list[str]
    """Paths that could not be judged, with the reason, such as a damaged file."""
    num_places: int
    """Number of specs, checkpoints, packages and table files that were read."""

    def __str__(self) -> str:
        end = f"{len(self.found)} places in {self.num_places:,} files and folders have values"
        lines = [*map(str, self.found), *(f"not judged: {text}" for text in self.unknown)]
        if self.unknown:
            end += f"; {len(self.unknown)} are not judged"
        return "\n".join([*lines, end])


@checked_but("paths", "values", "spec")
def find_values(
    paths: str | Path | Sequence[str | Path],
    values: Mapping[str, Iterable[str | int]],
    spec: FeatureSpec,
) -> ValuesReport:
    """List the files that still have given values, such as users who asked for deletion.

    It reads the specs, checkpoints, delta checkpoints, packages with their deltas, prepared files,
    and raw tables (Parquet, CSV, Arrow; also records of requests) in folders and their subfolders.
    Nothing changes. A checkpoint without a spec is compared by its fingerprints with the other
    specs that are found. Other files, such as exported programs and safetensors, and the
    names of folders, such as `user=ann`, are not read.

    Args:
        paths: A folder, or several; links in them are not followed.
        values: Values by table, such as `{"user": ["ann"]}`.
        spec: A fitted spec with the tables and their columns, of any day.

    Returns:
        The report. An empty `found` is an answer only if `unknown` is empty, too.

    Raises:
        FileNotFoundError: A folder does not exist.
        KeyError: The spec has no such table.
        TypeError: A value has another type than the values of the table.
        ValueError: Values of the table share rows.

    Example:
        >>> import tempfile
        >>> from recsys.features import Categorical
        >>> spec = FeatureSpec([Categorical("user")]).fit({"user": ["ann", "bob", "eve"]})
        >>> folder = Path(tempfile.mkdtemp())
        >>> spec.save(folder / "monday")
        >>> spec.forget({"user": ["ann"]}).save(folder / "tuesday")
        >>> print(str(find_values(folder, {"user": ["ann"]}, spec)).replace(str(folder), "runs"))
        runs/monday: spec, 1 values of table 'user'
        1 places in 2 files and folders have values
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    folders = [path_of("find_values.paths", path) for path in given]
    for folder in folders:
        if not folder.exists():
            raise FileNotFoundError(f"find_values.paths must exist; received {folder}.")
    search = _Search(values_by_table("find_values", values, spec), spec)
    places = [place for folder in folders for place in _places(folder)]
    report = ValuesReport([], [], len(places))
    for read, path in sorted(places, key=lambda place: place[0] is not _Search.spec):
        try:
            for what, table, count in read(search, path):
                if count:
                    report.found.append(FoundValues(str(path), what, table, count))
        except _ERRORS as error:
            report.unknown.append(f"{path}: {error}")
    report.found.sort()
    return report


_Read: TypeAlias = "Callable[[_Search, Path], Iterator[tuple[str, str, int]]]"


def _places(folder: Path) -> Iterator[tuple[_Read, Path]]:
    """Yield the specs, checkpoints, packages and table files of a folder, and how to read each."""
    if folder.is_file():
        yield _Search.table_file, folder
        return
    for name, inside, files in os.walk(folder):
        path = Path(name)
        inside.sort()
        if NAME in files:
            yield _Search.spec, path
        elif ".metadata" in files or (step_of(path) is not None and MANIFEST in files):
            yield _Search.checkpoint, path
            inside.clear()
        elif MANIFEST in files:
            yield _Search.package, path
            inside.clear()
        elif step_of(path) is not None and files:
            yield _Search.unfinished, path
        else:
            for file in sorted(files):
                if file.endswith(_TABLES):
                    yield _Search.table_file, path / file


@final
class _Search:
    """Given values, which are looked up in one place after the other.

    Args:
        values: The values by table.
        spec: The spec of the caller.
    """

    def __init__(self, values: Mapping[str, TableValues], spec: FeatureSpec) -> None:
        self._values, self._spec = values, spec
        self._known: dict[str, Vocabulary] = {}  # by fingerprint
        self._prepared: dict[Path, FeatureSpec] = {}  # by folder
        self._learn(spec)

    def _learn(self, spec: FeatureSpec) -> None:
        for vocabulary in spec.fitted.vocabularies.values():
            self._known[vocabulary.fingerprint] = vocabulary

    def spec(self, path: Path) -> Iterator[tuple[str, str, int]]:
        """Yield the numbers of values of a saved spec."""
        yield from self._in_spec(FeatureSpec.load(path), "spec")

    def _in_spec(self, spec: FeatureSpec, what: str) -> Iterator[tuple[str, str, int]]:
        """Yield the numbers of values in vocabularies and profiles."""
        self._learn(spec)
        for table, values in self._values.items():
            has = np.zeros(len(values.array), bool)
            vocabulary = spec.fitted.vocabularies.get(table)
            if vocabulary is not None:
                has |= _are_in(values.array, vocabulary.values)
            for column in spec.columns:
                profile = spec.fitted.profiles.get(column.name)
                if column.table == table and profile is not None and profile.bins:
                    has |= _are_in(values.array, pa.array(profile.bins))
            yield what, table, int(has.sum())

    def checkpoint(self, path: Path) -> Iterator[tuple[str, str, int]]:
        """Yield the numbers of values of a version of a checkpoint, a delta by its own rows."""
        folder, manifest = open_version(path)
        is_delta = (manifest or {}).get("kind") == "delta"
        what = "delta checkpoint" if is_delta else "checkpoint"
        # without its kind, a delta is read alone
        own = None if manifest is None else {k: v for k, v in manifest.items() if k != "kind"}
        saved, spec = SavedValues(folder, own), saved_spec(folder, manifest)
        if spec is not None and not is_delta:
            yield from self._in_spec(spec, what)
        for table, values in self._values.items():
            if values.ids is not None:
                yield what, table, self._hashed_in(saved, table, values.ids)
                continue
            if spec is not None and not is_delta:
                continue
            for weight in [n for n in saved.values if n.endswith(f".{table}.weight")]:
                vocabulary = self._known.get(saved.fingerprint_of(weight) or "")
                if spec is not None:
                    vocabulary = spec.fitted.vocabularies.get(table)
                if vocabulary is None:
                    raise ValueError(
                        f"it has table {table!r}, and no spec with its values was found"
                    )
                rows = rows_of(vocabulary, values.array)
                if is_delta and manifest is not None:
                    changed = rows_of_delta(folder, manifest, weight)
                    rows = np.intersect1d(rows, changed.numpy())
                yield what, table, len(rows)

    def unfinished(self, path: Path) -> Iterator[tuple[str, str, int]]:
        """Raise an error: a version that was never finished cannot be read."""
        raise ValueError("it is an unfinished version of a checkpoint. Remove it")

    def _hashed_in(self, saved: SavedValues, table: str, ids: _Array) -> int:
        found = np.zeros(len(ids), bool)
        for name in [n for n in saved.values if n.endswith(f".{table}.index.ids")]:
            used = f"{name.removesuffix('ids')}last_used"
            for rows in saved.row_ranges(name):
                block = saved.read({name: rows, used: rows})
                found |= np.isin(ids, block[name][block[used] > 0].numpy())
            for logged, _ in saved.logged_rows(name.removesuffix("index.ids")):
                found |= np.isin(ids, logged.numpy())
        return int(found.sum())

    def package(self, path: Path) -> Iterator[tuple[str, str, int]]:
        """Yield the numbers of values of a package, and of its deltas."""
        manifest = read_manifest(path)
        spec = load_spec(path) if (path / FOLDER).is_dir() else None
        if spec is not None:
            yield from self._in_spec(spec, "package")
        tables = {entry["name"].rpartition(".")[2]: entry for entry in manifest["tables"]}
        chosen = {table: values for table, values in self._values.items() if table in tables}
        for table, values in chosen.items():
            index = tables[table]["index"]
            if values.ids is not None and index is not None:
                ids = np.fromfile(path / index["ids"], np.int64)
                is_used = np.fromfile(path / index["digests"], np.uint8) > 0
                count = int(np.isin(values.ids, ids[is_used]).sum())
                yield "package", table, count
            elif spec is None:
                raise ValueError(f"it has table {table!r}, and no spec")
        found: dict[str, set[int]] = {table: set() for table in chosen}
        for delta in read_deltas(path):
            for name, (rows, _, *hashed) in delta.tables.items():
                table = name.rpartition(".")[2]
                if table not in chosen:
                    continue
                values = chosen[table]
                if values.ids is not None and hashed:
                    given, present = values.ids, hashed[0][hashed[1] > 0].numpy()
                elif values.ids is None and spec is not None:
                    given = rows_of(spec.fitted.vocabularies[table], values.array)
                    present = rows.numpy()
                else:
                    continue
                found[table] |= set(np.intersect1d(given, present).tolist())
        for table, of_table in found.items():
            yield "delta of a package", table, len(of_table)

    def table_file(self, path: Path) -> Iterator[tuple[str, str, int]]:
        """Yield the numbers of values of a file of raw or prepared rows."""
        prepared = next((p for p in path.parents if _is_prepared(p)), None)
        spec = self._spec if prepared is None else self._spec_of_prepared(prepared)
        by_column = {column.name: column for column in spec.columns if column.table in self._values}
        [file] = files_of(path)
        names = [name for name in by_column if name in file.schema.names]
        kinds = {} if prepared is not None else spec.column_kinds()
        kinds = {name: kind for name, kind in kinds.items() if name in names}
        [file] = unify_types([file], [], kinds)
        found = {str(by_column[n].table): set[int]() for n in names}
        rows = {} if prepared is None else {n: self._rows_in(by_column[n], spec) for n in names}
        for part in read_parts(file, names):
            for name in names:
                column = by_column[name]
                if prepared is None:
                    values = self._values[str(column.table)]
                    found[str(column.table)] |= _in_raw(part.table, column, values)
                else:
                    found[str(column.table)] |= _in_prepared(part.table, column, rows[name])
        what = "table" if prepared is None else "prepared file"
        for table, of_table in found.items():
            yield what, table, len(of_table)

    def _spec_of_prepared(self, folder: Path) -> FeatureSpec:
        """Return the spec of the raw columns of prepared files, read once for all files."""
        if folder not in self._prepared:
            self._prepared[folder] = FeatureSpec.load(folder / "features")
        return self._prepared[folder]

    def _rows_in(self, column: Column, spec: FeatureSpec) -> _Array:
        """Return the rows or ids of the given values in a prepared column."""
        values = self._values[str(column.table)]
        if values.ids is not None:
            return values.ids
        return rows_of(spec.fitted.vocabularies[str(column.table)], values.array)


def _is_prepared(folder: Path) -> bool:
    return (folder / "features" / NAME).is_file() and (folder / "prepared" / NAME).is_file()


def _are_in(array: Any, others: Any) -> _Array:
    """Return whether values are among others, [N] bool; none are among values of another kind."""
    if pa.types.is_integer(array.type) != pa.types.is_integer(others.type):
        return np.zeros(len(array), bool)
    is_in: _Array = pc.is_in(array, value_set=others.cast(array.type)).to_numpy(
        zero_copy_only=False
    )
    return is_in


def _in_raw(table: Any, column: Column, values: TableValues) -> set[int]:
    """Return the positions of the given values that a raw column has."""
    is_list = column.is_list
    try:
        read = read_values(table, column.name, is_list, separator=column.separator)
    except TypeError:  # such as a list where the spec has none
        read = read_values(table, column.name, not is_list)
    keys = read_keys(read, unsigned=values.ids is not None)
    if keys.texts is not None:
        has = _are_in(values.array, keys.texts)
    else:
        present = keys.numbers if keys.is_missing is None else keys.numbers[~keys.is_missing]
        has = _are_in(values.array, pa.array(present))
    return set(np.flatnonzero(has).tolist())


def _in_prepared(table: Any, column: Column, given: _Array) -> set[int]:
    """Return the given rows or ids that a prepared column has."""
    numbers = read_keys(read_values(table, column.name, column.is_list)).numbers
    return set(np.intersect1d(given, numbers).tolist())
