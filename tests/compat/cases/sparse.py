"""Jagged containers."""

from __future__ import annotations

from typing import Any

import torch


def keyed_jagged_tensor_to_dict() -> Any:
    from torchrec import KeyedJaggedTensor

    batch = KeyedJaggedTensor(["a", "b"], torch.randn(5), lengths=torch.tensor([2, 0, 1, 2]))
    return {
        key: [bag.values(), bag.lengths(), bag.offsets()] for key, bag in batch.to_dict().items()
    }
