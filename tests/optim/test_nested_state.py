"""Optimizer state nested in dictionaries, lists and tuples: checked, copied, saved and loaded."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint, save_checkpoint_async
from recsys.distributed.checkpoint.errors import CheckpointError
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from recsys.optim.nested_state import check_state, copy_into, live_state, reset_steps


class Factors(NamedTuple):
    left: Tensor
    count: int


class Shampoo(torch.optim.Optimizer):
    """Keeps for each block of rows of a parameter the sums of its gradients."""

    def __init__(self, params: list[Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["blocks"] = {
                        f"block_{i}": {"left": torch.zeros(()), "step": 0} for i in range(2)
                    }
                    state["roots"] = [torch.zeros(2), torch.zeros(3)]
                    state["pair"] = (torch.zeros(2), 0)
                for i, block in enumerate(state["blocks"].values()):
                    block["left"] += param.grad[i].square().sum()
                    block["step"] += 1
                    state["roots"][i] += block["left"]
                state["pair"] = (state["pair"][0].add_(1), state["pair"][1] + 1)
                param.sub_(group["lr"] * param.grad / (1 + state["roots"][0][0]))


def trained(steps: int, seed: int = 0) -> tuple[nn.Linear, KeyedOptimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = KeyedOptimizerWrapper(dict(model.named_parameters()), Shampoo)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((1, 3), 1.0 + step)).pow(2).sum().backward()
        optimizer.step()
    return model, optimizer


def assert_same(received: Any, expected: Any) -> None:
    torch.testing.assert_close(received, expected, rtol=0, atol=0)


def test_state_is_copied_and_not_aliased() -> None:
    _, source = trained(3)
    _, target = trained(1, seed=1)
    saved = source.state_dict()
    expected = copy.deepcopy(saved)
    kept = target.state_dict()["state"]["weight"]["blocks"]["block_0"]["left"]
    target.load_state_dict(saved)
    assert kept == expected["state"]["weight"]["blocks"]["block_0"]["left"]  # in place
    for values in saved["state"].values():
        for block in values["blocks"].values():
            block["left"].fill_(-1)
            block["step"] = -1
        values["roots"][0].fill_(-1)
        values["pair"][0].fill_(-1)
    assert_same(target.state_dict(), expected)


@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: CombinedOptimizer([("a", o)])])
def test_missing_and_unexpected_leaves_are_named_by_their_paths(wrap: Any) -> None:
    target = wrap(trained(2)[1])
    before = copy.deepcopy(target.state_dict())
    (name,) = (name for name in before["state"] if name.endswith("weight"))

    def refused(message: str, kind: type[Exception] = KeyError, **changes: Any) -> None:
        state = copy.deepcopy(before)
        state["state"][name] |= changes
        with pytest.raises(kind, match=message):
            target.load_state_dict(state)
        assert_same(target.state_dict(), before)

    blocks = before["state"][name]["blocks"]
    some = {"block_0": blocks["block_0"], "block_1": {"step": 1}}
    refused(r"missing: \['blocks\.block_1\.left'\], unexpected: \[\]", blocks=some)
    more = {**blocks, "block_2": {"left": torch.ones(())}}
    refused(r"missing: \[\], unexpected: \['blocks\.block_2\.left'\]", blocks=more)
    refused(r"missing: \['blocks\.block_0\.left', .*unexpected: \['blocks'\]", blocks=1)
    refused(r"missing: \['roots\.1'\]", roots=[torch.ones(2)])
    refused(r"unexpected: \['pair\.2'\]", pair=(torch.ones(2), 1, 1))
    wrong = [torch.ones(2), torch.ones(4)]
    refused(
        r"'roots\.1' .*weight' has shape \(3,\).*\(4,\)",
        ValueError,
        roots=wrong,
    )
    refused(r"missing: \['roots\.0', 'roots\.1'\], unexpected: \['roots\.\(empty\)'\]", roots=[])
    text = [torch.ones(2), "three"]
    refused(r"'roots\.1' .*a tensor; received 'three'", TypeError, roots=text)


def test_the_state_dict_has_containers_of_its_own() -> None:
    _, optimizer = trained(1)
    state = optimizer.state_dict()["state"]["weight"]
    left = state["blocks"]["block_0"]["left"]
    state["blocks"].clear()
    state["roots"].clear()
    assert optimizer.state_dict()["state"]["weight"]["blocks"]["block_0"]["left"] is left


def test_fresh_state_has_no_steps_behind_it() -> None:
    model, optimizer = trained(0)
    before = copy.deepcopy(model.state_dict())
    optimizer.init_state()
    assert_same(model.state_dict(), before)
    blocks = optimizer.state_dict()["state"]["weight"]["blocks"]
    assert [block["step"] for block in blocks.values()] == [0, 0]


@pytest.mark.parametrize("save", [save_checkpoint, save_checkpoint_async])
def test_checkpoints(tmp_path: Path, save: Any) -> None:
    model, optimizer = trained(3)
    pending = save(tmp_path, model, optimizer)
    if save is save_checkpoint_async:
        pending.wait()
    for steps in (0, 1):  # without state yet, and with another
        other, target = trained(steps, seed=1)
        load_checkpoint(tmp_path, other, target)
        assert_same(other.state_dict(), model.state_dict())
        assert_same(target.state_dict(), optimizer.state_dict())
        assert type(target.state[other.weight]["pair"]) is tuple


def test_a_checkpoint_without_a_nested_state(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    del optimizer.state[model.weight]["blocks"]["block_1"]["left"]
    save_checkpoint(tmp_path, model, optimizer)
    other, target = trained(1)
    with pytest.raises(
        CheckpointError, match=re.escape("optimizer.state.weight.blocks.block_1.left")
    ):
        load_checkpoint(tmp_path, other, target)


def test_a_part_of_a_table_with_nested_state_is_refused(tmp_path: Path) -> None:
    tables = [EmbeddingBagConfig(3, 2, "films", feature_names=["film"])]
    model = DistributedModelParallel(
        EmbeddingBagCollection(tables=tables), device=torch.device("cpu")
    )
    optimizer = KeyedOptimizerWrapper(dict(model.named_parameters()), Shampoo)
    optimizer.init_state()
    with pytest.raises(
        CheckpointError, match=r"State 'blocks' of 'embedding_bags\.films\.weight', a part"
    ):
        save_checkpoint(tmp_path, model, optimizer)
    assert list(tmp_path.glob("step-*/.metadata")) == []


def test_empty_containers_are_a_part_of_the_state() -> None:
    own = {"left": torch.zeros(2), "blocks": {}, "roots": []}
    check_state("w", own, {"left": torch.zeros(2), "blocks": {}, "roots": ()})
    for wrong in ({}, {"blocks": torch.ones(1)}, {"blocks": {"a": 1}}):
        with pytest.raises(KeyError, match=r"missing: \['blocks\.\(empty\)'"):
            check_state("w", own, {"left": torch.zeros(2), "roots": [], **wrong})


def test_named_tuples_and_empty_containers() -> None:
    own = {"factors": Factors(torch.zeros(2), 1), "empty": {}, "none": None}
    loaded = {"factors": Factors(torch.ones(2), 5), "empty": {}, "none": torch.ones(1)}
    check_state("w", own, loaded)
    left = own["factors"].left  # type: ignore[union-attr]
    kept = copy_into(own, live_state(loaded))
    assert kept is own
    assert kept["factors"] == Factors(left, 5)
    assert left.tolist() == [1, 1]
    assert kept["none"] is not loaded["none"]
    steps = {"step": torch.ones(1), "inner": [{"step": 3}]}
    reset_steps(steps)
    assert steps == {"step": 0, "inner": [{"step": 0}]}
