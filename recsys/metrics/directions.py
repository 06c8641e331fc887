"""Whether a larger or a smaller value of a metric is better."""

from __future__ import annotations

import re

from recsys.kernels.checked import checked

__all__ = ["is_larger_better"]

_LARGER = frozenset(
    "accuracy auc auprc binned_auc f1 gauc grouped_auc grouped_auprc grouped_rauc "
    "hindsight_target_pr hindsight_target_precision hindsight_target_recall hit_rate map mrr "
    "multi_label_precision multiclass_recall ndcg precision precision_session_level r_squared "
    "rauc recall recall_session_level xauc".split()
)
_SMALLER = frozenset(
    "cali_free_ne log_loss logloss loss mae mape mse ne ne_positive nmse nrmse recalibrated_ne "
    "rmse segmented_ne serving_ne unweighted_ne".split()
)
_NAME = re.compile(r"(?:.*\|)?(?:lifetime_|window_|attempt_)?([^/@]*)(?:[/@].*)?")


@checked
def is_larger_better(name: str) -> bool | None:
    """Return whether a larger value of a metric is better; None if the name does not decide it.

    Args:
        name: Name of a metric, also with a task (`auc/click`), a number of items (`ndcg@10`), or as
            a key of `RecMetricModule` (`ne-click|window_ne`).

    Example:
        >>> [is_larger_better(name) for name in ("auc/click", "ne-click|window_ne", "calibration")]
        [True, False, None]
    """
    found = _NAME.fullmatch(name)
    base = found[1].lower() if found else ""
    return base in _LARGER if base in _LARGER | _SMALLER else None
