"""Predict two labels by one model: MMoE, PLE, and a shared bottom.

- `python examples/multi_task/train.py --model mmoe`
- `torchrun --standalone --nproc-per-node=2 examples/multi_task/train.py --model ple`
- `python examples/multi_task/train.py --data FOLDER`: another release of MovieLens

Will this user rate this film 4 or more (`liked`), and will the rating be 5 (`loved`)? As with
clicks and purchases, the second needs the first and is rarer. `--model single` is the baseline: two
models of the size of the shared bottom, one for each label.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import nn

from recsys.features import FeatureSpec, Label
from recsys.modules.ctr.multi_task import PLE, MMoE, MultiTask
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.training.evaluation import BinaryMetrics

sys.path.insert(0, str(Path(__file__).parents[1]))
from ctr.training import parse_options, tables_of, train
from launch import run
from movielens.data import COLUMNS, load_movielens

MODELS = ("mmoe", "ple", "shared_bottom", "single")
LABELS = ("liked", "loved")


def load(folder: Path | None) -> dict[str, pa.Table]:
    """Read MovieLens; add the second label."""
    _, *parts = load_movielens(folder)
    return {
        name: part.append_column("loved", pc.equal(part["rating"], 5).cast(pa.float32()))
        for name, part in zip(("train", "validation", "test"), parts, strict=True)
    }


def build(arguments: argparse.Namespace, spec: FeatureSpec, num_tasks: int) -> nn.Module:
    """Build a model of some tasks."""
    torch.manual_seed(arguments.seed)
    tables = EmbeddingBagCollection(tables=tables_of(spec, arguments.dim))
    num_columns = arguments.dim * len(spec.features()) + len(spec.dense_names)
    sizes = {"expert_sizes": (128, 64), "tower_sizes": (32,), "dropout": arguments.dropout}
    if arguments.model == "ple":
        tasks = PLE(num_columns, num_tasks, num_layers=1, **sizes)
    else:  # a shared bottom is the only expert
        num_experts = 4 if arguments.model == "mmoe" else 1
        tasks = MMoE(num_columns, num_tasks, num_experts, **sizes)
    return MultiTask(tables, len(spec.dense_names), tasks)


def scores(arguments: argparse.Namespace) -> dict[str, float]:
    """Train the model, or a model for each label; return the metrics of the test by label."""
    parts, found = load(arguments.data), {}
    features = [column for column in COLUMNS if not isinstance(column, Label)]
    groups = [(label,) for label in LABELS] if arguments.model == "single" else [LABELS]
    for labels in groups:
        spec = FeatureSpec([*features, *map(Label, labels)]).fit(parts["train"])
        model = build(arguments, spec, len(labels))
        folder = arguments.out / "_".join((arguments.model, *labels))
        metrics = partial(BinaryMetrics, tasks=labels)
        found |= train(model, spec, parts, arguments, folder, metrics)
    return {
        f"{name}/{label}": found[f"{name}/{label}"] for name in ("auc", "loss") for label in LABELS
    }


def main() -> None:
    description = (__doc__ or "").split("\n")[0]
    arguments = parse_options(description, MODELS, "mmoe", "folder of MovieLens")
    run(partial(scores, arguments))


if __name__ == "__main__":
    main()
