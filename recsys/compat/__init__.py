"""Names that users of other libraries know: `torchrec` makes `import torchrec` mean recsys.

`table` says which of our objects stands for which name, `torchrec` installs it. A script that
cannot be touched runs through `python -m recsys.compat script.py`.
"""

from recsys.lazy import lazy_names

__getattr__ = lazy_names(__name__, {})
