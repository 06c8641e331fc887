from hypothesis import given

from recsys.sparse import ops
from tests.sparse.ops.cases import cases


@given(cases())
def test_bags_and_positions(case):
    x, bags = case
    assert ops.bags_of(x).tolist() == [i for i, bag in enumerate(bags) for _ in bag]
    places = ops.positions(x)
    assert places.values().tolist() == [place for bag in bags for place in range(len(bag))]
    assert places.lengths().tolist() == [len(bag) for bag in bags]
    backwards = ops.positions(x, from_end=True).values().tolist()
    assert backwards == [len(bag) - 1 - place for bag in bags for place in range(len(bag))]
