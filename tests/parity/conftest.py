"""Parity needs TorchRec: the extra ``peers``, installed as the Makefile does."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torchrec") else ["test_*.py"]
