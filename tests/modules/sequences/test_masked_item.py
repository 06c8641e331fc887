import pytest
import torch

from recsys.datasets.utils import Batch
from recsys.modules.sequences.bert4rec import BERT4Rec
from recsys.modules.sequences.masked_item import MaskedItem
from recsys.sparse import KeyedJaggedTensor

HISTORIES, TARGETS = [[3, 4, 5], [], [7]], [[4, 5, 6], [], [8]]


def build() -> MaskedItem:
    torch.manual_seed(0)
    return MaskedItem(BERT4Rec(10, 5, 8, 2, 1, dropout=0.0), mask_id=0, probability=0.5)


def batch() -> KeyedJaggedTensor:
    bags = HISTORIES + TARGETS
    ids = torch.tensor([id for bag in bags for id in bag])
    lengths = torch.tensor([len(bag) for bag in bags])
    return KeyedJaggedTensor(["history", "target"], ids, lengths=lengths)


def scores(model: MaskedItem, ids: list[int]) -> torch.Tensor:
    features = KeyedJaggedTensor(["item"], torch.tensor(ids), lengths=torch.tensor([len(ids)]))
    return model.model.scores(features).values()


def test_evaluation_asks_for_the_last_target():
    model = build().eval()
    loss, (_, users, last) = model(batch())
    assert last.tolist() == [6, 8]
    wanted = [scores(model, [*history, 0])[-1] for history in HISTORIES]
    items = model.items(10, users.device)
    assert items[0].isneginf().all()  # the mask is not an item
    torch.testing.assert_close(users @ items[1:].T, torch.stack(wanted)[:, 1:])
    torch.testing.assert_close(model.users(batch()), users)
    losses = [-wanted[0].log_softmax(0)[6], -wanted[2].log_softmax(0)[8]]
    torch.testing.assert_close(loss, torch.stack(losses).mean())


def test_special_rows_are_no_items():
    bert = BERT4Rec(10, 5, 8, 2, 1, dropout=0.0, num_special_rows=2)
    model = MaskedItem(bert, mask_id=9)
    assert model.special_ids().tolist() == [0, 1, 9]
    is_item = model.items(10, torch.device("cpu")).isfinite().all(1)
    assert is_item.nonzero().flatten().tolist() == [*range(2, 9)]


def test_training_asks_for_the_masked_items():
    model = build()
    torch.manual_seed(5)
    loss, _ = model(batch())
    torch.manual_seed(5)
    draw = torch.rand(6)  # of the sequences 3 4 5 6 and 7 8
    losses = []
    for ids, own in (([3, 4, 5, 6], draw[:4]), ([7, 8], draw[4:])):
        is_masked = (own < 0.5) | (own == own.min())
        masked = [0 if hidden else id for id, hidden in zip(ids, is_masked, strict=True)]
        found = scores(model, masked).log_softmax(1)
        losses += [-found[i, id] for i, id in enumerate(ids) if is_masked[i]]
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_weights_multiply_the_losses_of_a_sample():
    model = build().eval()
    features = batch()
    labels = torch.zeros(3)

    def loss(*weights):
        given = torch.tensor(weights)
        return model(Batch(torch.zeros(3, 0), features, labels, sample_weights=given))[0]

    torch.testing.assert_close(loss(1.0, 1.0, 1.0), model(features)[0])
    torch.testing.assert_close(
        loss(2.0, 7.0, 0.5), 2 * loss(1.0, 0.0, 0.0) + 0.5 * loss(0.0, 0.0, 1.0)
    )
    model.train()
    loss(2.0, 7.0, 0.0).backward()
    assert model.model.out.weight.grad.isfinite().all()


def test_errors():
    with pytest.raises(ValueError, match="mask_id must be below vocab_size=10 of"):
        MaskedItem(BERT4Rec(10, 5, 8, nhead=2, num_layers=1), mask_id=10)
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        MaskedItem(BERT4Rec(10, 5, 8, 2, 1), 0, 0.0)


@pytest.mark.parametrize("given", [None, {"history": 1}, torch.ones(2, 3)])
def test_other_inputs_are_named(given: object):
    with pytest.raises(TypeError, match=r"^MaskedItem\.batch must be a KeyedJaggedTensor; recei"):
        build()(given)
