"""A server that answers while versions change: it takes the highest number of a folder."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Self

from recsys.inference import Predictor

REQUEST = {"user": ["u7", "u700"], "item": ["i3", "new"], "country": ["no", "it"], "age": [30, 31]}


class Answers:
    """Answers a request again and again, in a thread, by the newest version.

    Args:
        models: The folder of the versions; it may not exist yet.
    """

    def __init__(self, models: Path) -> None:
        self._models, self._stop = models, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.num_answered = self.num_failed = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _newest(self) -> Path | None:
        numbers = [int(p.name) for p in self._models.glob("*") if p.name.isdecimal()]
        return self._models / str(max(numbers)) if numbers else None

    def _run(self) -> None:
        served: Path | None = None
        predictor: Predictor | None = None
        while not self._stop.wait(0.05):
            try:
                newest = self._newest()
                if newest is not None and newest != served:
                    if predictor is None:
                        predictor = Predictor(newest)
                    else:
                        predictor.swap(newest)
                    served = newest
                    print(f"serves {served}", flush=True)
                if predictor is not None:
                    predictor(REQUEST)
                    self.num_answered += 1
            except Exception as error:
                print(repr(error), flush=True)
                self.num_failed += 1
