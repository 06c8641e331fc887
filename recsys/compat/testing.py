"""TorchRec's test helpers, for users' tests that import them."""

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
    """Return an unused port of this host."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
        return port


def is_asan() -> bool:
    """Return False: sanitizer builds are not detected."""
    return False


is_tsan = is_asan_or_tsan = is_asan


def skip_if_asan(func: _F) -> _F:
    """Return the function unchanged, because `is_asan` is False."""
    return func


skip_if_asan_class = skip_if_asan


def init_distributed_single_host(
    rank: int, world_size: int, backend: str, local_size: int | None = None
) -> dist.ProcessGroup:
    """Initialize the default process group on one host.

    The environment variables MASTER_ADDR and MASTER_PORT must be set. The function sets RANK,
    WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.

    Args:
        rank: Rank of this process.
        world_size: Number of processes.
        backend: "gloo" or "nccl".
        local_size: Ranks of a simulated node; all ranks if None.

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
    """Decorate a function to run with a new random seed in each call, and log the seed."""

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
    """Check that models have equal tensors under the same names.

    Args:
        model_1: First model.
        model_2: Second model.
        check_named_buffers: Whether to compare the buffers.
        check_named_parameters: Whether to compare the parameters.
        check_state_dict: Whether to compare the state dicts.

    Raises:
        AssertionError: The models differ.
    """
    chosen = {
        "named_buffers": check_named_buffers,
        "named_parameters": check_named_parameters,
        "state_dict": check_state_dict,
    }
    names, other = map(get_state_buffers_parameters, (model_1, model_2))
    for part in (part for part, is_checked in chosen.items() if is_checked):
        torch.testing.assert_close(dict(names[part]), dict(other[part]), rtol=0, atol=0)


def keyed_jagged_tensor_equals(
    kjt1: KeyedJaggedTensor | None,
    kjt2: KeyedJaggedTensor | None,
    is_pooled_features: bool = False,
) -> bool:
    """Return whether batches have the same keys, lengths, ids and weights.

    Args:
        kjt1: First batch, or None.
        kjt2: Second batch, or None. None equals only None.
        is_pooled_features: Whether to ignore the order of ids in a bag.
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
    """Test case that creates small files in the Criteo formats."""

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
    """Return whether a changed signature is backward compatible.

    Positional arguments must keep position, name, default and annotation. More may be added after
    them, unless the previous signature has `*args`. Keyword-only arguments may be reordered and
    added. The return annotation must stay.

    Args:
        previous_signature: Signature before the change.
        current_signature: Signature after the change.

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
        and all(parameter in after[_BY_KEYWORD] for parameter in before[_BY_KEYWORD])
    )


_BY_POSITION, _BY_KEYWORD = "by position", inspect.Parameter.KEYWORD_ONLY
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _by_kind(signature: inspect.Signature) -> dict[Any, list[inspect.Parameter]]:
    by_kind: dict[Any, list[inspect.Parameter]] = {_BY_POSITION: [], _BY_KEYWORD: []}
    for parameter in signature.parameters.values():
        is_named = parameter.kind is not _BY_KEYWORD and parameter.kind not in _ANY_NUMBER
        by_kind.setdefault(_BY_POSITION if is_named else parameter.kind, []).append(parameter)
    return by_kind
