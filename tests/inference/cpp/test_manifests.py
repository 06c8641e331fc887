"""Manifests through Python and the C++ core: equal values of numbers, and equal verdicts."""

from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from recsys.inference.packages.manifest import read_manifest, sha256_of, verify_files
from tests.damage import damaged
from tests.inference.cpp import fake_package
from tests.inference.cpp.test_columns import whole_request
from tests.inference.cpp.test_core import opened, pytestmark  # noqa: F401

NUMBERS: list[Any] = [
    0, -0.0, 1, 5e-324, -5e-324, 1e-310, 2.2250738585072014e-308, 1e-400, 1e308, -1e308, 2**53 + 1,
    2**62, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, 10**30, -(10**300), 0.1, 1e22, 1e23,
]  # fmt: skip


def number_of(draw: random.Random) -> Any:
    """A finite number: a special one, a whole one of any size, or one of any bits."""
    kind = draw.randrange(3)
    if kind == 0:
        return draw.choice(NUMBERS)
    if kind == 1:
        return draw.randrange(-(10 ** draw.randrange(1, 300)), 10 ** draw.randrange(1, 300))
    found: float = struct.unpack("d", draw.randbytes(8))[0]
    return found if math.isfinite(found) else 0.0


def name_of(draw: random.Random) -> str:
    letters = "aZ0 .'\"\\/\n\t\u0001é北\U0001f600"
    return "".join(draw.choices(letters, k=draw.randrange(1, 8)))


def test_random_manifests_have_one_meaning(library: Path, tmp_path: Path) -> None:
    """500 with denormal numbers, whole numbers beyond 64 bits and any text, read by both."""
    draw = random.Random(0)
    version = fake_package.write_raw(tmp_path / "1")
    path = version / "manifest.json"
    text = path.read_text()
    kinds: Counter[str] = Counter()
    for case in range(500):
        manifest = json.loads(text)
        age, pay, *_ = columns = manifest["columns"]
        low, high = sorted([number_of(draw), number_of(draw)], key=float)
        age |= {"low": low, "high": high, "standardize": bool(draw.randrange(2))}
        age |= {"mean": number_of(draw), "deviation": abs(number_of(draw)) or 1}
        pay |= {"missing": number_of(draw), "log1p": False, "name": f"p{name_of(draw)}"}
        manifest["outputs"][0]["name"] = f"o{name_of(draw)}"
        manifest["inputs"][0]["default"] = number_of(draw)
        manifest[name_of(draw)] = [number_of(draw), name_of(draw), None, True, {"": []}]
        used = [v for c in columns for v in c.values() if isinstance(v, int | float) and v]
        kinds["denormal"] += any(0 < abs(float(v)) < 2.3e-308 for v in used)
        kinds["64 bits"] += any(isinstance(v, int) and not -(2**63) <= v < 2**63 for v in used)
        sample = {n.replace("response.score", f"response.{manifest['outputs'][0]['name']}"): v
                  for n, v in fake_package.SAMPLE.items()}  # fmt: skip
        save_file(sample, version / "sample.safetensors")
        about = manifest["files"]["sample.safetensors"]
        about["bytes"] = (version / "sample.safetensors").stat().st_size
        about["sha256"] = sha256_of(version / "sample.safetensors")
        path.write_text(json.dumps(manifest, ensure_ascii=bool(draw.randrange(2))))
        found = read_manifest(version)
        verify_files(version, found, True)
        core = opened(library, version)
        value = draw.choice([float(low), float(high), 1.0, draw.uniform(-1e3, 1e3)])
        request = {**whole_request(1), "age": torch.tensor([value], dtype=torch.float64)}
        [response] = core.run([request])
        core.close()
        clipped = one = min(max(value, float(low)), float(high))
        with np.errstate(all="ignore"):
            if age["standardize"]:
                one = float((np.float64(one) - float(age["mean"])) / float(age["deviation"]))
            two = float(pay["missing"])
            score = np.float32(one) + np.float32(two)
        most = float(np.finfo(np.float32).max)
        bad = next((v for v in (clipped, one, two) if not abs(v) <= most), None)
        if bad is not None:
            kinds["refused"] += 1
            assert "numbers in the range of float32" in str(response), (case, response)
            continue
        kinds["answered"] += 1
        assert isinstance(response, dict), (case, response)
        assert response[manifest["outputs"][0]["name"]].item() == float(score), case
    assert min(kinds[kind] for kind in ("denormal", "64 bits", "refused", "answered")) > 50, kinds


def test_damaged_manifests_have_one_verdict(library: Path, tmp_path: Path) -> None:
    """Refused by both or by none, before the program and the vocabularies are opened."""
    version = fake_package.write_recommender(tmp_path / "1", fake_package.CITIES)
    path = version / "manifest.json"
    value = json.loads(path.read_text())
    verdicts: Counter[str] = Counter()
    for member, damage, found in damaged(value, 1500, seed=0):
        path.write_text(json.dumps(found))
        errors = []
        for check in (read_manifest, lambda one: opened(library, one).close()):
            try:
                check(version)
                errors.append("")
            except ValueError as error:
                errors.append(str(error))
        python, core = errors
        rules = ("must be a manifest", "must have a description of its columns")
        is_refused = any(rule in core for rule in rules) and "no whole vocabulary" not in core
        verdicts[f"{bool(python)}, {is_refused}"] += 1
        assert bool(python) == is_refused, (member, damage, python, core)
    assert min(verdicts.values()) > 100, verdicts
