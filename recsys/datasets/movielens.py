"""MovieLens as samples for training is part of the example: `examples/movielens/data.py`.

In a checkout its names can be taken from here until 0.3. `recsys.datasets.rows` reads the
published files row by row.
"""

import importlib
import sys
import warnings
from pathlib import Path

_EXAMPLES = Path(__file__).parents[2] / "examples"


def __getattr__(name: str) -> object:
    if name.startswith("__"):  # Python and tools probe for these
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not (_EXAMPLES / "movielens" / "data.py").is_file():
        raise ImportError(
            f"{__name__} is no part of the package any more; received a request for {name}. Copy "
            "the folder examples/movielens of the repository beside your script, and import "
            f"{name} from movielens.data."
        )
    if str(_EXAMPLES) not in sys.path:
        sys.path.append(str(_EXAMPLES))
    value: object = getattr(importlib.import_module("movielens.data"), name)
    warnings.warn(
        f"{__name__} goes in 0.3: put the folder examples on sys.path, and import {name} from "
        "movielens.data.",
        DeprecationWarning,
        stacklevel=2,
    )
    return value
