from __future__ import annotations

import pytest
import torch

from recsys.modules.embedding_configs import (
    DATA_TYPE_NUM_BITS,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    EmbeddingTableConfig,
    PoolingType,
    data_type_to_dtype,
    dtype_to_data_type,
    pooling_type_to_pooling_mode,
)


def test_fields_may_be_positional() -> None:
    config = EmbeddingBagConfig(10, 4, "t", DataType.FP16, ["f"], 0.5, -0.25)
    assert config.get_weight_init_max() == 0.5
    assert config.get_weight_init_min() == -0.25
    assert config.pooling is PoolingType.SUM
    assert config.num_features() == 1


def test_default_range_depends_on_the_number_of_rows() -> None:
    config = EmbeddingConfig(100, 4)
    assert (config.get_weight_init_min(), config.get_weight_init_max()) == (-0.1, 0.1)


def test_configs_can_be_adapted_in_place() -> None:
    config = EmbeddingTableConfig(num_embeddings=10, embedding_dim=4, is_weighted=True)
    config.feature_names = ["f"]
    assert config.num_features() == 1


@pytest.mark.parametrize("data_type", list(DataType))
def test_dtypes_round_trip(data_type: DataType) -> None:
    dtype = data_type_to_dtype(data_type)
    assert dtype_to_data_type(dtype) is data_type
    if data_type not in (DataType.INT4, DataType.INT2):
        assert DATA_TYPE_NUM_BITS[data_type] == 8 * dtype.itemsize


def test_every_pooling_has_a_mode() -> None:
    modes = [pooling_type_to_pooling_mode(p).name for p in PoolingType]
    assert modes == ["SUM", "MEAN", "NONE"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_embeddings": 0}, r"needs num_embeddings > 0 .* received num_embeddings=0"),
        ({"embedding_dim": -1}, "embedding_dim=-1"),
        ({"feature_names": ["f", "g", "f"]}, r"must be unique; received \['f'\]"),
        ({"weight_init_min": 2.0, "weight_init_max": 1.0}, r"received 2\.0 > 1\.0"),
        ({"use_virtual_table": True}, "use_virtual_table is not supported"),
    ],
)
def test_bad_values_raise(fields: dict[str, object], message: str) -> None:
    defaults: dict[str, object] = {"num_embeddings": 10, "embedding_dim": 4, "name": "t"}
    with pytest.raises(ValueError, match=message):
        EmbeddingBagConfig(**{**defaults, **fields})  # type: ignore[arg-type]


def test_a_dtype_is_no_data_type() -> None:
    with pytest.raises(TypeError, match=r"must be a DataType; received torch.float16"):
        EmbeddingConfig(10, 4, "t", torch.float16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"No DataType has elements of torch\.complex64"):
        dtype_to_data_type(torch.complex64)
