import numpy as np
import pytest

from recsys.modules.ctr.dcn_v2 import DCNV2
from tests.modules.ctr.cases import (
    DENSE,
    assert_model_follows,
    assert_trains,
    collection,
    linear,
    mlp,
)

COLUMNS = DENSE + 9


def crossed(state, x, low_rank):
    found = x
    for layer in range(2):
        if low_rank:
            wide = state[f"model.cross.W_kernels.{layer}"]
            narrow = state[f"model.cross.V_kernels.{layer}"]
            matrix, bias = wide @ narrow, state[f"model.cross.bias.{layer}"]
        else:
            matrix = state[f"model.cross.kernels.{layer}"]
            bias = state[f"model.cross.bias.{layer}"].T
        found = x * (found @ matrix.T + bias) + found
    return found


@pytest.mark.parametrize("low_rank", [None, 2])
@pytest.mark.parametrize("structure", ["parallel", "stacked"])
@pytest.mark.parametrize("layers", [[], [4, 3]])
def test_against_the_formula(structure, low_rank, layers):
    def formula(state, x):
        cross = crossed(state, x, low_rank)
        deep = mlp(state, "model.deep", x if structure == "parallel" else cross, len(layers))
        both = [cross, deep] if structure == "parallel" and layers else [deep if layers else cross]
        return linear(state, "model.out", np.concatenate(both, 1))

    model = DCNV2(
        collection(), DENSE, 2, layers, structure=structure, low_rank=low_rank, num_tasks=2
    )
    assert_model_follows(model, formula, COLUMNS)


@pytest.mark.parametrize("structure", ["parallel", "stacked"])
def test_the_whole_model(structure):
    assert_trains(DCNV2(collection((3, 2, 4)), DENSE, 2, [8, 4], structure=structure))


def test_errors():
    with pytest.raises(ValueError, match="'parallel' or 'stacked'; received 'both'"):
        DCNV2(collection(), DENSE, structure="both")
    with pytest.raises(ValueError, match="num_tasks"):
        DCNV2(collection(), DENSE, num_tasks=0)
