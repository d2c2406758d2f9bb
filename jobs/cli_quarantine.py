"""The command `kalman-pipeline quarantine`: its actions and their options."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jobs.core.command import run

app = typer.Typer(
    name="quarantine",
    no_args_is_help=True,
    help="Look at rejected rows, land them after a fix, or put them away.",
)

Model = Annotated[str, typer.Option(help="A model's name, or the path of its spec.", show_default=False)]
Reason = Annotated[
    str | None, typer.Option(help="Only rows whose reason begins so, such as late.", show_default=False)
]
Since = Annotated[
    str | None,
    typer.Option(help="Only rows rejected since a time (ISO 8601), or for a duration such as 2d."),
]
Ids = Annotated[
    list[str] | None, typer.Option("--id", help="Only this row; may be repeated.", show_default=False)
]


@app.command("list")
def list_(ctx: typer.Context, model: Model, reason: Reason = None, since: Since = None) -> None:
    """Sum up rejected rows by reason: how many are held, replayed and discarded."""
    run(ctx, "quarantine", "list", model, _choice(reason, since))


@app.command()
def show(
    ctx: typer.Context,
    model: Model,
    reason: Reason = None,
    since: Since = None,
    id: Ids = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows to show at most.")] = 20,
    output: Annotated[
        str | None,
        typer.Option(help="Write all the rows to this file, as JSON lines to mend.", show_default=False),
    ] = None,
) -> None:
    """Show held rows, with their payload and where they came from."""
    run(ctx, "quarantine", "show", model, _choice(reason, since, id), limit=limit, output=output)


@app.command()
def replay(
    ctx: typer.Context,
    model: Model,
    reason: Reason = None,
    since: Since = None,
    id: Ids = None,
    edited: Annotated[
        str | None,
        typer.Option(
            help="Land the rows of this file, as `show --output` wrote it, with their payloads mended.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Land held rows that fit the spec as it is now, each at most once."""
    run(ctx, "quarantine", "replay", model, _choice(reason, since, id), edited=edited)


@app.command()
def discard(
    ctx: typer.Context,
    model: Model,
    reason: Reason = None,
    since: Since = None,
    id: Ids = None,
    all: Annotated[bool, typer.Option("--all", help="Every held row of the model.")] = False,
) -> None:
    """Put held rows away for good; they stay in the table, marked."""
    run(ctx, "quarantine", "discard", model, _choice(reason, since, id), everything=all)


def _choice(reason: str | None, since: str | None, ids: list[str] | None = None) -> Any:
    from jobs.warehouse.quarantine import Choice

    return Choice(reason, since, tuple(ids or ()))
