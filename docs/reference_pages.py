"""Write docs/reference/ from the promised names: `python docs/reference_pages.py`.

Each name of `tests/promised_names.txt`, and each name that a package exports, gets one entry, under
its shortest path. Moved names are under their new path. `docs/build.py` builds the site and checks
that every entry is on it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import recsys

DOCS = Path(__file__).parent
PROMISED = DOCS.parent / "tests" / "promised_names.txt"
HAS_COMPAT = importlib.util.find_spec("recsys.compat") is not None
#: New path of each moved name by its old path.
MOVED: Mapping[str, str] = (
    importlib.import_module("recsys.compat.moved").MOVED if HAS_COMPAT else {}
)

#: Page: its title, a sentence, and the modules whose names it shows. The longest match counts.
PAGES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "data_types": (
        "Data types",
        "Jagged and keyed tensors: inputs and outputs of a model. Guide: [batches](../data.md).",
        ("recsys.sparse", "recsys.streamable"),
    ),
    "features": (
        "Features",
        "Columns of tables, and their conversion to batches. Guide: [features](../features.md).",
        ("recsys.features",),
    ),
    "modules": (
        "Embedding modules",
        "Collections of tables, feature processors and pools.",
        ("recsys.modules",),
    ),
    "models": (
        "Models",
        "DLRM and other models of clicks, models of sequences, and their parts. Guide: "
        "[sequences and models of clicks](../sequences.md).",
        (
            "recsys.modules.activation",
            "recsys.modules.crossnet",
            "recsys.modules.ctr",
            "recsys.modules.deepfm",
            "recsys.modules.deepfm_model",
            "recsys.modules.dlrm",
            "recsys.modules.dlrm_variants",
            "recsys.modules.item_index",
            "recsys.modules.mlp",
            "recsys.modules.sequences",
        ),
    ),
    "optimizers": (
        "Optimizers",
        "Optimizers of tables and of dense parts. Guide: [optimizers](../optimizers.md).",
        ("recsys.optim", "recsys.kernels"),
    ),
    "distributed": (
        "Distributed training",
        "Sharded modules and models. Internals: [the engine](../engine.md).",
        ("recsys.distributed",),
    ),
    "plans": (
        "Sharding plans",
        "Plans and layouts. Guide: [plans by hand](../sharding.md).",
        (
            "recsys.distributed.placement",
            "recsys.distributed.sharding_plan",
            "recsys.distributed.types",
        ),
    ),
    "pipelines": (
        "Pipelines",
        "Training and evaluation loops. Guide: [pipelines](../pipelines.md).",
        ("recsys.distributed.train_pipeline",),
    ),
    "training": (
        "Training loop",
        "A loop with evaluation, checkpoints and logs. Guide: [training](../training.md).",
        ("recsys.training",),
    ),
    "watching": (
        "Watching a job",
        "Watchdog, loss guard, step report. Guide: [failures](../faults.md).",
        (
            "recsys.distributed.monitoring",
            "recsys.step_stages",
        ),
    ),
    "checkpoints": (
        "Checkpoints",
        "Saves and loads. Guide: [checkpoints](../checkpoints.md).",
        ("recsys.distributed.checkpoint",),
    ),
    "planner": (
        "Planner",
        "Topologies, constraints, plans with costs. Guide: [planner](../planner.md).",
        ("recsys.distributed.planner",),
    ),
    "inference": (
        "Inference",
        "Quantization and export. Guides: [quantize](../quantization.md), [serve](../serving.md).",
        ("recsys.inference",),
    ),
    "metrics": (
        "Metrics",
        "Metrics of many tasks. Guide: [metrics](../metrics.md).",
        ("recsys.metrics",),
    ),
    "datasets": (
        "Data sets",
        "Readers of tables and of public data sets, and random data. Guides: "
        "[read tables](../readers.md), [batches](../data.md).",
        ("recsys.datasets",),
    ),
    "compat": (
        "TorchRec compatibility",
        "Modules for scripts written for TorchRec. Guide: [moving from TorchRec](../migrating.md).",
        ("recsys.compat",),
    ),
    "tools": (
        "Tracing and other tools",
        "Tracing, shared helpers. Guide: [compile, trace and export](../tracing.md).",
        ("recsys",),
    ),
}
#: Options of single entries.
OPTIONS = {"recsys.sparse.keyed_jagged.KeyedJaggedTensor": "inherited_members: true"}


@dataclass
class Entry:
    """One object of the reference."""

    path: str
    """Shortest public path: the heading."""
    definition: str
    """Path of its definition, which the site uses as anchor."""
    value: Any
    aliases: list[str] = field(default_factory=list)
    """Other public paths of the same object."""


def public_paths() -> Iterator[str]:
    """Yield the promised paths, the new paths of moved names, and the exports of packages."""
    yield from MOVED.values()
    for line in PROMISED.read_text().splitlines():
        if not line.startswith("#"):
            yield line.strip().replace(" ", ".")
    packages = [
        info.name for info in pkgutil.walk_packages(recsys.__path__, "recsys.") if info.ispkg
    ]
    for package in map(importlib.import_module, ["recsys", *packages]):
        yield from (f"{package.__name__}.{name}" for name in getattr(package, "__all__", ()))


def resolve(path: str) -> tuple[Any, str]:
    """Return the object at a path, and the path of its definition.

    Raises:
        AttributeError: There is no such object.
    """
    path = MOVED.get(path, path)
    try:
        return importlib.import_module(path), path
    except ImportError:
        module, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    if isinstance(value, ModuleType):
        return value, value.__name__
    is_defined = inspect.isclass(value) or inspect.isfunction(value)
    if is_defined and value.__module__.startswith("recsys."):
        return value, f"{value.__module__}.{value.__qualname__}"
    return value, path


def entries() -> list[Entry]:
    """Return one entry for each public object, sorted by path."""
    found: dict[str, Entry] = {}
    order = sorted(set(public_paths()), key=lambda path: (path in MOVED, path.count("."), path))
    for path in order:
        value, definition = resolve(path)
        if definition in found:
            found[definition].aliases.append(path)
        else:
            found[definition] = Entry(path, definition, value)
    return sorted(found.values(), key=lambda entry: entry.path)


def page_of(entry: Entry) -> str:
    """Return the page of an entry: the longest prefix of its definition among the pages."""
    matches = [
        (len(prefix), page)
        for page, (_, _, prefixes) in PAGES.items()
        for prefix in prefixes
        if f"{entry.definition}.".startswith(f"{prefix}.")
    ]
    return max(matches)[1]


def render(shown: list[Entry]) -> dict[str, str]:
    """Return the text of each page."""
    by_page: dict[str, list[Entry]] = {page: [] for page in PAGES}
    for entry in shown:
        by_page[page_of(entry)].append(entry)
    pages = {}
    index = "# Reference\n\nAll public names, each under its shortest path. "
    index += "[Compatibility promises](../stability.md) hold for them.\n"
    for page, (title, sentence, _) in PAGES.items():
        pages[page] = f"# {title}\n\n{sentence}\n" + "".join(map(_directive, by_page[page]))
        index += f"\n## [{title}]({page}.md)\n\n"
        index += ", ".join(
            f"[`{entry.path.removeprefix('recsys.')}`]({page}.md#{entry.definition})"
            for entry in by_page[page]
        )
        index += "\n"
    return {"index": index, **pages}


def _directive(entry: Entry) -> str:
    options = [f"heading: {entry.path}", f"toc_label: {entry.path.removeprefix('recsys.')}"]
    if isinstance(entry.value, ModuleType):
        options.append("members: []")
    if entry.definition in OPTIONS:
        options.append(OPTIONS[entry.definition])
    lines = "".join(f"      {option}\n" for option in options)
    text = f"\n::: {entry.definition}\n    options:\n{lines}"
    if not (inspect.isroutine(entry.value) or isinstance(entry.value, type | ModuleType)):
        shown = repr(entry.value)
        is_short = len(shown) < 100 and " at 0x" not in shown
        text += f"\nValue: `{shown}`\n" if is_short else f"\nA `{type(entry.value).__name__}`.\n"
    if entry.aliases:
        text += "\nAlso: " + ", ".join(f"`{alias}`" for alias in entry.aliases) + "\n"
    return text


def write(folder: Path) -> list[Entry]:
    """Write the pages to a folder, and return their entries."""
    folder.mkdir(exist_ok=True)
    shown = entries()
    for page, text in render(shown).items():
        (folder / f"{page}.md").write_text(text)
    return shown


if __name__ == "__main__":
    write(DOCS / "reference")
