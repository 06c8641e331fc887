"""Checks by annotations: the values that each annotation accepts, and the texts of errors."""

from __future__ import annotations

import enum
import inspect
import pathlib
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pytest
import torch
from torch import nn

from recsys.base.checked import check_fields, checked, checked_late

if TYPE_CHECKING:
    from nowhere import Unknown  # type: ignore[import-not-found]


class Kind(enum.Enum):
    ONE = "one"


class Writer(Protocol):
    def write(self, text: str) -> None: ...


@checked
def take(
    count: int = 1,
    rate: float = 0.5,
    flag: bool = False,
    name: str = "",
    path: str | pathlib.Path | None = None,
    device: torch.device | None = None,
    kind: Kind = Kind.ONE,
    sizes: list[int] | None = None,
    ranks: Sequence[int] = (),
    lists: list[list[str]] | None = None,
    batches: Iterable[Any] = (),
    tables: Mapping[str, int] | None = None,
    module: nn.Module | None = None,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    function: Callable[[], Any] | None = None,
    writer: Writer | None = None,
    either: int | Sequence[int] = 1,
    unknown: Unknown | None = None,
    whatever: object = None,
    *others: int,
    **more: int,
) -> dict[str, Any]:
    return dict(locals())


RIGHT: list[tuple[str, Any]] = [
    ("count", -3),
    ("rate", 1),
    ("rate", float("nan")),
    ("rate", torch.tensor(0.5)),
    ("flag", True),
    ("name", "a"),
    ("path", "a"),
    ("path", None),
    ("sizes", [1, np.int64(2)]),
    ("ranks", (1, 2)),
    ("ranks", range(3)),
    ("ranks", [np.int32(1)]),
    ("lists", [("a",), ["b"]]),
    ("batches", iter([1])),
    ("batches", torch.ones(2)),
    ("tables", {"a": 1}),
    ("module", nn.Linear(1, 1)),
    ("optimizer", torch.optim.Adam),
    ("function", print),
    ("either", 2),
    ("either", [2]),
    ("unknown", object()),
    ("whatever", object()),
]


@pytest.mark.parametrize(("name", "value"), RIGHT)
def test_right_values_pass_as_they_are(name: str, value: Any) -> None:
    assert take(**{name: value})[name] is value


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("count", np.int64(3), 3),
        ("flag", np.bool_(True), True),
        ("flag", 0, False),
        ("device", "meta", torch.device("meta")),
        ("sizes", (1, 2), [1, 2]),
        ("sizes", np.array([1, 2]), [1, 2]),
        ("sizes", range(3), [0, 1, 2]),
        ("kind", "ONE", Kind.ONE),
        ("kind", "one", Kind.ONE),
    ],
)
def test_values_that_mean_the_same_become_the_annotated_type(
    name: str, value: Any, kept: Any
) -> None:
    found = take(**{name: value})[name]
    assert found == kept
    assert type(found) is type(kept)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("count", True, "take.count must be .*whole number; .*True"),
        ("count", 1.5, "a whole number; received 1.5"),
        ("count", None, "a whole number; received None"),
        ("rate", "0.1", r"take.rate must be a number.*'0\.1'"),
        ("rate", np.bool_(True), "a number"),
        ("flag", "no", "take.flag must be True .*False; .*'no'"),
        ("name", 3, "take.name must be text; received 3"),
        ("path", 3, "a path, as text .*received 3"),
        ("path", "", "must not be empty"),
        ("device", "nowhere", "must name a device"),
        ("device", 0, "a torch.device"),
        ("kind", "two", "one of one; received 'two'"),
        ("sizes", 3, "take.sizes must be a list.*3"),
        ("sizes", "12", "a list of whole .*received '12'"),
        ("sizes", [1, "a"], r"take.sizes\[1\] must be .*whole number.*'a'"),
        ("sizes", torch.tensor([1]), "a list of whole numbers"),
        ("lists", [["a"], "b"], r"take.lists\[1\] must be .*of text.*'b'\."),
        ("batches", 3, "a list; received 3"),
        ("tables", [1], r"take.tables must be a dict.*\[1\]"),
        ("tables", {"a": "b"}, r"take.tables\['a'\] must be .*number; .*'b'"),
        ("tables", {1: 2}, "key of take.tables must .*text.*1"),
        ("module", nn.Linear, "take.module must be an nn.Module; received"),
        ("optimizer", nn.Linear, "a subclass of torch.Optimizer"),
        ("optimizer", "sgd", "a subclass of torch.Optimizer; received 'sgd'"),
        ("function", 3, "take.function must be a function.*3"),
        ("writer", 3, "a Writer, which has write; .*3"),
        ("either", "a", "whole number or a list .*'a'"),
    ],
)
def test_errors_name_argument_rule_and_value(name: str, value: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        take(**{name: value})


def test_positional_and_collected_arguments() -> None:
    with pytest.raises(TypeError, match=r"take.rate must be a number.*'a'"):
        take(1, "a")
    assert take(more="not checked")["more"] == {"more": "not checked"}


def test_a_constructor_is_named_by_the_class_that_is_made() -> None:
    class Base:
        @checked
        def __init__(self, size: int) -> None:
            self.size = size

    class Child(Base):
        pass

    assert Child(np.int64(2)).size == 2
    with pytest.raises(TypeError, match=r"^Child.size must be a whole.*None\."):
        Child(None)


def test_proxies_of_a_trace_pass() -> None:
    class Twice(nn.Module):
        def forward(self, x: Any) -> Any:
            return take(module=x)["module"]

    assert torch.fx.symbolic_trace(Twice())(3) == 3


def test_fields_of_a_dataclass() -> None:
    @dataclass(frozen=True)
    class Config:
        rows: int
        names: list[str]

        def __post_init__(self) -> None:
            check_fields(self)

    assert type(Config(np.int64(3), ["a"]).rows) is int
    with pytest.raises(TypeError, match=r"^Config.rows must be a whole.*'a'\."):
        Config("a", [])
    with pytest.raises(TypeError, match=r"Config.names must be a list.*'ab'"):
        Config(1, "ab")


@checked_late
def divide(parts: list[int], by: int = 1, message: str = "") -> int:
    if message:
        raise TypeError(message)
    return parts[0] // by


def test_late_checks_say_why_a_call_failed() -> None:
    assert divide((7,), 2) == 3
    with pytest.raises(TypeError, match=r"divide.parts must be a list.*3"):
        divide(3)
    with pytest.raises(TypeError, match=r"divide.by must be a whole.*'2'"):
        divide([1], by="2")
    # an error of a function below it names that function's argument
    with pytest.raises(TypeError, match=r"divide.parts must be a list.*3"):
        divide(3, message="KeyedTensor.__getitem__.key must be text; received 0")
    with pytest.raises(TypeError, match="key must be text"):
        divide([3], message="KeyedTensor.__getitem__.key must be text; received 0")


def test_late_checks_keep_other_errors() -> None:
    with pytest.raises(ZeroDivisionError):
        divide([1], by=0)
    with pytest.raises(TypeError, match=r"^parts must be one; received two"):
        divide(3, message="parts must be one; received two")


def test_a_tuple_has_its_length_and_types() -> None:
    @checked
    def blend(betas: tuple[float, float]) -> object:
        return betas

    assert blend((0.9, 1)) == (0.9, 1)
    with pytest.raises(TypeError, match=r"betas must be .* 2; .*\(1,\)"):
        blend((1,))
    with pytest.raises(TypeError, match=r"betas\[1\] must be a number.*'a'"):
        blend((1, "a"))


def test_a_checked_function_looks_as_before() -> None:
    assert (
        str(inspect.signature(divide))
        == "(parts: 'list[int]', by: 'int' = 1, message: 'str' = '') -> 'int'"
    )
    assert pickle.loads(pickle.dumps(divide)) is divide
