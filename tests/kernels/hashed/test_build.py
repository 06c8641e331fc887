"""The build of the C file: two at once, no compiler, folders that cannot be used."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from recsys.kernels.hashed import build

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"
)

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import torch
from recsys.kernels.hashed import build
from recsys.kernels.hashed.index import *
settings = IndexSettings(eviction="lru", half_life=0, exponent=1, ttl=0, admission="always",
                         admission_value=0, is_shared=True)
index = IdIndex.empty(settings, 128, 2, 0, 2, seed=1)
rows = map_ids([index], torch.arange(30), [30], 1, 1, True).rows
assert index.ids[rows].tolist() == list(range(30))
print(build.describe())
"""


def start(folder: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "always", "-c", SCRIPT],
        cwd=folder.anchor,  # the current folder would be imported from
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
    monkeypatch.setattr(build, "compile_library", None)
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
@pytest.mark.parametrize("place", ["file", "folder", "parent"])
@pytest.mark.parametrize("change", ["group", "others", "owner"])
def test_a_library_that_others_can_replace_is_not_loaded(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, place: str, change: str
) -> None:
    cached = Path(build.load().text)
    path = {"file": cached, "folder": cached.parent, "parent": cached.parents[1]}[place]
    if change == "owner":
        if os.geteuid():
            pytest.skip("only root can give a file to another user")
        os.chown(path, 65534, 65534)
    else:
        path.chmod(path.stat().st_mode | (0o020 if change == "group" else 0o002))
    loaded = []
    monkeypatch.setattr(build.ctypes, "CDLL", lambda name: loaded.append(name))
    message = rf"is not used: .*{re.escape(str(path))}.* Set RECSYS_CACHE to a folder that only you"
    with pytest.warns(RuntimeWarning, match=message):
        assert build.load().text.startswith("in memory")
    assert str(cached) not in loaded
    assert len(loaded) == 1


@needs_compiler
def test_folders_such_as_tmp_may_be_shared(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.parent.chmod(0o1777)
    monkeypatch.setenv("RECSYS_CACHE", str(fresh / "new"))
    before = os.umask(0)
    try:
        assert build.load().text == str(build.cache_path())
    finally:
        os.umask(before)
    assert build._danger(fresh / "new") == ""


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


@needs_compiler
def test_without_a_compiler_the_library_of_the_wheel_serves(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prebuilt = tmp_path / "prebuilt.so"
    build.compile_library(prebuilt, [()])
    monkeypatch.setattr(build, "PREBUILT", prebuilt)
    path = build.load().text
    assert path == str(build.cache_path())  # a compiler is preferred
    Path(path).unlink()
    monkeypatch.setenv("CC", "no-such-compiler")
    reason = "there is no C compiler (no-such-compiler)"
    assert build.describe() == f"C: {prebuilt}, prebuilt: {reason}"
    build._loaded.cache_clear()
    other = tmp_path / "other.so"  # the loader knows the first by its path
    other.write_bytes(b"\x7fELF of another machine")
    monkeypatch.setattr(build, "PREBUILT", other)
    with pytest.warns(RuntimeWarning, match=r"no C compiler \(no-such-compiler\)"):
        assert build.library() is None


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="Linux on x86-64 only"
)
@needs_compiler
def test_a_wheel_with_the_library(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "recsys", tree / "recsys", ignore=ignored)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d"]
    for folder, variable in (("pure", "0"), ("prebuilt", "1")):
        subprocess.run(
            [*command, str(tmp_path / folder)], cwd=tree, check=True, timeout=120,
            env=os.environ | {"RECSYS_PREBUILT": variable}, capture_output=True,
        )  # fmt: skip
    [pure] = (tmp_path / "pure").iterdir()
    [wheel] = (tmp_path / "prebuilt").iterdir()
    assert pure.name.endswith("-py3-none-any.whl")
    assert wheel.name.endswith("-py3-none-manylinux_2_17_x86_64.whl")
    contents = [set(zipfile.ZipFile(path).namelist()) for path in (pure, wheel)]
    assert {"recsys/kernels/hashed/hash_index.so"} == contents[1] - contents[0]
    assert {f"recsys/kernels/hashed/{path.name}" for path in build.SOURCES} < contents[0]
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    library = installed / "recsys" / "kernels" / "hashed" / "hash_index.so"
    symbols = library.read_bytes()
    versions = {tuple(map(int, v.split(b"."))) for v in re.findall(rb"GLIBC_([0-9.]+)", symbols)}
    assert max(versions) <= (2, 17)
    found = start(tmp_path / "cache", CC="no-such-compiler", PYTHONPATH=str(installed))
    reason = "there is no C compiler (no-such-compiler)"
    assert result(found) == (f"C: {library}, prebuilt: {reason}", "")


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
