"""Work of threads ahead of its use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

__all__ = ["map_ahead"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def map_ahead(
    function: Callable[[_Item], _Result], items: Iterable[_Item], num_workers: int
) -> Generator[_Result, None, None]:
    """Yield the results of a function in the order of its arguments; threads compute them ahead.

    Args:
        function: The function that threads call. Calls begin in the order of the items.
        items: Arguments, read in the thread of the caller.
        num_workers: Number of threads; one more call waits for a thread. 0: calls are made in the
            thread of the caller, one at a time.

    Raises:
        Exception: An error of the function, at the turn of its item. Later calls are cancelled.

    Example:
        >>> list(map_ahead(abs, [-1, 2, -3], num_workers=2))
        [1, 2, 3]
    """
    if num_workers == 0:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="recsys-reader")
    try:
        rest = iter(items)
        waiting = deque(pool.submit(function, item) for item in islice(rest, num_workers + 1))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(function, item) for item in islice(rest, 1))
            yield result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
