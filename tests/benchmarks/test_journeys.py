"""The benchmark of journeys: sizes, files, checks, results and table. No Spark, and no time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml

from benchmarks.contenders.estimate_files import compare_files, read_readings, sort_readings
from benchmarks.suites import journeys
from benchmarks.suites.journeys import (
    GROUPS,
    JOURNEY,
    WORKS,
    Bench,
    Taken,
    add_up,
    build_table,
    check_count,
    check_equal,
    merge,
    summarise,
)
from benchmarks.workloads import journey_files as files
from benchmarks.workloads.processes import run_process
from jobs.cli import VERBS
from jobs.specs.loading import load_spec

BEGUN = {"commit": "abc", "measured_at": "now", "load_before": 0.1}


def test_sizes_at_scale_one_are_those_of_the_promise() -> None:
    sizes = files.build_sizes(1.0)
    assert (sizes.keys, sizes.series_rows, sizes.own_rows) == (1_000_000, 2_600_000, 100_000)
    assert (len(files.FIRST), len(files.SECOND), len(files.THIRD)) == (8, 2, 1)


def test_a_small_scale_still_has_rows_of_several_keys() -> None:
    assert files.build_sizes(0.005) == (5_000, 13_000, 2)
    assert min(files.build_sizes(1e-9)) >= 2


def test_every_key_has_a_row_in_each_minute(tmp_path: Path) -> None:
    files.write_minutes(tmp_path / "csv", files.SECOND, 30)
    files.write_halves(tmp_path / "halves", files.SECOND, 30)
    landed, whole = read_readings(tmp_path / "csv"), read_readings(tmp_path / "halves")
    for table in (landed, whole):
        keys, times, order = sort_readings(table)
        assert np.bincount(keys).tolist() == [2] * 30
        assert (np.diff(times[order].reshape(30, 2), axis=1) == 60_000_000).all()
    assert files.count_file_rows(tmp_path / "halves") == 60
    names = [set(pq.read_table(one)["sensor"].to_pylist()) for one in (tmp_path / "halves").iterdir()]
    assert names[0].isdisjoint(names[1])


def test_the_long_series_has_a_row_each_second(tmp_path: Path) -> None:
    files.write_series(tmp_path / "series.parquet", 50)
    keys, times, _ = sort_readings(read_readings(tmp_path / "series.parquet"))
    assert set(keys) == {0} and set(np.diff(times)) == {1_000_000}


def test_the_own_file_has_all_rows(tmp_path: Path) -> None:
    files.write_own(tmp_path / "own.csv", 3)
    table = pyarrow.csv.read_csv(tmp_path / "own.csv")
    assert table.column_names == ["sensor", "at", "value"]
    assert table.num_rows == 3 * files.ROWS_OF_OWN


@pytest.mark.parametrize("unit", ["minute", "second"])
def test_the_spec_is_valid(tmp_path: Path, unit: str) -> None:
    (tmp_path / "readings.yaml").write_text(files.build_spec("readings", unit))
    spec = load_spec(str(tmp_path / "readings.yaml"), tmp_path)
    assert (spec.name, list(spec.key), spec.time_unit) == ("readings", ["sensor"], unit)


def test_every_work_has_a_verb_of_the_command_line_or_is_the_floor() -> None:
    named = {verb for work in WORKS.values() for verb in VERBS if f"`{verb}" in work.text}
    assert {"init", "ingest", "pretrain", "stream", "estimate", "filter", "forecast", "plot"} <= named
    assert set(JOURNEY) < set(WORKS)
    assert set(GROUPS) == {"ingest", "journey", "filter", "series", "own", "floor"}


def test_the_journey_is_the_sum_of_its_commands() -> None:
    parts = [Taken("pretrain", "ours", 5, 2.0, 300.0), Taken("stream_first", "ours", 5, 3.0, 200.0)]
    assert add_up("journey", 10, parts) == Taken("journey", "ours", 10, 5.0, 300.0)


def taken(work: str, what: str, seconds: float, **inside: float) -> Taken:
    return Taken(work, what, 1_000, seconds, 50.0, inside)


def test_results_have_medians_and_ratios_within_a_round() -> None:
    rounds = [
        [
            taken("series_filter", "ours", 2.0),
            taken("series_filter", "statsmodels", 8.0, **{"filter alone": 1.0}),
        ],
        [
            taken("series_filter", "ours", 4.0),
            taken("series_filter", "statsmodels", 4.0, **{"filter alone": 3.0}),
        ],
    ]
    ours, peer = summarise(rounds, BEGUN, full=True)
    assert ours["seconds"] == {"min": 2.0, "median": 3.0, "max": 4.0}
    assert (ours["samples"], ours["goal_s"], ours["commit"]) == (2, 3, "abc")
    assert peer["ours_times_as_fast"] == {"min": 1.0, "median": 2.5, "max": 4.0}
    assert peer["inside_s"]["filter alone"]["median"] == 2.0
    assert "goal_s" not in summarise(rounds, BEGUN, full=False)[0]
    json.dumps([ours, peer])


def floor_and_filter() -> list[dict[str, Any]]:
    parts = {"read": 1e-5, "sort": 2e-5, "filter": 3e-5, "write": 4e-5}
    rounds = [
        [
            taken("filter_parquet", "ours", 4.0),
            taken("floor", "one process", 1e-4, **parts),
            taken("floor", "two processes", 1.0),
        ]
    ]
    return summarise(rounds, BEGUN, full=True)


def test_the_floor_of_the_same_run_is_the_yardstick() -> None:
    found = merge(floor_and_filter(), [])
    assert found[0]["vs_floor"] == 0.25
    one, two = floor_and_filter()[0], floor_and_filter()[1:]
    older = [{**other, "measured_at": "then"} for other in two]
    assert "vs_floor" not in merge([one], older)[0]


def test_works_that_were_not_measured_again_keep_their_results() -> None:
    before = summarise([[taken("ingest_1_file", "ours", 9.0), taken("pretrain", "ours", 9.0)]], BEGUN, True)
    new = summarise([[taken("pretrain", "ours", 1.0)]], BEGUN, True)
    merged = merge(new, before)
    assert [(one["work"], one["seconds"]["median"]) for one in merged] == [
        ("ingest_1_file", 9.0),
        ("pretrain", 1.0),
    ]


def test_results_of_another_scale_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "journeys.json"
    assert journeys.read_results(path, 1.0) == []
    path.write_text(json.dumps({"scale": 0.5, "results": [{"work": "pretrain"}]}))
    assert journeys.read_results(path, 1.0) == []
    assert journeys.read_results(path, 0.5) == [{"work": "pretrain"}]


def test_the_table_says_in_words_who_did_what() -> None:
    found = merge(floor_and_filter(), [])
    lines = build_table(found).splitlines()
    assert lines[2] == (
        "| `filter` of Parquet, without Spark | 1,000 | ours | 4.00 (4.00 to 4.00) | 250 | 50 |  | 0.250 | 8 |"
    )
    assert lines[-1] == "The floor in one process takes 100 ns a row: read 10, sort 20, filter 30, write 40."
    peer = summarise([[taken("series_filter", "statsmodels", 8.0, **{"filter alone": 1.0})]], BEGUN, True)
    assert "statsmodels (its filter alone 1.00 s)" in build_table(peer)


def test_lost_rows_and_other_estimates_end_the_measurement(tmp_path: Path) -> None:
    check_count("rows", 3, 3)
    with pytest.raises(ValueError, match="rows: 2 rows, not 3"):
        check_count("rows", 2, 3)
    for name, mean in (("a", 1.0), ("b", 1.0 + 1e-12), ("c", 1.1)):
        pq.write_table(pyarrow.table({"mean": [[mean, 2.0]]}), tmp_path / name)
    check_equal("series", "peer", tmp_path / "a", tmp_path / "b", ("mean",))
    with pytest.raises(ValueError, match="series: the estimates of peer differ from ours by 1"):
        check_equal("series", "peer", tmp_path / "a", tmp_path / "c", ("mean",))


@pytest.mark.parametrize("mode", ["filter", "smooth", "forecast"])
def test_statsmodels_does_the_same_work(tmp_path: Path, mode: str) -> None:
    from benchmarks.contenders import one_series
    from jobs import filter, forecast
    from jobs.core.settings import Settings

    files.write_series(tmp_path / "series.parquet", 200)
    (tmp_path / "readings.yaml").write_text(files.build_spec("readings", "second"))
    one_series.main(mode, tmp_path / "series.parquet", tmp_path / "peer.parquet")
    settings = Settings.load(warehouse=str(tmp_path / "warehouse"), models=str(tmp_path), quiet=True)
    source, target = str(tmp_path / "series.parquet"), str(tmp_path / "ours.parquet")
    if mode == "forecast":
        forecast.run(
            settings, "readings", input=source, output=target, steps=journeys.STEPS, all_columns=True
        )
    else:
        filter.run(settings, "readings", source, target, smooth=mode == "smooth")
    columns = journeys.SERIES_COLUMNS[mode]
    assert compare_files(tmp_path / "ours.parquet", tmp_path / "peer.parquet", columns) < journeys.TOLERANCE


def test_the_floor_estimates_every_row(tmp_path: Path) -> None:
    from benchmarks.contenders.floor import PARTS, filter_file

    files.write_halves(tmp_path / "halves", files.SECOND, 20)
    (tmp_path / "readings.yaml").write_text(files.build_spec("readings", "minute"))
    source, target = tmp_path / "halves" / "half-0.parquet", tmp_path / "out.parquet"
    parts = filter_file(str(tmp_path / "readings.yaml"), str(source), str(target))
    assert tuple(parts) == PARTS
    table = pq.read_table(target)
    assert table.num_rows == 20 and not np.isnan(table["mean"].combine_chunks().flatten().to_numpy()).any()


def test_a_failed_command_ends_the_measurement_with_its_words() -> None:
    run = run_process([sys.executable, "-c", "print('done')"], {})
    assert run.output == "done\n" and run.seconds > 0
    with pytest.raises(RuntimeError, match="exit code 1: .*no such thing"):
        run_process([sys.executable, "-c", "raise SystemExit('no such thing')"], {})


def test_files_are_written_once_and_a_warehouse_is_empty_each_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path, files.build_sizes(1e-5), alone=True)
    first = bench.prepare_minutes("third", files.THIRD)
    changed = next(first.iterdir()).stat().st_mtime_ns
    assert next(bench.prepare_minutes("third", files.THIRD).iterdir()).stat().st_mtime_ns == changed
    verbs = bench.start("readings", files.build_spec("readings", "minute"))
    verbs.warehouse.mkdir()
    assert not bench.start("readings", None).warehouse.exists()
    assert bench.list_contenders("copy", "statsmodels") == []
    assert yaml.safe_load(files.build_spec("readings", "minute"))["measurement"] == ["value"]


def test_results_of_a_trial_do_not_replace_the_published_ones() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.suites.journeys", "--scale", "0.01"],
        capture_output=True,
        text=True,
        cwd=journeys.results.ROOT,
    )
    assert done.returncode == 2 and "give their results another file" in done.stderr
