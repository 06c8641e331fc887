"""The texts of errors and warnings are listed in one file."""

from __future__ import annotations

from tests.messages import LIST, listed, messages


def test_the_list_has_the_texts_of_all_errors_and_warnings() -> None:
    found = messages()
    assert len(found) > 500
    assert any("received" in text for text in found)
    assert LIST.read_text() == listed(found), "run python -m tests.messages and read the change"
