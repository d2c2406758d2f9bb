"""The table of verifications, with the results of each run: counts, and the first differences."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Self

from jobs.storage.row_changes import NOW, Row, put_rows
from jobs.storage.tables import VERIFICATIONS
from jobs.storage.warehouse import Tables

EQUAL, DIFFERENT, NOTHING, NOT_VERIFIED = "equal", "different", "nothing to verify", "not verified"
"""Outcomes of a run: everything is equal, something differs, there was nothing to verify, or a part was left out."""

SHOWN = 5
"""The maximum number of differences that each part stores."""

DIFFERENCES = {
    "different": "estimates that differ",
    "missing": "rows without an estimate",
    "doubled": "estimates that a row has twice",
    "strange": "estimates of no landed row",
    "baseless": "refusals of no landed row",
    "states_different": "states that differ, are missing or belong to no key",
    "uncounted": "rows by which the counts of a generation do not add up",
}
"""The counts that must be 0, with their descriptions."""
COUNTS = (
    "landed",
    "keys",
    "rows",
    "equal",
    "close",
    "refused",
    "waiting",
    "states",
    "states_close",
    "unrecorded",
    "undecided",
    "numerics",
    "states_numerics",
    *DIFFERENCES,
)
"""Names of all counts.

landed: landed rows of all keys. rows: rows of the sampled keys. equal: estimates that are equal bit by bit. close:
estimates that are equal only within the tolerance. unrecorded: late rows that are no longer in quarantine. undecided:
keys whose rows with the same time may have been replayed in another order. states: states that are equal bit by bit.
numerics, states_numerics: estimates and states whose difference is excused, because other numerics filtered them
(`kalman.NUMERICS`).
"""


@dataclass(frozen=True, slots=True)
class Findings:
    """Counts, and descriptions of the first differences."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    firsts: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, *firsts: dict[str, Any], **counts: int) -> Self:
        """Return findings with these counts, 0 for all others, and descriptions of differences."""
        return cls({**dict.fromkeys(COUNTS, 0), **counts}, list(firsts))

    @property
    def differences(self) -> int:
        """Return the number of differences of all kinds."""
        return sum(self.counts[name] for name in DIFFERENCES)

    @property
    def compared(self) -> int:
        """Return the number of estimates and states that were compared."""
        return sum(self.counts[name] for name in ("equal", "close", "states", "states_close"))


def describe_difference(what: str, key: str | None = None, batch: int | None = None) -> dict[str, Any]:
    """Return the description of a difference that concerns a key, a micro-batch, or neither, but no estimate."""
    return {"key": key, "event_time": None, "batch": batch, "what": what}


def sum_findings(parts: Iterable[Findings]) -> Findings:
    """Return the sum of findings, with the first few differences from all of them."""
    total = Findings()
    for part in parts:
        for name, count in part.counts.items():
            total.counts[name] = total.counts.get(name, 0) + count
        total.firsts.extend(part.firsts)
    return Findings(total.counts, total.firsts[:SHOWN])


def format_difference(difference: Mapping[str, Any]) -> str:
    """Return a difference as a sentence."""
    where = f"key {difference['key']}" if difference.get("key") is not None else "all keys"
    if difference.get("event_time") is not None:
        where += f", row of {difference['event_time']}"
    if difference.get("batch") is not None:
        where += f", micro-batch {difference['batch']}"
    if difference.get("generation"):
        where += f" of {difference['generation']}"
    return f"{where}: {difference['what']}"


TABLE = "verifications"
BEGAN, PART, ENDED = "began", "part", "ended"
"""Values of the column `step`."""
_KEYS = ("run_id", "step", "part")
CONTINUED_FOR = timedelta(days=1)
"""The time within which a new run with the same options continues a killed run."""


class VerificationRun(NamedTuple):
    """A run of `verify`: its plan, and the findings of its finished parts."""

    run_id: str
    model: str
    plan: dict[str, Any]
    done: dict[str, Findings]

    @property
    def findings(self) -> Findings:
        """Return the sum of the findings of all parts."""
        return sum_findings(self.done[name] for name in sorted(self.done))


def begin(warehouse: Tables, model: str, plan: dict[str, Any], run_id: str) -> VerificationRun:
    """Record the start of a run."""
    run = VerificationRun(run_id, model, plan, {})
    _write(warehouse, run, BEGAN, plan=json.dumps(plan))
    return run


def find_unfinished_run(
    warehouse: Tables, model: str, options: dict[str, Any], run_id: str | None
) -> VerificationRun | None:
    """Return the run to continue: the named run, or the last run with these options if it was killed recently."""
    rows = _read_rows(warehouse, model)
    ended, recent = {row["run_id"] for row in rows if row["step"] == ENDED}, datetime.now(UTC) - CONTINUED_FOR

    def is_wanted(row: dict[str, Any]) -> bool:
        if run_id is not None:
            return row["run_id"] == run_id
        return row["recorded_at"] > recent and json.loads(row["plan"])["options"] == options

    began = [row for row in rows if row["step"] == BEGAN and row["run_id"] not in ended and is_wanted(row)]
    if not began:
        return None
    newest = max(began, key=lambda row: row["recorded_at"])
    mine = [row for row in rows if row["run_id"] == newest["run_id"] and row["step"] == PART]
    done = {row["part"]: Findings(json.loads(row["counts"]), json.loads(row["firsts"])) for row in mine}
    return VerificationRun(newest["run_id"], model, json.loads(newest["plan"]), done)


def is_finished(warehouse: Tables, model: str, run_id: str) -> bool:
    """Return whether a run with this id has ended."""
    return any(row["run_id"] == run_id and row["step"] == ENDED for row in _read_rows(warehouse, model))


def record_part(warehouse: Tables, run: VerificationRun, part: str, findings: Findings) -> None:
    """Record a finished part of a run; it is recorded once even if two processes continue the run."""
    _write(warehouse, run, PART, part=part, findings=findings)
    run.done[part] = findings


def end(warehouse: Tables, run: VerificationRun, outcome: str, not_verified: list[str]) -> None:
    """Record the outcome of a run."""
    found = run.findings
    _write(warehouse, run, ENDED, outcome=outcome, findings=found, not_verified=json.dumps(not_verified))


def read_last_outcomes(warehouse: Tables) -> dict[str, dict[str, Any]]:
    """Return the last finished run of each model: run_id, outcome, differences, first_difference, recorded_at."""
    names = ("run_id", "outcome", "differences", "first_difference", "recorded_at")
    ended = [row for row in _read_rows(warehouse, None) if row["step"] == ENDED]
    ended.sort(key=lambda row: row["recorded_at"])
    return {row["model"]: {name: row[name] for name in names} for row in ended}


def _read_rows(warehouse: Tables, model: str | None) -> list[dict[str, Any]]:
    mine = None if model is None else {"model": model}
    return warehouse.rows(TABLE, mine) if warehouse.exists(TABLE) else []


def _write(
    warehouse: Tables,
    run: VerificationRun,
    step: str,
    findings: Findings | None = None,
    part: str | None = None,
    **columns: str,
) -> None:
    """Add a row about a step of a run, unless the table has this row already."""
    warehouse.create(TABLE, VERIFICATIONS)
    found = Findings() if findings is None else findings
    row = {
        "run_id": run.run_id,
        "model": run.model,
        "step": step,
        "part": part,
        "rows": found.counts["rows"],
        "compared": found.compared,
        "differences": found.differences,
        "counts": json.dumps(found.counts),
        "first_difference": json.dumps(found.firsts[0]) if found.firsts else None,
        "firsts": json.dumps(found.firsts),
        **columns,
        "recorded_at": NOW,
    }

    def absent(there: Sequence[Row]) -> list[Row]:
        known = any(all(one[name] == row[name] for name in _KEYS) for one in there)
        return [] if known else [row]

    put_rows(warehouse, TABLE, _KEYS, absent)
