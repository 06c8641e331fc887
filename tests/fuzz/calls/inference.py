"""Calls of `recsys.inference`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recsys.base.checksums import new_file
from recsys.inference import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    export_torchscript,
    load_aoti,
    load_torchscript,
    quantization_report,
    quantize_embeddings,
    quantize_inference_model,
    read_delta,
    shard_quant_model,
    verify_checksum,
    write_delta,
)
from recsys.inference.modules import assign_weights_to_tbe, get_table_to_weights_from_tbe
from recsys.inference.quant_prep import (
    quant_prep_customize_row_alignment,
    quant_prep_enable_cache_features_order,
    quant_prep_enable_quant_state_dict_split_scale_bias,
    set_pruning_data,
)
from recsys.inference.quant_sharders import QuantEmbeddingBagCollectionSharder
from recsys.inference.quantize import quantize_state_dict
from recsys.modules.embedding_configs import DataType
from recsys.modules.embedding_modules import EmbeddingBagCollection
from tests.fuzz.argument_kinds import (
    DEVICE,
    KJT,
    Kind,
    anything,
    either,
    flag,
    many,
    mapping,
    maybe,
    member,
    module,
    path,
    subclass,
    text,
    texts,
    whole,
)
from tests.fuzz.calls.call import Call
from tests.fuzz.calls.modules import BAG_TABLES, TABLES, bag_config, bags, config, sequences
from tests.fuzz.calls.planner import CONSTRAINTS, SHARDERS


def _model() -> nn.Module:
    return nn.Sequential(bags())


def _quantized() -> nn.Module:
    return quantize_embeddings(_model())


def _program() -> str:
    with new_file("program.pt") as file:
        torch.jit.script(nn.Linear(2, 2)).save(str(file))
    return "program.pt"


def _as_int8(table: Any) -> Any:
    return dataclasses.replace(table, data_type=DataType.INT8)


def dtype_of(right: torch.dtype) -> Kind:
    """A dtype of weights."""
    return Kind(lambda: right, lambda value: None if isinstance(
        value, torch.dtype | DataType) else False)  # fmt: skip


def _weights() -> dict[str, Any]:
    return get_table_to_weights_from_tbe(_quantized())


MODEL = module(_model)
PER_TABLE = maybe(mapping(lambda: {"t": torch.int8}, dtype_of(torch.int8)))
TYPES = many(lambda: [EmbeddingBagCollection], subclass(EmbeddingBagCollection, nn.Module))
OUT = {"output_dtype": dtype_of(torch.float32)}
WEIGHTS = maybe(Kind(lambda: None, lambda value: None if isinstance(value, dict) else False))
QUANT = {
    "device": DEVICE, **OUT, "table_name_to_quantized_weights": WEIGHTS,
    "register_tbes": flag(False), "quant_state_dict_split_scale_bias": flag(False),
    "row_alignment": whole(16), "cache_features_order": flag(False),
}  # fmt: skip


def _version() -> str:
    Path("deltas").mkdir(exist_ok=True)
    table = {"name": "t", "rows": 9, "dim": 4, "dtype": "int8", "row_bytes": 8, "index": None}
    Path("manifest.json").write_text(json.dumps({"tables": [table]}))
    return "."


def _delta() -> str:
    return str(write_delta(_version(), {"t": (torch.tensor([1]), torch.ones(1, 4))}))


ROWS = mapping(
    lambda: {"t": (torch.tensor([1]), torch.ones(1, 4))},
    Kind(lambda: None, lambda value: None if isinstance(value, tuple) else False),
)

CALLS = [
    Call("write_delta", write_delta, {
        "version": Kind(_version, path(_version).is_legal), "tables": ROWS,
    }),
    Call("read_delta", read_delta, {"file": path(_delta)}),
    Call("quantization_report", lambda quantized: quantization_report(_model(), quantized), {
        "quantized": module(_quantized),
    }),
    Call("verify_checksum", verify_checksum, {"path": path(_program)}),
    Call("load_torchscript", load_torchscript, {"path": path(_program), "device": maybe(DEVICE)}),
    Call("load_aoti", load_aoti, {"path": Kind(_program, path(_program).is_legal)}),
    Call("quantize_embeddings", quantize_embeddings, {
        "module": MODEL, "dtype": dtype_of(torch.int8), "inplace": flag(False), **OUT,
        "additional_qconfig_spec_keys": maybe(TYPES), "per_table_weight_dtype": PER_TABLE,
        "additional_mapping": maybe(Kind(lambda: {}, lambda value: None if isinstance(
            value, dict) and all(isinstance(key, type) for key in value) else False)),
    }),
    Call("quantize_inference_model", quantize_inference_model, {
        "model": MODEL, "fp_weight_dtype": dtype_of(torch.int8),
        "quantization_dtype": dtype_of(torch.int8), **OUT, "per_table_weight_dtype": PER_TABLE,
        "quantization_mapping": maybe(Kind(
            lambda: None, mapping(dict, subclass(nn.Linear, nn.Module)).is_legal)),
    }),
    Call("QuantEmbeddingBagCollection", QuantEmbeddingBagCollection, {
        "tables": Kind(lambda: [_as_int8(bag_config())], BAG_TABLES.is_legal),
        "is_weighted": flag(False), **QUANT,
    }),
    Call("QuantEmbeddingCollection", QuantEmbeddingCollection, {
        "tables": Kind(lambda: [_as_int8(config())], TABLES.is_legal), "need_indices": flag(False),
        **QUANT,
    }),
    Call("QuantEmbeddingBagCollection.from_float", QuantEmbeddingBagCollection.from_float, {
        "module": module(bags, EmbeddingBagCollection), "use_precomputed_fake_quant": flag(False),
    }),
    Call("QuantEmbeddingCollection.from_float", QuantEmbeddingCollection.from_float, {
        "module": module(sequences, type(sequences())), "use_precomputed_fake_quant": flag(False),
    }),
    Call("QuantEmbeddingBagCollection.forward", lambda **given: _quantized()[0](  # type: ignore
        **given), {"features": KJT}),
    Call("quantize_state_dict", quantize_state_dict, {
        "module": module(bags), "table_name_to_quantized_weights": mapping(dict),
        "table_name_to_data_type": mapping(
            lambda: {"t": DataType.INT8}, member(DataType.INT8)),
        "table_name_to_num_embeddings_post_pruning": maybe(mapping(lambda: {"t": 5}, whole(5))),
    }),
    Call("shard_quant_model", shard_quant_model, {
        "model": module(_quantized), "world_size": whole(2), "compute_device": either(
            text("cpu"), DEVICE), "sharding_device": either(text("cpu"), DEVICE),
        "sharders": maybe(Kind(lambda: None, SHARDERS.is_legal)),
        "device_memory_size": maybe(whole(1 << 30)), "ddr_cap": maybe(whole(1 << 30)),
        "constraints": maybe(CONSTRAINTS), "sharding_plan": maybe(Kind(
            lambda: None, lambda value: False)),
    }, words={"device_memory_size": ("does not fit",), "ddr_cap": ("does not fit",)}),
    Call("QuantEmbeddingBagCollectionSharder", QuantEmbeddingBagCollectionSharder, {
        "fused_params": maybe(mapping(dict)), "shardable_params": maybe(texts(["t"])),
    }),
    Call("export_torchscript", export_torchscript, {
        "model": module(_quantized), "path": path(lambda: "model.pt"),
        "inputs": many(lambda: [KJT.right()], anything(KJT.right), 1),
    }),
    Call("quant_prep_customize_row_alignment", quant_prep_customize_row_alignment, {
        "module": MODEL, "module_types": TYPES, "row_alignment": whole(1),
    }),
    Call("quant_prep_enable_cache_features_order", quant_prep_enable_cache_features_order, {
        "module": MODEL, "module_types": TYPES,
    }),
    Call("quant_prep_enable_quant_state_dict_split_scale_bias",
         quant_prep_enable_quant_state_dict_split_scale_bias, {"module": MODEL}),
    Call("set_pruning_data", set_pruning_data, {
        "model": MODEL, "tables_to_rows_post_pruning": mapping(lambda: {"t": 5}, whole(5)),
        "module_types": maybe(TYPES),
    }),
    Call("assign_weights_to_tbe", assign_weights_to_tbe, {
        "model": module(_quantized), "table_to_weight": mapping(_weights),
    }),
    Call("get_table_to_weights_from_tbe", get_table_to_weights_from_tbe, {
        "model": module(_quantized),
    }),
]  # fmt: skip
