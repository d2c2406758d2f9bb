"""The progress of a stream as Prometheus metrics, on a port or in a text file for the node exporter."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    start_http_server,
    write_to_textfile,
)

from jobs.core.errors import UserError
from jobs.supervision.progress import OUTCOMES, parse_end_time

LABELS = ("model", "generation")
GAUGES = {
    "batch_id": ("kalman_batch_id", "Last micro-batch that was committed"),
    "seconds": ("kalman_batch_seconds", "Duration of the last micro-batch"),
    "rows_per_second": ("kalman_rows_per_second", "Rows a second in the last micro-batch"),
    "state_rows": ("kalman_state_rows", "Rows of the state store: blocks of keys"),
    "state_bytes": ("kalman_state_bytes", "Memory of the state store"),
    "lag_rows": ("kalman_lag_rows", "Rows that wait in the source"),
    "lag_seconds": ("kalman_lag_seconds", "Since when the first of them has waited"),
}
KINDS = ("estimated", "quarantined", *OUTCOMES)

LOOPBACK = "127.0.0.1"
"""The default address for metrics, because everybody who can reach the address can read the names of models."""


class Metrics:
    """The metrics of a driver."""

    def __init__(
        self,
        model: str,
        generation: str,
        port: int | None = None,
        file: str | None = None,
        host: str = LOOPBACK,
    ) -> None:
        """Serve the metrics on `port` of `host`, and write them to `file` with every record; None turns either off.

        Raises:
            UserError: the port is taken, or the file cannot be written.
        """
        disable_created_metrics()  # otherwise each counter gets an additional metric `_created`
        self._labels = (model, generation)
        self.registry = CollectorRegistry()
        self._file = None if file is None else Path(file).expanduser().absolute()
        self._gauges = {
            field: Gauge(name, text, LABELS, registry=self.registry) for field, (name, text) in GAUGES.items()
        }
        self._rows = Counter(
            "kalman_rows", "Rows by what became of them", (*LABELS, "outcome"), registry=self.registry
        )
        self._batches = Counter("kalman_batches", "Micro-batches committed", LABELS, registry=self.registry)
        self._last = Gauge(
            "kalman_last_batch_timestamp_seconds", "When the last micro-batch ended", LABELS, registry=self.registry
        )  # fmt: skip
        self._server: Any = None
        if self._file is not None:
            with _raise_option_error(f"--metrics-file {self._file}"):
                self.write()
        if port is not None:
            with _raise_option_error(f"--metrics-port {port} (--metrics-host {host})"):
                self._server, _ = start_http_server(port, host, registry=self.registry)

    def take(self, records: list[dict[str, Any]]) -> None:
        """Update the metrics with records, oldest first."""
        for one in records:
            self._batches.labels(*self._labels).inc()
            for kind in KINDS:
                self._rows.labels(*self._labels, kind).inc(one.get(kind) or 0)
        if records:
            newest = records[-1]
            for field, gauge in self._gauges.items():
                if newest.get(field) is not None:
                    gauge.labels(*self._labels).set(newest[field])
            self._last.labels(*self._labels).set(parse_end_time(newest).timestamp())
            if self._file is not None:
                self.write()

    def write(self) -> None:
        """Write the metrics to the file atomically."""
        assert self._file is not None
        write_to_textfile(str(self._file), self.registry)

    def close(self) -> None:
        """Release the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def write_verification(file: str, model: str, outcome: str, counts: dict[str, int], differences: int) -> None:
    """Write the outcome of a verification to a text file for the node exporter.

    Raises:
        UserError: the file cannot be written.
    """
    registry = CollectorRegistry()

    def gauge(name: str, text: str, value: float, **labels: str) -> None:
        one = Gauge(name, text, ("model", *labels), registry=registry)
        one.labels(model, *labels.values()).set(value)

    gauge("kalman_verify_differences", "Differences that the last verification found", differences)
    gauge("kalman_verify_compared", "Estimates and states that it compared", counts["compared"])
    gauge("kalman_verify_rows", "Landed rows that it recomputed", counts["rows"])
    gauge("kalman_verify_outcome", "1, with the outcome as its label", 1, outcome=outcome)
    gauge("kalman_verify_timestamp_seconds", "When it ended", time.time())
    with _raise_option_error(f"--metrics-file {file}"):
        write_to_textfile(file, registry)


@contextmanager
def _raise_option_error(option: str) -> Iterator[None]:
    """Turn an error about the file or port of an option into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{option}: {error.strerror or error}; give another, or omit the option") from error
