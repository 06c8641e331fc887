import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from recsys.metrics.retrieval import RetrievalMetrics
from tests.ranks import RankPool

CPU = torch.device("cpu")
IDS = st.lists(st.integers(-3, 8), unique=True, max_size=6)
FOUND = st.permutations(range(-3, 9)).map(lambda ids: ids[:5])


def expected(rows, k):
    totals, count = [0.0] * 4, 0
    for found, targets in rows:
        if not targets:
            continue
        count += 1
        places = [place for place, id in enumerate(found[:k]) if id in targets]
        ideal = sum(1 / math.log2(place + 2) for place in range(min(k, len(targets))))
        values = (
            len(places) / len(targets),
            float(bool(places)),
            sum(1 / math.log2(place + 2) for place in places) / ideal,
            1 / (places[0] + 1) if places else 0.0,
        )
        totals = [total + value for total, value in zip(totals, values, strict=True)]
    return [total / count for total in totals] if count else None


def update(metrics, rows):
    targets = [target for _, of_row in rows for target in of_row]
    offsets = torch.tensor([0, *(len(of_row) for _, of_row in rows)]).cumsum(0)
    found = torch.tensor([found for found, _ in rows]).view(-1, 5)
    metrics.update(found, torch.tensor(targets, dtype=torch.int64), offsets)


@given(st.lists(st.tuples(FOUND, IDS), min_size=1, max_size=6))
def test_against_lists(rows):
    metrics = RetrievalMetrics([1, 3, 5], CPU)
    update(metrics, rows[:2])
    if rows[2:]:
        update(metrics, rows[2:])
    values = metrics.compute()
    for k in (1, 3, 5):
        found = [values[f"{name}@{k}"] for name in ("recall", "hit_rate", "ndcg", "mrr")]
        wanted = expected(rows, k)
        if wanted is None:
            assert all(map(math.isnan, found))
        else:
            assert found == pytest.approx(wanted)


ROWS = [([1, 2, 3, 4, 5], [2]), ([5, 4, 3, 2, 1], [1, 8]), ([0, 1, 2, 3, 4], [7])]


def on_ranks():
    metrics = RetrievalMetrics([2, 5], CPU)
    update(metrics, ROWS[dist.get_rank() :: dist.get_world_size()])
    metrics.sync()
    return metrics.compute()


def test_ranks(ranks: RankPool):
    metrics = RetrievalMetrics([2, 5], CPU)
    metrics.sync()
    update(metrics, ROWS)
    for found in ranks(2, on_ranks):
        assert found == pytest.approx(metrics.compute())


OFFSETS = torch.tensor([0, 1])


def test_ties_count_by_the_expected_value():
    scores = torch.tensor([[3.0, 2.0, 2.0, 1.0]])
    metrics = RetrievalMetrics([1, 2, 3], CPU)
    metrics.update(torch.tensor([[5, 6, 7, 8]]), torch.tensor([7]), OFFSETS, scores)
    values = metrics.compute()
    assert [values[f"hit_rate@{k}"] for k in (1, 2, 3)] == [0.0, 0.5, 1.0]
    assert values["mrr@3"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert values["ndcg@3"] == pytest.approx((1 / math.log2(3) + 1 / 2) / 2)


def test_a_tie_that_goes_on_is_not_known():
    """Other items of the tie may be among the first, too: their order must not decide."""
    found, scores = torch.tensor([[5, 6, 7]]), torch.tensor([[3.0, 2.0, 2.0]])
    for target, is_known in ((5, True), (6, False), (9, False)):
        metrics = RetrievalMetrics([1, 2], CPU)
        metrics.update(found, torch.tensor([target]), OFFSETS, scores)
        values = metrics.compute()
        assert values["hit_rate@1"] == float(target == 5)
        assert math.isnan(values["hit_rate@2"]) != is_known
    metrics = RetrievalMetrics([2], CPU)
    more = torch.tensor([[2.0, 2.0, -math.inf]])  # no other items
    metrics.update(found, torch.tensor([6]), OFFSETS, more)
    assert metrics.compute()["hit_rate@2"] == 1.0


def test_a_query_without_scores_shows():
    found, scores = torch.tensor([[5, 6], [-1, -1]]), torch.tensor([[3.0, 2.0], [math.nan] * 2])
    for offsets, is_nan in ([0, 1, 2], True), ([0, 2, 2], False):  # the second has no targets
        metrics = RetrievalMetrics([1], CPU)
        metrics.update(found, torch.tensor([5, 6]), torch.tensor(offsets), scores)
        assert all(math.isnan(value) == is_nan for value in metrics.compute().values())


def test_errors():
    metrics = RetrievalMetrics([3], CPU)
    with pytest.raises(ValueError, match="at least 3"):
        metrics.update(torch.ones(1, 2), torch.ones(1), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"offsets must be \[2\]; received \[1\]"):
        metrics.update(torch.ones(1, 3), torch.ones(1), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"\[queries, at least 4\], as .*scores"):
        metrics.update(torch.ones(1, 3), torch.ones(1), OFFSETS, torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"of found, \[1, 4\]; .*\[1, 3\]"):
        metrics.update(torch.ones(1, 4), torch.ones(1), OFFSETS, torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"\[targets\]; received \[1\] and \[2\]"):
        metrics.update_ranks(torch.ones(1), torch.ones(2), OFFSETS)
    with pytest.raises(ValueError, match=r"offsets must .*\[queries \+ 1\]; .*\[0\]"):
        metrics.update_ranks(torch.ones(1), torch.ones(1), OFFSETS[:0])
    with pytest.raises(ValueError, match="received none"):
        RetrievalMetrics([], CPU)
