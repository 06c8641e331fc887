"""The batch that every reader gives, and how ranks share a batch."""

from dataclasses import dataclass
from typing import final

import torch

from recsys.sparse import KeyedJaggedTensor
from recsys.streamable import Pipelineable

PATH_MANAGER_KEY = "torchrec"
"""The default, and only, value of arguments of this name: files are local ones."""


@Pipelineable.register
@final
@dataclass
class Batch:
    """One rank's samples of one step.

    The pipelines copy it to the device ahead of time, which is why it can move, pin its memory and
    tell a stream that it is in use.

    Args:
        dense_features: ``[B, dense_in_features]`` float.
        sparse_features: ids of every feature, stride ``B``.
        labels: ``[B]``, 1 for what happened and 0 for what did not.

    Example:
        >>> import torch
        >>> from recsys.sparse import KeyedJaggedTensor
        >>> lengths = torch.tensor([2, 1])
        >>> ids = KeyedJaggedTensor(["film"], torch.tensor([3, 1, 4]), lengths=lengths)
        >>> batch = Batch(torch.zeros(2, 1), ids, torch.tensor([1.0, 0.0]))
        >>> batch.to(torch.device("cpu")).sparse_features.stride()
        2
    """

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Copy to a device.

        Args:
            device: where the copy lies.
            non_blocking: return before the copy has ended (needs pinned memory).

        Returns:
            A new batch; parts already on ``device`` are shared with this one.
        """
        return Batch(
            dense_features=self.dense_features.to(device=device, non_blocking=non_blocking),
            sparse_features=self.sparse_features.to(device=device, non_blocking=non_blocking),
            labels=self.labels.to(device=device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory from being reused until ``stream`` has done its present work.

        Args:
            stream: the stream that reads this batch, if not the one it was made on.
        """
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> "Batch":
        """Copy to page-locked memory, from which copies to a GPU are asynchronous.

        Returns:
            A new batch in pinned memory.
        """
        return Batch(
            dense_features=self.dense_features.pin_memory(),
            sparse_features=self.sparse_features.pin_memory(),
            labels=self.labels.pin_memory(),
        )


def check_rank(rank: int, world_size: int, batch_size: int) -> None:
    """Refuse a rank outside its world, or batches without samples.

    Args:
        rank: this process, from 0.
        world_size: number of processes that share the data.
        batch_size: samples per rank and step.

    Raises:
        ValueError: one of them is out of its range.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"rank must be in [0, world_size); received rank {rank} and world_size {world_size}. "
            "Pass torch.distributed.get_rank() and get_world_size()."
        )
    if batch_size < 1:
        raise ValueError(
            f"batch_size must be at least 1; received {batch_size}. It counts one rank's samples."
        )


def rank_slice(num_samples: int, rank: int, world_size: int) -> slice:
    """Give the part of ``num_samples`` samples that belongs to one rank.

    Parts differ by at most one sample, so all ranks take the same number of steps even when the
    last batch of an epoch is small; a part may then be empty.

    Args:
        num_samples: samples of one step over all ranks.
        rank: this process, from 0.
        world_size: number of processes.

    Returns:
        The slice of this rank. Slices of ranks 0, 1, ... follow one another.

    Example:
        >>> [rank_slice(5, rank, 2) for rank in (0, 1)]
        [slice(0, 2, None), slice(2, 5, None)]
    """
    return slice(num_samples * rank // world_size, num_samples * (rank + 1) // world_size)


def check_path_manager_key(key: str) -> None:
    """Refuse file systems other than the machine's.

    Args:
        key: must be `PATH_MANAGER_KEY`.

    Raises:
        ValueError: it is another.
    """
    if key != PATH_MANAGER_KEY:
        raise ValueError(
            f"path_manager_key must be {PATH_MANAGER_KEY!r}, the machine's own files; received "
            f"{key!r}. Mount or copy files that lie elsewhere."
        )
