"""The list of mutants that make no difference is of today's code, and each entry says why."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.equivalent import Judgement, judged, judgements, stale
from tests.mutants.sources import ROOT


def test_what_was_judged_is_still_in_the_files() -> None:
    known = judgements()
    assert stale(known, ROOT) == []
    assert len(set(known)) == len(known)
    assert not any(one.before == one.after for one in known)


def test_a_judgement_ends_with_the_lines_it_was_made_of(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(x):\n    if x < 0:\n        return 1\n", encoding="utf-8")
    good = Judgement("a.py", "if x < 0:\n    return 1", "if x <= 0:\n    return 1", "zero never comes")
    gone = Judgement("a.py", "if x < 1:", "if x <= 1:", "one never comes")
    silent = Judgement("a.py", "return 1", "return 2", " ")
    assert stale([good, gone, silent, Judgement("b.py", "x", "y", "no file")], tmp_path)[:2] == [gone, silent]
    assert stale([good], tmp_path) == []
    assert judged(
        Judgement("a.py", "  if x < 0:\n      return 1", "  if x <= 0:\n      return 1", ""), [good]
    )
    assert not judged(Judgement("b.py", good.before, good.after, ""), [good])
    assert not judged(Judgement("a.py", good.before, "if x > 0:\n    return 1", ""), [good])
