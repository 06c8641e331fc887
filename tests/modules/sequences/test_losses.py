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
    shift = np.zeros(7) if log_q is None else log_q + np.log(5)
    expected = [
        cross_entropy(q @ ITEMS[i], [q @ ITEMS[k] - shift[k] for k in sample if k != i])
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


def test_a_large_sample_has_the_loss_and_the_gradients_of_all_items():
    queries, items, ids = tensors(QUERIES, ITEMS, IDS)
    log_q = torch.from_numpy(LOG_Q)
    draw = torch.Generator().manual_seed(0)
    sample = torch.multinomial(log_q.exp(), 400_000, replacement=True, generator=draw)

    def of(loss):
        given = queries.clone().requires_grad_(), items.clone().requires_grad_()
        losses = loss(*given)
        return losses.detach(), *torch.autograd.grad(losses.sum(), given)

    expected = of(lambda q, x: full_softmax_loss(q, x, ids))
    found = of(lambda q, x: sampled_softmax_loss(q, x[ids], x[sample], ids, sample, log_q))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_ids_and_shapes():
    queries, items, ids = tensors(QUERIES, ITEMS, IDS)
    one = items[ids], ids
    with pytest.raises(ValueError, match=r"items must have .*id; received 6"):
        full_softmax_loss(queries, items[:6], ids)
    with pytest.raises(ValueError, match=r"query; received \[4\] .*queries \[5, 3\]"):
        full_softmax_loss(queries, items, ids[:4])
    with pytest.raises(ValueError, match=r"log_q must have .*id; received 6"):
        in_batch_softmax_loss(queries, *one, torch.zeros(6))
    with pytest.raises(ValueError, match=r"log_q must have .*id; received 1"):
        sampled_softmax_loss(queries, items[ids], items[ids], ids, ids, torch.zeros(1))
    with pytest.raises(ValueError, match=r"positives must have .*id; received \[5"):
        in_batch_softmax_loss(queries, items[ids], ids[:4])
    with pytest.raises(ValueError, match=r"negatives must have .*id; received \[7"):
        sampled_softmax_loss(queries, items[ids], items, ids, ids)
    with pytest.raises(ValueError, match=r"queries, \[N, D\]; received \[5, 3\]"):
        in_batch_softmax_loss(queries[:4], *one)


def test_pairs():
    positive, negative = DRAW.standard_normal(5), DRAW.standard_normal((5, 4))
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    expected = -np.log(sigmoid(positive[:, None] - negative)).mean(1)
    check(bpr_loss(*tensors(positive, negative)), expected)
    check(bpr_loss(*tensors(positive, negative[:, 0])), -np.log(sigmoid(positive - negative[:, 0])))
    expected = -np.log(sigmoid(positive)) - np.log(1 - sigmoid(negative)).mean(1)
    check(binary_loss(*tensors(positive, negative)), expected)
    for loss in (bpr_loss, binary_loss):
        with pytest.raises(ValueError, match=r"one other item .*received \[2, 0\]"):
            loss(torch.zeros(2), torch.zeros(2, 0))
        assert loss(torch.zeros(0), torch.zeros(0, 0)).shape == (0,)  # a rank without samples
    with pytest.raises(ValueError, match=r"received \[5\] and \[4, 5\]"):
        bpr_loss(*tensors(positive, negative.T))
