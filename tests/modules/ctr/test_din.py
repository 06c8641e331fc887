import numpy as np
import pytest
import torch

from recsys.modules.ctr.din import DIN, Dice, InterestAttention
from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingCollection
from recsys.sparse import JaggedTensor, KeyedJaggedTensor
from tests.formulas import assert_follows, randomise
from tests.modules.ctr.cases import DENSE, batch, collection, linear, sigmoid

LENGTHS, DIM = (2, 0, 3), 3


def dice(state, name, x):
    mean, variance = x.mean(0), x.var(0)
    shares = sigmoid((x - mean) / np.sqrt(variance + 1e-5))
    return (shares + (1 - shares) * state[f"{name}.alpha"]) * x


class OnRows(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, rows, candidate):
        return self.attention(JaggedTensor(rows, lengths=torch.tensor(LENGTHS)), candidate)


def formula(state, rows, candidate):
    other = np.repeat(candidate, LENGTHS, 0)
    x = np.concatenate([rows, other, rows - other, rows * other], 1)
    x = dice(state, "attention.network.1", linear(state, "attention.network.0", x))
    weighted = rows * linear(state, "attention.network.2", x)
    return np.stack([bag.sum(0) for bag in np.split(weighted, np.cumsum(LENGTHS)[:-1])])


def test_attention_against_the_formula():
    torch.manual_seed(0)
    attention = InterestAttention(DIM, [4])
    randomise(attention)
    rows, candidate = torch.randn(5, DIM), torch.randn(3, DIM)
    assert_follows(OnRows(attention), formula, rows.double(), candidate.double())


def test_dice_of_one_row_and_of_none():
    dice_ = Dice(2)
    for rows in (1, 0):
        assert dice_(torch.randn(rows, 2)).isfinite().all()


def build() -> DIN:
    films = EmbeddingConfig(
        name="f", embedding_dim=DIM, num_embeddings=10, feature_names=["seen", "candidate"]
    )
    return DIN(
        collection(), EmbeddingCollection(tables=[films]), DENSE, [("seen", "candidate")], [8, 4]
    )


def features(lengths: list[int]) -> KeyedJaggedTensor:
    pooled = batch(3)
    seen = torch.randint(0, 10, (sum(lengths),))
    more = KeyedJaggedTensor(["seen", "candidate"], seen, lengths=torch.tensor(lengths))
    return KeyedJaggedTensor.concat([pooled, more])


def test_the_whole_model():
    torch.manual_seed(0)
    model = build()
    given = torch.randn(3, DENSE), features([2, 0, 3, 1, 1, 1])
    logits = model(*given)
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    model.eval()
    program = torch.export.export(model, given).module()
    torch.testing.assert_close(program(*given), model(*given))


def test_a_history_is_read_by_its_candidate():
    model = build().eval()
    dense, ids = torch.randn(3, DENSE), features([2, 0, 3, 1, 1, 1])
    before = model(dense, ids)
    values = ids.values().clone()
    values[-8] = (values[-8] + 1) % 10  # first of the first history
    changed = KeyedJaggedTensor(ids.keys(), values, lengths=ids.lengths())
    assert (model(dense, changed) != before).flatten().tolist() == [True, False, False]


def test_errors():
    with pytest.raises(ValueError, match=r"3 ids of 3 samples, .*2"):
        build()(torch.randn(3, DENSE), features([1, 1, 1, 2, 0, 1]))
    with pytest.raises(ValueError, match=r"'candidate' must have .*received 2 ids"):
        build()(torch.randn(3, DENSE), features([2, 0, 3, 1, 0, 1]))
    with pytest.raises(ValueError, match="must name a history and its"):
        DIN(collection(), build().embedding_collection, DENSE, [])
