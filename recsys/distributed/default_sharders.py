"""Default sharders by module type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from recsys.base.arguments import instance
from recsys.base.checked import checked
from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from recsys.distributed.fused_embedding import (
    FusedEmbeddingBagCollectionSharder,
    FusedEmbeddingCollectionSharder,
)
from recsys.distributed.sharded.sharder import ModuleSharder

_added: list[Callable[[], ModuleSharder[Any]]] = []


@checked
def add_default_sharder(make: Callable[[], ModuleSharder[Any]]) -> None:
    """Add a default sharder for modules of a package that imports this one.

    Args:
        make: Function that returns the sharder.

    Raises:
        TypeError: If it returns another value.
    """
    instance("add_default_sharder: the result of make", make(), ModuleSharder)  # type: ignore[type-abstract]
    _added.append(make)


def get_default_sharders() -> list[ModuleSharder[Any]]:
    """Return a sharder for every module type that can be sharded.

    Sharders of quantized collections are included once `recsys.inference` is imported.
    """
    return [
        EmbeddingBagCollectionSharder(),
        FeatureProcessedEmbeddingBagCollectionSharder(),
        EmbeddingCollectionSharder(),
        FusedEmbeddingBagCollectionSharder(),
        FusedEmbeddingCollectionSharder(),
        *(make() for make in _added),
    ]


def get_module_to_default_sharders() -> dict[type[nn.Module], ModuleSharder[Any]]:
    """Return the default sharders by module type."""
    return {sharder.module_type: sharder for sharder in get_default_sharders()}


@checked
def sharder_of(module: nn.Module) -> ModuleSharder[Any]:
    """Return the default sharder for a module.

    Raises:
        ValueError: If the module has none.
    """
    known = get_module_to_default_sharders()
    if type(module) not in known:
        raise ValueError(
            "A module needs a sharder of its exact type; received a "
            f"{type(module).__name__}. Default sharders exist for "
            f"{', '.join(t.__name__ for t in known)}. Pass sharder=..."
        )
    return known[type(module)]
