"""The command `kalman-pipeline`: its verbs and their options.

A verb's module is imported when the verb runs, so that `--help` and a mistyped option answer at once.
Every verb is a module as well: `python -m jobs.pretrain ...` and `spark-submit jobs/pretrain.py ...` take the
same options, the global ones included.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jobs import cli_quarantine
from jobs.core.command import run as _run
from jobs.core.errors import INPUT_ERROR, UserError, show
from jobs.core.settings import DEFAULT_MASTER, Settings

_WITH_VALUE = {"--warehouse", "--models", "--master"}
_FLAGS = {"--json", "--quiet", "-q", "--debug"}


def hoist(args: Sequence[str]) -> list[str]:
    """Move the global options to the front, so that they may be given before or after the verb."""
    front: list[str] = []
    rest: list[str] = []
    words = iter(args)
    for word in words:
        if word in _FLAGS or word.split("=", 1)[0] in _WITH_VALUE and "=" in word:
            front.append(word)
        elif word in _WITH_VALUE:
            front += [word, *(value for value in [next(words, None)] if value is not None)]
        elif word == "--":
            rest += [word, *words]
        else:
            rest.append(word)
    return front + rest


class _Commands(TyperGroup):
    """The group of verbs: it accepts global options anywhere and shows every error as one clear line."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)  # in the order of a model's life, not of the alphabet

    def main(
        self, args: Sequence[str] | None = None, *rest: Any, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        words = hoist(sys.argv[1:] if args is None else args)
        try:
            code = super().main(words, *rest, standalone_mode=False, **extra)
        except Exception as error:
            code = _usage(error)
        if not standalone_mode:
            return code
        sys.exit(code)


def _usage(error: Exception) -> int:
    """Show a usage error of typer, which carries click within itself, as one line."""
    describe = getattr(error, "format_message", None)
    if describe is None:
        return show(error)
    message = " ".join(str(describe()).split()).rstrip(".")
    if not message:  # no verb was given, and typer has shown the help
        return INPUT_ERROR
    context = getattr(error, "ctx", None)
    verb = ""
    while context is not None and context.parent is not None:
        verb, context = f" {context.info_name}{verb}", context.parent
    return show(UserError(f"{message[:1].lower()}{message[1:]} (see kalman-pipeline{verb} --help)"))


app = typer.Typer(
    name="kalman-pipeline",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Kalman filters for millions of keys: trained in batch, continued in a stream, run by Airflow.",
    epilog="Options above may be given before or after the verb.",
)

Model = Annotated[str, typer.Option(help="A model's name, or the path of its spec.", show_default=False)]

Trigger = Annotated[
    str, typer.Option(help="available-now: until caught up; a number: every so many seconds, until stopped.")
]

Profile = Annotated[bool, typer.Option("--profile", help="Tell where the time went, step by step.")]

Monitor = Annotated[bool, typer.Option("--monitor", help="The model's monitor, not its stream.")]
Skill = Annotated[bool, typer.Option("--skill", help="The model's forecast skill, not its stream.")]


def _driven(monitor: bool, skill: bool) -> str:
    """Return what a command is about: the model's stream, or one of those that follow it."""
    if monitor and skill:
        raise typer.BadParameter("--monitor and --skill name two things: give one of them")
    return "monitor" if monitor else "skill" if skill else "stream"


@app.callback()
def _settings(
    ctx: typer.Context,
    warehouse: Annotated[
        str | None,
        typer.Option(help="Root of the tables. Environment: KALMAN_WAREHOUSE. Default: ./warehouse."),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(help="Folder of the model specs. Environment: KALMAN_MODELS. Default: ./models."),
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(help=f"Spark's master. Environment: KALMAN_MASTER. Default: {DEFAULT_MASTER}."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON document.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    ctx.obj = Settings.load(warehouse, models, master, json=json, quiet=quiet, debug=debug)


@app.command()
def ingest(
    ctx: typer.Context,
    model: Model,
    input: Annotated[
        list[str] | None,
        typer.Option(
            help="A file, a folder or a glob; may be repeated. Without any: the topic of the spec.",
            show_default=False,
        ),
    ] = None,
    trigger: Annotated[
        str,
        typer.Option(help="available-now, or a number: look again every so many seconds, until stopped."),
    ] = "available-now",
    history: Annotated[
        bool,
        typer.Option(
            "--history", help="They are the history of new keys, which a running stream gets from pretrain."
        ),
    ] = False,
) -> None:
    """Land files, or a topic, in the model's measurements table; what does not fit goes to quarantine."""
    _run(ctx, "ingest", model, input or [], trigger=trigger, history=history)


@app.command()
def inputs(
    ctx: typer.Context,
    model: Model,
    input: Annotated[
        str,
        typer.Option(help="A .csv or .parquet file with a row a key: all of the table.", show_default=False),
    ],
) -> None:
    """Put a file in the place of the model's table of inputs; streams take it with their next micro-batch."""
    _run(ctx, "inputs", model, input)


@app.command()
def pretrain(
    ctx: typer.Context,
    model: Model,
    to_version: Annotated[
        int | None,
        typer.Option(min=0, help="Use measurements up to this Delta version; by default the newest."),
    ] = None,
    as_of: Annotated[
        str | None, typer.Option(help="Use measurements that had landed by this time (ISO 8601).")
    ] = None,
    learn_from: Annotated[
        str | None, typer.Option(help="Learn from event times from here on (ISO 8601).")
    ] = None,
    learn_to: Annotated[
        str | None, typer.Option(help="Learn from event times before this (ISO 8601).")
    ] = None,
    history: Annotated[
        bool,
        typer.Option(
            "--history",
            help="Only what `ingest --history` has landed, for the streams that run to take over.",
        ),
    ] = False,
    profile: Profile = False,
) -> None:
    """Learn the model's parameters, filter the whole history, and commit a snapshot."""
    _run(
        ctx,
        "pretrain",
        model,
        to_version=to_version,
        as_of=as_of,
        learn_from=learn_from,
        learn_to=learn_to,
        history=history,
        profile=profile,
    )


@app.command()
def stream(
    ctx: typer.Context,
    model: Annotated[
        list[str],
        typer.Option(
            help="A model's name, or the path of its spec; several share one Spark application.",
            show_default=False,
        ),
    ],
    trigger: Trigger = "available-now",
    adopt: Annotated[
        str | None, typer.Option(help="Retire the live generation and start a new one from this snapshot.")
    ] = None,
    generation: Annotated[
        str | None,
        typer.Option(help="Drive this generation, such as a shadow, not the live one.", show_default=False),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Serve Prometheus metrics on this port.", show_default=False),
    ] = None,
    metrics_file: Annotated[
        str | None,
        typer.Option(help="Write Prometheus metrics to this file, for a collector.", show_default=False),
    ] = None,
    profile: Profile = False,
) -> None:
    """Start the model's stream from its newest snapshot, or resume it where it stopped."""
    beside: dict[str, Any] = {
        "metrics_port": metrics_port,
        "metrics_file": metrics_file,
        "profile": profile,
    }
    if len(model) == 1:
        _run(ctx, "stream", model[0], trigger=trigger, adopt=adopt, generation=generation, **beside)
    elif adopt is not None or generation is not None:
        raise typer.BadParameter("--adopt and --generation name something of one model: give one --model")
    else:
        _run(ctx, "streaming.several", model, trigger=trigger, **beside)


@app.command()
def monitor(
    ctx: typer.Context,
    model: Model,
    trigger: Trigger = "available-now",
) -> None:
    """Watch the live estimates: windows over time, and rules over keys that raise alerts."""
    _run(ctx, "monitor", model, trigger=trigger)


@app.command()
def skill(
    ctx: typer.Context,
    model: Model,
    trigger: Trigger = "available-now",
) -> None:
    """Compare forecasts from the live estimates with what was measured later, and show how good they are."""
    _run(ctx, "skill", model, trigger=trigger)


@app.command()
def stop(
    ctx: typer.Context,
    model: Model,
    hold: Annotated[
        str | None,
        typer.Option(
            help="How long Airflow is not to start it again, such as 30min; by default until `resume`."
        ),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Airflow may start it again at once.")] = False,
    wait: Annotated[str, typer.Option(help="How long to wait for the end.")] = "10min",
    needed: Annotated[
        bool, typer.Option("--needed", help="Exit code 3 if nothing drives the stream.")
    ] = False,
    monitor: Monitor = False,
    skill: Skill = False,
) -> None:
    """Stop a stream that runs; it finishes its micro-batch."""
    what = _driven(monitor, skill)
    _run(ctx, "stop", model, hold=hold, restart=restart, wait=wait, needed=needed, what=what)


@app.command()
def resume(ctx: typer.Context, model: Model, monitor: Monitor = False, skill: Skill = False) -> None:
    """Take back a stop, or begin anew what Airflow has given up: it may start the stream again."""
    _run(ctx, "resume", model, what=_driven(monitor, skill))


@app.command()
def export(
    ctx: typer.Context,
    model: Model,
    generation: Annotated[
        str | None, typer.Option(help="A generation; by default the live one.", show_default=False)
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=0, help="A committed micro-batch; by default the last.")
    ] = None,
    needed: Annotated[bool, typer.Option("--needed", help="Exit code 3 if nothing is live.")] = False,
    profile: Profile = False,
) -> None:
    """Take a snapshot of a stream's state at the end of a micro-batch; the stream is not disturbed."""
    _run(ctx, "export", model, generation=generation, batch=batch, needed=needed, profile=profile)


@app.command()
def migrate(
    ctx: typer.Context,
    model: Model,
    snapshot: Annotated[
        str | None,
        typer.Option(help="A snapshot; by default the newest of an earlier version.", show_default=False),
    ] = None,
    to: Annotated[int | None, typer.Option(min=1, help="A version; by default the spec's.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Report what would become of the states; write nothing.")
    ] = False,
    profile: Profile = False,
) -> None:
    """Carry a snapshot over to another version of its model, checked before anyone can use it."""
    _run(ctx, "migrate", model, snapshot=snapshot, to=to, dry_run=dry_run, profile=profile)


@app.command()
def upgrade(
    ctx: typer.Context,
    model: Model,
    mode: Annotated[
        str,
        typer.Option(help="blue-green, stop-start, retrain, stateless or repartition (docs/upgrades.md)."),
    ] = "blue-green",
    partitions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With mode repartition: how many state partitions; by default as the spec says.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would become of the states; change nothing.")
    ] = False,
    promote: Annotated[
        bool, typer.Option(help="Let a new version that compares well take over (blue-green).")
    ] = True,
    lose_state: Annotated[
        bool, typer.Option("--lose-state", help="Allow mode stateless to forget every key.")
    ] = False,
    needed: Annotated[
        bool, typer.Option("--needed", help="Exit code 3 if there is nothing to upgrade.")
    ] = False,
    drain: Annotated[
        bool,
        typer.Option(
            "--drain", help="Stop the stream first, and let Airflow start it again (not blue-green)."
        ),
    ] = False,
) -> None:
    """Bring the stream to the version of the model's spec, proved on live data first; or lay its state out anew."""
    _run(
        ctx,
        "upgrade",
        model,
        mode=mode,
        dry_run=dry_run,
        promote=promote,
        lose_state=lose_state,
        needed=needed,
        partitions=partitions,
        drain=drain,
    )


@app.command()
def promote(
    ctx: typer.Context,
    model: Model,
    generation: Annotated[
        str | None, typer.Option(help="A shadow; by default the newest.", show_default=False)
    ] = None,
    behind: Annotated[
        bool, typer.Option("--behind", help="Promote it though it has not come as far as the live one.")
    ] = False,
) -> None:
    """Make a shadow generation the live one, in one commit."""
    _run(ctx, "promote", model, generation=generation, behind=behind)


@app.command()
def rollback(
    ctx: typer.Context,
    model: Model,
    to: Annotated[
        str | None,
        typer.Option(help="A retired generation; by default the one before.", show_default=False),
    ] = None,
    last_state: Annotated[
        bool,
        typer.Option(
            "--last-state",
            help="Go on from the live generation's state, carried back, not from the older checkpoint.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --last-state: say what would become of the states.")
    ] = False,
) -> None:
    """Make the version before the live one live again, from its own checkpoint or with the last state."""
    _run(ctx, "rollback", model, to=to, last_state=last_state, dry_run=dry_run)


@app.command()
def retire(
    ctx: typer.Context,
    model: Model,
    generation: Annotated[
        str | None, typer.Option(help="A shadow; by default the only one.", show_default=False)
    ] = None,
) -> None:
    """Retire a shadow generation that is not to take over."""
    _run(ctx, "retire", model, generation=generation)


@app.command()
def maintain(
    ctx: typer.Context,
    model: Model,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; change nothing.")] = False,
    estimates: Annotated[
        bool,
        typer.Option(
            "--estimates",
            help="Also remove estimates of removed generations that are no part of the live ones.",
        ),
    ] = False,
) -> None:
    """Take away what the spec's `retention` lets go and nothing needs; compact and vacuum the tables."""
    _run(ctx, "maintain", model, dry_run=dry_run, estimates=estimates)


@app.command()
def report(
    ctx: typer.Context,
    model: Model,
    generation: Annotated[
        str | None,
        typer.Option(
            help="The new one; by default the newest shadow, else the live one.", show_default=False
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="The old one; by default the one that the new one began behind.", show_default=False
        ),
    ] = None,
) -> None:
    """Compare two generations of a model, and write an HTML and a JSON report beside the tables."""
    _run(ctx, "report", model, generation=generation, against=against)


@app.command()
def status(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Option(help="Only this model.", show_default=False)] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.5, help="With --watch: seconds between two looks.")] = 5.0,
    alarm_after: Annotated[
        str | None,
        typer.Option(
            help="Fail, with a sentence, if a stream has rows to take and took none for so long, such as 10m.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show models, snapshots, generations, positions, lag and the last error."""
    _run(ctx, "status", model, watch=every if watch else None, alarm_after=alarm_after)


@app.command("filter")
def filter_(
    ctx: typer.Context,
    model: Model,
    input: Annotated[str, typer.Option(help="Rows to filter: a .csv or .parquet file.", show_default=False)],
    output: Annotated[str, typer.Option(help="Where to write: a .csv or .parquet file.", show_default=False)],
    smooth: Annotated[
        bool, typer.Option("--smooth", help="Also give each row's state given all rows of its key.")
    ] = False,
    inputs: Annotated[
        str | None,
        typer.Option(
            help="Of a model with inputs: a .csv or .parquet file with a row a key.", show_default=False
        ),
    ] = None,
) -> None:
    """Try a model on a file, without Spark: one output row for each input row."""
    _run(ctx, "filter", model, input, output, smooth=smooth, inputs=inputs)


@app.command()
def forecast(
    ctx: typer.Context,
    model: Model,
    input: Annotated[
        str, typer.Option(help="The rows until now: a .csv or .parquet file.", show_default=False)
    ],
    output: Annotated[str, typer.Option(help="Where to write: a .csv or .parquet file.", show_default=False)],
    steps: Annotated[
        int | None, typer.Option(min=1, help="How many steps ahead of each key's newest row.")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(help="Up to this time (ISO 8601) in steps of --every; without it at this time alone."),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(help="A step, such as 1h. With --steps by default the median time between rows."),
    ] = None,
    probability: Annotated[float, typer.Option(help="With which a value is between the bounds.")] = 0.95,
) -> None:
    """Forecast the keys of a file, without Spark: state and measurement at times to come."""
    _run(
        ctx,
        "forecast",
        model,
        input,
        output,
        steps=steps,
        until=until,
        every=every,
        probability=probability,
    )


@app.command()
def schema(ctx: typer.Context) -> None:
    """Print the JSON schema of model specs."""
    _run(ctx, "schema")


app.add_typer(cli_quarantine.app)


def main(verb: str | None = None) -> None:
    """Run the command; with `verb`, that verb with the options of the command line.

    `if __name__ == "__main__": main("pretrain")` makes a verb's module a program.
    """
    # spark-submit puts jobs/ itself on the path, where our modules would hide others of the same name.
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != here]
    app(args=[*([verb] if verb else []), *sys.argv[1:]], prog_name="kalman-pipeline")


if __name__ == "__main__":
    main()
