from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recsys.datasets.random import RandomRecDataset
from recsys.datasets.utils import Batch
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.modules.dlrm import (
    DLRM,
    DenseArch,
    DLRMTrain,
    InteractionArch,
    OverArch,
    SparseArch,
)
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.losses import mean_loss

FEATURES = ["user", "film", "genre"]
DIM = 4


def collection(dims=(DIM, DIM, DIM)):
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"{feature}s", embedding_dim=dim, num_embeddings=20, feature_names=[feature]
            )
            for feature, dim in zip(FEATURES, dims, strict=True)
        ]
    )


def model():
    torch.manual_seed(0)
    return DLRM(
        collection(), dense_in_features=5, dense_arch_layer_sizes=[8, DIM],
        over_arch_layer_sizes=[8, 1],
    )  # fmt: skip


def random_batch(size=6):
    (batch,) = RandomRecDataset(
        FEATURES, size, hash_size=20, ids_per_feature=3, min_ids_per_feature=0, num_dense=5,
        manual_seed=0, num_batches=1,
    )  # fmt: skip
    return batch


def naive(dlrm, batch):
    """One sample and one pair at a time, as the paper writes it."""
    weights = {
        name.split(".")[-2]: parameter
        for name, parameter in dlrm.named_parameters()
        if name.startswith("sparse_arch")
    }
    logits = []
    for row in range(len(batch.labels)):
        dense = dlrm.dense_arch.model(batch.dense_features[row])
        vectors = [dense]
        for feature in FEATURES:
            ids = batch.sparse_features[feature].to_dense()[row]
            vectors.append(weights[f"{feature}s"][ids].sum(0))
        pairs = [
            vectors[first] @ vectors[second]
            for first in range(len(vectors))
            for second in range(first + 1, len(vectors))
        ]
        logits.append(dlrm.over_arch.model(torch.cat([dense, torch.stack(pairs)])))
    return torch.stack(logits)


def test_equals_the_formula():
    dlrm, batch = model(), random_batch()
    found = dlrm(batch.dense_features, batch.sparse_features)
    assert found.shape == (6, 1)
    torch.testing.assert_close(found, naive(dlrm, batch))


def test_gradients_equal_the_formula():
    dlrm, batch = model(), random_batch()
    dense = list(dlrm.dense_arch.parameters()) + list(dlrm.over_arch.parameters())
    found = torch.autograd.grad(
        dlrm(batch.dense_features, batch.sparse_features).square().sum(), dense
    )
    expected = torch.autograd.grad(naive(dlrm, batch).square().sum(), dense)
    torch.testing.assert_close(found, expected)


def test_state_dict_names_are_those_of_torchrec():
    assert list(model().state_dict()) == [
        "sparse_arch.embedding_bag_collection.embedding_bags.users.weight",
        "sparse_arch.embedding_bag_collection.embedding_bags.films.weight",
        "sparse_arch.embedding_bag_collection.embedding_bags.genres.weight",
        "dense_arch.model._mlp.0._linear.weight",
        "dense_arch.model._mlp.0._linear.bias",
        "dense_arch.model._mlp.1._linear.weight",
        "dense_arch.model._mlp.1._linear.bias",
        "over_arch.model.0._mlp.0._linear.weight",
        "over_arch.model.0._mlp.0._linear.bias",
        "over_arch.model.1.weight",
        "over_arch.model.1.bias",
    ]


def test_train_gives_loss_and_detached_results():
    train, batch = DLRMTrain(model()), random_batch()
    loss, (same_loss, logits, labels) = train(batch)
    expected = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.float())
    torch.testing.assert_close(loss, expected)
    assert torch.equal(same_loss, loss)
    assert torch.equal(labels, batch.labels)
    assert not (same_loss.requires_grad)
    assert not (logits.requires_grad)
    assert logits.shape == (6,)
    loss.backward()
    assert all(parameter.grad is not None for parameter in train.model.over_arch.parameters())


def test_an_empty_batch_has_loss_zero_that_carries_gradient():
    train = DLRMTrain(model())
    loss, (_, logits, _) = train(random_batch(size=0))
    assert loss == 0
    assert logits.shape == (0,)
    loss.backward()
    for parameter in train.model.dense_arch.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_a_wrong_number_of_labels_is_an_error():
    batch = random_batch()
    short = Batch(batch.dense_features, batch.sparse_features, batch.labels[:5])
    with pytest.raises(ValueError, match=r"received labels \[5\] and logits \[6\]"):
        DLRMTrain(model())(short)


def test_sample_weights_multiply_the_losses():
    train, batch = DLRMTrain(model()), random_batch()
    weights = torch.tensor([0.0, 0.5, 1.0, 1.0, 2.0, 3.0])
    weighted = replace(batch, sample_weights=weights)
    loss, (_, logits, labels) = train(weighted)
    per_sample = nn.functional.softplus(logits.double()) - labels * logits.double()
    torch.testing.assert_close(loss.double(), (weights * per_sample).sum() / 6)
    halves = [mean_loss(logits[of], labels[of], weights[of]) for of in (slice(3), slice(3, 6))]
    torch.testing.assert_close(sum(halves) / 2, loss)  # as on two ranks
    with pytest.raises(ValueError, match=r"received weights \[5\] and logits \[6\]"):
        train(replace(batch, sample_weights=weights[:5]))


def test_missing_labels_have_the_loss_zero():
    batch = replace(random_batch(), label_mask=torch.tensor([True] * 4 + [False] * 2))
    loss, (_, logits, labels) = DLRMTrain(model())(batch)
    torch.testing.assert_close(loss, mean_loss(logits[:4], labels[:4]) * 4 / 6)


def test_it_learns():
    torch.manual_seed(0)
    train, batch = DLRMTrain(model()), random_batch(64)
    optimizer = torch.optim.Adam(train.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        loss, _ = train(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_features_of_one_table():
    films = EmbeddingBagConfig(
        name="films", embedding_dim=DIM, num_embeddings=20, feature_names=["film", "genre"]
    )
    arch = SparseArch(EmbeddingBagCollection(tables=[films]))
    assert arch.sparse_feature_names == ["film", "genre"]
    assert arch(random_batch().sparse_features).shape == (6, 2, DIM)


@pytest.mark.parametrize("sizes", [[8, 5], [8], []])
def test_dense_layer_of_another_size_than_the_embeddings(sizes):
    expected = "dense_arch_layer_sizes must be .*embedding_dim 4"
    with pytest.raises(ValueError, match=expected):
        DLRM(collection(), 5, sizes, [8, 1])


def test_tables_of_different_dims():
    with pytest.raises(ValueError, match=r"all of one embedding_dim.*'films': 8"):
        SparseArch(collection(dims=(4, 8, 4)))


def test_no_over_layers():
    with pytest.raises(ValueError, match=r"over_arch_layer_sizes must have .*received \[\]"):
        OverArch(7, [])
    assert OverArch(7, [1])(torch.ones(2, 7)).shape == (2, 1)


# torch's own warning, about the __init__ of every traced module that is scripted.
@pytest.mark.filterwarnings("ignore:The TorchScript type system:UserWarning")
@pytest.mark.parametrize(
    ("arch", "inputs"),
    [
        (DenseArch(5, [8, 4]), (torch.randn(3, 5),)),
        (InteractionArch(2), (torch.randn(3, 4), torch.randn(3, 2, 4))),
        (OverArch(7, [8, 1]), (torch.randn(3, 7),)),
    ],
)
def test_dense_parts_script_trace_and_compile(arch, inputs):
    expected = arch(*inputs)
    torch.testing.assert_close(torch.jit.script(arch)(*inputs), expected)
    torch.testing.assert_close(torch.jit.script(torch.fx.symbolic_trace(arch))(*inputs), expected)
    torch.testing.assert_close(torch.export.export(arch, inputs).module()(*inputs), expected)


def test_interaction_has_no_state_and_survives_meta():
    arch = InteractionArch(3, device=torch.device("meta"))
    assert arch.state_dict() == {}
    arch.to_empty(device="cpu")
    arch.positions_P.fill_(-7)
    arch.reset_parameters()
    dense, sparse = torch.randn(2, 4), torch.randn(2, 3, 4)
    torch.testing.assert_close(arch(dense, sparse), InteractionArch(3)(dense, sparse))
    assert InteractionArch(0)(dense, sparse[:, :0]) is dense
    with pytest.raises(ValueError, match=r"num_sparse_features must not be negative.*-1"):
        InteractionArch(-1)


def test_without_sparse_features():
    dlrm = DLRM(None, 5, [8, 4], [8, 1])
    assert not any(name.startswith("sparse_arch") for name in dlrm.state_dict())
    dense = torch.randn(6, 5)
    expected = dlrm.over_arch.model(dlrm.dense_arch.model(dense))
    torch.testing.assert_close(dlrm(dense, random_batch().sparse_features), expected)
    torch.testing.assert_close(dlrm(dense, None), expected)


def test_without_dense_features():
    torch.manual_seed(0)
    dlrm, batch = DLRM(collection(), 0, [8, DIM], [8, 1]), random_batch()
    dense = torch.zeros(6, 0)
    found = dlrm(dense, batch.sparse_features)
    naive_batch = Batch(dense, batch.sparse_features, batch.labels)
    torch.testing.assert_close(found, naive(dlrm, naive_batch))
    found.square().sum().backward()
    assert dlrm.dense_arch.model._mlp[0]._linear.bias.grad.abs().sum() > 0


def test_batch_norm_and_dropout_reach_all_layers_but_the_logit():
    dlrm = DLRM(collection(), 5, [8, DIM], [8, 1], batch_norm=True, dropout=0.5)
    norms = [name for name, child in dlrm.named_modules() if isinstance(child, nn.BatchNorm1d)]
    assert norms == [
        "dense_arch.model._mlp.0._norm",
        "dense_arch.model._mlp.1._norm",
        "over_arch.model.0._mlp.0._norm",
    ]
    assert sum(isinstance(child, nn.Dropout) for child in dlrm.modules()) == 3
    batch = random_batch()
    torch.testing.assert_close(
        *(dlrm.eval()(batch.dense_features, batch.sparse_features) for _ in range(2))
    )


def test_all_but_the_lookup_is_compiled(monkeypatch):
    compiled = []

    def note(function, mode):
        def call(*inputs):
            compiled.append((type(function.__self__), mode))
            return function(*inputs)

        return call

    dlrm, batch = model(), random_batch()
    names = list(dlrm.state_dict())
    expected = dlrm(batch.dense_features, batch.sparse_features)
    monkeypatch.setattr(torch, "compile", note)
    dlrm.compile_dense_path("default")
    torch.testing.assert_close(dlrm(batch.dense_features, batch.sparse_features), expected)
    assert compiled == [(kind, "default") for kind in (DenseArch, InteractionArch, OverArch)]
    assert list(dlrm.state_dict()) == names


def _trains_with_batch_norm_on_ranks():
    rank = dist.get_rank()
    torch.manual_seed(0)
    unsharded = DLRM(collection(), 5, [8, DIM], [8, 1], batch_norm=True, dropout=0.1)
    names = list(unsharded.state_dict())
    before = unsharded.dense_arch.model._mlp[0]._norm.running_mean.clone()
    train = DistributedModelParallel(DLRMTrain(unsharded), device=torch.device("cpu"))
    for step in range(2):
        batch = random_batch(6 + rank + step)
        loss, _ = train(batch)
        loss.backward()
    assert [name.removeprefix("model.") for name in train.state_dict()] == names
    weights = [parameter.grad for parameter in train.module.model.over_arch.parameters()]
    gathered = [None, None]
    dist.all_gather_object(gathered, weights)
    for mine, theirs in zip(*gathered, strict=True):
        torch.testing.assert_close(mine, theirs)
    after = train.module.model.dense_arch.model._mlp[0]._norm.running_mean
    assert not torch.equal(after, before)


def test_trains_with_batch_norm_on_ranks(ranks):
    ranks(2, _trains_with_batch_norm_on_ranks)
