"""Packages of all kinds of models: a predictor's outputs equal the model's outputs."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recsys.inference import Predictor, inspect, package, quantize_embeddings, verify, write_delta
from recsys.inference.packages.manifest import sha256_of
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.feature_processor import PositionWeightedModuleCollection
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor

ROWS = {"film": 40, "user": 30}
LENGTHS = torch.tensor([2, 0, 1, 1, 3, 0])


def bags_of(seed: int = 0, is_weighted: bool = False) -> KeyedJaggedTensor:
    """Three samples of two features."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.randint(0, 40, (3,), generator=random),
                     torch.randint(0, 30, (4,), generator=random)])  # fmt: skip
    weights = torch.rand(7, generator=random) if is_weighted else None
    return KeyedJaggedTensor(list(ROWS), ids, weights, lengths=LENGTHS)


def tables_of(config: type, **options: Any) -> list[Any]:
    tables = [config(rows, 8, f"{name}s", feature_names=[name]) for name, rows in ROWS.items()]
    tables[0].feature_names = ["film", "user"] if options.get("shares") else ["film"]
    tables[0].num_embeddings = 40
    return tables


class Rows(nn.Module):
    """A model with a dense input, rows of ids, and a value that is made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = EmbeddingCollection(tables=tables_of(EmbeddingConfig))

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> dict[str, Any]:
        found = self.rows(ids)
        scaled = dense * torch.tensor([1.0, 2.0])
        return {"scaled": scaled, "film": found["film"], "user": found["user"]}


def request_of(bags: KeyedJaggedTensor, **dense: Tensor) -> dict[str, Tensor]:
    request = dict(dense)
    for name, bag in bags.to_dict().items():
        request |= {name: bag.values(), f"{name}.lengths": bag.lengths()}
        if bags.weights_or_none() is not None:
            request[f"{name}.weights"] = bag.weights()
    return request


@pytest.fixture(scope="module")
def dlrm() -> nn.Module:
    torch.manual_seed(0)
    tables = EmbeddingBagCollection(tables=tables_of(EmbeddingBagConfig))
    return quantize_embeddings(DLRM(tables, 2, [8, 8], [8, 1]).eval())


@pytest.fixture(scope="module")
def movies(dlrm: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with both kinds of programs, in a path with spaces."""
    folder = tmp_path_factory.mktemp("with spaces") / "movies"
    inputs = [torch.rand(3, 2), bags_of()]
    return package(dlrm, folder, inputs, programs=["aoti", "torchscript"])


@pytest.fixture
def copied(movies: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(movies, tmp_path / "movies" / "1"))


@pytest.mark.parametrize("kind", ["aoti", "torchscript"])
def test_a_package_equals_the_model(movies: Path, dlrm: nn.Module, kind: str) -> None:
    bags, dense = bags_of(seed=1), torch.rand(3, 2)
    with Predictor(movies, program=kind) as predictor:
        found = predictor(request_of(bags, dense_features=dense))
        empty = predictor({"dense_features": torch.rand(0, 2)})
    torch.testing.assert_close(torch.from_numpy(found["output"]), dlrm(dense, bags).detach())
    assert empty["output"].shape == (0, 1)


def test_the_folder_is_a_model_of_triton(movies: Path) -> None:
    config = (movies.parent / "config.pbtxt").read_text()
    assert 'name: "movies"' in config
    assert 'name: "film.lengths"' in config
    text = inspect(movies)
    assert "table films: 40 rows of 8 int8" in text
    assert "input user: ids from 0 to 29" in text
    verify(movies)


@pytest.mark.parametrize("dtype", [torch.int8, torch.quint4x2, torch.quint2x4, torch.float16])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_pooled_tables_are_equal_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, is_weighted: bool
) -> None:
    tables = tables_of(EmbeddingBagConfig, shares=True)
    model = quantize_embeddings(
        EmbeddingBagCollection(tables=tables, is_weighted=is_weighted), dtype
    )
    bags = bags_of(is_weighted=is_weighted).with_values(bags_of().values() % 30)
    version = package(model, tmp_path / "m", [bags], programs=["torchscript"])
    found = Predictor(version)(request_of(bags))
    wanted = model(bags).to_dict()
    assert found.keys() == wanted.keys()
    for name, output in wanted.items():
        assert torch.equal(torch.from_numpy(found[name]), output)


def test_jagged_outputs_and_values_made_in_forward(tmp_path: Path) -> None:
    model = quantize_embeddings(Rows().eval())
    bags, dense = bags_of(), torch.rand(3, 2)
    version = package(
        model, tmp_path / "m", [dense, bags], programs=["aoti"], defaults={"dense": 1}
    )
    with Predictor(version) as predictor:
        found = predictor(request_of(bags))
    wanted = model(torch.ones(3, 2), bags)
    assert torch.equal(torch.from_numpy(found["scaled"]), wanted["scaled"])
    for name in ROWS:
        assert torch.equal(torch.from_numpy(found[f"{name}.values"]), wanted[name].values())
        assert torch.equal(torch.from_numpy(found[f"{name}.lengths"]), wanted[name].lengths())


def test_feature_processors_and_tables_of_one_name(tmp_path: Path) -> None:
    def bags() -> EmbeddingBagCollection:
        return EmbeddingBagCollection(tables=tables_of(EmbeddingBagConfig), is_weighted=True)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weights = PositionWeightedModuleCollection(dict.fromkeys(ROWS, 5))
            self.a = FeatureProcessedEmbeddingBagCollection(bags(), weights)
            self.b = EmbeddingBagCollection(tables=tables_of(EmbeddingBagConfig))

        def forward(self, ids: KeyedJaggedTensor) -> Tensor:
            return torch.cat([self.a(ids).values(), self.b(ids).values()], dim=1)

    model = quantize_embeddings(Two().eval())
    version = package(model, tmp_path / "m", [bags_of()], programs=["torchscript"])
    found = Predictor(version)(request_of(bags_of(seed=3)))
    assert torch.equal(torch.from_numpy(found["output"]), model(bags_of(seed=3)))
    assert len(list((version / "tables").iterdir())) == 4


def test_versions_share_equal_tables(tmp_path: Path) -> None:
    model = quantize_embeddings(EmbeddingBagCollection(tables=tables_of(EmbeddingBagConfig)))
    first = package(model, tmp_path / "m", [bags_of()], programs=["torchscript"])
    model.embedding_bags["users"].weight[0] += 1
    second = package(model, tmp_path / "m", [bags_of()], programs=["torchscript"], version=2)
    is_shared = {
        name: (first / f"tables/{name}.rows").samefile(second / f"tables/{name}.rows")
        for name in ("films", "users")
    }
    assert is_shared == {"films": True, "users": False}
    with pytest.raises(FileExistsError, match="version"):
        package(model, tmp_path / "m", [bags_of()], programs=["torchscript"], version=2)
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["1", "2", "config.pbtxt"]


def test_a_model_that_combines_rows_is_refused(tmp_path: Path) -> None:
    class Softmax(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = EmbeddingBagCollection(tables=tables_of(EmbeddingBagConfig))

        def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
            return {"share": self.bags(ids).values().softmax(0)}

    model = quantize_embeddings(Softmax().eval())
    with pytest.raises(ValueError, match="share"):
        package(model, tmp_path / "m", [bags_of()], programs=["torchscript"])
    assert not list((tmp_path / "m").iterdir())


def test_updates_and_deltas_change_memory_only(copied: Path, dlrm: nn.Module) -> None:
    before = sha256_of(copied / "tables/films.rows")
    request = request_of(bags_of(), dense_features=torch.rand(3, 2))
    rows = torch.randn(2, 8)
    ids = bags_of().values()[:2]
    with Predictor(copied) as predictor:
        old = predictor(request)["output"]
        file = write_delta(copied, {"films": (ids, rows)})
        predictor.apply(file)
        new = predictor(request)["output"]
        assert predictor.sequence == 1
        with pytest.raises(ValueError, match="sequence number 2"):
            predictor.apply(file)
    assert (old != new).any()
    assert sha256_of(copied / "tables/films.rows") == before
    with Predictor(copied, program="torchscript") as predictor:
        torch.testing.assert_close(predictor(request)["output"], new)
        assert predictor.sequence == 1


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_verify_names_a_missing_file(copied: Path) -> None:
    (copied / "program.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"program\.pt is missing"):
        verify(copied)


CHANGES = {
    "machine": ({"machine": "vax"}, "vax"),
    "instructions": ({"instruction_set": "AVX1024"}, "AVX1024"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_packages_for_other_machines_are_refused(copied: Path, case: str) -> None:
    changed, message = CHANGES[case]
    path = copied / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(ValueError, match=message):
        Predictor(copied, verify_tables=False)


def test_archives_that_leave_the_package_are_refused(copied: Path) -> None:
    program = copied / "program.pt2"
    program.unlink()
    with zipfile.ZipFile(program, "w") as archive:
        archive.writestr("../../x.so", b"code")
    manifest = json.loads((copied / "manifest.json").read_text())
    about = {"bytes": program.stat().st_size, "sha256": sha256_of(program)}
    manifest["files"]["program.pt2"] = about
    (copied / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"\.\./\.\./x\.so"):
        Predictor(copied)


def test_an_array_of_texts_is_refused_alone(movies: Path) -> None:
    good = request_of(bags_of(), dense_features=torch.rand(3, 2))
    with Predictor(movies) as predictor:
        text, last = predictor.run([{"film": np.array(["a"])}, good])
    assert isinstance(text, TypeError)
    assert isinstance(last, dict)
