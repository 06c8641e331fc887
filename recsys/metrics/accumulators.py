"""State of metrics between batches, and its exchange between ranks.

Metrics of the same tasks share one tensor of sums and one window of rows. Shapes: `T` tasks, `K`
sums, `N` samples, `B` batches, `R` ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Self, final

import torch

from recsys.base.contact import explained
from recsys.metrics.batch import (
    Inputs,
    MetricBatch,
    TaskBatch,
    build_batch,
    pick_columns,
    select_labeled,
)
from recsys.metrics.metrics_namespace import (
    MetricPrefix,
    compose_customized_metric_key,
    compose_metric_namespace,
)
from recsys.metrics.windows import RowWindow, SumWindow, gather_rows

if TYPE_CHECKING:
    from recsys.metrics.metrics_config import RecTaskInfo
    from recsys.metrics.rec_metric import RecMetric, Value

PENDING_VALUES = 3 * 131_072
"""Number of pending predictions, labels and weights at which batches are summed together. A step
evicts the code and the sums from the caches; they are fetched once for all pending batches."""
SYNCED = "update() must not be called while synced. Call unsync() first."
CHUNK_VALUES = 3 * 32_768
"""Number of values that are summed at once: few calls for small batches, tensors that fit the
cache for large ones."""


class _TaskGroup:
    """Sums and rows of metrics of the same tasks.

    Args:
        metrics: Metrics of the same tasks.
        tasks: The tasks to add: all with the same label mask, or all without one.
    """

    def __init__(self, metrics: Sequence[RecMetric], tasks: Sequence[RecTaskInfo]) -> None:
        self.metrics, self.tasks, self.mask_name = metrics, tasks, tasks[0].mask_name
        self.all_tasks = metrics[0].tasks
        self.num_classes = metrics[0].num_classes
        kinds = ("prediction_name", "label_name", "weight_name")
        self.columns_from = itemgetter(*(getattr(t, kind) for kind in kinds for t in self.tasks))
        quantities = {q.name: q for metric in metrics for q in metric.quantities()}
        # Sums in the order of their columns.
        self.narrow = [q for q in quantities.values() if not q.width]
        self.wide = [q for q in quantities.values() if q.width]
        self.quantities = [*self.narrow, *self.wide]
        self.columns: dict[str, int | slice] = {}
        num_sums = 0
        for q in self.quantities:
            self.columns[q.name] = slice(num_sums, num_sums + q.width) if q.width else num_sums
            num_sums += q.width or 1
        self.lifetime = torch.zeros(len(self.tasks), num_sums, dtype=torch.float64)
        windows = {metric.local_window for metric in metrics if metric.quantities()}
        self.windows = {size: SumWindow(size) for size in sorted(windows)}
        ranked = [metric for metric in metrics if metric.ranks_rows]
        self.row_inputs = sorted({name for m in ranked for name in m.get_required_inputs()})
        self.rows = {size: RowWindow(size) for size in sorted({m.local_window for m in ranked})}
        # Rows of batches to sum later, and their wide sums.
        self.pending: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.validates = any(metric.should_validate_update for metric in metrics)

    def add(self, columns: Sequence[torch.Tensor], inputs: Inputs) -> None:
        """Add a batch: predictions of all tasks, then labels, then weights."""
        if self.mask_name is not None:
            columns, inputs = select_labeled(self.mask_name, len(self.tasks), columns, inputs)
        batch = build_batch(self.tasks, columns, inputs, self.num_classes)
        num_samples = batch.rows.size(2)
        if num_samples == 0 or (self.validates and not batch.rows[2].any()):
            return
        extra = None
        if self.row_inputs:
            extra = torch.stack([batch.input(name).long() for name in self.row_inputs])
        if self.windows:
            wide = self._sum_wide(batch) if self.wide else None
            if self.pending and self.pending[0][0].shape != batch.rows.shape:
                self.flush()
            self.pending.append((batch.rows, wide))
            if len(self.pending) * batch.rows.numel() >= PENDING_VALUES:
                self.flush()
        if self.rows:
            for rows in self.rows.values():
                rows.add(batch.rows, extra)

    @torch.no_grad()
    def _sum_wide(self, batch: MetricBatch) -> torch.Tensor:
        return torch.cat([quantity.of(batch) for quantity in self.wide], dim=1)

    def flush(self) -> None:
        """Sum the pending batches, which all have the same size."""
        if self.pending:
            each = max(1, CHUNK_VALUES // self.pending[0][0].numel())
            for begin in range(0, len(self.pending), each):
                self._add(self.pending[begin : begin + each])
            self.pending.clear()

    def _add(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        rows, wide = zip(*batches, strict=True)
        sums = []
        if self.narrow:
            # Rows are [3, T, B, N]. Each quantity is summed while its values are in the caches.
            batch = MetricBatch(self.tasks, torch.stack(rows, dim=2), None, {})
            sums.append(torch.stack([q.sums(batch) for q in self.narrow], dim=2))
        if self.wide:
            sums.append(torch.stack(wide, dim=1))
        sums_TBK = torch.cat(sums, dim=2).double()
        self.lifetime += sums_TBK.sum(1)
        for sums_TK in sums_TBK.unbind(1):
            for window in self.windows.values():
                window.add(sums_TK, rows[0].size(2))

    def window_totals(self) -> dict[int, torch.Tensor]:
        """Return the sums of each window, by its size on one rank."""
        zeros = torch.zeros_like(self.lifetime)
        return {
            size: torch.stack(tuple(window.sums)).sum(0) if window.sums else zeros
            for size, window in self.windows.items()
        }

    def values(
        self, metrics: Sequence[RecMetric]
    ) -> Iterator[tuple[RecMetric, Sequence[RecTaskInfo], MetricPrefix, Value]]:
        """Yield the results of metrics, with their tasks and their span."""
        lifetime = self.named(self.lifetime)
        windows = {size: self.named(sums) for size, sums in self.window_totals().items()}
        for metric in metrics:
            if metric.quantities():
                for value in metric.values(windows[metric.local_window]):
                    if value.prefix is None:
                        yield metric, self.tasks, MetricPrefix.WINDOW, value
                for value in metric.values(lifetime):
                    yield metric, self.tasks, MetricPrefix.LIFETIME, value
        for size in self.rows:
            ranking = [m for m in metrics if m.ranks_rows and m.local_window == size]
            rows = self.window_rows(size)
            # By task: metrics share the sorted rows of a task, which are then freed.
            for index in range(len(self.tasks) if ranking else 0):
                of_task = rows.of_task(index)
                for metric in ranking:
                    for value in metric.window_values(of_task):
                        yield metric, of_task.tasks, MetricPrefix.WINDOW, value

    def window_rows(self, size: int) -> MetricBatch:
        """Return the rows of a window as one batch."""
        rows_3TN, extra_EN = self._rows(size)
        inputs = {} if extra_EN is None else dict(zip(self.row_inputs, extra_EN, strict=True))
        return MetricBatch(self.tasks, rows_3TN, None, inputs)

    def gather(
        self,
        size: int,
        num_rows_R: Sequence[int],
        is_double: bool,
        process_group: torch.distributed.ProcessGroup | None,
        to_all: bool,
    ) -> RowWindow:
        """Return the rows of a window of all ranks."""
        window = RowWindow(size * len(num_rows_R))
        if sum(num_rows_R):
            rows, extra = self._rows(size)
            rows = rows.double() if is_double else rows
            rows = gather_rows(rows, num_rows_R, process_group, to_all)
            if extra is not None:
                extra = gather_rows(extra, num_rows_R, process_group, to_all)
            window.add(rows, extra)
        return window

    def _rows(self, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = self.rows[size].rows()
        if rows is None:
            none = torch.empty(3, len(self.tasks), 0, device=self.lifetime.device)
            extra = none.new_empty(len(self.row_inputs), 0, dtype=torch.int64)
            rows = none, extra if self.row_inputs else None
        return rows

    def named(self, sums_TK: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the sums of each quantity, by name."""
        return {name: sums_TK[:, column] for name, column in self.columns.items()}

    def entries(self) -> Iterator[tuple[str, int, int | slice]]:
        """Yield the name of each sum in the state dict, the index of its task, and its column."""
        for index, task in enumerate(self.tasks):
            for name, column in self.columns.items():
                yield f"{task.name}.{name}", index, column

    def entries_of(
        self, sums: Mapping[str, torch.Tensor], zeros: set[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the entries of a state dict of some quantities, with empty windows."""
        lifetime = torch.zeros_like(self.lifetime)
        for name, columns in self.named(lifetime).items():
            if name in sums and sums[name].numel() != columns.numel():
                raise ValueError(
                    f"The saved sum {name} needs {columns.numel()} values for tasks "
                    f"{[task.name for task in self.tasks]}; received {sums[name].numel()}."
                )
            if name in sums:
                columns.copy_(sums[name].reshape(columns.shape))
        for key, index, column in self.entries():
            if key[len(self.tasks[index].name) + 1 :] in zeros | sums.keys():
                yield f"lifetime.{key}", lifetime[index, column]
                for size in self.windows:
                    yield f"window_{size}.{key}", lifetime[:0, column]
        for size in self.windows:
            for task in self.tasks:
                yield f"window_{size}.{task.name}.part_sizes", torch.zeros(0, dtype=torch.int64)

    def reset(self) -> None:
        self.pending.clear()
        self.lifetime = torch.zeros_like(self.lifetime)
        self.windows = {size: SumWindow(size) for size in self.windows}
        self.rows = {size: RowWindow(size) for size in self.rows}


@final
class Accumulators(torch.nn.Module):
    """Sums and rows of metrics.

    The state dict has the sums of the lifetime and of the windows, by task and name. It does not
    have the rows: a window of rows may be large, and it fills again.

    Args:
        metrics: Metrics that share the accumulators.
    """

    def __init__(self, metrics: Sequence[RecMetric]) -> None:
        super().__init__()
        together: dict[Any, list[RecMetric]] = {}
        for metric in metrics:
            for mask_name in dict.fromkeys(task.mask_name for task in metric.tasks):
                key = (metric.tasks, metric.num_classes, mask_name)
                together.setdefault(key, []).append(metric)
        self.groups = [
            _TaskGroup(metrics, [task for task in tasks if task.mask_name == mask_name])
            for (tasks, _, mask_name), metrics in together.items()
        ]
        self._metrics = tuple(metrics)
        self._own: list[tuple[Any, ...]] | None = None

    def update(self, given: TaskBatch, inputs: Inputs) -> None:
        """Add a batch.

        Args:
            given: Predictions, labels and weights of all tasks.
            inputs: Other outputs of the model.

        Raises:
            TypeError: A value is not a tensor.
            ValueError: A tensor is missing, or sizes or devices differ.
            RuntimeError: The call is between `sync` and `unsync`.
        """
        if self._own is not None:
            raise RuntimeError(SYNCED)
        for group in self.groups:
            group.add(pick_columns(group.all_tasks, given, group.tasks), inputs)

    def update_from(self, model_out: Inputs, inputs: Inputs) -> None:
        """Add a batch of tensors by the keys of the tasks.

        Args:
            model_out: Predictions, labels and weights.
            inputs: Other outputs of the model.

        Raises:
            KeyError: A tensor is missing.
        """
        if self._own is not None:
            raise RuntimeError(SYNCED)
        for group in self.groups:
            group.add(group.columns_from(model_out), inputs)

    def sync(self, to_all: bool = True) -> None:
        """Use the sums and rows of all ranks; every rank must call it.

        One all-reduce exchanges all sums, and one exchange each window of rows.

        Args:
            to_all: Whether all ranks get the rows; otherwise the first rank alone.

        Raises:
            RuntimeError: The accumulators are synced already.
            LostContactError: Contact with another rank is lost.
        """
        import torch.distributed as dist

        if self._own is not None:
            raise RuntimeError("sync() must not be called twice. Call unsync() in between.")
        self._flush()
        self._own = [(g.lifetime, g.windows, g.rows) for g in self.groups]
        if not self.groups or not (dist.is_available() and dist.is_initialized()):
            return
        process_group = self._metrics[0].process_group
        if dist.get_world_size(process_group) == 1:
            return
        try:
            with explained(process_group, "add up metrics"):
                self._exchange(process_group, to_all)
        except Exception:
            self.unsync()
            raise

    def _exchange(self, process_group: torch.distributed.ProcessGroup | None, to_all: bool) -> None:
        import torch.distributed as dist

        num_ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        windows = [group.window_totals() for group in self.groups]
        rows = [window for group in self.groups for window in group.rows.values()]
        # Each rank fills its own column: the number of rows, and whether they are float64.
        sizes = torch.zeros(2, len(rows), num_ranks, dtype=torch.float64)
        for index, window in enumerate(rows):
            sizes[:, index, rank] = torch.tensor([window.num_rows, window.is_double])
        parts = [sizes.to(self.groups[0].lifetime.device)]
        for group, totals in zip(self.groups, windows, strict=True):
            parts += [group.lifetime, *totals.values()]
        packed = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(packed, group=process_group)
        summed = iter(packed.split([part.numel() for part in parts]))
        exchanges = iter(next(summed).view_as(sizes).long().transpose(0, 1).tolist())
        for group in self.groups:
            group.lifetime = next(summed).view_as(group.lifetime)
            group.windows = {size: SumWindow(size * num_ranks) for size in group.windows}
            for sums in group.windows.values():
                sums.add(next(summed).view_as(group.lifetime), 0)
            synced = {}
            for size in group.rows:
                num_rows, is_double = next(exchanges)
                synced[size] = group.gather(size, num_rows, any(is_double), process_group, to_all)
            group.rows = synced

    def unsync(self) -> None:
        """Restore the sums and rows of this rank.

        Raises:
            RuntimeError: The accumulators are not synced.
        """
        if self._own is None:
            raise RuntimeError("unsync() must come after sync().")
        for group, sums in zip(self.groups, self._own, strict=True):
            group.lifetime, group.windows, group.rows = sums
        self._own = None

    def compute(self, of: Sequence[RecMetric], prefix: str = "") -> dict[str, torch.Tensor]:
        """Compute results over the current sums and rows, synced or not.

        Args:
            of: Metrics to compute.
            prefix: Prefix of the name of each result.

        Returns:
            Results by key, in the shape of each metric.
        """
        self._flush()
        results: dict[str, torch.Tensor] = {}
        for group in self.groups:
            wanted = [metric for metric in group.metrics if any(metric is each for each in of)]
            for metric, tasks, span, value in group.values(wanted):
                name = f"{prefix}{value.prefix or span}{value.name}"
                for task, of_task in zip(tasks, metric.shaped(value.values_T), strict=True):
                    key = compose_metric_namespace(metric.namespace, task.name)
                    results[compose_customized_metric_key(key, name, value.description)] = of_task
        return results

    def kept(self) -> Iterator[torch.Tensor]:
        """Yield all tensors of sums and rows."""
        self._flush()
        for group in self.groups:
            if group.quantities:
                yield group.lifetime
            for window in group.windows.values():
                yield from window.sums
            for rows in group.rows.values():
                for kept in rows.rows() or ():
                    if kept is not None:
                        yield kept

    def _flush(self) -> None:
        for group in self.groups:
            group.flush()

    def reset(self) -> None:
        """Clear all sums and rows."""
        self._own = None
        for group in self.groups:
            group.reset()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move to a device; sums stay float64 for every requested dtype."""
        self._flush()
        for group in self.groups:
            device = fn(torch.empty(0, device=group.lifetime.device)).device
            group.lifetime = group.lifetime.to(device)
            for window in group.windows.values():
                window.sums = deque(sums.to(device) for sums in window.sums)
            for rows in group.rows.values():
                rows.to(device)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        self._flush()
        for group in self.groups:
            for key, task, columns in group.entries():
                destination[f"{prefix}lifetime.{key}"] = group.lifetime[task, columns]
            for size, window in group.windows.items():
                parts = torch.stack([torch.zeros_like(group.lifetime), *window.sums])[1:]
                for key, task, columns in group.entries():
                    destination[f"{prefix}window_{size}.{key}"] = parts[:, task, columns]
                counts = torch.tensor(window.counts, dtype=torch.int64)
                for owner in group.tasks:
                    destination[f"{prefix}window_{size}.{owner.name}.part_sizes"] = counts

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        expected: dict[str, Any] = {}
        self._save_to_state_dict(expected, prefix, keep_vars=False)
        missing = [key for key in expected if key not in state_dict]
        missing_keys += missing
        if strict:
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in expected]
        if missing:
            return
        for group in self.groups:
            for key, task, columns in group.entries():
                group.lifetime[task, columns] = state_dict[f"{prefix}lifetime.{key}"]
            for size in group.windows:
                counts = state_dict[f"{prefix}window_{size}.{group.tasks[0].name}.part_sizes"]
                parts = group.lifetime.new_zeros(len(counts), *group.lifetime.shape)
                for key, task, columns in group.entries():
                    parts[:, task, columns] = state_dict[f"{prefix}window_{size}.{key}"]
                group.windows[size] = SumWindow(size)
                for sums, count in zip(parts, counts.tolist(), strict=True):
                    group.windows[size].add(sums, count)
