"""Interfaces of batches in pipelines: copies to a device, and use on several streams."""

from __future__ import annotations

import abc
from typing import Self

import torch

__all__ = ["Multistreamable", "Pipelineable"]


class Multistreamable(abc.ABC):
    """Object with memory that several streams of a GPU may use.

    Jagged tensors, keyed tensors and `Batch` are registered as subclasses.

    Example:
        >>> from recsys import KeyedJaggedTensor
        >>> issubclass(KeyedJaggedTensor, Pipelineable)
        True
    """

    @abc.abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory from reuse until the work queued on a stream is done.

        Args:
            stream: A stream that uses the object, other than the one it was created on.
        """


class Pipelineable(Multistreamable):
    """`Multistreamable` that can be copied to a device: a batch of a pipeline."""

    @abc.abstractmethod
    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Copy to a device.

        Args:
            device: The target device.
            non_blocking: Do not wait for copies of pinned memory.
        """
