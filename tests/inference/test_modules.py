"""Rows of quantized tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recsys.inference import quantize_embeddings
from recsys.inference.modules import assign_weights_to_tbe, get_table_to_weights_from_tbe
from recsys.inference.quant_prep import quant_prep_enable_quant_state_dict_split_scale_bias
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor


class Model(nn.Module):
    """A model of one table."""

    def __init__(self) -> None:
        super().__init__()
        films = EmbeddingBagConfig(10, 4, "films", feature_names=["film"])
        self.tables = EmbeddingBagCollection(tables=[films])


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.quint4x2, torch.float16])
def test_rows_of_one_model_serve_another(dtype: torch.dtype, splits: bool) -> None:
    models: list[Any] = [Model().eval() for _ in range(2)]
    for model in models:
        if splits:
            quant_prep_enable_quant_state_dict_split_scale_bias(model.tables)
    ids = KeyedJaggedTensor(["film"], torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1]))
    first, second = (quantize_embeddings(model, dtype) for model in models)
    assert not torch.equal(first.tables(ids).values(), second.tables(ids).values())
    storage = second.tables.embedding_bags["films"].weight.data_ptr()
    weights = get_table_to_weights_from_tbe(first)
    rows, header = weights["films"]
    assert rows.shape == (10, {torch.int8: 4, torch.quint4x2: 2, torch.float16: 8}[dtype])
    assert (header is None) == (dtype is torch.float16)
    if dtype is torch.int8:
        assert header is not None
        scale, bias = header.contiguous().view(torch.float16).float().unbind(1)
        values = rows.float() * scale[:, None] + bias[:, None]
        expected = models[0].tables.embedding_bags["films"].weight
        torch.testing.assert_close(values, expected, atol=4e-3, rtol=0)
    assign_weights_to_tbe(second, {**weights, "another": weights["films"]})
    assert torch.equal(first.tables(ids).values(), second.tables(ids).values())
    assert second.tables.embedding_bags["films"].weight.data_ptr() == storage


def test_rows_that_do_not_fit() -> None:
    model = quantize_embeddings(Model())
    with pytest.raises(ValueError, match=r"every table .*without \['films'\]"):
        assign_weights_to_tbe(model, {})
    rows, header = get_table_to_weights_from_tbe(model)["films"]
    with pytest.raises(ValueError, match=r"'films'.* uint8 of shape \(10, 8\)"):
        assign_weights_to_tbe(model, {"films": (rows[:5], header[:5])})  # type: ignore[index]
