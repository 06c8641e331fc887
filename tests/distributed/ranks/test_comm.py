"""Errors of the remaining ranks after the loss of one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from recsys.base import contact

_STAGES = {
    "all_reduce": (1, "add up numbers"),
    "all_to_all": (0, "send numbers"),
    "auc": (2, "synchronize a metric"),
    "build": (2, "plan the model"),
    "clip": (1, "compare how gradients are clipped"),
    "interval": (1, "agree on when to compute metrics"),
    "load": (1, "load a state dict"),
    "metrics": (2, "add up metrics"),
    "ne": (0, "synchronize a metric"),
    "quantize": (1, r"quantize the model \(quantize_embeddings\)"),
    "save": (0, "meet in the stage 'Saving [^']+'"),
}
"""The lost rank and a pattern of the other ranks' message, by the ranks' work."""

_SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from recsys import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagConfig
from recsys import metrics
from recsys.base import contact
from recsys.distributed.ranks import comm
from recsys.distributed.checkpoint import save_checkpoint
from recsys.distributed.types import ShardingEnv
from recsys.inference import quantize_embeddings
from recsys.optim import GradientClipping, GradientClippingOptimizer, KeyedOptimizerWrapper

folder, port, cases = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
contact._WAIT_FOR_SIGNS = 2.0


def build():
    config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"])
    return DistributedModelParallel(torch.nn.Sequential(EmbeddingBagCollection(tables=[config])))


def clip():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    sgd = KeyedOptimizerWrapper({"w": weight}, lambda p: torch.optim.SGD(p, lr=1.0))
    limit = {"max_gradient": 1.0, "enable_global_grad_clip": True}
    GradientClippingOptimizer(sgd, GradientClipping.NORM, **limit).step()


def compute(**settings):
    task = metrics.RecTaskInfo()
    wanted = {
        kind: metrics.RecMetricDef(rec_tasks=[task]) for kind in (
            metrics.RecMetricEnum.NE, metrics.RecMetricEnum.AUC
        )
    }
    config = metrics.MetricsConfig(rec_tasks=[task], rec_metrics=wanted, **settings)
    module = metrics.generate_metric_module(
        metrics.RecMetricModule, config, 2, 3, dist.get_rank(), {}, torch.device("cpu")
    )
    module.update({name: torch.rand(2) for name in ("prediction", "label", "weight")})
    module.last_compute_time = 0.0
    try:
        module.compute()
    finally:  # what this rank has seen is still there
        module.update({name: torch.rand(2) for name in ("prediction", "label", "weight")})


def run(what, rank, lost):
    store = dist.PrefixStore(what, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    if what in ("load", "save", "quantize"):
        model = build()
        state = model.state_dict()
    comm.all_reduce(env, "warm up", torch.ones(3)).wait()
    if rank == lost:
        return "lost"
    start = time.monotonic()
    try:
        if what == "all_reduce":
            comm.all_reduce(env, "add up numbers", torch.ones(3)).wait()
        elif what == "all_to_all":
            comm.all_to_all(env, "send numbers", torch.ones(3), [1] * 3, [1] * 3).wait()
        elif what == "auc":
            metrics.AUC().sync()
        elif what == "ne":
            metrics.NormalizedEntropy().sync()
        elif what == "clip":
            clip()
        elif what == "metrics":
            compute()
        elif what == "interval":
            compute(max_compute_interval=60.0)
        elif what == "build":
            build()
        elif what == "load":
            model.load_state_dict(state)
        elif what == "save":
            save_checkpoint(folder, model)
        elif what == "quantize":
            quantize_embeddings(model)
    except Exception as error:
        return f"{type(error).__name__} {error}"


children = []
for case in cases:
    what, lost = case.split(":")
    for rank in range(3):
        child = os.fork()
        if child == 0:
            try:
                said = run(what, rank, int(lost))
            except BaseException as error:
                said = repr(error)
            with open(f"{folder}/{what}-{rank}", "w") as file:
                file.write(str(said))
            os._exit(0)
        children.append(child)
for child in children:
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of the messages of each rank in each case."""
    folder = tmp_path_factory.mktemp("lost")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cases = [f"{what}:{lost}" for what, (lost, _) in _STAGES.items()]
    command = [sys.executable, "-c", _SCRIPT, str(folder), str(store.port), *cases]
    subprocess.run(command, timeout=240, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("what", _STAGES)
def test_a_lost_rank_is_named_with_the_stage(said: Path, what: str) -> None:
    lost, stage = _STAGES[what]
    for rank in range(3):
        text = (said / f"{what}-{rank}").read_text()
        if rank != lost:
            start = f"LostContactError Rank {rank} of 3 lost contact .* when the ranks were to"
            found = re.match(rf"{start} {stage}\. Nothing is heard of ranks? ([0-9, ]+): ", text)
            assert found, text
            assert str(lost) in found[1].split(", ")
            assert "or have ended without this call, which every rank must make. Error of" in text
            assert str(rank) not in found[1].split(", ")


def test_what_is_no_lost_contact_is_not_told_as_such() -> None:
    error = RuntimeError("Split sizes doesn't match total dim 0 size")
    assert contact.explain(error, None, "send numbers") is error
    with pytest.raises(RuntimeError) as raised, contact.explained(None, "send numbers"):
        raise error
    assert raised.value is error
    assert raised.value.__cause__ is None
