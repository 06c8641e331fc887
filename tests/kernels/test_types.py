from __future__ import annotations

import pytest

from recsys.kernels.types import EmbOptimType, OptimizerSpec, TableSpec, WeightDecayMode


def test_exact_sgd_is_sgd() -> None:
    assert EmbOptimType.EXACT_SGD is EmbOptimType.SGD


def test_optimizer_specs_are_grouping_keys() -> None:
    a = OptimizerSpec(algorithm=EmbOptimType.ADAM, learning_rate=0.1)
    b = OptimizerSpec(
        algorithm=EmbOptimType.ADAM, learning_rate=0.1, weight_decay_mode=WeightDecayMode.DECOUPLE
    )
    assert {a: 1}[b] == 1


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        (EmbOptimType.SGD, {"eps": 0.1}, r"SGD does .*received \[0.1\]"),
        (EmbOptimType.ADAM, {"momentum": 0.5}, r"ADAM does not read \['momentum'\]"),
        (EmbOptimType.ADAM, {"beta1": 1.0}, "beta1 must .*received 1.0"),
        (EmbOptimType.ADAM, {"learning_rate": -1.0}, "learning_rate must be .*and >= 0"),
        (EmbOptimType.LAMB, {"weight_decay_mode": WeightDecayMode.L2}, "received L2"),
        (EmbOptimType.SGD, {"weight_decay": float("nan")}, "weight_decay must be finite"),
    ],
)
def test_a_setting_that_would_be_ignored_or_wrong_raises(
    algorithm: EmbOptimType, changes: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerSpec(algorithm=algorithm, **changes)  # type: ignore[arg-type]


def test_algorithm_must_be_the_enum() -> None:
    with pytest.raises(TypeError, match="must be an EmbOptimType; received 'adam'"):
        OptimizerSpec(algorithm="adam")  # type: ignore[arg-type]


def test_a_table_may_be_empty_but_not_thin() -> None:
    assert TableSpec(name="shard", num_rows=0, dim=4).num_rows == 0
    with pytest.raises(ValueError, match="table 't' received num_rows=3, dim=0"):
        TableSpec(name="t", num_rows=3, dim=0)
