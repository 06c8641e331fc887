from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recsys.inference import quantize_embeddings, quantize_inference_model, shard_quant_model
from recsys.inference.quant_prep import (
    quant_prep_customize_row_alignment,
    quant_prep_enable_cache_features_order,
    quant_prep_enable_quant_state_dict_split_scale_bias,
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types,
    set_pruning_data,
)
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.sparse import KeyedJaggedTensor
from tests.inference.row_sizes import table_bytes
from tests.inference.test_quantize import _batch, _collection, _mixed


def test_rows_are_aligned_as_said() -> None:
    model = _mixed()
    quant_prep_customize_row_alignment(model, [EmbeddingBagCollection], 4)
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types(model, [EmbeddingCollection])
    quantized: Any = quantize_embeddings(model)
    assert quantized["pooled"].embedding_bags["a"].weight.shape == (50, 12)
    assert quantized["processed"].split()[1].embedding_bags["weighed"].weight.shape == (50, 12)
    assert {name: tuple(b.shape) for name, b in quantized["sequence"].named_buffers()} == {
        "embeddings.rows.weight": (50, 8),
        "embeddings.rows.weight_qscale": (50, 1),
        "embeddings.rows.weight_qbias": (50, 1),
    }
    assert quantized["sequence"].embeddings["rows"].weight.stride() == (16, 1)
    expected: Any = quantize_embeddings(_collection())
    torch.testing.assert_close(quantized["pooled"](_batch()).values(), expected(_batch()).values())


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_order_of_features_is_kept_if_asked_for(is_kept: bool) -> None:
    model = nn.Sequential(_collection())
    if is_kept:
        quant_prep_enable_cache_features_order(model, [EmbeddingBagCollection])
    quantized: Any = quantize_embeddings(model)
    collection = quantized[0]
    expected = collection(_batch()).values()
    for keys in ("xyz", "zxy", "zxy", "xyz"):  # positions are computed again for another order
        assert torch.equal(collection(_batch(keys=keys)).values(), expected)
    once, again = (collection._positions(_batch()) for _ in range(2))
    assert once == again == [0, 1, 2]
    assert (once is again) is is_kept


def test_what_was_said_about_other_modules_is_not_taken() -> None:
    model = nn.ModuleDict({"tables": _collection()})
    quant_prep_enable_quant_state_dict_split_scale_bias(model)  # not the collection
    quant_prep_customize_row_alignment(model, [EmbeddingCollection], 1)
    quantized: Any = quantize_inference_model(model)
    names = [name for name, _ in quantized["tables"].embedding_bags["a"].named_buffers()]
    assert names == ["weight"]
    assert quantized["tables"].embedding_bags["a"].weight.shape == (50, 16)


def test_pruned_tables_keep_their_first_rows() -> None:
    model, batch = _mixed(), _batch()
    assert set_pruning_data(model, {"a": 20, "rows": 20}) is model
    whole: Any = quantize_embeddings(_mixed())
    quantized: Any = quantize_embeddings(model)
    for each in (quantized, shard_quant_model(quantized, 2, "cpu")[0]):
        tables = each["pooled"]
        assert tables.embedding_bags["a"].weight.shape == (20, 16)
        assert table_bytes(tables) == [20 * 12, 30 * 20, 20 * 12]
        assert torch.equal(tables(batch).values(), whole["pooled"](batch).values())
        assert [c.num_embeddings for c in tables.configs()] == [50, 30, 20]
        bad = KeyedJaggedTensor(
            ["x", "y", "z"], torch.tensor([20]), lengths=torch.tensor([1, 0, 0])
        )
        with pytest.raises(IndexError, match=r"feature 'x' must .*0 to 19"):
            tables(bad)
    assert quantized["sequence"].embeddings["rows"].weight.shape == (20, 16)
    _, plan = shard_quant_model(quantized, 2, "cpu")
    entry = plan.plan["pooled"]["a"]  # type: ignore[index]
    assert entry.sharding_spec.shards[0].shard_sizes == [20, 8]


def test_pruning_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tables of the model, .*received \['d'\]"):
        set_pruning_data(_mixed(), {"d": 1})
    with pytest.raises(ValueError, match=r"tables of the model, .*received \['a'\]"):
        set_pruning_data(_mixed(), {"a": 1}, [EmbeddingCollection])
    for rows in (0, 51):
        with pytest.raises(ValueError, match=f"table 'a' after pruning .*received {rows}"):
            set_pruning_data(_mixed(), {"a": rows})
    collection = _collection()
    collection.embedding_bag_configs()[0].num_embeddings_post_pruning = 51
    with pytest.raises(ValueError, match="Table 'a': num_embeddings_post_pruning"):
        quantize_embeddings(collection)
