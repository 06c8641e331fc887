"""Pictures of few and many tables on few and many ranks: their content, not their style."""

from __future__ import annotations

import io
import sys
from typing import Any

import matplotlib as mpl
import pytest

from recsys.distributed.placement.layout import Layout, PlacedTable, Rect, build_layout
from recsys.distributed.placement.layout_plot import rank_colors
from tests.distributed.placement.test_traffic import layout_of


def layout_with(num_tables: int, world_size: int, node_size: int) -> Layout:
    """Tables in turn whole, split by rows over a node, and replicated."""
    tables = []
    for i in range(num_tables):
        node = range(i % (world_size // node_size) * node_size, world_size)[:node_size]
        splits: list[tuple[int, int, int]] = [
            (j * 10, j * 10 + 10, rank) for j, rank in enumerate(node)
        ]
        whole = [(0, 10 * node_size, i % world_size)]
        rects = [splits, whole, []][i % 3]
        tables.append(
            PlacedTable(
                name=f"table_of_a_long_name_{i}",
                num_rows=10 * node_size,
                dim=8 + 8 * (i % 4),
                features=(i,),
                group=0,
                rects=tuple(
                    Rect(row_start=a, row_end=b, col_start=0, col_end=8 + 8 * (i % 4), rank=r)
                    for a, b, r in rects
                ),
            )
        )
    return build_layout(tables, num_tables, world_size, node_size=node_size)


def svg_of(layout: Layout) -> str:
    data = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "recsys", "svg.fonttype": "none"}):
        layout.plot(samples_per_rank=512).savefig(data, format="svg", metadata={"Date": None})
    return data.getvalue()


def texts_of(figure: Any) -> list[str]:
    axes = [axis for part in figure.subfigs for axis in (*part.axes, *_axes_below(part))]
    return [text.get_text() for axis in axes for text in axis.texts]


def _axes_below(part: Any) -> list[Any]:
    return [axis for sub in part.subfigs for axis in sub.axes]


@pytest.mark.parametrize(
    ("num_tables", "world_size", "node_size"),
    [(1, 1, 1), (3, 4, 2), (200, 64, 8)],
)
def test_draws_any_layout_alike_each_time(num_tables: int, world_size: int, node_size: int) -> None:
    layout = layout_with(num_tables, world_size, node_size)
    picture = svg_of(layout)
    assert picture == svg_of(layout)
    assert "Weights on each rank" in picture
    assert ("sums inside a node" in picture) is layout.is_hierarchical


def test_parts_have_the_colours_and_numbers_of_their_ranks() -> None:
    figure = layout_with(3, 4, 2).plot()
    axes = figure.subfigs[0].axes[0]
    faces = axes.collections[0].get_facecolor()
    colors = rank_colors(4, 2)
    assert [tuple(face[:3]) for face in faces[:3]] == [colors[0], colors[1], colors[1]]
    texts = texts_of(figure)
    assert texts[:4] == ["0", "1", "table_of_a_long_name_0", "20 x 8"]
    assert "all" in texts


def test_bytes_are_written_where_there_is_room() -> None:
    from recsys.distributed.sharding_plan import table_wise

    texts = texts_of(layout_of(table_wise(1)).plot(samples_per_rank=100))
    assert texts.count("800") == 4
    assert texts.count("6.4 k") == 4


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"plot needs matplotlib.*pip install matplotlib"):
        layout_with(1, 1, 1).plot()
