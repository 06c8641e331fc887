import pytest
import torch

from recsys.modules.sequences.gru4rec import GRU4Rec
from recsys.sparse import JaggedTensor
from tests.modules.sequences.cases import (
    DIM,
    LENGTHS,
    NUM,
    Exportable,
    OnRows,
    assert_causal,
    assert_exports,
    assert_names_other_inputs,
)


def test_against_each_history_alone():
    encoder = GRU4Rec(DIM, 6, num_layers=2, hidden=5, dropout=0.0).double()
    rows = torch.randn(NUM, DIM, dtype=torch.float64, requires_grad=True)
    found = OnRows(encoder)(rows)
    alone = [encoder.linear(encoder.gru(bag)[0]) for bag in rows.split(LENGTHS) if len(bag)]
    torch.testing.assert_close(found, torch.cat(alone))
    factors = torch.randn_like(found)
    leaves = [rows, *encoder.parameters()]
    gradients = torch.autograd.grad((found * factors).sum(), leaves)
    expected = torch.autograd.grad((torch.cat(alone) * factors).sum(), leaves)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_later_values_and_other_bags_change_nothing():
    assert_causal(GRU4Rec(DIM, 6))


def test_batch_without_values():
    x = JaggedTensor(torch.zeros(0, DIM), lengths=torch.tensor([0, 0]))
    assert GRU4Rec(DIM, 6)(x).values().shape == (0, DIM)


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # torch, about any nn.GRU
def test_other_inputs_are_named():
    assert_names_other_inputs(GRU4Rec(DIM, 6, hidden=5))


@pytest.mark.filterwarnings("ignore:The tensor attributes")
def test_export():
    assert_exports(GRU4Rec(DIM, 6, hidden=5))


@pytest.mark.filterwarnings("ignore:The tensor attributes")
def test_exported_programs_refuse_longer_histories():
    given = torch.randn(4, DIM), torch.tensor([3, 1])
    program = torch.export.export(Exportable(GRU4Rec(DIM, 2).eval()), given).module()
    with pytest.raises(RuntimeError, match="at most 2 values"):
        program(*given)


def test_errors():
    with pytest.raises(ValueError, match="num_layers"):
        GRU4Rec(DIM, 6, num_layers=0)
