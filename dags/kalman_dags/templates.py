"""Templates in a model's spec. Airflow renders them, so they contain named fields alone, none of which is a secret."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
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
_PARTS = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Call, nodes.Keyword, nodes.Filter),
    *(nodes.Neg, nodes.Add, nodes.Concat, nodes.CondExpr),
)

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
    if value.endswith("{"):
        unfit = unfit or "a brace at its end"
    remedy = "write fields such as {{ ds }} or {{ run_id }}"
    if unfit is None:
        return None
    if unfit.replace(".", "").isidentifier() and "._" not in unfit:
        remedy += f", or have the owner of Airflow list it in {VARIABLE}"
    return f"contains a template with {unfit}, which a spec may not use", remedy


def _list_unfit_parts(node: nodes.Node) -> Iterator[str]:
    name = _join_name(node)
    listed = (*FIELDS, *re.split(r"[\s,]+", os.environ.get(VARIABLE, "")))
    if name:
        if not _is_listed(name, listed):
            yield name
        return
    if isinstance(node, nodes.Filter) and not _is_listed(node.name, (*FILTERS, *listed)):
        yield node.name
    elif isinstance(node, nodes.Const | nodes.TemplateData):
        # Whatever renders the result once more must find no template in it.
        text = str(node.value if isinstance(node, nodes.Const) else node.data)
        if re.search(r"\{[{%#]", text):
            yield "braces in a text"
    elif not isinstance(node, _PARTS):
        yield f"an expression ({type(node).__name__})"
    for child in node.iter_child_nodes():
        yield from _list_unfit_parts(child)


def _is_listed(name: str, listed: Sequence[str]) -> bool:
    return "._" not in name and any(fnmatchcase(name, pattern) for pattern in listed)


def _join_name(node: nodes.Node) -> str:
    """Return the dotted name that an expression is; the empty text if it is another expression."""
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        inner, last = _join_name(node.node), node.arg.value
    else:
        inner, last = (_join_name(node.node), node.attr) if isinstance(node, nodes.Getattr) else ("", "")
    return inner and f"{inner}.{last}"
