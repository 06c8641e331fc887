"""TorchRec's eviction policies and filters of new ids, as rules of `HashedIds`."""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from math import floor

import torch
from torch import Tensor

from recsys.base.arguments import finite
from recsys.modules.hashed_ids import LFU, LRU, AtLeast, DistanceLFU, Probability

Admission = AtLeast | Probability | None
Filter = Callable[[Tensor], tuple[Tensor, float | Tensor]]
"""Function of the counts of ids that returns which ids pass, and the threshold."""

_admissions: ContextVar[list[Admission] | None] = ContextVar("admissions", default=None)


def _note(admission: Admission) -> None:
    noted = _admissions.get()
    if noted is not None:
        noted.append(admission)


def average_threshold_filter(id_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return which counts are above their mean, and the mean.

    As the filter of a policy it becomes `AtLeast(2)`: the mean is at least 1.

    Args:
        id_counts: Counts of ids, `[N]`.

    Example:
        >>> average_threshold_filter(torch.tensor([1, 1, 4]))
        (tensor([False, False,  True]), tensor(2.))
    """
    _note(AtLeast(2))
    mean = id_counts.float().mean()
    return id_counts > mean, mean


def dynamic_threshold_filter(
    id_counts: Tensor, threshold_skew_multiplier: float = 10.0
) -> tuple[Tensor, Tensor]:
    """Return which counts are above a multiple of their mean, and that multiple.

    As the filter of a policy it becomes `AtLeast(n)` with the smallest count that can pass.

    Args:
        id_counts: Counts of ids, `[N]`.
        threshold_skew_multiplier: Multiple of the mean.

    Example:
        >>> dynamic_threshold_filter(torch.tensor([1, 1, 10]), 2.0)
        (tensor([False, False,  True]), tensor(8.))
    """
    least = floor(finite("threshold_skew_multiplier", threshold_skew_multiplier)) + 1
    _note(AtLeast(least) if least > 1 else None)
    threshold = threshold_skew_multiplier * (1 / id_counts.numel()) * id_counts.sum()
    return id_counts > threshold, threshold


def probabilistic_threshold_filter(
    id_counts: Tensor, per_id_probability: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Return which ids pass at random, each occurrence with a probability, and the random numbers.

    As the filter of a policy it becomes `Probability(p)`, for each batch that has the id.

    Args:
        id_counts: Counts of ids, `[N]`.
        per_id_probability: Probability `p` of one occurrence.

    Example:
        >>> probabilistic_threshold_filter(torch.tensor([0, 1]), 1.0)[0]
        tensor([False,  True])
    """
    _note(Probability(per_id_probability) if per_id_probability < 1 else None)
    missed = torch.full(id_counts.shape, 1 - per_id_probability, device=id_counts.device)
    drawn = torch.rand(id_counts.shape, device=id_counts.device)
    return 1 - missed**id_counts > drawn, drawn


def _admission_of(filtering: Filter | None) -> Admission:
    """Return the admission of the filter that a function calls."""
    if filtering is None:
        return None
    noted: list[Admission] = []
    token = _admissions.set(noted)
    try:
        with torch.random.fork_rng(devices=[]):
            filtering(torch.ones(1, dtype=torch.int64))
    finally:
        _admissions.reset(token)
    if len(noted) != 1:
        raise ValueError(
            "threshold_filtering_func must call one of average_threshold_filter, "
            "dynamic_threshold_filter and probabilistic_threshold_filter; received a function that "
            f"calls {len(noted)} of them. Use a plain collection whose tables have "
            "ids=HashedIds(admission=...)."
        )
    return noted[0]


class EvictionPolicy:
    """Base of the three policies.

    Args:
        eviction: Rule of the id that loses its row.
        filtering: Function that calls one of the three filters, or None.

    Raises:
        ValueError: The function calls none of the three filters.
    """

    def __init__(self, eviction: LRU | LFU | DistanceLFU, filtering: Filter | None) -> None:
        self.eviction, self.admission = eviction, _admission_of(filtering)


class LFU_EvictionPolicy(EvictionPolicy):
    """Eviction of the least frequently used id: `LFU()`.

    Args:
        threshold_filtering_func: Filter of new ids; see `average_threshold_filter` and others.

    Raises:
        ValueError: The function calls none of the three filters.
    """

    def __init__(self, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__(LFU(), threshold_filtering_func)


class LRU_EvictionPolicy(EvictionPolicy):
    """Eviction of the least recently used id: `LRU()`.

    Args:
        decay_exponent: Above 0; without an effect, as it does not change the order of ids.
        threshold_filtering_func: As for `LFU_EvictionPolicy`.

    Raises:
        ValueError: The exponent is not above 0, or the function calls none of the three filters.
    """

    def __init__(
        self, decay_exponent: float = 1.0, threshold_filtering_func: Filter | None = None
    ) -> None:
        if finite("LRU_EvictionPolicy.decay_exponent", decay_exponent) <= 0:
            raise ValueError(
                f"LRU_EvictionPolicy.decay_exponent must be above 0; received {decay_exponent}."
            )
        super().__init__(LRU(), threshold_filtering_func)


class DistanceLFU_EvictionPolicy(EvictionPolicy):
    """Eviction of the id with the lowest count / distance^exponent: `DistanceLFU(exponent)`.

    Args:
        decay_exponent: Whole number from 1 to 4.
        threshold_filtering_func: As for `LFU_EvictionPolicy`.

    Raises:
        ValueError: The exponent is another number, or the function calls none of the three filters.
    """

    def __init__(
        self, decay_exponent: float = 1.0, threshold_filtering_func: Filter | None = None
    ) -> None:
        if decay_exponent not in (1, 2, 3, 4):
            raise ValueError(
                "DistanceLFU_EvictionPolicy.decay_exponent must be 1, 2, 3 or 4; received "
                f"{decay_exponent}."
            )
        super().__init__(DistanceLFU(int(decay_exponent)), threshold_filtering_func)


class HashZchEvictionPolicyName(enum.Enum):
    """Eviction of a `HashZchManagedCollisionModule`."""

    SINGLE_TTL_EVICTION = "SINGLE_TTL_EVICTION"
    PER_FEATURE_TTL_EVICTION = "PER_FEATURE_TTL_EVICTION"
    LRU_EVICTION = "LRU_EVICTION"


@dataclass
class HashZchEvictionConfig:
    """Settings of an eviction; without an effect, as no id expires by the clock.

    Args:
        features: Features of the table.
        single_ttl: Hours without an id after which it expires.
        per_feature_ttl: The same by feature.
    """

    features: list[str]
    single_ttl: int | None = None
    per_feature_ttl: list[int] | None = None
