import math

import pytest
import torch

from recsys.metrics import ThroughputMetric
from recsys.metrics.metric_module import RecMetricModule, generate_metric_module
from recsys.metrics.metrics_config import (
    BatchSizeStage,
    MetricsConfig,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
)


def build(times, **arguments):
    clock = iter(times)
    return ThroughputMetric(
        batch_size=10, world_size=2, clock=lambda: next(clock), **arguments
    )  # fmt: skip


def read(metric):
    namespace = "throughput-throughput|"
    found = metric.compute()
    assert all(key.startswith(namespace) for key in found)
    return {key.removeprefix(namespace): value.item() for key, value in found.items()}


def run(times, **arguments):
    metric = build(times, **arguments)
    for _ in times:
        metric.update()
    return read(metric)


def test_warm_up_is_left_out():
    found = run([0.0, 100.0, 101.0, 102.0], window_seconds=1000, warmup_steps=2)
    assert found == {
        "total_examples": 80,
        "attempt_examples": 80,
        "lifetime_throughput": 20.0,
        "window_throughput": 20.0,
        "attempt_throughput": 20.0,
    }


def test_window_forgets():
    found = run([0.0, 10.0, 11.0, 12.0], window_seconds=2, warmup_steps=0)
    assert found["lifetime_throughput"] == 5.0
    assert found["window_throughput"] == 20.0


def test_nothing_timed_yet():
    found = run([5.0], window_seconds=2, warmup_steps=0)
    assert found == {"total_examples": 20, "attempt_examples": 20}
    assert run([], window_seconds=2)["total_examples"] == 0


def test_batch_sizes_that_change():
    stages = [BatchSizeStage(10, 2), BatchSizeStage(30, None)]
    times = [0.0, 1.0, 2.0, 3.0]
    found = run(times, window_seconds=9, warmup_steps=1, batch_size_stages=stages)
    assert found["batch_size"] == 30
    assert found["total_examples"] == 2 * (10 + 10 + 30 + 30)
    assert found["window_throughput"] == pytest.approx(2 * (10 + 30 + 30) / 3)
    metric = build(times, window_seconds=9, batch_size_stages=stages)
    metric.set_num_batch(2)
    metric.update()
    assert read(metric)["total_examples"] == 2 * 30


def test_counts_go_on_from_a_state_dict():
    before = build([0.0, 1.0, 2.0], window_seconds=9, warmup_steps=1)
    for _ in range(3):
        before.update()
    after = build([50.0, 54.0], window_seconds=9, warmup_steps=1)
    after.load_state_dict(before.state_dict())
    for _ in range(2):
        after.update()
    found = read(after)
    assert found["total_examples"] == 100
    assert found["attempt_examples"] == 40
    assert found["lifetime_throughput"] == 60 / 6
    assert found["attempt_throughput"] == found["window_throughput"] == 20 / 4
    with pytest.raises(RuntimeError, match="Missing key"):
        after.load_state_dict({"total_examples": torch.tensor(1)})


def test_bad_arguments():
    with pytest.raises(ValueError, match="batch_size must be positive; received 0"):
        ThroughputMetric(batch_size=0, world_size=1, window_seconds=1)
    with pytest.raises(ValueError, match=r"warmup_steps must not be negative.*-1"):
        ThroughputMetric(batch_size=1, world_size=1, window_seconds=1, warmup_steps=-1)
    with pytest.raises(ValueError, match=r"a stage without end.*max_iters \[1\]"):
        build([], window_seconds=1, batch_size_stages=[BatchSizeStage(1, 1)])


def test_samples_of_a_task_per_second():
    module = generate(RecMetricEnum.TOWER_QPS, warmup_steps=0)
    assert module.compute()["qps-DefaultTask|lifetime_qps"].isnan()
    for size in (4, 2):  # the first update starts the clock
        module.update({name: torch.rand(size) for name in ("prediction", "label", "weight")})
    found = module.compute()
    assert 0.0 < found["qps-DefaultTask|lifetime_qps"] < math.inf
    assert found["qps-DefaultTask|total_examples"] == 6
    with pytest.raises(ValueError, match=r"warmup_steps must not be negative.*-1"):
        generate(RecMetricEnum.TOWER_QPS, warmup_steps=-1)


def generate(metric, **arguments):
    task = RecTaskInfo()
    definition = RecMetricDef(rec_tasks=[task], window_size=8, arguments=arguments)
    config = MetricsConfig(rec_tasks=[task], rec_metrics={metric: definition})
    return generate_metric_module(RecMetricModule, config, 4, 1, 0, {}, torch.device("cpu"))
