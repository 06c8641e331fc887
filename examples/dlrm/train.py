"""Train, checkpoint, quantize, export and score a sharded DLRM.

- `torchrun --standalone --nproc-per-node=2 examples/dlrm/train.py`
- `torchrun --standalone --nproc-per-node=2 examples/dlrm/train.py --split random`
- `torchrun --standalone --nproc-per-node=2 examples/dlrm/train.py --dataset criteo --data DIR`
- `torchrun --standalone --nproc-per-node=2 examples/dlrm/train.py --dataset random`

It also runs on one process without torchrun. With `--resume auto` a killed job resumes from its
last save: start the same command again, or let torchrun do it (`--max-restarts`).
"""

import argparse
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from data import Data, load_data
from graphed import graph_dense
from torch import nn

from recsys.distributed.checkpoint import (
    CheckpointError,
    RandomState,
    load_checkpoint,
    newest_version,
    save_checkpoint,
    save_checkpoint_async,
)
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.monitoring.watchdog import Watchdog, end_with_launcher
from recsys.distributed.planner import EmbeddingShardingPlanner, Topology
from recsys.distributed.train_pipeline import TrainPipelineSparseDist
from recsys.distributed.types import ShardingEnv
from recsys.inference import export_torchscript, quantize_embeddings
from recsys.metrics import AUC, NormalizedEntropy
from recsys.modules.dlrm import DLRM, DLRMTrain
from recsys.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward, in_backward_optimizer_filter
from recsys.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

sys.path.insert(0, str(Path(__file__).parents[1]))
from arguments import folder, new_folder, positive, whole

META = torch.device("meta")
SPLITS = ["time", "random"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--dataset", choices=["movielens", "criteo", "random"], default="movielens")
    parser.add_argument(
        "--data", type=folder, help="folder of the data; default: fetch MovieLens 100K"
    )
    parser.add_argument("--split", choices=SPLITS, help=f"of MovieLens; default: {SPLITS[0]}")
    parser.add_argument("--epochs", type=whole(1), help="default: what suits the data")
    parser.add_argument(
        "--batch-size", type=whole(1), default=256, help="samples per rank and step"
    )
    parser.add_argument("--embedding-dim", type=whole(1), default=64)
    parser.add_argument("--embedding-lr", type=positive, default=0.3)
    parser.add_argument(
        "--embedding-eps", type=positive, default=3e-3, help="large: tame rare rows"
    )
    parser.add_argument("--dense-lr", type=positive, default=0.001)
    parser.add_argument(
        "--num-embeddings", type=whole(2), help="rows of Criteo's tables; default: 100000"
    )
    parser.add_argument("--bits", type=int, choices=[8, 4], default=8, help="of quantized rows")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0)
    parser.add_argument("--out", type=new_folder, default=Path("runs/dlrm"))
    parser.add_argument(
        "--resume", choices=["never", "auto"], default="never", help="save, and go on from there"
    )
    parser.add_argument(
        "--save-every", type=whole(1), help="steps, with --resume auto; default: 50"
    )
    parser.add_argument(
        "--tf32", action=argparse.BooleanOptionalAction, default=True, help="of a GPU's matmuls"
    )
    parser.add_argument(
        "--graph-dense", action="store_true", help="launch dense parts as CUDA graphs"
    )
    arguments = parser.parse_args()
    if arguments.graph_dense and not torch.cuda.is_available():
        parser.error("--graph-dense needs a CUDA device; torch sees none. Leave it out on a CPU.")
    dataset, with_dataset = arguments.dataset, f"with --dataset {arguments.dataset}"
    for option, value, is_read, when in (
        ("data", arguments.data, dataset != "random", with_dataset),
        ("split", arguments.split, dataset == "movielens", with_dataset),
        ("num-embeddings", arguments.num_embeddings, dataset != "movielens", with_dataset),
        ("save-every", arguments.save_every, arguments.resume == "auto", "without --resume auto"),
    ):
        if value is not None and not is_read:
            parser.error(f"--{option} does nothing {when}. Leave it out.")
    arguments.split = arguments.split or SPLITS[0]
    arguments.num_embeddings = arguments.num_embeddings or 100_000
    arguments.save_every = arguments.save_every or 50
    return arguments


def build_model(data: Data, arguments: argparse.Namespace, device: torch.device) -> DLRM:
    """Build the model; its tables on ``meta`` take no memory until they are sharded or loaded."""
    dim = arguments.embedding_dim
    tables = [
        EmbeddingBagConfig(
            name=f"t_{features[0]}",
            embedding_dim=dim,
            num_embeddings=data.num_embeddings[features[0]],
            feature_names=features,
            pooling=PoolingType.MEAN,
            weight_init_min=-0.05,
            weight_init_max=0.05,
        )
        for features in data.tables
    ]
    return DLRM(
        EmbeddingBagCollection(tables=tables, device=device),
        dense_in_features=data.num_dense,
        dense_arch_layer_sizes=[128, dim],
        over_arch_layer_sizes=[128, 64, 1],
    )


@torch.no_grad()
def evaluate(model: nn.Module, batches, device: torch.device) -> dict[str, float]:
    """Score one part of the data on all ranks together."""
    model.eval()
    auc, entropy = AUC(), NormalizedEntropy(device)
    for batch in batches:
        _, (_, logits, labels) = model(batch.to(device, non_blocking=True))
        auc.update(logits.sigmoid(), labels)
        entropy.update(logits.sigmoid(), labels)
    model.train()
    if dist.is_initialized():
        auc.sync()
        entropy.sync()
    return {
        "auc": auc.compute().item(),
        "ne": entropy.compute().item(),
        "loss": entropy.log_loss().item(),
    }


class Progress:
    """A progress bar on a terminal; one line per epoch in a log file."""

    def __init__(self, label: str, total: int | None, enabled: bool) -> None:
        self._bar = None
        self._began = time.perf_counter()
        self._samples = 0
        if enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=label, unit=" steps", leave=False)

    def step(self, samples: int) -> None:
        """Count a step."""
        self._samples += samples
        if self._bar is not None:
            self._bar.update()

    def close(self) -> float:
        """Return samples per second on this rank."""
        if self._bar is not None:
            self._bar.close()
        return self._samples / (time.perf_counter() - self._began)


def train(
    arguments: argparse.Namespace, env: ShardingEnv, device: torch.device, watchdog: Watchdog
) -> dict:
    data = load_data(arguments, env)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(arguments.seed)
    model = build_model(data, arguments, META)
    apply_optimizer_in_backward(
        RowWiseAdagrad,
        model.sparse_arch.parameters(),
        {"lr": arguments.embedding_lr, "eps": arguments.embedding_eps},
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=env.world_size, compute_device=device.type),
        batch_size=arguments.batch_size,
    )
    sharded = DistributedModelParallel(
        DLRMTrain(model),
        env=env,
        device=device,
        plan=None,
        planner=planner,
        init_data_parallel=not arguments.graph_dense,
    )
    if arguments.graph_dense:
        example = torch.zeros(arguments.batch_size, data.num_dense, device=device)
        graph_dense(model, example)
        sharded.init_data_parallel()
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        lambda params: torch.optim.Adam(params, lr=arguments.dense_lr),
    )
    optimizer = CombinedOptimizer([sharded.fused_optimizer, dense])
    is_first = env.rank == 0
    if is_first:
        print(f"\n{sharded.plan}\n")
        heads = f"{'train loss':>10} {'AUC':>7} {'NE':>7} {'log loss':>8} {'samples/s':>9}"
        print(f"{'validation':16} {heads}")
        for name, row in data.baselines("validation").items():
            print(f"{name:16} {'':10} {row['auc']:7.4f} {row['ne']:7.4f} {row['loss']:8.4f}")

    # By log loss: the last epochs still order samples better, but are ever surer where they err.
    checkpoint, resume = arguments.out / "checkpoint", arguments.out / "resume"
    at = {"epoch": 0, "step": 0, "best": math.inf, "losses": []}
    progress = {"random": RandomState()}
    if arguments.resume == "auto" and newest_version(resume):
        at = load_checkpoint(resume, sharded, optimizer, progress=progress)
        if is_first:
            print(f"Going on from {resume}: epoch {at['epoch'] + 1}, step {at['step']}", flush=True)
    pipeline = TrainPipelineSparseDist(sharded, optimizer, device)
    for epoch in range(at["epoch"], arguments.epochs or data.epochs):
        data.train.set_epoch(epoch)
        bar = Progress(f"epoch {epoch + 1}", data.train_steps, is_first)
        batches = itertools.islice(data.train, at["step"], None)
        while True:
            try:
                detached, _, labels = pipeline.progress(batches)
            except StopIteration:
                break
            at["losses"].append(detached)
            at["step"] += 1
            bar.step(len(labels))
            if arguments.resume == "auto" and at["step"] % arguments.save_every == 0:
                save_checkpoint_async(resume, sharded, optimizer, at, progress=progress)
        rate = bar.close() * env.world_size
        with watchdog.pause("evaluation"):
            scores = evaluate(sharded, data.validation, device)
        if is_first:
            mean_loss = torch.stack(at["losses"]).mean().item()
            name = f"epoch {epoch + 1}"
            print(
                f"{name:16} {mean_loss:10.4f} {scores['auc']:7.4f} {scores['ne']:7.4f} "
                f"{scores['loss']:8.4f} {rate:9.0f}",
                flush=True,
            )

        if scores["loss"] < at["best"]:  # the same on all ranks
            at["best"] = scores["loss"]
            save_checkpoint(checkpoint, sharded, optimizer, {"epoch": epoch + 1})
        at |= {"epoch": epoch + 1, "step": 0, "losses": []}
        if arguments.resume == "auto":
            save_checkpoint(resume, sharded, optimizer, at, progress=progress)

    extra = load_checkpoint(checkpoint, sharded, optimizer)
    if is_first:
        print(f"Kept epoch {extra['epoch']}, the one of least log loss on validation: {checkpoint}")
    return {"data": data, "test": evaluate(sharded, data.test, device)}


def export(arguments: argparse.Namespace, data: Data) -> dict[str, dict[str, float]]:
    """Load the checkpoint into the unsharded model, quantize and export it, and score the file."""
    model = DLRMTrain(build_model(data, arguments, torch.device("cpu")))
    load_checkpoint(arguments.out / "checkpoint", model)
    dtype = torch.int8 if arguments.bits == 8 else torch.quint4x2
    quantized = quantize_embeddings(model.model, dtype)
    path = arguments.out / "model.pt"
    batches = list(data.whole_test)
    export_torchscript(quantized, path, (batches[0].dense_features, batches[0].sparse_features))

    inputs = [
        (b.dense_features, b.sparse_features.values(), b.sparse_features.lengths()) for b in batches
    ]
    test = {"inputs": inputs, "labels": [b.labels for b in batches]}
    torch.save(test, arguments.out / "test.pt")
    # a fresh process, in which nothing of this library can be imported by accident
    score = Path(__file__).with_name("score.py")
    files = [str(arguments.out / name) for name in ("model.pt", "test.pt", "scores.pt")]
    result = subprocess.run(
        [sys.executable, str(score), *files],
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        raise RuntimeError(f"{score} failed on {path}:\n{result.stderr}")
    rows = {"unsharded, from the checkpoint": evaluate(model, data.whole_test, torch.device("cpu"))}
    rows[f"int{arguments.bits} TorchScript, fresh process"] = json.loads(result.stdout)
    return rows


def print_table(rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{'test set':34} {'AUC':>7} {'NE':>7} {'log loss':>8}")
    for name, scores in rows.items():
        print(f"{name:34} {scores['auc']:7.4f} {scores['ne']:7.4f} {scores['loss']:8.4f}")


def end(error: BaseException, out: Path, env: ShardingEnv) -> NoReturn:
    """End this process; rank 0 reports the last save."""
    is_interrupt = isinstance(error, KeyboardInterrupt)
    if env.rank == 0:
        saves = {name: newest_version(out / name) for name in ("resume", "checkpoint")}
        cause = "interrupted" if is_interrupt else str(error).rstrip(".")
        last = saves["resume"] or saves["checkpoint"]
        text = f"Training has ended: {cause}. "
        text += f"The last save is {last}." if last else f"Nothing was saved in {out}."
        if saves["resume"]:
            text += " Resume from it by the same command with --resume auto."
        print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(130 if is_interrupt else 1)  # the other ranks may be gone: wait for nothing


def main() -> None:
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    end_with_launcher()
    if "RANK" in os.environ:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend)
    env = ShardingEnv.default()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and arguments.tf32:
        torch.set_float32_matmul_precision("high")
    try:
        with Watchdog() as watchdog:
            trained = train(arguments, env, device, watchdog)
    except (CheckpointError, KeyboardInterrupt) as error:
        end(error, arguments.out, env)
    if dist.is_initialized():
        dist.destroy_process_group()
    if env.rank == 0:
        rows = {**trained["data"].baselines("test"), "DLRM, sharded": trained["test"]}
        rows.update(export(arguments, trained["data"]))
        print_table(rows)
        print(f"\nCheckpoint and exported model are in {arguments.out}/")


if __name__ == "__main__":
    main()
