"""Helpers that TorchRec has for tests, for clients' own tests that import them."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import os
import random
import socket
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from recsys.optim.keyed import KeyedOptimizer
from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor

_F = TypeVar("_F", bound=Callable[..., Any])


def get_free_port() -> int:
    """Return a port of this host that nobody listens on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
        return port


def is_asan() -> bool:
    """Return False: no build of a sanitizer is known here."""
    return False


is_tsan = is_asan_or_tsan = is_asan


def skip_if_asan(func: _F) -> _F:
    """Return the function: tests run, as `is_asan` is False."""
    return func


skip_if_asan_class = skip_if_asan


def init_distributed_single_host(
    rank: int, world_size: int, backend: str, local_size: int | None = None
) -> dist.ProcessGroup:
    """Join this process to others of this host, as MASTER_ADDR and MASTER_PORT say.

    Args:
        rank: of this process.
        world_size: number of processes.
        backend: "gloo" or "nccl".
        local_size: ranks of a node, where one host stands for several; all if None.

    Returns:
        The default process group.
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(local_size or world_size)
    os.environ["LOCAL_RANK"] = str(rank % (local_size or world_size))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    group: dist.ProcessGroup = dist.GroupMember.WORLD  # type: ignore[assignment]
    return group


def seed_and_log(wrapped_func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that draws other numbers each time; the log has the seed."""

    @functools.wraps(wrapped_func)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        seed = time.time_ns() % 2**32
        logging.getLogger(__name__).info("%s has the seed %s", wrapped_func, seed)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return wrapped_func(*args, **kwargs)

    return seeded


def get_state_buffers_parameters(model: nn.Module) -> dict[str, Any]:
    """Return the state dict, the named buffers and the named parameters of a model."""
    return {
        "named_buffers": model.named_buffers(),
        "named_parameters": model.named_parameters(),
        "state_dict": model.state_dict().items(),
    }


def assert_state_buffers_parameters_equal(
    model_1: nn.Module,
    model_2: nn.Module,
    check_named_buffers: bool = True,
    check_named_parameters: bool = True,
    check_state_dict: bool = True,
) -> None:
    """Assert that models have equal tensors under the same names.

    Args:
        model_1: one.
        model_2: the other.
        check_named_buffers: whether to compare the buffers.
        check_named_parameters: whether to compare the parameters.
        check_state_dict: whether to compare the state dicts.

    Raises:
        AssertionError: they differ.
    """
    chosen = {
        "named_buffers": check_named_buffers,
        "named_parameters": check_named_parameters,
        "state_dict": check_state_dict,
    }
    one, other = map(get_state_buffers_parameters, (model_1, model_2))
    for part in (part for part, is_checked in chosen.items() if is_checked):
        torch.testing.assert_close(dict(one[part]), dict(other[part]), rtol=0, atol=0)


def keyed_jagged_tensor_equals(
    kjt1: KeyedJaggedTensor | None,
    kjt2: KeyedJaggedTensor | None,
    is_pooled_features: bool = False,
) -> bool:
    """Return whether batches have the same keys, lengths, ids and weights.

    Args:
        kjt1: one, or None.
        kjt2: the other, or None.
        is_pooled_features: whether the order of ids in a bag means nothing.
    """
    if kjt1 is None or kjt2 is None:
        return kjt1 is kjt2
    return bool(_bags_of(kjt1, is_pooled_features) == _bags_of(kjt2, is_pooled_features))


def _bags_of(batch: KeyedJaggedTensor, is_sorted: bool) -> Any:
    validate_keyed_jagged_tensor(batch)
    weights = batch.weights_or_none()
    ids = batch.values().tolist()
    pairs = list(zip(ids, ids if weights is None else weights.tolist(), strict=True))
    offsets = batch.offsets().tolist()
    bags = [pairs[start:end] for start, end in itertools.pairwise(offsets)]
    shown = [sorted(bag) for bag in bags] if is_sorted else bags
    return list(batch.keys()), weights is None, shown


class DummyKeyedOptimizer(KeyedOptimizer):
    """A `KeyedOptimizer` whose step does nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


class CriteoTest(unittest.TestCase):
    """A test case that makes small files of Criteo's formats."""

    INT_FEATURE_COUNT: ClassVar[int] = 13
    CAT_FEATURE_COUNT: ClassVar[int] = 26
    LABEL_VAL_RANGE: ClassVar[tuple[int, int]] = (0, 1)
    INT_VAL_RANGE: ClassVar[tuple[int, int]] = (0, 100)
    CAT_VAL_RANGE: ClassVar[tuple[int, int]] = (0, 1000)

    @classmethod
    @contextmanager
    def _create_dataset_tsv(
        cls, num_rows: int = 10, train: bool = True, filename: str = "criteo"
    ) -> Iterator[str]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / filename
            path.write_text("".join(cls._line(train) for _ in range(num_rows)))
            yield str(path)

    @classmethod
    def _line(cls, train: bool) -> str:
        label = [str(random.randint(*cls.LABEL_VAL_RANGE))] if train else []
        dense = [str(random.randint(*cls.INT_VAL_RANGE)) for _ in range(cls.INT_FEATURE_COUNT)]
        ids = [f"{random.getrandbits(32):08x}" for _ in range(cls.CAT_FEATURE_COUNT)]
        return "\t".join([*label, *dense, *ids]) + "\n"

    @classmethod
    @contextmanager
    def _create_dataset_npys(
        cls,
        num_rows: int = 10,
        filename: str = "criteo",
        filenames: Sequence[str] | None = None,
        generate_dense: bool = True,
        generate_sparse: bool = True,
        generate_labels: bool = True,
        dense: np.ndarray | None = None,
        sparse: np.ndarray | None = None,
        labels: np.ndarray | None = None,
    ) -> Iterator[tuple[str, ...]]:
        low, high = cls.CAT_VAL_RANGE
        ids = np.random.randint(low, high + 1, (num_rows, cls.CAT_FEATURE_COUNT), dtype=np.int32)
        parts: Mapping[str, tuple[bool, Any]] = {
            "dense": (
                generate_dense,
                np.random.random((num_rows, cls.INT_FEATURE_COUNT)).astype(np.float32)
                if dense is None
                else dense,
            ),
            "sparse": (generate_sparse, ids if sparse is None else sparse),
            "labels": (
                generate_labels,
                np.random.randint(0, 2, (num_rows, 1), dtype=np.int32)
                if labels is None
                else labels,
            ),
        }
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for name in filenames or [filename]:
                for part, (is_made, array) in parts.items():
                    if is_made:
                        paths.append(str(Path(folder) / f"{name}_{part}.npy"))
                        np.save(paths[-1], array)
            yield tuple(paths)

    def _validate_sample(self, sample: Mapping[str, Any], train: bool = True) -> None:
        expected = self.INT_FEATURE_COUNT + self.CAT_FEATURE_COUNT + int(train)
        assert len(sample) == expected, f"expected {expected} values; received {len(sample)}"


def is_signature_compatible(
    previous_signature: inspect.Signature, current_signature: inspect.Signature
) -> bool:
    """Return whether a function still takes the arguments that it took, in the same way.

    Arguments by position stay where they are, with name, default and annotation; more may follow
    them, unless any number could. Arguments by keyword may come in any order, and more may be
    added. The annotation of the result stays.

    Args:
        previous_signature: as it was.
        current_signature: as it is.

    Example:
        >>> def before(a: int): ...
        >>> def after(a: int, b: int = 0): ...
        >>> is_signature_compatible(inspect.signature(before), inspect.signature(after))
        True
    """
    before, after = _by_kind(previous_signature), _by_kind(current_signature)
    positional = after[_BY_POSITION][: len(before[_BY_POSITION])]
    takes_any = inspect.Parameter.VAR_POSITIONAL in before
    return (
        previous_signature.return_annotation == current_signature.return_annotation
        and all(kind in after for kind in before if kind in _ANY_NUMBER)
        and before[_BY_POSITION] == (after[_BY_POSITION] if takes_any else positional)
        and all(one in after[_BY_KEYWORD] for one in before[_BY_KEYWORD])
    )


_BY_POSITION, _BY_KEYWORD = "by position", inspect.Parameter.KEYWORD_ONLY
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _by_kind(signature: inspect.Signature) -> dict[Any, list[inspect.Parameter]]:
    found: dict[Any, list[inspect.Parameter]] = {_BY_POSITION: [], _BY_KEYWORD: []}
    for parameter in signature.parameters.values():
        is_named = parameter.kind is not _BY_KEYWORD and parameter.kind not in _ANY_NUMBER
        found.setdefault(_BY_POSITION if is_named else parameter.kind, []).append(parameter)
    return found
