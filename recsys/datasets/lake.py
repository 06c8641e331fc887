"""Tables of Delta Lake and Apache Iceberg, read at one version.

The folder of such a table also has files of older versions, and of rows that were removed. Only the
log of the table states which files belong to a version, so the libraries `deltalake` and
`pyiceberg` read it; the files themselves are read as other Parquet files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final, NamedTuple, final
from urllib.parse import unquote

import fsspec
import pyarrow as pa
import torch.distributed as dist

from recsys.base.arguments import whole, wrong_type
from recsys.base.logs import logger
from recsys.datasets.partitions import Partition

__all__ = [
    "LakeFile",
    "TableVersion",
    "VersionedTables",
    "check_no_lake",
    "lake_at",
    "lake_files",
    "values_outside",
]

_READABLE: Final = {
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
"""Reader features of Delta tables whose files can be read; the first two are checked further."""
_FIELD_ID: Final = b"PARQUET:field_id"


@final
class LakeFile(NamedTuple):
    """A Parquet file of a version of a table."""

    path: str
    """Path or URL."""
    partition: Partition
    """Values of the partition columns, which the file may lack."""
    schema: Any
    """The columns of the table at this version, as an Arrow schema."""
    field_ids: dict[str, int]
    """The number of each column in the schemas of Iceberg files; empty for Delta Lake."""


@final
@dataclass(frozen=True)
class TableVersion:
    """A version of a table of Delta Lake or Apache Iceberg, to read instead of a path.

    Readers, `FeatureSpec.fit` and `extend`, `prepare` and `score` read exactly the rows that the
    table has at this version. A path of the folder alone means the latest version.

    Args:
        path: The folder or URL of the table; of an Iceberg table in a catalog, the metadata file
            that the catalog states, `table.metadata_location`.
        version: The version of a Delta table, or the id of an Iceberg snapshot; None: the latest
            one. In a job of several ranks it must be given, as a new version may appear while ranks
            start.

    Attributes:
        version: The version as a number, also if it was None.

    Raises:
        FileNotFoundError: `path` is not such a table.
        ImportError: `deltalake` or `pyiceberg` is not installed.
        TypeError: An argument has another type.
        ValueError: The log of the table cannot be read, or a job of several ranks does not state
            the version. An unknown version is an error when it is read.

    Example:
        >>> from recsys import datasets
        >>> reader = datasets.parquet(TableVersion("clicks", 12), spec, 256)  # doctest: +SKIP
    """

    path: str | PurePath
    version: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | PurePath):
            wrong_type("path", "a path or a URL", self.path)
        path = str(self.path)
        object.__setattr__(self, "path", path.rstrip("/") or path)
        if self.version is not None:
            whole("version", self.version, 0)
        if _kind_of(path) is None:
            raise FileNotFoundError(
                f"path must be a table of Delta Lake or Iceberg, a folder with _delta_log or with "
                f"metadata; received {path}."
            )
        if self.version is None:
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                raise ValueError(
                    f"{path} must be read at a stated version in a job of several ranks, as a new "
                    "version may appear while ranks start. Pass TableVersion(path, version), with "
                    "the same version on all ranks."
                )
            object.__setattr__(self, "version", _latest(path))

    def __str__(self) -> str:
        return f"{self.path} at version {self.version}"


@final
class VersionedTables:
    """The tables of Delta Lake and Iceberg of a reader, which may move to other versions.

    Args:
        versions: The version of each table.
        open_at: Function that returns the sources of the reader at some versions.

    Attributes:
        versions: As the argument.
    """

    def __init__(
        self, versions: Sequence[int], open_at: Callable[[Sequence[int]], Sequence[Any]]
    ) -> None:
        self.versions, self._open_at = [*versions], open_at

    def sources(self) -> Sequence[Any]:
        """Return the sources of the reader."""
        return self._open_at(self.versions)

    def move(self, versions: Sequence[int]) -> bool:
        """Take the versions of a saved state, and return whether they are others.

        Args:
            versions: The versions. Another number of tables changes nothing; the state is then
                refused for its files.
        """
        if len(versions) != len(self.versions) or [*versions] == self.versions:
            return False
        logger.info("The reader continues at the versions %s of its tables.", [*versions])
        self.versions = [*versions]
        return True


def lake_at(path: str) -> TableVersion | None:
    """Return the latest version of the table in a folder; None if it is another folder or path.

    Raises:
        ImportError: As for `TableVersion`.
        ValueError: As for `TableVersion`.
    """
    return None if _kind_of(path) is None else TableVersion(path)


def lake_files(table: TableVersion) -> list[LakeFile]:
    """Return the files of a version of a table, in the order of their paths.

    Raises:
        ImportError: As for `TableVersion`.
        ValueError: The table does not have the version or does not have rows, or its files alone
            do not state its rows. The message names the feature.
    """
    is_delta = _kind_of(str(table.path)) == "delta"
    files = [*(_delta_files(table) if is_delta else _iceberg_files(table))]
    if not files:
        raise ValueError(f"A table must have rows; {table} has none. Pass another version.")
    return sorted(files)


def check_no_lake(system: Any, paths: Sequence[str], prefix: str) -> None:
    """Check that files are not a part of a table of Delta Lake or Iceberg.

    Args:
        system: The file system of fsspec.
        paths: Paths of files in it.
        prefix: The protocol of URLs, for the message.

    Raises:
        ValueError: A folder above a file is a table with a log. Its files may have removed rows.
    """
    folders: dict[str, str] = {}
    for path in paths:
        folder = path.replace("\\", "/").rpartition("/")[0]
        while folder.strip("/") and not folder.endswith(":/") and folder not in folders:
            if "=" not in folder.rpartition("/")[2]:  # the table is above its partitions
                folders[folder] = path
            folder = folder.rpartition("/")[0]
    for folder, path in folders.items():
        if _kind_in(system, folder) is not None:
            raise ValueError(
                f"{prefix}{path} must be read by the log of its table, {prefix}{folder}, as files "
                f"may have rows that were removed. Pass the path {prefix}{folder}, or "
                "TableVersion(path, version), and filter= for some of its partitions."
            )


def _kind_of(path: str) -> str | None:
    """Return "delta" or "iceberg"; None for other paths."""
    if path.endswith(".metadata.json"):
        return "iceberg"
    system, place = fsspec.core.url_to_fs(path)
    return _kind_in(system, place) if system.isdir(place) else None


def _kind_in(system: Any, folder: str) -> str | None:
    if system.isdir(f"{folder}/_delta_log"):
        return "delta"
    metadata = f"{folder}/metadata"
    if system.isdir(metadata) and any(
        name.endswith(".metadata.json") for name in system.ls(metadata, detail=False)
    ):
        return "iceberg"
    return None


def _latest(path: str) -> int:
    if _kind_of(path) == "delta":
        return int(_delta(path, None).version())
    snapshot = _iceberg(path).current_snapshot()
    if snapshot is None:
        raise ValueError(f"A table must have rows; {path} has no snapshot. Append rows to it.")
    return int(snapshot.snapshot_id)


def _delta(path: str, version: int | None) -> Any:
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError
    except ImportError as error:
        raise _not_installed(path, "Delta Lake", "deltalake") from error
    try:
        return DeltaTable(path, version=version)
    except (TableNotFoundError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a Delta table: {error}") from error
    except DeltaError as error:
        wanted = "" if version is None else f" at version {version}"
        raise ValueError(
            f"{path} must have a log that states the table{wanted}; received: {error}. Pass "
            "another version, or None for the latest."
        ) from error


def _delta_files(table: TableVersion) -> Iterator[LakeFile]:
    delta = _delta(str(table.path), table.version)
    features = {*(delta.protocol().reader_features or ())}
    mapping = delta.metadata().configuration.get("delta.columnMapping.mode", "none")
    if mapping != "none":
        raise _unreadable(table, f"column mapping ({mapping})", "Write it to a table without it")
    if unknown := sorted(features - _READABLE):
        raise _unreadable(table, f"the reader features {unknown}", "Write it to a table without")
    if "deletionVectors" in features and pa.table(delta.deletion_vectors()).num_rows:
        raise _unreadable(table, "deletion vectors", "Run REORG TABLE ... APPLY (PURGE) in Spark")
    schema = pa.schema(delta.schema().to_arrow())
    actions = pa.table(delta.get_add_actions(flatten=True))
    names = delta.metadata().partition_columns
    root = str(table.path)
    for place, path in enumerate(actions["path"].to_pylist()):
        path = unquote(path)
        yield LakeFile(
            path if "://" in path or path.startswith("/") else f"{root}/{path}",
            {name: _text(actions[f"partition.{name}"][place]) for name in names},
            schema,
            {},
        )


def _iceberg(path: str) -> Any:
    try:
        from pyiceberg.exceptions import ValidationError
        from pyiceberg.table import StaticTable
    except ImportError as error:
        raise _not_installed(path, "Iceberg", "pyiceberg") from error
    try:
        return StaticTable.from_metadata(path)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} must state its current metadata in metadata/version-hint.text, or be in a "
            "catalog. Pass the metadata file that the catalog states, such as TableVersion("
            "catalog.load_table('db.clicks').metadata_location)."
        ) from error
    except (ValidationError, ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as an Iceberg table: {error}") from error


def _iceberg_files(table: TableVersion) -> Iterator[LakeFile]:
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    iceberg = _iceberg(str(table.path))
    versions = [snapshot.snapshot_id for snapshot in iceberg.metadata.snapshots]
    if table.version not in versions:
        raise ValueError(
            f"version must be the id of a snapshot of {table.path}, one of {versions[-5:]} (the "
            f"last 5); received {table.version}."
        )
    scan = iceberg.scan(snapshot_id=table.version)
    fields = scan.projection().fields
    schema = schema_to_pyarrow(scan.projection(), include_field_ids=False)
    defaults = [one.name for one in fields if getattr(one, "initial_default", None) is not None]
    if defaults:
        raise _unreadable(table, f"default values of {defaults}", "Write it to a new table")
    field_ids = {one.name: one.field_id for one in fields}
    names = {number: name for name, number in field_ids.items()}
    for task in scan.plan_files():
        if task.delete_files:
            raise _unreadable(table, "delete files", "Run rewrite_data_files in Spark")
        if str(task.file.file_format.value).upper() != "PARQUET":
            raise _unreadable(table, f"{task.file.file_format.value} files", "Write Parquet files")
        spec = iceberg.specs()[task.file.spec_id]
        values = {
            names[one.source_id]: _iceberg_text(
                task.file.partition[place], schema.field(names[one.source_id]).type
            )
            for place, one in enumerate(spec.fields)
            if str(one.transform) == "identity" and one.source_id in names
        }
        path = task.file.file_path
        path = path.removeprefix("file://") if path.startswith("file:///") else path
        yield LakeFile(path.removeprefix("file:"), values, schema, field_ids)


def _iceberg_text(value: Any, kind: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and pa.types.is_temporal(kind):  # days or microseconds since 1970
        number = pa.int32() if pa.types.is_date32(kind) else pa.int64()
        return _text(pa.scalar(value, number).cast(kind))
    return _text(pa.scalar(value, kind))


def _text(value: Any) -> str | None:
    return value.cast(pa.string()).as_py() if value.is_valid else None


def values_outside(file: LakeFile, stored: Any) -> dict[str, str | None]:
    """Return the values of the columns of a table that a file of it does not have.

    Args:
        file: The file.
        stored: The columns in the file, as an Arrow schema.

    Returns:
        The partition values, and None for columns that the table got after the file was written.

    Raises:
        ValueError: A column had another name when the file was written.
    """
    numbers = {one.name: int((one.metadata or {}).get(_FIELD_ID, -1)) for one in stored}
    by_number = {number: name for name, number in numbers.items() if number >= 0}
    added: dict[str, str | None] = {}
    for name in file.schema.names:
        number = file.field_ids.get(name, -1)
        earlier = by_number.get(number, name)
        if earlier != name:
            raise ValueError(
                f"{file.path} must have the column {name!r} under this name; it has {earlier!r}, "
                "the name before the column was renamed. Rewrite the files of the table, such as "
                "by rewrite_data_files in Spark."
            )
        is_other = bool(by_number) and number >= 0 and number not in by_number
        if name not in numbers or is_other:
            added[name] = file.partition.get(name)
    return added


def _not_installed(path: str, kind: str, library: str) -> ImportError:
    return ImportError(
        f"{path} is a table of {kind}, which {library} reads; it is not installed. Run pip install "
        "'recsys-torch[lake]'."
    )


def _unreadable(table: TableVersion, feature: str, remedy: str) -> ValueError:
    return ValueError(
        f"{table} must be readable by its files alone; it has {feature}. {remedy}, or pass an "
        "Arrow table that another engine reads."
    )
