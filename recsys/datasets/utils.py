"""The batch that every reader gives, and how ranks share a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from recsys.kernels import ops
from recsys.sparse import KeyedJaggedTensor, from_columns
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
        dense_features: `[B, dense_in_features]` float.
        sparse_features: ids of every feature, stride `B`.
        labels: `[B]`, 1 for what happened and 0 for what did not.

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

    @staticmethod
    def from_columns(
        columns: Any,
        *,
        sparse: Sequence[str],
        dense: Sequence[str] = (),
        label: str | None = None,
        weights: Mapping[str, str] | None = None,
        padding: int | None = None,
    ) -> "Batch":
        """Make a batch from the columns of a table.

        Args:
            columns: name to column: a dict of arrays, a pandas DataFrame or an Arrow Table.
            sparse: columns of ids, or of lists of ids; see `from_columns`.
            dense: columns of numbers, one per sample.
            label: the column of labels; all are 0 without it.
            weights: feature to the column of its ids' weights.
            padding: what a matrix of ids holds where a sample has no more.

        Returns:
            The batch, on the CPU if the columns are.

        Raises:
            KeyError: a column is not there.
            TypeError: a column holds no numbers.
            ValueError: columns differ in their number of samples.

        Example:
            >>> table = {"age": [31.0, 44.0], "films": [[1, 2], [3]], "liked": [1, 0]}
            >>> batch = Batch.from_columns(table, sparse=["films"], dense=["age"], label="liked")
            >>> batch.dense_features.tolist(), batch.labels.tolist()
            ([[31.0], [44.0]], [1.0, 0.0])
        """
        named = {feature: columns[name] for feature, name in (weights or {}).items()}
        ids = from_columns({name: columns[name] for name in sparse}, named, padding=padding)
        numbers = [_numbers(columns, name) for name in dense]
        labels = torch.zeros(ids.stride()) if label is None else _numbers(columns, label)
        for name, column in zip([*dense, label], [*numbers, labels], strict=True):
            if column.shape != (ids.stride(),):
                raise ValueError(
                    f"Columns must have as many samples; received {ids.stride()} in "
                    f"{sparse[0]!r} and shape {tuple(column.shape)} in {name!r}."
                )
        features = torch.stack(numbers, 1) if numbers else torch.zeros(ids.stride(), 0)
        return Batch(features, ids, labels)

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Copy to a device.

        Args:
            device: where the copy is.
            non_blocking: whether the host goes on while a GPU copies; what is not pinned is
                pinned first.

        Returns:
            A new batch; parts already on `device` are shared with this one.
        """
        return Batch(
            dense_features=ops.copy_to(self.dense_features, device, non_blocking),
            sparse_features=self.sparse_features.to(device=device, non_blocking=non_blocking),
            labels=ops.copy_to(self.labels, device, non_blocking),
        )

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory from being reused until `stream` has done its present work.

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


def _numbers(columns: Any, name: str) -> torch.Tensor:
    column = columns[name]
    if not isinstance(column, torch.Tensor):
        values = np.asarray(column)
        if values.dtype.kind not in "biuf":
            raise TypeError(
                f"Column {name!r} must hold numbers; received {values.dtype} values, such as "
                f"{values.ravel()[:1].tolist()}."
            )
        column = torch.from_numpy(values.astype(np.float32))
    return column.float()


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
    """Give the part of `num_samples` samples that belongs to one rank.

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
            f"{key!r}. Mount or copy files that are elsewhere."
        )
