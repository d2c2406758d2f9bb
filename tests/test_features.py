"""The table of features names fields, commands, DAGs and tests that exist, and leaves no row out."""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jobs.cli import VERBS
from jobs.core.command import name_module
from tests.support.named_tests import functions

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("features.md", "artan.md")
SYSTEMS = ("Artan", "Spark", "Flink", "statsmodels")
SCHEMA: dict[str, Any] = json.loads((ROOT / "docs" / "model.schema.json").read_text(encoding="utf-8"))


class Feature(NamedTuple):
    """A row of the table: the texts of its cells."""

    name: str
    how: str
    page: str
    tests: str
    others: str


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def features() -> list[Feature]:
    lines = (ROOT / "docs" / "features.md").read_text(encoding="utf-8").splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")
    ]
    return [Feature(*row) for row in rows if row[0] != "feature"]


FEATURES = features()


def unresolved(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a field's schema and those that it stands for: references, and what it may be among others."""
    found = [schema]
    for one in found:
        if "$ref" in one:
            found.append(SCHEMA["$defs"][one["$ref"].rsplit("/", 1)[1]])
        found += [*one.get("anyOf", ()), *([one["items"]] if isinstance(one.get("items"), dict) else [])]
    return found


def schemas_of(path: str) -> list[dict[str, Any]]:
    """Return the schemas of a field of a model's spec, such as order.kind; none if there is no such field."""
    level = [SCHEMA]
    for name in path.split("."):
        level = [
            every
            for one in level
            if name in one.get("properties", {})
            for every in unresolved(one["properties"][name])
        ]
    return level


def may_be(path: str, value: str) -> bool:
    """Tell if a field may have a value, as far as its schema lists the values."""
    listed = [
        value
        for one in schemas_of(path)
        for value in (*one.get("enum", ()), *([one["const"]] if "const" in one else []))
    ]
    return not listed or value in listed


def options(verb: str) -> set[str]:
    """Return the options of a command."""
    run = import_module(f"jobs.{name_module(verb)}").run
    return {f"--{name.replace('_', '-')}" for name in inspect.signature(run.function).parameters}


def dags() -> set[str]:
    """Return the beginnings of the names of all DAGs."""
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "dags").rglob("*.py"))
    return set(re.findall(r"\bkalman_[a-z_]+?(?=__)", text)) | {
        f"kalman_{path.stem}" for path in (ROOT / "dags").glob("*.py")
    }


def test_the_table_has_every_row() -> None:
    assert len(FEATURES) == 28
    assert len({feature.name for feature in FEATURES}) == 28


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name[:30])
def test_what_a_row_names_exists(feature: Feature) -> None:
    assert quoted(feature.how) and quoted(feature.tests) and "](" in feature.page and feature.others
    for name in quoted(feature.how):
        verb, _, option = name.partition(" ")
        field, _, value = name.partition(": ")
        if name.startswith("kalman_"):
            assert name in dags(), name
        elif verb in VERBS:
            assert not option or option in options(verb), name
        else:
            assert schemas_of(field), name
            assert not value or may_be(field, value), name


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name[:30])
def test_a_row_tells_something_of_each_of_the_four_systems(feature: Feature) -> None:
    told = re.findall(r"((?:\w+, )*\w+): ([^:]+?)(?=[.;] (?:\w+, )*\w+: |$)", feature.others)
    named = [name for names, fact in told if fact.strip() for name in names.split(", ")]
    assert sorted(named) == sorted(SYSTEMS), feature.others


@pytest.mark.parametrize("page", PAGES)
def test_each_named_test_exists(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    lost = []
    for name in re.findall(r"`(tests/[^`]+)`", text):
        path, _, function = name.partition("::")
        where = ROOT / path
        if not where.exists() or (function and function not in functions(where)):
            lost.append(name)
    assert lost == []


def test_each_test_that_the_page_of_examples_names_is_one_of_theirs() -> None:
    theirs = functions(ROOT / "tests" / "examples" / "test_artan.py")
    text = (ROOT / "docs" / "artan.md").read_text(encoding="utf-8")
    assert {name for name in re.findall(r"`(test_\w+)`", text)} <= theirs


def test_a_name_that_does_not_exist_would_be_found() -> None:
    assert schemas_of("monitor.rules.name") and not schemas_of("monitor.rules.colour")
    assert may_be("filter", "imm") and not may_be("order.kind", "backwards")
    assert "--smooth" in options("estimate") and "--smooth" not in options("stream")
