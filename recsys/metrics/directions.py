"""Directions of metrics: a larger or a smaller value is better."""

from __future__ import annotations

import re

from recsys.base.checked import checked

__all__ = ["is_larger_better"]

_LARGER = re.compile(
    "accuracy|auc|auprc|binned_auc|f1|gauc|grouped_(auc|auprc|rauc)|hindsight_target_(pr|precision|"
    "recall)|hit_rate|map|mrr|multi_label_precision|multiclass_recall|ndcg|r_squared|rauc|xauc|"
    "(precision|recall)(_session_level)?"
)
_SMALLER = re.compile(
    "(cali_free_|recalibrated_|segmented_|serving_|unweighted_)?ne|ne_positive|log_?loss|loss|mae|"
    "mape|mse|nmse|nrmse|rmse"
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
    match = _NAME.fullmatch(name)
    base = match[1].lower() if match else ""
    return True if _LARGER.fullmatch(base) else False if _SMALLER.fullmatch(base) else None
