"""Plot of a layout: tables as rectangles, weights per rank, and bytes between ranks.

matplotlib is imported when a plot is requested.
"""

from __future__ import annotations

import colorsys
from collections.abc import Callable
from math import ceil, log
from typing import TYPE_CHECKING, Any

from recsys.base.checked import checked
from recsys.distributed.placement.traffic import Traffic, traffic_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from recsys.distributed.placement.layout import Layout


_TABLES_WIDTH, _RANKS_WIDTH = 6.2, 5.8  # inches; the tables are on the left
_LEAST_CELL = 0.62  # inches per table if there are many
_INK, _FAINT, _REPLICA = "#222222", "#888888", "#d9d9d9"
_FONT = 8.0
_POINTS = 72.0  # per inch
_STYLE: Any = {
    "font.size": _FONT,
    "text.color": _INK,
    "axes.titlesize": _FONT,
    "axes.titlecolor": _INK,
    "axes.titlelocation": "left",
    "axes.labelcolor": _INK,
    "axes.labelsize": _FONT,
    "figure.titlesize": _FONT,
    "figure.titleweight": "normal",
}
_Color = tuple[float, float, float]


@checked
def plot_layout(
    layout: Layout, *, samples_per_rank: int = 1, ids_per_sample: float = 1.0, pooled: bool = True
) -> Figure:
    """Draw a layout; see `Layout.plot`."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Layout.plot needs matplotlib; received an environment without it. Install it: "
            "pip install matplotlib."
        ) from error
    traffic = traffic_of(
        layout, samples_per_rank=samples_per_rank, ids_per_sample=ids_per_sample, pooled=pooled
    )
    with rc_context(_STYLE):
        return _draw(Figure, layout, traffic, samples_per_rank)


def _draw(
    new_figure: Callable[..., Figure], layout: Layout, traffic: Traffic, samples_per_rank: int
) -> Figure:
    exchanges = [("ids to their owners", traffic.ids_RR)]
    if layout.is_hierarchical:
        exchanges.append(("sums inside a node", traffic.node_sums_RR))
    exchanges.append(("embeddings to the samples", traffic.embeddings_RR))

    columns = max(4, ceil(len(layout.tables) ** 0.5))
    cell = max(_TABLES_WIDTH / columns, _LEAST_CELL)
    tables_width = cell * columns
    tables_height = ceil(len(layout.tables) / columns) * cell + 0.5
    bars_height = min(0.6 + 0.2 * layout.world_size, 4.0)
    matrix_height = min(_RANKS_WIDTH / len(exchanges), 2.6) + 0.6
    height = max(tables_height, bars_height + matrix_height)

    figure = new_figure(figsize=(tables_width + _RANKS_WIDTH, height), layout="constrained")
    [[left, right]] = figure.subfigures(
        1, 2, squeeze=False, width_ratios=[tables_width, _RANKS_WIDTH]
    )
    below = height - bars_height - matrix_height + 1e-3
    [[upper], [lower], _] = right.subfigures(
        3, 1, squeeze=False, height_ratios=[bars_height, matrix_height, below]
    )
    colors = rank_colors(layout.world_size, layout.node_size)
    _draw_tables(left.subplots(), layout, colors, columns, cell)
    _draw_ranks(upper.subplots(), layout, colors)
    axes = lower.subplots(1, len(exchanges), squeeze=False)[0]
    for axis, (title, bytes_RR) in zip(axes, exchanges, strict=True):
        cell_points = (_RANKS_WIDTH / len(exchanges) - 0.6) / layout.world_size * _POINTS
        _plot_bytes_matrix(axis, layout, title, bytes_RR, font=min(_FONT, cell_points / 4.3))
    axes[0].set_ylabel("from rank")
    each = "one sample" if samples_per_rank == 1 else f"{samples_per_rank:,} samples"
    title = f"Bytes from rank to rank in a forward pass, {each} on each rank"
    lower.suptitle(title, x=0.01, ha="left")
    return figure


def rank_colors(world_size: int, node_size: int) -> list[_Color]:
    """Return a color per rank: hues distinguish nodes, or ranks if there is only one node.

    Example:
        >>> len(set(rank_colors(64, 8)))
        64
    """
    num_nodes = world_size // node_size
    colors = []
    for rank in range(world_size):
        node, local = divmod(rank, node_size)
        hue = (0.58 + (node / num_nodes if num_nodes > 1 else local / node_size)) % 1.0
        shade = local / max(node_size - 1, 1) if num_nodes > 1 else (local % 2) * 0.5
        colors.append(colorsys.hls_to_rgb(hue, 0.58 + 0.24 * shade, 0.55))
    return colors


def _draw_tables(
    axes: Axes, layout: Layout, colors: list[_Color], columns: int, cell: float
) -> None:
    """Draw each table in a grid cell, with a size in inches by its columns and rows."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    parts: list[Rectangle] = []
    font = min(_FONT, cell * 7.0)
    label = 2.8 * font / _POINTS
    free = cell - label - 0.08
    most_columns = max(table.dim for table in layout.tables)
    most_rows = max(log(table.num_rows + 1) for table in layout.tables)
    for index, table in enumerate(layout.tables):
        line, column = divmod(index, columns)
        width = (cell - 0.12) * (0.25 + 0.75 * table.dim / most_columns)
        height = free * (0.3 + 0.7 * log(table.num_rows + 1) / most_rows)
        left, bottom = column * cell, label - (line + 1) * cell
        for rect in table.rects or [table.whole]:
            x, y = rect.col_start / table.dim, 1 - rect.row_end / table.num_rows
            w, h = rect.num_cols / table.dim, rect.num_rows / table.num_rows
            color = colors[rect.rank] if table.rects else _REPLICA
            corner, sides = (left + x * width, bottom + y * height), (w * width, h * height)
            line_width = min(0.6, 0.1 * min(sides) * _POINTS)  # thin shards keep their color
            parts.append(Rectangle(corner, *sides, fc=color, ec="white", lw=line_width))
            name = str(rect.rank) if table.rects else "all"
            if sides[0] * _POINTS > 5 * len(name) and sides[1] * _POINTS > 9:
                middle = corner[0] + sides[0] / 2, corner[1] + sides[1] / 2
                _write(axes, *middle, name)
        letters = int(cell * _POINTS / (0.56 * font))
        names = [_shorten(table.name, letters), f"{_short(table.num_rows)} x {table.dim}"]
        for place, (text, ink) in enumerate(zip(names, (_INK, _FAINT), strict=True)):
            y = bottom - (0.3 + 1.25 * place) * font / _POINTS
            axes.text(left, y, text, ha="left", va="top", fontsize=font, color=ink, in_layout=False)
    # clipping would give its paths other names in each picture
    axes.add_collection(PatchCollection(parts, match_original=True, clip_on=False))
    axes.set_xlim(0, columns * cell)
    axes.set_ylim(-ceil(len(layout.tables) / columns) * cell, 0)
    axes.set_aspect("equal", anchor="NW")
    axes.set_axis_off()
    axes.set_title("Tables, and the rank of each part (heights: logarithm of the rows)")


def _draw_ranks(axes: Axes, layout: Layout, colors: list[_Color]) -> None:
    """Draw a bar per rank: its weights, table by table."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    replicas = sum(table.num_rows * table.dim for table in layout.tables if not table.rects)
    held = [replicas] * layout.world_size
    parts = [Rectangle((0, r - 0.4), replicas, 0.8, fc=_REPLICA) for r in range(len(held))]
    for rect in (rect for table in layout.tables for rect in table.rects):
        size, rank = rect.num_rows * rect.num_cols, rect.rank
        parts.append(Rectangle((held[rank], rank - 0.4), size, 0.8, fc=colors[rank]))
        held[rank] += size
    most = max(held)
    for part in parts:
        is_wide = part.get_width() > most / 50
        part.set(edgecolor="white" if is_wide else "none", linewidth=0.4)
    axes.add_collection(PatchCollection(parts, match_original=True, clip_on=False))
    axes.set_xlim(0, most * 1.02)
    axes.set_xticks([0, most], ["0", _short(most)])
    axes.set_title("Weights on each rank")
    _label_ranks(axes, layout, "y", most=16)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_ylim(layout.world_size - 0.5, -0.5)


def _plot_bytes_matrix(
    axes: Axes, layout: Layout, title: str, bytes_RR: Tensor, font: float
) -> None:
    """Draw a matrix of bytes; darker cells have more bytes."""
    world_size = layout.world_size
    darkest = max(float(bytes_RR.max()) * 1.6, 1.0)
    image = axes.imshow(bytes_RR.tolist(), cmap="Blues", vmin=0, vmax=darkest)
    image.set_clip_on(False)
    if font >= 4:  # smaller text is not readable
        for source, line in enumerate(bytes_RR.tolist()):
            for target, size in enumerate(line):
                if size:
                    _write(axes, target, source, _short(size), font)
    for edge in range(layout.node_size, world_size, layout.node_size):
        axes.axhline(edge - 0.5, color=_FAINT, lw=0.8, clip_on=False)
        axes.axvline(edge - 0.5, color=_FAINT, lw=0.8, clip_on=False)
    total, kept = float(bytes_RR.sum()), float(bytes_RR.trace())
    axes.set_title(f"{title}\n{_short(total - kept, 'B')} sent", loc="center")
    axes.set_xlabel("to rank")
    _label_ranks(axes, layout, "x")
    _label_ranks(axes, layout, "y")
    for side in axes.spines.values():
        side.set_color(_FAINT)


def _write(axes: Axes, x: float, y: float, text: str, font: float = _FONT) -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=font, in_layout=False)


def _label_ranks(axes: Axes, layout: Layout, side: str, most: int = 8) -> None:
    step = ceil(layout.world_size / most)
    getattr(axes, f"set_{side}ticks")(range(0, layout.world_size, step))
    axes.tick_params(labelsize=_FONT - 1, length=0, colors=_INK)


def _shorten(name: str, letters: int) -> str:
    return name if len(name) <= letters else name[: max(letters - 1, 1)] + "…"


def _short(number: float, unit: str = "") -> str:
    """Return a number with three digits.

    Example:
        >>> _short(0.5), _short(999), _short(1536, "B"), _short(20_000_000)
        ('0.5', '999', '1.54 kB', '20 M')
    """
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5 or prefix == "T":
            break
        number /= 1000
    return f"{number:.3g} {prefix}{unit}".rstrip()
