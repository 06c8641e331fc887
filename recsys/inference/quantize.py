"""Quantization of the embedding collections of a model."""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.ao.quantization import PlaceholderObserver
from torch.distributed.tensor import DTensor

from recsys.base.arguments import wrong_type
from recsys.base.checked import checked
from recsys.distributed.dmp_collection import DMPCollection
from recsys.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from recsys.distributed.model_parallel import get_unwrapped_module
from recsys.distributed.ranks.agreement import agree, stable
from recsys.distributed.ranks.comm import broadcast_object
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.sharded.collection import ShardedCollection
from recsys.distributed.sharded.module_tree import walk
from recsys.distributed.sharded.sharder import is_sharded
from recsys.inference.quant.collection import QuantizedCollection
from recsys.inference.quant.modules import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    QuantFeatureProcessedEmbeddingBagCollection,
)
from recsys.inference.quant.options import to_data_type
from recsys.inference.quant.rows import split_header
from recsys.inference.quant.sources import SavedTables, rows_of_table, with_saved_values
from recsys.modules.embedding_configs import DataType, QuantConfig
from recsys.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.modules.tables.embedding_tables import TableCollection

__all__ = ["quantize_embeddings", "quantize_inference_model", "quantize_state_dict"]


_Mapping = Mapping[type[nn.Module], type[nn.Module]]

_COLLECTIONS: _Mapping = {
    EmbeddingBagCollection: QuantEmbeddingBagCollection,
    EmbeddingCollection: QuantEmbeddingCollection,
}
_BUILT_IN = (QuantEmbeddingBagCollection, QuantEmbeddingCollection)
_INFERENCE: _Mapping = {
    **_COLLECTIONS,
    FeatureProcessedEmbeddingBagCollection: QuantFeatureProcessedEmbeddingBagCollection,
}


@checked
def quantize_embeddings(
    module: nn.Module,
    dtype: torch.dtype = torch.int8,
    inplace: bool = False,
    additional_qconfig_spec_keys: Sequence[type[nn.Module]] | None = None,
    additional_mapping: _Mapping | None = None,
    output_dtype: torch.dtype = torch.float32,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
    *,
    dst: int | None = None,
    checkpoint: str | Path | None = None,
) -> nn.Module:
    """Replace the embedding collections of a model by quantized collections.

    This replaces EmbeddingBagCollections and EmbeddingCollections, also inside of other modules
    such as a FeatureProcessedEmbeddingBagCollection. It keeps plain `nn.EmbeddingBag` and dense
    layers.

    The result for a sharded model, such as a DistributedModelParallel, equals the result for the
    unsharded model bit for bit. Every rank must call this. Each rank quantizes its own shards. The
    sharded model is not changed, so training can continue.

    Args:
        module: A trained model, sharded or not.
        dtype: Dtype of the tables: `torch.int8` (1 byte per value), `torch.quint4x2` (1/2),
            `torch.quint2x4` (1/4), `torch.float16` (2) or `torch.float32` (4).
        inplace: Change the model instead of a copy. A sharded model is always copied.
        additional_qconfig_spec_keys: Other classes to replace.
        additional_mapping: The replacement of each such class: a class whose `from_float(module)`
            reads `module.qconfig`. It may also map a collection to another class.
        output_dtype: Dtype of the output: `torch.float32`, `torch.float16` or `torch.bfloat16`.
        per_table_weight_dtype: Other dtypes by table name.
        dst: The rank that receives the tables of a sharded model; on other ranks they are on the
            `meta` device and use no memory. None: every rank receives all tables.
        checkpoint: A checkpoint, as `path` of `read_checkpoint`, of an unsharded `module` whose
            tables are on the `meta` device. Its tables are read and quantized block by block; all
            other values are loaded. Memory holds the quantized tables and a block, never the
            float tables.

    Returns:
        The model with quantized tables, unsharded, in evaluation mode.

    Raises:
        ValueError: The model has nothing to quantize or an unsupported collection, a dtype is not
            supported, a table cannot be quantized, or a name is not a table of the model. Or a
            `checkpoint` is given, and the model is sharded or has tables in memory.
        CheckpointError: The checkpoint is damaged, or is of another model.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> config = EmbeddingBagConfig(10, 4, "t", feature_names=["f"])
        >>> model = nn.Sequential(EmbeddingBagCollection(tables=[config]))
        >>> type(quantize_embeddings(model, torch.int8)[0]).__name__
        'QuantEmbeddingBagCollection'
    """
    keys, additional = list(additional_qconfig_spec_keys or []), dict(additional_mapping or {})
    mapping = {**_COLLECTIONS, **additional}
    unmatched = [kind for kind in keys if kind not in mapping]
    unmatched += [kind for kind in additional if kind not in {*keys, *_COLLECTIONS}]
    if unmatched:
        raise ValueError(
            "additional_qconfig_spec_keys and additional_mapping must name the same classes; "
            f"received {[kind.__name__ for kind in unmatched]} in only one of them."
        )
    per_table = dict(per_table_weight_dtype or {})
    qconfig = _qconfig(dtype, output_dtype, per_table)
    return _replace(module, mapping, dict.fromkeys(mapping, qconfig), inplace, dst, checkpoint)


@checked
def quantize_inference_model(
    model: nn.Module,
    quantization_mapping: Mapping[str, type[nn.Module]] | None = None,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
    fp_weight_dtype: torch.dtype = torch.int8,
    quantization_dtype: torch.dtype = torch.int8,
    output_dtype: torch.dtype = torch.float32,
    *,
    dst: int | None = None,
    checkpoint: str | Path | None = None,
) -> nn.Module:
    """Prepare a trained model for inference: quantize its tables in place.

    A sharded model is not changed; see `quantize_embeddings`.

    Args:
        model: A trained model, sharded or not. It is changed in place, except if it is sharded or a
            collection itself.
        quantization_mapping: The classes to replace, by full name, such as
            `"recsys.modules.embedding_modules.EmbeddingBagCollection"`, with their replacements.
            None: the three kinds of collections.
        per_table_weight_dtype: Other dtypes by table name.
        fp_weight_dtype: The dtype of the tables of FeatureProcessedEmbeddingBagCollections; see
            `dtype` of `quantize_embeddings`.
        quantization_dtype: The dtype of all other tables.
        output_dtype: Dtype of the output: `torch.float32`, `torch.float16` or `torch.bfloat16`.
        dst: As for `quantize_embeddings`.
        checkpoint: As for `quantize_embeddings`.

    Returns:
        The model with quantized tables, unsharded, in evaluation mode.

    Raises:
        ValueError: As `quantize_embeddings`, or the mapping has a name that is not a class.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> config = EmbeddingBagConfig(10, 4, "t", feature_names=["f"])
        >>> model = quantize_inference_model(EmbeddingBagCollection(tables=[config]))
        >>> model.embedding_bags["t"].weight.dtype
        torch.uint8
    """
    per_table = dict(per_table_weight_dtype or {})
    mapping = _INFERENCE
    if quantization_mapping is not None:
        mapping = {_class_named(name): made for name, made in quantization_mapping.items()}
    others = _qconfig(quantization_dtype, output_dtype, per_table)
    processed = _qconfig(fp_weight_dtype, output_dtype, per_table)
    qconfigs = {
        kind: processed if issubclass(kind, FeatureProcessedEmbeddingBagCollection) else others
        for kind in mapping
    }
    return _replace(model, mapping, qconfigs, True, dst, checkpoint)


@checked
def quantize_state_dict(
    module: nn.Module,
    table_name_to_quantized_weights: dict[str, tuple[Tensor, Tensor | None]],
    table_name_to_data_type: Mapping[str, DataType],
    table_name_to_num_embeddings_post_pruning: Mapping[str, int] | None = None,
) -> torch.device:
    """Quantize the tables of a trained collection, for the constructor of a quantized collection.

    Args:
        module: An unsharded EmbeddingBagCollection or EmbeddingCollection.
        table_name_to_quantized_weights: Filled with rows, uint8 `[rows, bytes]`, and scales and
            biases, uint8 `[rows, 4]` or None for FP16 and FP32, by table name.
        table_name_to_data_type: The element type of each table.
        table_name_to_num_embeddings_post_pruning: The number of first rows to keep, by table name;
            other tables keep all rows.

    Returns:
        The device of the tables.

    Raises:
        TypeError: The module is not such a collection.
        ValueError: A table has no data type, or cannot be quantized to it.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> tables = EmbeddingBagCollection(
        ...     tables=[EmbeddingBagConfig(10, 4, "t", feature_names=["f"])]
        ... )
        >>> rows: dict[str, tuple[Tensor, Tensor | None]] = {}
        >>> quantize_state_dict(tables, rows, {"t": DataType.INT8})
        device(type='cpu')
        >>> [part.shape for part in rows["t"]]
        [torch.Size([10, 4]), torch.Size([10, 4])]
    """
    if not isinstance(module, TableCollection):
        kinds = "an unsharded EmbeddingBagCollection or EmbeddingCollection"
        wrong_type("quantize_state_dict.module", kinds, module)
    missing = [c.name for c in module.configs() if c.name not in table_name_to_data_type]
    if missing:
        raise ValueError(
            f"table_name_to_data_type must name every table; received "
            f"{sorted(table_name_to_data_type)}, without {missing}. Add them."
        )
    left = table_name_to_num_embeddings_post_pruning or {}
    weights = module.table_weights()
    for config in module.configs():
        name, data_type = config.name, table_name_to_data_type[config.name]
        num_rows = left.get(name, config.num_embeddings_post_pruning)
        served = replace(config, data_type=data_type, num_embeddings_post_pruning=num_rows)
        rows = rows_of_table(served, weights[name])
        table_name_to_quantized_weights[name] = split_header(rows, data_type)
    return module.device


def _qconfig(
    dtype: torch.dtype, output_dtype: torch.dtype, per_table: dict[str, torch.dtype]
) -> QuantConfig:
    for table_dtype in (dtype, *per_table.values()):
        to_data_type(table_dtype)
    return QuantConfig(
        activation=PlaceholderObserver.with_args(dtype=output_dtype),
        weight=PlaceholderObserver.with_args(dtype=dtype),
        per_table_weight_dtype=per_table,
    )


def _class_named(name: str) -> type[nn.Module]:
    try:
        class_ = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"quantization_mapping must name classes, such as 'recsys.modules.embedding_modules."
            f"EmbeddingBagCollection'; received {name!r}. {error}"
        ) from error
    if not isinstance(class_, type) or not issubclass(class_, nn.Module):
        raise ValueError(f"quantization_mapping must name classes of modules; received {name!r}.")
    return class_


def _replace(
    model: nn.Module,
    mapping: _Mapping,
    qconfigs: Mapping[type[nn.Module], QuantConfig],
    inplace: bool,
    dst: int | None,
    checkpoint: str | Path | None,
) -> nn.Module:
    sharded = [child for child in model.modules() if isinstance(child, ShardedCollection)]
    if sharded:
        if checkpoint is not None:
            raise ValueError(
                "checkpoint must be None for a sharded model, which has its values; received "
                f"{str(checkpoint)!r}."
            )
        return _unsharded(model, sharded[0].env, mapping, qconfigs, dst)
    if dst is not None:
        raise ValueError(
            f"dst must be None for an unsharded model; received {dst} and {type(model).__name__}."
        )
    saved = None
    if checkpoint is not None:
        _checked(model, mapping, qconfigs)
        saved = SavedTables(checkpoint)
        model = with_saved_values(model if inplace else copy.deepcopy(model), saved)
        inplace = True
    replaced = _checked(model, mapping, qconfigs)
    paths = {id(child): path for path, child in model.named_modules()}
    quantized: dict[int, nn.Module] = {}
    for key, (trained, kind) in replaced.items():
        made = cast(Any, mapping[kind]).from_float
        if saved is not None:
            made = partial(_from_saved, mapping[kind], saved, paths[key])
        quantized[key] = _configured(trained, qconfigs[kind], made)
    if id(model) in quantized:
        return quantized[id(model)].eval()
    if not inplace:
        return copy.deepcopy(model, dict(quantized)).eval()
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            parent._modules[name] = quantized.get(id(child), child)  # a module may be shared
    return model.eval()


_Found = dict[int, tuple[nn.Module, type[nn.Module]]]
"""Modules to replace, and their class in the mapping, by `id` of the module."""


def _checked(
    model: nn.Module, mapping: _Mapping, qconfigs: Mapping[type[nn.Module], QuantConfig]
) -> _Found:
    replaced: _Found = {}
    _find(model, type(model).__name__, mapping, replaced)
    if not replaced:
        raise ValueError(
            f"{type(model).__name__} must contain one of {[kind.__name__ for kind in mapping]} to "
            "quantize; received none. A quantized model cannot be quantized again."
        )
    _check_names(model, qconfigs)
    return replaced


def _unsharded(
    model: nn.Module,
    env: ShardingEnv,
    mapping: _Mapping,
    qconfigs: Mapping[type[nn.Module], QuantConfig],
    dst: int | None,
) -> nn.Module:
    """Build a quantized model from a model with sharded tables.

    Args:
        model: The model; not changed.
        env: The ranks.
        mapping: The classes to replace, with their replacements.
        qconfigs: The quantization by class.
        dst: The rank that receives sharded tables; None: every rank.
    """

    def empty() -> tuple[_Found, dict[int, nn.Module]]:
        if dst is not None and not 0 <= dst < env.world_size:
            raise ValueError(f"dst must be a rank, 0 to {env.world_size - 1}; received {dst}.")
        if isinstance(model, DMPCollection):
            model.check_averaged()
        _check_dense(model)
        replaced = _checked(get_unwrapped_module(model), mapping, qconfigs)
        device = None if dst in (None, env.rank) else torch.device("meta")
        return replaced, {
            key: _configured(child, qconfigs[kind], partial(_like, mapping[kind], device))
            for key, (child, kind) in replaced.items()
        }

    prepared: tuple[_Found, dict[int, nn.Module]] | Exception
    try:
        prepared = empty()
    except Exception as error:  # reported to the other ranks, which would wait
        prepared = error
    if env.process_group is not None and env.world_size > 1:
        facts = {"dst": str(dst), "dtypes": stable(list(qconfigs.values()))}
        result = prepared if isinstance(prepared, Exception) else facts
        agree(env.process_group, "quantize the model (quantize_embeddings)", result, None)
    if isinstance(prepared, Exception):
        raise prepared
    replacements, quantized = prepared
    for key, (child, _) in replacements.items():
        cast(QuantizedCollection, quantized[key]).quantize(child)
    copied = copy.deepcopy(get_unwrapped_module(model), dict[int, Any](quantized))
    _copy_buffers(copied, {id(module) for module in quantized.values()}, env)
    for module in copied.modules():
        if isinstance(module, ShardedFeatureProcessedEmbeddingBagCollection):
            # the unsharded class has the same submodules
            module.__class__ = FeatureProcessedEmbeddingBagCollection  # type: ignore[assignment]
    return copied.eval()


def _from_saved(
    made: type[nn.Module], saved: SavedTables, path: str, module: nn.Module
) -> nn.Module:
    if not issubclass(made, _BUILT_IN):
        raise ValueError(
            f"A collection of a checkpoint can be replaced by one of "
            f"{[k.__name__ for k in _BUILT_IN]}; received {made.__name__} for {path!r}. Load the "
            "checkpoint into the model, and quantize that model."
        )
    return made.like(module, torch.device("cpu")).quantize_saved(saved, path)


def _like(made: type[nn.Module], device: torch.device | None, module: nn.Module) -> nn.Module:
    if not issubclass(made, _BUILT_IN):
        raise ValueError(
            f"A sharded collection can be replaced by one of {[k.__name__ for k in _BUILT_IN]}; "
            f"received {made.__name__} for a {type(module).__name__}. Load the checkpoint into the "
            "unsharded model, and quantize that model."
        )
    return made.like(module, device)


def _find(module: nn.Module, path: str, mapping: _Mapping, found: _Found) -> None:
    """Collect the modules to replace, the outermost module of each branch."""
    if isinstance(module, TableCollection) and not module.configs():
        return  # there is nothing to quantize
    unsharded = getattr(module, "unsharded_module_type", nn.Module)
    bases = (*type(module).__mro__, *unsharded.__mro__)
    kind = next((base for base in bases if base in mapping), None)
    if kind is not None:
        found[id(module)] = module, kind
        return
    is_left = isinstance(module, EmbeddingBagCollectionInterface | EmbeddingCollectionInterface)
    if isinstance(module, QuantizedCollection) or not mapping.keys() >= _COLLECTIONS.keys():
        is_left = False
    if is_sharded(module) or is_left:
        raise ValueError(
            f"{type(module).__name__} {path!r} cannot be quantized: supported classes are "
            f"{[known.__name__ for known in mapping]}. Name a replacement of another class in "
            "additional_mapping. If the module is sharded, load its checkpoint into the unsharded "
            "model, and quantize that model."
        )
    for name, child in module.named_children():
        _find(child, f"{path}.{name}", mapping, found)


def _check_names(model: nn.Module, qconfigs: Mapping[type[nn.Module], QuantConfig]) -> None:
    names = {name for q in qconfigs.values() for name in q.per_table_weight_dtype or {}}
    if names and qconfigs.keys() <= _INFERENCE.keys():
        tables = {
            config.name
            for child in model.modules()
            if isinstance(child, TableCollection | ShardedCollection)
            for config in child.configs()
        }
        unknown = sorted(names - tables)
        if unknown:
            raise ValueError(
                f"per_table_weight_dtype must name tables of the model, {sorted(tables)}; received "
                f"{unknown}."
            )


def _copy_buffers(model: nn.Module, quantized: set[int], env: ShardingEnv) -> None:
    """Fill buffers, such as the statistics of a batch norm, with the values of rank 0."""
    if env.process_group is None or env.world_size == 1:
        return
    buffers = [
        buffer
        for _, module in walk(model, lambda child: id(child) in quantized)
        if id(module) not in quantized
        for buffer in module.buffers(recurse=False)
    ]
    if buffers:
        sent = [buffer.cpu() for buffer in buffers] if env.rank == 0 else []
        values = broadcast_object(env.process_group, "send buffers", sent)
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)


def _check_dense(model: nn.Module) -> None:
    split = [name for name, value in model.named_parameters() if isinstance(value, DTensor)]
    if split:
        raise ValueError(
            f"Dense parameters must be whole on every rank; received {split}, which fully_shard "
            "has split. Load the checkpoint into the unsharded model, and quantize that model."
        )


def _configured(
    module: nn.Module, qconfig: QuantConfig, make: Callable[[nn.Module], nn.Module]
) -> nn.Module:
    """Call a function with a module that has the qconfig during the call."""
    before = module.__dict__.get("qconfig")
    module.__dict__["qconfig"] = qconfig
    try:
        return make(module)
    finally:
        if before is None:
            del module.__dict__["qconfig"]
        else:
            module.__dict__["qconfig"] = before
