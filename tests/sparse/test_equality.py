import pytest
import torch

from recsys.sparse import JaggedTensor, KeyedJaggedTensor, jt_is_equal, kjt_is_equal

IDS, WEIGHTS, LENGTHS = torch.arange(3), torch.ones(3), torch.tensor([1, 2])


def test_jagged():
    jt = JaggedTensor(IDS, WEIGHTS, LENGTHS)
    assert jt_is_equal(jt, JaggedTensor(IDS, WEIGHTS, offsets=torch.tensor([0, 1, 3])))
    assert not jt_is_equal(jt, JaggedTensor(IDS, None, LENGTHS))
    assert not jt_is_equal(jt, JaggedTensor(IDS, WEIGHTS * 2, LENGTHS))
    assert not jt_is_equal(jt, JaggedTensor(IDS + 1, WEIGHTS, LENGTHS))
    assert not jt_is_equal(jt, JaggedTensor(IDS, WEIGHTS, LENGTHS.flip(0)))


@pytest.mark.parametrize(
    "change",
    [
        {"keys": ["b", "a"]},
        {"values": IDS + 1},
        {"weights": None},
        {"weights": WEIGHTS * 2},
        {"lengths": LENGTHS.flip(0)},
        {"stride_per_key_per_rank": [[1, 0], [0, 1]]},
        {"inverse_indices": None},
        {"inverse_indices": (["a", "b"], torch.tensor([[0, 0], [0, 0]]))},
        {"inverse_indices": (["b", "a"], torch.tensor([[0], [0]]))},
    ],
)
def test_keyed_jagged(change):
    parts = {
        "keys": ["a", "b"],
        "values": IDS,
        "weights": WEIGHTS,
        "lengths": LENGTHS,
        "stride_per_key_per_rank": [[1], [1]],
        "inverse_indices": (["a", "b"], torch.tensor([[0], [0]])),
    }
    kjt = KeyedJaggedTensor(**parts)
    assert kjt_is_equal(kjt, KeyedJaggedTensor(**parts))
    assert not kjt_is_equal(kjt, KeyedJaggedTensor(**parts | change))
