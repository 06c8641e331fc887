"""Predict clicks: DLRM, DeepFM, DCN-V2, AutoInt, FinalMLP and DIN on the same features.

- `python examples/ctr/train.py --model dcn_v2`
- `torchrun --standalone --nproc-per-node=2 examples/ctr/train.py --model din`
- `python examples/ctr/train.py --data FOLDER`: `train.csv`, `valid.csv` and `test.csv`, or the same
  as `.parquet`, with a column `label` of 0 and 1; all other columns are categories, as of Frappe

The default is MovieLens 100K: will this user rate this film 4 or more, later than all training
ratings? `--model logistic_regression` is a baseline, without tables.
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys import datasets
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.types import ShardingEnv
from recsys.features import Categorical, FeatureSpec, Label
from recsys.metrics import auc, log_loss
from recsys.modules.ctr.autoint import AutoInt
from recsys.modules.ctr.dcn_v2 import DCNV2
from recsys.modules.ctr.din import DIN
from recsys.modules.ctr.final_mlp import FinalMLP
from recsys.modules.deepfm_model import SimpleDeepFMNN
from recsys.modules.dlrm import DLRM, DLRMTrain
from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.optim import AdamL2, apply_optimizer_in_backward, in_backward_optimizer_filter
from recsys.sparse import KeyedJaggedTensor
from recsys.training import Trainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from arguments import positive, whole
from movielens.baselines import one_hot
from movielens.data import load_movielens

CPU = torch.device("cpu")


class Logits(nn.Module):
    """Logits of a model that returns probabilities."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits, `[B, 1]`."""
        return self.model(dense_features, sparse_features).logit(eps=1e-6)


class Data(NamedTuple):
    """Three parts of a table, and their description."""

    spec: FeatureSpec
    parts: dict[str, pa.Table]
    label: str


def load(folder: Path | None) -> Data:
    """Read the data."""
    if folder is None:
        spec, *parts = load_movielens()
        return Data(spec, dict(zip(("train", "validation", "test"), parts, strict=True)), "liked")
    parts = {}
    for part, name in (("train", "train"), ("validation", "valid"), ("test", "test")):
        (path,) = (p for p in (folder / f"{name}.csv", folder / f"{name}.parquet") if p.exists())
        parts[part] = ds.dataset(path, format=path.suffix.removeprefix(".")).to_table()
    names = [name for name in parts["train"].column_names if name != "label"]
    spec = FeatureSpec([*map(Categorical, names), Label("label")])
    return Data(spec.fit(parts["train"]), parts, "label")


def tables_of_spec(spec: FeatureSpec, dim: int, without: tuple[str, ...] = ()) -> list:
    """Return the tables, without some features."""
    found = []
    for table in spec.tables(dim):
        features = [name for name in table.feature_names if name not in without]
        if features:
            scaled = replace(table, weight_init_min=-0.05, weight_init_max=0.05)
            found.append(replace(scaled, feature_names=features))
    return found


def build(name: str, spec: FeatureSpec, arguments: argparse.Namespace) -> nn.Module:
    """Build a model."""
    torch.manual_seed(arguments.seed)
    dim, layers, num_dense = arguments.dim, [128, 64], len(spec.dense_names)
    tables = EmbeddingBagCollection(tables=tables_of_spec(spec, dim))
    options = {"dropout": arguments.dropout}
    if name == "din":
        (films,) = (table for table in spec.tables(dim) if "history" in table.feature_names)
        pooled = EmbeddingBagCollection(tables=tables_of_spec(spec, dim, ("history", "item_id")))
        sequences = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name="films",
                    num_embeddings=films.num_embeddings,
                    embedding_dim=dim,
                    feature_names=["history", "item_id"],
                    weight_init_min=-0.05,
                    weight_init_max=0.05,
                )
            ]
        )
        return DIN(pooled, sequences, num_dense, [("history", "item_id")], layers)
    models: dict[str, Callable[[], nn.Module]] = {
        "dlrm": lambda: DLRM(tables, num_dense, [128, dim], [*layers, 1], **options),
        "deepfm": lambda: Logits(SimpleDeepFMNN(num_dense, tables, 128, 64)),
        "dcn_v2": lambda: DCNV2(tables, num_dense, 2, layers, **options),
        "autoint": lambda: AutoInt(tables, num_dense, 2, 2, 16, layers, **options),
        "final_mlp": lambda: FinalMLP(tables, num_dense, layers, **options),
    }
    return models[name]()


def train(arguments: argparse.Namespace) -> dict[str, float]:
    """Train a model; return the metrics of the test."""
    env, data = ShardingEnv.default(), load(arguments.data)
    model: nn.Module = DLRMTrain(build(arguments.model, data.spec, arguments))
    settings = {"lr": arguments.embedding_lr, "weight_decay": arguments.weight_decay}
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            apply_optimizer_in_backward(AdamL2, module.parameters(), settings)
    model = DistributedModelParallel(model, env=env, device=CPU)
    loaders = {
        name: datasets.table(
            part, data.spec, arguments.batch_size, rank=env.rank, world_size=env.world_size,
            divide="batches", shuffle=name == "train", seed=arguments.seed,
        )
        for name, part in data.parts.items()
    }  # fmt: skip
    dense = dict(in_backward_optimizer_filter(model.named_parameters())).values()
    trainer = Trainer(
        model,
        torch.optim.Adam(dense, lr=arguments.lr, weight_decay=arguments.weight_decay),
        arguments.out / arguments.model,
        epochs=arguments.epochs,
        patience=2,
        log_every=None,
    )
    trainer.fit(loaders["train"], loaders["validation"])
    return trainer.evaluate(loaders["test"])


def logistic_regression(arguments: argparse.Namespace) -> dict[str, float]:
    """Fit the baseline; its penalty is the best of the validation part."""
    from sklearn.linear_model import LogisticRegression

    data = load(arguments.data)
    columns = {name: one_hot(data.spec, part) for name, part in data.parts.items()}
    labels = {name: part[data.label].to_numpy() for name, part in data.parts.items()}
    found = []
    for inverse_penalty in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0):
        model = LogisticRegression(C=inverse_penalty, max_iter=500)
        model.fit(columns["train"], labels["train"])
        scores = {
            name: torch.from_numpy(model.predict_proba(columns[name])[:, 1])
            for name in ("validation", "test")
        }
        loss = log_loss(scores["validation"], torch.from_numpy(labels["validation"])).item()
        found.append((loss, scores["test"]))
    scores_N, labels_N = min(found, key=lambda one: one[0])[1], torch.from_numpy(labels["test"])
    return {
        "auc": auc(scores_N, labels_N).item(),
        "loss": log_loss(scores_N, labels_N).item(),
    }


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    models = ["dlrm", "deepfm", "dcn_v2", "autoint", "final_mlp", "din", "logistic_regression"]
    parser.add_argument("--model", choices=models, default="dcn_v2")
    parser.add_argument("--data", type=Path, help="folder of tables; default: MovieLens 100K")
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
    parser.add_argument("--out", type=Path, default=Path("runs/ctr"))
    return parser.parse_args()


def main() -> None:
    arguments = parse_options()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    is_baseline = arguments.model == "logistic_regression"
    scores = logistic_regression(arguments) if is_baseline else train(arguments)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print({name: round(scores[name], 4) for name in ("auc", "loss")})
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
