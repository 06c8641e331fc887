import numpy as np
import pytest
import torch

from recsys.modules.sequences.hstu import HSTU
from recsys.sparse import JaggedTensor
from tests.formulas import assert_follows, randomise
from tests.modules.sequences.cases import (
    DIM,
    LENGTHS,
    NUM,
    OnRows,
    assert_causal,
    assert_exports,
    assert_names_other_inputs,
    layer_norm,
    linear,
)

MOST, HEADS = 6, 2


def silu(x):
    return x / (1 + np.exp(-x))


def layer(state, name, x, times, first_target):
    projected = silu(linear(state, f"{name}.linear_in", layer_norm(state, f"{name}.norm", x)))
    gates, *parts = np.split(projected, 4, 1)
    read = np.zeros_like(gates)
    width = gates.shape[1] // HEADS
    for head in range(HEADS):
        columns = slice(head * width, (head + 1) * width)
        q, k, v = (part[:, columns] for part in parts)
        for i in range(len(x)):
            for j in range(i + 1):
                if j >= first_target and i != j:
                    continue
                score = q[i] @ k[j] / np.sqrt(width)
                apart = min(i, first_target) - min(j, first_target)
                score += state[f"{name}.position_bias"][head, MOST - 1 + apart]
                if times is not None:
                    bits = abs(int(times[i] - times[j])).bit_length()
                    score += state[f"{name}.time_bias"][head, bits]
                read[i, columns] += silu(score) / MOST * v[j]
    gated = layer_norm(state, f"{name}.output_norm", read) * gates
    return x + linear(state, f"{name}.linear_out", gated)


def formula(state, rows, times=None, num_targets=None):
    found, first = [], 0
    for number, length in enumerate(LENGTHS):
        own = slice(first, first + length)
        first += length
        if not length:
            continue
        first_target = length if num_targets is None else length - int(num_targets[number])
        places = np.minimum(np.arange(length), first_target)
        x = rows[own] * 2.0 + state["encoder.positions.positions.weight"][places]
        for i in range(2):
            of_bag = None if times is None else times[own]
            x = layer(state, f"encoder.layers.{i}", x, of_bag, first_target)
        found.append(layer_norm(state, "encoder.norm", x))
    return np.concatenate(found)


@pytest.mark.parametrize("has_time", [False, True])
@pytest.mark.parametrize("has_targets", [False, True])
def test_against_the_formula(has_time, has_targets):
    torch.manual_seed(0)
    encoder = HSTU(DIM, MOST, num_heads=HEADS, head_dim=3, dropout=0.0, has_time=has_time)
    randomise(encoder)
    times = torch.tensor([5, 9, 100, 3, 7, 2**40, 2**41, 2**41 + 1]) if has_time else None
    targets = torch.tensor([1, 0, 1, 2]) if has_targets else None
    rows = torch.randn(NUM, DIM, dtype=torch.float64)
    assert_follows(OnRows(encoder), formula, rows, fixed=(times, targets))


def test_later_values_and_other_bags_change_nothing():
    assert_causal(HSTU(DIM, MOST, num_heads=HEADS))


def test_candidates_do_not_change_each_other():
    encoder = HSTU(DIM, 8, has_time=True).eval()
    rows, times = torch.randn(7, DIM), torch.randint(0, 1000, (7,))
    swapped = [0, 1, 2, 3, 6, 4, 5]

    def encode(order):
        x = JaggedTensor(rows[order], lengths=torch.tensor([7]))
        return encoder(x, times[order], torch.tensor([3])).values()

    torch.testing.assert_close(encode(swapped), encode([*range(7)])[swapped])


def test_other_inputs_are_named():
    assert_names_other_inputs(HSTU(DIM, MOST, num_heads=HEADS))


def test_export():
    assert_exports(HSTU(DIM, MOST, num_heads=HEADS))


def test_missing_times():
    x = JaggedTensor(torch.randn(2, DIM), lengths=torch.tensor([2]))
    times = torch.tensor([1_700_000_001.0, 1_700_000_031.0])  # equal in float32
    with pytest.raises(ValueError, match=r"times must be .*received float32"):
        HSTU(DIM, MOST, has_time=True)(x, times)
    with pytest.raises(ValueError, match="has_time=True needs times; received None"):
        OnRows(HSTU(DIM, MOST, has_time=True))(torch.randn(NUM, DIM))
