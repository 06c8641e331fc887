"""The table that str(topology) shows."""

from __future__ import annotations

from dataclasses import replace

from recsys.distributed.planner.presets import PRESETS
from recsys.distributed.planner.topology_table import hardware_table


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
    assert "0, 2, 4, ... 8" in table


def test_kinds_without_a_name() -> None:
    rank = replace(PRESETS["CPU"], name="")
    assert hardware_table([rank], [0]).splitlines()[0].strip() == "each rank"
    more = hardware_table([rank, replace(rank, ddr_cap=1)], [0, 1])
    assert more.splitlines()[0].split() == ["kind", "0", "kind", "1"]
