"""From trained embedding collections to quantized ones, wherever they are in a model."""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.ao.quantization import PlaceholderObserver
from torch.distributed.tensor import DTensor

from recsys.distributed.dmp_collection import DMPCollection
from recsys.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from recsys.distributed.model_parallel import get_unwrapped_module
from recsys.distributed.ranks.agreement import agree, stable
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.sharded_collection import ShardedCollection
from recsys.distributed.sharder import is_sharded
from recsys.inference.quant_modules import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    QuantFeatureProcessedEmbeddingBagCollection,
)
from recsys.inference.quantized_collection import (
    QuantizedCollection,
    split_header,
    to_data_type,
)
from recsys.inference.quantized_shards import rows_of_table
from recsys.kernels.checked import checked
from recsys.modules.embedding_configs import DataType, QuantConfig
from recsys.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)
from recsys.modules.embedding_tables import TableCollection
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

__all__ = ["quantize_embeddings", "quantize_inference_model", "quantize_state_dict"]


class _Quantized(Protocol):
    """A class that is made from trained modules, as `torch.quantization.convert` calls it."""

    @classmethod
    def from_float(cls, module: nn.Module) -> nn.Module: ...


_Mapping = Mapping[type[nn.Module], type[nn.Module]]

_COLLECTIONS: _Mapping = {
    EmbeddingBagCollection: QuantEmbeddingBagCollection,
    EmbeddingCollection: QuantEmbeddingCollection,
}
_PROCESSED = (
    FeatureProcessedEmbeddingBagCollection,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
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
) -> nn.Module:
    """Replace the embedding collections of a model by quantized ones.

    EmbeddingBagCollections and EmbeddingCollections are replaced, also those inside of others, such
    as a FeatureProcessedEmbeddingBagCollection. Plain `nn.EmbeddingBag` and dense layers stay.

    A sharded model, such as a DistributedModelParallel, gives the quantized model that the
    unsharded one would, bit for bit. Every rank must call this. The sharded model stays as it is,
    so that training can go on, and each rank quantizes its own shards.

    Args:
        module: a trained model, sharded or not.
        dtype: `torch.int8` (one byte per value), `torch.quint4x2` (half a byte),
            `torch.quint2x4` (a quarter), `torch.float16` (two) or `torch.float32` (four).
        inplace: change the given model instead of a copy. A sharded model is always copied.
        additional_qconfig_spec_keys: other classes to replace...
        additional_mapping: ... and by what: a class whose `from_float(module)` reads
            `module.qconfig`. It may also name another replacement for a collection.
        output_dtype: of what is looked up: `torch.float32`, `torch.float16` or
            `torch.bfloat16`.
        per_table_weight_dtype: other dtypes by table name.
        dst: of a sharded model the rank that receives the tables; on the others they are on the
            `meta` device, and take no memory. None: every rank receives all of them.

    Returns:
        The model with quantized tables, unsharded, in evaluation mode.

    Raises:
        ValueError: if the model has nothing to quantize or a collection that cannot be, a dtype
            cannot be served, a table cannot be quantized, or a name is not a table's.

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
    return _replace(module, mapping, dict.fromkeys(mapping, qconfig), inplace, dst)


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
) -> nn.Module:
    """Make a trained model ready for inference: quantizes its tables, in place.

    A sharded model is not changed; see `quantize_embeddings`.

    Args:
        model: a trained model, sharded or not. It is changed, unless it is sharded or a collection
            itself.
        quantization_mapping: the classes to replace, each by its full name, such as
            `"recsys.modules.embedding_modules.EmbeddingBagCollection"`, and by what; nothing else
            is replaced then. None: the three kinds of collections.
        per_table_weight_dtype: other dtypes by table name.
        fp_weight_dtype: the dtype of the tables of FeatureProcessedEmbeddingBagCollections, as
            `dtype` of `quantize_embeddings`.
        quantization_dtype: that of all other tables.
        output_dtype: of what is looked up: `torch.float32`, `torch.float16` or
            `torch.bfloat16`.
        dst: as for `quantize_embeddings`.

    Returns:
        The model with quantized tables, unsharded, in evaluation mode.

    Raises:
        ValueError: as `quantize_embeddings`, or if a name in the mapping is not a class's.

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
    return _replace(model, mapping, qconfigs, True, dst)


@checked
def quantize_state_dict(
    module: nn.Module,
    table_name_to_quantized_weights: dict[str, tuple[Tensor, Tensor | None]],
    table_name_to_data_type: Mapping[str, DataType],
    table_name_to_num_embeddings_post_pruning: Mapping[str, int] | None = None,
) -> torch.device:
    """Quantize the tables of a trained collection, for the constructor of a quantized one.

    Args:
        module: an EmbeddingBagCollection or an EmbeddingCollection, unsharded.
        table_name_to_quantized_weights: is filled: by table name its rows, uint8 `[rows, bytes]`,
            and their scales and biases, uint8 `[rows, 4]`; None for FP16 and FP32.
        table_name_to_data_type: how the rows of each table are stored.
        table_name_to_num_embeddings_post_pruning: by table name how many of its first rows are
            left; all, if it is not there.

    Returns:
        The device of the tables.

    Raises:
        TypeError: if the module is no such collection.
        ValueError: if a table has no data type, or cannot be quantized to it.

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
        raise TypeError(
            "quantize_state_dict takes an EmbeddingBagCollection or an EmbeddingCollection, "
            f"unsharded; received {type(module).__name__}."
        )
    missing = [c.name for c in module.configs() if c.name not in table_name_to_data_type]
    if missing:
        raise ValueError(
            f"table_name_to_data_type must name every table; received "
            f"{sorted(table_name_to_data_type)}, without {missing}."
        )
    left = table_name_to_num_embeddings_post_pruning or {}
    for config in module.configs():
        name, data_type = config.name, table_name_to_data_type[config.name]
        served = replace(
            config,
            data_type=data_type,
            num_embeddings_post_pruning=left.get(name, config.num_embeddings_post_pruning),
        )
        rows = rows_of_table(served, module.table_weights()[name])
        table_name_to_quantized_weights[name] = split_header(rows, data_type)
    return module.device


def _qconfig(
    dtype: torch.dtype, output_dtype: torch.dtype, per_table: dict[str, torch.dtype]
) -> QuantConfig:
    for given in (dtype, *per_table.values()):
        to_data_type(given)
    return QuantConfig(
        activation=PlaceholderObserver.with_args(dtype=output_dtype),
        weight=PlaceholderObserver.with_args(dtype=dtype),
        per_table_weight_dtype=per_table,
    )


def _class_named(name: str) -> type[nn.Module]:
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"quantization_mapping must name classes, such as 'recsys.modules.embedding_modules."
            f"EmbeddingBagCollection'; received {name!r}. {error}"
        ) from error
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise ValueError(f"quantization_mapping must name classes of modules; received {name!r}.")
    return found


def _replace(
    model: nn.Module,
    mapping: _Mapping,
    qconfigs: Mapping[type[nn.Module], QuantConfig],
    inplace: bool,
    dst: int | None,
) -> nn.Module:
    sharded = [child for child in model.modules() if isinstance(child, ShardedCollection)]
    if sharded:
        return _unsharded(model, sharded[0].env, mapping, qconfigs, dst)
    if dst is not None:
        raise ValueError(f"dst is for sharded models; received {dst} and {type(model).__name__}.")
    found = _checked(model, mapping, qconfigs)
    quantized = {
        key: _configured(child, qconfigs[kind], cast(type[_Quantized], mapping[kind]).from_float)
        for key, (child, kind) in found.items()
    }
    if id(model) in quantized:
        return quantized[id(model)].eval()
    changed = model if inplace else copy.deepcopy(model, dict(quantized))
    if inplace:
        for parent in list(model.modules()):
            for name, child in parent._modules.items():
                if id(child) in quantized:  # also one that is used at several places
                    parent._modules[name] = quantized[id(child)]
    return changed.eval()


_Found = dict[int, tuple[nn.Module, type[nn.Module]]]
"""By identity the modules to replace, and the class by which the mapping knows each."""


def _checked(
    model: nn.Module, mapping: _Mapping, qconfigs: Mapping[type[nn.Module], QuantConfig]
) -> _Found:
    found: _Found = {}
    _find(model, type(model).__name__, mapping, found)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has none of {[kind.__name__ for kind in mapping]} to quantize "
            "(once quantized it has none)."
        )
    _check_names(model, qconfigs)
    return found


def _unsharded(
    model: nn.Module,
    env: ShardingEnv,
    mapping: _Mapping,
    qconfigs: Mapping[type[nn.Module], QuantConfig],
    dst: int | None,
) -> nn.Module:
    """Return a quantized model made from one of which some tables are sharded.

    Args:
        model: the model; it stays as it is.
        env: the ranks.
        mapping: the classes to replace, and by what.
        qconfigs: how, by class.
        dst: the rank that receives sharded tables; None: every rank.
    """

    def empty() -> tuple[_Found, dict[int, nn.Module]]:
        if dst is not None and not 0 <= dst < env.world_size:
            raise ValueError(f"dst must be a rank, 0 to {env.world_size - 1}; received {dst}.")
        if isinstance(model, DMPCollection):
            model.check_averaged()
        _check_dense(model)
        found = _checked(get_unwrapped_module(model), mapping, qconfigs)
        device = None if dst in (None, env.rank) else torch.device("meta")
        return found, {
            key: _configured(child, qconfigs[kind], partial(_like, mapping[kind], device))
            for key, (child, kind) in found.items()
        }

    prepared: tuple[_Found, dict[int, nn.Module]] | Exception
    try:
        prepared = empty()
    except Exception as error:  # the other ranks go on otherwise
        prepared = error
    if env.process_group is not None and env.world_size > 1:
        facts = {"dst": str(dst), "dtypes": stable(list(qconfigs.values()))}
        told = prepared if isinstance(prepared, Exception) else facts
        agree(env.process_group, "quantize the model", told, None)
    if isinstance(prepared, Exception):
        raise prepared
    found, quantized = prepared
    for key, (child, _) in found.items():
        tables: Any = child
        if isinstance(child, _PROCESSED):
            _, tables = child.split()
        cast(QuantizedCollection, quantized[key]).quantize(tables)
    copied = copy.deepcopy(get_unwrapped_module(model), dict[int, Any](quantized))
    for module in copied.modules():
        if isinstance(module, ShardedFeatureProcessedEmbeddingBagCollection):
            # its parts have the same names
            module.__class__ = FeatureProcessedEmbeddingBagCollection  # type: ignore[assignment]
    return copied.eval()


def _like(made: type[nn.Module], device: torch.device | None, module: nn.Module) -> nn.Module:
    if not issubclass(made, _BUILT_IN):
        raise ValueError(
            f"A sharded collection can become one of {[kind.__name__ for kind in _BUILT_IN]}; "
            f"received {made.__name__} for a {type(module).__name__}. Load the checkpoint into the "
            "unsharded model, and quantize that."
        )
    return made.like(module, device)


def _find(
    module: nn.Module,
    path: str,
    mapping: _Mapping,
    found: _Found,
) -> None:
    """Find what is to be replaced, the outermost module of each branch."""
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
            f"{type(module).__name__} {path!r} cannot be quantized: it is none of "
            f"{[known.__name__ for known in mapping]}. Another collection needs a class that is "
            "made from it, in additional_mapping; if it is sharded, load its checkpoint into the "
            "unsharded model, and quantize that."
        )
    for name, child in module.named_children():
        _find(child, f"{path}.{name}", mapping, found)


def _check_names(model: nn.Module, qconfigs: Mapping[type[nn.Module], QuantConfig]) -> None:
    given = {name for q in qconfigs.values() for name in q.per_table_weight_dtype or {}}
    if given and qconfigs.keys() <= _INFERENCE.keys():
        tables = {
            config.name
            for child in model.modules()
            if isinstance(child, TableCollection | ShardedCollection)
            for config in child.configs()
        }
        unknown = sorted(given - tables)
        if unknown:
            raise ValueError(
                f"per_table_weight_dtype names {unknown}, which are not tables of the model; its "
                f"tables are {sorted(tables)}."
            )


def _check_dense(model: nn.Module) -> None:
    split = [name for name, value in model.named_parameters() if isinstance(value, DTensor)]
    if split:
        raise ValueError(
            f"Dense parameters must be whole on every rank; received {split}, which fully_shard "
            "has split. Load the checkpoint into the unsharded model, and quantize that."
        )


def _configured(
    module: nn.Module, qconfig: QuantConfig, make: Callable[[nn.Module], nn.Module]
) -> nn.Module:
    """Return what a function makes of a module that has a qconfig for as long as it runs."""
    before = module.__dict__.get("qconfig")
    module.__dict__["qconfig"] = qconfig
    try:
        return make(module)
    finally:
        if before is None:
            del module.__dict__["qconfig"]
        else:
            module.__dict__["qconfig"] = before
