"""Calls of public functions with one wrong argument: each must be refused, in clear words.

`refused`: a value that means the same as the right one raises. `silent`: a value that cannot be
right is accepted. `unclear`: the error does not name the argument and the value, or is Python's
own, such as an AttributeError. `hung`: the call takes more than 30 seconds.
"""

from __future__ import annotations

import contextlib
import enum
import io
import logging
import os
import re
import signal
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import torch

import recsys
from recsys.distributed.checkpoint import CheckpointError
from recsys.distributed.planner.types import PlannerError
from tests.fuzz.argument_kinds import WRONG
from tests.fuzz.calls.call import Call
from tests.fuzz.calls.public import all_calls
from tests.ranks import RankPool

LIMIT_S = 30  # torch.compile is imported in one of the calls
CLEAR = (TypeError, ValueError, KeyError, IndexError, OSError, CheckpointError, PlannerError)
_HOME = str(Path(recsys.__file__).parent)


class _HungError(BaseException):
    """The call took too long."""


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """A folder, a random state and settings of the case's own, quiet, and a limit of time."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise _HungError

    home, threads = Path.cwd(), torch.get_num_threads()
    before = signal.signal(signal.SIGALRM, stop)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        os.chdir(folder)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        try:
            with contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            os.chdir(home)
            logging.disable(logging.NOTSET)
            torch.set_num_threads(threads)


def _shows(text: str, value: Any) -> bool:
    """Return True if a message shows a value, its type or one of its parts."""
    words = [repr(value)[:15], type(value).__name__]
    if isinstance(value, enum.Enum):
        words += [value.name, str(value.value)]
    elif isinstance(value, torch.Tensor | np.ndarray):
        words += [str(value.dtype), str(tuple(value.shape)), str(value.tolist())[:15], "a tensor"]
        words += [str(value.shape[-1]), "tensor("] if value.ndim else []
    elif isinstance(value, type):
        words.append(value.__name__)
    elif isinstance(value, float | np.number):
        words.append(f"{float(value):g}")
    elif isinstance(value, str | torch.dtype | torch.device | os.PathLike):
        words.append(str(value))
    elif isinstance(value, Mapping):
        parts = [*value, *value.values()]
        return any(word in text for word in words) or any(_shows(text, part) for part in parts)
    elif isinstance(value, list | tuple | set):
        shown = any(_shows(text, part) for part in value) or f"received {len(value)}" in text
        return (
            shown
            or any(word in text for word in words)
            or (not value and bool(re.search(r"\bno\b|none|\[\]", text)))
        )
    return any(word and word in text for word in words)


def _is_own(error: BaseException) -> bool:
    """Return True if the library raised an error itself, not torch or Python below it."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename.startswith(_HOME)


def _is_clear_refusal(call: Call, name: str, value: Any, error: Exception) -> bool:
    """Return True if an error reports that an argument's type is wrong."""
    text = str(error)
    if isinstance(error, TypeError) and f"argument '{name}'" in text:  # torch names it and its type
        return True
    words = [name, name.removesuffix("s"), *call.words.get(name, ())]
    is_named = any(re.search(rf"\b{re.escape(word)}\b", text) for word in words)
    is_of_class = re.search(r"takes an? .*; received", text)  # which names the expected type
    is_own = isinstance(error, CLEAR) and _is_own(error)
    if not _is_full(value) and re.search(r"at least|one .*or more|none|empty", text):
        return isinstance(error, CLEAR)
    return is_own and bool(is_named or is_of_class) and _shows(text, value)


def _is_full(value: Any) -> bool:
    """Return True if a value is not a container, or is one with elements."""
    return not isinstance(value, list | tuple | set | dict) or bool(value)


def _is_clear_misfit(call: Call, name: str, value: Any, error: Exception) -> bool:
    """Return True if an error reports that a value of the right type does not fit the others.

    Errors of torch about shapes and dtypes count, and so do errors of functions and batches that
    the caller gave.
    """
    if callable(value) or isinstance(value, Iterator) or isinstance(error, StopIteration):
        return True
    if isinstance(value, torch.Tensor) and isinstance(error, RuntimeError | IndexError):
        return True
    if "in loading state_dict" in str(error):  # as documented, and as in torch
        return True
    words = [*call.arguments, *call.name.split("."), "received", *call.words.get(name, ())]
    is_named = any(re.search(rf"\b{re.escape(word)}\b", str(error)) for word in words)
    return isinstance(error, CLEAR) and _is_own(error) and (is_named or _shows(str(error), value))


def complaint_about_call(call: Call, name: str, value: Any, is_alike: bool) -> str | None:
    """Return the error in a call whose argument has this value, or None."""
    kind = call.arguments[name]
    legal = True if is_alike else kind.is_legal(value)
    try:
        with _apart():
            call.run(**{name: value})
    except _HungError:
        return f"hung: more than {LIMIT_S} s"
    except Exception as error:
        text = str(error)
        shown = f"{type(error).__name__}: {text[:300]}"
        if is_alike:
            return f"refused: {shown}"
        if isinstance(error, OSError) and _shows(text, value):
            return None
        is_clear = _is_clear_refusal if legal is False else _is_clear_misfit
        return None if is_clear(call, name, value, error) else f"unclear: {shown}"
    return "silent" if legal is False else None


def complaint_about(pool: RankPool, seed: int) -> str | None:
    """See `tests.fuzz.kinds`."""
    rng = Random(seed)
    call = rng.choice(all_calls())
    name = rng.choice(list(call.arguments))
    with _apart():  # some make files
        alike = call.arguments[name].alike()
    place = rng.randrange(len(WRONG) + len(alike))
    is_alike = place >= len(WRONG)
    value = alike[place - len(WRONG)] if is_alike else list(WRONG.values())[place]()
    complaint = complaint_about_call(call, name, value, is_alike)
    if complaint is None:
        return None
    verdict, _, rest = complaint.partition(": ")
    return f"{verdict}: {call.name}({name}={str(value)[:60]!r}) {rest}"
