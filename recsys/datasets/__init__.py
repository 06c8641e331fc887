"""Readers of recommendation data that yield batches of dense features, jagged ids and labels.

`utils` defines the batch and its division among ranks. `random` generates batches, `criteo` reads
the Criteo click logs, and `rows` reads single lines. Readers take `rank` and `world_size` as
arguments and need no process group.
"""

from recsys.lazy import lazy_names

__getattr__ = lazy_names(__name__, {})
