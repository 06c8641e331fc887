from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recsys.distributed.placement.plan import EmbeddingModuleShardingPlan, ShardingType
from recsys.distributed.placement.strategies import parameter_sharding, rects_of
from recsys.distributed.planner import ParameterConstraints, PlannerError
from recsys.distributed.types import BoundsCheckMode, ShardingPlan
from recsys.inference import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    export_torchscript,
    quantize_embeddings,
    quantize_inference_model,
    shard_quant_model,
)
from recsys.inference.modules import assign_weights_to_tbe, get_table_to_weights_from_tbe
from recsys.inference.quant.collection import QuantizedCollection
from recsys.inference.quant.options import rows_left
from recsys.inference.quant_prep import quant_prep_enable_quant_state_dict_split_scale_bias
from recsys.inference.quant_sharders import (
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
)
from recsys.kernels import ops
from recsys.kernels.quantize import quantize_rows
from recsys.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.feature_processor import PositionWeightedModuleCollection
from recsys.sparse import KeyedJaggedTensor
from tests.allocations import Allocations
from tests.inference.quant.test_modules import _batch, _flat, _pooled, _processed, _sequence
from tests.inference.row_sizes import table_bytes
from tests.inference.test_export import Mixed, Processed, dlrm, inputs_of, plain_tensors
from tests.pretended_cuda import CUDA, PretendedCuda

CPU = torch.device("cpu")
KEYS = ["x", "y", "z"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sharded_model_equals_the_unsharded_one(tmp_path: Path, world_size: int) -> None:
    model = dlrm()
    sharded: Any
    sharded, plan = shard_quant_model(model, world_size, "cpu")
    inputs = inputs_of(6)
    expected = model(*inputs)
    torch.testing.assert_close(sharded(*inputs), expected, rtol=0, atol=0)
    scripted = export_torchscript(sharded, tmp_path / "model.pt", inputs)
    torch.testing.assert_close(scripted(*plain_tensors(*inputs)), expected, rtol=0, atol=0)
    ranks = [entry.ranks for tables in plan.plan.values() for entry in tables.values()]
    assert sorted(rank for [rank] in filter(None, ranks)) == [0, min(world_size, 2) - 1]


def test_bad_plans_are_refused() -> None:
    model = dlrm()
    _, plan = shard_quant_model(model, 2, "cpu")
    with pytest.raises(ValueError, match=r"rank 1, but .*1 ranks \(0\.\.0\)"):
        shard_quant_model(model, 1, "cpu", sharding_plan=plan)
    with pytest.raises(ValueError, match=r"missing: \['sparse_arch\."):
        shard_quant_model(model, 1, "cpu", sharding_plan=ShardingPlan())
    with pytest.raises(ValueError, match="Call quantize_embeddings first"):
        shard_quant_model(torch.nn.Linear(1, 1), 1, "cpu")


def test_devices_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be 'cuda' or 'cpu'; .*'gpu'"):
        shard_quant_model(dlrm(), 1, "gpu")
    with pytest.raises(ValueError, match=r"sharding_device must be .* received 'gpu'"):
        shard_quant_model(dlrm(), 1, "cpu", "gpu")
    with pytest.raises(ValueError, match="at least 1; received 0"):
        shard_quant_model(dlrm(), 0, "cpu")
    with pytest.raises(ValueError, match=r"CUDA devices, \d+ here; received 99"):
        shard_quant_model(dlrm(), 99)


def test_sharding_takes_the_rows_that_were_loaded() -> None:
    model, other = dlrm(), dlrm()
    state = {
        name: value.flip(0) if name.endswith(".embedding_bags.a.weight") else value
        for name, value in model.state_dict().items()
    }
    other.load_state_dict(state)
    sharded: Any = shard_quant_model(other, 2, "cpu")[0]
    loaded, moved, original = (
        list(each.sparse_arch.embedding_bag_collection.state_dict().values())
        for each in (other, sharded, model)
    )
    assert not torch.equal(loaded[0], original[0])
    for one, another in zip(moved, loaded, strict=True):
        assert torch.equal(one, another)


@pytest.mark.parametrize("make", [_pooled, _sequence, _processed])
@pytest.mark.parametrize("device", ["meta", "cpu", torch.device("cpu")])
def test_a_collection_alone_is_sharded(make: Any, device: str | torch.device) -> None:
    quantized = quantize_inference_model(make())
    compute = device if isinstance(device, torch.device) else "cpu"
    sharded, plan = shard_quant_model(quantized, 2, compute, device)
    assert type(sharded) is type(quantized)
    assert list(plan.plan) == [""]
    assert {str(entry.ranks) for entry in plan.plan[""].values()} == {"[0]", "[1]"}
    for each in (sharded, copy.deepcopy(sharded), pickle.loads(pickle.dumps(sharded))):
        assert torch.equal(_flat(each(_batch())), _flat(quantized(_batch())))
        assert list(each.state_dict()) == list(quantized.state_dict())


BITS = {8: DataType.INT8, 4: DataType.INT4, 2: DataType.INT2, 16: DataType.FP16, 32: DataType.FP32}
KINDS = [ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE]


def _weights(draw: random.Random, tables: list[Any]) -> dict[str, tuple[Tensor, None]]:
    """Random rows: per table its quantized rows."""
    torch.manual_seed(draw.randrange(1 << 30))
    bits = {data_type: bits for bits, data_type in BITS.items()}
    return {
        t.name: (
            quantize_rows(torch.randn(rows_left(t), t.embedding_dim) * 9, bits[t.data_type]),
            None,
        )
        for t in tables
    }


def _random_collection(draw: random.Random, row_alignment: int | None = None) -> Any:
    """A collection of one to four tables over features x, y and z."""
    is_pooled, dim = draw.random() < 0.6, 4 * draw.randint(1, 8)
    tables: list[Any] = []
    for name in "abcd"[: draw.randint(1, 4)]:
        rows = draw.randint(5, 40)
        made: Any = (EmbeddingBagConfig if is_pooled else EmbeddingConfig)(
            rows,
            4 * draw.randint(1, 8) if is_pooled else dim,
            name,
            data_type=draw.choice(list(BITS.values())),
            feature_names=draw.sample("xyz", draw.randint(1, 3)),
            num_embeddings_post_pruning=draw.choice([None, rows - 1]),
        )
        if is_pooled:
            made.pooling = draw.choice([PoolingType.SUM, PoolingType.MEAN])
        tables.append(made)
    options: dict[str, Any] = {
        "output_dtype": draw.choice([torch.float32, torch.float16, torch.bfloat16]),
        "table_name_to_quantized_weights": _weights(draw, tables),
        "quant_state_dict_split_scale_bias": draw.random() < 0.3,
        "row_alignment": row_alignment or draw.choice([2, 16]),
    }
    if is_pooled:
        weighted = draw.random() < 0.5
        return QuantEmbeddingBagCollection(tables, weighted, CPU, **options)
    needs_ids = draw.random() < 0.5
    return QuantEmbeddingCollection(tables, CPU, need_indices=needs_ids, **options)


def _random_plan(draw: random.Random, collection: Any, world_size: int) -> ShardingPlan:
    placed = EmbeddingModuleShardingPlan()
    for config in collection.configs():
        kind = draw.choice(KINDS)
        count = 1 if kind is ShardingType.TABLE_WISE else draw.randint(1, world_size)
        ranks = draw.sample(range(world_size), count)
        entry = parameter_sharding(kind, rows_left(config), config.embedding_dim, ranks)
        assert entry.sharding_spec is not None
        draw.shuffle(entry.sharding_spec.shards)  # a plan may name them in any order
        placed[config.name] = entry
    return ShardingPlan({"": placed})


def _random_batch(draw: random.Random, size: int) -> KeyedJaggedTensor:
    keys = draw.sample(["x", "y", "z", "unread"], 4)
    lengths = torch.tensor([draw.choice([0, 0, 1, 2, 7]) for _ in range(4 * size)])
    num_ids = int(lengths.sum())
    values = torch.tensor([draw.randrange(4) for _ in range(num_ids)], dtype=torch.int64)
    dtype = draw.choice([torch.int64, torch.int32])
    weights = torch.tensor([draw.uniform(-2, 2) for _ in range(num_ids)])
    return KeyedJaggedTensor(keys, values.to(dtype), weights, lengths.to(dtype), stride=size)


@pytest.mark.parametrize("seed", range(40))
def test_random_models_under_random_plans_are_the_same_to_the_bit(seed: int) -> None:
    draw = random.Random(seed)
    whole, world_size = _random_collection(draw), draw.randint(1, 4)
    plan = _random_plan(draw, whole, world_size)
    sharded: Any = shard_quant_model(whole, world_size, "cpu", sharding_plan=plan)[0]
    for size in (5, 0, 1):
        batch = _random_batch(draw, size)
        one, other = whole(batch), sharded(batch)
        assert torch.equal(_flat(one), _flat(other)), plan
        assert list(one.keys()) == list(other.keys())
    mine, theirs = sharded.state_dict(), whole.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_random_models_in_plain_pytorch(kind: ShardingType, monkeypatch: Any) -> None:
    monkeypatch.setattr(ops, "FBGEMM_DEVICES", frozenset())
    for seed in range(5):
        draw = random.Random(seed)
        whole = _random_collection(draw)
        sharded, plan = _sharded(whole, kind)
        batch = _random_batch(draw, 4)
        assert torch.equal(_flat(whole(batch)), _flat(sharded(batch))), plan


def _sharded(model: Any, kind: ShardingType, world_size: int = 3) -> tuple[Any, ShardingPlan]:
    constraints = {
        config.name: ParameterConstraints(sharding_types=[kind.value], min_partition=4)
        for child in model.modules()
        if isinstance(child, QuantizedCollection)
        for config in child.configs()
    }
    return shard_quant_model(model, world_size, "cpu", constraints=constraints)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [_pooled, _sequence, _processed])
def test_what_becomes_of_a_sharded_collection(make: Any, kind: ShardingType) -> None:
    whole: Any = quantize_inference_model(make())
    sharded, plan = _sharded(whole, kind)
    expected, rows = _flat(whole(_batch())), get_table_to_weights_from_tbe(whole)
    again, other = _sharded(sharded, ShardingType.COLUMN_WISE)
    assert other.plan != plan.plan or kind is ShardingType.COLUMN_WISE
    for each in (
        copy.deepcopy(sharded),
        pickle.loads(pickle.dumps(sharded)),
        copy.deepcopy(sharded).to("cpu").share_memory(),
        again,
    ):
        assert torch.equal(_flat(each(_batch())), expected)
        for name, (values, header) in get_table_to_weights_from_tbe(each).items():
            assert torch.equal(values, rows[name][0])
            assert torch.equal(header, rows[name][1])
    shown = repr(sharded).splitlines()
    assert shown[0].strip("(") == f"Sharded{type(whole).__name__}"
    assert sum("QuantizedLookup(tables=" in line for line in shown) >= 2
    assert repr(whole).startswith(type(whole).__name__)
    assert "QuantizedLookup" not in repr(whole)
    assert sharded.device == CPU
    assert table_bytes(sharded) == table_bytes(whole)
    assert whole.stored_row_bytes("a", 8, "cpu") == whole.stored_row_bytes("a", 8, "cuda") == 16


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_collection_loads_and_saves_whole_tables(
    kind: ShardingType, splits: bool, tmp_path: Path
) -> None:
    model, other = _pooled(), _pooled()
    if splits:
        for each in (model, other):
            quant_prep_enable_quant_state_dict_split_scale_bias(each)
    for weight in other.parameters():
        torch.nn.init.uniform_(weight, -7, 7)
    source: Any = quantize_inference_model(other)
    sharded, _ = _sharded(quantize_inference_model(model), kind)
    state = source.state_dict()
    assert not torch.equal(_flat(sharded(_batch())), _flat(source(_batch())))
    missing = {name: value for name, value in state.items() if ".a." not in name}
    with pytest.raises(RuntimeError, match=r"Missing key.*embedding_bags\.a\.weight"):
        sharded.load_state_dict(missing)
    bad = {name: value[1:] for name, value in state.items()}
    with pytest.raises(RuntimeError, match=r"size mismatch for embedding_bags\.a\.weight"):
        sharded.load_state_dict(bad)
    torch.save(state, tmp_path / "state.pt")
    for assign in (False, True):
        fresh = copy.deepcopy(sharded)
        fresh.load_state_dict(torch.load(tmp_path / "state.pt"), assign=assign)
        assert torch.equal(_flat(fresh(_batch())), _flat(source(_batch())))
        for name, value in fresh.state_dict().items():
            assert torch.equal(value, state[name])
    assign_weights_to_tbe(sharded, get_table_to_weights_from_tbe(source))
    assert torch.equal(_flat(sharded(_batch())), _flat(source(_batch())))
    assert torch.equal(sharded.embedding_bags["a"].weight, source.embedding_bags["a"].weight)


def test_shards_that_are_written_or_replaced_are_read() -> None:
    sharded, _ = _sharded(quantize_inference_model(_pooled()), ShardingType.ROW_WISE, 2)
    table = sharded.embedding_bags["a"]
    names = [name for name, _ in sharded.named_buffers() if ".a." in name]
    assert names == ["embedding_bags.a.shard_0", "embedding_bags.a.shard_1"]
    expected = [sharded(_batch()).values().clone()]
    table.shard_0.copy_(table.shard_0.flip(0))
    expected.append(sharded(_batch()).values().clone())
    table.shard_0 = table.shard_0.flip(0).clone()
    found = sharded(_batch()).values()
    assert torch.equal(found, expected[0])
    assert not torch.equal(found, expected[1])
    table.shard_0 = table.shard_0[1:]
    with pytest.raises(ValueError, match=r"embedding_bags\['a'\] must .*of shape \(25, 12\)"):
        sharded(_batch())


def _exported() -> list[tuple[Any, bool]]:
    """Models in evaluation mode, and whether they take weights."""
    positions = PositionWeightedModuleCollection({"x": 3, "y": 4, "z": 5})
    return [
        (quantize_embeddings(Mixed()), False),
        (dlrm(is_weighted=True), True),
        (quantize_inference_model(Processed(positions)), False),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_models_are_exported(tmp_path: Path, kind: ShardingType) -> None:
    keys = ["z", "y", "x"]
    for model, weighted in _exported():
        sharded, _ = _sharded(model, kind)
        export_torchscript(sharded, tmp_path / "model.pt", inputs_of(5, keys, weighted))
        loaded = torch.jit.load(tmp_path / "model.pt")
        for size in (5, 1, 0):
            inputs = inputs_of(size, keys, weighted)
            expected = model(*inputs)
            assert torch.equal(sharded(*inputs), expected)
            assert torch.equal(loaded(*plain_tensors(*inputs)), expected)


class TestArguments:
    def test_memory_of_devices_is_not_exceeded(self) -> None:
        tables = [
            EmbeddingBagConfig(rows, 8, f"t{rows}", feature_names=["x"])
            for rows in (5000, 3000, 2000, 1000)
        ]
        bytes_of = {table.name: table.num_embeddings * 16 for table in tables}
        model = quantize_inference_model(EmbeddingBagCollection(tables=tables))
        most = 6000 * 16
        limits: list[dict[str, int]] = [
            {"ddr_cap": most + 1000},
            {"device_memory_size": most + 1000, "ddr_cap": 10**9},
        ]
        for options in limits:
            _, plan = shard_quant_model(model, 2, "cpu", **options)
            held = [0, 0]
            for name, entry in plan.plan[""].items():
                [rank] = entry.ranks or []
                held[rank] += bytes_of[name]
            assert max(held) <= most
        _, plan = shard_quant_model(model, 2, "cpu", ddr_cap=most - 1)  # no two whole halves
        assert {len(entry.ranks or []) for entry in plan.plan[""].values()} == {1, 2}
        with pytest.raises(PlannerError, match="not fit"):
            shard_quant_model(model, 2, "cpu", ddr_cap=5500 * 16 - 1)

    def test_a_table_larger_than_a_device_is_split(self) -> None:
        table = EmbeddingBagConfig(64, 64, "t", feature_names=["x"])
        model = quantize_inference_model(EmbeddingBagCollection(tables=[table]))
        sharded: Any
        sharded, plan = shard_quant_model(model, 2, "cpu", device_memory_size=64 * 80 - 1)
        assert len(plan.plan[""]["t"].ranks or []) == 2
        batch = KeyedJaggedTensor(["x"], torch.tensor([3, 60]), lengths=torch.tensor([2]))
        assert torch.equal(sharded(batch).values(), model(batch).values())

    def test_a_given_plan_is_checked(self) -> None:
        model = quantize_inference_model(_pooled())
        _, plan = shard_quant_model(model, 2, "cpu")
        constraints = {"a": ParameterConstraints()}
        with pytest.raises(ValueError, match=r"received both, .*constraints for \['a'\]"):
            shard_quant_model(model, 2, "cpu", constraints=constraints, sharding_plan=plan)
        shard_quant_model(model, 2, "cpu", ddr_cap=10**6, sharding_plan=plan)
        with pytest.raises(PlannerError, match=r"MiB"):
            shard_quant_model(model, 2, "cpu", ddr_cap=300, sharding_plan=plan)

    def test_constraints(self) -> None:
        model = quantize_inference_model(_pooled())
        for constraint, message in (
            (ParameterConstraints(["data_parallel"]), "'b'"),
            (ParameterConstraints(compute_kernels=["fused_uvm"]), "'b'"),
            (ParameterConstraints(pooling_factors=[1.0, 2.0]), "one number for each of its feat"),
            (ParameterConstraints(bounds_check_mode=BoundsCheckMode.WARNING), "bounds_check_mode="),
        ):
            with pytest.raises(ValueError, match=message):
                shard_quant_model(model, 2, "cpu", constraints={"b": constraint})
        with pytest.raises(ValueError, match=r"for the tables \['z'\]"):
            shard_quant_model(model, 2, "cpu", constraints={"z": ParameterConstraints()})
        sure = {"a": ParameterConstraints(["column_wise"], pooling_factors=[1.0, 2.0])}
        _, plan = shard_quant_model(model, 2, "cpu", constraints=sure)
        assert plan.plan[""]["a"].sharding_type == "column_wise"
        elsewhere = {name: ParameterConstraints(device_group="cuda") for name in "abc"}
        same, plan = shard_quant_model(model, 2, "cpu", constraints=elsewhere)
        assert plan.plan == {}
        assert torch.equal(_flat(same(_batch())), _flat(model(_batch())))

    def test_sharders_say_what_is_sharded(self) -> None:
        model = torch.nn.ModuleDict({"pooled": _pooled(), "rows": _sequence()})
        quantize_inference_model(model)
        for sharders, expected in (
            ([QuantEmbeddingCollectionSharder()], {"rows"}),
            ([QuantEmbeddingBagCollectionSharder(shardable_params=["a", "b", "c"])], {"pooled"}),
            ([], {"pooled", "rows"}),
        ):
            _, plan = shard_quant_model(model, 2, "cpu", sharders=sharders)
            assert plan.plan.keys() == expected
        other = [QuantEmbeddingCollectionSharder(shardable_params=["other"])]
        with pytest.raises(ValueError, match="a quantized collection to shard"):
            shard_quant_model(model, 2, "cpu", sharders=other)


def test_what_is_on_other_devices_is_brought_to_the_ids(monkeypatch: Any) -> None:
    monkeypatch.setattr(ops, "FBGEMM_DEVICES", frozenset())
    num_splits = 0
    for seed in range(12):
        draw = random.Random(seed)
        whole = _random_collection(draw, row_alignment=16)
        plan = _random_plan(draw, whole, 4).plan[""]
        batch = _random_batch(draw, 4)
        expected = _flat(whole(batch))
        with PretendedCuda() as cuda, monkeypatch.context() as patch:
            patch.setattr(ops, "FBGEMM_DEVICES", frozenset())
            shards = [rects_of(n, *_size(whole, n), entry, 4) for n, entry in plan.items()]
            sharded = whole.placed(shards, lambda rank: CUDA if rank % 2 else CPU)
            for here in (batch, batch.to(CUDA)):
                cuda.forget()
                found = _flat(sharded(here))
                notes = cuda.notes
                assert [note for note in notes if note[0] == "mixture"] == []
                assert cuda.is_on_device(found) == (here is not batch)
                assert torch.equal(found.cpu(), expected)
                waits = [note for note in notes if "split_lookup" in note[2]]
                splits = [of for of in sharded.lookups().lookups if hasattr(of, "blocks")]
                assert sum(note[1] == "tolist" for note in waits) <= len(splits)
                num_splits += len(splits)
    assert num_splits


def _size(collection: Any, name: str) -> tuple[int, int]:
    [config] = [config for config in collection.configs() if config.name == name]
    return rows_left(config), config.embedding_dim


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
def test_each_row_is_copied_once(kind: str, splits: bool) -> None:
    tables = [EmbeddingBagConfig(200_000, 32, "t", feature_names=["f"])]
    model = nn.Sequential(EmbeddingBagCollection(tables=tables))
    if splits:
        quant_prep_enable_quant_state_dict_split_scale_bias(model[0])
    model = quantize_embeddings(model)
    constraints = {"t": ParameterConstraints(sharding_types=[kind])}
    sharded, _ = shard_quant_model(model, 2, "cpu", constraints=constraints)
    with Allocations(*model[0].lookups().buffers()) as allocations:
        placed = model[0].placed(sharded[0]._shards, lambda rank: torch.device("cpu"))
    stored = sum(t.numel() for rows in placed.lookups().stored_rows() for t in rows)
    # columns are copied in blocks on the way, and freed
    columns = 200_000 * (16 + 4) * 2 if kind == "column_wise" else 0
    assert stored <= allocations.num_bytes < stored + columns + 100_000
