"""Texts of reports: names and numbers as a person reads them."""

from __future__ import annotations

import pytest

from jobs.core.report import format_count, format_names


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b", "c", "d"], "a, b, c, d"),  # no "and 1 others"
        (["a", "b", "c", "d", "e"], "a, b, c and 2 others"),
    ],
)
def test_of_many_names_the_first_are_listed(names: list[str], text: str) -> None:
    assert format_names(names) == text


def test_one_thing_is_singular() -> None:
    assert (format_count(1, "key"), format_count(2_000, "key"), format_count(1, "series", "")) == (
        "1 key",
        "2,000 keys",
        "1 series",
    )
