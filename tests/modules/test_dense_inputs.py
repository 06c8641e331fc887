"""Every model with dense features checks them before its tables learn; so does the log loss."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recsys.datasets.utils import Batch
from recsys.fx import symbolic_trace
from recsys.modules.ctr.dcn_v2 import DCNV2
from recsys.modules.deepfm_model import SimpleDeepFMNN
from recsys.modules.dense_inputs import check_dense_features
from recsys.modules.dlrm import DLRM, DenseArch, DLRMTrain
from recsys.modules.dlrm_variants import DLRM_DCN
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.losses import mean_loss
from recsys.optim import SGD, apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor, finish_value_checks, set_value_checks
from tests.pretended_cuda import CUDA, PretendedCuda

DENSE = 3
COLUMNS: dict[str, Any] = {
    "age": [1.0, 2.0, 3.0],
    "price": [0.5, 0.0, 9.0],
    "day": [1, 2, 3],
    "film": [[1, 2], [], [3]],
    "liked": [1, 0, 1],
}


def tables(device: str = "cpu") -> EmbeddingBagCollection:
    torch.manual_seed(0)
    config = EmbeddingBagConfig(
        name="films", embedding_dim=4, num_embeddings=9, feature_names=["film"]
    )
    collection = EmbeddingBagCollection(tables=[config], device=torch.device(device))
    apply_optimizer_in_backward(SGD, collection.parameters(), {"lr": 0.1})
    return collection


MODELS: dict[str, Callable[[EmbeddingBagCollection], nn.Module]] = {
    "DLRM": lambda ebc: DLRM(ebc, DENSE, [4], [4, 1]),
    "DLRM_DCN": lambda ebc: DLRM_DCN(ebc, DENSE, [4], [4, 1], 2, 3),
    "SimpleDeepFMNN": lambda ebc: SimpleDeepFMNN(DENSE, ebc, 4, 4),
    "no tables": lambda ebc: DLRM(None, DENSE, [4], [4, 1]),
}
models = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)


def a_batch() -> Batch:
    dense = ["age", "price", "day"]
    return Batch.from_columns(COLUMNS, sparse=["film"], dense=dense, label="liked")


def step(model: nn.Module, batch: Batch) -> None:
    out = model(batch.dense_features, batch.sparse_features)
    mean_loss(out.squeeze(-1), batch.labels).backward()


@models
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_bad_value_is_raised_before_a_table_learns(
    build: Callable[..., nn.Module], bad: float, is_named: bool
) -> None:
    ebc, batch = tables(), a_batch()
    model, before = build(ebc), ebc.embedding_bags["films"].weight.detach().clone()
    batch.dense_features[2, 1] = bad
    if not is_named:
        batch = Batch(batch.dense_features.clone(), batch.sparse_features, batch.labels)
    column = "'price'" if is_named else "1"
    message = f"^dense_features must .*{bad} in row 2.*{column}"
    for call in (step, lambda model, batch: DLRMTrain(model)(batch)):
        with pytest.raises(ValueError, match=message):
            call(model, batch)
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        step(model.eval(), batch)
    assert torch.equal(ebc.embedding_bags["films"].weight, before)


@models
@pytest.mark.parametrize("bad", [math.nan, 5.0, -3.0])
def test_a_bad_label_is_raised_before_a_table_learns(
    build: Callable[..., nn.Module], bad: float
) -> None:
    ebc, batch = tables(), a_batch()
    model, before = build(ebc), ebc.embedding_bags["films"].weight.detach().clone()
    batch.labels[1] = bad
    message = f"^labels must .*{bad} in row 1.*'liked'"
    with pytest.raises(ValueError, match=message):
        step(model, batch)
    with pytest.raises(ValueError, match=message):
        DLRMTrain(model)(batch)
    assert torch.equal(ebc.embedding_bags["films"].weight, before)


def test_other_labels_are_legal_where_no_log_loss_reads_them() -> None:
    batch = Batch.from_columns(COLUMNS | {"stars": [5, -3, 0.5]}, sparse=["film"], label="stars")
    assert batch.labels.tolist() == [5.0, -3.0, 0.5]
    assert batch.label_name == "stars"


@models
@pytest.mark.parametrize("size", [0, 1, 4])
def test_another_number_of_columns_is_named(build: Callable[..., nn.Module], size: int) -> None:
    batch = a_batch()
    name = "num_dense_features" if build is MODELS["SimpleDeepFMNN"] else "dense_in_features"
    message = rf"^dense_features must be \[samples, {name}\], and {name} is 3; received shape \(3, "
    with pytest.raises(ValueError, match=rf"{message}{size}\)\."):
        build(tables())(torch.zeros(3, size), batch.sparse_features)
    with pytest.raises(ValueError, match=rf"{message}3, 1\)\."):
        build(tables())(torch.zeros(3, 3, 1), batch.sparse_features)


@models
@pytest.mark.parametrize("dense", [None, [[1.0] * 3] * 3, torch.zeros(3, 3, dtype=torch.int64)])
def test_what_are_no_dense_features_is_named(build: Callable[..., nn.Module], dense: Any) -> None:
    with pytest.raises(TypeError, match=r"^dense_features must .*floats, \[samples, 3"):
        build(tables())(dense, a_batch().sparse_features)


def test_float64_and_other_batches_are_named() -> None:
    tables = [EmbeddingBagConfig(9, 4, "t", feature_names=["f"])]
    model = DLRM(EmbeddingBagCollection(tables=tables), 2, [4], [1])
    ids = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    dense = torch.ones(2, 2, dtype=torch.float64)
    rule = r"dense_features must .*model, torch\.float32; .*torch\.float64"
    with pytest.raises(TypeError, match=rule):
        model(dense, ids)
    with pytest.raises(TypeError, match=rule):
        DCNV2(EmbeddingBagCollection(tables=tables), 2, 1, [4])(dense, ids)
    assert check_dense_features(dense, nn.Linear(2, 1).double(), "x").dtype is torch.float64
    for batch in (ids, dense, ids["f"], None, (dense, ids)):
        with pytest.raises(TypeError, match=r"DLRMTrain.batch must be .*Batch with"):
            DLRMTrain(model)(batch)  # type: ignore[arg-type]


def test_forgotten_columns_are_named() -> None:
    batch = Batch.from_columns(COLUMNS, sparse=["film"], label="liked")
    with pytest.raises(ValueError, match=r"received shape \(3, 0\)\. .*, dense=\["):
        MODELS["DLRM"](tables())(batch.dense_features, batch.sparse_features)
    model = DLRM(tables(), 0, [4], [4, 1])  # and here they are not needed
    assert model(batch.dense_features, batch.sparse_features).shape == (3, 1)


def test_a_dense_part_of_the_users_own_has_its_own_size() -> None:
    model = MODELS["DLRM"](tables())
    model.dense_arch = nn.Sequential(nn.Linear(5, 4))
    assert model(torch.ones(3, 5), a_batch().sparse_features).shape == (3, 1)
    dense = torch.full((3, 5), math.nan)
    with pytest.raises(ValueError, match=r"nan in row 0.*column 0"):
        model(dense, a_batch().sparse_features)


def test_without_checks_values_pass_and_shapes_do_not() -> None:
    set_value_checks(False)
    try:
        batch = a_batch()
        batch.dense_features[0, 0] = batch.labels[1] = math.nan
        loss, _ = DLRMTrain(MODELS["DLRM"](tables()))(batch)
        assert loss.isnan()
        with pytest.raises(ValueError, match="dense_features must be"):
            MODELS["DLRM"](tables())(torch.zeros(3, 1), batch.sparse_features)
    finally:
        set_value_checks(True)


@models
def test_on_a_gpu_it_is_raised_with_the_next_batch_and_tables_stay_finite(
    build: Callable[..., nn.Module],
) -> None:
    with PretendedCuda() as cuda:
        ebc = tables()
        train, batch = DLRMTrain(build(ebc)).to(CUDA), a_batch().to(CUDA)
        train(batch)[0].backward()
        cuda.is_behind = True
        batch.dense_features[2, 1] = math.inf
        batch.labels[0] = math.nan
        batch = copy.copy(batch)  # memory has new contents, names are the same
        cuda.forget()
        train(batch)[0].backward()
        assert not [note for note in cuda.notes if note[0] == "read"]
        cuda.is_behind = False
        assert all(bool(p.isfinite().all()) for p in ebc.parameters())
        with pytest.raises(ValueError, match=r"^dense_features of .*inf.*2 of column 'price'"):
            train(a_batch().to(CUDA))
        with pytest.raises(ValueError, match=r"^labels of .*nan in row 0"):
            finish_value_checks()
        finish_value_checks()


@models
def test_compiled_whole_and_exported(build: Callable[..., nn.Module]) -> None:
    torch._dynamo.reset()
    config = EmbeddingBagConfig(
        name="films", embedding_dim=4, num_embeddings=9, feature_names=["film"]
    )
    model, batch = build(EmbeddingBagCollection(tables=[config])), a_batch()
    given = batch.dense_features, batch.sparse_features
    expected = model(*given)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*given), expected)
    train = torch.compile(DLRMTrain(model), fullgraph=True, backend="eager")
    torch.testing.assert_close(train(batch)[0], DLRMTrain(model)(batch)[0])
    for strict in (True, False):
        program = torch.export.export(model.eval(), given, strict=strict)
        torch.testing.assert_close(program.module()(*given), expected)


# torch's own warnings, about TorchScript, and the __init__ of every traced module
@pytest.mark.filterwarnings("ignore:The TorchScript type system:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the shapes that are compared
def test_traced_and_scripted() -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return mean_loss(logits, labels)

    given = torch.randn(3), torch.tensor([0.0, 1.0, 1.0])
    expected = loss(*given)
    torch.testing.assert_close(torch.jit.script(mean_loss)(*given), expected)
    torch.testing.assert_close(torch.jit.trace(loss, given)(*given), expected)
    model, batch = MODELS["no tables"](tables()), a_batch()
    traced = torch.fx.symbolic_trace(DLRMTrain(model))
    torch.testing.assert_close(traced(batch)[0], DLRMTrain(model)(batch)[0])
    scripted, dense = torch.jit.script(symbolic_trace(model)), torch.randn(2, DENSE)
    torch.testing.assert_close(scripted(dense, None), model(dense, None))


def test_the_size_that_is_checked_is_that_of_the_dense_part() -> None:
    dense = torch.ones(2, 5)
    assert check_dense_features(dense, DenseArch(5, [4]), "n") is dense
    assert check_dense_features(dense, nn.Identity(), "n") is dense


def test_a_weighted_batch_names_the_feature() -> None:
    batch = KeyedJaggedTensor(
        ["film"], torch.tensor([1, 2]), torch.tensor([1.0, math.nan]), lengths=torch.tensor([1, 1])
    )
    config = EmbeddingBagConfig(
        name="films", embedding_dim=4, num_embeddings=9, feature_names=["film"]
    )
    model = DLRM(EmbeddingBagCollection(tables=[config], is_weighted=True), DENSE, [4], [4, 1])
    with pytest.raises(ValueError, match=r"weights must .*nan in bag 1"):
        model(torch.ones(2, DENSE), batch)
