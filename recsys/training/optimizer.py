"""All optimizers of a model as one."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from recsys.base.arguments import finite, wrong_type
from recsys.distributed.ranks.comm import gather_objects
from recsys.distributed.ranks.env import ShardingEnv
from recsys.optim import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    in_backward_optimizer_filter,
)


def whole_optimizer(
    model: nn.Module, optimizer: Optimizer, clip_norm: float | None = None
) -> KeyedOptimizer:
    """Return one optimizer of a model, with state by the names of parameters.

    A torch optimizer is joined with the `fused_optimizer` of the model, if it has one.

    Args:
        model: The model, sharded or not.
        optimizer: A `KeyedOptimizer`, which is complete; or a torch optimizer.
        clip_norm: Largest norm of all gradients together; None for no clipping.

    Raises:
        TypeError: `optimizer` is not an optimizer, or `clip_norm` not a number.
        ValueError: A torch optimizer has parameters of another model or of fused tables;
            `clip_norm` is negative; or clipped tables are fused.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = whole_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> sorted(optimizer.params)
        ['bias', 'weight']
    """
    keyed = optimizer if isinstance(optimizer, KeyedOptimizer) else _joined(model, optimizer)
    if clip_norm is None:
        return keyed
    limit = finite("Trainer.clip_norm", clip_norm, least=0)
    keyed.table_gradients()  # raises for fused tables
    return GradientClippingOptimizer(
        keyed, GradientClipping.NORM, limit, enable_global_grad_clip=True
    )


def _joined(model: nn.Module, optimizer: Optimizer) -> KeyedOptimizer:
    if not isinstance(optimizer, Optimizer):
        wrong_type("Trainer.optimizer", "a KeyedOptimizer or another torch optimizer", optimizer)
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = {name: p for name, p in model.named_parameters() if id(p) in owned}
    if len(named) != len(owned):
        raise ValueError(
            "Trainer.optimizer must have parameters of the model only; received "
            f"{len(owned) - len(named)} others. Create it after sharding, from "
            "model.named_parameters()."
        )
    dense = KeyedOptimizerWrapper(named, lambda _: optimizer)
    fused = getattr(model, "fused_optimizer", None)
    if not isinstance(fused, KeyedOptimizer):
        return dense
    if both := sorted(fused.params.keys() & named.keys()):
        raise ValueError(
            "Trainer.optimizer must leave out tables that are updated in backward; received "
            f"{both[:3]}. Use in_backward_optimizer_filter(model.named_parameters())."
        )
    return CombinedOptimizer([fused, dense])


def check_all_are_updated(model: nn.Module, optimizer: KeyedOptimizer, env: ShardingEnv) -> None:
    """Check that each trainable parameter is updated by the optimizer or in backward.

    Every rank calls it; a rank knows the parameters of its own shards.

    Args:
        model: The model, sharded or not.
        optimizer: All optimizers of the model.
        env: The ranks.

    Raises:
        ValueError: On every rank, if nothing updates a parameter of any rank.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = whole_optimizer(model, torch.optim.SGD([model.bias], lr=0.1))
        >>> check_all_are_updated(model, optimizer, ShardingEnv.default())
        Traceback (most recent call last):
        ...
        ValueError: Trainer.optimizer must update ... received 1 that nothing updates, ['weight']...
        >>> model.weight.requires_grad_(False)  # doctest: +ELLIPSIS
        Parameter containing:...
        >>> check_all_are_updated(model, optimizer, ShardingEnv.default())
    """
    stepped = set(map(id, optimizer.params.values()))
    not_updated = {
        name
        for name, parameter in in_backward_optimizer_filter(model.named_parameters())
        if parameter.requires_grad and id(parameter) not in stepped
    }
    fused = getattr(model, "fused_optimizer", None)
    if isinstance(fused, KeyedOptimizer):  # deferred tables are updated by its step
        deferred = {
            id(table)
            for group in fused.param_groups
            if group.get("update_mode") == "deferred"
            for table in group["params"]
        }
        waiting = deferred - stepped
        not_updated |= {name for name, table in fused.params.items() if id(table) in waiting}
    of_ranks = gather_objects(env.process_group, "check the optimizer", sorted(not_updated))
    if forgotten := sorted(set().union(*of_ranks)):
        raise ValueError(
            "Trainer.optimizer must update all trainable parameters; received "
            f"{len(forgotten)} that nothing updates, {forgotten[:3]}"
            f"{'...' if forgotten[3:] else ''}. Attach an optimizer to tables by "
            "apply_optimizer_in_backward before sharding; pass other parameters, and "
            "model.fused_optimizer, to Trainer.optimizer; or call requires_grad_(False) to keep "
            "the values."
        )
