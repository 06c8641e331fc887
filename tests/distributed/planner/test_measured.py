"""Between measured points, outside them, and where there are none."""

from __future__ import annotations

import pytest

from recsys.distributed.planner.hardware import Hardware
from recsys.distributed.planner.measured import (
    COLLECTIVES,
    CollectivePoint,
    LookupPoint,
    LookupTable,
    largest_collectives,
    transfer_ms,
)

RANK = Hardware(
    compute_device="cuda",
    hbm_cap=0,
    ddr_cap=0,
    intra_host_bw=100.0,
    inter_host_bw=10.0,
)


def lookup(dim: int, pooling: float, forward: float) -> LookupPoint:
    return LookupPoint(
        dim=dim,
        pooling=pooling,
        forward_bw=forward,
        backward_bw=forward / 2,
        split_bw=forward / 4,
    )


def collective(num_bytes: int, ms: float, world_size: int = 2) -> CollectivePoint:
    return CollectivePoint(kind="all_to_all", world_size=world_size, bytes=num_bytes, ms=ms)


class TestLookups:
    # in no order, and dims with different poolings
    TABLE = LookupTable(
        [lookup(128, 1, 80), lookup(64, 100, 60), lookup(64, 1, 20), lookup(64, 10, 40)]
    )

    @pytest.mark.parametrize(
        ("dim", "pooling", "forward"),
        [
            (64, 1, 20),  # as measured
            (64, 10, 40),
            (64, 10**0.5, 30),  # half way by factor
            (64, 1000, 60),  # beyond the largest
            (64, 0.1, 20),
            (64, 0, 20),
            (128, 50, 80),
            (96, 1, 50),  # half way between dims
            (96, 10, 60),
            (16, 10, 40),
            (512, 1, 80),
        ],
    )
    def test_between_and_beyond(self, dim: int, pooling: float, forward: float) -> None:
        assert self.TABLE.at(dim, pooling) == pytest.approx((forward, forward / 2, forward / 4))

    def test_points_come_once(self) -> None:
        with pytest.raises(ValueError, match=r"each point once.*dim 64.*pooling 1"):
            LookupTable([lookup(64, 1, 20), lookup(64, 1, 30)])


class TestCollectives:
    def test_the_largest_of_each_kind_and_world_size(self) -> None:
        points = [collective(10_000, 4.0), collective(100, 1.0), collective(9, 2.0, world_size=4)]
        found = largest_collectives(points)
        assert found.keys() == {("all_to_all", 2), ("all_to_all", 4)}
        assert found["all_to_all", 2] == pytest.approx((10_000, 4.0))
        assert found["all_to_all", 4] == pytest.approx((9, 2.0))

    def test_points_come_once(self) -> None:
        with pytest.raises(ValueError, match=r"received all_to_all of 2.*7 bytes"):
            largest_collectives([collective(7, 1.0), collective(7, 2.0)])


class TestModel:
    @pytest.mark.parametrize(
        ("kind", "ranks", "nodes", "ms"),
        [
            ("all_to_all", 1, 1, 0),
            ("all_to_all", 4, 1, 3000 / 100),  # 1000 of 4000 bytes stay
            ("reduce_scatter", 4, 1, 3000 / 100),
            ("all_gather", 4, 1, 3000 / 100),
            ("all_reduce", 4, 1, 6000 / 100),
            ("all_to_all", 4, 2, 2000 / 10),  # 2000 leave the node
            ("reduce_scatter", 4, 2, 3000 / 2 / 10),  # two ranks share what leaves their node
            ("all_reduce", 2, 2, 4000 / 10),  # one rank per node
        ],
    )
    def test_times(self, kind: str, ranks: int, nodes: int, ms: float) -> None:
        assert transfer_ms(kind, 4000, ranks, nodes, RANK) == pytest.approx(ms)

    def test_a_slow_node_is_seen_across_nodes_too(self) -> None:
        slow = Hardware(
            compute_device="cpu", hbm_cap=0, ddr_cap=0, intra_host_bw=1.0, inter_host_bw=10.0
        )
        slow_ms = transfer_ms("all_to_all", 4000, 4, 2, slow)
        assert slow_ms == pytest.approx(1000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "scan"}, f"must be one of {', '.join(COLLECTIVES)}; received 'scan'"),
        ({"ms": 0}, r"CollectivePoint\.ms must be positive; received 0"),
        ({"bytes": 0.5}, r"CollectivePoint\.bytes must .*received 0.5"),
        ({"world_size": 0}, r"CollectivePoint\.world_size must be .*positive whole number"),
    ],
)
def test_points_are_checked(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CollectivePoint(**{"kind": "all_reduce", "world_size": 2, "bytes": 1, "ms": 1.0, **change})
    with pytest.raises(ValueError, match=r"LookupPoint\.forward_bw must be positive"):
        lookup(64, 1, -1.0)
    with pytest.raises(TypeError, match=r"LookupPoint\.dim must be a number.*'64'"):
        lookup("64", 1, 1.0)  # type: ignore[arg-type]
