"""Texts of reports: names and numbers as a person reads them."""

from __future__ import annotations

import io

import pytest
from rich.console import Group
from rich.table import Table

from jobs.core.report import Report, format_count, format_names
from tests.support.hostile import HOSTILE


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


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_no_name_controls_the_terminal_or_forges_a_line(name: str) -> None:
    table = Table(title=name)
    table.add_column(name, overflow="fold")
    table.add_row(name)
    for report in (
        Report([f"key {name}"]),
        Report([], {}, Group(table, name)),
        Report(["one"], {}, None, [], [table]),
    ):
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        report.show(stream=out)
        out.seek(0)
        shown = out.read()
        assert all(one.isprintable() for one in shown.split("\n")), shown
        lines = shown.splitlines()
        assert len(lines) == (1 if report.lines == [f"key {name}"] else len(lines))
    assert len(lines) > 3
