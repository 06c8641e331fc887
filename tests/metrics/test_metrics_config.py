import pytest

from recsys.metrics.metrics_config import (
    BatchSizeStage,
    DefaultMetricsConfig,
    DefaultTaskInfo,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
    SessionMetricDef,
    validate_batch_size_stages,
)


def test_defaults():
    assert DefaultMetricsConfig.rec_tasks == [DefaultTaskInfo] == [RecTaskInfo()]
    assert DefaultMetricsConfig.rec_metrics == {
        RecMetricEnum.NE: RecMetricDef(rec_tasks=[DefaultTaskInfo], window_size=10_000_000)
    }
    assert str(RecMetricEnum.NE) == "ne"


def test_a_threshold_is_positive():
    with pytest.raises(ValueError, match="top_threshold must be positive; received 0"):
        SessionMetricDef("session", top_threshold=0)


@pytest.mark.parametrize("ends", [[1], [None, None], [None, 1]])
def test_stages_must_last(ends):
    with pytest.raises(ValueError, match=r"a stage without end.*received max_iters"):
        validate_batch_size_stages([BatchSizeStage(8, end) for end in ends])


@pytest.mark.parametrize("ends", [[], [None], [1, None]])
def test_stages(ends):
    validate_batch_size_stages([BatchSizeStage(8, end) for end in ends])
    validate_batch_size_stages(None)
