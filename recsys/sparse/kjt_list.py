"""Several KeyedJaggedTensors as one batch of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast, final

import torch

from recsys.base.arguments import wrong_type
from recsys.base.checked import checked_late
from recsys.base.streamable import Pipelineable
from recsys.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = ["KJTList"]


@final
class KJTList(Pipelineable):
    """A list of KeyedJaggedTensors that a pipeline moves together.

    Args:
        features: The batches.

    Attributes:
        features: The batches, as given.

    Example:
        >>> one = KeyedJaggedTensor(["f"], torch.tensor([3]), lengths=torch.tensor([1]))
        >>> batches = KJTList([one, one])
        >>> len(batches), batches[1].keys(), [b.stride() for b in batches]
        (2, ['f'], [1, 1])
    """

    @checked_late
    def __init__(self, features: Sequence[KeyedJaggedTensor]) -> None:
        if isinstance(cast(object, features), str | bytes):
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
        """Copy the batches to a device.

        Args:
            device: The target device.
            non_blocking: Do not wait for the copy. Unpinned tensors are pinned first.
        """
        return KJTList([batch.to(device, non_blocking) for batch in self.features])

    def pin_memory(self) -> KJTList:
        """Copy the batches to page-locked memory, for asynchronous copies to a GPU."""
        return KJTList([batch.pin_memory() for batch in self.features])

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory from reuse until the work queued on a stream is done.

        Args:
            stream: A stream that reads the batches.
        """
        for batch in self.features:
            batch.record_stream(stream)  # type: ignore[arg-type]  # of any device
