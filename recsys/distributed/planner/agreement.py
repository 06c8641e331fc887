"""Whether all ranks were asked for the same plan; if not, the same error on every rank."""

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
_ALIKE = 0.05  # share by which hosts that are alike differ in the memory that they report
_OF_TABLES = (
    *("rows", "dim", "element_bytes", "trains", "num_features", "is_pooled", "is_weighted"),
    "wire_bytes",
)
_STAGE = "plan the model"
_T = TypeVar("_T")


def facts_of(lister: OptionLister, tables: Sequence[PlannedTable], reservation: object) -> Facts:
    """Return what has to agree, in words.

    Memory is left out: topologies read it from the host they are made on, and hosts that are
    otherwise alike differ by some MiB.

    Args:
        lister: knows the machine and the batches.
        tables: to place.
        reservation: of memory.
    """
    topology, spoken = lister.topology, dict[int, str]()  # what many tables share is said once

    def words(shared: object) -> str:
        if id(shared) not in spoken:
            value = [*shared.items()] if isinstance(shared, Mapping) else shared
            spoken[id(shared)] = stable(value)
        return spoken[id(shared)]

    facts = {name: str(getattr(lister, name)) for name in ("batch_size", "batches_in_flight")}
    facts["storage_reservation"] = stable(reservation)
    for name in ("world_size", "local_world_size", "compute_device", "lookup", "collectives"):
        facts[f"topology.{name}"] = repr(getattr(topology, name))
    for name in (name for name in NUMBERS if name not in _CAPS):
        numbers = [str(getattr(rank, name)) for rank in topology.hardware]
        facts[f"topology.{name}"] = "; ".join(numbers)
    facts["tables"] = repr([table.name for table in tables])
    for table in tables:
        own = f"table {table.name!r} of module {table.path!r}"
        facts[f"constraints of {own}"] = words(table.constraints)
        optimizer = table.optimizer.spec.algorithm.name if table.optimizer else "none"
        parts = [f"{name} {getattr(table, name)}" for name in _OF_TABLES]
        facts[own] = "; ".join(
            [*parts, f"optimizer {optimizer}", f"kernels {words(table.kernels)}"]
        )
    return facts


def check_agreement(group: dist.ProcessGroup, facts: Facts | Exception, topology: Topology) -> None:
    """Raise the same error on every rank, unless all were asked for the same plan.

    Costs one small collective; two more where ranks differ.

    Args:
        group: the ranks.
        facts: what this rank was asked for, or why it cannot say.
        topology: the machine.

    Raises:
        PlannerError: naming a rank that differs from rank 0, and in what.
        Exception: why a rank cannot say what it was asked for.
    """
    caps = tuple(getattr(topology, cap) for cap in _CAPS)
    seen = agree(group, _STAGE, facts, caps, _mismatch)
    for number, cap in enumerate(_CAPS):
        sizes = [caps[number] for caps in seen]
        for rank, size in enumerate(sizes):
            if abs(size - sizes[0]) > _ALIKE * sizes[0]:
                text = differs(_STAGE, rank, f"topology.{cap}", str(sizes[0]), str(size))
                raise _mismatch(text)


def _mismatch(text: str) -> PlannerError:
    return PlannerError(text, PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH)


def planning_ranks(pg: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the ranks that plan together, all if None is given; None if this one is alone."""
    if pg is None and dist.is_available() and dist.is_initialized():
        pg = dist.group.WORLD
    return None if pg is None or dist.get_world_size(pg) == 1 else pg


def made_by_rank_0(pg: dist.ProcessGroup, make: Callable[[], _T]) -> _T:
    """Return what `make` returns on rank 0, or raise its error, on every rank.

    Args:
        pg: the ranks.
        make: is called on rank 0 alone.
    """
    answer: _T | Exception | None = None
    if dist.get_rank(pg) == 0:
        try:
            answer = make()
        except Exception as error:  # raised below, on every rank
            answer = error
    answer = broadcast_object(pg, "take the plan of rank 0", answer)
    if isinstance(answer, Exception):
        raise answer
    assert answer is not None
    return answer
