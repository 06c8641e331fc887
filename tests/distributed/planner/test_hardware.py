"""One rank: its valid values, and the spread of numbers over ranks."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from recsys.distributed.planner.hardware import (
    NUMBERS,
    Hardware,
    build_hardware,
    check_number,
    hardware_table,
    per_rank,
)
from recsys.distributed.planner.presets import PRESETS

RANK = Hardware(compute_device="cuda", hbm_cap=8, ddr_cap=9)


def test_tables_live_on_the_device() -> None:
    rank = replace(RANK, hbm_mem_bw=3.0, ddr_mem_bw=2.0)
    assert (rank.memory_cap, rank.memory_bw) == (8, 3.0)
    host = replace(rank, compute_device="cpu")
    assert (host.memory_cap, host.memory_bw) == (9, 2.0)


def test_a_name_is_no_difference() -> None:
    assert replace(RANK, name="x") == RANK
    assert hash(replace(RANK, name="x")) == hash(RANK)
    assert replace(RANK, ssd_mem_bw=1.0) != RANK


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_checked(name: str) -> None:
    for value, error in (
        (-1, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        ("8", TypeError),
        (True, TypeError),
        (None, TypeError),
    ):
        with pytest.raises(error, match=rf"^Hardware\.{name} must be .*|not be negative"):
            replace(RANK, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hbm_mem_bw", 0, "x must .*received 0. It"),
        ("hbm_cap", 1.5, "x must .*received 1.5"),
        ("kernel_launch_ms", -1, "x must .*received -1"),
        ("hbm_cap", "8", "x must .*received '8'"),
    ],
)
def test_errors_say_what_is_wrong(name: str, value: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        check_number("x", name, value)


def test_bytes_are_whole_and_the_rest_floats() -> None:
    for value in (2, 2.0, np.int64(2), np.float32(2)):
        assert type(check_number("x", "ddr_cap", value)) is int
        assert type(check_number("x", "ddr_mem_bw", value)) is float
    assert check_number("x", "ddr_cap", sys.maxsize) == sys.maxsize


def test_one_number_is_for_all_ranks() -> None:
    assert per_rank("x", "hbm_cap", 5, 3) == (5, 5, 5)
    assert per_rank("x", "hbm_cap", (1, 2, 3), 3) == (1, 2, 3)


def test_lists_have_a_number_for_each_rank() -> None:
    with pytest.raises(ValueError, match=r"x\.hbm_cap must .*3 ranks; .*2 numbers"):
        per_rank("x", "hbm_cap", [1, 2], 3)
    with pytest.raises(ValueError, match=r"x\.hbm_cap of rank 1 must.*-2"):
        per_rank("x", "hbm_cap", [1, -2], 2)
    with pytest.raises(TypeError, match=r"x\.hbm_cap must be a number.*'12'"):
        per_rank("x", "hbm_cap", "12", 2)


def test_every_field_comes_from_its_column() -> None:
    columns = {name: (10 * i + 1, 10 * i + 2) for i, name in enumerate(NUMBERS)}
    ranks = build_hardware("cpu", {"name": ["a", "b"], **columns})
    for i, name in enumerate(NUMBERS):
        assert [getattr(rank, name) for rank in ranks] == [10 * i + 1, 10 * i + 2]
    assert [rank.name for rank in ranks] == ["a", "b"]
    assert {rank.compute_device for rank in ranks} == {"cpu"}


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"compute_device must be 'cpu'.*'cuda'; .*'tpu'"):
        replace(RANK, compute_device="tpu")


def lines(names: list[str], kinds: list[int]) -> list[list[str]]:
    table = hardware_table([PRESETS[name] for name in names], kinds)
    return [line.split("  ") for line in table.splitlines()]


def test_one_column_for_each_kind() -> None:
    head, _, ranks, device, *_, launch, step = lines(["A100-80", "A100-80", "H100"], [0, 0, 1])
    assert [cell.strip() for cell in head if cell.strip()] == ["A100-80", "H100"]
    assert [cell.strip() for cell in ranks if cell.strip()] == ["ranks", "0-1", "2"]
    assert device[1].strip() == "80.0 GB, 1,631.2 GB/s"
    assert [cell.strip() for cell in launch if cell.strip()] == ["kernel launch"] + ["0.005 ms"] * 2
    assert [cell.strip() for cell in step if cell.strip()] == ["empty step", "0 ms", "0 ms"]


def test_cpus_have_no_lines_on_devices() -> None:
    labels = [cells[0] for cells in lines(["CPU"], [0])]
    assert [label.strip() for label in labels[2:]] == [
        *("ranks", "host memory", "disk", "inside a node", "across nodes", "empty step")
    ]


def test_ranks_are_ranges() -> None:
    names = ["H100", "H200"] * 5
    table = hardware_table([PRESETS[name] for name in names], [0, 1] * 5)
    assert "0, 2, 4, 6, ... and 1 more" in table


def test_kinds_without_a_name() -> None:
    rank = replace(PRESETS["CPU"], name="")
    assert hardware_table([rank], [0]).splitlines()[0].strip() == "each rank"
    more = hardware_table([rank, replace(rank, ddr_cap=1)], [0, 1])
    assert more.splitlines()[0].split() == ["kind", "0", "kind", "1"]
