import math

import pytest
import torch
from sklearn import metrics as sklearn_metrics

from recsys.metrics import NormalizedEntropy, log_loss, normalized_entropy
from recsys.metrics.entropy import normalize_by_mean


def samples(num=1000):
    generator = torch.Generator().manual_seed(0)
    predictions = torch.rand(num, generator=generator)
    labels = (torch.rand(num, generator=generator) < predictions).long()
    return predictions, labels, torch.rand(num, generator=generator)


def test_log_loss_equals_sklearn():
    predictions, labels, weights = samples()
    expected = sklearn_metrics.log_loss(
        labels.numpy(), predictions.double().numpy(), sample_weight=weights.numpy()
    )
    assert log_loss(predictions, labels, weights).item() == pytest.approx(expected, abs=1e-12)


def test_normalized_entropy_is_relative_to_the_base_rate():
    predictions, labels, _ = samples()
    rate = labels.double().mean()
    expected = log_loss(predictions, labels) / log_loss(rate.expand(len(labels)), labels)
    assert normalized_entropy(predictions, labels).item() == pytest.approx(expected.item())
    assert normalized_entropy(rate.expand(len(labels)), labels).item() == pytest.approx(1.0)


def test_sure_mistakes_are_finite():
    assert math.isfinite(log_loss(torch.tensor([0.0, 1.0]), torch.tensor([1, 0])))


def test_accumulated_and_merged_equals_whole():
    predictions, labels, weights = samples()
    parts = [NormalizedEntropy(), NormalizedEntropy()]
    for place, batch in enumerate(
        zip(predictions.split(300), labels.split(300), weights.split(300), strict=True)
    ):
        parts[place % 2].update(*batch)
    parts[0].merge(parts[1])
    expected = normalized_entropy(predictions, labels, weights).item()
    assert parts[0].compute().item() == pytest.approx(expected, abs=1e-12)
    expected = (labels * weights).sum() / weights.sum()
    assert parts[0].base_rate().item() == pytest.approx(expected.item(), abs=1e-6)
    assert parts[0].state().shape == (3,)


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_has_no_entropy(label):
    """For any rounding of the weights, in any order of their sums."""
    metric = NormalizedEntropy()
    for seed in range(8):
        weights = torch.rand(33, generator=torch.Generator().manual_seed(seed)).double() * 0.1
        metric.update(torch.full((33,), 0.3), torch.full((33,), label), weights)
    assert metric.compute() == math.inf
    assert metric.base_rate() == label


def test_a_class_of_little_weight_has_an_entropy():
    share = 1e-18
    weights = torch.tensor([1.0, share], dtype=torch.float64)
    for labels in (torch.tensor([1, 0]), torch.tensor([0, 1])):
        found = normalized_entropy(torch.tensor([0.5, 0.5]), labels, weights)
        assert found.item() == pytest.approx(math.log(2) / (share * (1 - math.log(share))))


def test_the_mean_prediction_may_be_one():
    ones, share = torch.tensor([3.3]).double(), torch.tensor([0.1]).double()
    found = normalize_by_mean(torch.ones(1), ones, share, ones + share, torch.zeros(1))
    assert found.item() == pytest.approx(1 / (0.1 * -math.log(1e-12)))
    nothing = torch.zeros(1)
    assert normalize_by_mean(torch.ones(1), ones, nothing, ones, nothing).item() == math.inf


def test_bad_input():
    with pytest.raises(ValueError, match=r"received predictions of shape \[3\]"):
        log_loss(torch.rand(3), torch.ones(2))
