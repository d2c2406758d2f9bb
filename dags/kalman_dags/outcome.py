"""What a verb has reported, for Airflow: the line that matters, and the facts that an asset's event carries."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kalman_dags.places import report_page

FACTS = (
    *(
        "snapshot",
        "snapshots",
        "generation",
        "run",
        "version",
        "position",
        "cut",
        "keys",
        "rows",
        "forecasts",
    ),
    *("quarantined", "late", "log_likelihood", "converged", "answer", "good", "promoted", "report"),
)
"""The numbers and names of a report that an asset's event carries in its extra, where the verb reports them."""

MATTERS = ("promoted ", "verdict: ", "estimated ", "no new rows after ", "stopped before ")
"""Beginnings of the line that matters in a report whose first line is not that; the last one counts."""

_SECONDS = re.compile(r"[\d.,]+ s")


class Outcome(NamedTuple):
    """The report of a verb: its lines for a person, and its data for a program."""

    lines: list[str]
    data: dict[str, Any]

    @property
    def headline(self) -> str | None:
        """The one line that says how it ended."""
        lines = [line for line in self.lines if not _SECONDS.fullmatch(line)]
        found = [line for line in lines if line.startswith(MATTERS)]
        return (found[-1:] or lines[:1] or [None])[0]

    @property
    def facts(self) -> dict[str, Any]:
        """What an asset's event carries."""
        found = {name: self.data[name] for name in FACTS if self.data.get(name) is not None}
        compared = self.data.get("comparison") or {}
        numbers = {
            "rows_compared": compared.get("rows"),
            "gain": (compared.get("gain") or {}).get("mean"),
            "log_likelihood_a_row": (compared.get("log_likelihood_a_row") or {}).get("new"),
            "page": report_page(str(found.get("report", ""))),
        }
        return found | {name: value for name, value in numbers.items() if value is not None}


def read_outcome(file: Path, said: Sequence[str] = ()) -> Outcome:
    """Return the report that a driver has written; of one that ran in a cluster only the lines that were seen."""
    try:
        found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Outcome(list(said), {})
    return Outcome(list(found["lines"]), dict(found["data"]))
