"""Predict modules and their factories."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from recsys.compat.inference import (
    BatchingMetadata,
    PredictFactory,
    PredictModule,
    QualNameMetadata,
    quantize_dense,
    quantize_feature,
    trim_torch_package_prefix_from_typename,
)
from recsys.inference import quantize_embeddings
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        films = EmbeddingBagConfig(10, 4, "films", feature_names=["film"])
        self.tables = EmbeddingBagCollection(tables=[films])
        self.dense = nn.Linear(2, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        return self.norm(self.dense(dense)).float() + self.tables(ids).values()


class Predict(PredictModule):
    def predict_forward(self, batch: dict[str, Tensor]) -> Tensor:
        ids = KeyedJaggedTensor(["film"], batch["ids"], lengths=batch["lengths"])
        (dense,) = quantize_feature(self, (batch["dense"],))
        result: Tensor = self.predict_module(dense, ids)
        return result


BATCH = {
    "dense": torch.tensor([[0.5, -1.0], [2.0, 1.0]]),
    "ids": torch.tensor([3, 1, 4]),
    "lengths": torch.tensor([2, 1]),
}


def test_a_call_has_no_gradients_and_the_models_values() -> None:
    model = Model().eval()
    predict = Predict(model, "cpu")
    found = predict(BATCH)
    ids = KeyedJaggedTensor(["film"], BATCH["ids"], lengths=BATCH["lengths"])
    assert torch.equal(found, model(BATCH["dense"], ids))
    assert not found.requires_grad
    assert found.is_inference()
    with pytest.raises(TypeError, match="abstract"):
        PredictModule(model)  # type: ignore[abstract]


def test_the_state_dict_is_the_models() -> None:
    model, other = Model(), Model()
    predict = Predict(model)
    assert list(predict.state_dict()) == list(model.state_dict())
    wrapped = nn.ModuleDict({"a": Predict(other)})
    wrapped.load_state_dict({f"a.{name}": v for name, v in predict.state_dict().items()})
    assert torch.equal(other.dense.weight, model.dense.weight)
    del other.dense.bias
    with pytest.raises(RuntimeError, match=r"Unexpected key.*dense\.bias"):
        Predict(other).load_state_dict(model.state_dict())


def test_dense_parts_in_half_precision() -> None:
    predict = Predict(Model().eval())
    before = predict(BATCH)
    assert quantize_dense(predict, torch.float16) is predict
    dtypes = {name: value.dtype for name, value in predict.state_dict().items()}
    assert dtypes["dense.weight"] is dtypes["norm.weight"] is torch.float16
    assert dtypes["norm.running_mean"] is torch.float16
    assert dtypes["tables.embedding_bags.films.weight"] is torch.float32
    torch.testing.assert_close(predict(BATCH), before, atol=5e-3, rtol=0)
    with pytest.raises(ValueError, match=r"torch\.float16; received torch\.int8"):
        quantize_dense(predict, torch.int8)
    kept = quantize_dense(Predict(Model()), torch.float16, [nn.Linear])
    assert kept.state_dict()["dense.weight"].dtype is torch.float32


class Factory(PredictFactory):
    def create_predict_module(self) -> nn.Module:
        return Predict(Model())

    def batching_metadata(self) -> dict[str, BatchingMetadata]:
        return {"dense": BatchingMetadata(type="dense", device="cpu", pinned=["dense"])}

    def result_metadata(self) -> str:
        return "tensor"

    def run_weights_independent_tranformations(self, predict_module: nn.Module) -> nn.Module:
        return quantize_embeddings(predict_module)

    def run_weights_dependent_transformations(self, predict_module: nn.Module) -> nn.Module:
        return predict_module

    def qualname_metadata(self) -> dict[str, QualNameMetadata]:
        return {"forward": QualNameMetadata(need_preproc=True)}


def test_a_factory_says_how_it_is_called() -> None:
    factory = Factory()
    predict = factory.run_weights_independent_tranformations(factory.create_predict_module())
    assert predict(BATCH).shape == (2, 4)
    assert json.loads(factory.batching_metadata_json()) == {
        "dense": {"type": "dense", "device": "cpu", "pinned": ["dense"]}
    }
    assert json.loads(factory.qualname_metadata_json()) == {"forward": {"need_preproc": True}}
    assert factory.model_inputs_data() == {}
    with pytest.raises(TypeError, match="abstract"):
        PredictFactory()  # type: ignore[abstract]


def test_names_of_types_from_packages() -> None:
    assert trim_torch_package_prefix_from_typename("<torch_package_12>.a.B") == "a.B"
    assert trim_torch_package_prefix_from_typename("a.B") == "a.B"
