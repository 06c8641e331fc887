"""Outputs of scripts, under TorchRec or under its names here.

`python -m tests.compat.printed` writes scripts/printed.json: the outputs of the scripts of that
folder under TorchRec (`make peers`), in one process and in two.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).with_name("scripts")
FILE = SCRIPTS / "printed.json"
NEEDS_CUDA = {"quantized"}
"""Scripts that TorchRec cannot run on a CPU: it shards quantized tables for GPUs on any device."""
ROOT = Path(__file__).parents[2]

ABORTED = "terminate called without an active exception"
"""So torch ends a process of gloo now and then as it exits, TorchRec's as ours: run again."""


def printed(script: Path, *, processes: int | None = None, by_peer: bool = False) -> dict[str, Any]:
    """Return the last output of a script, from JSON; torchrun starts a number of processes."""
    launcher = (
        []
        if processes is None
        else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    )
    how = [] if by_peer else ["-m", "recsys.compat"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    for _ in range(4):
        run = subprocess.run(
            [sys.executable, "-W", "ignore", *launcher, *how, str(script)],
            capture_output=True,
            text=True,
            timeout=200,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )
        if ABORTED not in run.stderr:
            break
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Asks TorchRec, of the scripts named as arguments or of all."""
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    names = {script.stem for script in SCRIPTS.glob("*.py")} - NEEDS_CUDA
    for name in sys.argv[1:] or sorted(names):
        script = SCRIPTS / f"{name}.py"
        found[name] = {str(n or 1): printed(script, processes=n, by_peer=True) for n in (None, 2)}
        FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
