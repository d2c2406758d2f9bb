"""The health of a model: its numbers against pandas, the page, the index. Tables made by delta-rs; no Spark."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from scipy.stats import chi2, norm

from jobs import report
from jobs.core.errors import UserError
from jobs.core.settings import Settings
from jobs.insight.health import Health, gather
from jobs.insight.health_page import build_health_page, judge_health
from jobs.insight.pictures import compute_wilson_interval, draw_example
from jobs.lineage import generations
from jobs.lineage.generations import LIVE, RETIRED, Generation
from jobs.snapshots import manifests
from jobs.snapshots.manifests import Manifest
from jobs.specs.model_spec import ModelSpec
from jobs.storage.row_changes import put_rows
from jobs.storage.tables import GENERATIONS, MANIFESTS
from jobs.storage.warehouse import Tables

SPEC: dict[str, Any] = {
    "name": "rooms",
    "version": 1,
    "key": ["room"],
    "time": "at",
    "measurement": ["temperature"],
    "states": ["level"],
    "process": {"kind": "random_walk", "variance": 1.0},
    "observation": {"R": [[1.0]]},
    "initial": {"mean": [0.0], "covariance": [[1.0]]},
}
SLOPED = {
    **SPEC,
    "version": 2,
    "states": ["level", "slope"],
    "process": {"kind": "local_linear_trend", "level_variance": 1.0, "slope_variance": 1.0},
    "observation": {"H": [[1.0, 0.0]], "R": [[1.0]]},
    "initial": {"mean": [0.0, 0.0], "covariance": [[1.0, 0.0], [0.0, 1.0]]},
}
START = pd.Timestamp("2024-03-01", tz="UTC")


def estimates(
    generation: str, batch: int, rows: int, keys: int, states: int, scale: float = 1.0
) -> pd.DataFrame:
    """Return made-up estimates whose NIS is `scale` times a chi-square's; every 20th row is gated."""
    rng = np.random.default_rng(batch + rows)
    flags = np.array([None, "gated"], object)[(np.arange(rows) % 20 == 7).astype(int)]
    return pd.DataFrame(
        {
            "key": [f"room-{n}" for n in rng.integers(0, keys, rows)],
            "event_time": START + pd.to_timedelta(batch * 86_400 + np.sort(rng.integers(0, 86_400, rows)), "s"),
            "mean": list(rng.normal(20, 1, (rows, states))),
            "covariance": [np.eye(states).ravel() for _ in range(rows)],
            "nis": np.where(flags == "gated", 30.0, scale * rng.chisquare(1, rows)),
            "flags": flags,
            "generation": generation,
            "batch_id": batch,
        }
    )  # fmt: skip


def put(root: Path, table: str, rows: pd.DataFrame, **options: Any) -> None:
    write_deltalake(
        str(root / table), pa.Table.from_pandas(rows, preserve_index=False), mode="append", **options
    )


def put_specs(tables: Tables, *specs: dict[str, Any]) -> None:
    """Put the manifests of the snapshots s1, s2 ..., each made with one of the specs."""
    tables.create("manifests", MANIFESTS)
    made = [
        Manifest(
            snapshot_id=f"s{number}", model="rooms", model_version=number, fingerprint="f", parameters={},
            position={"source": "delta", "version": 0}, key_count=1, checksum="", rows=1, snapshots_version=number,
            spec=ModelSpec.model_validate(spec).model_dump_json(by_alias=True),
        )
        for number, spec in enumerate(specs, 1)
    ]  # fmt: skip
    put_rows(
        tables,
        "manifests",
        ("snapshot_id",),
        lambda there: [manifests.build_manifest_row(one) for one in made],
    )


def warehouse(root: Path, scale: float = 1.0, rows: int = 300, keys: int = 9) -> pd.DataFrame:
    """Make a warehouse with a hand-over after micro-batch 1 of two generations; return the rows that are live."""
    first = pd.concat([estimates("rooms-g0001", batch, rows, keys, 1, scale) for batch in range(4)])
    second = pd.concat([estimates("rooms-g0002", batch, rows, keys, 2, scale) for batch in range(3)])
    for frame in (first, second):
        put(root, "estimates/rooms", frame)
    start = {"source": "delta", "table": "measurements/rooms", "version": 0}
    made_at = datetime(2024, 3, 5, tzinfo=UTC)
    began: dict[str, Any] = {"start_position": start, "partitions": 1, "blocks": 1, "created_at": made_at}
    known = [
        Generation("rooms-g0001", "rooms", 1, "f1", "s1", "c1", status=RETIRED, retired_at=made_at, **began),
        Generation(
            "rooms-g0002",
            "rooms",
            2,
            "f2",
            "s2",
            "c2",
            status=LIVE,
            parent="rooms-g0001",
            parent_batch=1,
            **began,
        ),
    ]
    tables = Tables(str(root))
    tables.create("generations", GENERATIONS)
    put_rows(
        tables,
        "generations",
        ("generation",),
        lambda there: [generations.build_generation_row(one) for one in known],
    )
    put_specs(tables, SPEC, SLOPED)
    reasons = ["late: older than the key's state"] * 3 + [
        "temperature: not a number: 'a'",
        "temperature: not a number: 'b'",
    ]
    put(
        root,
        "quarantine",
        pd.DataFrame({"model": "rooms", "reason": reasons, "status": ["replayed"] + [None] * 4}),
    )
    put(root, "quarantine", pd.DataFrame({"model": "others", "reason": reasons, "status": [None] * 5}))
    learned = [
        {"model": "rooms", "snapshot_id": "s2", "scope": "key", "key": f"room-{n}", "key_group": None,
         "outcome": "converged", "parameters": [("R", 1.0 + n)], "standard_errors": [("R", 0.1)], "rows": 10}
        for n in range(keys)
    ]  # fmt: skip
    kind = pa.map_(pa.string(), pa.float64())
    schema = pa.schema(
        [(name, kind if name in ("parameters", "standard_errors") else pa.int64() if name == "rows" else pa.string())
         for name in learned[0]]
    )  # fmt: skip
    write_deltalake(
        str(root / "learned"), pa.Table.from_pylist(learned, schema), partition_by=["model", "snapshot_id"]
    )
    folder = root / "_progress" / "rooms"
    folder.mkdir(parents=True)
    record = {"model": "rooms", "generation": "rooms-g0002", "started_at": "2024-03-05T00:00:00Z", "seconds": 2.0,
              "rows": 1, "lag_rows": 1, "batch_id": 2}  # fmt: skip
    (folder / "rooms-g0002.000001.000000.jsonl").write_text(json.dumps(record) + "\n" + '{"model": "roo')
    live: pd.DataFrame = pd.concat([first.query("batch_id <= 1"), second])
    return live


def test_the_numbers_are_those_of_the_live_rows(tmp_path: Path) -> None:
    live = warehouse(tmp_path)
    health = gather(str(tmp_path), "rooms", None)
    good = live[live["flags"].isna()]
    one = health.over_time
    assert health.rows == one.rows.sum() == len(live) == 1500
    assert one.flags["gated"].sum() == live["flags"].notna().sum() == 75
    assert one.nis.sum() == pytest.approx(good["nis"].sum(), rel=1e-13) and one.degrees.sum() == len(good)
    assert one.inside.sum() == (good["nis"] <= chi2.ppf(0.95, 1)).sum() and one.scored.sum() == len(live)
    by_key: Any = good.groupby("key")["nis"].agg(["sum", "count"])
    assert health.keys.key == by_key.index.tolist()
    np.testing.assert_allclose(health.keys.nis, by_key["sum"], rtol=1e-13)
    np.testing.assert_array_equal(health.keys.degrees, by_key["count"])
    low, high = chi2.ppf([0.025, 0.975], by_key["count"].to_numpy()[:, None]).T / by_key["count"].to_numpy()
    ratio = by_key["sum"] / by_key["count"]
    assert health.outside == pytest.approx(((ratio < low) | (ratio > high)).mean())
    assert [(one.reason, one.status, one.rows) for one in health.fates] == [
        ("late: older than the key's state", "held", 2),
        ("temperature: not a number", "held", 2),
        ("late: older than the key's state", "replayed", 1),
    ]
    assert health.first_rows == {
        name: rows["event_time"].min().value // 1000 for name, rows in live.groupby("generation")
    }
    assert health.made_at <= datetime.now(UTC) and len(health.progress) == 1  # half a line is no record


def test_a_corrected_row_counts_once(tmp_path: Path) -> None:
    """Of a generation's rows with a key, a time and any correction, those of the latest micro-batch count."""
    live = warehouse(tmp_path)
    again = live[(live["generation"] == "rooms-g0002") & (live["batch_id"] == 0)].iloc[:40]
    twice = [again.assign(batch_id=batch, correction=True, nis=float(batch), flags=None) for batch in (3, 4)]
    withdrawn = live[live["generation"] == "rooms-g0001"].iloc[:25].assign(batch_id=2, correction=True)
    put(tmp_path, "estimates/rooms", pd.concat([*twice, withdrawn]), schema_mode="merge")
    every = pd.concat([live.assign(correction=False), *twice])
    same: Any = every.groupby(["generation", "key", "event_time"])
    stays = ~same["correction"].transform("max") | (every["batch_id"] == same["batch_id"].transform("max"))
    kept: Any = every[stays.astype(bool)]
    health = gather(str(tmp_path), "rooms", None)
    assert health.rows == len(kept) == len(live)
    good = kept[kept["flags"].isna()]
    assert health.over_time.nis.sum() == pytest.approx(good["nis"].sum(), rel=1e-13)
    assert health.over_time.flags["gated"].sum() == kept["flags"].notna().sum() < 75
    np.testing.assert_allclose(health.keys.rows, kept.groupby("key").size())


def test_the_chosen_keys_show_the_measured_state_of_both_versions(tmp_path: Path) -> None:
    live = warehouse(tmp_path)
    health = gather(str(tmp_path), "rooms", None, ["room-3"])
    assert [one.key for one in health.examples][0] == "room-3" and 2 <= len(health.examples) <= 4
    rows = live.query("key == 'room-3'").sort_values("event_time", kind="stable").tail(400)
    shown = health.examples[0]
    line = shown.lines[0]
    assert sorted(line.mean) == sorted(mean[0] for mean in rows["mean"])
    assert (line.deviation == 1.0).all() and shown.quantity == "temperature"
    assert sorted(line.nis) == sorted(rows["nis"]) and (line.components == 1.0).all()
    share = (rows["nis"] < 3.841458820694124).mean()
    ax = plt.figure().subplots()
    draw_example.__wrapped__(ax, shown)
    assert ax.get_title(loc="center") == "room-3 · asked for"
    assert f"{share:.1%} of rows in their predicted 95 %" in ax.get_legend_handles_labels()[1][-1]
    with pytest.raises(
        UserError, match="--key room-77: model rooms has no estimate of it, such as of room-0"
    ):
        gather(str(tmp_path), "rooms", None, ["room-3", "room-77"])


@pytest.mark.parametrize(("scale", "kind"), [(1.0, "good"), (3.0, "bad"), (0.3, "bad")])
def test_the_verdict_follows_from_nis(tmp_path: Path, scale: float, kind: str) -> None:
    warehouse(tmp_path, scale)
    found, sentence = judge_health(gather(str(tmp_path), "rooms", None))
    assert found == kind
    assert ("kalman-pipeline compare --model rooms --model other" in sentence) == (kind == "bad")


def test_little_is_told_in_a_neutral_colour_and_in_the_singular(tmp_path: Path) -> None:
    warehouse(tmp_path, rows=1, keys=1)
    health = gather(str(tmp_path), "rooms", None)
    assert judge_health(health)[0] == "neutral"
    text = re.sub(r"<[^>]+>", " ", build_health_page(health))
    assert "of 1 key" in text and "1 keys" not in text and "1 rows" not in text and "1 micro-batch," in text


def test_several_columns_without_innovations_are_not_judged(tmp_path: Path) -> None:
    warehouse(tmp_path)
    two = {
        **SLOPED,
        "measurement": ["a", "b"],
        "observation": {"H": [[1.0, 0.0], [0.0, 1.0]], "R": [[1.0, 0.0], [0.0, 1.0]]},
    }
    put_specs(Tables(str(tmp_path)), two, two)
    health = gather(str(tmp_path), "rooms", None)
    assert judge_health(health)[0] == "neutral" and "innovation: true" in build_health_page(health)


def page_of(root: Path) -> tuple[str, Health]:
    health = gather(str(root), "rooms", None)
    return build_health_page(health), health


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    warehouse(tmp_path)
    page, health = page_of(tmp_path)
    for title in (
        "Fit over time",
        "Keys",
        "Worst keys",
        "Rows by fate",
        "Flags",
        "Lag",
        "Versions and hand-overs",
        "Learned",
    ):
        assert f"<h2>{title}" in page
    assert page.count("<img ") == 2 + len(health.examples) + 1 + 1 + 1 + 1  # R's distribution is the last
    assert not re.search(r"(src|href)=\"(?!data:)", page) and "<script" not in page
    assert "continues" in page and "rooms-g0001 after micro-batch 1" in page and "level, slope" in page


def test_wilson_s_interval() -> None:
    # Roots of (p - share)^2 = z^2 p (1 - p) / n, solved here as a polynomial.
    z, inside, rows = norm.ppf(0.975), 19.0, 20.0
    square = float(z * z)
    roots = np.sort(np.roots([1 + square / rows, -(2 * inside + square) / rows, (inside / rows) ** 2]))
    np.testing.assert_allclose(
        compute_wilson_interval(np.array([inside]), np.array([rows])), roots[:, None], rtol=1e-6
    )


def test_the_verb_writes_page_and_index_without_spark(tmp_path: Path, models_dir: Path) -> None:
    root = tmp_path / "warehouse"
    warehouse(root)
    settings = Settings.load(warehouse=str(root), models=str(models_dir), quiet=True)
    done = report.run(settings, "rooms").data
    assert (
        done["rows"] == 1500
        and done["good"]
        and Path(done["report"]).read_text().startswith("<!doctype html>")
    )
    index = report.run(settings).data
    assert index["models"] == ["air_time", "aircraft_delay", "nile", "rooms"]
    assert 'href="rooms/health.html"' in Path(index["report"]).read_text()
    with pytest.raises(UserError, match="model nile has no estimates to report on"):
        report.run(settings, "nile")
    with pytest.raises(UserError, match="--model is missing"):
        report.run(settings, compare=True)
