"""Tables of another fit get each row, with its optimizer state, at the place of its value."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recsys import EmbeddingBagCollection, EmbeddingBagConfig
from recsys.distributed.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from recsys.distributed.checkpoint.values import saved_spec
from recsys.distributed.checkpoint.versions import open_version
from recsys.features import Categorical, FeatureSpec, Numeric
from recsys.optim import Adam, RowWiseAdagrad
from recsys.optim.keyed import KeyedOptimizerWrapper
from tests.distributed.cases import (
    FEATURES,
    SizedType,
    train,
    trained,
    whole_state_and_optimizer,
)
from tests.ranks import RankPool

_OLD, _NEW = range(10), (4, 30, 2, 9, 31, 5, 0, 32, 33, 34, 7, 8, 35)


def _spec(values: Any) -> FeatureSpec:
    """Return a spec with a vocabulary in the order of the values, for each feature of the cases."""
    counts = [value for i, value in enumerate(values) for _ in range(len(values) - i)]
    return FeatureSpec([Categorical(name) for name in FEATURES]).fit(
        {name: [f"v{count}" for count in counts] for name in FEATURES}
    )


@dataclass(frozen=True)
class _Fitted(SizedType):
    """One table of each type, of a fit; others change places with the plan's seed."""

    values: tuple[int, ...] = ()

    def configs(self) -> list[Any]:
        prints = _spec(self.values).fingerprints()
        return [
            replace(
                config,
                fingerprint=prints[config.feature_names[0]],
                num_special_rows=2,
            )
            for config in super().configs()
        ]


def _save(case: _Fitted, path: str, is_delta: bool) -> dict[str, Tensor]:
    model, spec = trained(case, 0, 3), _spec(case.values)
    save_checkpoint(path, model, model.fused_optimizer, spec=spec, delta=is_delta)
    if is_delta:
        train(case, model, range(3, 4), rank=dist.get_rank())
        save_checkpoint(path, model, model.fused_optimizer, spec=spec, delta=True)
    return whole_state_and_optimizer(model)


def _load(
    case: _Fitted, path: str, new_rows: Any
) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    model, spec = trained(case, 1, 1), _spec(case.values)
    before, _ = whole_state_and_optimizer(model), spec.fingerprints()
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(path, model, model.fused_optimizer, resize=[k.value for k in case.types])
    load_checkpoint(path, model, model.fused_optimizer, spec=spec, new_rows=new_rows)
    return str(raised.value), before, whole_state_and_optimizer(model)


@pytest.mark.parametrize(
    ("optimizer", "new_rows", "is_delta", "saved_on", "loaded_on"),
    [
        (Adam, "init", False, 1, 2),
        (Adam, "unknown", True, 2, 3),
        (RowWiseAdagrad, "mean", True, 2, 2),
        (RowWiseAdagrad, "unknown", False, 3, 1),
    ],
)
def test_rows_follow_their_values_under_any_plan(
    ranks: RankPool,
    tmp_path: Path,
    optimizer: type[torch.optim.Optimizer],
    new_rows: str,
    is_delta: bool,
    saved_on: int,
    loaded_on: int,
) -> None:
    path = str(tmp_path)
    old = _Fitted(3, saved_on, optimizer=optimizer, values=(*_OLD,), rows=12)
    saved = ranks(saved_on, _save, old, path, is_delta)[0]
    case = _Fitted(3, loaded_on, optimizer=optimizer, values=_NEW, rows=len(_NEW) + 2)
    is_kept = [value in _OLD for value in _NEW]
    here = torch.tensor([0, 1, *(2 + i for i, kept in enumerate(is_kept) if kept)])
    there = torch.tensor([0, 1, *(2 + value for value in _NEW if value in _OLD)])
    new = torch.tensor([2 + i for i, kept in enumerate(is_kept) if not kept])
    for message, before, loaded in ranks(loaded_on, _load, case, path, new_rows):
        assert "8 of its 10 values have another row, or none" in message
        assert loaded.keys() == saved.keys()
        for name, value in loaded.items():
            if before[name].shape == saved[name].shape:
                expected = saved[name]
            else:
                expected = before[name].clone()
                expected[here] = saved[name][there]
                if "/" not in name and new_rows == "unknown":
                    expected[new] = saved[name][1]
                if "/" not in name and new_rows == "mean":
                    expected[new] = saved[name][2:].double().mean(0).to(value.dtype)
            torch.testing.assert_close(value, expected, rtol=0, atol=0, msg=name)


def _model(spec: FeatureSpec) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=spec.tables(4))


def _fit(values: list[Any]) -> FeatureSpec:
    return FeatureSpec([Categorical("city")]).fit({"city": values})


def _rows(model: Any, spec: FeatureSpec) -> dict[Any, list[float]]:
    weight = model.embedding_bags["city"].weight
    values = spec.values_of("city", np.arange(len(weight))).tolist()
    return {value: weight[row].tolist() for row, value in enumerate(values) if row > 1}


def test_random_orders_of_texts_and_numbers(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    for case in range(40):
        kind = str if case % 2 else int
        fits = [
            _fit([kind(v) for v in random.integers(0, 40, random.integers(1, 80))])
            for _ in range(2)
        ]
        first, second = map(_model, fits)
        save_checkpoint(tmp_path / str(case), first)
        load_checkpoint(tmp_path / str(case), second, spec=fits[1], saved_spec=fits[0])
        old, new = _rows(first, fits[0]), _rows(second, fits[1])
        assert {value: row for value, row in new.items() if value in old} == {
            value: row for value, row in old.items() if value in new
        }


def test_a_table_without_a_fingerprint_takes_it_from_the_checkpoint(tmp_path: Path) -> None:
    spec, other = _fit(["Oslo", "Rome", "Rome"]), _fit(["Oslo", "Oslo", "Rome"])
    save_checkpoint(tmp_path / "one", _model(spec))
    save_checkpoint(tmp_path / "other", _model(other))
    config = EmbeddingBagConfig(4, 4, "city", feature_names=["city"])
    model = EmbeddingBagCollection(tables=[config])
    load_checkpoint(tmp_path / "one", model)
    assert model.embedding_bag_configs()[0].fingerprint == spec.fingerprints()["city"]
    with pytest.raises(CheckpointError, match=r"'city' .* 2 of its 2 values"):
        load_checkpoint(tmp_path / "other", model)


def test_a_table_without_a_fingerprint_takes_it_from_the_given_spec(tmp_path: Path) -> None:
    old, new = _fit(["Oslo", "Rome", "Rome"]), _fit(["Oslo", "Oslo", "Rome"])
    model = _model(old)
    save_checkpoint(tmp_path, model, spec=old)
    config = EmbeddingBagConfig(4, 4, "city", feature_names=["city"])
    loaded = EmbeddingBagCollection(tables=[config])
    load_checkpoint(tmp_path, loaded, spec=new)
    assert _rows(loaded, new) == _rows(model, old)


def test_new_rows_without_a_saved_value_keep_their_values(tmp_path: Path) -> None:
    old = FeatureSpec([Categorical("city", min_count=2)]).fit({"city": ["Oslo", "Rome"]})
    new = old.extend({"city": ["Bonn", "Bonn"]}).spec
    save_checkpoint(tmp_path, _model(old), spec=old)
    model = _model(new)
    before = model.embedding_bags["city"].weight.detach().clone()
    load_checkpoint(tmp_path, model, spec=new, new_rows="mean")
    assert torch.equal(model.embedding_bags["city"].weight[2:], before[2:])


def test_partial_loads_and_shared_tables(tmp_path: Path) -> None:
    old = _fit(["Oslo", "Rome", "Rome"])
    save_checkpoint(tmp_path, _model(old), spec=old)
    columns = [Categorical("billing", table="city"), Categorical("city")]
    new = FeatureSpec(columns).fit({"billing": ["Oslo", "Oslo"], "city": ["Rome", "Bonn"]})
    model = _model(new)
    optimizer = KeyedOptimizerWrapper(
        dict(model.named_parameters()), lambda params: torch.optim.Adagrad(params)
    )
    with pytest.raises(CheckpointError, match=r"lacks .*city.*sum"):
        load_checkpoint(tmp_path, model, optimizer, spec=new)
    load_checkpoint(tmp_path, model, optimizer, spec=new, allow_partial=True)


def _save_other_fits(path: str) -> str:
    fits = [_fit(["Oslo", "Rome", "Rome"]), _fit(["Oslo", "Oslo", "Rome"])]
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # the text is compared by the caller
        save_checkpoint(path, _model(fits[dist.get_rank()]))
    return str(raised.value)


def test_ranks_of_other_fits_do_not_save(ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks(2, _save_other_fits, str(tmp_path)):
        assert "fingerprint of embedding_bags.city.weight" in message


def test_a_checkpoint_without_fingerprints_loads_with_one_warning(tmp_path: Path) -> None:
    spec = _fit(["Oslo", "Rome", "Rome"])
    config = EmbeddingBagConfig(4, 4, "city", feature_names=["city"])
    save_checkpoint(tmp_path, EmbeddingBagCollection(tables=[config]))
    with pytest.warns(UserWarning, match=r"no fingerprints of the tables \['city'\]") as caught:
        load_checkpoint(tmp_path, _model(spec))
    assert len(caught) == 1
    grown = _model(_fit(["Oslo", "Rome", "Rome", "Bonn"]))
    with pytest.raises(CheckpointError, match=r"'city' .* another fit"):
        load_checkpoint(tmp_path, grown, resize="city")


def test_wrong_specs_are_named(tmp_path: Path) -> None:
    old, new = _fit(["Oslo", "Rome", "Rome"]), _fit(["Oslo", "Oslo", "Rome", "Bonn"])
    save_checkpoint(tmp_path / "with", _model(old), spec=old)
    save_checkpoint(tmp_path / "without", _model(old))
    model = _model(new)
    cases = [
        ({"spec": old}, "load_checkpoint.spec must be of the fit that made table 'city'"),
        ({"spec": new, "saved_spec": new}, "saved_spec must be the spec of the checkpoint"),
        ({"spec": 3}, "spec must be a FeatureSpec"),
        ({"spec": new, "new_rows": "zero"}, "new_rows must be one of"),
    ]
    for arguments, message in cases:
        with pytest.raises((CheckpointError, TypeError, ValueError), match=message):
            load_checkpoint(tmp_path / "with", model, **arguments)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="has no spec, and table 'city'"):
        load_checkpoint(tmp_path / "without", model, spec=new)
    numbers = _fit([7, 7, 8])
    with pytest.raises(CheckpointError, match=r"'city' .* numbers .* texts"):
        load_checkpoint(tmp_path / "with", _model(numbers), spec=numbers)
    with pytest.raises(ValueError, match=r"save_checkpoint.spec must be of the fit .* 'city'"):
        save_checkpoint(tmp_path / "with", model, spec=old)


def test_buckets_take_the_row_of_the_bucket_of_their_middle(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    fits = [
        FeatureSpec([Numeric("age", buckets=count)]).fit({"age": random.gamma(2.0, 9.0, 500)})
        for count in (5, 8)
    ]
    for before, spec in itertools.permutations(fits):
        first, second = _model(before), _model(spec)
        save_checkpoint(tmp_path / str(len(before.fitted.edges["age"])), first, spec=before)
        load_checkpoint(tmp_path / str(len(before.fitted.edges["age"])), second, spec=spec)
        edges = spec.fitted.edges["age"]
        middles = [edges[0] - 1e-9, *((edges[1:] + edges[:-1]) / 2), edges[-1]]
        ids = before.transform({"age": middles}).sparse_features.values()
        weights = [model.embedding_bags["age"].weight for model in (first, second)]
        assert torch.equal(weights[1][1:], weights[0][ids])
        assert torch.equal(weights[1][0], weights[0][0])


def test_a_delta_has_the_spec_of_its_base(tmp_path: Path) -> None:
    spec = _fit(["Oslo", "Rome", "Rome"])
    model = _model(spec)
    for step in range(3):
        save_checkpoint(tmp_path, model, spec=spec, delta=True, keep=None)
        folder, manifest = open_version(tmp_path)
        assert manifest is not None
        assert manifest.get("kind", "full") == ("delta" if step else "full")
        found = saved_spec(folder, manifest)
        assert found is not None
        assert found.fingerprints() == spec.fingerprints()
    grown = spec.extend({"city": ["Bonn"]}).spec
    sizes = {
        version.name: sum(f.stat().st_size for f in version.iterdir())
        for version in tmp_path.iterdir()
    }
    assert sizes["step-2"] < sizes["step-1"]
    model = _model(grown)
    load_checkpoint(tmp_path, model, spec=grown)
    save_checkpoint(tmp_path, model, spec=grown, delta=True)
    assert open_version(tmp_path)[1].get("kind", "full") == "full"  # type: ignore[union-attr]
