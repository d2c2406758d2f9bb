"""Mutants that were judged to change nothing that anybody could notice, each with its reason.

They are in equivalent.toml. A judgement names the lines before and after the change, without their indentation; it
holds wherever they stand in the file, and has to be made anew when the lines change.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

LIST = Path(__file__).with_name("equivalent.toml")


class Change(Protocol):
    """What a judgement looks at of a mutant."""

    @property
    def path(self) -> str: ...
    @property
    def before(self) -> str: ...
    @property
    def after(self) -> str: ...


@dataclass(frozen=True)
class Judgement:
    """A change of a file that makes no difference, and why."""

    path: str
    before: str
    after: str
    reason: str


def judgements(file: Path = LIST) -> list[Judgement]:
    """Read the list."""
    return [Judgement(**one) for one in tomllib.loads(file.read_text(encoding="utf-8")).get("mutant", [])]


def judged(mutant: Change, known: list[Judgement]) -> bool:
    """Return whether a mutant is on the list."""
    return any(
        (one.path, plain(one.before), plain(one.after))
        == (mutant.path, plain(mutant.before), plain(mutant.after))
        for one in known
    )


def stale(known: list[Judgement], root: Path) -> list[Judgement]:
    """Return the judgements whose lines the file no longer has, or that give no reason."""
    old = []
    for one in known:
        file = root / one.path
        text = plain(file.read_text(encoding="utf-8")) if file.is_file() else ""
        if not plain(one.before) or plain(one.before) not in text or not one.reason.strip():
            old.append(one)
    return old


def plain(lines: str) -> str:
    """Return lines without their indentation."""
    return "\n".join(line.strip() for line in lines.strip().splitlines())
