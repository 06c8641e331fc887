"""Fingerprints of the values that rows of tables stand for, compared with the values of data.

`FeatureSpec.tables` sets them. A table without one takes it from the first batch of a `Trainer`, or
from the checkpoint that it loads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

import numpy as np
from torch import nn

from recsys.base.arguments import wrong_type
from recsys.modules.embedding_configs import BaseEmbeddingConfig

if TYPE_CHECKING:
    from recsys.features import FeatureSpec

__all__ = [
    "SPECS",
    "SpecFunctions",
    "check_fingerprints",
    "check_spec",
    "configs_by_weight",
    "moved_values",
    "remember_values",
]


class _Values(Protocol):
    """The values of a table, such as `recsys.features.vocabulary.Vocabulary`."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the table."""

    @property
    def num_special_rows(self) -> int:
        """Number of first rows that are not values."""

    def rows_in(self, other: Any) -> Any:
        """Return the row of each value among other values; -1 if they do not have it."""


@final
class SpecFunctions(NamedTuple):
    """Functions of `recsys.features`, which imports this room and not the reverse."""

    restore: Callable[[Mapping[str, Any]], FeatureSpec]
    """Return the spec of a state, as `FeatureSpec.from_state_dict`."""
    row_sources: Callable[[FeatureSpec, FeatureSpec, str], Any]
    """Return the rows of a table's values in an earlier spec."""
    hashed_values: Callable[[FeatureSpec, FeatureSpec, str], tuple[Any, Any]]
    """Return the values of a vocabulary as ids of a table with hashed ids, and their rows."""


SPECS: list[SpecFunctions] = []
"""The functions, once `recsys.features` is imported."""
_known: weakref.WeakValueDictionary[str, _Values] = weakref.WeakValueDictionary()


def remember_values(fingerprint: str, values: _Values) -> None:
    """Keep values by their fingerprint, for messages, as long as something else uses them."""
    _known[fingerprint] = values


def moved_values(fingerprint: str, before: str) -> tuple[int, int] | None:
    """Return how many values have another row than in an earlier fit, and how many it had.

    Args:
        fingerprint: Of the later fit.
        before: Of the earlier one.

    Returns:
        None if this process does not have the values of both.
    """
    later, earlier = _known.get(fingerprint), _known.get(before)
    if later is None or earlier is None:
        return None
    count = earlier.num_rows - earlier.num_special_rows
    try:
        rows = earlier.rows_in(later)
    except TypeError:  # texts and numbers
        return count, count
    return int((rows != np.arange(len(rows))).sum()), count


def configs_by_weight(model: nn.Module) -> Iterator[tuple[str, BaseEmbeddingConfig]]:
    """Yield the name of the weight and the config of each table, sharded, quantized or not.

    Args:
        model: The model, without wrappers.
    """
    for path, module in model.named_modules():
        configs = getattr(module, "configs", None)
        if callable(configs):
            tables = "embedding_bags" if hasattr(module, "embedding_bags") else "embeddings"
            for config in configs():
                if isinstance(config, BaseEmbeddingConfig):
                    name = f"{tables}.{config.name}.weight"
                    yield f"{path}.{name}" if path else name, config


def check_fingerprints(
    model: nn.Module, fingerprints: Mapping[str, str], subject: str, *, takes: bool = False
) -> None:
    """Check that features have the values which the rows of their tables stand for.

    Args:
        model: The model.
        fingerprints: Fingerprints by feature.
        subject: Where they are from, for the message, such as "spec".
        takes: Whether tables without a fingerprint take it.

    Raises:
        ValueError: A table was made with other values of a feature.
    """
    for _, config in configs_by_weight(model):
        for feature in config.feature_names:
            wanted = fingerprints.get(feature)
            if wanted is None or wanted == config.fingerprint:
                continue
            if config.fingerprint is None:
                if takes:
                    config.fingerprint = wanted
                continue
            raise ValueError(
                f"{subject} must be of the fit that made table {config.name!r}; its feature "
                f"{feature!r} is of another fit, whose rows stand for other values. Load the spec "
                "of the model, or make the tables by spec.tables and call "
                "load_checkpoint(..., spec=spec)."
            )


def check_spec(subject: str, spec: FeatureSpec, model: nn.Module) -> None:
    """Check that a spec is the one of a model's tables; tables without a fingerprint take its.

    Args:
        subject: The argument, for the message.
        spec: A fitted spec.
        model: The model, without wrappers.

    Raises:
        RuntimeError: The spec is not fitted.
        TypeError: It is not a spec.
        ValueError: A table was made by another fit.
    """
    fingerprints = getattr(spec, "fingerprints", None)
    if not callable(fingerprints):
        wrong_type(subject, "a FeatureSpec, or None", spec)
    check_fingerprints(model, fingerprints(), subject, takes=True)
