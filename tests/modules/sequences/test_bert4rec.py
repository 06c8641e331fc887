import math

import numpy as np
import pytest
import torch

from recsys.modules.sequences.bert4rec import BERT4Rec, BERTBlock, mask_items
from recsys.sparse import JaggedTensor, KeyedJaggedTensor
from tests.formulas import assert_follows, randomise
from tests.modules.sequences.cases import (
    DIM,
    LENGTHS,
    NUM,
    OnRows,
    by_bag,
    layer_norm,
    linear,
    softmax_attention,
)


@by_bag
def formula(state, x):
    q, k, v = np.split(linear(state, "encoder.attention_in", x), 3, 1)
    read = linear(state, "encoder.attention_out", softmax_attention(q, k, v, 2, causal=False))
    x = layer_norm(state, "encoder.attention_norm", x + read)
    hidden = linear(state, "encoder.forward_in", x)
    hidden = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    return layer_norm(
        state, "encoder.forward_norm", x + linear(state, "encoder.forward_out", hidden)
    )


def test_block_against_the_formula():
    torch.manual_seed(0)
    block = BERTBlock(DIM, 6, num_heads=2)
    randomise(block)
    assert_follows(OnRows(block), formula, torch.randn(NUM, DIM, dtype=torch.float64))


def batch() -> KeyedJaggedTensor:
    ids = torch.randint(0, 10, (NUM,))
    return KeyedJaggedTensor(["item"], ids, lengths=torch.tensor(LENGTHS))


def test_padded_scores_are_the_scores_of_each_value():
    model = BERT4Rec(10, 5, DIM, 2, 2).eval()
    padded, jagged = model(batch_ := batch()), model.scores(batch_).to_dense()
    assert padded.shape == (len(LENGTHS), 5, 10)
    for row, bag in zip(padded, jagged, strict=True):
        assert torch.equal(row[: len(bag)], bag)
        assert not row[len(bag) :].any()


def test_later_values_change_earlier_ones():
    model = BERT4Rec(10, 5, DIM, 2, 1).eval()
    features = batch()
    before = model.scores(features).values()
    features.values()[2] = (features.values()[2] + 1) % 10
    after = model.scores(features).values()
    assert (before != after).any(1).tolist() == [True] * 3 + [False] * (NUM - 3)


def test_masks():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 100, (3000,), generator=generator)
    lengths = torch.tensor([1] * 1000 + [0] * 5 + [20] * 100)
    x = JaggedTensor(ids, lengths=lengths)
    masked, targets = mask_items(x, 0, 0.2, generator)
    is_masked = targets >= 0
    assert torch.equal(masked.values(), ids.masked_fill(is_masked, 0))
    assert torch.equal(targets[is_masked], ids[is_masked])
    assert set(targets[~is_masked].tolist()) == {-100}
    assert is_masked[:1000].all()
    assert 0.17 < float(is_masked[1000:].float().mean()) < 0.23
    assert is_masked[1000:].view(100, 20).any(1).all()
    with pytest.raises(ValueError, match="above 0 and at most 1; received 0"):
        mask_items(x, 0, 0.0)


def test_errors():
    with pytest.raises(ValueError, match="multiple of num_heads=3; received 4"):
        BERT4Rec(10, 5, DIM, 3, 1)
