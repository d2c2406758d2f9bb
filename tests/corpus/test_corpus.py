"""Files as exporters write them: `init`, `filter`, `ingest` and `estimate --input` read each one as a person would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from jobs import filter, init
from jobs.core.errors import UserError
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.specs.loading import load_spec
from jobs.specs.model_spec import ModelSpec
from tests.corpus import make
from tests.corpus.reading import EXPECTED, differences, file_of, filtered_rows, landed_rows, right_rows

KNOWN = {
    "node_red_jsonl": "init reads no JSON",
    "ttn_flat_jsonl": "init reads no JSON",
    "ttn_nested_jsonl": "init reads no JSON",
    "prometheus_samples_jsonl": "init reads no JSON",
    "elastic_hits_ndjson": "init reads no JSON",
    "rest_pretty_json": "init reads no JSON",
    "open_meteo_json": "init reads no JSON",
    "mqtt_glued_json": "JSON objects that are glued together, and init reads no JSON",
    "influx_annotated_csv": "class 14",
    "grafana_for_excel_csv": "class 14",
    "campbell_toa5_csv": "class 14",
    "open_meteo_csv": "class 14",
    "fronius_solarweb_csv": "class 14",
    "sbfspot_day_csv": "class 14",
    "thingspeak_feed_csv": "class 13",
    "bigquery_export_csv": "class 13",
    "bigquery_fractions_csv": "class 13",
    "excel_american_csv": "class 13",
    "eia_hourly_csv": "class 13",
    "grafana_joined_csv": "class 15",
    "davis_weatherlink_csv": "class 15",
    "london_smart_meters_csv": "class 15",
    "pandas_unnamed_index_csv": "class 15",
    "excel_german_date_and_time_csv": "class 1",
    "beijing_pm25_csv": "class 1",
    "uci_power_csv": "class 1",
    "iso_hour_ending_csv": "class 1",
    "ghcn_by_year_csv": "class 2",
    "r_date_numbers_csv": "class 2",
    "sas_dates_csv": "class 2",
    "sas_datetimes_csv": "class 2",
    "stata_clock_csv": "class 2",
    "matlab_datenum_csv": "class 2",
    "julian_days_csv": "class 2",
    "decimal_years_csv": "class 2",
    "logger_yymmddhhmm_csv": "class 2",
    "vienna_clock_change_csv": "class 5",
    "missing_as_minus_999_parquet": "class 3",
    "excel_trailing_separators_csv": "class 19",
    "wide_stations_csv": "class 16",
}
"""Cases that are not read rightly yet, and their class in the issue; each must go when its class is mended."""


def all_cases() -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.xfail(reason=KNOWN[name], strict=True, raises=AssertionError))
        if name in KNOWN
        else name
        for name in EXPECTED
    ]


def settings_of(folder: Path) -> Settings:
    return Settings.load(str(folder / "warehouse"), str(folder / "models"), None)


def begun(folder: Path, name: str) -> tuple[Report, ModelSpec]:
    """Return what `init` says of a case's file, and the spec that it writes."""
    wishes = EXPECTED[name]["options"]
    done = init.run(
        settings_of(folder), str(file_of(name)), name="case", quick=True, no_picture=True, **wishes
    )
    return done, load_spec("case", folder / "models")


@pytest.mark.parametrize("name", all_cases())
def test_a_file_is_read_as_its_exporter_meant_it_or_refused_with_a_remedy(tmp_path: Path, name: str) -> None:
    expected, path = EXPECTED[name], file_of(name)
    try:
        done, spec = begun(tmp_path, name)
    except UserError as refusal:
        pattern, said = expected["refusal"], str(refusal).replace(str(path), "")
        assert pattern is not None and re.search(pattern, said), said
        return
    read = filtered_rows(spec, path)
    assert read.ordered == landed_rows(settings_of(tmp_path), spec, path).ordered
    said = "\n".join(done.lines).replace(str(path), "")
    found = differences(right_rows(name), read, expected["free"], expected["within"])
    note = expected["note"]
    assert not found or (note is not None and re.search(note, said)), (found[:3], said)
    out = tmp_path / "out.parquet"
    data = filter.run(settings_of(tmp_path), "case", str(path), str(out)).data
    assert (data["rows"], data["rejected"]) == (len(read.rows) + read.rejected, read.rejected)


def test_the_generator_gives_the_files_that_are_kept() -> None:
    cases = make.cases()
    assert list(EXPECTED) == [make.name_of(case) for case in cases] and len(cases) >= 50
    kept = {path.name for path in (make.HERE / "files").iterdir()}
    assert kept == {case.file for case in cases}
    for case in cases:
        assert (make.HERE / "golden" / f"{make.name_of(case)}.csv").read_text() == make.golden(case)
        if isinstance(case.content, str):
            assert file_of(make.name_of(case)).read_bytes() == case.content.encode()
