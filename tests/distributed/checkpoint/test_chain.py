"""A chain that is not whole, or not the one that was saved, is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recsys.distributed.checkpoint import (
    CheckpointError,
    export_safetensors,
    load_checkpoint,
    read_checkpoint,
)
from recsys.distributed.checkpoint.versions import MANIFEST
from tests.distributed.cases import assert_same
from tests.distributed.checkpoint.test_delta import make, save, state_of, step


def _chain(path: Path, seed: int = 0) -> None:
    model = make()
    for number in range(5):
        step(model, 100 * seed + number)
        save(path, model)


def _lose(path: Path) -> None:
    shutil.rmtree(path / "step-3")


def _lose_the_base(path: Path) -> None:
    shutil.rmtree(path / "step-1")


def _leave_unfinished(path: Path) -> None:
    (path / "step-2" / MANIFEST).unlink()


def _double(path: Path) -> None:
    shutil.copytree(path / "step-4", path / "step-9")


def _reorder(path: Path) -> None:
    (path / "step-3").rename(path / "held")
    (path / "step-4").rename(path / "step-3")
    (path / "held").rename(path / "step-4")


def _put_one_of_another_chain(path: Path) -> None:
    _chain(path.parent / "other", seed=1)
    shutil.rmtree(path / "step-3")
    shutil.copytree(path.parent / "other" / "step-3", path / "step-3")


def _put_another_base(path: Path) -> None:
    _chain(path.parent / "other", seed=1)
    shutil.rmtree(path / "step-1")
    shutil.copytree(path.parent / "other" / "step-1", path / "step-1")


def _put_a_full_version(path: Path) -> None:
    _chain(path.parent / "other", seed=1)
    shutil.rmtree(path / "step-3")
    shutil.copytree(path.parent / "other" / "step-1", path / "step-3")


def _flip(file: Path, place: float = 0.5) -> None:
    data = bytearray(file.read_bytes())
    data[int(len(data) * place)] ^= 4
    file.write_bytes(data)


def _flip_a_bit(path: Path) -> None:
    (file,) = (path / "step-3").glob("*.distcp")
    _flip(file)


def _flip_a_bit_of_a_manifest(path: Path) -> None:
    _flip(path / "step-3" / MANIFEST)


def _flip_a_bit_of_the_newest_manifest(path: Path) -> None:
    _flip(path / "step-5" / MANIFEST)


def _flip_a_bit_of_the_metadata(path: Path) -> None:
    _flip(path / "step-2" / ".metadata")


DAMAGES: dict[Callable[[Path], None], str] = {
    _lose: r"step-4 is a delta and needs .*step-3, which is missing",
    _lose_the_base: r"step-2 is a delta and needs .*step-1, which is missing",
    _leave_unfinished: r"step-3 is a delta and needs .*step-2, which is missing or was never",
    _double: r"step-9 must be the delta of its number; received a copy of step-4",
    _reorder: r"step-5 is a delta on another version than .*step-4",
    _put_one_of_another_chain: r"step-4 is a delta on another version than .*step-3",
    _put_another_base: r"step-2 is a delta on another version than .*step-1",
    _put_a_full_version: r"step-4 is a delta on another version than .*step-3",
    _flip_a_bit: r"step-3/.*\.distcp is damaged|step-3/.*\.distcp has other values",
    _flip_a_bit_of_a_manifest: r"step-4 is a delta on another version than .*step-3",
    _flip_a_bit_of_the_newest_manifest: r"step-5/manifest.json is damaged",
    _flip_a_bit_of_the_metadata: r"step-2/.metadata is damaged",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_chain_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "c"
    _chain(path)
    damage(path)
    model = make()
    for read in (
        lambda: load_checkpoint(path, model, model.fused_optimizer),
        lambda: read_checkpoint(path, optimizer=True),
    ):
        with pytest.raises(CheckpointError, match=DAMAGES[damage]):
            read()


@pytest.mark.parametrize("number", range(1, 6))
def test_any_version_of_a_chain_loads(tmp_path: Path, number: int) -> None:
    model = make()
    states = []
    for seed in range(5):
        step(model, seed)
        save(tmp_path, model)
        states.append(state_of(model))
    other = make()
    load_checkpoint(tmp_path / f"step-{number}", other, other.fused_optimizer)
    assert_same(state_of(other), states[number - 1], rtol=0, atol=0)


def test_a_copy_of_a_whole_chain_and_a_link_load(tmp_path: Path) -> None:
    _chain(tmp_path / "c")
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    (tmp_path / "best").symlink_to(tmp_path / "copy" / "step-4")
    shutil.rmtree(tmp_path / "c")
    expected = read_checkpoint(tmp_path / "copy" / "step-4")
    assert_same(read_checkpoint(tmp_path / "best"), expected, rtol=0, atol=0)


def test_a_table_of_another_size_takes_the_rows_of_a_chain(tmp_path: Path) -> None:
    _chain(tmp_path)
    whole = read_checkpoint(tmp_path)["embedding_bags.static.weight"]
    model = torch.nn.ModuleDict(
        {"embedding_bags": torch.nn.ModuleDict({"static": torch.nn.Embedding(1000, 16)})}
    )
    load_checkpoint(tmp_path, model, allow_partial=True, resize=["static"])
    assert torch.equal(model["embedding_bags"]["static"].weight, whole[:1000])


def test_safetensors_of_a_chain(tmp_path: Path) -> None:
    _chain(tmp_path / "c")
    export_safetensors(tmp_path / "c", tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    for value in read_checkpoint(tmp_path / "c").values():
        assert value.numpy().tobytes() in data
