"""Collections under torch.fx, torch.export and torch.compile: as the eager ones, values and all."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx.experimental._config as shapes_config
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.export import Dim
from torch.utils import _pytree as pytree

from recsys.fx import symbolic_trace
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.feature_processor import (
    FeatureProcessor,
    FeatureProcessorsCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.modules.tables import traced
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

KEYS = ["film", "user", "shop", "other"]
ROWS = 10


def _bags(**options: Any) -> EmbeddingBagCollection:
    """Tables of several dims, dtypes and poolings, out of order; one feature in two tables."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(ROWS, 8, "shops", feature_names=["shop", "film"]),
            EmbeddingBagConfig(ROWS, 4, "films", feature_names=["film"], pooling=PoolingType.MEAN),
            EmbeddingBagConfig(ROWS, 4, "users", feature_names=["user"], data_type=DataType.BF16),
        ],
        **options,
    )


def _ids(need_indices: bool) -> EmbeddingCollection:
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(ROWS, 4, "shops", feature_names=["shop", "film"]),
            EmbeddingConfig(ROWS, 4, "films", feature_names=["film"], data_type=DataType.FP16),
        ],
        need_indices=need_indices,
    )


class Sum(nn.Module):
    """A model of dense features and a collection."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection
        self.dense = nn.Linear(3, 4)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> list[Tensor]:
        found = self.collection(features)
        over = self.dense(dense)
        if not isinstance(self.collection, EmbeddingCollection):
            return [found.values(), over * found["user"]]
        rows = [found[name].values() for name in ("shop", "film@shops", "film@films")]
        lengths = [over.sum() + found["shop"].lengths()]
        if self.collection.need_indices():
            rows.append(found["film@shops"].weights())
        return rows + lengths


class One(nn.Module):
    """A DLRM, whose output is one tensor."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(ROWS, 4, key, feature_names=[key]) for key in KEYS]
        self.dlrm = DLRM(EmbeddingBagCollection(tables=tables), 3, [5, 4], [5, 1])

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> list[Tensor]:
        return [self.dlrm(dense, features)]


class Rank(FeatureProcessorsCollection):
    """One of a user's own: weighs by the ids themselves."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        ids = features.values()
        return KeyedJaggedTensor(features.keys(), ids, 1 / (1 + ids), features.lengths())


def _weighed(kind: str) -> nn.Module:
    """Longest bags of each feature that differ; "other" has no weights in a collection."""
    longest = {"user": 5, "shop": 3, "film": 4}
    processors: Any = Rank()
    if kind == "collection":
        processors = PositionWeightedModuleCollection(longest)
    elif kind == "dict":
        processors = {name: PositionWeightedModule(most) for name, most in longest.items()}
    model = FeatureProcessedEmbeddingBagCollection(_bags(is_weighted=True), processors)
    for weight in model.split()[0].parameters():
        nn.init.uniform_(weight)
    return Sum(model)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bags": lambda: Sum(_bags()),
    "weighted bags": lambda: Sum(_bags(is_weighted=True)),
    "ids": lambda: Sum(_ids(False)),
    "ids with indices": lambda: Sum(_ids(True)),
    "DLRM": One,
    "position weights": lambda: _weighed("collection"),
    "position weights in a dict": lambda: _weighed("dict"),
    "weights of a user's": lambda: _weighed("own"),
}


def _batch(
    seed: int, size: int, model: nn.Module | None = None, most: int = 4
) -> tuple[Tensor, KeyedJaggedTensor]:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most, (len(KEYS) * size,), generator=random)
    count = int(lengths.sum())
    weights = torch.rand(count, generator=random)
    collection = getattr(model, "collection", None)
    is_weighted = model is None or (
        isinstance(collection, EmbeddingBagCollection) and collection.is_weighted()
    )
    features = KeyedJaggedTensor(
        KEYS,
        torch.randint(0, ROWS, (count,), generator=random),
        weights if is_weighted else None,
        lengths,
    )
    return torch.rand(size, 3, generator=random), features


def _equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def _gradients(model: nn.Module, found: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    loss = sum((part.float() ** 2).sum() for part in found if part.requires_grad)
    assert isinstance(loss, Tensor)
    return list(torch.autograd.grad(loss, [*model.parameters(), *inputs]))


# tables that share a storage are saved with it, each by its own name
pytestmark = pytest.mark.filterwarnings("ignore:No complete tensor found in the group")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        *[("compile", kind) for kind in MODELS],
        *[("fx", kind) for kind in MODELS if kind != "weights of a user's"],
        ("inductor", "weighted bags"),
        ("inductor", "DLRM"),
        ("inductor", "position weights"),
    ],
)
def test_traced_and_compiled_models_train_like_the_eager_one(way: str, kind: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    if way == "fx":
        other: Any = symbolic_trace(model)
    else:
        backend = "inductor" if way == "inductor" else "aot_eager"
        other = torch.compile(model, fullgraph=True, backend=backend)
    for seed, size in enumerate([3, 5, 1, 0, 2]):
        dense, features = _batch(seed, size, model)
        weights = features.weights_or_none()
        inputs = [] if weights is None else [weights.requires_grad_()]
        expected, found = model(dense, features), other(dense, features)
        _equal(found, expected)
        _equal(_gradients(model, found, inputs), _gradients(model, expected, inputs))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11, of itself
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_an_exported_program_serves_any_batch(kind: str, strict: bool) -> None:
    """Sizes 0 and 1 too, and in a process that has the file only."""
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    batches = [_batch(seed, size, model) for seed, size in enumerate([3, 5, 1, 0, 2])]
    expected = [model(*batch) for batch in batches]
    leaves = pytree.tree_leaves(batches[0][1])
    free = ({0: Dim.AUTO}, [None if leaf is None else {0: Dim.AUTO} for leaf in leaves])
    with shapes_config.patch(backed_size_oblivious=True):
        program = torch.export.export(model, batches[0], dynamic_shapes=free, strict=strict)
    for batch, one in zip(batches, expected, strict=True):
        _equal(program.module()(*batch), one)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    del program, model
    gc.collect()  # or the tables of the file would not be the only ones
    loaded: Any = torch.export.load(file).module()
    for batch, one in zip(batches, expected, strict=True):
        _equal(loaded(*batch), one)


@pytest.mark.parametrize("kind", ["bags", "ids", "DLRM"])
def test_ragged_batches_need_few_compilations(kind: str) -> None:
    torch.manual_seed(0)
    model, counter = MODELS[kind](), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for seed in range(20):
        batch = _batch(seed, 2 + seed * 5 % 7, model)
        _equal(compiled(*batch), model(*batch))
    assert counter.frame_count <= 3
    for more, batch in enumerate(
        [_batch(3, 1, model), _batch(1, 0, model), _batch(1, 4, model, most=1)], start=1
    ):
        _equal(compiled(*batch), model(*batch))
        assert counter.frame_count <= 3 + more


def test_a_lookup_without_its_collection_has_the_same_gradients() -> None:
    """Each table with PyTorch's operations, as in a program that was loaded from a file."""
    torch.manual_seed(0)
    for collection in (_bags(is_weighted=True), _ids(False)):
        _, features = _batch(0, 6)
        weights = features.weights().requires_grad_()
        found: list[list[Tensor]] = []
        for tables in (
            list(collection.table_weights().values()),
            [t.detach().clone().requires_grad_() for t in collection.table_weights().values()],
        ):
            parts = *map(list, collection.reads()), False
            of_bags = weights if isinstance(collection, EmbeddingBagCollection) else None
            rows = torch.ops.recsys.look_up(
                tables, KEYS, 6, features.values(), features.lengths(), of_bags, *parts
            )
            inputs = [*tables, *([] if of_bags is None else [of_bags])]
            loss = sum((part**2).sum() for part in rows)
            found.append([*rows, *torch.autograd.grad(loss, inputs)])
        for mine, other in zip(*found, strict=True):
            torch.testing.assert_close(
                mine, other, rtol=1e-2 if mine.dtype.itemsize < 4 else 1e-5, atol=1e-5
            )


def test_two_collections_of_the_same_weights_are_told_apart() -> None:
    first, second = _bags(), _bags()
    second.embedding_bags = first.embedding_bags
    second._read = ["other", *first._read[1:]]
    tables = list(first.table_weights().values())
    assert traced._collection_of(tables, *first.reads()) is first
    assert traced._collection_of(tables, *second.reads()) is second
    moved = [table.clone() for table in tables]
    assert traced._collection_of(moved, *first.reads()) is None


def test_bad_ids_are_named_by_a_compiled_model_too() -> None:
    collection = _bags()
    compiled = torch.compile(collection, fullgraph=True, backend="eager")
    features = KeyedJaggedTensor(
        KEYS, torch.tensor([1, 2, ROWS, 0]), lengths=torch.tensor([1, 1, 1, 1])
    )
    with pytest.raises(IndexError, match=f"Id {ROWS} at .*of feature 'shop'"):
        compiled(features)


def test_bags_longer_than_their_weights_are_named_by_a_compiled_model_too() -> None:
    model = _weighed("collection")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    lengths = torch.tensor([0, 0, 1, 0, 0, 4, 0, 0])
    features = KeyedJaggedTensor(KEYS, torch.arange(5), lengths=lengths)
    for one in (model, compiled, symbolic_trace(model)):
        with pytest.raises(ValueError, match=r"3; received 4 ids.*1.*feature 'sh"):
            one(torch.ones(2, 3), features)


class Half(FeatureProcessor):
    """A processor of one feature."""

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        ids = features.values()
        return JaggedTensor(ids, 0.5 * torch.ones(ids.shape), features.lengths())


def test_processors_called_feature_by_feature_run_eagerly_or_are_refused() -> None:
    processors = {name: Half() for name in KEYS[:3]}
    model = FeatureProcessedEmbeddingBagCollection(_bags(is_weighted=True), processors)
    _, features = _batch(0, 3, model)
    found = torch.compile(model, backend="eager")(features)
    assert torch.equal(found.values(), model(features).values())
    torch._dynamo.reset()
    # the message of torch 2.13, or of torch 2.11
    said = "feature processors (in a dict run eagerly|of the whole batch)"
    with pytest.raises(Exception, match=said):
        torch.compile(model, backend="eager", fullgraph=True)(features)
    with pytest.raises(ValueError, match=r"received \['Half'\], which are called per"):
        symbolic_trace(model)
    with pytest.raises(ValueError, match=r"received \['Half'\], which are called per"):
        torch.export.export(model, (features,), strict=False)


def _varied() -> KeyedJaggedTensor:
    ones = torch.ones(len(KEYS) * 2, dtype=torch.int64)
    return KeyedJaggedTensor(
        KEYS,
        ones,
        lengths=ones,
        stride_per_key_per_rank=[[2]] * len(KEYS),
        inverse_indices=(KEYS, torch.tensor([[0, 1, 1]] * len(KEYS))),
    )


def test_what_a_graph_cannot_do_is_refused() -> None:
    collection = _bags()
    with pytest.raises(ValueError, match=r"exported EmbeddingBagCollection takes .*one batch size"):
        torch.export.export(collection, (_varied(),), strict=False)
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"are updated in backward.* call eval\(\)"):
        symbolic_trace(collection)
    graph = symbolic_trace(collection.eval())
    _, features = _batch(0, 3)
    assert torch.equal(graph(features).values(), collection(features).values())


@pytest.mark.parametrize("is_weighed", [False, True])
def test_a_compiled_model_takes_a_batch_size_per_feature(is_weighed: bool) -> None:
    collection: Any = _weighed("collection").collection if is_weighed else _bags()
    compiled = torch.compile(collection, backend="eager")  # by a graph break
    features = _varied()
    assert torch.equal(compiled(features).values(), collection(features).values())


def test_outputs_are_the_real_containers() -> None:
    _, features = _batch(0, 3, MODELS["bags"]())
    for compiled in (
        symbolic_trace(_bags()),
        torch.compile(_bags(), fullgraph=True, backend="eager"),
    ):
        found: Any = compiled(features)
        assert type(found) is KeyedTensor
        assert found.to_dict().keys() == {"shop", "film@shops", "film@films", "user"}
    for compiled in (
        symbolic_trace(_ids(True)),
        torch.compile(_ids(True), fullgraph=True, backend="eager"),
    ):
        found = compiled(features)
        assert type(found["shop"]) is JaggedTensor
        assert torch.equal(found["shop"].lengths(), features["shop"].lengths())
        assert torch.equal(found["shop"].weights(), features["shop"].values())


def test_hooks_run_once() -> None:
    collection, calls = _bags(), list[str]()
    collection.register_forward_hook(lambda *_: calls.append("forward"))
    _, features = _batch(0, 3, MODELS["bags"]())
    torch.compile(collection, backend="eager")(features)
    assert calls == ["forward"]
