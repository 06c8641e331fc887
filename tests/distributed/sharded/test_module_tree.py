"""Walks that stay out of leaves and see a shared module once."""

from __future__ import annotations

import pytest
from torch import nn

from recsys.distributed.sharded.module_tree import check_untied, outermost, walk


def is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList)


def test_leaves_are_seen_and_not_entered() -> None:
    inner = nn.ModuleList([nn.ModuleList([nn.ReLU()])])
    model = nn.ModuleDict({"a": nn.Sequential(inner, nn.ReLU()), "b": inner})
    assert [path for path, _ in walk(model, is_list)] == ["", "a", "a.0", "a.1"]
    assert list(outermost(model, is_list)) == [("a.0", inner)]
    assert list(outermost(inner, is_list)) == [("", inner)]
    assert list(outermost(nn.ReLU(), is_list)) == []


def test_a_weight_with_two_names_is_found() -> None:
    model = nn.ModuleDict({"one": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    one, other = model["one"], model["other"]
    check_untied(model, one.parameters())
    model["again"] = one  # one module at two places has one weight
    check_untied(model, one.parameters())
    other.weight = one.weight
    with pytest.raises(ValueError, match=r"'one\.weight' and 'other\.weight', which are one"):
        check_untied(model, one.parameters())
    check_untied(model, [one.bias])  # the tied one stays as it is


def test_a_weight_in_the_memory_of_another_is_found() -> None:
    table = nn.Embedding(6, 2)
    model = nn.ModuleDict({"table": table, "last": nn.Linear(2, 2, bias=False)})
    check_untied(model, table.parameters())
    model["last"].weight = nn.Parameter(table.weight.detach()[4:])
    with pytest.raises(ValueError, match=r"'table\.weight' and 'last\.weight', which .* overlap"):
        check_untied(model, table.parameters())
    check_untied(model, [])
    model["last"].weight = nn.Parameter(table.weight.detach()[4:].clone())
    check_untied(model, table.parameters())
