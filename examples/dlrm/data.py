"""The data sets of the DLRM example, behind one interface."""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from recsys.datasets.criteo import CriteoDataset
from recsys.datasets.random import RandomRecDataset
from recsys.datasets.utils import Batch
from recsys.distributed.types import ShardingEnv
from recsys.metrics import auc, log_loss, normalized_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))
from movielens.data import MovieLens, load_movielens


@dataclass(frozen=True, kw_only=True)
class Data:
    """Train, validation and test batches of this rank, and their sizes for the model."""

    num_embeddings: dict[str, int]
    tables: list[list[str]]  # the features that share each table
    num_dense: int
    epochs: int
    train: Iterable[Batch]
    validation: Iterable[Batch]
    test: Iterable[Batch]
    whole_test: Iterable[Batch]
    movielens: MovieLens | None = field(default=None)

    @property
    def feature_names(self) -> list[str]:
        """The features in the order of the batches."""
        return list(self.num_embeddings)

    def baselines(self, part: Literal["validation", "test"]) -> dict[str, dict[str, float]]:
        """Score predictions without features: the base rate, and the popularity of the film."""
        data = self.movielens
        if data is None:
            return {}
        labels = torch.from_numpy(data.label_N[data.rows(part)])
        base = float(data.label_N[data.rows("train")].mean())
        return {
            "base rate": _score(torch.full((len(labels),), base), labels),
            "film popularity": _score(torch.from_numpy(data.popularity(part)), labels),
        }


def _score(predictions: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    return {
        "auc": auc(predictions, labels).item(),
        "ne": normalized_entropy(predictions, labels).item(),
        "loss": log_loss(predictions, labels).item(),
    }


def load_data(arguments: argparse.Namespace, env: ShardingEnv) -> Data:
    """Load the data set the user chose; rank 0 first, so that it is fetched once."""
    if env.rank > 0:
        dist.barrier()
    loaders = {"movielens": _movielens, "criteo": _criteo, "random": _random}
    data = loaders[arguments.dataset](arguments, env)
    if env.rank == 0 and dist.is_initialized():
        dist.barrier()
    return data


def _movielens(arguments: argparse.Namespace, env: ShardingEnv) -> Data:
    data = load_movielens(arguments.data, split=arguments.split)
    size, place = arguments.batch_size, (env.rank, env.world_size)
    return Data(
        num_embeddings=data.num_embeddings,
        # the films a user liked and the film to rate are rows of one table
        tables=[
            ["item_id", "history"] if name == "item_id" else [name]
            for name in data.num_embeddings
            if name != "history"
        ],
        num_dense=data.dense_ND.shape[1],
        epochs=4,
        train=data.batches("train", size, *place, shuffle=True, seed=arguments.seed),
        validation=data.batches("validation", size, *place),
        test=data.batches("test", size, *place),
        whole_test=data.batches("test", 1024),
        movielens=data,
    )


def _criteo(arguments: argparse.Namespace, env: ShardingEnv) -> Data:
    """Train on all files but the last, which validates and tests."""
    if arguments.data is None:
        raise SystemExit("--dataset criteo needs --data DIR, a folder of day_0, day_1, ... files.")
    files = sorted(p for p in arguments.data.iterdir() if p.is_file())
    if len(files) < 2:
        raise SystemExit(
            f"--data {arguments.data} must hold two files or more, the last to test; found "
            f"{[path.name for path in files]}."
        )

    def read(paths: list, rank: int, world_size: int) -> CriteoDataset:
        return CriteoDataset(
            paths, arguments.batch_size, arguments.num_embeddings, rank, world_size
        )

    train = read(files[:-1], env.rank, env.world_size)
    held_out = read(files[-1:], env.rank, env.world_size)
    return Data(
        num_embeddings=dict.fromkeys(train.keys, arguments.num_embeddings),
        tables=[[name] for name in train.keys],
        num_dense=13,
        epochs=1,
        train=train,
        validation=held_out,
        test=held_out,
        whole_test=read(files[-1:], 0, 1),
    )


def _random(arguments: argparse.Namespace, env: ShardingEnv) -> Data:
    names = [f"f{i}" for i in range(26)]

    def batches(seed: int, count: int) -> RandomRecDataset:
        return RandomRecDataset(
            names,
            batch_size=arguments.batch_size,
            hash_size=arguments.num_embeddings,
            ids_per_feature=1,
            num_dense=13,
            manual_seed=seed,
            num_batches=count,
        )

    return Data(
        num_embeddings=dict.fromkeys(names, arguments.num_embeddings),
        tables=[[name] for name in names],
        num_dense=13,
        epochs=1,
        train=batches(env.rank, 50),
        validation=batches(100 + env.rank, 4),
        test=batches(200 + env.rank, 4),
        whole_test=batches(200, 4),
    )
