"""Writes and reads the blocks of a checkpoint, each with its CRC.

A block is one value, or one rank's part of one. The files are those of
``torch.distributed.checkpoint`` (which can read them, too): blocks in a row, each as ``torch.save``
writes it. How long they are and what their CRCs are is in the manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import uuid
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, cast
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
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
from torch.futures import Future

from recsys.distributed.checkpoint import versions
from recsys.distributed.checkpoint.errors import CheckpointError
from recsys.distributed.checkpoint.metadata import decode_metadata

METADATA = ".metadata"
_PIECE_BYTES = 1 << 20  # what is read at a time: small enough to be in cache when its CRC is taken

Files = Mapping[str, Sequence[Sequence[int]]]
"""For each file of a version ``[bytes, CRC]`` of its blocks, in their order."""


class BlockWriter(FileSystemWriter):
    """Writes a version: every rank its blocks, then rank 0 metadata and manifest.

    Args:
        folder: of the version; it exists.
        about: further members of the manifest; read on rank 0.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        super().__init__(folder)
        self._folder = folder
        self._about = about

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns it as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Names each rank's file; no rank left over from another save has one of that name."""
        save = uuid.uuid4().hex[:8]
        return [
            dataclasses.replace(plan, storage_data=f"{save}-rank-{rank}.distcp")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's blocks; returns, once they are on the disk, where and their CRCs."""
        results: list[WriteResult] = []
        if plan.items:
            with (self._folder / plan.storage_data).open("xb") as file, _without_zip_crc():
                for item in plan.items:
                    data = planner.resolve_data(item)
                    results.append(_write_block(file, plan.storage_data, item, data))
                file.flush()
                os.fsync(file.fileno())
            versions.sync_folder(self._folder)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes metadata and manifest, by which the version is complete."""
        files: dict[str, list[tuple[int, int]]] = {}
        written = []
        for result in (result for of_rank in results for result in of_rank):
            info, crc = result.storage_data
            files.setdefault(info.relative_path, []).append((info.length, crc))
            written.append(dataclasses.replace(result, storage_data=info))
        super().finish(metadata, [written])
        data = (self._folder / METADATA).read_bytes()
        files[METADATA] = [(len(data), crc32(data))]
        versions.write_manifest(self._folder, {"files": files, **self._about})


def _write_block(
    file: IO[bytes], name: str, item: WriteItem, data: Tensor | io.BytesIO
) -> WriteResult:
    stream = _CrcStream(file)
    start = file.tell()
    if isinstance(data, io.BytesIO):
        stream.write(data.getbuffer())
    else:
        tensor = data.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # else the whole of what it is a part of would be saved
        try:
            torch.save(tensor, cast(IO[bytes], stream))
        except Exception as error:
            raise stream.error or error from None  # torch forgets that the disk is full
    length = file.tell() - start
    info = _StorageInfo(name, start, length)
    return WriteResult(item.index, length, storage_data=(info, stream.crc))


class _CrcStream(io.RawIOBase):
    """Writes to a file and takes the CRC of what passes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.crc = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.crc = crc32(data, self.crc)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise


@contextlib.contextmanager
def _without_zip_crc() -> Iterator[None]:
    """Has ``torch.save`` leave out its own CRC, which ``torch.load`` does not look at."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class BlockReader(FileSystemReader):
    """Reads a version, or a folder that ``torch.distributed.checkpoint`` wrote.

    Args:
        folder: of the version.
        files: what its manifest says; None for a folder without one, of which nothing is known.
    """

    def __init__(self, folder: Path, files: Files | None) -> None:
        super().__init__(folder)
        self._folder = folder
        self._blocks = None if files is None else _blocks_of(files)
        self._metadata: Metadata | None = None
        self._buffer = bytearray()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns what the version holds.

        Raises:
            CheckpointError: if it is damaged, or no metadata.
        """
        if self._metadata is None:
            data = (self._folder / METADATA).read_bytes()
            if self._blocks is not None:
                length, crc = self._blocks.get((METADATA, 0), (-1, -1))
                self._check(METADATA, 0, (len(data), crc32(data)), (length, crc))
            self._metadata = decode_metadata(str(self._folder / METADATA), data)
            if getattr(self._metadata, "storage_meta", None) is None:
                self._metadata.storage_meta = StorageMeta()
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the blocks that a plan needs, each once, and fills in their values."""
        if self._blocks is None:
            return super().read_data(plan, planner)
        needs: dict[str, dict[int, list[ReadItem]]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            needs.setdefault(info.relative_path, {}).setdefault(info.offset, []).append(item)
        for name, items_at in needs.items():
            if any((name, start) not in self._blocks for start in items_at):
                raise CheckpointError(f"{self._folder / name} is not in the manifest.")
            with (self._folder / name).open("rb", buffering=0) as file:
                for start, items in sorted(items_at.items()):
                    block = self._read_block(file, name, start)
                    for item in items:
                        self._fill(item, block, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_block(self, file: io.FileIO, name: str, start: int) -> memoryview:
        """Returns a block whose CRC is right; the next one overwrites it."""
        assert self._blocks is not None
        length, expected = self._blocks[name, start]
        if len(self._buffer) < length:
            self._buffer = bytearray(length)
        block = memoryview(self._buffer)[:length]
        file.seek(start)
        crc = end = 0
        while end < length:
            count = file.readinto(block[end : end + _PIECE_BYTES])
            if not count:
                break
            crc = crc32(block[end : end + count], crc)
            end += count
        self._check(name, start, (end, crc), (length, expected))
        return block

    def _check(
        self, name: str, start: int, found: tuple[int, int], expected: tuple[int, int]
    ) -> None:
        if found != expected:
            raise CheckpointError(
                f"{self._folder / name} is damaged: the block at byte {start} has {found[0]} bytes "
                f"with CRC {found[1]:08x}; the manifest says {expected[0]} with {expected[1]:08x}."
            )

    def _fill(self, item: ReadItem, block: memoryview, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(block))
            return
        index = item.storage_index
        metadata = self.read_metadata().state_dict_metadata[index.fqn]
        assert isinstance(metadata, TensorStorageMetadata)
        sizes = next(c.sizes for c in metadata.chunks if c.offsets == index.offset)
        saved = _tensor_in(block, metadata.properties.dtype, sizes)
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            saved = saved.narrow(dim, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(saved)
        planner.commit_tensor(item, target)


def _blocks_of(files: Files) -> dict[tuple[str, int], tuple[int, int]]:
    """Returns ``(bytes, CRC)`` of each block by file and first byte."""
    return {
        (name, start): (length, crc)
        for name, blocks in files.items()
        for start, (length, crc) in zip(
            accumulate((length for length, _ in blocks), initial=0), blocks, strict=False
        )
    }


def _tensor_in(block: memoryview, dtype: torch.dtype, sizes: torch.Size) -> Tensor:
    """Returns a view of the values in a block: ``torch.load`` would copy them."""
    if sizes.numel() == 0:
        return torch.empty(sizes, dtype=dtype)
    with zipfile.ZipFile(io.BufferedReader(_View(block))) as archive:
        (record,) = [r for r in archive.infolist() if r.filename.endswith("/data/0")]
    # behind a header of 30 bytes, a name and further fields, as long as bytes 26 to 29 say
    header = block[record.header_offset :]
    start = 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    values = torch.frombuffer(
        header, dtype=torch.uint8, count=sizes.numel() * dtype.itemsize, offset=start
    )
    return values.view(dtype).view(sizes)


class _View(io.RawIOBase):
    """Reads from memory without a copy of all of it."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._memory)}[whence]
        self._at = origin + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        piece = self._memory[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)
