"""Random modules of containers and collections: TorchScript does what Python does.

The forward pass of a module is written from the seed, as text, since TorchScript reads source.
"""

from __future__ import annotations

import importlib
import io
import linecache
import random
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from recsys.inference import quantize_embeddings
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.feature_processor import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from tests.ranks import RankPool
from tests.without_compat import HAS_COMPAT

ROWS, LONGEST = 20, 4
DTYPES = (torch.int8, torch.quint4x2, torch.float16, torch.float32)


COMPAT: Any = importlib.import_module("tests.compat.scripted") if HAS_COMPAT else None
"""Modules of `recsys.compat`, which are drawn where it is."""


def _some(rng: random.Random, keys: list[str]) -> list[str]:
    return rng.sample(keys, rng.randint(1, len(keys)))


def _bags(rng: random.Random, keys: list[str], is_weighted: bool) -> list[EmbeddingBagConfig]:
    kinds = [PoolingType.SUM] if is_weighted else [PoolingType.SUM, PoolingType.MEAN]
    return [
        EmbeddingBagConfig(
            ROWS, rng.choice((4, 8)), f"t{i}", feature_names=_some(rng, keys),
            pooling=rng.choice(kinds),
        )
        for i in range(rng.randint(1, 3))
    ]  # fmt: skip


def _pooled(rng: random.Random, keys: list[str]) -> nn.Module:
    """A module from a batch to a KeyedTensor."""
    kind = rng.choice(("plain", "weighted", "processed", "processed_dict", "fused", "quantized"))
    tables = _bags(rng, keys, kind in ("weighted", "processed", "processed_dict"))
    if kind == "fused":
        return FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": 0.1}).eval()
    collection = EmbeddingBagCollection(
        tables=tables, is_weighted=kind not in ("plain", "quantized")
    )
    if kind == "processed":
        known = {key: LONGEST for key in keys if rng.random() < 0.8} or {keys[0]: LONGEST}
        processors = PositionWeightedModuleCollection(known)
        for weight in processors.parameters():
            nn.init.uniform_(weight)
        return FeatureProcessedEmbeddingBagCollection(collection, processors)
    if kind == "processed_dict":
        read = {feature for table in tables for feature in table.feature_names}
        each = {key: PositionWeightedModule(LONGEST) for key in keys if key in read}
        return FeatureProcessedEmbeddingBagCollection(collection, each)
    if kind == "quantized":
        return quantize_embeddings(collection, rng.choice(DTYPES))
    return collection


def _rows(rng: random.Random, keys: list[str]) -> nn.Module:
    """A module from a batch to a dict of jagged tensors."""
    tables = [
        EmbeddingConfig(ROWS, 4, f"t{i}", feature_names=_some(rng, keys))
        for i in range(rng.randint(1, 2))
    ]
    collection = EmbeddingCollection(tables=tables, need_indices=rng.random() < 0.5)
    return quantize_embeddings(collection, rng.choice(DTYPES)) if rng.random() < 0.4 else collection


def _draw(rng: random.Random, keys: list[str]) -> tuple[list[str], list[nn.Module]]:
    """The lines of a forward pass, and the modules that it calls."""
    lines, modules = ["k0 = kjt"], list[nn.Module]()
    batch = "k0"
    for count in range(1, rng.randint(2, 4)):
        new = f"k{count}"
        more = ["processor"] if COMPAT else []
        move = rng.choice(["permute", "concat", "values", "offsets", "single", *more])
        order = rng.sample(range(len(keys)), len(keys))
        if move == "permute":
            lines.append(f"{new} = {batch}.permute({order})")
        elif move == "concat":
            first = rng.randint(0, len(keys))
            lines.append(f"p{count} = {batch}.split([{first}, {len(keys) - first}])")
            lines.append(f"{new} = KeyedJaggedTensor.concat([p{count}[1], p{count}[0]])")
        elif move == "values":
            lines.append(f"{new} = {batch}.with_values({batch}.values() // 2)")
        elif move == "offsets":
            lines.append(
                f"{new} = KeyedJaggedTensor({batch}.keys(), {batch}.values(), "
                f"{batch}.weights_or_none(), offsets={batch}.offsets())"
            )
        elif move == "single":
            key = rng.choice(keys)
            lines.append(f"j{count} = {batch}['{key}']")
            lines.append(f"found += [j{count}.values(), j{count}.lengths(), j{count}.offsets()]")
            lines.append(f"found += j{count}.to_dense()")
            lines.append(f"{new} = {batch}.to('cpu')")
        else:
            modules.append(COMPAT.processor(dict.fromkeys(keys, LONGEST)))
            lines.append(f"{new} = self.m{len(modules) - 1}({batch})")
        batch = new
        if rng.random() < 0.6:
            modules.append(_pooled(rng, keys))
            lines.append(f"t{count} = self.m{len(modules) - 1}({batch})")
            name = modules[-1]
            one = _first_name(name)
            lines.append(f"found += [t{count}.values(), t{count}['{one}']]")
            lines.append(f"found += KeyedTensor.regroup([t{count}], [['{one}'], t{count}.keys()])")
        if rng.random() < 0.4:
            modules.append(_rows(rng, keys))
            lines.append(f"for name, jagged in self.m{len(modules) - 1}({batch}).items():")
            lines.append("    found += [jagged.values(), jagged.lengths()]")
        if rng.random() < 0.2 and COMPAT:
            modules.append(COMPAT.tower(_pooled(rng, keys)))
            lines.append(f"found += [self.m{len(modules) - 1}({batch})]")
    lines.append(f"found += [{batch}.values(), {batch}.lengths()]")
    return lines, modules


def _first_name(pooled: Any) -> str:
    inner = pooled
    if isinstance(pooled, FeatureProcessedEmbeddingBagCollection):
        _, inner = pooled.split()
    name: str = (inner.lookups().names if hasattr(inner, "lookups") else inner._names)[0]
    return name


def _class_of(lines: list[str], seed: int) -> Any:
    body = "\n".join(f"        {line}" for line in lines)
    source = (
        "class Model(torch.nn.Module):\n"
        "    def __init__(self, modules, is_wrong):\n"
        "        super().__init__()\n"
        "        self.wrong = 1 if is_wrong else None\n"
        "        for i, module in enumerate(modules):\n"
        "            setattr(self, f'm{i}', module)\n"
        "    def forward(self, kjt: KeyedJaggedTensor):\n"
        "        found: list[torch.Tensor] = []\n"
        f"{body}\n"
        "        if self.wrong is not None:\n"
        "            kjt.unknown()\n"
        "        return found\n"
    )
    file = f"<scripts {seed}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    namespace = {
        "torch": torch, "JaggedTensor": JaggedTensor, "KeyedJaggedTensor": KeyedJaggedTensor,
        "KeyedTensor": KeyedTensor, "__name__": "tests.fuzz.scripts",
    }  # fmt: skip
    exec(compile(source, file, "exec"), namespace)
    return namespace["Model"]


def _batch(rng: random.Random, keys: list[str]) -> KeyedJaggedTensor:
    size = rng.choice((0, 1, 2, 5))
    lengths = torch.tensor([rng.randint(0, LONGEST) for _ in range(size * len(keys))])
    count = int(lengths.sum())
    values = torch.tensor([rng.randrange(ROWS) for _ in range(count)], dtype=torch.int64)
    return KeyedJaggedTensor(keys, values, torch.rand(count), lengths.long())


def _different(found: list[Tensor], wanted: list[Tensor], atol: float) -> list[int]:
    pairs = enumerate(zip(found, wanted, strict=True))
    return [
        i
        for i, (a, b) in pairs
        if a.dtype != b.dtype or a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=atol)
    ]


def complaint_about(pool: RankPool, seed: int) -> str | None:
    """Return the difference between TorchScript and Python for a module of a seed, or None."""
    del pool  # one process
    rng = random.Random(seed)
    torch.manual_seed(seed)
    keys = [f"f{i}" for i in range(rng.randint(1, 3))]
    lines, modules = _draw(rng, keys)
    kind = _class_of(lines, seed)
    model = kind(modules, False).eval()
    text = "; ".join(lines)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rng.random() < 0.3:
            try:
                torch.jit.script(kind(modules, True).eval())
                return f"accepts a method that does not exist: {text}"
            except RuntimeError as error:
                if "unknown" not in str(error):
                    return f"{type(error).__name__}: {str(error).strip()[:300]} for {text}"
        try:
            scripted = torch.jit.script(model)
            file = io.BytesIO()
            torch.jit.save(scripted, file)
            file.seek(0)
            loaded = torch.jit.load(file)
            for _ in range(3):
                batch = _batch(rng, keys)
                wanted = model(batch)
                # without their collections trained tables are looked up by PyTorch, not by FBGEMM
                for program, atol in ((scripted, 0.0), (loaded, 1e-6)):
                    odd = _different(program(batch), wanted, atol)
                    if odd:
                        return f"other results {odd} for {text}"
        except Exception as error:
            return f"{type(error).__name__}: {str(error).strip()[:600]} for {text}"
    return None
