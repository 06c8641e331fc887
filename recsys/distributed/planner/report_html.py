"""Report on a plan as one self-contained HTML page, from the template `report.html`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from recsys.distributed.planner.formatting import ms, size_of
from recsys.distributed.planner.plan_cost import PlanCost, TableCost
from recsys.distributed.planner.report_rows import COST_PARTS, Explanation

_MOST_TABLES = 1500
_MOST_RANKS = 2048
_TABLE_HEAD = (
    *(("table", "t"), ("rows", ""), ("columns", ""), ("placement", "t")),
    *(("ms on its busiest rank", ""), ("ms on all ranks", ""), ("memory", ""), ("next best", "t")),
)


def report_html(explanation: Explanation) -> str:
    """Return the page."""
    rating = explanation.rating
    tables = [_table_row(explanation, table) for table in explanation.tables[:_MOST_TABLES]]
    # `$` placeholders, since CSS and JavaScript contain braces
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        scope=explanation.scope(),
        headline=escape(explanation.headline()),
        binding=_list("Bottleneck", explanation.binding()),
        gains=_list("Suggested changes", explanation.gain_sentences()),
        times=_times(rating),
        memory=_memory(rating),
        tables=_table(
            _TABLE_HEAD,
            tables,
            "Next best: time of the slowest rank if only this table moves there, to the best ranks "
            "found.",
            left_out=len(explanation.tables) - _MOST_TABLES,
        ),
    )


def _list(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>{title}</h2>\n<ul>{items}</ul>" if lines else ""


def _times(rating: PlanCost) -> str:
    """Return the phases of each rank's time as a heat map."""
    most = max((ms for cost in rating.costs for ms in cost.parts), default=0.0) or 1.0
    slowest = rating.slowest_ms or 1.0
    rows = []
    for rank, cost in enumerate(rating.costs[:_MOST_RANKS]):
        shares = [*((part, most) for part in cost.parts), (cost.total, slowest)]
        cells = [f'<td class=h style="--v:{100 * x / of:.0f}">{x:.3f}' for x, of in shares]
        # HTML allows rows and cells without end tags; a page has thousands of them
        rows.append(f"<tr><td>{rank}{''.join(cells)}")
    head = [(name, "") for name in ("rank", *COST_PARTS, "total")]
    scale = f"up to {ms(most)} for parts, {ms(slowest)} for totals"
    caption = f"Stronger colours are longer times: {scale}."
    return _table(head, rows, caption, left_out=len(rating.costs) - _MOST_RANKS)


def _memory(rating: PlanCost) -> str:
    """Return the memory of each rank as bars."""
    pools = rating.pools
    rows = []
    for rank, (used, budget) in enumerate(rating.memory[:_MOST_RANKS]):
        bars = [_bar(used[pool], budget[pool]) for pool in range(len(pools))]
        rows.append(f"<tr><td>{rank}{''.join(bars)}")
    head = [("rank", ""), *((f"{pool} memory", "t") for pool in pools)]
    caption = "Memory used by tables; the frame is the memory that is free for them."
    return _table(head, rows, caption, left_out=len(rating.costs) - _MOST_RANKS)


def _bar(used: int, budget: int) -> str:
    # a reservation larger than the memory leaves a negative budget
    share = used / budget if budget > 0 else float(used > 0)
    full = ' class="full"' if share >= 0.95 else ""
    return (
        f'<td class="t" data-k="{used}"><svg{full} viewBox="0 0 100 8" preserveAspectRatio="none" '
        f'aria-hidden="true"><rect width="{min(100 * share, 100):.1f}" height="8"/><rect '
        f'class="cap" width="100" height="8"/></svg>{size_of(used)} of {size_of(max(budget, 0))} '
        f"({share:.0%})"
    )


def _table_row(explanation: Explanation, rated: TableCost) -> str:
    table, size = rated.table, sum(rated.memory)
    others = "<br>".join(map(escape, explanation.others(rated)))
    return (
        # the script sorts by `data-k`, where the text has units or separators
        f'<tr><td class=t>{escape(table.full_name)}<td data-k="{table.rows}">{table.rows:,}'
        f"<td>{table.dim}<td class=t>{escape(explanation.place(rated))}"
        f"<td>{rated.busiest_ms:.4f}<td>{rated.work_ms:.4f}"
        f'<td data-k="{size}">{size_of(size)}<td class=t>{others or "none"}'
    )


def _table(
    head: Sequence[tuple[str, str]], rows: Sequence[str], caption: str, *, left_out: int = 0
) -> str:
    cells = [
        f'<th scope="col"{f" class={kind}" if kind else ""}><button>{name}</button>'
        for name, kind in head
    ]
    rest = f" ... and {left_out:,} more." if left_out > 0 else ""
    return (
        f'<div class="scroll" tabindex="0"><table class=sortable>'
        f"<caption>{escape(caption)}{rest}</caption>\n<thead><tr>{''.join(cells)}</thead>\n<tbody>\n"
        + "\n".join(rows)
        + "\n</tbody></table></div>"
    )
