"""Several batches of jagged features as one object of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast, final

import torch

from recsys.kernels.arguments import wrong_type
from recsys.kernels.checked import checked_late
from recsys.sparse.keyed_jagged import KeyedJaggedTensor
from recsys.streamable import Pipelineable

__all__ = ["KJTList"]


@final
class KJTList(Pipelineable):
    """A list of batches that is moved, and kept on a stream, as a whole.

    Args:
        features: the batches.

    Attributes:
        features: the batches, as given.

    Example:
        >>> one = KeyedJaggedTensor(["f"], torch.tensor([3]), lengths=torch.tensor([1]))
        >>> batches = KJTList([one, one])
        >>> len(batches), batches[1].keys(), [b.stride() for b in batches]
        (2, ['f'], [1, 1])
    """

    @checked_late
    def __init__(self, features: Sequence[KeyedJaggedTensor]) -> None:
        if isinstance(cast(object, features), str):
            wrong_type("KJTList.features", "a list of KeyedJaggedTensors", features)
        self.features = list(features)
        for place, batch in enumerate(self.features):
            if not isinstance(cast(object, batch), KeyedJaggedTensor):
                wrong_type(f"KJTList.features[{place}]", "a KeyedJaggedTensor", batch)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, key: int) -> KeyedJaggedTensor:
        return self.features[key]

    def __setitem__(self, key: int, item: KeyedJaggedTensor) -> None:
        self.features[key] = item

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        return iter(self.features)

    @checked_late
    def to(self, device: torch.device, non_blocking: bool = False) -> KJTList:
        """Return the batches on another device.

        Args:
            device: where to.
            non_blocking: whether the host goes on while a GPU copies; what is not pinned is
                pinned first.
        """
        return KJTList([batch.to(device, non_blocking) for batch in self.features])

    def pin_memory(self) -> KJTList:
        """Return the batches in page-locked memory, from where copies to a GPU can overlap."""
        return KJTList([batch.pin_memory() for batch in self.features])

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the batches' memory from being used anew until work in a stream is done.

        Args:
            stream: where they are used.
        """
        for batch in self.features:
            batch.record_stream(stream)  # type: ignore[arg-type]  # of any device
