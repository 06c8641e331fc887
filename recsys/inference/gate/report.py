"""The report of a gate: rules and segments as text, and as one HTML page with plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple, final

from recsys.base.arguments import path_of
from recsys.inference.gate.segments import Numbers

__all__ = ["GateReport", "Rule", "Segment"]

_STYLE = """
:root { color-scheme: light dark; --new: #2563eb; --served: #94a3b8; --bad: #dc2626; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #8884; }
.bad { color: var(--bad); font-weight: 600; }
svg text { fill: currentColor; font: 13px system-ui, sans-serif; }
"""


@final
class Rule(NamedTuple):
    """A rule with its measured value."""

    name: str
    """"auc", "calibration", "data", "drift", "error", "finite", "gain", "rows", "size" or
    "speed"."""
    subject: str
    """The data set, with the label if there are several, and with a segment; or "package"."""
    value: float
    limit: float
    is_most: bool
    """True if the limit is the largest value, False if it is the least one."""
    text: str
    """The measured value in words."""

    @property
    def passed(self) -> bool:
        """True if the value is inside its limit; NaN is not."""
        return self.value <= self.limit if self.is_most else self.value >= self.limit

    def __str__(self) -> str:
        bound = "at most" if self.is_most else "at least"
        state = "ok     " if self.passed else "REFUSED"
        return (
            f"{state} {self.name} ({self.subject}): {self.text}; {self.value:.4g} must be {bound} "
            f"{self.limit:.4g}"
        )


@final
class Segment(NamedTuple):
    """Numbers of a segment of a data set."""

    data: str
    name: str
    new: Numbers
    served: Numbers | None


@final
@dataclass(frozen=True)
class GateReport:
    """The results of a gate; as text, a line per rule."""

    new: str
    """The folder of the new version."""
    manifest: str
    """SHA-256 of its manifest."""
    served: str
    """The folder of the served version, or "None"."""
    rules: Sequence[Rule]
    segments: Sequence[Segment]

    @property
    def passed(self) -> bool:
        """True if the new version meets all rules."""
        return not self.refused

    @property
    def refused(self) -> list[Rule]:
        """The rules that it does not meet."""
        return [rule for rule in self.rules if not rule.passed]

    def __str__(self) -> str:
        end = "publish" if self.passed else f"do not publish: {len(self.refused)} rules are not met"
        return "\n".join([*map(str, self.rules), f"{self.new}: {end}"])

    def write_html(self, path: str | Path) -> None:
        """Write the report as one page without other files.

        Args:
            path: The file.

        Raises:
            OSError: The file cannot be written.
        """
        rows = "".join(
            f"<tr{'' if rule.passed else ' class=bad'}><td>{'ok' if rule.passed else 'refused'}"
            f"<td>{escape(rule.name)}<td>{escape(rule.subject)}<td>{escape(rule.text)}"
            f"<td>{rule.value:.4g}<td>{'&le;' if rule.is_most else '&ge;'} {rule.limit:.4g}</tr>"
            for rule in self.rules
        )
        title = "publish" if self.passed else "do not publish"
        plots = ""
        for name, field in (("AUC", "auc"), ("Calibration: predictions / labels", "calibration")):
            bars = [
                (f"{s.data}, {s.name}", getattr(s.new, field), getattr(s.served, field, None))
                for s in self.segments
            ]
            plots += f"<h2>{name}</h2>{_bars(bars)}"
        page = (
            f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport "
            f"content='width=device-width'><title>{escape(self.new)}: {title}</title>"
            f"<style>{_STYLE}</style><h1>{escape(self.new)}: {title}</h1>"
            f"<p>Compared with {escape(self.served)}.</p><table><tr><th>Result<th>Rule<th>Of"
            f"<th>Measured<th>Value<th>Limit</tr>{rows}</table>{plots}</html>"
        )
        path_of("GateReport.write_html.path", path).write_text(page)


def _bars(rows: Sequence[tuple[str, float, float | None]]) -> str:
    """Return an SVG with two bars per row: the new version, and below it the served one."""
    finite = [v for _, *values in rows for v in values if v is not None and math.isfinite(v)]
    most = max([*finite, 1e-9])
    parts = []
    for number, (name, new, served) in enumerate(rows):
        top = 36 * number
        parts.append(f"<text x=0 y={top + 20}>{escape(name)}</text>")
        for offset, value, color in ((6, new, "--new"), (20, served, "--served")):
            if value is not None and math.isfinite(value):
                width = 420 * value / most
                parts.append(
                    f"<rect x=300 y={top + offset} width={width:.1f} height=12 "
                    f"fill='var({color})'/><text x={width + 306:.1f} y={top + offset + 11}>"
                    f"{value:.4g}</text>"
                )
    height = 36 * len(rows) + 8
    return f"<svg viewBox='0 0 800 {height}' width='100%' role=img>{''.join(parts)}</svg>"
