"""History's estimates: the bits of the stream and of the filter alone; intervals replaced, never doubled; kills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest

from jobs import estimate
from jobs import filter as offline
from jobs.batch import estimating
from jobs.core.errors import UserError
from jobs.core.report import Report
from jobs.storage.tables import estimates_history
from tests.jobs.batch import small_commits
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, ordered, random_rows, random_walk_spec
from tests.jobs.support.processes import Driver
from tests.jobs.test_kinds import EXPLICIT, FUNCTIONS, KINDS, MODULE

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("tasks_of_spark")]

TABLE = estimates_history("walk")
OUTPUTS: dict[str, Any] = {
    "innovation": True,
    "residual": True,
    "matrices": ["F", "H", "Q", "R"],
    "state_index": True,
    "sliding_log_likelihood": 4,
}
STREAMED: dict[str, dict[str, Any]] = {
    "linear": {"outputs": {"innovation": True, "covariance": "diagonal"}},
    "unscented": FUNCTIONS,
    "duplicates, in any order": {"order": {"kind": "replay", "rows": 40}, "duplicates": {}},
}
ALONE: dict[str, dict[str, Any]] = {
    "extended": KINDS["angles by differences"],
    "mixture": KINDS["mixture"],
    "imm": KINDS["imm"],
    "expiry": {"expiry": {"after": "6h"}},
    "gated": KINDS["gated"],
    "fixed lag": KINDS["fixed lag"],
    "stored in 32 bits": {"storage": {"dtype": "float32"}},
}
RLS: dict[str, Any] = {
    "filter": "rls",
    "measurement": ["a"],
    "control": ["b"],
    "states": ["slope"],
    "process": None,
    "observation": None,
    "initial": None,
    "rls": {"forgetting": 0.99, "delta": 1.0},
}
SMOOTHED: dict[str, dict[str, Any]] = {
    "linear": {"outputs": OUTPUTS},
    "extended": KINDS["angles by differences"],
    "imm": KINDS["imm"],
    "expiry": {"expiry": {"after": "6h"}},
}


def pipeline_of(folder: Path, **changes: Any) -> Pipeline:
    """Return a pipeline whose functions are beside its spec."""
    pipeline = Pipeline(folder, random_walk_spec())
    (pipeline.settings.models / "sideways.py").write_text(MODULE)
    pipeline.write_spec(random_walk_spec(**changes))
    return pipeline


def estimated(pipeline: Pipeline, **options: Any) -> Report:
    return estimate.run(pipeline.settings, "walk", **options)


def history(pipeline: Pipeline, table: str = TABLE) -> pd.DataFrame:
    return ordered(pipeline.warehouse.read(table).toPandas())


def alone(pipeline: Pipeline, *frames: pd.DataFrame, **options: Any) -> pd.DataFrame:
    """Return what the filter without Spark gives for the rows that it accepts, with the names of the estimates."""
    rows, out = pipeline.folder / "alone-in.parquet", pipeline.folder / "alone-out.parquet"
    pd.concat(frames).to_parquet(rows, index=False)
    offline.run(pipeline.settings, "walk", str(rows), str(out), **options)
    found = pd.read_parquet(out).rename(columns={"id": "key", "at": "event_time", "flag": "flags"})
    found = found.loc[~found["flags"].fillna("").str.startswith("rejected")].astype({"key": str})
    found["event_time"] = found["event_time"].dt.tz_localize(None)
    return ordered(found)


def lists_equal(found: pd.DataFrame, expected: pd.DataFrame, columns: list[str]) -> None:
    for name in columns:
        np.testing.assert_array_equal(np.stack(found[name].to_list()), np.stack(expected[name].to_list()))


def commits(pipeline: Pipeline, table: str = TABLE) -> list[dict[str, Any]]:
    """Return the metadata of the table's commits of estimates, in their order."""
    log = Path(pipeline.settings.warehouse, table, "_delta_log")
    infos = [json.loads(path.read_text().splitlines()[0]) for path in sorted(log.glob("*.json"))]
    texts = [one.get("commitInfo", {}).get("userMetadata") for one in infos]
    return [json.loads(text) for text in texts if text]


def some_slow(kinds: dict[str, Any], *quick: str) -> list[Any]:
    """Return the kinds, all but the quick ones marked as slow."""
    return [pytest.param(kind, marks=[] if kind in quick else pytest.mark.slow) for kind in kinds]


@pytest.mark.core
@pytest.mark.parametrize("kind", some_slow(STREAMED, "duplicates, in any order"))
def test_history_is_the_stream_over_the_same_rows(tmp_path: Path, kind: str) -> None:
    pipeline = pipeline_of(tmp_path, **STREAMED[kind])
    days = random_rows(2, rows=60, text=kind == "linear")
    if "duplicates" in STREAMED[kind]:
        days = [day.drop_duplicates(["id", "at"]) for day in days]
        days[1] = pd.concat([days[1], days[1].head(5)])
    pipeline.land(days[0])
    pipeline.pretrain(to_version=0)
    pipeline.land(*days[1:])
    pipeline.stream()
    report = estimated(pipeline)
    found, streamed = history(pipeline), pipeline.estimates()
    assert report.data["rows"] == len(found) == sum(map(len, days)) - 5 * ("duplicates" in STREAMED[kind])
    assert_bit_equal(found, streamed)
    # A reader of the live estimates finds the same columns, the run in the place of the generation.
    assert set(streamed.columns) - set(found.columns) <= {"source_range", "correction"}
    assert set(found["generation"]) == {report.data["run"]}
    if "outputs" in STREAMED[kind]:
        lists_equal(found, streamed, ["innovation"])


@pytest.mark.parametrize("kind", some_slow(ALONE, "mixture"))
def test_history_is_the_filter_alone_over_the_same_rows(tmp_path: Path, kind: str) -> None:
    pipeline = pipeline_of(tmp_path, **ALONE[kind])
    days = random_rows(2, rows=60)
    pipeline.land(*days)
    estimated(pipeline)
    expected = alone(pipeline, *days)
    assert len(expected) == 120
    found = history(pipeline)
    assert_bit_equal(found, expected)
    extra = [name for name, _ in pipeline_outputs(pipeline)]
    lists_equal(found, expected, extra)


def pipeline_outputs(pipeline: Pipeline) -> list[tuple[str, int]]:
    """Return the names and widths of the outputs that a model's filter has beside the usual ones."""
    import kalman

    return list(kalman.build(pipeline.spec.definition()).outputs.items())


def test_recursive_least_squares_with_a_control(tmp_path: Path) -> None:
    days = [day.dropna() for day in random_rows(2, rows=80)]
    pipeline = pipeline_of(tmp_path, **RLS)
    pipeline.land(*days)
    estimated(pipeline)
    assert_bit_equal(history(pipeline), alone(pipeline, *days))


@pytest.mark.parametrize("kind", some_slow(SMOOTHED, "expiry"))
def test_smoothing_on_spark_is_smoothing_alone(tmp_path: Path, kind: str) -> None:
    pipeline = pipeline_of(tmp_path, **SMOOTHED[kind])
    days = random_rows(2, rows=60)
    pipeline.land(*days)
    estimated(pipeline, smooth=True)
    found, expected = history(pipeline), alone(pipeline, *days, smooth=True)
    assert_bit_equal(found, expected)
    smoothed = [name for name in expected.columns if name.startswith("smoothed_")]
    assert {"smoothed_mean", "smoothed_covariance"} <= set(smoothed)
    lists_equal(found, expected, [*smoothed, *pipeline.spec.outputs.columns])


def test_what_cannot_be_smoothed_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    pipeline = pipeline_of(tmp_path, **KINDS["mixture"])
    pipeline.land(random_rows(1, rows=20)[0])
    with pytest.raises(UserError, match="--smooth: walk: .*cannot be smoothed"):
        estimated(pipeline, smooth=True)
    assert not pipeline.warehouse.exists(TABLE)


def test_an_interval_begins_from_the_states_before_it_and_replaces_its_rows_alone(tmp_path: Path) -> None:
    days = random_rows(3)
    pipeline = pipeline_of(tmp_path)
    pipeline.land(pd.concat(days[:2]), days[2])
    interval = {"since": "2024-03-02", "to": "2024-03-03"}
    # Without a snapshot, the rows before the interval are filtered.
    first = estimated(pipeline, **interval).data
    assert (first["rows"], first["rows_before"], first["began_from_states"]) == (150, 150, False)
    everything = alone(pipeline, *days)
    day = everything["event_time"].dt.day
    assert_bit_equal(history(pipeline), everything.loc[day == 2].reset_index(drop=True))

    # With one that reflects just the rows before, they are not read. Its run replaces the other's rows.
    snapshot = pipeline.pretrain(as_of="2024-03-02").data["snapshot"]
    second = estimated(pipeline, **interval).data
    assert (second["rows"], second["rows_before"], second["began_from_states"]) == (150, 0, True)
    assert second["snapshot"] == snapshot and second["run"] != first["run"]
    found = history(pipeline)
    assert_bit_equal(found, everything.loc[day == 2].reset_index(drop=True))
    assert set(found["generation"]) == {second["run"]}

    # Other intervals stay.
    estimated(pipeline, since="2024-03-03")
    estimated(pipeline, to="2024-03-02")
    assert_bit_equal(history(pipeline), everything)
    assert sorted(history(pipeline).groupby("generation").size()) == [150, 150, 150]

    # A row before the interval has landed since the snapshot: its states are not what a pass gives, so it is not used.
    late = days[0].head(1).assign(at=days[0]["at"].head(1) + pd.Timedelta("17s"), a=3.0, b=1.0)
    pipeline.land(late)
    third = estimated(pipeline, **interval).data
    assert (third["rows"], third["rows_before"], third["began_from_states"]) == (150, 151, False)
    now, again = history(pipeline), alone(pipeline, late, *days)
    assert_bit_equal(
        now.loc[now["event_time"].dt.day == 2].reset_index(drop=True),
        again.loc[again["event_time"].dt.day == 2].reset_index(drop=True),
    )


def test_a_run_that_has_ended_is_not_made_again_unless_another_has_replaced_it(tmp_path: Path) -> None:
    pipeline = pipeline_of(tmp_path)
    days = random_rows(2, rows=60)
    pipeline.land(days[0])
    made = estimated(pipeline).data
    again = estimated(pipeline).data
    assert made["made"] and not again["made"] and again["run"] == made["run"]
    assert len(commits(pipeline)) == made["commits"] == 1
    before = history(pipeline)
    smooth = estimated(pipeline, smooth=True).data
    assert smooth["run"] != made["run"] and len(history(pipeline)) == 60
    back = estimated(pipeline).data
    assert back["made"] and back["run"] == made["run"]
    assert_bit_equal(history(pipeline), before)
    # New rows are another run.
    pipeline.land(days[1])
    more = estimated(pipeline).data
    assert more["run"] != made["run"] and more["rows"] == 120
    assert_bit_equal(history(pipeline), alone(pipeline, *days))


class SmallCommits(Driver):
    """`estimate` as a process of its own, with commits of a few rows."""

    module: ClassVar[str] = "tests.jobs.batch.small_commits"


@pytest.mark.slow
def test_a_run_killed_between_write_and_commit_is_continued_after_its_last_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipeline_of(tmp_path)
    days = random_rows(2, rows=80)
    pipeline.land(*days)
    folder = Path(pipeline.settings.warehouse, TABLE)
    driver = SmallCommits(pipeline, "estimate", "--model", "walk")

    def writing() -> bool:
        """Tell if two commits are there, and a file that none of them has."""
        there = {path.name for path in folder.glob("*.parquet")}
        texts = [path.read_text() for path in (folder / "_delta_log").glob("*.json")]
        return len(texts) == 3 and any(
            name not in "".join(texts) for name in there
        )  # the first makes the table

    driver.wait_for(writing)
    driver.kill()
    kept = commits(pipeline)
    assert len(kept) == 2
    partial = history(pipeline)
    assert 0 < len(partial) < 160 and not partial.duplicated(["key", "event_time", "log_likelihood"]).any()

    # Rows that land meanwhile are for the next run: this one ends as it began.
    pipeline.land(random_rows(3, rows=80)[2])
    monkeypatch.setattr(estimating, "ROWS_A_COMMIT", small_commits.ROWS)
    report = estimated(pipeline).data
    assert report["continued"] and report["commits"] == 2 and report["version"] == kept[0]["version"]
    assert [one["slices"] for one in commits(pipeline)] == [[i << 14, (i + 1) << 14] for i in range(4)]
    assert {one["run"] for one in commits(pipeline)} == {report["run"]}
    assert_bit_equal(history(pipeline), alone(pipeline, *days))
    more = estimated(pipeline).data
    assert not more["continued"] and more["rows"] == 240


def test_any_table_and_any_output(tmp_path: Path) -> None:
    pipeline = pipeline_of(tmp_path)
    days = random_rows(2, rows=60)
    frame = pd.concat(days)
    pipeline.land(days[0])
    rows = tmp_path / "rows"
    rows.mkdir()
    broken = frame.head(1).assign(at=pd.NaT)
    odd = frame.head(1).assign(a=np.inf)
    pd.concat([frame, broken, odd]).assign(other="x").to_parquet(rows / "one.parquet", index=False)
    output = str(tmp_path / "elsewhere" / "out")
    # A folder of Spark's, with folders in it; files and folders that begin with _ are none of its rows.
    spark = pipeline.warehouse.spark
    (rows / "part=1").mkdir()
    (rows / "_temporary").mkdir()
    frame.to_parquet(rows / "_temporary" / "left.parquet", index=False)
    frame.head(0).to_parquet(rows / "part=1" / "two %20; isDirectory=false; length=1.parquet", index=False)
    (rows / "one.parquet").rename(rows / "part=1" / "one.parquet")
    report = estimated(pipeline, input=str(rows), output=output).data
    assert (report["rows"], report["unfit"], report["version"]) == (120, 2, None)
    expected = alone(pipeline, frame)
    assert_bit_equal(ordered(spark.read.format("delta").load(output).toPandas()), expected)
    assert not estimated(pipeline, input=str(rows), output=output).data["made"]
    # A Delta table by its name in the warehouse, too.
    spark.read.parquet(str(rows)).write.format("delta").save(pipeline.warehouse.path("own/rows"))
    report = estimated(pipeline, input="own/rows", output="own/estimates").data
    assert (report["rows"], report["version"], report["table"]) == (120, 0, "own/estimates")
    assert report["rejected_by_reason"] == {"measurement a: not finite": 1, "time at: missing": 1}
    assert_bit_equal(history(pipeline, "own/estimates"), expected)
    for given, text in (
        ("own/none", "no Delta table of this name .* own/none: no such file"),
        (str(rows), "no column 'c'"),
    ):
        if "column" in text:
            pipeline.write_spec(random_walk_spec(measurement=["a", "c"]))
        with pytest.raises(UserError, match=text):
            estimated(pipeline, input=given)


@pytest.mark.slow
def test_keys_with_parameters_of_their_own_end_in_the_states_of_the_snapshot(tmp_path: Path) -> None:
    pipeline = pipeline_of(
        tmp_path,
        learn={"parameters": ["level_variance", "R"], "scope": "key", "max_iterations": 3},
        key=["site", "id"],
    )
    days = [day.assign(site="n ü") for day in random_rows(2, keys=6, rows=60)]
    pipeline.land(*days)
    snapshot = pipeline.pretrain().data["snapshot"]
    assert estimated(pipeline).data["snapshot"] == snapshot
    states = pipeline.snapshot(snapshot).set_index("key")
    found = history(pipeline)
    last = found.sort_values("event_time", kind="stable").groupby("key").last()
    assert set(last.index) == set(states.index) and set(found["site"]) == {"n ü"}
    total = found.groupby("key")["log_likelihood"].sum()
    for key, state in states.iterrows():
        assert last.loc[key, "event_time"] == state["event_time"]
        assert total[key] == pytest.approx(state["log_likelihood"], rel=1e-12)
    # An interval from the states of an earlier snapshot: each key goes on with its parameters, as a stream would.
    earlier = pipeline.pretrain(as_of="2024-03-02").data["snapshot"]
    part = estimated(pipeline, since="2024-03-02", output="part").data
    assert part["began_from_states"] and part["snapshot"] == earlier
    whole = estimated(pipeline, snapshot=earlier, output="whole").data
    assert not whole["began_from_states"]
    all_rows = history(pipeline, "whole")
    second = all_rows.loc[all_rows["event_time"].dt.day == 2].reset_index(drop=True)
    assert_bit_equal(history(pipeline, "part"), second)


def test_pretrain_writes_the_estimates_of_the_rows_that_its_snapshot_reflects(tmp_path: Path) -> None:
    pipeline = pipeline_of(tmp_path, order={"kind": "strict", "delay": "8h"})
    pipeline.land(pd.concat(random_rows(2, keys=6, rows=80)))
    made = pipeline.pretrain(estimates=True).data
    assert made["waiting"] > 0 and made["estimates"]["rows"] == made["rows"] == 160 - made["waiting"]
    found = history(pipeline)
    # What is there is not made again, neither by `pretrain` nor by `estimate`; and `estimate` alone gives the same.
    assert not pipeline.pretrain(estimates=True).data["estimates"]["made"]
    last = found["event_time"].max() + pd.Timedelta("1us")
    alike = estimated(pipeline, snapshot=made["snapshot"], to=last.isoformat(), output="alone")
    assert alike.data["rows"] == len(found)
    assert_bit_equal(found, history(pipeline, "alone"))
    with pytest.raises(UserError, match="--history writes no estimates"):
        pipeline.pretrain(estimates=True, history=True)


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    pipeline = pipeline_of(tmp_path, **EXPLICIT)
    with pytest.raises(UserError, match="no measurements"):
        estimated(pipeline)
    pipeline.land(random_rows(1, rows=10)[0])
    with pytest.raises(UserError, match="--from must be before --to"):
        estimated(pipeline, since="2024-03-02", to="2024-03-01")
    with pytest.raises(UserError, match="has no such snapshot"):
        estimated(pipeline, snapshot="no-such")
    with pytest.raises(UserError, match="has versions 0 to 1"):
        estimated(pipeline, to_version=9)
    report = estimated(pipeline, since="2025-01-01")
    assert "warning: there are no rows in the interval" in report.lines and report.data["rows"] == 0
