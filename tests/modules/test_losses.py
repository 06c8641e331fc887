import pytest
import torch
from torch import nn

from recsys.modules.losses import mean_loss


def test_sample_weights_multiply_the_losses_of_all_tasks():
    torch.manual_seed(0)
    logits, labels, weights = torch.randn(5, 3), torch.rand(5, 3), torch.rand(5)
    expected = sum(mean_loss(logits[:, task], labels[:, task], weights) for task in range(3)) / 3
    torch.testing.assert_close(mean_loss(logits, labels, weights), expected)
    with pytest.raises(ValueError, match=r"weights \[3\] and logits \[5, 3\]"):
        mean_loss(logits, labels, weights[:3])


def test_missing_labels_have_the_loss_zero():
    torch.manual_seed(0)
    logits, labels = torch.randn(60, 3, requires_grad=True), torch.rand(60, 3)
    mask, weights = torch.rand(60, 3) < 0.6, torch.rand(60)
    terms = nn.functional.softplus(logits.double()) - labels * logits.double()
    for given in (None, weights):
        scale = torch.ones(60, 1) if given is None else weights.unsqueeze(1)
        found = mean_loss(logits, labels, given, mask)
        torch.testing.assert_close(found.double(), (terms * scale * mask).sum() / 180)
        (gradient,) = torch.autograd.grad(found, logits)
        assert torch.equal(gradient != 0, mask)
        assert torch.equal(mean_loss(logits, labels.where(mask, 1 - labels), given, mask), found)
        parts = [slice(rank * 20, rank * 20 + 20) for rank in range(3)]  # as on three ranks
        sums = [
            mean_loss(logits[p], labels[p], None if given is None else given[p], mask[p])
            for p in parts
        ]
        torch.testing.assert_close(sum(sums) / 3, found)
    with pytest.raises(ValueError, match=r"label_mask must be bool.*received torch\.float32"):
        mean_loss(logits, labels, mask=mask.float())
    with pytest.raises(ValueError, match=r"bool \[60\] and labels \[60, 3\]"):
        mean_loss(logits, labels, mask=mask[:, 0])
    with pytest.raises(ValueError, match="labels must be from 0 to"):
        mean_loss(logits, labels.where(mask, torch.nan), mask=mask)  # an error of the data
