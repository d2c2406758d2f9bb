"""Choose the table of estimates to draw; an error names the command that makes them. Light: no NumPy, no Spark."""

from __future__ import annotations

from jobs.core.errors import UserError
from jobs.storage.tables import estimates, estimates_history
from jobs.storage.warehouse import Tables

LIVE, HISTORY = "live", "history"


def need_estimates(tables: Tables, model: str, which: str) -> str:
    """Return the table of a model's live estimates, or of the estimates of its history.

    Raises:
        UserError: there are no estimates; the message names the command that makes them.
    """
    name = (estimates if which == LIVE else estimates_history)(model)
    if tables.exists(name):
        return name
    if which == HISTORY:
        raise UserError(
            f"model {model} has no estimates of history in {tables.root}: make them with "
            f"`kalman-pipeline estimate --model {model}`"
        )
    if _has_stream(tables, model):
        raise UserError(
            f"model {model} has no live estimates in {tables.root} yet: its stream has read no row after its snapshot; "
            f"land newer rows and run `kalman-pipeline stream --model {model}` again, or estimate the rows before it "
            f"with `kalman-pipeline estimate --model {model}`"
        )
    raise UserError(
        f"model {model} has no live estimates in {tables.root}: make them with `kalman-pipeline stream --model {model}`"
    )


def _has_stream(tables: Tables, model: str) -> bool:
    if not tables.exists("generations"):
        return False
    return any(row["status"] == "live" for row in tables.rows("generations", {"model": model}))
