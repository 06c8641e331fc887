"""The build of the C file: two at once, no compiler, folders that cannot be used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recsys.kernels.hashed import build

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"
)

SCRIPT = """
import torch
from recsys.kernels.hashed import build
from recsys.kernels.hashed.index import *
settings = IndexSettings(eviction="lru", half_life=0, exponent=1, ttl=0, admission="always",
                         admission_value=0, is_shared=True)
index = HashIndex.empty(settings, 128, 2, 0, 2, seed=1)
rows = map_ids([index], torch.arange(30), [30], 1, 1, True).rows
assert index.ids[rows].tolist() == list(range(30))
print(build.describe())
"""


def start(folder: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "always", "-c", SCRIPT],
        env=os.environ | {"RECSYS_CACHE": str(folder), "PYTHONPATH": os.getcwd()} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return output.strip(), errors


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, and nothing loaded yet."""
    build._loaded.cache_clear()
    monkeypatch.setenv("RECSYS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RECSYS_HASH", raising=False)
    yield tmp_path / "cache"
    build._loaded.cache_clear()


@needs_compiler
def test_two_processes_build_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    found = [result(process) for process in [start(folder), start(folder)]]
    [library] = folder.iterdir()
    assert found == [(f"C: {library}", "")] * 2


@needs_compiler
def test_the_library_is_built_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build.load().text
    monkeypatch.setattr(build, "_compile", None)
    assert build.load().text == path
    assert build.describe() == f"C: {path}"
    assert build.library() is not None


@needs_compiler
def test_the_name_has_what_the_library_depends_on(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = {build.cache_path()}
    other = tmp_path / "hash_index.c"
    other.write_text(build.SOURCES[0].read_text() + "\n")
    for name, value in {
        "SOURCES": (other, *build.SOURCES[1:]),
        "FLAGS": (*build.FLAGS, "-g"),
        "_cpu_features": lambda: "flags: none",
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(build, name, value)
            names.add(build.cache_path())
    monkeypatch.setattr("platform.machine", lambda: "other")
    names.add(build.cache_path())
    assert len(names) == 5


@needs_compiler
@pytest.mark.parametrize("kind", ["file", "read-only", "no home"])
def test_a_cache_folder_that_cannot_be_used(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "file":
        fresh.write_text("")
    elif kind == "read-only":

        def refuse(*args: object, **options: object) -> None:
            raise PermissionError(13, "Permission denied", str(fresh))

        monkeypatch.setattr(Path, "mkdir", refuse)  # root may write to any folder
    else:
        monkeypatch.delenv("RECSYS_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert build.describe().startswith("C: in memory")
    assert build.library() is not None
    assert not fresh.is_dir()


@needs_compiler
def test_a_damaged_library_is_replaced(fresh: Path) -> None:
    path = build.cache_path()
    assert path is not None
    path.parent.mkdir()
    path.write_bytes(b"")
    assert build.describe() == f"C: {path}"
    assert [path] == list(fresh.iterdir())


def test_without_a_compiler_the_twin_serves_with_one_warning(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O1")
    with pytest.warns(RuntimeWarning, match=r"no C compiler \(no-such-compiler -O1\).*set CC"):
        assert build.library() is None
    assert build.library() is None  # warnings are errors
    assert build.describe() == "torch: there is no C compiler (no-such-compiler -O1)"


def test_a_compiler_that_fails_is_named(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{shutil.which('sh')} -c 'echo broken >&2; exit 3'")
    with pytest.warns(RuntimeWarning, match=r"sh failed \(broken\)"):
        assert build.library() is None


@needs_compiler
def test_a_compiler_without_flags_of_the_cpu(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "CPU_FLAGS", (("-march=no-such-cpu",), ()))
    assert build.describe().startswith("C: ")


def test_the_twin_is_forced(tmp_path: Path) -> None:
    assert result(start(tmp_path, RECSYS_HASH="torch")) == ("torch: RECSYS_HASH=torch", "")


@needs_compiler
def test_the_c_files_compile_without_warnings(tmp_path: Path) -> None:
    command = [*build._compiler(), *build.FLAGS, "-Werror", "-Wconversion", "-pedantic", "-o"]
    subprocess.run(
        [*command, str(tmp_path / "x.so"), *map(str, build.SOURCES)], check=True, timeout=60
    )
