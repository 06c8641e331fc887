"""Manifests: damaged members, and values that a package must not have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recsys.inference import package
from recsys.inference.packages.mapping import MappedFile, map_files
from tests.damaged_manifests import FILES, complaints
from tests.inference.small_package import arguments_of, random_request, small_model


@pytest.mark.filterwarnings("ignore")
def test_damaged_members_of_packages_and_checkpoints_are_named() -> None:
    """The short form of `python -m tests.damaged_manifests`."""
    wrong, outcomes, counts = complaints(150, seed=3)
    assert wrong == []
    assert counts[("overflow", "of the logs")] > 10
    assert all(counts[(name,)] == 30 for name in FILES)
    assert min(outcomes["ValueError"], outcomes["CheckpointError"], outcomes["opens"]) > 10


@pytest.mark.parametrize("default", [float("nan"), float("inf")])
def test_values_that_servers_do_not_read_are_not_written(tmp_path: Path, default: float) -> None:
    inputs = arguments_of(random_request(3, seed=0))
    defaults = {"dense_features": default}
    with pytest.raises(ValueError, match=r"inputs\[0\].default must be a finite number"):
        package(small_model(0), tmp_path / "m", inputs, programs=["torchscript"], defaults=defaults)
    assert list((tmp_path / "m").iterdir()) == []
    with pytest.raises(ValueError, match=r"max_rows must .*received 9223372036854775808\."):
        package(small_model(0), tmp_path / "m", inputs, programs=["torchscript"], max_rows=2**63)


@pytest.mark.parametrize(
    ("offset", "size"), [(2**36, 8), (65536, 1), (-65536, 8), (8, 8), (0, 9), (0, -1)]
)
def test_files_are_mapped_inside_their_buffer(tmp_path: Path, offset: int, size: int) -> None:
    file = tmp_path / "rows"
    file.write_bytes(bytes(range(8)))
    with pytest.raises(ValueError, match=r"must fill a place in.* 65536"):
        map_files(65536, [MappedFile(file, offset, size)])
    assert map_files(65536, [MappedFile(file, 0, 8)])[:8].tolist() == list(range(8))
    assert map_files(0, [MappedFile(file, 0, 0)]).shape == torch.Size([0])
