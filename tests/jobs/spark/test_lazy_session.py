"""A command's warehouse starts Spark when its session is first needed, once, and with Java's settings for its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from jobs.core.settings import Settings
from jobs.spark import session
from jobs.spark.conf import build_quick_java_conf
from jobs.spark.session import open_warehouse
from jobs.spark.warehouse import Warehouse


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The settings of each session that was started."""
    found: list[dict[str, str]] = []

    def start(settings: Settings, app: str, conf: dict[str, str], kafka: bool) -> Any:
        found.append(conf)
        return object()

    monkeypatch.setattr(session, "spark_session", start)
    return found


def test_spark_starts_once_and_only_if_it_is_needed(tmp_path: Path, started: list[dict[str, str]]):
    warehouse = open_warehouse(Settings.load(warehouse=str(tmp_path)), "test", {"a": "1"})
    other = warehouse.at(str(tmp_path / "other"))
    assert not warehouse.exists("measurements/walk") and not warehouse.has_spark and started == []
    assert other.spark is warehouse.spark is warehouse.spark and warehouse.has_spark
    assert started == [{"a": "1"}] and other.root.endswith("other")


def test_a_session_that_is_given_has_started(tmp_path: Path):
    given: Any = object()
    warehouse = Warehouse(given, str(tmp_path))
    assert warehouse.has_spark and warehouse.spark is given


def test_few_measurements_need_no_optimising_compiler(
    tmp_path: Path, started: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
):
    def conf() -> dict[str, str]:
        settings = Settings.load(warehouse=str(tmp_path))
        assert open_warehouse(settings, "test", reads_all_of="walk").spark
        return started.pop()

    assert conf() == {}  # there are no measurements yet
    write_deltalake(str(tmp_path / "measurements" / "walk"), pa.table({"id": [1, 2]}))
    assert conf() == build_quick_java_conf()
    assert "TieredStopAtLevel=1" in build_quick_java_conf()["spark.driver.extraJavaOptions"]
    monkeypatch.setattr(session, "QUICK_BYTES", 100)
    assert conf() == {}


def test_java_that_moves_no_rows_needs_no_optimising_compiler(
    tmp_path: Path, started: list[dict[str, str]]
) -> None:
    warehouse = open_warehouse(Settings.load(warehouse=str(tmp_path)), "test")
    warehouse.moves_rows = False
    assert warehouse.spark and started == [build_quick_java_conf()]
