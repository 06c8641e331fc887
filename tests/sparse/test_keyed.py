import copy
import pickle

import pytest
import torch

from recsys.sparse import KeyedTensor


@pytest.fixture
def kt() -> KeyedTensor:
    return KeyedTensor(["x", "y", "z"], [1, 2, 1], torch.arange(8.0).view(2, 4))


def test_reads_columns(kt):
    assert kt.keys() == ["x", "y", "z"]
    assert kt.key_dim() == 1
    assert kt.offset_per_key() == [0, 1, 3, 4]
    assert kt["y"].tolist() == [[1, 2], [5, 6]]
    assert {key: x.tolist() for key, x in kt.to_dict().items()} == {
        "x": [[0], [4]],
        "y": [[1, 2], [5, 6]],
        "z": [[3], [7]],
    }
    assert kt.size_in_bytes() == 32
    assert kt.to("meta").device().type == "meta"


def test_other_key_dims():
    kt = KeyedTensor(["x", "y"], [1, 2], torch.arange(6).view(3, 2), key_dim=0)
    assert kt["y"].tolist() == [[2, 3], [4, 5]]
    last = KeyedTensor(["x", "y"], [1, 2], torch.arange(3), key_dim=-1)
    assert last["y"].tolist() == [1, 2]


def test_from_tensor_list(kt):
    columns = list(kt.to_dict().values())
    built = KeyedTensor.from_tensor_list(kt.keys(), columns)
    assert torch.equal(built.values(), kt.values())
    assert built.length_per_key() == [1, 2, 1]


def test_regroup(kt):
    other = KeyedTensor(["w", "v"], [1, 1], torch.tensor([[9.0, 8.0], [9.0, 8.0]]))
    groups = [["w", "x", "y"], ["z"], ["y", "x"], ["x", "v"]]
    first, second, third, fourth = KeyedTensor.regroup([kt, other], groups)
    assert first.tolist() == [[9, 0, 1, 2], [9, 4, 5, 6]]
    assert second.tolist() == [[3], [7]]
    assert third.tolist() == [[1, 2, 0], [5, 6, 4]]
    assert fourth.tolist() == [[0, 8], [4, 8]]
    named = KeyedTensor.regroup_as_dict([kt, other], groups, ["p", "q", "r", "s"])
    assert torch.equal(named["p"], first)
    assert list(named) == ["p", "q", "r", "s"]


def test_regroup_is_differentiable(kt):
    values = kt.values().clone().requires_grad_()
    source = KeyedTensor(kt.keys(), kt.length_per_key(), values)
    (first, second) = KeyedTensor.regroup([source], [["y", "x"], ["x"]])
    (first.sum() + 10 * second.sum()).backward()
    assert values.grad.tolist() == [[11, 1, 1, 0]] * 2


def test_regroup_of_nothing_names_the_argument(kt):
    with pytest.raises(ValueError, match=r"keyed_tensors must .*received none.*\[\['x'\]\]"):
        KeyedTensor.regroup([], [["x"]])
    for wrong in (None, kt, [None], [torch.ones(2, 2)]):
        with pytest.raises(TypeError, match=r"keyed_tensors.* must be a .*KeyedTensor"):
            KeyedTensor.regroup(wrong, [["x"]])
    for wrong in (None, ["x"], [None]):
        with pytest.raises(TypeError, match=r"groups.* must be .*; received"):
            KeyedTensor.regroup([kt], wrong)
    assert KeyedTensor.regroup([kt], []) == []


def test_known_numbers_that_do_not_fit_are_refused():
    parts = ["x", "y"], [1, 2], torch.ones(2, 3)
    with pytest.raises(
        ValueError, match=r"KeyedTensor.offset_per_key must .*\[0, 1, 3\]; received"
    ):
        KeyedTensor(*parts, offset_per_key=[0, 2, 3])
    with pytest.raises(ValueError, match=r"index_per_key .*received {'x': 1, 'y': 0}"):
        KeyedTensor(*parts, index_per_key={"x": 1, "y": 0})
    kt = KeyedTensor(*parts, offset_per_key=[0, 1, 3], index_per_key={"x": 0, "y": 1})
    assert kt["y"].shape == (2, 2)


def test_regroup_refuses_what_it_would_have_to_guess(kt):
    twin = KeyedTensor(["x"], [1], torch.ones(2, 1))
    with pytest.raises(KeyError, match=r"no source has .*\['q'\]; received"):
        KeyedTensor.regroup([kt], [["q"]])
    with pytest.raises(ValueError, match=r"one source only; received \['x'\]"):
        KeyedTensor.regroup([kt, twin], [["x"]])
    assert len(KeyedTensor.regroup([kt, twin], [["y"]])) == 1
    with pytest.raises(ValueError, match=r"group needs .*received \[\('x',\), \(\)\]"):
        KeyedTensor.regroup([kt], [["x"], []])
    rows = KeyedTensor(["r"], [2], torch.ones(2, 1), key_dim=0)
    with pytest.raises(ValueError, match=r"same key_dim; received \[1, 0\]"):
        KeyedTensor.regroup([kt, rows], [["x"]])
    with pytest.raises(ValueError, match="received 1 keys for 2 groups"):
        KeyedTensor.regroup_as_dict([kt], [["x"], ["y"]], ["only"])


def test_bad_construction():
    values = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"to 2 .*shape \(2, 3\)"):
        KeyedTensor(["x", "y"], [1, 1], values)
    with pytest.raises(ValueError, match="received 1 widths for 2 keys"):
        KeyedTensor(["x", "y"], [3], values)
    with pytest.raises(ValueError, match=r"unique; .*more than once: \['x'\]"):
        KeyedTensor(["x", "x"], [1, 2], values)
    with pytest.raises(ValueError, match="a dimension of values; received 2"):
        KeyedTensor(["x"], [3], values, key_dim=2)
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor; received list"):
        KeyedTensor(["x"], [3], [values])
    with pytest.raises(KeyError, match="no key 'q'; received keys"):
        KeyedTensor(["x"], [3], values)["q"]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_independent(kt, clone):
    twin = clone(kt)
    assert torch.equal(twin.values(), kt.values())
    twin.values().zero_()
    assert kt["y"].tolist() == [[1, 2], [5, 6]]
