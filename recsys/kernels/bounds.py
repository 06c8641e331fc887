"""Checks of ids against table sizes and of bags against the ids, before a kernel reads memory.

Shapes: N ids, F features, B bags per feature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, final

import torch
from torch import Tensor

NO_LIMIT: int = torch.iinfo(torch.int64).max
"""Number of rows of a feature without a table."""
OVERWRITTEN = (
    "Ids must be in range for their table; received a bad id in an earlier batch, whose memory was "
    "overwritten since. To get the id reported, do not write to a batch before the next call."
)
"""Error text for bad ids whose memory was overwritten."""


def are_bags_bad(lengths: Tensor, offsets: Tensor, num_ids: int) -> Tensor:
    """Return whether bags are bad: negative lengths, wrong sum, other offsets; no device sync.

    Args:
        lengths: [M] int32 or int64, M at least 1.
        offsets: [M + 1] of the same dtype.
        num_ids: Required sum of the lengths.

    Returns:
        [] bool.

    Example:
        >>> are_bags_bad(torch.tensor([2, -1, 2]), torch.tensor([0, 2, 1, 3]), 3)
        tensor(True)
    """
    starts, ends = offsets[:-1], offsets[1:]
    bad_M = (ends < starts) | (ends - starts != lengths)
    return bad_M.any() | (offsets[0] != 0) | (offsets[-1] != num_ids)


def safe_lengths(
    lengths: Tensor,
    is_bad: Tensor,
    num_ids: int,
    known: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Replace bad lengths by lengths that fit the ids; no device sync.

    Args:
        lengths: [M] int32 or int64.
        is_bad: [] bool, see `are_bags_bad`.
        num_ids: Required sum of the lengths.
        known: If the host knows the number of ids of each feature: [F] int64 first bag of each
            feature, and [F] the numbers.

    Returns:
        [M]. If bags are bad, all ids are in the first bag, or in the first bag of their feature.

    Example:
        >>> safe_lengths(torch.tensor([2, -1, 2]), torch.tensor(True), 3)
        tensor([3, 0, 0])
        >>> known = torch.tensor([0, 2]), torch.tensor([2, 1])  # two features, of 2 bags and of 1
        >>> safe_lengths(torch.tensor([2, -1, 2]), torch.tensor(True), 3, known)
        tensor([2, 0, 1])
    """
    first = torch.zeros_like(lengths)
    if known is None:
        first[:1] = num_ids
    else:
        first.index_copy_(0, known[0], known[1].to(lengths.dtype))
    return torch.where(is_bad, first, lengths)


def find_bad_ids(indices: Tensor, offsets: Tensor, num_rows_F: Tensor) -> Tensor:
    """Return a mask of ids that are negative or too large for their table; no device sync.

    Args:
        indices: [N] int32 or int64.
        offsets: [F * B + 1].
        num_rows_F: [F] int64 rows of the table that each feature reads; `NO_LIMIT`: any id is good.

    Returns:
        [N] bool.

    Example:
        >>> find_bad_ids(torch.tensor([0, 5]), torch.tensor([0, 2]), torch.tensor([5]))
        tensor([False,  True])
    """
    num_bags = (offsets.numel() - 1) // num_rows_F.numel()
    if num_bags == 0 or indices.numel() == 0:
        return torch.zeros_like(indices, dtype=torch.bool)
    if num_rows_F.numel() == 1:
        return ((indices < 0) | (indices >= num_rows_F)) & (num_rows_F != NO_LIMIT)
    # without `output_size` the host waits for the sum of the counts
    limit_N = num_rows_F.repeat_interleave(offsets[::num_bags].diff(), output_size=indices.numel())
    return ((indices < 0) | (indices >= limit_N)) & (limit_N != NO_LIMIT)


def bad_id_text(feature: str, id: int, position: int, rows: int) -> str:
    """Return the sentence about an id outside its table; TorchScript compiles it.

    Training, quantized collections, compiled programs, packages and the C++ core (`batch.cpp`) use
    these words.

    Args:
        feature: Name of the feature.
        id: The id.
        position: Position of the id among the ids of the feature.
        rows: Rows of the table.

    Example:
        >>> bad_id_text("film", 7, 0, 5)
        "Id 7 at position 0 of feature 'film' must be from 0 to 4."
    """
    return f"Id {id} at position {position} of feature '{feature}' must be from 0 to {rows - 1}."


def bad_id_message(
    bad_N: Tensor,
    indices: Tensor,
    offsets: Tensor,
    num_rows_per_feature: Tensor,
    feature_names: Sequence[str],
    table_names: Sequence[str],
) -> str:
    """Return the error text about the first bad id of a batch; reads from the device.

    Args:
        bad_N: [N] bool, at least one True; see `find_bad_ids`.
        indices: [N] int32 or int64.
        offsets: [F * B + 1].
        num_rows_per_feature: [F] int64 rows of the table that each feature reads.
        feature_names: [F].
        table_names: [F] the table each feature reads.
    """
    places = bad_N.nonzero().flatten()
    place = int(places[0])
    num_bags = (offsets.numel() - 1) // len(feature_names)
    # `right`: empty bags before the id's bag start at the same offset
    bag = int(torch.searchsorted(offsets.contiguous(), place, right=True)) - 1
    feature, sample = divmod(bag, num_bags)
    rows = int(num_rows_per_feature[feature])
    position = place - int(offsets[feature * num_bags])
    plural = "" if places.numel() == 1 else "s"
    return (
        f"{bad_id_text(feature_names[feature], int(indices[place]), position, rows)} Table "
        f"'{table_names[feature]}' has {rows} rows; the batch has {places.numel()} bad id{plural}, "
        f"the first in sample {sample}. Hash or remap ids, enlarge num_embeddings, or choose "
        "another BoundsCheckMode."
    )


_FEW = 8  # results are copied as they are: any() would be one kernel more
_LateCheck: TypeAlias = tuple[Tensor, torch.cuda.Event, Callable[[Tensor], None]]
"""A result in pinned memory, the event of its arrival, and the function that reads it."""


@final
class AsyncChecks:
    """Asynchronous checks on a CUDA device: a later batch reads and reports their results.

    Attributes:
        pending: Checks whose results were not read yet.
    """

    def __init__(self) -> None:
        self.pending: list[_LateCheck] = []

    def add(self, bad: Tensor, report: Callable[[], None]) -> None:
        """Start copying flags to the host.

        Args:
            bad: [any] on the device, bool or int32, not 0 for bad values.
            report: Raises or warns; called after the copy has arrived if a flag is not 0.
        """
        few = bad if bad.numel() <= _FEW else bad.any()
        self.send(few, lambda copied: report() if bool(copied.any()) else None)

    def send(self, result: Tensor, read: Callable[[Tensor], None]) -> None:
        """Start copying the result of a check to the host.

        Args:
            result: [any] on the device, small.
            read: Called with the copy after it has arrived, to raise or warn.
        """
        # pinned memory and an event, so that no copy waits
        # docs/decisions/exchange.md, "The host waits for the device once per step"
        copied = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
        copied.copy_(result, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(result.device))
        self.pending.append((copied, done, read))

    def read_arrived(self) -> None:
        """Report the results of finished checks."""
        while self.pending and self.pending[0][1].query():
            # removed before it is read: `read` may raise, and an error is reported once
            copied, _, read = self.pending.pop(0)
            read(copied)

    def read_all(self) -> None:
        """Wait for the device, and report the results of all checks."""
        for _, done, _ in self.pending:
            done.synchronize()
        self.read_arrived()
