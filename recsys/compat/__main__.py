"""Runs a TorchRec script unchanged: `python -m recsys.compat train.py --its-own arguments`.

Run a module with `python -m recsys.compat -m package.train --its-own arguments`. With torchrun:
`torchrun --nproc-per-node=2 -m recsys.compat train.py`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from recsys.compat import torchrec


def main() -> None:
    """Install the TorchRec names, then run the script or module as `__main__`."""
    if sys.argv[1:2] == ["-m"] and len(sys.argv) > 2:
        torchrec.install()
        del sys.argv[:2]  # the folder it is run from is first in sys.path already
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(
            "usage: python -m recsys.compat SCRIPT [its arguments]\n"
            "       python -m recsys.compat -m MODULE [its arguments]"
        )
    torchrec.install()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
