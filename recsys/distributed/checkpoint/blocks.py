"""Writes and reads the blocks of a checkpoint, each with its CRC.

A block is one value, or one rank's shard of one. The files have the format of
`torch.distributed.checkpoint`, which can read them, too: consecutive blocks, each written by
`torch.save`. The manifest contains their lengths and CRCs.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import uuid
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, cast
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future
from torch.utils.serialization import config

from recsys.distributed.checkpoint import versions
from recsys.distributed.checkpoint.errors import CheckpointError
from recsys.distributed.checkpoint.safe_pickle import KnownUnpickler, decode_metadata

METADATA = ".metadata"
_PIECE_BYTES = 1 << 20  # read or written at a time; stays in cache for the CRC
_AHEAD_BYTES = 8 << 20  # written to the disk after so many bytes, not only at fsync

Files = Mapping[str, Sequence[Sequence[int]]]
"""`[bytes, CRC]` of each block in order, by file of a version."""


class BlockWriter(FileSystemWriter):
    """Writes a version: each rank its blocks, then rank 0 metadata and manifest.

    Args:
        folder: Existing folder of the version.
        about: Further members of the manifest; read on rank 0.
        more: Further files of the version and their blocks; read on rank 0.
        then: Function called on rank 0 with the folder and the manifest's files, before the version
            is complete.
    """

    def __init__(
        self,
        folder: Path,
        about: Mapping[str, Any],
        more: Files,
        then: Callable[[Path, Files], None] | None = None,
    ) -> None:
        super().__init__(folder)
        self._more = more
        self._folder = folder
        self._about = about
        self._then = then

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose a file name for each rank that no other save has used."""
        save = uuid.uuid4().hex[:8]
        return [
            dataclasses.replace(plan, storage_data=f"{save}-rank-{rank}.distcp")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's blocks to the disk; return their positions and CRCs."""
        results: list[WriteResult] = []
        if plan.items:
            # torch.load does not check the CRC of torch.save
            without_zip_crc = cast(Any, config).patch("save.compute_crc32", False)
            with (self._folder / plan.storage_data).open("xb") as file, without_zip_crc:
                flushed = 0
                for item in plan.items:
                    data = planner.resolve_data(item)
                    results.append(_write_block(file, plan.storage_data, item, data))
                    if file.tell() - flushed >= _AHEAD_BYTES:
                        _advise_disk(file, "POSIX_FADV_DONTNEED", flushed, file.tell() - flushed)
                        flushed = file.tell()
                file.flush()
                os.fsync(file.fileno())
            versions.sync_folder(self._folder)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata and manifest, which make the version complete."""
        files: dict[str, Any] = dict(self._more)
        written = []
        for result in (result for of_rank in results for result in of_rank):
            info, crc = result.storage_data
            files.setdefault(info.relative_path, []).append((info.length, crc))
            written.append(dataclasses.replace(result, storage_data=info))
        super().finish(metadata, [written])
        data = (self._folder / METADATA).read_bytes()
        files[METADATA] = [(len(data), crc32(data))]
        if self._then is not None:
            self._then(self._folder, files)
        versions.write_manifest(self._folder, {"files": files, **self._about})


def _advise_disk(file: IO[bytes] | io.FileIO, advice: str, start: int, length: int) -> None:
    """Pass the expected use of a file's bytes to the operating system, if it supports that."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(file.fileno(), start, length, getattr(os, advice))


def _write_block(
    file: IO[bytes], name: str, item: WriteItem, data: Tensor | io.BytesIO
) -> WriteResult:
    stream = _CrcStream(file)
    start = file.tell()
    if isinstance(data, io.BytesIO):
        stream.write(data.getbuffer())
    else:
        tensor = data.detach().cpu().resolve_conj().resolve_neg().contiguous()
        try:
            torch.save(_with_own_storage(tensor), cast(IO[bytes], stream))
        except Exception as error:
            raise stream.error or error from None  # torch replaces the stream's error
    length = file.tell() - start
    info = _StorageInfo(name, start, length)
    return WriteResult(item.index, length, storage_data=(info, stream.crc))


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor whose storage has no other values: `torch.save` writes whole storages."""
    start = tensor.storage_offset() * tensor.element_size()
    storage = tensor.untyped_storage()[start : start + tensor.nbytes]  # shares the memory
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())


class _CrcStream(io.RawIOBase):
    """Stream that writes to a file and computes the CRC of the written bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.crc = 0
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        try:
            for start in range(0, len(rest), _PIECE_BYTES):
                piece = rest[start : start + _PIECE_BYTES]
                self.crc = crc32(piece, self.crc)
                self._file.write(piece)
        except BaseException as error:  # also an interrupt, which torch would replace, too
            self.error = error
            raise
        return len(rest)


class BlockReader(FileSystemReader):
    """Reads a version, or a folder written by `torch.distributed.checkpoint`.

    Args:
        folder: Folder of the version.
        manifest: Its manifest; None for a folder without one.
    """

    def __init__(self, folder: Path, manifest: versions.Manifest | None) -> None:
        super().__init__(folder)
        self._folder = folder
        self._blocks = None if manifest is None else _blocks_of(manifest["files"])
        self._metadata: Metadata | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._unused = memoryview(bytearray(_PIECE_BYTES))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the version.

        Raises:
            CheckpointError: The file is missing or damaged, or is not metadata.
        """
        if self._metadata is None:
            try:
                data = versions.regular_file(self._folder / METADATA).read_bytes()
            except OSError as error:
                raise CheckpointError(
                    f"{self._folder} is not a readable checkpoint: {error}"
                ) from error
            if self._blocks is not None:
                expected = self._blocks.get((METADATA, 0), (-1, -1))
                self._check(METADATA, 0, (len(data), crc32(data)), expected)
            self._metadata = decode_metadata(str(self._folder / METADATA), data)
            if getattr(self._metadata, "storage_meta", None) is None:
                self._metadata.storage_meta = StorageMeta()
        return self._metadata

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename values.

        Args:
            names: New names by the names in the checkpoint.
        """
        metadata = self.read_metadata()
        metadata.state_dict_metadata = {
            names.get(name, name): value for name, value in metadata.state_dict_metadata.items()
        }
        metadata.storage_data = {
            dataclasses.replace(index, fqn=names.get(index.fqn, index.fqn)): info
            for index, info in metadata.storage_data.items()
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the blocks of a plan, each once, and fill in their values."""
        needs: dict[str, dict[int, list[ReadItem]]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            if self._blocks is None and getattr(info, "transform_descriptors", None):
                return super().read_data(plan, planner)  # for example compressed values
            needs.setdefault(info.relative_path, {}).setdefault(info.offset, []).append(item)
        for name, items_at in needs.items():
            if self._blocks is not None and not all((name, s) in self._blocks for s in items_at):
                raise CheckpointError(f"{self._folder / name} is not in the manifest.")
            with versions.regular_file(self._folder / name).open("rb", buffering=0) as file:
                _advise_disk(file, "POSIX_FADV_SEQUENTIAL", 0, 0)  # increases the read-ahead
                for start in sorted(items_at):
                    self._load_block(file, name, start, items_at[start], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _load_block(
        self,
        file: io.FileIO,
        name: str,
        start: int,
        items: Sequence[ReadItem],
        planner: LoadPlanner,
    ) -> None:
        """Fill in the needed values of a block; only the needed rows are kept in memory."""
        info = self.storage_data[items[0].storage_index]
        length = info.length if self._blocks is None else self._blocks[name, start][0]
        if items[0].type == LoadItemType.BYTE_IO:
            data = memoryview(bytearray(length))
            self._read(file, name, start, [data])
            for item in items:
                planner.load_bytes(item, io.BytesIO(data))
            return
        dtype, sizes = self._saved_as(items[0])
        num_bytes = sizes.numel() * dtype.itemsize
        offset = _offset_of_values(file, start, length, num_bytes, self._blocks is not None)
        if offset == -1:
            self._load_whole(file, start, length, items, planner)
            return
        if offset is None:
            self._read(file, name, start, [length])
            raise CheckpointError(
                f"{self._folder / name} has other values at byte {start} than in its metadata."
            )
        targets = [planner.resolve_tensor(item).detach() for item in items]
        rows = _rows_of(items, sizes)
        row_bytes = num_bytes // max(sizes[0], 1) if sizes else num_bytes
        num_kept = len(rows) * row_bytes
        is_direct = len(items) == 1 and _is_direct(items[0], targets[0], dtype, sizes)
        if not is_direct and self._buffer.numel() < num_kept:
            self._buffer = torch.empty(num_kept, dtype=torch.uint8)
        values = targets[0].view(-1).view(torch.uint8) if is_direct else self._buffer[:num_kept]
        memory: Any = values.numpy()
        before = offset + rows.start * row_bytes
        parts: list[memoryview | int] = [before, memoryview(memory), length - before - num_kept]
        self._read(file, name, start, parts)
        if not is_direct:
            saved = values.view(dtype).view(len(rows), *sizes[1:]) if sizes else values.view(dtype)
            for item, target in zip(items, targets, strict=True):
                if not sizes:
                    target.copy_(saved.view(()))
                    continue
                offsets = [item.storage_offsets[0] - rows.start, *item.storage_offsets[1:]]
                target.copy_(narrow_tensor_by_index(saved, offsets, item.lengths))
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)

    def _load_whole(
        self,
        file: io.FileIO,
        start: int,
        length: int,
        items: Sequence[ReadItem],
        planner: LoadPlanner,
    ) -> None:
        """Fill in the needed values of a tensor that is not saved row by row."""
        view = cast(IO[bytes], _create_file_view(file, start, length))
        saved = torch.load(view, map_location="cpu", weights_only=True)
        for item in items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(narrow_tensor_by_index(saved, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)

    def _saved_as(self, item: ReadItem) -> tuple[torch.dtype, torch.Size]:
        index = item.storage_index
        metadata = self.read_metadata().state_dict_metadata[index.fqn]
        assert isinstance(metadata, TensorStorageMetadata)
        sizes = next(c.sizes for c in metadata.chunks if c.offsets == index.offset)
        return metadata.properties.dtype, sizes

    def _read(
        self, file: io.FileIO, name: str, start: int, parts: Sequence[memoryview | int]
    ) -> None:
        """Read a block into memory in consecutive pieces, and check its CRC.

        Args:
            file: File with the block.
            name: Name of the file.
            start: Position of the block.
            parts: Buffers to fill, or numbers of bytes to use for the CRC only.
        """
        file.seek(start)
        crc = length = 0
        for part in parts:
            if isinstance(part, int) and self._blocks is None:
                file.seek(part, os.SEEK_CUR)
                length += part
                continue
            size = part if isinstance(part, int) else len(part)
            end = 0
            while end < size:
                step = min(size - end, _PIECE_BYTES)
                piece = self._unused[:step] if isinstance(part, int) else part[end : end + step]
                count = file.readinto(piece)
                if not count:
                    break
                if self._blocks is not None:
                    crc = crc32(piece[:count], crc)
                end += count
            length += end
        if self._blocks is not None:
            self._check(name, start, (length, crc), self._blocks[name, start])
        elif length < sum(part if isinstance(part, int) else len(part) for part in parts):
            raise CheckpointError(f"{self._folder / name} is damaged: it ends too early.")

    def _check(
        self, name: str, start: int, found: tuple[int, int], expected: tuple[int, int]
    ) -> None:
        if found != expected:
            raise CheckpointError(
                f"{self._folder / name} is damaged: the block at byte {start} has {found[0]} bytes "
                f"with CRC {found[1]:08x}; the manifest has {expected[0]} with {expected[1]:08x}."
            )


def _blocks_of(files: Files) -> dict[tuple[str, int], tuple[int, int]]:
    """Return `(bytes, CRC)` of each block by file and first byte."""
    return {
        (name, start): (length, crc)
        for name, blocks in files.items()
        for start, (length, crc) in zip(
            accumulate((length for length, _ in blocks), initial=0), blocks, strict=False
        )
    }


def _rows_of(items: Sequence[ReadItem], sizes: torch.Size) -> range:
    """Return the range of needed rows of a block."""
    if not sizes:
        return range(1)
    first = min(item.storage_offsets[0] for item in items)
    return range(first, max(item.storage_offsets[0] + item.lengths[0] for item in items))


def _is_direct(item: ReadItem, target: Tensor, dtype: torch.dtype, sizes: torch.Size) -> bool:
    """Return whether rows of a block can be read directly into the target tensor."""
    return (
        target.device.type == "cpu"
        and target.is_contiguous()
        and target.dtype == dtype
        and target.shape == item.lengths
        and item.lengths[1:] == sizes[1:]
    )


def _offset_of_values(
    file: io.FileIO, start: int, length: int, num_bytes: int, is_ours: bool
) -> int | None:
    """Return the position of the values in a block; None, or any position, if the block is damaged.

    A block is an archive of `torch.save`, in which the bytes of the values are one record. -1 if
    they are not stored row by row, as in a transposed tensor of another writer.
    """
    try:
        view = cast(IO[bytes], _create_file_view(file, start, length))
        archive: Any = torch._C.PyTorchFileReader(view)
        if not is_ours and not _is_in_order(archive.get_record("data.pkl")):
            return -1
        first = archive.get_record_offset("data/0")
    except (RuntimeError, OSError):
        return None
    return first if first <= length - num_bytes else None


def _is_in_order(pickled: bytes) -> bool:
    """Return whether a saved tensor fills its storage in row-major order from the first byte."""
    try:
        offset, sizes, strides = _LayoutUnpickler(pickled).load()
    except (pickle.UnpicklingError, ValueError, TypeError):
        return False
    expected = torch.empty(sizes, device="meta").stride()
    return offset == 0 and tuple(strides) == expected


class _LayoutUnpickler(KnownUnpickler):
    """Unpickler that reads only offset, sizes and strides of a saved tensor."""

    def __init__(self, data: bytes) -> None:
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): lambda _, *layout: layout[:3],
            ("collections", "OrderedDict"): dict,
        }
        super().__init__(data, known, "{} is not a plain tensor")

    def find_class(self, module: str, name: str) -> Any:
        """Return None for any type of storage."""
        return None if name.endswith("Storage") else super().find_class(module, name)

    def persistent_load(self, _: object) -> None:
        """Return no storage."""
