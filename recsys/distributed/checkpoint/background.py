"""Saves during training: copies on the host, and the thread that writes them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from recsys.base.logs import logger
from recsys.distributed.state.sharded_table import ShardedTable

_pending: WeakKeyDictionary[nn.Module, PendingSave] = WeakKeyDictionary()
_buffers: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()


@final
class PendingSave:
    """A save in progress, made by `save_checkpoint_async`.

    A process that ends normally waits for it.

    Args:
        model: The model that is saved.
        work: Writes the values; returns the folder.
    """

    def __init__(self, model: nn.Module, work: Callable[[], Path]) -> None:
        self._work = work
        self._folder: Path | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="save a checkpoint")
        _pending[model] = self
        self._thread.start()

    def done(self) -> bool:
        """Return whether it has ended, successfully or not; does not wait."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait for its end.

        Returns:
            The folder of the complete version.

        Raises:
            CheckpointError: On every rank, if it failed on one.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._folder is not None
        return self._folder

    def _run(self) -> None:
        try:
            self._folder = self._work()
        except Exception as error:
            self._error = error
            logger.error("An asynchronous save failed: %s", error)
        del self._work  # frees the values


def end_pending(model: nn.Module) -> None:
    """Wait for the model's save in progress and raise its error. Every rank must call it."""
    pending = _pending.pop(model, None)
    if pending is not None:
        pending.wait()


def copy_to_host(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Copy values to host memory that is reused by the model's next save.

    Args:
        model: The model of the values.
        state: Nested dicts of values.
    """
    buffers = _buffers.setdefault(model, {})
    copied: dict[str, Any] = _copied("", state, buffers)
    if any(buffer.is_pinned() for buffer in buffers.values()):  # copies from a GPU
        torch.cuda.synchronize()
    return copied


def _copied(name: str, value: Any, buffers: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _copied(f"{name}.{key}", part, buffers) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = (_copied(f"{name}.{i}", part, buffers) for i, part in enumerate(value))
        return type(value)(parts)
    shards: Sequence[Any] | None = None
    if isinstance(value, ShardedTable):
        shards = value.local_shards()
    elif isinstance(value, DTensor):
        mesh, placements, part = value.device_mesh, value.placements, value.to_local()
        _, offsets = compute_local_shape_and_global_offset(value.shape, mesh, placements)
        shards = [(tuple(offsets), part)] if part.numel() else []
    if shards is not None:
        copies = [(at, _copied(f"{name}/{i}", p, buffers)) for i, (at, p) in enumerate(shards)]
        cpu = torch.device("cpu")
        return ShardedTable(value.shape, copies, dtype=value.dtype, device=cpu)
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    buffer = buffers.get(name)
    if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
        buffer = torch.empty_like(value.detach(), device="cpu", pin_memory=value.is_cuda)
        buffers[name] = buffer
    return buffer.copy_(value.detach(), non_blocking=True)
