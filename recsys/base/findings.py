"""Findings of checks of an installation and of a machine."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, final

Level: TypeAlias = Literal["ok", "note", "problem"]


@final
class Finding(NamedTuple):
    """Result of a check."""

    level: Level
    """`problem` if something is broken or will break; `note` if it only costs speed."""
    text: str
    fix: str | None = None
    """Command that fixes the problem, if there is one."""

    def __str__(self) -> str:
        fix = "" if self.fix is None else f"\n{'':<8} {self.fix}"
        return f"{self.level:<8} {self.text}{fix}"
