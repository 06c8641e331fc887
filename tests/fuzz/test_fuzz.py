"""The short form of ``python -m tests.fuzz``: every fault once, some sound cases, old finds."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fuzz import oracle
from tests.fuzz.cases import Case, draw
from tests.fuzz.faults import FAULTS, make_case
from tests.fuzz.player import complaint_about
from tests.fuzz.undo import UNDONE
from tests.ranks import RankPool

# Seeds and faults of the fuzzer's finds in the library; the first ones in the last version without
# it, in five minutes.
FINDS: list[tuple[int, str | None]] = [
    (1, "negative length"),
    (3, "dim of True"),
    (5, "tables by a generator"),
    (7, "init_fn of 3"),
    (9, "other rows on one rank"),
    (11, "rows of 10.5"),
    (13, "a scaled loss"),
    (15, "a tied weight"),
    (21, "weights of two dims"),
    (23, "negative inverse index"),
    (25, "extra that cannot be saved"),
    (27, "offsets outside"),
    (29, "negative sizes"),
    (31, "a plan without a table"),
    (33, "a tensor for features"),
    (37, "a range of NaN"),
    (39, "shards of one dim"),
    (43, "a rate of -1"),
    (45, "ids of two dims"),
    (47, "rows in text"),
    (51, "pooling by name"),
    (53, "None for features"),
    (55, "no batch on one rank"),
    (61, "large inverse index"),
    (63, "a rate of NaN"),
    (65, "features in one text"),
    (71, "another plan on one rank"),
    (73, "negative length"),
    (75, "dim of True"),
    (77, "tables by a generator"),
    (79, "init_fn of 3"),
    (81, "other rows on one rank"),
    (83, "rows of 10.5"),
    (85, "a scaled loss"),
    (87, "a tied weight"),
    (93, "weights of two dims"),
    (95, "negative inverse index"),
    (97, "extra that cannot be saved"),
    (99, "offsets outside"),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_on_every_rank(ranks: RankPool, fault: str) -> None:
    case = make_case(0, fault)
    assert complaint_about(ranks, case) is None, str(case)


@pytest.mark.parametrize("seed", range(16))
def test_sound_cases_train_as_the_oracle(ranks: RankPool, seed: int) -> None:
    case = make_case(seed, None)
    assert complaint_about(ranks, case) is None, str(case)


@pytest.mark.parametrize(("seed", "fault"), FINDS)
def test_what_was_found_stays_mended(ranks: RankPool, seed: int, fault: str | None) -> None:
    case = make_case(seed, fault)
    assert complaint_about(ranks, case) is None, str(case)


@pytest.mark.parametrize(
    ("undone", "fault", "says"),
    [
        ("lengths are checked", "negative length", ""),
        ("inverse indices are checked", "large inverse index", ""),
        ("rates are checked", "a rate of NaN", "passes silently"),
        ("tied weights are refused", "a tied weight", "passes silently"),
        ("a scaled loss is refused", "a scaled loss", "passes silently"),
    ],
)
def test_a_check_that_is_taken_out_is_missed(
    ranks: RankPool, undone: str, fault: str, says: str
) -> None:
    complaint = complaint_about(ranks, make_case(0, fault), undone)
    assert complaint is not None
    assert says in complaint


def test_cases_are_the_same_again() -> None:
    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


def _outputs(case: Case) -> list[float]:
    outputs, tables = oracle.train(case)
    numbers = [x.sum() for step in outputs for rank in step for x in rank]
    return [*map(float, numbers), *(float(table.sum()) for table in tables.values())]


def test_the_oracle_sees_every_id() -> None:
    """A case whose ids change has another result, unless no table reads them."""
    case = next(c for c in map(draw, range(100)) if c.steps[0][0].bags[c.tables[0].features[0]])
    table = case.tables[0]
    bags = case.steps[0][0].bags[table.features[0]]
    before = _outputs(case)
    bags[0].append(table.rows - 1)
    if case.weighted:
        case.steps[0][0].weights[table.features[0]][0].append(1.0)  # type: ignore[index]
    assert not np.allclose(before, _outputs(case)) or case.steps[0][0].inverse is not None


def test_undone_checks_are_still_there() -> None:
    for patches in UNDONE.values():
        for patch in patches():
            with patch:
                pass
