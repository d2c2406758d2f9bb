"""Texts of reports: names and numbers as a person reads them."""

from __future__ import annotations

import pytest

from jobs.core.report import plural, some


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
    assert some(names) == text


def test_one_thing_is_singular() -> None:
    assert (plural(1, "key"), plural(2_000, "key"), plural(1, "series", "")) == (
        "1 key",
        "2,000 keys",
        "1 series",
    )
