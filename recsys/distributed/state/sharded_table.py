"""A whole table in a state dict; this rank holds some of its shards.

Shape and state dict name equal the unsharded table's, so a checkpoint does not depend on the plan.
`torch.distributed.checkpoint` saves and loads it natively: it requests chunks by the three methods
below, and reads all saved chunks that overlap them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from recsys.distributed.placement.layout import Rect
from recsys.distributed.placement.plan import ShardMetadata
from recsys.distributed.placement.strategies import placement
from recsys.distributed.ranks.comm import gather_objects
from recsys.distributed.state.table_operations import (
    Part,
    is_by_element,
    is_reduction,
    like_of,
    reduce_parts,
    written_argument,
)

_aten = torch.ops.aten


@final
@dataclass(slots=True, eq=False)
class Shard:
    """A shard of a table on one rank. It can be unpacked: `offsets, tensor = shard`.

    Args:
        tensor: The values.
        metadata: Position in the table, and rank.

    Raises:
        ValueError: The tensor's shape differs from the metadata.

    Example:
        >>> shard = Shard.from_tensor_and_offsets(torch.ones(2, 4), [6, 0], rank=3)
        >>> shard.metadata.shard_sizes, shard.metadata.rank, shard.offsets
        ([2, 4], 3, (6, 0))
    """

    tensor: Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        if list(self.tensor.shape) != self.metadata.shard_sizes:
            raise ValueError(
                f"Shard.tensor must have the shape of its metadata, {self.metadata.shard_sizes}; "
                f"received {list(self.tensor.shape)}."
            )

    @classmethod
    def from_tensor_and_offsets(cls, tensor: Tensor, shard_offsets: list[int], rank: int) -> Shard:
        """Make the shard of a rank.

        Args:
            tensor: The values.
            shard_offsets: First row and column in the table.
            rank: The owner; its device is the tensor's.
        """
        place = f"rank:{rank}/{tensor.device}"
        return cls(tensor, ShardMetadata(shard_offsets, list(tensor.shape), place))

    @property
    def offsets(self) -> tuple[int, ...]:
        """First row and column; for row-wise states the first row."""
        return tuple(self.metadata.shard_offsets)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.offsets, self.tensor))


@final
@dataclass
class ShardedTensorMetadata:
    """Description of a table without its values.

    Args:
        shards_metadata: Shards on all ranks.
        size: Shape of the whole table.
        tensor_properties: Dtype of the table.
    """

    shards_metadata: list[ShardMetadata] = field(default_factory=list)
    size: torch.Size = field(default_factory=torch.Size)
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)


@final
@dataclass(frozen=True, slots=True)
class _Owners:
    """The ranks of a table, shared by its copies."""

    group: torch.distributed.ProcessGroup | None
    rects: Sequence[Rect]
    node_size: int

    def __deepcopy__(self, memo: dict[int, Any]) -> _Owners:
        return self


@final
class ShardedTable(Tensor):
    """A table, or a state of its optimizer, with some of its shards on this rank.

    It has the shape and dtype of the whole table but no storage of its own; `local_shards` are live
    views of this rank's weights. Three kinds of operations are defined:

    - Elementwise, each rank on its shards, without communication: `clone`, `half`, `to`,
      `isfinite`, `zeros_like`, `mul_`, `table == other`, ... The other tensors have the same
      shards, or are plain tensors of the whole table. The result is a ShardedTable.
    - Reductions to one value: `norm`, `sum`, `mean`, `max`, `min`, `all`, `any`, `torch.equal`,
      `torch.allclose`. The ranks exchange partial results, so every rank must call them; the result
      is the same on every rank.
    - Gathers of the whole: `full_tensor()`, or `tensor.copy_(table)`. Every rank must call them.

    All others, such as views and products of matrices, raise NotImplementedError.

    Args:
        size: Shape of the whole, `[rows, columns]` or, for row-wise states, `[rows]`.
        shards: `(offsets, tensor)` of each shard on this rank. Shards may repeat, on one rank or on
            several (every column owner has a row-wise state): one is saved, all are loaded.
        dtype: Dtype of the shards.
        device: Device of the shards.
        group: Ranks with the other shards; None for one rank.
        rects: Shards of all ranks, if known.
        node_size: Ranks per node; with `rects`.

    Example:
        >>> parts = [((0, 0), torch.ones(1, 2)), ((1, 0), torch.zeros(2, 2))]
        >>> table = ShardedTable((3, 2), parts, dtype=torch.float32, device=torch.device("cpu"))
        >>> table.half()
        ShardedTable((3, 2), torch.float16, this rank holds (1, 2) at (0, 0), (2, 2) at (1, 0))
        >>> (table * 3).sum()
        tensor(6.)
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _shards: list[Part]
    _owners: _Owners

    @staticmethod
    def __new__(  # noqa: D102
        cls,
        size: Sequence[int],
        shards: Iterable[Shard | Part],
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: torch.distributed.ProcessGroup | None = None,
        rects: Sequence[Rect] = (),
        node_size: int = 1,
    ) -> ShardedTable:
        table: ShardedTable = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(size), dtype=dtype, device=device
        )
        table._shards = [(tuple(offsets), tensor.detach()) for offsets, tensor in shards]
        table._owners = _Owners(group, rects, node_size)
        return table

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `__new__` sets everything."""

    @property
    def group(self) -> torch.distributed.ProcessGroup | None:
        """Ranks with the other shards; None for one rank."""
        return self._owners.group

    def local_shards(self) -> list[Shard]:
        """Return this rank's shards as live views; each unpacks to (offsets, tensor)."""
        rank = 0 if self.group is None else self.group.rank()
        return [
            Shard.from_tensor_and_offsets(tensor, list(offsets), rank)
            for offsets, tensor in self._shards
        ]

    def local_tensor(self) -> Tensor:
        """Return this rank's only shard, as a live view.

        Raises:
            NotImplementedError: This rank has none, or several: call `local_shards`.
        """
        if len(self._shards) != 1:
            raise NotImplementedError(
                f"ShardedTable.local_tensor is for a rank with one part; received {self}. Call "
                "local_shards()."
            )
        return self._shards[0][1]

    def metadata(self) -> ShardedTensorMetadata:
        """Return shards of all ranks, shape and dtype, without communication.

        For a table that was made by hand, without `rects`, the shards are this rank's.
        """
        parts = [
            ShardMetadata(
                [*rect.offsets[: self.dim()]],
                [*rect.shape[: self.dim()]],
                placement(self.device.type, rect.rank, self._owners.node_size),
            )
            for rect in self._owners.rects
        ]
        return ShardedTensorMetadata(
            parts or [shard.metadata for shard in self.local_shards()],
            self.shape,
            TensorProperties(dtype=self.dtype),
        )

    def _replace_values(self, parts: Sequence[Tensor], like: Tensor) -> ShardedTable:
        """Return a table with other values for the same shards, with another's dtype and device."""
        offsets = (offsets for offsets, _ in self._shards)
        owners = self._owners
        return ShardedTable(
            self.shape, zip(offsets, parts, strict=True), dtype=like.dtype, device=like.device,
            group=owners.group, rects=owners.rects, node_size=owners.node_size,
        )  # fmt: skip

    def full_tensor(self) -> Tensor:
        """Gather the whole on every rank. Every rank must call it.

        Returns:
            A new tensor of the whole's shape, on the shards' device.

        Raises:
            ValueError: No rank holds some shard.
        """
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if self.is_meta:
            return whole
        filled = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
        mine = [(offsets, tensor.cpu()) for offsets, tensor in self._shards]
        for shards in gather_objects(self.group, "gather a table", mine):
            for offsets, tensor in shards:
                whole[_region(offsets, tensor)] = tensor.to(self.device)
                filled[_region(offsets, tensor)] = True
        if not bool(filled.all()):
            raise ValueError(
                f"{self!r} cannot be gathered: no process of its group holds the other parts. "
                "A ShardedTable that was pickled has lost its group."
            )
        return whole

    def gather(  # type: ignore[override]
        self, dst: int = 0, out: Tensor | None = None
    ) -> None:
        """Gather the whole into a tensor on one rank. Every rank must call it.

        Args:
            dst: The rank, within the group of the shards.
            out: On that rank, a tensor of the whole's shape; ignored on other ranks.

        Raises:
            ValueError: `out` is missing on `dst`, or no rank holds some shard.
        """
        whole = self.full_tensor()
        if self.group is None or self.group.rank() == dst:
            if out is None:
                raise ValueError(
                    f"ShardedTable.gather needs out, a tensor of shape {list(self.shape)}, on rank "
                    f"{dst}; received None."
                )
            out.detach().copy_(whole)

    def copy_(self, source: Tensor, non_blocking: bool = False) -> ShardedTable:
        """Copy this rank's shards from a whole table, or from a table with the same shards.

        Args:
            source: A plain tensor of the whole's shape, or a ShardedTable with the same shards.
            non_blocking: As in `Tensor.copy_`.

        Raises:
            ValueError: Shapes differ, or the shards have other offsets.
        """
        if source.shape != self.shape:
            raise ValueError(
                f"source must have the table's shape, {tuple(self.shape)}; received one of shape "
                f"{tuple(source.shape)}."
            )
        if isinstance(source, ShardedTable):
            shard_offsets, others = ([o for o, _ in table._shards] for table in (self, source))
            if shard_offsets != others:
                raise ValueError(
                    f"source must have the parts at {shard_offsets} on this rank; received "
                    f"{others}. To load under another plan, save and load with "
                    "torch.distributed.checkpoint."
                )
            for (_, tensor), (_, values) in zip(self._shards, source._shards, strict=True):
                if tensor.data_ptr() != values.data_ptr():  # otherwise they were filled in place
                    tensor.copy_(values, non_blocking=non_blocking)
        else:
            for offsets, tensor in self._shards:
                tensor.copy_(source[_region(offsets, tensor)], non_blocking=non_blocking)
        return self

    def share_memory_(self) -> ShardedTable:
        """Move this rank's shards to shared memory."""
        for _, tensor in self._shards:
            tensor.share_memory_()
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        parts = ", ".join(f"{tuple(t.shape)} at {o}" for o, t in self._shards) or "nothing"
        return f"ShardedTable({tuple(self.shape)}, {self.dtype}, this rank holds {parts})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        rects, node_size = self._owners.rects, self._owners.node_size
        state = tuple(self.shape), self._shards, self.dtype, self.device, rects, node_size
        return _rebuild, state

    def __copy__(self) -> ShardedTable:
        return self._replace_values([tensor for _, tensor in self._shards], self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTable:
        return self._replace_values([tensor.clone() for _, tensor in self._shards], self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        table = next((v for v in (*args, *kwargs.values()) if isinstance(v, ShardedTable)), None)
        first, *rest = args or (None,)
        if isinstance(table, ShardedTable) and isinstance(func, OpOverload):
            if func is _aten.copy_.default and first is not table:
                return first.copy_(table.full_tensor())
            if func is _aten.equal.default:
                return first.shape == rest[0].shape and bool((first == rest[0]).all())
            if func is _aten.allclose.default:
                return bool(torch.isclose(*args, **kwargs).all())
            if func is _aten.is_pinned.default:
                return all(tensor.is_pinned() for _, tensor in table._shards)
            if first is table and is_reduction(func, args, kwargs):
                return reduce_parts(func, table._shards, table, table.group, rest, kwargs)
            like = like_of(func)
            if like is not None and table.shape == torch.Size(rest[0]):
                return table._by_element(like, (table, *rest[1:]), kwargs)
            if like is not None:
                return func(table._no_values(), *rest, **kwargs)
            written = written_argument(func, args, kwargs)
            if is_by_element(func) and (written is None or isinstance(written, ShardedTable)):
                return table._by_element(func, args, kwargs)
        raise NotImplementedError(
            f"{func} is not defined on a ShardedTable: this rank holds only parts of it. "
            "Use full_tensor() or tensor.copy_(table) to gather the whole, or local_shards()."
        )

    def _no_values(self) -> Tensor:
        return torch.empty((0,) * self.dim(), dtype=self.dtype, device=self.device)

    def _check_fits(self, func: OpOverload, other: Tensor) -> None:
        """Raise unless an elementwise operation can use another tensor."""
        if not isinstance(other, ShardedTable):
            try:
                other.broadcast_to(self.shape)
            except RuntimeError:
                raise ValueError(
                    f"{func} takes {self} and tensors that broadcast to its shape; received one "
                    f"of shape {tuple(other.shape)}."
                ) from None
            return
        shards, others = (
            (table.shape, [(offsets, tensor.shape) for offsets, tensor in table._shards])
            for table in (self, other)
        )
        if shards != others:
            raise ValueError(
                f"{func} takes tables with the same parts on this rank; received {self} and "
                f"{other}. Gather one of them with full_tensor() on every rank."
            )

    def _by_element(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Apply an operation to each shard, and to the same positions of the other arguments."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                self._check_fits(func, value)
        written = written_argument(func, args, kwargs)
        results: list[Any] = []
        done: set[tuple[tuple[int, ...], int]] = set()
        parts = self._shards or [((0,) * self.dim(), self._no_values())]
        for place, (offsets, tensor) in enumerate(parts):
            if isinstance(written, ShardedTable) and written._shards:
                storage = offsets, written._shards[place][1].data_ptr()
                if storage in done:
                    continue  # a shard that is listed twice
                done.add(storage)

            def here(value: Any, place: int = place, part: Part = (offsets, tensor)) -> Any:
                if isinstance(value, ShardedTable):
                    return value._shards[place][1] if value._shards else value._no_values()
                if isinstance(value, Tensor) and value.dim():
                    return value.broadcast_to(self.shape)[_region(*part)]
                return value

            named = {name: here(value) for name, value in kwargs.items()}
            results.append(func(*map(here, args), **named))
        if written is not None:
            return written if func._schema.returns else None
        return self._replace_values(results if self._shards else [], results[0])

    # -- torch.distributed.checkpoint ------------------------------------------------------------

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        distinct = {chunk.offsets: chunk for chunk in self.__create_chunk_list__()}
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for offsets, chunk in distinct.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=tensor.shape)
            for offsets, tensor in self._shards
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        # the index is a hint: a position among the chunks of this rank or of all ranks. It
        # distinguishes repeated shards.
        if index.index is not None and index.index < len(self._shards):
            offsets, tensor = self._shards[index.index]
            if index.offset is None or index.offset == torch.Size(offsets):
                return tensor
        for offsets, tensor in self._shards:
            if index.offset == torch.Size(offsets):
                return tensor
        raise ValueError(f"{index.fqn} has no part at {index.offset} on this rank; it has {self}.")


def _region(offsets: tuple[int, ...], tensor: Tensor) -> tuple[slice, ...]:
    return tuple(slice(o, o + size) for o, size in zip(offsets, tensor.shape, strict=True))


def _rebuild(
    size: tuple[int, ...],
    shards: list[Part],
    dtype: torch.dtype,
    device: torch.device,
    rects: Sequence[Rect] = (),
    node_size: int = 1,
) -> ShardedTable:
    return ShardedTable(size, shards, dtype=dtype, device=device, rects=rects, node_size=node_size)
