"""Argument names and order are TorchRec's, except for the arguments listed as not ours."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from recsys.compat.table import HOMES
from tests.offenders import check_each


class Fact(NamedTuple):
    module: str
    name: str
    is_enum: bool
    shared: list[str]
    not_ours: list[str]
    all: list[str]


def read_facts() -> Iterator[Fact]:
    module = owner = ""
    for line in Path(__file__).with_name("signatures.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        if not line.startswith(" "):
            module = line
        for dot, name, bracket, text in re.findall(r"(\.?)(\w+)([({])([^)}]*)[)}]", line):
            owner = owner if dot else name
            names = text.split()
            yield Fact(
                module=module,
                name=f"{owner}.{name}" if dot else name,
                is_enum=bracket == "{",
                shared=[n for n in names if not n.startswith("-")],
                not_ours=[n[1:] for n in names if n.startswith("-")],
                all=[n.removeprefix("-") for n in names],
            )


FACTS = list(read_facts())


def find_ours(fact: Fact) -> object:
    owner, _, method = fact.name.partition(".")
    home = HOMES[fact.module][owner]
    module = __import__(home.module, fromlist=[home.name])
    value = getattr(module, home.name)
    return getattr(value, method) if method else value


def arguments_of(function: object) -> list[inspect.Parameter]:
    assert callable(function)
    if inspect.isclass(function):
        function = function.__init__
    parameters = list(inspect.signature(function).parameters.values())
    return [p for p in parameters if p.name != "self"]


def has_members(fact: Fact) -> None:
    ours = find_ours(fact)
    assert isinstance(ours, enum.EnumMeta)
    names = {member.name for member in ours}
    assert set(fact.shared) <= names
    assert not names & set(fact.not_ours), "now ours: remove the minus in signatures.txt"


def test_members() -> None:
    check_each(has_members, [f for f in FACTS if f.is_enum])


def has_arguments(fact: Fact) -> None:
    ours = arguments_of(find_ours(fact))
    names = [p.name for p in ours]
    assert set(fact.shared) <= set(names)
    assert not set(names) & set(fact.not_ours), "now ours: remove the minus in signatures.txt"
    positional = [p.name for p in ours if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    # what follows an argument that we do not take is keyword-only
    assert all(a == b for a, b in zip(positional, fact.all, strict=False)), (positional, fact.all)


def test_arguments() -> None:
    check_each(has_arguments, [f for f in FACTS if not f.is_enum])


def test_facts_cover_the_classes_that_users_build() -> None:
    names = {fact.name for fact in FACTS}
    assert {
        "DLRM",
        "DistributedModelParallel",
        "EmbeddingBagCollection",
        "EmbeddingBagConfig",
        "EmbeddingCollection",
        "JaggedTensor",
        "KeyedJaggedTensor.from_lengths_sync",
        "KeyedOptimizerWrapper",
        "KeyedTensor.regroup",
        "ShardingEnv.from_process_group",
        "Topology",
    } <= names
