"""Train, checkpoint, quantize, export and score a sharded DLRM.

- `torchrun --standalone --nproc-per-node=2 examples/dlrm/train.py`
- `torchrun --standalone --nproc-per-node=2 examples/dlrm/train.py --split random`
- `torchrun --standalone --nproc-per-node=2 examples/dlrm/train.py --dataset criteo --data DIR`
- `torchrun --standalone --nproc-per-node=2 examples/dlrm/train.py --dataset random`

It also runs on one process without torchrun. With `--resume auto` a killed job resumes from its
last save: start the same command again, or let torchrun do it (`--max-restarts`).
"""

import argparse
import os
import random
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from data import Data, load_data
from export import export, print_table
from graphed import graph_dense
from model import build_model
from options import parse_options

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.monitoring.watchdog import end_with_launcher
from recsys.distributed.planner import EmbeddingShardingPlanner, Topology
from recsys.distributed.types import ShardingEnv
from recsys.modules.dlrm import DLRMTrain
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward, in_backward_optimizer_filter
from recsys.training import Trainer, exit_on_error

META = torch.device("meta")


class Table:
    """Logger that prints a row per evaluation."""

    def __init__(self, baselines: Mapping[str, Mapping[str, float]]) -> None:
        print(
            f"{'validation':16} {'train loss':>10} {'AUC':>7} {'NE':>7} {'log loss':>8} samples/s"
        )
        for name, row in baselines.items():
            print(f"{name:16} {'':10} {row['auc']:7.4f} {row['ne']:7.4f} {row['loss']:8.4f}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Print a row."""
        auc, ne, loss = (values[f"validation/{name}"] for name in ("auc", "ne", "loss"))
        row = f"{values['loss']:10.4f} {auc:7.4f} {ne:7.4f} {loss:8.4f}"
        name = f"epoch {values['epoch']}"
        print(f"{name:16} {row} {values['samples_per_second']:9.0f}", flush=True)

    def close(self) -> None:
        """Do nothing."""


def shard(
    data: Data, arguments: argparse.Namespace, env: ShardingEnv, device: torch.device
) -> DistributedModelParallel:
    """Build the model, place its tables by the planner, and attach their optimizer."""
    model = build_model(data.spec, arguments.embedding_dim, META)
    settings = {"lr": arguments.embedding_lr, "eps": arguments.embedding_eps}
    apply_optimizer_in_backward(RowWiseAdagrad, model.sparse_arch.parameters(), settings)
    topology = Topology(world_size=env.world_size, compute_device=device.type)
    sharded = DistributedModelParallel(
        DLRMTrain(model),
        env=env,
        device=device,
        planner=EmbeddingShardingPlanner(topology=topology, batch_size=arguments.batch_size),
        init_data_parallel=not arguments.graph_dense,
    )
    if arguments.graph_dense:
        graph_dense(
            model, torch.zeros(arguments.batch_size, len(data.spec.dense_names), device=device)
        )
        sharded.init_data_parallel()
    return sharded


def train(
    arguments: argparse.Namespace, env: ShardingEnv, device: torch.device
) -> tuple[Data, dict]:
    data = load_data(arguments, env)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(arguments.seed)
    model = shard(data, arguments, env, device)
    dense = dict(in_backward_optimizer_filter(model.named_parameters())).values()
    loggers = []
    if env.rank == 0:
        data.spec.save(arguments.out / "features")
        print(f"\n{model.plan}\n")
        loggers = [Table(data.baselines.get("validation", {}))]
    # It keeps the epoch of least log loss: later epochs are surer where they err.
    trainer = Trainer(
        model,
        torch.optim.Adam(dense, lr=arguments.dense_lr),
        arguments.out,
        epochs=arguments.epochs or data.epochs,
        save_every=arguments.save_every,
        resume=arguments.resume == "auto",
        overwrite=arguments.resume != "auto",
        log_every=None,
        loggers=loggers,
    )
    result = trainer.fit(data.train, data.validation)
    if env.rank == 0:
        epoch = f"epoch {result.best_epoch}, the one of least log loss on validation"
        print(f"Kept {epoch}: {trainer.best}")
    return data, trainer.evaluate(data.test)


def main() -> None:
    arguments = parse_options(__doc__.splitlines()[0])
    end_with_launcher()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "RANK" in os.environ:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda" and arguments.tf32:
        torch.set_float32_matmul_precision("high")
    env = ShardingEnv.default()
    with exit_on_error(arguments.out, "Resume from it by the same command with --resume auto."):
        data, test = train(arguments, env, device)
    if dist.is_initialized():
        dist.destroy_process_group()
    if env.rank == 0:
        rows = {**data.baselines.get("test", {}), "DLRM, sharded": test, **export(arguments, data)}
        print_table(rows)
        print(f"\nCheckpoint and exported model are in {arguments.out}/")


if __name__ == "__main__":
    main()
