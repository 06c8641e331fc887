"""A bad id has one sentence in training, evaluation, programs and packages.

`cpp/test_core.py` compares errors of the C++ core with errors of `check_request`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from recsys.inference import quantize_embeddings
from recsys.inference.packages.requests import check_request
from recsys.inference.programs import AOTIProgram
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor
from tests.inference.cpp import fake_package
from tests.inference.test_programs import JAGGED, Compiled
from tests.sparse.test_script_modules import script

FILMS = EmbeddingBagConfig(9, 4, "films", feature_names=["a"])


def _batch(bad: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["b", "a"], torch.tensor([7, 0, bad]), lengths=torch.tensor([1, 2]))


def _bags() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=[FILMS])


def _warn(batch: KeyedJaggedTensor) -> None:
    with pytest.warns(UserWarning, match="Table") as caught:
        validate_keyed_jagged_tensor(batch, [FILMS])
    raise IndexError(str(caught[0].message))


def _run_aoti(batch: KeyedJaggedTensor) -> None:
    features = [
        {"name": "b", "rows": None, "table": None, "module": None},
        {"name": "a", "rows": 9, "table": "films", "module": "bags"},
    ]
    metadata = {**JAGGED, "jagged": [{"input": "a", "features": features}, JAGGED["jagged"][1]]}
    program = AOTIProgram(Compiled(metadata), "model.pt2")  # type: ignore[arg-type]
    program(batch.values(), batch.lengths(), torch.tensor([1]), torch.tensor([1]))


def _request(batch: KeyedJaggedTensor) -> None:
    manifest: dict[str, Any] = fake_package.manifest()
    [feature] = [f for f in manifest["inputs"][1]["features"] if f["name"] == "a"]
    feature["rows"] = 9
    bags = {"a": batch["a"].values(), "a.lengths": torch.tensor([2])}
    check_request(manifest, {"dense": torch.zeros(1, 2), **bags})


@pytest.mark.parametrize("bad", [9, -1, 2**62])
@pytest.mark.parametrize(
    ("look_up", "start"),
    [
        (lambda batch: _bags()(batch), ""),
        (lambda batch: _bags().eval()(batch), ""),
        (lambda batch: script(_bags())(batch), ""),
        (lambda batch: quantize_embeddings(_bags())(batch), ""),
        (lambda batch: script(quantize_embeddings(_bags()))(batch), ""),
        (_warn, ""),
        (_run_aoti, "a: "),
        (_request, ""),
    ],
    ids=["train", "eval", "script", "quantized", "scripted quantized", "check", "aoti", "package"],
)
def test_a_bad_id_has_one_sentence(
    look_up: Callable[[KeyedJaggedTensor], object], start: str, bad: int
) -> None:
    with pytest.raises((IndexError, RuntimeError, torch.jit.Error)) as caught:
        look_up(_batch(bad))
    sentence = f"Id {bad} at position 1 of feature 'a' must be from 0 to 8."
    text = str(caught.value)
    if not isinstance(caught.value, IndexError):  # of TorchScript
        assert sentence in text
    else:
        assert text.startswith(start + sentence), text
