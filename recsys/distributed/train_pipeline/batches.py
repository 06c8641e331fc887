"""Batches of any structure: change or move the tensors in containers and dataclasses."""

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
        batch: The batch.
        is_part: Whether a value is a part to change.
        change: Function from a part to its replacement.
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
    """Move every part of a batch that has a method `to`.

    Args:
        batch: Tensors, jagged tensors and similar values, in containers and dataclasses.
        device: The target device.
        non_blocking: Whether the host continues while a GPU copies. Tensors, jagged tensors and
            `Batch` are pinned first if needed. Other classes pin in their `to` or in the loader.
    """

    def moved(part: Any) -> Any:
        if isinstance(part, Tensor):
            return ops.copy_to(part, device, non_blocking)
        return part.to(device=device, non_blocking=non_blocking)

    return map_batch(batch, lambda part: callable(getattr(part, "to", None)), moved)


def record_stream(batch: object, stream: torch.Stream) -> None:
    """Keep a batch's memory until the current work of a stream is done.

    Args:
        batch: As in `to_device`.
        stream: Another stream that uses the batch than the stream that allocated it.
    """
    map_batch(
        batch,
        lambda part: callable(getattr(part, "record_stream", None)),
        lambda part: part.record_stream(stream),
    )
