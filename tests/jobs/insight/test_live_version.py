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
from jobs.lineage.generations import LIVE, RETIRED, SHADOW, Generation
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

    def stream(self, spec: dict[str, Any], after: int = 0) -> None:
        """Write the estimates of the rows from an hour on as those of a generation."""
        self.deploy(spec)
        made, number = self.models.parent / "made.parquet", spec["version"]
        offline.run(self.settings, "oven", str(self.rows), str(made))
        found = _in_utc(pq.read_table(made))
        first = np.datetime64("2024-05-01") + np.timedelta64(after, "h")
        found = found.filter(pa.array(found["at"].cast(pa.timestamp("us")).to_numpy() >= first))
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
            str(self.root / "latest" / "oven"), newest, mode="append", partition_by=["generation"]
        )

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
    drawn = plot.run(place.settings, "oven", output=place.picture, keys=1, quantity=["level"])
    assert drawn.lines[2:] == [
        "note: heat not drawn: --quantity heat",
        "note: 1 of 5 keys: --keys 20, or --key KEY",
    ]
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
            "rollback --model oven`",
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
    alerts = [
        ("s1", "hot", "raised", 0),
        ("s1", "hot", "cleared", 1),
        ("s2", "hot", "raised", 0),
        ("s3", "hot", "raised", 2),
    ]
    write_deltalake(
        str(place.root / "alerts" / "oven"),
        pa.table(
            {
                "key": [key for key, *_ in alerts],
                "rule": [rule for _, rule, *_ in alerts],
                "status": [one for *_, one, _ in alerts],
                "event_time": pa.array([at for *_, at in alerts], pa.timestamp("us", "UTC")),
                "batch_id": [0] * len(alerts),
            }
        ),
    )
    told = describe_model(str(place.root), spec)
    assert told["live"] == "version 1 (generation oven-g0001)" and told["deployed"] == UPGRADE
    assert told["monitor"] == "raised: hot (2 keys)" and told["driver"] == "none runs now"
    assert json.dumps(told) and "lag" in told
