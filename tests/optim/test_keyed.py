"""Optimizer state by parameter name: saved, checked, loaded in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recsys.optim.keyed import (
    CombinedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
    set_learning_rate,
)

Factory = Callable[[list[Tensor]], torch.optim.Optimizer]


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


def adam(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.1)


def adagrad(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.1)


ALL = pytest.mark.parametrize("factory", [sgd, adam, adagrad])


def layer(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def wrap(module: nn.Module, factory: Factory = adam) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(dict(module.named_parameters()), factory)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        module(torch.full((1, 3), 1.0 + step)).pow(2).sum().backward()
        optimizer.step()


def values_of(state: Any) -> Any:
    """A state dict with tensors copied, to compare by torch.testing."""
    return copy.deepcopy(state)


def assert_same(received: Any, expected: Any) -> None:
    torch.testing.assert_close(received, expected, rtol=0, atol=0)


class TestKeyedOptimizerWrapper:
    @ALL
    def test_steps_as_the_wrapped_optimizer(self, factory: Factory) -> None:
        wrapped, plain = layer(), layer()
        train(wrapped, wrap(wrapped, factory))
        train(plain, factory(list(plain.parameters())))
        assert_same(wrapped.state_dict(), plain.state_dict())

    def test_clears_gradients(self) -> None:
        module = layer()
        optimizer = wrap(module)
        module(torch.ones(1, 3)).sum().backward()
        optimizer.zero_grad()
        assert module.weight.grad is None

    def test_schedulers_of_torch_reach_it(self) -> None:
        optimizer = wrap(layer())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        optimizer.step()
        scheduler.step()
        assert optimizer._optimizer.param_groups[0]["lr"] == 0.05

    @ALL
    def test_state_is_named_and_makes_the_round_trip(self, factory: Factory) -> None:
        module, other = layer(), layer()
        optimizer, loaded = wrap(module, factory), wrap(other, factory)
        train(module, optimizer)
        saved = optimizer.state_dict()
        assert set(saved) == {"state"}
        assert set(saved["state"]) == {"weight", "bias"}
        other.load_state_dict(module.state_dict())
        loaded.init_state()
        tensors = [id(t) for s in loaded.state.values() for t in s.values()]
        loaded.load_state_dict(values_of(saved))
        assert [id(t) for s in loaded.state.values() for t in s.values()] == tensors, "in place"
        assert_same(values_of(loaded.state_dict()), values_of(saved))
        train(module, optimizer)
        train(other, loaded)
        assert_same(other.state_dict(), module.state_dict())

    def test_state_does_not_depend_on_the_order_of_parameters(self) -> None:
        module, other = layer(), layer()
        optimizer = wrap(module)
        turned = KeyedOptimizerWrapper(dict(reversed(list(other.named_parameters()))), adam)
        train(module, optimizer)
        turned.init_state()
        turned.load_state_dict(values_of(optimizer.state_dict()))
        for name in ("weight", "bias"):
            assert_same(
                turned.state[getattr(other, name)]["exp_avg"],
                optimizer.state[getattr(module, name)]["exp_avg"],
            )

    def test_the_state_dict_is_live(self) -> None:
        module = layer()
        optimizer = wrap(module)
        train(module, optimizer)
        assert (
            optimizer.state_dict()["state"]["bias"]["exp_avg"]
            is (optimizer.state[module.bias]["exp_avg"])
        )

    def test_parameter_groups_on_request(self) -> None:
        module = layer()

        def factory(params: list[Tensor]) -> torch.optim.Optimizer:
            weight, bias = params
            return torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": 0.5}], lr=0.1)

        optimizer, other = wrap(module, factory), wrap(layer(), factory)
        optimizer.save_param_groups(True)
        groups = optimizer.state_dict()["param_groups"]
        assert [(g["params"], g["lr"]) for g in groups] == [(["weight"], 0.1), (["bias"], 0.5)]
        for group in optimizer.param_groups:
            group["lr"] *= 2
        other.load_state_dict(values_of(optimizer.state_dict()))
        assert [g["lr"] for g in other.param_groups] == [0.2, 1.0]
        assert other._optimizer.param_groups[1]["lr"] == 1.0
        groups[0]["params"] = ["weight", "bias"]
        with pytest.raises(ValueError, match=r"parameter groups .*; received \['bias', 'weight'\]"):
            other.load_state_dict({**other.state_dict(), "param_groups": groups[:1]})


class TestStrictness:
    def optimizers(self) -> tuple[KeyedOptimizerWrapper, dict[str, Any]]:
        module = layer()
        optimizer = wrap(module)
        train(module, optimizer)
        return optimizer, values_of(optimizer.state_dict())

    @pytest.mark.parametrize(
        ("given", "received"),
        [(None, "NoneType"), ([], "list"), ({}, r"\[\]"), ({"model": {}}, r"\['model'\]")],
    )
    def test_what_is_no_state_dict(self, given: Any, received: str) -> None:
        optimizer, _ = self.optimizers()
        for each in (optimizer, CombinedOptimizer([optimizer]), OptimizerWrapper(optimizer)):
            with pytest.raises(TypeError, match=rf"with the key 'state', .*{received}"):
                each.load_state_dict(given)

    def test_missing_parameter(self) -> None:
        optimizer, state = self.optimizers()
        del state["state"]["bias"]
        with pytest.raises(KeyError, match=r"same parameters .*: \['bias'\], unexpected: \[\]"):
            optimizer.load_state_dict(state)

    def test_unexpected_parameter(self) -> None:
        optimizer, state = self.optimizers()
        state["state"]["scale"] = {}
        with pytest.raises(KeyError, match=r"missing: \[\], unexpected: \['scale'\]"):
            optimizer.load_state_dict(state)

    def test_missing_and_unexpected_state(self) -> None:
        optimizer, state = self.optimizers()
        state["state"]["bias"]["momentum"] = state["state"]["bias"].pop("exp_avg")
        with pytest.raises(KeyError, match=r"parameter 'bias' .*\['exp_avg'\], .*\['momentum'\]"):
            optimizer.load_state_dict(state)

    def test_another_shape(self) -> None:
        optimizer, state = self.optimizers()
        state["state"]["bias"]["exp_avg"] = torch.zeros(1)  # would broadcast
        with pytest.raises(ValueError, match=r"'exp_avg' of .*'bias' .*\(2,\); .*\(1,\)"):
            optimizer.load_state_dict(state)

    def test_state_that_was_never_made(self) -> None:
        _, state = self.optimizers()
        with pytest.raises(KeyError, match=r"unexpected: \['bias', 'weight'\]"):
            wrap(layer()).load_state_dict(state)

    def test_unnamed_parameter(self) -> None:
        module = layer()
        optimizer = adam(list(module.parameters()))
        with pytest.raises(ValueError, match=r"param_groups\[0\]; 1 of 2 "):
            KeyedOptimizer({"bias": module.bias}, optimizer.state, optimizer.param_groups)

    def test_parameters_are_fixed(self) -> None:
        with pytest.raises(NotImplementedError, match="with CombinedOptimizer"):
            wrap(layer()).add_param_group({"params": []})


class TestInitState:
    @ALL
    def test_changes_no_parameter_and_gradient(self, factory: Factory) -> None:
        module = layer()
        optimizer = wrap(module, factory)
        module.weight.grad = torch.ones(2, 3)
        before = copy.deepcopy(module.state_dict())
        settings = copy.deepcopy([{**g, "params": []} for g in optimizer.param_groups])
        optimizer.init_state()
        assert_same(module.state_dict(), before)
        assert module.weight.grad.tolist() == [[1.0] * 3] * 2
        assert module.bias.grad is None
        assert [{**g, "params": []} for g in optimizer.param_groups] == settings

    def test_undoes_what_an_optimizer_does_without_a_gradient(self) -> None:
        class Noisy(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                for param in self.param_groups[0]["params"]:
                    param.add_(1.0)

        module = layer()
        before = copy.deepcopy(module.state_dict())
        wrap(module, lambda params: Noisy(params, lr=0.1)).init_state()
        assert_same(module.state_dict(), before)

    @ALL
    def test_training_goes_on_as_without(self, factory: Factory) -> None:
        module, other = layer(), layer()
        optimizer = wrap(module, factory)
        optimizer.init_state()
        train(module, optimizer)
        train(other, wrap(other, factory))
        torch.testing.assert_close(module.state_dict(), other.state_dict())

    @ALL
    def test_names_what_the_first_step_would(self, factory: Factory) -> None:
        module, other = layer(), layer()
        optimizer, stepped = wrap(module, factory), wrap(other, factory)
        optimizer.init_state()
        train(other, stepped, steps=1)
        names = {name: set(state) for name, state in stepped.state_dict()["state"].items()}
        received = optimizer.state_dict()["state"]
        assert {name: set(state) for name, state in received.items()} == names

    def test_keeps_the_state_there_is(self) -> None:
        module = layer()
        optimizer = wrap(module)
        train(module, optimizer)  # leaves gradients behind, too
        before = values_of(optimizer.state_dict())
        optimizer.init_state()
        assert_same(values_of(optimizer.state_dict()), before)
        assert module.weight.grad is not None

    def test_leaves_frozen_parameters_out(self) -> None:
        module = layer()
        module.bias.requires_grad_(False)
        optimizer = wrap(module)
        optimizer.init_state()
        assert set(optimizer.state_dict()["state"]) == {"weight"}

    def test_sparse_gradients(self) -> None:
        bag = nn.EmbeddingBag(5, 2, sparse=True, mode="sum")
        optimizer = KeyedOptimizerWrapper(
            dict(bag.named_parameters()), lambda params: torch.optim.SparseAdam(params, lr=0.1)
        )
        before = bag.weight.detach().clone()
        optimizer.init_state({"weight"})
        assert_same(bag.weight.detach(), before)
        assert optimizer.state_dict()["state"]["weight"]["exp_avg"].shape == (5, 2)


class TestSetLearningRate:
    @pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
    def test_a_wrong_rate_raises_also_without_parameters(self, rate: float) -> None:
        with pytest.raises(ValueError, match=rf"lr must be finite .*received {rate}"):
            set_learning_rate(CombinedOptimizer([]), rate)


class TestCombinedOptimizer:
    def test_steps_and_clears_all(self) -> None:
        a, b = layer(1), layer(2)
        plain = copy.deepcopy([a, b])
        both = CombinedOptimizer([("a", wrap(a, sgd)), ("b", wrap(b, adam))])
        separate = [sgd(list(plain[0].parameters())), adam(list(plain[1].parameters()))]
        for _ in range(2):
            both.zero_grad()
            for optimizer in separate:
                optimizer.zero_grad()
            for module in (a, b, *plain):
                module(torch.ones(1, 3)).pow(2).sum().backward()
            both.step()
            for optimizer in separate:
                optimizer.step()
        for module, other in zip((a, b), plain, strict=True):
            assert_same(module.state_dict(), other.state_dict())
        both.zero_grad()
        assert a.weight.grad is None
        assert b.weight.grad is None

    def test_names_are_led_by_prefixes(self) -> None:
        both = CombinedOptimizer([("a", wrap(layer())), wrap(layer())])
        assert list(both.params) == ["a.weight", "a.bias", "weight", "bias"]
        assert [prefix for prefix, _ in both.optimizers] == ["a", ""]
        assert CombinedOptimizer.prepend_opt_key("w", "x") == "x.w"
        assert CombinedOptimizer.prepend_opt_key("w", "") == "w"

    def test_names_must_be_distinct(self) -> None:
        with pytest.raises(ValueError, match=r"'weight' appears twice"):
            CombinedOptimizer([wrap(layer()), wrap(layer())])

    def test_state_makes_the_round_trip(self) -> None:
        def build(seed: int) -> tuple[nn.ModuleDict, CombinedOptimizer]:
            modules = nn.ModuleDict({"a": layer(seed), "b": layer(seed + 1)})
            return modules, CombinedOptimizer(
                [("a", wrap(modules["a"], sgd)), ("b", wrap(modules["b"], adam))]
            )

        modules, both = build(1)
        for name, optimizer in both.optimizers:
            train(modules[name], optimizer)
        saved = values_of(both.state_dict())
        assert set(saved["state"]) == {"a.weight", "a.bias", "b.weight", "b.bias"}
        _, other = build(5)
        other.init_state()
        other.load_state_dict(saved)
        assert_same(values_of(other.state_dict()), saved)
        del saved["state"]["b.bias"]
        with pytest.raises(KeyError, match=r"missing: \['b.bias'\]"):
            other.load_state_dict(saved)

    def test_init_state_changes_no_parameter(self) -> None:
        a, b = layer(1), layer(2)
        both = CombinedOptimizer([("a", wrap(a, sgd)), ("b", wrap(b, adam))])
        before = copy.deepcopy([a.state_dict(), b.state_dict()])
        both.init_state()
        assert_same([a.state_dict(), b.state_dict()], before)
        assert set(both.state_dict()["state"]) == set(both.params)

    def test_parameter_groups_are_those_of_all(self) -> None:
        first, second = wrap(layer(), sgd), wrap(layer(), adam)
        both = CombinedOptimizer([("a", first), ("b", second)])
        both.save_param_groups(True)
        both.param_groups[1]["lr"] = 0.7
        assert second._optimizer.param_groups[0]["lr"] == 0.7
        saved = both.state_dict()["param_groups"]
        assert [(g["params"], g["lr"]) for g in saved] == [
            (["a.bias", "a.weight"], 0.1),
            (["b.bias", "b.weight"], 0.7),
        ]

    def test_tells_each_optimizer_of_a_load(self) -> None:
        told: list[str] = []

        class Told(KeyedOptimizerWrapper):
            def post_load_state_dict(self) -> None:
                told.append("told")

        parameters = dict(layer().named_parameters())
        both = CombinedOptimizer([("a", Told(parameters, adam))])
        both.load_state_dict(both.state_dict())
        assert told == ["told"]

    def test_each_optimizer_saves_and_loads_itself(self) -> None:
        class Counting(OptimizerWrapper):
            flushed = 0
            rounds = 0

            def state_dict(self) -> dict[str, Any]:
                self.flushed += 1
                saved = super().state_dict()
                return {"state": {**saved["state"], "rounds": {"count": self.rounds}}}

            def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
                state = dict(state_dict["state"])
                self.rounds = state.pop("rounds")["count"]
                super().load_state_dict({"state": state})

        def build() -> tuple[Counting, CombinedOptimizer]:
            own = Counting(wrap(layer()))
            own.init_state()
            return own, CombinedOptimizer([("a", own), wrap(layer(), sgd)])

        first, saving = build()
        first.rounds = 3
        before = first.flushed
        saved = values_of(saving.state_dict())
        assert first.flushed > before
        assert set(saved["state"]) == {"a.weight", "a.bias", "a.rounds"}
        second, loading = build()
        loading.load_state_dict(saved)
        assert second.rounds == 3
        del saved["state"]["a.rounds"], saved["state"]["a.bias"]
        saved["state"]["b"] = {}
        with pytest.raises(KeyError, match=r"\['a.bias', 'a.rounds'\], unexpected: \['b'\]"):
            loading.load_state_dict(saved)
        with pytest.raises(ValueError, match=r"'rounds' appears twice"):
            CombinedOptimizer(
                Counting(KeyedOptimizerWrapper({name: torch.ones(1)}, sgd)) for name in "ab"
            )

    def test_nothing_is_loaded_if_something_does_not_fit(self) -> None:
        both = CombinedOptimizer([("a", wrap(layer())), ("b", wrap(layer()))])
        both.init_state()
        before = values_of(both.state_dict())
        other = values_of(before)
        other["state"]["a.bias"]["exp_avg"] += 1.0
        other["state"]["b.bias"]["exp_avg"] = torch.zeros(1)
        with pytest.raises(ValueError, match=r"'exp_avg' of .*'b\.bias' has shape \(2,\)"):
            both.load_state_dict(other)
        assert_same(values_of(both.state_dict()), before)

    def test_loads_parameter_groups(self) -> None:
        both, other = (CombinedOptimizer([("a", wrap(layer(), sgd))]) for _ in range(2))
        both.save_param_groups(True)
        both.param_groups[0]["lr"] = 0.7
        other.load_state_dict(values_of(both.state_dict()))
        assert other.optimizers[0][1].param_groups[0]["lr"] == 0.7

    def test_shows_its_parts(self) -> None:
        shown = repr(CombinedOptimizer([("a", wrap(layer())), wrap(layer(), sgd)]))
        first, second = wrap(layer()), wrap(layer(), sgd)
        assert shown == f"a: {first!r}\n{second!r}"


def test_a_wrapper_shows_the_optimizer_through() -> None:
    module, plain = layer(), layer()
    inner = wrap(module)
    outer = OptimizerWrapper(inner)
    outer.init_state()
    train(module, outer)
    train(plain, wrap(plain))
    torch.testing.assert_close(module.state_dict(), plain.state_dict())
    saved = values_of(outer.state_dict())
    assert_same(saved, values_of(inner.state_dict()))
    outer.load_state_dict(saved)
    outer.save_param_groups(True)
    assert "param_groups" in inner.state_dict()
    outer.zero_grad()
    assert module.weight.grad is None
    assert repr(outer) == f"OptimizerWrapper({inner!r})"
