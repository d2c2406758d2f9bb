"""Templates in a model's spec. Airflow renders them, so they contain named fields alone, none of which is a secret."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from jinja2 import Environment, TemplateError, nodes

VARIABLE = "KALMAN_TEMPLATES"
"""Environment variable in which the owner of Airflow lists further fields: names, or patterns such as `params.*`."""

FIELDS = (
    "logical_date logical_date.strftime data_interval_start data_interval_start.strftime data_interval_end "
    "data_interval_end.strftime ds ds_nodash ts ts_nodash ts_nodash_with_tz macros.ds_add macros.ds_format run_id "
    "dag_run.run_id dag.dag_id task.task_id task.subject task.body ti.task_id ti.run_id ti.try_number ti.log_url"
).split()
"""The fields and functions that a template may name."""
FILTERS = ("ds", "ds_nodash", "ts", "ts_nodash", "ts_nodash_with_tz")
_PARTS = (nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Neg, nodes.Call, nodes.Filter)

_JINJA = Environment()  # noqa: S701  it parses alone


def find_template_problem(value: Any) -> tuple[str, str] | None:
    """Return the problem and the remedy for the first unfit template in a value, at any depth, or None."""
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple, set)):
        return next(filter(None, map(find_template_problem, value)), None)
    if not isinstance(value, str):
        return None
    try:
        unfit = next(_list_unfit_parts(_JINJA.parse(value)), None)
    except TemplateError as error:
        return f"is not a template ({error})", "write fields such as {{ ds }}"
    if unfit is None:
        return None
    problem = f"contains a template with {unfit}, which a spec may not use"
    return problem, f"write fields such as {{{{ ds }}}}, or have the owner of Airflow list it in {VARIABLE}"


def _list_unfit_parts(node: nodes.Node) -> Iterator[str]:
    name = _join_name(node)
    if name:
        listed = (*FIELDS, *re.split(r"[\s,]+", os.environ.get(VARIABLE, "")))
        if not any(fnmatchcase(name, pattern) for pattern in listed):
            yield name
        return
    if not isinstance(node, _PARTS) or (isinstance(node, nodes.Filter) and node.name not in FILTERS):
        yield getattr(node, "name", "") or type(node).__name__
    for child in node.iter_child_nodes():
        yield from _list_unfit_parts(child)


def _join_name(node: nodes.Node) -> str:
    """Return the dotted name that an expression is; the empty text if it is another expression."""
    if isinstance(node, nodes.Name):
        return node.name
    inner = _join_name(node.node) if isinstance(node, nodes.Getattr) else ""
    return inner and f"{inner}.{node.attr}"  # pyright: ignore[reportAttributeAccessIssue]
