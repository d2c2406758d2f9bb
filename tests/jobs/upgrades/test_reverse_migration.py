"""A version is rolled back with its state, and no row is read twice; against a textbook filter of one key."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest

from jobs import rollback, upgrade, verify
from jobs.core.errors import UserError
from jobs.lineage import generations
from jobs.lineage.generations import read_live_lineage
from jobs.lineage.live import live_estimates
from jobs.snapshots import manifests
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec
from tests.jobs.support.processes import Driver
from tests.jobs.upgrades.test_upgrade_faults import commits

pytestmark = pytest.mark.spark

F1, Q1 = np.array([[1.0, 1.0], [0.0, 0.9]]), np.diag([0.5, 0.01])
F2, Q2 = np.array([[1.0, 2.0, 0.0], [0.0, 0.9, 0.0], [0.0, 0.0, 0.8]]), np.diag([2.0, 0.01, 0.3])
H1, H2 = np.array([[1.0, 0.0], [0.5, 1.0]]), np.array([[0.5, 0.0, 1.0], [0.25, 1.0, 1.0]])
R = np.array([[1.0, 0.3], [0.3, 2.0]])
FIRST = random_walk_spec(
    process={"kind": "explicit", "F": F1.tolist(), "Q": Q1.tolist()},
    observation={"H": H1.tolist(), "R": R.tolist()},
)
SECOND: dict[
    str, Any
] = {  # the level in halves and under another name, and the two measurements' common error
    **FIRST,
    "version": 2,
    "states": ["halves", "slope", "bias"],
    "process": {"kind": "explicit", "F": F2.tolist(), "Q": Q2.tolist()},
    "observation": {"H": H2.tolist(), "R": R.tolist()},
    "initial": {"mean": [0.0, 0.0, 0.0], "covariance": np.diag([40.0, 1.0, 0.5]).tolist()},
    "migrate": {
        "states": {"halves": {"from": "level", "scale": 2.0, "offset": 3.0}, "bias": {"initial": True}}
    },
    "upgrade": {"loss": 10.0},
}
T, B, N = np.array([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]]), np.array([3.0, 0.0, 0.0]), np.diag([0.0, 0.0, 0.5])
BACK, C = np.array([[0.5, 0.0, 0.0], [0.0, 1.0, 0.0]]), np.array([-1.5, 0.0])
BOOKS = {
    1: (F1, Q1, H1, np.zeros(2), np.diag([10.0, 1.0])),
    2: (F2, Q2, H2, np.zeros(3), np.diag([40.0, 1.0, 0.5])),
}
MAPS = {(1, 2): (T, B, N), (2, 1): (BACK, C, np.zeros((2, 2)))}


def days(number: int) -> list[pd.DataFrame]:
    """Return rows of which no two of a key have one time."""
    return [day.drop_duplicates(["id", "at"]) for day in random_rows(number, keys=30, rows=80, seed=3)]


def oracle(rows: list[pd.DataFrame], versions: list[int]) -> dict[tuple[str, int], tuple[int, Any, Any]]:
    """Filter each key alone, each day by its version, and map the state by hand where the version changes."""
    found: dict[tuple[str, int], tuple[int, Any, Any]] = {}
    for key in sorted({int(one) for day in rows for one in day["id"]}):
        state: tuple[Any, Any] | None = None
        at = versions[0]
        for day, version in zip(rows, versions, strict=True):
            if version != at and state is not None:
                A, b, noise = MAPS[at, version]
                state = A @ state[0] + b, A @ state[1] @ A.T + noise
            at = version
            F, Q, H, m0, P0 = BOOKS[version]
            of_key: Any = day[day["id"] == key]
            mine = of_key.sort_values("at")
            for time, y in zip(mine["at"], mine[["a", "b"]].to_numpy(), strict=True):
                m, P = (m0, P0) if state is None else (F @ state[0], F @ state[1] @ F.T + Q)
                seen = ~np.isnan(y)
                h = H[seen]
                K = P @ h.T @ np.linalg.inv(h @ P @ h.T + R[np.ix_(seen, seen)])
                state = m + K @ (y[seen] - h @ m), P - K @ h @ P
                found[str(key), int(time.value)] = version, *state
    return found


def check(pipeline: Pipeline, rows: list[pd.DataFrame], versions: list[int]) -> None:
    """Check the live estimates of all days but the first: each row has one, of the version that had its day."""
    live = live_estimates(pipeline.warehouse, "walk").toPandas()
    assert len(live) == sum(map(len, rows[1:])), "no row is lost, none is there twice"
    wanted = oracle(rows, versions)
    row: Any
    for row in live.itertuples():
        version, m, P = wanted[row.key, row.event_time.value]
        assert row.model_version == version
        np.testing.assert_allclose(row.mean, m, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(row.covariance, P.ravel(), rtol=1e-9, atol=1e-9)


def upgraded(folder: Path, rows: list[pd.DataFrame], second: dict[str, Any] = SECOND) -> Pipeline:
    """Return a pipeline: a day of history, a day by version 1, and a day by version 2."""
    pipeline = Pipeline(folder, FIRST)
    pipeline.land(rows[0])
    pipeline.pretrain()
    pipeline.land(rows[1])
    pipeline.stream()
    pipeline.write_spec(second)
    upgrade.run(pipeline.settings, "walk", mode="stop-start")
    pipeline.land(rows[2])
    pipeline.stream()
    return pipeline


def statuses(pipeline: Pipeline) -> dict[str, str]:
    return {one.generation: one.status for one in generations.read_generations(pipeline.warehouse, "walk")}


@pytest.mark.slow
def test_a_version_is_rolled_back_with_its_state(tmp_path: Path) -> None:
    rows = days(5)
    pipeline = upgraded(tmp_path, rows)
    preview = rollback.run(pipeline.settings, "walk", last_state=True, dry_run=True)
    assert statuses(pipeline) == {"walk-g0001": "retired", "walk-g0002": "live"}
    assert preview.data["change"]["dropped"] == ["halves", "bias"] and preview.data["change"]["wrong"] == 0
    assert preview.data["snapshot"] is None and "dry run" in preview.lines[-1]

    done = rollback.run(pipeline.settings, "walk", last_state=True).data
    assert (done["generation"], done["model_version"]) == ("walk-g0003", 1)
    assert done["retired"] == "walk-g0002"
    again = rollback.run(pipeline.settings, "walk", last_state=True)
    assert (again.data["generation"], again.data["retired"]) == ("walk-g0003", None)
    by_name = rollback.run(pipeline.settings, "walk", to="walk-g0001", last_state=True)
    assert "nothing to do" in again.lines[0] and again.lines == by_name.lines
    assert statuses(pipeline) == {
        "walk-g0001": "retired",
        "walk-g0002": "retired",
        "walk-g0003": "live",
    }
    assert generations.read_named(pipeline.warehouse, "walk").partitions == 2  # as the spec says
    links = [(link.generation, link.last_batch) for link in read_live_lineage(pipeline.warehouse, "walk")]
    assert links == [("walk-g0003", None), ("walk-g0002", 0), ("walk-g0001", 0)]

    pipeline.land(rows[3])
    assert pipeline.stream().data["rows"] == len(rows[3])  # version 2 is deployed, and 1 goes on
    pipeline.write_spec(FIRST)
    pipeline.land(rows[4])
    assert pipeline.stream().data["generation"] == "walk-g0003"
    check(pipeline, rows, [1, 1, 2, 1, 1])
    proof = verify.run(pipeline.settings, "walk", share="100%").data
    assert (proof["outcome"], proof["not_verified"]) == ("equal", []), proof
    assert proof["counts"]["equal"] == sum(map(len, rows[1:]))


MAPS_BESIDE = """
import numpy as np

T, B, N = np.array([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]]), np.array([3.0, 0.0, 0.0]), np.diag([0.0, 0.0, 0.5])


def there(mean, covariance, extras):
    keys = mean.shape[1]
    P = np.einsum("ij,jlk,ml->imk", T, covariance.reshape(2, 2, keys), T) + N[:, :, None]
    return T @ mean + B[:, None], P.reshape(9, keys)


def back(mean, covariance, extras):
    keys, A = mean.shape[1], np.array([[0.5, 0.0, 0.0], [0.0, 1.0, 0.0]])
    P = np.einsum("ij,jlk,ml->imk", A, covariance.reshape(3, 3, keys), A)
    return A @ mean - np.array([[1.5], [0.0]]), P.reshape(4, keys)
"""
"""What SECOND does to states, and its inverse, as functions of a module beside the spec."""


@pytest.mark.slow
def test_migrate_reverse_can_be_added_later_and_without_it_a_roll_back_is_refused(tmp_path: Path) -> None:
    rows = days(4)
    by_function = {**SECOND, "migrate": {"function": "walk_maps:there"}}
    pipeline = Pipeline(tmp_path, FIRST)
    (tmp_path / "models" / "walk_maps.py").write_text(MAPS_BESIDE)
    pipeline.land(rows[0])
    pipeline.pretrain()
    pipeline.land(rows[1])
    pipeline.stream()
    settings = pipeline.settings
    with pytest.raises(UserError, match="walk-g0001 of walk came from no other version than its own, 1"):
        rollback.run(settings, "walk", last_state=True)
    with pytest.raises(UserError, match="--dry-run is for --last-state"):
        rollback.run(settings, "walk", dry_run=True)
    pipeline.write_spec(by_function)
    upgrade.run(settings, "walk", mode="stop-start")
    pipeline.land(rows[2])
    pipeline.stream()
    before = len(manifests.read_manifests(pipeline.warehouse, "walk"))
    with pytest.raises(UserError, match="the way from version 1 to 2 has no inverse") as raised:
        rollback.run(settings, "walk", last_state=True)
    assert "under migrate.reverse" in raised.value.message
    assert (
        "walk-g0002 is live as before; without --last-state walk-g0001 would continue" in raised.value.message
    )
    with pytest.raises(UserError, match=r"has no generation g \(it has walk-g0001, walk-g0002\)"):
        rollback.run(settings, "walk", to="g", last_state=True)
    assert len(manifests.read_manifests(pipeline.warehouse, "walk")) == before
    assert statuses(pipeline) == {"walk-g0001": "retired", "walk-g0002": "live"}

    # The way back is written into version 2, and the old generation's checkpoint is not needed for it.
    migrate = {"function": "walk_maps:there", "reverse": {"function": "walk_maps:back"}}
    pipeline.write_spec({**SECOND, "migrate": migrate})
    known = generations.read_generations(pipeline.warehouse, "walk")
    generations.remove(pipeline.warehouse, ["walk-g0001"], known)
    with pytest.raises(UserError, match="no generation to roll back to"):
        rollback.run(settings, "walk")
    assert rollback.run(settings, "walk", last_state=True).data["generation"] == "walk-g0003"
    pipeline.land(rows[3])
    pipeline.stream()
    check(pipeline, rows, [1, 1, 2, 1])
    with pytest.raises(UserError, match="go there with `kalman-pipeline upgrade"):
        rollback.run(settings, "walk", to="walk-g0002", last_state=True)


# After which file a roll-back is killed: table, and how many files more than before; or before the switch.
MOMENTS = {
    "the export's rows": ("snapshots/_delta_log", 1),
    "the export": ("manifests/_delta_log", 1),
    "the rows carried back": ("snapshots/_delta_log", 2),
    "the snapshot carried back": ("manifests/_delta_log", 2),
    "all but the switch": None,
    "the switch": ("generations/_delta_log", 1),
}


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(one, marks=pytest.mark.slow if one == "all but the switch" else pytest.mark.soak)
        for one in MOMENTS
    ],
)
def test_a_roll_back_killed_after(tmp_path: Path, moment: str) -> None:
    rows = days(4)
    pipeline = upgraded(tmp_path, rows)
    warehouse = pipeline.warehouse
    before, made = {**statuses(pipeline)}, len(manifests.read_manifests(warehouse, "walk"))
    where = MOMENTS[moment]
    # The commit of the switch waits for this lock.
    with warehouse.lock("generations") if where is None else nullcontext():
        reached = holds_open("generations.lock") if where is None else committed(pipeline, *where)
        driver = Driver(pipeline, "rollback", "--model", "walk", "--last-state")
        driver.wait_for(lambda: reached(driver))
        driver.kill()
        if moment != "the switch":
            assert statuses(pipeline) == before
    done = rollback.run(pipeline.settings, "walk", last_state=True).data
    assert (done["generation"], done["model_version"]) == ("walk-g0003", 1)
    assert statuses(pipeline) == {"walk-g0001": "retired", "walk-g0002": "retired", "walk-g0003": "live"}
    assert len(manifests.read_manifests(warehouse, "walk")) == made + 2
    pipeline.land(rows[3])
    pipeline.stream()
    check(pipeline, rows, [1, 1, 2, 1])


def committed(pipeline: Pipeline, table: str, more: int) -> Callable[[Driver], bool]:
    """Return a test whether a table has so many commits more than now."""
    folder = Path(pipeline.settings.warehouse, table)
    wanted = commits(folder) + more
    return lambda driver: commits(folder) >= wanted


def holds_open(name: str) -> Callable[[Driver], bool]:
    """Return a test whether a driver has a file of this name open."""

    def test(driver: Driver) -> bool:
        return any(file.path.endswith(name) for file in psutil.Process(driver.process.pid).open_files())

    return test
