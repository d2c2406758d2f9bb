"""Which mutants can be drawn, and which tests are chosen for one. Needs the extra `mutants`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mutmut.mutation.file_mutation", reason="the extra `mutants` is not installed")

from tests.mutants import drawing, sources  # noqa: E402
from tests.mutants.reach import Reach  # noqa: E402
from tests.mutants.trying import wanted  # noqa: E402

CODE = '''
"""A text that nobody mutates."""
LIMIT = 3


def f(a, b):
    """Nor this."""
    if a < LIMIT:
        raise ValueError(f"{a} is less than " + str(LIMIT))
    for one, other in zip(a, b, strict=True):
        print("a sentence for people", one + other)
    return "key"
'''


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a.py").write_text(CODE, encoding="utf-8")
    monkeypatch.setattr(drawing, "ROOT", tmp_path)
    return tmp_path


def test_what_only_people_read_is_not_mutated(tree: Path) -> None:
    changes = {(one.before.strip(), one.after.strip()) for one in drawing.every("a.py")}
    assert {
        ("LIMIT = 3", "LIMIT = 4"),
        ("LIMIT = 3", "LIMIT = None"),
        ("if a < LIMIT:", "if a <= LIMIT:"),
        ('return "key"', 'return "KEY"'),
        ("for one, other in zip(a, b, strict=True):", "for one, other in zip(None, b, strict=True):"),
    } <= changes
    assert (
        'print("a sentence for people", one + other)',
        'print("a sentence for people", one - other)',
    ) in changes
    assert not any("raise" in before or "Nor" in before or "nobody" in before for before, _ in changes)
    assert not any("strict" in before and "strict=True" not in after for before, after in changes)
    assert not any("XXa sentence" in after or "A SENTENCE" in after for _, after in changes)


def test_a_draw_is_repeated_by_its_seed(tree: Path) -> None:
    everything = [(one.line, one.after) for one in drawing.every("a.py")]
    first = [(one.line, one.after) for one in drawing.draw(["a.py"], 5, seed=1)]
    assert first == [(one.line, one.after) for one in drawing.draw(["a.py"], 5, seed=1)]
    assert first != [(one.line, one.after) for one in drawing.draw(["a.py"], 5, seed=2)]
    assert len(set(first)) == 5 and set(first) <= set(everything)
    assert sorted(everything) == sorted((one.line, one.after) for one in drawing.draw(["a.py"], 999, seed=1))


def test_a_mutant_is_looked_for_on_the_lines_of_its_statement() -> None:
    code = "def f(\n    a,\n):\n    if (\n        a\n    ):\n        return (\n            a\n        )\n"
    assert [list(drawing.statement_lines(code, line)) for line in (1, 4, 5, 8)] == [
        [1, 2, 3], [4, 5, 6], [4, 5, 6], [7, 8, 9],
    ]  # fmt: skip


def test_the_fast_tests_that_reach_a_line_come_first() -> None:
    reach = Reach()
    reach.add(
        {
            "seconds": {"t::slow": 9.0, "t::fast": 1.0},
            "lines": {"a.py": {"3": ["t::slow", "t::fast", "t::broken"]}},
        }
    )
    reach.add({"seconds": {"t::last": 99.0}, "lines": {"a.py": {"4": ["t::last"]}}})
    found = reach.of_lines("a.py", range(3, 4))
    assert found == ["t::fast", "t::slow"]
    assert reach.within(10.0, found) == found and reach.within(9.9, found) == ["t::fast"]
    assert reach.within(5.0, ["t::last", "t::fast"]) == ["t::last"]  # one at least
    assert reach.of_lines("a.py", range(3, 5)) == ["t::fast", "t::slow", "t::last"]
    assert reach.of_lines("a.py", range(1, 2)) == reach.of_lines("kalman/no.py", range(3, 4)) == []
    assert reach.of_file("a.py") == ["t::fast", "t::slow", "t::last"]


def test_its_room_and_the_files_that_import_it_stand_for_a_file_after_its_own_tests() -> None:
    reach = Reach()
    reach.add(
        {
            "seconds": {
                "t::own": 9.0,
                "t::other": 1.0,
                "t::else": 1.0,
                "tests/jobs/state/test_a.py": 3.0,
                "tests/jobs/state/test_a.py::room": 2.0,
                "tests/jobs/state/test_b.py::room": 2.0,
            },
            "lines": {
                "jobs/state/encoding/row_order.py": {"9": ["t::own"]},
                "jobs/state/replay.py": {"9": ["t::own", "t::other"]},
                "kalman/flags.py": {"9": ["t::else"]},
            },
        }
    )
    assert reach.of_file("jobs/state/encoding/row_order.py") == [
        "t::own",
        "t::other",
        "tests/jobs/state/test_a.py::room",
    ]


def test_the_lines_of_functions_run_when_they_are_called() -> None:
    lines = enumerate(CODE.splitlines(), 1)
    assert [text.strip() for line, text in lines if text and drawing.runs_on_import(CODE, line)] == [
        '"""A text that nobody mutates."""', "LIMIT = 3", "def f(a, b):",
    ]  # fmt: skip


def test_a_line_that_runs_on_import_has_more_tests_than_those_that_first_imported_it() -> None:
    reach = Reach()
    reach.add(
        {
            "seconds": {"t::first": 2.0, "t::caller": 3.0, "t::fast": 1.0},
            "lines": {"a.py": {"3": ["t::first"], "8": ["t::caller", "t::fast"]}},
        }
    )
    assert CODE.splitlines()[2] == "LIMIT = 3"
    assert wanted("a.py", 3, CODE, reach) == ["t::first", "t::fast", "t::caller"]
    assert wanted("a.py", 8, CODE, reach) == ["t::fast", "t::caller"]
    assert wanted("a.py", 10, CODE, reach) == []


def test_every_mutated_file_is_there_and_needs_no_spark_to_be_tested() -> None:
    files = sources.mutated_files()
    assert all((sources.ROOT / path).is_file() for path in files)
    assert {"kalman/run.py", "jobs/upgrades/migration/state_map.py", "jobs/state/replay.py"} <= set(files)
    assert "tests/jobs/state/test_strict.py" in sources.test_files()
    assert "tests/jobs/upgrades/test_upgrade.py" not in sources.test_files()
