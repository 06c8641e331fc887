"""Compatibility with TorchRec: `torchrec.install` makes `import torchrec` import recsys objects.

`table` maps TorchRec names to recsys objects, and `torchrec` installs them. To run a script
without changing it, use `python -m recsys.compat script.py`.
"""

from recsys.base.lazy import lazy_names

__getattr__ = lazy_names(__name__, {})
