"""`Batch`, the type that all readers yield, and the division of batches among ranks."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from recsys.base.arguments import MissingKeyError, instance, names, setting, shown
from recsys.base.checked import checked_late
from recsys.base.streamable import Pipelineable
from recsys.kernels import ops
from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.column import read_numbers
from recsys.sparse.columns import check_table, jagged_of
from recsys.sparse.tree import register
from recsys.sparse.value_checks import name_columns

_T = TypeVar("_T")
PATH_MANAGER_KEY = "torchrec"
"""The only value that `path_manager_key` arguments accept: local files."""
_PARTS = ("dense_features", "sparse_features", "labels")
_OPTIONAL_PARTS = ("sample_weights", "groups", "label_mask")


@Pipelineable.register
@final
@dataclass
class Batch:
    """One rank's samples of one step.

    Train pipelines copy it to the device ahead of time, with `to`, `pin_memory` and
    `record_stream`.

    Args:
        dense_features: `[B, dense_in_features]` float.
        sparse_features: Ids of every feature, stride `B`.
        labels: `[B]`, such as 1 for a click and 0 for none, or `[B, T]` for T tasks; any finite
            numbers are legal here, and a log loss requires labels from 0 to 1.
        dense_names: Names of the columns of `dense_features`, for error messages; empty if unknown.
        label_name: Name of the label column, for error messages, or of the columns of T tasks,
            joined by commas; empty if unknown.
        sample_weights: `[B]` float32, weights of the samples in the loss, or None.
        groups: `[B]` int64, keys of the samples' groups, such as sessions, or None.
        label_mask: bool, of the shape of `labels`: False where a sample has no label of a task,
            which then counts in neither loss nor metrics; None if all labels are present.
        fingerprints: Fingerprints of the fitted values of features, by feature, of
            `FeatureSpec.fingerprints`; empty if unknown.

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
    sample_weights: torch.Tensor | None = None
    groups: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dense_features is not None:  # models report a missing part themselves
            instance("Batch.dense_features", self.dense_features, torch.Tensor, "a tensor")
        instance("Batch.sparse_features", self.sparse_features, KeyedJaggedTensor)
        instance("Batch.labels", self.labels, torch.Tensor, "a tensor")
        instance("Batch.label_name", self.label_name, str, "text")
        for name in _OPTIONAL_PARTS:
            if getattr(self, name) is not None:
                instance(f"Batch.{name}", getattr(self, name), torch.Tensor, "a tensor")
        self.dense_names = tuple(names("Batch.dense_names", self.dense_names))
        self._name_columns()

    def _name_columns(self) -> None:
        name_columns(self.dense_features, self.dense_names)
        name_columns(self.labels, self.label_name.split(",") if self.label_name else ())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"fingerprints": {}, **state})  # a file of an older recsys has none
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
            columns: Columns by name: a dict of arrays, a pandas or polars DataFrame or an Arrow
                Table.
            sparse: Columns of ids, or of lists of ids; see `recsys.sparse.from_columns`.
            dense: Columns of numbers, one per sample.
            label: The column of labels, finite numbers. Without it all labels are 0.
            weights: The column of id weights of each weighted feature, by feature.
            padding: The value that fills unused places of an id matrix.

        Returns:
            The batch, on the CPU if the columns are.

        Raises:
            KeyError: A column does not exist.
            TypeError: A column contains values that are not numbers.
            ValueError: Columns have different numbers of samples; a dense feature, label or weight
                is missing, NaN or infinite; or an id does not fit into int64. The message names
                the column, the row and the value.

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
        wanted = dict.fromkeys([*sparse, *dense, *weights.values(), *([label] if label else [])])
        try:
            columns = {name: columns[name] for name in wanted}
        except KeyError as error:
            raise MissingKeyError(
                f"Batch.from_columns: columns must have {[*wanted]}; received {shown(columns)}, "
                f"without {error}."
            ) from None
        named = {f: (f"Column {name!r}", columns[name]) for f, name in weights.items()}
        unknown = sorted(named.keys() - set(sparse))
        if unknown:
            raise MissingKeyError(
                f"weights must name features of sparse, {list(sparse)}; received {unknown}."
            )
        ids = jagged_of({name: columns[name] for name in sparse}, named, padding)
        numbers = [read_numbers(f"Column {name!r}", columns[name]) for name in dense]
        labels = torch.zeros(ids.stride())
        if label is not None:
            labels = read_numbers(f"Column {label!r}", columns[label])
        for name, column in zip([*dense, label], [*numbers, labels], strict=True):
            if len(column) != ids.stride():
                raise ValueError(
                    f"All columns must have the same number of samples; received {ids.stride()} in "
                    f"{sparse[0]!r} and {len(column)} in {name!r}."
                )
        features = torch.stack(numbers, 1) if numbers else torch.zeros(ids.stride(), 0)
        return Batch(features, ids, labels, tuple(dense), label or "")

    @checked_late
    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Copy to a device.

        Args:
            device: The target device.
            non_blocking: Do not wait for the copy. Unpinned tensors are pinned first.

        Returns:
            A new batch; parts already on `device` are shared with this one.
        """

        def copied(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else ops.copy_to(part, device, non_blocking)

        return replace(
            self,
            dense_features=ops.copy_to(self.dense_features, device, non_blocking),
            sparse_features=self.sparse_features.to(device=device, non_blocking=non_blocking),
            labels=ops.copy_to(self.labels, device, non_blocking),
            sample_weights=copied(self.sample_weights),
            groups=copied(self.groups),
            label_mask=copied(self.label_mask),
        )

    def _optional(self) -> list[tuple[str, torch.Tensor]]:
        """Return the names and values of the optional parts that the batch has."""
        parts = [(name, getattr(self, name)) for name in _OPTIONAL_PARTS]
        return [(name, part) for name, part in parts if part is not None]

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory from reuse until the work queued on `stream` is done.

        Args:
            stream: A stream that reads this batch, other than the one it was created on.
        """
        for name in _PARTS:
            getattr(self, name).record_stream(stream)
        for _, part in self._optional():
            part.record_stream(stream)

    def pin_memory(self) -> "Batch":
        """Copy to page-locked memory, from which copies to a GPU are asynchronous.

        Returns:
            A new batch in pinned memory.
        """
        parts = [*((name, getattr(self, name)) for name in _PARTS), *self._optional()]
        pinned: dict[str, Any] = {name: part.pin_memory() for name, part in parts}
        return replace(self, **pinned)


def _members_of(batch: Batch) -> tuple[dict[str, Any], object]:
    members = {name: getattr(batch, name) for name in _PARTS} | dict(batch._optional())
    fingerprints = [list(pair) for pair in batch.fingerprints.items()]
    return members, (list(members), list(batch.dense_names), batch.label_name, fingerprints)


def _batch_of(members: Iterable[Any], rest: Any) -> Batch:
    batch = Batch.__new__(Batch)  # unchecked: the members may be no tensors after a tree_map
    columns, names, label, *fingerprints = rest  # programs of an older recsys have none
    parts = {**dict.fromkeys(_OPTIONAL_PARTS), **dict(zip(columns, members, strict=True))}
    rest = {"dense_names": tuple(names), "label_name": label}
    pairs = fingerprints[0] if fingerprints else ()
    batch.__setstate__({**parts, **rest, "fingerprints": dict(map(tuple, pairs))})
    return batch


register(Batch, _members_of, _batch_of)


def check_rank(rank: int, world_size: int, batch_size: int) -> None:
    """Check that a rank is below the world size, and that batches have samples.

    Args:
        rank: This process, from 0.
        world_size: Number of processes that share the data.
        batch_size: Samples per rank and step.

    Raises:
        ValueError: One of them is out of its range.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"rank must be in [0, world_size); received rank {rank} and world_size {world_size}. "
            "Pass torch.distributed.get_rank() and get_world_size()."
        )
    if batch_size < 1:
        raise ValueError(
            f"batch_size, the samples of one rank, must be at least 1; received {batch_size}."
        )


def rank_in_job(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the rank and the number of processes that share the data.

    Args:
        rank: This process, from 0; None: its rank in the default process group, if there is one,
            else 0.
        world_size: Number of processes; None: the size of the default process group, if there is
            one, else 1.

    Raises:
        ValueError: One of them is None, and this is one of several processes (`WORLD_SIZE` of
            torchrun) without a process group: each would read all samples.

    Example:
        >>> rank_in_job(None, None), rank_in_job(3, 8)
        ((0, 1), (3, 8))
    """
    if rank is not None and world_size is not None:
        return rank, world_size
    job_rank, job_size = 0, 1
    if dist.is_available() and dist.is_initialized():
        job_rank, job_size = dist.get_rank(), dist.get_world_size()
    elif (started := setting("WORLD_SIZE") or 1) > 1:
        raise ValueError(
            "A reader needs rank and world_size, or a process group to take them from; received "
            f"rank={rank} and world_size={world_size} in one of {started} processes "
            f"(WORLD_SIZE={started}) without a process group. Call "
            "torch.distributed.init_process_group first, or pass both; with rank=0 and "
            "world_size=1 this process reads all samples."
        )
    return job_rank if rank is None else rank, job_size if world_size is None else world_size


def rank_slice(num_samples: int, rank: int, world_size: int) -> slice:
    """Return the slice of `num_samples` samples that belongs to one rank.

    Sizes differ by at most one sample. All ranks so have the same number of steps, even if the last
    batch of an epoch is small; a slice may then be empty.

    Args:
        num_samples: Samples of one step over all ranks.
        rank: This process, from 0.
        world_size: Number of processes.

    Returns:
        The slice of this rank. Slices of successive ranks are adjacent.

    Example:
        >>> [rank_slice(5, rank, 2) for rank in (0, 1)]
        [slice(0, 2, None), slice(2, 5, None)]
    """
    return slice(num_samples * rank // world_size, num_samples * (rank + 1) // world_size)


def of_worker(steps: Iterable[_T]) -> Iterator[_T]:
    """Return every `num_workers`-th step, the share of this DataLoader worker.

    A DataLoader reads from its workers in turn, so it yields all steps in their order.

    Args:
        steps: The steps of an epoch, the same in every worker.

    Returns:
        The steps of this worker; all steps outside of a worker.

    Example:
        >>> list(of_worker([1, 2, 3]))
        [1, 2, 3]
    """
    worker = get_worker_info()
    if worker is None:
        return iter(steps)
    return itertools.islice(steps, worker.id, None, worker.num_workers)


def check_path_manager_key(key: str) -> None:
    """Check that `path_manager_key` selects local files.

    Args:
        key: The argument; must be `PATH_MANAGER_KEY`.

    Raises:
        ValueError: The key differs.
    """
    if key != PATH_MANAGER_KEY:
        raise ValueError(
            f"path_manager_key must be {PATH_MANAGER_KEY!r}, for local files; received {key!r}. "
            "Mount or copy remote files."
        )
