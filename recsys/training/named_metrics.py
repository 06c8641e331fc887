"""Metrics of `recsys.metrics` by name, for a `Trainer`.

Shapes: `B` samples of a batch, `T` tasks, `C` classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from recsys.base.arguments import choice, repeated
from recsys.base.checked import checked
from recsys.metrics.metrics_config import RecMetricEnum, RecTaskInfo, SessionMetricDef
from recsys.metrics.rec_metric import METRICS, RecMetric, RecMetricList
from recsys.metrics.session_metrics import SessionMetric
from recsys.sparse import KeyedJaggedTensor
from recsys.training.evaluation import BinaryMetrics, MeanOfLosses

__all__ = ["NamedMetrics"]

_ALL = 2**62
"""Size of a window that contains every sample of an evaluation."""
_GROUP = "grouping_keys"
"""Name of the groups among the inputs of a metric."""
_NEED_THRESHOLD = {RecMetricEnum.RECALL_SESSION_LEVEL, RecMetricEnum.PRECISION_SESSION_LEVEL}
_FIELDS_OF = {
    "tensor_name": {RecMetricEnum.TENSOR_WEIGHTED_AVG},
    "weighted": {RecMetricEnum.TENSOR_WEIGHTED_AVG},
    "top_threshold": _NEED_THRESHOLD,
    "run_ranking_of_labels": _NEED_THRESHOLD,
}
"""Arguments that `RecTaskInfo` or its `SessionMetricDef` takes, and their metrics."""
_NEED_GROUPS = {
    *(RecMetricEnum.GAUC, RecMetricEnum.NDCG, RecMetricEnum.SEGMENTED_NE),
    *_NEED_THRESHOLD,
}
_OWN = {RecMetricEnum.AUC: "auc", RecMetricEnum.NE: "ne"}
"""Metrics that `BinaryMetrics` computes, and the name of the result."""


class _Rows(RecMetric):
    """Keeps the samples and their groups, and has no results."""

    ranks_rows = True
    arguments: ClassVar[Mapping[str, Any]] = {"is_grouped": False}
    namespace = METRICS[RecMetricEnum.GAUC].namespace

    def get_required_inputs(self) -> set[str]:
        return {_GROUP} if self.options["is_grouped"] else set()


@final
class _Chosen(NamedTuple):
    """A metric by name.

    Attributes:
        metric: The metric.
        group_by: Feature whose ids define the groups, or "".
        arguments: Arguments of the metric's class.
        task_fields: Arguments among `_FIELDS_OF`.
    """

    metric: RecMetricEnum
    group_by: str
    arguments: Mapping[str, Any]
    task_fields: Mapping[str, Any]

    def build(self, task: str) -> RecMetric:
        """Build the metric for one task, over all samples that it receives."""
        tensor = {k: v for k, v in self.task_fields.items() if k in ("tensor_name", "weighted")}
        session = {k: v for k, v in self.task_fields.items() if k not in tensor}
        info = RecTaskInfo(
            task, session_metric_def=SessionMetricDef(_GROUP, **session) if session else None,
            **tensor,
        )  # fmt: skip
        return _build(METRICS[self.metric], info, self.arguments)

    @property
    def is_session_metric(self) -> bool:
        return issubclass(METRICS[self.metric], SessionMetric)


@final
class NamedMetrics:
    """Metrics of `RecMetricEnum` by name, over all samples of an evaluation and of all ranks.

    `Trainer(..., metrics=["auc", "ne", "calibration"])` computes them, and
    `metrics=partial(NamedMetrics, names, tasks=["click", "buy"])` for several tasks. The model
    returns the output `(loss, logits, labels)`. Results include the `loss` of `BinaryMetrics`, and
    sample weights and label masks have the same meaning. Predictions are `sigmoid(logits)`. The
    metric `multiclass_recall` reads logits `[B, C]`; for `multi_label_precision` a task is
    predicted if its prediction is at least 0.5.

    A metric of groups, such as `gauc`, needs the argument `group_by`: the name of a feature with
    one id for each sample, or of an attribute `[B]` of the batch. Groups are complete even if their
    samples are in several batches or on several ranks. For this, metrics of groups and of the order
    of samples keep 12 to 32 bytes for each sample and task.

    Results have the names of docs/metrics.md without span, such as `rmse`, and with the task as in
    `rmse/click`. `ndcg` is larger for better models, unless its arguments request one minus it.

    Args:
        metrics: Names, such as "gauc"; or the arguments of each metric by its name:
            `{"auc": {}, "gauc": {"group_by": "user"}}`. Beside the arguments of docs/metrics.md
            these are `group_by`; `tensor_name` and `weighted` of `tensor_weighted_avg`; and
            `top_threshold` and `run_ranking_of_labels` of `recall_session_level` and
            `precision_session_level`.
        device: Device of the model's output.
        tasks: Names of the tasks of `[B, T]` labels; empty for one task.

    Raises:
        TypeError: An argument has another type.
        ValueError: A name or an argument is unknown or missing; a metric is named twice; or, at an
            update, the batch lacks a feature or has samples without exactly one id in it.

    Example:
        >>> from types import SimpleNamespace
        >>> metrics = NamedMetrics({"mse": {}, "gauc": {"group_by": "user"}}, torch.device("cpu"))
        >>> user = torch.tensor([7, 8, 7, 8])
        >>> logits, labels = torch.tensor([0.0, 2.0, 1.0, -1.0]), torch.tensor([0.0, 1.0, 1.0, 1.0])
        >>> output = torch.tensor(0.4), logits, labels
        >>> metrics.update(output, SimpleNamespace(user=user))
        >>> {name: round(value, 3) for name, value in metrics.compute().items()}
        {'mse': 0.218, 'rmse': 0.467, 'gauc': 1.0, 'gauc_num_samples': 1.0, 'loss': 0.612}
    """

    @checked
    def __init__(
        self,
        metrics: Sequence[str] | Mapping[str, Mapping[str, Any]],
        device: torch.device,
        tasks: Sequence[str] = (),
    ) -> None:
        if isinstance(metrics, Sequence) and (twice := repeated(metrics)):
            raise ValueError(f"metrics must be distinct names; received {twice} more than once.")
        by_name = metrics if isinstance(metrics, Mapping) else {name: {} for name in metrics}
        self._chosen = [_choose(name, dict(arguments)) for name, arguments in by_name.items()]
        names = {chosen.metric for chosen in self._chosen}
        self._has_classes = RecMetricEnum.MULTICLASS_RECALL in names
        if self._has_classes and (len(names) > 1 or tasks):
            raise ValueError(
                "metrics must be multiclass_recall alone and without tasks, as it reads logits of "
                f"classes; received {sorted(by_name)} and tasks {list(tasks)}."
            )
        self.tasks = list(tasks)
        self._group_names = {chosen.group_by for chosen in self._chosen} - {""}
        self._tensor_names = {
            chosen.task_fields["tensor_name"]
            for chosen in self._chosen
            if "tensor_name" in chosen.task_fields
        }
        self._losses: BinaryMetrics | MeanOfLosses = (
            MeanOfLosses(device)
            if self._has_classes
            else BinaryMetrics(device, tasks, auc=RecMetricEnum.AUC in names)
        )
        self._tasks = [_Task(task, self._chosen, device) for task in self.tasks or [""]]
        labels = [c for c in self._chosen if c.metric is RecMetricEnum.MULTI_LABEL_PRECISION]
        names_of_labels = {"num_labels": len(self._tasks), "label_names": self.tasks or None}
        self._label_sets = [
            _build(METRICS[c.metric], RecTaskInfo(), names_of_labels | dict(c.arguments)).to(device)
            for c in labels
        ]

    @torch.no_grad()
    def update(self, output: tuple[Tensor, Tensor, Tensor], batch: Any) -> None:
        """Add a batch.

        Args:
            output: Loss, logits `[B]`, `[B, T]` or `[B, C]`, and labels.
            batch: The batch, on the device of the model.
        """
        self._losses.update(output, batch)
        _, logits, labels = output
        weights, mask = (getattr(batch, name, None) for name in ("sample_weights", "label_mask"))
        size = len(labels)
        groups, tensors = (
            {name: _column_of(batch, name, size) for name in names}
            for names in (self._group_names, self._tensor_names)
        )
        if self._has_classes:
            self._tasks[0].update(logits, labels, weights, None, groups, tensors)
            return
        num_tasks = len(self._tasks)
        scores, truth = logits.sigmoid().view(-1, num_tasks), labels.view(-1, num_tasks)
        masks = [None] * num_tasks if mask is None else mask.view(-1, num_tasks).unbind(1)
        for task, score, label, is_known in zip(
            self._tasks, scores.unbind(1), truth.unbind(1), masks, strict=True
        ):
            task.update(score, label, weights, is_known, groups, tensors)
        if self._label_sets:
            if mask is not None:
                raise ValueError(
                    "multi_label_precision needs all labels; received a batch with a label_mask."
                )
            bits = 2 ** torch.arange(num_tasks, device=logits.device)
            columns = [((x >= 0.5) * bits).sum(1).double() for x in (scores, truth)]
            _add(self._label_sets[0], columns, weights, {})

    def sync(self) -> None:
        """Add the state of all ranks; every rank calls it, if there are several."""
        self._losses.sync()
        for task in self._tasks:
            task.sync()
        for metric in self._label_sets:
            metric.sync()

    def compute(self) -> dict[str, float]:
        """Return the metrics by name."""
        of_losses = self._losses.compute()
        wanted = {_OWN.get(chosen.metric, "") for chosen in self._chosen} | {"loss"}
        results: dict[str, float] = {}
        for task in self._tasks:
            end = f"/{task.name}" if task.name else ""
            results |= {f"{name}{end}": value for name, value in task.compute()}
        for metric in self._label_sets:
            for key, value in metric.local_compute().items():
                label = _result_name(key).removeprefix("multi_label_precision")
                results[f"multi_label_precision/{label}"] = value.item()
        # `BinaryMetrics` computes AUC and NE in float64
        return results | {k: v for k, v in of_losses.items() if k.partition("/")[0] in wanted}


@final
class _Task:
    """Metrics of one task.

    Args:
        name: Name of the task; "" for the only one.
        chosen: The metrics.
        device: Device of the samples.
    """

    def __init__(self, name: str, chosen: Sequence[_Chosen], device: torch.device) -> None:
        self.name, self._device = name, device
        self._chosen = [
            metric_choice
            for metric_choice in chosen
            if metric_choice.metric is not RecMetricEnum.MULTI_LABEL_PRECISION
            and (metric_choice.metric not in _OWN or metric_choice.arguments)
        ]
        self._metrics: dict[int, RecMetric] = {}
        self._lists: dict[str, RecMetricList] = {}
        """The metrics that share accumulators, by the feature of their groups."""
        self._rows: dict[str, RecMetric] = {}
        """Samples for the metrics of sessions, by the feature of their groups."""
        for group_by in dict.fromkeys(metric_choice.group_by for metric_choice in self._chosen):
            members: list[RecMetric] = []
            for i, metric_choice in enumerate(self._chosen):
                if metric_choice.group_by != group_by:
                    continue
                metric = metric_choice.build(name)
                if not metric_choice.is_session_metric:
                    self._metrics[i] = metric
                    members.append(metric)
                elif group_by not in self._rows:
                    rows = _build(_Rows, RecTaskInfo(name), {"is_grouped": bool(group_by)})
                    self._rows[group_by] = rows
                    members.append(rows)
            self._lists[group_by] = RecMetricList(members).to(device)

    def update(
        self,
        scores: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        mask: Tensor | None,
        groups: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Add a batch; samples that `mask` leaves out do not count."""
        kept = slice(None) if mask is None else mask.nonzero().squeeze(1)
        columns = [scores[kept], labels[kept]]
        inputs = {name: values[kept] for name, values in tensors.items()}
        for group_by, metrics in self._lists.items():
            keys = {_GROUP: groups[group_by][kept]} if group_by else {}
            _add(metrics, columns, None if weights is None else weights[kept], inputs | keys)

    def sync(self) -> None:
        """Exchange sums and rows with all ranks."""
        for metrics in self._lists.values():
            metrics.sync()

    def compute(self) -> Iterator[tuple[str, float]]:
        """Yield the results by name."""
        for i, chosen in enumerate(self._chosen):
            metric = self._metrics.get(i)
            if metric is None:
                metric = self._from_rows(chosen)
            results = {}
            for key, value in metric.local_compute().items():
                name = _result_name(key)
                is_main = name == str(metric.name)
                name = chosen.metric.value if is_main else name
                if "lifetime_" in key or name not in results:
                    results[name] = value
            for name, value in results.items():
                if value.numel() == 1:
                    yield name, value.item()
                else:
                    values = enumerate(value.flatten().tolist(), start=1)
                    yield from ((f"{name}@{k}", at_k) for k, at_k in values)

    def _from_rows(self, chosen: _Chosen) -> RecMetric:
        """Return a metric of sessions, computed with complete groups."""
        kept = self._rows[chosen.group_by]
        groups = kept._accumulators.groups
        [rows] = [group.window_rows(_ALL) for group in groups if kept in group.metrics]
        scores, labels, weights = rows.rows[:, 0]
        inputs = {}
        if chosen.group_by:
            keys, order = rows.input(_GROUP).sort(stable=True)
            scores, labels, weights = scores[order], labels[order], weights[order]
            inputs[_GROUP] = keys
            inputs["num_candidates"] = keys.unique_consecutive(return_counts=True)[1]
        metric = chosen.build(self.name).to(self._device)
        _add(metric, [scores, labels], weights, inputs)
        return metric


def _choose(name: str, arguments: dict[str, Any]) -> _Chosen:
    """Return the metric of a name and its arguments."""
    metric = choice("metrics", name, RecMetricEnum)
    group_by = arguments.pop("group_by", "")
    if not isinstance(group_by, str):
        raise TypeError(f"group_by of {name} must be text; received {group_by!r}.")
    fields = {key: arguments.pop(key) for key in _FIELDS_OF if key in arguments}
    is_grouped = metric in _NEED_GROUPS or bool(arguments.get(f"grouped_{name}"))
    if metric in _NEED_THRESHOLD and "top_threshold" not in fields:
        raise ValueError(
            f"{name} needs top_threshold, the number of samples of a group that are predicted "
            f'positive; received none. Pass metrics={{"{name}": {{"top_threshold": 10, ...}}}}.'
        )
    if is_grouped and not group_by:
        raise ValueError(
            f"{name} needs group_by, the feature whose ids are the groups; received none. Pass "
            f'metrics={{"{name}": {{"group_by": "user"}}}}.'
        )
    if group_by and not is_grouped:
        raise ValueError(f"{name} has no groups and takes no group_by; received {group_by!r}.")
    if metric is RecMetricEnum.NDCG:
        arguments = {"report_ndcg_as_decreasing_curve": False, **arguments, "session_key": _GROUP}
    for field in fields:
        if metric not in _FIELDS_OF[field]:
            raise ValueError(f"{name} takes no {field}; received {fields[field]!r}.")
    chosen = _Chosen(metric, group_by, arguments, fields)
    chosen.build("")  # raises for wrong arguments
    return chosen


def _build(of: type[RecMetric], task: RecTaskInfo, arguments: Mapping[str, Any]) -> RecMetric:
    return of(world_size=1, my_rank=0, batch_size=1, tasks=[task], window_size=_ALL, **arguments)


def _add(
    metrics: RecMetric | RecMetricList,
    columns: Sequence[Tensor],
    weights: Tensor | None,
    inputs: Mapping[str, Tensor],
) -> None:
    """Add predictions, labels and weights of one task."""
    scores, labels = (column.unsqueeze(0) for column in columns)
    metrics.update(
        predictions=scores,
        labels=labels,
        weights=None if weights is None else weights.unsqueeze(0),
        required_inputs=inputs,
    )


def _result_name(key: str) -> str:
    """Return the name of a result without namespace, task and span."""
    name = key.rpartition("|")[2].removeprefix("local_")
    return name.removeprefix("lifetime_").removeprefix("window_")


def _column_of(batch: Any, name: str, size: int) -> Tensor:
    """Return a feature with one id for each sample, or an attribute of the batch, `[B]`."""
    features = getattr(batch, "sparse_features", batch)
    keys = features.keys() if isinstance(features, KeyedJaggedTensor) else []
    if name in keys:
        bags = features[name]
        if bags.values().numel() != size or bool((bags.lengths() != 1).any()):
            raise ValueError(
                f"Feature {name!r} of metrics must have one id for each sample; received "
                f"{bags.values().numel()} ids for {size} samples."
            )
        ids: Tensor = bags.values()
        return ids
    values = getattr(batch, name, None)
    if not isinstance(values, Tensor) or values.numel() != size:
        raise ValueError(
            f"The batch must have {name!r} for metrics, as a feature or as an attribute with one "
            f"value for each sample; received features {list(keys)}."
        )
    flat: Tensor = values.reshape(-1)
    return flat
