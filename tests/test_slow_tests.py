"""Each slow test gets its turn: which ones `scripts/slow_tests.py` chooses, and what it makes of their run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import slow_tests
from scripts.slow_tests import COMMITS, SECONDS, TURNS, UNKNOWN_SECONDS, Run, Share, choose, turn_of

TESTS = [f"tests/test_{number:02d}.py::test" for number in range(30)]
BRIEF = 10.0


def known(green: int, seconds: float = BRIEF) -> dict[str, Run]:
    return dict.fromkeys(TESTS, Run(seconds, green))


def chosen(
    runs: dict[str, Run], commit: int, changed: dict[str, int] | None = None, workers: int = 1
) -> Share:
    return choose(TESTS, runs, commit, changed or {}, {"tests/test_07.py": {"jobs/one.py"}}, workers)


def test_each_test_has_a_turn_in_a_dozen_commits_also_where_no_run_is_recorded() -> None:
    runs = known(99, SECONDS / 4)
    ran = {test for commit in range(100, 100 + TURNS) for test in chosen(runs, commit).run}
    assert ran == set(TESTS)
    for position, test in enumerate(TESTS):
        last = turn_of(position, 111)
        assert 100 <= last <= 111 and chosen(runs, last).run[test] == "its turn"


def test_none_is_older_than_a_dozen_landings_whose_runs_are_recorded_whatever_their_numbers() -> None:
    runs, commit = known(100, SECONDS / 5), 100
    ages = dict.fromkeys(TESTS, 0)
    for landing in range(60):
        commit += 1 + landing * 7 % 24  # a multiple of a dozen, too
        ran = chosen(runs, commit).run
        runs |= {test: Run(SECONDS / 5, commit) for test in ran}
        ages = {test: 0 if test in ran else age + 1 for test, age in ages.items()}
        assert max(ages.values()) <= TURNS


def test_what_changed_after_a_green_run_and_the_turn_come_before_the_oldest() -> None:
    runs = known(90) | {TESTS[1]: Run(BRIEF, 10), TESTS[29]: Run(BRIEF, 99)}
    changed = {"tests/test_06.py": 95, "jobs/one.py": 91, "tests/test_29.py": 98}
    share = chosen(runs, 100, changed)
    assert list(share.run.items())[:5] == [
        (TESTS[4], "its turn"),
        (TESTS[6], "its file has changed"),
        (TESTS[16], "its turn"),
        (TESTS[7], "a module of it has changed"),
        (TESTS[28], "its turn"),
    ]
    rest = list(share.run)[5:]
    assert rest[0] == TESTS[1] and rest[-1] == TESTS[29]  # 29 was green after its change
    assert {share.run[test] for test in rest} == {"the oldest run"}


def test_neither_turns_nor_changes_take_all_of_the_time() -> None:
    changed = {f"tests/test_{number:02d}.py": 100 for number in range(30)}
    share = chosen(known(90, SECONDS / 4), 100, changed)
    assert sorted(share.run.values()) == ["its file has changed"] * 2 + ["its turn"] * 2


def test_a_test_that_was_green_at_this_commit_does_not_run_again() -> None:
    share = chosen(known(100) | {TESTS[0]: Run(BRIEF, 99)}, 100)
    turn = [test for position, test in enumerate(TESTS) if turn_of(position, 100) == 100]
    assert set(share.run) == {TESTS[0], *turn}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_share_ends_with_its_time_and_says_what_is_left(workers: int) -> None:
    changed = {f"tests/test_{number:02d}.py": 100 for number in range(30)}
    share = chosen(known(90, SECONDS / 10), 100, changed, workers)
    assert len(share.run) == 10 * workers
    assert len(share.waiting) == 30 - len(share.run)
    assert set(share.waiting.values()) <= {"its file has changed", "its turn"}


def test_the_tests_of_a_file_run_on_one_process() -> None:
    tests = [f"tests/test_one.py::test_{number}" for number in range(4)]
    share = choose(tests, dict.fromkeys(tests, Run(SECONDS / 2, 90)), 100, {}, {}, 2)
    assert len(share.run) == 2


def test_a_test_that_never_ran_counts_as_long_and_one_longer_than_a_share_is_named() -> None:
    runs = dict.fromkeys(TESTS, Run())
    share = chosen(runs, 100)
    assert len(share.run) == SECONDS // UNKNOWN_SECONDS
    share = chosen(runs | {TESTS[4]: Run(SECONDS + 1, None)}, 100)
    assert share.too_long == [TESTS[4]] and TESTS[4] not in share.run


def test_the_record_is_read_as_written_without_tests_that_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "slow_runs.tsv"
    assert slow_tests.read_record(path) == {}
    runs = {
        "tests/a.py::t[x, y]": Run(61.4, 100),
        "tests/b.py::t": Run(5.0, None),
        "tests/gone.py::t": Run(1, 1),
    }
    slow_tests.write_record(path, ["tests/b.py::t", "tests/a.py::t[x, y]", "tests/new.py::t"], runs)
    assert (
        path.read_text()
        == "test\tseconds\tgreen\ntests/a.py::t[x, y]\t61\t100\ntests/b.py::t\t5\t\ntests/new.py::t\t\t\n"
    )
    assert slow_tests.read_record(path) == {
        "tests/a.py::t[x, y]": Run(61.0, 100),
        "tests/b.py::t": Run(5.0, None),
        "tests/new.py::t": Run(None, None),
    }


def test_a_failure_keeps_the_last_green_run_and_a_skipped_test_has_not_run() -> None:
    before = {name: Run(5.0, 90) for name in ("green", "red", "skipped")}
    results = {
        "green": ("passed", 6.0),
        "red": ("failed", 7.0),
        "skipped": ("skipped", 0.0),
        "new": ("failed", 1.0),
    }
    assert slow_tests.updated(before, results, 100) == {
        "green": Run(6.0, 100),
        "red": Run(7.0, 90),
        "skipped": Run(5.0, 90),
        "new": Run(1.0, None),
    }


def test_a_test_file_is_about_what_it_imports_and_the_module_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "tests" / "jobs" / "state" / "test_replay.py"
    file.parent.mkdir(parents=True)
    file.write_text("import kalman\nfrom jobs import upgrade\nfrom tests.support.gateways import Gateway\n")
    found = slow_tests.modules_of(file, tmp_path)
    wanted = {"jobs/state/replay.py", "kalman/__init__.py", "jobs/upgrade.py", "tests/support/gateways.py"}
    assert wanted <= found
    assert "jobs/state/plan.py" not in found


@pytest.fixture
def commit(tmp_path: Path) -> Callable[..., None]:
    """Commit files of a made-up repository; on a branch, and merged, if one is named."""

    def git(*words: str) -> None:
        who = ("-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--initial-branch", "main")

    def made(*files: str, branch: str = "main") -> None:
        if branch != "main":
            git("switch", "--create", branch)
        for name in files:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as out:
                out.write("# a line\n")
            git("add", name)
            git("commit", "--message", name)
        if branch != "main":
            git("switch", "main")
            git("merge", "--no-ff", "--message", "merge", branch)

    return made


def test_changes_have_the_number_of_their_commit_or_of_its_merge(
    tmp_path: Path, commit: Callable[..., None]
) -> None:
    commit("old.py", *(f"f{number}.py" for number in range(COMMITS - 1)))
    commit("one.py", "two.py", branch="work")
    (tmp_path / "f5.py").write_text("not committed")
    number = slow_tests.number_of("HEAD", tmp_path)
    assert number == COMMITS + 3
    changed = slow_tests.changed_files(tmp_path, number)
    assert changed["one.py"] == changed["two.py"] == number
    assert changed["f5.py"] == number + 1
    assert changed[f"f{COMMITS - 2}.py"] == COMMITS
    assert "old.py" not in changed  # longer ago


MADE_UP = {
    "good": "import pytest\n\n@pytest.mark.slow\ndef test_good(): pass\n",
    "bad": "import pytest\n\n@pytest.mark.slow\ndef test_bad(): assert False\n",
    "quick": "def test_quick(): pass\n",
    "soak": "import pytest\n\n@pytest.mark.soak\n@pytest.mark.slow\ndef test_soak(): pass\n",
    "skipped": "import pytest\n\n@pytest.mark.slow\ndef test_skipped(): pytest.skip('no server')\n",
    "hanging": "import time, pytest\n\n@pytest.mark.slow\ndef test_hanging(): time.sleep(60)\n",
}


@pytest.fixture
def project(tmp_path: Path, commit: Callable[..., None]) -> Callable[..., tuple[Path, list[str]]]:
    """Make a repository with test files of these names; return it and its slow tests."""

    def made(*names: str) -> tuple[Path, list[str]]:
        (tmp_path / "pytest.ini").write_text(
            "[pytest]\nmarkers =\n slow: s\n soak: s\naddopts = -m 'not slow'\n"
        )
        (tmp_path / "scripts").symlink_to(slow_tests.ROOT / "scripts")
        commit("README.md")
        for name in names:
            path = tmp_path / "tests" / f"test_{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(MADE_UP[name])
        return tmp_path, slow_tests.collect(tmp_path)

    return made


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_share_that_runs_fails_by_its_tests_and_records_them(
    project: Callable[..., tuple[Path, list[str]]], capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    root, tests = project("good", "quick", "soak", "skipped")
    assert tests == ["tests/test_good.py::test_good", "tests/test_skipped.py::test_skipped"]
    assert slow_tests.run_share(root, tests, 7, workers, []) == 0
    record = slow_tests.read_record(root / slow_tests.RECORD)
    assert record["tests/test_good.py::test_good"].green == 7
    assert record["tests/test_skipped.py::test_skipped"] == Run()
    said = capsys.readouterr().out
    assert "skipped:\n  tests/test_skipped.py::test_skipped" in said
    assert "green     7  turn" in said and "green never  turn" in said
    root, tests = project_of(root, "bad")
    assert slow_tests.run_share(root, tests, 8, workers, []) == 1
    record = slow_tests.read_record(root / slow_tests.RECORD)
    assert record["tests/test_bad.py::test_bad"].green is None
    assert "failed:\n  tests/test_bad.py::test_bad" in capsys.readouterr().out


def project_of(root: Path, more: str) -> tuple[Path, list[str]]:
    """Add a test file to a made-up repository."""
    (root / "tests" / f"test_{more}.py").write_text(MADE_UP[more])
    return root, slow_tests.collect(root)


def test_a_share_without_a_test_passes(project: Callable[..., tuple[Path, list[str]]]) -> None:
    root, tests = project("quick")
    assert tests == []
    (root / "tests").mkdir(exist_ok=True)
    assert slow_tests.run_share(root, tests, 7, 1, []) == 0


@pytest.mark.slow
def test_a_share_that_lasts_too_long_is_cut_off_and_does_not_fail(
    project: Callable[..., tuple[Path, list[str]]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slow_tests, "LIMIT_SECONDS", 15.0)
    root, tests = project("good", "hanging")
    assert slow_tests.run_share(root, tests, 7, 1, []) == 0
    assert "cut off:\n  tests/test_hanging.py::test_hanging" in capsys.readouterr().out
    record = slow_tests.read_record(root / slow_tests.RECORD)
    assert record["tests/test_good.py::test_good"].green == 7
    assert record["tests/test_hanging.py::test_hanging"].green is None


def test_the_record_of_this_repository_can_be_read() -> None:
    record = slow_tests.read_record(slow_tests.ROOT / slow_tests.RECORD)
    assert record
    gone = [test for test in record if not (slow_tests.ROOT / slow_tests.file_of(test)).is_file()]
    assert not gone, f"{slow_tests.RECORD} names tests that are gone: remove their lines"
