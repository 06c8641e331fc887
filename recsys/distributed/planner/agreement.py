"""Whether all ranks were asked for the same plan; if not, the same error on every rank."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from recsys.distributed.planner.hardware import NUMBERS
from recsys.distributed.planner.tables import PlannedTable
from recsys.distributed.planner.topology import Topology
from recsys.distributed.planner.types import PlannerError

_CAPS = ("hbm_cap", "ddr_cap", "ssd_cap")
_ALIKE = 0.05  # share by which hosts that are alike differ in the memory that they report
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

Facts = Mapping[str, str]
"""What a rank was asked for: the value of each input, by its name."""


def facts_of(
    topology: Topology, tables: Sequence[PlannedTable], others: Mapping[str, object]
) -> Facts:
    """Returns what has to agree, in words.

    Memory is left out: topologies read it from the host they are made on, and hosts that are
    otherwise alike differ by some MiB.

    Args:
        topology: the machine.
        tables: to place.
        others: further inputs by name.
    """
    facts = {name: _stable(value) for name, value in others.items()}
    for name in ("world_size", "local_world_size", "compute_device", "lookup", "collectives"):
        facts[f"topology.{name}"] = repr(getattr(topology, name))
    for name in NUMBERS:
        if name not in _CAPS:
            numbers = [getattr(rank, name) for rank in topology.hardware]
            facts[f"topology.{name}"] = repr(numbers[0] if len(set(numbers)) == 1 else numbers)
    facts["tables"] = repr([table.name for table in tables])
    for table in tables:
        optimizer = table.optimizer.spec.algorithm.name if table.optimizer else "none"
        kinds = {kind.value: _stable(kernels) for kind, kernels in table.kernels.items()}
        own = f"table {table.name!r} of module {table.path!r}"
        facts[own] = (
            f"{table.rows} x {table.dim}, {table.element_bytes} bytes per weight, optimizer "
            f"{optimizer}, {'trained' if table.trains else 'frozen'}, {table.num_features} "
            f"features, {'pooled' if table.is_pooled else 'sequences'}, "
            f"{'weighted' if table.is_weighted else 'unweighted'}, bytes on the wire "
            f"{table.wire_bytes}, {kinds}"
        )
        facts[f"constraints of {own}"] = _stable(table.constraints)
    return facts


def check_agreement(group: dist.ProcessGroup, facts: Facts | Exception, topology: Topology) -> None:
    """Raises the same error on every rank, unless all were asked for the same plan.

    Costs one small collective; two more where ranks differ.

    Args:
        group: the ranks.
        facts: what this rank was asked for, or why it cannot say.
        topology: the machine.

    Raises:
        PlannerError: naming a rank that differs from rank 0, and in what.
    """
    failure = str(facts) if isinstance(facts, Exception) else None
    lines = {} if isinstance(facts, Exception) else dict(facts)
    digest = hashlib.sha256(repr(list(lines.items())).encode()).hexdigest()
    caps = tuple(getattr(topology, cap) for cap in _CAPS)
    seen: list[tuple[str | None, str, tuple[int, ...]]] = [("", "", ())] * group.size()
    dist.all_gather_object(seen, (failure, digest, caps), group=group)
    failed = [rank for rank, (why, _, _) in enumerate(seen) if why is not None]
    if failed:
        if isinstance(facts, Exception) and len({why for why, _, _ in seen}) == 1:
            raise facts
        raise PlannerError(f"On rank {failed[0]} no plan can be made: {seen[failed[0]][0]}")
    if len({digest for _, digest, _ in seen}) > 1:
        raise PlannerError(_find_difference(group, lines))
    for number, cap in enumerate(_CAPS):
        first = seen[0][2][number]
        for rank, (_, _, sizes) in enumerate(seen):
            if abs(sizes[number] - first) > _ALIKE * first:
                raise PlannerError(_differs(rank, f"topology.{cap}", str(first), sizes[number]))


def _find_difference(group: dist.ProcessGroup, lines: Facts) -> str:
    box: list[Facts] = [lines]
    dist.broadcast_object_list(box, group=group, group_src=0)
    first, rank = box[0], dist.get_rank(group)
    differing = [name for name in {**first, **lines} if first.get(name) != lines.get(name)]
    own = None
    if differing:
        name = differing[0]
        own = _differs(rank, name, first.get(name, "nothing"), lines.get(name, "nothing"))
    found: list[str | None] = [None] * group.size()
    dist.all_gather_object(found, own, group=group)
    return next((text for text in found if text is not None), "Ranks ask for different plans.")


def _differs(rank: int, name: str, first: str, own: object) -> str:
    return (
        f"All ranks must ask for the same plan; {name} differs: rank 0 has {_cut(first)}, rank "
        f"{rank} has {_cut(str(own))}. Build model and planner from the same arguments on every "
        "rank."
    )


def _stable(value: object) -> str:
    """Returns what prints the same in every process."""
    return _ADDRESS.sub("", repr(value))


def _cut(text: str, most: int = 400) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
