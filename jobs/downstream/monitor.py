"""Watch the live estimates: windows over event time and rules over each key's sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jobs.core.report import Report
from jobs.downstream.queries import MONITOR, list_queries, read_application
from jobs.downstream.rule_exports import adopt
from jobs.downstream.rule_operator import Alerts, fix_bucket_count, start_rules
from jobs.downstream.runner import LiveQueries
from jobs.downstream.windows import Windows
from jobs.spark.kafka import read_topic
from jobs.specs.monitor import Monitor
from jobs.state.encoding.keys import build_key_kind
from jobs.storage.tables import estimates

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass
class MonitorQueries(LiveQueries):
    """One run of a monitor."""

    monitor: Monitor
    adopted: str | None = None
    """Export of rule states with which new rules begin (`jobs.downstream.rule_exports`)."""
    notes: list[str] = field(default_factory=list, init=False)
    """Differences between the rules and the adopted states' rules."""
    windows: Windows | None = None
    alerts: Alerts | None = None

    label = "the monitor"

    def start(self) -> list[StreamingQuery]:
        """Start a query for the windows and one for the rules."""
        spec, monitor, warehouse = self.spec, self.monitor, self.warehouse
        for given in (monitor.kafka, monitor.windows_kafka):
            if given is not None:
                read_topic(warehouse.spark, given.topic)
        queries = []
        for query in list_queries(spec, MONITOR):
            if query.part == "windows":
                self.windows = self.windows or Windows(
                    warehouse, spec, monitor, read_application(warehouse, query)
                )
                sink, rows = self.windows, self.source(query)
            else:
                if self.alerts is None:
                    kind = build_key_kind(spec.key, warehouse.read(estimates(spec.name)).schema)
                    self.alerts = Alerts(warehouse, spec, monitor, read_application(warehouse, query), kind)
                sink = self.alerts
                with_states = adopt(warehouse, spec, query, self.adopted)
                begin, seeds = (None, None) if with_states is None else with_states[:2]
                if with_states is not None:
                    self.notes = with_states.changes.lines()
                source = self.source(query, begin=begin)
                rows = start_rules(
                    spec, monitor, source, fix_bucket_count(warehouse, spec, query.name), seeds
                )
            queries.append(self.start_query(rows, query, sink))
        return queries

    def format_progress(self) -> str:
        """Return the numbers of rows added to windows, and of alerts raised and cleared, as text."""
        parts = []
        if self.windows is not None:
            parts.append(f"{self.windows.rows:,} rows in windows")
        if self.alerts is not None:
            parts.append(f"{self.alerts.raised:,} alerts raised, {self.alerts.cleared:,} cleared")
        return ", ".join(parts)

    def report(self, seconds: float) -> Report:
        """Return the report of this run."""
        lines, data = [*self.notes], {}
        if self.windows is not None:
            rows, late = self.windows.rows, self.windows.late
            lines.append(f"added {rows:,} rows to the windows of {self.spec.name}, {late:,} were late")
            data |= {"window_rows": rows, "late": late}
        if self.alerts is not None:
            lines.append(f"raised {self.alerts.raised:,} alerts and cleared {self.alerts.cleared:,}")
            data |= {
                "raised": self.alerts.raised,
                "cleared": self.alerts.cleared,
                "failed": self.alerts.failed,
            }
            if self.alerts.failed:
                lines.append(f"functions of rules failed at {self.alerts.failed:,} rows, which they left out")
        return Report(lines, {"model": self.spec.name, **data, "seconds": seconds})
