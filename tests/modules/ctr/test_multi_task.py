import numpy as np
import pytest
import torch

from recsys.datasets.utils import Batch
from recsys.modules.ctr.multi_task import PLE, MMoE, MultiTask
from recsys.modules.dlrm import DLRMTrain
from tests.formulas import assert_follows, randomise
from tests.modules.ctr.cases import (
    DENSE,
    SIZE,
    assert_trains,
    batch,
    collection,
    linear,
    mlp,
    sigmoid,
    softmax,
)

TASKS, COLUMNS = 3, 5


def mixed(state, gate, x, experts):
    shares = softmax(linear(state, gate, x))
    return sum(shares[:, i : i + 1] * expert for i, expert in enumerate(experts))


def tower(state, task, x, layers):
    return linear(state, f"towers.{task}.1", mlp(state, f"towers.{task}.0", x, layers))


def mmoe(state, x):
    experts = [mlp(state, f"experts.{i}", x, 2) for i in range(4)]
    logits = [tower(state, t, mixed(state, f"gates.{t}", x, experts), 1) for t in range(TASKS)]
    return np.concatenate(logits, 1)


def ple(state, x):
    inputs = [x] * (TASKS + 1)
    for layer in range(2):
        own = [
            [
                mlp(state, f"experts.{layer}.{group}.{i}", one, 1)
                for i in range(1 + (group == TASKS))
            ]
            for group, one in enumerate(inputs)
        ]
        gates = [own[t] + own[TASKS] for t in range(TASKS)] + [[e for group in own for e in group]]
        count = TASKS + 1 if layer == 0 else TASKS
        inputs = [mixed(state, f"gates.{layer}.{g}", inputs[g], gates[g]) for g in range(count)]
    return np.concatenate([tower(state, t, inputs[t], 0) for t in range(TASKS)], 1)


@pytest.mark.parametrize(
    ("model", "formula"),
    [
        (lambda: MMoE(COLUMNS, TASKS, 4, [4, 3], [2]), mmoe),
        (lambda: PLE(COLUMNS, TASKS, 2, 2, 1, [3], []), ple),
    ],
)
def test_against_the_formula(model, formula):
    torch.manual_seed(0)
    module = model()
    randomise(module)
    assert_follows(module, formula, torch.randn(SIZE, COLUMNS, dtype=torch.float64))


@pytest.mark.parametrize("kind", [MMoE, PLE])
def test_the_whole_model(kind):
    tasks = kind(DENSE + 9, 2, expert_sizes=[8, 4], tower_sizes=[4])
    assert_trains(MultiTask(collection(), DENSE, tasks), num_tasks=2)


def test_loss_and_gradients_of_several_tasks():
    """The loss is the mean cross entropy of all tasks; its gradient by a logit is known."""
    torch.manual_seed(0)
    model = MultiTask(collection(), DENSE, MMoE(DENSE + 9, 2, 3, [4], [])).double()
    dense, ids = torch.randn(SIZE, DENSE, dtype=torch.float64), batch()
    labels = torch.randint(0, 2, (SIZE, 2)).double()
    loss, (_, logits, _) = DLRMTrain(model)(Batch(dense, ids, labels))
    x, y = logits.numpy(), labels.numpy()
    expected = -(y * np.log(sigmoid(x)) + (1 - y) * np.log(1 - sigmoid(x))).mean()
    np.testing.assert_allclose(loss.item(), expected, rtol=1e-12)
    loss.backward()
    of_bias = ((sigmoid(x) - y) / (2 * SIZE)).sum(0)
    for task in range(2):
        bias = model.tasks.towers[task][1].bias
        np.testing.assert_allclose(bias.grad.item(), of_bias[task], rtol=1e-9)


def test_errors():
    with pytest.raises(ValueError, match=r"tasks must read 11 columns.*received in_features=4"):
        MultiTask(collection(), DENSE, MMoE(4, 2))
    with pytest.raises(ValueError, match="num_experts"):
        MMoE(4, 2, 0)
    for model in (MMoE, PLE):
        with pytest.raises(ValueError, match=r"expert_sizes must have .*received none"):
            model(4, 2, expert_sizes=[])
