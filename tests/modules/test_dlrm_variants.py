import numpy as np
import pytest
import torch
from torch import nn

from recsys.datasets.random import RandomRecDataset
from recsys.modules.crossnet import LowRankCrossNet
from recsys.modules.dlrm import DLRM, DLRMTrain, InteractionArch, OverArch
from recsys.modules.dlrm_variants import DLRM_DCN, InteractionDCNArch
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from tests.formulas import assert_follows, randomise

FEATURES = ["user", "film", "genre"]
DIM = 4


def collection():
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"{feature}s", embedding_dim=DIM, num_embeddings=20, feature_names=[feature]
            )
            for feature in FEATURES
        ]
    )


def dcn(tables, dense=5, **more):
    return DLRM_DCN(tables, dense, [8, DIM], [8, 1], dcn_num_layers=2, dcn_low_rank_dim=3, **more)


def random_batch(size=6):
    (batch,) = RandomRecDataset(
        FEATURES, size, hash_size=20, ids_per_feature=3, min_ids_per_feature=0, num_dense=5,
        manual_seed=0, num_batches=1,
    )  # fmt: skip
    return batch


def mlp(state, prefix, x):
    """Layers of `MLP`, by their names; relu after each."""
    layer = 0
    while f"{prefix}._mlp.{layer}._linear.weight" in state:
        of = f"{prefix}._mlp.{layer}._linear."
        x = np.maximum(x @ state[of + "weight"].T + state[of + "bias"], 0)
        layer += 1
    return x


def crossed(state, prefix, x0):
    x = x0
    for layer in range(2):
        wide, narrow = (state[f"{prefix}.{kind}_kernels.{layer}"] for kind in "WV")
        x = x0 * (wide @ (narrow @ x) + state[f"{prefix}.bias.{layer}"]) + x
    return x


def formula_of(interact):
    """The whole model, one sample at a time."""

    def formula(state, dense_features, ids):
        logits = []
        for row in range(len(dense_features)):
            dense = mlp(state, "dense_arch.model", dense_features[row])
            vectors = [dense]
            for feature in FEATURES:
                name = f"sparse_arch.embedding_bag_collection.embedding_bags.{feature}s.weight"
                vectors.append(state[name][ids[feature].to_dense()[row].numpy()].sum(0))
            hidden = mlp(
                state, "over_arch.model.0", interact(state, np.concatenate(vectors), dense)
            )
            logits.append(state["over_arch.model.1.weight"] @ hidden)
        return np.stack(logits) + state["over_arch.model.1.bias"]

    return formula


DCN = formula_of(lambda state, flat, dense: crossed(state, "inter_arch.crossnet", flat))
models = pytest.mark.parametrize("build", [dcn])


@pytest.mark.parametrize(("build", "formula"), [(dcn, DCN)])
def test_follows_the_formula(build, formula):
    torch.manual_seed(0)
    model, batch = build(collection()), random_batch()
    for part in (model.dense_arch, model.inter_arch, model.over_arch):
        randomise(part)
    with torch.no_grad():
        for weight in model.sparse_arch.parameters():  # their sums are exact in fp32
            weight.copy_(torch.randint(-64, 65, weight.shape) / 64)
    tables = {name: p for name, p in model.named_parameters() if name.startswith("sparse_arch")}

    class InDouble(nn.Module):
        """Tables stay fp32; their outputs are widened."""

        def __init__(self):
            super().__init__()
            self.model = model

        def state_dict(self):
            return {name: value.double() for name, value in self.model.state_dict().items()}

        def named_parameters(self):
            return ((n, p) for n, p in self.model.named_parameters() if n not in tables)

        def forward(self, dense, ids):
            embedded = self.model.sparse_arch(ids).double()
            return self.model.over_arch(
                self.model.inter_arch(self.model.dense_arch(dense), embedded)
            )

    assert_follows(
        InDouble(), formula, batch.dense_features.double(), fixed=[batch.sparse_features]
    )


def test_state_dict_names_are_those_of_torchrec():
    names = [name for name in dcn(collection()).state_dict() if name.startswith("inter_arch")]
    assert names == [f"inter_arch.crossnet.{kind}_kernels.{i}" for kind in "WV" for i in (0, 1)] + [
        "inter_arch.crossnet.bias.0",
        "inter_arch.crossnet.bias.1",
    ]


@models
def test_trains_an_empty_batch(build):
    train = DLRMTrain(build(collection()))
    loss, _ = train(random_batch(0))
    assert loss == 0
    loss.backward()


@models
def test_without_sparse_or_dense_features(build):
    dense = torch.randn(6, 5)
    model = build(None)
    torch.testing.assert_close(
        model(dense, None), model.over_arch(model.dense_arch(dense)), rtol=0, atol=0
    )
    assert build(collection(), dense=0)(
        torch.zeros(6, 0), random_batch().sparse_features
    ).shape == (
        6,
        1,
    )


@pytest.mark.parametrize(("build", "parts"), [(dcn, {"dense_arch", "over_arch"})])
def test_dropout_and_batch_norm_reach_all_parts(build, parts):
    model = build(collection(), batch_norm=True, dropout=0.5)
    names = [name for name, child in model.named_modules() if isinstance(child, nn.BatchNorm1d)]
    assert {name.partition(".")[0] for name in names} == parts
    assert all(p.device.type == "meta" for p in build(None, dense_device="meta").parameters())


@pytest.mark.parametrize("arch", [InteractionDCNArch(2, LowRankCrossNet(12, 2))])
def test_interactions_script_and_trace(arch):
    inputs = torch.randn(3, 4), torch.randn(3, 2, 4)
    torch.testing.assert_close(torch.jit.script(arch)(*inputs), arch(*inputs))
    torch.testing.assert_close(torch.fx.symbolic_trace(arch)(*inputs), arch(*inputs))


def test_a_negative_number_of_features():
    with pytest.raises(ValueError, match="num_sparse_features must not be negative"):
        InteractionDCNArch(-1, nn.Identity())


@models
def test_no_part_is_made_in_vain(build, monkeypatch):
    made = []

    def init(self, *args, **kwargs):
        made.append(type(self).__name__)
        return original(self, *args, **kwargs)

    original = OverArch.__init__
    monkeypatch.setattr(OverArch, "__init__", init)
    monkeypatch.setattr(InteractionArch, "__init__", lambda *_: pytest.fail("made in vain"))
    model = build(collection())
    assert made == ["OverArch"]
    assert isinstance(model, DLRM)
