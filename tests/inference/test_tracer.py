"""recsys.fx: graphs of models of collections, and TorchScript of these graphs."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from recsys.fx import Tracer, symbolic_trace
from recsys.inference import quantize_embeddings, quantize_inference_model, shard_quant_model
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.feature_processor import PositionWeightedModuleCollection
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor, KeyedTensor

KEYS = ["film", "user", "other"]
KINDS = ["trained", "quantized", "sharded"]


class Bags(nn.Module):
    """The documented inference module: a batch in, a KeyedTensor out."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.ebc_ = collection

    def forward(self, kjt: KeyedJaggedTensor) -> KeyedTensor:
        found: KeyedTensor = self.ebc_(kjt)
        return found


class Mixed(nn.Module):
    """Bags and sequences; a dict of tensors and of jagged tensors comes out."""

    def __init__(self, bags: nn.Module, ids: nn.Module) -> None:
        super().__init__()
        self.bags, self.ids = bags, ids
        self.over = nn.Linear(12, 2)

    def forward(self, dense: Tensor, kjt: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self.ids(kjt)["film"]
        return self.over(self.bags(kjt).values()) + dense, found.values(), found.lengths()


def _bags(is_weighted: bool = False) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(20, 8, "films", feature_names=["film"]),
        EmbeddingBagConfig(20, 4, "users", feature_names=["user"], pooling=PoolingType.MEAN),
    ]
    return EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)


def _ids() -> EmbeddingCollection:
    torch.manual_seed(1)
    return EmbeddingCollection(tables=[EmbeddingConfig(20, 4, "films", feature_names=["film"])])


def _as(kind: str, model: nn.Module) -> nn.Module:
    if kind == "trained":
        return model.eval()
    model = quantize_embeddings(model)
    return model if kind == "quantized" else shard_quant_model(model, 2, "cpu")[0]


def _batch(size: int, keys: list[str] = KEYS, is_weighted: bool = False) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(size)
    lengths = torch.randint(0, 4, (len(keys) * size,), generator=random)
    count = int(lengths.sum())
    weights = torch.rand(count, generator=random) if is_weighted else None
    return KeyedJaggedTensor(
        keys, torch.randint(0, 20, (count,), generator=random), weights, lengths
    )


def _script(graph: fx.GraphModule) -> Any:
    """Compile, save and load."""
    with warnings.catch_warnings():
        # of torch.fx.GraphModule itself; and TorchScript is in maintenance
        warnings.filterwarnings("ignore", "The TorchScript type system doesn't support instance")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(graph), file)  # type: ignore[no-untyped-call]
        file.seek(0)
        return torch.jit.load(file)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_documented_way_from_a_model_to_torchscript(kind: str, is_weighted: bool) -> None:
    model = _as(kind, Bags(_bags(is_weighted)))
    state = list(model.state_dict())
    tracer = Tracer(leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen"])
    graph = fx.GraphModule(model, tracer.trace(model))
    assert list(model.state_dict()) == state
    scripted = _script(graph)
    for size, keys in [(3, KEYS), (1, KEYS), (0, KEYS), (4, KEYS[::-1]), (2, KEYS[:2])]:
        batch = _batch(size, keys, is_weighted)
        expected = model(batch)
        for found in (graph(batch), scripted(batch)):
            assert type(found) is KeyedTensor
            assert found.keys() == expected.keys()
            # without its collection a trained table is looked up by PyTorch, not by FBGEMM
            most = 1e-6 if kind == "trained" else 0
            torch.testing.assert_close(found.values(), expected.values(), rtol=0, atol=most)
            torch.testing.assert_close(found["user"], expected["user"], rtol=0, atol=most)


@pytest.mark.parametrize("kind", KINDS)
def test_bags_and_sequences_and_dense_features(kind: str) -> None:
    model = _as(kind, Mixed(_bags(), _ids()))
    graph = symbolic_trace(model)
    scripted = _script(graph)
    for size in (3, 1, 0):
        dense, batch = torch.rand(size, 2), _batch(size)
        for found in (graph(dense, batch), scripted(dense, batch)):
            for mine, other in zip(found, model(dense, batch), strict=True):
                assert torch.equal(mine, other)


def test_classes_named_as_leaves_are_not_seen_through() -> None:
    model = Bags(_bags())
    seen = [node.target for node in symbolic_trace(model).graph.nodes]
    assert "ebc_" not in seen
    leaf = symbolic_trace(model, leaf_modules=["EmbeddingBagCollection"])
    assert "ebc_" in [node.target for node in leaf.graph.nodes]
    batch = _batch(3)
    assert torch.equal(leaf(batch).values(), model(batch).values())


def test_arguments_can_be_fixed_and_functions_traced() -> None:
    def double(x: Tensor, twice: bool) -> Tensor:
        return x * 2 if twice else x

    graph = symbolic_trace(double, {"twice": True})
    assert torch.equal(graph(torch.ones(2), True), torch.full((2,), 2.0))


@pytest.mark.parametrize("kind", ["quantized", "sharded"])
def test_a_missing_feature_and_weights_are_named(kind: str) -> None:
    graph = symbolic_trace(_as(kind, Bags(_bags(True))))
    with pytest.raises(KeyError, match="The batch lacks the feature user"):
        graph(_batch(2, ["film"], True))
    with pytest.raises(ValueError, match="has no weights"):
        graph(_batch(2))
    with pytest.raises(torch.jit.Error, match="has no weights"):
        _script(graph)(_batch(2))


def test_processors_are_compiled_too() -> None:
    processed = FeatureProcessedEmbeddingBagCollection(
        _bags(True), PositionWeightedModuleCollection({"film": 4, "user": 4})
    )
    model = quantize_inference_model(Bags(processed))
    graph = symbolic_trace(model)
    scripted = _script(graph)
    for size in (3, 1, 0):
        expected = model(_batch(size)).values()
        assert torch.equal(graph(_batch(size)).values(), expected)
        assert torch.equal(scripted(_batch(size)).values(), expected)


def test_processors_of_trained_models_are_compiled_too() -> None:
    model = Bags(
        FeatureProcessedEmbeddingBagCollection(
            _bags(True), PositionWeightedModuleCollection({"film": 4, "user": 4})
        )
    )
    graph = symbolic_trace(model)
    expected = model(_batch(3)).values()
    assert torch.equal(graph(_batch(3)).values(), expected)
    torch.testing.assert_close(_script(graph)(_batch(3)).values(), expected)
