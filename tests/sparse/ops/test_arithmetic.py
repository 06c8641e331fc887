import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.sparse import JaggedTensor, ops
from tests.sparse.ops.cases import DTYPES, cases, cast, dense_gradients, gradients

ZEROS = torch.zeros(3, dtype=torch.float64)
REDUCTIONS = {
    "sum": lambda bag: bag.sum(0),
    "mean": lambda bag: bag.mean(0) if len(bag) else ZEROS,
    "max": lambda bag: bag.amax(0) if len(bag) else ZEROS,
}


@pytest.mark.parametrize("name", REDUCTIONS)
@given(case=cases(), dtype=DTYPES)
def test_reductions_against_each_bag(name, case, dtype):
    x, bags = case
    function = getattr(ops, name)
    expected = torch.stack([REDUCTIONS[name](bag) for bag in bags])
    found = function(cast(x, dtype))
    assert found.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.05)
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        gradients(x, function),
        dense_gradients(bags, lambda bags: torch.stack([REDUCTIONS[name](bag) for bag in bags])),
    )


def test_half_types_are_summed_in_float32():
    x = JaggedTensor(torch.ones(1000, dtype=torch.bfloat16), lengths=torch.tensor([1000]))
    assert ops.sum(x).item() == 1000  # in bfloat16 256 + 1 is 256
    assert ops.mean(x).item() == 1


@given(cases(), DTYPES)
def test_softmax_against_each_bag(case, dtype):
    x, bags = case
    found = ops.softmax(cast(x, dtype))
    assert found.values().dtype == dtype
    expected = torch.cat([bag.softmax(0) for bag in bags])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.02)
    torch.testing.assert_close(found.values().double(), expected, atol=tolerance, rtol=0.0)
    dense = dense_gradients(bags, lambda bags: torch.cat([bag.softmax(0) for bag in bags]))
    torch.testing.assert_close(gradients(x, ops.softmax), dense)


def test_softmax_of_large_values():
    x = JaggedTensor(torch.tensor([1e4, 1e4, -1e4]), lengths=torch.tensor([2, 1]))
    assert ops.softmax(x).values().tolist() == [0.5, 0.5, 1.0]


@given(cases(), st.sampled_from(["add", "sub", "mul", "div"]))
def test_elementwise(case, name):
    function, of_jagged = getattr(torch, name), getattr(ops, name)
    x, bags = case
    doubled = JaggedTensor(2 * x.trim().values(), offsets=x.offsets())
    rows = torch.arange(1.0, 3 * len(bags) + 1, dtype=torch.float64).view(-1, 3)
    expected = [function(bag, 2 * bag) for bag in bags]
    assert torch.equal(of_jagged(x, doubled).values(), torch.cat(expected))
    expected = [function(bag, row) for bag, row in zip(bags, rows, strict=True)]
    found = of_jagged(x, rows)
    assert torch.equal(found.values(), torch.cat(expected))
    assert found.lengths().tolist() == [len(bag) for bag in bags]


@given(cases())
def test_expand_gives_its_gradient_to_the_row(case):
    x, bags = case
    rows = torch.zeros(len(bags), 3, dtype=torch.float64, requires_grad=True)
    (ops.expand(rows, x).values() * x.trim().values()).sum().backward()
    torch.testing.assert_close(rows.grad, torch.stack([bag.sum(0) for bag in bags]))


@given(cases())
def test_layer_norm(case):
    x, _ = case
    norm = torch.nn.LayerNorm(3, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    found = ops.layer_norm(x, norm.weight, norm.bias)
    torch.testing.assert_close(found.values(), norm(x.trim().values()))


@given(cases(), st.integers(1, 3))
def test_products_against_each_bag(case, width):
    x, bags = case
    right = torch.randn(len(bags), 3, width, dtype=torch.float64)
    other = torch.randn(x.trim().values().shape[0], width, dtype=torch.float64)
    y = JaggedTensor(other, lengths=x.lengths())

    def rows(bags):
        return torch.cat([bag @ matrix for bag, matrix in zip(bags, right, strict=True)])

    def matrices(bags):
        others = other.split([len(bag) for bag in bags])
        return torch.stack([bag.T @ one for bag, one in zip(bags, others, strict=True)])

    torch.testing.assert_close(ops.bmm(x, right).values(), rows(bags))
    torch.testing.assert_close(ops.bmm(x, y), matrices(bags))
    by_rows = gradients(x, lambda x: ops.bmm(x, right))
    torch.testing.assert_close(by_rows, dense_gradients(bags, rows))
    by_matrices = gradients(x, lambda x: ops.bmm(x, y))
    torch.testing.assert_close(by_matrices, dense_gradients(bags, matrices))


def test_jagged_tensors_that_do_not_fit():
    x = JaggedTensor(torch.ones(3, 2), lengths=torch.tensor([2, 1]))
    y = JaggedTensor(torch.ones(3, 2), lengths=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"lengths .*received 2 and 1.* 0"):
        ops.add(x, y)
    with pytest.raises(ValueError, match=r"of bags.*received 3 and 2"):
        ops.expand(torch.ones(3), x)
    with pytest.raises(ValueError, match=r"\[3, 2\] and \[2, 3, 1\]"):
        ops.bmm(x, torch.ones(2, 3, 1))


class Pooled(torch.nn.Module):
    """Attention of a query over a jagged tensor."""

    def forward(self, values, lengths, query):
        x = JaggedTensor(values, lengths=lengths)
        shares = ops.softmax(ops.bmm(x, query.unsqueeze(2)))
        centred = ops.sub(x, ops.mean(x))
        return ops.sum(ops.mul(centred, shares)) + ops.max(x)


def test_torch_export_and_compile():
    module, given = Pooled(), (torch.randn(6, 3), torch.tensor([3, 0, 3]), torch.randn(3, 3))
    ids, bags = torch.export.Dim("ids", min=2), torch.export.Dim("bags", min=3)
    shapes = {"values": {0: ids}, "lengths": {0: bags}, "query": {0: bags}}
    program = torch.export.export(module, given, dynamic_shapes=shapes).module()
    other = torch.randn(9, 3), torch.tensor([1, 4, 0, 2, 2]), torch.randn(5, 3)
    torch.testing.assert_close(program(*other), module(*other))
    compiled = torch.compile(module, backend="eager")
    torch.testing.assert_close(compiled(*other), module(*other))


def test_fx_trace():
    def pooled(x, rows):
        return ops.sum(ops.softmax(ops.mul(x, rows)))

    traced = torch.fx.symbolic_trace(pooled)
    x, rows = JaggedTensor(torch.randn(3, 2), lengths=torch.tensor([2, 1])), torch.randn(2, 2)
    assert torch.equal(traced(x, rows), pooled(x, rows))
