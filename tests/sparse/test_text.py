import torch

from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor


def test_jagged():
    jt = JaggedTensor(torch.tensor([1, 2, 3]), torch.tensor([0.5, 1.0, 2.0]), torch.tensor([2, 1]))
    assert repr(jt) == (
        "JaggedTensor(2 bags, 3 values, weighted, int64, cpu)\n"
        "    [[1, 2], [3]]\n"
        "    weights [[0.5, 1], [2]]"
    )
    rows = JaggedTensor(torch.ones(1, 2), lengths=torch.tensor([0, 1]))
    assert repr(rows).endswith("[[], [[1, 1]]]")


def test_keyed_jagged():
    kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1, 0]))
    assert repr(kjt) == (
        "KeyedJaggedTensor(2 keys, stride 2, 3 values, int64, cpu)\n"
        '    "a":\n'
        "        [[1, 2], []]\n"
        '    "b":\n'
        "        [[3], []]"
    )
    variable = KeyedJaggedTensor(
        ["a", "b"], torch.ones(2), lengths=torch.tensor([1, 1, 0]), stride_per_key=[2, 1]
    )
    assert "stride [2, 1]" in repr(variable)


def test_keyed():
    kt = KeyedTensor(["x", "y"], [1, 2], torch.arange(6.0).view(2, 3).requires_grad_())
    assert repr(kt) == (
        'KeyedTensor(2 keys, shape (2, 3), float32, cpu)\n    "x": [[0], [3]]\n'
        '    "y": [[1, 2], [4, 5]]'
    )
    assert repr(kt.to("meta")) == "KeyedTensor(2 keys, shape (2, 3), float32, meta)"


def test_large_ones_are_cut():
    keys = [f"f{i}" for i in range(100)]
    kjt = KeyedJaggedTensor(keys, torch.arange(2000), lengths=torch.full((2000,), 1))
    assert repr(kjt).endswith(
        '    "f7":\n        [[140], [141], [142], [143], [144], [145], [146], [147], ...]\n    ...'
    )
    kt = KeyedTensor(keys, [20] * 100, torch.zeros(50, 2000))
    assert repr(kt).count("\n") == 9


def test_a_broken_one_can_still_be_printed():
    kjt = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1]))
    assert "invalid: KeyedJaggedTensor.lengths must add up" in repr(kjt)
    assert repr(JaggedTensor(torch.arange(1), lengths=torch.tensor([2]))).endswith("[[0]]")
