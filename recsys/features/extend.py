"""Extends fitted specs by the values of further data, such as the next day's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, final

from recsys.base.arguments import MissingKeyError, whole
from recsys.features.columns import Column
from recsys.features.counts import TableChange
from recsys.features.fit import Fitted, PartialFit

__all__ = ["Report", "extended"]


@final
class Report(NamedTuple):
    """What changed in an extension of a spec; as text, a line per table."""

    tables: dict[str, TableChange]
    """Changes of the vocabularies, by table."""

    def __str__(self) -> str:
        return "\n".join(f"{name}: {_in_words(change)}" for name, change in self.tables.items())


def extended(
    columns: Sequence[Column],
    before: Fitted,
    parts: Iterable[PartialFit],
    retire_after: int | None,
    refit: Sequence[str],
) -> tuple[Fitted, Report]:
    """Return the state of a spec with the values of further data, and what changed.

    Args:
        columns: The columns of the spec.
        before: Its state.
        parts: As for `FeatureSpec.extend_parts`.
        retire_after: As for `FeatureSpec.extend`.
        refit: As for `FeatureSpec.extend`.

    Raises:
        KeyError: As for `FeatureSpec.extend`.
        TypeError: As for `FeatureSpec.extend`.
        ValueError: As for `FeatureSpec.extend_parts`.
    """
    if retire_after is not None:
        whole("retire_after", retire_after)
    if unknown := sorted(set(refit) - before.means.keys()):
        raise MissingKeyError(
            f"refit must name Numeric columns, {list(before.means)}; received {unknown}."
        )
    joined = PartialFit.joined(columns, parts, "extend", before.kinds)
    fitted = Fitted(before.num_rows + joined.num_rows, {}, {}, {}, {}, dict(joined.kinds))
    changes: dict[str, TableChange] = {}
    for column in columns:
        if column.name in refit:
            column.finish_fit(joined, fitted)
            continue
        change = column.finish_extend(joined, before, fitted, retire_after)
        if change is not None:
            changes[str(column.table)] = change
    return fitted, Report(changes)


def _in_words(change: TableChange) -> str:
    text = f"{change.new:,} new, {change.kept:,} kept ({change.absent:,} not in the data)"
    rest = {
        "retired": change.retired,
        "below min_count": change.rare,
        "left out by max_size": change.left_out,
    }
    return ", ".join([text, *(f"{count:,} {what}" for what, count in rest.items() if count)])
