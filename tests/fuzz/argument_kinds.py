"""Kinds of arguments: a right value of each, which other values are legal, and values to try."""

from __future__ import annotations

import enum
import math
import operator
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from recsys.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor


class Color(enum.Enum):
    """An enum that no function asks for."""

    RED = "red"


@dataclass(frozen=True)
class Kind:
    """The legal values of an argument."""

    right: Callable[[], Any]
    is_legal: Callable[[Any], bool | None]
    """True, False, or None for values whose type is right and whose content may not fit."""
    alike: Callable[[], list[Any]] = list
    """Other values that mean the same as the right one, and must be accepted."""


def maybe(kind: Kind) -> Kind:
    """A kind that also may be None."""
    return Kind(kind.right, lambda value: True if value is None else kind.is_legal(value))


# -- numbers, texts and flags --------------------------------------------------------------------


def whole(right: int, least: int | None = 1, most: int | None = None) -> Kind:
    """An int, or one of NumPy's integers."""

    def is_legal(value: Any) -> bool | None:
        if isinstance(value, torch.Tensor | np.ndarray):
            return None if value.ndim == 0 else False
        if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
            return False
        number = operator.index(value)
        if (least is not None and number < least) or (most is not None and number > most):
            return False
        return None

    return Kind(lambda: right, is_legal, lambda: [np.int64(right), np.int32(right)])


def number(
    right: float, least: float = -math.inf, below: float = math.inf, is_finite: bool = True
) -> Kind:
    """A float, an int, or one of NumPy's numbers."""

    def is_legal(value: Any) -> bool | None:
        if isinstance(value, torch.Tensor | np.ndarray):
            return None if value.ndim == 0 or value.shape == (1,) else False
        if isinstance(value, bool | np.bool_ | complex):
            return False
        if not isinstance(value, int | float | np.number):
            return False
        inside = least <= float(value) < below or (value == math.inf == below)
        inside = inside or (math.isnan(value) and not is_finite)
        return None if inside and (math.isfinite(value) or not is_finite) else False

    return Kind(lambda: right, is_legal, lambda: [np.float64(right), np.float32(right)])


def flag(right: bool) -> Kind:
    """A bool, or NumPy's; 0 and 1 may pass for one."""

    def is_legal(value: Any) -> bool | None:
        if isinstance(value, bool | np.bool_):
            return True
        return None if isinstance(value, int | np.integer) and value in (0, 1) else False

    return Kind(lambda: right, is_legal, lambda: [np.bool_(right)])


def text(right: str) -> Kind:
    """Text."""
    return Kind(lambda: right, lambda value: None if isinstance(value, str) else False)


def member(right: enum.Enum) -> Kind:
    """A member of an enum, or text that may name one."""

    def is_legal(value: Any) -> bool | None:
        if isinstance(value, type(right)):
            return True
        texts = {str(one.value) for one in type(right)} | {one.name for one in type(right)}
        return None if isinstance(value, str) and {value, value.upper()} & texts else False

    return Kind(lambda: right, is_legal)


# -- collections ---------------------------------------------------------------------------------


def _is_iterable(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | nn.Module)


def many(right: Callable[[], list[Any]], one: Kind, least: int = 0, is_tuple: bool = True) -> Kind:
    """A list of a kind."""

    def is_legal(value: Any) -> bool | None:
        if isinstance(value, torch.Tensor | np.ndarray):
            return None
        if not _is_iterable(value) or isinstance(value, Iterator):
            return None if isinstance(value, Iterator) else False
        parts = list(value)
        if len(parts) < least or any(one.is_legal(part) is False for part in parts):
            return False
        return None

    return Kind(right, is_legal, lambda: [tuple(right())] if is_tuple else [])


def wholes(right: list[int], least: int = 0, size: int = 0, is_tuple: bool = True) -> Kind:
    """A list of whole numbers."""
    return many(lambda: list(right), whole(0, least), size, is_tuple)


def texts(right: list[str], least: int = 0, is_tuple: bool = True) -> Kind:
    """A list of texts."""
    return many(lambda: list(right), text(""), least, is_tuple)


def mapping(right: Callable[[], Mapping[Any, Any]], one: Kind | None = None) -> Kind:
    """A dict of text to a kind."""

    def is_legal(value: Any) -> bool | None:
        if not isinstance(value, Mapping | nn.ModuleDict):
            return False
        is_text = all(isinstance(key, str) for key in value)
        is_wrong = one is not None and any(one.is_legal(part) is False for part in value.values())
        return None if is_text and not is_wrong else False

    return Kind(right, is_legal)


# -- objects -------------------------------------------------------------------------------------


def made(right: Callable[[], Any], *types: Any) -> Kind:
    """An object of one of these classes, of the right one's class if there are none."""
    classes = types or (type(right()),)
    return Kind(right, lambda value: None if isinstance(value, classes) else False)


def either(*kinds: Kind) -> Kind:
    """A value of one of these kinds."""

    def is_legal(value: Any) -> bool | None:
        found = [kind.is_legal(value) for kind in kinds]
        return True if True in found else None if None in found else False

    return Kind(kinds[0].right, is_legal, kinds[0].alike)


def anything(right: Callable[[], Any]) -> Kind:
    """Any object: only its errors must be clear."""
    return Kind(right, lambda value: None)


def subclass(right: type, base: type) -> Kind:
    """A class under another one."""
    return Kind(
        lambda: right,
        lambda value: None if isinstance(value, type) and issubclass(value, base) else False,
    )


def function(right: Callable[..., Any]) -> Kind:
    """A callable."""
    return Kind(lambda: right, lambda value: None if callable(value) else False)


def path(right: Callable[[], str]) -> Kind:
    """A path, as text or as `os.PathLike`."""

    def is_legal(value: Any) -> bool | None:
        if not isinstance(value, str | os.PathLike) or str(value) == "":
            return False
        return None

    return Kind(right, is_legal, lambda: [pathlib.Path(right())])


def tensor(right: Callable[[], torch.Tensor]) -> Kind:
    """A tensor; its dtype and shape may not fit."""
    return made(right, torch.Tensor)


def module(right: Callable[[], nn.Module], *types: type[nn.Module]) -> Kind:
    """A module."""
    return made(right, *(types or (nn.Module,)))


def _is_device(value: Any) -> bool | None:
    if isinstance(value, torch.device):
        return None
    try:
        return None if isinstance(value, str) and torch.device(value) else False
    except RuntimeError:
        return False


DEVICE = Kind(lambda: torch.device("cpu"), _is_device)
DTYPE = made(lambda: torch.float32, torch.dtype)
KJT = made(
    lambda: KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 1, 0])
    ),
    KeyedJaggedTensor,
)
JT = made(lambda: JaggedTensor(torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2])), JaggedTensor)
KT = made(lambda: KeyedTensor(["a", "b"], [1, 2], torch.ones(2, 3)), KeyedTensor)

WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "text": lambda: "wrong",
    "empty text": lambda: "",
    "digits": lambda: "3",
    "path": lambda: pathlib.Path("nothing/here"),
    "bytes": lambda: b"a",
    "True": lambda: True,
    "1.5": lambda: 1.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-1": lambda: -1,
    "0": lambda: 0,
    "1": lambda: 1,
    "7": lambda: 7,
    "complex": lambda: 1j,
    "[]": list,
    "()": tuple,
    "{}": dict,
    "set": lambda: {"a", "b"},
    "[None]": lambda: [None],
    "[1]": lambda: [1],
    "[-1]": lambda: [-1],
    "[1.5]": lambda: [1.5],
    "[text]": lambda: ["wrong"],
    "[text, 1]": lambda: ["a", 1],
    "[[text]]": lambda: [["a"], ["b"]],
    "[a, a]": lambda: ["a", "a"],
    "[tensor]": lambda: [torch.ones(2)],
    "[module]": lambda: [nn.Linear(1, 1)],
    "{wrong: 1}": lambda: {"wrong": 1},
    "{a: None}": lambda: {"a": None},
    "{1: 2}": lambda: {1: 2},
    "object": object,
    "class": lambda: object,
    "floats": lambda: torch.tensor([0.5, -1.0]),
    "ints": lambda: torch.tensor([1, 2, 3]),
    "int8s": lambda: torch.tensor([1, 2, 3], dtype=torch.int8),
    "bools": lambda: torch.tensor([True, False]),
    "complexes": lambda: torch.tensor([1j]),
    "scalar": lambda: torch.tensor(2.5),
    "matrix": lambda: torch.ones(3, 2),
    "cube": lambda: torch.ones(2, 2, 2),
    "no values": lambda: torch.ones(0),
    "array": lambda: np.array([1.0, 2.0]),
    "np float": lambda: np.float32(0.5),
    "np bool": lambda: np.bool_(True),
    "np int": lambda: np.int64(2),
    "module": lambda: nn.Linear(2, 2),
    "module class": lambda: nn.Linear,
    "optimizer class": lambda: torch.optim.SGD,
    "optimizer": lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1),
    "dtype": lambda: torch.int16,
    "device": lambda: torch.device("cpu"),
    "JaggedTensor": JT.right,
    "KeyedJaggedTensor": KJT.right,
    "KeyedTensor": KT.right,
    "config": lambda: EmbeddingBagConfig(5, 4, "other", feature_names=["z"]),
    "Color": lambda: Color.RED,
    "PoolingType": lambda: PoolingType.MEAN,
    "function": lambda: lambda: None,
    "generator": lambda: iter([1, "a"]),
    "slice": lambda: slice(1, 2),
}
"""Makers of values to put in an argument's place."""
