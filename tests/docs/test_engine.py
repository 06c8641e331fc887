"""The pictures of docs/engine.md show the layouts of today."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine_pictures", DOCS / "engine_pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_up_to_date(pictures: ModuleType) -> None:
    for name, generators in pictures.PLANS.items():
        digest = pictures.digest_of(pictures.layout_of(generators))
        picture = (pictures.FOLDER / f"{name}.svg").read_text()
        assert f"layout {digest}" in picture, "run: python docs/engine_pictures.py"


def test_every_picture_is_on_the_page(pictures: ModuleType) -> None:
    page = (DOCS / "engine.md").read_text()
    shown = re.findall(r"!\[[^\]]+\]\(engine/(\w+)\.svg\)", page)
    assert shown == list(pictures.PLANS)
    assert {path.stem for path in pictures.FOLDER.iterdir()} == set(shown)


def test_pictures_are_drawn(pictures: ModuleType, tmp_path: Path) -> None:
    pictures.draw(tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {f"{name}.svg" for name in pictures.PLANS} == set(drawn)
    assert all("data_parallel" in text or "users" in text for text in drawn.values())
