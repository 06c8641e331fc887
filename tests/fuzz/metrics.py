"""A random metric under random settings, on random batches of one to three ranks.

Its results must equal `tests.metrics.formulas`. Batches are empty, of one class, of equal
predictions, with weights that are zero, tiny or huge, and with a NaN somewhere.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from recsys.metrics import AUC, BinnedAUC, NormalizedEntropy, auc, log_loss, normalized_entropy
from recsys.metrics.metric_module import REC_METRICS_MAPPING
from recsys.metrics.metrics_config import RecMetricEnum, RecTaskInfo, SessionMetricDef
from recsys.metrics.rec_metric import RecMetric
from tests.metrics import formulas
from tests.metrics.formulas import Results, Rows
from tests.ranks import RankPool

FUNCTIONS = ("auc()", "log_loss()", "normalized_entropy()", "AUC", "BinnedAUC", "NormalizedEntropy")
# The result of TOWER_QPS depends on the clock.
NAMES = [*(str(m) for m in RecMetricEnum if m is not RecMetricEnum.TOWER_QPS), *FUNCTIONS]
BATCH_SIZE = 40
TARGETS = (0.3819660112501051, 0.6180339887498949, 1.0)
OF_ROWS = ("auc", "auprc", "rauc")
OF_NUMBERS = ("mse", "nmse", "mae", "rauc", "xauc", "ndcg", "calibration", "average", "scalar")
SCALED = ("sum_weights", "weighted_sum_predictions", "num_positive_samples", "num_missing_labels")
"""Results that grow with the weights, and are compared by their relative error alone."""


@dataclass(frozen=True)
class Case:
    """A metric, its options, and the batches that it reads."""

    metric: str
    options: dict[str, Any]
    session: SessionMetricDef
    num_tasks: int
    """All of them are given the same samples."""
    window: int
    """Samples of a rank."""
    validates: bool
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    """Dtypes of predictions, labels and weights."""
    without_weights: bool
    batches: list[list[Rows]]
    """Batches by rank."""

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.batches)


def _options(draw: random.Random, metric: str) -> dict[str, Any]:
    flag = lambda: draw.random() < 0.5  # noqa: E731
    own: dict[str, Any] = {
        "ne": {"include_logloss": True},
        "recalibrated_ne": {"recalibration_coefficient": draw.choice([1.0, 0.25, 1e-3])},
        "recalibrated_calibration": {"recalibration_coefficient": draw.choice([1.0, 0.25, 1e-3])},
        "segmented_ne": {"num_groups": draw.choice([1, 3, 5]), "include_logloss": True},
        "mse": {"include_r_squared": True},
        "multiclass_recall": {"number_of_classes": draw.choice([2, 4])},
        "multi_label_precision": {"num_labels": draw.choice([1, 3])},
        "binned_auc": {"num_bins": draw.choice([2, 7, 1000])},
        "BinnedAUC": {"num_bins": draw.choice([2, 7, 1000])},
        "hindsight_target_pr": {"target_precision": draw.choice(TARGETS)},
        "ndcg": {
            "exponential_gain": flag(),
            "k": draw.choice([-1, 0, 1, 3]),
            "report_ndcg_as_decreasing_curve": flag(),
            "remove_single_length_sessions": flag(),
            "scale_by_weights_tensor": flag(),
        },
    }
    # Two to the power of a huge weight is infinite.
    own["ndcg"]["exponential_gain"] &= not own["ndcg"]["scale_by_weights_tensor"]
    if metric in ("accuracy", "precision", "recall"):
        return {"threshold": draw.choice([0.0, 0.25, 0.5, 1.0])}
    if metric in OF_ROWS:
        return {f"grouped_{metric}": flag()}
    found: dict[str, Any] = own.get(metric, {})
    return found


def _weights(draw: random.Random, kind: str, size: int) -> list[float]:
    of = {
        "ones": lambda: 1.0,
        "tenths": lambda: 0.1,
        "random": draw.random,
        "some zero": lambda: draw.choice([0.0, draw.random()]),
        "zero": lambda: 0.0,
        "tiny": lambda: draw.random() * 1e-30,
        "huge": lambda: draw.random() * 1e30,
        "wide": lambda: 10.0 ** draw.uniform(-9, 9),
    }[kind]
    return [of() for _ in range(size)]


def _labels(draw: random.Random, kind: str, size: int) -> list[float]:
    same = draw.choice([0.1, 0.7, 2.3])
    of = {
        "both": lambda: float(draw.random() < 0.4),
        "ones": lambda: 1.0,
        "zeros": lambda: 0.0,
        "shares": draw.random,
        "equal": lambda: same,
        "numbers": lambda: draw.choice([0.0, 1.0, 2.0, draw.random() * 4]),
    }[kind]
    return [of() for _ in range(size)]


def _predictions(draw: random.Random, kind: str, size: int) -> list[float]:
    same = draw.choice([0.3, 0.5, 1.0, 0.0])
    of = {
        "random": draw.random,
        "ties": lambda: draw.randrange(5) / 4,
        "equal": lambda: same,
        "small": lambda: draw.random() * 1e-6,
        "any": lambda: draw.choice([-1e30, 1e30, draw.gauss(0.5, 1.0)]),
    }[kind]
    return [of() for _ in range(size)]


def _batch(draw: random.Random, metric: str, size: int, kinds: tuple[str, ...]) -> Rows:
    prediction, label, weight = kinds
    p, y = _predictions(draw, prediction, size), _labels(draw, label, size)
    if metric == "multi_label_precision":
        p, y = ([float(draw.randrange(8)) for _ in range(size)] for _ in range(2))
    if metric == "multiclass_recall":
        y = [float(draw.randrange(2)) for _ in range(size)]
    sizes: list[int] = []
    while sum(sizes) < size:
        sizes.append(draw.randint(0, min(5, size - sum(sizes))))
    return Rows(
        p,
        y,
        _weights(draw, weight, size),
        session=[draw.randrange(4) for _ in range(size)],
        group=[draw.randrange(-1, 5) for _ in range(size)],
        sizes=sizes,
        tensor=[draw.random() for _ in range(size)],
        classes=[[draw.random() for _ in range(4)] for _ in range(size)],
    )


def make_case(seed: int) -> Case:
    """The same for the same seed, in every process."""
    draw = random.Random(f"metrics {seed}")
    metric = draw.choice(NAMES)
    world = draw.choice([1, 1, 1, 1, 2, 3]) if "()" not in metric else 1
    labels = ["both", "both", "ones", "ones", "zeros"]
    predictions = ["random", "random", "ties", "equal", "small"]
    if metric in OF_NUMBERS:
        labels += ["equal", "numbers", "numbers"]
    elif metric not in (*TOP_METRICS, "accuracy", "precision", "recall"):
        labels += ["shares"]
    if metric in (
        *OF_ROWS,
        *TOP_METRICS,
        "binned_auc",
        "BinnedAUC",
        "hindsight_target_pr",
        "auc()",
    ):
        predictions += ["any"]
    weight = draw.choice(
        ["ones", "tenths", "tenths", "random", "some zero", "zero", "tiny", "huge", "wide"]
    )
    kinds = (draw.choice(predictions), draw.choice(labels), weight)
    batches = [
        [
            _batch(draw, metric, draw.choice([0, 1, 2, 7, draw.randint(1, BATCH_SIZE)]), kinds)
            for _ in range(draw.choice([0, 1, 2, 4]))
        ]
        for _ in range(world)
    ]
    dtypes = [torch.float64] * 3
    if draw.random() < 0.5:
        dtypes = draw.choices([torch.float32, torch.float64], [2, 1], k=3)
    if metric in ("multiclass_recall", "NormalizedEntropy") and draw.random() < 0.5:
        dtypes[1] = torch.int64
    if draw.random() < 0.3 and dtypes[1] != torch.int64:
        _put_nan(draw, metric, batches)
    if dtypes[1] == torch.int64:
        for rows in (rows for of_rank in batches for rows in of_rank):
            rows.y[:] = [float(int(value)) for value in rows.y]
    limit = draw.choice([1, 2, 3])
    return Case(
        metric,
        _options(draw, metric),
        SessionMetricDef("session_id", limit, draw.random() < 0.5),
        num_tasks=draw.choice([1, 1, 2, 5]),
        window=draw.choice([BATCH_SIZE, 57, 1000]),
        validates=draw.random() < 0.3,
        dtypes=(dtypes[0], dtypes[1], dtypes[2]),
        without_weights=weight == "ones" and draw.random() < 0.5,
        batches=batches,
    )


TOP_METRICS = ("recall_session_level", "precision_session_level")


def _put_nan(draw: random.Random, metric: str, batches: list[list[Rows]]) -> None:
    filled = [rows for of_rank in batches for rows in of_rank if len(rows)]
    if filled:
        rows = draw.choice(filled)
        place = draw.randrange(len(rows))
        column = draw.choice([rows.p, rows.y, rows.w])
        if metric == "multiclass_recall" and column is rows.p:
            column, place = rows.classes[place], draw.randrange(2)
        if metric == "tensor_weighted_avg" and column is rows.p:
            column = rows.tensor
        column[place] = math.nan


def _tensors(case: Case, rows: Rows) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the arguments of `update`."""
    p, y, w = (
        torch.tensor(values, dtype=torch.float64).to(dtype)
        for values, dtype in zip((rows.p, rows.y, rows.w), case.dtypes, strict=True)
    )
    if case.metric == "multiclass_recall":
        p = torch.tensor(rows.classes, dtype=case.dtypes[0])
        p = p.view(len(rows), 4)[:, : case.options["number_of_classes"]]
    return {"predictions": p, "labels": y, "weights": None if case.without_weights else w}, {
        "session_id": torch.tensor(rows.session, dtype=torch.int64),
        "grouping_keys": torch.tensor(rows.group, dtype=torch.int64),
        "num_candidates": torch.tensor(rows.sizes, dtype=torch.int64),
        "tensor": torch.tensor(rows.tensor, dtype=torch.float64),
    }


def _as_rounded(case: Case, rows: Rows) -> Rows:
    """The values that the tensors have."""
    given, _ = _tensors(case, rows)
    columns = {name: given[name].double().tolist() for name in ("predictions", "labels")}
    weights = [1.0] * len(rows) if case.without_weights else given["weights"].double().tolist()
    if case.metric == "multiclass_recall":
        columns = {"predictions": rows.p, "labels": columns["labels"]}
        classes = given["predictions"].double().tolist()
    else:
        classes = rows.classes
    return Rows(
        columns["predictions"],
        columns["labels"],
        weights,
        rows.session,
        rows.group,
        rows.sizes,
        rows.tensor,
        classes,
    )


def _build(case: Case, rank: int) -> RecMetric:
    kind = REC_METRICS_MAPPING[RecMetricEnum(case.metric)]
    tasks = [
        RecTaskInfo(f"t{place}", session_metric_def=case.session, tensor_name="tensor")
        for place in range(case.num_tasks)
    ]
    return kind(
        world_size=case.world,
        my_rank=rank,
        batch_size=BATCH_SIZE,
        tasks=tasks,
        window_size=case.window * case.world,
        compute_on_all_ranks=True,
        should_validate_update=case.validates,
        **case.options,
    )


def _of_function(case: Case, rank: int) -> dict[str, Any]:
    if case.metric in ("auc()", "log_loss()", "normalized_entropy()"):
        function = {"auc()": auc, "log_loss()": log_loss}.get(case.metric, normalized_entropy)
        given, _ = _tensors(case, formulas.joined(case.batches[0]))
        return {case.metric: [float(function(**given))]}
    make: Any = {"AUC": AUC, "NormalizedEntropy": NormalizedEntropy, "BinnedAUC": BinnedAUC}
    parts = [make[case.metric](**case.options) for _ in range(2)]
    for place, rows in enumerate(case.batches[rank]):
        parts[place % 2].update(**_tensors(case, rows)[0])
    parts[0].merge(parts[1])
    if case.world > 1:
        parts[0].sync()
    found = {case.metric: [float(parts[0].compute())]}
    if case.metric == "NormalizedEntropy":
        found |= {name: [float(getattr(parts[0], name)())] for name in ("log_loss", "base_rate")}
    return found


def compute(seed: int) -> dict[str, Any]:
    """The results on one rank."""
    case = make_case(seed)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if case.metric in FUNCTIONS:
        return _of_function(case, rank)
    metric = _build(case, rank)
    names = [task.name for task in metric.tasks]
    for rows in case.batches[rank]:
        given, inputs = _tensors(case, rows)
        by_task = {k: None if v is None else dict.fromkeys(names, v) for k, v in given.items()}
        metric.update(**by_task, **inputs)
    found: dict[str, Any] = {}
    for key, value in metric.compute().items():
        found.setdefault(key.partition("|")[2], []).append(value.squeeze(0).tolist())
    return found


def _expected_of_function(case: Case, rows: Rows) -> Results:
    options = case.options
    loss = formulas.cross_entropies(rows.p, rows.y)
    return {
        "auc()": lambda: {case.metric: formulas.area(rows.p, rows.y, rows.w)},
        "AUC": lambda: {case.metric: formulas.area(rows.p, rows.y, rows.w)},
        "BinnedAUC": lambda: {case.metric: formulas.binned(rows, options["num_bins"])},
        "log_loss()": lambda: {case.metric: formulas.log_loss(rows)},
        "normalized_entropy()": lambda: {case.metric: formulas.normalized(loss, rows.y, rows.w)},
        "NormalizedEntropy": lambda: {
            case.metric: formulas.normalized(loss, rows.y, rows.w),
            "log_loss": formulas.log_loss(rows),
            "base_rate": formulas.divide(formulas.dot(rows.y, rows.w), math.fsum(rows.w)),
        },
    }[case.metric]()


def _expected(case: Case, batches: list[Rows]) -> Results:
    """The results over some batches."""
    rows, options, metric = formulas.joined(batches), case.options, case.metric
    if metric == "ndcg":
        return {"ndcg": formulas.ndcg(batches, options)}
    if metric in TOP_METRICS:
        session = case.session
        both = formulas.top_of_sessions(
            batches, session.top_threshold or 0, session.run_ranking_of_labels
        )
        return {metric: both[TOP_METRICS.index(metric)]}
    if metric == "gauc":
        return dict(zip(("gauc", "gauc_num_samples"), formulas.gauc(batches), strict=True))
    if metric == "xauc":
        return {"xauc": formulas.xauc(batches)}
    if metric == "binned_auc":
        return {"binned_auc": formulas.binned(rows, options["num_bins"])}
    if metric == "hindsight_target_pr":
        names = [f"hindsight_target_{name}" for name in ("pr", "precision", "recall")]
        found = formulas.hindsight(rows, options["target_precision"])
        return dict(zip(names, found, strict=True))
    if metric == "multiclass_recall":
        return {metric: formulas.multiclass(rows, options["number_of_classes"])}
    if metric == "multi_label_precision":
        values = formulas.multi_label(rows, options["num_labels"])
        return {f"{metric}label_{place}": value for place, value in enumerate(values)}
    return formulas.over_samples(metric, rows, options)


def _expected_of_rows(case: Case, rows: Rows) -> Results:
    value = {
        "auc": formulas.area,
        "auprc": formulas.average_precision,
        "rauc": formulas.share_in_order,
    }[case.metric]
    found: Results = {case.metric: value(rows.p, rows.y, rows.w)}
    if case.options[f"grouped_{case.metric}"]:
        grouped = formulas.over_groups(rows, value, reads_weights=case.metric != "rauc")
        found[f"grouped_{case.metric}"] = grouped
    return found


def expected(case: Case) -> Results:
    """Return the expected results of every rank."""
    by_rank = [[_as_rounded(case, rows) for rows in of_rank] for of_rank in case.batches]
    if case.metric in FUNCTIONS:
        return _expected_of_function(case, formulas.joined([r for part in by_rank for r in part]))
    if case.validates:
        by_rank = [[rows for rows in part if any(w != 0 for w in rows.w)] for part in by_rank]
    by_rank = [[rows for rows in part if len(rows)] for part in by_rank]
    if case.metric in OF_ROWS:
        last = []
        for part in by_rank:
            rows = formulas.joined(part)
            last.append(rows.take(range(max(0, len(rows) - case.window), len(rows))))
        return {f"window_{k}": v for k, v in _expected_of_rows(case, formulas.joined(last)).items()}
    in_window: list[Rows] = []
    for part in by_rank:
        kept: list[Rows] = []
        for rows in reversed(part):
            if sum(map(len, [*kept, rows])) > case.window:
                break
            kept.append(rows)
        in_window += kept
    everything = [rows for part in by_rank for rows in part]
    found = {f"window_{k}": v for k, v in _expected(case, in_window).items()}
    found |= {f"lifetime_{k}": v for k, v in _expected(case, everything).items()}
    if case.metric in ("serving_ne", "serving_calibration"):
        found["total_examples"] = sum(w != 0 for rows in everything for w in rows.w)
    return found


def _is_near(case: Case, value: float, wanted: float) -> bool:
    if math.isnan(wanted) or math.isinf(wanted):
        return value == wanted or (math.isnan(value) and math.isnan(wanted))
    is_single = torch.float32 in case.dtypes and case.metric not in FUNCTIONS
    is_single |= case.metric in (*OF_ROWS, "segmented_ne")  # results are float32
    relative, absolute = (1e-4, 1e-6) if is_single else (1e-9, 1e-12)
    if case.metric == "mse":
        relative = max(relative, 1e-6)  # labels that differ little are subtracted
    if case.metric in SCALED:
        absolute = 0.0
    return math.isclose(value, wanted, rel_tol=relative, abs_tol=absolute)


def complaint_about(pool: RankPool, seed: int) -> str | None:
    """Return the error in the results of a case; None if they are right."""
    case = make_case(seed)
    of_ranks = pool(case.world, compute, seed) if case.world > 1 else [compute(seed)]
    wanted = expected(case)
    for rank, found in enumerate(of_ranks):
        if set(found) != set(wanted):
            return f"{case.metric}: results {sorted(found)} for {sorted(wanted)}"
        for key, value in wanted.items():
            for of_task in found[key]:
                values, wants = (x if isinstance(x, list) else [x] for x in (of_task, value))
                if not all(_is_near(case, *pair) for pair in zip(values, wants, strict=True)):
                    return f"{case.metric} {case.options}: {key} {of_task} for {value}, rank {rank}"
    return None
