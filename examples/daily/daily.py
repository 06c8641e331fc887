"""A model that learns from each day: extend the spec, continue, compare, publish.

    python examples/daily/daily.py OUT [--days 14] [--compare]

It makes up some days of clicks, three of them broken, and runs `run_day` on each. Started again
after a kill, it continues with the step that was interrupted. docs/second_day.md explains it.
`--compare` also trains a model from scratch each day, one with hashed ids and one that never
learns again, and draws the AUC of all on the next day's rows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pyarrow.parquet as pq
import torch
from compare import compare
from days import write_day
from server import Answers

from recsys import DistributedModelParallel, EmbeddingBagCollection, datasets
from recsys.distributed.checkpoint import load_checkpoint
from recsys.features import Categorical, FeatureSpec, Label, Numeric
from recsys.inference import package, quantize_embeddings
from recsys.inference.gate import Gate, GateReport, publish
from recsys.modules.dlrm import DLRM, DLRMTrain
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward, in_backward_optimizer_filter
from recsys.training import Trainer

COLUMNS = [
    Categorical("user", max_size=6000),
    Categorical("item", max_size=1000),
    Categorical("country"),
    Numeric("age", standardize=True),
    Label("click"),
]
GATE = Gate(segments=("country",), max_calibration_error=0.2, max_slowdown=3.0)
BROKEN = {4: "empty", 7: "late", 10: "twice"}


def build_model(spec: FeatureSpec) -> DLRMTrain:
    torch.manual_seed(0)
    tables = EmbeddingBagCollection(tables=spec.tables(dim=8))
    return DLRMTrain(DLRM(tables, len(spec.dense_names), [16, 8], [32, 1]))


def trainer_of(spec: FeatureSpec, folder: Path, **settings: object) -> Trainer:
    model = build_model(spec)
    apply_optimizer_in_backward(RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": 0.2})
    sharded = DistributedModelParallel(model)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters())).values()
    adam = torch.optim.Adam(dense, lr=0.003)
    quiet = {"epochs": 1, "loggers": (), "shows_bar": False}
    return Trainer(sharded, adam, folder, **{**quiet, **settings})


def run_day(day: int, out: Path, before: int | None) -> GateReport:
    """Learn from a day, and publish if the new version is better than the served one."""
    work, rows = out / f"work/{day}", pq.read_table(out / f"days/{day}.parquet")
    last, served = (None, None) if before is None else (out / f"work/{before}", before + 1)
    held = rows.slice(0, rows.num_rows // 10)
    if (work / "spec").exists():
        spec = FeatureSpec.load(work / "spec")
    elif last is None:
        spec = FeatureSpec(COLUMNS).fit(rows)
    else:
        spec = FeatureSpec.load(last / "spec").extend(rows, retire_after=3).spec
    spec.save(work / "spec")
    trainer = trainer_of(spec, work / "job", resume=True, start_from=last and last / "job/last")
    trainer.fit(datasets.table(rows.slice(len(held)), spec, batch_size=256, shuffle=True))
    if not (work / "staged/1").exists():
        model = build_model(spec)
        load_checkpoint(trainer.last, model)
        quantized, example = quantize_embeddings(model.model.eval()), held.slice(0, 2)
        package(quantized, work / "staged", example, spec=spec, programs=["torchscript"])
    days = {"today": day} if before is None else {"today": day, "yesterday": before}
    paths = {name: out / f"days/{number}.parquet" for name, number in days.items()}
    data = {name: pq.read_table(path).slice(0, len(held)) for name, path in paths.items()}
    report = GATE.compare(work / "staged/1", served and out / f"models/{served}", data)
    report.write_html(work / "report.html")
    if report.passed:
        publish(report, out / "models", day + 1)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--days", type=int, default=14)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--compare", action="store_true", help="train other models, too, and plot")
    options = parser.parse_args()
    out, before = options.out, None
    with Answers(out / "models") as answers:
        for day in range(options.days):
            refused = out / f"work/{day}/refused"
            print(f"day {day} {BROKEN.get(day, '')}".rstrip(), flush=True)
            if not (out / f"models/{day + 1}").exists() and not refused.exists():
                write_day(out / f"days/{day}.parquet", day, options.rows, BROKEN.get(day, ""))
                try:
                    reasons = [str(rule) for rule in run_day(day, out, before).refused]
                except ValueError as error:  # such as a day without rows
                    reasons = [str(error)]
                if reasons:
                    refused.parent.mkdir(parents=True, exist_ok=True)
                    refused.write_text("\n".join(reasons))
            print(refused.read_text() if refused.exists() else "published", flush=True)
            before = before if refused.exists() else day
    print(f"{answers.num_answered} requests answered, {answers.num_failed} failed")
    if options.compare:
        compare(out, COLUMNS, trainer_of, options.days, set(BROKEN))
    return int(answers.num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
