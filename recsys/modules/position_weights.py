"""Weights of ids by their position in a bag, for all features of a batch in one gather.

Shapes: `K` features of a batch, `M` bags, `N` ids, `P` positions of all features together.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple, NoReturn, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from recsys.base.checked import checked
from recsys.kernels.bounds import NO_LIMIT, AsyncChecks
from recsys.modules.tables.traced import is_proxy, record
from recsys.sparse import KeyedJaggedTensor

__all__ = ["PositionGather", "PositionWeights", "ScriptedPositions", "with_weights"]


@final
class PositionWeights(nn.ParameterDict):
    """One parameter per feature: a weight per position in a bag, initially 1.

    The order is kept, and a feature may have a method name of a dict, such as `items`.

    Args:
        max_feature_lengths: Maximum number of ids of a bag, by feature.
        device: Device of the weights; None: torch's default device.

    Raises:
        ValueError: A length is not positive.

    Example:
        >>> PositionWeights({"clicks": 3})["clicks"].tolist()
        [1.0, 1.0, 1.0]
    """

    @checked
    def __init__(
        self, max_feature_lengths: Mapping[str, int], device: torch.device | None = None
    ) -> None:
        bad = {name: length for name, length in max_feature_lengths.items() if length < 1}
        if bad:
            raise ValueError(
                f"A feature with position weights needs a maximum length of at least 1; received "
                f"{bad}. Remove the feature, or pass the length of its longest bag."
            )
        super().__init__(  # pairs, as it sorts the names of a dict
            (name, nn.Parameter(torch.ones(length, device=device)))
            for name, length in max_feature_lengths.items()
        )

    def __getitem__(self, key: str) -> nn.Parameter:
        return self._parameters[key]  # type: ignore[return-value]

    def __setitem__(self, key: str, value: nn.Parameter) -> None:
        # the base sets an attribute, which cannot have the name of a method
        self._keys[key] = None
        self._parameters[key] = value

    def reset_parameters(self) -> None:
        """Set every weight to 1."""
        for weight in self.parameters():
            nn.init.ones_(weight)

    def tensors(self) -> list[Tensor]:
        """Return the parameters, in order, faster than `values()` with 2 us per parameter."""
        return list(self._parameters.values())  # type: ignore[arg-type]


class _Route(NamedTuple):
    """Positions of the weights of a batch's features among all weights."""

    table_3K: Tensor
    """Position of the first weight, position of the last weight, maximum number of ids of a bag."""
    limits: list[int]
    """The maximum numbers on the host."""
    has_others: bool
    """True if a feature has no weights; its ids then read a 1 after all weights."""


@final
class PositionGather:
    """Gather of the weight of each id by its position in a bag; ids of other features get 1.

    A bag with more ids than its feature has weights is an error. On CUDA the host does not wait:
    the error is raised with a later batch or by `check()`, and the ids beyond the end get the last
    weight.

    Args:
        max_feature_lengths: Number of weights by feature.
        owner: Class of the caller, for messages.

    Example:
        >>> gather = PositionGather({"f": 2}, "test")
        >>> batch = KeyedJaggedTensor(["f"], torch.tensor([7, 8, 9]), lengths=torch.tensor([1, 2]))
        >>> gather([torch.tensor([0.5, 0.1])], batch)
        tensor([0.5000, 0.5000, 0.1000])
    """

    @checked
    def __init__(self, max_feature_lengths: Mapping[str, int], owner: str) -> None:
        self._lengths = dict(max_feature_lengths)
        self._owner = owner
        self._seen: tuple[list[str], torch.device] | None = None
        self._route: _Route
        self._late = AsyncChecks()

    def __reduce__(self) -> tuple[type[PositionGather], tuple[dict[str, int], str]]:
        """Copy and pickle without the state of earlier batches."""
        return PositionGather, (self._lengths, self._owner)

    def __call__(self, weights: Sequence[Tensor], features: KeyedJaggedTensor) -> Tensor:
        """Gather the weights of a batch.

        Args:
            weights: One 1-D tensor per feature of `max_feature_lengths`, in that order.
            features: The batch, on the same device; its own weights are ignored.

        Returns:
            [N], differentiable with respect to the weights.

        Raises:
            ValueError: A bag is too long, in this batch or (CUDA) an earlier batch; or the batch is
                on another device.
        """
        device = features.device()
        if weights and weights[0].device != device:
            raise ValueError(
                f"{self._owner} has its position weights on {weights[0].device}; received a batch "
                f"on {device}. Move one of them with .to()."
            )
        if torch.compiler.is_compiling():
            keys = features.keys()
            place_N = torch.ops.recsys.places_of_positions(
                keys,
                features.stride_per_key(),
                features.values(),
                features.lengths(),
                list(self._lengths),
                list(self._lengths.values()),
                self._owner,
            )
            has_others = any(key not in self._lengths for key in keys)
        else:
            place_N = self.places(features)
            has_others = self._route.has_others
        dtype = weights[0].dtype if weights else torch.float32
        ones = [torch.ones(1, dtype=dtype, device=device)] if has_others else []
        return torch.cat([*weights, *ones]).index_select(0, place_N)

    def weigh(self, features: KeyedJaggedTensor, weights: list[Tensor]) -> KeyedJaggedTensor:
        """Replace the weights of a batch; `torch.fx` records it as one node.

        Arguments and errors as `__call__`.
        """
        if is_proxy(features):
            return record(weigh, features, weights, list(self._lengths), self._owner)  # type: ignore[no-any-return]
        features = trimmed(features)
        return with_weights(features, self(weights, features))

    def places(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the position of each id's weight among all weights, followed by a 1.

        Args:
            features: The batch.

        Returns:
            int64 [N].

        Raises:
            ValueError: A bag is too long, in this batch or (CUDA) an earlier batch.
        """
        device = features.device()
        route = self._route_for(features.keys(), device)
        offsets_M1, lengths_M = features.offsets(), features.lengths()
        num_ids = features.values().shape[0]
        first_M, last_M, limit_M = _per_bag(route.table_3K, features)
        self._check_lengths(lengths_M > limit_M, features, route.limits)
        place_N = (first_M - offsets_M1[:-1]).repeat_interleave(lengths_M, output_size=num_ids)
        place_N += torch.arange(num_ids, device=device)
        if route.has_others or place_N.is_cuda:  # else all bags are valid
            ends_N = last_M.repeat_interleave(lengths_M, output_size=num_ids)
            place_N = torch.minimum(place_N, ends_N)
        return place_N

    def check(self) -> None:
        """Wait for the device and raise if a bag of an earlier batch was too long."""
        traced = _gather_of(tuple(self._lengths), tuple(self._lengths.values()), self._owner)
        for gather in (self, traced):
            gather._late.read_all()

    def _route_for(self, keys: list[str], device: torch.device) -> _Route:
        if self._seen is None or self._seen != (keys, device):
            places, end = {}, 0
            for name, length in self._lengths.items():
                places[name] = (end, end + length - 1, length)
                end += length
            rows = [places.get(key, (end, end, NO_LIMIT)) for key in keys]
            table_3K = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 3).T
            has_others = any(key not in places for key in keys)
            self._route = _Route(table_3K.contiguous(), [row[2] for row in rows], has_others)
            self._seen = list(keys), device
        return self._route

    def _check_lengths(
        self, too_long_M: Tensor, features: KeyedJaggedTensor, limits: list[int]
    ) -> None:
        complain = partial(self._complain, too_long_M, features, limits)
        if too_long_M.is_cuda:
            self._late.read_arrived()
            self._late.add(too_long_M, complain)
        elif bool(too_long_M.any()):
            complain()

    def _complain(
        self, too_long_M: Tensor, features: KeyedJaggedTensor, limits: list[int]
    ) -> NoReturn:
        bags = too_long_M.nonzero().flatten()
        bag = int(bags[0])
        length = int(features.lengths()[bag])
        ends = list(itertools.accumulate(features.stride_per_key()))
        index = bisect.bisect_right(ends, bag)
        bag -= ends[index] - features.stride_per_key()[index]
        key = features.keys()[index]
        where = f"bag {bag} of feature {key!r}" if key else f"bag {bag}"
        raise ValueError(
            f"{self._owner}: a bag must not have more ids than its feature has position weights, "
            f"{limits[index]}; received {length} ids in {where} ({bags.numel()} such in the "
            "batch). Shorten the bags, or increase the feature's maximum length."
        )


def _per_bag(table_3K: Tensor, features: KeyedJaggedTensor) -> tuple[Tensor, ...]:
    """Repeat the values of each feature for its bags."""
    if not features.variable_stride_per_key():
        return table_3K.repeat_interleave(features.stride(), dim=1).unbind()
    strides = features.stride_per_key()
    strides_K = torch.tensor(strides).to(table_3K.device, non_blocking=True)
    return table_3K.repeat_interleave(strides_K, dim=1, output_size=sum(strides)).unbind()


def with_weights(features: KeyedJaggedTensor, weights: Tensor) -> KeyedJaggedTensor:
    """Replace the weights of a batch.

    Args:
        features: The batch.
        weights: [N].

    Returns:
        The same ids in the same bags.

    Example:
        >>> batch = KeyedJaggedTensor(["f"], torch.tensor([7]), lengths=torch.tensor([1]))
        >>> with_weights(batch, torch.tensor([0.5])).weights()
        tensor([0.5000])
    """
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor.from_parts(
        features.keys(),
        features.values(),
        weights,
        features.lengths_or_none(),
        features.offsets_or_none(),
        stride=features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        length_per_key=features.length_per_key_or_none(),
        inverse_indices=features.inverse_indices_or_none(),
    )


def trimmed(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Drop values after the last bag; in a compiled graph, where sizes are unknown, keep them.

    Args:
        features: The batch.
    """
    return features if torch.compiler.is_compiling() else features.trim()


def weigh(
    features: KeyedJaggedTensor, weights: list[Tensor], names: list[str], owner: str
) -> KeyedJaggedTensor:
    """Set position weights of a batch in TorchScript, and as one node of a graph of `torch.fx`.

    Args:
        features: The batch.
        weights: [P] per name.
        names: The features with weights; ids of other features get 1.
        owner: Class of the caller, for messages.
    """
    sizes = [weight.numel() for weight in weights]
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        keys, values, lengths = features.keys(), features.values(), features.lengths()
        strides = [features.stride() for _ in keys]
        place_N = torch.ops.recsys.places_of_positions(
            keys, strides, values, lengths, names, sizes, owner
        )
        ones = torch.ones(1, dtype=weights[0].dtype, device=values.device)
        weights_N = torch.cat(weights + [ones]).index_select(0, place_N)  # noqa: RUF005
        return KeyedJaggedTensor(keys, values, weights_N, lengths)
    else:
        return _gather_of(tuple(names), tuple(sizes), owner).weigh(features, weights)


@final
class ScriptedPositions(nn.Module):
    """Position weights for TorchScript.

    Args:
        weights: Parameter [P] by feature.
        owner: Class of the caller, for messages.
        keeps_others: Keep features without weights in the batch.
    """

    @checked
    def __init__(
        self, weights: Mapping[str, nn.Parameter], owner: str, *, keeps_others: bool = True
    ) -> None:
        super().__init__()
        self.names = list(weights)
        self.weights = nn.ParameterList(weights.values())
        self.owner = owner
        self.keeps_others = keeps_others

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Set the weights of a batch with one batch size for all features."""
        if not self.keeps_others:
            known: list[int] = []
            for i, key in enumerate(features.keys()):
                if key in self.names:
                    known.append(i)
            features = features.permute(known)
        weights: list[Tensor] = []
        for weight in self.weights:
            weights.append(weight)
        return weigh(features, weights, self.names, self.owner)


# -- the operation that computes positions, for compilation and export -----------------------------

_LIBRARY = torch.library.Library("recsys", "FRAGMENT")
_LIBRARY.define(
    "places_of_positions(str[] keys, SymInt[] strides, Tensor values, Tensor lengths, "
    "str[] names, int[] sizes, str owner) -> Tensor"
)


@cache
def _gather_of(names: tuple[str, ...], sizes: tuple[int, ...], owner: str) -> PositionGather:
    return PositionGather(dict(zip(names, sizes, strict=True)), owner)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _places(
    keys: list[str],
    strides: list[int],
    values: Tensor,
    lengths: Tensor,
    names: list[str],
    sizes: list[int],
    owner: str,
) -> Tensor:
    ranks = [[stride] for stride in strides] if len({*strides}) > 1 else None
    batch = KeyedJaggedTensor.from_parts(
        keys, values, None, lengths, stride=max(strides), stride_per_key_per_rank=ranks
    )
    place_N = _gather_of(tuple(names), tuple(sizes), owner).places(batch.trim())
    return functional.pad(
        place_N, (0, values.shape[0] - place_N.shape[0])
    )  # ids after the last bag


def _shape_of_places(keys: list[str], strides: list[int], values: Tensor, *rest: object) -> Tensor:
    return values.new_empty(values.shape[0], dtype=torch.int64)


_LIBRARY.impl("places_of_positions", _places, "CompositeExplicitAutograd")
torch.library.register_fake("recsys::places_of_positions", _shape_of_places, lib=_LIBRARY)
