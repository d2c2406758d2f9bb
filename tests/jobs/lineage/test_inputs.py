"""Inputs of keys from a table: each micro-batch uses one version, and the same one when it is repeated."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from jobs import filter as offline
from jobs import inputs
from jobs.core.errors import UserError
from jobs.lineage.inputs_table import build_inputs_layout, check_inputs, look_up, map_records
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.packets import Records
from jobs.state.encoding.routing import compute_routes
from tests.jobs.specs.test_spec import refused
from tests.jobs.support.pipeline import Pipeline
from tests.jobs.support.processes import Driver, files

VARIANCE, START = 0.25, (1.0, 100.0)
GAUGES: dict[str, Any] = {
    "name": "gauge",
    "version": 1,
    "key": ["site", "id"],
    "time": "at",
    "time_unit": "minute",
    "measurement": ["level"],
    "inputs": {"columns": {"noise": "variance", "bias": "offset"}},
    "states": ["level"],
    "process": {"kind": "random_walk", "variance": VARIANCE},
    "observation": {"R": [["noise"]], "offset": ["bias"]},
    "initial": {"mean": [START[0]], "covariance": [[START[1]]]},
    "stream": {"max_files_per_batch": 1, "partitions": 2, "keys_per_block": 4},
}
Table = Mapping[tuple[str, int], tuple[float, float]]


def readings(day: int, keys: Sequence[tuple[str, int]], rows: int = 80) -> pd.DataFrame:
    rng = np.random.default_rng(day)
    chosen = rng.integers(0, len(keys), rows)
    minute = np.sort(rng.choice(24 * 60, rows, replace=False)) + day * 24 * 60
    at = pd.Timestamp("2024-03-01", tz="UTC") + pd.to_timedelta(minute, "min")
    return pd.DataFrame(
        {
            "site": [keys[i][0] for i in chosen],
            "id": [keys[i][1] for i in chosen],
            "at": at.as_unit("us"),
            "level": rng.normal(size=rows),
        }
    )


def table_of(keys: Sequence[tuple[str, int]], seed: int) -> dict[tuple[str, int], tuple[float, float]]:
    rng = np.random.default_rng(seed)
    return {key: (float(rng.uniform(0.1, 5.0)), float(rng.normal(0.0, 3.0))) for key in keys}


def as_frame(table: Table) -> pd.DataFrame:
    return pd.DataFrame.from_records(
        [(site, number, *values) for (site, number), values in table.items()],
        columns=["site", "id", "variance", "offset"],
    )


def put(pipeline: Pipeline, table: Table) -> int:
    path = pipeline.folder / "inputs.csv"
    as_frame(table).to_csv(path, index=False)
    return inputs.run(pipeline.settings, "gauge", str(path)).data["version"]


def by_hand(parts: Sequence[tuple[pd.DataFrame, Table]], silence: timedelta = timedelta.max) -> pd.DataFrame:
    """Filter rows in the order of their times as a textbook does, those of each part with its own inputs.

    Rows without any inputs are left out; a key that was silent for longer begins anew.
    """
    states: dict[tuple[str, int], tuple[float, float, pd.Timestamp]] = {}
    out = []
    told: list[tuple[Any, Table]] = [(row, table) for rows, table in parts for row in rows.itertuples()]
    for row, table in sorted(told, key=lambda one: one[0].at):
        key = (row.site, row.id)
        if key not in table:
            continue
        R, bias = table[key]
        m, P = START
        if key in states and row.at - states[key][2] <= silence:
            m, P, before = states[key]
            P += VARIANCE * (row.at - before).total_seconds() / 60
        error, S = row.level - bias - m, P + R
        m, P = m + P / S * error, P * R / S
        states[key] = (m, P, row.at)
        said = -0.5 * (math.log(2 * math.pi * S) + error * error / S)
        out.append((json.dumps([row.site, str(row.id)], separators=(",", ":")), row.at, m, P, said))
    return pd.DataFrame.from_records(
        out, columns=["key", "event_time", "mean", "covariance", "log_likelihood"]
    )


def assert_same(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    order = ["key", "event_time"]
    found, expected = (one.sort_values(order, ignore_index=True) for one in (found, expected))
    assert found["key"].to_list() == expected["key"].to_list()
    assert found["event_time"].to_list() == expected["event_time"].dt.tz_localize(None).to_list()
    for name in ("mean", "covariance"):
        np.testing.assert_allclose([one[0] for one in found[name]], expected[name], rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(found["log_likelihood"], expected["log_likelihood"], rtol=1e-11, atol=1e-12)


KEYS = [(site, number) for site in ("east", 'we"st') for number in range(5)]


def forget_the_last_commit(pipeline: Pipeline) -> int:
    """Undo the end of the stream's last micro-batch, as if its driver had been killed just before it."""
    commits = Path(pipeline.settings.warehouse, "checkpoints", f"{pipeline.name}-g0001", "commits")
    last = max(int(name) for name in files(commits))
    (commits / str(last)).unlink()
    (commits / f".{last}.crc").unlink(missing_ok=True)
    return last


@pytest.mark.slow
@pytest.mark.spark
def test_each_micro_batch_uses_one_version_and_the_same_after_a_kill(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, GAUGES)
    days = [readings(day, KEYS) for day in range(3)]
    first, second = table_of(KEYS[:-1], 1), table_of(KEYS, 2)
    pipeline.land(days[0])
    with pytest.raises(UserError, match="inputs/gauge: there is no such Delta table .* make it with"):
        pipeline.pretrain()
    assert put(pipeline, first) == 0
    made = pipeline.pretrain().data
    assert made["inputs"]["version"] == 0 and made["inputs"]["left_out"] == of_last_key(days[0])
    assert not pipeline.pretrain().data["made"]

    pipeline.land(days[1])
    assert pipeline.stream().data["without_inputs"] == of_last_key(days[1])
    kept = pipeline.warehouse.read("quarantine").toPandas()
    assert set(kept["reason"]) == {"inputs: the table of inputs has no row for the key"}
    assert len(kept) == of_last_key(days[1]) > 0
    assert set(json.loads(str(kept["payload"].iloc[0]))) == {"site", "id", "at", "level"}

    # Killed before its last micro-batch is committed, the driver repeats it with the pinned version, and continues.
    assert put(pipeline, second) == 1
    last = forget_the_last_commit(pipeline)
    pipeline.land(days[2])
    pipeline.stream()
    pins = Path(pipeline.settings.warehouse, "checkpoints", "gauge-g0001", "inputs", "pins")
    versions = [json.loads((pins / f"{batch}.json").read_text())["version"] for batch in range(last + 2)]
    assert versions == [0, 1]
    expected = by_hand([(days[0], first), (days[1], first), (days[2], second)])
    assert_same(pipeline.estimates(), since(expected, days[1]))
    assert pipeline.warehouse.read("quarantine").count() == len(kept)


def of_last_key(rows: pd.DataFrame) -> int:
    return int(((rows["site"] == KEYS[-1][0]) & (rows["id"] == KEYS[-1][1])).sum())


def since(expected: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    return expected.loc[expected["event_time"] >= rows["at"].min()]


def driver_killed_behind_its_pin(pipeline: Pipeline, batch: int) -> None:
    """Kill a driver once it has pinned a micro-batch, with luck before it has written any of it."""
    folder = Path(pipeline.settings.warehouse, "checkpoints", "gauge-g0001", "inputs", "pins")
    driver = Driver(pipeline, "stream", "--model", "gauge")
    driver.wait_for(lambda: f"{batch}.json" in files(folder))
    driver.kill()


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_a_driver_killed_after_its_pin_leaves_the_version_to_the_next(tmp_path: Path, strict: bool) -> None:
    order = {"order": {"kind": "strict", "delay": "30min"}} if strict else {}
    pipeline = Pipeline(tmp_path, {**GAUGES, **order})
    days = [readings(day, KEYS) for day in range(5)]
    tables = [table_of(KEYS, seed) for seed in range(4)]
    pipeline.land(days[0])
    put(pipeline, tables[0])
    pipeline.pretrain()
    parts = [(days[0], tables[0])]
    for batch in range(3):
        pipeline.land(days[batch + 1])
        driver_killed_behind_its_pin(pipeline, batch)
        put(pipeline, tables[batch + 1])
        parts.append((days[batch + 1], tables[batch]))
        if batch == 2:
            pipeline.land(days[4])
            parts.append((days[4], tables[3]))
        pipeline.stream()
    expected = by_hand(parts)
    found, later = pipeline.estimates(), since(expected, days[1])
    if strict:  # rows of the last half hour of a day wait, and keep the inputs that they arrived with
        ahead = days[0]["at"].max() - pd.Timedelta("30min")
        end = days[4]["at"].max() - pd.Timedelta("30min")
        later = expected.loc[(expected["event_time"] >= ahead) & (expected["event_time"] < end)]
    assert_same(found, later)

    # A new snapshot uses the latest version for all rows.
    states = pipeline.snapshot(pipeline.pretrain().data["snapshot"]).set_index("key")
    whole = pd.concat(days)
    if strict:
        whole = whole.loc[whole["at"] < whole["at"].max() - pd.Timedelta("30min")]
    last = by_hand([(whole, tables[3])]).groupby("key").last()
    assert sorted(states.index) == sorted(last.index)
    np.testing.assert_allclose(
        [one[0] for one in states["mean"]], last["mean"].loc[states.index], rtol=1e-11, atol=1e-12
    )


@pytest.mark.spark
@pytest.mark.slow
def test_keys_share_a_row_or_get_the_defaults(tmp_path: Path) -> None:
    section = {**GAUGES["inputs"], "key": ["id"], "defaults": {"noise": 2.0, "bias": -1.0}}
    pipeline = Pipeline(tmp_path, {**GAUGES, "inputs": {**section, "table": str(tmp_path / "shared")}})
    days = [readings(day, KEYS) for day in range(2)]
    of_id = {number: values for (_, number), values in table_of(KEYS[:4], 7).items()}
    table = {key: of_id.get(key[1], (2.0, -1.0)) for key in KEYS}
    rows = pd.DataFrame.from_records(
        [(number, *values) for number, values in of_id.items()], columns=["id", "variance", "offset"]
    )
    pipeline.land(days[0])
    rows.to_parquet(tmp_path / "inputs.parquet", index=False)
    inputs.run(pipeline.settings, "gauge", str(tmp_path / "inputs.parquet"))
    states = pipeline.snapshot(pipeline.pretrain().data["snapshot"]).set_index("key")
    last = by_hand([(days[0], table)]).groupby("key").last()
    assert sorted(states.index) == sorted(last.index)
    np.testing.assert_allclose(
        [one[0] for one in states["mean"]], last["mean"].loc[states.index], rtol=1e-11, atol=1e-12
    )
    pipeline.land(days[1])
    assert pipeline.stream().data["without_inputs"] == 0
    assert_same(pipeline.estimates(), since(by_hand([(day, table) for day in days]), days[1]))
    renamed = {
        **section,
        "table": str(tmp_path / "shared"),
        "columns": {"noise": "variances", "bias": "offset"},
    }
    pipeline.write_spec({**GAUGES, "inputs": renamed})
    with pytest.raises(
        UserError, match="version 0: there is no column variances .it has id, variance, offset"
    ):
        pipeline.stream()


# Without Spark


def test_the_offline_command_takes_a_file_of_inputs(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, {**GAUGES, "inputs": {**GAUGES["inputs"], "key": ["site"]}})
    rows = readings(0, KEYS)
    sites = pd.DataFrame({"offset": [0.5, -2.0], "variance": [0.3, 4.0], "site": ["east", 'we"st']})
    table = {key: (0.3, 0.5) if key[0] == "east" else (4.0, -2.0) for key in KEYS}
    source, file, out = (tmp_path / name for name in ("rows.csv", "sites.csv", "out.parquet"))
    rows.to_csv(source, index=False)

    def run(frame: pd.DataFrame | None) -> pd.DataFrame:
        if frame is not None:
            frame.to_csv(file, index=False)
        offline.run(
            pipeline.settings, "gauge", str(source), str(out), inputs=None if frame is None else str(file)
        )
        return pd.read_parquet(out)

    found = run(sites)
    expected = by_hand([(rows, table)]).set_index("event_time")["mean"]
    assert set(found["flag"]) == {None}
    np.testing.assert_allclose(
        [one[0] for one in found["mean"]],
        expected.loc[pd.to_datetime(found["at"])],
        rtol=1e-11,
        atol=1e-12,
    )
    found = run(sites.head(1))
    rejected = found["site"] == 'we"st'
    assert set(found.loc[rejected, "flag"]) == {"rejected: inputs: the file of inputs has no row for the key"}
    assert set(found.loc[~rejected, "flag"]) == {None}
    for frame, said in (
        (None, "gauge has inputs: give a file of them, a row a key, with --inputs"),
        (pd.concat([sites, sites]), "row 3 .key east.: the key is there twice, and 1 more"),
        (sites.assign(variance=["x", "1"]), "row 1 .key east.: input variance: not a number"),
        (sites.drop(columns="offset"), "offset"),
    ):
        with pytest.raises(UserError, match=said):
            run(frame)
    pipeline.write_spec(
        {**GAUGES, "inputs": {**GAUGES["inputs"], "key": ["site"], "defaults": {"noise": 1.0, "bias": 0.0}}}
    )
    found = run(sites.head(1))
    table = {key: (0.3, 0.5) if key[0] == "east" else (1.0, 0.0) for key in KEYS}
    expected = by_hand([(rows, table)]).set_index("event_time")["mean"]
    np.testing.assert_allclose(
        [one[0] for one in found["mean"]],
        expected.loc[pd.to_datetime(found["at"])],
        rtol=1e-11,
        atol=1e-12,
    )


@pytest.mark.parametrize("integer", [True, False])
def test_a_lookup_finds_its_keys_in_a_mapped_file_and_distinguishes_two_of_one_hash(
    tmp_path: Path, integer: bool
) -> None:
    kind = KeyKind(("id",), ("bigint" if integer else "string",), integer)
    layout = build_inputs_layout(kind, 2)
    identity = np.arange(0, 400, 2)
    arrays: dict[str, Any] = {"route": np.sort(compute_routes(identity))}
    if not integer:
        arrays["route"][1] = arrays["route"][0]
        arrays["check"] = np.arange(200)
    table = Records({**arrays, "u": np.arange(400.0).reshape(2, 200)}, None)
    path = tmp_path / "table.packet"
    path.write_bytes(layout.encode(table))
    read = map_records(path, layout)
    places = np.random.default_rng(0).permutation(200)[:50]
    u, known = look_up(read, table.take(places), None)
    assert known.all()
    np.testing.assert_array_equal(u, table.arrays["u"][:, places])
    asked: dict[str, Any] = {"route": compute_routes(np.array([1, 3]))}
    if not integer:
        asked["check"] = np.array([0, 0])
    u, known = look_up(read, Records(asked, None), None)
    assert not known.any()
    u, known = look_up(read, Records(asked, None), (5.0, 6.0))
    assert known.all() and u.tolist() == [[5.0, 5.0], [6.0, 6.0]]
    path = tmp_path / "empty.packet"
    path.write_bytes(layout.encode(layout.empty()))
    assert not look_up(map_records(path, layout), Records(asked, None), None)[1].any()


def rows_of(ids: Sequence[int | None], noise: Sequence[float | None]) -> pa.Table:
    """Return rows of a table of inputs as Spark returns them."""
    return pa.table(
        {
            "_text": [str(one) for one in ids],
            "_null_id": [one is None for one in ids],
            "identity": pa.array([one or 0 for one in ids], pa.int64()),
            "v0": pa.array(noise, pa.float64()),
        }
    )


@pytest.mark.parametrize(
    ("ids", "noise", "said"),
    [
        (
            [1, 2],
            [1.0, None],
            "t version 3: variance is missing or not a finite number for key 2; a key has one row",
        ),
        (
            [1, 2],
            [math.inf, math.nan],
            "not a finite number for key 1, and 1 more like it; a key has one row",
        ),
        ([1, None], [1.0, 1.0], "t version 3: a row has no id; a key has one row"),
        ([5, 7, 5], [1.0, 2.0, 3.0], "t version 3: there are two rows for key 5; a key has one row"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(ids: Any, noise: Any, said: str) -> None:
    kind = KeyKind(("id",), ("bigint",), True)
    with pytest.raises(UserError, match=said):
        check_inputs(rows_of(ids, noise), kind, ["variance"], "t version 3")
    table = check_inputs(rows_of([5, 7, -1], [1.0, 2.0, 3.0]), kind, ["variance"], "t version 3")
    u, known = look_up(table, Records({"route": compute_routes(np.array([7, 5, 6]))}, None), None)
    assert known.tolist() == [True, True, False] and u[0, :2].tolist() == [2.0, 1.0]
    assert check_inputs(rows_of([], []), kind, ["variance"], "t version 3").size == 0


def test_a_pin_is_made_once(tmp_path: Path) -> None:
    from jobs.storage.files import LocalFiles

    kept = LocalFiles(tmp_path)
    assert kept.create("pins/1.json", b"one") and not kept.create("pins/1.json", b"two")
    assert kept.read("pins/1.json") == b"one" and kept.names("pins") == ["1.json"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key": ["river"]}, "inputs.key[0]: 'river' is not a key column; choose from site, id"),
        (
            {"defaults": {"noise": 1.0}},
            "inputs.defaults: names other inputs than columns; give a default for each of",
        ),
        ({"columns": {}}, "inputs.columns: is empty"),
        ({"columns": {"level": "x"}}, "inputs.columns: column 'level' is already used in measurement"),
    ],
)
def test_mistakes_in_a_spec_are_errors(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in refused(tmp_path, {**GAUGES, "inputs": {**GAUGES["inputs"], **changes}})


def test_inputs_are_part_of_a_states_meaning_and_their_table_is_not() -> None:
    spec = ModelSpec.model_validate(GAUGES)
    other = ModelSpec.model_validate({**GAUGES, "inputs": {**GAUGES["inputs"], "table": "/data/x"}})
    renamed = ModelSpec.model_validate(
        {
            **GAUGES,
            "inputs": {"columns": {"noise": "variance", "shift": "offset"}},
            "observation": {"R": [["noise"]], "offset": ["shift"]},
        }
    )
    assert spec.fingerprint() == other.fingerprint() != renamed.fingerprint()
    assert spec.definition()["control"] == ["noise", "bias"] and spec.columns == ["site", "id", "at", "level"]
