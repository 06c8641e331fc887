"""One training step of DLRM and the sharded collection's part of it, beside TorchRec and the floor.

    torchrun --standalone --nproc-per-node=2 -m benchmarks.dlrm --plan table_wise --out result.json

26 tables of 100,000 x 64, row-wise Adagrad in backward, one id per feature and sample. All
contenders run in one process and take turns (A B C A B C ...), so that what else the machine does
falls on all alike; ratios are of medians, with the spread of the ratio over rounds. `python -m
benchmarks` runs all plans and batch sizes on 1 and 2 ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import ranks
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.types import (
    EmbeddingModuleShardingPlan,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from recsys.modules.dlrm import DLRM, DLRMTrain
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor

NUM_TABLES, NUM_ROWS, DIM, NUM_DENSE = 26, 100_000, 64, 13
DENSE_LAYERS, OVER_LAYERS = [256, 128, DIM], [256, 128, 1]
FEATURES = [f"f{i}" for i in range(NUM_TABLES)]
CPU = torch.device("cpu")
PLANS = ["table_wise", "column_wise", "row_wise", "mixed"]
COLLECTION_PATH = "model.sparse_arch.embedding_bag_collection"
MIX = ["table_wise", "column_wise", "row_wise", "data_parallel"]
PEER_MIX = MIX[:3]  # its data_parallel tables need an optimizer of their own


class Batch:
    """One batch in the form both libraries' DLRMTrain reads."""

    def __init__(self, dense: Tensor, sparse: Any, labels: Tensor) -> None:
        self.dense_features = dense
        self.sparse_features = sparse
        self.labels = labels


def strategy(plan: str, table: int, mix: list[str]) -> ShardingType:
    return ShardingType(mix[table % len(mix)] if plan == "mixed" else plan)


def our_plan(plan: str, path: str, mix: list[str], world_size: int) -> ShardingPlan:
    tables = EmbeddingModuleShardingPlan()
    for i in range(NUM_TABLES):
        kind = strategy(plan, i, mix)
        ranks = [i % world_size] if kind is ShardingType.TABLE_WISE else list(range(world_size))
        tables[f"t{i}"] = parameter_sharding(kind, NUM_ROWS, DIM, ranks)
    return ShardingPlan({path: tables})


def our_collection() -> EmbeddingBagCollection:
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(NUM_ROWS, DIM, f"t{i}", feature_names=[FEATURES[i]])
            for i in range(NUM_TABLES)
        ],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    return collection


def own_dlrm() -> DLRMTrain:
    return DLRMTrain(DLRM(our_collection(), NUM_DENSE, list(DENSE_LAYERS), list(OVER_LAYERS)))


def shard_ours(
    model: nn.Module, plan: str, mix: list[str], device: torch.device = CPU
) -> DistributedModelParallel:
    env = ShardingEnv.default()
    placed = our_plan(plan, COLLECTION_PATH, mix, env.world_size)
    return DistributedModelParallel(model, env=env, device=device, plan=placed)


def peer_model(plan: str, device: torch.device = CPU) -> nn.Module:
    """Shard TorchRec's own DLRM, with the same strategies."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection as PeerCollection
    from torchrec import EmbeddingBagConfig as PeerConfig
    from torchrec.distributed import DistributedModelParallel as PeerParallel
    from torchrec.distributed import sharding_plan as peer_plan
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingPlan as PeerPlan
    from torchrec.models.dlrm import DLRM as PeerDLRM
    from torchrec.models.dlrm import DLRMTrain as PeerTrain

    collection = PeerCollection(
        tables=[
            PeerConfig(
                name=f"t{i}",
                embedding_dim=DIM,
                num_embeddings=NUM_ROWS,
                feature_names=[FEATURES[i]],
            )
            for i in range(NUM_TABLES)
        ],
        device=torch.device("meta"),
    )
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    )
    world = dist.get_world_size()
    generators = {}
    for i in range(NUM_TABLES):
        kind = strategy(plan, i, PEER_MIX)
        if kind is ShardingType.TABLE_WISE:
            generator = peer_plan.table_wise(rank=i % world, compute_kernel="fused")
        elif kind is ShardingType.COLUMN_WISE:
            generator = peer_plan.column_wise(ranks=list(range(world)), compute_kernel="fused")
        else:
            generator = peer_plan.row_wise(compute_kernel="fused")
        generators[f"t{i}"] = generator
    table_plan = peer_plan.construct_module_sharding_plan(
        collection,
        generators,
        sharder=sharder,
        world_size=world,
        local_size=world,
        device_type=device.type,
    )
    model = PeerTrain(PeerDLRM(collection, NUM_DENSE, list(DENSE_LAYERS), list(OVER_LAYERS)))
    return PeerParallel(
        model,
        device=device,
        plan=PeerPlan({COLLECTION_PATH: table_plan}),
        sharders=[sharder],
    )


def collection_of(model: nn.Module) -> nn.Module:
    return model.module.model.sparse_arch.embedding_bag_collection


def ids(batch_size: int, kind: Any) -> Any:
    generator = torch.Generator().manual_seed(dist.get_rank())
    values = torch.randint(0, NUM_ROWS, (NUM_TABLES * batch_size,), generator=generator)
    lengths = torch.ones(NUM_TABLES * batch_size, dtype=torch.int32)
    return kind(keys=FEATURES, values=values, lengths=lengths)


class Step:
    """A whole training step."""

    def __init__(self, model: nn.Module, dense: list[nn.Parameter]) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(dense, lr=0.01)

    def __call__(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        loss, _ = self.model(batch)
        loss.backward()
        self.optimizer.step()


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for n, p in model.named_parameters() if "embedding_bag" not in n]


class _Given(nn.Module):
    """Stands in for the collection: embeddings that cost nothing to look up."""

    def __init__(self, batch_size: int, wrap: Callable[..., Any]) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(batch_size, NUM_TABLES * DIM))
        self._wrap = wrap

    def forward(self, features: Any) -> Any:
        return self._wrap(FEATURES, [DIM] * NUM_TABLES, self.values)


def dense_alone(model: nn.Module, batch_size: int, wrap: Callable[..., Any]) -> Step:
    """The same model under DDP with the collection taken out."""
    model.model.sparse_arch.embedding_bag_collection = _Given(batch_size, wrap)
    name = "model.sparse_arch.embedding_bag_collection.values"
    if dist.get_world_size() > 1:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [name])
        return Step(DistributedDataParallel(model), dense_parameters(model))
    return Step(model, dense_parameters(model))


class Floor:
    """The least a forward takes: ids there, lookup kernel, embeddings back."""

    def __init__(self, batch_size: int, world_size: int) -> None:
        from recsys.kernels.tbe import TableBatchedEmbedding
        from recsys.kernels.types import (
            EmbOptimType,
            OptimizerSpec,
            PoolingType,
            TableSpec,
            UpdateMode,
        )

        tables = NUM_TABLES // world_size
        self.tbe = TableBatchedEmbedding(
            [TableSpec(name=str(i), num_rows=NUM_ROWS, dim=DIM) for i in range(tables)],
            feature_table_map=list(range(tables)),
            pooling=PoolingType.SUM,
            optimizer=OptimizerSpec(algorithm=EmbOptimType.EXACT_ROWWISE_ADAGRAD),
            update_mode=UpdateMode.FUSED,
            device=CPU,
        )
        self.tbe.storage.zero_()
        self.world_size = world_size
        total = tables * batch_size * world_size
        self.ids = torch.randint(0, NUM_ROWS, (total,), dtype=torch.int32)
        self.lengths = torch.ones(total, dtype=torch.int32)
        self.offsets = torch.arange(total + 1, dtype=torch.int32)

    def exchange(self, tensor: Tensor) -> Tensor:
        if self.world_size == 1:
            return tensor
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor)
        return received

    def __call__(self) -> None:
        self.exchange(self.lengths)
        with torch.no_grad():
            rows = self.tbe.forward(self.exchange(self.ids), self.offsets, None)
        self.exchange(rows)


def run_case(plan: str, batch_size: int, rounds: int, repeats: int) -> dict[str, Any]:
    world = dist.get_world_size()
    has_peer, peer_kjt = True, None
    models: dict[str, nn.Module] = {}
    try:
        from torchrec import KeyedJaggedTensor as PeerJagged
        from torchrec.models.dlrm import DLRM as PeerDLRM
        from torchrec.models.dlrm import DLRMTrain as PeerTrain

        peer_kjt = PeerJagged
    except ImportError:
        has_peer = False
    mix = MIX if not has_peer else PEER_MIX
    models["ours"] = shard_ours(own_dlrm(), plan, mix)
    if has_peer:
        models["peer"] = peer_model(plan)
        # the peer's dense modules around our collection
        same = PeerTrain(
            PeerDLRM(_peer_collection_stub(), NUM_DENSE, list(DENSE_LAYERS), list(OVER_LAYERS))
        )
        same.model.sparse_arch.embedding_bag_collection = our_collection()
        models["ours_same_dense"] = shard_ours(same, plan, mix)
    dense = torch.randn(batch_size, NUM_DENSE)
    labels = (torch.rand(batch_size) < 0.5).float()
    our_batch = Batch(dense, ids(batch_size, KeyedJaggedTensor), labels)
    steps: dict[str, Callable[[], Any]] = {}
    forwards: dict[str, Callable[[], Any]] = {}
    own = Step(models["ours"], dense_parameters(models["ours"]))
    steps["ours"] = lambda: own(our_batch)
    our_sharded = collection_of(models["ours"])
    forwards["ours"] = lambda: our_sharded(
        KeyedJaggedTensor(
            FEATURES,
            our_batch.sparse_features.values(),
            lengths=our_batch.sparse_features.lengths(),
        )
    ).values()
    if has_peer:
        peer_batch = Batch(dense, ids(batch_size, peer_kjt), labels)
        peer_step = Step(models["peer"], dense_parameters(models["peer"]))
        same_step = Step(models["ours_same_dense"], dense_parameters(models["ours_same_dense"]))
        steps["peer"] = lambda: peer_step(peer_batch)
        steps["ours_same_dense"] = lambda: same_step(our_batch)
        from torchrec import KeyedTensor as PeerKeyed

        stub = PeerTrain(
            PeerDLRM(_peer_collection_stub(), NUM_DENSE, list(DENSE_LAYERS), list(OVER_LAYERS))
        )
        alone = dense_alone(stub, batch_size, PeerKeyed)
        steps["dense_alone"] = lambda: alone(peer_batch)
        peer_sharded = collection_of(models["peer"])
        forwards["peer"] = lambda: peer_sharded(
            peer_kjt(
                keys=FEATURES,
                values=peer_batch.sparse_features.values(),
                lengths=peer_batch.sparse_features.lengths(),
            )
        ).values()
    from recsys.sparse import KeyedTensor

    own_alone = dense_alone(own_dlrm(), batch_size, KeyedTensor)
    steps["our_dense_alone"] = lambda: own_alone(our_batch)
    floor = Floor(batch_size, world)
    forwards["floor"] = floor
    return {
        "plan": plan,
        "ranks": world,
        "batch_size": batch_size,
        "peer": "TorchRec 1.8.0" if has_peer else "not installed",
        "step_ms": ranks.measure(steps, rounds, repeats),
        "forward_ms": ranks.measure(forwards, rounds, repeats),
    }


def _peer_collection_stub() -> Any:
    from torchrec import EmbeddingBagCollection as PeerCollection
    from torchrec import EmbeddingBagConfig as PeerConfig

    return PeerCollection(
        tables=[
            PeerConfig(
                name=f"t{i}", embedding_dim=DIM, num_embeddings=2, feature_names=[FEATURES[i]]
            )
            for i in range(NUM_TABLES)
        ],
        device=torch.device("meta"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", choices=PLANS, required=True)
    parser.add_argument("--batch-size", type=int, default=1024)
    arguments = ranks.begin(parser)
    result = run_case(arguments.plan, arguments.batch_size, arguments.rounds, arguments.repeats)
    for what in ("step_ms", "forward_ms"):
        ranks.show(f"{arguments.plan} {arguments.batch_size} {what}", result[what])
    ranks.end(result, arguments.out)


if __name__ == "__main__":
    main()
