"""Verbs as commands: the parameters of a verb's `run` are the options of the command, declared only in its file.

`@command` makes a `Command` of a verb's `run`. Python calls the command as a function; `kalman-pipeline VERB`,
`python -m jobs.VERB` and `spark-submit jobs/VERB.py` call it with parsed options. The global options may stand before
or after the verb. The command prints a report. It shows an error as one clear line and ends with an exit code.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Generic, ParamSpec, get_type_hints

import typer
from typer.core import TyperGroup

from jobs.core.errors import INPUT_ERROR, UserError, print_note, show
from jobs.core.faults import require_open_files
from jobs.core.processes import raise_on_sigterm
from jobs.core.report import REPORT_FILE, Report
from jobs.core.settings import DEFAULT_MASTER, Settings
from jobs.core.times import parse_duration_us

P = ParamSpec("P")
PROGRAM = "kalman-pipeline"
_WITH_VALUE = {"--warehouse", "--models", "--master"}
_FEWEST_FILES = 64
"""Fewest open files with which a command runs; the library of the tables would end with a panic."""
_FLAGS = {"--json", "--quiet", "-q", "--debug"}

Model = Annotated[str, typer.Option(help="A model's name, or the path of its spec.")]

Trigger = Annotated[
    str,
    typer.Option(help="available-now: until caught up; a number: every so many seconds, until stopped."),
]

Profile = Annotated[bool, typer.Option("--profile", help="Report where the time went, step by step.")]

Snapshot = Annotated[
    str | None,
    typer.Option(
        help="Take learned parameters from this snapshot; `none`: the spec's values. By default the spec's newest good "
        "snapshot, if there is one."
    ),
]

Monitor = Annotated[bool, typer.Option("--monitor", help="The model's monitor, not its stream.")]
Skill = Annotated[bool, typer.Option("--skill", help="The model's forecast skill, not its stream.")]


MODULES = {"import": "import_states"}
"""Module of each verb that is a keyword of Python, which cannot be the name of an importable module."""


def name_module(verb: str) -> str:
    """Return the name of a verb's module in `jobs`."""
    return MODULES.get(verb, verb)


def parse_verb(file: Path) -> str:
    """Return the verb to which a file in `jobs` belongs."""
    return next((verb for verb, module in MODULES.items() if module == file.stem), file.stem)


class Command(Generic[P]):
    """A verb: a function in Python, and a command whose options are the function's parameters after `settings`.

    The first paragraph of the function's docstring is the command's help. If `announced` is true, the command first
    describes its work in one line on standard error, because minutes may pass before the report. If `timed` is true,
    the report ends with the seconds that the verb took.
    """

    def __init__(self, function: Callable[P, Report], announced: bool = True, timed: bool = False) -> None:
        self.function, self.announced, self.timed = function, announced, timed
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **options: P.kwargs) -> Report:
        """Run the verb."""
        began, report = time.monotonic(), self.function(*args, **options)
        if not self.timed:
            return report
        seconds = time.monotonic() - began
        lines, data = [*report.lines, f"{seconds:.1f} s"], {**report.data, "seconds": seconds}
        return replace(report, lines=lines, data=data)

    def add_to(self, app: typer.Typer, name: str) -> None:
        """Add the verb to an application as a command."""
        app.command(name, help=self.help_text)(self._build_callback())

    @property
    def help_text(self) -> str:
        """The help text of the command."""
        return (inspect.getdoc(self.function) or "").partition("\n\n")[0].replace("\n", " ")

    def format_announcement(self, name: str, options: Mapping[str, Any]) -> str:
        """Return a line that announces the command: its name, its model, and the first sentence of its help."""
        given = options.get("model") or ()
        models = [given] if isinstance(given, str) else given
        first = self.help_text.partition(". ")[0].removesuffix(".")
        return f"{' '.join([name, *models])}: {first[:1].lower()}{first[1:]}"

    def main(self) -> None:
        """Run the file of a verb as a program, by `if __name__ == "__main__": run.main()`."""
        _run_verb(self.add_to, parse_verb(self.file))

    @property
    def file(self) -> Path:
        """The file of the verb."""
        return Path(inspect.getfile(self.function))

    def _build_callback(self) -> Callable[..., None]:
        """Return the function that typer calls; its first parameter is typer's context instead of the settings."""
        hints = get_type_hints(self.function, include_extras=True)
        given = list(inspect.signature(self.function).parameters.values())[1:]
        context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        options = [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[each.name]) for each in given
        ]

        def callback(ctx: typer.Context, **options: Any) -> None:
            if self.announced and not ctx.obj.quiet:
                name = ctx.command_path.partition(" ")[2]
                print_note(self.format_announcement(name, options))
            _execute(lambda: self(ctx.obj, **options), ctx.obj)  # type: ignore[call-arg]

        callback.__signature__ = inspect.Signature([context, *options])  # type: ignore[attr-defined]
        callback.__annotations__ = {each.name: each.annotation for each in [context, *options]}
        return callback


class Actions:
    """A verb with actions, each of which is a `Command`, such as `kalman-pipeline quarantine list`."""

    def __init__(self, help_text: str, actions: Mapping[str, Command[...]]) -> None:
        self.help_text = help_text
        self.actions = actions

    def add_to(self, app: typer.Typer, name: str) -> None:
        """Add the verb to an application as a group of commands."""
        group = typer.Typer(name=name, no_args_is_help=True, help=self.help_text)
        for action, one in self.actions.items():
            one.add_to(group, action)
        app.add_typer(group)

    def main(self) -> None:
        """Run the file of the verb as a program."""
        some = next(iter(self.actions.values()))
        _run_verb(self.add_to, parse_verb(some.file))


def command(function: Callable[P, Report]) -> Command[P]:
    """Make a command of a verb's function: the first parameter is `settings`, every other parameter is an option."""
    return Command(function)


def timed(function: Callable[P, Report]) -> Command[P]:
    """Make a command, as `command` does, whose report ends with the seconds that the verb took."""
    return Command(function, timed=True)


def answer(function: Callable[P, Report]) -> Command[P]:
    """Make a command of a verb's function that ends within a second or two, so that it prints only its report."""
    return Command(function, announced=False)


def select_query(monitor: bool, skill: bool) -> str:
    """Return the query to which a command applies: the model's stream, its monitor or its forecast skill.

    Raises:
        UserError: both flags are given.
    """
    if monitor and skill:
        raise UserError("--monitor and --skill name two queries: give one of them")
    return "monitor" if monitor else "skill" if skill else "stream"


def parse_duration_option(option: str, text: str) -> timedelta:
    """Return the duration that the text of an option means.

    Raises:
        UserError: the text is not a duration.
    """
    try:
        return timedelta(microseconds=parse_duration_us(text))
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}; write a duration such as 30min or 2h") from error


def build_application() -> typer.Typer:
    """Return the command line without verbs: it has the global options and shows each error as one line."""
    app = typer.Typer(
        name=PROGRAM,
        cls=_Commands,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Kalman filters for millions of keys: trained in batch, continued in a stream, run by Airflow.",
        epilog="Options above may be given before or after the verb.",
    )
    app.callback()(_load_settings)
    return app


def _run_verb(add: Callable[[typer.Typer, str], None], verb: str) -> None:
    """Run one verb with the options of the command line, including the global options."""
    leave_own_folder()
    app = build_application()
    add(app, verb)
    words = sys.argv[1:]
    app(args=insert_verb(verb, words) if _is_submitted() else [verb, *words], prog_name=PROGRAM)


def _is_submitted() -> bool:
    """Return whether a DAG or spark-submit started this program; option values may then come from strangers."""
    return "PYSPARK_GATEWAY_PORT" in os.environ or REPORT_FILE in os.environ


def insert_verb(verb: str, words: Sequence[str]) -> list[str]:
    """Return the words passed to a verb's file by a DAG or spark-submit, with the verb after the global options.

    Only words before the verb's first option can be global options, so a value is never read as a global option.
    """
    rest = list(words)
    front: list[str] = []
    while rest and (rest[0] in _FLAGS or rest[0].split("=", 1)[0] in _WITH_VALUE):
        count = 2 if rest[0] in _WITH_VALUE else 1
        front, rest = front + rest[:count], rest[count:]
    return [*front, verb, *rest]


def leave_own_folder() -> None:
    """Remove jobs/, which spark-submit adds, from the import path: its modules would hide others of the same name."""
    own = Path(__file__).resolve().parents[1]
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != own]


def hoist_global_options(args: Sequence[str]) -> list[str]:
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
    """The group of verbs, which accepts global options anywhere and shows every error as one clear line."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)  # in the order in which a model needs the verbs, not in alphabetical order

    def main(
        self, args: Sequence[str] | None = None, *rest: Any, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        if not _is_submitted():
            words = hoist_global_options(words)
        try:
            code = super().main(words, *rest, standalone_mode=False, **extra)
        except Exception as error:
            code = _show_usage_error(error)
        if not standalone_mode:
            return code
        sys.exit(code)


def _show_usage_error(error: Exception) -> int:
    """Show a usage error of typer as one line; typer contains a separate copy of click."""
    describe = getattr(error, "format_message", None)
    if describe is None:
        return show(error)
    message = " ".join(str(describe()).split()).rstrip(".")
    if not message:  # typer has already shown the help, because no verb was given
        return INPUT_ERROR
    context = getattr(error, "ctx", None)
    verb = ""
    while context is not None and context.parent is not None:
        verb, context = f" {context.info_name}{verb}", context.parent
    return show(UserError(f"{message[:1].lower()}{message[1:]} (see {PROGRAM}{verb} --help)"))


def _load_settings(
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


def _execute(run: Callable[[], Report], settings: Settings) -> None:
    """Run a verb and show its report; end with the exit code of the error, if any, or of the report."""
    try:
        with raise_on_sigterm():
            require_open_files(_FEWEST_FILES)
            report = run()
            report.save()
            report.show(settings.json)
            errors, code = report.errors, report.error_code
    except BrokenPipeError:
        # The reader (such as `| head`) has closed the pipe, which is allowed. Later flushes must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except SystemExit:
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        raise typer.Exit(show(error, settings.debug)) from error
    else:
        if errors:
            raise typer.Exit(show(UserError("\n".join(errors), code)))
