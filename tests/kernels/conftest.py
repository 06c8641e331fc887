from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_comparison_at_first_use(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a kernel is compared with PyTorch at its first use, which tests patch."""
    if request.path.name.endswith("_triton.py"):
        monkeypatch.setenv("RECSYS_SELF_CHECK", "0")
