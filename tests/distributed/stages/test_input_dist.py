"""Invalid input of one rank is raised on every rank, before any row changes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.shard import shard as shard_module
from recsys.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from recsys.distributed.types import ShardingEnv, ShardingPlan, ShardingType
from recsys.kernels.types import BoundsCheckMode
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import CPU, FEATURES, Case, counted_collectives, shard
from tests.ranks import RankPool

KINDS = [
    (ShardingType.TABLE_WISE,),
    (ShardingType.ROW_WISE,),
    (ShardingType.COLUMN_WISE,),
    (ShardingType.DATA_PARALLEL,),
]


def _good_batch(case: Case) -> KeyedJaggedTensor:
    return case.batches(3)[dist.get_rank()]


def _with_id(batch_size: int, feature: int, position: int, bad: int) -> KeyedJaggedTensor:
    lengths = torch.ones(len(FEATURES) * batch_size, dtype=torch.int64)
    values = torch.zeros(len(FEATURES) * batch_size, dtype=torch.int64)
    values[feature * batch_size + position] = bad
    return KeyedJaggedTensor(FEATURES, values, lengths=lengths)


def _raise_everywhere(case: Case, failing: int, kind: str) -> str:
    """Return this rank's error; check that tables are unchanged and training continues."""
    model = shard(case)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    table = case.configs()[0]
    feature = FEATURES.index(table.feature_names[0])
    batch = _with_id(3, 0, 0, 0)
    if dist.get_rank() == failing:
        if kind == "id":
            batch = _with_id(3, feature, 2, table.num_embeddings)
        elif kind == "negative":
            batch = _with_id(3, feature, 1, -1)
    try:
        model(batch)
    except (IndexError, KeyError, TypeError) as error:
        message = f"{type(error).__name__}: {error.args[0]}"
    else:
        message = "no error"
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0)
    _, logits = model(_with_id(2, 0, 0, 0))
    logits.sum().backward()
    return message


def _case(seed: int, kinds: tuple[ShardingType, ...], world_size: int) -> Case:
    while Case(seed, world_size).is_weighted:
        seed += 1
    return Case(seed, world_size, types=kinds, optimizer=RowWiseAdagrad)


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: kinds[0].value)
@pytest.mark.parametrize("kind", ["id", "negative"])
def test_bad_id_on_one_rank_raises_the_same_error_on_all(
    ranks: RankPool, kinds: tuple[ShardingType, ...], kind: str
) -> None:
    case = _case(0, kinds, 3)
    table = case.configs()[0]
    messages = ranks(3, _raise_everywhere, case, 1, kind)
    assert len(set(messages)) == 1, messages
    bad, sample = (table.num_embeddings, 2) if kind == "id" else (-1, 1)
    feature = table.feature_names[0]
    smallest = min(
        (c for c in case.configs() if feature in c.feature_names), key=lambda c: c.num_embeddings
    )
    rows = smallest.num_embeddings
    pattern = (
        rf"IndexError: On rank 1: Id {bad} at position \d+ of feature {feature!r} must be from 0 "
        rf"to {rows - 1}\. Table {smallest.name!r} has {rows} rows; the batch has 1 bad id, the "
        rf"first in sample {sample}\."
    )
    assert re.match(pattern, messages[0]), messages[0]


def _ids(**told: list[int]) -> KeyedJaggedTensor:
    tensors = {name: torch.tensor(numbers) for name, numbers in told.items()}
    return KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2, 0]), **tensors)


def _with_strides(inverse_of_g: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["f", "g"],
        torch.tensor([1, 2, 0]),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key=[1, 2],
        inverse_indices=(["f", "g"], torch.tensor([[0, 0], inverse_of_g])),
    )


def _with_weights(weights: torch.Tensor | None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["f", "g"], torch.tensor([1, 2]), weights, lengths=torch.ones(2, dtype=torch.int64)
    )


ONES = torch.ones(2, dtype=torch.int64)
FAULTS: dict[str, tuple[Callable[[], object], str]] = {
    "a tensor": (
        lambda: torch.tensor([1, 2]),
        "TypeError: {0} takes a KeyedJaggedTensor; received a tensor of shape (2,)",
    ),
    "None": (lambda: None, "TypeError: {0} takes a KeyedJaggedTensor; received None"),
    "a dict": (lambda: {"f": ONES}, "TypeError: {0} takes a KeyedJaggedTensor; received a dict"),
    "floats": (
        lambda: KeyedJaggedTensor(["f", "g"], torch.ones(2), lengths=ONES),
        "TypeError: {0} looks up ids, which must be int32 or int64; received torch.float32",
    ),
    "two dims": (
        lambda: KeyedJaggedTensor(["f", "g"], torch.ones(2, 3).long(), lengths=ONES),
        "ValueError: {0} looks up ids, which must have one dim, [ids]; received values of shape "
        "(2, 3)",
    ),
    "a missing feature": (
        lambda: KeyedJaggedTensor(["f"], ONES, lengths=ONES),
        "MissingKeyError: The batch lacks the features ['g']",
    ),
    "a negative length": (
        lambda: _ids(lengths=[2, -1, 2, 0]),
        "ValueError: KeyedJaggedTensor.lengths must not be negative; received length -1 at bag 1 "
        'of feature "f"',
    ),
    "wrong sum": (
        lambda: _ids(lengths=[2, 1, 2, 0]),
        "ValueError: KeyedJaggedTensor.lengths must add up to at most the number of values; "
        "received lengths that add up to 5 for 3 values",
    ),
    "decreasing offsets": (
        lambda: _ids(offsets=[0, 3, 1, 3, 3]),
        "ValueError: KeyedJaggedTensor.offsets must not decrease; received length -2 at bag 1 of "
        'feature "f"',
    ),
    "offsets far outside": (
        lambda: _ids(offsets=[0, 900_000, 2, 3, 3]),
        "ValueError: KeyedJaggedTensor.offsets must not decrease; received length -899998 at bag 1",
    ),
}
POOLED_FAULTS: dict[str, tuple[Callable[[], object], str]] = FAULTS | {
    "inverse indices too large": (
        lambda: _with_strides([1, 2]),
        'ValueError: KeyedJaggedTensor.inverse_indices of feature "g" must be in 0..1; received 2',
    ),
    "negative inverse indices": (
        lambda: _with_strides([-1, 0]),
        'ValueError: KeyedJaggedTensor.inverse_indices of feature "g" must be in 0..1; received -1',
    ),
    "inverse indices of some keys": (
        lambda: KeyedJaggedTensor(
            ["f", "g"],
            torch.tensor([1, 2, 0]),
            lengths=torch.ones(3, dtype=torch.int64),
            stride_per_key=[1, 2],
            inverse_indices=(["f"], torch.tensor([[0, 0]])),
        ),
        "ValueError: KeyedJaggedTensor.inverse_indices must cover every key that is looked up; "
        "received none for ['g']",
    ),
    "no inverse indices": (
        lambda: KeyedJaggedTensor(
            ["f", "g"],
            torch.zeros(3, dtype=torch.int64),
            lengths=torch.ones(3, dtype=torch.int64),
            stride_per_key=[1, 2],
        ),
        "ValueError: A pooled lookup of features with different batch sizes needs inverse_indices",
    ),
}
WEIGHTED_FAULTS: dict[str, tuple[Callable[[], object], str]] = {
    "no weights": (
        lambda: _with_weights(None),
        "ValueError: {0} was built with is_weighted=True and needs one weight per id",
    ),
    "weights of two dims": (
        lambda: _with_weights(torch.ones(2, 3)),
        "ValueError: {0} multiplies each id's row by a number, so weights must have one dim",
    ),
    "weights of integers": (
        lambda: _with_weights(ONES),
        "TypeError: {0} needs weights of a floating dtype; received torch.int64",
    ),
}
BY_KIND = {"pooled": POOLED_FAULTS, "weighted": WEIGHTED_FAULTS, "sequence": FAULTS}


def _collection(kind: str) -> EmbeddingBagCollection | EmbeddingCollection:
    sizes = {"t": "f", "u": "g"}
    if kind == "sequence":
        return EmbeddingCollection(
            tables=[EmbeddingConfig(3, 4, name, feature_names=[f]) for name, f in sizes.items()]
        )
    return EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(3, 4, name, feature_names=[f]) for name, f in sizes.items()],
        is_weighted=kind == "weighted",
    )


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error.args[0]}"
    return "no error"


def _look_up_fault(kind: str, fault: str) -> str:
    """Return this rank's error where rank 1 has the fault; check that training continues."""
    collection = _collection(kind)
    plan = construct_module_sharding_plan(
        collection, {"t": table_wise(rank=0), "u": row_wise()}, world_size=2, device_type="cpu"
    )
    model = DistributedModelParallel(
        collection, plan=ShardingPlan({"": plan}), device=torch.device("cpu")
    )
    weights = torch.ones(3) if kind == "weighted" else None
    good = KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2, 0]), weights, torch.tensor([2, 1]))
    bad, _ = BY_KIND[kind][fault]
    said = _error_of(lambda: model(bad() if dist.get_rank() == 1 else good))
    assert len(model(good).keys()) == 2
    return said


@pytest.mark.parametrize(
    ("kind", "fault"), [(kind, fault) for kind, faults in BY_KIND.items() for fault in faults]
)
def test_a_batch_that_does_not_fit_raises_the_same_error_on_all(
    ranks: RankPool, kind: str, fault: str
) -> None:
    messages = ranks(2, _look_up_fault, kind, fault)
    owner = f"Sharded{type(_collection(kind)).__name__}"
    name, text = BY_KIND[kind][fault][1].format(owner).split(": ", 1)
    assert len(set(messages)) == 1, messages
    assert messages[0].startswith(f"{name}: On rank 1: {text}"), messages[0]


@pytest.mark.parametrize(
    ("kind", "fault"), [(kind, fault) for kind, faults in BY_KIND.items() for fault in faults]
)
def test_a_batch_that_does_not_fit_raises_unsharded(kind: str, fault: str) -> None:
    collection = _collection(kind)
    bad, text = BY_KIND[kind][fault]
    message = _error_of(lambda: collection(bad()))
    if fault == "a missing feature":
        assert message.startswith("MissingKeyError"), message
    else:
        assert message.startswith(text.format(type(collection).__name__)), message


def _long(kind: str, spare: int, told: bool) -> KeyedJaggedTensor:
    """A batch in a buffer with as many ids to spare, which no table has; weights there are NaN."""
    ids = torch.cat([torch.tensor([1, 2, 0, 2]), torch.full((spare,), 99)])
    weights = torch.cat([torch.arange(1.0, 5.0), torch.full((spare,), torch.nan)])
    return KeyedJaggedTensor(
        ["f", "g"],
        ids,
        weights if kind == "weighted" else None,
        torch.tensor([2, 0, 1, 1]),
        length_per_key=[2, 2] if told else None,
    )


def _train_on(kind: str, spare: int, told: bool) -> list[list[float]]:
    torch.manual_seed(0)
    collection = _collection(kind)
    world_size, spec = dist.get_world_size(), {"t": table_wise(rank=0), "u": row_wise()}
    plan = construct_module_sharding_plan(
        collection, spec, world_size=world_size, device_type="cpu"
    )
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.5})
    model = DistributedModelParallel(
        collection, plan=ShardingPlan({"": plan}), device=torch.device("cpu")
    )
    found: list[torch.Tensor] = []
    for _ in range(2):
        output = model(_long(kind, spare, told))
        if kind == "sequence":
            parts = [part for bags in output.values() for part in (bags.values(), bags.lengths())]
        else:
            parts = [output.values()]
        sum(part.sum() for part in parts if part.is_floating_point()).backward()
        found += parts
    return [part.flatten().tolist() for part in found]


def _look_up_one_of_two() -> list[float]:
    torch.manual_seed(0)
    table = EmbeddingBagConfig(3, 4, "t", feature_names=["f"])
    plan = construct_module_sharding_plan(
        EmbeddingBagCollection([table]), {"t": row_wise()}, world_size=2, device_type="cpu"
    )
    model = DistributedModelParallel(
        EmbeddingBagCollection([table]),
        plan=ShardingPlan({"": plan}),
        device=torch.device("cpu"),
    )
    some_keys = KeyedJaggedTensor(
        ["f", "g"],
        torch.tensor([1, 2, 0]),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key=[1, 2],
        inverse_indices=(["f"], torch.tensor([[0, 0]])),
    )
    found: list[float] = model(some_keys).values().flatten().tolist()
    one_size = KeyedJaggedTensor(["f"], torch.ones(2).long(), lengths=torch.ones(2).long())
    assert found == model(one_size).values().flatten().tolist()
    return found


def test_features_that_no_table_reads_need_no_inverse_indices(ranks: RankPool) -> None:
    one, other = ranks(2, _look_up_one_of_two)
    assert len(one) == 8
    assert one == other


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("kind", ["pooled", "weighted", "sequence"])
def test_what_follows_the_last_bag_is_never_read(
    ranks: RankPool, kind: str, told: bool, world_size: int
) -> None:
    long, short = (ranks(world_size, _train_on, kind, spare, told) for spare in (3, 0))
    assert long == short


def _look_up_bad_id(case: Case, mode: BoundsCheckMode) -> tuple[int, torch.Tensor, torch.Tensor]:
    plan = case.plan()
    for sharding in plan.plan["ebc"].values():
        sharding.bounds_check_mode = mode
    model = shard(case, plan).module.ebc
    batch = _with_id(2, 0, 0, 0)
    good = model(batch).values()
    if dist.get_rank() == 1:
        batch = _with_id(2, 0, 0, 10**6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = model(batch).values()
    texts = [str(w.message) for w in caught]
    assert all("Id 1000000 at position 0 of feature 'f0' must be" in text for text in texts)
    return len(texts), good.detach(), values.detach()


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: kinds[0].value)
@pytest.mark.parametrize("mode", [BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE])
def test_row_0_is_read_only_where_the_user_chose_it(
    ranks: RankPool, kinds: tuple[ShardingType, ...], mode: BoundsCheckMode
) -> None:
    case = _case(0, kinds, 2)
    assert any("f0" in c.feature_names for c in case.configs())
    for rank, (num_warnings, good, values) in enumerate(ranks(2, _look_up_bad_id, case, mode)):
        assert num_warnings == (rank == 1 and mode is BoundsCheckMode.WARNING)
        torch.testing.assert_close(values, good)


def _warn_as_error(case: Case) -> str:
    plan = case.plan()
    for sharding in plan.plan["ebc"].values():
        sharding.bounds_check_mode = BoundsCheckMode.WARNING
    model = shard(case, plan).module.ebc
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return _error_of(lambda: model(_with_id(2, 0, 0, 10**6 * dist.get_rank())))


def test_a_warning_that_is_an_error_is_one_on_all_ranks(ranks: RankPool) -> None:
    first, second = ranks(2, _warn_as_error, _case(0, KINDS[0], 2))
    assert first == second
    assert first.startswith("IndexError: On rank 1: "), first
    assert "Id 1000000 at position 0 of feature 'f0' must be" in first


def _count_collectives(case: Case) -> dict[str, dict[str, int]]:
    model = shard(case)
    with counted_collectives() as forward:
        pooled = model.module.ebc(_good_batch(case)).values()
    with counted_collectives() as backward:
        pooled.sum().backward()
    return {"forward": dict(forward), "backward": dict(backward)}


@pytest.mark.parametrize("kinds", [KINDS[0], KINDS[1], KINDS[2], sum(KINDS[:3], ())])
def test_a_mix_of_strategies_costs_no_more_collectives_than_one(
    ranks: RankPool, kinds: tuple[ShardingType, ...]
) -> None:
    # SGD: no row statistics to exchange for column splits
    case = Case(7, 2, types=kinds)
    assert (
        ranks(2, _count_collectives, case)
        == [{"forward": {"all_to_all_single": 3}, "backward": {"all_to_all_single": 1}}] * 2
    )


def test_replicated_tables_and_column_splits_add_one_collective_each(ranks: RankPool) -> None:
    case = Case(7, 2, types=KINDS[3])
    (counts, _) = ranks(2, _count_collectives, case)
    assert counts == {"forward": {"all_to_all_single": 1}, "backward": {"all_reduce": 1}}
    case = Case(12, 2, types=KINDS[2], optimizer=RowWiseAdagrad)
    (counts, _) = ranks(2, _count_collectives, case)
    assert counts["backward"] == {"all_to_all_single": 2}


class _Towers(nn.Module):
    """Two collections whose headers are equally long."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.film = (
            EmbeddingBagCollection(
                tables=[EmbeddingBagConfig(9, 4, name, feature_names=["f"])], device=CPU
            )
            for name in ("users", "films")
        )


def _out_of_step(how: str) -> list[str]:
    """Run three steps in which the ranks differ in the second; return this rank's errors."""
    rank = dist.get_rank()
    model: Any = DistributedModelParallel(_Towers(), device=CPU).module
    features = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    messages = []
    for step in range(3):
        order = [model.user, model.film]
        if step == 1 and how == "order" and rank == 1:
            order.reverse()
        alone = step == 1 and how == "alone" and rank == 0
        try:
            with torch.set_grad_enabled(not alone):
                outputs = [part(features).values().sum() for part in order]
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
            continue
        if step != 1:
            sum(outputs).backward()
    return messages


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("order", "rank 0 calls 'user' with gradients, rank 1 calls 'film' with gradients"),
        ("alone", "rank 0 calls 'user' without gradients, rank 1 calls 'user' with gradients"),
    ],
)
def test_ranks_that_are_out_of_step_hear_of_it(ranks: RankPool, how: str, said: str) -> None:
    first, second = ranks(2, _out_of_step, how)
    assert first == second
    assert [bool(message) for message in first] == [False, True, False]
    assert said in first[1]
    assert "an evaluation on rank 0 alone" in first[1]


def test_what_is_given_in_place_of_a_batch_needs_no_stream() -> None:
    """Such as the error of a feature processor, which the header takes to all ranks."""
    env, plan = ShardingEnv.from_local(), {"t": table_wise(rank=0), "u": table_wise(rank=0)}
    sharded: Any = shard_module(_collection("pooled"), plan, env, CPU)
    stream: Any = object()
    with mock.patch.object(torch.Tensor, "record_stream") as recorded:
        for given in (ValueError("a processor's"), {"no": "batch"}):
            trip = sharded.input_stage.prepare(given)
            trip.record_stream(stream)
            assert trip.error is not None
        before = recorded.call_count
        trip = sharded.input_stage.prepare(_ids(lengths=[1, 1, 1, 0]))
        trip.record_stream(stream)
        assert recorded.call_count > before + 2
