import itertools

import numpy as np
import pytest
import torch
from torch import nn

from recsys.modules.deepfm import DeepFM, FactorizationMachine
from tests.formulas import assert_follows, randomise


def embeddings():
    torch.manual_seed(0)
    return torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 2, 3, dtype=torch.float64)


class Listed(nn.Module):
    """Takes as many arguments as the module has embeddings in its list."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *embeddings):
        return self.module(list(embeddings))


def test_factorization_machine_adds_up_all_pairs():
    def formula(state, *arrays):
        rows = []
        for sample in range(5):
            columns = np.concatenate([array[sample].reshape(-1) for array in arrays])
            rows.append([sum(a * b for a, b in itertools.combinations(columns, 2))])
        return np.array(rows)

    assert_follows(Listed(FactorizationMachine()), formula, *embeddings())


def test_deepfm_hands_all_columns_to_the_dense_module():
    def formula(state, *arrays):
        flat = np.concatenate([array.reshape(5, -1) for array in arrays], axis=1)
        return np.tanh(flat @ state["module.dense_module.0.weight"].T)

    deep = Listed(DeepFM(nn.Sequential(nn.Linear(10, 2, bias=False), nn.Tanh())))
    randomise(deep)
    with torch.no_grad():
        deep.module.dense_module[0].weight.mul_(0.1)
    assert_follows(deep, formula, *embeddings())


@pytest.mark.parametrize("module", [DeepFM(nn.Linear(10, 2)), FactorizationMachine()])
def test_script_trace_and_empty_batch(module):
    inputs = [torch.randn(3, 4), torch.randn(3, 2, 3)]
    torch.testing.assert_close(torch.jit.script(module)(inputs), module(inputs))
    assert module([value[:0] for value in inputs]).shape[0] == 0


@pytest.mark.parametrize("module", [DeepFM(nn.Linear(10, 2)), FactorizationMachine()])
@pytest.mark.parametrize("bad", [[], [torch.ones(3)]])
def test_bad_embeddings(module, bad):
    with pytest.raises(ValueError, match=r"least one tensor \[B, ...\]; received"):
        module(bad)
