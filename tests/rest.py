"""The cases that `make test` leaves to `make test REST=1`, in `tests/rest.txt`.

`python -m tests.mutants choose FOLDER` writes the list: `make test` keeps the cases that are quick
for the lines that they execute.
"""

from __future__ import annotations

from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")
_NAMES = frozenset(LIST.read_text().splitlines())


def is_rest(nodeid: str) -> bool:
    """Return True if a case, its test or its file is in the list.

    Args:
        nodeid: The id of a case.
    """
    test = nodeid.partition("[")[0]
    return not _NAMES.isdisjoint((nodeid, test, test.partition("::")[0]))
