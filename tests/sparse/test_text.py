import torch

from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor


def test_jagged():
    jt = JaggedTensor(torch.tensor([1, 2, 3]), torch.tensor([0.5, 1.0, 2.0]), torch.tensor([2, 1]))
    assert repr(jt) == (
        "JaggedTensor(2 bags, 3 values, weighted, int64, cpu)\n"
        "    [[1, 2], [3]]\n"
        "    weights [[0.5, 1.0], [2.0]]"
    )
    rows = JaggedTensor(torch.ones(1, 2), lengths=torch.tensor([0, 1]))
    assert repr(rows).endswith("[[], [[1.0, 1.0]]]")


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
        'KeyedTensor(2 keys, shape (2, 3), float32, cpu)\n    "x": [[0.0], [3.0]]\n'
        '    "y": [[1.0, 2.0], [4.0, 5.0]]'
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


def test_print_shows_the_documented_layout():
    ids, lengths = torch.tensor([5, 7, 1]), torch.tensor([1, 2])
    assert str(JaggedTensor(ids, lengths=lengths)) == "JaggedTensor({\n    [[5], [7, 1]]\n})\n"
    weights = torch.tensor([0.5, 1.0, 2.0])
    assert str(JaggedTensor(ids, weights, lengths)) == (
        'JaggedTensor({\n    "values": [[5], [7, 1]],\n    "weights": [[0.5], [1.0, 2.0]]\n})\n'
    )
    plain = KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([1, 1, 0, 1]))
    assert str(plain) == 'KeyedJaggedTensor({\n    "a": [[5], [7]],\n    "b": [[], [1]]\n})\n'
    weighted = KeyedJaggedTensor(["a"], ids, weights, lengths)
    assert str(weighted) == (
        'KeyedJaggedTensor({\n    "a": {\n        "values": [[5], [7, 1]],\n'
        '        "weights": [[0.5], [1.0, 2.0]]\n    }\n})\n'
    )
    kt = KeyedTensor(["x", "y"], [1, 2], torch.arange(6.0).view(2, 3))
    assert str(kt) == (
        'KeyedTensor({\n    "x": [[0.0], [3.0]],\n    "y": [[1.0, 2.0], [4.0, 5.0]]\n})\n'
    )


def test_print_of_what_is_empty_large_broken_or_not_there():
    assert str(KeyedJaggedTensor([], torch.tensor([]), lengths=torch.tensor([]))) == (
        "KeyedJaggedTensor()\n"
    )
    keys = [f"f{i}" for i in range(100)]
    many = KeyedJaggedTensor(keys, torch.arange(200), lengths=torch.ones(200, dtype=torch.int64))
    assert str(many).endswith('    "f7": [[14], [15]],\n    ...\n})\n')
    broken = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1]))
    assert "invalid: KeyedJaggedTensor.lengths must add up" in str(broken)
    for made in (many, many["f1"], KeyedTensor(["x"], [2], torch.ones(1, 2))):
        assert str(made.to(torch.device("meta"))) == repr(made.to(torch.device("meta")))
