"""Quarantine: rejected rows are kept with their reason, and replayed after a fix at most once, also after crashes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from deltalake import DeltaTable

from jobs import ingest, quarantine
from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.report import Report
from jobs.landing.rejected import replay
from jobs.lineage import generations
from jobs.snapshots import manifests, store, verified_rows
from jobs.storage.quarantine import RowSelection
from jobs.storage.tables import estimates
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since
from tests.jobs.support.processes import Driver, files

GERMAN = (
    "id,at,a,b\n" + "".join(f"{i},{i + 1:02d}.03.2024,{i / 8},\n" for i in range(8)) + "9,2024-03-09,1,1\n"
)


def call(pipeline: Pipeline, action: str, choice: RowSelection | None = None, **options: Any) -> Report:
    return quarantine.act(pipeline.settings, action, pipeline.name, choice, **options)


def rejected(folder: Path) -> Pipeline:
    """Return a pipeline with eight rows in quarantine, whose times are not in the spec's format."""
    pipeline = Pipeline(folder, random_walk_spec())
    path = folder / "rows.csv"
    path.write_text(GERMAN)
    assert ingest.run(pipeline.settings, "walk", [str(path)]).data["quarantined"] == 8
    return pipeline


def mend(pipeline: Pipeline) -> None:
    pipeline.write_spec(random_walk_spec(time_format="%d.%m.%Y"))


def landed(pipeline: Pipeline) -> pd.DataFrame:
    return pd.DataFrame(pipeline.tables.rows("measurements/walk")).sort_values("id", ignore_index=True)


def statuses(pipeline: Pipeline) -> list[str | None]:
    return [row["status"] for row in pipeline.tables.rows("quarantine")]


def assert_all_landed(pipeline: Pipeline) -> None:
    rows = landed(pipeline)
    assert rows["id"].tolist() == list("012345679")
    assert rows["a"].tolist() == [*(i / 8 for i in range(8)), 1.0]
    assert rows["at"].dt.day.tolist() == list(range(1, 10))
    assert set(statuses(pipeline)) == {"replayed"}


def test_a_row_is_listed_edited_replayed_and_discarded(tmp_path: Path) -> None:
    pipeline = rejected(tmp_path)
    (reason,) = call(pipeline, "list").data["reasons"]
    assert (reason["reason"], reason["held"], reason["replayed"]) == ("time at: not a time", 8, 0)
    assert call(pipeline, "replay").data["reasons"] == {"time at: not a time": 8}  # without a fix
    assert statuses(pipeline) == [None] * 8

    path = tmp_path / "mended.jsonl"
    assert call(pipeline, "show", output=str(path)).data["rows"] == 8
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    first, second, third = lines[:3]
    first["payload"] |= {"at": "2024-03-20T12:00:00Z", "a": 0.1}
    second["payload"]["at"] = "never"
    path.write_text("\n".join(json.dumps(line) for line in (first, second)))
    done = call(pipeline, "replay", edited=str(path))
    assert (done.data["landed"], done.data["reasons"]) == (1, {"time at: not a time": 1})
    (row,) = pipeline.tables.rows("measurements/walk", {"a": 0.1})
    assert (str(row["id"]), row["b"], f"{row['at']:%F %H}") == (first["payload"]["id"], None, "2024-03-20 12")
    again = call(pipeline, "replay", edited=str(path))
    assert (again.data["landed"], again.data["before"], again.data["stay"]) == (0, 1, 1)

    assert call(pipeline, "discard", RowSelection(ids=(third["id"],))).data["discarded"] == 1
    path.write_text(json.dumps(third))
    with pytest.raises(UserError, match="1 rows of the file are not held"):
        call(pipeline, "replay", edited=str(path))
    wrong = RowSelection(since="2999-01-01", reason="time")
    assert call(pipeline, "discard", wrong).data["discarded"] == 0
    with pytest.raises(UserError, match="name the rows to discard"):
        call(pipeline, "discard")
    shown = call(pipeline, "show", RowSelection(reason="time", since="1h"), limit=3).data["rows"]
    assert len(shown) == 3 and third["id"] not in [one["id"] for one in shown]
    assert call(pipeline, "discard", RowSelection(reason="time at")).data["discarded"] == 6
    (reason,) = call(pipeline, "list").data["reasons"]
    assert (reason["held"], reason["replayed"], reason["discarded"]) == (0, 1, 7)


def fails(*args: Any, **options: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("after", ["the choice", "landing"])
def test_a_replay_that_fails_between_its_commits_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    pipeline = rejected(tmp_path)
    mend(pipeline)
    with monkeypatch.context() as patch:
        patch.setattr(replay, "_complete" if after == "the choice" else "mark_replayed", fails)
        for _ in range(2 if after == "landing" else 1):
            with pytest.raises(KeyboardInterrupt):
                call(pipeline, "replay")
    assert len(landed(pipeline)) == (1 if after == "the choice" else 9)
    assert set(statuses(pipeline)) == {"replaying"}
    assert call(pipeline, "list").data["interrupted"] == 8
    assert call(pipeline, "discard", everything=True).data["discarded"] == 0
    pipeline.write_spec(random_walk_spec())  # the outcome was fixed before this change
    done = call(pipeline, "replay")
    assert (done.data["landed"], done.data["landed_of_interrupted"]) == (0, 8)
    assert_all_landed(pipeline)
    assert call(pipeline, "replay").data["landed"] == 0


@pytest.mark.parametrize("commit", ["quarantine", "measurements/walk"])
def test_a_killed_replay_is_completed_by_the_next(tmp_path: Path, commit: str) -> None:
    pipeline = rejected(tmp_path)
    mend(pipeline)
    log = Path(pipeline.settings.warehouse, commit, "_delta_log")
    before = len([name for name in files(log) if name.endswith(".json")])
    driver = Driver(pipeline, "quarantine", "replay", "--model", "walk")
    driver.wait_for(lambda: len([name for name in files(log) if name.endswith(".json")]) > before)
    driver.kill()
    call(pipeline, "replay")
    assert_all_landed(pipeline)


DAYS = random_rows(3)
LATE = DAYS[1].assign(at=DAYS[0]["at"] + pd.Timedelta(seconds=1))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A pipeline that was pretrained on the first day."""
    pipeline = Pipeline(tmp_path_factory.mktemp("pretrained"), random_walk_spec())
    pipeline.land(DAYS[0])
    pipeline.pretrain()
    return pipeline


def with_late_rows_replayed(pipeline: Pipeline) -> int:
    """Let the stream refuse late rows, replay them, and return their number."""
    pipeline.land(pd.concat([DAYS[1], LATE]))
    refused = pipeline.stream().data["late"]
    assert refused > 50
    pipeline.write_spec(random_walk_spec(late="apply"))
    done = call(pipeline, "replay", RowSelection(reason="late"))
    assert (done.data["landed"], done.data["late"]) == (refused, refused)
    assert "copies are appended" in done.lines[1]
    return refused


@pytest.mark.spark
def test_late_rows_are_replayed_for_the_stream_alone(pretrained: Pipeline, tmp_path: Path) -> None:
    pipeline = pretrained.copied(tmp_path / "copy")
    refused = with_late_rows_replayed(pipeline)
    streamed = pipeline.stream().data
    assert (streamed["rows"], streamed["late"]) == (refused, 0)


@pytest.mark.spark
@pytest.mark.slow
def test_a_stream_that_begins_anew_has_replayed_rows_at_their_own_positions(
    pretrained: Pipeline, tmp_path: Path
) -> None:
    pipeline = pretrained.copied(tmp_path / "copy")
    before = pipeline.tables.latest_version("measurements/walk") + 1
    refused = with_late_rows_replayed(pipeline)
    snapshot = pipeline.pretrain().data["snapshot"]
    (made,) = [one for one in manifests.read_manifests(pipeline.warehouse) if one.snapshot_id == snapshot]
    assert made.version == before + 1
    assert made.rows == sum(map(len, (*DAYS[:2], LATE)))
    again = pipeline.pretrain(to_version=before).data["snapshot"]
    pipeline.land(DAYS[1].assign(at=DAYS[1]["at"] + pd.Timedelta(days=9)))
    adopted = pipeline.stream(adopt=again).data
    assert (adopted["began"], adopted["rows"], adopted["late"]) == (True, len(DAYS[1]), 0)
    # The new lineage does not replay the old lineage's other late rows.
    pipeline.warehouse.spark.sql(
        f"UPDATE delta.`{pipeline.warehouse.path('quarantine')}` SET status = NULL WHERE status = 'replayed'"
    )
    stale = call(pipeline, "replay")
    assert (stale.data["landed"], stale.data["reasons"]) == (0, {replay.STALE: refused})


@pytest.mark.spark
def test_too_many_late_rows_fail_the_micro_batch_and_change_nothing(
    pretrained: Pipeline, tmp_path: Path
) -> None:
    pipeline = pretrained.copied(tmp_path / "copy")
    pipeline.write_spec(random_walk_spec(quarantine={"fail_above": 0.05}))
    pipeline.land(DAYS[1], DAYS[2].assign(at=DAYS[0]["at"]))
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"micro-batch 1: \d+ of 150 rows would go to quarantine"
        ) as error:
            pipeline.stream()
        assert error.value.exit_code == RUN_FAILED
        assert_bit_equal(pipeline.estimates(), since(pipeline.batch(2), DAYS[1]))
        assert not pipeline.warehouse.exists("quarantine")
        table = Path(pipeline.warehouse.path(estimates("walk")))
        assert {one.name for one in table.glob("*.parquet")} == {
            Path(one).name for one in DeltaTable(str(table)).file_uris()
        }
    live = generations.find_live(pipeline.warehouse, "walk")
    assert live is not None and "quarantine.fail_above" in (live.last_error or "")

    pipeline.write_spec(random_walk_spec())
    done = pipeline.stream().data
    assert done["late"] == pipeline.warehouse.read("quarantine").count() > 50
    assert done["rows"] + done["late"] == 150
    (held,) = call(pipeline, "list").data["reasons"]
    assert held["held"] == done["late"]


def test_a_file_with_too_many_rejected_rows_does_not_land(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec(quarantine={"fail_above": 0.5, "fail_from": 9}))
    path = tmp_path / "rows.csv"
    path.write_text(GERMAN)
    assert ingest.run(pipeline.settings, "walk", [str(path)]).data["quarantined"] == 8  # fewer than fail_from
    other = tmp_path / "more.csv"
    other.write_text(GERMAN + "10,bad,1,1\n")
    pipeline.write_spec(random_walk_spec(quarantine={"fail_above": 0.5}))
    with pytest.raises(UserError, match=r"more.csv: 9 of 10 rows would go to quarantine"):
        ingest.run(pipeline.settings, "walk", [str(other)])
    assert (len(landed(pipeline)), len(statuses(pipeline))) == (1, 8)
    assert ingest.run(pipeline.settings, "walk", [str(path)]).data["files_landed_before"] == 1


@pytest.mark.slow
@pytest.mark.spark
def test_rows_of_a_key_with_a_broken_state_do_not_fail_the_stream(
    pretrained: Pipeline, tmp_path: Path
) -> None:
    from pyspark.sql import functions as F

    pipeline = pretrained.copied(tmp_path / "copy")
    pipeline.land(DAYS[1])
    (good,) = manifests.read_manifests(pipeline.warehouse)
    key = str(DAYS[1].loc[DAYS[1]["id"].isin(DAYS[0]["id"]), "id"].mode()[0])
    rows = verified_rows.read_rows(pipeline.warehouse, good.snapshot_id, "walk").withColumn(
        "mean",
        F.when(F.col("key") == key, F.array(F.lit(float("nan")), F.lit(0.0))).otherwise(F.col("mean")),
    )
    store.write(pipeline.warehouse, replace(good, snapshot_id="broken"), rows)
    done = pipeline.stream(adopt="broken")
    of_key = int((DAYS[1]["id"].astype(str) == key).sum())
    assert (done.data["bad_state"], done.data["late"]) == (of_key, 0)
    assert f"quarantined {of_key} rows of keys whose state is not a number" in done.lines
    expected = since(pipeline.batch(), DAYS[1])
    assert_bit_equal(pipeline.estimates(), expected.loc[expected["key"] != key].reset_index(drop=True))
    (held,) = call(pipeline, "list").data["reasons"]
    assert (held["reason"], held["held"]) == ("state: the key's state is not a number", of_key)


@pytest.mark.spark
def test_a_table_without_row_ids_is_upgraded(tmp_path: Path) -> None:
    pipeline = rejected(tmp_path)
    warehouse = pipeline.warehouse
    old = warehouse.read("quarantine").drop("id", "status", "replay", "landing", "resolved_at")
    rows = warehouse.spark.createDataFrame(old.toPandas(), old.schema)
    writer = rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
    writer.save(warehouse.path("quarantine"))
    path = tmp_path / "more.csv"
    path.write_text(GERMAN + "10,bad,1,1\n")
    assert ingest.run(pipeline.settings, "walk", [str(path)]).data["quarantined"] == 9
    mend(pipeline)
    assert call(pipeline, "replay").data["landed"] == 16
    assert len({row["id"] for row in warehouse.read("quarantine").collect()}) == 17
