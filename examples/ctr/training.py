"""Training of models of clicks, and the options of their scripts."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import torch
from arguments import positive, whole
from torch import nn

from recsys import datasets
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.types import ShardingEnv
from recsys.features import FeatureSpec
from recsys.modules.dlrm import DLRMTrain
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.optim import AdamL2, apply_optimizer_in_backward, in_backward_optimizer_filter
from recsys.training import Trainer
from recsys.training.evaluation import BinaryMetrics, Metrics

CPU = torch.device("cpu")


def tables_of(
    spec: FeatureSpec, dim: int, without: tuple[str, ...] = ()
) -> list[EmbeddingBagConfig]:
    """Return the tables, without some features."""
    found = []
    for table in spec.tables(dim):
        features = [name for name in table.feature_names if name not in without]
        if features:
            scaled = replace(table, weight_init_min=-0.05, weight_init_max=0.05)
            found.append(replace(scaled, feature_names=features))
    return found


def train(
    model: nn.Module,
    spec: FeatureSpec,
    parts: dict[str, pa.Table],
    arguments: argparse.Namespace,
    folder: Path,
    metrics: Callable[[torch.device], Metrics] = BinaryMetrics,
) -> dict[str, float]:
    """Train a model, until the loss of validation no longer falls; return the test's metrics."""
    env, model = ShardingEnv.default(), DLRMTrain(model)
    settings = {"lr": arguments.embedding_lr, "weight_decay": arguments.weight_decay}
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            apply_optimizer_in_backward(AdamL2, module.parameters(), settings)
    sharded = DistributedModelParallel(model, env=env, device=CPU)
    loaders = {
        name: datasets.table(
            part, spec, arguments.batch_size, rank=env.rank, world_size=env.world_size,
            divide="batches", shuffle=name == "train", seed=arguments.seed,
        )
        for name, part in parts.items()
    }  # fmt: skip
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters())).values()
    trainer = Trainer(
        sharded,
        torch.optim.Adam(dense, lr=arguments.lr, weight_decay=arguments.weight_decay),
        folder,
        epochs=arguments.epochs,
        metrics=metrics,
        patience=2,
        overwrite=True,
        log_every=None,
    )
    trainer.fit(loaders["train"], loaders["validation"])
    return trainer.evaluate(loaders["test"])


def parse_options(
    description: str, models: Sequence[str], default: str, data: str
) -> argparse.Namespace:
    """Read the command line.

    Args:
        description: one line about the script.
        models: choices of `--model`.
        default: the default of it.
        data: description of `--data`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", choices=models, default=default)
    parser.add_argument("--data", type=Path, help=f"{data}; default: fetch MovieLens 100K")
    parser.add_argument("--dim", type=whole(1), default=16, help="of the embeddings")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--lr", type=positive, default=0.001, help="of the dense layers")
    parser.add_argument("--embedding-lr", type=positive, default=0.001)
    parser.add_argument("--weight-decay", type=float, default=1e-4, help="added to gradients")
    parser.add_argument(
        "--batch-size", type=whole(1), default=512, help="samples per rank and step"
    )
    parser.add_argument("--epochs", type=whole(1), default=30, help="at most")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/clicks"))
    return parser.parse_args()
