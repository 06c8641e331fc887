"""Predict clicks: DLRM, DeepFM, DCN-V2, AutoInt, FinalMLP, DIN and HSTU.

- `python examples/ctr/train.py --model dcn_v2`
- `torchrun --standalone --nproc-per-node=2 examples/ctr/train.py --model din`
- `python examples/ctr/train.py --data FOLDER`: another release of MovieLens; or a folder with
  `train.csv`, `valid.csv` and `test.csv`, or other forms of Frappe (see data.py)

The default is MovieLens 100K: will this user rate this film 4 or more, later than all training
ratings? All models have the same features, except for HSTU: it reads the films, ratings and times
of the user's history. `--model logistic_regression` is a baseline, without tables.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from recsys.features import FeatureSpec
from recsys.metrics import auc, log_loss
from recsys.modules.ctr.autoint import AutoInt
from recsys.modules.ctr.dcn_v2 import DCNV2
from recsys.modules.ctr.din import DIN
from recsys.modules.ctr.final_mlp import FinalMLP
from recsys.modules.deepfm_model import SimpleDeepFMNN
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.sequences.hstu import HSTU
from recsys.modules.sequences.ranking import Ranking
from recsys.sparse import KeyedJaggedTensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from ctr.data import Data, is_movielens, load, load_rated
from ctr.training import parse_options, tables_of, train
from launch import run
from movielens.baselines import one_hot

MODELS = ("dlrm", "deepfm", "dcn_v2", "autoint", "final_mlp", "din", "hstu")
NEEDS_HISTORIES = ("din", "hstu")
HISTORY = 50  # ratings that HSTU reads


class Logits(nn.Module):
    """Logits of a model that returns probabilities."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits, `[B, 1]`."""
        return self.model(dense_features, sparse_features).logit(eps=1e-6)


def sequence_table(spec: FeatureSpec, name: str, dim: int, features: list[str]) -> EmbeddingConfig:
    """Return a table of histories."""
    return EmbeddingConfig(
        name=name,
        num_embeddings=spec.fitted.vocabularies[name].num_rows,
        embedding_dim=dim,
        feature_names=features,
        weight_init_min=-0.05,
        weight_init_max=0.05,
    )


def build(name: str, spec: FeatureSpec, arguments: argparse.Namespace) -> nn.Module:
    """Build a model."""
    torch.manual_seed(arguments.seed)
    dim, layers, num_dense = arguments.dim, [128, 64], len(spec.dense_names)
    options = {"dropout": arguments.dropout}
    if name == "hstu":
        films = sequence_table(spec, "item_id", dim, ["rated", "item_id"])
        stars = sequence_table(spec, "half_stars", dim, ["half_stars"])
        encoder = HSTU(dim, HISTORY + 1, num_heads=2, has_time=True, **options)
        return Ranking(
            EmbeddingCollection(tables=[films, stars]), encoder, dim, [64, 1], history="rated",
            actions="half_stars", candidate="item_id", times="times", candidate_times="timestamp",
        )  # fmt: skip
    tables = EmbeddingBagCollection(tables=tables_of(spec, dim))
    if name == "din":
        pair = ("history", "item_id")
        pooled = EmbeddingBagCollection(tables=tables_of(spec, dim, pair))
        films = sequence_table(spec, "item_id", dim, [*pair])
        return DIN(pooled, EmbeddingCollection(tables=[films]), num_dense, [pair], layers)
    models: dict[str, Callable[[], nn.Module]] = {
        "dlrm": lambda: DLRM(tables, num_dense, [128, dim], [*layers, 1], **options),
        "deepfm": lambda: Logits(SimpleDeepFMNN(num_dense, tables, 128, 64)),
        "dcn_v2": lambda: DCNV2(tables, num_dense, 2, layers, **options),
        "autoint": lambda: AutoInt(tables, num_dense, 2, 2, 16, layers, **options),
        "final_mlp": lambda: FinalMLP(tables, num_dense, layers, **options),
    }
    return models[name]()


def scores(arguments: argparse.Namespace) -> dict[str, float]:
    """Train a model or fit the baseline; return the metrics of the test."""
    name, folder = arguments.model, arguments.data
    if name in NEEDS_HISTORIES and not (folder is None or is_movielens(folder)):
        raise SystemExit(
            f"--model {name} needs histories, which MovieLens has; received --data {folder}. "
            "Choose another model."
        )
    data = load_rated(folder, HISTORY) if name == "hstu" else load(folder)
    if name == "logistic_regression":
        return logistic_regression(data)
    model = build(name, data.spec, arguments)
    found = train(model, data.spec, data.parts, arguments, arguments.out / name)
    return {metric: found[metric] for metric in ("auc", "loss")}


def logistic_regression(data: Data) -> dict[str, float]:
    """Fit the baseline; its penalty is the best of the validation part."""
    from sklearn.linear_model import LogisticRegression

    columns = {name: one_hot(data.spec, part) for name, part in data.parts.items()}
    labels = {
        name: torch.tensor(part[data.label].to_numpy()).float() for name, part in data.parts.items()
    }
    found = []
    for inverse_penalty in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0):
        model = LogisticRegression(C=inverse_penalty, max_iter=500)
        model.fit(columns["train"], labels["train"].numpy())
        scores = {
            name: torch.from_numpy(model.predict_proba(columns[name])[:, 1])
            for name in ("validation", "test")
        }
        loss = log_loss(scores["validation"], labels["validation"]).item()
        found.append((loss, scores["test"]))
    scores_N = min(found, key=lambda one: one[0])[1]
    return {
        "auc": auc(scores_N, labels["test"]).item(),
        "loss": log_loss(scores_N, labels["test"]).item(),
    }


def main() -> None:
    arguments = parse_options(
        (__doc__ or "").split("\n")[0],
        [*MODELS, "logistic_regression"],
        "dcn_v2",
        "folder of tables or of MovieLens",
    )
    run(partial(scores, arguments))


if __name__ == "__main__":
    main()
