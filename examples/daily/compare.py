"""The AUC of four ways to learn from days, each on the rows of the next day."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recsys import datasets
from recsys.features import Categorical, FeatureSpec, Hashed
from recsys.features.columns import Column
from recsys.training import Trainer

WAYS = ("continued vocabulary", "hashed ids", "from scratch each day", "first day only")


def compare(
    out: Path,
    columns: Sequence[Column],
    trainer_of: Callable[..., Trainer],
    days: int,
    left_out: set[int],
) -> dict[str, list[float]]:
    """Train in four ways, print AUC and seconds, and draw `auc.svg`."""
    whole = [day for day in range(days) if day not in left_out]
    rows = {day: pq.read_table(out / f"days/{day}.parquet") for day in whole}
    hashed = [
        Hashed(column.name, rows=8000, growing=True)
        if isinstance(column, Categorical) and column.name != "country"
        else column
        for column in columns
    ]
    areas: dict[str, list[float]] = {way: [] for way in WAYS}
    seconds = dict.fromkeys(WAYS, 0.0)
    specs: dict[str, FeatureSpec] = {}
    trainers: dict[str, Trainer] = {}
    for number, (day, following) in enumerate(itertools.pairwise(whole)):
        for way in WAYS:
            if way == "first day only" and number:
                continue
            start = time.perf_counter()
            data, settings = rows[day], {}
            if way == "from scratch each day":
                data = pa.concat_tables(rows[d] for d in whole[: number + 1])
            if number and way in ("continued vocabulary", "hashed ids"):
                spec = specs[way].extend(data, retire_after=3).spec
                settings["start_from"] = trainers[way].last
            else:
                spec = FeatureSpec(hashed if way == "hashed ids" else columns).fit(data)
            settings["overwrite"] = True
            trainer = trainer_of(spec, out / f"compare/{way}/{day}", **settings)
            trainer.fit(datasets.table(data, spec, batch_size=256, shuffle=True))
            seconds[way] += time.perf_counter() - start
            specs[way], trainers[way] = spec, trainer
        for way in WAYS:
            reader = datasets.table(rows[following], specs[way], batch_size=1024)
            areas[way].append(trainers[way].evaluate(reader)["auc"])
    for way in WAYS:
        mean = sum(areas[way]) / len(areas[way])
        print(f"{way}: AUC {mean:.4f}, last {areas[way][-1]:.4f}, {seconds[way]:.1f} s")
    _draw(out / "auc.svg", whole[1:], areas)
    return areas


def _draw(path: Path, days: Sequence[int], areas: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for way, values in areas.items():
        axes.plot(days, values, label=way)
    axes.set(xlabel="day", ylabel="AUC on the rows of the day, before it is learned")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, bbox_inches="tight")
