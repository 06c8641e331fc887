"""The module types that can be sharded without saying how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from recsys.distributed.fused_embedding import (
    FusedEmbeddingBagCollectionSharder,
    FusedEmbeddingCollectionSharder,
)
from recsys.distributed.sharded.sharder import ModuleSharder
from recsys.kernels.arguments import instance
from recsys.kernels.checked import checked

_of_others: list[Callable[[], ModuleSharder[Any]]] = []


@checked
def add_default_sharder(make: Callable[[], ModuleSharder[Any]]) -> None:
    """Let modules of a package above this one have a default sharder.

    Args:
        make: returns the sharder.

    Raises:
        TypeError: what it returns is none.
    """
    instance("add_default_sharder: what make returns", make(), ModuleSharder)  # type: ignore[type-abstract]
    _of_others.append(make)


def get_default_sharders() -> list[ModuleSharder[Any]]:
    """Return a sharder for every module type that can be sharded.

    Those of quantized collections are among them once `recsys.inference`, which has these, is
    imported.
    """
    return [
        EmbeddingBagCollectionSharder(),
        FeatureProcessedEmbeddingBagCollectionSharder(),
        EmbeddingCollectionSharder(),
        FusedEmbeddingBagCollectionSharder(),
        FusedEmbeddingCollectionSharder(),
        *(make() for make in _of_others),
    ]


def get_module_to_default_sharders() -> dict[type[nn.Module], ModuleSharder[Any]]:
    """Return the default sharders by the module type that each replaces."""
    return {sharder.module_type: sharder for sharder in get_default_sharders()}


@checked
def sharder_of(module: nn.Module) -> ModuleSharder[Any]:
    """Return the default sharder for a module.

    Raises:
        ValueError: if there is none.
    """
    known = get_module_to_default_sharders()
    if type(module) not in known:
        raise ValueError(
            "A module needs a sharder made for its very type; received a "
            f"{type(module).__name__}, and there are default ones for "
            f"{', '.join(t.__name__ for t in known)}. Pass sharder=..."
        )
    return known[type(module)]
