"""Write the corpus: small files in the shapes of real exporters with made-up values, and the rows that are right.

Run `python -m tests.corpus.make` from the repository. Each case draws its rows first (key, time in UTC, values), then
writes them as its exporter does; `golden/` and `expected.json` come from the drawn rows, never from our reader.
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.orc as orc
import pyarrow.parquet as pq

HERE = Path(__file__).parent
START = datetime(2024, 1, 8, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
BERLIN = ZoneInfo("Europe/Berlin")
VIENNA = ZoneInfo("Europe/Vienna")


class Row(NamedTuple):
    """One right row; None: the value is missing."""

    key: str
    at: datetime
    values: tuple[float | None, ...]


class Case(NamedTuple):
    """A file and what a careful person expects of it.

    measured: the names of the measured columns, in the order of the rows' values.
    options: what this person tells `init` beside the file, as the file cannot say it.
    refusal: a pattern of the remedy with which the file may be refused instead; None: it must be read.
    note: a pattern of the note with which `init` may read the file otherwise; None: it may not.
    free: the reader may name the measured column as it likes (a column that the reader makes).
    within: seconds by which a time may differ, as the file writes it with few digits.
    """

    file: str
    content: str | bytes
    rows: list[Row]
    measured: tuple[str, ...]
    options: dict[str, Any] = {}
    refusal: str | None = None
    note: str | None = None
    free: bool = False
    within: float = 0.001


def drawn(
    seed: str,
    keys: Sequence[str] = ("",),
    count: int = 60,
    step: timedelta = HOUR,
    start: datetime = START,
    levels: Sequence[float] = (20.0,),
    digits: int = 1,
    spread: float = 0.4,
) -> list[Row]:
    """Draw the rows of some series: each value follows its own random walk around a level."""
    rng = random.Random(seed)
    now = {key: [level + rng.uniform(-3, 3) * spread for level in levels] for key in keys}
    rows: list[Row] = []
    for i in range(count):
        for key in keys:
            now[key] = [
                level + 0.9 * (value - level) + rng.gauss(0, spread)
                for level, value in zip(levels, now[key], strict=True)
            ]
            rows.append(Row(key, start + i * step, tuple(round(value, digits) for value in now[key])))
    return rows


def without(rows: list[Row], places: Sequence[int]) -> list[Row]:
    """Return the rows with no value at some places."""
    return [
        row._replace(values=(None,) * len(row.values)) if i in set(places) else row
        for i, row in enumerate(rows)
    ]


def text(head: Sequence[str], lines: Iterator[str], end: str = "\n") -> str:
    """Return a text of lines."""
    return end.join([*head, *lines]) + end


def lines(rows: Sequence[Row], form: Callable[[Row], str]) -> Iterator[str]:
    """Yield the line of each row."""
    return (form(row) for row in rows)


def put(row: Row, absent: str = "", mark: str = ".", separator: str = ",") -> str:
    """Return the values of a row as fields."""
    return separator.join(absent if value is None else str(value).replace(".", mark) for value in row.values)


def iso(at: datetime, form: str = "%Y-%m-%dT%H:%M:%SZ") -> str:
    return at.strftime(form)


def local(at: datetime, form: str, zone: ZoneInfo = BERLIN) -> str:
    return at.astimezone(zone).strftime(form)


def homes() -> Iterator[Case]:
    """Home automation and its databases."""
    rows = without(drawn("ha", ("sensor.kitchen", "sensor.hall"), levels=(21.0,)), (40, 41))
    yield Case(
        "home_assistant_history.csv",
        text(
            ["entity_id,state,last_changed"],
            lines(rows, lambda r: f"{r.key},{put(r, 'unavailable')},{iso(r.at, '%Y-%m-%dT%H:%M:%S.123Z')}"),
        ),
        [row._replace(at=row.at + timedelta(milliseconds=123)) for row in rows],
        ("state",),
    )
    rows = drawn("ha-statistics", ("sensor.power", "sensor.heat"), levels=(210.0, 200.0, 220.0), digits=2)
    yield Case(
        "home_assistant_statistics.csv",
        text(
            ["statistic_id,start_ts,mean,min,max"],
            lines(rows, lambda r: f"{r.key},{r.at.timestamp():.1f},{put(r)}"),
        ),
        rows,
        ("mean", "min", "max"),
    )
    rows = drawn("openhab", ("Outside_Temperature", "Cellar_Temperature"))
    yield Case(
        "openhab_jdbc.csv",
        text(
            ["time;item;value"],
            lines(rows, lambda r: f"{local(r.at, '%Y-%m-%dT%H:%M:%S.000%z')};{r.key};{put(r)}"),
        ),
        rows,
        ("value",),
    )
    rows = drawn("node-red", ("home/attic", "home/porch"), step=timedelta(minutes=5))
    yield Case(
        "node_red.jsonl",
        text(
            [],
            lines(
                rows,
                lambda r: json.dumps(
                    {
                        "topic": r.key,
                        "payload": r.values[0],
                        "ts": int(r.at.timestamp() * 1000),
                        "qos": 0,
                    }
                ),
            ),
        ),
        rows,
        ("payload",),
    )
    yield from _influx()
    rows = drawn("thingspeak", step=timedelta(minutes=15), levels=(18.0, 55.0))
    numbered = {row.at: number for number, row in enumerate(rows, 1)}
    yield Case(
        "thingspeak_feed.csv",
        text(
            ["created_at,entry_id,field1,field2"],
            lines(rows, lambda r: f"{iso(r.at, '%Y-%m-%d %H:%M:%S UTC')},{numbered[r.at]},{put(r)}"),
        ),
        rows,
        ("field1", "field2"),
    )
    rows = drawn("ttn", ("node-1", "node-2"), levels=(12.0, 3.6), digits=2)
    yield Case(
        "ttn_flat.jsonl",
        text(
            [],
            lines(
                rows,
                lambda r: json.dumps(
                    {
                        "device_id": r.key,
                        "received_at": iso(r.at, "%Y-%m-%dT%H:%M:%S.123456789Z"),
                        "temperature": r.values[0],
                        "battery": r.values[1],
                    }
                ),
            ),
        ),
        [row._replace(at=row.at + timedelta(microseconds=123456)) for row in rows],
        ("temperature", "battery"),
    )
    rows = drawn("ttn-nested", ("node-1", "node-2"), levels=(12.0,), digits=2)
    yield Case(
        "ttn_nested.jsonl",
        text(
            [],
            lines(
                rows,
                lambda r: json.dumps(
                    {
                        "end_device_ids": {"device_id": r.key},
                        "received_at": iso(r.at),
                        "uplink_message": {"decoded_payload": {"temperature": r.values[0]}},
                    }
                ),
            ),
        ),
        rows,
        ("temperature",),
        refusal="uplink_message",
        free=True,
    )


def _influx() -> Iterator[Case]:
    rows = drawn("influx", ("host-a", "host-b"), levels=(0.7,), digits=3, spread=0.05)
    head = [
        "#group,false,false,true,true,false,false,true,true,true",
        "#datatype,string,long,dateTime:RFC3339,dateTime:RFC3339,dateTime:RFC3339,double,string,string,string",
        "#default,_result,,,,,,,,",
        ",result,table,_start,_stop,_time,_value,_field,_measurement,host",
    ]
    tables = {"host-a": 0, "host-b": 1}
    bounds = "2024-01-08T00:00:00Z,2024-01-11T00:00:00Z"
    by_table = sorted(rows, key=lambda r: tables[r.key])
    yield Case(
        "influx_annotated.csv",
        text(
            head,
            lines(by_table, lambda r: f",,{tables[r.key]},{bounds},{iso(r.at)},{put(r)},load,system,{r.key}"),
            "\r\n",
        ),
        by_table,
        ("_value",),
        refusal="line 4|skip_lines",
    )
    rows = drawn("influx-cli", ("host=a", "host=b"), levels=(40.0,), digits=2)
    yield Case(
        "influx_v1_cli.csv",
        text(
            ["name,tags,time,usage"],
            lines(rows, lambda r: f"cpu,{r.key},{int(r.at.timestamp())}000000000,{put(r)}"),
        ),
        rows,
        ("usage",),
    )


def monitoring() -> Iterator[Case]:
    """Dashboards, metrics, message brokers, databases."""
    rows = drawn("grafana", levels=(21.0, 19.0))
    yield Case(
        "grafana_joined.csv",
        text(
            ['"Time","room a","room b"'],
            lines(rows, lambda r: f"{iso(r.at, '%Y-%m-%d %H:%M:%S')},{put(r)}"),
        ),
        rows,
        ("room a", "room b"),
    )
    rows = drawn("grafana-excel", levels=(48.0,))
    yield Case(
        "grafana_for_excel.csv",
        text(
            ["sep=,", '"Time","temperature"'],
            lines(rows, lambda r: f'"{iso(r.at, "%Y-%m-%d %H:%M:%S")}","{put(r)}"'),
        ),
        rows,
        ("temperature",),
        refusal="line 2|skip_lines",
    )
    rows = drawn("prometheus", ("10.0.0.1:9100", "10.0.0.2:9100"), step=timedelta(seconds=15), digits=3)
    yield Case(
        "prometheus_range.csv",
        text(
            ["timestamp,job,instance,value"],
            lines(rows, lambda r: f"{r.at.timestamp():.3f},node,{r.key},{put(r)}"),
        ),
        rows,
        ("value",),
    )
    rows = drawn("prometheus-json", ("a:9100", "b:9100"), step=timedelta(minutes=1))
    yield Case(
        "prometheus_samples.jsonl",
        text(
            [],
            lines(
                rows,
                lambda r: json.dumps(
                    {"timestamp": r.at.timestamp(), "instance": r.key, "value": str(r.values[0])}
                ),
            ),
        ),
        rows,
        ("value",),
    )
    rows = drawn("elastic", ("web-1", "web-2"), step=timedelta(minutes=1), levels=(120.0,))
    yield Case(
        "elastic_hits.ndjson",
        text(
            [],
            lines(
                rows,
                lambda r: json.dumps(
                    {
                        "@timestamp": iso(r.at, "%Y-%m-%dT%H:%M:%S.000Z"),
                        "host": r.key,
                        "latency": r.values[0],
                    }
                ),
            ),
        ),
        rows,
        ("latency",),
    )
    rows = drawn("mqtt", ("tank", "well"), step=timedelta(minutes=10))
    yield Case(
        "mqtt_glued.json",
        "".join(json.dumps({"at": iso(r.at), "sensor": r.key, "level": r.values[0]}) for r in rows),
        rows,
        ("level",),
        refusal="one object on each line|one (JSON )?object|glued",
    )
    rows = drawn("rest", ("tank", "well"), step=timedelta(minutes=10))
    yield Case(
        "rest_pretty.json",
        json.dumps([{"at": iso(r.at), "sensor": r.key, "level": r.values[0]} for r in rows], indent=2) + "\n",
        rows,
        ("level",),
    )
    rows = drawn("psql", ("pump-1", "pump-2"))
    yield Case(
        "psql_copy.csv",
        text(
            ["ts,device,pressure"],
            lines(rows, lambda r: f"{iso(r.at, '%Y-%m-%d %H:%M:%S+00')},{r.key},{put(r)}"),
        ),
        rows,
        ("pressure",),
    )
    rows = without(drawn("mysql", ("7", "12"), levels=(5.0,), digits=2), (10, 31, 52))
    yield Case(
        "mysql_outfile.csv",
        text(
            ["station_id\trecorded\tflow"],
            lines(rows, lambda r: f"{r.key}\t{iso(r.at, '%Y-%m-%d %H:%M:%S')}\t{put(r, chr(92) + 'N')}"),
        ),
        rows,
        ("flow",),
    )
    rows = drawn("bigquery", ("s-1", "s-2"), levels=(9.0,))
    yield Case(
        "bigquery_export.csv",
        text(
            ["ts,sensor,value"],
            lines(rows, lambda r: f"{iso(r.at, '%Y-%m-%d %H:%M:%S UTC')},{r.key},{put(r)}"),
        ),
        rows,
        ("value",),
    )
    half = [
        row._replace(at=row.at + timedelta(milliseconds=500 * (i % 3 == 0)))
        for i, row in enumerate(drawn("bigquery-fractions", step=timedelta(seconds=1)))
    ]
    yield Case(
        "bigquery_fractions.csv",
        text(
            ["ts,value"],
            lines(
                half,
                lambda r: f"{iso(r.at, '%Y-%m-%d %H:%M:%S')}{'.5' if r.at.microsecond else ''} UTC,{put(r)}",
            ),
        ),
        half,
        ("value",),
    )


def spreadsheets() -> Iterator[Case]:
    """Spreadsheets in three languages."""
    rows = drawn("excel-de", levels=(12.0,), digits=2)
    yield Case(
        "excel_german_date_and_time.csv",
        "\ufeff"
        + text(
            ["Datum;Uhrzeit;Temperatur"],
            lines(rows, lambda r: f"{iso(r.at, '%d.%m.%Y;%H:%M')};{put(r, mark=',')}"),
            "\r\n",
        ),
        rows,
        ("Temperatur",),
    )
    rows = drawn("excel-fr", levels=(12.0,), digits=2)
    yield Case(
        "excel_french.csv",
        "\ufeff"
        + text(
            ["Date;Valeur"],
            lines(rows, lambda r: f"{iso(r.at, '%d/%m/%Y %H:%M')};{put(r, mark=',')}"),
            "\r\n",
        ),
        rows,
        ("Valeur",),
    )
    rows = drawn("excel-us", levels=(60.0,))
    yield Case(
        "excel_american.csv",
        text(
            ["Date,Reading"],
            lines(
                rows,
                lambda r: (
                    f"{r.at.month}/{r.at.day}/{r.at.year} {iso(r.at, '%I:%M %p').removeprefix('0')},{put(r)}"
                ),
            ),
            "\r\n",
        ),
        rows,
        ("Reading",),
    )
    rows = drawn("excel-serial", levels=(60.0,))
    since = datetime(1899, 12, 30, tzinfo=UTC)
    yield Case(
        "excel_serial_days.csv",
        text(["date,reading"], lines(rows, lambda r: f"{(r.at - since) / DAY:.10f},{put(r)}")),
        rows,
        ("reading",),
    )
    rows = drawn("excel-trailing", ("north", "south"))
    yield Case(
        "excel_trailing_separators.csv",
        text(
            ["at,site,value"],
            lines(rows, lambda r: f"{iso(r.at, '%Y-%m-%d %H:%M')},{r.key},{put(r)},,"),
        ),
        rows,
        ("value",),
    )


def weather() -> Iterator[Case]:
    """Loggers of weather stations, and archives of weather."""
    rows = drawn("toa5", levels=(8.0, 12.9), digits=2)
    head = [
        '"TOA5","tower","CR1000","1234","CR1000.Std.32","CPU:tower.CR1","999","hourly"',
        '"TIMESTAMP","RECORD","AirTC_Avg","Batt_V"',
        '"TS","RN","Deg C","Volts"',
        '"","","Avg","Min"',
    ]
    record = {row.at: number for number, row in enumerate(rows)}
    yield Case(
        "campbell_toa5.csv",
        text(head, lines(rows, lambda r: f'"{iso(r.at, "%Y-%m-%d %H:%M:%S")}",{record[r.at]},{put(r)}')),
        rows,
        ("AirTC_Avg", "Batt_V"),
        refusal="line 2|skip_lines",
    )
    rows = drawn("davis", levels=(7.0, 80.0))
    yield Case(
        "davis_weatherlink.csv",
        text(
            ['"Date & Time","Temp - °C","Hum - %"'],
            lines(
                rows,
                lambda r: (
                    f'"{r.at.month}/{r.at.day}/{iso(r.at, "%y")} {iso(r.at, "%I:%M %p").removeprefix("0")}",{put(r)}'
                ),
            ),
        ),
        rows,
        ("Temp - °C", "Hum - %"),
    )
    rows = without(drawn("ghcn", ("AU01", "AU02"), step=DAY, levels=(112.0, 31.0), digits=0), (5, 6, 44))
    yield Case(
        "ghcn_access.csv",
        text(
            ['"STATION","DATE","TMAX","TMIN"'],
            lines(
                rows,
                lambda r: (
                    f'"{r.key}","{iso(r.at, "%Y-%m-%d")}",'
                    + ",".join("" if v is None else f'"{v:5.0f}"' for v in r.values)
                ),
            ),
        ),
        rows,
        ("TMAX", "TMIN"),
    )
    rows = drawn("ghcn-year", ("AU01/TMAX", "AU01/TMIN", "AU02/TMAX"), step=DAY, levels=(112.0,), digits=0)
    yield Case(
        "ghcn_by_year.csv",
        text(
            ["ID,DATE,ELEMENT,DATA_VALUE"],
            lines(
                rows,
                lambda r: (
                    f"{r.key.split('/')[0]},{iso(r.at, '%Y%m%d')},{r.key.split('/')[1]},{r.values[0]:.0f}"
                ),
            ),
        ),
        rows,
        ("DATA_VALUE",),
    )
    rows = drawn("isd", levels=(8.0,))
    yield Case(
        "isd_hourly.csv",
        text(
            ['"STATION","DATE","TMP"'],
            lines(
                rows,
                lambda r: (
                    f'"03772099999","{iso(r.at, "%Y-%m-%dT%H:%M:%S")}","{round((r.values[0] or 0) * 10):+05d},1"'
                ),
            ),
        ),
        rows,
        ("TMP",),
        refusal="TMP",
        note="a comma before fractions",
    )
    rows = drawn("usgs", ("06730500", "06730525"), step=timedelta(minutes=15), levels=(3.0,), digits=2)
    yield Case(
        "usgs_rdb.csv",
        text(
            [
                "# ---- WARNING ----",
                "# Data are provisional",
                "site_no\tdatetime\tgage_height",
                "15s\t20d\t14n",
            ],
            lines(rows, lambda r: f"{r.key}\t{iso(r.at, '%Y-%m-%d %H:%M')}\t{put(r)}"),
        ),
        rows,
        ("gage_height",),
        refusal="line 4|skip_lines|units|lines of comments",
        note="rejected",
    )
    rows = drawn("open-meteo", levels=(4.0,))
    yield Case(
        "open_meteo.csv",
        text(
            [
                "latitude,longitude,elevation,utc_offset_seconds,timezone,timezone_abbreviation",
                "48.2,16.4,171.0,0,GMT,GMT",
                "",
                "time,temperature_2m (°C)",
            ],
            lines(rows, lambda r: f"{iso(r.at, '%Y-%m-%dT%H:%M')},{put(r)}"),
        ),
        rows,
        ("temperature_2m (°C)",),
        refusal="line 4|skip_lines",
    )
    hourly = {
        "time": [iso(r.at, "%Y-%m-%dT%H:%M") for r in rows],
        "temperature_2m": [r.values[0] for r in rows],
    }
    yield Case(
        "open_meteo.json",
        json.dumps({"latitude": 48.2, "longitude": 16.4, "hourly": hourly}) + "\n",
        rows,
        ("temperature_2m",),
        refusal="one object|hourly|list",
        free=True,
    )
    rows = drawn("co2", count=48, step=DAY * 31, levels=(420.0,), digits=2)
    months = [
        row._replace(at=datetime(2020 + i // 12, i % 12 + 1, 1, tzinfo=UTC)) for i, row in enumerate(rows)
    ]
    months = without(months, (7,))
    yield Case(
        "noaa_co2_months.csv",
        text(
            ["# Mauna Loa, monthly means", "# missing: -99.99", "year,month,average"],
            lines(months, lambda r: f"{r.at.year},{r.at.month},{put(r, '-99.99')}"),
        ),
        months,
        ("average",),
        refusal="year.*month|month.*year|lines of comments",
    )
    rows = without(drawn("beijing", levels=(60.0, -4.0), digits=0, spread=6.0), (3, 4, 5))
    number = {row.at: i for i, row in enumerate(rows, 1)}
    yield Case(
        "beijing_pm25.csv",
        text(
            ["No,year,month,day,hour,pm2.5,TEMP"],
            lines(
                rows,
                lambda r: (
                    f"{number[r.at]},{r.at.year},{r.at.month},{r.at.day},{r.at.hour},"
                    + ",".join("NA" if v is None else f"{v:.0f}" for v in r.values)
                ),
            ),
        ),
        rows,
        ("pm2.5", "TEMP"),
    )


def energy() -> Iterator[Case]:
    """Inverters, meters, grids."""
    rows = drawn("fronius", levels=(350.0,), step=timedelta(minutes=5), digits=2)
    yield Case(
        "fronius_solarweb.csv",
        text(
            ["Datum und Uhrzeit;Energie | Symo 5.0", "[dd.MM.yyyy HH:mm];[Wh]"],
            lines(rows, lambda r: f"{iso(r.at, '%d.%m.%Y %H:%M')};{put(r, mark=',')}"),
        ),
        rows,
        ("Energie | Symo 5.0",),
        refusal="line 2|units|skip_lines",
        note="rejected",
    )
    rows = drawn("sbfspot", levels=(1234.0, 2.5), step=timedelta(minutes=5), digits=3)
    yield Case(
        "sbfspot_day.csv",
        text(
            [
                "sep=;",
                "Version CSV1|Tool SBFspot3.9|Linebreaks CR/LF|Delimiter semicolon|Decimalpoint dot|Precision 3",
                "",
                ";SN: 2100000000;SN: 2100000000",
                ";SB 5000TL-21;SB 5000TL-21",
                ";2100000000;2100000000",
                ";Total yield;Power",
                ";Counter;Analog",
                "dd/MM/yyyy HH:mm:ss;kWh;kW",
            ],
            lines(rows, lambda r: f"{iso(r.at, '%d/%m/%Y %H:%M:%S')};{put(r, separator=';')}"),
        ),
        rows,
        ("Total yield", "Power"),
    )
    rows = drawn("entsoe", levels=(80.0,), digits=2)
    yield Case(
        "entsoe_prices.csv",
        text(
            ['"MTU (CET/CEST)","Day-ahead Price [EUR/MWh]"'],
            lines(
                rows,
                lambda r: (
                    f'"{local(r.at, "%d.%m.%Y %H:%M")} - {local(r.at + HOUR, "%d.%m.%Y %H:%M")}","{put(r)}"'
                ),
            ),
        ),
        rows,
        ("Day-ahead Price [EUR/MWh]",),
        {"time_zone": "Europe/Berlin"},
        refusal="MTU",
    )
    rows = drawn("eia", ("CAL", "TEX"), levels=(900.0,), digits=0, spread=20.0)
    yield Case(
        "eia_hourly.csv",
        text(
            ["period,respondent,value,value_units"],
            lines(rows, lambda r: f"{iso(r.at, '%Y-%m-%dT%H')},{r.key},{r.values[0]:.0f},megawatthours"),
        ),
        rows,
        ("value",),
    )
    rows = without(drawn("uci", step=timedelta(minutes=1), levels=(4.2, 0.4, 234.0), digits=3), (20, 21))
    yield Case(
        "uci_power.csv",
        text(
            ["Date;Time;Global_active_power;Global_reactive_power;Voltage"],
            lines(
                rows,
                lambda r: f"{r.at.day}/{r.at.month}/{iso(r.at, '%Y;%H:%M:%S')};{put(r, '?', separator=';')}",
            ),
        ),
        rows,
        ("Global_active_power", "Global_reactive_power", "Voltage"),
    )
    rows = without(drawn("london", ("MAC000002", "MAC000003"), step=timedelta(minutes=30), digits=3), (9,))
    yield Case(
        "london_smart_meters.csv",
        text(
            ["LCLid,tstp,energy(kWh/hh)"],
            lines(rows, lambda r: f"{r.key},{iso(r.at, '%Y-%m-%d %H:%M:%S.0000000')},{put(r, 'Null')}"),
        ),
        rows,
        ("energy(kWh/hh)",),
    )
    rows = drawn("hour-ending", ("north", "south"), levels=(400.0,))
    yield Case(
        "iso_hour_ending.csv",
        text(
            ["date,hour,station,load"],
            lines(rows, lambda r: f"{iso(r.at, '%Y-%m-%d')},{r.at.hour},{r.key},{put(r)}"),
        ),
        rows,
        ("load",),
        refusal="date.*hour|hour.*date",
    )
    quarter = timedelta(minutes=15)
    night = datetime(2024, 10, 26, 18, tzinfo=UTC)
    rows = drawn("dst", ("meter-1", "meter-2"), step=quarter, start=night)
    by_key = sorted(rows, key=lambda r: r.key)
    yield Case(
        "vienna_clock_change.csv",
        text(
            ["meter,at,kwh"],
            lines(by_key, lambda r: f"{r.key},{local(r.at, '%Y-%m-%d %H:%M', VIENNA)},{put(r)}"),
        ),
        by_key,
        ("kwh",),
        {"time_zone": "Europe/Vienna"},
    )
    rows = drawn("wide", tuple(f"st{i:02d}" for i in range(12)), count=48)
    names = [f"st{i:02d}" for i in range(12)]
    yield Case(
        "wide_stations.csv",
        text(
            ["date," + ",".join(names)],
            (
                iso(rows[i].at, "%Y-%m-%d %H:%M") + "," + ",".join(put(r) for r in rows[i : i + 12])
                for i in range(0, len(rows), 12)
            ),
        ),
        rows,
        ("value",),
        refusal="wide",
        note="wide",
        free=True,
    )


def tracks() -> Iterator[Case]:
    """Devices that move, and prices."""
    rows = drawn("gpx", step=timedelta(seconds=1), levels=(48.2, 16.4, 180.0, 120.0), digits=4, spread=0.01)
    yield Case(
        "gpx_to_csv.csv",
        text(["time,lat,lon,ele,hr"], lines(rows, lambda r: f"{iso(r.at)},{put(r)}")),
        rows,
        ("lat", "lon", "ele", "hr"),
    )
    days = [
        row._replace(at=START + timedelta(days=i // 5 * 7 + i % 5))
        for i, row in enumerate(drawn("yfinance", count=50, levels=(180.0, 182.0, 178.0, 181.0), digits=2))
    ]
    yield Case(
        "yfinance_history.csv",
        text(
            ["Date,Open,High,Low,Close"],
            lines(days, lambda r: f"{iso(r.at, '%Y-%m-%d 00:00:00-05:00')},{put(r)}"),
        ),
        [row._replace(at=row.at + timedelta(hours=5)) for row in days],
        ("Open", "High", "Low", "Close"),
    )
    yield Case(
        "yfinance_download.csv",
        text(
            ["Price,Close,High,Low,Open", "Ticker,AAPL,AAPL,AAPL,AAPL", "Date,,,,"],
            lines(days, lambda r: f"{iso(r.at, '%Y-%m-%d')},{put(r)}"),
        ),
        days,
        ("Close", "High", "Low", "Open"),
        refusal="skip_lines|line [23]|units",
        note="rejected",
    )


def packages() -> Iterator[Case]:
    """Packages of statistics and numbers, with epochs of their own."""
    rows = drawn("pandas-index", levels=(20.0,))
    yield Case(
        "pandas_unnamed_index.csv",
        text([",value"], lines(rows, lambda r: f"{iso(r.at, '%Y-%m-%d %H:%M:%S')},{put(r)}")),
        rows,
        ("value",),
        refusal="no name.*(rename|index)",
    )
    rows = drawn("pandas-range", ("a", "b"))
    place = {(r.key, r.at): i for i, r in enumerate(rows)}
    yield Case(
        "pandas_range_index.csv",
        text(
            [",at,sensor,value"],
            lines(rows, lambda r: f"{place[r.key, r.at]},{iso(r.at, '%Y-%m-%d %H:%M:%S')},{r.key},{put(r)}"),
        ),
        rows,
        ("value",),
    )
    rows = drawn("r-rownames", step=DAY)
    place = {("", r.at): i for i, r in enumerate(rows, 1)}
    yield Case(
        "r_row_names.csv",
        text(
            ['"","date","value"'],
            lines(rows, lambda r: f'"{place["", r.at]}",{iso(r.at, "%Y-%m-%d")},{put(r)}'),
        ),
        rows,
        ("value",),
    )
    yield from _day_counts()
    rows = drawn("decimal-year", count=48, start=datetime(2020, 1, 1, tzinfo=UTC))
    months = [
        row._replace(at=datetime(2020 + i // 12, i % 12 + 1, 1, tzinfo=UTC)) for i, row in enumerate(rows)
    ]
    yield Case(
        "decimal_years.csv",
        text(["decimal_date,value"], lines(months, lambda r: f"{_decimal_year(r.at):.6f},{put(r)}")),
        months,
        ("value",),
        refusal="decimal_date",
        within=60.0,
    )
    rows = drawn("yymmddhhmm", count=60, start=datetime(2020, 1, 1, tzinfo=UTC))
    yield Case(
        "logger_yymmddhhmm.csv",
        text(["time,value"], lines(rows, lambda r: f"{iso(r.at, '%y%m%d%H%M')},{put(r)}")),
        rows,
        ("value",),
        refusal="time",
        note="note: time: ",
    )
    rows = [
        row._replace(at=datetime(2018 + i // 12, i % 12 + 1, 1, tzinfo=UTC))
        for i, row in enumerate(drawn("stata-month", count=60))
    ]
    yield Case(
        "stata_months.csv",
        text(["month,value"], lines(rows, lambda r: f"{r.at.year}m{r.at.month},{put(r)}")),
        rows,
        ("value",),
        refusal="month",
    )


def _decimal_year(at: datetime) -> float:
    first, last = (datetime(at.year + i, 1, 1, tzinfo=UTC) for i in (0, 1))
    return at.year + (at - first) / (last - first)


def _day_counts() -> Iterator[Case]:
    """Numbers that count days or other units from another beginning."""
    counts = (
        ("r_date_numbers.csv", "date", datetime(1970, 1, 1, tzinfo=UTC), DAY, DAY, 0, 0.0),
        ("sas_dates.csv", "DATE", datetime(1960, 1, 1, tzinfo=UTC), DAY, DAY, 0, 0.0),
        (
            "sas_datetimes.csv",
            "DATETIME",
            datetime(1960, 1, 1, tzinfo=UTC),
            timedelta(seconds=1),
            HOUR,
            0,
            0.0,
        ),
        (
            "stata_clock.csv",
            "time",
            datetime(1960, 1, 1, tzinfo=UTC),
            timedelta(milliseconds=1),
            HOUR,
            0,
            0.0,
        ),
        ("matlab_datenum.csv", "t", datetime(1970, 1, 1, tzinfo=UTC), DAY, HOUR, 9, 719529.0),
        ("julian_days.csv", "jd", datetime(1970, 1, 1, tzinfo=UTC), DAY, HOUR * 6, 2, 2440587.5),
    )
    for file, name, since, unit, step, digits, first in counts:
        rows = drawn(file, step=step)
        yield Case(
            file,
            text(
                [f"{name},value"],
                (f"{first + (r.at - since) / unit:.{digits}f},{put(r)}" for r in rows),
            ),
            rows,
            ("value",),
            {"time": name},
            refusal=name,
            note=f"note: {name}: " if file in ("r_date_numbers.csv", "sas_dates.csv") else None,
        )


def stored() -> Iterator[Case]:
    """Parquet and ORC."""
    rows = drawn("pandas-ns", levels=(20.0,))
    at = [row.at.replace(tzinfo=None) for row in rows]
    values = [row.values[0] for row in rows]
    yield Case(
        "pandas_nanoseconds.parquet",
        _parquet({"time": pa.array(at, pa.timestamp("ns")), "value": values}),
        rows,
        ("value",),
    )
    rows = drawn("pandas-zone", ("x", "y"))
    yield Case(
        "pandas_time_zone.parquet",
        _parquet(
            {
                "at": pa.array([r.at for r in rows], pa.timestamp("ns", "Europe/Berlin")),
                "sensor": [r.key for r in rows],
                "value": [r.values[0] for r in rows],
            }
        ),
        rows,
        ("value",),
    )
    rows = drawn("local-parquet", ("x", "y"))
    yield Case(
        "naive_local_times.parquet",
        _parquet(
            {
                "at": pa.array(
                    [r.at.astimezone(BERLIN).replace(tzinfo=None) for r in rows], pa.timestamp("us")
                ),
                "sensor": [r.key for r in rows],
                "value": [r.values[0] for r in rows],
            }
        ),
        rows,
        ("value",),
        {"time_zone": "Europe/Berlin"},
    )
    rows = without(drawn("sentinel", ("x", "y"), levels=(50.0,)), tuple(range(7, 100, 9)))
    yield Case(
        "missing_as_minus_999.parquet",
        _parquet(
            {
                "at": pa.array([r.at for r in rows], pa.timestamp("ms", "UTC")),
                "station": pa.array([r.key for r in rows]).dictionary_encode(),
                "value": [-999.0 if r.values[0] is None else r.values[0] for r in rows],
            }
        ),
        rows,
        ("value",),
        note="-999",
    )
    rows = drawn("hive", ("x", "y"))
    out = io.BytesIO()
    orc.write_table(
        pa.table(
            {
                "at": pa.array([r.at for r in rows], pa.timestamp("ns", "UTC")),
                "sensor": [r.key for r in rows],
                "value": [r.values[0] for r in rows],
            }
        ),
        out,
    )
    yield Case("hive.orc", out.getvalue(), rows, ("value",))


def _parquet(columns: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, compression="zstd")
    return out.getvalue()


def cases() -> list[Case]:
    """Return the cases of the corpus."""
    makers = (homes, monitoring, spreadsheets, weather, energy, tracks, packages, stored)
    return [case for make in makers for case in make()]


def name_of(case: Case) -> str:
    """Return the name of a case: its file's, with the ending as part of it."""
    return case.file.replace(".", "_")


def golden(case: Case) -> str:
    """Return the right rows as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["key", "time", *case.measured])
    for row in case.rows:
        values = ["" if value is None else repr(float(value)) for value in row.values]
        writer.writerow([row.key, row.at.isoformat(), *values])
    return out.getvalue()


def main() -> None:
    """Write the files, the right rows and what is expected."""
    expected: dict[str, Any] = {}
    for folder in ("files", "golden"):
        (HERE / folder).mkdir(exist_ok=True)
    for case in cases():
        path = HERE / "files" / case.file
        if isinstance(case.content, bytes):
            path.write_bytes(case.content)
        else:
            path.write_bytes(case.content.encode())
        (HERE / "golden" / f"{name_of(case)}.csv").write_text(golden(case))
        expected[name_of(case)] = {
            "file": case.file,
            "options": case.options,
            "refusal": case.refusal,
            "note": case.note,
            "free": case.free,
            "within": case.within,
        }
    (HERE / "expected.json").write_text(json.dumps(expected, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
