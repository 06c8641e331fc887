import numpy as np
import pytest
import torch

from recsys.modules.sequences.bert4rec import BERTBlock
from recsys.modules.sequences.hstu import HSTULayer
from recsys.modules.sequences.sasrec import SASRec, SASRecBlock
from recsys.sparse import JaggedTensor
from tests.formulas import assert_follows, randomise
from tests.modules.sequences.cases import (
    DIM,
    NUM,
    OnRows,
    assert_causal,
    assert_exports,
    assert_names_other_inputs,
    by_bag,
    layer_norm,
    linear,
    softmax_attention,
)


def block(state, name, x, heads):
    q, k, v = np.split(
        linear(state, f"{name}.attention_in", layer_norm(state, f"{name}.attention_norm", x)), 3, 1
    )
    x = x + softmax_attention(q, k, v, heads, causal=True)
    hidden = linear(state, f"{name}.forward_in", layer_norm(state, f"{name}.forward_norm", x))
    return x + linear(state, f"{name}.forward_out", np.maximum(hidden, 0))


@by_bag
def formula(state, bag):
    x = bag * 2.0 + state["encoder.positions.positions.weight"][: len(bag)][::-1]
    for i in range(2):
        x = block(state, f"encoder.blocks.{i}", x, 2)
    return layer_norm(state, "encoder.norm", x)


def test_against_the_formula():
    torch.manual_seed(0)
    encoder = SASRec(DIM, 6, num_blocks=2, num_heads=2, dropout=0.0)
    randomise(encoder)
    assert_follows(OnRows(encoder), formula, torch.randn(NUM, DIM, dtype=torch.float64))


def test_later_values_and_other_bags_change_nothing():
    assert_causal(SASRec(DIM, 6, num_heads=2))


def test_other_inputs_are_named():
    assert_names_other_inputs(SASRec(DIM, 6, num_heads=2))


def test_export():
    assert_exports(SASRec(DIM, 6, num_heads=2))


def test_dropout_in_training_only():
    encoder = SASRec(DIM, 6, dropout=0.5)
    rows = torch.randn(NUM, DIM)
    assert not torch.equal(OnRows(encoder)(rows), OnRows(encoder)(rows))
    encoder.eval()
    assert torch.equal(OnRows(encoder)(rows), OnRows(encoder)(rows))


def test_errors():
    with pytest.raises(ValueError, match="multiple of num_heads=3; received 4"):
        SASRecBlock(4, 6, num_heads=3)
    with pytest.raises(ValueError, match=r"PositionEmbedding\.dropout must .*0, 1\); .*1"):
        SASRec(4, 6, dropout=1.0)
    with pytest.raises(ValueError, match=r"at most max_length=\d+ values; received"):
        OnRows(SASRec(DIM, 3))(torch.randn(NUM, DIM))


@pytest.mark.parametrize("block", [SASRecBlock, BERTBlock, HSTULayer])
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_batch_without_values(block, lengths):
    x = JaggedTensor(torch.zeros(0, DIM), lengths=torch.tensor(lengths, dtype=torch.int64))
    more = (None, None) if block is HSTULayer else ()
    assert block(DIM, 6, num_heads=2)(x, *more).values().shape == (0, DIM)
