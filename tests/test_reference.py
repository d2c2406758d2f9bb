"""The pages that follow from the code are current: docs/tables.md, commands.md and environment.md."""

from __future__ import annotations

import re

import pytest

from jobs.storage.dictionary import TABLES
from jobs.supervision.progress import COLUMNS
from scripts import reference


@pytest.mark.parametrize("page", reference.PAGES)
def test_a_page_is_what_the_script_writes(page: str) -> None:
    assert (reference.DOCS / page).read_text(encoding="utf-8") == reference.PAGES[page](), (
        "run `python scripts/reference.py`"
    )


@pytest.mark.parametrize("kind", TABLES)
def test_every_column_has_a_type_and_a_sentence(kind: str) -> None:
    one = TABLES[kind]
    types = (
        reference.columns_of(reference.SCHEMAS[kind]) if kind in reference.SCHEMAS else reference.TYPES[kind]
    )
    assert types.keys() == one.columns.keys()
    for name, text in one.columns.items():
        assert len(text) >= 5 and not text.endswith(".") and "|" not in text and "\n" not in text, name


def test_the_schemas_are_read_as_they_are() -> None:
    assert tuple(reference.columns_of(reference.PROGRESS)) == COLUMNS
    nested = reference.columns_of("a map<string, array<double>>, b struct<c: int, d: int>")
    assert nested == {"a": "map<string, array<double>>", "b": "struct<c: int, d: int>"}


def test_the_list_of_tables_is_complete() -> None:
    text = (reference.DOCS / "tables.md").read_text(encoding="utf-8")
    assert set(TABLES) - set(re.findall(r"^## ([a-z_]+)$", text, re.M)) == set()


def test_the_environment_page_names_what_the_code_reads() -> None:
    page = (reference.DOCS / "environment.md").read_text(encoding="utf-8")
    assert set(re.findall(r"KALMAN_[A-Z_]*[A-Z]", page)) == set(reference.variables())
