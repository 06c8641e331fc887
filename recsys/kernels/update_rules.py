"""Optimizers of tables: state, settings and update of rows.

`UPDATE_RULES` describes each optimizer for the rest of the library; the files of the backends list
FBGEMM's kernels. The formulas are FBGEMM's, so that a table trained by any backend has the same
weights:

    SGD            w -= lr * g
    Adagrad        s += g*g;                w -= lr * g / (sqrt(s) + eps)
    row-wise       s += mean(g*g);          w -= lr * g / (sqrt(s) + eps)      one s per row
    Adam           m, v as usual;           w -= lr * (m^ / (sqrt(v^) + eps) + wd * w)
    partial row-w. as Adam with v from mean(g*g), one per row
    LAMB           r = m^ / (sqrt(v^) + eps) + wd * w;   w -= lr * |w| / |r| * r   norms per row
    partial row-w. LAMB: as LAMB with v from mean(g*g), one per row
    LARS-SGD       b = momentum * b + lr * eta * |w| / (|g| + wd * |w|) * (g + wd * w);   w -= b

A new optimizer is a member of `EmbOptimType`, an entry of `UPDATE_RULES` and its function of
`TouchedRows`.

Shapes: R rows of the table, K touched rows, D columns.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from recsys.base.arguments import finite


class EmbOptimType(enum.Enum):
    """Optimizers that a table can own. Names as in FBGEMM, whose users know them."""

    SGD = "sgd"
    # an equal value makes an alias, not another member
    EXACT_SGD = "sgd"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    ADAM = "adam"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    LAMB = "lamb"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    LARS_SGD = "lars_sgd"

    def __str__(self) -> str:
        return self.value


class WeightDecayMode(enum.Enum):
    """Form of `weight_decay`. Only rows that were looked up decay, never other rows."""

    L2 = "l2"
    """Added to the gradient (`g + weight_decay * w`), so that the optimizer's statistics see it."""
    DECOUPLE = "decouple"
    """`w` shrinks by `learning_rate * weight_decay`, beside the update (as in AdamW)."""


class RowReads(enum.Enum):
    """Input of an update from all columns of a row."""

    NOTHING = "nothing"
    """Columns are independent: a table may be split between any two."""
    MOMENT = "moment"
    """The mean of g*g, which owners of different columns can add up (see `row_statistic`)."""
    NORMS = "norms"
    """Norms of the weights and of the step. Weight decay is inside the update, in one mode only."""


StateKind: TypeAlias = Literal["element", "row", "table"]
"""Unit that has one value of a state."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """The optimizer a table owns. Hashable: tables are grouped by it.

    Fields that an algorithm does not read must keep their default, so that no setting is silently
    ignored.

    Example:
        >>> OptimizerSpec(algorithm=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.1).eps
        1e-08
    """

    algorithm: EmbOptimType
    learning_rate: float = 0.01
    """The value at construction; `TableBatchedEmbedding.learning_rates` changes it later."""
    eps: float = 1e-8
    """Added to the square root, outside of it. Adagrad, Adam, LAMB."""
    beta1: float = 0.9
    """Adam, LAMB."""
    beta2: float = 0.999
    """Adam, LAMB."""
    weight_decay: float = 0.0
    """Acts on looked-up rows only."""
    weight_decay_mode: WeightDecayMode | None = None
    """None: decoupled for Adam, partial row-wise Adam and LAMB, L2 for the others."""
    momentum: float = 0.9
    """LARS-SGD."""
    eta: float = 0.001
    """LARS-SGD: the trust coefficient."""
    stochastic_rounding: bool = False
    """Tables of fp16 or bf16: round an updated weight up or down at random, right on average.
    Updates smaller than half a step of the dtype are then not lost."""

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, EmbOptimType):
            raise TypeError(
                "OptimizerSpec.algorithm must be an EmbOptimType; received "
                f"{self.algorithm!r}. Choose one of {[e.name for e in EmbOptimType]}."
            )
        rule, name = self.rule, self.algorithm.name
        unread = []
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(each.default, float):
                below = 1 if each.name in ("beta1", "beta2", "momentum") else None
                value = finite(f"OptimizerSpec.{each.name}", value, least=0, below=below)
                object.__setattr__(self, each.name, value)
                if each.name not in (*rule.settings, *_ALWAYS_READ) and value != each.default:
                    unread.append(each.name)
        if self.weight_decay_mode is None:
            object.__setattr__(self, "weight_decay_mode", rule.decay)
        elif self.weight_decay_mode is not rule.decay and rule.reads_row is RowReads.NORMS:
            raise ValueError(
                f"{name} knows only weight_decay_mode={rule.decay.name}; received "
                f"{self.weight_decay_mode.name}."
            )
        if unread:
            raise ValueError(
                f"{name} does not read {unread}; received "
                f"{[getattr(self, n) for n in unread]}. Leave them at their defaults."
            )

    @property
    def rule(self) -> UpdateRule:
        """State, settings and update of the algorithm."""
        return UPDATE_RULES[self.algorithm]

    @property
    def reads_weights(self) -> bool:
        """True if an update needs the old weights."""
        return self.weight_decay != 0 or self.rule.reads_row is RowReads.NORMS

    @property
    def moves_without_gradient(self) -> bool:
        """True if a row with a zero gradient may change: by its state, by decay, or by 0 / 0.

        Otherwise a dense gradient can update all rows of a table: rows with a zero gradient do not
        change.

        Example:
            >>> OptimizerSpec(algorithm=EmbOptimType.EXACT_ADAGRAD).moves_without_gradient
            False
            >>> OptimizerSpec(algorithm=EmbOptimType.ADAM).moves_without_gradient
            True
        """
        rule = self.rule
        divides_by_zero = "eps" in rule.settings and self.eps == 0
        return (
            rule.dense_scale is None
            or divides_by_zero
            or self.weight_decay != 0
            or self.stochastic_rounding
        )

    def decay(self, mode: WeightDecayMode) -> float:
        """Return the weight decay for a mode, or 0 if the update rule applies the decay itself."""
        is_meant = self.weight_decay_mode is mode and self.rule.reads_row is not RowReads.NORMS
        return self.weight_decay if is_meant else 0.0

    def settings(self) -> dict[str, float | str | tuple[float, float]]:
        """Return the settings of the algorithm without its rate, under the names of torch.optim."""
        read = {name: getattr(self, name) for name in self.rule.settings}
        if "beta1" in read:
            read["betas"] = (read.pop("beta1"), read.pop("beta2"))
        if self.weight_decay and self.weight_decay_mode is not None:
            read["weight_decay_mode"] = self.weight_decay_mode.value
        return {"weight_decay": self.weight_decay, **read}


_ALWAYS_READ = ("learning_rate", "weight_decay")


@final
@dataclass(frozen=True, slots=True)
class TouchedRows:
    """Input of an update function: unique rows of one table."""

    spec: OptimizerSpec
    gradients: Tensor
    """[K, D] fp32, including L2 decay except for rules that read norms."""
    state: Mapping[str, Tensor]
    rate: float | Tensor
    """A scalar or [K, 1]; so is `step`."""
    rows: Tensor | None = None
    """[K] int64; None: all of them."""
    old: Tensor | None = None
    """[K, D] fp32 weights, where `spec.reads_weights`."""
    step: Tensor | None = None
    """Number of updates including this one, for rules that count them."""
    given_moment: Tensor | None = None
    """[K] of whole rows, where the table has only some of the columns."""

    @property
    def weights(self) -> Tensor:
        """`old`, if `spec.reads_weights`."""
        assert self.old is not None
        return self.old

    @property
    def moment(self) -> Tensor:
        """[K] mean of g*g of whole rows."""
        return row_moment(self.gradients) if self.given_moment is None else self.given_moment

    def advance(self, name: str, fresh: Tensor, keep: float = 1.0, share: float = 1.0) -> Tensor:
        """Set state[rows] to keep * state[rows] + share * fresh; returns the new values, a copy."""
        assert self.rows is not None
        values = self.state[name].index_select(0, self.rows)
        values = values.mul_(keep).add_(fresh, alpha=share)
        self.state[name].index_copy_(0, self.rows, values)
        return values

    def move_along(self, direction: Tensor) -> Tensor:
        """Step in a direction, and by decoupled weight decay, at the learning rate."""
        decay = self.spec.decay(WeightDecayMode.DECOUPLE)
        if decay:
            direction = direction.add(self.weights, alpha=decay)
        return direction * self.rate


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRule:
    """Definition of one optimizer."""

    move: Callable[[TouchedRows], Tensor]
    """Return the step to subtract, [K, D], learning rate included; updates the state in place."""
    state: Mapping[str, StateKind] = field(default_factory=dict)
    """State by name, as in torch.optim; fp32, zeros at first. `step` counts updates."""
    settings: tuple[str, ...] = ()
    """Fields of an `OptimizerSpec` that it reads besides rate and weight decay."""
    decay: WeightDecayMode = WeightDecayMode.L2
    """Default mode of weight decay."""
    reads_row: RowReads = RowReads.NOTHING
    dense_scale: Callable[[TouchedRows], Tensor] | None = None
    """Return the step to subtract as a factor of the gradient, for all rows; updates the state in
    place. For rules that do not change rows without a gradient."""
    update_copies: int
    """Values of touched rows that an update in plain PyTorch holds at a time, gradients included:
    for the planner."""
    torch_classes: Mapping[type[Optimizer], WeightDecayMode] = field(default_factory=dict)
    """Equal classes of torch.optim, and the weight decay mode of each."""

    @property
    def reduces_rows(self) -> bool:
        """True if the update needs all columns of a row, so that a column split is not exact."""
        return self.reads_row is not RowReads.NOTHING


def row_moment(g_KD: Tensor) -> Tensor:
    """Return the mean of g*g, by the norm: `square().mean()` would write a [K, D] intermediate."""
    norm_K: Tensor = torch.linalg.vector_norm(g_KD, dim=1)
    return norm_K.square_().div_(g_KD.shape[1])


def _move_by_adagrad(touched: TouchedRows) -> Tensor:
    g_KD = touched.gradients
    root_KD = touched.advance("sum", g_KD.square()).sqrt_().add_(touched.spec.eps)
    return touched.move_along(g_KD / root_KD)


def _move_by_rowwise_adagrad(touched: TouchedRows) -> Tensor:
    root_K = touched.advance("sum", touched.moment).sqrt_().add_(touched.spec.eps)
    if touched.spec.decay(WeightDecayMode.DECOUPLE):
        return touched.move_along(touched.gradients / root_K.unsqueeze(1))
    # one factor per row: [K, D] is read and written once instead of twice
    return touched.gradients * (root_K.reciprocal_().unsqueeze(1) * touched.rate)


def _adam_direction(touched: TouchedRows) -> Tensor:
    """Return Adam's step before decay and rate; the rule's state defines if v is one per row."""
    spec, g_KD, step = touched.spec, touched.gradients, touched.step
    assert step is not None
    mean_hat = touched.advance("exp_avg", g_KD, spec.beta1, 1 - spec.beta1)
    mean_hat = mean_hat / (1 - spec.beta1**step)
    is_row_wise = spec.rule.state["exp_avg_sq"] == "row"
    fresh = touched.moment if is_row_wise else g_KD.square()
    square = touched.advance("exp_avg_sq", fresh, spec.beta2, 1 - spec.beta2)
    if is_row_wise:
        square = square.unsqueeze(1)
    return mean_hat / (square / (1 - spec.beta2**step)).sqrt_().add_(spec.eps)


def _move_by_lamb(touched: TouchedRows) -> Tensor:
    old_KD = touched.weights
    direction = _adam_direction(touched).add(old_KD, alpha=touched.spec.weight_decay)
    direction *= _safe_ratio(_row_norm(old_KD), _row_norm(direction))
    return direction * touched.rate


def _move_by_lars_sgd(touched: TouchedRows) -> Tensor:
    spec, g_KD, old_KD = touched.spec, touched.gradients, touched.weights
    decay = spec.weight_decay
    w_norm, g_norm = _row_norm(old_KD), _row_norm(g_KD)
    trust = _safe_ratio(spec.eta * w_norm, g_norm + decay * w_norm) * touched.rate
    fresh = g_KD.add(old_KD, alpha=decay).mul_(trust)
    return touched.advance("momentum_buffer", fresh, spec.momentum)


def _row_norm(x_KD: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x_KD, dim=1, keepdim=True)
    return norm


def _safe_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide; 0 if the denominator is 0, so that a row without a gradient does not change."""
    return torch.where(denominator > 0, numerator / denominator, torch.zeros_like(numerator))


def _scale_of_sgd(all_rows: TouchedRows) -> Tensor:
    rate = all_rows.rate
    if isinstance(rate, Tensor):
        return rate
    # `addcmul_` takes no numbers, only tensors
    return torch.full((), rate, device=all_rows.gradients.device)


def _scale_of_adagrad(all_rows: TouchedRows) -> Tensor:
    g_RD = all_rows.gradients
    # `sqrt` copies: the sum is the live state
    root_RD = all_rows.state["sum"].addcmul_(g_RD, g_RD).sqrt().add_(all_rows.spec.eps)
    return root_RD.reciprocal_().mul_(all_rows.rate)


def _scale_of_rowwise_adagrad(all_rows: TouchedRows) -> Tensor:
    root_R = all_rows.state["sum"].add_(all_rows.moment).sqrt().add_(all_rows.spec.eps)
    return root_R.reciprocal_().unsqueeze(1) * all_rows.rate


_L2, _DECOUPLE = WeightDecayMode.L2, WeightDecayMode.DECOUPLE
_ADAM_STATE: Mapping[str, StateKind] = {
    "exp_avg": "element",
    "exp_avg_sq": "element",
    "step": "table",
}
_ROW_WISE_ADAM_STATE: Mapping[str, StateKind] = {**_ADAM_STATE, "exp_avg_sq": "row"}

# without `torch_classes`, as LAMB is made from it and has none
_ADAM = UpdateRule(
    move=lambda touched: touched.move_along(_adam_direction(touched)),
    state=_ADAM_STATE,
    settings=("eps", "beta1", "beta2"),
    decay=_DECOUPLE,
    update_copies=5,
)
_LAMB = replace(_ADAM, move=_move_by_lamb, reads_row=RowReads.NORMS, update_copies=7)
UPDATE_RULES: Mapping[EmbOptimType, UpdateRule] = {
    EmbOptimType.SGD: UpdateRule(
        move=lambda touched: touched.move_along(touched.gradients),
        dense_scale=_scale_of_sgd,
        update_copies=2,
        torch_classes={torch.optim.SGD: _L2},
    ),
    EmbOptimType.EXACT_ADAGRAD: UpdateRule(
        move=_move_by_adagrad,
        state={"sum": "element"},
        settings=("eps",),
        dense_scale=_scale_of_adagrad,
        update_copies=4,
        torch_classes={torch.optim.Adagrad: _L2},
    ),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: UpdateRule(
        move=_move_by_rowwise_adagrad,
        state={"sum": "row"},
        settings=("eps",),
        reads_row=RowReads.MOMENT,
        dense_scale=_scale_of_rowwise_adagrad,
        update_copies=2,
    ),
    EmbOptimType.ADAM: replace(
        _ADAM,
        torch_classes={
            torch.optim.Adam: _L2,
            torch.optim.AdamW: _DECOUPLE,
            torch.optim.SparseAdam: _L2,
        },
    ),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: replace(
        _ADAM, state=_ROW_WISE_ADAM_STATE, reads_row=RowReads.MOMENT, update_copies=4
    ),
    EmbOptimType.LAMB: _LAMB,
    EmbOptimType.PARTIAL_ROWWISE_LAMB: replace(_LAMB, state=_ROW_WISE_ADAM_STATE, update_copies=6),
    EmbOptimType.LARS_SGD: UpdateRule(
        move=_move_by_lars_sgd,
        state={"momentum_buffer": "element"},
        settings=("momentum", "eta"),
        reads_row=RowReads.NORMS,
        update_copies=4,
    ),
}
