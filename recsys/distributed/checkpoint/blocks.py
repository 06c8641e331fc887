"""Writes and reads the blocks of a checkpoint, each with its CRC.

A block is one value, or one rank's part of one. The files are those of
`torch.distributed.checkpoint` (which can read them, too): blocks in a row, each as `torch.save`
writes it. How long they are and what their CRCs are is in the manifest.
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
from recsys.distributed.checkpoint.metadata import decode_metadata
from recsys.distributed.checkpoint.plain import KnownUnpickler

METADATA = ".metadata"
_PIECE_BYTES = 1 << 20  # read or written at a time: still in cache when its CRC was taken
_AHEAD_BYTES = 8 << 20  # after so many the disk begins, rather than at fsync

Files = Mapping[str, Sequence[Sequence[int]]]
"""For each file of a version `[bytes, CRC]` of its blocks, in their order."""


class BlockWriter(FileSystemWriter):
    """Writes a version: every rank its blocks, then rank 0 metadata and manifest.

    Args:
        folder: of the version; it exists.
        about: further members of the manifest; read on rank 0.
        then: called on rank 0 with the folder and what the manifest says of its files, before the
            version is complete.
    """

    def __init__(
        self,
        folder: Path,
        about: Mapping[str, Any],
        then: Callable[[Path, Files], None] | None = None,
    ) -> None:
        super().__init__(folder)
        self._folder = folder
        self._about = about
        self._then = then

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return it as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Names each rank's file; no rank left over from another save has one of that name."""
        save = uuid.uuid4().hex[:8]
        return [
            dataclasses.replace(plan, storage_data=f"{save}-rank-{rank}.distcp")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's blocks; return, once they are on the disk, where and their CRCs."""
        results: list[WriteResult] = []
        if plan.items:
            # torch.load looks at no CRC of its own
            without_zip_crc = cast(Any, config).patch("save.compute_crc32", False)
            with (self._folder / plan.storage_data).open("xb") as file, without_zip_crc:
                sent = 0
                for item in plan.items:
                    data = planner.resolve_data(item)
                    results.append(_write_block(file, plan.storage_data, item, data))
                    if file.tell() - sent >= _AHEAD_BYTES:
                        _tell_disk(file, "POSIX_FADV_DONTNEED", sent, file.tell() - sent)
                        sent = file.tell()
                file.flush()
                os.fsync(file.fileno())
            versions.sync_folder(self._folder)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata and manifest, by which the version is complete."""
        files: dict[str, list[tuple[int, int]]] = {}
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


def _tell_disk(file: IO[bytes] | io.FileIO, what: str, start: int, length: int) -> None:
    """Say what a file's bytes are needed for, where that can be said."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(file.fileno(), start, length, getattr(os, what))


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
            torch.save(_without_surroundings(tensor), cast(IO[bytes], stream))
        except Exception as error:
            raise stream.error or error from None  # torch replaces what the stream raised
    length = file.tell() - start
    info = _StorageInfo(name, start, length)
    return WriteResult(item.index, length, storage_data=(info, stream.crc))


def _without_surroundings(tensor: Tensor) -> Tensor:
    """Return a tensor whose storage ends where it ends: `torch.save` writes whole storages."""
    start = tensor.storage_offset() * tensor.element_size()
    own = tensor.untyped_storage()[start : start + tensor.nbytes]  # shares the memory
    return torch.empty(0, dtype=tensor.dtype).set_(own, 0, tensor.shape, tensor.stride())


class _CrcStream(io.RawIOBase):
    """Writes to a file and takes the CRC of what passes."""

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
        except BaseException as error:  # also an interrupt, which torch would replace as well
            self.error = error
            raise
        return len(rest)


class BlockReader(FileSystemReader):
    """Reads a version, or a folder that `torch.distributed.checkpoint` wrote.

    Args:
        folder: of the version.
        files: what its manifest says; None for a folder without one, of which nothing is known.
    """

    def __init__(self, folder: Path, files: Files | None) -> None:
        super().__init__(folder)
        self._folder = folder
        self._blocks = None if files is None else _blocks_of(files)
        self._metadata: Metadata | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._unused = memoryview(bytearray(_PIECE_BYTES))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the version holds.

        Raises:
            CheckpointError: if it is damaged, or no metadata.
        """
        if self._metadata is None:
            data = versions.regular_file(self._folder / METADATA).read_bytes()
            if self._blocks is not None:
                length, crc = self._blocks.get((METADATA, 0), (-1, -1))
                self._check(METADATA, 0, (len(data), crc32(data)), (length, crc))
            self._metadata = decode_metadata(str(self._folder / METADATA), data)
            if getattr(self._metadata, "storage_meta", None) is None:
                self._metadata.storage_meta = StorageMeta()
        return self._metadata

    def rename(self, names: Mapping[str, str]) -> None:
        """Have values go by other names from now on.

        Args:
            names: by the one that the checkpoint has.
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
        """Read the blocks that a plan needs, each once, and fill in their values."""
        needs: dict[str, dict[int, list[ReadItem]]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            if self._blocks is None and getattr(info, "transform_descriptors", None):
                return super().read_data(plan, planner)  # such as compressed ones
            needs.setdefault(info.relative_path, {}).setdefault(info.offset, []).append(item)
        for name, items_at in needs.items():
            if self._blocks is not None and any(
                (name, start) not in self._blocks for start in items_at
            ):
                raise CheckpointError(f"{self._folder / name} is not in the manifest.")
            with versions.regular_file(self._folder / name).open("rb", buffering=0) as file:
                _tell_disk(file, "POSIX_FADV_SEQUENTIAL", 0, 0)  # it reads farther ahead
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
        """Fill in what is needed of a block; of its rows only those are kept."""
        length = self._length(name, start, items[0])
        if items[0].type == LoadItemType.BYTE_IO:
            data = memoryview(bytearray(length))
            self._read(file, name, start, [data])
            for item in items:
                planner.load_bytes(item, io.BytesIO(data))
            return
        dtype, sizes = self._saved_as(items[0])
        num_bytes = sizes.numel() * dtype.itemsize
        place = _place_of_values(file, start, length, num_bytes, self._blocks is not None)
        if place == -1:
            self._load_whole(file, start, length, items, planner)
            return
        if place is None:
            self._read(file, name, start, [length])
            raise CheckpointError(
                f"{self._folder / name} does not hold at byte {start} what its metadata says."
            )
        targets = [planner.resolve_tensor(item).detach() for item in items]
        rows = _rows_of(items, sizes)
        row_bytes = num_bytes // max(sizes[0], 1) if sizes else num_bytes
        num_kept = len(rows) * row_bytes
        is_direct = len(items) == 1 and _lies_alike(items[0], targets[0], dtype, sizes)
        if not is_direct and self._buffer.numel() < num_kept:
            self._buffer = torch.empty(num_kept, dtype=torch.uint8)
        values = targets[0].view(-1).view(torch.uint8) if is_direct else self._buffer[:num_kept]
        memory: Any = values.numpy()
        before = place + rows.start * row_bytes
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
        """Fill in what is needed of a tensor that is not saved row by row."""
        view = cast(IO[bytes], _create_file_view(file, start, length))
        saved = torch.load(view, map_location="cpu", weights_only=True)
        for item in items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(narrow_tensor_by_index(saved, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)

    def _length(self, name: str, start: int, item: ReadItem) -> int:
        if self._blocks is not None:
            return self._blocks[name, start][0]
        length: int = self.storage_data[item.storage_index].length
        return length

    def _saved_as(self, item: ReadItem) -> tuple[torch.dtype, torch.Size]:
        index = item.storage_index
        metadata = self.read_metadata().state_dict_metadata[index.fqn]
        assert isinstance(metadata, TensorStorageMetadata)
        sizes = next(c.sizes for c in metadata.chunks if c.offsets == index.offset)
        return metadata.properties.dtype, sizes

    def _read(
        self, file: io.FileIO, name: str, start: int, parts: Sequence[memoryview | int]
    ) -> None:
        """Read a block into memory, part by part, and check its CRC.

        Args:
            file: that has the block.
            name: of the file.
            start: of the block in it.
            parts: memory to fill, or how many bytes are of no interest but for the CRC.
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
                f"with CRC {found[1]:08x}; the manifest says {expected[0]} with {expected[1]:08x}."
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
    """Return the rows of a block from the first to the last that is needed."""
    if not sizes:
        return range(1)
    first = min(item.storage_offsets[0] for item in items)
    return range(first, max(item.storage_offsets[0] + item.lengths[0] for item in items))


def _lies_alike(item: ReadItem, target: Tensor, dtype: torch.dtype, sizes: torch.Size) -> bool:
    """Return whether rows of a block can be read right into the memory that they are for."""
    return (
        target.device.type == "cpu"
        and target.is_contiguous()
        and target.dtype == dtype
        and target.shape == item.lengths
        and item.lengths[1:] == sizes[1:]
    )


def _place_of_values(
    file: io.FileIO, start: int, length: int, num_bytes: int, is_ours: bool
) -> int | None:
    """Return where in a block the values begin; None, or anywhere, if the block is damaged.

    A block is the archive that `torch.save` writes; the bytes of the values are one record of it.
    -1 if they are not there row by row, as of a transposed tensor that someone else saved.
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
    """Return whether a saved tensor is its storage, row by row."""
    try:
        offset, sizes, strides = _LayoutUnpickler(pickled).load()
    except (pickle.UnpicklingError, ValueError, TypeError):
        return False
    expected = torch.empty(sizes, device="meta").stride()
    return offset == 0 and tuple(strides) == expected


class _LayoutUnpickler(KnownUnpickler):
    """Reads of a saved tensor's pickle only where in the storage its values are."""

    def __init__(self, data: bytes) -> None:
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): lambda _, *layout: layout[:3],
            ("collections", "OrderedDict"): dict,
        }
        super().__init__(data, known, "{} is no plain tensor")

    def find_class(self, module: str, name: str) -> Any:
        """Return anything for a kind of storage."""
        return None if name.endswith("Storage") else super().find_class(module, name)

    def persistent_load(self, _: object) -> None:
        """Return no storage."""
