"""A table of clicks: the AUC of a tuned one-hot logistic regression beside the best possible.

    python -m benchmarks.own_data

The table is `recsys.datasets.synthetic.ClickModel`. It is split by time: 80% for training, 10% to
choose the strength of the regularization, 10% for the scores. The regression is scikit-learn's, on
one-hot ids, multi-hot tags, buckets of the numbers and hours. A logistic regression cannot learn
the pairs of city and genre; `--pairs` adds them as a column, as someone who knew them would.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.preprocessing import KBinsDiscretizer, MultiLabelBinarizer, OneHotEncoder

from recsys.datasets.synthetic import ClickModel, Clicks

STRENGTHS = (0.01, 0.03, 0.1, 0.3, 1.0)
NUM_BUCKETS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", action="store_true", help="add pairs of city and genre")
    parser.add_argument("--out", type=Path, help="a JSON file of the result")
    options = parser.parse_args()
    training, validation, test = split(ClickModel(seed=options.seed).draw(options.rows))
    found = baseline(training, validation, test, options.pairs)
    print(
        f"one-hot logistic regression: AUC {found['auc']:.4f}, log loss {found['log_loss']:.4f} "
        f"(C = {found['strength']:g})\n"
        f"best possible:               AUC {found['bayes_auc']:.4f}, "
        f"log loss {found['bayes_log_loss']:.4f}"
    )
    if options.out:
        options.out.write_text(json.dumps(found))


def split(clicks: Clicks) -> tuple[Clicks, Clicks, Clicks]:
    """Training, validation and test rows, by time."""
    count = clicks.table.num_rows
    cuts = [0, count * 8 // 10, count * 9 // 10, count]
    training, validation, test = (
        clicks.take(np.arange(start, stop)) for start, stop in itertools.pairwise(cuts)
    )
    return training, validation, test


def baseline(
    training: Clicks, validation: Clicks, test: Clicks, pairs: bool = False
) -> dict[str, float]:
    """Scores of the regression on test rows, tuned on validation rows, and the best scores."""
    encoder = Encoder(training, pairs)
    inputs = [encoder(part) for part in (training, validation, test)]
    labels = [part.table["click"].to_numpy() for part in (training, validation, test)]
    best, model, chosen = -1.0, None, 0.0
    for strength in STRENGTHS:
        tried = LogisticRegression(C=strength, max_iter=1000).fit(inputs[0], labels[0])
        auc = float(roc_auc_score(labels[1], tried.predict_proba(inputs[1])[:, 1]))
        if auc > best:
            best, model, chosen = auc, tried, strength
    assert model is not None
    scores = model.predict_proba(inputs[2])[:, 1]
    optimum = test.bayes()
    return {
        "auc": float(roc_auc_score(labels[2], scores)),
        "log_loss": float(log_loss(labels[2], scores)),
        "strength": chosen,
        "bayes_auc": optimum.auc,
        "bayes_log_loss": optimum.log_loss,
    }


class Encoder:
    """One-hot features of a table."""

    def __init__(self, training: Clicks, pairs: bool) -> None:
        self.pairs = pairs
        self.one_hot = OneHotEncoder(handle_unknown="ignore", min_frequency=2)
        self.tags = MultiLabelBinarizer(sparse_output=True)
        columns = self.columns(training)
        self.edges = {
            name: KBinsDiscretizer(NUM_BUCKETS, encode="ordinal").fit(
                columns[name].dropna().to_numpy()[:, None]
            )
            for name in ("age", "price")
        }
        self.one_hot.fit(self.categories(columns))
        self.tags.fit(columns["tags"])

    def __call__(self, clicks: Clicks) -> Any:
        columns = self.columns(clicks)
        one_hot = self.one_hot.transform(self.categories(columns))
        return sparse.hstack([one_hot, self.tags.transform(columns["tags"])]).tocsr()

    @staticmethod
    def columns(clicks: Clicks) -> Any:
        return clicks.table.to_pandas()

    def categories(self, columns: Any) -> Any:
        city = columns["city"].fillna("none").astype(str).to_numpy()
        genre = columns["genre"].astype(str).to_numpy()
        found = [
            columns["user"].astype(str).to_numpy(),
            columns["film"].astype(str).to_numpy(),
            city,
            genre,
            columns["time"].dt.hour.astype(str).to_numpy(),
        ]
        for name, edges in self.edges.items():
            number = columns[name].to_numpy()
            bucket = edges.transform(np.nan_to_num(number)[:, None])[:, 0]
            found.append(np.where(np.isnan(number), "none", bucket.astype(str)))
        if self.pairs:
            found.append(np.char.add(np.char.add(city.astype(str), "/"), genre.astype(str)))
        return np.stack([column.astype(object) for column in found], 1)


if __name__ == "__main__":
    main()
