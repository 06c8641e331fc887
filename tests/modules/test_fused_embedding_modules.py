import copy

import numpy as np
import pytest
import torch

from recsys.kernels.types import EmbeddingLocation
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from recsys.optim import CombinedOptimizer
from recsys.optim.fused import FusedOptimizer
from recsys.sparse import KeyedJaggedTensor

CPU = torch.device("cpu")


def configs(kind):
    return [
        kind(num_embeddings=10 + i, embedding_dim=4, name=f"t{i}", feature_names=[f"f{i}"])
        for i in range(2)
    ]


def pooled(optimizer=torch.optim.Adagrad, **kwargs):
    return FusedEmbeddingBagCollection(
        configs(EmbeddingBagConfig), optimizer, {"lr": 0.5}, **kwargs
    )


def sequence(optimizer=torch.optim.Adagrad, **kwargs):
    return FusedEmbeddingCollection(configs(EmbeddingConfig), optimizer, {"lr": 0.5}, **kwargs)


def batch():
    return KeyedJaggedTensor(
        ["f0", "f1"], torch.tensor([1, 2, 2, 5]), lengths=torch.tensor([1, 2, 0, 1])
    )


def values_of(collection):
    found = collection(batch())
    if isinstance(collection, EmbeddingBagCollection):
        return found.values()
    return torch.cat([jagged.values() for jagged in found.values()])


def adagrad(weight, rows, lr=0.5, eps=1e-10):
    """One step from the gradients of the sum of outputs: as many ones as a row was read."""
    weight = weight.astype(np.float64)
    for row in set(rows):
        grad = float(rows.count(row))
        weight[row] -= lr * grad / (np.sqrt(grad * grad) + eps)
    return weight


@pytest.mark.parametrize(("build", "name"), [(pooled, "embedding_bags"), (sequence, "embeddings")])
def test_tables_update_themselves(build, name):
    collection = build()
    before = {t: w.detach().numpy().copy() for t, w in collection.table_weights().items()}
    values_of(collection).sum().backward()
    after = collection.table_weights()
    for table, rows in {"t0": [1, 2, 2], "t1": [5]}.items():
        np.testing.assert_allclose(after[table].detach(), adagrad(before[table], rows), rtol=1e-6)
        assert after[table].grad is None
    optimizer = collection.fused_optimizer()
    assert list(optimizer.params) == [f"{name}.t0.weight", f"{name}.t1.weight"]
    state = optimizer.state_dict()["state"]
    np.testing.assert_allclose(state[f"{name}.t0.weight"]["sum"][:3, 0], [0, 1, 4])
    assert collection.optimizer_type() is torch.optim.Adagrad
    assert collection.optimizer_kwargs() == {"lr": 0.5}


def test_a_rate_that_is_set_is_that_of_the_next_update():
    collection = pooled(torch.optim.SGD)
    optimizer = CombinedOptimizer([("ebc", collection.fused_optimizer())])
    optimizer.param_groups[0]["lr"] = 0.25
    before = collection.table_weights()["t0"].detach().clone()
    values_of(collection).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    change = collection.table_weights()["t0"].detach() - before
    torch.testing.assert_close(change[1], torch.full((4,), -0.25))
    assert collection.fused_optimizer().param_groups[0]["lr"] == 0.25
    with pytest.raises(ValueError, match=r"'weight_decay' of tables .* received 1"):
        optimizer.param_groups[0]["weight_decay"] = 1
    optimizer.param_groups[0].update(lr=0.125)
    assert collection.fused_optimizer().param_groups[0]["lr"] == 0.125
    with pytest.raises(ValueError, match=r"'weight_decay' of tables .* received 2"):
        optimizer.param_groups[0].update(weight_decay=2)
    with pytest.raises(ValueError, match=r"learning rate of tables must .*-1"):
        optimizer.param_groups[0]["lr"] = -1.0
    assert isinstance(collection.fused_optimizer(), FusedOptimizer)


@pytest.mark.parametrize("build", [pooled, sequence])
def test_state_moves_from_one_to_another(build):
    trained, other = build(), build()
    values_of(trained).sum().backward()
    other.load_state_dict(trained.state_dict())
    other.fused_optimizer().load_state_dict(trained.fused_optimizer().state_dict())
    for collection in (trained, other, copy.deepcopy(trained)):
        values_of(collection).sum().backward()
        for name, value in trained.state_dict().items():
            torch.testing.assert_close(collection.state_dict()[name], value)


@pytest.mark.parametrize("build", [pooled, sequence])
def test_what_tables_do_not_know(build):
    with pytest.raises(ValueError, match=r"received torch\.optim\.rmsprop\.RMSprop"):
        build(torch.optim.RMSprop)
    with pytest.raises(ValueError, match=r"location must be .*received MANAGED\."):
        build(location=EmbeddingLocation.MANAGED)
    assert build(location=EmbeddingLocation.HOST).device == CPU
