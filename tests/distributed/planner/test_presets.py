"""Presets equal the numbers of docs/topology.md, with its sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recsys.distributed.planner import presets
from recsys.distributed.planner.presets import DATASHEETS, PRESETS, check_preset

PAGE = Path(__file__).parents[3] / "docs" / "topology.md"


def rows_of_the_page() -> dict[str, list[float]]:
    """The table of datasheet numbers: preset to its numbers, in the order of the columns."""
    rows = re.findall(r"^\| `([\w-]+)` \|(( [\d.,]+ \|)+)$", PAGE.read_text(), re.M)
    return {
        name: [float(cell.replace(",", "")) for cell in cells.split("|") if cell.strip()]
        for name, cells, _ in rows
    }


def test_the_page_has_the_numbers_of_the_code() -> None:
    assert rows_of_the_page() == {
        name: [s.hbm_gb, s.hbm, s.ddr_gb, s.ddr, s.ssd_gb, s.link, s.node, s.nic]
        for name, s in DATASHEETS.items()
    }


def test_the_page_has_the_assumed_shares() -> None:
    text = PAGE.read_text()
    for share, what in (
        (presets.HBM_SHARE, "device memory"),
        (presets.DDR_SHARE, "host memory"),
        (presets.LINK_SHARE, "device to host"),
        (presets.NODE_SHARE, "inside a node"),
        (presets.NIC_SHARE, "across nodes"),
    ):
        assert f"| {what} | {share:.0%} |" in text


def test_every_preset_names_its_sources() -> None:
    text = PAGE.read_text()
    sources = text[text.index("Sources") :]
    for name in PRESETS:
        assert re.search(rf"^\| .*`{name}`.* \| .+ \| .+ \|$", sources, re.M), name


def test_a_rank_achieves_a_share_of_the_peak() -> None:
    rank = PRESETS["H100"]
    assert rank.hbm_cap == 80 * 10**9
    assert rank.hbm_mem_bw == 0.8 * 3350e6
    assert rank.inter_host_bw == 0.9 * 50e6
    assert rank.name == "H100"
    assert {p.compute_device for name, p in PRESETS.items() if name != "CPU"} == {"cuda"}
    assert PRESETS["CPU"].compute_device == "cpu"


def test_unknown_presets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be one of A100-40.*CPU; .*'H1000'"):
        check_preset("H1000")
