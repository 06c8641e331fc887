"""Random rankings against brute force: `python -m tests.training.rankings --cases 5000 --seed 0`.

Each case is a small catalogue with NaN, infinite and equal vectors, special rows, seen items and
seen targets. `FullRanking`, `ItemIndex`, `Recommend`, `FaissIndex` and `RetrievalMetrics` must have
the results of the oracle, which averages over all orders of equal scores. The command prints the
seeds of the cases that fail, and how many cases had each property and each pair of properties.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from recsys.inference.faiss_index import FaissIndex
from recsys.metrics.retrieval import RetrievalMetrics
from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingCollection
from recsys.modules.item_index import ItemIndex, Recommend
from recsys.modules.sequences.next_item import NextItem
from recsys.sparse import JaggedTensor, KeyedJaggedTensor
from recsys.training.full_ranking import FullRanking
from tests import properties

CPU = torch.device("cpu")
NAMES = ("recall", "hit_rate", "ndcg", "mrr")
PROPERTIES = (
    "ties", "nan item", "infinite item", "overflow", "nan query", "nan target", "special rows",
    "special target", "seen items", "seen target", "several targets", "chunks",
)  # fmt: skip
TRIPLE = ("ties", "nan item", "special rows")
Bags = list[list[int]]


@dataclass
class Case:
    """A catalogue and its users; the query of a user is the vector of the last item read."""

    vectors: np.ndarray
    """float32 `[rows, columns]`, of numbers whose products and sums are exact."""
    special: int
    histories: Bags
    earlier: Bags
    targets: Bags
    """Distinct rows of each user; the last is the target of `FullRanking`."""
    ks: list[int]
    chunk: int
    has: set[str] = field(default_factory=set)

    def scores(self, user: int) -> np.ndarray:
        """Return the scores of all rows; not finite if they must not be ranked."""
        history = self.histories[user]
        query = self.vectors[history[-1]] if history else np.zeros_like(self.vectors[0])
        with np.errstate(all="ignore"):
            return (self.vectors * query).sum(1, dtype=np.float32)

    def is_broken(self, user: int) -> bool:
        """Return True if the query is not finite."""
        history = self.histories[user]
        return bool(history) and not np.isfinite(self.vectors[history[-1]]).all()

    def seen(self, user: int) -> set[int]:
        """Return the rows that the user has read."""
        return {*self.histories[user], *self.earlier[user]}

    def ranked(self, user: int, targets: Sequence[int]) -> list[int]:
        """Return the rows that are ranked: finite items, unseen or targets."""
        scores, hidden = self.scores(user), self.seen(user) - {*targets}
        rows = range(self.special, len(self.vectors))
        return [row for row in rows if np.isfinite(scores[row]) and row not in hidden]


def draw(seed: int) -> Case:
    """Draw a case."""
    rng = random.Random(seed)
    rows, columns, special = rng.randint(4, 8), rng.randint(1, 3), rng.choice([0, 0, 1, 2])
    choices = rng.choice([[1.0], [0.0, 1.0], [-1.0, 0.5, 2.0], [i / 4 for i in range(-9, 10)]])
    vectors = np.array(
        [[rng.choice(choices) for _ in range(columns)] for _ in range(rows)], np.float32
    )
    vectors[:special] = 8.0  # the first of all, if they were ranked
    for value in (math.nan, math.inf, -math.inf, 1e30):
        # A vector of -inf alone is not an item.
        if rng.random() < 0.2 and (columns > 1 or value != -math.inf):
            vectors[rng.sample(range(rows), k=rng.choice([1, 2])), 0] = value
    num_users = rng.randint(1, 4)
    histories = [rng.choices(range(rows), k=rng.randint(0, 3)) for _ in range(num_users)]
    earlier = [rng.choices(range(rows), k=rng.choice([0, 0, 2])) for _ in range(num_users)]
    most = rng.choice([1, 1, 3])
    targets = [rng.sample(range(rows), k=min(rows, rng.randint(1, most))) for _ in range(num_users)]
    ks = sorted(rng.sample(range(1, rows - special + 1), k=rng.randint(1, 2)))
    case = Case(vectors, special, histories, earlier, targets, ks, rng.choice([1, 2, 3, 100]))
    _describe(case)
    return case


def _describe(case: Case) -> None:
    """Record the properties of a case."""
    vectors = case.vectors[case.special :]
    found = {
        "nan item": np.isnan(vectors).any(),
        "infinite item": np.isinf(vectors).any(),
        "special rows": case.special > 0,
        "chunks": case.chunk < len(vectors),
        "several targets": any(len(bag) > 1 for bag in case.targets),
    }
    for user, targets in enumerate(case.targets):
        scores, ranked = case.scores(user), case.ranked(user, targets)
        items = [row for row in targets if row >= case.special]
        values = [scores[row] for row in ranked]
        is_finite = np.isfinite(vectors).all(1)
        of_user = {
            "ties": not case.is_broken(user)
            and any(values.count(scores[row]) > 1 for row in items if row in ranked),
            "overflow": not case.is_broken(user)
            and bool((is_finite & ~np.isfinite(scores[case.special :])).any()),
            "nan query": case.is_broken(user),
            "nan target": not case.is_broken(user)
            and any(not np.isfinite(scores[row]) for row in items),
            "special target": len(items) < len(targets),
            "seen items": bool(case.seen(user)),
            "seen target": any(row in case.seen(user) for row in items),
        }
        found = {
            name: found.get(name, False) or value for name, value in {**found, **of_user}.items()
        }
    case.has = {name for name, value in found.items() if value}


# -- oracle ----------------------------------------------------------------------------------------


def expected(case: Case, user: int, targets: Sequence[int], k: int) -> list[float]:
    """Return the mean of the metrics over all orders of equal scores."""
    scores, ranked = case.scores(user), case.ranked(user, targets)
    is_nan = any(row >= case.special and not np.isfinite(scores[row]) for row in targets)
    if case.is_broken(user) or is_nan:
        return [math.nan] * 4
    ideal = sum(1 / math.log2(place + 2) for place in range(min(k, len(targets))))
    values = sorted({scores[row] for row in ranked}, reverse=True)
    ties = [[row for row in ranked if scores[row] == value] for value in values]
    marks = [_orders(tie, targets) for tie in ties]
    total, count = np.zeros(4), 0
    for parts in itertools.product(*marks):
        order = [row for part in parts for row in part][:k]
        places = [place for place, row in enumerate(order) if row in targets]
        total += [
            len(places) / len(targets),
            float(bool(places)),
            sum(1 / math.log2(place + 2) for place in places) / ideal,
            1 / (places[0] + 1) if places else 0.0,
        ]
        count += 1
    return list(total / count)


def _orders(tie: list[int], targets: Sequence[int]) -> list[list[int]]:
    """Return the orders of a tie; items that are not targets are interchangeable, and are -1."""
    own = [row for row in tie if row in targets]
    found = []
    for places in itertools.permutations(range(len(tie)), len(own)):
        order = [-1] * len(tie)
        for place, row in zip(places, own, strict=True):
            order[place] = row
        found.append(order)
    return found


def mean(rows: list[list[float]]) -> list[float]:
    """Return the means of columns; NaN without rows."""
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)] or [math.nan] * 4


def differs(found: dict[str, float], wanted: dict[int, list[float]]) -> Iterator[str]:
    """Yield the metrics that differ."""
    for k, values in wanted.items():
        for name, value in zip(NAMES, values, strict=True):
            own = found[f"{name}@{k}"]
            if math.isnan(own) != math.isnan(value) or abs(own - value) > 1e-9:
                yield f"{name}@{k} is {own}, of brute force {value}"


# -- checks ----------------------------------------------------------------------------------------


class _Last(nn.Module):
    def forward(self, x: JaggedTensor, times: Tensor | None = None) -> JaggedTensor:
        return x


def _model(case: Case) -> NextItem:
    items = EmbeddingConfig(
        *case.vectors.shape, "items", feature_names=["history", "target"],
        num_special_rows=case.special,
    )  # fmt: skip
    model = NextItem(EmbeddingCollection(tables=[items]), _Last(), "in_batch").eval()
    with torch.no_grad():
        model.embedding_collection.embeddings["items"].weight.copy_(torch.from_numpy(case.vectors))
    return model


def _jagged(bags: Bags) -> JaggedTensor:
    ids = torch.tensor([id for bag in bags for id in bag], dtype=torch.int64)
    return JaggedTensor(ids, lengths=torch.tensor([len(bag) for bag in bags]))


def _features(case: Case) -> KeyedJaggedTensor:
    bags = {"history": case.histories, "target": case.targets, "earlier": case.earlier}
    return KeyedJaggedTensor.from_jt_dict({name: _jagged(of) for name, of in bags.items()})


def check(case: Case) -> list[str]:
    """Return what differs from the oracle."""
    with torch.no_grad():
        model, features = _model(case), _features(case)
        users = model.users(features)
        index = ItemIndex(model.items(len(case.vectors), CPU), chunk_items=case.chunk)
        return [
            *_check_full_ranking(case, model, features, users),
            *_check_index(case, model, features, users, index),
            *_check_retrieval(case, users, index),
        ]


def _check_full_ranking(
    case: Case, model: NextItem, features: KeyedJaggedTensor, users: Tensor
) -> Iterator[str]:
    for seen_targets in ("rank", "skip"):
        metrics = FullRanking(
            model, len(case.vectors), CPU, case.ks, ["earlier"], seen_targets=seen_targets
        )
        metrics.update((torch.zeros(()), users, features["target"].values()), features)
        found, lasts = metrics.compute(), [bag[-1] for bag in case.targets]
        is_left = [
            seen_targets == "rank" or last < case.special or last not in case.seen(user)
            for user, last in enumerate(lasts)
        ]
        if seen_targets == "skip" and found["seen_targets"] != is_left.count(False):
            yield f"seen_targets is {found['seen_targets']}"
        wanted = {
            k: mean([expected(case, u, [lasts[u]], k) for u in range(len(lasts)) if is_left[u]])
            for k in case.ks
        }
        yield from (f"FullRanking {seen_targets}: {text}" for text in differs(found, wanted))


def _check_index(
    case: Case, model: NextItem, features: KeyedJaggedTensor, users: Tensor, index: ItemIndex
) -> Iterator[str]:
    k = case.ks[-1]
    bags = [[*a, *b] for a, b in zip(case.histories, case.earlier, strict=True)]
    found = {"ItemIndex": index(users, k, _jagged(bags))}
    if model.items(len(case.vectors), CPU).isfinite().all(1).any():
        of_faiss = FaissIndex(model.items(len(case.vectors), CPU), kind="Flat")
        found["FaissIndex"] = of_faiss(users, k, _jagged(bags))
    both = KeyedJaggedTensor.from_jt_dict(
        {"history": _jagged(case.histories), "target": _jagged([[] for _ in bags])}
    )
    weight = model.embedding_collection.embeddings["items"].weight
    found["Recommend"] = Recommend(model, ItemIndex(weight), k)(both)
    for name, (scores, ids) in found.items():
        for user, (of_scores, of_ids) in enumerate(zip(scores.tolist(), ids.tolist(), strict=True)):
            own = case if name != "Recommend" else _without_earlier(case)
            if case.is_broken(user):
                if not all(map(math.isnan, of_scores)) or {*of_ids} != {-1}:
                    yield f"{name}: a broken query finds {of_ids} {of_scores}"
                continue
            ranked, all_scores = own.ranked(user, []), own.scores(user)
            best = sorted((float(all_scores[row]) for row in ranked), reverse=True)[:k]
            best += [-math.inf] * (k - len(best))
            given = [float(all_scores[row]) if row >= 0 else -math.inf for row in of_ids]
            is_right = of_scores == best == given and all(row in [*ranked, -1] for row in of_ids)
            if not is_right or len({*of_ids} - {-1}) < min(k, len(ranked)):
                yield f"{name}: user {user} gets {of_ids} {of_scores}, of brute force {best}"


def _without_earlier(case: Case) -> Case:
    return Case(**{**vars(case), "earlier": [[] for _ in case.earlier]})


def _check_retrieval(case: Case, users: Tensor, index: ItemIndex) -> Iterator[str]:
    bags = _jagged(case.targets)
    wanted = {
        k: mean([expected(case, user, bag, k) for user, bag in enumerate(case.targets)])
        for k in case.ks
    }
    seen = [
        [row for row in (*a, *b) if row not in targets]
        for a, b, targets in zip(case.histories, case.earlier, case.targets, strict=True)
    ]
    metrics = RetrievalMetrics(case.ks, CPU)
    metrics.update_ranks(
        *index.rank(users, bags.values(), bags.offsets(), _jagged(seen)), bags.offsets()
    )
    yield from (f"update_ranks: {text}" for text in differs(metrics.compute(), wanted))
    num_items = index.items.shape[0]
    for size in {num_items, min(num_items, max(case.ks) + 1)}:
        scores, found = index(users, size, _jagged(seen))
        if size == num_items:  # all items are found: the list is complete
            scores = nn.functional.pad(scores, (0, 1), value=-math.inf)
            found = nn.functional.pad(found, (0, 1), value=-1)
        elif size <= max(case.ks):
            continue
        metrics = RetrievalMetrics(case.ks, CPU)
        metrics.update(found, bags.values(), bags.offsets(), scores)
        of_found = {
            k: mean([_of_known(case, u, k, scores[u], found[u]) for u in range(len(scores))])
            for k in case.ks
        }
        yield from (f"update: {text}" for text in differs(metrics.compute(), of_found))


def _of_known(case: Case, user: int, k: int, scores: Tensor, found: Tensor) -> list[float]:
    """Return the metrics as far as the items that were found show them."""
    if case.is_broken(user):
        return [math.nan] * 4
    # A target that is not finite is not found: a miss, unlike in `rank`.
    targets = case.targets[user]
    scores_of_rows = case.scores(user)
    misses = [row if np.isfinite(scores_of_rows[row]) else -2 - row for row in targets]
    wanted = expected(case, user, misses, k)
    last = scores[-1].item()
    is_open = last > -math.inf and (scores[:k] == last).any().item()
    given = dict(zip(found.tolist(), scores.tolist(), strict=True))
    is_before = all(given.get(row, -math.inf) > last for row in targets)
    return [math.nan] * 4 if is_open and not is_before else wanted


# -- command ---------------------------------------------------------------------------------------


def search(seeds: Sequence[int]) -> tuple[dict[int, list[str]], properties.Counts]:
    """Check cases; return the failures by seed, and the numbers of cases with each property."""
    failures, counts = dict[int, list[str]](), properties.Counts()
    for seed in seeds:
        case = draw(seed)
        found = check(case)
        if found:
            failures[seed] = found
        properties.count(counts, PROPERTIES, case.has)
        counts.update([TRIPLE] if case.has.issuperset(TRIPLE) else [])
    return failures, counts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.training.rankings", description=__doc__)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    options = parser.parse_args()
    failures, counts = search(range(options.seed, options.seed + options.cases))
    for seed, found in failures.items():
        print(f"seed {seed}: {' | '.join(found)}")
    print(f"{options.cases} cases, {len(failures)} wrong. Cases with each property and pair:")
    print("\n".join(properties.lines(counts, PROPERTIES)))
    print(f"  {', '.join(TRIPLE)} together: {counts[TRIPLE]}")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
