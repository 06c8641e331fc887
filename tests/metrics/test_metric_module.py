"""The module as a configuration builds it: names, ranks, collectives, checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.metrics import accumulators, metric_module
from recsys.metrics.metric_module import (
    REC_METRICS_MAPPING,
    RecMetricModule,
    StateMetric,
    generate_metric_module,
)
from recsys.metrics.metrics_config import (
    DefaultMetricsConfig,
    MetricsConfig,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
    SessionMetricDef,
    StateMetricEnum,
    ThroughputDef,
)
from tests.metrics.data import TASKS, batches_of_rank, model_out
from tests.pretended_cuda import CUDA, PretendedCuda
from tests.ranks import RankPool

CLICK, BUY = (RecTaskInfo(t, f"{t}_label", f"{t}_prediction", f"{t}_weight") for t in TASKS)
SUMS = {
    RecMetricEnum.NE: RecMetricDef(rec_tasks=[CLICK, BUY], window_size=160),
    RecMetricEnum.CTR: RecMetricDef(rec_task_indices=[0], window_size=160),
    RecMetricEnum.MSE: RecMetricDef(rec_tasks=[CLICK, BUY], window_size=80),
}


def build(
    rec_metrics: Any = SUMS, world_size: int = 1, my_rank: int = 0, **settings: Any
) -> RecMetricModule:
    config = MetricsConfig(rec_tasks=[CLICK, BUY], rec_metrics=rec_metrics, **settings)
    return generate_metric_module(
        RecMetricModule, config, 16, world_size, my_rank, {}, torch.device("cpu")
    )


class Spy:
    """Counts the collectives that are called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._real = {n: getattr(dist, n) for n in ("all_reduce", "all_gather", "gather")}

    def __enter__(self) -> Spy:
        def counted(name: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.calls.append(name)
                return self._real[name](*args, **kwargs)

            return call

        for name in self._real:
            setattr(dist, name, counted(name))
        return self

    def __exit__(self, *error: object) -> None:
        for name, function in self._real.items():
            setattr(dist, name, function)


def count_collectives(rec_metrics: Any, on_all: bool) -> tuple[list[str], int]:
    rank = dist.get_rank()
    module = build(rec_metrics, dist.get_world_size(), rank, compute_on_all_ranks=on_all)
    with Spy() as spy:
        for batch in batches_of_rank(rank):
            module.update(batch)
        assert spy.calls == []
        results = module.compute()
    return spy.calls, len(results)


def test_all_sums_travel_in_one_all_reduce(ranks: RankPool) -> None:
    first, second = ranks(2, count_collectives, SUMS, False)
    assert first == (["all_reduce"], 2 * (2 + 1 + 4))
    assert second == (["all_reduce"], 0)


def test_names_of_results() -> None:
    module = build(throughput_metric=ThroughputDef())
    module.update(model_out(0, 16))
    expected = {
        f"{key.format(task)}{name}"
        for key, names, tasks in (
            ("ne-{}|", ("lifetime_ne", "window_ne"), TASKS),
            ("ctr-{}|", ("lifetime_ctr", "window_ctr"), TASKS[:1]),
            ("mse-{}|", ("lifetime_mse", "window_mse", "lifetime_rmse", "window_rmse"), TASKS),
        )
        for task in tasks
        for name in names
    }
    counts = {f"throughput-throughput|{kind}_examples" for kind in ("total", "attempt")}
    assert set(module.compute()) == expected | counts
    local = {key.replace("|", "|local_") for key in expected}
    assert set(module.local_compute()) == local


def sync_and_save() -> dict[str, float]:
    rank = dist.get_rank()
    module = build(world_size=dist.get_world_size(), my_rank=rank)
    for batch in batches_of_rank(rank):
        module.update(batch)
    own = module.local_compute()
    module.sync()
    synced = {key: float(value) for key, value in module.local_compute().items()}
    state = {k: v.clone() for k, v in module.state_dict().items()}
    module.unsync()
    assert module.local_compute() == own
    fresh = build(world_size=dist.get_world_size(), my_rank=rank)
    fresh.load_state_dict(state)
    assert {key: float(value) for key, value in fresh.local_compute().items()} == synced
    return synced


def test_sync_has_the_sums_of_all_ranks(ranks: RankPool) -> None:
    module = build()
    for rank in range(3):
        for batch in batches_of_rank(rank):
            module.update(batch)
    expected = {k: float(v) for k, v in module.local_compute().items() if "lifetime" in k}
    for found in ranks(3, sync_and_save):
        assert {k: v for k, v in found.items() if "lifetime" in k} == pytest.approx(expected)


def test_state_dict_round_trip() -> None:
    before, after = build(), build()
    batches = [model_out(seed, 16) for seed in range(12)]
    for batch in batches[:8]:
        before.update(batch)
    saved = {key: value.clone() for key, value in before.state_dict().items()}
    after.update(batches[0])
    after.load_state_dict(saved)
    assert after.compute() == before.compute()
    for batch in batches[8:]:
        before.update(batch)
        after.update(batch)
    assert after.compute() == before.compute()


def test_state_of_other_metrics_is_refused() -> None:
    state = build({RecMetricEnum.CTR: SUMS[RecMetricEnum.CTR]}).state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*lifetime\.click\.log_loss"):
        build().load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*lifetime\.click\.squared_error"):
        build({RecMetricEnum.CTR: SUMS[RecMetricEnum.CTR]}).load_state_dict(build().state_dict())


def test_windows_may_differ() -> None:
    module = build()
    for seed in range(8):
        module.update(model_out(seed, 16))
    last_5, all_8 = build(), build()
    for seed in range(8):
        all_8.update(model_out(seed, 16))
        if seed >= 3:
            last_5.update(model_out(seed, 16))
    found = module.compute()
    assert found["mse-buy|window_mse"].item() == pytest.approx(
        last_5.compute()["mse-buy|lifetime_mse"].item()
    )
    assert found["ne-buy|window_ne"].item() == pytest.approx(
        all_8.compute()["ne-buy|lifetime_ne"].item()
    )


def test_when_to_compute() -> None:
    module = build({}, compute_interval_steps=3)
    said = []
    for _ in range(7):
        module.update({})
        said.append(module.should_compute())
    assert said == [False, False, True, False, False, True, False]
    assert module.trained_batches == 7


@pytest.mark.parametrize(("least", "most", "steps"), [(0.0, 4.0, 2), (20.0, 60.0, 40), (0, 99, 10)])
def test_interval_is_kept_within_seconds(
    least: float, most: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(metric_module.time, "monotonic", lambda: now_s)
    module = build(
        {}, compute_interval_steps=10, min_compute_interval=least, max_compute_interval=most
    )
    for _ in range(2):
        for _ in range(10):
            now_s += 1.0
            module.update({})
        module.compute()
    assert module.compute_interval_steps == steps


def test_a_batch_without_weight_may_be_left_out() -> None:
    batches = [model_out(seed, 16) for seed in (0, 1)]
    for task in TASKS:
        batches[1][f"{task}_weight"].zero_()
    definition = {RecMetricEnum.CTR: RecMetricDef(rec_tasks=[CLICK], window_size=16)}
    for validates in (False, True):
        module = build(definition, should_validate_update=validates)
        for batch in batches:
            module.update(batch)
        assert module.compute()["ctr-click|window_ctr"].isnan() is not validates


def test_half_moves_no_sum() -> None:
    module = build().half()
    module.update(model_out(0, 16))
    assert all(v.dtype != torch.half for v in module.state_dict().values())


def test_states_of_others_are_reported() -> None:
    class Rates(StateMetric):
        def get_metrics(self) -> dict[str, torch.Tensor | float]:
            return {"lr": 0.5}

    config = MetricsConfig(state_metrics=[StateMetricEnum.OPTIMIZERS])
    arguments = (RecMetricModule, config, 16, 1, 0)
    module = generate_metric_module(
        *arguments, {StateMetricEnum.OPTIMIZERS: Rates()}, torch.device("cpu")
    )
    assert module.compute() == {"optimizers-optimizers|lr": 0.5}
    with pytest.raises(ValueError, match="and not 'optimizers'"):
        generate_metric_module(*arguments, {}, torch.device("cpu"))


def test_every_metric_can_be_asked_for() -> None:
    assert set(REC_METRICS_MAPPING) == set(RecMetricEnum)


def test_bad_configurations() -> None:
    with pytest.raises(ValueError, match="the metric 'ne' must have either"):
        build({RecMetricEnum.NE: RecMetricDef()})
    with pytest.raises(ValueError, match="the metric 'ne' must have either"):
        build({RecMetricEnum.NE: RecMetricDef(rec_tasks=[CLICK], rec_task_indices=[0])})
    with pytest.raises(ValueError, match=r"some of \['accuracy', .*received 'other'"):
        build({"other": RecMetricDef(rec_tasks=[CLICK])})
    with pytest.raises(ValueError, match=r"must be among .* received \['x'\]"):
        build({RecMetricEnum.NE: RecMetricDef(rec_tasks=[RecTaskInfo("x")])})
    with pytest.raises(ValueError, match="compute_interval_steps must be positive; received 0"):
        build({}, compute_interval_steps=0)
    with pytest.raises(ValueError, match=r"in seconds; received 5\.0 and 1\.0"):
        build({}, min_compute_interval=5.0, max_compute_interval=1.0)
    module = build()
    with pytest.raises(ValueError, match=r"must have 'buy_label'.* received"):
        module.update({k: v for k, v in model_out(0, 4).items() if k != "buy_label"})


def test_a_default_for_everything() -> None:
    assert dataclasses.is_dataclass(DefaultMetricsConfig)
    module = generate_metric_module(
        RecMetricModule, DefaultMetricsConfig, 4, 1, 0, {}, torch.device("cpu")
    )
    out = {name: torch.rand(4) for name in ("prediction", "label", "weight", "other")}
    module.update(out)
    assert "ne-DefaultTask|window_ne" in module.compute()


def test_an_update_on_a_gpu_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulators, "PENDING_VALUES", 200)  # every third
    waits = {RecMetricEnum.XAUC, RecMetricEnum.MULTICLASS_RECALL, RecMetricEnum.GAUC}
    session = SessionMetricDef("session_id", 2)
    tasks = [
        dataclasses.replace(t, session_metric_def=session, tensor_name="tensor")
        for t in (CLICK, BUY)
    ]
    wanted = {
        metric: RecMetricDef(rec_tasks=tasks, window_size=64)
        for metric in RecMetricEnum
        if metric not in waits
    }
    for metric in ("auc", "auprc", "rauc"):
        wanted[RecMetricEnum(metric)].arguments = {f"grouped_{metric}": True}
    config = MetricsConfig(rec_tasks=tasks, rec_metrics=wanted)
    on_cpu = generate_metric_module(RecMetricModule, config, 16, 1, 0, {}, torch.device("cpu"))
    batches = [model_out(seed, 16) for seed in range(7)]
    for batch in batches:
        on_cpu.update(batch)
    with PretendedCuda() as cuda:
        module = generate_metric_module(RecMetricModule, config, 16, 1, 0, {}, CUDA)
        on_device = [{k: v.to(CUDA) for k, v in batch.items()} for batch in batches]
        cuda.forget()
        for batch in on_device:
            module.update(batch)
        assert cuda.notes == []
        found = module.compute()
        assert all(cuda.is_on_device(value) for value in found.values())
    assert {k: float(v) for k, v in found.items()} == pytest.approx(
        {k: float(v) for k, v in on_cpu.compute().items()}, nan_ok=True
    )


@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(0, 16), max_size=12), limit=st.integers(1, 500))
def test_batches_added_up_together_or_one_by_one(sizes: list[int], limit: int) -> None:
    wanted = SUMS | {
        RecMetricEnum.NDCG: RecMetricDef(rec_tasks=[CLICK, BUY], window_size=160),
        RecMetricEnum.SCALAR: RecMetricDef(rec_tasks=[CLICK, BUY], window_size=48),
    }
    modules = []
    for values in (1, limit):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(accumulators, "PENDING_VALUES", values)
            module = build(wanted)
            for seed, size in enumerate(sizes):
                module.update(model_out(seed, size))
        modules.append(module)
    first, second = ({k: float(v) for k, v in m.compute().items()} for m in modules)
    assert first == pytest.approx(second, nan_ok=True, rel=1e-12)
    saved = [module.state_dict() for module in modules]
    torch.testing.assert_close(saved[0], saved[1])
