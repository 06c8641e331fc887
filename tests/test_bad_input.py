"""Bad input never passes silently: a user's view of each kind of it.

Every message names the subject, the received value, and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from recsys.base.arguments import MissingKeyError
from recsys.datasets.criteo import CriteoDataset
from recsys.distributed.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.planner import EmbeddingShardingPlanner, PlannerError, Topology
from recsys.distributed.types import (
    EmbeddingModuleShardingPlan,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor

CPU, META = torch.device("cpu"), torch.device("meta")
KEYS = ["user", "film"]


def _tables(**names: str) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=names.get(f"{feature}s", f"{feature}s"),
            num_embeddings=10,
            embedding_dim=4,
            feature_names=[feature],
        )
        for feature in KEYS
    ]


def _unsharded() -> nn.Module:
    return EmbeddingBagCollection(tables=_tables(), device=CPU)


def _plan(**ranks: int) -> ShardingPlan:
    """A plan by hand: table name to the rank that gets it."""
    tables = EmbeddingModuleShardingPlan(
        {
            name: parameter_sharding(ShardingType.TABLE_WISE, 10, 4, [rank])
            for name, rank in ranks.items()
        }
    )
    return ShardingPlan({"": tables})


def _sharded(plan: ShardingPlan | None = None) -> nn.Module:
    plan = _plan(users=0, films=0) if plan is None else plan
    return DistributedModelParallel(
        _unsharded(), env=ShardingEnv.from_local(), device=CPU, plan=plan
    )


def _batch(
    values: list[int] | list[float], lengths: list[int], keys: list[str] = KEYS
) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys, torch.tensor(values), lengths=torch.tensor(lengths))


def _looked_up(build: Callable[[], nn.Module], *batch: object) -> Callable[[Path], object]:
    """Makes the batch and looks it up."""
    return lambda _: build()(_batch(*batch)).values()  # type: ignore[arg-type]


def _too_big_for_the_topology(_: Path) -> None:
    table = EmbeddingBagConfig(
        name="ads", num_embeddings=1_000_000, embedding_dim=64, feature_names=["ad"]
    )
    model = EmbeddingBagCollection(tables=[table], device=META)
    topology = Topology(world_size=2, compute_device="cpu", ddr_cap=100 << 20)
    EmbeddingShardingPlanner(topology).plan(model, [EmbeddingBagCollectionSharder()])


def _dense_size(_: Path) -> None:
    DLRM(
        EmbeddingBagCollection(tables=_tables()),
        dense_in_features=13,
        dense_arch_layer_sizes=[32, 16],
        over_arch_layer_sizes=[8, 1],
    )


def _corrupt_checkpoint(folder: Path) -> None:
    model = _sharded()
    save_checkpoint(folder / "c", model)
    (data,) = (folder / "c" / "step-1").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:100])
    load_checkpoint(folder / "c", model)


def _truncated_dataset(folder: Path) -> None:
    line = "\t".join(["1"] + ["5"] * 13 + ["0a"] * 26) + "\n"
    (folder / "day_0").write_text(line * 2 + line[:40])
    list(CriteoDataset([folder / "day_0"], batch_size=2, num_embeddings_per_feature=100))


# kind of bad input -> (what provokes it, exception, its whole message; "..." for any text)
CASES: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "lengths that do not add up": (
        _looked_up(_unsharded, [1, 2, 3], [1, 2, 3, 1]),
        ValueError,
        "KeyedJaggedTensor.lengths must add up to at most the number of values; received lengths "
        "that add up to 7 for 3 values. Correct the lengths or the values.",
    ),
    "lengths that do not add up, sharded": (
        _looked_up(_sharded, [1, 2, 3], [1, 0, 0, 3]),
        ValueError,
        "On rank 0: KeyedJaggedTensor.lengths must add up ... that add up to 4 for 3 values. ...",
    ),
    "float ids": (
        _looked_up(_unsharded, [1.0, 2.0], [1, 1]),
        TypeError,
        "EmbeddingBagCollection looks up ids, which must be int32 or int64; received torch.float32 "
        "for the features ['user', 'film']. Convert them with .long().",
    ),
    "float ids, sharded": (
        _looked_up(_sharded, [1.0, 2.0], [1, 1]),
        TypeError,
        "On rank 0: ShardedEmbeddingBagCollection looks up ids, which must be int32 or int64; "
        "received torch.float32 for the features [...]. Convert them with .long().",
    ),
    "unknown feature": (
        _looked_up(_unsharded, [1, 2], [1, 1], ["user", "movie"]),
        MissingKeyError,
        "The batch lacks the features ['film'], which EmbeddingBagCollection looks up in the "
        "tables ['films']; received the keys ['user', 'movie']. Add them (bags may be empty), ...",
    ),
    "unknown feature, sharded": (
        _looked_up(_sharded, [1, 2], [1, 1], ["user", "movie"]),
        MissingKeyError,
        "On rank 0: The batch lacks the features ['film'], which this module looks up; received "
        "the keys ['user', 'movie']. Add them (bags may be empty), or ...",
    ),
    "id = num_embeddings": (
        _looked_up(_unsharded, [1, 10], [1, 1]),
        IndexError,
        "Id 10 at position 0 of feature 'film' must be from 0 to 9. Table 'films' has 10 rows; the "
        "batch has 1 bad id, the first in sample 0. Hash or remap ids, ...",
    ),
    "id = num_embeddings, sharded": (
        _looked_up(_sharded, [1, 10], [1, 1]),
        IndexError,
        "On rank 0: Id 10 at position 0 of feature 'film' must be from 0 to 9. Table 'films' ...",
    ),
    "negative id": (
        _looked_up(_unsharded, [3, -1, 2], [2, 1]),
        IndexError,
        "Id -1 at position 1 of feature 'user' must be from 0 to 9. Table 'users' has 10 rows; the "
        "batch has 1 bad id, the first in sample 0. Hash or remap ids, ...",
    ),
    "negative id, sharded": (
        _looked_up(_sharded, [3, -1, 2], [2, 1]),
        IndexError,
        "On rank 0: Id -1 at position 1 of feature 'user' must be from 0 to 9. Table 'users' ...",
    ),
    "duplicate table names": (
        lambda _: EmbeddingBagCollection(tables=_tables(films="users")),
        ValueError,
        "EmbeddingBagCollection needs tables with different names; received ['users'] more than "
        "once. Rename all but one. ...",
    ),
    "plan for a wrong world size": (
        lambda _: _sharded(_plan(users=0, films=1)),
        ValueError,
        "The plan places a shard of table 'films' on rank 1, but there are 1 ranks (0..0). Make "
        "the plan for this world size.",
    ),
    "table too big for the topology": (
        _too_big_for_the_topology,
        PlannerError,
        "Table 'ads' of module '' (1000000 x 64, 488.3 MiB with its gradient) does not fit on "
        "the 2 cpu ranks of 100.0 MiB each, of which 84.6 MiB are free for it. Tried:\n"
        "...row_wise       2      244.3 MiB       159.7 MiB  cpu\n..."
        "would suffice: 6 ranks like these.",
    ),
    "mismatched devices within a batch": (
        lambda _: KeyedJaggedTensor(
            KEYS, torch.tensor([1, 2]), lengths=torch.ones(2).int().to(META)
        ),
        ValueError,
        "KeyedJaggedTensor.lengths must be on the values' device; received lengths on meta and "
        "values on cpu. Move with lengths.to('cpu').",
    ),
    "mismatched devices of batch and tables": (
        lambda _: _unsharded()(_batch([1, 2], [1, 1]).to(META)),
        ValueError,
        "EmbeddingBagCollection has its tables on cpu; received a batch on meta. Move one of them "
        "with .to().",
    ),
    "mismatched devices of batch and tables, sharded": (
        lambda _: _sharded()(_batch([1, 2], [1, 1]).to(META)),
        ValueError,
        "On rank 0: ShardedEmbeddingBagCollection has its tables on cpu; received a batch on meta. "
        "Move one of them with .to().",
    ),
    "dense layer of another size than the embeddings": (
        _dense_size,
        ValueError,
        "the last of dense_arch_layer_sizes must be the tables' embedding_dim 4; received [32, "
        "16]. The interaction multiplies the dense vector with the embeddings: make the two equal.",
    ),
    "corrupt checkpoint file": (
        _corrupt_checkpoint,
        CheckpointError,
        "The checkpoint /.../c/step-1 cannot be loaded. Load an earlier one, or copy this one "
        "again. rank 0: /.../c/step-1/...-rank-0.distcp is damaged: the block at byte 0 has 100 "
        "bytes with CRC ...; the manifest has ...",
    ),
    "truncated dataset file": (
        _truncated_dataset,
        ValueError,
        "/.../day_0, line 3: must have 40 fields between tabs (...) and a newline; received 19 "
        "fields and no newline at the end. The file is truncated or damaged: download it again.",
    ),
    "table missing from a hand-written plan": (
        lambda _: _sharded(_plan(users=0)),
        ValueError,
        "The plan of module 'EmbeddingBagCollection' must name each of its tables once; missing: "
        "['films'], not in the module: []. Give it one ParameterSharding for each of ['users', "
        "'films'].",
    ),
    "module missing from a hand-written plan": (
        lambda _: _sharded(ShardingPlan()),
        ValueError,
        "The plan must name each shardable module of the model once; missing: [''], not shardable "
        "modules of the model: []. To leave ... on every rank, place its tables data_parallel.",
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_message_names_subject_received_and_fix(kind: str, tmp_path: Path) -> None:
    provoke, error, message = CASES[kind]
    with pytest.raises(error) as raised:
        provoke(tmp_path)
    assert type(raised.value) is error
    received = str(raised.value.args[0])
    pattern = ".*".join(re.escape(part) for part in message.split("..."))
    assert re.fullmatch(pattern, received, re.DOTALL), received
