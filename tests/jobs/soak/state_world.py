"""A model whose state has sparse, mixed and dense micro-batches, and what must be true of its state after a strike.

Counted and compared are the states that `export` reads from the checkpoint's files, without those that a driver holds
in its memory: the rows of each key against the rows that were landed, and the numbers against the filter alone.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from jobs import export, verify
from jobs.core.errors import UserError
from jobs.lineage import generations
from jobs.lineage.live import latest_corrections, live_estimates
from jobs.snapshots import waiting_rows
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.tables import measurements
from tests.jobs.soak.aimed import Aim
from tests.jobs.soak.kills import Kill
from tests.jobs.soak.oracle import Oracle, as_compared, differences
from tests.jobs.soak.state_kills import ARRIVED, DENSE, FILES, MIXED, SPARSE, STRICT, StateKill
from tests.jobs.soak.world import MODEL, Act, World
from tests.jobs.support.pipeline import Pipeline, random_walk_spec

KEYS = {SPARSE: 40, MIXED: 500, DENSE: 2000}
"""Keys of a day's rows; a sparse day writes a change, as its blocks have more than 512 records."""
KEYS_PER_BLOCK = 64
FIRST_DAY = pd.Timestamp("2024-03-01", tz="UTC")
DELAY = pd.Timedelta("12h")
ORDERS: dict[str, dict[str, Any]] = {
    ARRIVED: {},
    STRICT: {"order": {"kind": "strict", "delay": "12h"}},
    "replay": {"order": {"kind": "replay", "rows": 8}},
}
_STORE = "spark.sql.streaming.stateStore"


def java_options(folder: Path, *more: str) -> str:
    """Return SPARK_SUBMIT_OPTS with which Spark keeps its local copies below a folder."""
    usual = os.environ["SPARK_SUBMIT_OPTS"].split(" -Dspark.local.dir=")[0]
    return " ".join([usual, f"-Dspark.local.dir={folder}", *more])


class StateWorld(World):
    """A model's warehouse with a stream, some thousand keys, and strikes at one micro-batch each."""

    environment: ClassVar[dict[str, str]] = {}

    def __init__(self, folder: Path, seed: int, order: str, partitions: int) -> None:
        self.random, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.order, self.partitions, self.version, self.bad = order, partitions, 1, 0
        self.local = folder / "local"
        # Uploads of snapshots of the state in seconds; the test's own Spark takes its time, so that later micro-batches
        # are read from changelogs.
        quick = f"-D{_STORE}.maintenanceInterval=1s", f"-D{_STORE}.minDeltasForSnapshot=1"
        self.environment = {"SPARK_SUBMIT_OPTS": java_options(folder / "local-struck", *quick)}  # type: ignore[misc]
        os.environ["SPARK_SUBMIT_OPTS"] = java_options(self.local)
        self.pipeline = Pipeline(folder, self.spec(1, None))
        self.oracle = Oracle(self.pipeline.settings, MODEL, folder)
        self.land_day(DENSE)
        self.pipeline.pretrain()
        self.land_day(SPARSE)
        self.catch_up()

    def spec(self, version: int, migrated_from: int | None) -> dict[str, Any]:
        stream = {"max_files_per_batch": 1, "partitions": self.partitions, "keys_per_block": KEYS_PER_BLOCK}
        return random_walk_spec(MODEL, version=version, stream=stream, **ORDERS[self.order])

    def land_day(self, kind: str) -> None:
        """Land a day with rows of few, of many or of all keys; by event time, some reach into the next day."""
        number = len(self.oracle.parts)
        keys = np.sort(self.numbers.choice(KEYS[DENSE], KEYS[kind], replace=False))
        minutes = 1440 if self.order == ARRIVED or number == 0 else 1900
        seconds = number * 86_400 + self.numbers.integers(0, minutes * 60, len(keys))
        at = seconds * 1_000_000 + keys  # no two rows at one time
        values = self.numbers.normal(size=(2, len(keys))) + keys / 100
        frame = pd.DataFrame({"id": keys, "at": FIRST_DAY + pd.to_timedelta(at, "us")})
        frame = frame.assign(a=values[0], b=values[1]).astype({"at": "datetime64[us, UTC]"})
        self.pipeline.land(frame)
        self.oracle.parts.append(frame)

    def checkpoint(self) -> Checkpoint:
        live = generations.find_live(self.pipeline.warehouse, MODEL)
        assert live is not None
        return Checkpoint(self.pipeline.warehouse, live.checkpoint)

    def prepared(self, kill: Kill) -> Act:
        """Land the days of a strike; a driver that is to have no copy then begins behind a dense day."""
        assert isinstance(kill, StateKill)
        if not kill.copy:
            self.land_day(DENSE)
            self.catch_up()
        for kind in (*kill.lead, kill.target, *kill.following):
            self.land_day(kind)
        if not kill.kept:
            for copies in self.local.glob("*/kalman-states"):
                shutil.rmtree(copies)
        return Act(["stream", "--model", MODEL])

    def aim(self, kill: Kill, notes: str, seconds: float) -> Aim:
        assert isinstance(kill, StateKill)
        aim = super().aim(kill, notes, seconds)
        if kill.point is not None:
            return aim
        folder, pattern = FILES[kill.moment_name]
        checkpoint = self.checkpoint()
        batch = (checkpoint.find_last_commit() or 0) + 1 + len(kill.lead)
        least = batch + 1 if folder.startswith("state") else batch
        place = Path(self.pipeline.settings.warehouse, "checkpoints", f"{MODEL}-g0001")
        folders = str(place / folder.format(partition=kill.partition))
        return Aim(aim.victim, aim.how, notes, folders=folders, file=pattern, least=least, far=aim.far)

    def problems(self, catch_up: bool = True) -> list[str]:
        """Return what is not as it must be, a sentence each."""
        try:
            self.catch_up()
            taken = export.run(self.pipeline.settings, MODEL).data["snapshot"]
            verified = verify.run(self.pipeline.settings, MODEL, share="1")
        except UserError as error:
            return [f"a command does not end well: {error.message}"]
        said = [] if verified.data["outcome"] == "equal" else [f"verify: {one}" for one in verified.lines]
        warehouse, parts = self.pipeline.warehouse, self.oracle.parts
        live = as_compared(latest_corrections(live_estimates(warehouse, MODEL)).toPandas())
        landed = warehouse.read(measurements(MODEL)).toPandas()
        states = as_compared(self.pipeline.snapshot(taken))
        whole = self.oracle.one_pass(0)
        applied: Any = whole[whole["event_time"] < self.watermark(len(parts))]
        expected = applied[applied["event_time"] >= self.watermark(1)]
        last = applied.sort_values("event_time").groupby("key").tail(1)
        return [
            *said,
            *(f"live estimates: {one}" for one in differences(live, expected)),
            *(f"states: {one}" for one in differences(states, last, ("mean", "covariance"))),
            *(f"measurements: {one}" for one in self._landed(landed)),
            *self._count_packets(taken, states),
            *self._generations(),
        ]

    def watermark(self, parts: int) -> pd.Timestamp:
        """Return the time before which rows of so many parts are in the states."""
        newest = max(part["at"].max() for part in self.oracle.parts[:parts]).tz_localize(None)
        return newest - DELAY if self.order == STRICT else newest + pd.Timedelta("1us")

    def _count_packets(self, taken: str, states: pd.DataFrame) -> list[str]:
        """Compare the rows that a snapshot counts for each key, applied or waiting, with the files that were landed."""
        sent = pd.concat(pd.read_parquet(file) for file in self.pipeline.folder.glob("landing-*.parquet"))
        wanted = sent.groupby(sent["id"].astype(str)).size()
        found = states.set_index("key")["state_index"]
        if self.order == STRICT:
            rows = self.pipeline.warehouse.read(waiting_rows.TABLE)
            held = rows.filter(rows["snapshot_id"] == taken).groupBy("key").count().toPandas()
            found = found.add(held.set_index("key")["count"], fill_value=0)
        both: Any = pd.DataFrame({"wanted": wanted, "found": found}).fillna(0).astype(int)
        wrong: Any = both[both["wanted"] != both["found"]]
        if wrong.empty:
            return []
        first = f"{wrong['found'].iloc[0]} of {wrong['wanted'].iloc[0]} rows of key {wrong.index[0]}"
        return [
            f"the states count {both['found'].sum()} rows of {both['wanted'].sum()}: "
            f"{len(wrong)} keys have another number, first {first}"
        ]
