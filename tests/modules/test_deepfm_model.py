import itertools

import numpy as np
import pytest
import torch
from torch import nn

from recsys.datasets.random import RandomRecDataset
from recsys.modules.deepfm_model import FMInteractionArch, SimpleDeepFMNN
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedTensor
from tests.formulas import assert_follows, randomise

FEATURES = ["user", "film", "genre"]
DIM = 4


def model(dims=(DIM, DIM, DIM)):
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"{feature}s", embedding_dim=dim, num_embeddings=20, feature_names=[feature]
            )
            for feature, dim in zip(FEATURES, dims, strict=True)
        ]
    )
    return SimpleDeepFMNN(5, tables, hidden_layer_size=6, deep_fm_dimension=3)


def random_batch(size=6):
    (batch,) = RandomRecDataset(
        FEATURES, size, hash_size=20, ids_per_feature=3, min_ids_per_feature=0, num_dense=5,
        manual_seed=0, num_batches=1,
    )  # fmt: skip
    return batch


def linear(state, name, x):
    return state[f"{name}.weight"] @ x + state[f"{name}.bias"]


def formula(state, dense_BN, sparse_BFD):
    rows = []
    for features, sparse in zip(dense_BN, sparse_BFD, strict=True):
        hidden = np.maximum(linear(state, "dense_arch.model.0", features), 0)
        dense = np.maximum(linear(state, "dense_arch.model.2", hidden), 0)
        columns = np.concatenate([dense, sparse.reshape(-1)])
        deep = np.maximum(linear(state, "inter_arch.deep_fm.dense_module.0", columns), 0)
        pairs = [sum(a * b for a, b in itertools.combinations(columns, 2))]
        logit = linear(state, "over_arch.model.0", np.concatenate([dense, deep, pairs]))
        rows.append(1 / (1 + np.exp(-logit)))
    return np.stack(rows)


class AfterLookup(nn.Module):
    """The model from the pooled embeddings on, all in float64."""

    def __init__(self, whole):
        super().__init__()
        self.dense_arch, self.inter_arch = whole.dense_arch, whole.inter_arch
        self.over_arch = whole.over_arch

    def forward(self, dense, sparse):
        pooled = KeyedTensor(FEATURES, [DIM] * 3, sparse.flatten(1))
        return self.over_arch(self.inter_arch(self.dense_arch(dense), pooled))


def test_follows_the_formula():
    torch.manual_seed(0)
    rest = AfterLookup(model())
    randomise(rest)
    with torch.no_grad():
        rest.over_arch.model[0].weight.mul_(0.02)  # away from where the sigmoid is flat
    inputs = torch.randn(6, 5), torch.randn(6, 3, DIM)
    assert_follows(rest, formula, *(value.double() for value in inputs))


def test_looks_features_up_in_their_order():
    torch.manual_seed(0)
    whole, batch = model(), random_batch()
    weights = whole.sparse_arch.embedding_bag_collection.table_weights()
    sparse = torch.stack(
        [
            torch.stack(
                [weights[f"{f}s"][ids].sum(0) for ids in batch.sparse_features[f].to_dense()]
            )
            for f in FEATURES
        ],
        dim=1,
    )
    state = {name: value.numpy() for name, value in whole.state_dict().items()}
    expected = formula(state, batch.dense_features.numpy(), sparse.detach().numpy())
    found = whole(batch.dense_features, batch.sparse_features)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-5)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in whole.parameters())


def test_state_dict_names_are_those_of_torchrec():
    names = [name for name in model().state_dict() if not name.startswith("sparse_arch")]
    assert names == [
        f"{part}.{kind}"
        for part in (
            "dense_arch.model.0",
            "dense_arch.model.2",
            "inter_arch.deep_fm.dense_module.0",
            "over_arch.model.0",
        )
        for kind in ("weight", "bias")
    ]


def test_empty_batch_and_features_that_are_not_named():
    batch = random_batch(0)
    assert model()(batch.dense_features, batch.sparse_features).shape == (0, 1)
    arch = FMInteractionArch(8, ["film"], 3)
    both = KeyedTensor(["film", "user"], [4, 4], torch.ones(2, 8))
    only = KeyedTensor(["film"], [4], torch.ones(2, 4))
    torch.testing.assert_close(arch(torch.ones(2, 4), both), arch(torch.ones(2, 4), only))


def test_tables_of_different_dims():
    with pytest.raises(ValueError, match=r"all of one embedding_dim.*'films': 8"):
        model(dims=(4, 8, 4))
