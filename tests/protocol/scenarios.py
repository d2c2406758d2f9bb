"""Who meets whom: the scenarios that are explored."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from jobs.core.errors import UserError
from jobs.lineage import generations, start_point
from jobs.lineage.generations import DeployedModel
from jobs.specs.model_spec import ModelSpec
from jobs.streaming.exporting import export
from tests.protocol import actors, world
from tests.protocol.actors import MODEL, spec_of, warehouse
from tests.protocol.explorer import Scenario
from tests.protocol.memory_files import MemoryFiles
from tests.protocol.scheduler import Deviation, Scheduler
from tests.protocol.world import World

DAYS = 86_400.0

FORGETFUL = "retention: {snapshots: {newest: 0}}"
"""Of old snapshots only those are kept that something needs."""

ONE_BY_ONE = "stream: {max_files_per_batch: 1}"
"""A driver makes several micro-batches, so that it has a local copy of the states from its second on."""

FILES = {
    "a": "a,1,1\nb,2,2\na,3,3\n",
    "b": "a,4,4\nb,5,5\na,6,6\nb,1970-01-01T00:00:07Z,7\n",  # its last row is refused, and accepted by a replay
    "c": "a,8,8\nb,9,9\n",
    "late": "a,2,10\nb,11,11\n",  # a row that is older than its key's state
    "d": "a,12,12\nb,13,13\na,14,14\n",
    "grown": "a,15,15\n",
    "both": "a,31,31\nb,31,32\n",
    "only-a": "a,33,33\n",
    "only-b": "b,34,34\n",
    "history": "h,1,21\nh,2,22\n",
    "new": "h,30,23\n",
}


@cache
def file(name: str) -> str:
    """Return the path of a file with some rows."""
    folder = Path(tempfile.gettempdir(), f"kalman-protocol-{os.getpid()}")
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.csv"
    path.write_text("k,t,y\n" + FILES[name])
    return str(path)


def _made(*steps: Callable[[], object]) -> World:
    made = World()
    with world.inhabited(made):
        for step in steps:
            step()
    return made


def _land(name: str) -> Callable[[], object]:
    return lambda: actors.ingest(file(name))


def _pass(days: float) -> Callable[[], object]:
    def wait() -> None:
        world.current().clock.seconds += days * DAYS

    return wait


@cache
def landed() -> World:
    """Rows have landed, and there is no snapshot."""
    return _made(_land("a"))


@cache
def pretrained() -> World:
    """There is a snapshot, and rows after it."""
    return _made(_land("a"), actors.pretrain, _land("b"))


@cache
def streaming() -> World:
    """A generation is live, and rows have landed that it has not read."""
    return _made(_land("a"), actors.pretrain, _land("b"), actors.stream, _land("c"), _land("d"))


@cache
def late() -> World:
    """A late row is in quarantine, and a row of a file, too."""
    return _made(_land("a"), actors.pretrain, _land("b"), _land("late"), actors.stream, _land("d"))


@cache
def shadowed() -> World:
    """A generation was replaced, and another runs in shadow of its successor."""
    return _made(
        _land("a"),
        actors.pretrain,
        _land("b"),
        actors.stream,
        lambda: actors.upgrade("stop-start"),
        lambda: actors.stream(spec_of(2)),
        _land("c"),
        lambda: actors.stream(spec_of(2)),
        _shadow,
    )


def _shadow() -> None:
    """Begin a shadow of the live generation, from an export of it, and let it catch up."""
    here = warehouse()
    live = generations.read_named(here, MODEL)
    model = DeployedModel(spec_of(2), here)
    manifest, _ = export(model, live)
    made = start_point.begin_exported(model, manifest, live, generations.SHADOW)
    actors.stream(spec_of(2), name=made.generation)


@cache
def lagging() -> World:
    """A shadow lags the live generation."""
    return _made(
        lambda: world.current().files.update(shadowed().files),
        lambda: world.current().newest.update(shadowed().newest),
        _land("d"),
        lambda: actors.stream(spec_of(2)),
    )


@cache
def damaged() -> World:
    """The checkpoint of the live generation is gone."""
    return _made(
        lambda: world.current().files.update(streaming().files),
        lambda: world.current().newest.update(streaming().newest),
        lambda: MemoryFiles(f"{world.ROOT}/checkpoints/{MODEL}-g0001").remove_tree(""),
    )


@cache
def grown() -> World:
    """A file has landed, and rows were added to it."""
    made = _made(_land("a"), actors.pretrain, _land("grown"))
    with Path(file("grown")).open("a") as more:
        more.write("b,16,16\n")
    return made


def _importing() -> ModelSpec:
    return spec_of(1, "stream: {new_keys: pretrained}")


def _with_latest() -> ModelSpec:
    return spec_of(1, "sinks: {latest: true}")


def _with_inputs() -> ModelSpec:
    return spec_of(1, "inputs: {columns: {gain: gain}}")


@cache
def with_inputs() -> World:
    """A model whose keys have inputs, and rows that it has not read."""
    spec = _with_inputs()
    return _made(
        actors.change_inputs,
        lambda: actors.ingest(file("a"), spec),
        lambda: actors.pretrain(spec),
        lambda: actors.ingest(file("b"), spec),
        lambda: actors.stream(spec),
        lambda: actors.ingest(file("c"), spec),
    )


@cache
def with_history() -> World:
    """The history of a new key has landed for a stream that imports such keys, and a row of the key after it."""
    spec = _importing()
    return _made(
        lambda: actors.ingest(file("a"), spec),
        lambda: actors.pretrain(spec),
        lambda: actors.ingest(file("b"), spec),
        lambda: actors.stream(spec),
        lambda: actors.land_history(file("history"), spec),
        lambda: actors.ingest(file("new"), spec),
    )


@cache
def two_snapshots() -> World:
    """The live generation began from the second of two snapshots, and its parent from the first."""
    return _made(
        _land("a"),
        actors.pretrain,
        _land("b"),
        actors.stream,
        lambda: actors.stream(adopt=actors.pretrain()),
        _land("c"),
        actors.stream,
    )


@cache
def streamed_at_once() -> World:
    """The live generation has read two versions in one micro-batch."""
    return _made(_land("a"), actors.pretrain, _land("b"), _land("c"), actors.stream)


def _killed_after(
    file: str, main: Callable[[], object], deviate: Callable[[Scheduler], None] = lambda scheduler: None
) -> Callable[[], None]:
    """Run a driver of the first generation, and kill it as soon as its checkpoint has a file."""

    def on_step(scheduler: Scheduler) -> None:
        if f"{world.ROOT}/checkpoints/{MODEL}-g0001/{file}" in scheduler.world.files:
            scheduler.processes[0].dead = True
        else:
            deviate(scheduler)

    def run() -> None:
        scheduler = Scheduler(world.current(), {}, on_step)
        scheduler.begin("killed", main)
        scheduler.run()

    return run


@cache
def stopped_within_a_version() -> World:
    """The live generation has read a version of two files, and the first of two files of the next."""
    slow = spec_of(1, "stream: {max_files_per_batch: 3}")
    stopped = _killed_after("commits/0", lambda: actors.stream(slow))
    return _made(_land("a"), actors.pretrain, _land("b"), _land("d"), stopped, _pass(1))


def _one_by_one() -> ModelSpec:
    return spec_of(1, ONE_BY_ONE)


@cache
def sparse() -> World:
    """A generation has begun, and not read three micro-batches: rows of both keys, of the one, of the other."""
    unread = (_land("both"), _land("only-a"), _land("only-b"))
    return _made(_land("a"), actors.pretrain, lambda: actors.stream(_one_by_one()), *unread)


def _former_stream() -> None:
    actors.former_stream(_one_by_one())


def _former(last: int) -> World:
    """The driver of an earlier release was killed after a micro-batch within a version of two files."""
    killed = _killed_after(f"commits/{last}", _former_stream)
    return _made(_land("a"), actors.pretrain, _land("b"), _land("d"), killed, _pass(1))


@cache
def former() -> World:
    """The live generation is of an earlier release, and has read one version and half of another."""
    return _former(2)


@cache
def former_within_its_first_version() -> World:
    """The live generation is of an earlier release, and none of its micro-batches completes a version."""
    return _former(0)


@cache
def hurt() -> World:
    """The states of the live generation, of an earlier release, are those of two attempts and lack a row.

    Its driver was killed between the snapshot of a micro-batch's states and the commit, and started again.
    """

    def upload(scheduler: Scheduler) -> None:
        pending = scheduler.next_default(scheduler.ready()).pending
        if pending is not None and pending.what.endswith("commits/1"):
            scheduler.deviations[scheduler.step] = Deviation("run", "killed/maintenance")

    return _made(
        lambda: world.current().files.update(sparse().files),
        lambda: world.current().newest.update(sparse().newest),
        _killed_after("state/0/0/2.zip", _former_stream, upload),
        _pass(1),
        _former_stream,
    )


@cache
def aged() -> World:
    """Some generations and snapshots are old enough to be removed."""
    return _made(
        _land("a"),
        actors.pretrain,
        _land("b"),
        actors.stream,
        lambda: actors.upgrade("stop-start"),
        lambda: actors.stream(spec_of(2)),
        _pass(1),
        lambda: actors.stream(spec_of(2), adopt=actors.pretrain(spec_of(2))),
        lambda: actors.stream(spec_of(2), adopt=actors.pretrain(spec_of(2))),
        _pass(60),
        _land("c"),
    )


def _processes(**mains: Callable[[], object]) -> Callable[[Scheduler], None]:
    def begin(scheduler: Scheduler) -> None:
        for name, main in mains.items():
            scheduler.begin(name, main)

    return begin


def _on_one_host(**mains: Callable[[], object]) -> Callable[[Scheduler], None]:
    def begin(scheduler: Scheduler) -> None:
        for name, main in mains.items():
            scheduler.begin(name, main, "host")

    return begin


def _stream_all(version: int = 1) -> Callable[[], None]:
    def catch_up() -> None:
        live = generations.find_live(warehouse(), MODEL)
        spec = spec_of(max(version, 1 if live is None else live.model_version))
        actors.stream(spec)

    return catch_up


def _after(*steps: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for step in steps:
            step()

    return run


def _tolerant(step: Callable[[], object]) -> Callable[[], None]:
    """Let a command be refused, which is an outcome."""

    def run() -> None:
        with contextlib.suppress(UserError):
            step()

    return run


def _stream_or_adopt() -> None:
    """Drive the live generation; if its states lack rows, compute them anew from its snapshot, as the message says."""
    try:
        actors.stream(_one_by_one())
    except UserError as error:
        adopted = re.search(r"--adopt (\S+)` computes the state anew", error.message)
        if adopted is None:
            raise
        actors.stream(_one_by_one(), adopt=adopted[1])


TAKE_OVER = Scenario(
    "two drivers of one generation",
    streaming,
    _processes(A=actors.stream, B=actors.stream),
    _stream_all(),
    keeps_lease=True,
)
FIRST_START = Scenario(
    "two drivers begin the first generation",
    pretrained,
    _processes(A=actors.stream, B=actors.stream),
    _stream_all(),
)
SAME_HOST = Scenario(
    "a driver is started again on its own machine",
    streaming,
    _on_one_host(A=actors.stream, B=actors.stream),
    _stream_all(),
)
THREE_DRIVERS = Scenario(
    "three drivers, one after another",
    streaming,
    _processes(A=actors.stream, B=actors.stream, C=actors.stream),
    _stream_all(),
)
STOPPED_BETWEEN = Scenario(
    "a driver ends cleanly between one that freezes and a third",
    streaming,
    _processes(A=actors.stream, B=actors.stopped_stream, C=actors.stream),
    _stream_all(),
    faults=("freeze",),
)
BLUE_GREEN = Scenario(
    "a blue-green upgrade beside the live driver",
    streaming,
    _processes(upgrade=lambda: actors.upgrade("blue-green"), live=actors.stream),
    _after(lambda: actors.upgrade("blue-green"), _stream_all(2)),
)
STOP_START = Scenario(
    "a stop-start upgrade with --drain beside the live driver",
    streaming,
    _processes(upgrade=lambda: actors.upgrade("stop-start", drain=True), live=actors.stream),
    _after(lambda: actors.upgrade("stop-start"), _stream_all(2)),
)
SWITCHES = Scenario(
    "promote, roll back and retire at once",
    shadowed,
    _processes(promote=actors.promote, rollback=actors.rollback, retire=actors.retire),
    _after(_stream_all()),
)
ADOPT = Scenario(
    "a snapshot is adopted beside a driver",
    streaming,
    _processes(adopt=lambda: actors.stream(adopt=actors.pretrain()), live=actors.stream),
    _stream_all(),
    skips=True,
)
INGEST = Scenario(
    "one file is landed twice at once, and streamed",
    pretrained,
    _processes(
        one=lambda: actors.ingest(file("c")), two=lambda: actors.ingest(file("c")), stream=actors.stream
    ),
    _after(lambda: actors.ingest(file("c")), _stream_all()),
)
REPLAY = Scenario(
    "two replays at once, beside a driver",
    late,
    _processes(one=actors.replay, two=actors.replay, stream=actors.stream),
    _after(actors.replay, _stream_all()),
)
PRETRAIN = Scenario(
    "two pretrains at once, and the first driver",
    landed,
    _processes(one=actors.pretrain, two=actors.pretrain, stream=actors.stream),
    _after(actors.pretrain, _stream_all()),
)
MAINTAIN = Scenario(
    "maintain beside a roll-back",
    aged,
    _processes(maintain=lambda: actors.maintain(spec_of(2, FORGETFUL)), rollback=actors.rollback),
    _after(lambda: actors.maintain(spec_of(2, FORGETFUL)), _stream_all()),
)
MAINTAIN_AND_EXPORT = Scenario(
    "maintain beside an export and a driver",
    aged,
    _processes(
        maintain=lambda: actors.maintain(spec_of(2, FORGETFUL)),
        export=actors.export_state,
        stream=lambda: actors.stream(spec_of(2)),
    ),
    _after(lambda: actors.maintain(spec_of(2, FORGETFUL)), _stream_all()),
)
LAGGING = Scenario(
    "a shadow that lags is promoted",
    lagging,
    _processes(promote=actors.promote),
    _after(_stream_all(2)),
)
DAMAGED = Scenario(
    "a driver of a generation without its checkpoint",
    damaged,
    _processes(A=actors.stream),
    _tolerant(_stream_all()),
)
RETRAIN = Scenario(
    "a retraining upgrade with --drain beside the live driver",
    streaming,
    _processes(upgrade=lambda: actors.upgrade("retrain", drain=True), live=actors.stream),
    _after(lambda: actors.upgrade("retrain"), _stream_all(2)),
)
OFFER = Scenario(
    "states of new keys are offered twice at once, beside a driver",
    with_history,
    _processes(
        one=lambda: actors.offer(_importing()),
        two=lambda: actors.offer(_importing()),
        stream=lambda: actors.stream(_importing()),
    ),
    _after(lambda: actors.offer(_importing()), lambda: actors.stream(_importing())),
)
LATEST = Scenario(
    "two drivers of one generation that keeps the latest states",
    streaming,
    _processes(A=lambda: actors.stream(_with_latest()), B=lambda: actors.stream(_with_latest())),
    lambda: actors.stream(_with_latest()),
)
ADOPT_OLDER = Scenario(
    "a snapshot is adopted that is older than the live generation's start",
    two_snapshots,
    _processes(adopt=lambda: actors.stream(adopt=actors.pretrain(version=1))),
    _stream_all(),
    depth=0,
)
ADOPT_INSIDE = Scenario(
    "a snapshot is adopted whose position is inside a micro-batch",
    streamed_at_once,
    _processes(adopt=lambda: actors.stream(adopt=actors.pretrain(version=2))),
    _stream_all(),
    depth=0,
)
RETRAIN_INSIDE = Scenario(
    "a stream that stopped within a version is retrained",
    stopped_within_a_version,
    _processes(upgrade=lambda: actors.upgrade("retrain")),
    _stream_all(2),
    depth=0,
)
PINNED = Scenario(
    "the inputs of keys change beside a driver that is killed",
    with_inputs,
    _processes(A=lambda: actors.stream(_with_inputs()), inputs=actors.change_inputs),
    lambda: actors.stream(_with_inputs()),
)
GROWN = Scenario(
    "a file that has grown since it landed is landed again",
    grown,
    _processes(one=lambda: actors.ingest(file("grown")), stream=actors.stream),
    _after(_tolerant(lambda: actors.ingest(file("grown"))), _stream_all()),
)
STATES = Scenario(
    "two drivers whose attempts write different states",
    sparse,
    _processes(A=lambda: actors.stream(_one_by_one()), B=lambda: actors.stream(_one_by_one())),
    lambda: actors.stream(_one_by_one()),
    faults=("crash", "freeze", "lost", "upload"),
)
TAKEN_UP = Scenario(
    "a driver of an earlier release beside one that takes up its generation",
    sparse,
    _processes(A=_former_stream, B=lambda: actors.stream(_one_by_one())),
    lambda: actors.stream(_one_by_one()),
    faults=("crash", "freeze", "lost", "upload"),
)
TAKEN_UP_TWICE = Scenario(
    "two drivers take up a generation of an earlier release",
    former,
    _processes(A=lambda: actors.stream(_one_by_one()), B=lambda: actors.stream(_one_by_one())),
    lambda: actors.stream(_one_by_one()),
)
TAKEN_UP_INSIDE = Scenario(
    "a generation of an earlier release that stopped within its first version is taken up",
    former_within_its_first_version,
    _processes(A=lambda: actors.stream(_one_by_one())),
    lambda: actors.stream(_one_by_one()),
    depth=0,
)
HURT = Scenario(
    "a generation of an earlier release whose states lack rows",
    hurt,
    _processes(A=_stream_or_adopt, B=_stream_or_adopt),
    _stream_or_adopt,
)
HAND_OVERS = (ADOPT_OLDER, ADOPT_INSIDE, RETRAIN_INSIDE, TAKEN_UP_INSIDE)
"""Hand-overs from a position that no micro-batch of the live generation ends at."""

ALL = (
    TAKE_OVER,
    FIRST_START,
    SAME_HOST,
    THREE_DRIVERS,
    STOPPED_BETWEEN,
    BLUE_GREEN,
    STOP_START,
    RETRAIN,
    OFFER,
    LATEST,
    PINNED,
    GROWN,
    SWITCHES,
    ADOPT,
    INGEST,
    REPLAY,
    PRETRAIN,
    MAINTAIN,
    MAINTAIN_AND_EXPORT,
    STATES,
    TAKEN_UP,
    TAKEN_UP_TWICE,
    HURT,
)
