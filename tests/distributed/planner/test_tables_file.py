"""Tables files: their tables are planned, and errors name the wrong value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recsys.distributed.planner import EmbeddingShardingPlanner, Topology
from recsys.distributed.planner.model_tables import tables_of
from recsys.distributed.planner.tables import PlannedTable
from recsys.distributed.planner.tables_file import OPTIMIZERS, read_tables
from recsys.distributed.types import ShardingType

EXAMPLE = Path(__file__).parents[3] / "examples" / "planner" / "tables.yaml"


def planned_tables(path: Path) -> dict[str, PlannedTable]:
    file = read_tables(path)
    tables = tables_of(file.model, file.sharders, file.constraints, "cpu")
    return {table.name: table for table in tables}


def test_the_example() -> None:
    assert read_tables(EXAMPLE).batch_size == 4096
    users, items, countries, history = planned_tables(EXAMPLE).values()
    assert (users.name, users.path, users.rows, users.dim) == ("users", "ebc", 40_000_000, 128)
    assert (items.ids_per_sample, items.num_features, items.is_pooled) == (71.0, 3, True)
    assert users.optimizer is not None
    assert users.optimizer.spec.algorithm.name == "EXACT_ROWWISE_ADAGRAD"
    assert countries.optimizer is not None
    assert countries.optimizer.spec.algorithm.name == "ADAM"
    assert list(countries.kernels) == [ShardingType.DATA_PARALLEL]
    assert (history.path, history.is_pooled, history.element_bytes) == ("tower.history", False, 2)
    assert history.ids_per_sample == 100
    assert {table.wire_bytes for table in (users, items, history)} == {(2.0, 2.0)}


def test_the_example_is_planned() -> None:
    file = read_tables(EXAMPLE)
    planner = EmbeddingShardingPlanner(
        Topology.preset("H100", 8), file.batch_size, constraints=file.constraints
    )
    plan = planner.plan(file.model, file.sharders)
    assert plan.plan["ebc"]["countries"].sharding_type == "data_parallel"


def write(folder: Path, **changes: Any) -> Path:
    """A file with one table, in which some keys are others; of the table where that has them."""
    table = {"name": "t", "rows": 100, "dim": 8, "features": ["f", "g"]}
    data: dict[str, Any] = {"optimizer": "SGD", "tables": [table]}
    for key, value in changes.items():
        owner = data if key in ("tables", "batch_size", "wire", "table") else table
        owner[key] = value
    path = folder / "tables.json"
    path.write_text(json.dumps(data))
    return path


def test_defaults(tmp_path: Path) -> None:
    path = tmp_path / "tables.yaml"
    path.write_text("optimizer: none\ntables: [{name: t, rows: 9, dim: 4}]\n")
    (table,) = planned_tables(path).values()
    assert read_tables(path).batch_size is None
    assert (table.path, table.ids_per_sample, table.num_features) == ("ebc", 1.0, 1)
    assert (table.element_bytes, table.wire_bytes, table.is_pooled) == (4, (4.0, 4.0), True)
    assert table.has_gradient


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(tmp_path: Path, optimizer: str) -> None:
    (table,) = planned_tables(write(tmp_path, optimizer=optimizer)).values()
    assert (table.optimizer is None) == (optimizer == "none")


def test_weighted_tables_are_a_module_of_their_own(tmp_path: Path) -> None:
    (table,) = planned_tables(write(tmp_path, weighted=True)).values()
    assert (table.path, table.is_weighted) == ("weighted_ebc", True)


def test_the_whole_model_may_be_the_module(tmp_path: Path) -> None:
    (table,) = planned_tables(write(tmp_path, module="")).values()
    assert table.path == ""


def other(**changes: Any) -> dict[str, Any]:
    return {"name": "u", "rows": 10, "dim": 8, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table": []}, "received 'table'. The nearest is 'tables'"),
        ({"tables": []}, "tables must hold .*least one table"),
        ({"batch_size": 0}, "batch_size must be positive; received 0"),
        ({"row": 3}, r"tables\[0\] has .*received 'row'. The"),
        ({"tables": [{"name": "t"}]}, r"tables\[0\] must have .*for rows, dim"),
        ({"rows": 0}, "rows must .*received 0"),
        ({"dim": -4}, "dim must .*received -4"),
        ({"pooling": "AVG"}, "pooling must .*received 'AVG'"),
        ({"data_type": "FP8"}, "data_type must .*received 'FP8'"),
        ({"optimizer": "adagrad"}, "optimizer must be .*nearest is 'Adagrad'"),
        (
            {"optimizer": None},
            "must have .*none for optimizer",
        ),
        ({"features": []}, "needs feature_names; received none"),
        ({"name": "a.b"}, "module 'ebc': .*received 'a.b'"),
        ({"module": "x..y"}, "module must .*received 'x..y'"),
        ({"module": "train"}, "not attributes .*received 'train'"),
        ({"pooling": "NONE", "weighted": True}, "weighted .*pooling NONE"),
        (
            {"pooling_factors": [1, -1]},
            r"pooling_factors\[1\] must .*received -1",
        ),
        (
            {"constraints": {"sharding_type": ["row_wise"]}},
            "table 't': constraints .*nearest is 'sharding_types'",
        ),
        (
            {"constraints": {"sharding_types": ["row_wize"]}},
            r"sharding_types\[0\] must .*is 'row_wise'",
        ),
        ({"constraints": {"sharding_types": []}}, r"sharding_types must name .*of .* \[\]"),
        ({"constraints": {"min_partition": 0}}, "min_partition must be positive; received 0"),
        ({"wire": {"forward": "BF16"}}, "wire has keys .* is 'forward_precision'"),
        ({"wire": {"forward_precision": "BF"}}, "wire: forward_precision must .*one of FP32"),
        (
            {"tables": [other(optimizer="SGD"), other(optimizer="SGD")]},
            r"table 'u' must .* as tables\[1\]",
        ),
        (
            {"tables": [other(module="m"), other(name="v", pooling="NONE", module="m")]},
            "table 'v' must .* module 'm'",
        ),
        (
            {"tables": [other(module=""), other(name="v", module="m")]},
            "module '' .*only one; received",
        ),
        (
            {"tables": [other(module="m"), other(name="v", module="m.n")]},
            "inside another module .* received 'm.n'",
        ),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    if "none for optimizer" in message:
        path = write(tmp_path)
        path.write_text(path.read_text().replace('"optimizer": "SGD", ', ""))
    else:
        path = write(tmp_path, **changes)
    with pytest.raises(ValueError, match=rf"^Tables file .*tables\.json.*{message}"):
        read_tables(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tables": {}}, "tables must .*received {}"),
        ({"tables": ["t"]}, r"tables\[0\] must .*received \"t\""),
        ({"rows": "1e6"}, "table 't': .*received \"1e6\""),
        ({"features": "f"}, "table 't': .*received \"f\""),
        ({"weighted": 1}, "weighted must .*received 1"),
        ({"pooling": None}, "pooling must be text; received null"),
        (
            {"pooling_factors": [1]},
            r"must be .*received \[1\]",
        ),
        ({"constraints": []}, r"constraints must .*received \[\]"),
    ],
)
def test_wrong_types_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        read_tables(write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text + "\ntables: []", "must name .*received 'tables' twice"),
        (lambda text: text.replace("dim: 128", "rows: 128", 1), "'rows' twice, in line 8"),
        (lambda text: text + "\n]", "must be .*received text with:"),
        (lambda text: "", "must be .*received null"),
    ],
)
def test_wrong_yaml_is_named(tmp_path: Path, edit: Callable[[str], str], message: str) -> None:
    path = tmp_path / "tables.yaml"
    path.write_text(edit(EXAMPLE.read_text()))
    with pytest.raises((TypeError, ValueError), match=message):
        read_tables(path)
