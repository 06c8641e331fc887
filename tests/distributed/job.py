"""A training job for tests: the same losses, to rounding, on any number of ranks.

    torchrun ... -m tests.distributed.job FOLDER [--steps 30] [--save-every 5] [--pause 0.1]

The ranks of a step share a fixed set of samples. The job saves, resumes from the last save, and
records each step's loss in a file. Its plan depends on the numbers of ranks and nodes: with several
nodes, a table's rows are added up within a node first.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from recsys.datasets.utils import Batch
from recsys.distributed.checkpoint import load_checkpoint, newest_version, save_checkpoint
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.monitoring.watchdog import end_with_launcher
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
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward, in_backward_optimizer_filter
from recsys.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from recsys.sparse import KeyedJaggedTensor

SAMPLES = 24  # of a step, on all ranks together
ROWS, DIM, TABLES = 60, 8, 4
FEATURES = [f"f{number}" for number in range(TABLES)]
PATH = "model.sparse_arch.embedding_bag_collection"


def model_of() -> nn.Module:
    """The unsharded model, the same on every rank."""
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(ROWS, DIM, f"t_{f}", feature_names=[f]) for f in FEATURES]
    model = DLRMTrain(DLRM(EmbeddingBagCollection(tables=tables), 3, [16, DIM], [16, 1]))
    apply_optimizer_in_backward(RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": 0.3})
    return model


def plan_for(world_size: int, node_size: int, shift: int = 0) -> ShardingPlan:
    """A plan with another strategy for each table; another shift deals them out otherwise."""
    world = list(range(world_size))
    kinds = [
        (ShardingType.TABLE_WISE, [world_size - 1]),
        (ShardingType.ROW_WISE, world),
        (ShardingType.COLUMN_WISE, world[:2]),
        (ShardingType.TABLE_ROW_WISE, world[-node_size:])
        if node_size > 1
        else (ShardingType.DATA_PARALLEL, world),
    ]
    placed = EmbeddingModuleShardingPlan()
    for number, feature in enumerate(FEATURES):
        kind, ranks = kinds[(number + shift) % TABLES]
        placed[f"t_{feature}"] = parameter_sharding(kind, ROWS, DIM, ranks, local_size=node_size)
    return ShardingPlan({PATH: placed})


def samples(step: int, rank: int, world_size: int) -> Batch:
    """A rank's share of a step's samples."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (TABLES, SAMPLES), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    whole = KeyedJaggedTensor(FEATURES, ids, lengths=lengths.flatten())
    dense = torch.rand(SAMPLES, 3, generator=generator)
    bags = {key: whole[key].to_dense() for key in FEATURES}
    labels = torch.tensor([float((bag < ROWS // 2).any()) for bag in bags["f0"]])
    share = SAMPLES // world_size
    own = slice(rank * share, (rank + 1) * share)
    features = KeyedJaggedTensor(
        FEATURES,
        torch.cat([bag for key in FEATURES for bag in bags[key][own]]),
        lengths=lengths[:, own].flatten(),
    )
    return Batch(dense[own], features, labels[own])


class Job:
    """The model on these ranks, with its optimizer; resumes from the last save."""

    def __init__(self, saves: Path | None, shift: int = 0) -> None:
        self.env = ShardingEnv.default()
        plan = plan_for(self.env.world_size, self.env.node_size, shift)
        cpu = torch.device("cpu")
        self.model = DistributedModelParallel(model_of(), device=cpu, plan=plan)
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())),
            lambda params: torch.optim.Adam(params, lr=0.02),
        )
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])
        self.saves, self.step = saves, 0
        if saves is not None and newest_version(saves):
            self.step = load_checkpoint(saves, self.model, self.optimizer)["step"]

    def train_step(self) -> float:
        """Trains on the next samples of all ranks; returns their mean loss."""
        self.optimizer.zero_grad()
        loss, _ = self.model(samples(self.step, self.env.rank, self.env.world_size))
        loss.backward()
        self.optimizer.step()
        self.step += 1
        mean = loss.detach().clone()
        if self.env.world_size > 1:
            dist.all_reduce(mean)
        return mean.item() / self.env.world_size

    def save(self) -> None:
        """Saves, with the position."""
        assert self.saves is not None
        save_checkpoint(self.saves, self.model, self.optimizer, {"step": self.step})


def losses_in(folder: Path) -> dict[int, float]:
    """The losses that a job has noted, by step; of a step that was repeated the last."""
    lines = (folder / "losses").read_text().splitlines()
    return {note["step"]: note["loss"] for note in map(json.loads, lines)}


def main() -> None:
    """Trains under torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    arguments = parser.parse_args()
    end_with_launcher()
    dist.init_process_group("gloo")
    job = Job(arguments.folder / "saves")
    layout = job.model.module.get_submodule(PATH).layout
    about = {"world_size": job.env.world_size, "two_hops": layout.is_hierarchical}
    while job.step < arguments.steps:
        note = {"step": job.step, "loss": job.train_step(), **about}
        if job.env.rank == 0:
            with (arguments.folder / "losses").open("a") as file:
                file.write(json.dumps(note) + "\n")
        if job.step % arguments.save_every == 0:
            job.save()
        time.sleep(arguments.pause)
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print("done", flush=True)


if __name__ == "__main__":
    main()
