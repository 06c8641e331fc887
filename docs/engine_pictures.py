"""Draw the pictures of docs/engine.md from real layouts: `python docs/engine_pictures.py`.

Each picture contains a digest of its layout, by which a test detects an outdated picture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

from recsys.distributed.placement.layout import Layout
from recsys.distributed.placement.plan_layout import layout_of_plan
from recsys.distributed.placement.traffic import traffic_of
from recsys.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection

FOLDER = Path(__file__).parent / "engine"
SAMPLES = 1024

PLANS: Mapping[str, Mapping[str, ParameterShardingGenerator]] = {
    "strategies": {
        "table_wise": table_wise(rank=1),
        "row_wise": row_wise(),
        "column_wise": column_wise(ranks=[0, 3]),
        "table_row_wise": table_row_wise(host_index=1),
        "table_column_wise": table_column_wise(host_index=0),
        "grid_shard": grid_shard(host_indexes=[0, 1]),
        "data_parallel": data_parallel(),
    },
    "row_wise": {"users": row_wise()},
    "two_hops": {"users": grid_shard(host_indexes=[0, 1])},
}


def layout_of(generators: Mapping[str, ParameterShardingGenerator]) -> Layout:
    """Return the layout of tables of 1,000,000 x 64 on two nodes of two ranks."""
    tables = [
        EmbeddingBagConfig(
            name=name, embedding_dim=64, num_embeddings=1_000_000, feature_names=[name]
        )
        for name in generators
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    plan = construct_module_sharding_plan(
        collection, generators, local_size=2, world_size=4, device_type="cpu"
    )
    return layout_of_plan(collection, plan, world_size=4, local_size=2)


def digest_of(layout: Layout) -> str:
    """Return a digest of the facts that a picture of a layout shows."""
    traffic = traffic_of(layout, samples_per_rank=SAMPLES)
    shown = [(table.name, table.num_rows, table.dim, table.rects) for table in layout.tables]
    sizes = [
        bytes_RR.tolist()
        for bytes_RR in (traffic.ids_RR, traffic.node_sums_RR, traffic.embeddings_RR)
    ]
    return hashlib.sha256(repr((shown, sizes)).encode()).hexdigest()[:16]


def draw(folder: Path) -> None:
    """Write every picture."""
    import matplotlib as mpl

    folder.mkdir(exist_ok=True)
    for name, generators in PLANS.items():
        layout = layout_of(generators)
        metadata = {"Date": None, "Description": f"layout {digest_of(layout)}"}
        with mpl.rc_context({"svg.hashsalt": "recsys", "svg.fonttype": "none"}):
            figure = layout.plot(samples_per_rank=SAMPLES)
            figure.savefig(folder / f"{name}.svg", metadata=metadata)


if __name__ == "__main__":
    draw(FOLDER)
