import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from recsys.metrics import AUC, BinnedAUC, auc


def samples(num=2000, seed=0, ties=True):
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(num, generator=generator) < 0.3).float()
    scores = torch.rand(num, generator=generator) * 0.6 + 0.4 * labels * torch.rand(
        num, generator=generator
    )
    weights = torch.rand(num, generator=generator)
    return (scores.mul(50).round() / 50 if ties else scores), labels, weights


@settings(deadline=None, max_examples=50)
@given(
    scores=st.lists(st.integers(0, 5), min_size=4, max_size=40),
    labels=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_equals_sklearn_with_ties(scores, labels):
    labels = [True, False, *labels][: len(scores)]
    expected = roc_auc_score(labels, scores)
    found = auc(torch.tensor(scores) / 5, torch.tensor(labels))
    assert found.item() == pytest.approx(expected, abs=1e-12)


def test_equals_sklearn_weighted():
    scores, labels, weights = samples()
    expected = roc_auc_score(labels, scores, sample_weight=weights)
    assert auc(scores, labels, weights).item() == pytest.approx(expected, abs=1e-12)


def test_one_class_is_nan():
    assert auc(torch.rand(4), torch.ones(4)).isnan()
    assert AUC().compute().isnan()


@pytest.mark.parametrize("make", [AUC, lambda: BinnedAUC(num_bins=51)])
def test_accumulated_and_merged_equals_whole(make):
    scores, labels, weights = samples()
    parts = [make(), make()]
    for place, (score, label, weight) in enumerate(
        zip(scores.split(300), labels.split(300), weights.split(300), strict=True)
    ):
        parts[place % 2].update(score, label, weight)
    parts[0].merge(parts[1])
    whole = make()
    whole.update(scores, labels, weights)
    assert parts[0].compute().item() == pytest.approx(whole.compute().item(), abs=1e-12)


def test_binned_is_near_exact():
    scores, labels, _ = samples(ties=False)
    metric = BinnedAUC()
    metric.update(scores, labels)
    assert metric.compute().item() == pytest.approx(auc(scores, labels).item(), abs=1e-4)


def test_binned_takes_probabilities_of_0_and_1():
    metric = BinnedAUC(num_bins=10)
    metric.update(torch.tensor([0.0, 1.0]), torch.tensor([0, 1]))
    assert metric.compute() == 1.0


@pytest.mark.parametrize("place", range(3))
def test_a_nan_shows(place):
    given = [torch.rand(8), (torch.arange(8) % 2).float(), torch.rand(8)]
    given[place][3] = math.nan
    assert auc(*given).isnan()
    for metric in (AUC(), BinnedAUC(num_bins=10)):
        metric.update(*given)
        assert metric.compute().isnan()


def test_bins_take_any_number():
    metric = BinnedAUC(num_bins=10)
    metric.update(torch.tensor([-math.inf, -1e30, 0.5, 1e30, math.inf]), torch.arange(5) > 2)
    assert metric.compute() == 1.0


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_weights_of_any_size(size):
    scores, labels, weights = samples(num=100)
    for make in (AUC, lambda: BinnedAUC(num_bins=51)):
        metric, of_ones = make(), make()
        metric.update(scores, labels, weights.double() * size)
        of_ones.update(scores, labels, weights)
        assert metric.compute().item() == pytest.approx(of_ones.compute().item())


def test_bad_input():
    with pytest.raises(ValueError, match=r"received predictions of shape \[3\]"):
        auc(torch.rand(3), torch.ones(2))
    with pytest.raises(ValueError, match=r"on one device; received \['cpu', 'meta'\]"):
        auc(torch.rand(3), torch.ones(3, device="meta"))
    with pytest.raises(ValueError, match="num_bins must be at least 2"):
        BinnedAUC(num_bins=1)
    with pytest.raises(ValueError, match=r"received \[2, 10\] and \[2, 20\]"):
        BinnedAUC(10).merge(BinnedAUC(20))
