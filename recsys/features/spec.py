"""`FeatureSpec`: the description of a model's inputs, fitted on training data.

Shapes: `B` rows, `N` values, `F` features.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from recsys.base.arguments import MissingKeyError, path_of, shown, whole, wrong_type
from recsys.datasets.memory import table_of
from recsys.datasets.sources import parts_of
from recsys.datasets.utils import Batch
from recsys.features import extend, save
from recsys.features.arrow import with_missing
from recsys.features.columns import INPUTS, Column, Feature, check_columns
from recsys.features.fingerprints import hashed_values, row_sources
from recsys.features.fit import Fitted, PartialFit
from recsys.features.samples import join_labels
from recsys.features.transform import jagged_of
from recsys.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from recsys.modules.hashed_ids import HashedIds
from recsys.modules.tables.fingerprints import SPECS, SpecFunctions

__all__ = ["Extension", "FeatureSpec"]

_Array: TypeAlias = np.ndarray[Any, Any]
_WINDOW: Final = 1 << 18
"""Number of rows that `fit` converts together."""


@final
class Extension(NamedTuple):
    """A spec with the values of further data, and what changed."""

    spec: FeatureSpec
    report: extend.Report


@final
class FeatureSpec:
    """Columns of a table and their features, the same in training and serving.

    Args:
        columns: Descriptions from `recsys.features`, in the order of the model's inputs.

    Raises:
        TypeError: A value is not a description of a column.
        ValueError: Two features have one name, or columns with one table differ in its settings.

    Example:
        >>> from recsys.features import Categorical, FeatureSpec, Label, Numeric
        >>> spec = FeatureSpec([Categorical("city"), Numeric("age", standardize=True), Label("ok")])
        >>> data = {"city": ["Oslo", "Rome", "Rome"], "age": [20, 30, 40], "ok": [0, 1, 1]}
        >>> batch = spec.fit(data).transform(data)
        >>> batch.sparse_features["city"].values().tolist()
        [3, 2, 2]
        >>> batch.dense_features.tolist(), batch.labels.tolist()
        ([[-1.2247449159622192], [0.0], [1.2247449159622192]], [0.0, 1.0, 1.0])
        >>> [(table.name, table.num_embeddings) for table in spec.tables(dim=8)]
        [('city', 4)]
    """

    def __init__(self, columns: Iterable[Column]) -> None:
        self.columns: tuple[Column, ...] = tuple(columns)
        for column in self.columns:
            if not isinstance(column, Column):
                wrong_type("FeatureSpec.columns", "columns of recsys.features", column)
        self._fitted: Fitted | None = None
        self._fingerprints: dict[str, str] | None = None
        check_columns(self.columns)

    @property
    def fitted(self) -> Fitted:
        """The fitted state.

        Raises:
            RuntimeError: The spec has columns to fit and is not fitted.
        """
        return self._state_of(self.columns)

    @fitted.setter
    def fitted(self, fitted: Fitted) -> None:
        self._fitted, self._fingerprints = fitted, None

    @property
    def is_fitted(self) -> bool:
        """True after `fit`, `fit_parts`, `load` and `load_state_dict`."""
        return self._fitted is not None

    @property
    def converted(self) -> tuple[str, ...]:
        """Columns of prepared tables without the values of the raw column of this name."""
        return () if self._fitted is None else self._fitted.converted

    @property
    def is_weighted(self) -> bool:
        """True if ids have weights. Ids of columns without weights have the weight 1."""
        return any(column.weights is not None for column in self.columns)

    @property
    def dense_names(self) -> list[str]:
        """Names of the dense features, in the order of their columns in a batch."""
        dense = [column for column in self.columns if column.part == "dense_features"]
        return [name for column in dense for name in column.feature_names()]

    @property
    def label_names(self) -> list[str]:
        """Names of the labels, in the order of their columns in a batch."""
        return [column.name for column in self.columns if column.part == "labels"]

    def column_names(self, labels: bool = True) -> list[str]:
        """Return the names of the columns that `transform` reads.

        Args:
            labels: False to leave out labels, sample weights and groups.
        """
        read: dict[str, None] = {}
        for column in self.columns:
            if labels or column.part in INPUTS:
                read |= dict.fromkeys(column.column_names())
                if column.weights is not None:
                    read[column.weights] = None
        return list(read)

    def optional_names(self) -> list[str]:
        """Return the names of the columns that tables may lack, with `optional=True`."""
        return [name for column in self.columns for name in column.optional_names()]

    def fit_column_names(self) -> list[str]:
        """Return the names of the columns whose values `fit` reads."""
        fitted = [column for column in self.columns if column.needs_fit]
        names = [name for column in fitted for name in column.column_names()]
        return names or self.column_names()[:1]

    def column_kinds(self) -> dict[str, str | None]:
        """Return the kind of the values of each `Categorical`, `Hashed` and `Group` column.

        Returns:
            "text" or "number", as the data of `fit`; None if it is not known and both are legal.
            Columns of lists are left out, as text files do not have them, except for lists in
            texts: these columns, and their weights, are "text".
        """
        in_texts = [column for column in self.columns if column.separator is not None]
        names = [name for column in in_texts for name in (column.name, column.weights) if name]
        return dict.fromkeys(names, "text") | {
            column.name: None if self._fitted is None else column.value_kind(self._fitted)
            for column in self.columns
            if column.has_keys and not column.is_list
        }

    def features(self) -> list[Feature]:
        """Return the features with ids, in the order of a batch.

        Raises:
            RuntimeError: The spec is not fitted.
        """
        sparse = [column for column in self.columns if column.part == "sparse_features"]
        fitted = self._state_of(sparse)
        return [feature for column in sparse for feature in column.features(fitted)]

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprint of the fitted values of each feature that depends on them.

        Batches of the spec have them, and the tables of `tables`. A batch, a checkpoint or a
        package of another fit is refused by them: its rows stand for other values.

        Returns:
            By name of the feature. `Hashed`, `Ids` and `Timestamp` columns have none.

        Raises:
            RuntimeError: The spec is not fitted.

        Example:
            >>> from recsys.features import Categorical, FeatureSpec
            >>> spec = FeatureSpec([Categorical("city")]).fit({"city": ["Oslo", "Rome", "Rome"]})
            >>> spec.fingerprints()
            {'city': 'd789b1e72f3962780c813b963b3dc13b'}
        """
        if self._fingerprints is None:
            inputs = [column for column in self.columns if column.part in INPUTS]
            fitted, found = self._state_of(inputs), dict[str, str]()
            for column in inputs:
                found |= column.fingerprints(fitted)
            self._fingerprints = found
        return dict(self._fingerprints)

    def _state_of(self, columns: Iterable[Column]) -> Fitted:
        """Return the fitted state, or an empty one if it has nothing of these columns."""
        if self._fitted is not None:
            return self._fitted
        if any(column.needs_fit for column in columns):
            raise RuntimeError(
                "The spec must be fitted. Call fit with training data, or load a saved spec."
            )
        return Fitted(0, {}, {}, {}, {}, {})

    def tables(
        self, dim: int | Mapping[str, int], pooling: PoolingType = PoolingType.MEAN
    ) -> list[EmbeddingBagConfig]:
        """Return a config for each table, with its number of special rows.

        Args:
            dim: Columns of each table, or of the table of each name.
            pooling: Pooling of all tables.

        Raises:
            KeyError: `dim` has no entry for a table.
            RuntimeError: The spec is not fitted.
        """
        by_table: dict[str, list[Feature]] = {}
        for feature in self.features():
            by_table.setdefault(feature.table, []).append(feature)
        configs, fingerprints = [], self.fingerprints()
        for name, features in by_table.items():
            if isinstance(dim, Mapping) and name not in dim:
                raise MissingKeyError(
                    f"dim must have all tables, {list(by_table)}; it has {list(dim)}."
                )
            configs.append(
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=features[0].rows,
                    embedding_dim=dim[name] if isinstance(dim, Mapping) else whole("dim", dim),
                    feature_names=[feature.name for feature in features],
                    pooling=pooling,
                    ids=HashedIds() if features[0].growing else None,
                    num_special_rows=features[0].special_rows,
                    fingerprint=fingerprints.get(features[0].name),
                )
            )
        return configs

    def values_of(self, table: str, rows: Any) -> _Array:
        """Return the values of the data that rows of a table stand for, such as recommended items.

        Args:
            table: The table of a `Categorical` column.
            rows: Whole numbers of any shape, a tensor, an array or a list; -1 stands for no row.

        Returns:
            Objects, texts or whole numbers, of the shape of `rows`; None for missing, unknown and
            -1.

        Raises:
            KeyError: No `Categorical` column has the table.
            RuntimeError: The spec is not fitted.
            TypeError: `rows` are not whole numbers.
            ValueError: A row is outside the table.

        Example:
            >>> from recsys.features import Categorical, FeatureSpec
            >>> spec = FeatureSpec([Categorical("city")]).fit({"city": ["Oslo", "Rome", "Rome"]})
            >>> spec.values_of("city", [[2, 3], [1, -1]]).tolist()
            [['Rome', 'Oslo'], [None, None]]
        """
        vocabularies = self.fitted.vocabularies
        if not isinstance(table, str) or table not in vocabularies:
            raise MissingKeyError(
                f"table must be one of a Categorical column, {list(vocabularies)}; received "
                f"{shown(table)}. Other tables do not store values."
            )
        try:
            row_numbers = (
                rows.detach().cpu().numpy() if isinstance(rows, Tensor) else np.asarray(rows)
            )
        except (TypeError, ValueError):  # such as lists of unequal lengths
            row_numbers = np.asarray(None)
        if row_numbers.dtype.kind not in "iu" and row_numbers.size:
            raise TypeError(f"rows must be whole numbers of one shape; received {shown(rows)}.")
        return vocabularies[table].values_of(row_numbers.astype(np.int64))

    # -- files -------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write the fitted spec: `features.json` and an Arrow file per vocabulary.

        Args:
            folder: A new folder, or one with an older spec, which is replaced.

        Raises:
            FileExistsError: The folder has other files.
            ValueError: `folder` is an address, such as `s3://bucket/spec`.
            RuntimeError: The spec is not fitted.
        """
        save.save_folder(path_of("FeatureSpec.save.folder", folder), self.columns, self.fitted)

    @staticmethod
    def load(folder: str | Path) -> FeatureSpec:
        """Read a spec that `save` wrote.

        Args:
            folder: The folder.

        Raises:
            FileNotFoundError: The folder has no spec.
            ValueError: A file is damaged, or of another version.
        """
        columns, fitted = save.load_folder(path_of("FeatureSpec.load.folder", folder))
        spec = FeatureSpec(columns)
        spec.fitted = fitted
        return spec

    def state_dict(self) -> dict[str, Any]:
        """Return the fitted spec as text and tensors of bytes, for a checkpoint's `extra`.

        Raises:
            RuntimeError: The spec is not fitted.
        """
        return {
            "description": json.dumps(save.describe(self.columns, self.fitted)),
            "vocabularies": {
                name: torch.frombuffer(bytearray(save.to_bytes(vocabulary)), dtype=torch.uint8)
                for name, vocabulary in self.fitted.vocabularies.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the fitted state of a spec with the same columns.

        Args:
            state: The result of `state_dict`.

        Raises:
            ValueError: The state is of other columns.
        """
        spec = FeatureSpec.from_state_dict(state)
        if spec.columns != self.columns:
            raise ValueError(
                f"The state must be of the columns {list(self.columns)}; received the state of "
                f"{list(spec.columns)}."
            )
        self.fitted = spec.fitted

    @staticmethod
    def from_state_dict(state: Mapping[str, Any]) -> FeatureSpec:
        """Return the fitted spec of a state.

        Args:
            state: The result of `state_dict`.

        Raises:
            ValueError: The state is damaged, or of another version.
        """
        tensors: Mapping[str, Tensor] = state["vocabularies"]
        vocabularies = {
            name: save.from_bytes(data.numpy().tobytes()) for name, data in tensors.items()
        }
        description = json.loads(state["description"])
        columns, fitted = save.restore(description, vocabularies, "The state")
        spec = FeatureSpec(columns)
        spec.fitted = fitted
        return spec

    # -- fit ---------------------------------------------------------------------------------------

    def partial(self, data: Any, *, limit: int = 50_000_000) -> PartialFit:
        """Return the statistics of a part of the data, for `fit_parts`.

        Args:
            data: As for `fit`.
            limit: As for `fit`.

        Raises:
            KeyError: As for `fit`.
            TypeError: As for `fit`.
            ValueError: As for `fit`.
        """
        return self._partial(data, limit, FeatureSpec(self.columns).column_kinds())

    def _partial(self, data: Any, limit: int, kinds: Mapping[str, str | None]) -> PartialFit:
        """Return the statistics of data; text files are read with the kinds."""
        part = PartialFit(self.columns, limit)
        for rows in parts_of(data, self.fit_column_names(), kinds, self.optional_names()):
            for start in range(0, max(rows.table.num_rows, 1), _WINDOW):
                window = rows.slice(start, _WINDOW)
                with window.located(part.num_rows):
                    part.add(window.table)
        return part

    def fit(self, data: Any, *, limit: int = 50_000_000) -> FeatureSpec:
        """Collect vocabularies, means, deviations, buckets, and kinds of keys.

        A `Hashed` or `Group` column has texts or numbers: `transform` rejects the other kind,
        because digits as text and as number have different hashes. Text files are read with the
        kinds of the fitted spec.

        Args:
            data: A path, glob, folder or URL of Parquet or CSV files, or a list of them; a table of
                Arrow, pandas, polars or Hugging Face; a dict of columns; or an iterable of tables.
            limit: Largest number of distinct values of a vocabulary in memory. More values are
                counted in temporary files.

        Returns:
            This spec.

        Raises:
            KeyError: A table does not have a column.
            TypeError: A column has values of another type.
            ValueError: There are not rows, or a value is NaN, infinite or out of its range. The
                message names the column, the row and the value; in data of files, also the file.
        """
        return self.fit_parts([self.partial(data, limit=limit)])

    def fit_parts(self, parts: Iterable[PartialFit]) -> FeatureSpec:
        """Join statistics of parts of the data, as `fit` of all data.

        Args:
            parts: Results of `partial` of specs with the same columns, in any order.

        Returns:
            This spec.

        Raises:
            ValueError: There are not rows, or a part is of another spec.
        """
        joined = PartialFit.joined(self.columns, parts, "fit")
        kinds, profiles = dict(joined.kinds), extend.profiles_of(self.columns, joined)
        fitted = Fitted(joined.num_rows, {}, {}, {}, {}, kinds, profiles, (joined.digest(),))
        for column in self.columns:
            column.finish_fit(joined, fitted)
        self.fitted = fitted
        return self

    def extend(
        self,
        data: Any,
        *,
        retire_after: int | None = None,
        refit: Sequence[str] = (),
        allow_repeated: bool = False,
        limit: int = 50_000_000,
    ) -> Extension:
        """Return this spec with the new values of further data, such as the next day's.

        Known values keep their rows. New values that occur `min_count` times in the data get
        further rows, up to `max_size`. Means, deviations and edges stay. This spec does not change.
        Build the next model by `tables` of the new spec, and load the checkpoint of this one with
        `load_checkpoint(..., spec=new, saved_spec=old)`.

        Args:
            data: As for `fit`; only the further data.
            retire_after: A value that as many extensions in a row did not have may give its row to
                a new value, with initial weights and optimizer state; None: no value does.
            refit: `Numeric` columns that get the mean, the deviation and the edges of the data.
            allow_repeated: Whether the data may have the number of rows, counts and means of the
                data of `fit` or of one of the last 63 extensions.
            limit: As for `fit`.

        Returns:
            The spec, and the changes.

        Raises:
            KeyError: A table does not have a column, or `refit` names another one.
            RuntimeError: This spec is not fitted.
            TypeError: A column has values of another type, or texts where this spec has numbers.
            ValueError: As for `fit`, or the data seems to come twice.

        Example:
            >>> from recsys.features import Categorical, FeatureSpec
            >>> spec = FeatureSpec([Categorical("city")]).fit({"city": ["Oslo", "Rome", "Rome"]})
            >>> extended, report = spec.extend({"city": ["Bonn", "Rome"]})
            >>> extended.values_of("city", range(extended.tables(4)[0].num_embeddings)).tolist()
            [None, None, 'Rome', 'Oslo', 'Bonn']
            >>> print(report)
            city: 1 new, 2 kept (1 not in the data)
            city: missing 0.0% -> 0.0%, stability index 7.009
        """
        part = self._partial(data, limit, self.column_kinds())
        return self.extend_parts(
            [part], retire_after=retire_after, refit=refit, allow_repeated=allow_repeated
        )

    def extend_parts(
        self,
        parts: Iterable[PartialFit],
        *,
        retire_after: int | None = None,
        refit: Sequence[str] = (),
        allow_repeated: bool = False,
    ) -> Extension:
        """Join statistics of parts of further data, as `extend` of all of it.

        Args:
            parts: Results of `partial` of specs with the same columns, in any order.
            retire_after: As for `extend`.
            refit: As for `extend`.
            allow_repeated: As for `extend`.

        Raises:
            KeyError: As for `extend`.
            RuntimeError: As for `extend`.
            TypeError: As for `extend`.
            ValueError: There are not rows, a part is of another spec, or the data is known.
        """
        fitted, report = extend.extended(
            self.columns, self.fitted, parts, retire_after, refit, allow_repeated
        )
        spec = FeatureSpec(self.columns)
        spec.fitted = fitted
        return Extension(spec, report)

    def forget(self, values: Mapping[str, Iterable[str | int]]) -> FeatureSpec:
        """Return this spec without some values, such as users who ask for deletion.

        The last values of a table take their rows. Make the next model by `tables` of the new spec
        and load the checkpoint with `load_checkpoint(..., spec=new, saved_spec=old)`: the rows and
        the optimizer state of the values are then gone. Older specs, checkpoints and packages still
        have them: remove these files.

        Args:
            values: Values by table; values that the table does not have are left out.

        Raises:
            KeyError: A table is not one of a `Categorical` column.
            RuntimeError: This spec is not fitted.
            TypeError: A value has another type than the values of the table.

        Example:
            >>> from recsys.features import Categorical, FeatureSpec
            >>> spec = FeatureSpec([Categorical("user")]).fit({"user": ["ann", "bob", "eve"]})
            >>> spec.forget({"user": ["ann"]}).values_of("user", [2, 3]).tolist()
            ['eve', 'bob']
        """
        spec = FeatureSpec(self.columns)
        spec.fitted = extend.without(self.columns, self.fitted, values)
        return spec

    # -- transform ---------------------------------------------------------------------------------

    def transform(self, data: Any, *, labels: bool = True) -> Batch:
        """Convert a table to a batch.

        Args:
            data: A table of Arrow, pandas, polars or Hugging Face, or a dict of columns. Further
                columns are ignored. An optional column, and one that states the value of missing
                numbers, such as `Numeric("age", missing=0.0)`, may be absent; all its values are
                missing then.
            labels: False for a table without labels, sample weights and groups; labels are then 0.

        Returns:
            `dense_features` [B, number of dense features] float32; `sparse_features` of all
            features with ids; `labels` [B] float32, or [B, number of labels] if there are several;
            `sample_weights` [B] float32 or None; `groups` [B] int64 or None; `label_mask`
            [B, number of labels] bool, False where one of several labels is missing, or None.

        Raises:
            KeyError: The table does not have a column.
            TypeError: A column has values of another type.
            ValueError: A value is NaN, infinite or out of its range. The message names the column,
                the row and the value.
            RuntimeError: The spec is not fitted.
        """
        table = with_missing(table_of(data), self.optional_names())
        size = table.num_rows
        bags = self._read(table, "sparse_features")
        dense = self._read(table, "dense_features")
        targets, mask = join_labels(self._read(table, "labels") if labels else [], size)
        weights, groups = (
            [torch.from_numpy(array) for array in self._read(table, part)] if labels else []
            for part in ("sample_weights", "groups")
        )
        return Batch(
            torch.from_numpy(np.stack(dense, 1)) if dense else torch.zeros(size, 0),
            jagged_of([feature.name for feature in self.features()], bags, size, self.is_weighted),
            targets,
            tuple(self.dense_names),
            ",".join(self.label_names) if labels else "",
            sample_weights=weights[0] if weights else None,
            groups=groups[0] if groups else None,
            label_mask=mask,
            fingerprints=self.fingerprints(),
        )

    def _read(self, table: Any, part: str) -> list[Any]:
        """Return the values of the columns of a part of a batch."""
        columns = [column for column in self.columns if column.part == part]
        return [values for column in columns for values in column.read(table, self.fitted)]


SPECS.append(SpecFunctions(FeatureSpec.from_state_dict, row_sources, hashed_values))
