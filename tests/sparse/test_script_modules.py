"""`torch.jit.script` compiles models that hold collections, also after it failed once."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.jit import _recursive

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.inference import quantize_embeddings, shard_quant_model
from recsys.modules.deepfm_model import SimpleDeepFMNN
from recsys.modules.dlrm import DLRM
from recsys.modules.dlrm_variants import DLRM_DCN
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.feature_processor import (
    FeatureProcessor,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from recsys.sparse.script_modules import watch_script, with_forms, without_torchscript_warnings

KEYS = ["film", "user"]


def bags(is_weighted: bool = False) -> EmbeddingBagCollection:
    pooling = PoolingType.SUM if is_weighted else PoolingType.MEAN
    tables = [
        EmbeddingBagConfig(20, 8, "films", feature_names=["film"]),
        EmbeddingBagConfig(20, 8, "users", feature_names=["user"], pooling=pooling),
    ]
    return EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)


def rows() -> EmbeddingCollection:
    return EmbeddingCollection(
        tables=[EmbeddingConfig(20, 8, "films", feature_names=["film", "user"])], need_indices=True
    )


def batch(size: int, *, is_weighted: bool = True) -> KeyedJaggedTensor:
    lengths = torch.randint(0, 4, (2 * size,))
    count = int(lengths.sum())
    weights = torch.rand(count) if is_weighted else None
    return KeyedJaggedTensor(KEYS, torch.randint(0, 20, (count,)), weights, lengths)


def script(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # it is in maintenance
        return torch.jit.script(module)


def tensors_of(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, KeyedTensor):
        return [found.values()]
    if isinstance(found, KeyedJaggedTensor | JaggedTensor):
        return [found.values(), found.weights(), found.lengths()]
    return [tensor for name in found for tensor in tensors_of(found[name])]


class Scores(nn.Module):
    """Scores from the lookups of any collection; a module of the user's own."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables, self.over = tables, nn.Linear(16, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        score: Tensor = self.over(self.tables(features).values())
        return score


def processed(processors: Any) -> nn.Module:
    model = FeatureProcessedEmbeddingBagCollection(bags(True), processors)
    for name, weight in model.named_parameters():
        if "position_weight" in name:
            nn.init.uniform_(weight)
    return model


def updated() -> nn.Module:
    collection = bags()
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    return Scores(collection).eval()


LENGTHS = {"film": 4, "user": 4}
MODELS = {
    "bags": bags,
    "weighted": lambda: bags(True),
    "rows": rows,
    "own": lambda: Scores(bags()),
    "updated in backward": updated,
    "processed": lambda: processed(PositionWeightedModuleCollection(LENGTHS)),
    "processed in part": lambda: processed(PositionWeightedModuleCollection({"user": 4})),
    "processed by name": lambda: processed({key: PositionWeightedModule(4) for key in KEYS}),
    "quantized bags": lambda: quantize_embeddings(Scores(bags()), torch.quint4x2),
    "quantized rows": lambda: quantize_embeddings(rows()),
    "quantized and processed": lambda: quantize_embeddings(
        processed(PositionWeightedModuleCollection(LENGTHS))
    ),
    "sharded rows": lambda: shard_quant_model(quantize_embeddings(rows()), 2, "cpu")[0],
}
MODELS_OF_DENSE_FEATURES = {
    "dlrm": lambda: DLRM(bags(), 3, [8, 8], [8, 1]),
    "dcn": lambda: DLRM_DCN(bags(), 3, [8, 8], [8, 1], 2, 2),
    "deepfm": lambda: SimpleDeepFMNN(3, bags(), 8, 3),
    "quantized dlrm": lambda: quantize_embeddings(DLRM(bags(), 3, [8, 8], [8, 1])),
}


@pytest.mark.parametrize(
    ("build", "num_dense"),
    [(build, 0) for build in MODELS.values()]
    + [(build, 3) for build in MODELS_OF_DENSE_FEATURES.values()],
    ids=[*MODELS, *MODELS_OF_DENSE_FEATURES],
)
def test_models_are_compiled_as_they_are(build: Callable[[], nn.Module], num_dense: int) -> None:
    torch.manual_seed(0)
    model = build()
    state, modules = list(model.state_dict()), list(model.modules())
    scripted = script(model)
    file = io.BytesIO()
    torch.jit.save(scripted, file)  # type: ignore[no-untyped-call]
    file.seek(0)
    loaded = torch.jit.load(file)  # type: ignore[no-untyped-call]
    assert list(model.state_dict()) == state
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    for size in (3, 1, 0, 5):
        dense = [torch.rand(size, num_dense)] if num_dense else []
        inputs = [*dense, batch(size)]
        expected = tensors_of(model(*inputs))
        # without their collections trained tables are looked up by PyTorch, not by FBGEMM
        for program, atol in ((scripted, 0.0), (loaded, 1e-6)):
            found = tensors_of(program(*inputs))
            torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def test_a_processor_of_one_feature_is_compiled() -> None:
    module = PositionWeightedModule(4)
    nn.init.uniform_(module.position_weight)
    jagged = JaggedTensor(torch.arange(5), lengths=torch.tensor([3, 0, 2]))
    assert torch.equal(script(module)(jagged).weights(), module(jagged).weights())


def test_parameters_are_shared_and_trained_through_the_program() -> None:
    torch.manual_seed(0)
    model = Scores(processed(PositionWeightedModuleCollection(LENGTHS)))
    features = batch(4)
    scripted = script(model)
    wanted = torch.autograd.grad(model(features).sum(), list(model.parameters()))
    scripted(features).sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(found, list(wanted))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(scripted(features), model(features))


def test_tables_that_are_updated_in_backward_do_not_train_in_a_program() -> None:
    model = updated()
    loss = script(model)(batch(3)).sum()
    with pytest.raises(ValueError, match="updated in backward, which an exported"):
        loss.backward()


def test_what_is_not_known_in_a_program_is_named() -> None:
    scripted = script(Scores(bags()))
    with pytest.raises(torch.jit.Error, match="Id 1000 at position 0"):
        script(quantize_embeddings(bags()))(
            KeyedJaggedTensor(KEYS, torch.tensor([1000]), lengths=torch.tensor([1, 0]))
        )
    with pytest.raises(Exception, match=r"Id 99 at .*of feature 'film'"):
        scripted(KeyedJaggedTensor(KEYS, torch.tensor([99]), lengths=torch.tensor([1, 0])))
    varying = KeyedJaggedTensor(
        KEYS, torch.arange(3), lengths=torch.ones(3).long(), stride_per_key=[1, 2]
    )
    with pytest.raises(torch.jit.Error, match="takes batches with one batch size"):
        scripted(varying)


def test_processors_of_other_kinds_are_named() -> None:
    class Own(FeatureProcessor):
        def forward(self, features: JaggedTensor) -> JaggedTensor:
            return features

    model = processed({key: Own() for key in KEYS})
    with pytest.raises(ValueError, match=r"of the whole batch; received \['Own'\]"):
        script(model)


# -- after a compilation that failed ---------------------------------------------------------------


class Head(nn.Module):
    """Can be compiled, or not."""

    def __init__(self, unknown: int | None) -> None:
        super().__init__()
        self.unknown = unknown

    def forward(self, x: Tensor) -> Tensor:
        if self.unknown is not None:
            x = x.there_is_no_such_method()
        return x * 2


class Whole(nn.Module):
    """Holds such a head; fails by itself, or through it."""

    def __init__(self, unknown: int | None, of_head: int | None, tables: nn.Module) -> None:
        super().__init__()
        self.unknown, self.head, self.tables = unknown, Head(of_head), tables

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        if self.unknown is not None:
            features.there_is_no_such_method()
        found: Tensor = self.head(self.tables(features).values())
        return found


WRONG = "there_is_no_such_method"


@pytest.mark.parametrize("tables", [bags, lambda: quantize_embeddings(bags())])
@pytest.mark.parametrize("order", [(1, None), (None, 1), (1, 1)])
def test_a_class_is_compiled_after_it_failed(tables: Any, order: tuple[int | None, ...]) -> None:
    features, collection = batch(3), tables()
    before = script(Whole(None, None, collection))
    for _ in range(3):  # the same error each time, and nothing of "Can't redefine method"
        with pytest.raises(RuntimeError, match=WRONG):
            script(Whole(*order, collection))
    model = Whole(None, None, collection)
    for program in (script(model), before, script(model.head)):
        inputs = model.tables(features).values() if program is not before else None
        if isinstance(program, torch.jit.ScriptModule) and hasattr(program, "tables"):
            assert torch.equal(program(features), model(features))
        else:
            assert torch.equal(program(inputs), model.head(inputs))
    with pytest.raises(RuntimeError, match=WRONG):
        script(Head(1))
    assert torch.equal(script(Head(None))(torch.ones(2)), torch.full((2,), 2.0))


def test_a_form_is_not_that_of_a_subclass_with_its_own_forward() -> None:
    class Own(PositionWeightedModuleCollection):
        def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
            return features

    own, base = Own(LENGTHS), PositionWeightedModuleCollection(LENGTHS)
    assert with_forms(own, {}) is own
    assert with_forms(base, {}) is not base
    features = batch(2)
    assert torch.equal(script(own)(features).weights(), features.weights())


def test_a_module_that_is_used_twice_stays_one() -> None:
    quantized = quantize_embeddings(bags())
    model = nn.ModuleList([quantized, nn.Sequential(quantized), nn.Identity()])
    formed = with_forms(model, {})
    assert isinstance(formed, nn.ModuleList)
    assert formed is not model
    first, second = formed[0], formed[1]
    assert isinstance(second, nn.Sequential)
    assert first is second[0]
    assert formed[2] is model[2]


def test_watching_twice_changes_nothing() -> None:
    create = _recursive.create_script_module
    watch_script()
    assert _recursive.create_script_module is create


FRESH = """
import sys
import torch
{imports}
program = torch.jit.load(sys.argv[1])
values, lengths, expected = torch.load(sys.argv[2])
torch.testing.assert_close(program(values, lengths), expected, rtol=0, atol=1e-6)
assert ("recsys" in sys.modules) == {needs_recsys}
"""


class OfTensors(nn.Module):
    """Builds the batch itself, so that who calls it needs no container."""

    def __init__(self, scores: nn.Module) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        found: Tensor = self.scores(KeyedJaggedTensor(["film", "user"], values, None, lengths))
        return found


@pytest.mark.parametrize("kind", ["own", "quantized bags"])
def test_programs_run_in_a_fresh_process(tmp_path: Path, kind: str) -> None:
    model = OfTensors(MODELS[kind]())
    features = batch(5, is_weighted=False)
    script(model).save(str(tmp_path / "model.pt"))
    expected = model(features.values(), features.lengths()).detach()
    torch.save((features.values(), features.lengths(), expected), tmp_path / "batch.pt")
    is_trained = kind == "own"
    imports = "import recsys.modules.tables.traced" if is_trained else "import fbgemm_gpu"
    code = FRESH.format(imports=imports, needs_recsys=is_trained)
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, tmp_path / "model.pt", tmp_path / "batch.pt"],
        check=True,
    )


def test_containers_are_known_to_a_process_that_only_loads(tmp_path: Path) -> None:
    class Doubled(nn.Module):
        def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
            return features.with_values(features.values() * 2)

    script(Doubled()).save(str(tmp_path / "model.pt"))
    code = (
        "import sys, torch; from recsys import KeyedJaggedTensor\n"
        "batch = KeyedJaggedTensor(['a'], torch.arange(2), lengths=torch.tensor([2]))\n"
        "found = torch.jit.load(sys.argv[1])(batch)\n"
        "assert type(found) is KeyedJaggedTensor and found.values().tolist() == [0, 2]\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, tmp_path / "model.pt"], check=True)


def test_sharded_models_are_named() -> None:
    sharded = DistributedModelParallel(Scores(bags()), device=torch.device("cpu"))
    for module in (sharded, sharded.module):
        with pytest.raises(TypeError, match="ShardedEmbeddingBagCollection cannot be compiled by"):
            script(module)


def test_only_the_warning_about_torchscript_is_ignored() -> None:
    with without_torchscript_warnings():
        warnings.warn(
            "`torch.jit.script` is deprecated. Please switch", FutureWarning, stacklevel=1
        )
        warnings.warn(
            "`torch.jit.load` is not supported in Python 3.14+", DeprecationWarning, stacklevel=1
        )
        with pytest.warns(FutureWarning, match="another"):
            warnings.warn("another", FutureWarning, stacklevel=1)
    with pytest.warns(UserWarning, match="jit"):
        warnings.warn("`torch.jit.script` is", UserWarning, stacklevel=1)
