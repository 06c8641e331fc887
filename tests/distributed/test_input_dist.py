"""What is wrong with one rank's input is raised on every rank, before any row changes."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from recsys.distributed.types import ShardingType
from recsys.kernels.types import BoundsCheckMode
from recsys.optim import RowWiseAdagrad
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import FEATURES, Case, counted_collectives, shard
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
    """Returns this rank's error; checks that tables are as before and training goes on."""
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
        elif kind == "float":
            batch = KeyedJaggedTensor(FEATURES, torch.zeros(0), lengths=torch.zeros(12).int())
        elif kind == "missing":
            batch = (
                batch.split([1, 3])[1] if feature == 0 else batch.split([feature, 4 - feature])[0]
            )
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
    start = (
        f"IndexError: On rank 1: Id {bad} of feature {feature!r} is out of range for table "
        f"{smallest.name!r} with {smallest.num_embeddings} rows"
    )
    assert messages[0].startswith(start), messages[0]
    assert f"sample {sample}; 1 bad id in the batch" in messages[0]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "float",
            "TypeError: On rank 0: The ids of a batch must be int32 or int64; received torch.fl",
        ),
        ("missing", "KeyError: On rank 0: The batch lacks the features ["),
    ],
)
def test_other_bad_input_on_one_rank_raises_the_same_error_on_all(
    ranks: RankPool, kind: str, text: str
) -> None:
    messages = ranks(2, _raise_everywhere, _case(1, KINDS[0], 2), 0, kind)
    assert len(set(messages)) == 1, messages
    assert messages[0].startswith(text), messages[0]


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
    assert all("Id 1000000 of feature 'f0' is out of range" in text for text in texts)
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
