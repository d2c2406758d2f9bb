"""The demo's upgrade and roll-back alone, on a few days of flights: every row in one version and in the other."""

from __future__ import annotations

import math
from datetime import date
from pathlib import Path

import pytest

from demo.flights import ZONE, load_flights, with_times, write_csv
from demo.upgrade import HELD, MODEL, rows_in, upgrade_and_roll_back
from jobs.core.settings import Settings

pytestmark = [pytest.mark.spark, pytest.mark.soak]

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ("origin", "dest", "at", "air_time")


def test_air_time_is_upgraded_under_its_feed_and_rolled_back(tmp_path: Path) -> None:
    from datetime import datetime

    from demo.check import check
    from demo.content import switch_of
    from demo.figures import draw_switch
    from jobs import ingest, pretrain, stream
    from jobs.spark.session import spark_session
    from jobs.spark.warehouse import Warehouse
    from jobs.specs.loading import load_spec

    flights = load_flights()
    flights = with_times(flights[flights["month"].isin([9, 10])])
    history = flights[(flights["day"] >= date(2013, 9, 17)) & (flights["day"] < date(2013, 10, 1))]
    days = [
        write_csv(flights[flights["day"] == date(2013, 10, day)], COLUMNS, tmp_path / "days" / f"{day}.csv")
        for day in range(1, 3 + HELD)
    ]
    settings = Settings.load(str(tmp_path / "warehouse"), ROOT / "models", "local[2,4]", quiet=True)
    ingest.run(settings, MODEL, [str(write_csv(history, COLUMNS, tmp_path / "history.csv"))])
    pretrain.run(settings, MODEL)
    ingest.run(settings, MODEL, [str(day) for day in days[:-HELD]])
    stream.run(settings, [MODEL])
    sent = sum(rows_in(day) for day in days[:-HELD])
    said: list[str] = []
    done = upgrade_and_roll_back(settings, tmp_path / "models", days[-HELD:], sent, said.append)

    assert done.problems() == [] and len(done.rows) == HELD + 1
    assert (done.first, done.second) == ("air_time-g0001", "air_time-g0002")
    assert done.comparison["rows"] == rows_in(days[-HELD])
    assert Path(done.report).is_file() and len(said) == 4
    # The first version has every row, as one batch over all of them has them; the second those that it saw.
    since = datetime(2013, 10, 1, tzinfo=ZONE)
    warehouse = Warehouse(spark_session(settings, "demo"), settings.warehouse)
    total = sum(rows_in(day) for day in days)
    checked = check(warehouse, load_spec(MODEL, settings.models), total, since, str(tmp_path / "days"), print)
    assert checked.worst == 0.0 and not math.isnan(checked.worst)
    assert checked.counts.add_up and checked.generation.generation == done.first
    shown = switch_of(checked, done)
    assert len(shown.routes) == 3
    assert draw_switch(shown, "minutes").startswith("data:image/png;base64,")
