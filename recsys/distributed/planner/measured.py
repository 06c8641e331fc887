"""Measured speeds of lookups and collectives, and the model for unmeasured ones."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, final

from recsys.distributed.placement.file_checks import choice_of
from recsys.distributed.planner.hardware import Hardware, check_number

KIND = "The kind of a collective"
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LookupPoint:
    """Measured speed of lookups of one shape.

    Args:
        dim: Columns of the tables.
        pooling: Ids per bag.
        forward_bw: Bytes of rows read per millisecond in forward.
        backward_bw: Bytes of rows read and written per millisecond in backward and update.
        split_bw: As `backward_bw`, for tables split by columns whose optimizer keeps a value for
            each row, such as row-wise Adagrad; includes sorting.

    Raises:
        ValueError: A number is not positive.
    """

    dim: int
    pooling: float
    forward_bw: float
    backward_bw: float
    split_bw: float

    def __post_init__(self) -> None:
        _check_positive(self, ("dim", "pooling", "forward_bw", "backward_bw", "split_bw"))


class LookupSpeed(NamedTuple):
    """Bytes per millisecond, as in `LookupPoint`."""

    forward_bw: float
    backward_bw: float
    split_bw: float


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CollectivePoint:
    """Measured time of one collective.

    Args:
        kind: One of `COLLECTIVES`.
        world_size: Number of ranks, which were consecutive.
        bytes: Bytes of the larger of a rank's two buffers: the input of an all-to-all or a
            reduce-scatter, the output of an all-gather.
        ms: Milliseconds.

    Raises:
        ValueError: A number is not positive, or the kind is unknown.
    """

    kind: str
    world_size: int
    bytes: int
    ms: float

    def __post_init__(self) -> None:
        choice_of(KIND, self.kind, COLLECTIVES)
        _check_positive(self, ("world_size", "bytes", "ms"))


_Point = TypeVar("_Point", LookupPoint, CollectivePoint)


def _check_positive(point: LookupPoint | CollectivePoint, names: Sequence[str]) -> None:
    for name in names:
        subject = f"{type(point).__name__}.{name}"
        value = check_number(subject, name, getattr(point, name))
        whole = name in ("dim", "world_size", "bytes")
        if value <= 0 or (whole and value != int(value)):
            kind = "a positive whole number" if whole else "positive"
            raise ValueError(f"{subject} must be {kind}; received {getattr(point, name)}.")


class _Curve(NamedTuple):
    """Linear interpolation between points with increasing `xs`, constant outside."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def at(self, x: float) -> float:
        right = bisect_left(self.xs, x)
        if right == 0:
            return self.ys[0]
        if right == len(self.xs):
            return self.ys[-1]
        left = right - 1
        share = (x - self.xs[left]) / (self.xs[right] - self.xs[left])
        return self.ys[left] + share * (self.ys[right] - self.ys[left])


@final
class LookupTable:
    """Interpolates measured points for any dim and pooling.

    A bandwidth is linear in the logarithm of the pooling and in the dim, and constant outside of
    the measured range.

    Args:
        points: At least one; each dim and pooling once.

    Raises:
        ValueError: A dim and pooling occur twice.

    Example:
        >>> fast = LookupPoint(dim=64, pooling=1, forward_bw=2e6, backward_bw=1e6, split_bw=5e5)
        >>> LookupTable([fast]).at(dim=128, pooling=5.0).backward_bw
        1000000.0
    """

    def __init__(self, points: Sequence[LookupPoint]) -> None:
        by_dim = _sorted(points, "lookup", ("dim", "pooling"), "dim {} with pooling {}")
        self._dims = [dim for (dim,) in by_dim]
        self._curves = {
            dim: [
                _Curve(tuple(math.log(p.pooling) for p in of), tuple(getattr(p, n) for p in of))
                for n in LookupSpeed._fields
            ]
            for (dim,), of in by_dim.items()
        }

    def at(self, dim: int, pooling: float) -> LookupSpeed:
        """Return the bandwidths in bytes per millisecond."""
        x = math.log(max(pooling, 1e-9))  # mostly empty features have less than one id
        right = bisect_left(self._dims, dim)
        # one dim at either end, so that the curve is constant outside
        near = self._dims[max(right - 1, 0) : right + 1]
        xs = tuple(float(d) for d in near)
        of_dims = [[curve.at(x) for curve in self._curves[d]] for d in near]
        return LookupSpeed(*(_Curve(xs, ys).at(dim) for ys in zip(*of_dims, strict=True)))


def largest_collectives(
    points: Sequence[CollectivePoint],
) -> dict[tuple[str, int], tuple[float, float]]:
    """Return bytes and milliseconds of the largest measurement, by kind and world size.

    Args:
        points: Each kind, world size and number of bytes once.

    Raises:
        ValueError: A kind, world size and number of bytes occur twice.
    """
    names = ("kind", "world_size", "bytes")
    groups = _sorted(points, "collectives", names, "{} of {} ranks and {} bytes")
    # sorted by bytes last; the share of latency is smallest in the longest transfer
    largest = {(kind, world_size): of[-1] for (kind, world_size), of in groups.items()}
    # the logarithms keep the last bits, on which the choice among equally good plans depends
    return {
        key: (math.exp(math.log(point.bytes)), math.exp(math.log(point.ms)))
        for key, point in largest.items()
    }


def _sorted(
    points: Sequence[_Point], table: str, names: tuple[str, ...], words: str
) -> dict[tuple[Any, ...], list[_Point]]:
    """Return the sorted points by all names but the last; raise if a point occurs twice."""
    key, groups = attrgetter(*names), dict[tuple[Any, ...], list[_Point]]()
    ordered = sorted(points, key=key)
    for left, other in pairwise(map(key, ordered)):
        if left == other:
            raise ValueError(
                f"Topology.{table} must have each point once; received {words.format(*left)} twice."
            )
    for point in ordered:
        groups.setdefault(key(point)[:-1], []).append(point)

    return groups


def transfer_ms(
    kind: str, num_bytes: float, num_ranks: int, num_nodes: int, rank: Hardware
) -> float:
    """Return the milliseconds that a collective takes to transfer its bytes, without latency.

    Ranks are spread evenly over the nodes. Transfers inside a node and across nodes overlap. The
    bytes that a rank must send follow the "bus bandwidth" factors of nccl-tests. The ranks of a
    node share the bytes that a reduction sends to other nodes.

    Args:
        kind: One of `COLLECTIVES`.
        num_bytes: As in `CollectivePoint`.
        num_ranks: Ranks that take part.
        num_nodes: Their nodes.
        rank: Hardware of the slowest rank.

    Example:
        >>> rank = Hardware(compute_device="cuda", hbm_cap=0, ddr_cap=0, intra_host_bw=1e6)
        >>> transfer_ms("all_to_all", 8e6, num_ranks=4, num_nodes=1, rank=rank)
        6.0
    """
    per_node = num_ranks / num_nodes
    if kind == "all_to_all":
        inside = num_bytes * (per_node - 1) / num_ranks
        across = num_bytes * (num_ranks - per_node) / num_ranks
    else:
        sent = (2 if kind == "all_reduce" else 1) * num_bytes * (num_ranks - 1) / num_ranks
        inside = sent if per_node > 1 else 0.0
        across = sent / per_node if num_nodes > 1 else 0.0
    return max(inside / rank.intra_host_bw, across / rank.inter_host_bw)
