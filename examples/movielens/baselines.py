"""Baselines for DLRM: base rate, popularity, and logistic regression on the same features.

.venv/bin/python examples/movielens/baselines.py [--split time|random] [--data FOLDER]
"""

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from scipy import sparse
from sklearn.linear_model import LogisticRegression

from recsys.features import FeatureSpec
from recsys.metrics import auc, log_loss, normalized_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))
from movielens.data import MovieLens, load_movielens, popularity


def one_hot(spec: FeatureSpec, part: pa.Table) -> sparse.csr_matrix:
    """Put all features of some ratings side by side; several ids of one feature share weight 1."""
    batch = spec.transform(part)
    columns = [sparse.csr_matrix(batch.dense_features.numpy())]
    for feature in spec.features():
        bags = batch.sparse_features[feature.name]
        ids, lengths, starts = (
            one.numpy() for one in (bags.values(), bags.lengths(), bags.offsets())
        )
        weights = np.repeat(1.0 / np.maximum(lengths, 1), lengths)
        columns.append(sparse.csr_matrix((weights, ids, starts), shape=(len(part), feature.rows)))
    return sparse.hstack(columns, format="csr")


def logistic_regression(data: MovieLens) -> NDArray[np.float64]:
    """Fit on the training part, choose the penalty by validation log loss, score the test part."""
    train_x, validation_x = one_hot(data.spec, data.train), one_hot(data.spec, data.validation)
    labels = labels_of(data.validation)
    least_loss, best = math.inf, None
    for inverse_penalty in (0.01, 0.03, 0.1, 0.3, 1.0):
        model = LogisticRegression(C=inverse_penalty, max_iter=500)
        model.fit(train_x, labels_of(data.train))
        scores = torch.from_numpy(model.predict_proba(validation_x)[:, 1])
        found = log_loss(scores, labels).item()
        if found < least_loss:
            least_loss, best = found, model
    assert best is not None
    return best.predict_proba(one_hot(data.spec, data.test))[:, 1]


def labels_of(part: pa.Table) -> torch.Tensor:
    """Return the labels of ratings."""
    return torch.from_numpy(part["liked"].to_numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--split", choices=["time", "random"], help="default: both")
    parser.add_argument("--data", type=Path, help="a MovieLens release; default: fetch 100K")
    arguments = parser.parse_args()
    print(f"{'split':8} {'model':22} {'test AUC':>9} {'NE':>7} {'log loss':>9}")
    for split in [arguments.split] if arguments.split else ["time", "random"]:
        data = load_movielens(arguments.data, split=split)
        labels = labels_of(data.test)
        models = {
            "training base rate": np.full(len(labels), labels_of(data.train).mean().item()),
            "popularity": popularity(data.train, data.test),
            "logistic regression": logistic_regression(data),
        }
        for name, scores in models.items():
            scores_N = torch.from_numpy(scores)
            print(
                f"{split:8} {name:22} {auc(scores_N, labels):9.4f} "
                f"{normalized_entropy(scores_N, labels):7.4f} {log_loss(scores_N, labels):9.4f}"
            )


if __name__ == "__main__":
    main()
