"""Batches of any kind: tensors in containers and dataclasses, changed or moved together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from recsys.kernels import ops

B = TypeVar("B")


def map_batch(batch: B, is_part: Callable[[Any], bool], change: Callable[[Any], Any]) -> B:
    """Change the parts of a batch, in containers and dataclasses of any depth.

    Args:
        batch: what is looked through.
        is_part: says what is changed as a whole.
        change: returns what takes a part's place.
    """

    def changed(value: Any) -> Any:
        if is_part(value):
            return change(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            new = {name: map_batch(field, is_part, change) for name, field in fields.items()}
            return dataclasses.replace(value, **new)
        return value

    result: B = pytree.tree_map(
        changed, batch, is_leaf=lambda value: is_part(value) or dataclasses.is_dataclass(value)
    )
    return result


def to_device(batch: B, device: torch.device, *, non_blocking: bool = False) -> B:
    """Move a batch: whatever in it has a method `to`.

    Args:
        batch: tensors, jagged tensors and the like, in containers and dataclasses, or one of them.
        device: where to.
        non_blocking: whether the host goes on while a GPU copies. Tensors, jagged tensors and
            `Batch` are pinned first where they are not; classes of the user's own see to it in
            their `to`, or have their loader pin them.
    """

    def moved(part: Any) -> Any:
        if isinstance(part, Tensor):
            return ops.copy_to(part, device, non_blocking)
        return part.to(device=device, non_blocking=non_blocking)

    return map_batch(batch, lambda part: callable(getattr(part, "to", None)), moved)


def record_stream(batch: object, stream: torch.Stream) -> None:
    """Keep a batch's memory from being used anew until work that is now in a stream is done.

    Args:
        batch: as for `to_device`.
        stream: where it is used, beside the stream on which it was made.
    """
    map_batch(
        batch,
        lambda part: callable(getattr(part, "record_stream", None)),
        lambda part: part.record_stream(stream),
    )
