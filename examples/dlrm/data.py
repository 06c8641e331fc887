"""The data sets of the DLRM example: a description of the columns, and readers of three parts."""

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.distributed as dist
from criteo_spec import csv_options
from criteo_spec import spec as criteo_spec
from pyarrow import csv

from recsys import datasets
from recsys.distributed.types import ShardingEnv
from recsys.features import FeatureSpec, Ids, Label, Numeric
from recsys.metrics import auc, log_loss, normalized_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))
from movielens.data import load_movielens, popularity

Scores = dict[str, dict[str, float]]
PARTS = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class Data:
    """The columns, fitted; this rank's batches of each part; scores of predictions by rules."""

    spec: FeatureSpec
    epochs: int
    train: datasets.TableReader
    validation: datasets.TableReader
    test: datasets.TableReader
    whole_test: datasets.TableReader
    baselines: dict[str, Scores]


def load_data(arguments: argparse.Namespace, env: ShardingEnv) -> Data:
    """Load the data set the user chose; rank 0 first, so that it is fetched once."""
    if env.rank > 0:
        dist.barrier()
    loaders = {"movielens": _movielens, "criteo": _criteo, "random": _random}
    data = loaders[arguments.dataset](arguments, env)
    if env.rank == 0 and dist.is_initialized():
        dist.barrier()
    return data


def _data(
    spec: FeatureSpec,
    readers: Mapping[str, Callable[..., datasets.TableReader]],
    arguments: argparse.Namespace,
    env: ShardingEnv,
    epochs: int,
    **baselines: Scores,
) -> Data:
    size, place = arguments.batch_size, {"rank": env.rank, "world_size": env.world_size}
    place["divide"] = "batches"  # ranks get consecutive rows of each step
    return Data(
        spec=spec,
        epochs=epochs,
        train=readers["train"](spec, size, shuffle=True, seed=arguments.seed, **place),
        validation=readers["validation"](spec, size, **place),
        test=readers["test"](spec, size, **place),
        whole_test=readers["test"](spec, size, rank=0, world_size=1),
        baselines=baselines,
    )


def _movielens(arguments: argparse.Namespace, env: ShardingEnv) -> Data:
    data = load_movielens(arguments.data, split=arguments.split)
    base = pc.mean(data.train["liked"]).as_py()
    baselines = {}
    for part, table in {"validation": data.validation, "test": data.test}.items():
        labels = torch.from_numpy(table["liked"].to_numpy())
        baselines[part] = {
            "base rate": _score(torch.full((len(labels),), base), labels),
            "film popularity": _score(torch.from_numpy(popularity(data.train, table)), labels),
        }
    readers = {part: partial(datasets.table, getattr(data, part)) for part in PARTS}
    return _data(data.spec, readers, arguments, env, 4, **baselines)


def _score(predictions: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    return {
        "auc": auc(predictions, labels).item(),
        "ne": normalized_entropy(predictions, labels).item(),
        "loss": log_loss(predictions, labels).item(),
    }


def _criteo(arguments: argparse.Namespace, env: ShardingEnv) -> Data:
    """Read raw or prepared files; the last one tests, and the one before it validates."""
    if arguments.data is None:
        raise SystemExit(
            "--dataset criteo needs --data DIR: a folder of day_0, day_1, ... files, or the output "
            "of recsys prepare."
        )
    files = [str(path) for path in arguments.data.iterdir() if path.is_file()]
    files.sort(key=lambda path: [int(digits) for digits in re.findall(r"\d+", Path(path).name)])
    if len(files) < 3:
        raise SystemExit(
            f"--data {arguments.data} must hold three files or more, the last two to validate and "
            f"to test; found {files}. Divide a file by split -n l/10."
        )
    prepared = arguments.data / "prepared"
    if prepared.is_dir():
        spec, read = FeatureSpec.load(prepared), datasets.parquet
    else:
        spec, read = criteo_spec, partial(datasets.csv, format="tsv", **csv_options)
        spec.fit(csv.open_csv(path, **csv_options) for path in files[:-2])
    parts = dict(zip(PARTS, (files[:-2], files[-2], files[-1]), strict=True))
    readers = {part: partial(read, paths) for part, paths in parts.items()}
    return _data(spec, readers, arguments, env, 1)


def _random(arguments: argparse.Namespace, env: ShardingEnv) -> Data:
    ids, numbers = [f"f{i}" for i in range(26)], [f"x{i}" for i in range(13)]
    rows, draw = arguments.num_embeddings, np.random.default_rng(arguments.seed)
    spec = FeatureSpec(
        [*(Ids(name, rows=rows) for name in ids), *map(Numeric, numbers), Label("label")]
    )
    readers = {}
    for part, num_batches in zip(PARTS, (50, 4, 4), strict=True):
        size = num_batches * arguments.batch_size * env.world_size
        columns = {name: draw.integers(0, rows, size) for name in ids}
        columns |= {name: draw.standard_normal(size) for name in numbers}
        table = pa.table({**columns, "label": draw.integers(0, 2, size)})
        readers[part] = partial(datasets.table, table)
        if part == "train":
            spec.fit(table)
    return _data(spec, readers, arguments, env, 1)
