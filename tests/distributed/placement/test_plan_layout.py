"""A plan's layout without ranks equals the layout of the sharded module."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from recsys.distributed.placement.layout import Layout
from recsys.distributed.placement.plan_layout import layout_of_plan
from tests.distributed.cases import Case, shard
from tests.ranks import RankPool


def _layout_of_rank(case: Case) -> Layout | None:
    layout: Layout = shard(case).module.ebc.layout
    return replace(layout, tables=()) if dist.get_rank() == 0 else None


@pytest.mark.parametrize("pooled", [True, False])
def test_is_that_of_the_sharded_module(ranks: RankPool, pooled: bool) -> None:
    for seed in range(4):
        case = Case(seed, 2, pooled=pooled)
        sharded = ranks(2, _layout_of_rank, case)[0]
        planned = layout_of_plan(case.model().ebc, case.plan().plan["ebc"], 2)  # type: ignore[arg-type]
        assert sharded is not None
        assert planned.streams == sharded.streams
        assert planned.send_segments == sharded.send_segments
        assert planned.rank_widths == sharded.rank_widths
        assert planned.slots == sharded.slots


def test_plans_that_do_not_fit() -> None:
    case = Case(0, 2)
    with pytest.raises(ValueError, match="plan of module 'EmbeddingBagCollection' must name"):
        layout_of_plan(case.model().ebc, {}, 2)  # type: ignore[arg-type]
