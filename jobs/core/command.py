"""Run a verb's module for the command line: its report printed, its error one clear line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import typer

from jobs.core.errors import RUN_FAILED, Terminated, UserError, show
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.core.signals import sigterm_raises


def run(ctx: typer.Context, verb: str, *args: Any, **options: Any) -> None:
    """Call `jobs.VERB.run` with the settings of the command and these arguments, and show what it reports."""
    settings: Settings = ctx.obj
    try:
        with sigterm_raises():
            report: Report = importlib.import_module(f"jobs.{verb}").run(settings, *args, **options)
            report.show(settings.json)
            errors = report.errors
    except BrokenPipeError:
        # The reader (`| head`) has gone, as it may. Leave nothing to flush into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (Exception, KeyboardInterrupt, Terminated) as error:
        raise typer.Exit(show(error, settings.debug)) from error
    else:
        if errors:
            raise typer.Exit(show(UserError("\n".join(errors), RUN_FAILED)))
