"""A predict factory as a file."""

from __future__ import annotations

import importlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.package.package_exporter import PackageExporter, PackagingError
from torch.package.package_importer import PackageImporter

from recsys.compat.model_packager import (
    PredictFactoryPackager,
    load_config_text,
    load_pickle_config,
)

SOURCE = """
import torch
from torch import nn

from recsys.compat.model_packager import load_config_text, load_pickle_config
from recsys.compat.inference import BatchingMetadata, PredictFactory, PredictModule


class Predict(PredictModule):
    def predict_forward(self, batch):
        return self.predict_module(batch["dense"])


class Factory(PredictFactory):
    def create_predict_module(self):
        sizes = load_pickle_config("sizes", dict)
        model = nn.Linear(sizes["columns"], 1)
        nn.init.constant_(model.weight, float(load_config_text("value")))
        nn.init.zeros_(model.bias)
        return Predict(model)

    def batching_metadata(self):
        return {"dense": BatchingMetadata("dense", "cpu", [])}

    def result_metadata(self):
        return "tensor"

    def run_weights_independent_tranformations(self, predict_module):
        return predict_module

    def run_weights_dependent_transformations(self, predict_module):
        return predict_module
"""


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "served_factory.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("served_factory")
    del sys.modules["served_factory"]


class Packager(PredictFactoryPackager):
    @classmethod
    def set_extern_modules(cls, pe: PackageExporter) -> None:
        pe.extern("torch.**")

    @classmethod
    def set_mocked_modules(cls, pe: PackageExporter) -> None:
        pe.mock("training_only.**", allow_empty=True)


def test_a_factory_is_loaded_with_its_configs(served: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    configs = {"sizes": {"columns": 3}, "value": "0.5"}
    files = {"notes.txt": "text", "raw.bin": b"\x00\x01"}
    Packager.save_predict_factory(served.Factory, configs, path, files)
    del sys.modules["served_factory"]
    (tmp_path / "served_factory.py").unlink()  # the file has the source
    importer = PackageImporter(path)
    factory = importer.import_module("__module_loader").MODULE_FACTORY()
    assert "torch_package" in type(factory).__module__
    batch = {"dense": torch.tensor([[1.0, 2.0, 3.0]])}
    assert factory.create_predict_module()(batch).tolist() == [[3.0]]
    assert factory.batching_metadata()["dense"].device == "cpu"
    assert importer.load_text("extra_files", "notes.txt") == "text"
    assert importer.load_binary("extra_files", "raw.bin") == b"\x00\x01"
    sys.modules["served_factory"] = served  # the fixture removes it


def test_a_config_of_another_type(served: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    Packager.save_predict_factory(served.Factory, {"sizes": [3], "value": "1"}, path, {})
    factory = PackageImporter(path).import_module("__module_loader").MODULE_FACTORY()
    with pytest.raises(TypeError, match="'sizes' of this package must be a dict; received a list"):
        factory.create_predict_module()


def test_a_loader_of_your_own(served: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    Packager.save_predict_factory(
        served.Factory, {}, path, {}, loader_code="import %PACKAGE%\nname = '%CLASS%'\n"
    )
    assert PackageImporter(path).import_module("__module_loader").name == "Factory"
    with zipfile.ZipFile(path) as package:
        assert not [name for name in package.namelist() if "recsys" in name]


def test_modules_that_nobody_named(served: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "served_helper.py").write_text("")
    source = Path(str(served.__file__))
    source.write_text("import served_helper\n" + SOURCE)
    with pytest.raises(PackagingError, match="served_helper"):
        Packager.save_predict_factory(served.Factory, {}, tmp_path / "model.zip", {})


def test_configs_are_for_code_of_packages() -> None:
    with pytest.raises(RuntimeError, match="code of a package"):
        load_config_text("value")
    with pytest.raises(RuntimeError, match="code of a package"):
        load_pickle_config("sizes", dict)
