"""The stages of a sharded module, called one by one, do what its forward pass does."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.base.streamable import Multistreamable
from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.stages import input_dist
from recsys.distributed.types import (
    EmbeddingModuleShardingPlan,
    ShardedModule,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from recsys.kernels.types import UpdateMode
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.optim import Adam, RowWiseAdagrad, apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import (
    CPU,
    FEATURES,
    Case,
    EachType,
    counted_collectives,
    shard,
    whole_state,
)
from tests.distributed.pipeline_client import in_turn, interleave, train_pipelined
from tests.ranks import RankPool

S = ShardingType
MIXED = (S.TABLE_WISE, S.ROW_WISE, S.COLUMN_WISE, S.DATA_PARALLEL)


def _learn(outputs: list[Tensor]) -> None:
    sum((values * values.detach().sin()).sum() for values in outputs).backward()  # type: ignore[union-attr]


def _train_by_stages(case: Case, sharders: list[Any] | None) -> None:
    rank = dist.get_rank()
    found: list[list[Tensor]] = []
    states, gradients = [], []
    for look_up in (interleave, in_turn):
        model = shard(case, sharders=sharders)
        found.append([])
        for step in range(0, 4, 2):
            batches = [case.batches(step + i)[rank] for i in range(2)]
            weights = [w for b in batches if (w := b.weights_or_none()) is not None]
            for given in weights:
                given.requires_grad_()
            outputs = look_up(model.module.ebc, *((batch,) for batch in batches))
            _learn(outputs)
            model.fused_optimizer.step()
            found[-1] += [values.detach() for values in outputs]
            gradients.append([given.grad for given in weights])
        states.append(whole_state(model))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    start = case.model().state_dict()
    assert any(not torch.equal(states[0][name], value) for name, value in start.items())
    for name, value in states[1].items():
        assert torch.equal(states[0][name], value), name
    for one_step, other_step in zip(gradients[:2], gradients[2:], strict=True):
        for mine, others in zip(one_step, other_step, strict=True):
            assert torch.equal(mine, others)  # type: ignore[arg-type]
    if case.node_size is not None:
        assert model.module.ebc.layout.is_hierarchical


CASES = {
    "pooled": EachType(0, 2, types=MIXED, optimizer=RowWiseAdagrad),
    "weighted": Case(4, 2, types=MIXED, weighted=True),
    "variable": Case(4, 2, types=MIXED, variable_batch=True, optimizer=Adam),
    "two hops": Case(
        3, 4, types=(S.TABLE_ROW_WISE, S.GRID_SHARD, S.TABLE_WISE), node_size=2, weighted=False
    ),
    "sequence": Case(5, 2, types=MIXED, pooled=False, optimizer=RowWiseAdagrad),
    "distinct": Case(6, 2, types=MIXED, pooled=False, use_index_dedup=True),
    "one rank": EachType(1, 1, types=MIXED),
    "replicas": EachType(2, 2, types=(S.DATA_PARALLEL,), optimizer=Adam),
}


@pytest.mark.parametrize("name", CASES)
def test_two_batches_at_once_train_as_in_turn(ranks: RankPool, name: str) -> None:
    case = CASES[name]
    ranks(case.world_size, _train_by_stages, case, None)


def _train_by_id(case: Case) -> None:
    with mock.patch.multiple(input_dist, _MAX_IDS=1e9, _MIN_VALUES=0):
        _train_by_stages(case, None)


@pytest.mark.parametrize("name", ["pooled", "weighted", "variable"])
def test_two_batches_at_once_return_by_id_as_in_turn(ranks: RankPool, name: str) -> None:
    ranks(2, _train_by_id, CASES[name])


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_deferred_tables_train_as_in_turn(ranks: RankPool, pooled: bool) -> None:
    fused = {"optimizer": "ADAM", "learning_rate": 0.1, "update_mode": UpdateMode.DEFERRED}
    kind: Any = EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder
    case = EachType(0, 2, types=MIXED, optimizer=None, pooled=pooled)
    ranks(2, _train_by_stages, case, [kind(fused)])


class Model(nn.Module):
    """Pooled tables and sequences under a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        names = [f"t{i}" for i in range(4)]
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    20 + 5 * i, 8, name, feature_names=[FEATURES[i], FEATURES[i - 1]]
                )
                for i, name in enumerate(names)
            ],
            device=CPU,
        )
        self.rows = EmbeddingCollection(
            tables=[
                EmbeddingConfig(30, 4, name, feature_names=[FEATURES[i]])
                for i, name in enumerate(names)
            ],
            device=CPU,
        )
        self.over = nn.Linear(8 * 8 + 4, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(features)
        total = sum(rows[name].values().sum(0) for name in FEATURES)
        pooled = self.bags(features).values()
        wide = torch.cat([pooled, total.expand(len(pooled), -1)], 1)  # type: ignore[union-attr]
        logits: Tensor = self.over(wide)
        return logits.squeeze(1)


def sharded_model(optimizer: type[torch.optim.Optimizer]) -> DistributedModelParallel:
    model = Model()
    plans = {}
    for path in ("bags", "rows"):
        collection: Any = model.get_submodule(path)
        apply_optimizer_in_backward(optimizer, collection.parameters(), {"lr": 0.1})
        plans[path] = EmbeddingModuleShardingPlan(
            {
                config.name: parameter_sharding(
                    kind,
                    config.num_embeddings,
                    config.embedding_dim,
                    [0, 1][kind is S.TABLE_WISE :],
                )
                for kind, config in zip(MIXED, collection.configs(), strict=True)
            }
        )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(model, env=env, device=CPU, plan=ShardingPlan(plans))


def batch_of(step: int) -> KeyedJaggedTensor:
    """The batch of this rank, of 1 to 4 samples."""
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    lengths = torch.randint(0, 4, (len(FEATURES) * (1 + step % 4),), generator=generator)
    ids = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(FEATURES, ids, lengths=lengths)


def _pipeline(optimizer: type[torch.optim.Optimizer]) -> None:
    batches = [batch_of(step) for step in range(20)]
    losses, states = [], []
    for way in ("forward", "in one call", "in two calls"):
        model = sharded_model(optimizer)
        dense = torch.optim.Adam(model.module.over.parameters(), lr=0.05)

        def step(
            model: nn.Module, batch: KeyedJaggedTensor, dense: torch.optim.Optimizer = dense
        ) -> float:
            dense.zero_grad()
            loss = (model(batch) - 1).square().mean()
            loss.backward()
            dense.step()
            return loss.item()

        if way == "forward":
            losses.append([step(model, batch) for batch in batches])
        else:
            losses.append(
                train_pipelined(model, ShardedModule, batches, step, way == "in one call")
            )
        states.append(whole_state(model))
    assert sum(losses[0][-4:]) < 0.7 * sum(losses[0][:4])
    assert losses[0] == losses[1] == losses[2]
    for state in states[1:]:
        for name, value in states[0].items():
            assert torch.equal(state[name], value), name


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad, Adam])
def test_a_pipeline_of_a_clients_own_trains_as_forward_does(
    ranks: RankPool, optimizer: type[torch.optim.Optimizer]
) -> None:
    ranks(2, _pipeline, optimizer)


def _count() -> None:
    module = shard(EachType(0, 2, types=(S.TABLE_WISE, S.ROW_WISE))).module.ebc
    batch = EachType(0, 2).batches(0)[dist.get_rank()]
    counts = []
    with counted_collectives() as collectives:
        context = module.create_context()
        coming = module.input_dist(context, batch)
        counts.append(collectives.total())
        under_way = coming.wait()
        counts.append(collectives.total())
        found = module.compute(context, under_way.wait())
        counts.append(collectives.total())
        module.output_dist(context, found).wait()
        counts.append(collectives.total())
    assert counts == [1, 2, 2, 3]  # header, ids, nothing, embeddings


def test_each_stage_starts_its_exchange_and_no_other(ranks: RankPool) -> None:
    ranks(2, _count)


def _mistake() -> None:
    module, other = (shard(CASES["pooled"]).module.ebc for _ in range(2))
    batches = [CASES["pooled"].batches(step)[dist.get_rank()] for step in range(2)]
    first, second = module.create_context(), module.create_context()
    assert isinstance(first, Multistreamable)
    with pytest.raises(ValueError, match="received one of another module"):
        other.input_dist(first, batches[0])
    counts = module.input_dist(first, batches[0])
    with pytest.raises(ValueError, match="received one of a batch"):
        module.input_dist(first, batches[1])
    counts_of_second = module.input_dist(second, batches[1])
    ids = counts.wait()
    assert ids is counts.wait()  # nothing is sent twice
    for given in (counts, counts_of_second):
        with pytest.raises(ValueError, match="another batch's, or one that is"):
            module.compute(first, given)
    expected = module(batches[0]).wait().values()
    assert torch.equal(module.compute_and_output_dist(first, ids).wait().values(), expected)
    with pytest.raises(ValueError, match="another batch's, or one that is"):
        module.compute_and_output_dist(second, ids)
    module.compute_and_output_dist(second, counts_of_second.wait().wait()).wait()


def test_a_context_is_for_one_batch_of_its_module(ranks: RankPool) -> None:
    ranks(2, _mistake)


def _bad_on_one_rank() -> None:
    module = shard(CASES["pooled"]).module.ebc
    rank = dist.get_rank()
    batch = CASES["pooled"].batches(0)[rank]
    bad = KeyedJaggedTensor(FEATURES, torch.full((4,), 99), lengths=torch.ones(4).int())
    good = module.input_dist(module.create_context(), batch)
    wrong = module.input_dist(module.create_context(), bad if rank else batch)
    with pytest.raises(IndexError, match="99"):
        wrong.wait()
    good.wait().wait()
    module(batch).wait()  # the ranks are in step


def test_what_is_wrong_on_one_rank_is_raised_on_all_where_headers_are_read(
    ranks: RankPool,
) -> None:
    ranks(2, _bad_on_one_rank)


def _recorded(case: Case) -> None:
    module = shard(case).module.ebc
    context = module.create_context()
    batch = case.batches(0)[dist.get_rank()]
    ids = module.input_dist(context, batch).wait().wait()
    recorded: set[int] = set()

    def record(tensor: Tensor, stream: object) -> None:
        assert stream == "a stream"
        recorded.add(tensor.untyped_storage().data_ptr())

    with mock.patch.object(torch.Tensor, "record_stream", record):
        ids.record_stream("a stream")
    prepared, received = context.prepared, ids.received
    read = [batch.values(), prepared.counts_G, context.routes.header]
    read += [tensor for bags in (*received.lookups, *received.replicas) for tensor in bags[:2]]
    read += [
        w for bags in (*received.lookups, *received.replicas) if (w := bags.weights) is not None
    ]
    read += [] if prepared.inverse is None else [prepared.inverse]
    assert recorded >= {tensor.untyped_storage().data_ptr() for tensor in read}


@pytest.mark.parametrize("name", ["weighted", "distinct", "replicas"])
def test_what_a_batch_holds_outlives_its_use_on_another_stream(ranks: RankPool, name: str) -> None:
    ranks(2, _recorded, CASES[name])


def _shown() -> str:
    module = shard(CASES["pooled"]).module.ebc
    assert module._input_dists == [module.input_stage]
    assert "OutputDist" in repr(module._output_dists)
    assert all(str(lookup).startswith("TableBatched") for lookup in module._lookups)
    return repr(module)


def test_print_names_lookups_and_stages(ranks: RankPool) -> None:
    for shown in ranks(2, _shown):
        assert "TableBatchedEmbedding" in shown
        assert re.search(
            r"InputDist\(sends 4 features, receives \d streams from each of 2 ranks", shown
        )
        assert "OutputDist(returns 4 features' embeddings, torch.float32)" in shown
