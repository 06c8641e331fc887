"""Bytes between ranks, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recsys.distributed.placement.layout import Layout
from recsys.distributed.placement.plan_layout import layout_of_plan
from recsys.distributed.placement.traffic import traffic_of
from recsys.distributed.sharding_plan import (
    apply_to_all,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection


def layout_of(generator: Any, features: int = 1) -> Layout:
    """One table of 8 rows and 16 columns, on two nodes of two ranks."""
    table = EmbeddingBagConfig(
        name="t",
        embedding_dim=16,
        num_embeddings=8,
        feature_names=[f"f{i}" for i in range(features)],
    )
    ebc = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    plan = construct_module_sharding_plan(
        ebc, apply_to_all(ebc, generator), local_size=2, world_size=4, device_type="cpu"
    )
    return layout_of_plan(ebc, plan, world_size=4, local_size=2)


# One sample of one id on each rank; an id and a length take 4 bytes, the embedding takes 64.
@pytest.mark.parametrize(
    ("generator", "ids", "sums", "embeddings"),
    [
        (table_wise(1), [0, 8, 0, 0], [[0] * 4] * 4, [[0] * 4, [64] * 4, [0] * 4, [0] * 4]),
        (row_wise(), [5, 5, 5, 5], [[0] * 4] * 4, [[64] * 4] * 4),
        (
            column_wise(size_per_rank=[4, 12]),
            [8, 8, 0, 0],
            [[0] * 4] * 4,
            [[16] * 4, [48] * 4, [0] * 4, [0] * 4],
        ),
        (
            table_row_wise(1),
            [0, 0, 6, 6],
            [[0] * 4, [0] * 4, [0, 0, 128, 128], [0, 0, 128, 128]],
            [[0] * 4, [0] * 4, [64, 0, 64, 0], [0, 64, 0, 64]],
        ),
        (
            grid_shard([0, 1]),
            [6, 6, 6, 6],
            [[64, 64, 0, 0], [64, 64, 0, 0], [0, 0, 64, 64], [0, 0, 64, 64]],
            [[32, 0, 32, 0], [0, 32, 0, 32], [32, 0, 32, 0], [0, 32, 0, 32]],
        ),
        (data_parallel(), [0] * 4, [[0] * 4] * 4, [[0] * 4] * 4),
    ],
)
def test_one_sample(
    generator: Any, ids: list[int], sums: list[list[int]], embeddings: list[list[int]]
) -> None:
    traffic = traffic_of(layout_of(generator))
    assert traffic.ids_RR.tolist() == [ids] * 4
    assert traffic.node_sums_RR.tolist() == sums
    assert traffic.embeddings_RR.tolist() == embeddings


def test_grows_with_samples_ids_and_features() -> None:
    traffic = traffic_of(layout_of(table_wise(1), 2), samples_per_rank=10, ids_per_sample=3)
    assert traffic.ids_RR[0].tolist() == [0, 2 * 10 * (3 * 4 + 4), 0, 0]
    assert traffic.embeddings_RR[1].tolist() == [2 * 10 * 64] * 4
    sequence = traffic_of(layout_of(row_wise()), ids_per_sample=8, pooled=False)
    assert sequence.embeddings_RR.tolist() == [[2 * 64] * 4] * 4
