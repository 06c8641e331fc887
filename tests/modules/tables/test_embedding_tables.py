"""Changes of modules, followed by training: the lookup must keep reading the parameters."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.fx import symbolic_trace
from recsys.kernels.types import UpdateMode
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.feature_processor import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.optim import optimizers
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.allocations import Allocations
from tests.saved import through_torch_save

TABLES = [
    EmbeddingBagConfig(20, 4, "a", feature_names=["f"]),
    EmbeddingBagConfig(30, 8, "b", feature_names=["g", "h"]),
    EmbeddingBagConfig(5, 4, "c", feature_names=["i"]),
]


def batch(seed: int = 0) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (4 * 3,), generator=generator)
    values = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=["f", "g", "h", "i"], values=values, lengths=lengths)


def build(owner: str) -> EmbeddingBagCollection:
    torch.manual_seed(7)
    ebc = EmbeddingBagCollection(tables=TABLES)
    if owner == "table":
        apply_optimizer_in_backward(optimizers.Adam, ebc.parameters(), {"lr": 0.1})
    return ebc


def train(ebc: EmbeddingBagCollection, owner: str, steps: range = range(2)) -> None:
    optimizer = None if owner == "table" else optimizers.SGD(ebc.parameters(), lr=0.1)
    for step in steps:
        ebc(batch(step)).values().square().sum().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def via_pickle(ebc: EmbeddingBagCollection) -> EmbeddingBagCollection:
    return pickle.loads(pickle.dumps(ebc))


def via_assign(ebc: EmbeddingBagCollection) -> EmbeddingBagCollection:
    ebc.load_state_dict({k: v.clone() for k, v in ebc.state_dict().items()}, assign=True)
    return ebc


def via_data(ebc: EmbeddingBagCollection) -> EmbeddingBagCollection:
    table = ebc.embedding_bags["b"]
    table.weight.data = table.weight.data.clone()
    return ebc


def via_new_parameter(ebc: EmbeddingBagCollection) -> EmbeddingBagCollection:
    table = ebc.embedding_bags["a"]
    table.weight = nn.Parameter(table.weight.detach().clone())
    return ebc


def via_meta_and_back(ebc: EmbeddingBagCollection) -> EmbeddingBagCollection:
    state = {k: v.clone() for k, v in ebc.state_dict().items()}
    ebc.to_empty(device="cpu")
    ebc.load_state_dict(state)
    return ebc


CHANGES: list[Callable[[EmbeddingBagCollection], EmbeddingBagCollection]] = [
    copy.deepcopy,
    via_pickle,
    through_torch_save,
    via_assign,
    via_data,
    via_new_parameter,
    via_meta_and_back,
    lambda ebc: ebc.to(torch.float64).to(torch.float32),
    lambda ebc: ebc.share_memory(),
]
NAMES = ["deepcopy", "pickle", "save", "assign", "data", "parameter", "empty", "to", "share"]


@pytest.mark.parametrize("owner", ["user", "table"])
@pytest.mark.parametrize("change", CHANGES, ids=NAMES)
@pytest.mark.parametrize("when", ["fresh", "trained"])
def test_training_goes_on_as_if_nothing_had_happened(
    change: Callable[[EmbeddingBagCollection], EmbeddingBagCollection], owner: str, when: str
) -> None:
    if change is via_new_parameter and when == "fresh":
        owner = "user"  # no lookup has seen yet that the old parameter owned an optimizer
    steps = range(2) if when == "trained" else range(0)
    plain, changed = build(owner), build(owner)
    train(plain, owner, steps)
    train(changed, owner, steps)
    changed = change(changed)
    for ebc in (plain, changed):
        train(ebc, owner, range(2, 4))
    assert [n for n, _ in changed.named_parameters()] == [n for n, _ in plain.named_parameters()]
    for a, b in zip(plain.parameters(), changed.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    out = changed(batch()).values()
    assert torch.equal(out, copy.deepcopy(changed)(batch()).values())
    excluded = list(optimizers.in_backward_optimizer_filter(changed.named_parameters()))
    assert len(excluded) == (0 if owner == "table" else 3)


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda ebc: ebc.double(),
        lambda ebc: ebc.half(),
        lambda ebc: ebc.to_empty(device="cpu"),
    ],
    ids=["deepcopy", "double", "half", "empty"],
)
def test_tables_that_move_are_allocated_once(
    change: Callable[[EmbeddingBagCollection], EmbeddingBagCollection],
) -> None:
    sizes = {"a": (5000, 8), "b": (7000, 4), "c": (1, 8)}
    tables = [EmbeddingBagConfig(*size, name, feature_names=[name]) for name, size in sizes.items()]
    ebc = EmbeddingBagCollection(tables=tables)
    features = KeyedJaggedTensor(["a", "b", "c"], torch.zeros(3).int(), lengths=torch.ones(3).int())
    ebc(features)
    with Allocations(*(group.tbe.storage for group in ebc._current_lookups().groups)) as allocated:
        changed = change(ebc)
        with torch.no_grad():
            changed(features)
    num_bytes = sum(parameter.nbytes for parameter in changed.parameters())
    assert num_bytes <= allocated.num_bytes < 1.1 * num_bytes


def test_a_copy_is_independent() -> None:
    ebc = build("table")
    train(ebc, "table")
    before = [p.detach().clone() for p in ebc.parameters()]
    train(copy.deepcopy(ebc), "table")
    assert all(torch.equal(a, b) for a, b in zip(before, ebc.parameters(), strict=True))


@pytest.mark.parametrize("owner", ["user", "table"])
def test_half_trains(owner: str) -> None:
    ebc = build(owner)
    train(ebc, owner)
    ebc = ebc.half()
    before = [p.detach().clone() for p in ebc.parameters()]
    train(ebc, owner)
    for a, b in zip(before, ebc.parameters(), strict=True):
        assert b.dtype is torch.float16
        assert not torch.equal(a, b)


def test_a_half_child_is_noticed() -> None:
    ebc = build("user")
    train(ebc, "user")
    ebc.embedding_bags["b"].bfloat16()
    train(ebc, "user")
    assert len(ebc._current_lookups().groups) == 2


def test_pickle_carries_each_table_once() -> None:
    big = [EmbeddingBagConfig(1000, 16, f"t{i}", feature_names=[f"f{i}"]) for i in range(10)]
    ebc = EmbeddingBagCollection(tables=big)
    assert len(pickle.dumps(ebc)) < 1.2 * 10 * 1000 * 16 * 4


def _add_one(ebc: EmbeddingBagCollection) -> None:
    with torch.no_grad():
        for parameter in ebc.parameters():
            parameter.add_(1)
        ebc(batch())


def test_shared_memory_is_shared_with_another_process() -> None:
    ebc = build("user")
    ebc.share_memory()
    before = ebc(batch()).values().detach().clone()
    process = mp.get_context("spawn").Process(target=_add_one, args=(ebc,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert not torch.equal(ebc(batch()).values(), before)
    train(ebc, "user")
    assert all(p.is_shared() for p in ebc.parameters())


def test_training_does_not_rebuild_lookups() -> None:
    ebc = build("table")
    train(ebc, "table")
    lookups = ebc._lookups
    train(ebc, "table")
    ebc.eval()
    ebc(batch())
    ebc.load_state_dict(ebc.state_dict())
    ebc(batch())
    assert ebc._lookups is lookups


# -- tables that own an optimizer -------------------------------------------------------------


def test_fused_tables_are_updated_in_backward_without_gradients() -> None:
    ebc = build("table")
    before = [p.detach().clone() for p in ebc.parameters()]
    ebc(batch()).values().sum().backward()
    (group,) = ebc._current_lookups().groups
    assert group.tbe.update_mode is UpdateMode.FUSED
    for old, parameter in zip(before, ebc.parameters(), strict=True):
        assert parameter.grad is None
        assert not torch.equal(old, parameter)


def test_fused_tables_do_not_wake_the_optimizers_of_dense_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(optimizers.Adam, "step", refuse)
    for ebc in (build("table"), copy.deepcopy(build("table"))):
        train(ebc, "table")
        parameter = ebc.embedding_bags["a"].weight
        assert not parameter._post_accumulate_grad_hooks


def test_attaching_after_a_first_forward_is_noticed() -> None:
    ebc = build("user")
    ebc(batch())
    apply_optimizer_in_backward(torch.optim.SGD, [ebc.embedding_bags["b"].weight], {"lr": 0.1})
    before = {n: p.detach().clone() for n, p in ebc.named_parameters()}
    ebc(batch()).values().sum().backward()
    assert ebc.embedding_bags["a"].weight.grad is not None
    assert ebc.embedding_bags["b"].weight.grad is None
    assert torch.equal(before["embedding_bags.a.weight"], ebc.embedding_bags["a"].weight)
    assert not torch.equal(before["embedding_bags.b.weight"], ebc.embedding_bags["b"].weight)


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.5}),
        (torch.optim.Adagrad, {"lr": 0.5, "eps": 1e-4}),
        (torch.optim.Adam, {"lr": 0.5}),
        (optimizers.RowWiseAdagrad, {"lr": 0.5}),
    ],
)
def test_torchs_own_attachment_means_the_same(
    optimizer: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    own, torchs = build("user"), build("user")
    apply_optimizer_in_backward(optimizer, own.parameters(), settings)
    _apply_optimizer_in_backward(optimizer, torchs.parameters(), settings)
    (of_a,) = torchs.embedding_bags["a"].weight._in_backward_optimizers
    scheduler = torch.optim.lr_scheduler.StepLR(of_a, 1, gamma=0.0)
    for _ in range(3):
        for collection in (own, torchs):
            collection(batch()).values().square().sum().backward()
    for (name, a), b in zip(own.named_parameters(), torchs.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert b.grad is None
        for parameter in (a, b):
            assert parameter._optimizer_classes == [optimizer]
            assert parameter._optimizer_kwargs == [settings]
    of_a.step()  # of a parameter without a gradient
    scheduler.step()  # its rate is 0 from now on
    before = [parameter.detach().clone() for parameter in torchs.parameters()]
    torchs(batch()).values().square().sum().backward()
    unmoved = [torch.equal(a, b) for a, b in zip(before, torchs.parameters(), strict=True)]
    assert unmoved == [True] + [False] * (len(before) - 1)


def test_torchs_own_attachment_that_tables_do_not_know_is_refused_by_name() -> None:
    collection = build("user")
    _apply_optimizer_in_backward(torch.optim.RMSprop, collection.parameters(), {"lr": 0.5})
    with pytest.raises(ValueError, match=r"Table 'a' cannot own.*optimizer.*RMSprop"):
        collection(batch())
    collection = build("user")
    for optimizer in (torch.optim.SGD, torch.optim.Adam):
        _apply_optimizer_in_backward(optimizer, collection.parameters(), {"lr": 0.5})
    with pytest.raises(ValueError, match=r"one optimizer; received \['SGD', 'Adam'\]"):
        collection(batch())


def test_torchs_own_attachment_after_a_first_forward_trains_as_torch_does() -> None:
    collection = build("user")
    before = [parameter.detach().clone() for parameter in collection.parameters()]
    collection(batch())
    _apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.5})
    collection(batch()).values().square().sum().backward()
    assert all(not torch.equal(a, b) for a, b in zip(before, collection.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"Adagrad has updated .*\[20, 4\] already"):
        copy.deepcopy(collection)


@pytest.mark.parametrize("attach", [apply_optimizer_in_backward, _apply_optimizer_in_backward])
def test_a_new_parameter_of_a_table_tells_the_optimizer_that_was_attached(attach: Any) -> None:
    collection = build("user")
    attach(torch.optim.Adam, collection.parameters(), {"lr": 0.5})
    collection(batch())
    table = collection.embedding_bags["a"]
    table.weight = nn.Parameter(table.weight.detach().clone())
    collection(batch()).values().sum().backward()
    assert table.weight._optimizer_classes == [torch.optim.Adam]  # type: ignore[attr-defined]
    assert table.weight._optimizer_kwargs == [{"lr": 0.5}]  # type: ignore[attr-defined]


def test_a_learning_rate_scheduler_reaches_the_tables() -> None:
    ebc = build("table")
    attached = ebc.embedding_bags["a"].weight._in_backward_optimizers[0]
    attached.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in ebc.parameters()]
    train(ebc, "table")
    assert all(torch.equal(a, b) for a, b in zip(before, ebc.parameters(), strict=True))


def test_an_optimizer_that_tables_do_not_know_is_refused_by_name() -> None:
    ebc = EmbeddingBagCollection(tables=TABLES)
    apply_optimizer_in_backward(torch.optim.RMSprop, ebc.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"Table 'a' cannot own .*RMSprop"):
        ebc(batch())


def test_optimizer_state_is_live_by_table_name() -> None:
    ebc = build("table")
    train(ebc, "table")
    states = ebc.optimizer_states()
    assert list(states) == ["a", "b", "c"]
    assert states["b"]["exp_avg"].shape == (30, 8)
    assert states["b"]["step"] == 2
    assert build("user").optimizer_states() == {}


# -- initial values ---------------------------------------------------------------------------


def test_initial_values_are_in_range_and_come_from_the_global_seed() -> None:
    first, second = build("user"), build("user")
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.abs().max() <= a.shape[0] ** -0.5
    other = EmbeddingBagCollection(tables=TABLES)
    assert not torch.equal(other.embedding_bags["a"].weight, first.embedding_bags["a"].weight)
    first.reset_parameters()
    assert not torch.equal(first.embedding_bags["a"].weight, second.embedding_bags["a"].weight)
    assert torch.equal(first.initial_rows(1, 3, 9), first.embedding_bags["b"].weight[3:9])


def test_a_meta_collection_allocates_nothing_and_knows_its_initial_rows() -> None:
    torch.manual_seed(7)
    ebc = EmbeddingBagCollection(tables=TABLES, device=torch.device("meta"))
    assert all(p.is_meta for p in ebc.parameters())
    assert torch.equal(ebc.initial_rows(2, 0, 5), build("user").embedding_bags["c"].weight)


@pytest.mark.parametrize("optimizer", [optimizers.SGD, optimizers.Adam, optimizers.RowWiseAdagrad])
def test_tables_with_an_optimizer_come_from_meta_by_to_empty(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    expected, found = build("user"), EmbeddingBagCollection(tables=TABLES, device="meta")
    for ebc in (expected, found):
        apply_optimizer_in_backward(optimizer, ebc.parameters(), {"lr": 0.1})
    found.to_empty(device="cpu")
    found.load_state_dict(expected.state_dict())
    for ebc in (expected, found):
        train(ebc, "table")
    for a, b in zip(expected.parameters(), found.parameters(), strict=True):
        assert torch.equal(a, b)


def test_repr_is_the_module_tree() -> None:
    assert "(b): EmbeddingBag(30, 8, mode='sum')" in repr(build("user"))


def test_tables_on_two_devices_raise() -> None:
    ebc = build("user")
    ebc.embedding_bags["b"].to("meta")
    with pytest.raises(
        ValueError, match=r"tables of one EmbeddingBagCollection .*\['cpu', 'meta'\]"
    ):
        ebc(batch())


def test_tables_may_have_names_that_modules_and_dicts_use() -> None:
    names = ["items", "keys", "values", "pop", "training", "forward"]
    tables = [EmbeddingBagConfig(8, 4, name, feature_names=[name]) for name in names]
    ebc = EmbeddingBagCollection(tables=tables)
    features = KeyedJaggedTensor(names, torch.arange(6), lengths=torch.ones(6, dtype=torch.int32))
    assert list(ebc.state_dict()) == [f"embedding_bags.{name}.weight" for name in names]
    again = copy.deepcopy(ebc)
    again.load_state_dict(ebc.state_dict())
    expected = ebc(features).values()
    torch.testing.assert_close(again(features).values(), expected)
    sharded = DistributedModelParallel(ebc, device=torch.device("cpu"))
    assert list(sharded.state_dict()) == list(again.state_dict())
    torch.testing.assert_close(sharded(features).values(), expected)
    for model in (again, sharded):
        assert not any(module.training for module in model.eval().modules())
        torch.testing.assert_close(model(features).values(), expected)


def _in_a_buffer(spare: int) -> KeyedJaggedTensor:
    """A batch with as many ids to spare, which no table has, and whose weights are NaN."""
    ids = torch.cat([torch.tensor([1, 2, 0, 2]), torch.full((spare,), 99)])
    weights = torch.cat([torch.arange(1.0, 5.0), torch.full((spare,), torch.nan)])
    return KeyedJaggedTensor(["f", "g"], ids, weights, torch.tensor([2, 0, 1, 1]))


def _collections() -> dict[str, nn.Module]:
    sizes = {"t": "f", "u": "g"}
    bags = [EmbeddingBagConfig(3, 4, name, feature_names=[f]) for name, f in sizes.items()]
    rows = [EmbeddingConfig(3, 4, name, feature_names=[f]) for name, f in sizes.items()]
    weighted = EmbeddingBagCollection(bags, is_weighted=True)
    positions = PositionWeightedModuleCollection({"f": 2, "g": 2})
    return {
        "bags": EmbeddingBagCollection(bags),
        "weighted bags": weighted,
        "positions": FeatureProcessedEmbeddingBagCollection(weighted, positions),
        "processors": FeatureProcessedEmbeddingBagCollection(
            weighted, {f: PositionWeightedModule(2) for f in sizes.values()}
        ),
        "rows": EmbeddingCollection(rows),
        "some keys": EmbeddingBagCollection(bags[1:]),
    }


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo looks at it
@pytest.mark.parametrize("way", ["eager", "graph", "scripted", "compiled"])
@pytest.mark.parametrize("kind", _collections())
def test_what_follows_the_last_bag_is_never_read(kind: str, way: str) -> None:
    module: Any = _collections()[kind]
    called = {
        "eager": lambda: module,
        "graph": lambda: symbolic_trace(module),
        "scripted": lambda: torch.jit.script(module),
        "compiled": lambda: torch.compile(module, backend="eager"),
    }[way]()
    found, wanted = called(_in_a_buffer(3)), module(_in_a_buffer(0))
    if isinstance(wanted, dict):
        found, wanted = ({k: bags.values() for k, bags in d.items()} for d in (found, wanted))
    else:
        found, wanted = found.to_dict(), wanted.to_dict()
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert torch.equal(found[key], values)
