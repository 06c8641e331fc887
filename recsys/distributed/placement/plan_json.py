"""A plan of a whole model and its file: editable JSON with a line per table, checked when read.

The file omits a table's rectangles if they follow from its sharding type, ranks and size.
Otherwise, for example for rows divided by hand, it lists them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from recsys.base.checked import check_fields, checked
from recsys.distributed.placement import file_checks as files
from recsys.distributed.placement.file_checks import MOST_RANKS, MOST_ROWS, Reader, Readers
from recsys.distributed.placement.plan import (
    CacheParams,
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingType,
    ShardMetadata,
)
from recsys.distributed.placement.strategies import parameter_sharding, placement
from recsys.kernels.types import BoundsCheckMode

FORMAT = 1

_HINT = "plan.to_json() writes a file that has them all."


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRanks:
    """The ranks that a plan is made for.

    Attributes:
        world_size: Number of ranks.
        local_world_size: Ranks per node.
        compute_device: Device type of the ranks, "cpu" or "cuda".
    """

    world_size: int
    local_world_size: int
    compute_device: str


@dataclass
class ShardingPlan:
    """The placement of a whole model: module path to the plan of that module.

    Args:
        plan: Plans by module path.
        made_for: The ranks, if known: planners and files set them.

    Example:
        >>> tables = EmbeddingModuleShardingPlan()
        >>> tables["users"] = ParameterSharding("table_wise", "fused", ranks=[0])
        >>> plan = ShardingPlan({"sparse": tables})
        >>> ShardingPlan.from_json(plan.to_json()) == plan
        True
    """

    plan: dict[str, EmbeddingModuleShardingPlan] = field(default_factory=dict)
    made_for: PlanRanks | None = field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)

    def __eq__(self, other: object) -> bool:
        # plans are compared by their placements alone: a plan and its file are equal
        return self.plan == other.plan if isinstance(other, ShardingPlan) else NotImplemented

    @checked
    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """Return the plan of the module at this path, or None."""
        return self.plan.get(module_path)

    @checked
    def to_json(self, path: str | Path | None = None) -> str:
        """Return the plan as JSON, one line per table, and write it to a file if a path is given.

        Args:
            path: Path of the file.
        """
        text = write(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @staticmethod
    @checked
    def from_json(source: str | Path) -> ShardingPlan:
        """Return the plan in a file.

        `EmbeddingShardingPlanner.rate` and `DistributedModelParallel` check that it fits a model.

        Args:
            source: A path, or JSON text, which starts with a brace.

        Raises:
            OSError: The file cannot be read.
            ValueError: The text is not JSON, or a key, a choice, a rank or a size is wrong. The
                message names module and table.
            TypeError: A value has another type.
        """
        return read(*files.read_source(source, "Plan file"))

    def __str__(self) -> str:
        return "\n\n".join(
            f"module: {path}".rstrip() + f"\n{plan}" for path, plan in self.plan.items()
        )


# -- writing ---------------------------------------------------------------------------------------


def write(plan: ShardingPlan) -> str:
    """Return the text of a plan file."""
    made_for = plan.made_for or _guess_ranks(plan)
    modules = {
        path: {name: _entry(sharding, made_for) for name, sharding in tables.items()}
        for path, tables in plan.plan.items()
    }
    content = {"format": FORMAT, **asdict(made_for), "plan": modules}
    return files.to_json(content, levels=3) + "\n"


def _entry(sharding: ParameterSharding, made_for: PlanRanks) -> dict[str, object]:
    kind, spec, ranks = sharding.sharding_type, sharding.sharding_spec, sharding.ranks
    entry: dict[str, object] = {"sharding_type": kind, "compute_kernel": sharding.compute_kernel}
    shards = spec.shards if spec is not None else []
    if ranks is None:
        ranks = [shard.rank for shard in shards]
    # a plan does not contain the sizes of tables
    size = [
        max((shard.shard_offsets[i] + shard.shard_sizes[i] for shard in shards), default=0)
        for i in (0, 1)
    ]
    # torch's `_remote_device` is not equal to its text
    placed = [replace(shard, placement=str(shard.placement)) for shard in shards]
    follows = not shards or _shards_of(kind, size, ranks, made_for) == placed
    if follows and ranks:
        entry["ranks"] = _runs(ranks)
    if shards and follows:
        entry["size"] = size
    elif shards:
        entry["shards"] = [_shard(shard, made_for) for shard in shards]
    for name, (attribute, _, shown) in _SETTINGS.items():
        value = getattr(sharding, attribute)
        # CacheParams may have no load factor
        if value is not None and shown(value) is not None:
            entry[name] = shown(value)
    return entry


def _shards_of(
    kind: str, size: Sequence[int], ranks: Sequence[int], made_for: PlanRanks
) -> list[ShardMetadata]:
    """Return the shards that follow from a type, a size and ranks; empty if none do."""
    if not ranks or kind == ShardingType.DATA_PARALLEL.value:
        return []
    (rows, dim), device, local_size = size, made_for.compute_device, made_for.local_world_size
    spec = parameter_sharding(
        ShardingType(kind), rows, dim, ranks, device_type=device, local_size=local_size
    ).sharding_spec
    return spec.shards if spec is not None else []


def _shard(shard: ShardMetadata, made_for: PlanRanks) -> dict[str, object]:
    (row, col), (rows, cols) = shard.shard_offsets, shard.shard_sizes
    entry: dict[str, object] = {
        "rank": shard.rank,
        "rows": [row, row + rows],
        "columns": [col, col + cols],
    }
    usual = placement(made_for.compute_device, shard.rank, made_for.local_world_size)
    if str(shard.placement) != usual:
        entry["placement"] = str(shard.placement)
    return entry


def _runs(ranks: Sequence[int]) -> list[int | str]:
    """Return ranks, with three or more consecutive ones as "first-last"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown: list[int | str] = []
    for run in runs:
        shown += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else run
    return shown


def _guess_ranks(plan: ShardingPlan) -> PlanRanks:
    """Return the smallest number of ranks that the plan fits."""
    entries = [sharding for tables in plan.plan.values() for sharding in tables.values()]
    shards = [s for e in entries if e.sharding_spec is not None for s in e.sharding_spec.shards]
    ranks = {rank for e in entries for rank in e.ranks or ()} | {shard.rank for shard in shards}
    world_size = max(ranks, default=0) + 1
    gpus = [re.search(r"cuda(:\d+)?$", str(shard.placement)) for shard in shards]
    # each node numbers its GPUs from 0, so the largest number shows the size of a node
    numbers = [int((gpu[1] or ":0")[1:]) for gpu in gpus if gpu is not None]
    local_size = max(numbers, default=world_size - 1) + 1
    return PlanRanks(
        world_size=-(-world_size // local_size) * local_size,
        local_world_size=local_size,
        compute_device="cuda" if numbers else "cpu",
    )


# -- reading ---------------------------------------------------------------------------------------


def read(text: str, subject: str) -> ShardingPlan:
    """Return the plan in a text.

    Args:
        text: JSON.
        subject: Name of the text in errors.

    Raises:
        ValueError: The text is not JSON, a key is missing, unknown or repeated, a value is not one
            of its choices, or ranks and sizes do not match.
        TypeError: A value has another type.
    """
    members = files.read_members(subject, files.parse_json(text, subject), _FILE, hint=_HINT)
    made_for = PlanRanks(**{member.name: members[member.name] for member in fields(PlanRanks)})
    if made_for.world_size % made_for.local_world_size:
        raise ValueError(
            f"{subject}: local_world_size must divide world_size, because nodes have the same "
            f"number of ranks; received {made_for.local_world_size} and {made_for.world_size}."
        )
    plan = ShardingPlan(made_for=made_for)
    for path, tables in members["plan"].items():
        owner = f"{subject}: module {path!r}"
        plan.plan[path] = EmbeddingModuleShardingPlan(
            {
                name: _sharding(f"{owner}, table {name!r}", entry, made_for)
                for name, entry in files.object_of(owner, tables).items()
            }
        )
    return plan


def _sharding(subject: str, entry: object, made_for: PlanRanks) -> ParameterSharding:
    optional: Readers = {
        "ranks": partial(_ranks, world_size=made_for.world_size),
        "size": partial(_pair, rule="[rows, columns]", least=1),
        "shards": partial(files.list_of, each=partial(_read_shard, made_for=made_for)),
        **{name: read for name, (_, read, _) in _SETTINGS.items()},
    }
    hint = 'Such as {"sharding_type": "table_wise", "compute_kernel": "fused", "ranks": [0]}.'
    members = files.read_members(subject, entry, _ENTRY, optional, hint)
    kind, ranks, shards = members["sharding_type"], members.get("ranks"), members.get("shards")
    if shards is not None and ("ranks" in members or "size" in members):
        raise ValueError(
            f"{subject} must have shards, or ranks and a size that they follow from; received "
            f"both: {', '.join(members)}. Remove one."
        )
    spec = None
    if ranks is not None:
        _check_ranks(subject, ShardingType(kind), ranks, made_for)
    elif shards is not None:
        ranks, spec = [shard.rank for shard in shards], EnumerableShardingSpec(shards)
    elif kind not in (ShardingType.ROW_WISE.value, ShardingType.DATA_PARALLEL.value):
        raise ValueError(f"{subject} ({kind}) must have ranks or shards; received neither.")
    if "size" in members:
        spec = _spec(subject, kind, members["size"], ranks, made_for)
    return ParameterSharding(
        kind,
        members["compute_kernel"],
        ranks,
        spec,
        **{attribute: members.get(name) for name, (attribute, _, _) in _SETTINGS.items()},
    )


def _cache_params(subject: str, share: object) -> CacheParams:
    if not files.is_number(share):
        files.wrong_type(subject, "a number", share)
    return CacheParams(load_factor=share)


def _bounds_check_mode(subject: str, name: object) -> BoundsCheckMode:
    return BoundsCheckMode[files.choice_of(subject, name, [mode.name for mode in BoundsCheckMode])]


def _dtype(subject: str, name: object) -> torch.dtype:
    dtype = getattr(torch, files.text_of(subject, name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"{subject} must name a torch dtype, such as 'float32'; received {name!r}."
        )
    return dtype


_FILE: Readers = {
    "format": partial(files.check_format, known=FORMAT),
    "world_size": partial(files.whole_of, most=MOST_RANKS),
    "local_world_size": files.whole_of,
    "compute_device": partial(files.choice_of, choices=("cpu", "cuda")),
    "plan": files.object_of,
}
_ENTRY: Readers = {
    "sharding_type": partial(files.choice_of, choices=[kind.value for kind in ShardingType]),
    "compute_kernel": partial(
        files.choice_of, choices=[kernel.value for kernel in EmbeddingComputeKernel]
    ),
}
_SETTINGS: Mapping[str, tuple[str, Reader, Callable[[Any], object]]] = {
    "bounds_check_mode": ("bounds_check_mode", _bounds_check_mode, lambda mode: mode.name),
    "cache_load_factor": ("cache_params", _cache_params, lambda params: params.load_factor),
    "stochastic_rounding": ("stochastic_rounding", files.flag_of, bool),
    "output_dtype": ("output_dtype", _dtype, lambda dtype: str(dtype).removeprefix("torch.")),
}
"""Attribute of ParameterSharding, its reader and its writer, by the setting's name in a file."""


def _spec(
    subject: str, kind: str, size: list[int], ranks: list[int] | None, made_for: PlanRanks
) -> EnumerableShardingSpec:
    if not ranks or kind == ShardingType.DATA_PARALLEL.value:
        raise ValueError(
            f"{subject} ({kind}): size is for shards that follow from ranks; received "
            f"{size} and {'no ranks' if not ranks else kind}. Remove it."
        )
    shards = _shards_of(kind, size, ranks, made_for)
    if len(shards) != len(ranks):
        raise ValueError(
            f"{subject} ({kind}): {size[0]} rows x {size[1]} columns must make a shard for "
            f"each of {len(ranks)} ranks; received ranks {_runs(ranks)}; only {len(shards)} "
            "of them would own a shard. Name that many ranks."
        )
    return EnumerableShardingSpec(shards)


def _read_shard(subject: str, entry: object, made_for: PlanRanks) -> ShardMetadata:
    interval = partial(_pair, rule="[first, one past the last]")
    rank_of = partial(_read_rank, world_size=made_for.world_size)
    required: Readers = {"rank": rank_of, "rows": interval, "columns": interval}
    members = files.read_members(subject, entry, required, {"placement": files.text_of})
    rank, (top, bottom), (left, right) = members["rank"], members["rows"], members["columns"]
    if top > bottom or left > right:
        raise ValueError(
            f"{subject}: rows and columns must not end before they start; received rows "
            f"{members['rows']} and columns {members['columns']}."
        )
    usual = placement(made_for.compute_device, rank, made_for.local_world_size)
    device = members.get("placement", usual)
    shard = ShardMetadata([top, left], [bottom - top, right - left], device)
    if shard.rank != rank:
        raise ValueError(
            f"{subject}: placement must be on the shard's rank, {rank}; received {device!r}."
        )
    return shard


def _pair(subject: str, value: object, rule: str, least: int = 0) -> list[int]:
    if not isinstance(value, list) or len(value) != 2 or not all(map(files.is_number, value)):
        files.wrong_type(subject, rule, value)
    return [files.whole_of(subject, number, least, MOST_ROWS) for number in value]


def _ranks(subject: str, value: object, world_size: int) -> list[int]:
    ranks: list[int] = []
    for rank in files.list_of(subject, value):
        # so few digits that `int` accepts them
        run = re.fullmatch(r"(\d{1,18})-(\d{1,18})", rank) if isinstance(rank, str) else None
        if isinstance(rank, str) and (run is None or int(run[1]) > int(run[2])):
            raise ValueError(
                f'{subject} must hold numbers, and runs of them such as "0-7"; received {rank!r}.'
            )
        first, last = (int(run[1]), int(run[2])) if run else (rank, rank)
        # both ends are checked before the range, which a wrong number would make huge
        _read_rank(subject, first, world_size)
        ranks += range(first, _read_rank(subject, last, world_size) + 1)
        # runs may overlap, so there can be more than `world_size`
        if len(ranks) > MOST_RANKS:
            raise ValueError(f"{subject} must name at most {MOST_RANKS} ranks; received more.")
    if not ranks:
        raise ValueError(f"{subject} must name at least one rank; received none.")
    return ranks


def _read_rank(subject: str, value: object, world_size: int) -> int:
    rank = files.whole_of(subject, value, least=0)
    if rank >= world_size:
        raise ValueError(
            f"{subject} must be in 0..{world_size - 1}, as the plan's world_size is {world_size}; "
            f"received {rank}."
        )
    return rank


def _check_ranks(
    subject: str, kind: ShardingType, ranks: Sequence[int], made_for: PlanRanks
) -> None:
    """Raise unless the sharding type can use the ranks."""
    size = made_for.local_world_size
    nodes = [[rank // size for rank in ranks[i : i + size]] for i in range(0, len(ranks), size)]
    is_one_node = len({rank // size for rank in ranks}) == 1
    of_one_node = is_one_node, f"ranks of one node, which has {size}"
    rules: Mapping[ShardingType, tuple[bool, str]] = {
        ShardingType.TABLE_WISE: (len(ranks) == 1, "one rank"),
        ShardingType.DATA_PARALLEL: (
            sorted(ranks) == list(range(made_for.world_size)),
            f'all ranks, ["0-{made_for.world_size - 1}"], or none',
        ),
        ShardingType.TABLE_ROW_WISE: of_one_node,
        ShardingType.TABLE_COLUMN_WISE: of_one_node,
        ShardingType.GRID_SHARD: (
            len(ranks) % size == 0 and all(len(set(node)) == 1 for node in nodes),
            f"all ranks of some nodes, node by node; a node has {size}",
        ),
    }
    holds, rule = rules.get(kind, (True, ""))
    if not holds:
        raise ValueError(
            f"{subject} ({kind.value}): ranks must be {rule}; received {_runs(ranks)}."
        )
