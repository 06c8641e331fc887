import pytest
import torch

from recsys.modules.dot_interaction import dot_pairs, pair_of_position, pair_positions


def naive(vectors):
    num = vectors.size(1)
    pairs = [
        (vectors[:, first] * vectors[:, second]).sum(1)
        for first in range(num)
        for second in range(first + 1, num)
    ]
    return torch.stack(pairs, dim=1)


def ours(vectors):
    num = vectors.size(1)
    return dot_pairs(vectors, pair_positions(num), pair_of_position(num))


@pytest.mark.parametrize("num_vectors", [2, 3, 27])
def test_forward_and_gradient_equal_the_formula(num_vectors):
    vectors = torch.randn(5, num_vectors, 8, requires_grad=True)
    weights = torch.randn(num_vectors * (num_vectors - 1) // 2)
    torch.testing.assert_close(ours(vectors), naive(vectors))
    (found,) = torch.autograd.grad((ours(vectors) * weights).sum(), vectors)
    (expected,) = torch.autograd.grad((naive(vectors) * weights).sum(), vectors)
    torch.testing.assert_close(found, expected)


def test_first_and_second_derivatives():
    vectors = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(ours, vectors)
    torch.autograd.gradgradcheck(ours, vectors)


def test_empty_batch():
    vectors = torch.zeros(0, 3, 4, requires_grad=True)
    ours(vectors).sum().backward()
    assert vectors.grad.shape == (0, 3, 4)


def test_autocast():
    vectors = torch.randn(2, 3, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        pairs = ours(vectors)
    assert pairs.dtype == torch.bfloat16
    pairs.float().sum().backward()
    assert vectors.grad.dtype == torch.float32
