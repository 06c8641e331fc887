"""Checks of arguments: each function returns the converted value or raises an error."""

from __future__ import annotations

import enum
import math
import os
import re
from collections import Counter
from collections.abc import Iterable
from operator import index
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import fx

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # also of a Path, which joins the slashes

_Choice = TypeVar("_Choice", bound=enum.Enum)


def whole(subject: str, value: object, least: int | None = 1, most: int | None = None) -> int:
    """Return a whole number, given as an int or one of NumPy's integers.

    Args:
        subject: Name of the value in errors.
        value: Value to check.
        least: The smallest allowed; None: any.
        most: The largest allowed; None: any.

    Raises:
        TypeError: The value is not a whole number, such as True or 10.0.
        ValueError: It is too small or too large.

    Example:
        >>> whole("rows", 10)
        10
    """
    if isinstance(value, bool):
        wrong_type(subject, "a whole number", value)
    try:
        number = index(value)  # type: ignore[arg-type]  # raises for other values
    except TypeError:
        wrong_type(subject, "a whole number", value)
    if least is not None and number < least:
        rule = {0: "not be negative", 1: "be positive"}.get(least, f"be at least {least}")
        raise ValueError(f"{subject} must {rule}; received {shown(number)}.")
    if most is not None and number > most:
        raise ValueError(f"{subject} must be at most {most}; received {shown(number)}.")
    return number


def finite(
    subject: str, value: object, least: float | None = None, below: float | None = None
) -> float:
    """Return a number that is finite, given as a float, an int or a tensor of one value.

    Args:
        subject: Name of the value in errors.
        value: Value to check.
        least: The smallest allowed; None: any.
        below: Exclusive upper limit; None: any.

    Raises:
        TypeError: The value is not a number, such as True or "0.1".
        ValueError: It is infinite, NaN, or out of the range.

    Example:
        >>> finite("rate", 1)
        1.0
    """
    number(subject, value)
    result = float(value)  # type: ignore[arg-type]
    rules = ["finite"]
    rules += [] if least is None else [f">= {least:g}"]
    rules += [] if below is None else [f"< {below:g}"]
    low, high = least is not None and result < least, below is not None and result >= below
    if low or high or not math.isfinite(result):
        raise ValueError(f"{subject} must be {' and '.join(rules)}; received {value}.")
    return result


_Number = TypeVar("_Number")


def number(subject: str, value: _Number) -> _Number:
    """Return a number as it is: a float, an int or a tensor of one value, infinite or not.

    Args:
        subject: Name of the value in errors.
        value: Value to check.

    Raises:
        TypeError: The value is not a number, such as True or "0.1".

    Example:
        >>> number("rate", 1)
        1
    """
    is_flag = isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")  # NumPy's too
    if is_flag or isinstance(value, str) or not hasattr(value, "__float__"):
        wrong_type(subject, "a number", value)
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):  # such as a tensor of several values
        wrong_type(subject, "a number", value)
    return value


def flag(subject: str, value: object) -> bool:
    """Return a bool, given as a bool of Python or NumPy, or as 0 or 1.

    Args:
        subject: Name of the value in errors.
        value: Value to check.

    Raises:
        TypeError: The value is not a bool, such as "no" or None.

    Example:
        >>> flag("is_weighted", True)
        True
    """
    is_number = isinstance(value, int) and value in (0, 1)
    if not is_number and type(value).__name__ not in ("bool_", "bool"):  # NumPy's
        wrong_type(subject, "True or False", value)
    return bool(value)


_Kind = TypeVar("_Kind")


def instance(subject: str, value: object, kind: type[_Kind], rule: str = "") -> _Kind:
    """Return an object of a class.

    Args:
        subject: Name of the value in errors.
        value: Value to check.
        kind: The class.
        rule: Name of such an object in errors.

    Raises:
        TypeError: It is an object of another class.

    Example:
        >>> instance("name", "user", str)
        'user'
    """
    if not isinstance(value, kind):
        wrong_type(subject, rule or f"a {kind.__name__}", value)
    return value


def check_input(subject: str, value: object, kind: type) -> None:
    """Check an argument of a module's forward; proxies of `torch.fx` pass.

    Args:
        subject: Name of the value in errors.
        value: Value to check.
        kind: The class.

    Raises:
        TypeError: It is an object of another class.

    Example:
        >>> check_input("MLP.input", torch.ones(2), torch.Tensor)
    """
    if not isinstance(value, kind | fx.Proxy):
        wrong_type(subject, f"a {'tensor' if kind is torch.Tensor else kind.__name__}", value)


def device_of(subject: str, value: object) -> torch.device:
    """Return a device, given as a `torch.device` or by its name.

    Args:
        subject: Name of the value in errors.
        value: Such as `torch.device("cpu")` or `"cuda:1"`.

    Raises:
        TypeError: It is neither a device nor text.
        ValueError: There is no such device.

    Example:
        >>> device_of("device", "cpu")
        device(type='cpu')
    """
    if isinstance(value, torch.device):
        return value
    if not isinstance(value, str):
        wrong_type(subject, 'a torch.device, such as torch.device("cpu")', value)
    try:
        return torch.device(value)
    except RuntimeError:
        raise ValueError(
            f"{subject} must name a device, such as 'cpu' or 'cuda:0'; received {value!r}."
        ) from None


def choice(subject: str, value: object, choices: Iterable[_Choice]) -> _Choice:
    """Return a member of an enum, given as a member, its value, or its name in any case.

    A member of another library's enum counts by its name.

    Args:
        subject: Name of the value in errors.
        value: Value to check.
        choices: The enum, or some of its members.

    Raises:
        TypeError: It is neither a member nor text.
        ValueError: There is no such member.

    Example:
        >>> from recsys.kernels.types import PoolingType
        >>> choice("pooling", "mean", PoolingType).name
        'MEAN'
    """
    text = value.name if isinstance(value, enum.Enum) else value
    for member in choices:
        if value is member:
            return member
        if isinstance(text, str) and (text == member.value or text.upper() == member.name):
            return member
    listed = f"one of {', '.join(str(member.value) for member in choices)}"
    if not isinstance(text, str):
        wrong_type(subject, listed, value)
    raise ValueError(f"{subject} must be {listed}; received {shown(value)}.")


def names(subject: str, value: object) -> list[str]:
    """Return a list of texts, from any iterable of them.

    Args:
        subject: Name of the value in errors.
        value: Such as a list, a tuple or a generator.

    Raises:
        TypeError: The value is one text, or is not an iterable of texts.

    Example:
        >>> names("features", ("user", "film"))
        ['user', 'film']
    """
    if isinstance(value, str):
        raise TypeError(f"{subject} must be a list of text; received {value!r}. Write [{value!r}].")
    listed = _listed(value)
    if listed is None or not all(isinstance(name, str) for name in listed):
        wrong_type(subject, "a list of text", value if listed is None else listed)
    return listed


def whole_list(subject: str, value: object, length: int | None = None) -> list[int]:
    """Return a list of whole numbers from 0 on.

    Args:
        subject: Name of the value in errors.
        value: Such as a list, a tuple or a range.
        length: Required number of elements; None: any.

    Raises:
        TypeError: The value is not an iterable of whole numbers.
        ValueError: A number is negative, or there are too many or too few.

    Example:
        >>> whole_list("ranks", range(3))
        [0, 1, 2]
    """
    listed = _listed(value)
    if listed is None:
        wrong_type(subject, "a list of whole numbers", value)
    numbers = listed
    if not all(type(number) is int and number >= 0 for number in listed):  # convert or raise
        numbers = [whole(f"{subject}[{i}]", number, least=0) for i, number in enumerate(listed)]
    if length is not None and len(numbers) != length:
        raise ValueError(f"{subject} must have {length} numbers; received {shown(numbers)}.")
    return numbers


def _listed(value: object) -> list[Any] | None:
    """Return the elements of an iterable; None for text and other values."""
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes)
    if not is_list or (isinstance(value, torch.Tensor) and not value.dim()):
        return None
    return list(value)  # type: ignore[call-overload, no-any-return]


def path_of(subject: str, value: object) -> Path:
    """Return a local path, given as text or as any `os.PathLike`.

    Args:
        subject: Name of the value in errors.
        value: Value to check.

    Raises:
        TypeError: It is not a path.
        ValueError: It is empty, or the address of another storage.

    Example:
        >>> path_of("path", "runs/film").name
        'film'
    """
    if not isinstance(value, str | os.PathLike):
        wrong_type(subject, "a path, as text or pathlib.Path", value)
    text = os.fsdecode(value)
    if not text:
        raise ValueError(f"{subject} must not be empty; received {value!r}.")
    if _ADDRESS.match(text):
        raise ValueError(
            f"{subject} must be a local path; received the address {text!r}. Use a local or "
            "mounted folder, and copy its files by fsspec or by the command of the storage."
        )
    return Path(value)


def writable_folder(subject: str, value: object) -> Path:
    """Return the path of a folder that can be written to, or created; creates nothing.

    Args:
        subject: Name of the value in errors.
        value: Text or an `os.PathLike`.

    Raises:
        TypeError: It is not a path.
        ValueError: It is empty.
        OSError: The path, or its nearest existing parent, is not a folder or cannot be written to.

    Example:
        >>> writable_folder("folder", "/dev/null/saved")
        Traceback (most recent call last):
        NotADirectoryError: folder must be a folder that can be written to; received ...
    """
    folder = path_of(subject, value)
    nearest = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    rule = f"{subject} must be a folder that can be written to; received {str(folder)!r}"
    if not nearest.is_dir():
        raise NotADirectoryError(f"{rule}, and {nearest} is not a folder. Choose another one.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{rule}, and {nearest} is read-only for this process. Choose another one, or change "
            "its permissions."
        )
    return folder


def setting(variable: str, least: int = 1) -> int | None:
    """Return the whole number in an environment variable; None if it is not set.

    Raises:
        ValueError: The variable is not a whole number, or is too small.
    """
    text = os.environ.get(variable)
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        raise ValueError(
            f"The environment variable {variable} must be a whole number; received {text!r}."
        ) from None
    return whole(f"The environment variable {variable}", number, least)


def repeated(values: Iterable[str]) -> list[str]:
    """Return the values that occur more than once, sorted.

    Example:
        >>> repeated(["b", "a", "b"])
        ['b']
    """
    return sorted(value for value, times in Counter(values).items() if times > 1)


class MissingKeyError(KeyError):
    """A KeyError with a message. Python prints a KeyError as the repr of its key, with quotes.

    Example:
        >>> print(MissingKeyError("The batch lacks the feature film."))
        The batch lacks the feature film.
    """

    def __str__(self) -> str:
        return str(self.args[0])


def wrong_type(subject: str, rule: str, value: object) -> NoReturn:
    """Raise the TypeError of a value of another type."""
    raise TypeError(f"{subject} must be {rule}; received {shown(value)}.")


def shown(value: object, most: int = 60) -> str:
    """Return the text of a value for a message, shortened to `most` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
