import pytest
import torch

from recsys.kernels.attention import AttentionRules, Bias
from recsys.sparse import JaggedTensor, ops
from tests.kernels.attention_cases import formula

LENGTHS = torch.tensor([3, 0, 2])


def jagged(*columns: int, spare: int = 0) -> JaggedTensor:
    return JaggedTensor(torch.randn(5 + spare, *columns, dtype=torch.float64), lengths=LENGTHS)


@pytest.mark.parametrize("kind", ["softmax", "silu"])
def test_defaults_and_all_arguments(kind):
    query, key, value = jagged(2, 4), jagged(2, 4, spare=2), jagged(2, 3)
    found = ops.attention(query, key, value, max_length=6, kind=kind)
    assert found.lengths() is query.lengths()
    rules = AttentionRules(kind=kind, causal=True, scale=0.5, divisor=6.0, max_length=6)
    parts = query.values(), key.values()[:5], value.values(), query.offsets()
    expected = formula(*parts, rules, Bias(None, None, None, None, None))
    torch.testing.assert_close(found.values(), expected)
    times, targets = torch.tensor([5, 9, 100, 0, 7]), torch.tensor([1, 0, 2])
    position = torch.randn(2, 5, dtype=torch.float64)
    time = torch.randn(2, 8, dtype=torch.float64)
    found = ops.attention(
        query, key, value, max_length=6, kind=kind, causal=False, scale=2.0, divisor=3.0,
        position_bias=position, time_bias=time, times=times, query_times=times + 4,
        num_targets=targets,
    )  # fmt: skip
    rules = AttentionRules(kind=kind, causal=False, scale=2.0, divisor=3.0, max_length=6)
    expected = formula(*parts, rules, Bias(position, time, times + 4, times, targets))
    torch.testing.assert_close(found.values(), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": jagged(1, 3)}, "equal numbers of heads"),
        ({"key": jagged(2, 5)}, "needs query and key"),
        ({"kind": "relu"}, "kind must .*received 'relu'"),
        ({"position_bias": torch.ones(2, 4)}, "2P - 1 columns; received 4"),
        ({"position_bias": torch.ones(3, 5)}, "a row for .*of 2 heads"),
        ({"time_bias": torch.ones(2, 5)}, "time_bias and times .*be given together"),
        ({"max_length": 2}, "at most max_length=2 values; received 3"),
        ({"num_targets": torch.ones(2)}, "numbers of bags .*2 and 3"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    given = {"query": jagged(2, 4), "key": jagged(2, 4), "value": jagged(2, 4), "max_length": 4}
    with pytest.raises(ValueError, match=message):
        ops.attention(**{**given, **change})


class Layer(torch.nn.Module):
    def forward(self, values, lengths):
        x = JaggedTensor(values, lengths=lengths)
        return ops.attention(x, x, x, max_length=5, kind="silu").values()


def test_torch_export():
    ids, bags = torch.export.Dim("ids", min=2), torch.export.Dim("bags", min=3)
    given = torch.randn(6, 2, 4), torch.tensor([3, 1, 2])
    shapes = {"values": {0: ids}, "lengths": {0: bags}}
    program = torch.export.export(Layer(), given, dynamic_shapes=shapes).module()
    other = torch.randn(10, 2, 4), torch.tensor([1, 5, 0, 2, 2])
    torch.testing.assert_close(program(*other), Layer()(*other))
