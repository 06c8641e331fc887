"""A plan that knows what it costs, and reports on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from recsys.distributed.placement.plan_json import ShardingPlan
from recsys.distributed.planner.explanation import Explanation
from recsys.distributed.planner.plan_cost import Rating
from recsys.distributed.planner.report import report
from recsys.distributed.planner.report_html import report_html


@dataclass
class RatedPlan(ShardingPlan):
    """A plan that knows what it costs.

    Attributes:
        rating: milliseconds and memory of each rank and table; None once it is edited or loaded.
    """

    rating: Rating | None = field(default=None, compare=False, repr=False)
    _explanation: Explanation | None = field(default=None, init=False, compare=False, repr=False)

    def report(self, *, seconds: float = 5.0) -> str:
        """Returns, as text, what the plan costs, why it is so, and what would make it faster.

        Args:
            seconds: how long to try changes for (planning again under each); 0 tries none.

        Raises:
            ValueError: if the plan was edited after it was rated.
        """
        return report(self._explained(seconds))

    def report_html(self, path: str | Path | None = None, *, seconds: float = 5.0) -> str:
        """Returns the report as one HTML page that needs nothing else, and writes it to a file.

        Args:
            path: of the file; none is written if None.
            seconds: as for :meth:`report`.

        Raises:
            ValueError: if the plan was edited after it was rated.
        """
        page = report_html(self._explained(seconds))
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def _explained(self, seconds: float) -> Explanation:
        """Returns what text and page say, found once for both."""
        rating, known = self._checked(), self._explanation
        if known is None or known.rating is not rating or known.seconds != seconds:
            self._explanation = known = Explanation(rating, seconds)
        return known

    def _checked(self) -> Rating:
        if self.rating is None:
            raise ValueError(
                "A plan must be rated before it can be reported on; received one that is not. "
                "planner.rate(module, sharders, plan) rates it."
            )
        rated = {(t.table.path, t.table.name): t for t in self.rating.tables}
        entries = {(path, name): e for path, of in self.plan.items() for name, e in of.items()}
        for path, name in [*entries, *rated]:
            table, entry = rated.get((path, name)), entries.get((path, name))
            if table is None or entry is None or not table.is_placed_by(entry):
                raise ValueError(
                    f"A plan must be rated as it is; received one whose table {name!r} of module "
                    f"{path!r} was edited since. planner.rate(module, sharders, plan) rates it "
                    "again."
                )
        return self.rating
