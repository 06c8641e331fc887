"""A table takes its values from an array or a file, under any plan."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.checkpoint import CheckpointError, load_table, table
from recsys.optim import Adam
from tests.distributed.cases import EachType, shard, whole, whole_state
from tests.ranks import RankPool

VALUES = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)


def _states(model: Any) -> dict[str, Tensor]:
    states = model.fused_optimizer.state_dict()["state"]
    return {f"{p}/{k}": whole(v) for p, values in states.items() for k, v in values.items()}


def _fill(path: str) -> dict[str, Tensor]:
    case = EachType(3, dist.get_world_size(), optimizer=Adam)
    model = shard(case)
    table._BLOCK_BYTES = 100  # three rows
    before = _states(model)
    for i, kind in enumerate(case.types):
        load_table(model, kind.value, path if i % 2 else np.load(path, mmap_mode="r"))
    torch.testing.assert_close(_states(model), before, rtol=0, atol=0)
    return whole_state(model)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_sharded_tables_under_all_types(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    path = str(tmp_path / "values.npy")
    np.save(path, VALUES)
    for state in ranks(num_ranks, _fill, path):
        tables = [value for name, value in state.items() if "embedding_bags" in name]
        assert len(tables) == 4
        for value in tables:
            assert np.array_equal(value.numpy(), VALUES)


class _Counted(np.ndarray[Any, Any]):
    """An array that notes the rows that are read."""

    read: list[slice]

    def __getitem__(self, rows: Any) -> Any:
        self.read.append(rows)
        return np.asarray(self)[rows]


def _count() -> list[tuple[int, int]]:
    model = shard(EachType(3, 2))
    table._BLOCK_BYTES = 100
    values = VALUES.view(_Counted)
    values.read = []
    load_table(model, "row_wise", values)
    return [(rows.start, rows.stop) for rows in values.read]


def test_each_rank_reads_its_rows_a_few_at_a_time(ranks: RankPool) -> None:
    assert ranks(2, _count) == [[(0, 3), (3, 6)], [(6, 9), (9, 12)]]


@pytest.mark.parametrize("dtype", [">f4", "<f8", "f2"])
def test_unsharded_tables_of_other_dtypes(dtype: str) -> None:
    model = nn.ModuleDict({"a": nn.Embedding(12, 8, dtype=torch.bfloat16)})
    load_table(model, "a", VALUES.astype(dtype))
    expected = torch.from_numpy(VALUES.astype(dtype).astype(np.float64)).to(torch.bfloat16)
    assert torch.equal(model["a"].weight, expected)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("t_usr", VALUES, r"received 't_usr'\. Near are \['t_user'\]"),
        ("xyz", VALUES, r"received 'xyz'\. The model has \['one\.t_user\.weight'"),
        ("t_item", VALUES, r"a part of \['one\.t_item\.weight', 'two\.t_item\.weight'\]"),
        ("t_user", VALUES.T, r"'one\.t_user\.weight' must .*received \(8, 12\)"),
        ("t_user", VALUES.astype("i4"), "floating point; received int32"),
        ("t_user", [[1.0]], "must be .*received a list"),
    ],
)
def test_errors_name_what_was_given(name: str, values: Any, message: str) -> None:
    model = nn.ModuleDict(
        {
            "one": nn.ModuleDict({"t_user": nn.Embedding(12, 8), "t_item": nn.Embedding(12, 8)}),
            "two": nn.ModuleDict({"t_item": nn.Embedding(12, 8)}),
        }
    )
    with pytest.raises(ValueError, match=message):
        load_table(model, name, values)
    load_table(model, "two.t_item", VALUES)


def _fill_from_a_file_that_one_lacks(path: str) -> str:
    model = shard(EachType(3, 2))
    with pytest.raises(CheckpointError) as raised:
        load_table(model, "row_wise", path if dist.get_rank() else path + ".npy")
    return str(raised.value)


def test_a_file_that_one_rank_lacks_is_an_error_on_all(ranks: RankPool, tmp_path: Path) -> None:
    np.save(tmp_path / "values.npy", VALUES)
    for text in ranks(2, _fill_from_a_file_that_one_lacks, str(tmp_path / "values")):
        assert text.startswith("On rank 1: Loading table 'row_wise': FileNotFoundError: ")


@pytest.mark.parametrize("bad", [1e300, float("nan"), float("-inf")])
def test_values_that_do_not_fit_are_named(bad: float) -> None:
    model = nn.ModuleDict({"t": nn.Embedding(5, 3)})
    values = np.zeros((5, 3))
    values[3, 1] = bad
    with pytest.raises(ValueError, match=re.escape(f"received {bad} in row 3, column")):
        load_table(model, "t", values)


def test_a_narrow_table_does_not_overflow() -> None:
    model = nn.ModuleDict({"t": nn.Embedding(5, 3, dtype=torch.float16)})
    with pytest.raises(ValueError, match=r"torch\.float16; received 1000000\.0 in row 0"):
        load_table(model, "t", np.full((5, 3), 1e6, np.float32))


def test_a_pipe_is_no_file_of_values(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.npy")
    with pytest.raises(CheckpointError, match="must be a regular file"):
        load_table(nn.ModuleDict({"t": nn.Embedding(5, 3)}), "t", tmp_path / "t.npy")
