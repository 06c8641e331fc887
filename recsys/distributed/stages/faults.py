"""Faults of a batch, exchanged in the headers: every rank raises the error of any rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recsys.distributed.ranks.agreement import raise_together
from recsys.distributed.stages.batch import BatchContext
from recsys.distributed.stages.header import Flag, check_same_call
from recsys.modules.tables.batch_checker import BatchChecker, CheckedBatch, warn_of_bad_ids

if TYPE_CHECKING:
    from recsys.distributed.stages.input_dist import InputDist


def flag_of_bad_ids(checker: BatchChecker) -> int:
    """Return the header flag of a batch with bad ids."""
    return Flag.FAILED if checker.bad_ids_raise() else Flag.WARNED


def report_late(stage: InputDist, checked: CheckedBatch) -> None:
    """Raise or warn of the faults of a batch that had no header."""
    error, warning = stage.checker.describe(checked)
    raise_together(stage.module.env, "exchange a bad batch", error)
    warn_of_bad_ids(warning)


def raise_faults(ctx: BatchContext, flags_R: np.ndarray) -> str:
    """Raise the error of any rank; return the warning of this rank.

    Args:
        ctx: The batch.
        flags_R: `[R]` flags of the headers.
    """
    stage, error, warning = ctx.stage, ctx.error, ""
    own_flag = int(flags_R[stage.module.env.rank])
    check_same_call(flags_R)
    if ctx.is_good and own_flag & (Flag.FAILED | Flag.WARNED):
        # waits for the device, but only for a batch with faults
        error, warning = stage.checker.describe(ctx.checked)
    if (flags_R & Flag.FAILED).any():
        # a collective: every rank has the same flags, so every rank enters it
        raise_together(stage.module.env, "exchange a bad batch", error)
    return warning
