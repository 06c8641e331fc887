"""The batch that every reader gives, and how ranks share a batch."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

import torch
from torch.utils.data import get_worker_info

from recsys.kernels import ops
from recsys.kernels.arguments import instance, names
from recsys.kernels.checked import checked_late
from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.column import read_numbers
from recsys.sparse.columns import check_table, jagged_of
from recsys.sparse.tree import register
from recsys.sparse.value_checks import name_columns
from recsys.streamable import Pipelineable

_T = TypeVar("_T")
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
        labels: `[B]`, such as 1 for a click and 0 for none; any finite numbers are legal here, and
            a log loss takes those from 0 to 1.
        dense_names: names of the columns of `dense_features`, for messages about their values;
            empty if they are not known.
        label_name: of the labels' column, for messages; empty if it is not known.

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
    dense_names: Sequence[str] = ()
    label_name: str = ""

    def __post_init__(self) -> None:
        if self.dense_features is not None:  # models say in their own words what they lack
            instance("Batch.dense_features", self.dense_features, torch.Tensor, "a tensor")
        instance("Batch.sparse_features", self.sparse_features, KeyedJaggedTensor)
        instance("Batch.labels", self.labels, torch.Tensor, "a tensor")
        instance("Batch.label_name", self.label_name, str, "text")
        self.dense_names = tuple(names("Batch.dense_names", self.dense_names))
        self._name_columns()

    def _name_columns(self) -> None:
        name_columns(self.dense_features, self.dense_names)
        name_columns(self.labels, (self.label_name,) if self.label_name else ())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._name_columns()

    @staticmethod
    @checked_late
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
            columns: name to column: a dict of arrays, a pandas or polars DataFrame or an Arrow
                Table.
            sparse: columns of ids, or of lists of ids; see `recsys.sparse.from_columns`.
            dense: columns of numbers, one per sample.
            label: the column of labels, finite numbers; all are 0 without it.
            weights: feature to the column of its ids' weights.
            padding: what a matrix of ids holds where a sample has no more.

        Returns:
            The batch, on the CPU if the columns are.

        Raises:
            KeyError: a column is not there.
            TypeError: a column holds no numbers.
            ValueError: columns differ in their number of samples; a dense feature, a label or a
                weight is missing, NaN or infinite; or an id does not fit into int64. The message
                names the column, the row and the value.

        Example:
            >>> table = {"age": [31.0, 44.0], "films": [[1, 2], [3]], "liked": [1, 0]}
            >>> batch = Batch.from_columns(table, sparse=["films"], dense=["age"], label="liked")
            >>> batch.dense_features.tolist(), batch.labels.tolist()
            ([[31.0], [44.0]], [1.0, 0.0])
        """
        check_table("Batch.from_columns: columns", columns)
        if isinstance(dense, str):
            names("Batch.from_columns: dense", dense)
        weights = {} if weights is None else weights
        named = {f: (f"Column {name!r}", columns[name]) for f, name in weights.items()}
        unknown = sorted(named.keys() - set(sparse))
        if unknown:
            raise KeyError(
                f"weights must be of features in sparse; received {unknown}, not in {sparse}."
            )
        ids = jagged_of({name: columns[name] for name in sparse}, named, padding)
        numbers = [read_numbers(f"Column {name!r}", columns[name]) for name in dense]
        labels = torch.zeros(ids.stride())
        if label is not None:
            labels = read_numbers(f"Column {label!r}", columns[label])
        for name, column in zip([*dense, label], [*numbers, labels], strict=True):
            if len(column) != ids.stride():
                raise ValueError(
                    f"Columns must have as many samples; received {ids.stride()} in "
                    f"{sparse[0]!r} and {len(column)} in {name!r}."
                )
        features = torch.stack(numbers, 1) if numbers else torch.zeros(ids.stride(), 0)
        return Batch(features, ids, labels, tuple(dense), label or "")

    @checked_late
    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Copy to a device.

        Args:
            device: where the copy is.
            non_blocking: whether the host goes on while a GPU copies; what is not pinned is
                pinned first.

        Returns:
            A new batch; parts already on `device` are shared with this one.
        """
        return replace(
            self,
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
        return replace(
            self,
            dense_features=self.dense_features.pin_memory(),
            sparse_features=self.sparse_features.pin_memory(),
            labels=self.labels.pin_memory(),
        )


def _members_of(batch: Batch) -> tuple[dict[str, Any], object]:
    names = "dense_features", "sparse_features", "labels"
    rest = list(batch.dense_names), batch.label_name
    return {name: getattr(batch, name) for name in names}, rest


def _batch_of(members: Iterable[Any], rest: Any) -> Batch:
    batch = Batch.__new__(Batch)  # a tree_map may have put something else than tensors here
    dense, sparse, labels = members
    names, label = rest
    batch.__setstate__(
        {
            "dense_features": dense,
            "sparse_features": sparse,
            "labels": labels,
            "dense_names": tuple(names),
            "label_name": label,
        }
    )
    return batch


register(Batch, _members_of, _batch_of)


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


def of_worker(steps: Iterable[_T]) -> Iterator[_T]:
    """Give a worker of a DataLoader its share of the steps: every `num_workers`-th one.

    A DataLoader takes a step of each worker in turn, so that it gives the steps in their order.

    Args:
        steps: of an epoch, the same in every worker.

    Returns:
        The steps of this worker; all of them outside of a worker.

    Example:
        >>> list(of_worker([1, 2, 3]))
        [1, 2, 3]
    """
    worker = get_worker_info()
    if worker is None:
        return iter(steps)
    return itertools.islice(steps, worker.id, None, worker.num_workers)


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
