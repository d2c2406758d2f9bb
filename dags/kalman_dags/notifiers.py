"""Notifiers that a model's spec names for the approval of an upgrade: classes of Airflow's providers."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from airflow.sdk import BaseNotifier

from jobs.specs.model_spec import ModelSpec

ALLOWED = "airflow.providers."
"""The prefix of modules that are always allowed; KALMAN_NOTIFIERS lists other allowed modules, separated by commas."""


def build_notifiers(spec: ModelSpec) -> list[BaseNotifier]:
    """Return the notifiers of a spec's `airflow.upgrade.notifiers`.

    Raises:
        ValueError: a notifier cannot be made; the message gives the reason and the remedy.
    """
    return [_build_notifier(path, given) for path, given in spec.airflow.upgrade.notifiers.items()]


def _build_notifier(path: str, arguments: dict[str, Any]) -> BaseNotifier:
    module, _, name = path.rpartition(".")
    others = [one.strip() for one in os.environ.get("KALMAN_NOTIFIERS", "").split(",") if one.strip()]
    if not path.startswith(ALLOWED) and module not in others:
        raise ValueError(
            f"{path} is of no provider of Airflow: name the module {module or path} in KALMAN_NOTIFIERS, if this "
            "installation has it"
        )
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{path} cannot be imported ({error}): install its provider beside Airflow"
        ) from None
    if not (isinstance(found, type) and issubclass(found, BaseNotifier)):
        raise ValueError(f"{path} is not a notifier: name a class such as SmtpNotifier")
    try:
        return found(**arguments)
    except Exception as error:  # another library's exception: its message is shown, too
        raise ValueError(f"{path} does not accept these arguments: {error}") from None
