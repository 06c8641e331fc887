import pytest

from recsys.metrics import ThroughputMetric


def run(times, **arguments):
    clock = iter(times)
    metric = ThroughputMetric(
        batch_size=10, world_size=2, clock=lambda: next(clock), **arguments
    )  # fmt: skip
    for _ in times:
        metric.update()
    return metric.compute()


def test_warm_up_is_left_out():
    found = run([0.0, 100.0, 101.0, 102.0], window_seconds=1000, warmup_steps=2)
    assert found == {"total_examples": 80, "throughput": 20.0, "window_throughput": 20.0}


def test_window_forgets():
    found = run([0.0, 10.0, 11.0, 12.0], window_seconds=2, warmup_steps=0)
    assert found == {"total_examples": 80, "throughput": 5.0, "window_throughput": 20.0}


def test_nothing_timed_yet():
    found = run([5.0], window_seconds=2, warmup_steps=0)
    assert found == {"total_examples": 20, "throughput": 0.0, "window_throughput": 0.0}
    assert run([], window_seconds=2)["total_examples"] == 0


def test_bad_arguments():
    with pytest.raises(ValueError, match="batch_size must be positive; received 0"):
        ThroughputMetric(batch_size=0, world_size=1, window_seconds=1)
    with pytest.raises(ValueError, match="warmup_steps must be 0 or more; received -1"):
        ThroughputMetric(batch_size=1, world_size=1, window_seconds=1, warmup_steps=-1)
