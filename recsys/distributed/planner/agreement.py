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
        own = f"table {table.name!r} of module {table.path!r}"
        facts[f"constraints of {own}"] = _stable(table.constraints)
        facts[own] = "; ".join(
            (
                f"{table.rows} x {table.dim}",
                f"{table.element_bytes} bytes per weight",
                f"optimizer {table.optimizer.spec.algorithm.name if table.optimizer else 'none'}",
                "trained" if table.trains else "frozen",
                f"{table.num_features} features",
                "pooled" if table.is_pooled else "sequences",
                "weighted" if table.is_weighted else "unweighted",
                f"{table.wire_bytes} bytes per value on the wire",
                f"kernels {_stable([*table.kernels.items()])}",
            )
        )
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
        sizes = [caps[number] for _, _, caps in seen]
        for rank, size in enumerate(sizes):
            if abs(size - sizes[0]) > _ALIKE * sizes[0]:
                raise PlannerError(_differs(rank, f"topology.{cap}", str(sizes[0]), str(size)))


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


def _differs(rank: int, name: str, first: str, own: str) -> str:
    ours, theirs = first.split("; "), own.split("; ")
    if len(ours) == len(theirs):
        pairs = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]]
        first, own = ("; ".join(side) for side in zip(*pairs, strict=True))
    return (
        f"All ranks must ask for the same plan; {name} differs: rank 0 has {_cut(first)}, rank "
        f"{rank} has {_cut(own)}. Build model and planner from the same arguments on every rank."
    )


def _stable(value: object) -> str:
    """Returns what prints the same in every process."""
    return _ADDRESS.sub("", repr(value))


def _cut(text: str, most: int = 400) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
