"""Predicted against measured step times, over random plans of one model.

    python -m benchmarks.prediction --plot docs/planner/prediction.svg

A step is forward, a sum, and backward with row-wise Adagrad in it, of twelve tables on two ranks;
there are no dense layers. Of many random plans those are taken whose times, predicted after two
rounds of calibration, are spread most evenly. All of them lie ready in the same processes and take
turns, among themselves and with further rounds of calibration: so both see the same machine,
whatever else it does. What is predicted from these rounds is compared with the median turn; the
medians of odd and of even turns are the two repeats that show the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.stats import spearmanr
from torch import Tensor, nn

from benchmarks import ranks
from recsys.calibrate import Calibration
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from recsys.distributed.planner.rating import RatedPlan
from recsys.distributed.planner.report_rows import COST_PARTS
from recsys.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from recsys.distributed.types import ShardingPlan
from recsys.kernels.types import EmbOptimType
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor

TABLES, BATCH = 12, 1024
CANDIDATES, PLANS = 200, 20
CPU = torch.device("cpu")


class Model(nn.Module):
    """One collection; the loss is the sum of what it returns."""

    def __init__(self, tables: list[EmbeddingBagConfig]) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.ebc(features).values().sum()


def model_of(seed: int) -> tuple[Model, dict[str, ParameterConstraints]]:
    """Return the model, and how many ids its features have."""
    rng = random.Random(seed)
    tables, demands = [], {}
    for i in range(TABLES):
        tables.append(
            EmbeddingBagConfig(
                name=f"t{i}",
                num_embeddings=int(10 ** rng.uniform(3, 5.5)),
                embedding_dim=rng.choice([16, 32, 64, 128]),
                feature_names=[f"f{i}"],
            )
        )
        pooling = float(rng.choice([1, 2, 5, 10, 20]))
        demands[f"t{i}"] = ParameterConstraints(pooling_factors=[pooling])
    return Model(tables), demands


def random_plan(model: Model, world_size: int, seed: int) -> ShardingPlan:
    """Return a plan that has a liking for some strategies, and for some ranks."""
    rng = random.Random(seed)
    liking = [rng.random() ** 2 for _ in range(3)] + [rng.random() ** 4]
    favour = [rng.random() ** 2 for _ in range(world_size)]

    def generator() -> ParameterShardingGenerator:
        kind = rng.choices(range(4), liking)[0]
        if kind == 0:
            return table_wise(rank=rng.choices(range(world_size), favour)[0])
        return (row_wise(), column_wise(ranks=list(range(world_size))), data_parallel())[kind - 1]

    generators = {config.name: generator() for config in model.ebc.embedding_bag_configs()}
    of_module = construct_module_sharding_plan(
        model.ebc, generators, world_size=world_size, local_size=world_size, device_type="cpu"
    )
    return ShardingPlan({"ebc": of_module})


def evenly_spread(plans: list[RatedPlan]) -> list[RatedPlan]:
    """Return the plans whose predicted times are nearest to evenly spaced logarithms."""
    left = sorted(plans, key=lambda plan: plan.rating.step_ms)
    times = np.log([plan.rating.step_ms for plan in left])
    chosen = []
    for wanted in np.linspace(times[0], times[-1], PLANS):
        nearest = int(np.argmin(np.abs(times - wanted)))
        chosen.append(left.pop(nearest))
        times = np.delete(times, nearest)
    return chosen


def features_of(model: Model, demands: dict[str, ParameterConstraints]) -> KeyedJaggedTensor:
    """Return this rank's batch: even ids, bags of all lengths about the mean."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    lengths, values = [], []
    for config in model.ebc.embedding_bag_configs():
        [pooling] = demands[config.name].pooling_factors
        mean = torch.full((BATCH,), pooling)
        lengths.append(torch.poisson(mean, generator=generator).int())
        size = (int(lengths[-1].sum()),)
        values.append(torch.randint(0, config.num_embeddings, size, generator=generator))
    keys = [config.feature_names[0] for config in model.ebc.embedding_bag_configs()]
    return KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths))


def run(seed: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Choose plans, then calibrate and measure them in turns."""
    world_size = dist.get_world_size()
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    sharders = [EmbeddingBagCollectionSharder(fused_params=fused)]
    model, demands = model_of(seed)

    def rated(topology: Topology, plans: Iterable[ShardingPlan]) -> list[RatedPlan]:
        planner = EmbeddingShardingPlanner(topology, BATCH, constraints=demands)
        return [planner.rate(model, sharders, plan) for plan in plans]

    first = Calibration(CPU)
    for _ in range(2):
        first.measure()
    candidates = (random_plan(model, world_size, number) for number in range(CANDIDATES))
    chosen = evenly_spread(rated(first.topology(), candidates))
    features = features_of(model, demands)

    def step(sharded: nn.Module) -> None:
        sharded(features).backward()

    steps = {}
    for number, plan in enumerate(chosen):
        fresh, _ = model_of(seed)
        sharded = DistributedModelParallel(fresh, device=CPU, plan=plan, sharders=sharders)
        steps[str(number)] = partial(step, sharded)
    calibration = Calibration(CPU)
    turns: list[list[float]] = [[] for _ in chosen]
    for _ in range(rounds):
        calibration.measure()
        for of_plan, times in zip(turns, ranks.measure(steps, 1, repeats).values(), strict=True):
            of_plan += times
    slowest = torch.tensor(turns)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    topology = calibration.topology()
    return {
        "topology": json.loads(topology.to_json()),
        "plans": [
            {
                "predicted_ms": plan.rating.step_ms,
                "predicted_before_ms": before.rating.step_ms,
                "parts_ms": {
                    part: [getattr(cost, part) for cost in plan.rating.costs] for part in COST_PARTS
                },
                "measured_ms": of_plan,
                "types": {n: s.sharding_type for n, s in plan.plan["ebc"].items()},
                "ranks": {n: s.ranks for n, s in plan.plan["ebc"].items()},
            }
            for before, plan, of_plan in zip(
                chosen, rated(topology, chosen), slowest.tolist(), strict=True
            )
        ],
    }


def summary(result: dict[str, Any]) -> dict[str, float]:
    """Return how well predictions agree with measurements, and these with each other."""
    predicted = [plan["predicted_ms"] for plan in result["plans"]]
    measured = [statistics.median(plan["measured_ms"]) for plan in result["plans"]]
    halves = [
        [statistics.median(plan["measured_ms"][i::2]) for plan in result["plans"]] for i in (0, 1)
    ]
    before = [plan["predicted_before_ms"] for plan in result["plans"]]
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    errors_before = [abs(p / m - 1) for p, m in zip(before, measured, strict=True)]
    return {
        "spearman": float(spearmanr(predicted, measured).statistic),
        "spearman of two repeats": float(spearmanr(*halves).statistic),
        "median error": statistics.median(errors),
        "largest error": max(errors),
        "median error, two rounds before": statistics.median(errors_before),
        "predicted span": max(predicted) / min(predicted),
        "measured span": max(measured) / min(measured),
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw measured over predicted times."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    predicted = np.array([plan["predicted_ms"] for plan in result["plans"]])
    turns = np.array([plan["measured_ms"] for plan in result["plans"]])
    measured = np.median(turns, axis=1)
    low, high = np.percentile(turns, [10, 90], axis=1)
    _, axes = plt.subplots(figsize=(5, 4.5), layout="constrained")
    ends = [min(predicted.min(), low.min()) / 1.2, max(predicted.max(), high.max()) * 1.2]
    axes.plot(ends, ends, color="0.6", linewidth=1, label="as predicted")
    axes.fill_between(ends, np.array(ends) / 1.25, np.array(ends) * 1.25, color="0.93")
    bars = np.stack([measured - low, high - measured])
    axes.errorbar(predicted, measured, bars, fmt="o", markersize=4, linewidth=1, label="a plan")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="predicted, ms", ylabel="measured, ms (80 % of turns)")
    found = result["summary"]
    axes.set_title(
        f"{len(predicted)} random plans on 2 ranks\n"
        f"Spearman {found['spearman']:.2f}, median error {found['median error']:.0%}",
        fontsize=10,
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    axes.legend(frameon=False)
    path.parent.mkdir(exist_ok=True)
    plt.savefig(path)


def main() -> None:
    """Measure, and print how well predictions agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the model")
    parser.add_argument("--plot", type=Path)
    if "RANK" in os.environ:
        arguments = ranks.begin(parser)
        found = run(arguments.seed, arguments.rounds, arguments.repeats)
        ranks.end(found, arguments.out)
        return
    arguments = parser.parse_args()
    result = ranks.launch(
        "benchmarks.prediction", 2, "--seed", str(arguments.seed), "--rounds", "9", "--repeats", "3"
    )
    result["summary"] = summary(result)
    for plan in result["plans"]:
        measured = statistics.median(plan["measured_ms"])
        print(f"predicted {plan['predicted_ms']:8.2f} ms, measured {measured:8.2f} ms")
    print(json.dumps(result["summary"], indent=1))
    path = Path(__file__).parent / "results" / "prediction-cpu.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
