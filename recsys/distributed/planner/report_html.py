"""A plan explained on one page of HTML that loads nothing: styles, bars and sorting are inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from recsys.distributed.planner.explanation import (
    COST_PARTS,
    Explanation,
    TableFacts,
    ms,
    other_way,
    percent,
    size_of,
    verdict,
    way,
)
from recsys.distributed.planner.rating import Rating

_MOST_TABLES = 1500
_MOST_RANKS = 2048

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --faint: #5c5c66; --line: #d8d8de; --page: #fff;
  --hot: #e8590c; --bar: #1971c2; --full: #c92a2a; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececf0; --faint: #a5a5b0; --line: #3a3a42;
  --page: #17171a; --hot: #f76707; --bar: #4dabf7; --full: #ff8787; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.headline { font-size: 1.1rem; } .note, caption { color: var(--faint); text-align: left; }
.scroll { overflow-x: auto; max-height: 36rem; overflow-y: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; }
th.t, td.t { text-align: left; } thead th { position: sticky; top: 0; background: var(--page); }
thead button { font: inherit; font-weight: 600; color: inherit; background: none; border: 0;
  padding: 0; cursor: pointer; } th[aria-sort=ascending] button::after { content: " \\25b2"; }
th[aria-sort=descending] button::after { content: " \\25bc"; }
.h { background: color-mix(in srgb, var(--hot) calc(var(--v) * .6%), transparent); }
svg { width: 12rem; height: .8rem; vertical-align: middle; margin-right: .5rem; }
svg rect { fill: var(--bar); } svg.full rect { fill: var(--full); }
svg rect.cap { fill: none; stroke: var(--faint); }
"""

_SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") === "descending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => row.cells[column].dataset.k ?? row.cells[column].textContent;
    const compare = (a, b) => isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
    const rows = [...table.tBodies[0].rows].sort((a, b) => compare(key(a), key(b)));
    table.tBodies[0].append(...(up ? rows : rows.reverse()));
  }));
}
"""


def report_html(explanation: Explanation) -> str:
    """Returns the page about a plan."""
    rating = explanation.rating
    topology = rating.topology
    nodes = "1 node" if topology.num_nodes == 1 else f"{topology.num_nodes} nodes"
    scope = (
        f"{len(rating.tables):,} tables on {topology.world_size:,} {topology.compute_device} ranks "
        f"({nodes}), {rating.batch_size:,} samples per rank and step"
    )
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Sharding plan: {scope}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            f'<h1>Sharding plan</h1>\n<p class="note">{scope}</p>',
            f'<p class="headline">{escape(explanation.headline())}</p>',
            "<h2>What binds</h2>",
            _bullets(explanation.binding()),
            *_gains(explanation),
            "<h2>Ranks: milliseconds per step</h2>",
            _heat_map(rating),
            "<h2>Ranks: memory</h2>",
            _memory(rating),
            "<h2>Tables</h2>",
            _tables(explanation),
            f"<script>{_SCRIPT}</script>\n</body>\n</html>\n",
        ]
    )


def _bullets(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _gains(explanation: Explanation) -> Iterator[str]:
    now = explanation.rating.slowest_ms
    if explanation.gains:
        rows = [
            f'<tr><td class="t">{escape(gain.text)}<td>{ms(gain.slowest_ms)}'
            f"<td>-{percent(1 - gain.slowest_ms / now)}"
            for gain in explanation.gains
        ]
        head = [("change", "t"), ("slowest rank", ""), ("gain", "")]
        yield "<h2>What would gain most</h2>"
        yield _table(
            head, rows, f"Each was planned again by itself; now it is {ms(now)}.", sortable=False
        )


def _heat_map(rating: Rating) -> str:
    peaks = [
        max((getattr(cost, part) for cost in rating.costs), default=0.0) for part in COST_PARTS
    ]
    most, slowest = max(peaks) or 1.0, rating.slowest_ms or 1.0
    rows = []
    for rank, cost in enumerate(rating.costs[:_MOST_RANKS]):
        cells = [_heat(getattr(cost, part), most) for part in COST_PARTS]
        rows.append(f"<tr><td>{rank}{''.join(cells)}{_heat(cost.total, slowest)}")
    head = [("rank", ""), *((part, "") for part in COST_PARTS), ("total", "")]
    scale = f"up to {ms(most)} for parts, {ms(slowest)} for totals"
    caption = f"The stronger the colour, the longer: {scale}."
    return _table(head, rows, caption + _left_out(len(rating.costs), _MOST_RANKS))


def _heat(value: float, most: float) -> str:
    return f'<td class=h style="--v:{100 * value / most:.0f}">{value:.3f}'


def _memory(rating: Rating) -> str:
    pools = [rating.topology.compute_device]
    if any(stored.total.host for stored in rating.storage):
        pools.append("host")
    rows = []
    for rank, (stored, room) in enumerate(zip(rating.storage, rating.rooms, strict=True)):
        if rank == _MOST_RANKS:
            break
        bars = [_bar(stored.total[pool], room[pool]) for pool in range(len(pools))]
        rows.append(f"<tr><td>{rank}{''.join(bars)}")
    head = [("rank", ""), *((f"{pool} memory", "t") for pool in pools)]
    caption = "What tables take of the memory that is free for them, the frame."
    return _table(head, rows, caption + _left_out(len(rating.costs), _MOST_RANKS))


def _bar(used: int, free: int) -> str:
    share = used / free if free > 0 else float(used > 0)
    full = ' class="full"' if share >= 0.95 else ""
    return (
        f'<td class="t" data-k="{used}"><svg{full} viewBox="0 0 100 8" preserveAspectRatio="none" '
        f'aria-hidden="true"><rect width="{min(100 * share, 100):.1f}" height="8"/><rect '
        f'class="cap" width="100" height="8"/></svg>{size_of(used)} of {size_of(max(free, 0))} '
        f"({share:.0%})"
    )


def _tables(explanation: Explanation) -> str:
    rows = [_table_row(explanation, table) for table in explanation.tables[:_MOST_TABLES]]
    head = [
        ("table", "t"),
        ("rows", ""),
        ("columns", ""),
        ("where", "t"),
        ("ms on its busiest rank", ""),
        ("ms on all ranks", ""),
        ("memory", ""),
        ("next best", "t"),
    ]
    caption = (
        "Next best: what the slowest rank would take if this table alone went there, to the best "
        "ranks that were found, while all others stay."
    )
    return _table(head, rows, caption + _left_out(len(explanation.tables), _MOST_TABLES))


def _table_row(explanation: Explanation, table: TableFacts) -> str:
    rated, rating = table.rated, explanation.rating
    owned = rated.table
    place = way(rated.option, rated.ranks, rating.topology.world_size)
    size = sum(table.memory)
    others = [
        escape(f"{other_way(other, rated)}: {verdict(other, rating.slowest_ms, table.work_ms)}")
        for other in explanation.others(table)
    ]
    return (
        f'<tr><td class=t>{escape(table.name)}<td data-k="{owned.rows}">{owned.rows:,}'
        f"<td>{owned.dim}"
        f"<td class=t>{escape(place)}<td>{table.busiest_ms:.4f}<td>{table.work_ms:.4f}"
        f'<td data-k="{size}">{size_of(size)}<td class=t>{"<br>".join(others) or "none"}'
    )


def _table(
    head: Sequence[tuple[str, str]], rows: Sequence[str], caption: str, *, sortable: bool = True
) -> str:
    cells = [
        f'<th scope="col"{f" class={kind}" if kind else ""}>'
        + (f"<button>{name}</button>" if sortable else name)
        for name, kind in head
    ]
    return (
        f'<div class="scroll" tabindex="0"><table{" class=sortable" if sortable else ""}>'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{''.join(cells)}</thead>\n<tbody>\n"
        + "\n".join(rows)
        + "\n</tbody></table></div>"
    )


def _left_out(number: int, most: int) -> str:
    return f" ... and {number - most:,} more." if number > most else ""
