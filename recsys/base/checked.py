"""Checks of arguments against the annotations of the function that takes them."""

from __future__ import annotations

import collections.abc
import enum
import functools
import inspect
import os
import pathlib
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import fx, nn

from recsys.base.arguments import (
    choice,
    device_of,
    flag,
    names,
    number,
    path_of,
    shown,
    whole,
    wrong_type,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def checked(function: _Function) -> _Function:
    """Check the types of a function's arguments in each call, by its annotations.

    Not for functions that run with every batch: each argument costs about a microsecond; see
    `checked_late`. Numbers of NumPy are converted to numbers of Python, and text to a device or a
    member of an enum. A bool is not accepted as `int`. A `list` may be any iterable except text,
    tensors and iterators. A `float` may be any number. Each element of a list or a mapping is
    checked. Arguments without an annotation are not checked.

    Args:
        function: Such as an `__init__`.

    Returns:
        The function that checks first.

    Example:
        >>> @checked
        ... def repeat(text: str, times: int = 2) -> str:
        ...     return text * times
        >>> repeat("a", times="b")
        Traceback (most recent call last):
        TypeError: repeat.times must be a whole number; received 'b'.
    """
    return checked_but()(function)


def checked_but(*names: str) -> Callable[[_Function], _Function]:
    """Check the types of a function's arguments as `checked` does, except some of them.

    Args:
        names: Names of the arguments that are not checked.

    Example:
        >>> @checked_but("path")
        ... def read(path: str, lines: int = 1) -> None:
        ...     raise ValueError(f"There is no file {path}.")
        >>> read(3)
        Traceback (most recent call last):
        ValueError: There is no file 3.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*_check_call(function, args, kwargs, names), **kwargs)

        return cast(_Function, call)

    return decorate


def checked_late(function: _Function) -> _Function:
    """Check the types of a function's arguments only after it has raised an error.

    For functions that run with every batch. If an argument has a wrong type, the error of
    `checked` replaces the error. All other errors are kept, and so is a TypeError that names an
    argument of the function and the received value.

    Args:
        function: Function to call.

    Returns:
        The function that checks after an error.

    Example:
        >>> @checked_late
        ... def first(values: list[int]) -> int:
        ...     return values[0]
        >>> first(3)
        Traceback (most recent call last):
        TypeError: first.values must be a list of whole numbers; received 3.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not (isinstance(error, TypeError) and _names_an_argument(function, args, error)):
                _check_call(function, args, kwargs)
            raise

    return cast(_Function, call)


def _check_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    unchecked: tuple[str, ...] = (),
) -> tuple[Any, ...]:
    """Return the converted positional arguments; converts `kwargs` in place."""
    rules, code = _rules_of(function), function.__code__
    subject = _subject_of(function, args)
    positional = list(args)
    for place, name in enumerate(code.co_varnames[: min(code.co_argcount, len(args))]):
        if name in rules and name not in unchecked:
            positional[place] = _keep(rules[name], f"{subject}.{name}", args[place])
    for name, value in kwargs.items():
        if name in rules and name not in unchecked:
            kwargs[name] = _keep(rules[name], f"{subject}.{name}", value)
    return tuple(positional)


def _subject_of(function: Callable[..., Any], args: Sequence[Any]) -> str:
    """Return the name of a function in errors, or of the class that an `__init__` makes."""
    owner = function.__qualname__.rpartition("<locals>.")[2]
    return type(args[0]).__name__ if args and owner.endswith(".__init__") else owner


def _names_an_argument(function: Callable[..., Any], args: Sequence[Any], error: Exception) -> bool:
    """Return True if an error begins with an argument of a function and has the received value."""
    name = re.split(r"[ \[:]", str(error), maxsplit=1)[0].removeprefix(
        f"{_subject_of(function, args)}."
    )
    return name in function.__code__.co_varnames and "received" in str(error)


def check_fields(owner: object) -> None:
    """Check the fields of a dataclass, by their annotations; for its `__post_init__`.

    Args:
        owner: The object. Fields are converted as `checked` converts arguments.

    Raises:
        TypeError: A field has another type than annotated.
        ValueError: A field is text that names no device or member.
    """
    for name, rule in _rules_of(cast(Any, type(owner))).items():
        value = getattr(owner, name)
        kept = _keep(rule, f"{type(owner).__name__}.{name}", value)
        if kept is not value:
            object.__setattr__(owner, name, kept)


class _Rule(NamedTuple):
    """Check of the values of an annotation, and its name in errors."""

    words: str
    check: Callable[[str, Any], Any]
    """Function of the subject and the value: returns the converted value, or raises."""


def _keep(rule: _Rule, subject: str, value: Any) -> Any:
    return value if isinstance(value, fx.Proxy) else rule.check(subject, value)


@functools.cache
def _rules_of(owner: Callable[..., Any]) -> dict[str, _Rule]:
    """Return the rules of a function's parameters, or of a dataclass's fields."""
    rules: dict[str, _Rule] = {}
    for place in reversed(inspect.getmro(owner)) if isinstance(owner, type) else [owner]:
        known = vars(sys.modules[place.__module__])
        if isinstance(place, type):
            names = tuple(getattr(place, "__dataclass_fields__", ()))
        else:  # without *args and **kwargs
            code = place.__code__
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name, annotation in inspect.get_annotations(cast(Any, place)).items():
            rule = _rule_of(_resolved(annotation, known))
            if rule is not None and name in names:
                rules[name] = rule
    return rules


def _resolved(annotation: Any, known: Mapping[str, Any]) -> Any:
    """Evaluate the text of an annotation; Any if its names exist for type checkers only."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, dict(known))
    except (NameError, TypeError):
        return Any


def _rule_of(annotation: Any) -> _Rule | None:
    """Return the rule of an annotation; None: anything."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, TypeVar):
        return _rule_of(annotation.__bound__) if annotation.__bound__ is not None else None
    if origin in (typing.Union, types.UnionType):
        return _rule_of_union(inner)
    if annotation is Any:
        return None
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if annotation is None or annotation is types.NoneType:
        return _rule_of_class(types.NoneType, "None")
    if origin is type or annotation is type:
        return _rule_of_type(inner[0] if inner else object)
    kind = origin or annotation
    if kind is tuple and Ellipsis not in inner:
        return _rule_of_tuple(inner)
    if kind in _LISTS:
        return _rule_of_list(kind, _rule_of(inner[0]) if inner else None)
    if kind in (dict, collections.abc.Mapping):
        return _rule_of_mapping(*(_rule_of(part) for part in inner or (Any, Any)))
    if kind is collections.abc.Callable:
        return _rule_if("a function", callable)
    if not isinstance(kind, type) or kind is object:
        return None
    if issubclass(kind, enum.Enum):
        return _Rule(f"a {kind.__name__}", lambda subject, value: choice(subject, value, kind))
    return _rule_of_class(kind)


def _check_path(subject: str, value: Any) -> Any:
    path_of(subject, value)
    return value


_LISTS = (
    list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable,
    collections.abc.Collection, collections.abc.Set,
)  # fmt: skip
_PLAIN: dict[Any, _Rule] = {
    int: _Rule("a whole number", lambda subject, value: whole(subject, value, least=None)),
    float: _Rule("a number", number),
    bool: _Rule("True or False", flag),
    torch.device: _Rule("a torch.device", device_of),
    pathlib.Path: _Rule("a path", _check_path),
}


def _rule_of_class(kind: type, words: str = "") -> _Rule:
    """Return the rule of a class, or of a protocol, which is checked by its names."""
    name = _name_of(kind)
    words = words or f"{'an' if name[0] in 'AEIO' or name.startswith('nn.') else 'a'} {name}"
    if getattr(kind, "_is_protocol", False):
        known = {**vars(kind), **inspect.get_annotations(kind)}
        members = [name for name in known if not name.startswith("_")]

        def check(subject: str, value: Any) -> Any:
            missing = [name for name in members if not hasattr(value, name)]
            if missing:
                wrong_type(subject, f"{words}, which has {', '.join(missing)}", value)
            return value

        return _Rule(words, check)
    return _rule_if(words, lambda value: isinstance(value, kind))


def _rule_if(words: str, accepts: Callable[[Any], bool]) -> _Rule:
    """Return the rule of values that a function accepts."""

    def check(subject: str, value: Any) -> Any:
        return value if accepts(value) else wrong_type(subject, words, value)

    return _Rule(words, check)


def _name_of(kind: type) -> str:
    known = {nn.Module: "nn.Module", nn.Parameter: "nn.Parameter", str: "text"}
    room = "torch." if kind.__module__.partition(".")[0] == "torch" else ""
    return known.get(kind, f"{room}{kind.__name__}")


_PLAIN[str] = _rule_of_class(str, "text")


def _rule_of_tuple(parts: Sequence[Any]) -> _Rule:
    """Return the rule of a tuple or list of fixed length."""
    rules = [_rule_of(part) for part in parts]
    words = f"a tuple of {len(rules)}"

    def check(subject: str, value: Any) -> Any:
        if not isinstance(value, tuple | list) or len(value) != len(rules):
            wrong_type(subject, words, value)
        for place, (rule, part) in enumerate(zip(rules, value, strict=True)):
            if rule is not None:
                _keep(rule, f"{subject}[{place}]", part)
        return value

    return _Rule(words, check)


def _rule_of_type(base: Any) -> _Rule | None:
    base = typing.get_origin(base) or base
    if not isinstance(base, type):
        return _rule_of_type(base.__bound__ or object) if isinstance(base, TypeVar) else None
    words = "a class" if base is object else f"a subclass of {_name_of(base)}"
    return _rule_if(words, lambda value: isinstance(value, type) and issubclass(value, base))


def _rule_of_union(parts: Sequence[Any]) -> _Rule | None:
    """Build the check for a union type."""
    rules = [_rule_of(part) for part in parts if part not in (types.NoneType, None)]
    if None in rules:
        return None
    for kind in (pathlib.Path, torch.device):  # with str: text that names one, not any text
        if kind in parts:
            of_text = (_PLAIN[str], _PLAIN[kind])
            rules = [_PLAIN[kind], *(rule for rule in rules if rule not in of_text)]
    is_optional = types.NoneType in parts
    known = cast(list[_Rule], rules)
    words = " or ".join([rule.words for rule in known] + ["None"] * is_optional)

    def check(subject: str, value: Any) -> Any:
        if value is None and is_optional:
            return None
        if len(known) == 1:
            return known[0].check(subject, value)
        if pathlib.Path in parts and isinstance(value, str | os.PathLike):
            return _check_path(subject, value)
        for rule in known:
            try:
                return rule.check(subject, value)
            except (TypeError, ValueError):
                continue
        return wrong_type(subject, words, value)

    return _Rule(words, check)


def _rule_of_list(kind: Any, one: _Rule | None) -> _Rule:
    words = f"a list of {_plural(one.words)}" if one is not None else "a list"
    once = (collections.abc.Iterable,)

    def check(subject: str, value: Any) -> Any:
        if isinstance(value, str) and one is _PLAIN[str]:
            names(subject, value)
        is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes)
        if is_list:
            is_list = not isinstance(value, Mapping) and (
                kind in once or not isinstance(value, torch.Tensor | Iterator)
            )
        if not is_list:
            wrong_type(subject, words, value)
        if not isinstance(value, collections.abc.Collection):
            return value  # to be read once
        if isinstance(value, torch.Tensor) and not value.dim():
            wrong_type(subject, words, value)
        kept = list(value)
        if one is not None:
            kept = [_keep(one, f"{subject}[{i}]", part) for i, part in enumerate(kept)]
        return kept if kind is list and not isinstance(value, list) else value

    return _Rule(words, check)


def _plural(words: str) -> str:
    known = {"text": "text", "a whole number": "whole numbers", "a number": "numbers"}
    singular = words.removeprefix("a ").removeprefix("an ")
    return known.get(words, singular if " " in singular else f"{singular}s")


def _rule_of_mapping(key: _Rule | None, one: _Rule | None) -> _Rule:
    words = f"a dict of {_plural(one.words)}" if one is not None else "a dict"

    def check(subject: str, value: Any) -> Any:
        if not isinstance(value, Mapping | nn.ModuleDict | nn.ParameterDict):
            wrong_type(subject, words, value)
        for name, part in value.items():
            if key is not None:
                key.check(f"Each key of {subject}", name)
            if one is not None:
                _keep(one, f"{subject}[{shown(name)}]", part)
        return value

    return _Rule(words, check)
