"""Checkpoints that TorchRec saved by torch.distributed.checkpoint load, with optimizer state."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from recsys.distributed.checkpoint import CheckpointError, load_checkpoint, read_checkpoint
from recsys.distributed.checkpoint.torchrec_names import own_names
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.types import (
    EmbeddingModuleShardingPlan,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim import SGD, Adagrad, Adam, RowWiseAdagrad, apply_optimizer_in_backward
from recsys.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from tests.distributed.cases import CPU, whole
from tests.distributed.checkpoint.torchrec_save import FEATURES, TABLES
from tests.ranks import RankPool

ROOT = Path(__file__).parents[3]
OPTIMIZERS = {"SGD": SGD, "Adagrad": Adagrad, "RowWiseAdagrad": RowWiseAdagrad}

PARAM = "ebc.embedding_bags.t_user.weight"


@pytest.mark.parametrize(
    ("saved", "live", "expected"),
    [
        ("t_user.momentum1", ["sum"], "sum"),
        ("t_user.momentum1", ["momentum_buffer"], "momentum_buffer"),
        ("t_user.exp_avg", ["exp_avg", "exp_avg_sq", "step"], "exp_avg"),
        ("t_user.momentum1", ["exp_avg"], "momentum1"),
        ("t_item.momentum1", ["sum"], None),
        ("sum", ["sum"], None),
    ],
)
def test_names(saved: str, live: list[str], expected: str | None) -> None:
    start = f"optimizer.state.{PARAM}."
    found = own_names([f"{start}{saved}", f"model.{PARAM}"], {start + name for name in live})
    assert found == ({} if expected is None else {f"{start}{saved}": f"{start}{expected}"})


def _saved_by_torchrec(kind: str, optimizer: str, folder: Path) -> dict[str, Tensor]:
    """Have TorchRec train and save; return the values that it had, whole."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    module = ["-m", "tests.distributed.checkpoint.torchrec_save", kind, optimizer, str(folder)]
    environment = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *module],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    parts = [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]
    found: dict[str, Tensor] = {}
    for name in parts[0] | parts[1]:
        held = [part for of_rank in parts for part in of_rank.get(name, [])]
        size = [max(o[i] + p.shape[i] for o, p in held) for i in range(held[0][1].dim())]
        found[name] = torch.full(size, float("nan"))
        for offsets, part in held:
            region = tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
            found[name][region] = part
    return found


def _model(optimizer: str) -> nn.Module:
    configs = [
        EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[feature]
        )
        for feature, (name, (rows, dim)) in zip(FEATURES, TABLES.items(), strict=True)
    ]
    ebc = EmbeddingBagCollection(tables=configs, device=CPU)
    apply_optimizer_in_backward(OPTIMIZERS[optimizer], ebc.parameters(), {"lr": 0.1})
    return nn.ModuleDict({"ebc": ebc, "over": nn.Linear(12, 1)})


def _load(optimizer: str, path: str) -> dict[str, Tensor]:
    world = list(range(dist.get_world_size()))
    kinds = {"t_user": ShardingType.ROW_WISE, "t_item": ShardingType.DATA_PARALLEL}
    plan = EmbeddingModuleShardingPlan(
        {name: parameter_sharding(kind, *TABLES[name], world) for name, kind in kinds.items()}
    )
    model = DistributedModelParallel(
        _model(optimizer), device=CPU, plan=ShardingPlan({"ebc": plan})
    )
    dense = KeyedOptimizerWrapper(
        {f"over.{name}": param for name, param in model.module["over"].named_parameters()},
        lambda params: torch.optim.Adam(params, lr=0.1),
    )
    both = CombinedOptimizer([model.fused_optimizer, dense])
    assert load_checkpoint(path, model, both) == {}
    values = {name: whole(value) for name, value in model.state_dict().items()}
    for param, states in both.state_dict()["state"].items():
        values |= {f"{param}.{name}": whole(value) for name, value in states.items()}
    return values


@pytest.mark.skipif(find_spec("torchrec") is None, reason="needs TorchRec: make peers")
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [("table_wise", "RowWiseAdagrad"), ("row_wise", "RowWiseAdagrad"), ("table_wise", "SGD")],
)
def test_what_torchrec_saved_loads_under_another_plan(
    ranks: RankPool, tmp_path: Path, kind: str, optimizer: str
) -> None:
    saved = _saved_by_torchrec(kind, optimizer, tmp_path)
    path = str(tmp_path / "saved")
    expected = {}
    for name, value in saved.items():
        for table in TABLES:
            name = name.replace(f".{table}.momentum1", ".sum")
        expected[name] = value
    assert expected.keys() >= {f"{PARAM}.sum"} or optimizer == "SGD"
    for loaded in ranks(3, _load, optimizer, path):
        assert loaded.keys() == expected.keys()
        for name, value in loaded.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)
    read = read_checkpoint(path, {"t_user": slice(2, 9)})
    torch.testing.assert_close(read, {PARAM: expected[PARAM][2:9]}, rtol=0, atol=0)
    alone = _model(optimizer)
    load_checkpoint(path, alone)
    torch.testing.assert_close(alone.state_dict()[PARAM], expected[PARAM], rtol=0, atol=0)


def test_missing_steps_of_adam_are_named(tmp_path: Path) -> None:
    ebc = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name="t_user", num_embeddings=5, embedding_dim=4, feature_names=["f0"]
            )
        ],
        device=CPU,
    )
    apply_optimizer_in_backward(Adam, ebc.parameters(), {"lr": 0.1})
    model = nn.ModuleDict({"ebc": ebc})
    moments = {key: torch.rand(5, 4) for key in ("t_user.exp_avg", "t_user.exp_avg_sq")}
    state = {"model": {PARAM: torch.rand(5, 4)}, "optimizer": {"state": {PARAM: moments}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    env = ShardingEnv.from_local()
    sharded = DistributedModelParallel(model, env=env, device=CPU)
    with pytest.raises(CheckpointError, match=r"lacks 1 of .* \['optimizer.state.*\.step'\]"):
        load_checkpoint(tmp_path, sharded, sharded.fused_optimizer)
    load_checkpoint(tmp_path, sharded, sharded.fused_optimizer, allow_partial=True)
    found = sharded.fused_optimizer.state_dict()["state"][PARAM]
    assert torch.equal(whole(found["exp_avg_sq"]), moments["t_user.exp_avg_sq"])
