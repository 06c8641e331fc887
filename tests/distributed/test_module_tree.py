"""Walks that stay out of leaves and see a shared module once."""

from __future__ import annotations

from torch import nn

from recsys.distributed.module_tree import outermost, walk


def is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList)


def test_leaves_are_seen_and_not_entered() -> None:
    inner = nn.ModuleList([nn.ModuleList([nn.ReLU()])])
    model = nn.ModuleDict({"a": nn.Sequential(inner, nn.ReLU()), "b": inner})
    assert [path for path, _ in walk(model, is_list)] == ["", "a", "a.0", "a.1"]
    assert list(outermost(model, is_list)) == [("a.0", inner)]
    assert list(outermost(inner, is_list)) == [("", inner)]
    assert list(outermost(nn.ReLU(), is_list)) == []
