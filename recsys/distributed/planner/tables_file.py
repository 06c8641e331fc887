"""Files that describe tables, for planning without a model: YAML or JSON, checked when read."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from recsys import optim
from recsys.base.checked import checked
from recsys.distributed.default_sharders import get_default_sharders
from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.placement import file_checks as files
from recsys.distributed.placement.plan import EmbeddingComputeKernel, ShardingType
from recsys.distributed.planner.types import ParameterConstraints
from recsys.distributed.ranks.wire import CommType, QCommsConfig, get_qcomm_codecs_registry
from recsys.distributed.sharded.sharder import ModuleSharder
from recsys.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.optim.specs import supported_optimizer_classes

OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer] | None] = {
    **{known.__name__: known for known in supported_optimizer_classes()},
    "none": None,
}
"""Optimizers by their name in a file; with "none" a table has a gradient of its own size."""

_ONE_OF_THE_TYPES = partial(files.choice_of, choices=("FP32", "FP16", "BF16"))
_OPTIMIZER = partial(files.choice_of, choices=[*OPTIMIZERS])
_HINT = f"The whole file may have an optimizer, too: one of {', '.join(OPTIMIZERS)}."
_DEFAULTS: Mapping[str, Any] = {
    **{"pooling": "SUM", "weighted": False, "data_type": "FP32", "pooling_factors": 1.0},
    "constraints": {},
}
_NAMED: files.Readers = {"name": files.text_of, "rows": files.whole_of, "dim": files.whole_of}
_WITH_OPTIMIZER: files.Readers = {**_NAMED, "optimizer": _OPTIMIZER}
_KINDS = partial(files.choice_of, choices=[kind.value for kind in ShardingType])
_KERNELS = partial(files.choice_of, choices=[kernel.value for kernel in EmbeddingComputeKernel])
_CONSTRAINTS: files.Readers = {
    "sharding_types": partial(files.list_of, each=_KINDS),
    "compute_kernels": partial(files.list_of, each=_KERNELS),
    "min_partition": files.whole_of,
}
_TABLE: files.Readers = {
    "features": partial(files.list_of, each=files.text_of),
    "pooling_factors": lambda subject, value: value,  # checked against the number of features later
    "pooling": partial(files.choice_of, choices=[kind.name for kind in PoolingType]),
    "weighted": files.flag_of,
    "data_type": _ONE_OF_THE_TYPES,
    "optimizer": _OPTIMIZER,
    "module": files.text_of,
    "constraints": partial(files.read_members, required={}, optional=_CONSTRAINTS),
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TablesFile:
    """Content of a tables file.

    Attributes:
        model: Tables on the `meta` device.
        sharders: Sharders for the tables.
        constraints: Constraints by table name.
        batch_size: Samples per rank and step, if the file contains it.
    """

    model: nn.Module
    sharders: Sequence[ModuleSharder[Any]]
    constraints: Mapping[str, ParameterConstraints]
    batch_size: int | None = None


@checked
def read_tables(path: str | Path) -> TablesFile:
    """Return the content of a file.

    Args:
        path: Path of a YAML file, or of a JSON file if it ends in ".json".

    Raises:
        OSError: The file cannot be read.
        ImportError: PyYAML is missing and the file is not JSON.
        ValueError: A key is unknown or missing, or a value is out of range.
        TypeError: A value has another type.
    """
    path, subject = Path(path), f"Tables file {path}"
    text = path.read_text(encoding="utf-8")
    data = files.parse_json(text, subject) if path.suffix == ".json" else _parse_yaml(text, subject)
    optional: files.Readers = {
        "batch_size": files.whole_of,
        "optimizer": _OPTIMIZER,
        "data_type": _ONE_OF_THE_TYPES,
        "wire": _sharders,
    }
    members = files.read_members(subject, data, {"tables": files.list_of}, optional)
    if not members["tables"]:
        raise ValueError(f"{subject}: tables must hold at least one table; received none.")
    modules: dict[str, list[Mapping[str, Any]]] = {}
    constraints: dict[str, ParameterConstraints] = {}
    for index, row in enumerate(members["tables"]):
        numbered = f"{subject}: tables[{index}]"
        # read before the other members, so that their errors have the table's name
        name = files.read_members(numbered, row, dict.fromkeys(_NAMED), dict.fromkeys(_TABLE))[
            "name"
        ]
        owner = f"{subject}: table {files.text_of(f'{numbered}.name', name)!r}"
        if name in constraints:
            raise ValueError(f"{owner} must occur once; received it again as tables[{index}].")
        needed = _NAMED if "optimizer" in members else _WITH_OPTIMIZER
        # settings of the table override settings of the file
        table = {**_DEFAULTS, **members, **files.read_members(owner, row, needed, _TABLE, _HINT)}
        is_pooled, weighted = kind = _kind(table)
        if weighted and not is_pooled:
            raise ValueError(f"{owner}: weighted requires a pooled table; received pooling NONE.")
        usual = ("weighted_ebc" if weighted else "ebc") if is_pooled else "ec"
        of_module = modules.setdefault(path_of := table.get("module", usual), [])
        of_module.append(table)
        if _kind(of_module[0]) != kind:
            raise ValueError(
                f"{owner} must have the pooling and weights of the other tables of module "
                f"{path_of!r}; received pooling {table['pooling']} and weighted "
                f"{str(weighted).lower()}. Use another module."
            )
        constraints[name] = _constraints(owner, table)
    return TablesFile(
        model=_model(subject, modules),
        sharders=members.get("wire", get_default_sharders()),
        constraints=constraints,
        batch_size=members.get("batch_size"),
    )


def _kind(table: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a table is pooled, and whether its ids are weighted."""
    return table["pooling"] != "NONE", table["weighted"]


def _constraints(owner: str, table: Mapping[str, Any]) -> ParameterConstraints:
    # the default has one entry: a feature named like the table
    num_features = len(table.get("features", "1"))
    factors = table["pooling_factors"]
    numbers = factors if isinstance(factors, list) else [factors] * num_features
    if not all(map(files.is_number, numbers)) or len(numbers) != num_features:
        rule = f"a number, or a list of one for each of {num_features} features"
        files.wrong_type(f"{owner}: pooling_factors", rule, factors)
    try:
        return ParameterConstraints(**table["constraints"], pooling_factors=numbers)
    except ValueError as error:
        raise ValueError(f"{owner}: {error}") from None


def _model(subject: str, modules: Mapping[str, Sequence[Mapping[str, Any]]]) -> nn.Module:
    if "" in modules and len(modules) > 1:
        raise ValueError(
            f"{subject}: module '' is the whole model, and must be the only one; received "
            f"{', '.join(map(repr, modules))}."
        )
    root, plain = nn.Module(), nn.Module()
    for path, tables in modules.items():
        inside = any(f"{path}.".startswith(f"{other}.") for other in modules if other != path)
        names = path.split(".")
        if path and (inside or not all(name and not hasattr(plain, name) for name in names)):
            raise ValueError(
                f"{subject}: module must be names separated by dots, not inside another module and "
                f"not attributes of every nn.Module, such as 'train'; received {path!r}."
            )
        try:
            collection = _collection(tables)
        except ValueError as error:
            raise ValueError(f"{subject}: module {path!r}: {error}") from None
        if not path:
            return collection
        parent = root
        for name in names[:-1]:
            if name not in parent._modules:
                parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        parent.add_module(names[-1], collection)
    return root


def _collection(
    tables: Sequence[Mapping[str, Any]],
) -> EmbeddingBagCollection | EmbeddingCollection:
    """Return the tables of a module with their optimizers."""
    (is_pooled, weighted), meta = _kind(tables[0]), torch.device("meta")
    config: type[Any] = EmbeddingBagConfig if is_pooled else EmbeddingConfig
    configs = [
        config(
            num_embeddings=table["rows"],
            embedding_dim=table["dim"],
            name=table["name"],
            data_type=DataType[table["data_type"]],
            feature_names=table.get("features", [table["name"]]),
            **({"pooling": PoolingType[table["pooling"]]} if is_pooled else {}),
        )
        for table in tables
    ]
    collection = (
        EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=meta)
        if is_pooled
        else EmbeddingCollection(tables=configs, device=meta)
    )
    optimizers = {table["name"]: OPTIMIZERS[table["optimizer"]] for table in tables}
    for name, parameter in collection.named_parameters():
        # parameters are named `embedding_bags.TABLE.weight`, and names of tables have no dots
        optimizer = optimizers[name.split(".")[-2]]
        if optimizer is not None:
            # no cost depends on the rate, so any one serves
            optim.apply_optimizer_in_backward(optimizer, [parameter], {"lr": 0.01})
    return collection


def _sharders(subject: str, wire: object) -> Sequence[ModuleSharder[Any]]:
    """Return sharders with the precision of exchanges from a file."""
    precision = partial(files.choice_of, choices=[kind.name for kind in CommType])
    directions: files.Readers = {"forward_precision": precision, "backward_precision": precision}
    chosen = files.read_members(subject, wire, {}, directions)
    there, back = (CommType[chosen.get(key, "FP32")] for key in directions)
    registry = get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=there, backward_precision=back)
    )
    return [
        EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry),
        EmbeddingCollectionSharder(qcomm_codecs_registry=registry),
    ]


def _parse_yaml(text: str, subject: str) -> object:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            f"{subject} needs PyYAML, unless it is JSON and its name ends in .json; received an "
            "environment without it. Install it: pip install pyyaml."
        ) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """YAML loader that rejects repeated keys; the default loader uses the last one."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            # a list: unhashable keys are an error of the base class
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = next((key for key in keys if keys.count(key) > 1), None)
            if twice is not None:
                raise ValueError(
                    f"{subject} must name each key once; received {twice!r} twice, in line "
                    f"{node.start_mark.line + 1} and below."
                )
            members: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
            return members

    try:
        value: object = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{subject} must be YAML; received text with: {reason}.") from None
    return value
