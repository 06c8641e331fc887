"""The machine as the planner sees it."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recsys.distributed.planner.measured import CollectivePoint, LookupPoint
from recsys.distributed.planner.presets import PRESETS
from recsys.distributed.planner.topology import CustomTopologyData, Topology

GIB = 1 << 30


def test_memory_is_that_of_the_device_the_tables_are_on() -> None:
    sizes = {"hbm_cap": 3 * GIB, "ddr_cap": 5 * GIB}
    assert Topology(2, "cuda", **sizes).memory_cap == 3 * GIB
    assert Topology(2, "cpu", **sizes).memory_cap == 5 * GIB


def test_host_memory_is_shared_by_the_ranks_of_a_host() -> None:
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert Topology(4, "cpu").memory_cap == host // 4
    assert Topology(8, "cpu", local_world_size=2).memory_cap == host // 2


def test_planning_for_gpus_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Topology(8, "cuda").memory_cap == 32 * GIB


def test_exchanges_cross_the_slower_link() -> None:
    assert Topology(8, "cuda").exchange_bw == Topology(8, "cuda").intra_host_bw
    several = Topology(8, "cuda", local_world_size=4, inter_host_bw=7.0)
    assert several.exchange_bw == 7.0


def test_tables_are_read_where_they_are() -> None:
    topology = {"hbm_mem_bw": 3.0, "ddr_mem_bw": 2.0}
    assert Topology(1, "cuda", **topology).memory_bw == 3.0
    assert Topology(1, "cpu", **topology).memory_bw == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compute_device": "mtia"}, "compute_device must .*received 'mtia'"),
        ({"world_size": 0}, "world_size must be positive; received 0"),
        ({"local_world_size": 0}, "local_world_size must be positive; received 0"),
        ({"ddr_cap": -1}, r"Topology\.ddr_cap must .*received -1"),
        ({"hbm_cap": [1, 2, 3]}, r"Topology\.hbm_cap must be .*of the 2"),
        (
            {"local_world_size": 2, "world_size": 3},
            "must divide world_size: .* received local_world",
        ),
        ({"inter_host_bw": [1.0, 0.0]}, r"Topology\.inter_host_bw of rank .*must be positive"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(**{"world_size": 2, "compute_device": "cpu", **arguments})


class TestMixedRanks:
    def test_numbers_are_for_all_or_for_each(self) -> None:
        topology = Topology(2, "cuda", hbm_cap=[4, 3], ddr_cap=5, kernel_launch_ms=[0.1, 0.2])
        assert [r.hbm_cap for r in topology.hardware] == [4, 3]
        assert [r.ddr_cap for r in topology.hardware] == [5, 5]
        assert [r.kernel_launch_ms for r in topology.hardware] == [0.1, 0.2]

    def test_one_number_for_all_is_the_worst(self) -> None:
        speeds = {
            name: [3.0, 2.0, 4.0]
            for name in (
                "hbm_mem_bw",
                "ddr_mem_bw",
                "ssd_mem_bw",
                "hbm_to_ddr_mem_bw",
                "intra_host_bw",
                "inter_host_bw",
            )
        }
        caps = {"hbm_cap": [9, 8, 7], "ddr_cap": [6, 5, 6], "ssd_cap": [1, 2, 3]}
        topology = Topology(3, "cuda", **caps, **speeds, kernel_launch_ms=[0.1, 0.3, 0.2])
        assert [getattr(topology, name) for name in caps] == [7, 5, 1]
        assert {getattr(topology, name) for name in speeds} == {2.0}
        assert (topology.memory_cap, topology.host_cap, topology.memory_bw) == (7, 5, 2.0)
        assert topology.exchange_bw == 2.0
        assert topology.slowest.kernel_launch_ms == 0.3

    def test_kinds_are_ranks_with_equal_hardware(self) -> None:
        assert Topology(4, "cuda", hbm_cap=1, ddr_cap=1).kinds == (0, 0, 0, 0)
        assert Topology(4, "cuda", hbm_cap=[5, 6, 5, 7], ddr_cap=1).kinds == (0, 1, 0, 2)
        named = [replace(PRESETS["H100"], name="mine"), PRESETS["H100"]]
        assert Topology.from_hardware(named).kinds == (0, 0)

    def test_devices_do_not_mix(self) -> None:
        with pytest.raises(ValueError, match=r"one compute_device .*received cpu and"):
            Topology.preset(["CPU", "H100"], 2)


class TestNodes:
    def test_a_node_has_no_more_ranks_than_there_are(self) -> None:
        topology = Topology(4, "cuda", local_world_size=8)
        assert (topology.local_world_size, topology.num_nodes) == (4, 1)

    def test_presets_know_their_nodes(self) -> None:
        assert Topology.preset("H100", 64).num_nodes == 8
        assert Topology.preset("H100", 64, local_world_size=4).num_nodes == 16
        assert Topology.preset("H100", 2).num_nodes == 1
        assert Topology.preset("CPU", 4).num_nodes == 2

    def test_without_a_number_the_link_inside_a_cpu_node_is_its_memory(self) -> None:
        assert Topology(2, "cpu", ddr_mem_bw=8.0).intra_host_bw == 2.0
        assert Topology(2, "cpu", ddr_mem_bw=8.0, intra_host_bw=3.0).exchange_bw == 3.0
        assert Topology(2, "cuda").intra_host_bw == 3.0e8


class TestPresets:
    @pytest.mark.parametrize("name", PRESETS)
    def test_all_have_a_topology(self, name: str) -> None:
        topology = Topology.preset(name, world_size=16)
        assert set(topology.hardware) == {PRESETS[name]}
        assert topology.compute_device == PRESETS[name].compute_device

    def test_names_of_each_rank(self) -> None:
        topology = Topology.preset(["A100-80", "H100"], 2)
        assert [rank.name for rank in topology.hardware] == ["A100-80", "H100"]
        with pytest.raises(ValueError, match=r"of the 3 ranks; .*2 names"):
            Topology.preset(["A100-80", "H100"], 3)

    def test_unknown(self) -> None:
        with pytest.raises(ValueError, match=r"must be one of A100-40.*'V100'"):
            Topology.preset("V100", 8)
        with pytest.raises(ValueError, match="world_size must be positive; received 0"):
            Topology.preset("H100", 0)
        with pytest.raises(ValueError, match="local_world_size must be positive; received 0"):
            Topology.preset("H100", 8, 0)


POINTS = (
    LookupPoint(dim=64, pooling=1, forward_bw=20.0, backward_bw=10.0, split_bw=4.0),
    LookupPoint(dim=64, pooling=100, forward_bw=40.0, backward_bw=30.0, split_bw=6.0),
)


class TestMeasurements:
    def test_lookups_are_as_fast_as_memory_unless_measured(self) -> None:
        topology = Topology(2, "cuda", hbm_mem_bw=[3.0, 2.0])
        assert topology.lookup_speed(64, 1.0) == (2.0, 2.0, 2.0)
        assert topology.lookup_speed(64, 1.0, topology.hardware[0]) == (3.0, 3.0, 3.0)
        measured = topology.with_measurements(lookup=POINTS)
        assert measured.lookup_speed(64, 10.0, topology.hardware[0]) == pytest.approx(
            (30.0, 20.0, 5.0)
        )
        assert measured.lookup == POINTS
        assert measured.with_measurements(collectives=[]).lookup == POINTS
        assert measured.with_measurements(lookup=[]) == topology

    def test_collectives_are_modelled_unless_measured(self) -> None:
        topology = Topology(8, "cuda", local_world_size=4, intra_host_bw=100.0, inter_host_bw=10.0)
        rank = topology.slowest
        assert topology.transfer_ms("all_to_all", 4000, 4, 1, rank) == pytest.approx(30.0)
        points = [
            CollectivePoint(kind="all_to_all", world_size=size, bytes=4000, ms=ms)
            for size, ms in ((1, 9.0), (4, 60.0))
        ]
        measured = topology.with_measurements(collectives=points)
        assert measured.transfer_ms("all_to_all", 2000, 4, 1, rank) == pytest.approx(30.0)
        # another world size: twice the model, as at the one that was measured
        model = topology.transfer_ms("all_to_all", 4000, 3, 1, rank)
        assert measured.transfer_ms("all_to_all", 4000, 3, 1, rank) == pytest.approx(2 * model)
        # another kind, other links, or a rank alone: not measured
        for kind, *ranks in (("all_reduce", 4, 1), ("all_to_all", 8, 2), ("all_to_all", 1, 1)):
            model = topology.transfer_ms(kind, 4000, *ranks, rank)
            assert measured.transfer_ms(kind, 4000, *ranks, rank) == model

    @pytest.mark.parametrize("num_ranks", [1, 3, 4, 8, 20, 30, 500])
    def test_the_nearest_world_size_is_by_factor(self, num_ranks: int) -> None:
        topology = Topology(512, "cuda", local_world_size=512, intra_host_bw=100.0)
        points = [
            CollectivePoint(kind="all_to_all", world_size=size, bytes=100 * size, ms=size - 1)
            for size in (2, 8, 64)
        ]
        measured = topology.with_measurements(collectives=points)
        near = {1: 2, 3: 2, 4: 8, 8: 8, 20: 8, 30: 64, 500: 64}[num_ranks]
        at = [
            of.transfer_ms("all_to_all", 1e6, num_ranks, 1, topology.slowest)
            for of in (topology, measured)
        ]
        longest = topology.transfer_ms("all_to_all", 100 * near, near, 1, topology.slowest)
        assert at[1] == pytest.approx(at[0] * (near - 1) / longest)

    def test_what_cannot_be_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"Topology\.lookup must have each point once"):
            Topology(2, "cpu").with_measurements(lookup=[POINTS[0], POINTS[0]])


class TestFiles:
    @pytest.mark.parametrize(
        "topology",
        [
            Topology(3, "cpu"),
            Topology.preset("H100", 64),
            Topology.preset(["A100-40", "B200"], 2),
            Topology(2, "cuda", hbm_cap=[1, 2], hbm_mem_bw=1 / 3).with_measurements(
                lookup=POINTS,
                collectives=[CollectivePoint(kind="all_reduce", world_size=2, bytes=9, ms=0.1)],
            ),
        ],
        ids=["defaults", "preset", "mixed", "measured"],
    )
    def test_what_is_saved_is_loaded(self, topology: Topology, tmp_path: Path) -> None:
        path = tmp_path / "topology.json"
        text = topology.to_json(path)
        for source in (path, str(path), text):
            loaded = Topology.from_json(source)
            assert loaded == topology
            assert hash(loaded) == hash(topology)
            assert str(loaded) == str(topology)
            assert loaded.to_json() == text

    def test_errors_name_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.json"
        path.write_text("{}")
        with pytest.raises(ValueError, match=r"Topology file .*mine\.json must have"):
            Topology.from_json(path)
        with pytest.raises(ValueError, match=r"^Topology file must have the keys"):
            Topology.from_json("{}")
        path.write_text(
            Topology.preset("H100", 8).to_json().replace('_size": 8,\n  "h', '_size": 3,\n  "h')
        )
        with pytest.raises(ValueError, match=r"file .*mine\.json: Topology\.local_world_size must"):
            Topology.from_json(path)
        with pytest.raises(FileNotFoundError):
            Topology.from_json(tmp_path / "none.json")


def test_topologies_are_values() -> None:
    one, other = Topology.preset("H100", 8), Topology.preset("H100", 8)
    assert one == other == pickle.loads(pickle.dumps(one))
    assert one != Topology.preset("H200", 8)
    assert one != Topology.preset("H100", 8, local_world_size=4)


def test_a_table_shows_the_ranks() -> None:
    text = str(Topology.preset("H100", 16))
    assert text.startswith("16 cuda ranks on 2 nodes\n")
    assert "H100" in text
    assert text.endswith("measured: 0 lookups, 0 collectives")
    assert repr(Topology.preset("H100", 16)) == text


class TestCustomData:
    """Numbers per rank in the way of TorchRec."""

    def test_they_win_over_the_arguments(self) -> None:
        data = CustomTopologyData({"hbm_cap": [1, 2], "inter_host_bw": [3.0, 4.0]}, world_size=2)
        topology = Topology(2, "cuda", hbm_cap=5, ddr_cap=7, custom_topology_data=data)
        assert [r.hbm_cap for r in topology.hardware] == [1, 2]
        assert [r.inter_host_bw for r in topology.hardware] == [3.0, 4.0]
        assert [r.ddr_cap for r in topology.hardware] == [7, 7]

    def test_what_was_given_is_told(self) -> None:
        data = CustomTopologyData({"ddr_cap": [1, 2]}, world_size=2)
        assert data.has_data("ddr_cap")
        assert not data.has_data("hbm_cap")
        assert data.get_data("ddr_cap") == [1, 2]
        with pytest.raises(KeyError, match="hbm_cap"):
            data.get_data("hbm_cap")
        assert {"hbm_cap", "ddr_cap", "ssd_cap"} <= set(data.supported_fields)

    def test_what_cannot_be_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"have keys among hbm_cap.*received 'foo'"):
            CustomTopologyData({"foo": [1]}, world_size=1)
        with pytest.raises(ValueError, match=r"CustomTopologyData\.hbm_cap must .* 2 ranks; .*1"):
            CustomTopologyData({"hbm_cap": [1]}, world_size=2)
        two = CustomTopologyData({"hbm_cap": [1, 2]}, world_size=2)
        with pytest.raises(ValueError, match=r"made for 3 ranks; .*for 2"):
            Topology(3, "cuda", custom_topology_data=two)
