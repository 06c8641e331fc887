"""Check that all ranks plan with the same inputs; otherwise all raise the same error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

from recsys.distributed.planner.hardware import NUMBERS
from recsys.distributed.planner.option_lister import OptionLister
from recsys.distributed.planner.tables import PlannedTable
from recsys.distributed.planner.topology import Topology
from recsys.distributed.planner.types import PlannerError, PlannerErrorType
from recsys.distributed.ranks.agreement import Facts, agree, differs, stable
from recsys.distributed.ranks.comm import broadcast_object

_CAPS = ("hbm_cap", "ddr_cap", "ssd_cap")
_TOLERANCE = 0.05  # share by which the reported memory of identical hosts may differ
_OF_TABLES = (
    *("rows", "dim", "element_bytes", "trains", "num_features", "is_pooled", "is_weighted"),
    "wire_bytes",
)
_STAGE = "plan the model"
_T = TypeVar("_T")


def facts_of(lister: OptionLister, tables: Sequence[PlannedTable], reservation: object) -> Facts:
    """Return the inputs that all ranks must share, as text.

    Memory sizes are omitted: topologies read them from the host, and the memory of identical hosts
    differs by some MiB.

    Args:
        lister: Has the machine and the batch sizes.
        tables: Tables to place.
        reservation: Memory reservation.
    """
    topology = lister.topology
    texts: dict[int, str] = {}  # by identity: values that tables share are formatted once

    def text_of(shared: object) -> str:
        # the tables keep these objects alive, so no other object gets their identity
        if id(shared) not in texts:
            value = [*shared.items()] if isinstance(shared, Mapping) else shared
            texts[id(shared)] = stable(value)
        return texts[id(shared)]

    facts = {name: str(getattr(lister, name)) for name in ("batch_size", "batches_in_flight")}
    # stable: the default `repr` of an object has its address, which differs between ranks
    facts["storage_reservation"] = stable(reservation)
    for name in ("world_size", "local_world_size", "compute_device", "lookup", "collectives"):
        facts[f"topology.{name}"] = repr(getattr(topology, name))
    for name in (name for name in NUMBERS if name not in _CAPS):
        numbers = [str(getattr(rank, name)) for rank in topology.hardware]
        facts[f"topology.{name}"] = "; ".join(numbers)
    facts["tables"] = repr([table.name for table in tables])
    for table in tables:
        subject = f"table {table.name!r} of module {table.path!r}"
        facts[f"constraints of {subject}"] = text_of(table.constraints)
        optimizer = table.optimizer.spec.algorithm.name if table.optimizer else "none"
        parts = [f"{name} {getattr(table, name)}" for name in _OF_TABLES]
        facts[subject] = "; ".join(
            [*parts, f"optimizer {optimizer}", f"kernels {text_of(table.kernels)}"]
        )
    return facts


def check_agreement(group: dist.ProcessGroup, facts: Facts | Exception, topology: Topology) -> None:
    """Raise the same error on every rank unless all ranks have the same inputs.

    Costs one small collective, and two more if ranks differ.

    Args:
        group: Process group.
        facts: Inputs of this rank, or the error that prevented it from collecting them.
        topology: Machine.

    Raises:
        PlannerError: Names a rank that differs from rank 0, and the input.
        Exception: The error of a rank that could not collect its inputs.
    """
    caps = tuple(getattr(topology, cap) for cap in _CAPS)
    seen = agree(group, _STAGE, facts, caps, _mismatch)
    # all ranks compare the same numbers, so all raise or none
    for number, cap in enumerate(_CAPS):
        sizes = [caps[number] for caps in seen]
        for rank, size in enumerate(sizes):
            if abs(size - sizes[0]) > _TOLERANCE * sizes[0]:
                text = differs(_STAGE, rank, f"topology.{cap}", str(sizes[0]), str(size))
                raise _mismatch(text)


def _mismatch(text: str) -> PlannerError:
    return PlannerError(text, PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH)


def planning_ranks(pg: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group of ranks that plan together, by default all; None for a single rank."""
    # a torch without distributed has no `is_initialized`
    if pg is None and dist.is_available() and dist.is_initialized():
        pg = dist.group.WORLD
    return None if pg is None or dist.get_world_size(pg) == 1 else pg


def made_by_rank_0(pg: dist.ProcessGroup | None, make: Callable[[], _T]) -> _T:
    """Return the result of `make` on rank 0, or raise its error, on every rank.

    Args:
        pg: Process group; None is this process alone.
        make: Called on rank 0 only.
    """
    if pg is None:
        return make()
    answer: _T | Exception | None = None
    if dist.get_rank(pg) == 0:
        try:
            # the other ranks wait in the broadcast, so an error must not skip it
            answer = make()
        except Exception as error:  # raised below on every rank
            answer = error
    answer = broadcast_object(pg, "take the plan of rank 0", answer)
    if isinstance(answer, Exception):
        raise answer
    assert answer is not None
    return answer
