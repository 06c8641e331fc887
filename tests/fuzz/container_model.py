"""The content of a random batch in plain Python lists, and a KeyedJaggedTensor built of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from recsys.sparse import KeyedJaggedTensor

INTS = (torch.int32, torch.int64)
Bags = list[list[int]]


@dataclass
class Model:
    """The content of a KeyedJaggedTensor; the weight of a value is the value plus one half."""

    keys: list[str]
    bags: list[Bags]
    stride: int
    strides: list[list[int]] | None
    inverse: dict[str, list[int]] | None
    weights: torch.dtype | None
    dtypes: tuple[torch.dtype, torch.dtype] = field(default=(torch.int64, torch.int64))

    def flat(self) -> list[int]:
        return [value for bags in self.bags for bag in bags for value in bag]

    def lengths(self) -> list[int]:
        return [len(bag) for bags in self.bags for bag in bags]

    def counts(self) -> list[int]:
        return [sum(map(len, bags)) for bags in self.bags]

    def pick(self, places: list[int]) -> Model:
        return replace(
            self,
            keys=[self.keys[i] for i in places],
            bags=[self.bags[i] for i in places],
            strides=None if self.strides is None else [self.strides[i] for i in places],
        )


def running(numbers: list[int]) -> list[int]:
    return [sum(numbers[:i]) for i in range(len(numbers) + 1)]


def model_of(rng: random.Random, prefix: str, like: Model | None = None) -> Model:
    num_keys = rng.choice([0, 1, 2, 2, 3])
    keys = [f"{prefix}{i}" for i in range(num_keys)]
    stride = rng.choice([0, 1, 2, 5]) if like is None else like.stride
    is_variable = rng.random() < 0.4 if like is None else like.strides is not None
    has_inverse = rng.random() < 0.3 if like is None else like.inverse is not None
    strides = None
    if is_variable or has_inverse:
        most = stride + 2 if has_inverse else stride
        strides = [[rng.randint(0, most) for _ in range(1)] for _ in keys]
        if rng.random() < 0.5:
            strides = [[size // 2, size - size // 2] for (size,) in strides]
        if has_inverse:
            strides = [[max(size[0], 1), *size[1:]] for size in strides]
    sizes = [stride] * num_keys if strides is None else [sum(size) for size in strides]
    bags = [
        [[rng.randrange(100) for _ in range(rng.choice([0, 0, 1, 3]))] for _ in range(size)]
        for size in sizes
    ]
    inverse = None
    if has_inverse:
        inverse = {
            key: [rng.randrange(size) for _ in range(stride)]
            for key, size in zip(keys, sizes, strict=True)
        }
    return Model(
        keys,
        bags,
        stride,
        strides,
        inverse,
        rng.choice([None, torch.float32]) if like is None else like.weights,
        (rng.choice(INTS), rng.choice(INTS)) if like is None else like.dtypes,
    )


def built(rng: random.Random, model: Model) -> KeyedJaggedTensor:
    values, lengths = (
        torch.tensor(numbers, dtype=dtype)
        for numbers, dtype in zip((model.flat(), model.lengths()), model.dtypes, strict=True)
    )
    offsets = torch.tensor(running(model.lengths()), dtype=model.dtypes[1])
    given: dict[str, Any] = {"lengths": lengths}
    if rng.random() < 0.4:
        given = {"offsets": offsets}
    elif rng.random() < 0.3:
        given["offsets"] = offsets
    if model.inverse is not None:
        rows = list(model.inverse.values())
        indices = torch.tensor(rows, dtype=torch.int64).view(len(rows), model.stride)
        given["inverse_indices"] = list(model.inverse), indices
    if model.strides is not None:
        name = "stride_per_key_per_rank"
        given[name] = model.strides
        if all(len(sizes) == 1 for sizes in model.strides) or rng.random() < 0.2:
            given["stride_per_key"] = [sum(sizes) for sizes in model.strides]
        if all(len(sizes) == 1 for sizes in model.strides):
            del given[name]
    if not (model.strides and model.inverse) or rng.random() < 0.5:
        given["stride"] = model.stride
    right = caches(model)
    for name, value in right.items():
        if rng.random() < 0.2:
            given[name] = value
    weights = None if model.weights is None else values.to(model.weights) + 0.5
    return KeyedJaggedTensor(list(model.keys), values, weights, **given)


def caches(model: Model) -> dict[str, Any]:
    counts = model.counts()
    return {
        "length_per_key": counts,
        "offset_per_key": running(counts),
        "index_per_key": {key: place for place, key in enumerate(model.keys)},
        "lengths_offset_per_key": running([len(bags) for bags in model.bags]),
    }
