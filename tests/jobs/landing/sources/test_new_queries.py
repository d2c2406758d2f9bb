"""A landing begins a new query where the table's columns were changed under it, and not for ever."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from pyspark.errors import PySparkException

from jobs.core.errors import UserError
from jobs.landing.sources import landing
from jobs.landing.sources.table import TableReader

CHANGED = "[DELTA_SCHEMA_CHANGED_WITH_VERSION] Detected schema change in version 7"


def run(monkeypatch: pytest.MonkeyPatch, *ends: tuple[str | None, int], restarts: tuple[str, ...]) -> int:
    """Run a landing whose queries end so: with an error or none, after landing so many micro-batches; count them."""
    reader: Any = MagicMock(restarts=restarts, explain_error=str)
    reader.is_empty.return_value = False
    spec = SimpleNamespace(name="walk", source=SimpleNamespace(title="table t"))
    one: Any = SimpleNamespace(spec=spec, reader=reader, batches=0)
    queries = iter(ends)

    def await_end(*_: Any) -> None:
        error, batches = next(queries)
        one.batches += batches
        if error is not None:
            raise PySparkException(error)

    monkeypatch.setattr(landing, "await_end", await_end)
    landing.run(one, None, threading.Event())
    assert next(queries, None) is None
    return reader.rows.call_count


def test_a_new_query_goes_on_after_columns_were_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, (CHANGED, 0), (None, 1), restarts=TableReader.restarts) == 2
    often = [(CHANGED, 1)] * 7  # over the months of a landing that watches the table
    assert run(monkeypatch, *often, (None, 0), restarts=TableReader.restarts) == 8


def test_a_query_that_never_gets_on_ends_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"landing table t failed: .*DELTA_SCHEMA_CHANGED"):
        run(monkeypatch, *[(CHANGED, 0)] * 9, restarts=TableReader.restarts)
    for error, restarts in (("[DELTA_SOURCE_IGNORE_DELETE]", TableReader.restarts), (CHANGED, ())):
        with pytest.raises(UserError, match="landing table t failed"):
            run(monkeypatch, (error, 1), (None, 0), restarts=restarts)
