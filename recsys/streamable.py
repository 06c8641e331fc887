"""What pipelines may ask of a batch: to move to a device, and to outlive its use on a stream."""

from __future__ import annotations

import abc
from typing import Self

import torch

__all__ = ["Multistreamable", "Pipelineable"]


class Multistreamable(abc.ABC):
    """An object whose memory may be in use on several streams of a GPU.

    Jagged and keyed tensors and `Batch` count as such without
    inheriting from it.

    Example:
        >>> from recsys import KeyedJaggedTensor
        >>> issubclass(KeyedJaggedTensor, Pipelineable)
        True
    """

    @abc.abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory from being used anew until work that is now in a stream is done.

        Args:
            stream: where the object is used, beside the stream on which it was made.
        """


class Pipelineable(Multistreamable):
    """A `Multistreamable` that can be moved to a device: a batch of a pipeline."""

    @abc.abstractmethod
    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Return the same on another device.

        Args:
            device: where to.
            non_blocking: whether the host goes on while pinned memory is copied.
        """
