from __future__ import annotations

import numpy as np
import pytest
import torch

from recsys.modules.embedding_configs import (
    DATA_TYPE_NUM_BITS,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    data_type_to_dtype,
    dtype_to_data_type,
)
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.sparse import KeyedJaggedTensor


def test_fields_may_be_positional() -> None:
    config = EmbeddingBagConfig(10, 4, "t", DataType.FP16, ["f"], 0.5, -0.25)
    assert config.get_weight_init_max() == 0.5
    assert config.get_weight_init_min() == -0.25
    assert config.pooling is PoolingType.SUM
    assert config.num_features() == 1


def test_default_range_depends_on_the_number_of_rows() -> None:
    config = EmbeddingConfig(100, 4)
    assert (config.get_weight_init_min(), config.get_weight_init_max()) == (-0.1, 0.1)


@pytest.mark.parametrize("data_type", list(DataType))
def test_dtypes_round_trip(data_type: DataType) -> None:
    dtype = data_type_to_dtype(data_type)
    assert dtype_to_data_type(dtype) is data_type
    if data_type not in (DataType.INT4, DataType.INT2):
        assert DATA_TYPE_NUM_BITS[data_type] == 8 * dtype.itemsize


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_embeddings": 0}, r"'t'\.num_embeddings must be positive; received 0"),
        ({"embedding_dim": -1}, r"'t'\.embedding_dim must be positive; received -1"),
        ({"num_embeddings": 10**9, "embedding_dim": -(10**99)}, r"received -10{58}\.\.\."),
        ({"weight_init_min": float("nan")}, r"weight_init_min must be finite; received nan"),
        ({"weight_init_max": float("inf")}, r"weight_init_max must be finite; received inf"),
        ({"pooling": "max"}, r"'t'\.pooling must be .*SUM, MEAN.*'max'"),
        ({"feature_names": ["f", "g", "f"]}, r"must be unique; received \['f'\]"),
        ({"weight_init_min": 2.0, "weight_init_max": 1.0}, r"received 2\.0 > 1\.0"),
        ({"num_special_rows": -1}, r"'t'\.num_special_rows must not be negative.*-1"),
        ({"use_virtual_table": True}, "use_virtual_table is not supported"),
    ],
)
def test_bad_values_raise(fields: dict[str, object], message: str) -> None:
    defaults: dict[str, object] = {"num_embeddings": 10, "embedding_dim": 4, "name": "t"}
    with pytest.raises(ValueError, match=message):
        EmbeddingBagConfig(**{**defaults, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_embeddings": 10.5}, r"'t'\.num_embeddings must .*whole number; .*10\.5"),
        ({"num_embeddings": "10"}, "num_embeddings must be a whole.*'10'"),
        ({"num_embeddings": True}, "num_embeddings must be a whole.*True"),
        ({"embedding_dim": None}, "embedding_dim must be a whole.*None"),
        ({"feature_names": "film"}, r"list of text.*'film'\. Write \['film'\]"),
        ({"feature_names": None}, "feature_names must be a list.*None"),
        ({"feature_names": [1, 2]}, r"feature_names must be .*received \[1, 2\]"),
        ({"name": 3}, r"EmbeddingBagConfig\.name must be text; received 3"),
        ({"weight_init_min": "low"}, "weight_init_min must be a number.*'low'"),
        ({"init_fn": 3}, "init_fn must be a function.*3"),
        ({"pooling": None}, "pooling must be .*SUM, MEAN.*received None"),
    ],
)
def test_values_of_another_type_raise(fields: dict[str, object], message: str) -> None:
    defaults: dict[str, object] = {"num_embeddings": 10, "embedding_dim": 4, "name": "t"}
    with pytest.raises(TypeError, match=message):
        EmbeddingBagConfig(**{**defaults, **fields})  # type: ignore[arg-type]


def test_values_are_kept_as_what_they_mean() -> None:
    config = EmbeddingBagConfig(
        np.int64(10),  # type: ignore[arg-type]
        4,
        "t",
        feature_names=(f"f{i}" for i in range(2)),  # type: ignore[arg-type]
        weight_init_min=-1,
        pooling="mean",  # type: ignore[arg-type]
    )
    assert type(config.num_embeddings) is int
    assert config.feature_names == ["f0", "f1"]
    assert config.pooling is PoolingType.MEAN
    assert config.get_weight_init_min() == -1.0


class TestCheckTables:
    @staticmethod
    def config(name: str = "t") -> EmbeddingBagConfig:
        return EmbeddingBagConfig(10, 4, name, feature_names=["f"])

    def test_takes_any_iterable(self) -> None:
        ebc = EmbeddingBagCollection(tables=(self.config(name) for name in ("a", "b")))
        assert list(ebc.state_dict()) == ["embedding_bags.a.weight", "embedding_bags.b.weight"]
        sequences = (EmbeddingConfig(10, 4, name, feature_names=["f"]) for name in ("a", "b"))
        assert list(EmbeddingCollection(tables=sequences).state_dict()) == [
            "embeddings.a.weight",
            "embeddings.b.weight",
        ]

    def test_no_tables_at_all(self) -> None:
        tables = EmbeddingBagCollection(tables=iter([]))
        features = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([0, 2]))
        assert tables(features).values().shape == (2, 0)
        assert EmbeddingCollection(tables=[])(features) == {}

    def test_names_that_repeat_are_listed(self) -> None:
        with pytest.raises(ValueError, match=r"different names; received \['b'\] more"):
            EmbeddingBagCollection(tables=[self.config(name) for name in "abcb"])

    def test_a_config_that_was_changed_is_checked_again(self) -> None:
        config = self.config()
        config.num_embeddings = 10.5  # type: ignore[assignment]
        with pytest.raises(TypeError, match=r"'t'\.num_embeddings must be a whole number"):
            EmbeddingBagCollection(tables=[config])


def test_a_dtype_is_no_data_type() -> None:
    with pytest.raises(TypeError, match=r"must be a DataType; received torch.float16"):
        EmbeddingConfig(10, 4, "t", torch.float16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"one of .*; received torch\.complex64"):
        dtype_to_data_type(torch.complex64)
