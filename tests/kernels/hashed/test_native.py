"""The C file against the twin, bit for bit, and under sanitizers."""

from __future__ import annotations

import copy
import dataclasses
import random
import re
import shutil
import subprocess
from itertools import chain
from pathlib import Path

import pytest
import torch

from recsys.kernels.hashed import build, native, twin
from recsys.kernels.hashed.index import IdIndex, IndexSettings, geometry
from tests.kernels.hashed.cases import (
    EXTREMES,
    SETTINGS,
    assert_same,
    assert_same_state,
    batch_of,
    ids_of_line,
    index_of,
    settings_of,
)

COMPILER = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


def map_both(
    indexes: list[IdIndex], twins: list[IdIndex], parts: list[list[int]], *now: int
) -> twin.Found:
    """Map a batch by the C file and by the twin, and compare results and states."""
    library = build.library()
    assert library is not None
    ids = torch.tensor([*chain(*parts)], dtype=torch.int64)
    sizes = [len(part) for part in parts]
    step, pin, is_training = now
    returns_old = step % 2 == 0
    given = ids, sizes, step, pin, bool(is_training), returns_old
    found = native.map_tables(library, indexes, *given)
    assert_same(found, twin.map_tables(twins, *given))
    assert len(found[5]) == (len(found[1]) if returns_old else 0)
    for index, other in zip(indexes, twins, strict=True):
        assert_same_state(index, other)
    return found


def stream(seed: int, names: list[str], num_steps: int, most_ids: int, universe: int) -> list[int]:
    """Map a stream by both, for tables of several settings; return the sums of the counts."""
    draw = random.Random(seed)
    indexes = [
        index_of(SETTINGS[name], lines=1 + i % 3, num_regions=1 << i % 4, seed=i - 2)
        for i, name in enumerate(names)
    ]
    twins, step, total = copy.deepcopy(indexes), 1, torch.zeros(5, dtype=torch.int64)
    for _ in range(num_steps):
        parts = [batch_of(draw, most_ids, universe) for _ in names]
        step += draw.choice([0, 1, 1, 1, 5])
        found = map_both(indexes, twins, parts, step, step - draw.randrange(4), draw.random() < 0.9)
        total += found[4].sum(0)
    return total.tolist()


def test_a_group_of_tables_equals_the_twin() -> None:
    assert min(stream(0, list(SETTINGS), 60, most_ids=150, universe=600)) > 0


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_equals_the_twin(name: str) -> None:
    hits, admitted, *_ = stream(1, [name] * 3, 30, most_ids=400, universe=1500)
    assert min(hits, admitted) > 0


def test_a_million_operations_equal_the_twin() -> None:
    counts = stream(2, list(SETTINGS), 120, most_ids=2000, universe=4000)
    assert counts[0] + counts[4] > 1_000_000


@pytest.mark.parametrize("name", ["lru", "ttl", "at least 2", "distance"])
def test_many_ids_of_one_line_equal_the_twin(name: str) -> None:
    crowd = ids_of_line(100_000, 7)
    indexes, twins = [index_of(SETTINGS[name])], [index_of(SETTINGS[name])]
    small = crowd[:40]
    map_both(indexes, twins, [small], 1, 1, True)
    rows = map_both(indexes, twins, [crowd], 5, 5, True)[0]
    assert rows.max() < 64
    map_both(indexes, twins, [crowd], 6, 6, False)


def test_values_at_their_limits() -> None:
    """Extreme ids, saturated counts, and the last step."""
    last = 2**31 - 1
    for name in ("lfu", "distance", "at least 5"):
        indexes = [index_of(SETTINGS[name])]
        map_both(indexes, copy.deepcopy(indexes), [EXTREMES], 1, 1, True)
        indexes[0].seen[indexes[0].last_used > 0] = last
        indexes[0].sketch.fill_(255)
        twins = copy.deepcopy(indexes)
        for step in (2, last - 1, last):
            map_both(indexes, twins, [EXTREMES + ids_of_line(300, 7)], step, step, True)


def test_empty_groups_and_tables() -> None:
    map_both([], [], [], 1, 1, True)
    indexes = [index_of(SETTINGS["lru"]) for _ in range(3)]
    assert map_both(indexes, copy.deepcopy(indexes), [[], [5, 6], []], 1, 1, True)[3] == [0, 2, 0]


def test_an_array_that_moved_is_used_at_its_new_place() -> None:
    """Descriptions of indexes are kept from call to call; arrays may get another storage."""
    index, library = index_of(SETTINGS["lru"]), build.library()
    assert library is not None
    ids = torch.arange(10)
    native.map_tables(library, [index], ids, [10], 1, 1, True)
    index.ids.set_(index.ids.clone())
    native.map_tables(library, [index], ids + 10, [10], 2, 2, True)
    assert set(index.ids[index.last_used > 0].tolist()) == set(range(20))


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("ids", torch.zeros(128, dtype=torch.int32)),
        ("seen", torch.zeros(127, dtype=torch.int32)),
        ("sketch", torch.zeros(1024, dtype=torch.uint8)[::2]),
        ("digests", torch.zeros(128, dtype=torch.uint8, device="meta")),
    ],
)
def test_arrays_are_validated(name: str, array: torch.Tensor) -> None:
    settings = settings_of(eviction="lfu", admission="at_least", admission_value=2)
    index, library = dataclasses.replace(index_of(settings), **{name: array}), build.library()
    assert library is not None
    with pytest.raises(ValueError, match=rf"^{name} must be .*on {array.device}\.$"):
        native.map_tables(library, [index], torch.zeros(1, dtype=torch.int64), [1], 1, 1, True)


def test_groups_that_share_an_index_and_arrays_that_move() -> None:
    indexes = [index_of(SETTINGS[name], seed=i) for i, name in enumerate(SETTINGS)]
    twins = copy.deepcopy(indexes)
    for step in range(1, 30):
        count = 1 + step % 3
        some = [0, *random.Random(step).sample(range(1, len(indexes)), count - 1)]
        parts = [batch_of(random.Random(step), 40, 300) for _ in some]
        map_both([indexes[i] for i in some], [twins[i] for i in some], parts, step, step, 1)
        if step % 5 == 0:
            for array in (indexes[0].ids, indexes[0].digests):
                array.set_(array.clone())


def compiled(folder: Path, *flags: str) -> Path:
    assert COMPILER is not None
    program = folder / "driver"
    source = Path(__file__).with_name("driver.c")
    command = [COMPILER, "-std=c11", "-g", "-Wall", "-Wextra", "-Werror", *flags]
    command += [f"-I{build.SOURCES[0].parent}", "-o", str(program), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, steps: int) -> str:
    command = [str(program), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_digests_are_compared_alike_by_all_instructions(tmp_path: Path) -> None:
    """Instructions of this machine, of any machine of its kind, and without vectors."""
    expected = run(compiled(tmp_path, "-O2"), 100)
    for flag in ("-march=native", "-DRECSYS_PORTABLE"):
        assert run(compiled(tmp_path, "-O2", flag), 100) == expected


@pytest.mark.parametrize("flag", ["-march=native", "-DRECSYS_PORTABLE"])
def test_random_calls_under_sanitizers(tmp_path: Path, flag: str) -> None:
    flags = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", flag]
    run(compiled(tmp_path, *flags), 30_000)


def test_a_table_of_usual_size_equals_the_twin() -> None:
    settings: IndexSettings = settings_of(eviction="lfu", half_life=100, ttl=1000)
    rows, num_regions = geometry(100_000)
    indexes = [IdIndex.empty(settings, rows, num_regions, 0, num_regions, 5)]
    twins = copy.deepcopy(indexes)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 6):
        ids = torch.randint(-(2**62), 2**62, (40_000,), generator=generator)
        part = [*ids.tolist(), *indexes[0].ids[:100].tolist()]
        map_both(indexes, twins, [part], step, step, True)
    assert indexes[0].last_used.count_nonzero() > 0.99 * rows


def test_the_core_of_serving_declares_the_function_of_the_file() -> None:
    """The core calls the C file without a header, so nothing else compares the parameters."""
    root = Path(build.__file__).parents[2]
    sources = (root / "kernels/hashed/hash_index.c", root / "inference/cpp/hash_index.cpp")
    parameters = []
    for source in sources:
        text = source.read_text()
        declared = re.search(r"int64_t recsys_map_ids\(([^)]*)\)", text)
        assert declared is not None
        words = declared[1].replace("std::", "").replace("CTable", "Table").replace("*", " * ")
        parameters.append([" ".join(part.split()) for part in words.split(",")])
    assert parameters[0] == parameters[1]
