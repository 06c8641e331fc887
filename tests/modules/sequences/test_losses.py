import numpy as np
import pytest
import torch

from recsys.modules.sequences.losses import (
    binary_loss,
    bpr_loss,
    full_softmax_loss,
    in_batch_softmax_loss,
    sampled_softmax_loss,
)

DRAW = np.random.default_rng(0)
QUERIES, ITEMS = DRAW.standard_normal((5, 3)), DRAW.standard_normal((7, 3))
IDS = np.array([2, 6, 2, 0, 5])
LOG_Q = np.log(DRAW.dirichlet(np.ones(7)))


def tensors(*arrays):
    return [torch.from_numpy(array) for array in arrays]


def cross_entropy(positive, others):
    return np.log(np.exp(positive) + sum(np.exp(score) for score in others)) - positive


def check(found, expected):
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_full_softmax():
    scores = QUERIES @ ITEMS.T
    expected = [
        cross_entropy(row[i], np.delete(row, i)) for row, i in zip(scores, IDS, strict=True)
    ]
    check(full_softmax_loss(*tensors(QUERIES, ITEMS, IDS)), expected)


@pytest.mark.parametrize("log_q", [None, LOG_Q])
def test_sampled_softmax_leaves_out_the_target(log_q):
    sample = np.array([1, 2, 2, 4, 6])
    shift = np.zeros(7) if log_q is None else log_q
    expected = [
        cross_entropy(q @ ITEMS[i] - shift[i], [q @ ITEMS[k] - shift[k] for k in sample if k != i])
        for q, i in zip(QUERIES, IDS, strict=True)
    ]
    given = tensors(QUERIES, ITEMS[IDS], ITEMS[sample], IDS, sample)
    check(
        sampled_softmax_loss(*given, None if log_q is None else torch.from_numpy(log_q)), expected
    )


@pytest.mark.parametrize("log_q", [None, LOG_Q])
def test_in_batch_softmax_leaves_out_the_same_item(log_q):
    shift = np.zeros(7) if log_q is None else log_q
    expected = [
        cross_entropy(q @ ITEMS[i] - shift[i], [q @ ITEMS[k] - shift[k] for k in IDS if k != i])
        for q, i in zip(QUERIES, IDS, strict=True)
    ]
    given = tensors(QUERIES, ITEMS[IDS], IDS)
    check(
        in_batch_softmax_loss(*given, None if log_q is None else torch.from_numpy(log_q)), expected
    )


def test_the_correction_makes_a_sample_unbiased():
    """With scores log of the counts, a sample by these counts has the loss of the full softmax."""
    queries, items = torch.ones(1, 1).double(), torch.from_numpy(LOG_Q[:, None])
    target = torch.tensor([3])
    full = full_softmax_loss(queries, items, target)
    draw = torch.multinomial(items.exp().flatten(), 20_000, replacement=True)
    found = sampled_softmax_loss(
        queries, items[target], items[draw], target, draw, torch.from_numpy(LOG_Q)
    )
    # all corrected scores are 0: log(1 + the number of other items)
    others = int((draw != 3).sum())
    torch.testing.assert_close(found, torch.tensor([np.log1p(others)]))
    assert abs(others / 20_000 - (1 - float((-full).exp()))) < 0.02


def test_pairs():
    positive, negative = DRAW.standard_normal(5), DRAW.standard_normal((5, 4))
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    expected = -np.log(sigmoid(positive[:, None] - negative)).mean(1)
    check(bpr_loss(*tensors(positive, negative)), expected)
    check(bpr_loss(*tensors(positive, negative[:, 0])), -np.log(sigmoid(positive - negative[:, 0])))
    expected = -np.log(sigmoid(positive)) - np.log(1 - sigmoid(negative)).mean(1)
    check(binary_loss(*tensors(positive, negative)), expected)
    with pytest.raises(ValueError, match=r"received \[5\] and \[4, 5\]"):
        bpr_loss(*tensors(positive, negative.T))
