"""Policies and filters become rules of `HashedIds`. The folder `cases` has the filters' values."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from recsys.compat.eviction_policies import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    average_threshold_filter,
    dynamic_threshold_filter,
    probabilistic_threshold_filter,
)
from recsys.modules.hashed_ids import LFU, LRU, AtLeast, DistanceLFU, Probability


def test_policies_become_rules() -> None:
    assert LFU_EvictionPolicy().eviction == LFU()
    assert LRU_EvictionPolicy(decay_exponent=0.5).eviction == LRU()
    assert DistanceLFU_EvictionPolicy().eviction == DistanceLFU(1)
    assert DistanceLFU_EvictionPolicy(decay_exponent=3.0).eviction == DistanceLFU(3)
    for exponent in (0, 1.5, 5):
        with pytest.raises(ValueError, match=rf"must be 1, 2, 3 or 4; received {exponent}\."):
            DistanceLFU_EvictionPolicy(exponent)
    with pytest.raises(ValueError, match="decay_exponent must be above 0; received 0"):
        LRU_EvictionPolicy(0)


FILTERS = (
    (None, None),
    (average_threshold_filter, AtLeast(2)),
    (dynamic_threshold_filter, AtLeast(11)),
    (lambda counts: dynamic_threshold_filter(counts, 2.5), AtLeast(3)),
    (lambda counts: dynamic_threshold_filter(counts, threshold_skew_multiplier=0.5), None),
    (probabilistic_threshold_filter, Probability(0.01)),
    (partial(probabilistic_threshold_filter, per_id_probability=0.3), Probability(0.3)),
    (partial(probabilistic_threshold_filter, per_id_probability=1.0), None),
)


@pytest.mark.parametrize(("filtering", "admission"), FILTERS)
@pytest.mark.parametrize(
    "policy", [LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy]
)
def test_filters_become_admissions(policy: Any, filtering: Any, admission: Any) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert policy(threshold_filtering_func=filtering).admission == admission
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("multiple", [1.0, 1.5, 4.0])
def test_a_count_that_is_not_admitted_passes_no_filter(multiple: float) -> None:
    """The filter compares with a multiple of the mean, which is 1 at least."""
    admission = LFU_EvictionPolicy(
        lambda counts: dynamic_threshold_filter(counts, multiple)
    ).admission
    assert isinstance(admission, AtLeast)
    counts = torch.ones(100_000, dtype=torch.int64)
    counts[0], counts[1] = admission.batches - 1, admission.batches
    passes, _ = dynamic_threshold_filter(counts, multiple)
    assert passes[:3].tolist() == [False, True, False]


def test_other_filters_are_refused() -> None:
    for number, function in (
        (0, lambda counts: (counts > 3, 3)),
        (2, lambda counts: (average_threshold_filter(counts), dynamic_threshold_filter(counts))),
    ):
        with pytest.raises(ValueError, match=f"a function that calls {number} of them"):
            LFU_EvictionPolicy(threshold_filtering_func=function)  # type: ignore[arg-type]
