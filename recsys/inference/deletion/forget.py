"""`forget`: removes values from a model that trains.

Shapes: `K` rows, `D` columns of a table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from recsys.base.arguments import MissingKeyError
from recsys.base.checked import checked_but
from recsys.distributed.changed_rows import TablePart, table_parts
from recsys.distributed.checkpoint.state import env_of
from recsys.distributed.model_parallel import get_unwrapped_module
from recsys.distributed.ranks.agreement import run_on_all_ranks
from recsys.distributed.ranks.comm import gather_objects
from recsys.features.spec import FeatureSpec
from recsys.inference.deletion.values import TableValues, rows_of, values_by_table
from recsys.modules.tables.fingerprints import check_spec, configs_by_weight

__all__ = ["forget"]

_WHAT = "forget values"
_UNKNOWN = 1  # row of unknown values in tables with a vocabulary


@checked_but("model", "values", "spec")
def forget(
    model: nn.Module,
    values: Mapping[str, Iterable[str | int]],
    spec: FeatureSpec | None = None,
) -> dict[str, int]:
    """Remove values from a model that trains, such as users who ask for deletion.

    - A table with `HashedIds`: the ids lose their rows, also rows on the disk. The next batch that
      has such an id trains it as a new one.
    - A table of a `Categorical` column: the rows take the weights of the row of unknown values.
      The values are still in the spec: make the next model by `spec.forget`.

    Optimizer states in backward are reset; a torch optimizer keeps its states. The next checkpoint
    does not have the ids, weights and states, and the next delta of a `Publisher` removes them from
    the servers, which then answer as for an unknown value. `find_values` lists older files.
    Counters of `AtLeast`, which several ids share, stay.

    Call it between two training steps, on all ranks that the model is sharded over, with the
    same values. Batches that a pipeline has prefetched still train the rows: end it before.

    Args:
        model: The model, sharded or not.
        values: Values by table, such as `{"user": ["ann"]}`; unknown ones are left out.
        spec: The fitted spec of the model's tables; None: the values are 64-bit ids of tables with
            `HashedIds`.

    Returns:
        The number of rows that were removed, by table, of all ranks.

    Raises:
        KeyError: The spec or the model has no such table.
        OSError: Rows on the disk cannot be removed.
        TypeError: A value has another type than the values of the table.
        ValueError: The spec is not the one of the model, values of a table share rows, gradients
            wait for a step, or ranks have different values.

    Example:
        >>> from recsys import EmbeddingBagCollection
        >>> from recsys.features import Categorical
        >>> spec = FeatureSpec([Categorical("user")]).fit({"user": ["ann", "bob", "eve"]})
        >>> model = EmbeddingBagCollection(tables=spec.tables(dim=2))
        >>> forget(model, {"user": ["ann", "zoe"]}, spec)
        {'user': 1}
        >>> weight = model.embedding_bags["user"].weight
        >>> bool((weight[2] == weight[1]).all()), bool((weight[3] == weight[1]).all())
        (True, False)
    """
    env, work = env_of(model), _Work()
    seen_here = run_on_all_ranks(env, _WHAT, lambda: work.prepare(model, values, spec))
    found = gather_objects(env.process_group, _WHAT, seen_here)
    if len({seen.digest for seen in found}) > 1:
        raise ValueError("forget.values must be equal on all ranks; received different values.")
    if lacking := sorted(set(values) - {name for seen in found for name in seen.tables}):
        raise MissingKeyError(
            f"forget.values must name tables of the model; no rank has {lacking}. Pass the model "
            "that trains, not a quantized one."
        )
    pieces = {key: piece for seen in found for key, piece in seen.unknown.items()}
    counts: dict[tuple[str, str, int], int] = {}  # column shards have the same rows
    counts_here = run_on_all_ranks(env, _WHAT, lambda: work.apply(pieces))
    for of_rank in gather_objects(env.process_group, _WHAT, counts_here):
        counts |= of_rank
    removed = dict.fromkeys(values, 0)
    for (table, _, _), count in counts.items():
        removed[table] += count
    return removed


@final
class _Seen(NamedTuple):
    """Tables of a rank, and its columns of unknown rows."""

    digest: str
    """Digest of the values."""
    tables: list[str]
    unknown: dict[tuple[str, int], Tensor]
    """Columns of the row of unknown values, by weight and first column."""


@final
class _Work:
    """The parts of the tables on this rank."""

    def __init__(self) -> None:
        self._tables: dict[str, TableValues] = {}
        self._rows: dict[str, np.ndarray[Any, Any]] = {}
        self._parts: list[tuple[str, TablePart]] = []

    def prepare(
        self,
        model: nn.Module,
        values: Mapping[str, Iterable[str | int]],
        spec: FeatureSpec | None,
    ) -> _Seen:
        """Convert the values and find the parts; nothing changes."""
        self._tables = values_by_table("forget", values, spec)
        if spec is not None:
            check_spec("forget.spec", spec, model)
            for name, of_table in self._tables.items():
                if of_table.ids is None:
                    vocabulary = spec.fitted.vocabularies[name]
                    self._rows[name] = rows_of(vocabulary, of_table.array)
        inner = get_unwrapped_module(model)
        names = {weight: config.name for weight, config in configs_by_weight(inner)}
        unknown = {}
        for part in table_parts(model):
            name = names.get(part.name, "")
            if name not in self._tables:
                continue
            self._check(name, part)
            self._parts.append((name, part))
            if name in self._rows and _UNKNOWN in part.rows:
                part.kernel.flush()
                row = part.kernel.weights[part.place][_UNKNOWN - part.rows.start]
                unknown[part.name, part.columns.start or 0] = row.detach().cpu().clone()
        text = repr([(name, t.array.to_pylist()) for name, t in sorted(self._tables.items())])
        return _Seen(
            hashlib.sha256(text.encode()).hexdigest(), [name for name, _ in self._parts], unknown
        )

    def _check(self, name: str, part: TablePart) -> None:
        if (part.ids is None) != (self._tables[name].ids is None):
            has = "no hashed ids" if part.ids is None else "hashed ids"
            raise ValueError(
                f"forget.spec must be the spec of the model; table {name!r} of the model has {has}."
                " Pass the spec whose tables the model has, or None for hashed ids."
            )
        if part.kernel.deferred.exist:
            raise ValueError(
                f"forget needs a model without gradients that wait for a step; table {name!r} has "
                "some. Call step() or zero_grad() before."
            )

    def apply(self, unknown: Mapping[tuple[str, int], Tensor]) -> dict[tuple[str, str, int], int]:
        """Reset the rows of this rank; return their number, by table, weight and first row."""
        counts = {}
        for name, part in self._parts:
            weights = part.kernel.weights[part.place]
            if part.ids is not None:
                ids = torch.from_numpy(np.array(self._tables[name].ids))
                rows = part.ids.free(ids)
                values = weights.new_zeros(len(rows), weights.shape[1])
            else:
                chosen = self._rows[name]
                chosen = chosen[(chosen >= part.rows.start) & (chosen < part.rows.stop)]
                rows = torch.from_numpy(chosen - part.rows.start).to(weights.device)
                row = unknown[part.name, part.columns.start or 0].to(weights)
                values = row.expand(len(rows), -1).clone()
            if len(rows):
                part.kernel.write_rows(part.place, rows, values, is_new=True)
            counts[name, part.name, part.rows.start] = len(rows)
        return counts
