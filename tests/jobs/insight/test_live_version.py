"""Pages and pictures show the live version by its own spec while another version is deployed. No Spark."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import write_deltalake

from jobs import filter as offline
from jobs import forecast, plot, report, status
from jobs.core.errors import UserError
from jobs.core.settings import Settings
from jobs.insight import health
from jobs.insight.status import describe_model, describe_other_version
from jobs.lineage import generations
from jobs.lineage.catalog import Catalog
from jobs.lineage.generations import LIVE, REMOVED, RETIRED, SHADOW, Generation
from jobs.offline.stored_keys import predict_measurements, read_live_keys
from jobs.snapshots import manifests
from jobs.snapshots.manifests import Manifest
from jobs.specs.model_spec import ModelSpec
from jobs.storage.row_changes import put_rows
from jobs.storage.tables import GENERATIONS, MANIFESTS
from jobs.storage.warehouse import Tables

pytest.importorskip("matplotlib").use("Agg")

from jobs.offline import estimate_pictures, estimate_series  # noqa: E402

SLOPED: dict[str, Any] = {
    "name": "oven",
    "version": 1,
    "key": ["site"],
    "time": "at",
    "time_unit": "hour",
    "measurement": ["heat"],
    "states": ["level", "slope"],
    "process": {"kind": "local_linear_trend", "level_variance": 0.1, "slope_variance": 0.01},
    "observation": {"R": [[0.25]]},
    "initial": {"mean": [20.0, 0.0], "covariance": [[9.0, 0.0], [0.0, 1.0]]},
    "sinks": {"latest": True},
}
WAVES = ["level", "wave_a", "turn_a", "wave_b", "turn_b"]
WAVY: dict[str, Any] = {
    **SLOPED,
    "version": 2,
    "states": WAVES,
    "process": {
        "kind": "sum",
        "parts": [
            {"name": "level", "kind": "random_walk", "variance": 0.1},
            {
                "name": "day",
                "kind": "seasonal_trigonometric",
                "period": 24.0,
                "harmonics": 2,
                "variance": 0.01,
            },
        ],
    },
    "initial": {"mean": [20.0, *[0.0] * 4], "covariance": np.diag([9.0] + [1.0] * 4).tolist()},
}
HOURS, KEYS = 30, 5


class Place:
    """A warehouse with a live version 1, and a folder with the deployed spec."""

    def __init__(self, root: Path) -> None:
        self.root, self.models = root / "warehouse", root / "models"
        self.models.mkdir()
        self.settings = Settings.load(warehouse=str(self.root), models=self.models, quiet=True)
        self.picture = str(root / "p.html")
        rng = np.random.default_rng(5)
        times = [f"2024-05-{1 + at // 24:02d}T{at % 24:02d}:00:00Z" for at in range(HOURS)]
        lines = [f"{time},s{key},{20 + key + rng.normal():.3f}" for time in times for key in range(KEYS)]
        self.rows = root / "rows.csv"
        self.rows.write_text("at,site,heat\n" + "\n".join(lines) + "\n")
        landed = pyarrow.csv.read_csv(self.rows)
        write_deltalake(str(self.root / "measurements" / "oven"), _in_utc(landed))
        self.tables = Tables(str(self.root))

    def deploy(self, spec: dict[str, Any]) -> ModelSpec:
        (self.models / "oven.yaml").write_text(yaml.safe_dump(spec))
        return ModelSpec.model_validate(spec)

    def stream(self, spec: dict[str, Any], after: int = 0, until: int = HOURS) -> None:
        """Write the estimates of the rows from an hour on, and before another, as those of a generation."""
        self.deploy(spec)
        made, number = self.models.parent / "made.parquet", spec["version"]
        offline.run(self.settings, "oven", str(self.rows), str(made))
        found = _in_utc(pq.read_table(made))
        first, end = (np.datetime64("2024-05-01") + np.timedelta64(at, "h") for at in (after, until))
        at = found["at"].cast(pa.timestamp("us")).to_numpy()
        found = found.filter(pa.array((at >= first) & (at < end)))
        rows = pa.table(
            {
                "key": found["site"],
                "event_time": found["at"],
                "mean": found["mean"],
                "covariance": found["covariance"],
                "nis": found["nis"],
                "flags": pa.nulls(found.num_rows, pa.string()),
                "generation": [f"oven-g000{number}"] * found.num_rows,
                "batch_id": pa.array([0] * found.num_rows, pa.int64()),
            }
        )
        write_deltalake(str(self.root / "estimates" / "oven"), rows, mode="append")
        newest = rows.filter(pc.equal(rows["event_time"], pc.max(rows["event_time"])))  # type: ignore[attr-defined]
        write_deltalake(
            str(self.root / "latest" / "oven"), newest, mode="overwrite", partition_by=["generation"]
        )

    def alert(self, spec: ModelSpec, *alerts: tuple[str, str, str, int], batch: int = 0) -> None:
        """Write alerts of a spec's rules: key, rule, status and event time."""
        assert spec.monitor is not None
        rows = {
            "key": [key for key, *_ in alerts],
            "rule": [rule for _, rule, *_ in alerts],
            "status": [one for *_, one, _ in alerts],
            "event_time": pa.array([at for *_, at in alerts], pa.timestamp("us", "UTC")),
            "definition": [spec.monitor.definition("rules")] * len(alerts),
            "batch_id": [batch] * len(alerts),
        }
        write_deltalake(str(self.root / "alerts" / "oven"), pa.table(rows), mode="append")

    def record(self, *known: tuple[dict[str, Any], str]) -> Catalog:
        """Write a generation, and the snapshot it began from, for each spec and status."""
        start = {"source": "delta", "table": "measurements/oven", "version": 0}
        made, snapshots = [], []
        for spec, state in known:
            model, number = ModelSpec.model_validate(spec), spec["version"]
            of: dict[str, Any] = {
                "model": "oven",
                "model_version": number,
                "fingerprint": model.fingerprint(),
            }
            began: dict[str, Any] = {"generation": f"oven-g000{number}", "snapshot_id": f"s{number}", **of}
            if number == 2:
                began |= {"parent": "oven-g0001", "parent_batch": 0}
            made.append(
                Generation(
                    **began,
                    checkpoint=f"c{number}",
                    start_position=start,
                    partitions=1,
                    blocks=1,
                    status=state,
                )
            )
            snapshots.append(
                Manifest(
                    snapshot_id=f"s{number}",
                    **of,
                    parameters={},
                    position=start,
                    key_count=1,
                    checksum="",
                    rows=1,
                    snapshots_version=number,
                    spec=model.model_dump_json(by_alias=True),
                )
            )
        for name, columns, key, rows in (
            (
                "generations",
                GENERATIONS,
                "generation",
                [generations.build_generation_row(one) for one in made],
            ),
            ("manifests", MANIFESTS, "snapshot_id", [manifests.build_manifest_row(one) for one in snapshots]),
        ):
            self.tables.create(name, columns)
            put_rows(self.tables, name, (key,), lambda there, rows=rows: rows)
        return Catalog(self.tables)


def _in_utc(rows: pa.Table) -> pa.Table:
    at = rows.column_names.index("at")
    return rows.set_column(at, "at", rows["at"].cast(pa.timestamp("us", "UTC")))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Version 1 with two states is live; version 2 with five states is deployed."""
    found = Place(tmp_path)
    found.stream(SLOPED)
    found.record((SLOPED, LIVE))
    found.deploy(WAVY)
    return found


UPGRADE = "version 2 of oven is deployed, and version 1 is live until `kalman-pipeline upgrade --model oven`"


def test_plot_draws_the_live_version_and_says_what_is_deployed(place: Place) -> None:
    drawn = plot.run(place.settings, "oven", output=place.picture, keys=1)
    assert (drawn.data["version"], drawn.data["quantities"]) == (1, ["heat"])
    page = Path(place.picture).read_text()
    assert "<h1>oven v1: live estimates</h1>" in page and "slope ± standard deviation" in page
    assert f"note: {UPGRADE}" in drawn.lines and "<code>kalman-pipeline upgrade --model oven</code>" in page


def test_plot_and_report_do_without_the_file_of_the_spec(place: Place) -> None:
    (place.models / "oven.yaml").unlink()
    assert plot.run(place.settings, "oven", output=place.picture, keys=1).data["version"] == 1
    assert report.run(place.settings, "oven").data["rows"] == HOURS * KEYS
    assert [one["model"] for one in status.run(place.settings, "oven").data["models"]] == ["oven"]
    with pytest.raises(UserError, match="there is no model 'oben'"):
        status.run(place.settings, "oben")


def test_a_broken_spec_is_told_while_its_model_is_shown(place: Place) -> None:
    (place.models / "oven.yaml").write_text("name: oven\nversion: two\n")
    told = "the spec of oven cannot be read: "
    for name in ("oven", None):
        (said,) = status.run(place.settings, name).data["advice"]
        assert said.startswith(f"{told}{place.models}/oven.yaml: time")
    drawn = plot.run(place.settings, "oven", output=place.picture, keys=1)
    assert drawn.data["version"] == 1 and any(line.startswith(f"note: {told}") for line in drawn.lines)
    page = Path(report.run(place.settings, "oven").data["report"]).read_text()
    assert "The spec of oven cannot be read: " in page


def test_rows_from_before_a_hand_over_are_drawn_by_their_own_spec(place: Place) -> None:
    place.stream(WAVY, after=12)
    catalog = place.record((SLOPED, RETIRED), (WAVY, LIVE))
    spec = place.deploy(WAVY)
    found = estimate_series.read_warehouse_series(
        catalog, "oven", spec, "live", ["s2"], wanted=["heat", "wave_a"]
    )
    (one,) = found.series
    by_generation = {
        number: pa.table(
            {
                name: place.tables.columns("estimates/oven", (name,))[name]
                for name in ("key", "generation", "mean")
            }
        ).filter(pc.field("generation") == f"oven-g000{number}")
        for number in (1, 2)
    }
    old, new = (
        [row["mean"] for row in rows.to_pylist() if row["key"] == "s2"] for rows in by_generation.values()
    )
    heat = sorted([mean[0] for mean in old] + [mean[0] + mean[1] + mean[3] for mean in new])
    assert sorted(one.lines[0].mean[0]) == pytest.approx(heat, rel=1e-12)
    assert np.isnan(one.lines[0].mean[1]).sum() == len(old) and len(new) == HOURS - 12
    plot.run(place.settings, "oven", output=place.picture, key=["s2"])
    assert "<h1>oven v1 and v2: live estimates</h1>" in Path(place.picture).read_text()


def test_a_picture_has_the_version_that_estimated_its_rows(place: Place) -> None:
    """Version 2 is live, and no row has come since."""
    place.record((SLOPED, RETIRED), (WAVY, LIVE))
    plot.run(place.settings, "oven", output=place.picture, keys=1)
    assert "<h1>oven v1: live estimates</h1>" in Path(place.picture).read_text()


SHORT: dict[str, Any] = {**SLOPED, "outputs": {"covariance": "diagonal"}}


@pytest.fixture
def mixed(tmp_path: Path) -> Place:
    """The live version had covariances up to hour 12, then variances, and has covariances from hour 20 on."""
    found = Place(tmp_path)
    found.record((SLOPED, LIVE))
    for spec, after, until in ((SLOPED, 0, 12), (SHORT, 12, 20), (SLOPED, 20, HOURS)):
        found.stream(spec, after, until)
    return found


def test_rows_with_variances_are_drawn_beside_rows_with_covariances(mixed: Place, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    once = Place(whole)
    once.stream(SLOPED)
    found, expected = (
        estimate_series.read_warehouse_series(place.record((SLOPED, LIVE)), "oven", None, "live", ["s1"], 1)
        for place in (mixed, once)
    )
    for a, b in zip(found.series[0].lines[0], expected.series[0].lines[0], strict=True):
        np.testing.assert_array_equal(a, b)
    plot.run(mixed.settings, "oven", output=mixed.picture)
    page = health.gather(str(mixed.root), "oven", None)
    for one in page.examples:
        (line,) = one.lines
        # A row after one with variances alone is not predicted, and its neighbours are, as their NIS shows.
        assert np.flatnonzero(np.isnan(line.mean)).tolist() == [0, *range(13, 21)]
        np.testing.assert_allclose(
            (((one.measured - line.mean) / line.deviation) ** 2)[21:], line.nis[21:], rtol=1e-9
        )


def test_a_file_of_forecasts_starts_from_a_snapshot_while_latest_rows_have_variances(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    place.record((SLOPED, LIVE))
    place.stream(SHORT)
    for spec, why in (
        (SHORT, "its estimates have variances alone; write outputs: {covariance: full}"),
        (
            SLOPED,
            "oven-g0001 has variances alone of key s0; land a row of each key, or name a snapshot with --snapshot",
        ),
    ):
        assert read_live_keys(str(place.root), place.deploy(spec), [], None) == why
    place.stream(SLOPED)
    assert not isinstance(read_live_keys(str(place.root), place.deploy(SLOPED), [], None), str)


def test_a_prediction_is_of_the_drawn_measurement_whatever_its_place(place: Place) -> None:
    """Two versions name two measurements in another order."""
    both: dict[str, Any] = {
        **SLOPED,
        "measurement": ["other", "heat"],
        "observation": {"H": [[0.0, 1.0], [1.0, 0.0]], "R": [[4.0, 0.0], [0.0, 0.25]]},
    }
    rows = place.tables.columns("estimates/oven", ("key", "event_time", "mean", "covariance", "flags"))
    rows = rows.filter(pc.equal(rows["key"], "s1")).sort_by("event_time")  # type: ignore[attr-defined]
    rows = rows.append_column("time", rows["event_time"].cast(pa.timestamp("us")).cast(pa.int64()))
    of = partial(predict_measurements, str(place.root))
    one = of(ModelSpec.model_validate(SLOPED), None, rows, "heat")
    two = of(ModelSpec.model_validate(both), None, rows, "heat")
    assert np.isfinite(one[:, 1:]).all()
    np.testing.assert_allclose(two, one, rtol=1e-12)
    assert np.isnan(of(ModelSpec.model_validate(SLOPED), None, rows, "other")).all()


def test_a_robust_version_is_drawn_over_its_measurements(tmp_path: Path) -> None:
    place, robust = Place(tmp_path), {**WAVY, "version": 1, "robust": {"student_t": {"degrees": 6}}}
    place.stream(robust)
    catalog = place.record((robust, LIVE))
    found = estimate_series.read_warehouse_series(
        catalog, "oven", ModelSpec.model_validate(robust), "live", count=1
    )
    assert found.quantities[: found.drawn] == ["heat"]
    ax = estimate_pictures.draw_keys(found, "").subfigs[0].subfigs[0].axes[0]
    dots = next(line for line in ax.get_lines() if line.get_label() == "measured")
    assert np.isfinite(np.asarray(dots.get_ydata(), float)).sum() == HOURS


def test_history_is_drawn_by_the_version_of_its_run(place: Place) -> None:
    place.stream(WAVY)
    rows = place.tables.columns("estimates/oven", ("key", "event_time", "mean", "covariance", "nis", "flags"))
    names = place.tables.columns("estimates/oven", ("generation",))["generation"]
    rows = rows.append_column("generation", names).filter(pc.equal(names, "oven-g0002"))  # type: ignore[attr-defined]
    version = pa.array([2] * rows.num_rows, pa.int32())
    write_deltalake(
        str(place.root / "estimates_history" / "oven"), rows.append_column("model_version", version)
    )
    drawn = plot.run(place.settings, "oven", output=place.picture, history=True, keys=1)
    assert (drawn.data["version"], drawn.data["rows"]) == (2, HOURS)
    place.deploy(SLOPED)
    with pytest.raises(
        UserError, match="key s0 are not of version 1 of oven: deploy the version that made them"
    ):
        plot.run(place.settings, "oven", output=place.picture, history=True, keys=1)


def test_plot_says_what_it_leaves_out_and_how_to_see_it(place: Place) -> None:
    draw = partial(plot.run, place.settings, "oven", output=place.picture)
    assert draw(keys=1).lines[2:] == ["note: 1 of 5 keys: --keys 5, or --key KEY"]
    # What the user chose needs no advice, and no more keys can be drawn by number than --keys takes.
    assert len(draw(key=["s1"], quantity=["level"]).lines) == 2
    many = estimate_series.DrawnSeries(
        ModelSpec.model_validate({**SLOPED, "measurement": ["größe"]}), ["level"], 1, [], 50
    )
    left = plot._list_left_out
    assert left(many, None, None) == [
        "größe not drawn: --quantity größe",
        "0 of 50 keys: --keys 20, or --key KEY",
    ]
    series: Any = [None] * 20
    assert left(many._replace(series=series), None, ["level"]) == ["20 of 50 keys: --key KEY"]
    read = partial(
        estimate_series.read_warehouse_series, Catalog(place.tables), "oven", None, "live", ["s1"], 1
    )
    found = read(["slope", "heat"])
    assert (found.quantities[: found.drawn], found.keys) == (["slope", "heat"], KEYS)
    with pytest.raises(UserError, match="--quantity wave_a: version 1 of oven estimates heat, level, slope"):
        read(["wave_a"])


def test_the_health_page_draws_what_was_predicted_of_each_measurement(place: Place) -> None:
    found = health.gather(str(place.root), "oven", ModelSpec.model_validate(WAVY))
    assert found.spec.version == 1 and found.other_version == UPGRADE
    for one in found.examples:
        (line,) = one.lines
        assert one.quantity == "heat" and line.is_predicted and np.isnan(line.mean[0])
        # The estimate's own NIS is the square of the distance to the prediction: an oracle of mean and deviation.
        nis = ((one.measured - line.mean) / line.deviation)[1:] ** 2
        np.testing.assert_allclose(nis, line.nis[1:], rtol=1e-9)
    page = Path(report.run(place.settings, "oven").data["report"]).read_text()
    assert "what was predicted of each measurement" in page and "Version 2 of oven is deployed" in page


def test_a_file_of_forecasts_starts_from_the_live_version(place: Place, tmp_path: Path) -> None:
    out = tmp_path / "ahead.csv"
    made = forecast.run(place.settings, "oven", output=str(out), steps=2, every="1h", all_columns=True)
    assert (made.data["version"], made.data["generation"], made.data["forecasts"]) == (
        1,
        "oven-g0001",
        2 * KEYS,
    )
    assert "mean_slope" in out.read_text() and "wave_a" not in out.read_text()


def test_a_forecast_asks_for_what_the_live_version_needs(place: Place, tmp_path: Path) -> None:
    out = tmp_path / "ahead.csv"
    ask = partial(forecast.run, place.settings, "oven", output=str(out), steps=2, every="1mo")
    explicit = {"kind": "explicit", "F": np.eye(2).tolist(), "Q": np.eye(2).tolist(), "B": [[1.0], [0.0]]}
    place.deploy({**SLOPED, "version": 2, "control": ["wind"], "process": explicit,
                  "observation": {"H": [[1.0, 0.0]], "R": [[0.25]]}})  # fmt: skip
    made = ask()
    assert made.data["forecasts"] == 2 * KEYS
    assert made.lines[-1].startswith("note: version 2 of oven is deployed, and version 1 is live until")
    # No rows of a file give the day of the month, so that the report names the rule.
    assert "a step is 1 month of the calendar, from one month's last day to the next" in "".join(made.lines)
    (place.models / "oven.yaml").unlink()
    assert ask().data["version"] == 1
    with pytest.raises(UserError, match="there is no model 'oven'"):
        ask(snapshot="newest")


def test_status_says_which_version_is_live(place: Place) -> None:
    found = status.run(place.settings, "oven")
    assert (
        found.data["advice"] == [UPGRADE] and found.data["models"][0]["generations"][0]["model_version"] == 1
    )


@pytest.mark.parametrize(
    ("known", "deployed", "told"),
    [
        ([(SLOPED, LIVE)], SLOPED, None),
        ([(SLOPED, SHADOW)], WAVY, None),
        ([(SLOPED, LIVE)], WAVY, UPGRADE),
        (
            [(SLOPED, LIVE), (WAVY, SHADOW)],
            WAVY,
            "version 2 of oven runs as shadow oven-g0002, and version 1 is live until `kalman-pipeline promote --model "
            "oven`",
        ),
        (
            [(SLOPED, RETIRED), (WAVY, LIVE)],
            SLOPED,
            "version 1 of oven is deployed, and version 2 is live: deploy version 2 again, or run `kalman-pipeline "
            "rollback --model oven --to oven-g0001`",
        ),
        *(
            (known, SLOPED, "version 1 of oven is deployed, and version 2 is live: deploy version 2 again")
            for known in ([(WAVY, LIVE)], [(SLOPED, REMOVED), (WAVY, LIVE)])
        ),
        (
            [(SLOPED, LIVE)],
            {**SLOPED, "observation": {"R": [[1.0]]}},
            "the deployed spec of oven is not that of the live oven-g0001, under the same version 1: restore the spec; "
            "or raise its version and run `kalman-pipeline upgrade --model oven`",
        ),
    ],
)
def test_another_deployed_version_is_told_with_its_remedy(
    tmp_path: Path, known: Any, deployed: dict[str, Any], told: str | None
) -> None:
    catalog = Place(tmp_path).record(*known)
    assert describe_other_version(catalog, "oven", ModelSpec.model_validate(deployed)) == told
    assert describe_other_version(catalog, "oven", None) is None


def test_an_operator_reads_what_is_live_its_lag_and_the_alerts(place: Place) -> None:
    rules = [{"name": name, "kind": "level", "at_least": 25} for name in ("hot", "hotter")]
    spec = ModelSpec.model_validate({**WAVY, "monitor": {"rules": rules}})
    assert describe_model(str(place.root), spec)["monitor"].startswith("no alert was raised yet; ")
    place.alert(
        spec,
        ("s1", "hot", "raised", 0),
        ("s1", "hot", "cleared", 1),
        ("s2", "hot", "raised", 0),
        ("s3", "hot", "raised", 2),
    )
    told = describe_model(str(place.root), spec)
    assert told["live"] == "version 1 (generation oven-g0001)" and told["deployed"] == UPGRADE
    assert told["monitor"] == "raised: hot (2 keys)" and told["driver"] == "none runs now"
    assert json.dumps(told) and "lag" in told


def test_alerts_of_former_rules_count_where_their_states_continue(place: Place) -> None:
    hot = {"name": "hot", "kind": "level", "at_least": 25}
    rules = (
        [
            hot,
            {"name": "odd", "kind": "nis", "at_least": 9},
            {"name": "gone", "kind": "level", "at_least": 1},
        ],
        [{**hot, "at_least": 30}, {"name": "odd", "kind": "level", "at_least": 9}],
    )
    former, spec = (ModelSpec.model_validate({**WAVY, "monitor": {"rules": one}}) for one in rules)
    assert former.monitor is not None and spec.monitor is not None
    place.alert(former, ("s1", "hot", "raised", 0), ("s2", "odd", "raised", 0), ("s2", "gone", "raised", 0))
    place.alert(former, ("s3", "hot", "raised", 5), batch=1)
    place.alert(spec, ("s4", "odd", "raised", 9))

    def told() -> str:
        return describe_model(str(place.root), spec)["monitor"]

    assert told() == "raised: odd (1 key)"  # new rules without states: those of the former ones are no more
    query = f"monitor-oven-rules-{former.monitor.definition('rules')}"
    files, export = place.tables.files("_monitor/oven"), f"{query}-0"
    kept = {"query": query, "batch": 0, "rules": [rule.model_dump() for rule in former.monitor.rules]}
    files.write(f"export-{export}.json", json.dumps(kept).encode())
    adopted = f"adopted-{spec.monitor.definition('rules')}.json"
    files.write(adopted, json.dumps({"export": export}).encode())
    # hot continues, with its alert up to the export; odd reads something else, so it is another rule
    assert told() == "raised: hot (1 key), odd (1 key)"
    place.alert(spec, ("s1", "hot", "cleared", 9))
    assert told() == "raised: odd (1 key)"
