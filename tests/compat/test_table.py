"""Every entry of the table is there, and nothing that users know is left out of it."""

from __future__ import annotations

import importlib
import inspect

import recsys
from recsys.compat.table import HOMES, INSTEAD, TABLE, Home, home_of, reason_of
from tests.all_modules import all_modules
from tests.compat.facts import read_lines
from tests.offenders import check_each

# Modules whose names are also names of other classes elsewhere in TorchRec.
ROOMS = (
    "torchrec.quant.",
    "torchrec.models.deepfm.",
    "torchrec.modules.feature_processor.",
    "torchrec.distributed.planner.",
    "torchrec.metrics.hindsight_target_pr.",
    "torchrec.metrics.mae.",
    "torchrec.metrics.segmented_ne.",
    "torchrec.metrics.xauc.",
    "torchrec.datasets.scripts.npy_preproc_criteo.",
    "torchrec.datasets.scripts.contiguous_preproc_criteo.",
    "torchrec.datasets.scripts.shuffle_preproc_criteo.",
)


def our_public_names() -> set[str]:
    names = set()
    for module_name in all_modules():
        if module_name.startswith("recsys.compat"):
            continue
        module = importlib.import_module(module_name)
        for name, value in vars(module).items():
            defined_here = getattr(value, "__module__", None) == module_name
            if not name.startswith("_") and (defined_here or name.isupper()):
                names.add(name)
    return names


def names_public_objects(row: tuple[str, str, list[str]]) -> None:
    theirs, _, words = row
    for word in words:
        name, _, alias = word.partition("=")
        home = HOMES[theirs][alias or name]
        value = getattr(importlib.import_module(home.module), home.name)
        assert not home.name.startswith("_")
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__.startswith("recsys.")
            assert (value.__doc__ or "").strip()


def test_rows_name_public_objects() -> None:
    check_each(names_public_objects, TABLE)


def test_rows_are_sorted_within() -> None:
    for theirs, ours, words in TABLE:
        assert words == sorted(words), (theirs, ours)


def test_a_name_means_one_object_everywhere() -> None:
    homes: dict[str, set[int]] = {}
    for theirs, names in HOMES.items():
        for name, home in names.items():
            value = getattr(importlib.import_module(home.module), home.name)
            room = next((room for room in ROOMS if f"{theirs}.".startswith(room)), "")
            homes.setdefault(room + name, set()).add(id(value))
    assert [name for name, objects in homes.items() if len(objects) > 1] == []


def test_parents_of_modules_are_modules() -> None:
    assert HOMES["torchrec.sparse"] == {}
    assert HOMES["torchrec.sparse.jagged_tensor"]["KeyedTensor"] == Home(
        "recsys.sparse", "KeyedTensor"
    )
    assert all(m == "torchrec" or m.rpartition(".")[0] in HOMES for m in HOMES)


def test_names_in_use_that_we_lack_have_a_reason() -> None:
    ours = our_public_names()
    for dotted in (line[1:] for line in read_lines("-")):
        module, _, name = dotted.rpartition(".")
        assert name not in ours, f"{dotted} is ours: map it"
        assert home_of(module, name) is None, dotted
        assert reason_of(dotted) is not None, dotted


def test_top_level_names_are_those_of_the_table() -> None:
    assert set(HOMES["torchrec"]) <= set(recsys.__all__)
    for name, home in HOMES["torchrec"].items():
        assert getattr(recsys, name) is getattr(importlib.import_module(home.module), home.name)


def test_advice_is_for_names_that_are_not_here() -> None:
    known = {f"{module}.{name}" for module, names in HOMES.items() for name in names}
    for start in INSTEAD:
        assert not [name for name in known if name == start or name.startswith(f"{start}.")], start
