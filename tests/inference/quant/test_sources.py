"""A sharded model gives the quantized model that the unsharded one gives, bit for bit."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recsys.distributed.dmp_collection import DMPCollection
from recsys.distributed.fully_sharded import FullyShardWrapper
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.shard import shard, shard_modules
from recsys.distributed.sharding_plan import column_wise, row_wise
from recsys.distributed.types import ShardingEnv, ShardingType
from recsys.inference import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    quantize_embeddings,
    quantize_inference_model,
)
from recsys.inference.quant import sources
from recsys.inference.quant_prep import (
    quant_prep_customize_row_alignment,
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types,
    set_pruning_data,
)
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.feature_processor import PositionWeightedModuleCollection
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import CPU, Case, train
from tests.ranks import RankPool

TYPES = tuple(ShardingType)
DTYPES = [(torch.int8, 1), (torch.quint4x2, 2), (torch.quint2x4, 4), (torch.float16, 1)]


def odd_rows(weight: Tensor, rng: random.Random) -> None:
    """Writes rows that are quantized in a way of their own."""
    for row in weight.detach():
        kind = rng.choice(("usual", "usual", "equal", "zeros", "tiny", "far", "close"))
        if kind == "equal":
            row.fill_(rng.uniform(-3000, 3000))
        elif kind == "zeros":
            row.copy_(torch.tensor([rng.choice((0.0, -0.0)) for _ in row]))
        elif kind == "tiny":
            row.mul_(rng.choice((1e-6, 1e-9, 1e-40)))
        elif kind == "far":
            row.mul_(30000)
        elif kind == "close":
            row.mul_(1e-4).add_(rng.uniform(-3000, 3000))


def dtypes_of(configs: list[Any], rng: random.Random) -> dict[str, torch.dtype]:
    return {
        config.name: rng.choice([d for d, n in DTYPES if config.embedding_dim % n == 0])
        for config in configs
    }


def assert_same_module(found: nn.Module, expected: nn.Module) -> None:
    state = expected.state_dict()
    assert list(found.state_dict()) == list(state)
    for name, value in found.state_dict().items():
        assert torch.equal(value, state[name]), name
    kinds = [(path, type(child)) for path, child in found.named_modules()]
    assert kinds == [(path, type(child)) for path, child in expected.named_modules()]
    assert str(found) == str(expected)
    assert not any(child.training for child in found.modules())


def quantizes(case: Case, steps: int) -> None:
    rng = random.Random(case.seed)
    model = case.model()
    for config in case.configs():
        if not steps:
            odd_rows(model.ebc.table_weights()[config.name], rng)  # type: ignore[operator]
    dtypes = dtypes_of(case.configs(), rng)
    left = {c.name: rng.randint(1, c.num_embeddings) for c in case.configs() if rng.random() < 0.3}
    set_pruning_data(model, left)
    expected = quantize_inference_model(copy.deepcopy(model), per_table_weight_dtype=dtypes)
    sharded = DistributedModelParallel(
        model, ShardingEnv.default(), CPU, case.plan(), init_data_parallel=bool(steps)
    )
    if steps:
        train(case, sharded, range(steps), rank=dist.get_rank())
        whole = case.model()
        state = {name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in
                 sharded.state_dict().items()}  # fmt: skip
        whole.load_state_dict(state)
        set_pruning_data(whole, left)
        expected = quantize_inference_model(whole, per_table_weight_dtype=dtypes)
    before = {name: copy.deepcopy(value) for name, value in sharded.state_dict().items()}
    with (
        mock.patch.object(sources, "BLOCK_VALUES", rng.choice((1, 20, 100, 1 << 20))),
        mock.patch.object(sources, "_ROUND_BYTES", rng.choice((1, 50, 300, 1 << 20))),
    ):
        dst = rng.choice((None, case.world_size - 1))
        found = quantize_inference_model(sharded, per_table_weight_dtype=dtypes, dst=dst)
    if dst in (None, dist.get_rank()):
        assert_same_module(found, expected)
    else:
        assert {b.device.type for _, b in found.ebc.named_buffers()} == {"meta"}
    for name, value in sharded.state_dict().items():  # it stays as it is
        mine = [t for _, t in value.local_shards()] if hasattr(value, "local_shards") else [value]
        other = before[name]
        others = [t for _, t in other.local_shards()] if hasattr(other, "local_shards") else [other]
        assert all(map(torch.equal, mine, others))


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_random_plans(ranks: RankPool, num_ranks: int, pooled: bool) -> None:
    for seed in range(12):
        case = Case(seed, num_ranks, TYPES, optimizer=None, pooled=pooled)
        ranks(num_ranks, quantizes, case, 0)


def test_a_model_that_has_trained(ranks: RankPool) -> None:
    for seed in range(3):
        ranks(2, quantizes, Case(seed, 2, TYPES), 2)


class Mixed(nn.Module):
    """A collection of each kind, dense layers, and a plain bag."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        bags = [EmbeddingBagConfig(30, 8, f"b{i}", feature_names=[f"f{i}"]) for i in range(2)]
        weighed = EmbeddingBagConfig(20, 16, "w", feature_names=["f0"])
        self.bags = EmbeddingBagCollection(tables=bags)
        self.rows = EmbeddingCollection(tables=[EmbeddingConfig(25, 4, "r", feature_names=["f1"])])
        self.processed = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables=[weighed], is_weighted=True),
            PositionWeightedModuleCollection({"f0": 5}),
        )
        self.over = nn.Sequential(nn.Linear(32, 3), nn.BatchNorm1d(3))
        self.plain = nn.EmbeddingBag(7, 4)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = torch.cat([self.bags(features).values(), self.processed(features).values()], 1)
        found: Tensor = self.over(pooled)
        return found


def _batch() -> KeyedJaggedTensor:
    lengths = torch.tensor([2, 0, 3, 1, 1, 4])
    return KeyedJaggedTensor(["f0", "f1"], torch.arange(11), lengths=lengths)


def _mixed(kind: str) -> None:
    model = Mixed()
    if kind == "prepared before":
        quant_prep_customize_row_alignment(model, [EmbeddingBagCollection], 2)
        set_pruning_data(model, {"b1": 17, "r": 11})
    whole = copy.deepcopy(model)
    device = torch.device("cpu")
    if kind in ("model", "prepared before", "prepared after"):
        sharded: nn.Module = DistributedModelParallel(model, device=device)
    elif kind == "several groups":
        sharded = DMPCollection(
            model,
            device,
            None,
            dist.get_world_size(),
            1,
            dist.distributed_c10d._get_default_group(),
        )
    else:
        sharded = shard_modules(model, device=device)
        if kind == "in DistributedDataParallel":
            sharded = DistributedDataParallel(sharded)
    if kind == "prepared after":
        for each in (sharded, whole):
            quant_prep_enable_quant_state_dict_split_scale_bias_for_types(
                each, [EmbeddingCollection]
            )
            set_pruning_data(each, {"b1": 17})
    for quantize in (quantize_inference_model, quantize_embeddings):
        found = quantize(sharded, per_table_weight_dtype={"b1": torch.quint4x2})
        expected = quantize(copy.deepcopy(whole), per_table_weight_dtype={"b1": torch.quint4x2})
        assert_same_module(found, expected)
        features = _batch()
        with torch.no_grad():
            assert torch.equal(found(features), expected(features))
        own = {value.data_ptr() for value in sharded.parameters()}
        assert not own & {value.data_ptr() for value in found.parameters()}  # training continues
    assert sharded.training


@pytest.mark.parametrize(
    "kind",
    [
        "model",
        "modules",
        "in DistributedDataParallel",
        "several groups",
        "prepared before",
        "prepared after",
    ],
)
def test_models_of_all_kinds(ranks: RankPool, kind: str) -> None:
    ranks(2, _mixed, kind)


def _with_a_norm(dst: int | None) -> bool:
    """Quantize a model whose running statistics differ from rank to rank, as after training."""
    tables = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(40, 12, "t", feature_names=["f"])], device=CPU
    )
    norm = nn.BatchNorm1d(12)
    model = DistributedModelParallel(nn.ModuleList([tables, norm]), device=CPU)
    rank = dist.get_rank()
    for value in norm.buffers():
        value.fill_(rank + 5)
    found = quantize_embeddings(model, dst=dst)
    assert [value.min().item() for value in norm.buffers()] == [rank + 5] * 3  # training continues
    return all(bool((value == 5).all()) for value in found[1].buffers())


@pytest.mark.parametrize("dst", [None, 1])
def test_buffers_are_those_of_rank_0(ranks: RankPool, dst: int | None) -> None:
    assert ranks(2, _with_a_norm, dst) == [True, True]


def _one_collection() -> None:
    tables = [EmbeddingBagConfig(40, 12, "t", feature_names=["f"])]
    torch.manual_seed(0)
    collection = EmbeddingBagCollection(tables=tables)
    rows = EmbeddingCollection(tables=[EmbeddingConfig(40, 12, "t", feature_names=["f"])])
    for module, made in (
        (collection, QuantEmbeddingBagCollection),
        (rows, QuantEmbeddingCollection),
    ):
        for plan in (row_wise(), column_wise(list(range(dist.get_world_size())))):
            sharded = shard(copy.deepcopy(module), plan, device=CPU)
            expected = made.from_float(module)
            assert_same_module(quantize_embeddings(sharded), expected)
            assert_same_module(made.from_float(sharded), expected)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.ao.quantization is deprecated
                found = torch.quantization.quantize_dynamic(
                    nn.ModuleDict({"ebc": sharded}),
                    qconfig_spec={type(sharded)},
                    mapping={type(sharded): made},
                    dtype=torch.qint8,
                )
            assert_same_module(found["ebc"], expected)


def test_one_collection(ranks: RankPool) -> None:
    ranks(2, _one_collection)


PLANS = {"rows": row_wise, "columns": lambda: column_wise([0, 1])}


def _fails(value: float, dtype: torch.dtype, message: str, plan: str) -> None:
    collection = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(40, 8, n, feature_names=[n]) for n in ("good", "bad")]
    )
    sharded = shard(collection, PLANS[plan](), device=CPU)
    for part in sharded.table_weights()["bad"].local_shards():
        if dist.get_rank() == 1:
            part.tensor.detach()[3, 1] = value
    for dst in (None, 0, 1):
        with pytest.raises(ValueError, match=message):
            quantize_embeddings(sharded, dtype, dst=dst)
    # and the ranks are still together
    for part in sharded.table_weights()["bad"].local_shards():
        part.tensor.detach().zero_()
    quantize_embeddings(sharded, dtype)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (float("nan"), torch.int8, r"On rank 1: Table 'bad' cannot be .* received NaN or infinity"),
        (float("inf"), torch.float16, r"On rank 1: Table 'bad' cannot be .* NaN or infinity"),
        (1e9, torch.quint4x2, r"On rank [01]: Table 'bad' cannot .* ends at 65504; .* to 1e\+09"),
        (1e6, torch.float16, r"On rank 1: Table 'bad' cannot be quantized. fp16 ends at 65504"),
    ],
)
def test_a_bad_value_on_one_rank_is_raised_on_all(
    ranks: RankPool, plan: str, value: float, dtype: torch.dtype, message: str
) -> None:
    ranks(2, _fails, value, dtype, message, plan)


def _differs() -> None:
    rank = dist.get_rank()
    sharded = DistributedModelParallel(Mixed(), device=CPU)
    with pytest.raises(
        ValueError, match=r"\(quantize_embeddings\) from the same arguments; dtypes"
    ):
        quantize_inference_model(sharded, quantization_dtype=(torch.int8, torch.float16)[rank])
    with pytest.raises(ValueError, match=r"\(quantize_embeddings\) from the same arguments; dst"):
        quantize_inference_model(sharded, dst=rank)
    with pytest.raises(ValueError, match=r"dst must .*0 to 1; .*2"):
        quantize_inference_model(sharded, dst=2)
    with pytest.raises(ValueError, match=r"per_table_weight_dtype must .*received \['x'\]"):
        quantize_inference_model(
            sharded, per_table_weight_dtype={"x": torch.int8} if rank else None
        )
    set_pruning_data(sharded, {"b0": 5 + rank})
    with pytest.raises(ValueError, match=r"table 'b0' differs: rank 0.*5 rows"):
        quantize_inference_model(sharded)


def test_arguments_that_differ_are_named(ranks: RankPool) -> None:
    ranks(2, _differs)


def _refuses() -> None:
    class Own(QuantEmbeddingCollection):
        pass

    class NotOurs(nn.Module):
        pass

    with pytest.raises(ValueError, match="received NotOurs for a ShardedEmbeddi"):
        quantize_embeddings(
            DistributedModelParallel(Mixed(), device=CPU),
            additional_mapping={EmbeddingBagCollection: NotOurs},
        )
    with pytest.raises(ValueError, match=r"whole on every rank; received .*'over\.0\.weight'"):
        quantize_embeddings(
            DistributedModelParallel(Mixed(), device=CPU, data_parallel_wrapper=FullyShardWrapper())
        )


def test_what_cannot_be_quantized_is_named(ranks: RankPool) -> None:
    ranks(2, _refuses)
    with pytest.raises(ValueError, match=r"dst must be None.*0 and Mixed"):
        quantize_inference_model(Mixed(), dst=0)


def _peak_of_received() -> int:
    """The most bytes that a rank receives at a time."""
    table = EmbeddingBagConfig(60_000, 64, "t", feature_names=["f"])
    sharded = shard(EmbeddingBagCollection(tables=[table]), row_wise(), device=CPU)
    sizes: list[int] = []
    exchange = sources.comm.all_to_all

    def counted(env: Any, what: str, send: Tensor, *sizes_of: Any) -> Any:
        sizes.extend((send.numel(), sum(sizes_of[1])))
        return exchange(env, what, send, *sizes_of)

    with mock.patch.object(sources.comm, "all_to_all", counted):
        quantize_embeddings(sharded, torch.float32)
    return max(sizes)


def test_a_whole_table_never_travels_at_once(ranks: RankPool) -> None:
    for most in ranks(2, _peak_of_received):
        assert most <= 12 << 20  # of 15 MiB
