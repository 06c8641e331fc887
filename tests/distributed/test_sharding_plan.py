"""Plans by hand: the placement of each helper equals TorchRec 1.8.0's, except where noted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.sharding_plan import (
    ParameterShardingGenerator,
    apply_to_all,
    calculate_shard_sizes_and_offsets,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    placement_helper,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from recsys.distributed.types import ParameterSharding
from recsys.kernels.types import EmbOptimType
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward


def collection(*names: str, rows: int = 10, dim: int = 16) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name=n, embedding_dim=dim, num_embeddings=rows, feature_names=[n])
        for n in names
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


def place(
    generator: ParameterShardingGenerator, rows: int = 10, dim: int = 16, device: str = "cuda"
) -> ParameterSharding:
    """Places a table on two nodes of two ranks each."""
    plan = construct_module_sharding_plan(
        collection("t", rows=rows, dim=dim),
        {"t": generator},
        local_size=2,
        world_size=4,
        device_type=device,
    )
    return plan["t"]


def shards_of(placed: ParameterSharding) -> list[tuple[list[int], list[int], object]]:
    assert placed.sharding_spec is not None
    shards = placed.sharding_spec.shards
    assert placed.ranks == [shard.rank for shard in shards]
    return [(shard.shard_offsets, shard.shard_sizes, shard.placement) for shard in shards]


@pytest.mark.parametrize(
    ("generator", "kind", "expected"),
    [
        (table_wise(rank=3), "table_wise", [([0, 0], [10, 16], "rank:3/cuda:1")]),
        (
            row_wise(),
            "row_wise",
            [
                ([0, 0], [3, 16], "rank:0/cuda:0"),
                ([3, 0], [3, 16], "rank:1/cuda:1"),
                ([6, 0], [3, 16], "rank:2/cuda:0"),
                ([9, 0], [1, 16], "rank:3/cuda:1"),
            ],
        ),
        (
            row_wise(num_buckets=5),
            "row_wise",
            [
                ([0, 0], [4, 16], "rank:0/cuda:0"),
                ([4, 0], [2, 16], "rank:1/cuda:1"),
                ([6, 0], [2, 16], "rank:2/cuda:0"),
                ([8, 0], [2, 16], "rank:3/cuda:1"),
            ],
        ),
        (
            row_wise(([7, 3], "cuda")),
            "row_wise",
            [([0, 0], [7, 16], "rank:0/cuda:0"), ([7, 0], [3, 16], "rank:1/cuda:1")],
        ),
        (
            column_wise(ranks=[3, 1]),
            "column_wise",
            [([0, 0], [10, 8], "rank:3/cuda:1"), ([0, 8], [10, 8], "rank:1/cuda:1")],
        ),
        (
            column_wise(ranks=[1, 1, 0, 1]),
            "column_wise",
            [
                ([0, 0], [10, 4], "rank:1/cuda:1"),
                ([0, 4], [10, 4], "rank:1/cuda:1"),
                ([0, 8], [10, 4], "rank:0/cuda:0"),
                ([0, 12], [10, 4], "rank:1/cuda:1"),
            ],
        ),
        (
            column_wise(size_per_rank=[4, 12]),
            "column_wise",
            [([0, 0], [10, 4], "rank:0/cuda:0"), ([0, 4], [10, 12], "rank:1/cuda:1")],
        ),
        (
            table_row_wise(host_index=1),
            "table_row_wise",
            [([0, 0], [5, 16], "rank:2/cuda:0"), ([5, 0], [5, 16], "rank:3/cuda:1")],
        ),
        (
            grid_shard(host_indexes=[1]),
            "grid_shard",
            [([0, 0], [5, 16], "rank:2/cuda:0"), ([5, 0], [5, 16], "rank:3/cuda:1")],
        ),
    ],
)
def test_places_as_torchrec_does(
    generator: ParameterShardingGenerator, kind: str, expected: list[Any]
) -> None:
    placed = place(generator)
    assert placed.sharding_type == kind
    assert placed.compute_kernel == "dense"
    assert shards_of(placed) == expected


def test_a_copy_on_every_rank() -> None:
    placed = place(data_parallel())
    assert placed == ParameterSharding("data_parallel", "dense", [0, 1, 2, 3], None)


def test_what_torchrec_refuses_or_lacks() -> None:
    assert shards_of(place(grid_shard([1, 0]), device="cpu")) == [
        ([0, 0], [5, 8], "rank:2/cpu"),
        ([5, 0], [5, 8], "rank:3/cpu"),
        ([0, 8], [5, 8], "rank:0/cpu"),
        ([5, 8], [5, 8], "rank:1/cpu"),
    ]
    assert shards_of(place(table_column_wise(host_index=1), device="cpu")) == [
        ([0, 0], [10, 8], "rank:2/cpu"),
        ([0, 8], [10, 8], "rank:3/cpu"),
    ]
    # columns that do not divide, and owners of given sizes
    sizes = [sizes for _, sizes, _ in shards_of(place(column_wise(ranks=[0, 1, 2])))]
    assert sizes == [[10, 8], [10, 8]]
    placed = place(column_wise(ranks=[2, 0], size_per_rank=[12, 4]), device="cpu")
    assert [p for _, _, p in shards_of(placed)] == ["rank:2/cpu", "rank:0/cpu"]


def test_a_named_device_leaves_the_rank_as_it_is() -> None:
    [(_, _, place_of_one)] = shards_of(place(table_wise(rank=3, device="cpu")))
    assert place_of_one == "rank:3/cpu"
    placed = place(row_wise(([6, 0, 3, 1], ["cpu", "cuda", "cuda", "cpu"])))
    assert [p for _, _, p in shards_of(placed)] == [
        "rank:0/cpu",
        "rank:1/cuda:1",
        "rank:2/cuda:0",
        "rank:3/cpu",
    ]
    placed = place(column_wise(ranks=[0, 1], device_types=["cpu", "cuda"]))
    assert [p for _, _, p in shards_of(placed)] == ["rank:0/cpu", "rank:1/cuda:1"]


@pytest.mark.parametrize("generator", [table_wise(0), row_wise(), row_wise(([10], "cpu"))])
def test_kernel_of_tables_that_update_themselves(generator: ParameterShardingGenerator) -> None:
    where: dict[str, Any] = {"world_size": 1, "local_size": 1, "device_type": "cpu"}
    ebc = collection("t")
    attached = collection("t")
    apply_optimizer_in_backward(torch.optim.SGD, attached.parameters(), {"lr": 0.1})
    fused = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD})
    of = construct_module_sharding_plan
    assert of(ebc, {"t": generator}, **where)["t"].compute_kernel == "dense"
    assert of(attached, {"t": generator}, **where)["t"].compute_kernel == "fused"
    assert of(ebc, {"t": generator}, fused, **where)["t"].compute_kernel == "fused"


def test_kernels_can_be_named() -> None:
    for generator in (
        table_wise(0, compute_kernel="fused_uvm"),
        row_wise(compute_kernel="fused_uvm"),
        column_wise([0], compute_kernel="fused_uvm"),
    ):
        assert place(generator).compute_kernel == "fused_uvm"


def test_this_job_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    ebc = collection("a", "b")
    plan = construct_module_sharding_plan(ebc, apply_to_all(ebc, row_wise()), device_type="cpu")
    assert list(plan) == ["a", "b"]
    assert plan["b"].ranks == [0]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    generators = apply_to_all(ebc, table_row_wise(1))
    plan = construct_module_sharding_plan(ebc, generators, world_size=4, device_type="cpu")
    assert plan["a"].ranks == [2, 3]


class _OnlyWhole(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["table_wise"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: column_wise(), r"column_wise needs .* received neither"),
        (lambda: column_wise(ranks=[]), r"ranks must .*received \[\]"),
        (
            lambda: column_wise(ranks=[0], size_per_rank=[4, 4]),
            r"ranks and size_per_rank .*received \[0\]",
        ),
        (
            lambda: row_wise(([5, 5], ["cpu"])),
            r"sizes and placement .*received \[5, 5\]",
        ),
        (lambda: row_wise(([10], "cpu"), num_buckets=2), r"sizes_placement or num_buckets; rec"),
        (lambda: grid_shard([]), r"received none\. Write grid_shard"),
        (
            lambda: place(row_wise(([4, 3], "cpu"))),
            r"row_wise must .*received \[4, 3\],",
        ),
        (
            lambda: place(column_wise(size_per_rank=[4, 16])),
            r"column_wise must .*received \[4, 16\], .*20",
        ),
        (lambda: place(row_wise(num_buckets=3)), "num_buckets=3 for 10 .*on 4 ranks"),
        (lambda: place(row_wise(num_buckets=2)), "num_buckets=2 for 10 .*on 4 ranks"),
        (lambda: place(table_wise(rank=4)), "table 't' on .*are 4 ranks"),
        (lambda: place(table_row_wise(2)), "table 't' on .*are 4 ranks"),
        (
            lambda: construct_module_sharding_plan(
                collection("a", "b"), {"a": row_wise(), "c": row_wise()}, world_size=1
            ),
            r"each table of .*in .*: \['c'\]",
        ),
        (
            lambda: construct_module_sharding_plan(
                collection("a"), {"a": row_wise()}, local_size=3, world_size=4
            ),
            "local_size must divide .* local_size=3, world_size=4",
        ),
        (
            lambda: construct_module_sharding_plan(
                collection("a"), {"a": row_wise()}, _OnlyWhole(), world_size=1, device_type="cpu"
            ),
            "_OnlyWhole .*received row_wise",
        ),
        (
            lambda: apply_to_all(nn.Linear(1, 1), row_wise()),
            r"a Linear.* EmbeddingBagCollection, .* Pass sharder=",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def cut(rows: int, dim: int, kind: str, **settings: Any) -> tuple[list[list[int]], list[list[int]]]:
    table = torch.empty(rows, dim, device="meta")
    return calculate_shard_sizes_and_offsets(table, 4, 2, kind, **settings)


@pytest.mark.parametrize(
    ("rows", "dim", "kind", "settings", "sizes", "offsets"),
    [
        (10, 16, "table_wise", {}, [[10, 16]], [[0, 0]]),
        (10, 16, "data_parallel", {}, [[10, 16]] * 4, [[0, 0]] * 4),
        (5, 8, "row_wise", {}, [[2, 8], [2, 8], [1, 8], [0, 8]], [[0, 0], [2, 0], [4, 0], [5, 0]]),
        (10, 8, "row_wise", {"num_buckets": 5}, [[4, 8], [2, 8], [2, 8], [2, 8]],
         [[0, 0], [4, 0], [6, 0], [8, 0]]),
        (10, 8, "row_wise", {"device_memory_sizes": [3, 1, 1, 1]},
         [[5, 8], [1, 8], [1, 8], [3, 8]], [[0, 0], [5, 0], [6, 0], [7, 0]]),
        (10, 16, "table_row_wise", {}, [[5, 16]] * 2, [[0, 0], [5, 0]]),
        (10, 256, "column_wise", {}, [[10, 128]] * 2, [[0, 0], [0, 128]]),
        (10, 260, "column_wise", {}, [[10, 260]], [[0, 0]]),
        (10, 96, "column_wise", {"col_wise_shard_dim": 40}, [[10, 48]] * 2, [[0, 0], [0, 48]]),
        (10, 97, "table_column_wise", {"col_wise_shard_dim": 8}, [[10, 97]], [[0, 0]]),
        (10, 16, "column_wise", {"col_wise_shard_dim": 3}, [[10, 4]] * 4,
         [[0, 0], [0, 4], [0, 8], [0, 12]]),
        (10, 256, "grid_shard", {}, [[5, 128]] * 4, [[0, 0], [5, 0], [0, 128], [5, 128]]),
    ],
)  # fmt: skip
def test_sizes_and_offsets_of_parts(
    rows: int, dim: int, kind: str, settings: dict[str, Any], sizes: object, offsets: object
) -> None:
    """The numbers are what TorchRec 1.8.0 returns."""
    assert cut(rows, dim, kind, **settings) == (sizes, offsets)


def test_parts_that_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match=r"sharding_type must be .*; received 'stripes'"):
        cut(10, 8, "stripes")
    with pytest.raises(ValueError, match=r"one per rank; .*2 for 4"):
        cut(10, 8, "row_wise", device_memory_sizes=[1, 1])


def test_placements_by_parts() -> None:
    assert placement_helper("cuda", 2, 5) == "rank:5/cuda:2"
    assert placement_helper("cpu", 1, 3) == "rank:3/cpu"
