"""Quantization of a checkpoint equals the quantization of the model, in less memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from recsys.distributed.checkpoint import CheckpointError, save_checkpoint, state
from recsys.inference import quantize_embeddings, quantize_inference_model
from recsys.inference.quant_prep import set_pruning_data
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.feature_processor import PositionWeightedModuleCollection
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection


class Model(nn.Module):
    """Each kind of collection; two tables have one name."""

    def __init__(self, device: str, rows: int = 1000) -> None:
        super().__init__()
        torch.manual_seed(0)
        on = torch.device(device)
        bags = [
            EmbeddingBagConfig(rows, 8, "a", feature_names=["x"]),
            EmbeddingBagConfig(300, 8, "b", feature_names=["y"]),
        ]
        self.bags = EmbeddingBagCollection(tables=bags, device=on)
        self.rows = EmbeddingCollection(
            tables=[EmbeddingConfig(70, 8, "a", feature_names=["x"])], device=on
        )
        weighted = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(50, 8, "c", feature_names=["x"])],
            is_weighted=True,
            device=on,
        )
        positions = PositionWeightedModuleCollection({"x": 5}, on)
        self.weighted = FeatureProcessedEmbeddingBagCollection(weighted, positions)
        self.over = nn.Linear(8, 1, device=on)
        self.plain = nn.BatchNorm1d(3)


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, Model]:
    model = Model("cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    with mock.patch.object(state, "_BLOCK_BYTES", 4096):
        save_checkpoint(tmp_path / "runs", model)
    return tmp_path / "runs", model


def _assert_equal(found: nn.Module, wanted: nn.Module) -> None:
    assert repr(found) == repr(wanted)
    values = wanted.state_dict()
    assert list(found.state_dict()) == list(values)
    for name, value in found.state_dict().items():
        assert torch.equal(value, values[name]), name
    assert not any(tensor.is_meta for tensor in (*found.parameters(), *found.buffers()))


@pytest.mark.parametrize("dtype", [torch.int8, torch.quint4x2, torch.float16, torch.float32])
def test_a_checkpoint_equals_the_model(checkpoint: tuple[Path, Model], dtype: torch.dtype) -> None:
    path, model = checkpoint
    given = Model("meta")
    found = quantize_embeddings(given, dtype, checkpoint=path)
    _assert_equal(found, quantize_embeddings(model, dtype))
    assert given.over.weight.is_meta
    _assert_equal(
        quantize_inference_model(Model("meta"), checkpoint=path),
        quantize_inference_model(model),
    )


def test_pruned_tables_have_their_first_rows(checkpoint: tuple[Path, Model]) -> None:
    path, model = checkpoint
    found, wanted = (set_pruning_data(m, {"b": 130}) for m in (Model("meta"), model))
    _assert_equal(quantize_embeddings(found, checkpoint=path), quantize_embeddings(wanted))


def test_models_that_do_not_fit_are_refused(checkpoint: tuple[Path, Model], tmp_path: Path) -> None:
    path, model = checkpoint
    with pytest.raises(ValueError, match=r"on the meta device, .*'bags\.embedding_bags\.a"):
        quantize_embeddings(model, checkpoint=path)
    with pytest.raises(CheckpointError, match=r"must have 999 rows.*8 columns; .*\(1000"):
        quantize_embeddings(Model("meta", 999), checkpoint=path)
    other = Model("meta")
    other.over = nn.Linear(9, 1)
    with pytest.raises(CheckpointError, match=r"'over\.weight' of .*the shape \(1, 9\)"):
        quantize_embeddings(other, checkpoint=path)
    other.more = nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"received none for \['more.weight', 'more.bias'\]"):
        quantize_embeddings(other, checkpoint=path)
    save_checkpoint(tmp_path / "other", nn.ModuleDict({"over": model.over, "plain": model.plain}))
    bags = nn.ModuleDict({"over": model.over, "bags": Model("meta").bags})
    with pytest.raises(CheckpointError, match="must have one table 'a'"):
        quantize_embeddings(bags, checkpoint=tmp_path / "other")
    model.over.weight.data.fill_(torch.nan)
    model.bags.embedding_bags["b"].weight.data[7] = torch.nan
    save_checkpoint(path, model)
    with pytest.raises(ValueError, match=r"Table 'b' cannot be quantized\..*finite"):
        quantize_embeddings(Model("meta"), checkpoint=path)


MEMORY = """
import resource, sys
import torch
from recsys.distributed.checkpoint import save_checkpoint
from recsys.inference import quantize_embeddings
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
mode, folder, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
def model(device):
    tables = [EmbeddingBagConfig(rows, 64, n, feature_names=[n]) for n in "abcd"]
    return torch.nn.Sequential(EmbeddingBagCollection(tables=tables, device=torch.device(device)))
if mode == "save":
    save_checkpoint(folder, model("cpu"))
else:
    given = model("meta")
    quantize_embeddings(EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(9, 64, "t", feature_names=["f"])]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = quantize_embeddings(given, checkpoint=folder)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = sum(buffer.numel() for buffer in found.buffers())
    print((after - before) * 1024, size, 4 * rows * 64 * 4)
"""


def test_memory_holds_the_quantized_tables_and_a_block(tmp_path: Path) -> None:
    """The float tables have 512 MiB in four tables."""
    for mode in ("save", "quantize"):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, mode, str(tmp_path / "runs"), str(1 << 19)],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    used, quantized, floats = map(int, done.stdout.split())
    assert floats == 512 << 20
    assert used < quantized + (200 << 20) < floats
