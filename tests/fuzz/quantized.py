"""Random models, plans and rows: sharded and unsharded models have equal quantized rows."""

from __future__ import annotations

import random

from recsys.distributed.types import ShardingType
from tests.distributed.cases import Case
from tests.inference.quant.test_sources import quantizes
from tests.ranks import RankError, RankPool


def complaint_about(pool: RankPool, seed: int) -> str | None:
    """Return the difference for the case of a seed, or None."""
    rng = random.Random(seed)
    num_ranks = rng.randint(1, 3)
    case = Case(seed, num_ranks, tuple(ShardingType), optimizer=None, pooled=rng.random() < 0.6)
    try:
        pool(num_ranks, quantizes, case, 0)
    except RankError as error:
        return f"{num_ranks} ranks, {case}: {str(error)[-600:]}"
    return None
