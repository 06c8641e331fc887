"""Sharding plan with its costs, an explanation and suggestions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from recsys.base.arguments import path_of
from recsys.distributed.placement.plan import format_table
from recsys.distributed.placement.plan_json import ShardingPlan
from recsys.distributed.planner.formatting import ms, size_of
from recsys.distributed.planner.plan_cost import PlanCost
from recsys.distributed.planner.report_html import report_html
from recsys.distributed.planner.report_rows import COST_PARTS, Explanation

_MOST_RANKS = 16
_SLOWEST = 3
_MOST_TABLES = 20
_GAINS = "Suggested changes, each planned separately"


@dataclass(eq=False)
class RatedPlan(ShardingPlan):
    """Sharding plan with its costs.

    Attributes:
        rating: Milliseconds and bytes of each rank and table; None for a plan without costs.
    """

    rating: PlanCost | None = field(default=None, repr=False)
    _explanation: Explanation | None = field(default=None, init=False, repr=False)

    def report(self, *, seconds: float = 5.0) -> str:
        """Return the costs of the plan, their explanation and faster changes as text.

        Args:
            seconds: Time limit for trying changes. Each change runs the planner; 0 tries none.

        Raises:
            ValueError: The plan was edited after it was rated.
        """
        explanation = self._explained(seconds)
        gains = explanation.gain_sentences()
        return "\n\n".join(
            [
                explanation.headline(),
                f"Bottleneck\n{_bullets(explanation.binding())}",
                *([f"{_GAINS}\n{_bullets(gains)}"] if gains else []),
                f"Ranks, in ms per step\n{_ranks(explanation.rating)}",
                "Tables, longest time first. Below each: the two next best options, and the time "
                "of the slowest\nrank if only this table moves, to the best ranks found\n"
                + "\n".join(_tables(explanation)),
            ]
        )

    def report_html(self, path: str | Path | None = None, *, seconds: float = 5.0) -> str:
        """Return the report as one self-contained HTML page, and write it to a file.

        Args:
            path: Path of the file; None writes no file.
            seconds: As for `report`.

        Raises:
            ValueError: The plan was edited after it was rated.
        """
        page = report_html(self._explained(seconds))
        if path is not None:
            path_of("RatedPlan.report_html.path", path).write_text(page, encoding="utf-8")
        return page

    def _explained(self, seconds: float) -> Explanation:
        """Return the content of both reports, computed once."""
        if self.rating is None:
            raise ValueError(
                "A plan must be rated before it is reported; received a plan without rating. Call "
                "planner.rate(module, sharders, plan)."
            )
        # checked in each call, since `plan` can be edited between two reports
        rated = {(t.table.path, t.table.name): t for t in self.rating.tables}
        entries = {(path, name): e for path, of in self.plan.items() for name, e in of.items()}
        for path, name in [*entries, *rated]:
            table, entry = rated.get((path, name)), entries.get((path, name))
            if table is None or entry is None or not table.matches(entry):
                raise ValueError(
                    "A plan must not change after it is rated; received a plan whose table "
                    f"{name!r} of module {path!r} was edited. Call planner.rate(module, sharders, "
                    "plan) again."
                )
        known = self._explanation
        if known is None or known.rating is not self.rating or known.seconds != seconds:
            self._explanation = known = Explanation(self.rating, seconds)
        return known


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _ranks(rating: PlanCost) -> str:
    labels = _labels(rating)
    rows = []
    for rank, label in labels.items():
        cost, (used, budget) = rating.costs[rank], rating.memory[rank]
        row = [f"{rank}{label}", *(f"{ms:.3f}" for ms in (*cost.parts, cost.total))]
        for pool in range(len(rating.pools)):
            row += [size_of(used[pool]), size_of(budget[pool] - used[pool])]
        rows.append(tuple(row))
    memory = [("memory", "free"), ("host memory", "free")][: len(rating.pools)]
    head = ("rank", *COST_PARTS, "total", *(name for pair in memory for name in pair))
    text = format_table(head, rows, numbers=range(1, len(head)))
    left_out = len(rating.costs) - len(rows)
    return f"{text}\n... and {left_out} more" if left_out else text


def _labels(rating: PlanCost) -> dict[int, str]:
    """Return the ranks to show, each with a label if there are many."""
    totals = [cost.total for cost in rating.costs]
    order = sorted(range(len(totals)), key=lambda rank: (-totals[rank], rank))
    if len(order) <= _MOST_RANKS:
        return dict.fromkeys(range(len(order)), "")
    labels = dict.fromkeys(order[:_SLOWEST], " slowest")
    labels |= {order[len(order) // 2]: " median", order[-1]: " fastest"}
    # of equally full ranks, `max` returns the slowest, which is shown anyway
    fullest = max(order, key=lambda rank: rating.memory[rank][0].device)
    labels[fullest] = f"{labels.get(fullest, '')} fullest"
    return labels


def _tables(explanation: Explanation) -> Iterator[str]:
    for rated in explanation.tables[:_MOST_TABLES]:
        table, time = rated.table, ms(rated.busiest_ms)
        if rated.option.num_ranks > 1:
            time = f"at most {time} on one, {ms(rated.work_ms)} on all together"
        size = f"{table.rows:,} x {table.dim}, {size_of(sum(rated.memory))}"
        yield f"{table.full_name}, {size}: {explanation.place(rated)}, {time}"
        yield from (f"    {other}" for other in explanation.others(rated))
    if len(explanation.tables) > _MOST_TABLES:
        yield f"... and {len(explanation.tables) - _MOST_TABLES} more"
