from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from recsys.inference import (
    export_torchscript,
    quantize_embeddings,
    quantize_inference_model,
    shard_quant_model,
    trace_model,
)
from recsys.inference.quantized_tables import QuantizedTables
from recsys.modules.dlrm import DLRM, DLRMTrain
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.feature_processor import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor

SCORE = """
import sys, torch, fbgemm_gpu
model = torch.jit.load(sys.argv[1])
inputs, expected = torch.load(sys.argv[2])
torch.testing.assert_close(model(*inputs), expected, rtol=0, atol=0)
assert "recsys" not in sys.modules
"""


def _model(is_weighted: bool = False) -> DLRM:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(50, 8, "a", feature_names=["x", "y"]),
        EmbeddingBagConfig(30, 8, "b", feature_names=["z"], pooling=PoolingType.MEAN),
    ]
    collection = EmbeddingBagCollection(
        tables=tables, is_weighted=is_weighted, device=torch.device("cpu")
    )
    return quantize_embeddings(DLRM(collection, 5, [16, 8], [16, 1]))


def _inputs(size: int, is_weighted: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    lengths = torch.randint(0, 4, (3 * size,), generator=generator)
    values = torch.randint(0, 30, (int(lengths.sum()),), generator=generator)
    dense = torch.rand(size, 5, generator=generator)
    weights = [torch.rand(len(values), generator=generator)] if is_weighted else []
    return [dense, values, lengths, *weights]


def _eager(model: DLRM, inputs: list[torch.Tensor], keys: list[str]) -> torch.Tensor:
    dense, values, lengths, *weights = inputs
    weight = weights[0] if weights else None
    return model(dense, KeyedJaggedTensor(keys, values, weight, lengths))


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("keys", [["x", "y", "z"], ["z", "x", "y"]])
def test_traced_and_exported_models_equal_the_eager_one(
    tmp_path: Path, keys: list[str], is_weighted: bool
) -> None:
    model = _model(is_weighted)
    traced = trace_model(model, keys, is_weighted)
    path = tmp_path / "model.pt"
    export_torchscript(model, path, keys, is_weighted)
    loaded = torch.jit.load(path)
    for size in (1, 4, 0, 7):
        inputs = _inputs(size, is_weighted)
        if keys[0] == "z":
            inputs[1] = inputs[1] % 30
        expected = _eager(model, inputs, keys)
        assert expected.shape == (size, 1)
        torch.testing.assert_close(traced(*inputs), expected, rtol=0, atol=0)
        torch.testing.assert_close(loaded(*inputs), expected, rtol=0, atol=0)


def test_exported_file_runs_without_this_library(tmp_path: Path) -> None:
    model, inputs = _model(), _inputs(5)
    export_torchscript(model, tmp_path / "model.pt", ["x", "y", "z"])
    torch.save((inputs, _eager(model, inputs, ["x", "y", "z"])), tmp_path / "inputs.pt")
    subprocess.run(
        [sys.executable, "-c", SCORE, tmp_path / "model.pt", tmp_path / "inputs.pt"], check=True
    )


def test_exported_model_refuses_a_bad_id(tmp_path: Path) -> None:
    export_torchscript(_model(), tmp_path / "model.pt", ["x", "y", "z"])
    dense, values, lengths = _inputs(3)
    values[0] = 10**6
    with pytest.raises(torch.jit.Error, match="has the id 1000000, outside its table with"):
        torch.jit.load(tmp_path / "model.pt")(dense, values, lengths)


def test_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        trace_model(_model().train(), ["x", "y", "z"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["x", "y"], r"received \['x', 'y'\], without \['z'\], which the tables read"),
        (["x", "x", "y", "z"], "must name each feature of the batches once"),
        ([], "must name each feature of the batches once"),
    ],
)
def test_names_that_do_not_fit_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace_model(_model(), names)
    with pytest.raises(TypeError, match=r"received 'x'. Write \['x'\]"):
        trace_model(_model(), "x")


def test_weights_must_be_what_the_model_reads() -> None:
    with pytest.raises(ValueError, match="nothing in DLRM reads weights"):
        trace_model(_model(), ["x", "y", "z"], is_weighted=True)
    with pytest.raises(ValueError, match="is_weighted=True to an export"):
        trace_model(_model(is_weighted=True), ["x", "y", "z"])


class _Wrapped(nn.Module):
    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.tables = _model().sparse_arch.embedding_bag_collection
        self.branches = branches

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> object:
        pooled = self.tables(features)
        if self.branches and pooled.values().sum() > 0:
            return dense
        return pooled


def test_models_that_cannot_be_exported_say_why() -> None:
    names = ["x", "y", "z"]
    with pytest.raises(TypeError, match=r"called as model\(dense, features\); received DLRMTrain"):
        trace_model(DLRMTrain(_model()).eval(), names)
    table = EmbeddingBagConfig(50, 8, "a", feature_names=["x"])
    with pytest.raises(ValueError, match="the EmbeddingBagCollection 'sparse_arch"):
        trace_model(DLRM(EmbeddingBagCollection(tables=[table]), 5, [16, 8], [16, 1]).eval(), names)
    with pytest.raises(TypeError, match=r"returned a KeyedTensor. Return its values\(\)"):
        trace_model(_Wrapped(branches=False).eval(), names)
    with pytest.raises(fx.proxy.TraceError) as caught:
        trace_model(_Wrapped(branches=True).eval(), names)
    assert "torch.where chooses" in caught.value.__notes__[0]


class _Mixed(nn.Module):
    """Pools bags, and reads sequences: sums of their rows, and of their ids."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        bags = [EmbeddingBagConfig(30, 8, "bags", feature_names=["x"], pooling=PoolingType.MEAN)]
        rows = [
            EmbeddingConfig(30, 8, "rows", feature_names=["y", "x"]),
            EmbeddingConfig(40, 8, "more", feature_names=["y"]),
        ]
        self.bags = EmbeddingBagCollection(tables=bags)
        self.rows = EmbeddingCollection(tables=rows, need_indices=True)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.bags(features).values().sum(1, keepdim=True)
        read = self.rows(features)
        padded = read["y@rows"].to_padded_dense(4).sum((1, 2)).unsqueeze(1)
        others = read["y@more"].values().sum() + read["x"].weights().sum()
        return torch.cat([dense, pooled, padded], dim=1) + others


@pytest.mark.parametrize("output", [torch.float32, torch.float16, torch.bfloat16])
def test_models_with_sequences_are_exported(tmp_path: Path, output: torch.dtype) -> None:
    keys = ["z", "y", "x"]
    model = quantize_embeddings(_Mixed(), torch.quint4x2, output_dtype=output)
    for each in (model, shard_quant_model(model, 3, "cpu")[0]):
        export_torchscript(each, tmp_path / "model.pt", keys)
        loaded = torch.jit.load(tmp_path / "model.pt")
        for size in (5, 1, 0):
            inputs = _inputs(size)
            expected = _eager(model, inputs, keys)
            assert expected.shape == (size, 7)
            torch.testing.assert_close(_eager(each, inputs, keys), expected, rtol=0, atol=0)
            torch.testing.assert_close(loaded(*inputs), expected, rtol=0, atol=0)


def test_a_collection_that_is_used_twice_is_exported_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = _model().sparse_arch.embedding_bag_collection

        def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
            return self.tables(features).values() + self.tables(features).values()

    model, inputs = Twice().eval(), _inputs(3)
    traced = trace_model(model, ["x", "y", "z"])
    assert len([child for child in traced.modules() if isinstance(child, QuantizedTables)]) == 1
    torch.testing.assert_close(traced(*inputs), _eager(model, inputs, ["x", "y", "z"]))


class Processed(nn.Module):
    """A score of pooled bags whose ids are weighed by position."""

    def __init__(self, processors: Any) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(50, 8, "a", feature_names=["x", "y"]),
            EmbeddingBagConfig(30, 8, "b", feature_names=["z"], pooling=PoolingType.MEAN),
        ]
        self.tables = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables=tables, is_weighted=True), processors
        )
        self.over = nn.Linear(5 + 24, 1)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        pooled: Tensor = self.tables(ids).values()
        return torch.cat([dense, pooled], dim=1) @ self.over.weight.T


@pytest.mark.parametrize("keys", [["x", "y", "z"], ["z", "x", "y"]])
@pytest.mark.parametrize("kind", ["collection", "some", "dict"])
@pytest.mark.parametrize("quantize", [quantize_embeddings, quantize_inference_model])
def test_models_with_position_weights(
    tmp_path: Path, keys: list[str], kind: str, quantize: Callable[[nn.Module], nn.Module]
) -> None:
    torch.manual_seed(0)
    lengths = {"x": 3, "y": 4, "z": 5}
    processors: Any = {name: PositionWeightedModule(n) for name, n in lengths.items()}
    if kind != "dict":
        known = dict(list(lengths.items())[: 2 if kind == "some" else 3])
        processors = PositionWeightedModuleCollection(known)
    model = Processed(processors)
    for name, weight in model.named_parameters():
        if "position_weight" in name:
            nn.init.uniform_(weight, 0.5, 2.0)
    quantized: Any = quantize(model.eval())
    loaded = export_torchscript(quantized, tmp_path / "model.pt", keys)
    loaded = torch.jit.load(tmp_path / "model.pt")
    for size in (1, 4, 0, 7):
        inputs = _inputs(size)
        expected = _eager(quantized, inputs, keys)
        torch.testing.assert_close(loaded(*inputs), expected, rtol=0, atol=0)
    dense, values = torch.ones(1, 5), torch.ones(6, dtype=torch.int64)
    too_long = torch.tensor([6 if key == "x" else 0 for key in keys])
    with pytest.raises(torch.jit.Error, match=r"feature x must not have more ids .* 3; received 6"):
        loaded(dense, values, too_long)
