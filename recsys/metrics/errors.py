"""Errors of metrics: `ValueError` and `TypeError` with a common base class."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, final

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class RecMetricException(Exception):
    """Base class of the errors that metrics raise for wrong arguments and batches."""


@final
class MetricTypeError(RecMetricException, TypeError):
    """An argument of a metric has a wrong type."""


@final
class MetricValueError(RecMetricException, ValueError):
    """An argument of a metric has a wrong value."""


def raises_metric_errors(
    function: Callable[_Arguments, _Result],
) -> Callable[_Arguments, _Result]:
    """Convert the `TypeError` and `ValueError` of a function to errors of metrics.

    Args:
        function: Function that raises them for wrong arguments.

    Returns:
        Function that raises `MetricTypeError` and `MetricValueError` with the same messages.

    Example:
        >>> try:
        ...     raises_metric_errors(int)("one")
        ... except RecMetricException as error:
        ...     print(isinstance(error, ValueError))
        True
    """

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except RecMetricException:
            raise
        except (TypeError, ValueError) as error:
            kind = MetricTypeError if isinstance(error, TypeError) else MetricValueError
            raised = kind(*error.args).with_traceback(error.__traceback__)
            raise raised from error.__cause__

    return call
