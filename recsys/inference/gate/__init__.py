"""Compares a new version of a package with the one that is served, before it is published.

Files in reading order: `scored` (both versions score the same rows), `segments` (numbers of rows of
a segment), `rules` (`Gate`), `report` (text and HTML), `versions` (publish and roll back).
"""

from recsys.inference.gate.report import GateReport, Rule
from recsys.inference.gate.rules import Gate
from recsys.inference.gate.versions import publish, rollback

__all__ = ["Gate", "GateReport", "Rule", "publish", "rollback"]
