"""Each metric as a loop over samples in Python floats: what results must equal.

Whether a class is there is counted, and sums are exact (`math.fsum`), so that nothing here depends
on the order of additions. A value that a metric reads and that is NaN makes its results NaN.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

EPSILON = 1e-12
Results = dict[str, float | list[float]]


@dataclass(frozen=True)
class Rows:
    """The samples of one batch of one task."""

    p: list[float]
    y: list[float]
    w: list[float]
    session: list[int]
    group: list[int]
    sizes: list[int]
    """Sizes of the sessions of GAUC, which follow one another."""
    tensor: list[float]
    classes: list[list[float]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.p)

    def take(self, places: Sequence[int]) -> Rows:
        """Some of the samples."""
        names = ("p", "y", "w", "session", "group", "tensor")
        columns = {name: [getattr(self, name)[i] for i in places] for name in names}
        return Rows(**columns, sizes=[], classes=[self.classes[i] for i in places])


def joined(batches: Sequence[Rows]) -> Rows:
    """The samples of several batches."""
    names = ("p", "y", "w", "session", "group", "sizes", "tensor", "classes")
    return Rows(**{n: [v for b in batches for v in getattr(b, n)] for n in names})


def divide(part: float, whole: float) -> float:
    """Divide like floats of tensors: by zero, the result is infinite or NaN."""
    if whole != 0:
        return part / whole
    return math.nan if part == 0 or math.isnan(part) else math.copysign(math.inf, part)


def dot(*columns: Sequence[float]) -> float:
    """Sum of products."""
    return math.fsum(math.prod(values) for values in zip(*columns, strict=True))


def rest(values: Sequence[float]) -> list[float]:
    """Return the difference of each value from one."""
    return [1.0 - value for value in values]


def log_or_least(value: float) -> float:
    """Logarithm, bounded as losses are."""
    return math.log(max(value, EPSILON))


def cross_entropies(p: Sequence[float], y: Sequence[float]) -> list[float]:
    """In nats."""
    least = math.log(EPSILON)
    negative = [max(math.log1p(-value), least) if value < 1 else least for value in p]
    return [-(b * log_or_least(a) + (1 - b) * n) for a, b, n in zip(p, y, negative, strict=True)]


def logs_of_shares(a: float, b: float) -> tuple[float, float]:
    """Logarithms of the two shares of a sum, neither of them rounded to zero near one."""
    of_a, of_b = divide(a, a + b), divide(b, a + b)
    log_a = math.log1p(-of_b) if of_a > 0.5 else math.log(of_a) if of_a > 0 else -math.inf
    log_b = math.log1p(-of_a) if of_b > 0.5 else math.log(of_b) if of_b > 0 else -math.inf
    return log_a, log_b


def entropy_of(positive: float, negative: float) -> float:
    """Return the entropy of the base rate."""
    if positive + negative == 0:
        return math.nan
    log_p, log_n = logs_of_shares(positive, negative)
    total = positive + negative
    return -sum(x / total * log for x, log in ((positive, log_p), (negative, log_n)) if x != 0)


def normalized(loss: Sequence[float], y: Sequence[float], w: Sequence[float]) -> float:
    """Mean loss by the entropy of the base rate."""
    positive, negative = dot(y, w), dot(rest(y), w)
    return divide(divide(dot(loss, w), positive + negative), entropy_of(positive, negative))


def has_nan(*columns: Sequence[float]) -> bool:
    """Return True if a value is not a number."""
    return any(math.isnan(value) for column in columns for value in column)


def scaled(weights: Sequence[float]) -> list[float]:
    """Scale weights by a power of two, exactly, so that products stay in range."""
    most = max(map(abs, weights), default=0.0)
    return [math.ldexp(w, -math.frexp(most)[1]) for w in weights] if most else list(weights)


def area(p: Sequence[float], y: Sequence[float], w: Sequence[float]) -> float:
    """Return the area under the ROC curve, from all pairs; NaN for one class."""
    if has_nan(p, y, w):
        return math.nan
    w = scaled(w)
    positive = [(s, a * b) for s, a, b in zip(p, y, w, strict=True) if a * b]
    negative = [(s, (1 - a) * b) for s, a, b in zip(p, y, w, strict=True) if (1 - a) * b]
    won = [
        u * v * (1.0 if s > t else 0.5 if s == t else 0.0) for s, u in positive for t, v in negative
    ]
    whole = math.fsum(v for _, v in positive) * math.fsum(v for _, v in negative)
    return divide(math.fsum(won), whole)


def average_precision(p: Sequence[float], y: Sequence[float], w: Sequence[float]) -> float:
    """Steps under the curve of precision over recall; NaN without positives."""
    if has_nan(p, y, w):
        return math.nan
    w = scaled(w)
    gained = []
    for score in set(p):
        above = [i for i, other in enumerate(p) if other >= score]
        right = math.fsum(y[i] * w[i] for i in above)
        here = math.fsum(y[i] * w[i] for i in above if p[i] == score)
        if here:
            gained.append(here * right / math.fsum(w[i] for i in above))
    return divide(math.fsum(gained), dot(y, w))


def share_in_order(p: Sequence[float], y: Sequence[float], w: Sequence[float]) -> float:
    """Return the share of pairs in the labels' order, half for equal ones; weights do not count."""
    if has_nan(p, y):
        return math.nan
    pairs = list(itertools.combinations(range(len(p)), 2))
    wrong = sum(
        0.5 if p[i] == p[j] else float((p[i] > p[j]) == (y[i] < y[j]))
        for i, j in pairs
        if y[i] != y[j]
    )
    return 1 - wrong / len(pairs) if pairs else math.nan


def over_groups(rows: Rows, value: Callable[..., float], reads_weights: bool = True) -> float:
    """Mean over the groups that have a value; NaN if one is not a number."""
    if has_nan(rows.p, rows.y, rows.w if reads_weights else []):
        return math.nan
    values = []
    for group in set(rows.group):
        of = rows.take([i for i, other in enumerate(rows.group) if other == group])
        values.append(value(of.p, of.y, of.w))
    defined = [v for v in values if not math.isnan(v)]
    return divide(math.fsum(defined), len(defined))


def binned(rows: Rows, num_bins: int) -> float:
    """Area where samples of a bin are ties."""
    if has_nan(rows.p, rows.y, rows.w):
        return math.nan
    bins = [
        min(max(math.floor(max(min(p, 2.0), -1.0) * num_bins), 0), num_bins - 1) for p in rows.p
    ]
    return area(bins, rows.y, rows.w)


def hindsight(rows: Rows, target: float) -> tuple[float, float, float]:
    """The least threshold of that precision, the precision, and the recall."""
    if has_nan(rows.p, rows.y, rows.w):
        return math.nan, math.nan, math.nan
    for place in range(1000):
        taken = [i for i, p in enumerate(rows.p) if p >= place / 999]
        of = rows.take(taken)
        precision = divide(dot(of.y, of.w), math.fsum(of.w))
        if precision >= target:
            return place / 999, precision, divide(dot(of.y, of.w), dot(rows.y, rows.w))
    return math.nan, math.nan, math.nan


def by_session(rows: Rows) -> Iterator[Rows]:
    """The samples of each session of a batch."""
    for session in set(rows.session):
        yield rows.take([i for i, other in enumerate(rows.session) if other == session])


def orders_of_ties(scores: Sequence[float]) -> list[tuple[int, int]]:
    """The numbers of higher and of equal scores."""
    return [(sum(s > own for s in scores), sum(s == own for s in scores)) for own in scores]


def discounted(gains: Sequence[float], scores: Sequence[float], k: int) -> float:
    """Gains by the logarithms of their places; the mean over the places of equal scores."""
    return math.fsum(
        gain / math.log2(place + 2) / tied
        for gain, (better, tied) in zip(gains, orders_of_ties(scores), strict=True)
        for place in range(better, better + tied)
        if k < 0 or place < k
    )


def of_the_first(scores: Sequence[float], limit: int) -> list[float]:
    """The share of the orders of equal scores in which each is one of the first."""
    return [min(max(limit - better, 0), tied) / tied for better, tied in orders_of_ties(scores)]


def ndcg(batches: Sequence[Rows], options: Mapping[str, Any]) -> float:
    """Mean over sessions."""
    values = []
    for rows in (session for batch in batches for session in by_session(batch)):
        if options["remove_single_length_sessions"] and len(rows) == 1:
            continue
        if has_nan(rows.p, rows.y, rows.w):
            return math.nan
        labels, scores, weight = rows.y, rows.p, max(rows.w)
        if options["scale_by_weights_tensor"]:
            labels, scores = (
                [value * w for value, w in zip(values, rows.w, strict=True)]
                for values in (rows.y, rows.p)
            )
            weight = 1.0
        gains = [2**y - 1 if options["exponential_gain"] else y for y in labels]
        best = discounted(gains, gains, options["k"])
        value = discounted(gains, scores, options["k"]) / best if best else 0.0
        values.append(weight * (1 - value if options["report_ndcg_as_decreasing_curve"] else value))
    return divide(math.fsum(values), len(values))


def top_of_sessions(batches: Sequence[Rows], limit: int, ranks_labels: bool) -> tuple[float, float]:
    """Recall and precision of the best of each session."""
    hits, predicted, positive = [], [], []
    for rows in (session for batch in batches for session in by_session(batch)):
        if has_nan(rows.p, rows.y, rows.w):
            return math.nan, math.nan
        labels = of_the_first(rows.y, limit) if ranks_labels else rows.y
        for chance, label, w in zip(of_the_first(rows.p, limit), labels, rows.w, strict=True):
            hits.append(chance * label * w)
            predicted.append(chance * w)
            positive.append(label * w)
    found = math.fsum(hits)
    return divide(found, math.fsum(positive)), divide(found, math.fsum(predicted))


def gauc(batches: Sequence[Rows]) -> tuple[float, float]:
    """Mean over the sessions that have both classes, and their number."""
    areas = []
    for rows in batches:
        if has_nan(rows.p, rows.y, rows.w):
            return math.nan, math.nan
        begin = 0
        for size in rows.sizes:
            of = slice(begin, begin + size)
            areas.append(area(rows.p[of], rows.y[of], rows.w[of]))
            begin += size
    defined = [value for value in areas if not math.isnan(value)]
    return divide(math.fsum(defined), len(defined)), len(defined)


def xauc(batches: Sequence[Rows]) -> float:
    """Share of the pairs of a batch that are ordered as their labels."""
    right, whole = [], []
    for rows in batches:
        if has_nan(rows.p, rows.y, rows.w):
            return math.nan
        for i, j in itertools.combinations(range(len(rows)), 2):
            weight = rows.w[i] * rows.w[j]
            whole.append(weight)
            p, y = rows.p[i] - rows.p[j], rows.y[i] - rows.y[j]
            is_half = p == 0 and y != 0
            is_right = (p > 0) - (p < 0) == (y > 0) - (y < 0)
            right.append(weight * (0.5 if is_half else float(is_right)))
    return divide(math.fsum(right), math.fsum(whole))


def squared_errors(rows: Rows, around: float | None = None) -> list[float]:
    """Return squared errors of the predictions, or of a number in their place."""
    return [
        ((p if around is None else around) - y) ** 2 for p, y in zip(rows.p, rows.y, strict=True)
    ]


def r_squared(rows: Rows) -> float:
    """One minus the squared error over the squared error of the labels' mean."""
    mean, total = divide(dot(rows.y, rows.w), math.fsum(rows.w)), math.fsum(rows.w)
    if total == 0:
        return math.nan
    weighed = [y for y, w in zip(rows.y, rows.w, strict=True) if w != 0]
    spread = dot(squared_errors(rows, mean), rows.w) if len(set(weighed)) > 1 else 0.0
    return 1 - divide(dot(squared_errors(rows), rows.w), spread)


def recalibrated(p: Sequence[float], rate: float) -> list[float]:
    """Predictions whose sampling of negatives is undone."""
    return [rate * x / (rate * x + (1 - x)) for x in p]


def cali_free_ne(rows: Rows) -> float:
    """Log loss divided by the log loss of the mean prediction."""
    p, y, w = rows.p, rows.y, rows.w
    positive, negative, total = dot(y, w), dot(rest(y), w), math.fsum(w)
    if total == 0:
        return math.nan
    least = math.log(EPSILON)
    log_p, log_n = (max(log, least) for log in logs_of_shares(dot(p, w), dot(rest(p), w)))
    of_mean = -(positive / total * log_p + negative / total * log_n)
    return divide(dot(cross_entropies(p, y), w) / total, of_mean)


def multiclass(rows: Rows, num_classes: int) -> list[float]:
    """Share of samples whose class is among the k best, for each k."""
    if has_nan(rows.y, rows.w, *rows.classes):
        return [math.nan] * num_classes
    chances = [
        [of_the_first(c, k)[int(y)] for c, y in zip(rows.classes, rows.y, strict=True)]
        for k in range(1, num_classes + 1)
    ]
    return [divide(dot(of_k, rows.w), math.fsum(rows.w)) for of_k in chances]


def multi_label(rows: Rows, num_labels: int) -> list[float]:
    """Precision of each label."""
    if has_nan(rows.p, rows.y, rows.w):
        return [math.nan] * num_labels
    values = []
    for bit in range(num_labels):
        given = [float(int(p) >> bit & 1) for p in rows.p]
        right = [float(int(p) & int(y)) and float(int(p) & int(y) & (1 << bit) > 0)
                 for p, y in zip(rows.p, rows.y, strict=True)]  # fmt: skip
        values.append(divide(dot(right, rows.w), dot(given, rows.w)))
    return values


def segmented(rows: Rows, num_groups: int) -> Results:
    """Normalized entropy and log loss in bits of each segment."""
    found: Results = {}
    for group in range(num_groups):
        of = rows.take([i for i, other in enumerate(rows.group) if other == group])
        loss = cross_entropies(of.p, of.y)
        found[f"segmented_ne_{group}"] = normalized(loss, of.y, of.w)
        found[f"logloss_{group}"] = divide(dot(loss, of.w), math.fsum(of.w)) / math.log(2)
    return found


def log_loss(rows: Rows) -> float:
    """Mean, in nats."""
    return divide(dot(cross_entropies(rows.p, rows.y), rows.w), math.fsum(rows.w))


def over_samples(metric: str, rows: Rows, options: Mapping[str, Any]) -> Results:
    """The results of a metric that is a formula of sums over samples."""
    p, y, w = rows.p, rows.y, rows.w
    ones, total = [1.0] * len(rows), math.fsum(w)
    threshold = options.get("threshold", 0.5)
    decided = [float(value >= threshold) if value == value else math.nan for value in p]
    hits = dot(y, decided, w)
    right = [
        math.nan if has_nan(pair) else float(pair[0] == pair[1])
        for pair in zip(decided, y, strict=True)
    ]
    rate = options.get("recalibration_coefficient", 1.0)
    formulas: dict[str, Callable[[], Results]] = {
        "ne": lambda: {
            "ne": normalized(cross_entropies(p, y), y, w),
            "logloss": log_loss(rows) / math.log(2),
        },
        "serving_ne": lambda: {"ne": normalized(cross_entropies(p, y), y, w)},
        "recalibrated_ne": lambda: {
            "ne": normalized(cross_entropies(recalibrated(p, rate), y), y, w)
        },
        "recalibrated_calibration": lambda: {
            "calibration": divide(dot(recalibrated(p, rate), w), dot(y, w))
        },
        "ne_positive": lambda: {
            "ne_positive": normalized(
                [-b * log_or_least(a) for a, b in zip(p, y, strict=True)], y, w
            )
        },
        "unweighted_ne": lambda: {"unweighted_ne": normalized(cross_entropies(p, y), y, ones)},
        "cali_free_ne": lambda: {"cali_free_ne": cali_free_ne(rows)},
        "segmented_ne": lambda: segmented(rows, options.get("num_groups", 1)),
        "log_loss": lambda: {"logloss": log_loss(rows)},
        "calibration": lambda: {"calibration": divide(dot(p, w), dot(y, w))},
        "serving_calibration": lambda: {"calibration": divide(dot(p, w), dot(y, w))},
        "ctr": lambda: {"ctr": divide(dot(y, w), total)},
        "average": lambda: {
            "label_average": divide(dot(y, w), total),
            "prediction_average": divide(dot(p, w), total),
        },
        "weighted_avg": lambda: {"weighted_avg": divide(dot(p, w), total)},
        "tensor_weighted_avg": lambda: {"weighted_avg": divide(dot(rows.tensor, w), total)},
        "scalar": lambda: {"scalar": divide(math.fsum(y), len(y))},
        "mse": lambda: {
            "mse": divide(dot(squared_errors(rows), w), total),
            "rmse": math.sqrt(divide(dot(squared_errors(rows), w), total)),
            "r_squared": r_squared(rows),
        },
        "nmse": lambda: {
            "nmse": (
                nmse := divide(dot(squared_errors(rows), w), dot(squared_errors(rows, 1.0), w))
            ),
            "nrmse": math.sqrt(nmse),
        },
        "mae": lambda: {
            "mae": divide(dot([abs(a - b) for a, b in zip(p, y, strict=True)], w), total)
        },
        "accuracy": lambda: {"accuracy": divide(dot(right, w), total)},
        "precision": lambda: {"precision": divide(hits, dot(decided, w))},
        "recall": lambda: {"recall": divide(hits, dot(y, w))},
        "sum_weights": lambda: {"sum_weights": total},
        "weighted_sum_predictions": lambda: {"weighted_sum_predictions": dot(p, w)},
        "num_positive_samples": lambda: {
            "num_positive_samples": dot([0.0 if math.isnan(b) else b for b in y], w)
        },
        "num_missing_labels": lambda: {
            "num_missing_labels": dot([float(math.isnan(b)) for b in y], w)
        },
    }
    return formulas[metric]()
