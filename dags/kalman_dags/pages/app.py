"""Serve the pages: a user may read a model's pages only if the user may read the model's DAG in Airflow.

Airflow's dependency identifies the user by the cookie of the log-in, or by the token of the API.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagDetails
from airflow.api_fastapi.core_api.security import GetUserDep
from airflow.models.dag import DagModel
from airflow.utils.session import create_session
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from sqlalchemy import select

from dags.kalman_dags.pages import reports
from dags.kalman_dags.pages.missing import find_landed_intervals
from dags.kalman_dags.pages.model_page import Dag, build_index_page, build_model_page
from dags.kalman_dags.pages.waiting import list_waiting_runs
from dags.kalman_dags.places import PAGES, find_models_path, find_warehouse_root, name_dag
from jobs.core.errors import UserError
from jobs.specs.loading import find_deployed_spec, list_model_names
from jobs.specs.model_spec import ModelSpec, is_model_name

# Redirects that add or remove a slash would take their host from the request.
app = FastAPI(title="Kalman models", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

GUARD = {
    # A report is made from data, so its content may only draw. It cannot run a script, send a form, or read Airflow's
    # pages with the rights of the viewer.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; sandbox",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "private, no-store",
}

OWN = {**GUARD, "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'"}
"""The headers of this package's own pages, whose links lead to Airflow's pages."""


def may_read(model: str, user: Any) -> bool:
    """Return whether a user may read the DAG of a model's upgrades, and therefore the model's pages."""
    return _may_read_dag(name_dag("upgrade", model), user)


def _may_read_dag(name: str, user: Any) -> bool:
    details = DagDetails(id=name, team_name=DagModel.get_team_name(name))
    return get_auth_manager().is_authorized_dag(method="GET", details=details, user=user)


def check_readable(model: str, user: GetUserDep) -> str:
    """Return the model in an address if the user may read it; raise a 403 or 404 error otherwise."""
    if not is_model_name(model):
        raise HTTPException(404, "there is no such model")
    if not may_read(model, user):
        raise HTTPException(403, "Forbidden")
    return model


Readable = Annotated[str, Depends(check_readable)]


def list_valid_specs() -> list[ModelSpec]:
    """Return the valid specs of the models folder."""
    folder = find_models_path()
    specs = (find_deployed_spec(name, folder)[1] for name in list_model_names(folder))
    return [one for one in specs if one is not None]


def read_live_versions(specs: Sequence[ModelSpec]) -> dict[str, str]:
    """Return the live version of each model as text, or why the warehouse cannot be read."""
    from jobs.insight.status import list_live_versions  # loads PyArrow

    names = [one.name for one in specs]
    try:
        return list_live_versions(find_warehouse_root(), names)
    except UserError as error:
        return dict.fromkeys(names, error.message)


def read_now(spec: ModelSpec) -> dict[str, str]:
    """Return what is live of a model (`describe_model`), or why the warehouse cannot be read."""
    from jobs.insight.status import describe_model  # loads PyArrow

    try:
        return describe_model(find_warehouse_root(), spec)
    except UserError as error:
        return {"live": error.message}


def list_dags(model: str, user: Any) -> list[Dag]:
    """Return the DAGs of a model that exist in Airflow and that the user may read."""
    with create_session() as session:
        query = (
            select(DagModel)
            .where(DagModel.dag_id.endswith(f"__{model}", autoescape=True), DagModel.is_stale.is_(False))
            .order_by(DagModel.dag_id)
        )
        found = [
            Dag(one.dag_id, one.dag_display_name, one.description or "", bool(one.is_paused))
            for one in session.scalars(query)
        ]
    mine = [one for one in found if one.dag_id.partition("__")[2] == model]
    return [one for one in mine if _may_read_dag(one.dag_id, user)]


@app.exception_handler(401)
def log_in(request: Request, error: Any) -> Response:
    """Redirect a person without a valid log-in to Airflow's log-in page, and back to a path of the same server."""
    here = request.url.replace(scheme="", netloc="")
    return RedirectResponse(get_auth_manager().get_url_login(next_url=str(here)))


@app.get("/", response_class=HTMLResponse)
def all_models(request: Request, user: GetUserDep) -> Response:
    """Show the models that the user may read."""
    shown = [spec for spec in list_valid_specs() if may_read(spec.name, user)]
    return HTMLResponse(build_index_page(shown, read_live_versions(shown), _find_root(request)), headers=OWN)


@app.get("/models/{model}", response_class=HTMLResponse)
def one_model(model: Readable, request: Request, user: GetUserDep) -> Response:
    """Show a model: its DAGs, tables, reports and commands."""
    spec = next((one for one in list_valid_specs() if one.name == model), None)
    if spec is None:
        raise HTTPException(404, f"there is no model {model!r}, or its spec is broken")
    dags = list_dags(model, user)
    page = build_model_page(
        spec,
        read_now(spec),
        dags,
        list_waiting_runs([one.dag_id for one in dags]),
        reports.list_report_names(model),
        find_landed_intervals(spec),
        _find_root(request),
    )
    return HTMLResponse(page, headers=OWN)


@app.get("/reports/{model}/{name}")
def one_report(model: Readable, name: str) -> Response:
    """Serve a report of a model."""
    found = reports.read(model, name)
    if found is None:
        raise HTTPException(404, "there is no such report")
    return Response(found[0], media_type=found[1], headers=GUARD)


def _find_root(request: Request) -> str:
    """Return the path prefix of Airflow's own pages."""
    return request.scope.get("root_path", "").removesuffix(PAGES)
