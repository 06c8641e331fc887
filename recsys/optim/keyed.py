"""Optimizers with a state dict by parameter name, which any sharding plan can load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recsys.base.arguments import finite, flag, shown
from recsys.base.checked import checked, checked_late
from recsys.optim.nested_state import (
    check_same_keys,
    check_state,
    copy_into,
    live_state,
    loaded_state,
    reset_steps,
)
from recsys.optim.specs import may_evaluate_again, optimizer_kind
from recsys.optim.table_gradients import TableGradients


class KeyedOptimizer(Optimizer):
    """Optimizer with a state dict by parameter name.

    Names, unlike the positions in torch.optim, do not depend on the number of ranks or the order of
    the parameters.

    Args:
        params: Parameters by name. A parameter may be any tensor, sharded or not.
        state: State by parameter, as in `torch.optim`: tensors or numbers by name, or dictionaries,
            lists and tuples of them.
        param_groups: The groups, as in `torch.optim`.

    Raises:
        ValueError: If a group contains a parameter that is not in `params`.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> sgd = torch.optim.SGD([weight], lr=0.1)
        >>> KeyedOptimizer({"weight": weight}, sgd.state, sgd.param_groups).state_dict()["state"]
        {}
    """

    @checked
    def __init__(
        self,
        params: Mapping[str, Tensor],
        state: Mapping[Any, Any],
        param_groups: Collection[dict[str, Any]],
    ) -> None:
        # Optimizer.__init__ would copy the state, which another object owns
        self.__setstate__({"defaults": {}})  # creates the hooks
        self.params = params
        self.state = state  # type: ignore[assignment]
        self.param_groups = list(param_groups)
        self._saves_param_groups = False
        named = {id(param) for param in params.values()}
        for index, group in enumerate(self.param_groups):
            unnamed = sum(id(param) not in named for param in group["params"])
            if unnamed:
                raise ValueError(
                    f"params must name every parameter of param_groups[{index}]; {unnamed} of "
                    f"{len(group['params'])} are not in params."
                )

    def save_param_groups(self, save: bool) -> None:
        """Set whether `state_dict()` contains the parameter groups, such as learning rates."""
        self._saves_param_groups = flag("save_param_groups: save", save)

    @checked
    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Create the state of the first step, without changing a parameter.

        Checkpoints are loaded in place, so the state must exist before.

        Args:
            sparse_grad_parameter_names: Parameters with sparse gradients.
        """
        sparse = sparse_grad_parameter_names or set()
        before = {name: param.grad for name, param in self.params.items()}
        fresh = {n: p for n, p in self.params.items() if p.requires_grad and p not in self.state}
        for name, param in self.params.items():
            if name not in fresh:
                param.grad = None  # keep an existing state
            elif name in sparse:
                param.grad = torch.zeros_like(param, layout=torch.sparse_coo)
            else:
                param.grad = torch.zeros_like(param)
        # a zero gradient without decay and learning rate changes neither parameters nor state
        stilled = [
            (group, key, group[key])
            for group in self.param_groups
            for key in ("lr", "weight_decay")
            if key in group and not isinstance(group[key], Tensor)
        ]
        for group, key, _ in stilled:
            group[key] = 0.0
        with torch.no_grad():
            values_before = {name: param.clone() for name, param in fresh.items()}
            self.step(closure=lambda: 0.0)
            for name, value in values_before.items():
                fresh[name].copy_(value)
        for group, key, value in stilled:
            group[key] = value
        for name, param in self.params.items():
            param.grad = before[name]
        for param in fresh.values():
            reset_steps(self.state.get(param, {}))

    def state_dict(self) -> dict[str, Any]:
        """Return `{"state": {name: {state name: value}}}`, and `"param_groups"` if enabled.

        Containers are copies; tensors are not.
        """
        return self._with_param_groups(
            {
                name: live_state(self.state[param])
                for name, param in self.params.items()
                if param in self.state
            }
        )

    def _with_param_groups(self, state: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {"state": state}
        if self._saves_param_groups:
            names = {id(param): name for name, param in self.params.items()}
            result["param_groups"] = [
                {**group, "params": sorted(names[id(param)] for param in group["params"])}
                for group in self.param_groups
            ]
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a state dict into the state of this optimizer, in place.

        Args:
            state_dict: The result of `state_dict`.

        Raises:
            KeyError: If parameters or states are missing or unexpected. Nested states are named by
                their paths.
            ValueError: If a shape differs, or the parameter groups do not match.
            TypeError: If `state_dict` is not a state dict, or a value is not a tensor.
        """
        loaded, current = loaded_state(state_dict), self.state_dict()["state"]
        check_same_keys("parameters", current, loaded)
        for name, values in current.items():
            check_state(name, values, loaded[name])
        if "param_groups" in state_dict:  # before the state, from which a warm-up sets its rate
            self._load_param_groups(state_dict["param_groups"])
        self._load_state(loaded)

    @torch.no_grad()
    def _load_state(self, loaded: Mapping[str, Any]) -> None:
        for name, values in loaded.items():
            copy_into(self.state[self.params[name]], values)
        self.post_load_state_dict()

    def _load_param_groups(self, groups: list[dict[str, Any]]) -> None:
        names = {id(param): name for name, param in self.params.items()}
        own_groups = {
            tuple(sorted(names[id(param)] for param in group["params"])): group
            for group in self.param_groups
        }
        keys = [tuple(sorted(group["params"])) for group in groups]
        for key in keys:
            if key not in own_groups:
                raise ValueError(
                    "The loaded state must have the parameter groups of the optimizer, "
                    f"{[list(k) for k in own_groups]}; received {list(key)}."
                )
        for key, group in zip(keys, groups, strict=True):
            for option, value in group.items():
                if option != "params":
                    own_groups[key][option] = value

    def post_load_state_dict(self) -> None:
        """Update the optimizer after a load; for subclasses."""

    def optimizer_kinds(self) -> dict[str, str]:
        """Return the kind of optimizer of each parameter, such as `adam`; for subclasses.

        Different kinds may have states of the same name but another meaning.
        """
        return dict.fromkeys(self.params, type(self).__qualname__)

    def _needs_closure(self) -> bool:
        return may_evaluate_again(self)

    def table_gradients(self) -> list[TableGradients]:
        """Return the gradients outside of `.grad`, for clipping.

        Raises:
            ValueError: If tables have fused updates, which keep no gradient.
        """
        return []

    def add_param_group(self, param_group: Any) -> None:
        """Raise an error: the parameters of a keyed optimizer are fixed.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "The parameters of a KeyedOptimizer are fixed. Create another optimizer and join both "
            "with CombinedOptimizer."
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


@checked
def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups of an optimizer.

    It applies to all members of a `CombinedOptimizer`. Tables that are updated in backward use the
    rate from the next backward pass on. Schedulers of torch work, too, and keep the ratios between
    groups.

    Args:
        optimizer: The optimizer.
        lr: The learning rate, at least 0.

    Raises:
        TypeError: If `lr` is not a number.
        ValueError: If `lr` is negative, infinite or NaN.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> set_learning_rate(optimizer, 0.5)
        >>> optimizer.param_groups[0]["lr"]
        0.5
    """
    rate = finite("lr", lr, least=0)
    for group in optimizer.param_groups:
        group["lr"] = rate


class CombinedOptimizer(KeyedOptimizer):
    """Several keyed optimizers that step, save and load as one.

    Args:
        optims: The optimizers, or pairs `(prefix, optimizer)`, which add `prefix.` to the names.

    Raises:
        ValueError: If two optimizers have the same parameter name or state name.

    Example:
        >>> a, b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
        >>> make = lambda params: torch.optim.SGD(params, lr=0.1)
        >>> both = CombinedOptimizer(
        ...     [
        ...         KeyedOptimizerWrapper({"a": a}, make),
        ...         ("b", KeyedOptimizerWrapper({"w": b}, make)),
        ...     ]
        ... )
        >>> sorted(both.params)
        ['a', 'b.w']
    """

    @checked
    def __init__(self, optims: Iterable[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self._optims = [optim if isinstance(optim, tuple) else ("", optim) for optim in optims]
        taken: set[str] = set()
        for prefix, optim in self._optims:
            # state dicts may have more names, such as the progress of a warm-up
            for name in {**optim.params, **_state_of(optim)}:
                key = self.prepend_opt_key(name, prefix)
                if key in taken:
                    raise ValueError(
                        f"CombinedOptimizer needs distinct parameter names; {key!r} appears twice. "
                        "Add a prefix to one of the optimizers: (prefix, optimizer)."
                    )
                taken.add(key)
        groups = [group for _, optim in self._optims for group in optim.param_groups]
        params = _ChainedParams(self._optims)
        super().__init__(params, _ChainedState([optim for _, optim in self._optims]), groups)

    @staticmethod
    @checked
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """Return `opt_key.name`, or `name` if the key is empty."""
        return f"{opt_key}.{name}" if opt_key else name

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """Prefixes and optimizers."""
        return self._optims

    def __repr__(self) -> str:
        return "\n".join(
            f"{prefix}: {optim!r}" if prefix else repr(optim) for prefix, optim in self._optims
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all optimizers."""
        for _, optim in self._optims:
            optim.zero_grad(set_to_none=set_to_none)

    @checked_late
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all optimizers, in their order.

        Args:
            closure: Function that computes the gradients and returns the loss. Consecutive
                optimizers share one evaluation. An optimizer that evaluates the closure again, such
                as LBFGS, starts with an evaluation of its own. Each evaluation updates the tables
                whose optimizer updates them in backward.

        Returns:
            The loss of the first evaluation.
        """
        losses, is_shared = [], False
        for _, optim in self._optims:
            if closure is None or (is_shared and not optim._needs_closure()):
                optim.step()
            else:
                losses.append(optim.step(closure))
                is_shared = not optim._needs_closure()
        return losses[0] if losses else None

    def _needs_closure(self) -> bool:
        return any(optim._needs_closure() for _, optim in self._optims)

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Create the state of each optimizer."""
        sparse = sparse_grad_parameter_names or set()
        for prefix, optim in self._optims:
            sparse_names = {
                name for name in optim.params if self.prepend_opt_key(name, prefix) in sparse
            }
            optim.init_state(sparse_names)

    def table_gradients(self) -> list[TableGradients]:
        """Return the gradients outside of `.grad` of all optimizers."""
        return [held for _, optim in self._optims for held in optim.table_gradients()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state dicts of all optimizers, with their prefixes."""
        return self._with_param_groups(
            {
                self.prepend_opt_key(name, prefix): values
                for prefix, optim in self._optims
                for name, values in _state_of(optim).items()
            }
        )

    def _load_state(self, loaded: Mapping[str, Any]) -> None:
        for prefix, optim in self._optims:
            names = {name: self.prepend_opt_key(name, prefix) for name in _state_of(optim)}
            optim.load_state_dict(
                {"state": {parameter: loaded[key] for parameter, key in names.items()}}
            )

    def post_load_state_dict(self) -> None:
        """Call `post_load_state_dict` of all optimizers."""
        for _, optim in self._optims:
            optim.post_load_state_dict()

    def optimizer_kinds(self) -> dict[str, str]:
        """Return the kinds of all optimizers, with their prefixes."""
        return {
            self.prepend_opt_key(name, prefix): kind
            for prefix, optim in self._optims
            for name, kind in optim.optimizer_kinds().items()
        }

    def save_param_groups(self, save: bool) -> None:
        """Set whether state dicts contain the parameter groups."""
        super().save_param_groups(save)
        for _, optim in self._optims:
            optim.save_param_groups(save)


def _state_of(optim: KeyedOptimizer) -> dict[str, Any]:
    state: dict[str, Any] = optim.state_dict()["state"]
    return state


class _ChainedParams(Mapping[str, Tensor]):
    """Live view of the parameters of several optimizers, by prefixed name."""

    def __init__(self, optims: list[tuple[str, KeyedOptimizer]]) -> None:
        self._owners = {
            CombinedOptimizer.prepend_opt_key(name, prefix): (optim, name)
            for prefix, optim in optims
            for name in optim.params
        }

    def __getitem__(self, key: str) -> Tensor:
        optim, name = self._owners[key]
        return optim.params[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)


class _ChainedState(Mapping[Any, Any]):
    """Live view of the states of several optimizers."""

    def __init__(self, optims: list[KeyedOptimizer]) -> None:
        self._optims = optims

    def __getitem__(self, param: Any) -> Any:
        for optim in self._optims:
            if param in optim.state:
                return optim.state[param]
        raise KeyError(param)

    def __iter__(self) -> Any:
        return (param for optim in self._optims for param in optim.state)

    def __len__(self) -> int:
        return sum(len(optim.state) for optim in self._optims)


class KeyedOptimizerWrapper(KeyedOptimizer):
    """Wrapper that adds a state dict by parameter name to any `torch.optim` optimizer.

    Args:
        params: Parameters by name.
        optim_factory: Function that builds the optimizer from the list of parameters.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> optimizer = KeyedOptimizerWrapper(
        ...     dict(layer.named_parameters()), lambda params: torch.optim.Adam(params, lr=0.01)
        ... )
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state_dict()["state"])
        ['bias', 'weight']
    """

    @checked
    def __init__(
        self, params: Mapping[str, Tensor], optim_factory: Callable[[list[Tensor]], Optimizer]
    ) -> None:
        try:
            self._optimizer = optim_factory(list(params.values()))
        except TypeError as error:
            raise TypeError(
                "KeyedOptimizerWrapper.optim_factory must be a function of a list of parameters; "
                f"received {shown(optim_factory)}, which raised: {error}"
            ) from error
        super().__init__(params, self._optimizer.state, self._optimizer.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        flag(f"{type(self).__name__}.zero_grad: set_to_none", set_to_none)
        self._optimizer.zero_grad(set_to_none=set_to_none)

    @checked_late
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the wrapped optimizer."""
        return self._optimizer.step(closure)

    def _needs_closure(self) -> bool:
        return may_evaluate_again(self._optimizer)

    def optimizer_kinds(self) -> dict[str, str]:
        """Return the kind of the wrapped optimizer for each parameter."""
        return dict.fromkeys(self.params, optimizer_kind(type(self._optimizer)))


class OptimizerWrapper(CombinedOptimizer):
    """Base of wrappers of a keyed optimizer, such as warm-up and clipping.

    Args:
        optimizer: The optimizer to wrap, with its parameters, state and groups.
    """

    @checked
    def __init__(self, optimizer: KeyedOptimizer) -> None:
        self._optimizer = optimizer
        super().__init__([optimizer])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the wrapped optimizer."""
        return self._optimizer.step(closure)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of the wrapped optimizer; subclasses may add to it."""
        self._optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"
