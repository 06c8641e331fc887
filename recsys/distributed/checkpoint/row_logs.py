"""Rows of tables with hashed ids that are on the disk (`HashedIds.overflow`), in a checkpoint.

A version has links to the files of each rank's logs, or copies, and for each log a file with one
bit for each record: whether it is valid. `files` of the manifest has their sizes and CRCs.
`overflow` has the logs of each table, by the prefix of the table's values: `fields` of a record,
the `rows` of its shard, and `segments`, each with `file`, `records` and `live`, the file of bits.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from recsys.distributed.checkpoint import versions
from recsys.distributed.checkpoint.errors import CheckpointError
from recsys.distributed.checkpoint.manifest_rules import LOG_FILE
from recsys.distributed.checkpoint.table_ids import HashedPart, hashed_parts
from recsys.distributed.model_parallel import get_unwrapped_module
from recsys.distributed.state.table_shards import TableShards
from recsys.kernels.hashed.twin import locate
from recsys.modules.ids.row_log import RecordField, record_bytes, split_records
from recsys.modules.ids.row_store import fields_of, open_log
from recsys.modules.tables.embedding_table import EmbeddingTable

_KEY = "overflow"
"""Key of the manifest."""
Files = dict[str, list[list[int]]]
"""Bytes and CRC of the blocks of each file; see `blocks.Files`."""


@final
class SavedLogs(NamedTuple):
    """Logs in a version."""

    files: Files
    tables: dict[str, list[dict[str, Any]]]
    """Logs by prefix; see `logs_of`."""

    def about(self) -> dict[str, Any]:
        """Return the entry of the manifest, if there are logs."""
        return {_KEY: self.tables} if self.tables else {}

    @staticmethod
    def joined(parts: Sequence[SavedLogs]) -> SavedLogs:
        """Return the logs of all ranks."""
        joined = SavedLogs({}, {})
        for part in parts:
            joined.files.update(part.files)
            for prefix, logs in part.tables.items():
                joined.tables.setdefault(prefix, []).extend(logs)
        return joined


def logs_of(manifest: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the logs of each table of a version, by the prefix of the table's values."""
    logs: dict[str, list[dict[str, Any]]] = manifest.get(_KEY, {})
    return logs


def refuse_logs(manifest: Mapping[str, Any], folder: Path, action: str) -> None:
    """Raise an error if a version has rows of logs.

    Args:
        manifest: Its manifest.
        folder: Its folder.
        action: The subject of the message, which such versions do not support.
    """
    for prefix, logs in logs_of(manifest).items():
        if logs:
            raise CheckpointError(
                f"{action} does not support tables with HashedIds.overflow; received {folder}, "
                f"whose table {prefix.removesuffix('.')!r} has one. Use read_hashed_table."
            )


def save_logs(model: nn.Module, folder: Path) -> SavedLogs:
    """Put this rank's logs into the folder of a version, and flush them to the disk.

    Raises:
        OSError: The disk is full, or a log misses rows.
    """
    saved = SavedLogs({}, {})
    save, number = uuid.uuid4().hex[:8], 0
    for prefix, parts in tables_with_logs(model):
        saved.tables[prefix] = []
        for part in parts:
            log = part.rows.log
            if log is None or not len(log):
                continue
            number += 1
            name = f"{save}{LOG_FILE}{number}"
            segments = log.save(folder, name)
            bits = b"".join(np.packbits(segment.is_live).tobytes() for segment in segments)
            with (folder / f"{name}.live").open("xb") as file:
                file.write(bits)
                file.flush()
                os.fsync(file.fileno())
            size = 8 + record_bytes(log.fields)
            saved.files[f"{name}.live"] = [[len(bits), crc32(bits)]]
            for segment in segments:
                saved.files[segment.name] = [[segment.records * size, segment.crc]]
            saved.tables[prefix].append(
                {
                    "fields": [
                        [f.name, str(f.dtype).removeprefix("torch."), f.values] for f in log.fields
                    ],
                    "rows": [part.first_row, part.first_row + part.rows.ids.numel()],
                    "live": f"{name}.live",
                    "segments": [[segment.name, segment.records] for segment in segments],
                }
            )
    if saved.files:
        versions.sync_folder(folder)
    return saved


def tables_with_logs(model: nn.Module) -> Iterator[tuple[str, list[HashedPart]]]:
    """Yield the prefix of the values of each table with `HashedIds.overflow`, and its shards."""
    for path, module in get_unwrapped_module(model).named_modules():
        parts: list[HashedPart] | None = None
        if isinstance(module, TableShards):
            if module.rules is not None and module.rules.has_rows_on_disk:
                parts = hashed_parts(model, module)
        elif (
            isinstance(module, EmbeddingTable)
            and hasattr(module, "index")
            and module.index.rules.has_rows_on_disk
        ):
            parts = hashed_parts(model, module.weight)
        if parts is not None:
            yield f"{path}." if path else "", parts


def check_logs(
    folder: Path,
    saved: Mapping[str, Any],
    model: nn.Module,
    *,
    optimizer: bool,
    allow_partial: bool,
) -> None:
    """Check that the logs of a version fit the tables of a model.

    Args:
        folder: The version.
        saved: `overflow` of its manifest.
        model: The model.
        optimizer: Whether the state of the optimizer is loaded.
        allow_partial: Whether tables without an overflow may leave the logs out.

    Raises:
        CheckpointError: A table has no overflow, or its records have other fields.
    """
    tables = dict(tables_with_logs(model))
    names = {
        f"{path}." for path, module in get_unwrapped_module(model).named_modules()
        if isinstance(module, TableShards | EmbeddingTable)
    }  # fmt: skip
    for prefix, logs in saved.items():
        if not logs or prefix not in names:
            continue
        if prefix not in tables:
            if allow_partial:
                continue
            raise CheckpointError(
                f"The checkpoint {folder} has rows of {prefix.removesuffix('.')!r} that were in "
                "the folder of HashedIds.overflow; here the table has none. Give it an overflow, "
                "or pass allow_partial=True to leave these rows out."
            )
        for part in tables[prefix]:
            for log in logs:
                _check_fields(folder, prefix, _fields(log), part, optimizer=optimizer)


def _check_fields(
    folder: Path,
    prefix: str,
    saved: Sequence[RecordField],
    part: HashedPart,
    *,
    optimizer: bool,
) -> None:
    expected = fields_of(part.kernel, part.place)
    if not optimizer:
        expected, saved = expected[:1], saved[:1]
    if list(expected) != list(saved):
        raise CheckpointError(
            f"The checkpoint {folder} has rows of {prefix.removesuffix('.')!r} with "
            f"{[tuple(f) for f in saved]} in the folder of HashedIds.overflow; here they have "
            f"{[tuple(f) for f in expected]}. Load it into a table of the same dtype, columns and "
            "optimizer, or load without the optimizer."
        )


def load_logs(
    folder: Path, saved: Mapping[str, Any], files: Files, model: nn.Module, *, optimizer: bool
) -> None:
    """Copy the saved rows of this rank's shards into their logs.

    The index of each table must have been loaded, which empties its log.

    Args:
        folder: The version.
        saved: `overflow` of its manifest.
        files: `files` of its manifest.
        model: The model.
        optimizer: Whether the state of the optimizer is loaded; else it is zeros.

    Raises:
        CheckpointError: A file is missing or damaged.
        OSError: The folder of a log cannot be written.
    """
    for prefix, parts in tables_with_logs(model) if saved else ():
        name = prefix.removesuffix(".").rpartition(".")[2]
        for part in parts:
            fields = fields_of(part.kernel, part.place)
            index = part.rows.index
            last_row = part.first_row + part.rows.ids.numel()
            for log in saved.get(prefix, ()):
                first, last = log["rows"]
                if first >= last_row or last <= part.first_row:
                    continue
                for ids, values in read_records(folder, log, files):
                    regions = locate(index, ids).regions
                    at = ((regions >= index.first_region) & (regions < index.last_region)).nonzero()
                    at = at.flatten()
                    if at.numel():
                        records = _records(fields, values, at, optimizer=optimizer)
                        open_log(part.rows, name, fields).append(ids[at], records)


def read_records(
    folder: Path, log: Mapping[str, Any], files: Files
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield the ids of each file of a saved log, int64 [N], and their fields, [N, values].

    Args:
        folder: The version.
        log: An item of `overflow` in the manifest.
        files: `files` of the manifest.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    fields = _fields(log)
    size = 8 + record_bytes(fields)
    bits = np.frombuffer(_read(folder, log["live"], files), np.uint8)
    start = 0
    for name, count in log["segments"]:
        end = start + -(-count // 8)
        is_live = np.unpackbits(bits[start:end], count=count).astype(np.bool_)
        records = np.frombuffer(_read(folder, name, files), np.uint8).reshape(count, size)
        chosen = torch.from_numpy(records[is_live])
        fields_of_files = split_records(chosen, [RecordField("id", torch.int64, 1), *fields])
        yield fields_of_files.pop("id")[:, 0], fields_of_files
        start = end


def _read(folder: Path, name: str, files: Files) -> bytes:
    file = folder / name
    try:
        data = versions.regular_file(file).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Load another version.") from error
    [expected] = files.get(name, [[-1, -1]])
    if [len(data), crc32(data)] != expected:
        raise CheckpointError(
            f"{file} is damaged: it has {len(data)} bytes with CRC {crc32(data):08x}; the manifest "
            f"has {expected[0]} with {expected[1] & 0xFFFFFFFF:08x}. Load another version."
        )
    return data


def _fields(log: Mapping[str, Any]) -> list[RecordField]:
    return [RecordField(name, getattr(torch, dtype), n) for name, dtype, n in log["fields"]]


def _records(
    fields: Sequence[RecordField], values: Mapping[str, Tensor], at: Tensor, *, optimizer: bool
) -> Tensor:
    """Return records of some positions of saved values; uint8 [N, bytes]."""
    parts = []
    for field in fields:
        if optimizer or field.name == "weight":
            part = values[field.name][at]
        else:
            part = torch.zeros(at.numel(), field.values, dtype=field.dtype)
        parts.append(part.view(torch.uint8))
    return torch.cat(parts, 1)
