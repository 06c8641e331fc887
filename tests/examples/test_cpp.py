"""Programs score in C++ as in Python, bit for bit."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recsys.inference import (
    QuantEmbeddingBagCollection,
    export_aoti,
    export_torchscript,
    quantize_embeddings,
)
from recsys.kernels.tbe_fbgemm import has_cpu_ops
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from tests.base.test_checksums import flip
from tests.cmake import built
from tests.inference.test_export import dlrm, inputs_of, plain_tensors

SOURCE = Path(__file__).parents[2] / "examples" / "cpp"
NAMES = ["user", 'a "film"', "prêt"]

pytestmark = [
    pytest.mark.skipif(not has_cpu_ops(), reason="fbgemm_gpu is not installed"),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake"),
    pytest.mark.skipif(
        not any(map(shutil.which, [os.environ.get("CXX", "c++"), "g++", "clang++"])),
        reason="there is no C++ compiler",
    ),
    pytest.mark.timeout(900),  # the build, on a machine that has other work
]

Score = Callable[..., subprocess.CompletedProcess[str]]


def _run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=environment, cwd=cwd
    )


@pytest.fixture(scope="module")
def score() -> Score:
    """Builds the program once; returns what runs it."""
    return partial(_run, built(SOURCE, needs_torch=True) / "score")


def _inputs(size: int) -> tuple[Tensor, ...]:
    return tuple(plain_tensors(*inputs_of(size)))


def _bags() -> QuantEmbeddingBagCollection:
    torch.manual_seed(0)
    table = EmbeddingBagConfig(30, 8, "a", feature_names=NAMES)
    return quantize_embeddings(EmbeddingBagCollection(tables=[table]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has programs of each kind."""
    folder = tmp_path_factory.mktemp("programs")
    for export, suffix in [(export_torchscript, "pt"), (export_aoti, "pt2")]:
        export(dlrm(), folder / f"dlrm.{suffix}", inputs_of(4))
        export(_bags(), folder / f"bags.{suffix}", [inputs_of(4, NAMES)[1]])
    return folder


def _in_python(model: Path, batches: list[tuple[Tensor, ...]]) -> list[Any]:
    is_package = model.suffix == ".pt2"
    load = torch._inductor.aoti_load_package if is_package else torch.jit.load
    program = load(str(model))
    with torch.inference_mode():
        return [program(*batch) for batch in batches]


@pytest.mark.parametrize("model", ["dlrm.pt", "dlrm.pt2", "bags.pt", "bags.pt2"])
@pytest.mark.parametrize("kind", [list, dict])
def test_scores_are_those_of_python(score: Score, folder: Path, model: str, kind: type) -> None:
    batches = [_inputs(size) for size in (1, 0, 2, 7, 128, 0, 1)]
    if model.startswith("bags"):
        batches = [jagged for _, *jagged in batches]
    torch.save(batches if kind is list else {"inputs": batches, "labels": []}, folder / "b.pt")
    done = score(model, "b.pt", "s.pt", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    expected = _in_python(folder / model, batches)
    scores = torch.load(folder / "s.pt")
    if model.startswith("bags"):
        scores = list(map(dict, scores))
        assert all(list(found) == NAMES for found in scores)
    torch.testing.assert_close(list(scores), expected, rtol=0, atol=0)


def test_strided_tensors_are_scored_like_others(score: Score, folder: Path) -> None:
    strided = [torch.stack([t, t + 1], -1)[..., 0] for t in _inputs(7)]
    torch.save([tuple(strided)], folder / "b.pt")
    done = score("dlrm.pt2", "b.pt", "s.pt", cwd=folder)
    assert done.returncode == 0, done.stderr
    expected = _in_python(folder / "dlrm.pt2", [_inputs(7)])
    torch.testing.assert_close(list(torch.load(folder / "s.pt")), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["dlrm.pt", "dlrm.pt2"])
def test_damaged_programs_are_errors(score: Score, folder: Path, tmp_path: Path, name: str) -> None:
    torch.save([_inputs(2)], tmp_path / "b.pt")
    path = tmp_path / name
    shutil.copy(folder / name, path)
    done = score(name, "b.pt", "s.pt", cwd=tmp_path)
    assert f"Its checksum must be in '{name}.sha256'. Copy both files" in done.stderr
    shutil.copy(folder / f"{name}.sha256", tmp_path)
    assert score(name, "b.pt", "s.pt", cwd=tmp_path).returncode == 0
    rng = random.Random(0)
    for _ in range(10):
        bit = rng.randrange(8 * path.stat().st_size)
        flip(path, bit)
        done = score(name, "b.pt", "never.pt", cwd=tmp_path)
        assert done.returncode == 1
        assert f"does not match its checksum in '{name}.sha256'" in done.stderr
        flip(path, bit)
    assert not (tmp_path / "never.pt").exists()


def test_times_are_printed(score: Score, folder: Path) -> None:
    torch.save([_inputs(1), _inputs(8)], folder / "b.pt")
    done = score("dlrm.pt", "b.pt", "s.pt", "--time", "5", cwd=folder)
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    assert re.fullmatch(r"batch 0: [\d.]+ us", first)
    assert re.fullmatch(r"batch 1: [\d.]+ us", second)
    assert last.startswith("2 batches scored: ")


def _few(dense: Tensor, values: Tensor, lengths: Tensor) -> tuple[Any, ...]:
    return dense, values


def _bad_id(dense: Tensor, values: Tensor, lengths: Tensor) -> tuple[Any, ...]:
    return dense, values + 1000, lengths


def _bad_dtype(dense: Tensor, values: Tensor, lengths: Tensor) -> tuple[Any, ...]:
    return dense, values.float(), lengths


def _bad_lengths(dense: Tensor, values: Tensor, lengths: Tensor) -> tuple[Any, ...]:
    return dense, values, lengths[:-1]


def _bad_width(dense: Tensor, values: Tensor, lengths: Tensor) -> tuple[Any, ...]:
    return dense[:, 1:], values, lengths


def _no_tensor(dense: Tensor, values: Tensor, lengths: Tensor) -> tuple[Any, ...]:
    return dense, values, 3


THREE = "A batch must have 3 tensors (dense_features, sparse_features_values, sparse_features_le"
TUPLES = "tuples of tensors, in a file of torch.save; received 'b.pt'. Expected Tensor"


@pytest.mark.parametrize(
    ("model", "broken", "message"),
    [
        ("dlrm.pt", _few, THREE),
        ("dlrm.pt2", _few, THREE),
        ("dlrm.pt", _bad_id, "Batch 1 of 'b.pt': Id 10"),
        ("dlrm.pt", _bad_lengths, "3 features; received 20 values."),
        ("dlrm.pt", _bad_width, "mat1 and mat2 shapes cannot be multiplied (7x4 and 5x16)"),
        ("dlrm.pt2", _bad_id, "An id is outside its table."),
        ("dlrm.pt2", _bad_dtype, "unmatched dtype, expected: 4(at::kLong), but got: 6"),
        ("dlrm.pt2", _bad_width, "unmatched dim value at 1, expected: 5, but got: 4"),
        ("dlrm.pt", _no_tensor, TUPLES),
    ],
)
def test_bad_batches_are_errors(
    score: Score, folder: Path, model: str, broken: Callable[..., Any], message: str
) -> None:
    torch.save([_inputs(2), broken(*_inputs(7))], folder / "b.pt")
    done = score(model, "b.pt", "never.pt", cwd=folder)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Batch 1 of 'b.pt': " in done.stderr or message == TUPLES
    assert "frame #" not in done.stderr
    assert not (folder / "never.pt").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.pt", "b.pt", "s.pt"], "received 'no.pt'. There is no such file."),
        (["no.pt2", "b.pt", "s.pt"], "received 'no.pt2'. There is no such file."),
        (["b.pt", "b.pt", "s.pt"], "A program must be a file of export_torchscript or, if its"),
        (["dlrm.pt", "no.pt", "s.pt"], "received 'no.pt'. There is no such file."),
        (["dlrm.pt", "dlrm.pt", "s.pt"], "a list, or a dict with one as 'inputs', of tuples"),
        (["dlrm.pt", "b.pt", "no/s.pt"], "file that can be written; received 'no/s.pt'."),
        (["dlrm.pt", "b.pt"], "Usage: score MODEL BATCHES SCORES [--time RUNS] [--fbgemm"),
        (["dlrm.pt", "b.pt", "s.pt", "--time", "x"], "a number of runs, 1 or more; received 'x'"),
        (
            ["dlrm.pt", "b.pt", "s.pt", "--fbgemm", "no"],
            f"made for torch {torch.__version__.partition('+')[0]}, must be in 'no'. Name",
        ),
    ],
)
def test_bad_arguments_are_errors(
    score: Score, folder: Path, arguments: list[str], message: str
) -> None:
    torch.save([_inputs(2)], folder / "b.pt")
    done = score(*arguments, cwd=folder)
    assert done.returncode == 1
    assert message in done.stderr
