"""Checks of a batch: bags that can be read, ids within their tables, and errors for the rest.

The structure of a batch is checked by `sparse` (`check_features`). On a CPU that includes its bags.
On a device the host does not wait: bad values are replaced, flags of the faults stay on the device,
and the caller reads them later.

Shapes: `F` and `K` features of a batch, `B` batch size, `N` ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from recsys.kernels import ops
from recsys.kernels.bounds import (
    NO_LIMIT,
    OVERWRITTEN,
    are_bags_bad,
    bad_id_message,
    find_bad_ids,
    safe_lengths,
)
from recsys.kernels.types import BoundsCheckMode
from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.keyed_bags import Parts
from recsys.sparse.per_key_checks import check_length_per_key
from recsys.sparse.validate import check_total

__all__ = [
    "NO_COUNTS",
    "NO_FAULTS",
    "BatchChecker",
    "CheckedBatch",
    "RowLimits",
    "warn_of_bad_ids",
    "with_one_batch_size",
]

NO_COUNTS = torch.empty(0, dtype=torch.int64)
"""Counts of a batch whose ids were not counted."""
NO_FAULTS = torch.empty(0, dtype=torch.bool)
"""Faults of a batch that certainly has none."""


@final
class RowLimits(NamedTuple):
    """Row limits for batches with the same keys.

    Attributes:
        rows_K: `[K]` rows of the smallest table that reads each feature.
            `NO_LIMIT` if no table with row numbers does.
        least: The smallest of them.
    """

    rows_K: Tensor
    least: int


@final
class CheckedBatch(NamedTuple):
    """A batch that kernels can read: bad ids are 0, bad lengths are replaced.

    Attributes:
        given: The batch as given.
        safe: The same with lengths and inverse indices that can be read.
        found: The bags with one batch size, before bad ids were replaced; for messages.
        bags: The bags with one batch size.
        counts_K: `[K]` ids of each feature, if a kernel counted them; else empty.
        limits: Limits of the ids.
        faults: `[2]` on the device, whether bags and whether ids were bad and replaced; empty if
            they were certainly good.
        is_variable: Whether features have their own batch sizes.
    """

    given: KeyedJaggedTensor
    safe: KeyedJaggedTensor
    found: Parts
    bags: Parts
    counts_K: Tensor
    limits: RowLimits
    faults: Tensor
    is_variable: bool


def _warnings_raise() -> bool:
    """Return whether Python is set to raise warnings, such as by `python -W error`."""
    for action, message, category, module, line in warnings.filters:
        if message is None and module is None and line == 0 and issubclass(UserWarning, category):
            return action == "error"
    return False


@final
class BatchChecker:
    """Sanitizes the batches of a collection of tables, and describes their faults.

    Args:
        readers: Per feature the name and the rows of each table that reads it by row number.
        mode: Handling of ids outside their table.
        device: Device of batches and tables.
        is_pooled: Whether bags are pooled. Otherwise the output has the lengths of the bags.

    Example:
        >>> checker = BatchChecker(
        ...     [("film", "films", 5)], BoundsCheckMode.IGNORE, torch.device("cpu"), is_pooled=True
        ... )
        >>> batch = KeyedJaggedTensor(["film"], torch.tensor([7]), lengths=torch.tensor([1]))
        >>> checked = checker.check(batch, batch.parts(), checker.limits_of(["film"]))
        >>> checked.bags.values, checked.faults
        (tensor([0]), tensor([False,  True]))
    """

    def __init__(
        self,
        readers: Sequence[tuple[str, str, int]],
        mode: BoundsCheckMode,
        device: torch.device,
        *,
        is_pooled: bool,
    ) -> None:
        self.mode = mode
        self._device, self._is_pooled = device, is_pooled
        self._smallest: dict[str, tuple[int, str]] = {}
        for feature, table, rows in readers:
            if rows < self._smallest.get(feature, (NO_LIMIT, ""))[0]:
                self._smallest[feature] = rows, table

    def limits_of(self, keys: Sequence[str]) -> RowLimits:
        """Return the limits of batches with these keys."""
        rows = np.array([self._smallest.get(key, (NO_LIMIT, ""))[0] for key in keys], np.int64)
        least = int(rows.min(initial=NO_LIMIT))
        return RowLimits(torch.from_numpy(rows).to(self._device), least)

    def check(
        self,
        features: KeyedJaggedTensor,
        bags: Parts,
        limits: RowLimits,
        *,
        needs_sizes: bool = True,
    ) -> CheckedBatch:
        """Return the batch with one batch size and without bad values, and its faults.

        Args:
            features: The batch, whose structure is valid (`check_features`).
            bags: Its parts.
            limits: Limits for its keys.
            needs_sizes: Whether the host reads `length_per_key`.
        """
        is_variable, by_kernels = bags.stride_per_key_per_rank is not None, False
        may_be_bad = self.mode is not BoundsCheckMode.NONE and limits.least != NO_LIMIT
        if may_be_bad and bags.values.is_cpu:
            may_be_bad = not bags.are_ids_below(limits.least)
        if bags.values.is_cpu and not is_variable and not may_be_bad:
            return CheckedBatch(features, features, bags, bags, NO_COUNTS, limits, NO_FAULTS, False)
        safe, bad_bags = features, NO_FAULTS
        if self._device.type != "cpu":  # there check_features has raised
            if not needs_sizes:
                bags = bags._replace(length_per_key=None)  # checking it costs an upload
            # the output of sequences has the lengths, which are not to be padded
            can_check = _are_checked_by_triton(bags, self.mode)
            by_kernels = (self._is_pooled or not is_variable) and can_check
            if not by_kernels:
                safe, bad_bags = _sanitize_on_device(features, bags.length_per_key)
                bags = safe.parts()
        unpadded = bags
        if is_variable:
            bags = with_one_batch_size(bags, features.stride_per_key())
        if by_kernels:
            return self._check_by_kernels(features, bags, unpadded, limits)
        checked, faults = bags, NO_FAULTS
        bad_N = NO_FAULTS
        if may_be_bad and bags.values.numel():
            bad_N = find_bad_ids(bags.values, bags.offsets, limits.rows_K)
        if bad_N.numel() and (not bad_N.is_cpu or bad_N.any()):
            bad_ids = bad_N.any()
            bags = bags._replace(values=bags.values.masked_fill(bad_N, 0))
            faults = torch.stack([torch.zeros_like(bad_ids), bad_ids])
        if bad_bags.dim() == 0:
            faults = torch.stack([bad_bags, faults[-1] if bad_N.numel() else bad_bags & False])
        return CheckedBatch(features, safe, checked, bags, NO_COUNTS, limits, faults, is_variable)

    def _check_by_kernels(
        self, features: KeyedJaggedTensor, bags: Parts, given: Parts, limits: RowLimits
    ) -> CheckedBatch:
        """Check a batch by Triton kernels; `given` are its bags before padding."""
        faults, safe_bags, counts_K = _make_safe(
            bags, limits.rows_K, None if given is bags else given
        )
        safe = features
        inverse, is_foreign = _safe_inverse_indices(features)
        if is_foreign is not None:
            faults[:1].logical_or_(is_foreign)
            parts = given._replace(inverse_indices=inverse)
            safe = KeyedJaggedTensor.from_parts(**parts._asdict())
        if not self._is_pooled:  # whose output has lengths, too
            lengths, offsets = safe_bags.lengths, safe_bags.offsets
            safe = KeyedJaggedTensor.from_parts(
                bags.keys, bags.values, None, lengths, offsets, stride=bags.stride
            )
        is_variable = given is not bags
        return CheckedBatch(features, safe, bags, safe_bags, counts_K, limits, faults, is_variable)

    def bad_ids_raise(self) -> bool:
        """Return whether bad ids raise an error."""
        return self.mode is BoundsCheckMode.FATAL or (
            self.mode is BoundsCheckMode.WARNING and _warnings_raise()
        )

    def flags_to_check_late(self, faults: Tensor) -> Tensor:
        """Return the flags of a batch that a later batch reads and reports."""
        return faults[:1] if self.mode is BoundsCheckMode.IGNORE else faults

    def describe(self, checked: CheckedBatch) -> tuple[Exception | None, str]:
        """Return the error of a batch, and the warning about its ids; waits for the device."""
        if bool(checked.faults[:1].any()):
            try:
                checked.given.validate()
            except ValueError as error:
                return error, ""
            text = "The lengths or inverse indices of the batch do not fit its ids."
            return ValueError(text), ""
        if self.mode is BoundsCheckMode.IGNORE:
            return None, ""
        message = self._describe_bad_ids(checked)
        warning = message if self.mode is BoundsCheckMode.WARNING else ""
        return (IndexError(message) if self.bad_ids_raise() else None), warning

    def report(self, checked: CheckedBatch) -> None:
        """Raise the error of a batch with faults, or warn."""
        error, warning = self.describe(checked)
        if error is not None:
            raise error
        warn_of_bad_ids(warning)

    def _describe_bad_ids(self, checked: CheckedBatch) -> str:
        """Return the message about the first id outside its table."""
        keys, bags, rows_K = checked.given.keys(), checked.found, checked.limits.rows_K
        bad_N = find_bad_ids(bags.values, bags.offsets, rows_K)
        if not bool(bad_N.any()):
            return OVERWRITTEN
        tables = [self._smallest.get(key, (0, ""))[1] for key in keys]
        return bad_id_message(bad_N, bags.values, bags.offsets, rows_K, keys, tables)


def warn_of_bad_ids(text: str) -> None:
    """Warn with the text of `BatchChecker.describe`, if there is one."""
    if text:
        warnings.warn(f"{text} Row 0 is read instead.", UserWarning, stacklevel=5)


def with_one_batch_size(bags: Parts, strides: Sequence[int]) -> Parts:
    """Pad the features of fewer samples with empty bags."""
    longest = max(strides, default=0)
    bags_K = np.array(strides, dtype=np.int64)
    # the zeros of all features are appended, then each feature's zeros are moved behind its lengths
    empty_K = longest - bags_K
    with_zeros = torch.nn.functional.pad(bags.lengths, (0, int(empty_K.sum())))
    lengths = ops.swap_segments(with_zeros, np.stack([bags_K, empty_K]))
    return bags._replace(
        lengths=lengths,
        offsets=ops.complete_cumsum(lengths),
        stride=longest,
        stride_per_key_per_rank=None,
    )


def _are_checked_by_triton(bags: Parts, mode: BoundsCheckMode) -> bool:
    """Return whether `make_safe` supports a batch and the mode.

    Args:
        bags: The bags of a batch after `check_features`, padded to one batch size.
        mode: Handling of bad ids.
    """
    return (
        bags.values.is_cuda
        and ops.HAS_TRITON
        and mode is not BoundsCheckMode.NONE
        and bags.lengths.numel() > 0
    )


def _make_safe(
    bags: Parts, num_rows_F: Tensor, unpadded: Parts | None = None
) -> tuple[Tensor, Parts, Tensor]:
    """Sanitize a batch: replace bad bags and ids, without a host wait.

    Inverse indices are not changed: see `_safe_inverse_indices`.

    Args:
        bags: The bags of a batch for which `_are_checked_by_triton` holds, with one batch size.
        num_rows_F: [F] int64 rows of the table that each feature reads; the largest int64 if all
            ids are valid.
        unpadded: The same bags before padding, if they were padded to one batch size.

    Returns:
        [2] int32, whether bags and whether ids are bad; the batch with valid bags and with 0 for
        bad ids; and the [F] int64 number of ids of each feature.

    Raises:
        ValueError: `length_per_key` is inconsistent.
    """
    from recsys.kernels import ops_triton

    known, first_ids = bags.length_per_key, None
    if known is not None:
        check_length_per_key(bags.keys, known, bags.values)
        first_ids = ops.upload([0, *accumulate(known)], bags.values.device)
    original = None if unpadded is None else (unpadded.lengths, unpadded.offsets)
    counts_of_faults, lengths, offsets, values, counts = ops_triton.make_safe(
        bags.lengths, bags.offsets, bags.values, num_rows_F, first_ids, original
    )
    return counts_of_faults, bags._replace(lengths=lengths, offsets=offsets, values=values), counts


def _sanitize_on_device(
    features: KeyedJaggedTensor, sizes: list[int] | None
) -> tuple[KeyedJaggedTensor, Tensor]:
    """Sanitize the bags of a batch on a device, without a host wait.

    Args:
        features: A batch after `check_features`.
        sizes: Its `length_per_key` if buffers are allocated by it, else None.

    Returns:
        The batch, with valid lengths and inverse indices. If `sizes` are given, they are the
        numbers of ids per feature. And a [] bool, whether the batch was bad; `NO_FAULTS` if it
        cannot be.

    Raises:
        ValueError: A feature has ids but no bags, or `length_per_key` is inconsistent.
    """
    values, lengths = features.values(), features.lengths()
    num_ids = values.numel()
    if values.is_meta:
        return features, NO_FAULTS
    known = None
    if sizes is not None:
        check_length_per_key(features.keys(), sizes, values)
    if not lengths.numel():
        check_total("KeyedJaggedTensor", 0, values)
        return features, NO_FAULTS
    is_bad = are_bags_bad(lengths, features.offsets(), num_ids)
    if sizes is not None:
        first_bags, first_ids, sizes_F = _known_sizes(features, sizes)
        is_bad = is_bad | (features.offsets().index_select(0, first_bags) != first_ids).any()
        known = first_bags, sizes_F
    inverse, is_foreign = _safe_inverse_indices(features)
    if is_foreign is not None:
        is_bad = is_bad | is_foreign
    safe = KeyedJaggedTensor.from_parts(
        features.keys(),
        values,
        features.weights_or_none(),
        safe_lengths(lengths, is_bad, num_ids, known),
        stride=features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() or None,
        length_per_key=sizes,
        inverse_indices=inverse,
    )
    return safe, is_bad


def _safe_inverse_indices(
    features: KeyedJaggedTensor,
) -> tuple[tuple[list[str], Tensor] | None, Tensor | None]:
    """Clamp the inverse indices of a batch on a device to its bags, without a host wait.

    Args:
        features: A batch.

    Returns:
        The indices, or None; and a [] bool, whether an index was clamped, or None.
    """
    inverse = features.inverse_indices_or_none()
    if inverse is None or not inverse[1].numel():
        return inverse, None
    keys, rows = inverse
    strides = dict(zip(features.keys(), features.stride_per_key(), strict=True))
    numbers = torch.iinfo(rows.dtype)
    limits = [(0, strides[k] - 1) if k in strides else (numbers.min, numbers.max) for k in keys]
    low, high = ops.upload(np.array(limits), rows.device, rows.dtype).unbind(1)
    safe_rows = torch.maximum(torch.minimum(rows, high.unsqueeze(1)), low.unsqueeze(1))
    return (keys, safe_rows), (safe_rows != rows).any()


def _known_sizes(features: KeyedJaggedTensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Return the first bag, the first id and the number of ids of each feature with bags.

    Raises:
        ValueError: A feature has ids but no bags.
    """
    bags_F, sizes_F = np.array(features.stride_per_key()), np.array(sizes)
    has_bags = bags_F > 0
    if sizes_F[~has_bags].any():
        features.validate()
    before = [x.cumsum() - x for x in (bags_F, sizes_F)]
    known = np.stack([*before, sizes_F])[:, has_bags]
    return ops.upload(known, features.device()).unbind()
