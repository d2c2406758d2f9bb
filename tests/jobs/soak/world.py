"""A model with its warehouse that lives through one verb after another, and what must be true of it at any time.

A verb is prepared so that it has something to do, run as a command (or killed on the way, by `tests.jobs.soak.strikes`,
and run again), and then everything that can be read is compared with the oracle.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from delta.tables import DeltaTable
from pyspark.sql import functions as F

from jobs import quarantine, retire
from jobs.cli import app
from jobs.core.errors import UserError
from jobs.lineage import generations
from jobs.lineage.live import live_estimates, live_latest
from jobs.snapshots import manifests, store
from jobs.storage.quarantine import REPLAYED
from jobs.storage.tables import measurements
from tests.jobs.soak.aimed import Aim
from tests.jobs.soak.kills import FREEZE, Kill
from tests.jobs.soak.oracle import Oracle, as_compared, differences
from tests.jobs.support.pipeline import MASTER, Pipeline, random_rows, random_walk_spec
from tests.jobs.support.processes import Driver

MODEL = "walk"
ROWS = 40
BAD = 3
LONG_AGO = "INTERVAL 400 DAYS"
RULES: dict[str, Any] = {
    "snapshots": {"newest": 0, "age": "30d"},
    "generations": {"newest": 0, "age": "30d"},
    "estimates": True,
}


@dataclass
class Act:
    """A command that has something to do; `done` tells the oracle, once the command has ended well."""

    words: list[str]
    done: Callable[[], None] = lambda: None
    streams: bool = True
    """Whether the stream is to catch up before everything is compared."""


class World:
    """One model's warehouse, from its first snapshot on."""

    environment: ClassVar[dict[str, str]] = {}
    """Of the processes that are struck, beside the usual."""
    verified: ClassVar[dict[str, Any]] = {}
    """What `verify` has found after the last kill."""

    def __init__(self, folder: Path, seed: int, store: str | None = None) -> None:
        """Make it in a folder; store: the URI of a store's folder, in which the warehouse is made instead."""
        self.random = random.Random(seed)
        self.days = iter(random_rows(400, keys=400, rows=ROWS, seed=seed))
        self.version = self.newest_version = 1
        self.partitions = 2
        self.migrated_from: int | None = None
        self.pipeline = Pipeline(folder, self.spec(1, None))
        if store is not None:
            place = f"{store}/{folder.parent.name}-{folder.name}"
            self.pipeline.settings = replace(self.pipeline.settings, warehouse=place)
        self.oracle = Oracle(self.pipeline.settings, MODEL, folder)
        self.bad = self.files = 0
        self.land()
        self.pipeline.pretrain()
        self.land()
        self.pipeline.stream()
        self.streamed = len(self.oracle.parts)
        """How many parts the live stream has read when it last caught up."""

    def spec(self, version: int, migrated_from: int | None) -> dict[str, Any]:
        """Return a version of the model: all are the same filter, so that states go on with the same bits."""
        changes: dict[str, Any] = {} if migrated_from is None else {"migrate": {"from": migrated_from}}
        return random_walk_spec(
            MODEL,
            version=version,
            sinks={"latest": True},
            stream={"max_files_per_batch": 1, "partitions": self.partitions, "keys_per_block": 8},
            retention=RULES,
            **changes,
        )

    def prepared(self, kill: Kill) -> Act:
        """Give the verb something to do that is to be struck, and return its command."""
        return getattr(self, f"_{kill.verb.replace('-', '_')}")()

    def aim(self, kill: Kill, notes: str, seconds: float) -> Aim:
        """Return where and how a kill strikes the processes of the verb that was prepared for it."""
        far = kill.how == FREEZE
        return Aim(kill.victim, kill.how, notes, kill.point, kill.nth, kill.edge, seconds=seconds, far=far)

    def again(self, act: Act) -> tuple[int, str]:
        """Run an act's command in this process; return its exit code, and what it printed."""
        settings, said = self.pipeline.settings, io.StringIO()
        words = [*act.words, "--warehouse", settings.warehouse, "--models", str(settings.models)]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = int(app(args=[*words, "--master", MASTER, "--quiet"], standalone_mode=False) or 0)
        return code, said.getvalue()

    def problems(self, catch_up: bool = True) -> list[str]:
        """Return what is not as it must be, a sentence each, after the stream has caught up if it is to."""
        if catch_up:
            try:
                self.catch_up()
            except UserError as error:
                return [f"the stream does not continue: {error.message}"]
        warehouse = self.pipeline.warehouse
        live = as_compared(live_estimates(warehouse, MODEL).toPandas())
        said = differences(live, self.oracle.live(self.streamed))
        latest = as_compared(live_latest(warehouse, MODEL).toPandas())
        state = differences(latest, self.oracle.last(parts=self.streamed), ("mean", "covariance"))
        landed = warehouse.read(measurements(MODEL)).toPandas()
        return [
            *(f"live estimates: {one}" for one in said),
            *(f"latest: {one}" for one in state),
            *(f"measurements: {one}" for one in self._landed(landed)),
            *self._held(),
            *self._generations(),
            *self._recomputed(),
        ]

    def written_by(self) -> dict[str, int]:
        """Return how many appends to the estimates each of the two writers has committed: `delta-rs`, and `java`."""
        log = self.pipeline.warehouse.files(f"estimates/{MODEL}/_delta_log")
        made: Counter[str] = Counter()
        for name in log.names(""):
            if not re.fullmatch(r"\d+\.json", name):
                continue
            commit = [json.loads(line) for line in (log.read(name) or b"").splitlines() if line]
            if any("add" in one for one in commit) and any("txn" in one for one in commit):
                engine = str(
                    [one["commitInfo"] for one in commit if "commitInfo" in one][0].get("engineInfo")
                )
                made["delta-rs" if "delta-rs" in engine else "java"] += 1
        return dict(made)

    def catch_up(self) -> None:
        """Let the stream read all that has landed."""
        self.pipeline.stream()
        self.streamed = len(self.oracle.parts)

    def _landed(self, found: pd.DataFrame) -> list[str]:
        columns = {"id": "key", "at": "event_time"}
        sent = as_compared(pd.concat(self.oracle.parts).rename(columns=columns))
        return differences(as_compared(found.rename(columns=columns)), sent, ("a", "b"))

    def _held(self) -> list[str]:
        if not self.bad and not self.pipeline.warehouse.exists("quarantine"):
            return []
        rows = self.pipeline.warehouse.read("quarantine")
        column = F.coalesce("status", F.lit("held")) if "status" in rows.columns else F.lit("held")
        counts = {row["s"]: row["count"] for row in rows.groupBy(column.alias("s")).count().collect()}
        counts.pop(REPLAYED, None)
        wanted = {"held": self.bad} if self.bad else {}
        return [] if counts == wanted else [f"quarantine has {counts}, and should have {wanted}"]

    def generations(self) -> dict[str, str]:
        """Return the status of each generation."""
        return {
            one.generation: one.status for one in generations.read_generations(self.pipeline.warehouse, MODEL)
        }

    def _generations(self) -> list[str]:
        warehouse, known, said = self.pipeline.warehouse, self.generations(), []
        if sorted(set(known.values()) - {"retired", "removed"}) != ["live"]:
            said.append(f"the generations are {known}")
        live = generations.find_live(warehouse, MODEL)
        if live is not None and live.model_version != self.version:
            said.append(f"{live.generation} is of version {live.model_version}, not {self.version}")
        for one in manifests.read_manifests(warehouse, MODEL):
            try:
                if one.status == manifests.GOOD and live is not None and one.snapshot_id == live.snapshot_id:
                    store.verify(warehouse, one)
            except UserError as error:
                said.append(error.message)
        return said

    def _recomputed(self) -> list[str]:
        """Let `verify` recompute all keys from the lineage.

        It leaves out what `maintain` has removed, and says so (exit code 3); it must find nothing that differs.
        """
        code, said = self.again(Act(["verify", "--model", MODEL, "--share", "1"]))
        equal = re.search(r"([0-9,]+) estimates and ([0-9,]+) states are equal to the bit", said)
        counts = [0, 0] if equal is None else [int(one.replace(",", "")) for one in equal.groups()]
        outcome = {0: "equal", 3: "a part was left out"}.get(code, "not equal")
        self.verified = {  # type: ignore[misc]
            "verify": outcome,
            "estimates": counts[0],
            "states": counts[1],
            "verify_said": said.splitlines() if code else [],
        }
        return [] if code in (0, 3) and counts[0] > 0 else [f"verify ends with {code}: {said.strip()}"]

    # What gives a verb something to do.

    def day(self) -> pd.DataFrame:
        """Return the next rows, of which no two have the same key and time."""
        return next(self.days).drop_duplicates(["id", "at"], ignore_index=True)

    def land(self, files: int = 1) -> None:
        """Land the next days."""
        frames = [self.day() for _ in range(files)]
        self.pipeline.land(*frames)
        self.oracle.parts += frames

    def _written(self) -> Path:
        """Write the next day with rows that do not fit, of keys of their own."""
        self.files += 1
        day = self.day()
        bad = day.head(BAD).assign(id=[100_000 + 10 * self.files + n for n in range(BAD)])
        path = self.pipeline.folder / f"sent-{self.files:03d}.csv"
        pd.concat([day.astype({"a": "object"}), bad.assign(a="many")]).to_csv(path, index=False)
        self.waiting = day
        return path

    def _ingest(self) -> Act:
        path = self._written()

        def done() -> None:
            self.oracle.parts.append(self.waiting)
            self.bad += BAD

        return Act(["ingest", "--model", MODEL, "--input", str(path)], done, streams=False)

    def _replay(self) -> Act:
        first = self._ingest()
        assert self.again(first)[0] == 0
        first.done()
        held, edited = (
            self.pipeline.folder / "held.jsonl",
            self.pipeline.folder / f"edited-{self.files}.jsonl",
        )
        quarantine.act(self.pipeline.settings, "show", MODEL, output=str(held))
        rows, lines = [], []
        for number, line in enumerate(held.read_text().splitlines()):
            one = json.loads(line)
            one["payload"]["a"] = str(0.5 + number)
            one["payload"]["b"] = "1.25"
            rows.append({**one["payload"], "a": 0.5 + number, "b": 1.25})
            lines.append(json.dumps(one))
        edited.write_text("\n".join(lines) + "\n")
        frame: Any = pd.DataFrame(rows)[["id", "at", "a", "b"]].astype({"id": np.int64})
        frame["at"] = pd.to_datetime(frame["at"], utc=True).astype("datetime64[us, UTC]")

        def done() -> None:
            self.oracle.parts.append(frame)
            self.bad = 0

        words = ["quarantine", "replay", "--model", MODEL, "--edited", str(edited)]
        return Act(words, done, streams=False)

    def _stream(self) -> Act:
        self.land(3)
        return Act(["stream", "--model", MODEL])

    def _pretrain(self) -> Act:
        self.land()
        return Act(["pretrain", "--model", MODEL], self._snapshot_is_right, streams=False)

    def _snapshot_is_right(self) -> None:
        """Compare the newest snapshot with the batch."""
        newest = max(manifests.read_manifests(self.pipeline.warehouse, MODEL), key=lambda one: one.version)
        store.verify(self.pipeline.warehouse, newest)
        found = as_compared(self.pipeline.snapshot(newest.snapshot_id))
        wrong = differences(found, self.oracle.last(0), ("mean", "covariance"))
        if wrong:
            raise AssertionError(f"snapshot {newest.snapshot_id}: {'; '.join(wrong)}")

    def _adopt(self) -> Act:
        """Adopt a snapshot level with the stream, older, or, one time in four, older than the live generation."""
        kind = self.random.choice(["level", "older", "older", "before"])
        self.catch_up()
        taken = self.pipeline.pretrain().data["snapshot"]
        part = len(self.oracle.parts)
        if kind == "before":
            self.land()
            self.catch_up()
            self._replaced("stop-start")
            # The spec is that of the snapshot, as the live generation's is the same filter by another number.
            taken = self.pipeline.pretrain(to_version=self._version_of(part)).data["snapshot"]
        if kind != "level":
            self.land(2)
            self.catch_up()
        self.land()
        words = ["stream", "--model", MODEL, "--adopt", taken]
        return Act(words, lambda: self.oracle.continues(part, 0))

    def _version_of(self, part: int) -> int:
        """Return the version of the measurements that a number of parts makes: each part is one commit."""
        log = self.pipeline.warehouse.latest_version(measurements(MODEL))
        return log - (len(self.oracle.parts) - part)

    def _replaced(self, mode: str) -> None:
        act = self._upgrade(mode)
        code, said = self.again(act)
        assert code == 0, said
        act.done()

    def _upgrade(self, mode: str, *more: str) -> Act:
        """Deploy the next version of the spec, with a day of rows that the stream has not read."""
        self.newest_version += 1
        self.migrated_from, self.version = self.version, self.newest_version
        self.pipeline.write_spec(self.spec(self.version, self.migrated_from))
        part = self.streamed
        self.land()
        began = {"stateless": part, "retrain": 0}.get(mode, self.oracle.began)
        words = ["upgrade", "--model", MODEL, "--mode", mode, *more]
        return Act(words, lambda: self.oracle.continues(part, began))

    def _blue_green(self) -> Act:
        return self._upgrade("blue-green", "--force")  # the old version may not read the rows of the new one

    def _stop_start(self) -> Act:
        return self._upgrade("stop-start")

    def _retrain(self) -> Act:
        return self._upgrade("retrain")

    def _stateless(self) -> Act:
        return self._upgrade("stateless", "--lose-state")

    def _repartition(self) -> Act:
        """Deploy the spec with another number of state partitions, 2 or 3."""
        self.partitions = 5 - self.partitions
        self.pipeline.write_spec(self.spec(self.version, self.migrated_from))
        self.land()
        return Act(["upgrade", "--model", MODEL, "--mode", "repartition", "--force"])

    def _maintain(self) -> Act:
        """Leave a shadow that was given up, its snapshots, and rows that were replayed, all of them long ago."""
        replayed = self._replay()
        assert self.again(replayed)[0] == 0
        replayed.done()
        self.newest_version += 1
        self.pipeline.write_spec(self.spec(self.newest_version, self.version))
        # In another process: here Spark's maintenance of state would upload the shadow's once more, a minute later.
        made = Driver(self.pipeline, "upgrade", "--model", MODEL, "--no-promote")
        assert made.finish() == 0, made.said()
        retire.run(self.pipeline.settings, MODEL)
        self.pipeline.write_spec(self.spec(self.version, self.migrated_from))
        self.pipeline.pretrain()
        warehouse = self.pipeline.warehouse
        for table, column in (
            ("generations", "retired_at"),
            ("generations", "created_at"),
            ("manifests", "committed_at"),
            ("quarantine", "resolved_at"),
        ):
            DeltaTable.forPath(warehouse.spark, warehouse.path(table)).update(
                F.col(column).isNotNull(), {column: F.col(column) - F.expr(LONG_AGO)}
            )
        return Act(["maintain", "--model", MODEL], self._nothing_is_left, streams=False)

    def _nothing_is_left(self) -> None:
        """Run it dry: nothing may be left to remove."""
        code, said = self.again(Act(["maintain", "--model", MODEL, "--dry-run", "--json"]))
        left = {
            name: value
            for name, value in json.loads(said[said.index("{") :]).items()
            if name in ("generations", "snapshots", "checkpoints", "quarantine", "estimates") and value
        }
        if code or left:
            raise AssertionError(f"maintain leaves {left} (exit {code})")
