"""Readers of recommendation data that give batches of dense features, jagged ids and labels.

`utils` says what a batch is and how ranks share one; `random` makes batches up, `criteo`
reads real ones and `rows` single lines. Nothing needs a process group: a reader is told its rank.
"""

from recsys.lazy import lazy_names

__getattr__ = lazy_names(__name__, {})
