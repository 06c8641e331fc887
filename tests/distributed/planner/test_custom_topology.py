"""Numbers per rank in the way of TorchRec."""

from __future__ import annotations

import pytest

from recsys.distributed.planner import CustomTopologyData, Topology


def test_they_win_over_the_arguments() -> None:
    data = CustomTopologyData({"hbm_cap": [1, 2], "inter_host_bw": [3.0, 4.0]}, world_size=2)
    topology = Topology(2, "cuda", hbm_cap=5, ddr_cap=7, custom_topology_data=data)
    assert [r.hbm_cap for r in topology.hardware] == [1, 2]
    assert [r.inter_host_bw for r in topology.hardware] == [3.0, 4.0]
    assert [r.ddr_cap for r in topology.hardware] == [7, 7]


def test_what_was_given_is_told() -> None:
    data = CustomTopologyData({"ddr_cap": [1, 2]}, world_size=2)
    assert data.has_data("ddr_cap")
    assert not data.has_data("hbm_cap")
    assert data.get_data("ddr_cap") == [1, 2]
    with pytest.raises(KeyError, match="hbm_cap"):
        data.get_data("hbm_cap")
    assert {"hbm_cap", "ddr_cap", "ssd_cap"} <= set(data.supported_fields)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data must have keys among hbm_cap, .*; received 'foo'"):
        CustomTopologyData({"foo": [1]}, world_size=1)
    with pytest.raises(
        ValueError, match=r"CustomTopologyData\.hbm_cap must .* 2 ranks; received 1"
    ):
        CustomTopologyData({"hbm_cap": [1]}, world_size=2)
    two = CustomTopologyData({"hbm_cap": [1, 2]}, world_size=2)
    with pytest.raises(ValueError, match="must be made for 3 ranks; received data for 2"):
        Topology(3, "cuda", custom_topology_data=two)
