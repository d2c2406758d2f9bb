"""Find runs of a model's DAGs that wait for a person, for an earlier run or for a pool, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.hitl import HITLDetail
from airflow.models.pool import Pool
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session
from airflow.utils.state import State
from sqlalchemy import select


class WaitingRun(NamedTuple):
    """A run that waits, the reason, and the remedy; `asks` is the task whose question a person must answer."""

    dag_id: str
    run_id: str
    reason: str
    remedy: str
    asks: str = ""


def list_waiting_runs(dag_ids: Sequence[str]) -> list[WaitingRun]:
    """Return the runs of these DAGs that wait; a holder of a pool is named only if it is one of these DAGs."""
    runs = (
        select(DagRun.dag_id, DagRun.run_id, DagRun.state, DagModel.is_paused)
        .join(DagModel, DagModel.dag_id == DagRun.dag_id)
        .where(DagRun.dag_id.in_(dag_ids), DagRun.state.in_(("queued", "running")))
    )
    task = TaskInstance
    asks = HITLDetail.ti_id.is_not(None) & HITLDetail.responded_at.is_(None)
    tasks = (
        select(task.dag_id, task.run_id, task.task_id, task.pool, task.state, asks.label("asks"))
        .join(HITLDetail, HITLDetail.ti_id == task.id, isouter=True)
        .where(task.dag_id.in_(dag_ids), task.state.in_(State.unfinished))
    )
    with create_session() as session:
        begun, tried = session.execute(runs).all(), session.execute(tasks).all()
        pools = Pool.slots_stats(session=session)
    active = {run.dag_id for run in begun if run.state == "running"}
    found = []
    for run in begun:
        if run.state == "queued" and run.is_paused:
            found.append(WaitingRun(run.dag_id, run.run_id, "its DAG is paused", "Switch the DAG on."))
        elif run.state == "queued" and run.dag_id in active:
            reason, remedy = "an earlier run of its DAG goes on", "Wait for that run, or end it."
            found.append(WaitingRun(run.dag_id, run.run_id, reason, remedy))
    for one in tried:
        if one.state == "awaiting_input" or (one.state == "deferred" and one.asks):
            reason = f"its task {one.task_id} waits for a person"
            found.append(WaitingRun(one.dag_id, one.run_id, reason, "Answer it", one.task_id))
        elif one.state == "scheduled" and one.pool not in pools:
            reason = f"there is no pool {one.pool}"
            remedy = f"airflow pools set {one.pool} 1 '' --include-deferred"
            found.append(WaitingRun(one.dag_id, one.run_id, reason, remedy))
        elif one.state == "scheduled" and pools[one.pool]["open"] <= 0:
            holders = sorted({other.dag_id for other in tried if _holds(other, one.pool)})
            reason = f"its task {one.task_id} needs a slot of the full pool {one.pool}"
            remedy = f"Wait for {', '.join(holders) or 'the run that has it'}, or end its run."
            found.append(WaitingRun(one.dag_id, one.run_id, reason, remedy))
    return found


def _holds(task: Any, pool: str) -> bool:
    return task.pool == pool and task.state in ("running", "queued", "deferred")
