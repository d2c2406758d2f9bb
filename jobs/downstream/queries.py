"""What follows a model's live estimates: its monitor and its forecast skill, each with queries, checkpoints and tables.

A query's name says what it means: `monitor-<model>-windows-<definition>`, `monitor-<model>-rules-<definition>`,
`skill-<model>-<definition>`. Another definition is another query, which begins at the first estimate, beside the rows
that the one before has left. Rows of a definition belong to its checkpoint: where that is gone they are made anew.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import NamedTuple

from pyspark.sql import functions as F

from jobs.specs.model_spec import ModelSpec
from jobs.supervision.driver_log import DriverLog
from jobs.supervision.driver_status import log_name
from jobs.warehouse.checkpoints import Checkpoint
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.files import hadoop_files
from jobs.warehouse.tables import alerts, forecast_skill, windows

MONITOR, SKILL = "monitor", "skill"
VERBS = (MONITOR, SKILL)
CHECKPOINTS = "checkpoints"
APPLICATIONS = "_followers"
"""Where it is noted under which name each checkpoint's transactions are."""

_KINDS: dict[tuple[str, str], Callable[[str], str]] = {
    (MONITOR, "windows"): windows,
    (MONITOR, "rules"): alerts,
    (SKILL, ""): forecast_skill,
}


class Query(NamedTuple):
    """One query over the live estimates; part: windows or rules of a monitor, nothing of the skill."""

    verb: str
    part: str
    model: str
    definition: str

    @property
    def name(self) -> str:
        """Return its name, which is its checkpoint's too."""
        return f"{_prefix(self.verb, self.part, self.model)}{self.definition}"

    @property
    def checkpoint(self) -> str:
        """Return its checkpoint's folder in the warehouse."""
        return f"{CHECKPOINTS}/{self.name}"

    @property
    def table(self) -> str:
        """Return the table that it writes."""
        return _KINDS[self.verb, self.part](self.model)


def queries_of(spec: ModelSpec, verb: str) -> list[Query]:
    """Return the queries that a spec asks for."""
    found = []
    if verb == MONITOR and spec.monitor is not None:
        for part in ("windows", "rules"):
            if getattr(spec.monitor, part):
                found.append(Query(verb, part, spec.name, spec.monitor.definition(part)))
    if verb == SKILL and spec.forecast is not None:
        found.append(Query(verb, "", spec.name, spec.forecast.definition()))
    return found


def query_of(model: str, folder: str) -> Query | None:
    """Return the query of a model that a checkpoint's folder is of; None if it is of none."""
    for verb, part in _KINDS:
        prefix = _prefix(verb, part, model)
        if folder.startswith(prefix):
            return Query(verb, part, model, folder.removeprefix(prefix))
    return None


def tables_of(model: str) -> list[str]:
    """Return the tables that follow a model's estimates, whether they are there or not."""
    return [table(model) for table in _KINDS.values()]


def application_of(warehouse: Warehouse, query: Query) -> str:
    """Return the name of a query's transactions, which each checkpoint has for itself.

    Micro-batches are counted from nought in a new checkpoint, and under an old name Delta would pass over them. A new
    one begins without rows of its definition: those that are there are of a checkpoint that has been removed.
    """
    notes = hadoop_files(warehouse, APPLICATIONS)
    if Checkpoint(warehouse, query.checkpoint).last_planned() is None:
        forget(warehouse, query)
        application = f"{query.name}-{uuid.uuid4().hex[:8]}"
        notes.write(f"{query.name}.json", json.dumps({"application": application}).encode())
        return application
    kept = notes.read(f"{query.name}.json")
    return query.name if kept is None else json.loads(kept)["application"]  # without: of an earlier release


def forget(warehouse: Warehouse, query: Query) -> int:
    """Remove what a query has left beside its checkpoint; return how many rows that were. Again it changes nothing."""
    kept = hadoop_files(warehouse, f"_monitor/{query.model}")
    for name in kept.names("") if query.verb == MONITOR else ():
        if name in (f"{query.name}.json", f"watermark-{query.definition}.json"):
            kept.remove(name)
    hadoop_files(warehouse, APPLICATIONS).remove(f"{query.name}.json")
    return warehouse.delete(query.table, F.col("definition") == query.definition)


def lease_log(warehouse: Warehouse, verb: str, model: str) -> DriverLog:
    """Return the log of drivers of a model's stream, monitor or skill."""
    return DriverLog.of(warehouse, log_name(verb, model))


def _prefix(verb: str, part: str, model: str) -> str:
    return f"{verb}-{model}-{part}-" if part else f"{verb}-{model}-"
