"""`Best` equals a scan of all scores."""

from __future__ import annotations

import random

import pytest

from recsys.training.best import Best


@pytest.mark.parametrize("maximize", [True, False])
def test_it_equals_a_scan_of_all_scores(maximize: bool) -> None:
    chance = random.Random(maximize)
    for _ in range(200):
        patience = chance.choice([None, 1, 2, 3])
        best, scores = Best("x", maximize=maximize, patience=patience), []
        for step in range(1, 12):
            scores.append(chance.choice([-1.0, 0.0, 0.5, 0.5, 2.0]))
            if step == 6:  # a resume
                state, best = best.state_dict(), Best("x", maximize=maximize, patience=patience)
                best.load_state_dicts([state, state])
            is_better = best.update(step, 1, {"x": scores[-1]})
            found = max(scores) if maximize else min(scores)
            first = scores.index(found) + 1
            assert is_better == (first == step)
            assert (best.step, best.scores, best.last_step) == (first, {"x": found}, step)
            assert best.is_final == (patience is not None and step - first >= patience)


def test_infinite_scores_count() -> None:
    best = Best("loss", patience=1)
    assert best.update(1, 1, {"loss": float("inf")})
    assert best.update(2, 1, {"loss": 3.0})
