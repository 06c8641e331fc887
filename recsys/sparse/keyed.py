"""KeyedTensor: the embeddings of several features, concatenated in one tensor.

Shapes: `B` batch size, `F` keys, `D` columns of all keys together.
"""

import functools
import itertools
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

from recsys.base.arguments import MissingKeyError, wrong_type
from recsys.base.checked import checked, checked_late
from recsys.kernels import ops
from recsys.sparse import validate
from recsys.sparse.bags import check_can_move
from recsys.sparse.per_key_checks import check_derived, check_index_per_key
from recsys.sparse.recorded import recorded
from recsys.sparse.text import format_keyed, show_keyed


class KeyedTensor:
    """Dense tensors by key, concatenated along one dimension, such as pooled embeddings.

    Each key has its own number of columns. `kt["film"]` returns the columns of one key, `to_dict()`
    the columns of all keys, as views; `KeyedTensor.regroup` concatenates keys in a new order.

    Args:
        keys: Unique names, in the order of the columns.
        length_per_key: `F` widths, the number of columns of each key.
        values: `[B, D]`, or any shape whose `key_dim` has size `D`, the sum of the widths.
        key_dim: The dimension along which keys are concatenated.
        offset_per_key: Running sum of `length_per_key`, `F + 1`, if known.
        index_per_key: Position of each key, if known.

    Raises:
        TypeError: If `values` is not a tensor.
        ValueError: If keys repeat, or the sum of the widths is not the size of `key_dim`.

    Example:
        >>> KeyedTensor(["user", "film"], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))["film"]
        tensor([[2., 3.]])
    """

    __slots__ = (
        "__weakref__",
        "_index_per_key",
        "_key_dim",
        "_keys",
        "_length_per_key",
        "_offset_per_key",
        "_values",
    )

    @checked_late
    def __init__(
        self,
        keys: list[str],
        length_per_key: list[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ) -> None:
        is_proxy = validate.is_proxy(values)
        if not is_proxy and not isinstance(values, Tensor):
            raise TypeError(
                f"KeyedTensor.values must be a torch.Tensor; received {type(values).__name__}. "
                "Use KeyedTensor.from_tensor_list for a list of tensors."
            )
        if len(keys) != len(length_per_key):
            raise ValueError(
                "KeyedTensor.length_per_key must have one width per key; received "
                f"{len(length_per_key)} widths for {len(keys)} keys."
            )
        keys = list(keys)
        validate.check_unique("KeyedTensor", keys)
        if isinstance(key_dim, bool):
            wrong_type("KeyedTensor.key_dim", "a whole number", key_dim)
        if not is_proxy and not -values.dim() <= key_dim < values.dim():
            raise ValueError(
                f"KeyedTensor.key_dim must be a dimension of values; received {key_dim} for values "
                f"of shape {tuple(values.shape)}."
            )
        if not is_proxy and sum(length_per_key) != values.shape[key_dim]:
            raise ValueError(
                "KeyedTensor.length_per_key must add up to the size of values along key_dim "
                f"{key_dim}; received widths that add up to {sum(length_per_key)} for values of "
                f"shape {tuple(values.shape)}."
            )
        if offset_per_key is not None:
            bounds = [0, *itertools.accumulate(length_per_key)]
            meaning = "the running sum of length_per_key"
            offsets = list(offset_per_key)
            check_derived("KeyedTensor", "offset_per_key", offsets, bounds, meaning)
        if index_per_key is not None:
            check_index_per_key("KeyedTensor", keys, index_per_key)
        self._keys = keys
        self._length_per_key = list(length_per_key)
        self._values = values
        self._key_dim = key_dim
        self._offset_per_key = offset_per_key
        self._index_per_key = index_per_key

    @staticmethod
    def from_parts(
        keys: list[str], length_per_key: list[int], values: Tensor, key_dim: int = 1
    ) -> "KeyedTensor":
        """Build from consistent parts, without checks, for hot paths.

        Args:
            keys: As for the constructor.
            length_per_key: As for the constructor.
            values: As for the constructor.
            key_dim: As for the constructor.

        Returns:
            The keyed tensor.

        Example:
            >>> KeyedTensor.from_parts(["a"], [2], torch.ones(1, 2)).values()
            tensor([[1., 1.]])
        """
        kt = KeyedTensor.__new__(KeyedTensor)
        kt._keys = keys
        kt._length_per_key = length_per_key
        kt._values = values
        kt._key_dim = key_dim
        kt._offset_per_key = None
        kt._index_per_key = None
        return kt

    @staticmethod
    @recorded
    @checked
    def from_tensor_list(
        keys: list[str], tensors: list[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> "KeyedTensor":
        """Concatenate one tensor per key.

        Args:
            keys: Unique names.
            tensors: One tensor per key, with equal sizes except in `cat_dim`.
            key_dim: The dimension of the keys.
            cat_dim: The dimension to concatenate, usually `key_dim`.

        Returns:
            The keyed tensor.

        Raises:
            ValueError: As the constructor, or the shapes of the tensors differ.

        Example:
            >>> KeyedTensor.from_tensor_list(["a", "b"], [torch.ones(1, 1), torch.zeros(1, 2)])
            KeyedTensor(2 keys, shape (1, 3), float32, cpu)
                "a": [[1.0]]
                "b": [[0.0, 0.0]]
        """
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            _check_shapes(tensors, key_dim, cat_dim)
        widths = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, widths, torch.cat(tensors, dim=cat_dim), key_dim)

    def keys(self) -> list[str]:
        """Return the keys, in the order of the columns."""
        return self._keys

    def values(self) -> Tensor:
        """Return the whole tensor, `[B, D]`."""
        return self._values

    def key_dim(self) -> int:
        """Return the dimension along which keys are concatenated."""
        return self._key_dim

    def length_per_key(self) -> list[int]:
        """Return the width of each key, `F` integers."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return the position of the first column of each key, and the end: `F + 1` integers."""
        if self._offset_per_key is None:
            self._offset_per_key = [0, *itertools.accumulate(self._length_per_key)]
        return self._offset_per_key

    @checked_late
    def __getitem__(self, key: str) -> Tensor:
        """Return the columns of one key, as a view."""
        if self._index_per_key is None:
            self._index_per_key = {name: i for i, name in enumerate(self._keys)}
        index = self._index_per_key.get(key)
        if index is None:
            raise MissingKeyError(f"KeyedTensor has no key {key!r}; received keys {self._keys}.")
        start = self.offset_per_key()[index]
        return self._values.narrow(self._key_dim, start, self._length_per_key[index])

    def to_dict(self) -> dict[str, Tensor]:
        """Return the columns of every key, as views.

        Returns:
            Tensor by key, in order.

        Example:
            >>> KeyedTensor(["a", "b"], [1, 1], torch.ones(1, 2)).to_dict()
            {'a': tensor([[1.]]), 'b': tensor([[1.]])}
        """
        columns = self._values.split_with_sizes(self._length_per_key, self._key_dim)
        return dict(zip(self._keys, columns, strict=True))

    @staticmethod
    @recorded
    @checked_late
    def regroup(keyed_tensors: "list[KeyedTensor]", groups: list[list[str]]) -> list[Tensor]:
        """Concatenate keys of several keyed tensors into new tensors, one per group.

        Args:
            keyed_tensors: Sources with different keys and the same shape otherwise.
            groups: The keys of each result, in order; a key may be in several groups.

        Returns:
            One `[B, sum of widths]` per group; differentiable.

        Raises:
            KeyError: If no source has a key.
            TypeError: If `keyed_tensors` is not a list of keyed tensors, or a group is not a list
                of keys.
            ValueError: If there is no source, two sources have the same key, `key_dim` differs, or
                a group is empty.

        Example:
            >>> kt = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))
            >>> KeyedTensor.regroup([kt], [["b", "a"], ["a"]])
            [tensor([[2., 3., 1.]]), tensor([[1.]])]
        """
        if isinstance(cast(object, keyed_tensors), KeyedTensor):
            subject = "KeyedTensor.regroup: keyed_tensors"
            wrong_type(subject, "a list of KeyedTensors", keyed_tensors)
        key_dims = {kt._key_dim for kt in keyed_tensors}
        if any(isinstance(group, str) for group in [groups, *groups]):
            wrong_type("KeyedTensor.regroup: groups", "a list of lists of keys", groups)
        if len(key_dims) != 1:
            if not keyed_tensors:
                raise ValueError(
                    "KeyedTensor.regroup: keyed_tensors must hold at least one KeyedTensor; "
                    f"received none for the groups {groups}."
                )
            raise ValueError(
                "KeyedTensor.regroup: all sources must have the same key_dim; received "
                f"{[kt._key_dim for kt in keyed_tensors]}."
            )
        (key_dim,) = key_dims
        plan = _plan_regroup(
            tuple(tuple(kt._keys) for kt in keyed_tensors),
            tuple(tuple(kt._length_per_key) for kt in keyed_tensors),
            tuple(map(tuple, groups)),
        )
        return [
            torch.cat(
                [
                    keyed_tensors[source]._values.narrow(key_dim, start, length)
                    for source, start, length in runs
                ],
                dim=key_dim,
            )
            for runs in plan
        ]

    @staticmethod
    @recorded
    @checked_late
    def regroup_as_dict(
        keyed_tensors: "list[KeyedTensor]", groups: list[list[str]], keys: list[str]
    ) -> dict[str, Tensor]:
        """Concatenate keys of several keyed tensors into new tensors, by name.

        Args:
            keyed_tensors: Sources with different keys and the same shape otherwise.
            groups: The keys of each result, in order.
            keys: The name of each result.

        Returns:
            `[B, sum of widths]` by name; differentiable.

        Raises:
            KeyError: As `regroup`.
            ValueError: As `regroup`, and if the numbers of keys and groups differ.

        Example:
            >>> kt = KeyedTensor(["a", "b"], [1, 1], torch.tensor([[1.0, 2.0]]))
            >>> KeyedTensor.regroup_as_dict([kt], [["b", "a"]], ["both"])
            {'both': tensor([[2., 1.]])}
        """
        if len(groups) != len(keys):
            raise ValueError(
                "KeyedTensor.regroup_as_dict: keys must have one name per group; received "
                f"{len(keys)} keys for {len(groups)} groups."
            )
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    @checked_late
    def to(self, device: torch.device | str, non_blocking: bool = False) -> "KeyedTensor":
        """Copy to a device.

        Args:
            device: The target device.
            non_blocking: Do not wait for the copy. Unpinned tensors are pinned first.

        Returns:
            A new keyed tensor.

        Example:
            >>> KeyedTensor(["a"], [2], torch.ones(1, 2)).to("cpu").device()
            device(type='cpu')
        """
        check_can_move("KeyedTensor", self._values, device)
        values = ops.copy_to(self._values, device, non_blocking)
        return KeyedTensor.from_parts(self._keys, self._length_per_key, values, self._key_dim)

    def pin_memory(self) -> "KeyedTensor":
        """Copy to page-locked memory, for asynchronous copies to a GPU."""
        values = self._values.pin_memory()
        return KeyedTensor.from_parts(self._keys, self._length_per_key, values, self._key_dim)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory from reuse until the work queued on a CUDA stream is done."""
        self._values.record_stream(stream)

    def size_in_bytes(self) -> int:
        """Return the size of the values in bytes."""
        return self._values.nbytes

    def __repr__(self) -> str:
        return format_keyed(self)

    def __str__(self) -> str:
        return show_keyed(self)


Run = tuple[int, int, int]
"""Source, first column and width of consecutive columns."""


@functools.lru_cache(maxsize=128)
def _plan_regroup(
    keys_per_source: tuple[tuple[str, ...], ...],
    widths_per_source: tuple[tuple[int, ...], ...],
    groups: tuple[tuple[str, ...], ...],
) -> list[list[Run]]:
    """Return the columns of each group; adjacent columns are merged to one run."""
    where: dict[str, Run] = {}
    repeated: set[str] = set()
    for source, (keys, widths) in enumerate(zip(keys_per_source, widths_per_source, strict=True)):
        start = 0
        for key, width in zip(keys, widths, strict=True):
            if key in where:
                repeated.add(key)
            where[key] = (source, start, width)
            start += width
    wanted = set(itertools.chain.from_iterable(groups))
    missing, ambiguous = sorted(wanted.difference(where)), sorted(wanted & repeated)
    if missing:
        raise MissingKeyError(
            f"KeyedTensor.regroup: no source has the keys {missing}; received sources with the "
            f"keys {sorted(where)}."
        )
    if ambiguous:
        raise ValueError(
            f"KeyedTensor.regroup: a key must be in one source only; received {ambiguous} in "
            "several. Rename the keys of one source."
        )
    if not all(groups):
        raise ValueError(
            f"KeyedTensor.regroup: every group needs at least one key; received {list(groups)}."
        )
    return [_merge_runs(where[key] for key in group) for group in groups]


def _merge_runs(runs: Iterable[Run]) -> list[Run]:
    merged: list[Run] = []
    for source, start, width in runs:
        if merged and merged[-1][0] == source and sum(merged[-1][1:]) == start:
            start, width = merged[-1][1], merged[-1][2] + width
            merged.pop()
        merged.append((source, start, width))
    return merged


def _check_shapes(tensors: list[Tensor], key_dim: int, cat_dim: int) -> None:
    """Check the tensors of `KeyedTensor.from_tensor_list`."""
    sizes = {_sizes_but(tensor, cat_dim, key_dim) for tensor in tensors}
    if None in sizes or len(sizes) != 1:
        raise ValueError(
            f"KeyedTensor.from_tensor_list: tensors must have the dimensions key_dim={key_dim} and "
            f"cat_dim={cat_dim}, and equal sizes in all but cat_dim; received tensors of the "
            f"shapes {[tuple(tensor.shape) for tensor in tensors]}."
        )


def _sizes_but(tensor: Tensor, cat_dim: int, key_dim: int) -> tuple[int, ...] | None:
    """Return the sizes of a tensor without `cat_dim`; None if it lacks one of the dimensions."""
    dim = tensor.dim()
    if not (-dim <= cat_dim < dim and -dim <= key_dim < dim):
        return None
    return (*tensor.shape[: cat_dim % dim], *tensor.shape[cat_dim % dim + 1 :])
