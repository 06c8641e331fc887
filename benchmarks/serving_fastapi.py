"""The usual hand-made server, for comparison: FastAPI, JSON, one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, Request

from benchmarks.serving_calls import Calls

calls = Calls(Path(os.environ["LIBRARY"]), Path(os.environ["VERSION"]))
dtypes: dict[str, str] = json.loads(os.environ["DTYPES"])
app = FastAPI()


@app.post("/score")
async def score(request: Request) -> dict[str, Any]:
    """Score the rows of a request: a list for each tensor."""
    body = await request.json()
    outputs = calls.run({name: np.asarray(body[name], dtypes[name]) for name in body})
    return {name: array.tolist() for name, array in outputs.items()}


@app.get("/ready")
async def ready() -> dict[str, bool]:
    """Answer when the model is loaded."""
    return {"ready": True}
