"""Extends fitted specs by the values of further data, such as the next day's."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, final

import numpy as np
import pyarrow as pa

from recsys.base.arguments import MissingKeyError, names, shown, whole, wrong_type
from recsys.features.columns import Column
from recsys.features.counts import TableChange
from recsys.features.fit import Fitted, PartialFit
from recsys.features.profiles import Profile, Shift, stability_index

__all__ = ["Report", "array_of", "extended", "profiles_of", "shifts_of", "without"]

_MOST_DIGESTS = 64
"""Number of last data that are known, so that the same data does not come twice."""


@final
class Report(NamedTuple):
    """Changes by an extension of a spec; as text, a line per table and one per column."""

    tables: dict[str, TableChange]
    """Changes of the vocabularies, by table."""
    shifts: dict[str, Shift]
    """Differences of `Numeric` and `Categorical` columns from the data before, by column; only the
    first column of a table has one."""

    def __str__(self) -> str:
        lines = [f"{name}: {_in_words(change)}" for name, change in self.tables.items()]
        return "\n".join([*lines, *(f"{name}: {shift}" for name, shift in self.shifts.items())])


def extended(
    columns: Sequence[Column],
    before: Fitted,
    parts: Iterable[PartialFit],
    retire_after: int | None,
    refit: Sequence[str],
    allow_repeated: bool,
) -> tuple[Fitted, Report]:
    """Return the state of a spec with the values of further data, and what changed.

    Args:
        columns: The columns of the spec.
        before: Its state.
        parts: As for `FeatureSpec.extend_parts`.
        retire_after: As for `FeatureSpec.extend`.
        refit: As for `FeatureSpec.extend`.
        allow_repeated: As for `FeatureSpec.extend`.

    Raises:
        KeyError: As for `FeatureSpec.extend`.
        TypeError: As for `FeatureSpec.extend`.
        ValueError: As for `FeatureSpec.extend_parts`.
    """
    if retire_after is not None:
        whole("retire_after", retire_after)
    if unknown := sorted(set(names("refit", refit)) - before.means.keys()):
        raise MissingKeyError(
            f"refit must name Numeric columns, {list(before.means)}; received {unknown}."
        )
    joined = PartialFit.joined(columns, parts, "extend", before.kinds)
    digest = joined.digest()
    if digest in before.digests and not allow_repeated:
        ago = before.digests[::-1].index(digest)
        raise ValueError(
            "extend needs further data; received the number of rows, counts and means of "
            f"{'the last data' if not ago else f'the data {ago} extensions before the last'}. "
            "Leave out data that comes twice; if this is other data, pass allow_repeated=True."
        )
    digests = (*before.digests, digest)[-_MOST_DIGESTS:]
    num_rows, kinds = before.num_rows + joined.num_rows, dict(joined.kinds)
    profiles = profiles_of(columns, joined)
    fitted = Fitted(num_rows, {}, {}, {}, {}, kinds, profiles, digests, before.converted)
    changes: dict[str, TableChange] = {}
    for column in columns:
        if column.name in refit:
            column.finish_fit(joined, fitted)
            continue
        change = column.finish_extend(joined, before, fitted, retire_after)
        if change is not None:
            changes[str(column.table)] = change
    return fitted, Report(changes, shifts_of(columns, before, joined))


def shifts_of(
    columns: Sequence[Column], before: Fitted, statistics: PartialFit
) -> dict[str, Shift]:
    """Return the differences of columns from the data before, by column.

    Args:
        columns: The columns of a spec.
        before: Its state.
        statistics: The statistics of further data.
    """
    shifts = {}
    for column in columns:
        old = before.profiles.get(column.name)
        now = None if old is None else column.profile(statistics, old.bins)
        if old is not None and now is not None:
            index = stability_index(np.array(old.shares), np.array(now.shares))
            shifts[column.name] = Shift((old.missing, now.missing), index)
    return shifts


def profiles_of(columns: Sequence[Column], statistics: PartialFit) -> dict[str, Profile]:
    """Return the profiles of columns, the first one of each table.

    Args:
        columns: The columns of a spec.
        statistics: The statistics of all rows.
    """
    profiles: dict[str, Profile] = {}
    tables: set[str | None] = set()
    for column in columns:
        if column.table is not None and column.table in tables:
            continue
        profile = column.profile(statistics, None)
        if profile is not None:
            tables.add(column.table)
            profiles[column.name] = profile
    return profiles


def without(
    columns: Sequence[Column], before: Fitted, values: Mapping[str, Iterable[str | int]]
) -> Fitted:
    """Return the state of a spec without some values.

    Args:
        columns: The columns of the spec.
        before: Its state.
        values: As for `FeatureSpec.forget`.

    Raises:
        KeyError: A table has no vocabulary.
        TypeError: A value has another type than the values of the table.
    """
    vocabularies, gone = dict(before.vocabularies), dict[str | None, frozenset[Any]]()
    tables = {column.name: column.table for column in columns}
    if not isinstance(values, Mapping):
        wrong_type("values", "a dict of values by table", values)
    for table, removed in values.items():
        if table not in vocabularies:
            raise MissingKeyError(
                f"values must name tables of Categorical columns, {list(vocabularies)}; received "
                f"{table!r}. Hashed tables have no list of values."
            )
        old = vocabularies[table]
        array = array_of(f"values[{table!r}]", removed, old.kind)
        vocabularies[table] = old.without(array)
        gone[table] = frozenset(array.to_pylist())
    profiles = {
        name: _without_bins(profile, gone.get(tables.get(name), frozenset()))
        for name, profile in before.profiles.items()
    }
    return before._replace(vocabularies=vocabularies, profiles=profiles)


def array_of(
    subject: str, values: Iterable[str | int], kind: str | None, *, unsigned: bool = False
) -> Any:
    """Return values as an Arrow array, each once and without missing ones.

    Args:
        subject: The argument, for messages.
        values: Texts or whole numbers.
        kind: "text" or "number"; None: either, but one kind.
        unsigned: True to keep the 64 bits of numbers from 2^63 on.

    Returns:
        An array of `large_string` or `int64`.

    Raises:
        TypeError: A value is of another kind, or `values` is one value.
    """
    if isinstance(values, str | int) or not isinstance(values, Iterable):
        wrong_type(subject, "a list of values", values)
    for name in ("to_pylist", "tolist"):  # of Arrow, of numpy, pandas and torch
        values = getattr(values, name, lambda given=values: given)()
    present: list[Any] = list(dict.fromkeys(value for value in values if value is not None))
    if kind is None:
        kind = "text" if any(isinstance(value, str) for value in present) else "number"
    for value in present:
        is_number = isinstance(value, Integral) and not isinstance(value, bool)
        if not (isinstance(value, str) if kind == "text" else is_number):
            raise TypeError(
                f"{subject} must be {kind}s, as the data of fit; received {shown(value)}."
            )
    try:
        if kind == "text":
            return pa.array([str(value) for value in present], pa.large_string())
        numbers = [int(value) for value in present]
        if unsigned:
            numbers = [n - 2**64 if 2**63 <= n < 2**64 else n for n in numbers]
        return pa.array(numbers, pa.int64())
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        raise TypeError(f"{subject} must be {kind}s, as the data of fit; {error}.") from None


def _without_bins(profile: Profile, values: Container[Any]) -> Profile:
    """Return a profile in which some values count as others."""
    if not any(value in values for value in profile.bins):
        return profile
    kept = [place for place, value in enumerate(profile.bins) if value not in values]
    shares = [profile.shares[place] for place in kept]
    return profile._replace(bins=[profile.bins[p] for p in kept], shares=[*shares, 1 - sum(shares)])


def _in_words(change: TableChange) -> str:
    text = f"{change.new:,} new, {change.kept:,} kept ({change.absent:,} not in the data)"
    rest = {
        "retired": change.retired,
        "below min_count": change.rare,
        "left out by max_size": change.left_out,
    }
    return ", ".join([text, *(f"{count:,} {what}" for what, count in rest.items() if count)])
