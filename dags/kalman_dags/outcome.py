"""A verb's report, for Airflow: the most important line, and the facts for an asset's event."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kalman_dags.places import report_page

FACTS = (
    *("snapshot", "snapshots", "generation", "run", "version", "position", "cut", "keys", "rows", "late"),
    *("forecasts", "quarantined", "log_likelihood", "converged", "answer", "good", "promoted", "report"),
)
"""The numbers and names of a report that are written to the extra of an asset's event, if the report has them."""

MATTERS = ("promoted ", "verdict: ", "estimated ", "no new rows after ", "stopped before ")
"""Prefixes of a report's most important line; of several lines with such a prefix the last is the most important."""

_SECONDS = re.compile(r"[\d.,]+ s")


class VerbOutcome(NamedTuple):
    """The report of a verb: lines of text, and data."""

    lines: list[str]
    data: dict[str, Any]

    @property
    def headline(self) -> str | None:
        """Return the line that states the outcome."""
        lines = [line for line in self.lines if not _SECONDS.fullmatch(line)]
        found = [line for line in lines if line.startswith(MATTERS)]
        return (found[-1:] or lines[:1] or [None])[0]

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts for the extra of an asset's event."""
        found = {name: self.data[name] for name in FACTS if self.data.get(name) is not None}
        if self.data.get("promoted") is False and self.data.get("live"):
            found["generation"] = self.data["live"]  # a comparison's report names the shadow
        compared = self.data.get("comparison") or {}
        numbers = {
            "rows_compared": compared.get("rows"),
            "gain": (compared.get("gain") or {}).get("mean"),
            "log_likelihood_a_row": (compared.get("log_likelihood_a_row") or {}).get("new"),
            "page": report_page(str(found.get("report", ""))),
        }
        return found | {name: value for name, value in numbers.items() if value is not None}


def read_outcome(file: Path, said: Sequence[str] = ()) -> VerbOutcome:
    """Return a driver's report; for a driver in a cluster, it has only the output lines in `said`."""
    try:
        found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return VerbOutcome(list(said), {})
    return VerbOutcome(list(found["lines"]), dict(found["data"]))
