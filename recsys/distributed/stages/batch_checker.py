"""Checks of a batch before its ids are sent, and the errors for their findings.

On a CPU a bad batch raises. On a device the checks leave flags there, and bad values are replaced,
so that kernels stay within their tables; the header carries the flags to all ranks.
"""

from __future__ import annotations

import warnings
from typing import final

import numpy as np
import torch
from torch import Tensor

from recsys.distributed.ranks import comm
from recsys.distributed.stages.bags import smallest_table, with_one_batch_size
from recsys.distributed.stages.batch import NO_FAULTS, BatchContext, CheckedBatch
from recsys.distributed.stages.header import Flag, check_same_call
from recsys.distributed.stages.routes import Routes
from recsys.distributed.stages.streams import StagedModule
from recsys.kernels.bounds import OVERWRITTEN, bad_id_message, find_bad_ids
from recsys.kernels.types import BoundsCheckMode
from recsys.modules.embedding_inputs import (
    are_checked_by_triton,
    make_safe,
    safe_features,
    safe_inverse_indices,
)
from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.keyed_bags import Parts


def _warnings_raise() -> bool:
    """Return whether Python is set to raise warnings, such as by `python -W error`."""
    for action, message, category, module, line in warnings.filters:
        if message is None and module is None and line == 0 and issubclass(UserWarning, category):
            return action == "error"
    return False


@final
class BatchChecker:
    """Makes batches safe to read, and describes their faults.

    Args:
        module: The module.
        needs_sizes: Whether the host must know the ids of each feature, to send no header.
    """

    def __init__(self, module: StagedModule, *, needs_sizes: bool) -> None:
        self._module, self._needs_sizes = module, needs_sizes

    def check(self, features: KeyedJaggedTensor, bags: Parts, routes: Routes) -> CheckedBatch:
        """Return the batch with one batch size, id 0 instead of bad ones, and its faults.

        Args:
            features: The batch, whose structure is valid (`check_features`).
            bags: Its parts.
            routes: Index tensors for its keys.
        """
        is_variable, by_kernels = bags.stride_per_key_per_rank is not None, False
        safe, bad_bags, pooled = features, None, self._module.is_pooled
        if self._module.device.type != "cpu":  # there check_features has raised
            if not self._needs_sizes or (pooled and routes.reads_whole):
                bags = bags._replace(length_per_key=None)  # checking it costs an upload
            # the output of sequences has the lengths, which are not to be padded
            can_check = are_checked_by_triton(bags, self._module.mode)
            by_kernels = (pooled or not is_variable) and can_check
            if not by_kernels:
                safe, bad_bags = safe_features(features, bags.length_per_key)
                bags = safe.parts()
        given = bags
        if is_variable:
            bags = with_one_batch_size(bags, features.stride_per_key())
        if by_kernels:
            return self._check_by_kernels(features, bags, given, routes)
        found, faults = bags, NO_FAULTS
        bad_N = self._find_bad_ids(bags, routes)
        if bad_N.numel():
            bad_ids = _without_unread(bad_N, bags, routes).any()
            bags = bags._replace(values=bags.values.masked_fill(bad_N, 0))
            faults = torch.stack([torch.zeros_like(bad_ids), bad_ids])
        if bad_bags is not None:
            faults = torch.stack([bad_bags, faults[-1] if bad_N.numel() else bad_bags & False])
        return CheckedBatch(
            features, safe, routes, found, bags, bags.ids_per_key(), faults, is_variable
        )

    def _check_by_kernels(
        self, features: KeyedJaggedTensor, bags: Parts, given: Parts, routes: Routes
    ) -> CheckedBatch:
        """Check a batch by Triton kernels; `given` are its bags before padding."""
        faults, safe_bags, counts_K = make_safe(
            bags, routes.limits.rows_K, None if given is bags else given
        )
        safe = features
        inverse, is_foreign = safe_inverse_indices(features)
        if is_foreign is not None:
            faults[:1].logical_or_(is_foreign)
            parts = given._replace(inverse_indices=inverse)
            safe = KeyedJaggedTensor.from_parts(**parts._asdict())
        if not self._module.is_pooled:  # whose output has lengths, too
            lengths, offsets = safe_bags.lengths, safe_bags.offsets
            safe = KeyedJaggedTensor.from_parts(
                bags.keys, bags.values, None, lengths, offsets, stride=bags.stride
            )
        is_variable = given is not bags
        return CheckedBatch(features, safe, routes, bags, safe_bags, counts_K, faults, is_variable)

    def _find_bad_ids(self, bags: Parts, routes: Routes) -> Tensor:
        """Return `[N]` bool for ids outside their table, or an empty tensor if there are none."""
        if self._module.mode is BoundsCheckMode.NONE or not bags.values.numel():
            return NO_FAULTS
        if bags.values.is_cpu and bags.are_ids_below(routes.limits.least):
            return NO_FAULTS
        return find_bad_ids(bags.values, bags.offsets, routes.limits.rows_K)

    def flag_of_bad_ids(self) -> int:
        """Return the header flag of a batch with bad ids."""
        # an error here must be one on all ranks
        fails = self._module.mode is BoundsCheckMode.FATAL or (
            self._module.mode is BoundsCheckMode.WARNING and _warnings_raise()
        )
        return Flag.FAILED if fails else Flag.WARNED

    def flags_to_check_late(self, faults: Tensor) -> Tensor:
        """Return the fault flags to read after the step if there is no header."""
        return faults[:1] if self._module.mode is BoundsCheckMode.IGNORE else faults

    def raise_faults(self, ctx: BatchContext, flags_R: np.ndarray) -> str:
        """Raise the error of any rank; return the warning of this rank.

        Args:
            ctx: The batch.
            flags_R: `[R]` flags of the headers.
        """
        error, own_flag, warning = ctx.error, int(flags_R[self._module.env.rank]), ""
        check_same_call(flags_R)
        if ctx.is_good and own_flag & (Flag.FAILED | Flag.WARNED):
            error, warning = self._describe(ctx.checked, own_flag)
        if (flags_R & Flag.FAILED).any():
            comm.raise_together(self._module.env, "tell of a bad batch", error)
        return warning

    def report_late(self, checked: CheckedBatch) -> None:
        """Raise or warn of the faults of a batch that had no header."""
        are_bags_bad = bool(checked.faults[:1].any())
        flag = Flag.FAILED if are_bags_bad else self.flag_of_bad_ids()
        error, warning = self._describe(checked, flag)
        comm.raise_together(self._module.env, "tell of a bad batch", error)
        if warning:
            warnings.warn(f"{warning} Row 0 is read instead.", UserWarning, stacklevel=4)

    def _describe(self, checked: CheckedBatch, flag: int) -> tuple[Exception | None, str]:
        """Return the error of a batch, and the warning about its ids; waits for the device."""
        if bool(checked.faults[:1].any()):
            try:
                checked.given.validate()
            except ValueError as error:
                return error, ""
            text = "The lengths or inverse indices of the batch do not fit its ids."
            return ValueError(text), ""
        message = self._describe_bad_ids(checked)
        warning = message if self._module.mode is BoundsCheckMode.WARNING else ""
        return (IndexError(message) if flag & Flag.FAILED else None), warning

    def _describe_bad_ids(self, checked: CheckedBatch) -> str:
        """Return the message about the first id outside its table."""
        keys, bags, routes = checked.given.keys(), checked.found, checked.routes
        bad_N = find_bad_ids(bags.values, bags.offsets, routes.limits.rows_K)
        bad_N = _without_unread(bad_N, bags, routes)
        if not bool(bad_N.any()):
            return OVERWRITTEN
        module = self._module
        tables = [smallest_table(module.layout, module.feature_names, key) for key in keys]
        return bad_id_message(bad_N, bags.values, bags.offsets, routes.limits.rows_K, keys, tables)


def _without_unread(bad_N: Tensor, bags: Parts, routes: Routes) -> Tensor:
    """Return which bad ids a table reads; features that no table reads may have any ids."""
    unread_K = routes.limits.unread_K
    if not unread_K.numel():
        return bad_N
    return bad_N & ~unread_K.repeat_interleave(bags.ids_per_key(), output_size=bad_N.numel())
