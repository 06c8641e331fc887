"""A table that grew or shrank takes the rows that were saved; others stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from recsys.distributed.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from recsys.optim import Adam, RowWiseAdagrad
from recsys.optim.keyed import KeyedOptimizerWrapper
from tests.distributed.cases import (
    Case,
    SizedType,
    trained,
    whole_state_and_optimizer,
)
from tests.ranks import RankPool


def _save(case: Case, path: str) -> dict[str, Tensor]:
    model = trained(case, 0, 3)
    save_checkpoint(path, model, model.fused_optimizer)
    return whole_state_and_optimizer(model)


def _load(case: Case, path: str) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    model = trained(case, 1, 1)
    before = whole_state_and_optimizer(model)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(path, model, model.fused_optimizer)
    names = [kind.value for kind in case.types]
    load_checkpoint(path, model, model.fused_optimizer, resize=names)
    return str(raised.value), before, whole_state_and_optimizer(model)


@pytest.mark.parametrize("optimizer", [Adam, RowWiseAdagrad])
@pytest.mark.parametrize("rows", [7, 19])
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 2), (2, 3)])
def test_rows_that_both_have_are_loaded(
    ranks: RankPool,
    tmp_path: Path,
    saved_on: int,
    loaded_on: int,
    rows: int,
    optimizer: type[torch.optim.Optimizer],
) -> None:
    path = str(tmp_path)
    saved = ranks(saved_on, _save, SizedType(3, saved_on, optimizer=optimizer), path)[0]
    case = SizedType(3, loaded_on, optimizer=optimizer, rows=rows)
    for message, before, loaded in ranks(loaded_on, _load, case, path):
        assert (
            "'ebc.embedding_bags.table_wise.weight' of shape (12, 8); here it has shape" in message
        )
        assert "pass resize=['table_wise']" in message
        assert loaded.keys() == saved.keys()
        for name, value in loaded.items():
            expected = saved[name]
            if before[name].shape != expected.shape:
                expected = before[name].clone()
                expected[:12] = saved[name][:rows]
            torch.testing.assert_close(value, expected, rtol=0, atol=0, msg=name)


def _unsharded(rows: int) -> tuple[nn.Module, KeyedOptimizerWrapper]:
    model = nn.ModuleDict({"t": nn.Embedding(rows, 4), "over": nn.Linear(4, 1)})
    params = dict(model.named_parameters())
    return model, KeyedOptimizerWrapper(params, lambda params: torch.optim.Adam(params, lr=0.1))


@pytest.mark.parametrize("rows", [3, 9])
def test_unsharded_tables_of_torch_optimizers(tmp_path: Path, rows: int) -> None:
    model, optimizer = _unsharded(6)
    for _ in range(2):
        model["over"](model["t"](torch.arange(6))).sum().backward()
        optimizer.step()
    save_checkpoint(tmp_path, model, optimizer)
    other, fresh = _unsharded(rows)
    before = other["t"].weight.detach().clone()
    load_checkpoint(tmp_path, other, fresh, resize="t")
    both = min(6, rows)
    assert torch.equal(other["t"].weight[:both], model["t"].weight[:both])
    assert torch.equal(other["t"].weight[both:], before[both:])
    state, saved = fresh.state_dict()["state"], optimizer.state_dict()["state"]
    moments = state["t.weight"]["exp_avg"]
    assert torch.equal(moments[:both], saved["t.weight"]["exp_avg"][:both])
    assert not moments[both:].any()
    assert state["t.weight"]["step"] == 2
    other["over"](other["t"](torch.arange(rows))).sum().backward()
    fresh.step()


def test_what_resize_cannot_do_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, nn.ModuleDict({"t": nn.Embedding(6, 4)}))
    wider = nn.ModuleDict({"t": nn.Embedding(6, 5)})
    with pytest.raises(CheckpointError, match=r"'t\.weight' .*\(6, 4\); .*\(6, 5\)\. Only"):
        load_checkpoint(tmp_path, wider, resize=["t"])
    with pytest.raises(CheckpointError, match=r"must name tables.*received 'x'"):
        load_checkpoint(tmp_path, wider, resize=["x"])
