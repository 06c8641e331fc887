"""Topology files: written files are read back, and errors name the wrong value."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from recsys.distributed.planner import topology_json
from recsys.distributed.planner.hardware import NUMBERS
from recsys.distributed.planner.measured import CollectivePoint, LookupPoint
from recsys.distributed.planner.presets import PRESETS
from recsys.distributed.planner.topology_json import read

MIXED = {
    "local_world_size": 2,
    "hardware": (PRESETS["A100-80"],) * 2 + (PRESETS["H100"],) * 2,
    "lookup": (LookupPoint(dim=64, pooling=0.1, forward_bw=1 / 3, backward_bw=2.0, split_bw=1.0),),
    "collectives": (
        CollectivePoint(kind="all_reduce", world_size=2, bytes=1, ms=1e-3),
        CollectivePoint(kind="all_reduce", world_size=2, bytes=2**53 + 1, ms=0.1 + 0.2),
    ),
}


def write(contents: dict[str, Any]) -> str:
    tables = {name: contents.get(name, ()) for name in ("lookup", "collectives")}
    return topology_json.write(contents["hardware"], contents["local_world_size"], **tables)


def test_what_is_written_is_read() -> None:
    again = read(write(MIXED), "Topology file x")
    assert again == MIXED
    assert [rank.name for rank in again["hardware"]] == ["A100-80", "A100-80", "H100", "H100"]
    assert write(again) == write(MIXED)


def test_a_file_is_short_where_ranks_are_alike() -> None:
    text = write({"local_world_size": 8, "hardware": (PRESETS["H100"],) * 64})
    assert '    "hbm_cap": 80000000000,\n' in text
    assert text.count("[") == 0  # no list, and no table of measurements that is empty
    assert write(MIXED).count("\n") < 40


def edited(edit: Callable[[dict[str, Any]], object]) -> str:
    data = json.loads(write(MIXED))
    edit(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda d: d.update(worldsize=3),
            "x has .*received 'worldsize'. The",
        ),
        (
            lambda d: d["hardware"].update(hbm_bw=3),
            "x: hardware .*received 'hbm_bw'. The",
        ),
        (
            lambda d: d["lookup"][0].update(poolin=3),
            r"x: lookup\[0\] .*received 'poolin'. The",
        ),
        (lambda d: d.pop("hardware"), "must have .*received none for hardware"),
        (
            lambda d: [d["hardware"].pop(k) for k in ("ddr_cap", "ssd_cap")],
            "x: hardware .*received none for",
        ),
        (lambda d: d["collectives"][1].pop("ms"), r"x: collectives\[1\] must .*none for ms"),
        (lambda d: d.update(format=2), "x: format .*received 2. Files"),
        (lambda d: d.update(world_size=0), "x: world_size must .*received 0"),
        (lambda d: d.update(compute_device="tpu"), "compute_device must be .* received 'tpu'"),
        (
            lambda d: d.update(world_size=3),
            "x: hardware.hbm_mem_bw must .*the 3 ranks;",
        ),
        (
            lambda d: d["hardware"].update(name=["a"]),
            "x: hardware.name .*received 1 texts",
        ),
        (
            lambda d: d["hardware"].update(hbm_cap=[1, 2, -3, 4]),
            "x: hardware.hbm_cap .*received -3",
        ),
        (
            lambda d: d["lookup"][0].update(dim=0),
            r"lookup\[0\]: LookupPoint.dim .*received 0",
        ),
        (
            lambda d: d["collectives"][0].update(kind="scan"),
            r"x: collectives\[0\]: .*received 'scan'",
        ),
    ],
)
def test_wrong_values_are_named(edit: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Topology file {message}|^Topology file x.*{message}"):
        read(edited(edit), "Topology file x")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(world_size=4.0), "world_size must .*received 4.0"),
        (lambda d: d.update(world_size=True), "world_size must .*received true"),
        (lambda d: d.update(compute_device=1), "compute_device must be text; received 1"),
        (lambda d: d.update(hardware=[]), r"hardware must .*received \[\]"),
        (
            lambda d: d["hardware"].update(hbm_cap="80GB"),
            "hardware.hbm_cap must .*received '80GB'",
        ),
        (
            lambda d: d["hardware"].update(hbm_cap=[1, 2, None, 4]),
            "hardware.hbm_cap of .*received None",
        ),
        (lambda d: d["hardware"].update(name=7), "hardware.name must be text; received 7"),
        (lambda d: d.update(lookup={}), "lookup must .*received {}"),
        (lambda d: d.update(lookup=[1]), r"lookup\[0\] must .*received 1"),
        (
            lambda d: d["lookup"][0].update(dim="8"),
            r"lookup\[0\]: LookupPoint.dim must be a number",
        ),
        (
            lambda d: d.update(collectives="x" * 99),
            r"collectives must .*received \"x+\.{3}",
        ),
    ],
)
def test_wrong_types_are_named(edit: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        read(edited(edit), "Topology file x")


@pytest.mark.parametrize("name", ["name", *NUMBERS])
def test_every_number_is_in_the_file(name: str) -> None:
    assert name in json.loads(write(MIXED))["hardware"]


def test_text_that_is_no_json() -> None:
    with pytest.raises(ValueError, match=r"Topology file x must.*JSON.*line 1"):
        read('{"format": 1,}', "Topology file x")
    with pytest.raises(TypeError, match=r"Topology file x must.*object.* 3"):
        read("3", "Topology file x")
