"""Programs of quantized models: TorchScript, and what AOTInductor compiles."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recsys.inference import (
    export_aoti,
    export_torchscript,
    quantize_embeddings,
    quantize_inference_model,
    shard_quant_model,
)
from recsys.inference.export import PlainModel, exported_program
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.feature_processor import (
    FeatureProcessorsCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

KEYS = ["x", "y", "z"]
SIZES = 4, 1, 0, 7
SCORE = """
import sys, torch, fbgemm_gpu
load = torch.jit.load if sys.argv[1].endswith(".pt") else torch._inductor.aoti_load_package
inputs, expected = torch.load(sys.argv[2])
torch.testing.assert_close(load(sys.argv[1])(*inputs), expected, rtol=0, atol=0)
assert "recsys" not in sys.modules
"""


def _bags(is_weighted: bool = False) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(50, 8, "a", feature_names=["x", "y"]),
        EmbeddingBagConfig(30, 8, "b", feature_names=["z"], pooling=PoolingType.MEAN),
    ]
    return EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)


def dlrm(is_weighted: bool = False) -> DLRM:
    return quantize_embeddings(DLRM(_bags(is_weighted), 5, [16, 8], [16, 1]))


def inputs_of(
    size: int, keys: Sequence[str] = KEYS, is_weighted: bool = False
) -> tuple[Tensor, KeyedJaggedTensor]:
    random = torch.Generator().manual_seed(size)
    lengths = torch.randint(0, 4, (len(keys) * size,), generator=random)
    values = torch.randint(0, 30, (int(lengths.sum()),), generator=random)
    weights = torch.rand(len(values), generator=random) if is_weighted else None
    dense = torch.rand(size, 5, generator=random)
    return dense, KeyedJaggedTensor(list(keys), values, weights, lengths)


def plain_tensors(dense: Tensor, features: KeyedJaggedTensor) -> list[Tensor]:
    weights = features.weights_or_none()
    return [dense, features.values(), features.lengths(), *([] if weights is None else [weights])]


def _equal(found: object, expected: object) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _programs(model: nn.Module, inputs: Sequence[object], path: Path) -> list[Callable[..., Any]]:
    """The TorchScript of a model, from its file, and the graph that AOTInductor compiles."""
    export_torchscript(model, path, inputs)
    return [torch.jit.load(path), exported_program(PlainModel(model, inputs)).module()]


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("keys", [KEYS, ["z", "x", "other", "y"]])
@pytest.mark.parametrize("size", [5, 1, 0])
def test_programs_equal_the_model(
    tmp_path: Path, keys: list[str], is_weighted: bool, size: int
) -> None:
    model = dlrm(is_weighted)
    state = list(model.state_dict())
    programs = _programs(model, inputs_of(size, keys, is_weighted), tmp_path / "model.pt")
    assert list(model.state_dict()) == state
    for other in SIZES:
        batch = inputs_of(other, keys, is_weighted)
        expected = model(*batch)
        assert expected.shape == (other, 1)
        for program in programs:
            _equal(program(*plain_tensors(*batch)), expected)


class Everything(nn.Module):
    """Tensors and jagged tensors in lists, tuples and dicts, in and out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        rows = [
            EmbeddingConfig(30, 8, "rows", feature_names=["y", "x"]),
            EmbeddingConfig(40, 8, "more", feature_names=["y"]),
        ]
        self.bags = _bags()
        self.rows = EmbeddingCollection(tables=rows, need_indices=True)
        self.score = DLRM(_bags(), 5, [16, 8], [16, 1])

    def forward(
        self, dense: dict[str, Tensor], sparse: list[Any], scale: float, none: Tensor | None = None
    ) -> dict[str, Any]:
        features, history = sparse
        assert none is None
        rows = self.rows(features)
        padded = rows["y@rows"].to_padded_dense(4).sum((1, 2)) * scale
        return {
            "score": self.score(dense["numbers"], features),
            "rows": rows,
            "parts": (self.bags(features), [padded + history.lengths()], None),
            "features": features,
            "history": JaggedTensor(history.values() * 2, lengths=history.lengths()),
        }


def _everything(size: int) -> tuple[dict[str, Tensor], list[Any], float, None]:
    dense, features = inputs_of(size)
    lengths = torch.arange(size)
    history = JaggedTensor(torch.rand(int(lengths.sum())), lengths=lengths)
    return {"numbers": dense}, [features, history], 0.5, None


def _names_of_everything(found: dict[str, Any]) -> dict[str, Tensor]:
    bags, [padded], _ = found["parts"]
    expected = {"score": found["score"]}
    for name, jagged in found["rows"].items():
        expected[f"rows.{name}.values"] = jagged.values()
        expected[f"rows.{name}.lengths"] = jagged.lengths()
        expected[f"rows.{name}.weights"] = jagged.weights()
    expected |= {f"parts.0.{key}": pooled for key, pooled in bags.to_dict().items()}
    expected["parts.1.0"] = padded
    expected["features.values"] = found["features"].values()
    expected["features.lengths"] = found["features"].lengths()
    expected["history.values"] = found["history"].values()
    expected["history.lengths"] = found["history"].lengths()
    return expected


def _tensors_of_everything(dense: Any, sparse: Any, scale: float, none: None) -> list[Tensor]:
    features, history = sparse
    tensors = [features.values(), features.lengths(), history.values(), history.lengths()]
    return [dense["numbers"], *tensors]


@pytest.mark.parametrize("output", [torch.float32, torch.float16, torch.bfloat16])
def test_any_signature(tmp_path: Path, output: torch.dtype) -> None:
    model = quantize_embeddings(Everything(), torch.quint4x2, output_dtype=output)
    model.score = quantize_embeddings(DLRM(_bags(), 5, [16, 8], [16, 1]))
    programs = _programs(model, _everything(3), tmp_path / "model.pt")
    sharded = shard_quant_model(model, 3, "cpu")[0]
    programs.append(export_torchscript(sharded, tmp_path / "sharded.pt", _everything(3)))
    for size in SIZES:
        inputs = _everything(size)
        expected = _names_of_everything(model(*inputs))
        for program in programs:
            found = program(*_tensors_of_everything(*inputs))
            assert list(found) == list(expected)
            _equal(found, expected)


def test_names_of_inputs_and_outputs(tmp_path: Path) -> None:
    inputs = _everything(3)
    plain = PlainModel(quantize_embeddings(Everything()), inputs)
    assert plain.names == [
        "dense_numbers",
        "sparse_0_values",
        "sparse_0_lengths",
        "sparse_1_values",
        "sparse_1_lengths",
    ]
    assert plain.output_names == list(_names_of_everything(plain.model(*inputs)))
    program = export_torchscript(dlrm(True), tmp_path / "model.pt", inputs_of(2, is_weighted=True))
    names = [argument.name for argument in program.forward.schema.arguments]
    assert names[1:] == [
        "dense_features",
        "sparse_features_values",
        "sparse_features_lengths",
        "sparse_features_weights",
    ]


class Mixed(nn.Module):
    """Pools bags, and reads sequences: sums of their rows, and of their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.rows = _bags(), Everything().rows

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.bags(features).values().sum(1, keepdim=True)
        rows = self.rows(features)
        padded = rows["y@rows"].to_padded_dense(4).sum((1, 2)).unsqueeze(1)
        others = rows["y@more"].values().sum() + rows["x"].weights().sum()
        return torch.cat([dense, pooled, padded], dim=1) + others


class Branches(nn.Module):
    """A branch in a module without tables, and one in the model itself."""

    class Over(nn.Module):
        def forward(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
            if pooled.sum() > 0:
                return pooled.sum(1), pooled
            return pooled.sum(1) * 2, pooled

    def __init__(self, is_outside: bool) -> None:
        super().__init__()
        self.tables, self.over, self.is_outside = _bags(), Branches.Over(), is_outside

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.tables(features).values()
        if self.is_outside and dense.sum() < 12:
            return dense.sum(1)
        score, _ = self.over(pooled)
        return score


@pytest.mark.parametrize("is_outside", [False, True])
def test_torchscript_keeps_branches(tmp_path: Path, is_outside: bool) -> None:
    model = quantize_embeddings(Branches(is_outside))
    program = export_torchscript(model, tmp_path / "model.pt", inputs_of(3))
    for size in SIZES:
        batch = inputs_of(size)
        _equal(program(*plain_tensors(*batch)), model(*batch))
    _equal(program(*plain_tensors(-batch[0], batch[1])), model(-batch[0], batch[1]))
    name = "''" if is_outside else "'over'"
    message = rf"Module {name} \((Branches|Over)\), {re.escape(__file__)}:\d+: `if "
    with pytest.raises(Exception, match=message):
        exported_program(PlainModel(model, inputs_of(3)))


class Unreadable(nn.Module):
    """Neither torch.fx nor TorchScript nor torch.export reads its head."""

    class Head(nn.Module):
        def forward(self, pooled: Tensor) -> Tensor:
            return pooled * float(pooled.numpy().sum())

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.head = _bags(), Unreadable.Head()

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        found: Tensor = self.head(self.tables(features).values())
        return found


@pytest.mark.parametrize(
    "export",
    [export_torchscript, lambda model, _, inputs: exported_program(PlainModel(model, inputs))],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, export: Callable[..., object]) -> None:
    line = re.escape("`return pooled * float(pooled.numpy().sum())`. torch.")
    with pytest.raises(Exception, match=rf"Module 'head' \(Head\), {__file__}:\d+: {line}"):
        export(quantize_embeddings(Unreadable()), tmp_path / "model.pt", inputs_of(3))
    assert not list(tmp_path.iterdir())


class Fixed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tables, self.kind = _bags(), kind

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.tables(features).values()
        if self.kind == "branch":
            return pooled if dense.shape[0] > 2 else pooled * 2
        return torch.ones(int(features.stride()), 1) + pooled


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("branch", r"traced for dense.shape\[0\] >= 3 only"),
        ("number", "received other outputs"),
    ],
)
def test_a_package_serves_any_batch_size(kind: str, message: str) -> None:
    plain = PlainModel(quantize_embeddings(Fixed(kind)), inputs_of(3))
    with pytest.raises(ValueError, match=message):
        plain.check(exported_program(plain).module())


def test_a_program_that_does_something_else_is_refused(tmp_path: Path) -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables, self.calls = _bags(), 0

        def forward(self, features: KeyedJaggedTensor) -> Tensor:
            self.calls += 1
            pooled: Tensor = self.tables(features).values()
            return pooled * self.calls

    model = quantize_embeddings(Remembers())
    with pytest.raises(ValueError, match="received other outputs on the example"):
        export_torchscript(model, tmp_path / "model.pt", inputs_of(3)[1:])
    assert not list(tmp_path.iterdir())


def test_models_that_cannot_be_exported_say_why(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        export_torchscript(dlrm().train(), path, inputs_of(2))
    with pytest.raises(ValueError, match="the EmbeddingBagCollection 'sparse_arch"):
        export_torchscript(DLRM(_bags(), 5, [16, 8], [16, 1]).eval(), path, inputs_of(2))

    class Text(nn.Module):
        def forward(self, dense: Tensor) -> dict[str, object]:
            return {"score": dense, "name": {"of": "model"}}

    with pytest.raises(TypeError, match=r"received str 'name\.of'"):
        export_torchscript(Text().eval(), path, [torch.ones(2)])
    with pytest.raises(ValueError, match=r"must end in '\.pt2'"):
        export_aoti(dlrm(), path, inputs_of(2))
    rows = shard_quant_model(dlrm(), 2, "cpu")[0]
    split = [m for m in rows.modules() if type(m).__name__ == "ShardedQuantizedTable"]
    if split:
        with pytest.raises(ValueError, match="one device; received a model"):
            exported_program(PlainModel(rows, inputs_of(2)))


def test_programs_refuse_bad_batches(tmp_path: Path) -> None:
    scripted, graph = _programs(dlrm(), inputs_of(3), tmp_path / "model.pt")
    dense, values, lengths = plain_tensors(*inputs_of(3))
    far = values.clone()
    far[0] = 10**6
    with pytest.raises(torch.jit.Error, match="Id 1000000 at position 0"):
        scripted(dense, far, lengths)
    with pytest.raises(RuntimeError, match="An id is outside its table"):
        graph(dense, far, lengths)
    with pytest.raises(torch.jit.Error, match="lengths must not be negative and"):
        scripted(dense, values[1:], lengths)
    with pytest.raises(RuntimeError, match="lengths must add up to the"):
        graph(dense, values[1:], lengths)
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        graph(dense[1:], values, lengths)


def test_a_collection_that_is_used_twice_is_exported_once(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = dlrm().sparse_arch.embedding_bag_collection

        def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
            return self.tables(features).values() + self.tables(features).values()

    model, batch = Twice().eval(), inputs_of(3)
    programs = _programs(model, batch, tmp_path / "model.pt")
    weights = [name for name in programs[0].state_dict() if name.endswith("lookups.0.weights")]
    assert len(weights) == 1
    for program in programs:
        _equal(program(*plain_tensors(*batch)), model(*batch))


class Processed(nn.Module):
    """A score of pooled bags whose ids are weighed first."""

    def __init__(self, processors: Any) -> None:
        super().__init__()
        self.tables = FeatureProcessedEmbeddingBagCollection(_bags(True), processors)
        self.over = nn.Linear(5 + 24, 1)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        pooled: Tensor = self.tables(ids).values()
        return torch.cat([dense, pooled], dim=1) @ self.over.weight.T


class OwnProcessor(FeatureProcessorsCollection):
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            features.keys(), features.values(), features.values() * 0.5, features.lengths()
        )


@pytest.mark.parametrize("keys", [KEYS, ["z", "x", "y"]])
@pytest.mark.parametrize("kind", ["collection", "some", "dict", "own"])
@pytest.mark.parametrize("quantize", [quantize_embeddings, quantize_inference_model])
def test_models_with_feature_processors(
    tmp_path: Path, keys: list[str], kind: str, quantize: Callable[[nn.Module], nn.Module]
) -> None:
    torch.manual_seed(0)
    lengths = {"x": 3, "y": 4, "z": 5}
    processors: Any = {name: PositionWeightedModule(n) for name, n in lengths.items()}
    if kind == "own":
        processors = OwnProcessor()
    elif kind != "dict":
        known = dict(list(lengths.items())[: 2 if kind == "some" else 3])
        processors = PositionWeightedModuleCollection(known)
    model = Processed(processors)
    for name, weight in model.named_parameters():
        if "position_weight" in name:
            nn.init.uniform_(weight, 0.5, 2.0)
    quantized: Any = quantize(model.eval())
    scripted, graph = _programs(quantized, inputs_of(3, keys), tmp_path / "model.pt")
    for size in SIZES:
        batch = inputs_of(size, keys)
        for program in (scripted, graph):
            _equal(program(*plain_tensors(*batch)), quantized(*batch))
    if kind == "own":
        return
    dense, values = torch.ones(1, 5), torch.ones(6, dtype=torch.int64)
    too_long = torch.tensor([6 if key == "x" else 0 for key in keys])
    with pytest.raises(torch.jit.Error, match=r"feature x must .*more ids.*3; .*6"):
        scripted(dense, values, too_long)
    with pytest.raises(RuntimeError, match="more ids than its feature has"):
        graph(dense, values, too_long)


def test_a_keyed_tensor_comes_out_by_key(tmp_path: Path) -> None:
    model = quantize_embeddings(_bags())
    _, features = inputs_of(3)
    for program in _programs(model, [features], tmp_path / "model.pt"):
        found = program(features.values(), features.lengths())
        expected: KeyedTensor = model(features)
        _equal(found, expected.to_dict())


@pytest.mark.slow
def test_packages_of_aotinductor(tmp_path: Path) -> None:
    """One package: the compiler takes 20 seconds for each."""
    model = quantize_embeddings(Everything())
    path = tmp_path / "model.pt2"
    program = export_aoti(model, path, _everything(3))
    metadata = program.compiled.get_metadata()
    assert json.loads(metadata["inputs"]) == PlainModel(model, _everything(3)).names
    for size in (*SIZES, 100):
        inputs = _everything(size)
        expected = _names_of_everything(model(*inputs))
        found = program(*_tensors_of_everything(*inputs))
        assert json.loads(metadata["outputs"]) == list(expected) == list(found)
        torch.testing.assert_close(found, expected)
    torch.save((_tensors_of_everything(*inputs), found), tmp_path / "inputs.pt")
    subprocess.run([sys.executable, "-c", SCORE, path, tmp_path / "inputs.pt"], check=True)
    dense, values, lengths, *rest = _tensors_of_everything(*_everything(3))
    with pytest.raises(IndexError, match=r"Id 1000\d+ at .*of feature '\w'"):
        program(dense, values + 10**6, lengths, *rest)
    # the reason is in the message from torch 2.13 on; before, on standard error
    with pytest.raises(RuntimeError, match=r"outside its table|API call failed"):
        program.compiled(dense, values + 10**6, lengths, *rest)
    with pytest.raises(RuntimeError, match=r"Expected Eq|API call failed"):
        program(dense[1:], values, lengths, *rest)


def test_a_file_runs_without_this_library(tmp_path: Path) -> None:
    model, batch = dlrm(), inputs_of(5)
    export_torchscript(model, tmp_path / "model.pt", batch)
    torch.save((plain_tensors(*batch), model(*batch)), tmp_path / "inputs.pt")
    subprocess.run(
        [sys.executable, "-c", SCORE, tmp_path / "model.pt", tmp_path / "inputs.pt"], check=True
    )


def test_programs_call_fbgemm_whatever_looks_up_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = dlrm()(*inputs_of(3))
    monkeypatch.setattr("recsys.kernels.ops.FBGEMM_DEVICES", ())  # as RECSYS_KERNELS=torch does
    model = dlrm()
    tables: Any = model.sparse_arch.embedding_bag_collection
    assert [lookup.backend for lookup in tables.lookups().lookups] == ["torch", "torch"]
    for program in _programs(model, inputs_of(3), tmp_path / "model.pt"):
        torch.testing.assert_close(program(*plain_tensors(*inputs_of(3))), expected)
    monkeypatch.setattr("recsys.inference.served_part.HAS_FBGEMM", False)
    with pytest.raises(ImportError, match="fbgemm_gpu is not installed"):
        export_torchscript(model, tmp_path / "model.pt", inputs_of(3))
