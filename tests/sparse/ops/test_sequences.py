import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.sparse import JaggedTensor, ops
from tests.sparse.ops.cases import cases, dense_gradients, gradients

PLACES = st.integers(-7, 7)


def same(found: JaggedTensor, bags: list[torch.Tensor]) -> None:
    assert found.lengths().tolist() == [len(bag) for bag in bags]
    assert torch.equal(found.values(), torch.cat(bags))
    assert found.offsets()[-1] == len(found.values())


@given(cases(), PLACES, st.none() | PLACES)
def test_slice(case, start, end):
    x, bags = case
    same(ops.slice(x, start, end), [bag[start:end] for bag in bags])


@given(cases(), st.integers(0, 6))
def test_truncate(case, length):
    x, bags = case
    same(ops.truncate(x, length), [bag[max(0, len(bag) - length) :] for bag in bags])
    same(ops.truncate(x, length, keep="left"), [bag[:length] for bag in bags])


@given(cases(), st.integers(0, 6), st.sampled_from(["left", "right"]))
def test_pad(case, length, side):
    x, bags = case

    def padded(bags):
        rows = []
        for bag in bags:
            kept = bag[max(0, len(bag) - length) :]
            fill = torch.full((length - len(kept), 3), -1.0, dtype=torch.float64)
            rows.append(torch.cat([fill, kept] if side == "left" else [kept, fill]))
        return torch.stack(rows)

    assert torch.equal(ops.pad(x, length, -1.0, side), padded(bags))
    found = gradients(x, lambda x: ops.pad(x, length, -1.0, side))
    torch.testing.assert_close(found, dense_gradients(bags, padded))


@given(cases())
def test_flip(case):
    x, bags = case
    same(ops.flip(x), [bag.flip(0) for bag in bags])


@given(cases(least_bags=3), st.data())
def test_concat(case, data):
    x, bags = case
    other = [torch.randn(data.draw(st.integers(0, 3)), 3, dtype=torch.float64) for _ in bags]
    y = JaggedTensor(torch.cat(other), lengths=torch.tensor([len(bag) for bag in other]))
    expected = [torch.cat([b, o, b]) for b, o in zip(bags, other, strict=True)]
    same(ops.concat([x, y, x]), expected)

    def joined(bags):
        return torch.cat([torch.cat([b, o, b]) for b, o in zip(bags, other, strict=True)])

    found = gradients(x, lambda x: ops.concat([x, y, x]))
    torch.testing.assert_close(found, dense_gradients(bags, joined))


@given(cases(), st.data())
def test_select(case, data):
    x, bags = case
    chosen = data.draw(st.lists(st.integers(0, len(bags) - 1), min_size=1, max_size=8))
    same(ops.select(x, torch.tensor(chosen)), [bags[i] for i in chosen])
    index = torch.tensor(chosen)
    dense = dense_gradients(bags, lambda bags: torch.cat([bags[i] for i in chosen]))
    torch.testing.assert_close(gradients(x, lambda x: ops.select(x, index)), dense)


def test_bad_arguments():
    x = JaggedTensor(torch.ones(3), lengths=torch.tensor([2, 1]))
    with pytest.raises(ValueError, match="needs at least one jagged tensor"):
        ops.concat([])
    with pytest.raises(ValueError, match=r"of bags.*received 1 and 2"):
        ops.concat([x, JaggedTensor(torch.ones(1), lengths=torch.tensor([1]))])
    with pytest.raises(ValueError, match=r"keep must be .*or 'right'; .*'both'"):
        ops.truncate(x, 1, keep="both")
    with pytest.raises(TypeError, match="length must be a whole number"):
        ops.pad(x, 1.5)


class Sequence(torch.nn.Module):
    def forward(self, values, lengths):
        x = JaggedTensor(values, lengths=lengths)
        return ops.pad(ops.concat([ops.flip(x), ops.truncate(x, 2)]), 4)


def test_torch_export():
    ids, bags = torch.export.Dim("ids", min=2), torch.export.Dim("bags", min=3)
    given = torch.randn(6, 3), torch.tensor([3, 1, 2])
    shapes = {"values": {0: ids}, "lengths": {0: bags}}
    program = torch.export.export(Sequence(), given, dynamic_shapes=shapes).module()
    other = torch.randn(9, 3), torch.tensor([1, 4, 0, 2, 2])
    assert torch.equal(program(*other), Sequence()(*other))
