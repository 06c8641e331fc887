"""What a user may demand of a plan."""

from __future__ import annotations

import pytest

from recsys.distributed.planner.types import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    ParameterConstraints,
)


def test_reservations_leave_memory_free() -> None:
    assert FixedPercentageStorageReservation(0.25).usable(1000, dense_bytes=300) == 750
    assert HeuristicalStorageReservation(0.25).usable(1000, dense_bytes=100) == 750 - 600
    assert HeuristicalStorageReservation(0.25, 2.5).usable(1000, dense_bytes=100) == 750 - 250
    estimated = HeuristicalStorageReservation(0.25, dense_tensor_estimate=70)
    assert estimated.usable(1000, dense_bytes=100) == 750 - 70
    # host memory beside a GPU has no dense parts
    assert estimated.usable(1000, dense_bytes=None) == 750


@pytest.mark.parametrize("kind", [FixedPercentageStorageReservation, HeuristicalStorageReservation])
@pytest.mark.parametrize("share", [-0.1, 1.0, 15])
def test_a_share_lies_between_0_and_1(kind: type, share: float) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__}.percentage must lie in \[0, 1\)"):
        kind(share)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sharding_types": ["tw"]}, r"sharding_types must name some of data_.*received \['tw'\]"),
        ({"sharding_types": []}, r"sharding_types must name some of .*; received \[\]"),
        ({"compute_kernels": ["gpu"]}, r"compute_kernels must name some of .*received \['gpu'\]"),
    ],
)
def test_unknown_demands_are_refused(arguments: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParameterConstraints(**arguments)
