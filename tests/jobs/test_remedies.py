"""A remedy works: in the state that a message is about, the commands that it names are run, and it is gone.

Every text of the code that names a command has a row here, or a reason for having none. A row's cause is a command
that prints the message; the remedy is taken from what it printed. What only a person can do (edit a spec, land newer
rows) is `prepare`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shlex
import shutil
import sys
import tarfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from jobs import cli
from jobs.core.command import Actions
from tests.conftest import MASTER
from tests.fixtures.make_release import FOLDER

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(r"(?:`|^next +)(kalman-pipeline [^`\n]+)")
NAMED = re.compile(rf"kalman-pipeline ({'|'.join(cli.VERBS)})\b")
WALK: dict[str, Any] = {
    "name": "walk",
    "version": 1,
    "key": ["id"],
    "time": "at",
    "time_unit": "hour",
    "measurement": ["y"],
    "states": ["level"],
    "process": {"kind": "random_walk", "variance": 1.0},
    "observation": {"R": [[0.25]]},
    "initial": {"mean": [0.0], "covariance": [[100.0]]},
}
RULES = {"rules": [{"name": "high", "kind": "measured", "at_least": 9.0}]}


class World:
    """A warehouse, a folder of specs and files of rows, on which commands run as a user runs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "models").mkdir(parents=True, exist_ok=True)

    def copied(self, folder: Path) -> World:
        """Return a copy in another folder."""
        shutil.copytree(self.folder, folder)
        return World(folder)

    def run(self, *words: str) -> str:
        """Run a command in this process; return what it printed."""
        where = ["--warehouse", str(self.folder / "warehouse"), "--models", str(self.folder / "models")]
        where += ["--master", MASTER]
        result = CliRunner().invoke(cli.app, [*words, "--quiet", *where])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.output

    def write(self, **changes: Any) -> None:
        """Write the spec of the model `walk`, changed; a field that is None is left out."""
        path = self.folder / "models" / f"{changes.get('name', 'walk')}.yaml"
        path.write_text(
            yaml.safe_dump({name: one for name, one in (WALK | changes).items() if one is not None})
        )

    def change(self, **changes: Any) -> None:
        """Change fields of the spec that is there."""
        path = self.folder / "models" / "walk.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))

    def rows(self, name: str = "rows.csv", first: int = 0, keys: str = "ab", **more: Any) -> str:
        """Write a file of 40 rows of each key, beginning with the hour `first`; return its path."""
        rng = np.random.default_rng(first)
        at = pd.Timestamp("2024-01-01") + pd.to_timedelta(np.arange(first, first + 40), "h")
        parts = [
            pd.DataFrame({"id": key, "at": at, "y": rng.normal(size=40).cumsum(), **more}) for key in keys
        ]
        pd.concat(parts).to_csv(self.folder / name, index=False)
        return str(self.folder / name)

    def land(self, *words: str, **options: Any) -> str:
        """Land a new file of rows."""
        return self.run("ingest", "--model", "walk", "--input", self.rows(**options), *words)


def do_nothing(world: World) -> None:
    """Leave a state as it is."""


class Row(NamedTuple):
    """A message: the file and a part of its text, the state, the command that prints it, and what is the person's.

    state: name of the state to copy. make: changes of it. cause: the command. fill: values of the placeholders of the
    remedy. prepare: what the message leaves to the person. only: the commands of the message that this row runs; by
    default all. hint: the message names what comes next, and does not go away. prints: an expression for what the
    command prints, where that is not the text in the code.
    """

    file: str
    text: str
    state: str
    cause: str
    make: Callable[[World], object] = do_nothing
    fill: Mapping[str, Callable[[World], str]] = {}
    prepare: Callable[[World], object] = do_nothing
    only: str = ""
    hint: bool = False
    prints: str = ""

    @property
    def pattern(self) -> str:
        """Return the expression for the message's text."""
        return self.prints or re.escape(self.text).replace("\\ ", " +")

    def words(self, world: World) -> list[str]:
        """Return the words of the command that prints the message."""
        words = shlex.split(self.cause.replace("{}", str(world.folder)))
        return [self.fill[one](world) if one in self.fill else one for one in words]


def raise_version(world: World) -> None:
    """Deploy a second version with another noise, which takes over the state as it is."""
    world.change(
        version=2,
        observation={"R": [[0.5]]},
        process={"kind": "random_walk", "variance": 2.0},
        migrate={"from": 1},
    )


def write_inputs(world: World) -> str:
    """Write a file with a number for each key; return its path."""
    path = world.folder / "inputs.csv"
    path.write_text("id,u\na,1.0\nb,2.0\n")
    return str(path)


FILE = {"FILE": lambda world: world.rows("more.csv", 100)}
QUICK = [
    Row("jobs/storage/tables.py", "has no measurements in", "empty", "pretrain --model walk", fill=FILE),
    Row(
        "jobs/batch/forecast_run.py",
        "no state to forecast from",
        "landed",
        "forecast --model walk --steps 2 --every 1h",
    ),
    Row(
        "jobs/insight/health.py",
        "no estimates to report on",
        "pretrained",
        "report --model walk",
        only="estimate",
    ),
    Row(
        "jobs/offline/estimate_series.py",
        "no estimates of history",
        "pretrained",
        "plot --model walk --history",
    ),
    Row(
        *("jobs/offline/estimate_series.py", "give a file that", "landed"),
        "plot --model walk --input {}/other.csv --output {}/a.png",
        lambda world: world.rows("other.csv"),
        fill={"FILE": World.rows},
    ),
    Row(
        *("jobs/offline/prior.py", "; learn them with", "landed"),
        "filter --model walk --input {}/rows.csv --output {}/out.csv",
        lambda world: world.change(learn={"parameters": ["R"]}),
    ),
    Row(
        *("jobs/init.py", "next kalman-pipeline filter", "empty"),
        "init --input {}/rows.csv --output {}/new.yaml --quick --no-picture",
        World.rows,
        hint=True,
    ),
    Row(
        *("jobs/lineage/inputs_table.py", "takes its inputs from it", "empty"),
        "pretrain --model walk",
        lambda world: (
            world.write(observation={"R": [[0.25]], "offset": ["u"]}, inputs={"columns": {"u": "u"}}),
            world.land(),
        ),
        fill={"FILE": write_inputs},
    ),
    Row(
        *("jobs/ingest.py", "every row was rejected", "empty"),
        "ingest --model walk --input {}/rows.csv",
        lambda world: (world.rows(), world.write(time_format="%d.%m.%Y")),
        prepare=World.write,
    ),
    Row(
        *("jobs/quarantine.py", "kalman-pipeline quarantine replay --model {spec.name} --edited", "rejected"),
        "quarantine show --model walk --output {}/held.jsonl",
        prints="edit the payloads there, then run",
        prepare=World.write,
        hint=True,
    ),
    Row(
        "jobs/supervision/driver_status.py",
        "kalman-pipeline resume",
        "pretrained",
        "stop --model walk",
        hint=True,
    ),
    Row(
        *("jobs/lineage/promotion.py", "is the live generation of", "live"),
        "retire --model walk --generation walk-g0001",
        hint=True,
    ),
]
"""Messages whose cause and remedy start no Spark."""
WAVES = Row(
    *("jobs/core/report.py", "finds other structures", "waves"),
    "pretrain --model walk",
    fill={"FILE": lambda world: f"{world.folder}/waves.csv"},
    hint=True,
)
SNAPSHOT = {
    "SNAPSHOT": lambda world: json.loads(world.run("status", "--json"))["models"][0]["snapshots"][-1][
        "snapshot"
    ]
}
NIS = {"rules": [{"name": "unfit", "kind": "nis", "at_least": 9.0}]}
PEAKS = {"windows": [{"size": "1d"}], "aggregates": [{"name": "most", "of": "innovation.y", "kind": "max"}]}
BOTH = {"measured": True, "innovation": True}
STREAM = "stream --model walk"


def of(file: str, text: str, cause: str, make: Callable[[World], object] = do_nothing, **more: Any) -> Row:
    """Return a row of the story, whose state is what the steps before have left."""
    return Row(f"jobs/{file}.py", text, "", cause, make, **more)


def no_live(cause: str, **more: Any) -> Row:
    """Return a row of a command that needs live estimates where no stream has run."""
    return of(
        "lineage/generations",
        "`kalman-pipeline stream --model {model}`",
        cause,
        prints=": make them with",
        **more,
    )


def not_yet(cause: str, **more: Any) -> Row:
    """Return a row of a command that needs live estimates where the stream has found no row."""
    return of("lineage/generations", "yet: its stream has read no row after its snapshot", cause, **more)


STORY: list[list[Row]] = [
    [
        of(
            *("batch/new_keys", "no history of new keys has landed", "pretrain --model walk --history"),
            lambda world: (
                world.write(stream={"new_keys": "pretrained"}, observation={"R": [[9.0]]}),
                world.land(),
            ),
            fill={"FILE": lambda world: world.rows("new.csv", keys="ef")},
        )
    ],
    [of("batch/new_keys", "has no snapshot to take parameters from", "pretrain --model walk --history")],
    [
        of(
            *("lineage/start_point", "{text}: make one with `kalman-pipeline pretrain", STREAM),
            lambda world: world.write(monitor=NIS),
            prints="has no snapshot that a stream can start from",
            hint=True,
        )
    ],
    [
        no_live("monitor --model walk"),
        no_live("plot --model walk --output {}/a.png"),
        no_live("report --model walk --compare"),
        of("lineage/generations", "has no live generation", "export --model walk"),
        of("verify", "no generation is live; start one", "verify --model walk"),
    ],
    [
        not_yet("monitor --model walk", prepare=lambda world: world.land(name="b.csv", first=40)),
        not_yet("report --model walk --compare"),
        of("downstream/over_history", "has no history in", "monitor --model walk --history"),
    ],
    [
        of(
            *("downstream/runner", "yet: its stream writes it beside the rows", "monitor --model walk"),
            lambda world: world.change(monitor=RULES, outputs={"measured": True}),
            prepare=lambda world: world.land(name="c.csv", first=80),
        )
    ],
    [of("verify", "nothing to verify: the live stream has read no row", "verify --model walk", hint=True)],
    [
        of(
            *(
                "downstream/over_history",
                "the history of {model} has no column",
                "monitor --model walk --history",
            ),
            lambda world: world.change(monitor=PEAKS, outputs=BOTH),
            prints="the history of walk has no column innovation",
        )
    ],
    [
        of(
            *("downstream/over_history", "is of the spec as it is now", "skill --model walk --history"),
            lambda world: world.change(forecast={"horizons": ["1h"]}, observation={"R": [[0.5]]}),
        )
    ],
    [
        of(
            *("lineage/compatibility", "under the same version {old}", STREAM),
            prints="under the same version 1",
            fill=SNAPSHOT,
            only="walk --adopt",
            hint=True,
            prepare=lambda world: (
                world.land(name="e.csv", first=120),
                world.run("pretrain", "--model", "walk"),
            ),
        )
    ],
    [of("lineage/start_point", "let it catch up first", f"{STREAM} --adopt SNAPSHOT", fill=SNAPSHOT)],
    [
        of(
            *("lineage/compatibility", "`kalman-pipeline upgrade --model {name}`", STREAM),
            raise_version,
            prints="continues as version 1 until `kalman-pipeline upgrade",
        )
    ],
    [
        of(
            *("lineage/promotion", "let it catch up first", "promote --model walk"),
            lambda world: (world.land(name="d.csv", first=160), world.run("stream", "--model", "walk")),
        ),
    ],
    [
        of(
            *("lineage/compatibility", "its shadow {deployed.shadow} is promoted", STREAM),
            prints=r"until its shadow walk-g\d{4} is promoted",
            only="promote",
            hint=True,
        )
    ],
    [of("upgrades/decision", "gives it the rows that land", "promote --model walk", only="--force")],
    [
        of(
            *("lineage/generations", "or run `kalman-pipeline rollback", STREAM),
            lambda world: world.write(monitor=NIS, observation={"R": [[0.5]]}),
            prints="is version 1, older than the version 2",
        ),
        of("upgrades/context", ", or roll back", "upgrade --model walk"),
    ],
    [
        of(
            *(
                "lineage/start_point",
                "is retired: `kalman-pipeline rollback",
                f"{STREAM} --generation walk-g0005",
            ),
            raise_version,
        ),
    ],
    [
        of(
            *("lineage/compatibility", "`kalman-pipeline upgrade --model {name} --mode repartition`", STREAM),
            lambda world: world.change(stream={"partitions": 3}),
            prints="keeps its 2 until",
        ),
    ],
    [
        of(
            *("report", "no such run over its history", "report --model walk --history"),
            lambda world: shutil.rmtree(world.folder / "warehouse" / "estimates_history"),
        )
    ],
    [
        of(
            *("core/report", "with the snapshot that it makes", STREAM),
            lambda world: (shutil.rmtree(world.folder / "warehouse" / "measurements"), world.land()),
            fill=SNAPSHOT,
            prints="the measurements table has been recreated",
            hint=True,
        )
    ],
    [
        of(
            *("lineage/start_point", "the state has these rows", f"{STREAM} --adopt SNAPSHOT"),
            fill=SNAPSHOT,
            only="allow-missing",
        )
    ],
]
"""A model's life, in which each step begins with messages; their remedies are run once, and all are gone."""


HERE = "the next step of STORY runs it"
REASONS = {
    (
        "dags/kalman_dags/approval.py",
        "give it up with `kalman-pipeline retire",
    ): "tests/jobs/lineage/test_retire.py",
    ("jobs/choosing/spec_text.py", "# Written by"): "what has made the spec",
    ("jobs/downstream/forecast_skill.py", "have no states of the filter yet"): "a table of an early release",
    (
        "jobs/downstream/rule_exports.py",
        "completes a version of the estimates",
    ): "a monitor killed in its first version",
    (
        "jobs/downstream/rule_exports.py",
        "no such export of rules",
    ): "tests/jobs/downstream/test_adopted_rules.py",
    ("jobs/export.py", "begin changed rules with it"): "tests/jobs/downstream/test_adopted_rules.py",
    ("jobs/import_states.py", "start from it with"): "tests/jobs/upgrades/test_importing.py",
    ("jobs/insight/health_page.py", "kalman-pipeline quarantine list"): "where to look",
    ("jobs/insight/index.py", "There is no model yet"): "the row of init begins there",
    ("jobs/insight/index.py", "writes a model's health"): "where to look",
    ("jobs/insight/status.py", "--mode repartition --partitions"): "tests/jobs/upgrades/test_repartition.py",
    ("jobs/insight/status.py", "`kalman-pipeline stream --model {spec.name}`"): "tests/dags/test_pages.py",
    ("jobs/insight/status.py", "the deployed spec of"): "tests/jobs/lineage/test_compatibility.py",
    ("jobs/insight/status.py", "no alert was raised yet"): "where to look",
    ("jobs/insight/status.py", "so readers open many"): "tests/jobs/insight/test_maintain.py",
    ("jobs/insight/status.py", "may be removed"): "tests/jobs/insight/test_maintain.py",
    ("jobs/insight/status.py", "retention.progress keeps"): "tests/jobs/insight/test_maintain.py",
    ("jobs/landing/sources/table.py", "--accept-loss"): "tests/jobs/landing/sources/test_table_source.py",
    ("jobs/landing/topics.py", "--accept-loss"): "tests/jobs/landing/test_kafka_once.py",
    ("jobs/lineage/compatibility.py", "Restore `source`"): "a topic",
    ("jobs/lineage/compatibility.py", "that topic was deleted and made anew"): "a topic",
    (
        "jobs/lineage/compatibility.py",
        "{setting} is {value} here",
    ): "a setting of Spark's that no option changes",
    ("jobs/lineage/compatibility.py", "takes no new keys until"): "tests/jobs/lineage/test_compatibility.py",
    ("jobs/lineage/generation_checkpoint.py", "each row counted once"): "tests/jobs/snapshots/test_damage.py",
    ("jobs/lineage/start_point.py", "misses none"): "tests/jobs/upgrades/test_hand_over.py",
    ("jobs/offline/row_faults.py", "writes says why"): "where to look",
    ("jobs/quarantine.py", "completes it"): "tests/jobs/landing/rejected/test_quarantine.py",
    ("jobs/retire.py", "when it is old enough"): "tests/jobs/insight/test_maintain.py",
    ("jobs/rollback.py", "resumes it from there"): HERE,
    ("jobs/rollback.py", "continue with"): HERE,
    ("jobs/snapshots/learned.py", "or migrate it"): "tests/jobs/upgrades/test_migration.py",
    ("jobs/storage/object_files.py", "kalman-pipeline doctor"): "another store",
    ("jobs/streaming/driver.py", "makes the shadow anew"): "tests/jobs/streaming/test_former_states.py",
    ("jobs/streaming/exporting.py", "computes"): "tests/jobs/streaming/test_former_states.py",
    ("jobs/upgrades/context.py", "continue with"): HERE,
    ("jobs/upgrades/context.py", "--mode stop-start"): "tests/jobs/upgrades/test_rekey.py",
    ("jobs/upgrades/context.py", "has not read: run"): "tests/jobs/upgrades/test_rekey.py",
    ("jobs/upgrades/decision.py", "kalman-pipeline promote --model {model}"): "what it refuses has a row",
    ("jobs/upgrades/migration/migrating.py", "--mode retrain"): "tests/jobs/upgrades/test_upgrade.py",
    ("jobs/upgrades/migration/parameters.py", "--mode retrain"): "tests/jobs/upgrades/test_upgrade.py",
    ("jobs/upgrades/migration/state_map.py", "--mode retrain"): "tests/jobs/upgrades/test_upgrade.py",
    ("jobs/upgrades/migration/rekey.py", "both change the keys"): "tests/jobs/upgrades/test_rekey.py",
    ("jobs/upgrades/modes.py", "then compare again"): "a shadow ahead of a stream that was stopped",
    ("jobs/upgrades/reverse_migration.py", "go there with"): "tests/jobs/upgrades/test_reverse_migration.py",
    ("jobs/verification/gathering.py", "has not landed"): "a topic",
}
"""Texts that name a command and have no row: the file of tests that run it, or the reason."""


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    """The states that rows copy."""
    made: dict[str, World] = {}

    def copy(name: str, of: str | None = None) -> World:
        folder = tmp_path_factory.mktemp("states") / name
        if of is not None:
            shutil.copytree(made[of].folder, folder)
        made[name] = World(folder)
        return made[name]

    copy("empty").write()
    copy("landed", "empty").land()
    copy("pretrained", "landed").run("pretrain", "--model", "walk")
    rejected = copy("rejected", "empty")
    rejected.write(time_format="%d.%m.%Y")
    rejected.land()
    waves = copy("waves")
    hours = np.arange(200)
    at = pd.Timestamp("2024-01-01") + pd.to_timedelta(hours, "h")
    y = 5 * np.sin(hours * np.pi / 12) + np.random.default_rng(0).normal(size=200)
    pd.DataFrame({"id": "a", "at": at, "y": y}).to_csv(waves.folder / "waves.csv", index=False)
    waves.write(learn={"parameters": ["variance", "R"]})
    waves.run("ingest", "--model", "walk", "--input", f"{waves.folder}/waves.csv")
    live = copy("live")
    with tarfile.open(sorted(FOLDER.glob("*.tar.gz"))[-1]) as archive:
        archive.extractall(live.folder, filter="data")
    return made


def name_row(row: Row) -> str:
    """Return a row's name in pytest."""
    return re.sub(r"\W+", "_", row.text).strip("_")


def run_remedy(world: World, *rows: Row) -> None:
    """Print messages of one state, run the commands that they name, and check that the messages are gone."""
    commands: list[str] = []
    for row in rows:
        row.make(world)
        said = world.run(*row.words(world))
        assert re.search(row.pattern, said), said
        commands += [one for line in said.splitlines() for one in COMMAND.findall(line) if row.only in one]
    assert commands
    for row in rows:
        row.prepare(world)
    for command in dict.fromkeys(commands):
        fill = {name: make for row in rows for name, make in row.fill.items()}
        answer = world.run(*(fill[one](world) if one in fill else one for one in shlex.split(command)[1:]))
        assert "error:" not in answer or COMMAND.search(answer), f"{command}: {answer}"
    for row in rows:
        said = "" if row.hint else world.run(*row.words(world))
        assert not re.search(row.pattern, said), said


@pytest.mark.parametrize("row", QUICK, ids=name_row)
def test_a_remedy_works(
    states: dict[str, World], tmp_path: Path, row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")  # it starts no Spark
    monkeypatch.chdir(tmp_path)
    run_remedy(states[row.state].copied(tmp_path / "world"), row)


def test_a_monitor_that_lacks_a_column_says_what_must_happen_before_spark_starts(
    states: dict[str, World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    world = states["live"].copied(tmp_path / "world")
    world.change(monitor=RULES, outputs={"measured": True})
    said = world.run("monitor", "--model", "walk")
    assert "no column measured yet" in said and "land newer rows" in said
    assert COMMAND.findall(said)[1:] == [
        "kalman-pipeline estimate --model walk",
        "kalman-pipeline monitor --model walk --history",
    ]


def test_a_model_that_does_not_fit_names_what_may_fit_better(
    states: dict[str, World], tmp_path: Path
) -> None:
    said = states["waves"].copied(tmp_path / "world").run("pretrain", "--model", "walk")
    assert "does not fit" in said and "kalman-pipeline compare --model walk --model other" in said


@pytest.mark.slow
def test_another_structure_fits_where_the_first_does_not(states: dict[str, World], tmp_path: Path) -> None:
    world = states["waves"].copied(tmp_path / "world")
    run_remedy(world, WAVES)
    world.run("ingest", "--model", "other", "--input", f"{world.folder}/waves.csv")
    assert "does not fit" not in world.run("pretrain", "--model", "other")


@pytest.mark.spark
@pytest.mark.slow
def test_remedies_work_along_a_model_s_life(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path / "world")
    for rows in STORY:
        run_remedy(world, *rows)


@cache
def list_named_commands() -> list[tuple[str, str]]:
    """Return the file and the text of each string of the code, besides docstrings, that names a command to run."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        messages = importlib.import_module("messages")
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    found = []
    for path in sorted(path for room in messages.ROOMS for path in (ROOT / room).rglob("*.py")):
        code = path.read_text()
        tree = ast.parse(code if "kalman-pipeline" in code else "")
        seen = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = None if id(node) in seen or not isinstance(node, ast.expr) else messages.text_of(node)
            if text is not None:
                seen |= {id(part) for part in ast.walk(node)}
                if NAMED.search(text):
                    found.append((str(path.relative_to(ROOT)), " ".join(text.split())))
    return found


def test_every_text_that_names_a_command_has_a_row_or_a_reason() -> None:
    rows = [*QUICK, WAVES, *(row for step in STORY for row in step)]
    known = {(row.file, row.text) for row in rows} | REASONS.keys()
    places = list_named_commands()
    without = [one for one in places if not any(file == one[0] and text in one[1] for file, text in known)]
    assert not without, "give it a row in QUICK or STORY, or a reason in REASONS"
    unused = [(file, text) for file, text in known if not any(file == f and text in t for f, t in places)]
    assert not unused
    assert not [one for one in REASONS.values() if one.startswith("tests/") and not (ROOT / one).exists()]


def test_a_remedy_is_written_as_it_is_run() -> None:
    """Every command in backquotes that a text names is whole: with its program, and options that the verb has."""
    for file, text in list_named_commands():
        for command in re.findall(r"`kalman-pipeline ([a-z][^`]+)`", text):
            verb = cli.VERBS[command.split()[0]]
            options = set(re.findall(r" (--[a-z-]+)", command))
            known = verb.actions[command.split()[1]] if isinstance(verb, Actions) else verb
            names = {f"--{name.replace('_', '-')}" for name in inspect.signature(known.function).parameters}
            assert not options - names - {"--warehouse"}, (file, command)
