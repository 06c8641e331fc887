"""Old paths of names that moved here: the same objects, with a warning that names the new path."""

from __future__ import annotations

import importlib
import pickle
import warnings

import pytest

from recsys.compat.moved import MOVED
from recsys.compat.table import TABLE
from tests.offenders import check_each


def is_deprecated_at_its_old_path(old: str) -> None:
    module, _, name = old.rpartition(".")
    home, _, new_name = MOVED[old].rpartition(".")
    assert name not in vars(importlib.import_module(module))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        scope: dict[str, object] = {}
        exec(compile(f"from {module} import {name}", "script.py", "exec"), scope)
    assert scope[name] is vars(importlib.import_module(home))[new_name]
    assert [(w.category, w.filename, w.lineno) for w in seen] == [
        (DeprecationWarning, "script.py", 1)
    ]
    assert str(seen[0].message).startswith(f"{old} has moved to {MOVED[old]}. ")


def test_old_paths_warn() -> None:
    check_each(is_deprecated_at_its_old_path, MOVED)


def test_scripts_for_torchrec_use_the_new_paths() -> None:
    rows = {f"{ours}.{word.partition('=')[0]}" for _, ours, words in TABLE for word in words}
    assert rows & set(MOVED) == set()
    assert set(MOVED.values()) - rows == set()


def test_pickles_with_old_paths_load() -> None:
    from recsys.compat.tracing import assert_fx_safe

    old = pickle.dumps(assert_fx_safe, 0).replace(b"recsys.compat.tracing", b"recsys.tracing")
    with pytest.warns(DeprecationWarning, match=r"^recsys\.tracing\.assert_fx_safe has moved"):
        assert pickle.loads(old) is assert_fx_safe


def test_unknown_names() -> None:
    import recsys.tracing

    with pytest.raises(AttributeError, match=r"'recsys\.tracing' has no attribute 'nothing'\.$"):
        recsys.tracing.nothing
    assert not hasattr(recsys.tracing, "__path__")
