"""Notifiers that a model's spec names for the approval of an upgrade: classes of Airflow's providers."""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

from airflow.sdk import BaseNotifier

from jobs.specs.model_spec import ModelSpec
from kalman_dags.templates import find_template_problem

VARIABLE, DEFAULT = "KALMAN_NOTIFIERS", "airflow.providers.*"
"""Environment variable that lists the modules whose notifiers specs may name: names or patterns; and its default."""

FILE_ARGUMENTS = ("files", "file", "template", "attach", "attachments", "config")
"""Arguments of Airflow's providers that name files, which a notifier would send with the rights of Airflow's tasks."""


def build_notifiers(spec: ModelSpec) -> list[BaseNotifier]:
    """Return the notifiers of a spec's `airflow.upgrade.notifiers`.

    Raises:
        ValueError: a notifier cannot be made; the message gives the reason and the remedy.
    """
    return [_build_notifier(path, given) for path, given in spec.airflow.upgrade.notifiers.items()]


def _build_notifier(path: str, arguments: dict[str, Any]) -> BaseNotifier:
    module, _, name = path.rpartition(".")
    listed = re.split(r"[\s,]+", (os.environ.get(VARIABLE) or DEFAULT).strip())
    if not any(fnmatchcase(module, pattern) or module.startswith(f"{pattern}.") for pattern in listed):
        raise ValueError(
            f"{path} is not one of the notifiers that a spec may name: list {module or path} in {VARIABLE} (now "
            f"{' '.join(listed)}), if everybody who writes specs may have Airflow run its code"
        )
    for argument in FILE_ARGUMENTS:
        if arguments.get(argument):
            raise ValueError(f"{path}: {argument} names a file of Airflow's machine: write the text itself")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{path} cannot be imported ({error}): install its provider beside Airflow"
        ) from None
    if not (isinstance(found, type) and issubclass(found, BaseNotifier)):
        raise ValueError(f"{path} is not a notifier: name a class such as SmtpNotifier")
    try:
        notifier = found(**arguments)
    except Exception as error:  # another library's exception: its message is shown, too
        raise ValueError(f"{path} does not accept these arguments: {error}") from None
    # The notifier may have read a file; Airflow renders these fields.
    rendered = [getattr(notifier, field, None) for field in notifier.template_fields]
    problem = find_template_problem([arguments, rendered])
    if problem:
        raise ValueError(f"{path} {'; '.join(problem)}")
    return notifier
