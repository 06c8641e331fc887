from __future__ import annotations

import pytest
import torch

from recsys.compat.planner.storage_reservations import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    InferenceStorageReservation,
    PlannersReservation,
)
from recsys.compat.planner.topology import Storage, Topology
from recsys.compat.planner.types import StorageReservation
from recsys.distributed import planner as ours
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.planner.types import PlannerError, PlannerErrorType
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection

CAP = 10**9
DENSE = 4 * (20 * 10 + 10)
BATCH = 64 * (8 + 2 * 8 + 3 * 4 * 4)  # an id, a length and its offset, three copies of a row
TABLES = [EmbeddingBagConfig(1000, 4, "t", feature_names=["f"])]
MODEL = torch.nn.Sequential(
    EmbeddingBagCollection(tables=TABLES, device=torch.device("meta")), torch.nn.Linear(20, 10)
)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("reservation", "left", "host"),
    [
        (HeuristicalStorageReservation(0.5), CAP // 2 - 6 * DENSE, CAP // 2),
        (HeuristicalStorageReservation(0.5, dense_tensor_estimate=9), CAP // 2 - 9, CAP // 2),
        (FixedPercentageStorageReservation(0.25), CAP * 3 // 4, CAP * 3 // 4),
        (FixedAbsoluteStorageReservation(1000), CAP - 1000, CAP),
        (InferenceStorageReservation(0.5), CAP // 2 - DENSE, CAP // 2),
        (InferenceStorageReservation(0.5, dense_tensor_estimate=9), CAP // 2 - 9, CAP // 2),
        (
            PlannersReservation(ours.FixedPercentageStorageReservation(0.5)),
            CAP // 2,
            CAP // 2,
        ),
    ],
    ids=lambda value: value if isinstance(value, str | int) else repr(value),
)
def test_what_is_left(reservation: StorageReservation, left: int, host: int, device: str) -> None:
    topology = Topology(2, device, hbm_cap=CAP, ddr_cap=CAP, local_world_size=2)
    assert reservation.last_reserved_topology is None or device == "cuda"
    found = reservation.reserve(topology, 64, MODEL, [EmbeddingBagCollectionSharder()])
    on_cpu = Storage(CAP, left - BATCH)
    expected = on_cpu if device == "cpu" else Storage(left - BATCH, host)
    assert [rank.storage for rank in found.devices] == [expected] * 2
    assert topology.devices[0].storage == Storage(CAP, CAP), "the machine stays as it is"
    last = reservation.last_reserved_topology
    assert last is not None
    assert last is not found
    assert last.devices == found.devices


def test_nothing_left() -> None:
    topology = Topology(2, "cuda", hbm_cap=1000, ddr_cap=CAP, local_world_size=2)
    with pytest.raises(PlannerError, match=r"rank 0 of 1000 bytes.*Reserve less") as raised:
        HeuristicalStorageReservation().reserve(
            topology, 64, MODEL, [EmbeddingBagCollectionSharder()]
        )
    assert raised.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE


def test_they_are_the_planners_rules_and_check_alike() -> None:
    assert isinstance(HeuristicalStorageReservation(), ours.HeuristicalStorageReservation)
    assert HeuristicalStorageReservation(0.1) == HeuristicalStorageReservation(0.1)
    for make in (
        lambda: HeuristicalStorageReservation(1.0),
        lambda: FixedPercentageStorageReservation(-0.1),
        lambda: FixedAbsoluteStorageReservation(-1),
        lambda: InferenceStorageReservation(2.0).usable(1, 1),
    ):
        with pytest.raises(ValueError, match="received"):
            make()
