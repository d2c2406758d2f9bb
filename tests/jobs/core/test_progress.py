"""Progress says of how much, at which rate and in which time the rest will be; in a log only what has changed."""

from __future__ import annotations

import time

import pytest

from jobs.core.progress import Progress
from jobs.core.report import format_rate
from tests.support.hostile import HOSTILE


def begun(progress: Progress, seconds: float) -> Progress:
    progress._started = time.monotonic() - seconds
    return progress


def test_of_how_much_at_which_rate_and_how_long_still():
    progress = begun(Progress("ingest nile", 24, noun="file"), 10.0)
    progress.advance(6, "600 rows")
    assert progress.text() == "6 of 24 files · 36 files/min · 30 s left · 600 rows"
    progress.advance(18, "2,400 rows")
    assert progress.text() == "24 of 24 files · 2,400 rows"


def test_without_a_total_nothing_is_counted_before_the_first_step():
    progress = Progress("stream nile", None, noun="micro-batch", ending="es")
    assert progress.text() == ""
    progress.note("waiting")
    assert progress.text() == "waiting"
    progress.advance(1, "100 rows")
    assert progress.text() == "1 micro-batch · 100 rows"


def test_no_name_controls_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    for name in HOSTILE:
        progress = Progress(f"ingest {name}", 2)
        progress.note(name or "x")
        progress._line()
        (line,) = capsys.readouterr().err[:-1].split("\n")
        assert line.isprintable()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress("[/] [red]", 2) as progress:  # which are no marks of rich
        progress.advance(1, "a\nb \x1b[31m [/b] [red]")
    err = capsys.readouterr().err
    assert "[/] [red]" in err and "a\\nb" in err and "\\x1b[31m [/b] [red]" in err


def test_a_log_has_a_line_only_where_something_has_changed(capsys: pytest.CaptureFixture[str]):
    progress = Progress("pretrain nile", None)
    progress._line()  # there is nothing to tell yet
    progress.note("filtering 100 rows")
    for seconds in (3, 6, 9):
        begun(progress, seconds)._line()
    progress.note("writing")
    begun(progress, 12)._line()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["pretrain nile: filtering 100 rows · 3 s", "pretrain nile: writing · 12 s"]


def test_the_parts_of_a_long_step_are_told_with_the_time_that_is_left(capsys: pytest.CaptureFixture[str]):
    counts = [0, 0]
    progress = Progress("pretrain nile", None)
    progress.follow(lambda: (counts[0], counts[1]))
    progress.note("filtering 100 rows")
    progress._line()
    counts[:] = [2, 8]
    progress._activity_began -= 10.0
    assert progress.text() == "filtering 100 rows · 2 of 8 tasks · 30 s left"
    for done in (2, 2, 5):
        counts[0] = done
        progress._line()
    lines = [line.rpartition(" · ")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "pretrain nile: filtering 100 rows",
        "pretrain nile: filtering 100 rows · 2 of 8 tasks · 30 s left",
        "pretrain nile: filtering 100 rows · 5 of 8 tasks · 6 s left",
    ]

    def gone() -> tuple[int, int]:
        raise ConnectionError("Spark has ended")

    progress.follow(gone)  # the work goes on
    assert progress.text() == "filtering 100 rows"


@pytest.mark.parametrize(
    ("number", "seconds", "said"),
    [
        (26_000, 2.0, "13,000 rows/s"),
        (100, 60.0, "1.7 rows/s"),
        (100, 300.0, "20 rows/min"),
        (1, 600.0, "6.0 rows/h"),
    ],
)
def test_a_rate_is_never_rounded_to_nothing(number: int, seconds: float, said: str):
    assert format_rate(number, seconds) == said
