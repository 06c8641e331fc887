"""Optimizers: of embedding tables (in backward), for plain parameters, and keyed by name.

A table's optimizer is a specification (`recsys.kernels.types.OptimizerSpec`) that its kernel
applies. This package turns optimizer classes into specifications, attaches them to parameters, and
wraps optimizers so that their state is saved by parameter name.
"""

from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.optim.clipping import GradientClipping, GradientClippingOptimizer
from recsys.optim.grad_scaler import GradScaler
from recsys.optim.keyed import (
    CombinedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
    set_learning_rate,
)
from recsys.optim.optimizers import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamL2,
    AdamW,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
    in_backward_optimizer_filter,
)
from recsys.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamL2",
    "AdamW",
    "CombinedOptimizer",
    "GradScaler",
    "GradientClipping",
    "GradientClippingOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "LarsSGD",
    "OptimizerWrapper",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "RowWiseAdagrad",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "apply_optimizer_in_backward",
    "in_backward_optimizer_filter",
    "set_learning_rate",
]
