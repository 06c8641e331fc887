"""A model of Triton's Python backend, for comparison."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ["PACKAGES"])  # the backend ignores PYTHONPATH

import triton_python_backend_utils as backend

from benchmarks.serving_calls import Calls


class TritonPythonModel:
    """The program of a package."""

    def initialize(self, args: dict[str, str]) -> None:
        self.calls = Calls(Path(os.environ["LIBRARY"]), Path(os.environ["VERSION"]))

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Any) -> Any:
        outputs = self.calls.run({one.name(): one.as_numpy() for one in request.inputs()})
        return backend.InferenceResponse(
            [backend.Tensor(name, array) for name, array in outputs.items()]
        )
