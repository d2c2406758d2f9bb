"""`plot`: which estimates it draws, of a file and of tables, and what it draws of them. No Spark."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from deltalake import write_deltalake

from jobs import filter as offline
from jobs import plot
from jobs.core.errors import UserError
from jobs.core.settings import Settings
from jobs.lineage.catalog import Catalog
from jobs.specs.model_spec import ModelSpec
from jobs.storage.warehouse import Tables
from tests.conftest import RunCli

pytest.importorskip("matplotlib").use("Agg")

from jobs.offline import estimate_pictures, estimate_series  # noqa: E402
from jobs.state import kernel  # noqa: E402

SPEC: dict[str, Any] = {
    "name": "climb",
    "version": 1,
    "key": ["site", "sensor"],
    "time": "at",
    "time_unit": "hour",
    "measurement": ["height"],
    "states": ["level", "slope"],
    "process": {"kind": "local_linear_trend", "level_variance": 0.1, "slope_variance": 0.01},
    "observation": {"R": [[0.25]]},
    "initial": {"mean": [0.0, 0.0], "covariance": [[9.0, 0.0], [0.0, 1.0]]},
}
CSV = "at,site,sensor,height\n" + "".join(
    f"2024-05-01T{hour:02d}:00:00Z,{site},s1,{height}\n"
    for hour, height in enumerate(["1.0", "2.1", "", "3.9"])
    for site in ("a", "b")
)
BEGIN = datetime(2024, 5, 1, tzinfo=UTC)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A folder with the model and rows of two keys."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "climb.yaml").write_text(yaml.safe_dump(SPEC))
    (tmp_path / "in.csv").write_text(CSV)
    return Settings.load(warehouse=str(tmp_path / "warehouse"), models=tmp_path / "models", quiet=True)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_file_of_filter_is_read_as_it_was_written(settings: Settings, tmp_path: Path, ending: str):
    out = tmp_path / f"out.{ending}"
    spec = ModelSpec.model_validate(SPEC)
    offline.run(settings, "climb", str(tmp_path / "in.csv"), str(out), smooth=True)
    one, two = estimate_series.read_file_series(spec, out, str(tmp_path / "in.csv"), [], 5).series
    assert (one.key, two.key) == ('["a","s1"]', '["b","s1"]')
    np.testing.assert_array_equal(one.measured, [[1.0, 2.1, np.nan, 3.9]])
    assert [str(at) for at in one.time[[0, 3]]] == [
        "2024-05-01T00:00:00.000000",
        "2024-05-01T03:00:00.000000",
    ]
    estimate, smoothed = one.lines
    # By hand: the first row's gain is 9 / 9.25; at the last row smoothed and filtered agree.
    # The measurement is the level: both are drawn.
    np.testing.assert_allclose(estimate.mean[:, 0], [9 / 9.25, 9 / 9.25, 0.0], rtol=1e-15)
    np.testing.assert_allclose(estimate.deviation[:, 0] ** 2, [9 * 0.25 / 9.25] * 2 + [1.0], rtol=1e-15)
    np.testing.assert_array_equal(smoothed.mean[:, -1], estimate.mean[:, -1])
    assert np.isnan(one.nis).tolist() == [False, False, True, False]


def test_the_newest_rows_alone_are_drawn(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out, picture = tmp_path / "out.parquet", str(tmp_path / "p.png")
    offline.run(settings, "climb", str(tmp_path / "in.csv"), str(out), smooth=True)
    spec = ModelSpec.model_validate(SPEC)
    whole, _ = estimate_series.read_file_series(spec, out, str(tmp_path / "in.csv"), [], 5).series
    part = whole.newest(2)
    np.testing.assert_array_equal(part.time, whole.time[2:])
    np.testing.assert_array_equal(part.measured, [[np.nan, 3.9]])
    assert (
        [one.mean.shape for one in part.lines] == [(3, 2)] * 2 == [one.deviation.shape for one in part.lines]
    )
    assert len(part.nis) == len(part.flagged) == 2
    drawn = plot.run(settings, "climb", input=str(out), output=picture, rows=2)
    assert (drawn.data["rows"], len(drawn.lines)) == (4, 1)
    monkeypatch.setattr(plot, "CROWDED", 3)
    lines = plot.run(settings, "climb", input=str(out), output=picture).lines
    assert lines[1:] == ["note: 4 rows of a key are drawn; --rows 500 shows the newest alone"]


def written(root: Path, table: str, **columns: Any) -> None:
    path = root / table
    path.parent.mkdir(parents=True, exist_ok=True)
    write_deltalake(str(path), pa.table(columns))


def test_the_measured_coverage_stands_beside_each_band(settings: Settings, tmp_path: Path) -> None:
    out = tmp_path / "estimates.parquet"
    values = {"a": [1.0, 2.0, 3.1, 4.0, 40.0, 6.0], "b": [1.0, None, 1.1, 1.0, 1.2, 1.1]}
    rows = "at,site,sensor,height\n" + "".join(
        f"2024-05-01T{hour:02d}:00:00Z,{site},s1,{'' if y is None else y}\n"
        for site, all_of_it in values.items()
        for hour, y in enumerate(all_of_it)
    )
    (tmp_path / "rows.csv").write_text(rows)
    offline.run(settings, "climb", str(tmp_path / "rows.csv"), str(out))
    spec = ModelSpec.model_validate(SPEC)
    found = estimate_series.read_file_series(spec, out, str(tmp_path / "rows.csv"), [], 2)
    picture, series = estimate_pictures.draw_keys(found, ""), found.series
    drawn = [band.subfigs[0].axes[0] for band in picture.subfigs]
    titles = [ax.get_title(loc="left") + ax.get_title() for ax in drawn]
    shares = [np.mean(one.nis[np.isfinite(one.nis)] < 3.841458820694124) for one in series]
    assert 0.3 < shares[0] < 0.9 and shares[1] == 1.0
    assert titles == [
        f"{one.key}: height · {share:.1%} of rows in their predicted 95 %"
        for one, share in zip(series, shares, strict=True)
    ]


def generations_of(root: Path) -> None:
    """Write two generations: the second is live, and continues after micro-batch 1 of the first."""
    nothing = pa.nulls(2, pa.string())
    written(
        *(root, "generations"),
        generation=["climb-g0001", "climb-g0002"],
        model=["climb", "climb"],
        model_version=[1, 1],
        fingerprint=["f", "f"],
        snapshot_id=["s", "s"],
        checkpoint=["c1", "c2"],
        start_position=['{"source": "delta", "table": "measurements/climb", "version": 0}'] * 2,
        parent=pa.array([None, "climb-g0001"], pa.string()),
        parent_batch=pa.array([None, 1], pa.int64()),
        partitions=[1, 1],
        blocks=[1, 1],
        status=["retired", "live"],
        owner=nothing,
    )


def test_only_live_estimates_are_drawn_and_their_last_corrections(settings: Settings):
    root = Path(settings.warehouse)
    generations_of(root)
    # Micro-batch 2 of the first generation came after the switch; micro-batch 1 of the second corrects hour 2.
    rows = [("1", 0, 0, False), ("1", 1, 1, False), ("1", 2, 2, False), ("2", 2, 0, False), ("2", 2, 1, True)]
    number = [float(at) for at in range(len(rows))]
    written(
        *(root, "estimates/climb"),
        key=['["a","s1"]'] * len(rows),
        event_time=[BEGIN + timedelta(hours=hour) for _, hour, _, _ in rows],
        mean=[[one, 0.5] for one in number],
        covariance=[[1.0, 0.0, 0.0, 1.0]] * len(rows),
        nis=number,
        flags=pa.array([None, None, None, None, "gated"], pa.string()),
        generation=[f"climb-g000{one}" for one, *_ in rows],
        batch_id=pa.array([batch for _, _, batch, _ in rows], pa.int64()),
        correction=[again for *_, again in rows],
    )
    written(
        *(root, "measurements/climb"),
        site=["a", "b", "a"],
        sensor=["s1", "s1", "s2"],
        at=[BEGIN, BEGIN, BEGIN],
        height=[1.0, 7.0, 8.0],
    )
    spec, catalog = ModelSpec.model_validate(SPEC), Catalog(Tables(settings.warehouse))
    (one,) = estimate_series.read_warehouse_series(catalog, "climb", spec, estimate_series.LIVE).series
    assert one.lines[0].mean[0].tolist() == [0.0, 1.0, 4.0]
    assert one.flagged.tolist() == [False, False, True]
    np.testing.assert_array_equal(one.measured, [[1.0, np.nan, np.nan]])
    done = plot.run(settings, "climb", output=str(root / "live.html"))
    assert done.data["keys"] == ['["a","s1"]'] and done.data["rows"] == 3
    page = (root / "live.html").read_text()
    assert page.count("data:image/png;base64,") == 1 and ">4 ± 1</td>" in page
    with pytest.raises(UserError, match="estimates/climb: has no estimates of key ..zz.,.s1..$"):
        plot.run(settings, "climb", key=["a,s1", "zz,s1"], output=str(root / "x.png"))


@pytest.mark.parametrize(
    ("mean", "deviation", "text"),
    [
        (14.2348, 6.998, "14.2 ± 7"),
        (-8.49412, 6.26, "-8.5 ± 6.3"),
        (1234567.0, 4321.0, "1234600 ± 4300"),
        (0.00123456, 0.0000321, "0.001235 ± 3.2e-05"),
        (4.0, 1.0, "4 ± 1"),
        (2.5, 0.0, "2.5 ± 0"),
        (float("nan"), float("inf"), "nan ± inf"),
    ],
)
def test_an_estimate_has_the_digits_that_its_deviation_tells(mean: float, deviation: float, text: str):
    assert estimate_pictures.estimate_text(mean, deviation) == text


def test_the_variance_of_what_is_measured():
    rng = np.random.default_rng(3)
    factors = rng.normal(size=(5, 3, 3))
    covariance, mean = factors @ factors.swapaxes(1, 2), rng.normal(size=(5, 3))
    covariance[0, 2, 2] = np.inf  # still diffuse, and not measured
    h = np.array([1.0, -2.0, 0.0])
    seen, variance = kernel.project_states(mean, covariance, h, 4.0)
    np.testing.assert_allclose(seen, [4.0 + m[0] - 2.0 * m[1] for m in mean], rtol=1e-14)
    brute = [P[0, 0] - 4.0 * P[0, 1] + 4.0 * P[1, 1] for P in covariance]
    np.testing.assert_allclose(variance, brute, rtol=1e-12)


def test_plot_says_what_there_is_to_do(settings: Settings, tmp_path: Path, run_cli: RunCli):
    where = ("--warehouse", settings.warehouse, "--models", settings.models)
    done = run_cli(
        "plot", "--model", "climb", *where, env={"JAVA_HOME": "/nonexistent", "PATH": "/nonexistent"}
    )
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == (
        "plot climb: draw estimates of some keys with their bands, as a PNG or an HTML page\n"
        f"error: model climb has no live estimates in {settings.warehouse}: make them with "
        "`kalman-pipeline stream --model climb`\n"
    )
    generations_of(Path(settings.warehouse))
    with pytest.raises(
        UserError, match="yet: its stream has read no row after its snapshot; land newer rows and run"
    ):
        plot.run(settings, "climb")
    with pytest.raises(
        UserError, match="has no estimates of history in .*make them with `kalman-pipeline estimate"
    ):
        plot.run(settings, "climb", history=True)
    with pytest.raises(UserError, match=r"x\.svg: the file's ending must be \.png or \.html"):
        plot.run(settings, "climb", output=str(tmp_path / "x.svg"))
    with pytest.raises(UserError, match="--input draws a file and --history a table"):
        plot.run(settings, "climb", input="a.csv", history=True)
    with pytest.raises(
        UserError, match="has no estimates of 2 states level, slope: give a file that `kalman-pipeline"
    ):
        plot.run(settings, "climb", input=str(tmp_path / "in.csv"))
