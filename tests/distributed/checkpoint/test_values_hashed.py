"""Values keep their rows when a table changes between a vocabulary and hashed ids."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from recsys import DistributedModelParallel, EmbeddingBagCollection
from recsys.distributed.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan, ShardingType
from recsys.features import Categorical, FeatureSpec, Hashed
from recsys.modules.hashed_ids import LFU, AtLeast, DistanceLFU, HashedIds
from recsys.optim import Adam, RowWiseAdagrad, apply_optimizer_in_backward
from tests.distributed.checkpoint.test_delta import always_deltas
from tests.distributed.checkpoint.test_hashed import line_of
from tests.features.plain import fnv, signed
from tests.ranks import RankPool

DIM = 8
TABLES = ("t0", "t1", "t2", "t3")
RULES = (
    HashedIds(),
    HashedIds(eviction=LFU(3), admission=AtLeast(2), unknown="zero"),
    HashedIds(eviction=DistanceLFU(), seed=5),
    HashedIds(eviction=None, seed=-9),
)
KINDS = (
    ShardingType.TABLE_WISE,
    ShardingType.ROW_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.DATA_PARALLEL,
)
Row = list[Any]
"""Weights, and then each state of the optimizer, of a row."""


def _spec(is_hashed: bool, values: Any, rows: int = 256) -> FeatureSpec:
    columns = [
        Hashed(name, rows=rows, growing=True) if is_hashed else Categorical(name) for name in TABLES
    ]
    return FeatureSpec(columns).fit(dict.fromkeys(TABLES, values))


def _model(spec: FeatureSpec, optimizer: Any = RowWiseAdagrad, shift: int = -1) -> Any:
    """Return a model; table i is sharded by kind i + shift, or replicated on one rank for -1."""
    tables = [
        config if config.ids is None else replace(config, ids=rules)
        for config, rules in zip(spec.tables(DIM), RULES, strict=True)
    ]
    model = EmbeddingBagCollection(tables=tables)
    apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.05})
    if shift < 0:
        return DistributedModelParallel(model)
    plan, world = EmbeddingModuleShardingPlan(), list(range(dist.get_world_size()))
    for i, config in enumerate(tables):
        kind = KINDS[(i + shift) % 4]
        if config.ids is not None and kind is ShardingType.DATA_PARALLEL:
            kind = ShardingType.ROW_WISE
        ranks = world[-1:] if kind is ShardingType.TABLE_WISE else world
        plan[config.name] = parameter_sharding(kind, config.num_embeddings, DIM, ranks)
    return DistributedModelParallel(model, plan=ShardingPlan({"": plan}))


def _train(model: Any, spec: FeatureSpec, values: Any, steps: int) -> None:
    batch = spec.transform(dict.fromkeys(TABLES, values)).sparse_features
    for _ in range(steps):
        model(batch).values().pow(2).sum().backward()


def _rows(folder: Path, spec: FeatureSpec, values: Any) -> dict[str, dict[Any, Row]]:
    """Return the rows of the values that a checkpoint has, and its special rows, by table."""
    saved = read_checkpoint(folder, optimizer=True)
    found: dict[str, dict[Any, Row]] = {}
    for table in TABLES:
        weight = f"embedding_bags.{table}.weight"
        arrays = [
            value
            for name, value in sorted(saved.items())
            if weight in name and value.dim() and len(value) == len(saved[weight])
        ]
        assert len(arrays) > 1
        index = f"embedding_bags.{table}.index."
        if f"{index}ids" in saved:
            used = saved[f"{index}last_used"].nonzero().flatten().tolist()
            row_of = {int(saved[f"{index}ids"][row]): row for row in used}
            places = {v: row_of.get(signed(fnv(v)) if isinstance(v, str) else v) for v in values}
            places["unknown"] = 0
        else:
            names = spec.values_of(table, np.arange(len(arrays[0]))).tolist()
            places = {name: row for row, name in enumerate(names)}
            places["missing"], places["unknown"] = 0, 1
        found[table] = {
            value: [array[row].tolist() for array in arrays]
            for value, row in places.items()
            if row is not None and value is not None
        }
    return found


def _compare(
    before: Mapping[str, Mapping[Any, Row]],
    initial: Mapping[str, Mapping[Any, Row]],
    after: Mapping[str, Mapping[Any, Row]],
    new_rows: str,
) -> None:
    """Compare a load into a vocabulary with dicts."""
    for table, rows in after.items():
        old = before[table]
        values = np.array([row[0] for value, row in old.items() if value != "unknown"])
        for value, row in rows.items():
            expected = old.get(value)
            if expected is None:
                first = initial[table][value][0]
                if new_rows == "unknown":
                    first = old["unknown"][0]
                elif new_rows == "mean" and len(values):
                    first = values.mean(0).tolist()
                expected = [first, *initial[table][value][1:]]
            if value not in old and new_rows == "mean":
                assert row[0] == pytest.approx(expected[0], rel=1e-6)
                row, expected = row[1:], expected[1:]
            assert row == expected, (table, value)


def _fits(seed: int) -> tuple[list[Any], FeatureSpec, FeatureSpec, list[Any]]:
    random = np.random.default_rng(seed)
    kind = str if seed % 2 else (lambda number: int(number) * 2**57)
    pools = [[kind(v) for v in random.integers(0, 60, random.integers(1, 90))] for _ in range(2)]
    return sorted({*pools[0], *pools[1]}), _spec(True, pools[0]), _spec(False, pools[1]), pools[0]


@pytest.mark.parametrize("seed", range(6))
def test_a_vocabulary_takes_the_rows_of_hashes(tmp_path: Path, seed: int) -> None:
    values, hashed, fitted, data = _fits(seed)
    torch.manual_seed(seed)
    model, other = _model(hashed), _model(fitted)
    _train(model, hashed, data, 3)
    save_checkpoint(tmp_path / "saved", model, model.fused_optimizer, spec=hashed)
    save_checkpoint(tmp_path / "initial", other, other.fused_optimizer)
    new_rows: Any = ("init", "mean", "unknown")[seed % 3]
    path = tmp_path / "saved"
    load_checkpoint(path, other, other.fused_optimizer, spec=fitted, new_rows=new_rows)
    save_checkpoint(tmp_path / "loaded", other, other.fused_optimizer)
    before = _rows(tmp_path / "saved", hashed, values)
    initial, after = (_rows(tmp_path / n, fitted, values) for n in ("initial", "loaded"))
    assert all(len(before[table]) == len({*data}) + 1 for table in TABLES)
    _compare(before, initial, after, new_rows)
    _train(other, fitted, values, 1)


@pytest.mark.parametrize("seed", range(4))
def test_hashed_ids_take_the_rows_of_values(tmp_path: Path, seed: int) -> None:
    values, hashed, fitted, data = _fits(seed)
    torch.manual_seed(seed)
    model, other = _model(fitted), _model(hashed)
    _train(model, fitted, values, 3)
    _train(other, hashed, data, 2)  # ids that the load removes
    save_checkpoint(tmp_path / "saved", model, model.fused_optimizer, spec=fitted)
    load_checkpoint(tmp_path / "saved", other, other.fused_optimizer, spec=hashed)
    save_checkpoint(tmp_path / "loaded", other, other.fused_optimizer)
    before = _rows(tmp_path / "saved", fitted, values)
    after = _rows(tmp_path / "loaded", hashed, values)
    for table, rules in zip(TABLES, RULES, strict=True):
        expected = dict(before[table])
        missing, unknown = expected.pop("missing"), expected.pop("unknown")
        assert after[table].pop("unknown") == (
            unknown if rules.unknown == "shared" else [[0.0] * DIM, 0.0]
        )
        assert after[table] == expected
        assert missing not in after[table].values()
    model.eval()
    other.eval()
    known = [value for value in values if value in before["t0"]]
    found = [
        m(spec.transform(dict.fromkeys(TABLES, known)).sparse_features).values()
        for m, spec in ((model, fitted), (other, hashed))
    ]
    assert torch.equal(*found)
    other.train()
    _train(other, hashed, values, 2)


def _save(spec: FeatureSpec, data: Any, path: Path, optimizer: Any, is_delta: bool) -> None:
    torch.manual_seed(3)
    model = _model(spec, optimizer, shift=0)
    _train(model, spec, data, 2)
    with always_deltas():
        for _ in range(3 if is_delta else 1):
            _train(model, spec, data[: len(data) // 2], 1)
            save_checkpoint(
                path, model, model.fused_optimizer, spec=spec, delta=is_delta, keep=None
            )


def _load(spec: FeatureSpec, values: Any, path: Path, optimizer: Any, new_rows: Any) -> None:
    torch.manual_seed(4)
    model = _model(spec, optimizer, shift=1)
    save_checkpoint(path / "initial", model, model.fused_optimizer)
    load_checkpoint(path / "saved", model, model.fused_optimizer, spec=spec, new_rows=new_rows)
    save_checkpoint(path / "loaded", model, model.fused_optimizer)
    _train(model, spec, values, 2)


@pytest.mark.parametrize(
    ("to_hashed", "optimizer", "is_delta", "saved_on", "loaded_on", "new_rows"),
    [
        (False, RowWiseAdagrad, True, 2, 3, "unknown"),
        (True, RowWiseAdagrad, True, 3, 2, "init"),
        pytest.param(False, Adam, False, 3, 1, "mean", marks=pytest.mark.rest),
        pytest.param(False, Adam, True, 1, 2, "init", marks=pytest.mark.rest),
        pytest.param(True, Adam, True, 1, 3, "init", marks=pytest.mark.rest),
        pytest.param(True, Adam, False, 2, 1, "init", marks=pytest.mark.rest),
    ],
)
def test_rows_follow_their_values_under_any_plan(
    ranks: RankPool,
    tmp_path: Path,
    to_hashed: bool,
    optimizer: Any,
    is_delta: bool,
    saved_on: int,
    loaded_on: int,
    new_rows: str,
) -> None:
    values, hashed, fitted, data = _fits(saved_on * 5 + loaded_on)
    old, new = (fitted, hashed) if to_hashed else (hashed, fitted)
    ranks(saved_on, _save, old, data, tmp_path / "saved", optimizer, is_delta)
    ranks(loaded_on, _load, new, values, tmp_path, optimizer, new_rows)
    before, after = (
        _rows(tmp_path / name, spec, values) for name, spec in (("saved", old), ("loaded", new))
    )
    if not to_hashed:
        _compare(before, _rows(tmp_path / "initial", new, values), after, new_rows)
        return
    for table in TABLES:
        expected = {v: r for v, r in before[table].items() if v not in ("missing", "unknown")}
        del after[table]["unknown"]
        assert after[table] == expected


def test_the_values_of_the_last_data_stay_if_the_table_is_too_small(tmp_path: Path) -> None:
    names = [f"v{i:03}" for i in range(400)]
    spec = _spec(False, names).extend(dict.fromkeys(TABLES, names[150:300])).spec
    small = _spec(True, names, rows=192)
    model, other = _model(spec), _model(small)
    save_checkpoint(tmp_path / "saved", model, model.fused_optimizer, spec=spec)
    with pytest.warns(UserWarning, match=r"no room for [\d,]+ values") as caught:
        load_checkpoint(tmp_path / "saved", other, other.fused_optimizer, spec=small)
    save_checkpoint(tmp_path / "loaded", other, other.fused_optimizer)
    before, after = (
        _rows(tmp_path / name, s, names) for name, s in (("saved", spec), ("loaded", small))
    )
    num_lost = 0
    for table in TABLES:
        index = other.module.embedding_bags[table].shards[0].index.index
        room: dict[int, int] = {}
        kept = set[str]()
        for name in [*names[150:300], *names[:150], *names[300:]]:
            line = line_of(signed(fnv(name)), index)
            room[line] = room.get(line, 64 - (line % index.lines == 0)) - 1
            kept |= {name} if room[line] >= 0 else set()
        del after[table]["unknown"]
        assert after[table] == {name: before[table][name] for name in kept}
        num_lost += 400 - len(kept)
    assert f" {num_lost} values" in str(caught[0].message)


def test_wrong_specs_and_tables_are_named(tmp_path: Path) -> None:
    texts, numbers = ["Oslo", "Rome"], [7, -8]
    hashed, fitted = _spec(True, texts), _spec(False, texts)
    for name, spec in (("hashed", hashed), ("fitted", fitted)):
        for kept in (spec, None):
            model = EmbeddingBagCollection(tables=spec.tables(DIM))
            path = tmp_path / (name if kept is None else f"{name}-spec")
            save_checkpoint(path, model, spec=kept)
    cases: list[tuple[str, FeatureSpec, dict[str, Any], str]] = [
        ("hashed-spec", fitted, {}, "'t0' .*hashed ids there only. Pass spec"),
        ("hashed-spec", fitted, {"allow_partial": True}, "'t0' .*hashed ids there only"),
        ("fitted-spec", hashed, {}, "'t0' .*hashed ids here only. Pass spec"),
        ("hashed", fitted, {"spec": fitted}, "has no spec, and table 't0'.* Pass saved_spec"),
        ("hashed", fitted, {"spec": fitted, "saved_spec": fitted}, "'t0' by Categorical, and"),
        ("fitted", hashed, {"spec": hashed, "saved_spec": hashed}, "saved_spec must be the spec"),
        ("fitted-spec", hashed, {"spec": fitted}, "'t0' by Categorical, and the other by Hashed"),
    ]
    for name, spec, arguments, message in cases:
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(tmp_path / name, _model(spec), **arguments)
    of_numbers = _spec(False, numbers)
    with pytest.raises(CheckpointError, match=r"numbers .* hashed texts. Cast"):
        load_checkpoint(tmp_path / "hashed-spec", _model(of_numbers), spec=of_numbers)
    model = _model(hashed)
    for is_partial in (False, True):
        with pytest.raises(CheckpointError, match=r"optimizer.state.*t0.weight"):
            load_checkpoint(
                tmp_path / "fitted-spec",
                model,
                model.fused_optimizer,
                spec=hashed,
                allow_partial=is_partial,
            )
    [first, *others] = hashed.tables(DIM)
    first = replace(first, ids=HashedIds(overflow=str(tmp_path / "rows")))
    model = EmbeddingBagCollection(tables=[first, *others])
    with pytest.raises(CheckpointError, match=r"by value needs all rows .*t0"):
        load_checkpoint(tmp_path / "fitted-spec", model, spec=hashed)


def test_rows_of_a_vocabulary_without_values(tmp_path: Path) -> None:
    empty = FeatureSpec([Categorical(name, min_count=9) for name in TABLES])
    empty.fit({name: ["Oslo"] for name in TABLES})
    hashed = _spec(True, ["Oslo"])
    for number, (old, new) in enumerate([(empty, hashed), (hashed, empty)]):
        model, other = _model(old), _model(new)
        _train(model, old, ["Oslo"], 1)
        save_checkpoint(tmp_path / str(number), model, model.fused_optimizer, spec=old)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_checkpoint(
                tmp_path / str(number), other, other.fused_optimizer, spec=new, new_rows="mean"
            )
        _train(other, new, ["Oslo", "Rome"], 1)
