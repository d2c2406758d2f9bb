"""Verification of a live stream: whole ones are equal to the bit, and every kind of damage is found and named."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from delta.tables import DeltaTable
from pyspark.sql import functions as F

import kalman
from jobs import export, migrate, upgrade, verify
from jobs.core.report import Report
from jobs.insight.status import find_alarms, read_status
from jobs.lineage.catalog import Catalog
from jobs.lineage.generations import DeployedModel, find_live
from jobs.specs.loading import load_spec
from jobs.storage.tables import estimates
from jobs.verification import runs
from jobs.verification.verifier import Options, Verifier
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec, streaming

pytestmark = pytest.mark.spark

DAYS = random_rows(6, keys=30, rows=100)
V2: dict[str, Any] = {
    "version": 2,
    "states": ["level", "slope", "bias"],
    "process": {
        "kind": "sum",
        "parts": [
            {"kind": "local_linear_trend", "level_variance": 0.5, "slope_variance": 0.01},
            {"kind": "ornstein_uhlenbeck", "rate": 0.01, "variance": 0.5},
        ],
    },
    "observation": {"H": [[1.0, 0.0, 1.0], [0.5, 1.0, 1.0]], "R": [[1.0, 0.3], [0.3, 2.0]]},
    "initial": {"mean": [0.0, 0.0, 0.0], "covariance": [[10.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.5]]},
    "migrate": {"states": {"bias": {"initial": True}}},
}


def verified(pipeline: Pipeline, **options: Any) -> Report:
    return verify.run(pipeline.settings, pipeline.name, **{"share": "100%", **options})


def late(day: pd.DataFrame) -> pd.DataFrame:
    """Return some rows of a day, changed, which a stream that has passed it refuses as late."""
    return day.head(20).assign(a=lambda rows: rows["a"] + 1.0)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """Return a pipeline whose live estimates are of two generations: pretrained, exported, adopted; with late rows."""
    return two_generations(tmp_path_factory.mktemp("verify") / "walk")


def two_generations(folder: Path) -> Pipeline:
    pipeline = streaming(folder, DAYS[0], pd.concat(DAYS[1:3]))
    snapshot = export.run(pipeline.settings, pipeline.name).data["snapshot"]
    pipeline.land(pd.concat([late(DAYS[1]), DAYS[3]]))
    pipeline.stream(adopt=snapshot)
    return pipeline


@pytest.mark.slow
def test_a_chain_of_generations_is_equal_to_the_bit(chain: Pipeline) -> None:
    report = verified(chain)
    counts = report.data["counts"]
    assert report.data["not_verified"] == []
    assert (report.data["outcome"], report.errors) == ("equal", []), report.data
    assert counts["equal"] == len(chain.estimates())
    assert counts["landed"] == counts["rows"] == len(chain.estimates()) + counts["refused"]
    assert counts["refused"] > 0
    segments = report.data["segments"]
    assert [one["generation"] for one in segments] == ["walk-g0002", "walk-g0001"]
    # The pretrained snapshot, the hand-over and the state now.
    assert counts["states"] > 2 * len(chain.snapshot(segments[1]["end"]))


def test_damage_is_found_named_recorded_and_raises_an_alarm(chain: Pipeline, tmp_path: Path) -> None:
    pipeline = chain.copied(tmp_path / "damaged")
    warehouse, name = pipeline.warehouse, pipeline.name
    table = DeltaTable.forPath(warehouse.spark, warehouse.path(estimates(name)))
    rows: list[Any] = [
        row for _, row in pipeline.estimates().drop_duplicates(["key", "event_time"], keep=False).iterrows()
    ]
    flipped, deleted, doubled = rows[20], rows[60], rows[100]

    def of(row: Any) -> Any:
        return (F.col("key") == row["key"]) & (F.col("event_time") == F.lit(row["event_time"]))

    once = warehouse.read(estimates(name)).filter(of(doubled)).toArrow()
    bit = math.nextafter(flipped["mean"][0], math.inf)
    table.update(of(flipped), {"mean": F.array(F.lit(bit), F.get("mean", F.lit(1)))})
    table.delete(of(deleted))
    warehouse.append(warehouse.spark.createDataFrame(once), estimates(name))
    gauges = tmp_path / "verify.prom"
    report = verified(pipeline, metrics_file=str(gauges))
    counts = report.data["counts"]
    assert report.data["not_verified"] == []
    assert (report.data["outcome"], report.error_code) == ("different", 2)
    assert [one["generation"] for one in report.data["segments"]] == ["walk-g0002", "walk-g0001"]
    assert counts["refused"] > 0
    assert counts["different"] == 1, report.data
    assert (counts["missing"], counts["doubled"], counts["strange"]) == (1, 1, 0)
    assert counts["states_different"] == 0
    named = {(one["key"], one["event_time"]): one for one in report.data["first_differences"] if one["key"]}
    places = [(row["key"], f"{row['event_time'].isoformat()}+00:00") for row in (flipped, deleted, doubled)]
    assert set(places) <= set(named)
    first = named[places[0]]
    assert first["what"].startswith("mean[0] is ")
    assert f"key {flipped['key']}, row of {places[0][1]}" in report.errors[0]
    # Where the deleted and the doubled one are of two generations, neither's rows add up.
    total = 3 + counts["uncounted"]
    assert counts["uncounted"] in (0, 2)
    assert report.data["differences"] == total
    assert f'kalman_verify_differences{{model="walk"}} {total}.0' in gauges.read_text()
    last = runs.read_last_outcomes(warehouse)[name]
    assert last is not None
    assert (last["outcome"], last["differences"]) == ("different", total)
    status = read_status(Catalog(warehouse), runs.read_last_outcomes(warehouse), name)
    (sentence,) = find_alarms([status], 600.0, last["recorded_at"])
    assert f"{total} differences" in sentence


@pytest.mark.slow
def test_a_changed_state_and_a_changed_snapshot_are_found(chain: Pipeline, tmp_path: Path) -> None:
    one, other = (chain.copied(tmp_path / name) for name in ("one", "other"))
    one.land(DAYS[4])
    one.stream()
    altered = DAYS[4].copy()
    altered.loc[altered.index[-1], "a"] = 77.0
    other.land(altered)
    other.stream()
    place = f"warehouse/{find_live(one.warehouse, one.name).checkpoint}"  # type: ignore[union-attr]
    report = verified(one)
    assert report.data["outcome"] == "equal", report.data
    for part in ("state", "commits"):  # a commit names the files of the states that count
        shutil.rmtree(one.folder / place / part)
        shutil.copytree(other.folder / place / part, one.folder / place / part)
    for path in (one.folder / place).glob("state/*/_metadata/v2/[!.]*"):
        path.write_text(path.read_text().replace(str(other.folder), str(one.folder)))
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    report = verified(one)
    counts = report.data["counts"]
    assert (counts["states_different"], report.data["differences"]) == (1, 1), report.data
    (first,) = report.data["first_differences"]
    assert first["key"] == str(altered["id"].iloc[-1])

    snapshot = report.data["segments"][1]["snapshot"]
    warehouse = other.warehouse
    rows = DeltaTable.forPath(warehouse.spark, warehouse.path("snapshots"))
    rows.update(
        (F.col("snapshot_id") == snapshot) & (F.col("key") == F.lit("3")), {"log_likelihood": F.lit(1.0)}
    )
    manifest = DeltaTable.forPath(warehouse.spark, warehouse.path("manifests"))
    newest = warehouse.latest_version("snapshots")
    manifest.update(F.col("snapshot_id") == snapshot, {"snapshots_version": F.lit(newest)})
    report = verified(other)
    assert report.data["outcome"] == "different"
    assert any("is damaged" in one["what"] for one in report.data["first_differences"])


def without_marks(pipeline: Pipeline) -> None:
    """Remove the numerics from the tables, as if an earlier release had written them."""
    warehouse = pipeline.warehouse
    for table, column in (("generations", "start_position"), ("manifests", "position")):
        written = DeltaTable.forPath(warehouse.spark, warehouse.path(table))
        marked = F.col(column).contains('"numerics"')
        assert written.toDF().filter(marked).count() == 1
        written.update(marked, {column: F.regexp_replace(column, ', "numerics": [{][^}]*[}]', "")})


@pytest.mark.slow
def test_what_an_earlier_release_began_diffuse_is_not_verified_where_it_differs(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path / "walk", random_walk_spec(initial={"diffuse": True}))
    first = DAYS[0].head(8)
    pipeline.land(first)
    pipeline.pretrain()
    pipeline.land(DAYS[1])
    pipeline.stream()
    made = find_live(pipeline.warehouse, pipeline.name)
    assert made is not None
    assert (made.numerics, "numerics" in made.start_position) == (kalman.NUMERICS, False)
    new = DAYS[1][~DAYS[1]["id"].isin(first["id"])].iloc[0]
    table = DeltaTable.forPath(pipeline.warehouse.spark, pipeline.warehouse.path(estimates(pipeline.name)))
    table.update(F.col("key") == F.lit(str(new["id"])), {"log_likelihood": F.col("log_likelihood") + 1.0})
    changed = int((pipeline.estimates()["key"].astype(str) == str(new["id"])).sum())

    report = verified(pipeline)
    assert (report.data["outcome"], report.data["differences"]) == ("different", changed), report.data
    without_marks(pipeline)
    report = verified(pipeline)
    assert (report.data["outcome"], report.error_code) == ("not verified", 3), report.data
    counts = report.data["counts"]
    assert (report.data["differences"], counts["numerics"], counts["states_numerics"]) == (0, changed, 0)
    assert counts["equal"] == len(pipeline.estimates()) - changed
    (reason,) = report.data["not_verified"]
    assert reason.startswith(f"other numerics: {changed} estimates and 0 states of walk-g0001 differ")


class Killed(BaseException):
    """Ends a run as a signal would."""


@pytest.mark.slow
def test_a_killed_run_is_continued_at_its_position_while_the_stream_runs_on(
    chain: Pipeline, tmp_path: Path
) -> None:
    pipeline = chain.copied(tmp_path / "killed")
    warehouse, spec = pipeline.warehouse, load_spec(pipeline.name, pipeline.settings.models)
    options = Options(seed="s", chunk_rows=60)
    done: list[str] = []

    def kill_at_the_seventh(part: str) -> None:
        done.append(part)
        if len(done) == 7:
            raise Killed

    with pytest.raises(Killed):
        Verifier(DeployedModel(spec, warehouse), options, kill_at_the_seventh).run()
    pipeline.land(DAYS[5])
    pipeline.stream()
    again: list[str] = []
    result = Verifier(DeployedModel(spec, warehouse), options, again.append).run()
    assert result.continued
    assert result.outcome == "equal", result
    assert again[0] == done[6]
    assert not set(done[1:6]) & set(again)
    assert result.findings.counts["equal"] == len(chain.estimates())
    fresh = Verifier(DeployedModel(spec, warehouse), options).run()
    assert not fresh.continued
    assert fresh.findings.counts["equal"] == len(pipeline.estimates())

    share = {seed: verified(pipeline, share="30%", seed=seed).data for seed in ("a", "a ", "b")}
    counts = [one["counts"]["keys"] for one in share.values()]
    assert all(0 < count < fresh.findings.counts["keys"] for count in counts)
    named = verified(pipeline, keys=["5"])
    assert named.data["outcome"] == "equal"
    assert (
        named.data["counts"]["rows"]
        == sum((day["id"] == 5).sum() for day in [*DAYS[1:4], DAYS[5]]) + (late(DAYS[1])["id"] == 5).sum()
    )
    nobody = verified(pipeline, keys=["999"])
    assert (nobody.data["outcome"], nobody.error_code) == ("nothing to verify", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [
        pytest.param({"order": {"kind": "strict", "delay": "1 h"}}, id="strict"),
        pytest.param({"order": {"kind": "replay", "rows": 8}}, id="replay"),
    ],
)
def test_rows_out_of_order_and_a_migration(tmp_path: Path, order: dict[str, Any]) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec(**order))
    pipeline.land(DAYS[0])
    pipeline.pretrain()
    mixed = pd.concat(DAYS[1:3]).sample(frac=1.0, random_state=1)
    pipeline.land(mixed.iloc[:90], mixed.iloc[90:])
    pipeline.stream()
    exported = export.run(pipeline.settings, pipeline.name).data["snapshot"]
    pipeline.write_spec(random_walk_spec(**order, **V2))
    if order["order"]["kind"] == "strict":
        migrated = migrate.run(pipeline.settings, pipeline.name, exported).data["snapshot"]
        pipeline.stream(adopt=migrated)
    else:
        pipeline.write_spec(random_walk_spec(**order))
    pipeline.land(DAYS[3].sample(frac=1.0, random_state=2), late(DAYS[3]))
    pipeline.stream()
    report = verified(pipeline)
    assert report.data["not_verified"] == []
    assert report.data["outcome"] == "equal", report.data
    counts = report.data["counts"]
    assert counts["landed"] == counts["rows"]
    assert counts["refused"] > 0
    if order["order"]["kind"] == "strict":
        assert counts["waiting"] > 0
        assert len(report.data["segments"]) == 2


@pytest.mark.slow
def test_a_generation_that_began_without_state(tmp_path: Path) -> None:
    pipeline = streaming(tmp_path, DAYS[0], DAYS[1])
    pipeline.write_spec(random_walk_spec(version=2))
    upgrade.run(pipeline.settings, pipeline.name, mode="stateless", lose_state=True)
    pipeline.land(DAYS[2])
    pipeline.stream()
    for place in (None, "walk-g0001"):  # `maintain` removes the checkpoint; its estimates say where it ended
        if place is not None:
            shutil.rmtree(Path(pipeline.settings.warehouse, "checkpoints", place))
        report = verified(pipeline)
        assert report.data["counts"]["equal"] == len(DAYS[1]) + len(DAYS[2])
        assert report.data["outcome"] == "not verified", report.data
        (reason,) = report.data["not_verified"]
        assert "the state at its end was not exported" in reason


def test_a_model_without_a_stream_has_nothing_to_verify(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(DAYS[0])
    report = verified(pipeline)
    assert (report.data["outcome"], report.error_code) == ("nothing to verify", 3)
    assert report.errors
