"""Configs of embedding tables: size, features, dtype, pooling and initial values.

The dataclasses are mutable and take positional arguments, as in TorchRec.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from recsys.base.arguments import choice, finite, flag, names, repeated, whole, wrong_type
from recsys.base.checked import checked
from recsys.base.lazy import moved_names
from recsys.kernels.hashed.index import geometry
from recsys.kernels.types import PoolingType
from recsys.modules.hashed_ids import HashedIds

__all__ = [
    "DATA_TYPE_NUM_BITS",
    "BaseEmbeddingConfig",
    "DataType",
    "EmbeddingBagConfig",
    "EmbeddingConfig",
    "PoolingType",
    "QuantConfig",
    "check_tables",
    "data_type_to_dtype",
    "dtype_to_data_type",
]


class DataType(enum.Enum):
    """Element type of a table. Training supports the first three."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT64 = "INT64"
    INT32 = "INT32"
    INT8 = "INT8"
    UINT8 = "UINT8"
    INT4 = "INT4"
    INT2 = "INT2"
    NFP8 = "NFP8"

    def __str__(self) -> str:
        return self.value


_ELEMENTS: Mapping[DataType, tuple[int, torch.dtype]] = {
    DataType.FP32: (32, torch.float32),
    DataType.FP16: (16, torch.float16),
    DataType.BF16: (16, torch.bfloat16),
    DataType.INT64: (64, torch.int64),
    DataType.INT32: (32, torch.int32),
    DataType.INT8: (8, torch.int8),
    DataType.UINT8: (8, torch.uint8),
    DataType.INT4: (4, torch.quint4x2),
    DataType.INT2: (2, torch.quint2x4),
    DataType.NFP8: (8, torch.float8_e4m3fn),
}
DATA_TYPE_NUM_BITS: Mapping[DataType, int] = {kind: bits for kind, (bits, _) in _ELEMENTS.items()}
"""Bits per element."""
_DATA_TYPES = {dtype: data_type for data_type, (_, dtype) in _ELEMENTS.items()}


@checked
def data_type_to_dtype(data_type: DataType) -> torch.dtype:
    """Return the torch dtype of a DataType.

    Example:
        >>> data_type_to_dtype(DataType.BF16)
        torch.bfloat16
    """
    return _ELEMENTS[data_type][1]


@checked
def dtype_to_data_type(dtype: torch.dtype) -> DataType:
    """Return the DataType of a torch dtype.

    Raises:
        ValueError: No DataType has this dtype.

    Example:
        >>> dtype_to_data_type(torch.float16)
        <DataType.FP16: 'FP16'>
    """
    if dtype not in _DATA_TYPES:
        raise ValueError(
            f"dtype must be the dtype of a DataType, one of {[str(d) for d in _DATA_TYPES]}; "
            f"received {dtype}."
        )
    return _DATA_TYPES[dtype]


_OPTIONAL_SIZES = {"num_embeddings_post_pruning": 0, "input_dim": 1, "total_num_buckets": 1}
"""Optional sizes of a config, with the minimum of each."""


@dataclass
class BaseEmbeddingConfig:
    """A table and the features that read it.

    Raises:
        ValueError: A size is not positive, a feature repeats, the range of initial values is empty
            or not finite, the pooling is unknown, or an option is not supported.
        TypeError: A field has another type, for example a string as `feature_names`.
    """

    num_embeddings: int
    """Rows; ids are in [0, num_embeddings), or any 64-bit number with `ids`."""
    embedding_dim: int
    """Columns."""
    name: str = ""
    """Unique in its collection: the table's name in state dict, plan and messages."""
    data_type: DataType = DataType.FP32
    """Element type."""
    feature_names: list[str] = field(default_factory=list)
    """Keys of the KeyedJaggedTensor that read this table."""
    weight_init_max: float | None = None
    """Upper end of the uniform initial values; None: 1 / sqrt(num_embeddings)."""
    weight_init_min: float | None = None
    """Lower end of the uniform initial values; None: -1 / sqrt(num_embeddings)."""
    num_embeddings_post_pruning: int | None = None
    """Rows left after pruning, for inference."""
    init_fn: Callable[[Tensor], Tensor | None] | None = None
    """Function that fills a block of rows in place or returns the values, instead of the range."""
    need_pos: bool = False
    """A position-weighted feature reads this table."""
    input_dim: int | None = None
    """Size of the id space before remapping; ignored."""
    total_num_buckets: int | None = None
    """Buckets of a table that is sharded by id bucket; ignored."""
    use_virtual_table: bool = False
    """Not supported: must be False."""
    virtual_table_eviction_policy: None = None
    """Not supported: must be None."""
    enable_embedding_update: bool = False
    """Not supported: must be False."""
    stash_weights: bool = False
    """Not supported: must be False."""
    ids: HashedIds | None = field(default=None, kw_only=True)
    """Rules of a table that is read by any 64-bit id; it has `num_embeddings` rows, rounded up."""
    num_special_rows: int = field(default=0, kw_only=True)
    """First rows that are not values of the data, such as missing and unknown; not recommended."""
    fingerprint: str | None = field(default=None, kw_only=True)
    """Fingerprint of the values that the rows stand for, of `FeatureSpec.tables`; None: not known,
    it is taken from the first batch of a `Trainer`."""

    def __post_init__(self) -> None:
        where = f"{type(self).__name__} '{self.name}'"
        if not isinstance(self.name, str):
            wrong_type(f"{type(self).__name__}.name", "text", self.name)
        self.num_embeddings = whole(f"{where}.num_embeddings", self.num_embeddings)
        self.embedding_dim = whole(f"{where}.embedding_dim", self.embedding_dim)
        self.num_special_rows = whole(f"{where}.num_special_rows", self.num_special_rows, 0)
        if not isinstance(self.ids, HashedIds | None):
            wrong_type(f"{where}.ids", "HashedIds or None", self.ids)
        if not isinstance(self.fingerprint, str | None):
            wrong_type(f"{where}.fingerprint", "text or None", self.fingerprint)
        if self.ids is not None:
            self.num_embeddings, _ = geometry(self.num_embeddings, self.ids.num_regions)
        if not isinstance(self.data_type, DataType):
            raise TypeError(
                f"{where}.data_type must be a DataType; received {self.data_type!r}. Use "
                "dtype_to_data_type for a torch dtype."
            )
        self.feature_names = names(f"{where}.feature_names", self.feature_names)
        twice = repeated(self.feature_names)
        if twice:
            raise ValueError(
                f"{where}.feature_names must be unique; received {twice} more than once."
            )
        for end in ("weight_init_min", "weight_init_max"):
            if getattr(self, end) is not None:
                setattr(self, end, finite(f"{where}.{end}", getattr(self, end)))
        if self.get_weight_init_min() > self.get_weight_init_max():
            raise ValueError(
                f"{where} needs weight_init_min <= weight_init_max; received "
                f"{self.get_weight_init_min()} > {self.get_weight_init_max()}."
            )
        if self.init_fn is not None and not callable(self.init_fn):
            wrong_type(f"{where}.init_fn", "a function of a tensor, or None", self.init_fn)
        self.need_pos = flag(f"{where}.need_pos", self.need_pos)
        for size, least in _OPTIONAL_SIZES.items():
            if getattr(self, size) is not None:
                setattr(self, size, whole(f"{where}.{size}", getattr(self, size), least))
        is_asked = {
            option: flag(f"{where}.{option}", getattr(self, option))
            for option in ("use_virtual_table", "enable_embedding_update", "stash_weights")
        }
        is_asked["virtual_table_eviction_policy"] = self.virtual_table_eviction_policy is not None
        for option, wanted in is_asked.items():
            if wanted:
                raise ValueError(
                    f"{where}.{option} is not supported; received {getattr(self, option)!r}. Leave "
                    "it out."
                )

    def get_weight_init_max(self) -> float:
        """Return the upper end of the initial values."""
        if self.weight_init_max is None:
            return 1 / math.sqrt(self.num_embeddings)
        return self.weight_init_max

    def get_weight_init_min(self) -> float:
        """Return the lower end of the initial values."""
        if self.weight_init_min is None:
            return -1 / math.sqrt(self.num_embeddings)
        return self.weight_init_min

    def num_features(self) -> int:
        """Return the number of features that read the table."""
        return len(self.feature_names)


@dataclass
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """A table whose bags are pooled.

    Example:
        >>> EmbeddingBagConfig(100, 8, "movies", feature_names=["liked"]).pooling
        <PoolingType.SUM: 'SUM'>
    """

    pooling: PoolingType = PoolingType.SUM
    """SUM or MEAN, or its name, such as "mean"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        where = f"{type(self).__name__} '{self.name}'"
        self.pooling = choice(f"{where}.pooling", self.pooling, PoolingType)


@dataclass
class EmbeddingConfig(BaseEmbeddingConfig):
    """A table whose rows are returned one per id.

    Example:
        >>> EmbeddingConfig(100, 8, "movies", feature_names=["liked"]).num_features()
        1
    """


class _QuantConfig(NamedTuple):
    activation: Callable[[], Any]
    weight: Callable[[], Any]
    per_table_weight_dtype: dict[str, torch.dtype] | None = None


@final
class QuantConfig(_QuantConfig):
    """Quantization of a collection, for `torch.quantization.quantize_dynamic`.

    Attributes:
        activation: Function that returns an observer. Its `dtype` is the dtype of the output:
            float32, float16 or bfloat16.
        weight: Function that returns an observer. Its `dtype` is the dtype of the tables: int8,
            quint4x2, quint2x4, float16 or float32.
        per_table_weight_dtype: Other dtypes by table name.

    Raises:
        TypeError: An argument has another type.

    Example:
        >>> from torch.ao.quantization import PlaceholderObserver
        >>> config = QuantConfig(
        ...     activation=PlaceholderObserver.with_args(dtype=torch.float16),
        ...     weight=PlaceholderObserver.with_args(dtype=torch.int8),
        ... )
        >>> config.weight().dtype
        torch.int8
    """

    __slots__ = ()

    @checked
    def __new__(
        cls,
        activation: Callable[[], Any],
        weight: Callable[[], Any],
        per_table_weight_dtype: dict[str, torch.dtype] | None = None,
    ) -> QuantConfig:
        """Check the arguments; a NamedTuple has no `__post_init__`."""
        return super().__new__(cls, activation, weight, per_table_weight_dtype)


_TRAINABLE = (DataType.FP32, DataType.FP16, DataType.BF16)


_Config = TypeVar("_Config", bound=BaseEmbeddingConfig)


def check_tables(
    owner: str,
    configs: Iterable[_Config],
    kind: type[_Config],
    data_types: Sequence[DataType] = _TRAINABLE,
) -> list[_Config]:
    """Check the tables of a collection.

    Args:
        owner: The collection's class, for messages.
        configs: The tables, in any iterable.
        kind: The class of their configs.
        data_types: Element types that the collection supports; default: types for training.

    Returns:
        The tables. Each config is checked again, as configs are mutable.

    Raises:
        ValueError: Names repeat, dims differ without pooling, or a table has no features, another
            dtype, or pooling NONE in a collection of bags.
        TypeError: A table is not a config of this class.
    """
    tables: list[_Config] = list(configs) if isinstance(configs, Iterable) else [configs]
    for config in tables:
        if not isinstance(config, kind):
            wrong_type(f"{owner}.tables", f"a list of {kind.__name__}", config)
        config.__post_init__()
    twice = repeated(config.name for config in tables)
    if twice:
        raise ValueError(
            f"{owner} needs tables with different names; received {twice} more than once. "
            "Rename all but one. To share a table, list all its features in feature_names."
        )
    for config in tables:
        if not config.name or "." in config.name:
            raise ValueError(
                f"{owner}: each table must have a name without dots; received '{config.name}'. The "
                "name is part of parameter names. Rename the table; in a FeatureSpec, pass another "
                "table=... to the column, or rename a column of buckets or times."
            )
        if not config.feature_names:
            raise ValueError(
                f"{owner} table '{config.name}' needs feature_names; received none. Name the keys "
                "of the KeyedJaggedTensor that read it."
            )
        if config.data_type not in data_types:
            use = "trained" if data_types is _TRAINABLE else "served"
            raise ValueError(
                f"{owner} table '{config.name}' needs a data_type that can be {use}, one of "
                f"{[str(d) for d in data_types]}; received {config.data_type}. Quantize a trained "
                "collection instead."
            )
        if getattr(config, "pooling", None) is PoolingType.NONE:
            raise ValueError(
                f"{owner} pools bags; received PoolingType.NONE for table '{config.name}'. Use an "
                "EmbeddingCollection or QuantEmbeddingCollection for one embedding per id."
            )
    dims = {config.name: config.embedding_dim for config in tables}
    if issubclass(kind, EmbeddingConfig) and len(set(dims.values())) > 1:
        raise ValueError(
            f"{owner} needs tables of one embedding_dim; received {dims}. Use one collection per "
            "dim."
        )
    return tables


if not TYPE_CHECKING:  # a type checker reports unknown names
    __getattr__ = moved_names(__name__)
