"""A right call of one public function, class or method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.argument_kinds import Kind


@dataclass(frozen=True)
class Call:
    """A function and its arguments."""

    name: str
    function: Callable[..., object]
    arguments: dict[str, Kind]
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Other words that errors may use for an argument."""

    def run(self, **replaced: Any) -> object:
        """Call with right values, except for those replaced."""
        given = {name: kind.right() for name, kind in self.arguments.items()}
        return self.function(**given | replaced)


def method(make: Callable[[], Any], name: str) -> Callable[..., object]:
    """A method of an object made for each call."""
    return lambda **given: getattr(make(), name)(**given)
