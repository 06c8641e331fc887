"""Lists of cases: `tests/rest.txt` for `make test REST=1`, `tests/long.txt` for `make test LONG=1`.

`python -m tests.mutants choose FOLDER` writes the rest: `make test` keeps the cases that are quick
for the lines that they execute. Long cases, such as many kills of a job, sanitizers and further
cases of a slow test, are chosen by hand, and CI leaves them out: each has a shorter case beside it.
"""

from __future__ import annotations

from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")
LONG = LIST.with_name("long.txt")
_REST = frozenset(LIST.read_text().splitlines())
_LONG = frozenset(LONG.read_text().splitlines())


def is_rest(nodeid: str) -> bool:
    """Return True if a case, its test or its file is in the list of the rest."""
    return _is_listed(nodeid, _REST)


def is_long(nodeid: str) -> bool:
    """Return True if a case, its test or its file is in the list of long cases."""
    return _is_listed(nodeid, _LONG)


def _is_listed(nodeid: str, names: frozenset[str]) -> bool:
    test = nodeid.partition("[")[0]
    return not names.isdisjoint((nodeid, test, test.partition("::")[0]))
