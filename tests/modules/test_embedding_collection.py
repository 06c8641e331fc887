from __future__ import annotations

import pytest
import torch

from recsys.modules.embedding_configs import DataType, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingCollection, EmbeddingCollectionInterface
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.modules.test_embedding_bag_collection import batch

TABLES = [
    EmbeddingConfig(20, 5, "users", feature_names=["user", "friend"]),
    EmbeddingConfig(30, 5, "films", feature_names=["liked", "user"], data_type=DataType.BF16),
    EmbeddingConfig(10, 5, "genres", feature_names=["genre"]),
]


@pytest.mark.parametrize("need_indices", [False, True])
def test_forward_and_gradients_equal_indexing(need_indices: bool) -> None:
    ec = EmbeddingCollection(tables=TABLES, need_indices=need_indices)
    features = batch()
    out = ec(features)
    assert list(out) == ["user@users", "friend", "liked", "user@films", "genre"]
    loss = torch.zeros(())
    for config in TABLES:
        weight = ec.embeddings[config.name].weight.detach().clone().requires_grad_()
        expected_loss = torch.zeros(())
        for feature in config.feature_names:
            name = f"{feature}@{config.name}" if feature == "user" else feature
            jagged = features[feature]
            expected = weight[jagged.values()].float()
            torch.testing.assert_close(out[name].values(), expected)
            assert torch.equal(out[name].lengths(), jagged.lengths())
            if need_indices:
                assert torch.equal(out[name].weights(), jagged.values())
            else:
                assert out[name].weights_or_none() is None
            expected_loss = expected_loss + expected.square().sum()
            loss = loss + out[name].values().square().sum()
        expected_loss.backward()
        config_grad = weight.grad
        ec.zero_grad()
        loss.backward(retain_graph=True)
        torch.testing.assert_close(ec.embeddings[config.name].weight.grad, config_grad)


def test_interface() -> None:
    ec = EmbeddingCollection(tables=TABLES, need_indices=True)
    assert isinstance(ec, EmbeddingCollectionInterface)
    assert ec.embedding_dim() == 5
    assert ec.need_indices()
    assert ec.embedding_configs() == TABLES
    assert ec.embedding_names_by_table() == [
        ["user@users", "friend"],
        ["liked", "user@films"],
        ["genre"],
    ]
    assert list(ec.state_dict()) == [f"embeddings.{c.name}.weight" for c in TABLES]


def test_fused_update_of_sequences() -> None:
    tables = TABLES[:1]
    fused, plain = EmbeddingCollection(tables=tables), EmbeddingCollection(tables=tables)
    plain.load_state_dict(fused.state_dict())
    apply_optimizer_in_backward(torch.optim.Adagrad, fused.parameters(), {"lr": 0.1})
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    for step in range(3):
        features = batch(seed=step)
        for ec in (fused, plain):
            sum(j.values().square().sum() for j in ec(features).values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(fused.embeddings["users"].weight, plain.embeddings["users"].weight)


def test_one_dim_only() -> None:
    tables = [TABLES[0], EmbeddingConfig(4, 6, "wide", feature_names=["f"])]
    with pytest.raises(ValueError, match=r"received {'users': 5, 'wide': 6}"):
        EmbeddingCollection(tables=tables)


def test_a_bad_id_is_named() -> None:
    ec = EmbeddingCollection(tables=TABLES[:1])
    features = KeyedJaggedTensor(
        keys=["user", "friend"], values=torch.tensor([1, 20]), lengths=torch.tensor([1, 1])
    )
    with pytest.raises(IndexError, match=r"Id 20 .*'friend'.* 'users' has 20"):
        ec(features)


@pytest.mark.parametrize("need_indices", [False, True])
def test_on_meta_the_output_has_its_shapes(need_indices: bool) -> None:
    meta = torch.device("meta")
    ec = EmbeddingCollection(tables=TABLES, device=meta, need_indices=need_indices)
    features = batch()
    expected = EmbeddingCollection(tables=TABLES, need_indices=need_indices)(features)
    features.length_per_key()  # known: it moves along
    found = ec(features.to(meta))
    assert list(found) == list(expected)
    for name, jagged in found.items():
        assert jagged.values().is_meta
        assert jagged.values().shape == expected[name].values().shape
        assert jagged.lengths().shape == expected[name].lengths().shape
        assert (jagged.weights_or_none() is not None) == need_indices
    with pytest.raises(ValueError, match=r"tables on meta; .*on cpu"):
        ec(features)


def test_on_meta_unknown_numbers_of_ids_are_equal_shares() -> None:
    meta = torch.device("meta")
    ec = EmbeddingCollection(
        tables=[EmbeddingConfig(9, 4, "t", feature_names=["a", "b"])], device=meta
    )
    ids = torch.empty(5, dtype=torch.int64, device=meta)
    lengths = torch.empty(4, dtype=torch.int64, device=meta)
    found = ec(KeyedJaggedTensor(["a", "b"], ids, lengths=lengths))
    assert [found[name].values().shape for name in "ab"] == [(3, 4), (2, 4)]
