"""Quality of a model of ids that keep arriving: hashed ids, modulo hashing, a fixed vocabulary.

    python -m benchmarks.quality [--data FOLDER] [--out benchmarks/results/quality-cpu.json]

The ratings of MovieLens (100K without `--data`) in the order of time; the model says whether a
rating is 4 or more, from the ids of the user and the film alone: a product of two vectors, and a
bias of each. Each batch is scored before the model trains on it. The ids of the first tenth are
known at the start, and its scores do not count. Ids with rows of half of all ids that occur compete
with as many rows of modulo-hashed ids; the best of several learning rates counts for each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from movielens.data import fetch_movielens_100k
from movielens.features import LIKED
from movielens.files import read_movielens

from recsys.kernels.hashed.twin import mix64
from recsys.metrics import auc, log_loss
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.hashed_ids import LFU, LRU, AtLeast, HashedIds
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor

RESULTS = Path(__file__).parent / "results"
DIM, BATCH, RANGE = 16, 64, 0.05
FEATURES = ("user", "film")


class Kind(NamedTuple):
    """Rows of a table, its rules for hashed ids, and the ids that it reads for given ids."""

    rows: int
    rules: HashedIds | None
    read: Callable[[Tensor], Tensor]


def kinds_of(ids_N: Tensor, num_first: int) -> dict[str, Kind]:
    """Return the contenders for one feature."""
    distinct, numbers_N = ids_N.unique(return_inverse=True)
    vocabulary = ids_N[:num_first].unique()
    number_of = dict(zip(distinct.tolist(), range(len(distinct)), strict=True))
    known = torch.full((len(distinct),), len(vocabulary))  # ids without a row share one
    known[[number_of[one] for one in vocabulary.tolist()]] = torch.arange(len(vocabulary))
    half = HashedRows(len(distinct) // 2)
    return {
        "a row for each id": Kind(len(distinct), None, lambda ids: numbers_N),
        "hashed ids, LRU": half.kind(LRU()),
        "hashed ids, LFU": half.kind(LFU(2000)),
        "hashed ids, LRU, from the 2nd batch": half.kind(LRU(), AtLeast(2)),
        "modulo-hashed ids": Kind(half.rows, None, lambda ids: mix64(ids).remainder(half.rows)),
        "fixed vocabulary": Kind(len(vocabulary) + 1, None, lambda ids: known[numbers_N]),
    }


class HashedRows:
    """Rows of a table with hashed ids, of one region and whole lines."""

    def __init__(self, least: int) -> None:
        rules = HashedIds(num_regions=1)
        self.rows = EmbeddingBagConfig(
            least, DIM, "t", feature_names=["f"], ids=rules
        ).num_embeddings

    def kind(self, eviction: Any, admission: Any = None) -> Kind:
        rules = HashedIds(eviction=eviction, admission=admission, num_regions=1)
        return Kind(self.rows, rules, mix64)


def score_stream(
    kinds: tuple[Kind, Kind], ids: tuple[Tensor, Tensor], liked_N: Tensor, rate: float, seed: int
) -> Tensor:
    """Return the logit of each rating, from a model that was trained on all batches before."""
    torch.manual_seed(seed)
    tables = [
        EmbeddingBagConfig(
            kind.rows, DIM, name, feature_names=[name], ids=kind.rules,
            weight_init_min=-RANGE, weight_init_max=RANGE,
        )
        for name, kind in zip(FEATURES, kinds, strict=True)
    ]  # fmt: skip
    model = EmbeddingBagCollection(tables=tables)
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": rate})
    bias = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.Adagrad([bias], lr=rate)
    read = torch.stack([kind.read(own) for kind, own in zip(kinds, ids, strict=True)])

    def logits(batch: Tensor) -> Tensor:
        lengths = torch.ones(batch.numel(), dtype=torch.int64)
        found = model(KeyedJaggedTensor(list(FEATURES), batch.reshape(-1), lengths=lengths))
        user, film = found.values().split(DIM, dim=1)
        own = user[:, 0] + film[:, 0]
        return own + (user[:, 1:] * film[:, 1:]).sum(1) + bias

    scores = []
    for batch, liked in zip(read.split(BATCH, dim=1), liked_N.split(BATCH), strict=True):
        model.eval()
        with torch.no_grad():
            scores.append(logits(batch))
        model.train()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            logits(batch), liked, reduction="sum"
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.cat(scores)


def main() -> None:
    """Print and write AUC and log loss of each contender."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a MovieLens release; default: fetch 100K")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.03, 0.1, 0.3])
    parser.add_argument("--out", type=Path, default=RESULTS / "quality-cpu.json")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    ratings = read_movielens(arguments.data or fetch_movielens_100k()).sort_by("timestamp")
    users, films, rating_N = (
        torch.from_numpy(ratings[name].to_numpy()) for name in ("user_id", "item_id", "rating")
    )
    ids, liked_N = (users, films), (rating_N >= LIKED).float()
    first = len(liked_N) // 10
    of_features = [kinds_of(own, first) for own in ids]
    result: dict[str, Any] = {"ratings": len(liked_N), "contenders": {}}
    for name in of_features[0]:
        kinds = of_features[0][name], of_features[1][name]
        by_rate = {}
        for rate in arguments.rates:
            found = []
            for seed in range(arguments.seeds):
                scores = score_stream(kinds, ids, liked_N, rate, seed)[first:].sigmoid()
                labels = liked_N[first:]
                found.append((auc(scores, labels).item(), log_loss(scores, labels).item()))
            by_rate[rate] = list(zip(*found, strict=True))
        rate, (aucs, losses) = min(by_rate.items(), key=lambda of: statistics.fmean(of[1][1]))
        result["contenders"][name] = {
            "rows": [kind.rows for kind in kinds],
            "learning_rate": rate,
            "auc": [round(one, 4) for one in aucs],
            "log_loss": [round(one, 4) for one in losses],
        }
        print(name, result["contenders"][name], flush=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
