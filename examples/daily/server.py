"""A server that answers while versions change: it takes the highest number of a folder."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any, Self

from recsys.inference import Predictor

REQUEST = {"user": ["u7", "u700"], "item": ["i3", "new"], "country": ["no", "it"], "age": [30, 31]}


class Answers:
    """Answers a request again and again, in a process, by the newest version.

    Args:
        models: The folder of the versions; it may not exist yet.
    """

    def __init__(self, models: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._models, self._stop = models, context.Event()
        self._counts = context.Array("q", 3)  # answered, failed, number of the served version
        self._process = context.Process(
            target=_answer, args=(models, self._stop, self._counts), daemon=True
        )

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *error: object) -> None:
        numbers = [int(path.name) for path in self._models.glob("*") if path.name.isdecimal()]
        end = time.monotonic() + 60
        while self._counts[2] != max(numbers, default=0) and time.monotonic() < end:
            time.sleep(0.05)  # it answers by the last version before it ends
        self._stop.set()
        self._process.join()

    @property
    def num_answered(self) -> int:
        """Number of requests with an answer."""
        return self._counts[0]

    @property
    def num_failed(self) -> int:
        """Number of requests with an error."""
        return self._counts[1]


def _answer(models: Path, stop: Any, counts: Any) -> None:
    served: Path | None = None
    predictor: Predictor | None = None
    parent = multiprocessing.parent_process()
    while not stop.wait(0.05) and parent is not None and parent.is_alive():
        numbers = [int(path.name) for path in models.glob("*") if path.name.isdecimal()]
        try:
            newest = models / str(max(numbers)) if numbers else None
            if newest is not None and predictor is None:
                predictor = Predictor(newest)
            elif newest not in (None, served) and predictor is not None:
                predictor.swap(str(newest))
            served = newest
            if predictor is not None:
                predictor(REQUEST)
                counts[0] += 1
                counts[2] = max(numbers)
        except Exception as error:
            print(f"the server failed: {error!r}", flush=True)
            counts[1] += 1
