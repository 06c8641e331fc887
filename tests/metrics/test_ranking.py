"""Areas and pairs equal scikit-learn, or a loop over all pairs."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from recsys.metrics.ranking import (
    Ranked,
    areas_under_roc,
    average_precisions,
    chances_of_top,
    equal_pairs,
    expected_discounts,
    group_samples,
    inverted_pairs,
    one_group,
    ranks_in_groups,
    weigh_equal_pairs,
)

SAMPLE = st.tuples(
    st.integers(0, 5),  # score: many ties
    st.booleans(),
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    st.integers(0, 2),  # group
)
SAMPLES = st.lists(SAMPLE, min_size=1, max_size=40)


def tensors(samples):
    scores, labels, weights, groups = zip(*samples, strict=True)
    return (
        torch.tensor(scores).double() / 5,
        torch.tensor(labels).double(),
        torch.tensor(weights).double(),
        torch.tensor(groups),
    )


def area(scores, labels, weights):
    if not (weights * labels).sum() or not (weights * (1 - labels)).sum():
        return math.nan
    return sk.roc_auc_score(labels, scores, sample_weight=weights)


def precision(scores, labels, weights):
    if not (weights * labels).sum():
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # precision 0 / 0 where weights are zero
        return sk.average_precision_score(labels, scores, sample_weight=weights)


def inverted(scores, labels, weights):
    return sum(
        weights[i] * weights[j]
        for i, j in itertools.combinations(range(len(scores)), 2)
        if (scores[i] - scores[j]) * (labels[i] - labels[j]) < 0
    )


def area_under_roc(*samples):
    return areas_under_roc(Ranked(*samples))


def average_precision(*samples):
    return average_precisions(Ranked(*samples))


@pytest.mark.parametrize(
    ("ours", "oracle"),
    [(area_under_roc, area), (average_precision, precision), (inverted_pairs, inverted)],
)
@settings(deadline=None, max_examples=150)
@given(samples=SAMPLES)
def test_equals_the_oracle(ours, oracle, samples):
    scores, labels, weights, keys = tensors(samples)
    if ours is inverted_pairs:
        labels = labels * 3 + scores.mul(7).remainder(2)  # any numbers
    found = ours(scores, labels, weights, one_group(scores))
    expected = oracle(scores.numpy(), labels.numpy(), weights.numpy())
    assert found.tolist() == pytest.approx([expected], abs=1e-9, nan_ok=True)
    groups = group_samples(keys)
    found = ours(scores, labels, weights, groups)
    present = [keys == key for key in keys.unique()]
    expected = [
        oracle(scores[of].numpy(), labels[of].numpy(), weights[of].numpy()) for of in present
    ]
    assert found[: len(present)].tolist() == pytest.approx(expected, abs=1e-9, nan_ok=True)
    assert groups.size_G.tolist()[: len(present)] == [int(of.sum()) for of in present]


def test_a_large_window():
    generator = np.random.default_rng(0)
    scores, weights = torch.tensor(generator.random((2, 20_000)))
    labels = torch.tensor(generator.random(20_000) < 0.1).double()
    groups = group_samples(torch.tensor(generator.integers(0, 50, 20_000)))
    found = area_under_roc(scores, labels, weights, groups)
    for place in range(50):
        of = groups.index_N == place
        expected = sk.roc_auc_score(labels[of], scores[of], sample_weight=weights[of])
        assert found[place].item() == pytest.approx(expected, abs=1e-9)


def test_a_score_that_is_no_number_shows():
    scores = torch.tensor([0.1, math.nan, 0.3, 0.4]).double()
    labels, ones = torch.tensor([0.0, 1.0, 0.0, 1.0]).double(), torch.ones(4).double()
    for metric in (area_under_roc, average_precision):
        assert metric(scores, labels, ones, one_group(scores)).isnan().all()
        of_groups = metric(scores, labels, ones, group_samples(torch.tensor([5, 5, 9, 9])))
        assert of_groups[:2].isnan().tolist() == [True, False]


@settings(deadline=None, max_examples=50)
@given(samples=SAMPLES)
def test_ranks_in_groups(samples):
    scores, _, _, keys = tensors(samples)
    better, tied = ranks_in_groups(scores, group_samples(keys))
    for i in range(len(keys)):
        of = [j for j in range(len(keys)) if keys[j] == keys[i]]
        assert better[i] == sum(bool(scores[j] > scores[i]) for j in of)
        assert tied[i] == sum(bool(scores[j] == scores[i]) for j in of)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_of_any_sign(dtype):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(200, generator=generator).mul(4).round().div(4).to(dtype)  # ties
    scores[:6] = torch.tensor([0.0, -0.0, math.inf, -math.inf, 3e38, -3e38])
    labels = (torch.rand(200, generator=generator) < 0.4).double()
    weights = torch.rand(200, generator=generator).double()
    as_ranks = torch.tensor(np.unique(scores.double().numpy(), return_inverse=True)[1])
    for ours, oracle in ((area_under_roc, area), (average_precision, precision)):
        found = ours(scores, labels, weights, one_group(scores)).item()
        assert found == pytest.approx(oracle(as_ranks, labels, weights), abs=1e-9)


def test_a_group_of_one_class_has_no_area():
    """Rounding of sums over other groups does not count as weight of the missing class."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.arange(400) // 4
    scores, weights = torch.rand(2, 400, generator=generator, dtype=torch.float64)
    labels = (torch.rand(400, generator=generator) < 0.5).double()
    for weights_N in (weights, torch.full_like(weights, 0.1)):
        samples = scores, labels, weights_N, group_samples(keys)
        has_one = labels.view(100, 4).sum(1) % 4 == 0
        assert 0 < has_one.sum() < 100
        assert torch.equal(area_under_roc(*samples)[:100].isnan(), has_one)
        has_none = labels.view(100, 4).sum(1) == 0
        assert torch.equal(average_precision(*samples)[:100].isnan(), has_none)


@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
def test_weights_of_any_size(size):
    scores = torch.tensor([0.1, 0.4, 0.4, 0.8]).double()
    labels, weights = torch.tensor([0, 0, 1, 1]).double(), torch.ones(4).double() * size
    samples = scores, labels, weights, one_group(scores)
    assert area_under_roc(*samples).item() == pytest.approx(0.875)
    assert average_precision(*samples).item() == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)


@settings(deadline=None, max_examples=100)
@given(samples=st.lists(st.tuples(st.integers(0, 3), st.floats(-9, 9)), max_size=20))
def test_pairs_of_equal_keys(samples):
    keys = torch.tensor([key for key, _ in samples])
    weights = 10 ** torch.tensor([power for _, power in samples], dtype=torch.float64)
    expected = math.fsum(
        weights[i] * weights[j]
        for i, j in itertools.combinations(range(len(samples)), 2)
        if keys[i] == keys[j]
    )
    assert weigh_equal_pairs(keys, weights).item() == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("k", [0, 1, 3, 9])
def test_ties_count_by_the_mean_over_their_orders(k):
    """Against all orders of seven samples, sorted by their scores."""
    scores = torch.tensor([0.5, 0.1, 0.5, 0.9, 0.5, 0.1, 0.2])
    ranks = ranks_in_groups(scores, one_group(scores))
    chances, discounts = np.zeros(7), np.zeros(7)
    orders = list(itertools.permutations(range(7)))
    for order in orders:
        for rank, sample in enumerate(sorted(order, key=lambda i: -scores[i])):
            if rank < k:
                chances[sample] += 1
                discounts[sample] += 1 / math.log2(rank + 2)
    assert chances_of_top(*ranks, k).tolist() == pytest.approx(list(chances / len(orders)))
    assert expected_discounts(*ranks, k).tolist() == pytest.approx(list(discounts / len(orders)))


@settings(deadline=None, max_examples=50)
@given(samples=SAMPLES)
def test_equal_pairs(samples):
    scores, labels, _, keys = tensors(samples)
    groups = group_samples(keys)
    found = equal_pairs(groups, scores, labels)[groups.index_N]
    for i in range(len(keys)):
        of = [j for j in range(len(keys)) if keys[j] == keys[i]]
        pairs = itertools.combinations(of, 2)
        assert found[i] == sum(
            bool(scores[a] == scores[b]) and bool(labels[a] == labels[b]) for a, b in pairs
        )
