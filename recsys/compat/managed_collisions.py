"""TorchRec's managed collision modules, as rules of tables with hashed ids.

Their constructors have TorchRec's arguments. Docstrings mark arguments without an effect, and give
the only value of arguments that have no meaning here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from recsys.base.arguments import finite, whole, wrong_type
from recsys.compat.eviction_policies import (
    DistanceLFU_EvictionPolicy,
    EvictionPolicy,
    HashZchEvictionConfig,
    HashZchEvictionPolicyName,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
)
from recsys.compat.features_as_rows import features_in_order, with_ids
from recsys.kernels.hashed.index import geometry
from recsys.modules.embedding_configs import BaseEmbeddingConfig
from recsys.modules.hashed_ids import LRU, HashedIds, Probability
from recsys.modules.ids.rows import rows_of_table
from recsys.modules.ids.table_index import TableIndex
from recsys.modules.tables.embedding_table import EmbeddingTable, TableDict
from recsys.sparse import JaggedTensor, KeyedJaggedTensor


class ManagedCollisionModule(nn.Module):
    """Rules and ids of one table; base of two classes.

    By itself it gives rows to ids in its own index. In an embedding collection it reads the index
    of its table: the collection's forward pass gives rows to ids.

    Args:
        zch_size: Rows, rounded up to whole lines of 64 rows per region.
        device: Device of the ids.
        ids: Rules.
        name: Name of the table, for messages.
        input_hash_size: Second argument of `input_hash_func`.
        input_hash_func: Function of ids that returns the ids to map; None: the ids themselves.
        buckets: Returned by `buckets`.
    """

    def __init__(
        self,
        zch_size: int,
        device: torch.device,
        ids: HashedIds,
        name: str | None,
        input_hash_size: int,
        input_hash_func: Callable[[Tensor, int], Tensor] | None,
        buckets: int,
    ) -> None:
        super().__init__()
        whole(f"{type(self).__name__}.zch_size", zch_size)
        self.ids, self._input_hash_size, self._buckets = ids, input_hash_size, buckets
        self.input_hash_func = input_hash_func
        table = BaseEmbeddingConfig(zch_size, 1, name or "", ids=ids)
        self._rows = table.num_embeddings
        self._own: TableIndex | None = TableIndex(table, torch.device(device))
        # the table of a collection, in a list: it is not a submodule
        self._tables: list[EmbeddingTable] = []

    def bind(self, table: EmbeddingTable) -> None:
        """Use the ids of a table of a collection from here on."""
        self._tables, self._own = [table], None

    @property
    def index(self) -> TableIndex:
        """Ids of the rows."""
        return self._tables[0].index if self._own is None else self._own

    @property
    def device(self) -> torch.device:
        """Device of the ids."""
        return self.index.ids.device

    def output_size(self) -> int:
        """Return the number of rows, which is `zch_size` rounded up."""
        return self._rows

    def input_size(self) -> int:
        """Return `input_hash_size`, which limits nothing."""
        return self._input_hash_size

    def buckets(self) -> int:
        """Return the number of buckets, which limits nothing."""
        return self._buckets

    def open_slots(self) -> Tensor:
        """Return the number of free rows, int64 `[1]`; waits for the device."""
        rows, used, *_ = self.index.stats()
        return torch.tensor([rows - used], device=self.device)

    def evict(self) -> None:
        """Return None: a table resets the rows of new ids itself."""

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Return the features with ids after `input_hash_func`."""
        return {name: _with_values(f, self.hashed(f.values())) for name, f in features.items()}

    def hashed(self, ids: Tensor) -> Tensor:
        """Return ids after `input_hash_func`."""
        function = self.input_hash_func
        return ids if function is None else function(ids, self._input_hash_size)

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Return the features: `remap` records the use of ids."""
        return features

    def remap(
        self,
        features: dict[str, JaggedTensor],
        mutate_miss_lengths: bool = True,
        write_weights: None = None,
    ) -> dict[str, JaggedTensor]:
        """Return the features with rows in place of ids.

        By itself, in training mode with gradients enabled, it gives rows to new ids.

        Args:
            features: Ids, by any names.
            mutate_miss_lengths: Without an effect: unknown ids read a row, and lengths stay.
            write_weights: None.

        Returns:
            The features with int64 rows.
        """
        if write_weights is not None:
            _refuse("remap", "write_weights", None, write_weights, "Store them by row yourself.")
        inputs = list(features.values())
        sizes = [f.values().numel() for f in inputs]
        rows = self.rows_of(torch.cat([f.values() for f in inputs])).split(sizes)
        pairs = zip(features.items(), rows, strict=True)
        return {name: _with_values(f, feature_rows) for (name, f), feature_rows in pairs}

    def forward(
        self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True
    ) -> dict[str, JaggedTensor]:
        """Return the features with rows in place of ids; see `preprocess` and `remap`."""
        return self.remap(self.preprocess(features))

    def rows_of(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, int64 `[N]`; see `remap`."""
        is_training = self.training and torch.is_grad_enabled() and self._own is not None
        return rows_of_table(self.index, ids, is_training)


class MCHManagedCollisionModule(ManagedCollisionModule):
    """TorchRec's module of sorted ids. New ids get their rows at once, not at intervals.

    Args:
        zch_size: Rows, rounded up to whole lines of 64 rows per region.
        device: Device of the ids.
        eviction_policy: `LRU_EvictionPolicy`, `LFU_EvictionPolicy` or `DistanceLFU_EvictionPolicy`.
        eviction_interval: At least 1; without an effect.
        input_hash_size: Second argument of `input_hash_func`; it limits nothing.
        input_hash_func: Function of ids that returns the ids to map.
        mch_size: Without an effect, as in TorchRec.
        mch_hash_func: Without an effect, as in TorchRec.
        name: Name of the table, for messages.
        output_global_offset: 0.
        output_segments: None.
        buckets: Without an effect.

    Raises:
        ValueError: A size or interval is not positive, or an argument must have its default.
        TypeError: The policy is of another class.

    Example:
        >>> from recsys.compat.eviction_policies import LFU_EvictionPolicy
        >>> module = MCHManagedCollisionModule(
        ...     zch_size=100, device=torch.device("cpu"), eviction_policy=LFU_EvictionPolicy(),
        ...     eviction_interval=1,
        ... )
        >>> module.output_size(), module.ids.eviction
        (128, LFU(half_life=0))
    """  # fmt: skip

    def __init__(
        self,
        zch_size: int,
        device: torch.device,
        eviction_policy: LRU_EvictionPolicy | LFU_EvictionPolicy | DistanceLFU_EvictionPolicy,
        eviction_interval: int,
        input_hash_size: int = 2**63 - 1,
        input_hash_func: Callable[[Tensor, int], Tensor] | None = None,
        mch_size: int | None = None,
        mch_hash_func: Callable[[Tensor, int], Tensor] | None = None,
        name: str | None = None,
        output_global_offset: int = 0,
        output_segments: list[int] | None = None,
        buckets: int = 1,
    ) -> None:
        kind = "MCHManagedCollisionModule"
        if not isinstance(eviction_policy, EvictionPolicy):
            wrong_type(f"{kind}.eviction_policy", "one of three policies", eviction_policy)
        whole(f"{kind}.eviction_interval", eviction_interval)
        ignored_settings = {"output_global_offset": (0, output_global_offset)}
        _refuse_others(
            kind, {**ignored_settings, "output_segments": (None, output_segments)}, _SHARDS
        )
        ids = HashedIds(eviction=eviction_policy.eviction, admission=eviction_policy.admission)
        settings = name, input_hash_size, input_hash_func, buckets
        super().__init__(zch_size, device, ids, *settings)


class HashZchManagedCollisionModule(ManagedCollisionModule):
    """TorchRec's module of hashed ids with probing.

    Args:
        zch_size: Rows, rounded up to whole lines of 64 rows per region.
        device: Device of the ids.
        total_num_buckets: Without an effect.
        max_probe: Without an effect.
        input_hash_size: Without an effect.
        output_segments: None.
        is_inference: False; call `eval()`.
        name: Name of the table, for messages.
        tb_logging_frequency: Without an effect; see `TableIndex.stats`.
        eviction_policy_name: None: ids keep their rows. SINGLE_TTL_EVICTION and LRU_EVICTION: the
            least recently used id loses its row. PER_FEATURE_TTL_EVICTION is refused.
        eviction_config: Without an effect.
        inference_dispatch_div_train_world_size: Without an effect.
        start_bucket: 0.
        end_bucket: None or `total_num_buckets`.
        opt_in_prob: Percent of admission in each batch that has the id; -1 and 100: always.
        percent_reserved_slots: From 0 to below 100, not 0 with `opt_in_prob`; without an effect.
        disable_fallback: True: unknown ids read zeros. False: they share a row.
        track_id_freq: False.
        read_only_suffix: Without an effect.
        enable_per_feature_lookups: False.
        no_bag: Without an effect.
        write_runtime_meta_dim: 0.
        persist_hash_zch_bucket: Without an effect.

    Raises:
        ValueError: A value is out of its range, or an argument must have its default.

    Example:
        >>> module = HashZchManagedCollisionModule(
        ...     zch_size=100, device=torch.device("cpu"), total_num_buckets=4, opt_in_prob=50,
        ...     percent_reserved_slots=1,
        ... )
        >>> module.ids.eviction, module.ids.admission
        (None, Probability(probability=0.5))
    """  # fmt: skip

    def __init__(
        self,
        zch_size: int,
        device: torch.device,
        total_num_buckets: int,
        max_probe: int = 128,
        input_hash_size: int = 0,
        output_segments: list[int] | None = None,
        is_inference: bool = False,
        name: str | None = None,
        tb_logging_frequency: int = 0,
        eviction_policy_name: HashZchEvictionPolicyName | None = None,
        eviction_config: HashZchEvictionConfig | None = None,
        inference_dispatch_div_train_world_size: bool = False,
        start_bucket: int = 0,
        end_bucket: int | None = None,
        opt_in_prob: int = -1,
        percent_reserved_slots: float = 0,
        disable_fallback: bool = False,
        track_id_freq: bool = False,
        read_only_suffix: str = "_readonly",
        enable_per_feature_lookups: bool = False,
        no_bag: bool = False,
        write_runtime_meta_dim: int = 0,
        persist_hash_zch_bucket: bool = True,
    ) -> None:
        kind = "HashZchManagedCollisionModule"
        settings = {"output_segments": (None, output_segments), "start_bucket": (0, start_bucket)}
        if end_bucket != total_num_buckets:
            settings["end_bucket"] = (None, end_bucket)
        _refuse_others(kind, settings, _SHARDS)
        _refuse_others(kind, {"is_inference": (False, is_inference)}, "Call eval() on the model.")
        settings = {
            "track_id_freq": (False, track_id_freq),
            "enable_per_feature_lookups": (False, enable_per_feature_lookups),
            "write_runtime_meta_dim": (0, write_runtime_meta_dim),
        }
        _refuse_others(
            kind, settings, "A row has no other values than its id and the time of its use."
        )
        per_feature = HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION
        if eviction_policy_name is per_feature:
            raise ValueError(
                f"{kind}.eviction_policy_name must be one rule for all features of a table; "
                "received PER_FEATURE_TTL_EVICTION. Use LRU_EVICTION, or a table per feature."
            )
        if not 0 <= finite(f"{kind}.percent_reserved_slots", percent_reserved_slots) < 100:
            raise ValueError(
                f"{kind}.percent_reserved_slots must be at least 0 and below 100; received "
                f"{percent_reserved_slots}."
            )
        percent = whole(f"{kind}.opt_in_prob", opt_in_prob, -1, 100)
        if percent == 0:
            raise ValueError(
                f"{kind}.opt_in_prob must be from 1 to 100, or -1 for 100; received 0, with which "
                "no id gets a row. Train in evaluation mode instead."
            )
        if percent > 0 and not percent_reserved_slots:
            raise ValueError(
                f"{kind}.percent_reserved_slots must be above 0 if opt_in_prob is; received 0. "
                "Pass 1: ids without a row share one row per region."
            )
        unknown: Literal["zero", "shared"] = "zero" if disable_fallback else "shared"
        ids = HashedIds(
            eviction=None if eviction_policy_name is None else LRU(),
            admission=Probability(percent / 100) if 0 < percent < 100 else None,
            unknown=unknown,
        )
        super().__init__(zch_size, device, ids, name, input_hash_size, None, total_num_buckets)

    def reset_inference_mode(self) -> None:
        """Set evaluation mode: ids without a row do not get one.

        Raises:
            ValueError: The module reads the ids of a collection in training mode, which gives rows
                to ids.
        """
        if self._tables and self._tables[0].training:
            raise ValueError(
                "HashZchManagedCollisionModule.reset_inference_mode() needs a collection of tables "
                "in evaluation mode, as the collection gives rows to ids; received one in training "
                "mode. Call eval() on the collection."
            )
        self.eval()

    def reset_training_mode(self) -> None:
        """Undo `reset_inference_mode`."""
        self.train()


class ManagedCollisionCollection(nn.Module):
    """Managed collision modules of the tables of a collection.

    Args:
        managed_collision_modules: Modules by table name.
        embedding_configs: The tables, without `ids`.
        need_preprocess: Without an effect.

    Raises:
        ValueError: A table has no module, or another number of rows than its module.
        TypeError: A module is of another class.

    Example:
        >>> table = BaseEmbeddingConfig(100, 4, "users", feature_names=["user"])
        >>> module = HashZchManagedCollisionModule(100, torch.device("cpu"), 1)
        >>> collection = ManagedCollisionCollection({"users": module}, [table])
        >>> batch = KeyedJaggedTensor(["user"], torch.tensor([-7]), lengths=torch.tensor([1]))
        >>> int(collection(batch).values()) < collection.open_slots()["users"].item()
        True
    """

    def __init__(
        self,
        managed_collision_modules: Mapping[str, ManagedCollisionModule],
        embedding_configs: Sequence[BaseEmbeddingConfig],
        need_preprocess: bool = True,
    ) -> None:
        super().__init__()
        self._managed_collision_modules = TableDict(managed_collision_modules)
        self._embedding_configs = list(embedding_configs)
        self.need_preprocess = need_preprocess
        for config in self._embedding_configs:
            if config.name not in managed_collision_modules:
                raise ValueError(
                    "managed_collision_modules must have a module for each table; received none "
                    f"for table '{config.name}'."
                )
            module: object = managed_collision_modules[config.name]
            if not isinstance(module, ManagedCollisionModule):
                wrong_type(
                    f"managed_collision_modules['{config.name}']",
                    "an MCHManagedCollisionModule or a HashZchManagedCollisionModule",
                    module,
                )
            rows, _ = geometry(config.num_embeddings, module.ids.num_regions)
            if rows != module.output_size() or config.ids is not None:
                raise ValueError(
                    f"Table '{config.name}' must have num_embeddings=zch_size of its module, and "
                    f"ids=None; received {config.num_embeddings} rows, {module.output_size()} "
                    f"rows of the module after rounding up, and ids={config.ids}."
                )

    def embedding_configs(self) -> list[BaseEmbeddingConfig]:
        """Return the tables, in order."""
        return self._embedding_configs

    def modules_by_table(self) -> Iterator[tuple[BaseEmbeddingConfig, ManagedCollisionModule]]:
        """Yield each table and its module, in order."""
        for config in self._embedding_configs:
            yield config, self._managed_collision_modules[config.name]  # type: ignore[misc]

    def bind(
        self, configs: Sequence[BaseEmbeddingConfig], tables: Sequence[EmbeddingTable]
    ) -> None:
        """Use the ids of the tables of a collection from here on."""
        self._embedding_configs = list(configs)
        for (_, module), table in zip(self.modules_by_table(), tables, strict=True):
            module.bind(table)

    def table_to_number_buckets(self) -> dict[str, int]:
        """Return the buckets of each module."""
        return {config.name: module.buckets() for config, module in self.modules_by_table()}

    def open_slots(self) -> dict[str, Tensor]:
        """Return the number of free rows of each table, int64 `[1]`; waits for the device."""
        return {config.name: module.open_slots() for config, module in self.modules_by_table()}

    def evict(self) -> dict[str, None]:
        """Return None for each table: tables reset the rows of new ids themselves."""
        return {config.name: None for config, _ in self.modules_by_table()}

    def forward(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> KeyedJaggedTensor:
        """Return the features with rows in place of ids; see `ManagedCollisionModule.remap`.

        Args:
            features: int32 or int64 ids of all features of the tables.
            mutate_miss_lengths: Without an effect.

        Returns:
            The features of the tables, in order, with int64 rows.

        Raises:
            ValueError: A feature is missing, or two tables read it.
        """
        features = features_in_order(features, self._embedding_configs)
        ids = iter(features.values().split(features.length_per_key()))
        rows = []
        for config, module in self.modules_by_table():
            of_table = torch.cat([next(ids) for _ in config.feature_names])
            rows.append(module.rows_of(module.hashed(of_table)))
        return with_ids(features, torch.cat(rows))

    def hash_functions(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """Return the function of ids by feature, for tables with an `input_hash_func`."""
        return {
            feature: module.hashed
            for config, module in self.modules_by_table()
            if module.input_hash_func is not None
            for feature in config.feature_names
        }


def _with_values(feature: JaggedTensor, values: Tensor) -> JaggedTensor:
    weights = feature.weights_or_none()
    return JaggedTensor(values, weights=weights, lengths=feature.lengths())


_SHARDS = "A table is sharded by its plan."


def _refuse_others(kind: str, arguments: Mapping[str, tuple[object, object]], advice: str) -> None:
    """Refuse arguments that differ from the only value that they can have."""
    for name, (wanted, received) in arguments.items():
        if received != wanted:
            _refuse(kind, name, wanted, received, advice)


def _refuse(kind: str, name: str, wanted: object, received: Any, advice: str) -> NoReturn:
    raise ValueError(f"{kind}.{name} must be {wanted}; received {received}. {advice}")
