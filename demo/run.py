"""Run the demo, `python -m demo.run`: a year of flights through the whole pipeline, killed on the way.

January to September is landed and pretrained by the DAGs. October and November land day by day while the
streams run, until their drivers are killed in mid-batch; the rest lands while they have no driver, and the DAGs
run again and resume. While its last days land, one model is upgraded to its next version and rolled back. At
the end every estimate and every key's state is compared with one uninterrupted batch pass.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from demo import upgrade as upgrades
from demo.dags import POLL_SECONDS, ROOT, AirflowSetup, DagRunner, Place
from demo.display import Display, Phase
from demo.flights import COLUMNS, HAND_OVER, Landing, flights_to_files
from demo.killer import Checkpoint, Killed, Killer
from demo.rates import busy_rate
from demo.result import problems_of, result_of, summary
from jobs.core.errors import RUN_FAILED, Terminated, UserError, show
from jobs.core.report import convert_to_json
from jobs.core.settings import DEFAULT_MASTER, Settings, parse_warehouse_root
from jobs.storage.files import open_files
from jobs.storage.object_files import FOLDER as PROBE_FOLDER

if TYPE_CHECKING:
    from demo.check import Checked
    from demo.upgrade import Switched

MODELS = tuple(COLUMNS)
PHASES = 9
FIRST_BATCH_SECONDS = 600.0
"""Most seconds for a stream to plan landed rows, before the demo gives up."""

SEED = 2013


@dataclass
class Demo:
    """The demo's state across its phases."""

    place: Place
    display: Display
    settings: Settings
    days: int | None
    seed: int
    landing: dict[str, Landing] = field(default_factory=dict)
    killed: dict[str, Killed] = field(default_factory=dict)
    runners: list[DagRunner] = field(default_factory=list)

    def prepare(self) -> None:
        """Write the files to land, while Airflow makes its database."""
        with self.display.phase("Write the flights as files, set up Airflow") as phase:
            phase.note("reading the flights")
            with AirflowSetup(self.place, MODELS) as airflow:
                # A separate process: reading the flights would block the display.
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    self.landing = pool.submit(flights_to_files, self.place.landing, self.days).result()
                phase.note("Airflow makes its database")
                airflow.wait()
            self.runners = [DagRunner(self.place, model) for model in MODELS]
            one = self.landing[MODELS[0]]
            phase.result(f"{one.history_rows:,} flights of history, {one.day_rows:,} to stream")

    def land_history(self) -> None:
        """Land January to September through the ingest DAGs."""
        with self.display.phase("Land January to September through the ingest DAGs") as phase:
            self._run_dags("ingest", lambda model: {"input": str(self.landing[model].history)}, phase)

    def pretrain(self) -> None:
        """Learn the models and filter history into snapshots, through the pretrain DAGs."""
        with self.display.phase("Learn and filter history through the pretrain DAGs") as phase:
            cut = HAND_OVER.astimezone(UTC).isoformat()
            self._run_dags("pretrain", lambda model: {"as_of": cut}, phase)

    def stream_and_kill(self) -> int:
        """Land day by day while the streams run, kill both drivers in mid-batch; return the days landed."""
        with self.display.phase("Land day by day, stream, kill the drivers") as phase:
            for runner in self.runners:
                runner.start("stream", {"trigger": "1"})
            killers = {model: Killer(self.place.warehouse, model, self.seed) for model in MODELS}
            count = len(self.landing[MODELS[0]].days)
            last = count - upgrades.HELD
            armed = random.Random(self.seed).randint(2, max(3, last // 5))
            landed = 0
            try:
                phase.note(lambda: self._stream_detail(landed, count))
                while landed < last and not all(one.killed for one in killers.values()):
                    if landed == armed:
                        for killer in killers.values():
                            killer.start()
                    versions = self._land(landed)
                    landed += 1
                    for runner, version in zip(self.runners, versions, strict=True):
                        _await_planned(runner, killers[runner.model], version)
            finally:
                for killer in killers.values():
                    if killer.ident is not None:
                        killer.call_off()
            for runner in self.runners:
                killer = killers[runner.model]
                if killer.error is not None:
                    raise killer.error
                if killer.killed is None:
                    raise UserError(f"the driver of {runner.model} was never caught in mid-batch", RUN_FAILED)
                self.killed[runner.model] = killer.killed
                _await_failed(runner)
            told = [
                f"{model} {one.after:.1f} s into micro-batch {one.batch}"
                for model, one in self.killed.items()
            ]
            phase.result(f"{landed} days; killed {', '.join(told)}")
        return landed

    def land_rest(self, landed: int) -> None:
        """Land the remaining days while the streams have no driver."""
        with self.display.phase("Land the remaining days, nobody streaming") as phase:
            count = len(self.landing[MODELS[0]].days)
            last = count - upgrades.HELD
            for number in range(landed, last):
                phase.note(f"{number} of {count} days")
                self._land(number)
            for number in range(last, count):
                phase.note(f"{number} of {count} days")
                self._land(number, tuple(model for model in MODELS if model != upgrades.MODEL))
            phase.result(
                f"{count - landed} days; {upgrades.HELD} of {upgrades.MODEL} are kept for its upgrade"
            )

    def resume(self) -> None:
        """Run the stream DAGs again: they resume from the checkpoints and process everything that has landed."""
        with self.display.phase("Resume through the stream DAGs") as phase:
            self._run_dags("stream", lambda model: {"trigger": "available-now"}, phase)

    def upgrade(self) -> Switched:
        """Upgrade a model to its next version while its last days land, and roll it back."""
        from demo.upgrade import HELD, MODEL, rows_in, upgrade_and_roll_back

        with self.display.phase("Upgrade air_time under its feed, roll it back") as phase:
            days = self.landing[MODEL].days
            sent = sum(rows_in(day) for day in days[:-HELD])
            folder = self.place.root / "models"
            done = upgrade_and_roll_back(self.settings, folder, days[-HELD:], sent, phase.note)
            likelihood = done.comparison["log_likelihood_a_row"]
            phase.result(
                f"version 2 was live for a day; log-likelihood a row {likelihood['old']:.4f} of version 1, "
                f"{likelihood['new']:.4f} of version 2"
            )
        return done

    def check(self) -> list[Checked]:
        """Compare everything with one batch pass."""
        from demo.check import check
        from jobs.spark.session import spark_session
        from jobs.spark.warehouse import Warehouse
        from jobs.specs.loading import load_spec

        with self.display.phase("Check every row and key against one batch pass") as phase:
            warehouse = Warehouse(spark_session(self.settings, "demo"), self.settings.warehouse)
            checked = [
                check(
                    warehouse,
                    load_spec(model, self.settings.models),
                    self.landing[model].day_rows,
                    HAND_OVER,
                    str(self.landing[model].days[0].parent),
                    phase.note,
                )
                for model in MODELS
            ]
            warehouse.spark.stop()
            compared = sum(one.estimates.compared for one in checked)
            keys = sum(one.states.compared for one in checked)
            worst = max(one.worst for one in checked)
            phase.result(f"{compared:,} rows and {keys:,} keys; largest difference {worst:.3g}")
        return checked

    def report(self, checked: list[Checked], switched: Switched) -> dict[str, Any]:
        """Write the report and result.json, and return the latter."""
        from demo.content import (
            choose_routes,
            marks_of,
            nis_of,
            parity_rows,
            route_series,
            share_sentence,
            switch_of,
        )
        from demo.report import Content, write_report

        path = self.place.root / "report.html"
        with self.display.phase("Write the report") as phase:
            rates = {
                name: busy_rate(Checkpoint(self.place.warehouse, name), one.batches, self.killed)
                for name, one in zip(MODELS, checked, strict=True)
            }
            routes = checked[0]
            marks = marks_of(routes, self.killed[routes.spec.name].batch)
            phase.note("drawing")
            result = result_of(
                checked, self.killed, rates, self.landing, self.display, _shown(path), switched
            )
            content = Content(
                result,
                parity_rows(checked),
                [route_series(routes, key) for key in choose_routes(routes)],
                "air time, minutes",
                [nis_of(one) for one in checked],
                marks,
                [share_sentence(one) for one in checked],
                dict(self.display.seconds),
                switch_of(routes, switched),
            )
            write_report(path, content)
        result["seconds"] = round(self.display.total, 1)
        result["phases"] = {name: round(seconds, 1) for name, seconds in self.display.seconds.items()}
        (self.place.root / "result.json").write_text(json.dumps(convert_to_json(result), indent=2) + "\n")
        return result

    def kill_all(self) -> None:
        """End every process that runs DAGs, and its descendants."""
        for runner in self.runners:
            runner.kill()

    def _run_dags(self, verb: str, conf: Callable[[str], dict[str, object]], phase: Phase) -> None:
        """Run both models' DAGs for a verb at the same time, to their ends."""
        for runner in self.runners:
            runner.start(verb, conf(runner.model))
        phase.note(lambda: "; ".join(runner.told() for runner in self.runners if runner.running))
        for runner in self.runners:
            runner.wait(lambda: [other.fail() for other in self.runners if other.failed])

    def _land(self, day: int, models: tuple[str, ...] = MODELS) -> list[int]:
        """Land a day's file of each model at the same time, and return the versions that have them."""
        import pyspark.sql  # noqa: F401 - now: of two threads that import it, one may find it half done

        from demo.land_day import land_day

        with ThreadPoolExecutor(len(models)) as pool:
            return list(
                pool.map(lambda model: land_day(self.settings, model, self.landing[model].days[day]), models)
            )

    def _stream_detail(self, landed: int, count: int) -> str:
        parts = [f"{landed} of {count} days landed"]
        for runner in self.runners:
            done = Checkpoint(self.place.warehouse, runner.model).batches().committed + 1
            now = f"{runner.model}: {done} micro-batches" if done else runner.told()
            parts.append(now if runner.running else f"{runner.model}: killed")
        return "; ".join(parts)


def _await_planned(runner: DagRunner, killer: Killer, version: int) -> None:
    """Wait until a stream has started on a version, so that landing does not run ahead of it."""
    until = time.monotonic() + FIRST_BATCH_SECONDS
    while killer.killed is None and killer.error is None and not killer.checkpoint.has_planned(version):
        if not runner.running:
            if killer.ident is not None:
                killer.join(1.0)  # the killer may be about to report its kill
            if killer.killed is None:
                runner.fail()
        if time.monotonic() > until:
            raise UserError(
                f"the stream of {runner.model} does not take in what lands: see {runner.log}", RUN_FAILED
            )
        time.sleep(POLL_SECONDS)


def _await_failed(runner: DagRunner) -> None:
    """Wait until Airflow has noticed that the driver is gone."""
    try:
        runner.wait()
    except UserError:
        return
    raise UserError(
        f"the DAG of {runner.model} ended well though its driver was killed: see {runner.log}", RUN_FAILED
    )


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


@contextmanager
def _demo(folder: Path, days: int | None, seed: int, warehouse: str | None) -> Iterator[Demo]:
    root = folder.absolute()
    place = Place(root, str(root / "warehouse") if warehouse is None else _empty(warehouse))
    shutil.rmtree(place.root, ignore_errors=True)
    place.logs.mkdir(parents=True)
    # The demo's Spark session, which lands days and checks, stays on this machine, wherever the DAGs' jobs run.
    master = os.environ.get("KALMAN_MASTER", DEFAULT_MASTER)
    local = master if master.startswith("local") else DEFAULT_MASTER
    settings = Settings.load(place.warehouse, ROOT / "models", local, quiet=True)
    demo = Demo(place, Display(PHASES), settings, days, seed)
    try:
        yield demo
    finally:
        demo.kill_all()


def _empty(warehouse: str) -> str:
    """Return the root of a warehouse chosen by the user, which must be empty.

    Raises:
        UserError: the warehouse is not empty, or cannot be reached.
    """
    root = parse_warehouse_root(warehouse)
    there = [name for name in open_files(root).names("") if name != PROBE_FOLDER]
    if there:
        raise UserError(
            f"the demo takes an empty warehouse, and in {root} there is {there[0]}: choose another folder, which need "
            "not exist"
        )
    return root


def run(
    folder: Path, days: int | None = None, seed: int = SEED, warehouse: str | None = None
) -> dict[str, Any]:
    """Run the demo in `folder`, which is emptied first, and return its result.

    Args:
        folder: folder of everything that the demo writes.
        days: number of days to stream, for a quick look; at least 8.
        seed: determines the day, and the moment in the micro-batch, of the drivers' kills.
        warehouse: an empty folder elsewhere for the tables, as a path or the URI of a store.

    Raises:
        UserError: a step failed.
    """
    with _demo(folder, days, seed, warehouse) as demo:
        demo.prepare()
        demo.land_history()
        demo.pretrain()
        landed = demo.stream_and_kill()
        demo.land_rest(landed)
        demo.resume()
        switched = demo.upgrade()
        checked = demo.check()
        return demo.report(checked, switched)


def _terminate(number: int, frame: Any) -> NoReturn:
    """End as after Ctrl-C, so that no driver is left running."""
    raise Terminated


def main() -> int:
    """Run the demo from the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        "python -m demo.run", description="Run the whole pipeline on a year of flights."
    )
    folder = ROOT / "var" / "demo"
    parser.add_argument("--folder", type=Path, default=folder, help="emptied first (default: var/demo)")
    parser.add_argument("--days", type=int, help="stream only so many days, at least 8 (default: all 61)")
    parser.add_argument(
        "--warehouse", help="an empty one elsewhere, a path or s3a://bucket/folder (default: in the folder)"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="decides when the drivers are killed")
    options = parser.parse_args()
    if options.days is not None and not 8 <= options.days <= 61:
        parser.error("--days must be from 8 to 61")
    signal.signal(signal.SIGTERM, _terminate)
    try:
        result = run(options.folder, options.days, options.seed, options.warehouse)
    except (Exception, KeyboardInterrupt, Terminated) as error:
        return show(error)
    print("\n" + "\n".join(summary(result)))
    for problem in problems_of(result):
        print(f"error: {problem}", file=sys.stderr)
    return RUN_FAILED if problems_of(result) else 0


if __name__ == "__main__":
    sys.exit(main())
