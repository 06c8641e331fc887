"""`python -m tests.damaged_manifests`: packages and checkpoints with one damaged member each.

A damaged manifest opens, or ends in a named error; a KeyError or a TypeError names nothing. Rows
that were on the disk must be the saved ones after a load. The command prints how many cases had
each property and each pair of properties.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recsys.distributed.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from recsys.distributed.checkpoint.versions import MANIFEST, _encode
from recsys.features import Categorical, FeatureSpec, Numeric, Timestamp
from recsys.inference import Predictor, inspect, package, quantize_embeddings, write_delta
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.hashed_ids import HashedIds
from recsys.optim import SGD, apply_optimizer_in_backward
from recsys.optim.keyed import KeyedOptimizerWrapper
from recsys.sparse import KeyedJaggedTensor
from tests import properties
from tests.damage import damaged
from tests.modules.ids.test_row_store import batch_of, collection, read, train

Open = Callable[[], object]
FILES = ("raw", "hashed", "full", "delta", "overflow")
PROPERTIES = (
    *FILES, "removed", "repeated", "another member", "null", "true or false", "number", "text",
    "list", "object", "of the top level", "of the logs", "opens", "refused",
)  # fmt: skip


def package_cases(folder: Path) -> Iterator[tuple[Path, Any, Open]]:
    """Yield the manifests of two packages: with raw columns, and with hashed ids."""
    rows = {"city": ["a", "b", "a"], "price": [1.0, 2.0, 3.0], "age": [1.0, 2.0, 4.0]}
    rows |= {"when": [1, 2, 3]}
    spec = FeatureSpec(
        [Categorical("city"), Numeric("price"), Numeric("age", buckets=2), Timestamp("when")]
    ).fit(rows)
    tables = EmbeddingBagCollection(tables=spec.tables(4))
    model = quantize_embeddings(DLRM(tables, 1, [4, 4], [4, 1]).eval())
    version = package(model, folder / "raw", rows, spec=spec, programs=["torchscript"])

    def open_raw() -> None:
        inspect(version)
        with Predictor(version) as predictor:
            if predictor.manifest["columns"]:
                predictor(rows)

    yield version / "manifest.json", spec, open_raw
    tables = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(512, 4, "h", feature_names=["h"], ids=HashedIds())]
    )
    ids = KeyedJaggedTensor(["h"], torch.tensor([3, 2**40]), lengths=torch.tensor([1, 1]))
    apply_optimizer_in_backward(SGD, tables.parameters(), {"lr": 0.1})
    tables(ids)
    own = package(
        quantize_embeddings(tables.eval()), folder / "hashed", [ids], programs=["torchscript"]
    )

    def open_hashed() -> None:
        for file in (own / "deltas").iterdir():
            file.unlink()
        write_delta(
            own, {"h": (torch.arange(0), torch.zeros(0, 4), torch.arange(0), torch.ones(0) > 0)}
        )
        inspect(own)
        Predictor(own).close()

    yield own / "manifest.json", None, open_hashed


def checkpoint_cases(folder: Path) -> Iterator[tuple[Path, Any, Open]]:
    """Yield the manifests of two checkpoints: a full one, and a delta."""
    for kind in ("full", "delta"):
        model = _Model()
        sgd = KeyedOptimizerWrapper(
            dict(model.named_parameters()), lambda params: torch.optim.SGD(params, lr=0.1)
        )
        path = folder / kind
        for _ in range(2 if kind == "delta" else 1):
            save_checkpoint(
                path, model, sgd, {"a": 1}, **({"delta": True} if kind == "delta" else {})
            )
        [*_, file] = sorted(path.glob(f"step-*/{MANIFEST}"))

        def opened(path: Path = path, model: nn.Module = model, sgd: Any = sgd) -> None:
            load_checkpoint(path, model, sgd)
            read_checkpoint(path)

        yield file, None, opened


def overflow_case(folder: Path) -> Iterator[tuple[Path, Any, Open]]:
    """Yield the manifest of a checkpoint with rows of hashed ids on the disk."""
    rows, path, draw = folder / "rows", folder / "overflow", random.Random(0)
    module = collection(rows)
    for _ in range(60):
        train(module, batch_of(draw, 900))
    save_checkpoint(path, module)
    batches = [batch_of(draw, 900) for _ in range(3)]
    wanted = _read(module, batches)
    other = collection(rows)

    def opened() -> None:
        load_checkpoint(path, other)
        assert all(map(torch.equal, _read(other, batches), wanted)), "other values"
        read_checkpoint(path)

    [file] = path.glob(f"step-*/{MANIFEST}")
    yield file, None, opened


@torch.no_grad()
def _read(module: Any, batches: list[KeyedJaggedTensor]) -> list[torch.Tensor]:
    module.eval()
    return [read(module, batch) for batch in batches]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(40, 4, "t", feature_names=["t"])]
        self.tables = EmbeddingBagCollection(tables=tables)
        self.over = nn.Linear(4, 1)


def complaints(count: int, seed: int) -> tuple[list[str], Counter[str], properties.Counts]:
    """Open damaged manifests; return the failures, and the number of cases by outcome.

    The third result has the numbers of cases with each property and each pair of properties.
    """
    wrong: list[str] = []
    outcomes, counts = Counter[str](), properties.Counts()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kinds = [*package_cases(folder), *checkpoint_cases(folder), *overflow_case(folder)]
        for number, (file, _, opened) in enumerate(kinds):
            text = file.read_bytes()
            opened()
            is_checkpoint = "crc32" in json.loads(text)
            named = (CheckpointError,) if is_checkpoint else (ValueError, OSError)
            value = json.loads(text)["content"] if is_checkpoint else json.loads(text)
            for path, damage, found in damaged(value, count // len(kinds), seed + number):
                file.write_bytes(_encode(found) if is_checkpoint else _text(found))
                has = {
                    file.relative_to(folder).parts[0],
                    *_describe(path, damage, found),
                    "refused",
                }
                try:
                    opened()
                    outcomes["opens"] += 1
                    has = {*has, "opens"} - {"refused"}
                except named as error:
                    outcomes[type(error).__name__] += 1
                    if not str(error).strip():
                        wrong.append(f"{file.parent.name} {path} {damage}: empty {error!r}")
                except Exception as error:
                    outcomes[type(error).__name__] += 1
                    wrong.append(f"{file} seed {seed + number} {path} {damage}: {error!r:.200}")
                properties.count(counts, PROPERTIES, has)
            file.write_bytes(text)
            opened()
    return wrong, outcomes, counts


def _describe(path: tuple[str | int, ...], damage: str, found: Any) -> Iterator[str]:
    """Yield the properties of a damage."""
    if len(path) == 1:
        yield "of the top level"
    if path[0] == "overflow" or (path[0] == "files" and "overflow" in str(path[1:2])):
        yield "of the logs"
    if damage in ("remove", "repeat"):
        yield "removed" if damage == "remove" else "repeated"
    elif damage.startswith("value of"):
        yield "another member"
    else:
        for key in path:
            found = found[key]
        kinds = {type(None): "null", bool: "true or false", str: "text", list: "list"}
        yield kinds.get(type(found), "object" if isinstance(found, dict) else "number")


def _text(found: Any) -> bytes:
    return json.dumps(found).encode()


def main() -> int:
    """Run the search; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.damaged_manifests", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="number of damaged manifests")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.monotonic()
    wrong, outcomes, counts = complaints(options.cases, options.seed)
    print("\n".join(wrong))
    took = time.monotonic() - start
    print(f"{outcomes.total()} cases in {took:.0f} s: {dict(outcomes)}; {len(wrong)} wrong")
    print("Cases with each property and pair:")
    print("\n".join(properties.lines(counts, PROPERTIES)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
