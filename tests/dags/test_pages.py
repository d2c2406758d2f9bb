"""The pages of the models and their reports, in Airflow's own API server, with its log-in and its rights."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote, urlencode
from uuid import uuid4

import pytest
from airflow.models.dag import DagModel
from airflow.models.dagbundle import DagBundleModel
from airflow.models.dagrun import DagRun
from airflow.models.hitl import HITLDetail
from airflow.models.pool import Pool
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session
from airflow.utils.state import DagRunState
from airflow.utils.types import DagRunType
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from dags.kalman_dags.pages.missing import Intervals
from dags.kalman_dags.pages.model_page import Dag, _complete, build_model_page
from dags.kalman_dags.pages.waiting import WaitingRun
from jobs.lineage.generations import LIVE, Generation, build_generation_row
from jobs.specs.loading import load_spec
from jobs.storage.row_changes import put_rows
from jobs.storage.tables import GENERATIONS
from jobs.storage.warehouse import Tables
from tests.dags.conftest import HOME, MODELS
from tests.support.hostile import HOSTILE, list_elements

pytestmark = pytest.mark.airflow

USERS = ("admin:admin", "tiny_reader:viewer", "other_reader:viewer")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warehouse with a report, a secret beside the reports, and a link that leads out of them."""
    root = tmp_path_factory.mktemp("pages")
    for model in ("tiny", "other"):
        (root / "warehouse" / "reports" / model).mkdir(parents=True)
        (root / "warehouse" / "reports" / model / f"{model}-g0002.html").write_text(
            f"<p>the report of {model}</p>"
        )
    (root / "warehouse" / "secret.html").write_text("a secret")
    (root / "secret.html").write_text("a secret")
    (root / "warehouse" / "reports" / "tiny" / "link.html").symlink_to(root / "secret.html")
    (root / "warehouse" / "reports" / "tiny" / "notes.txt").write_text("a secret")
    (root / "warehouse" / "reports" / "tiny" / "sibling.html").symlink_to("../other/other-g0002.html")
    (root / "warehouse" / "reports" / "tiny" / "own.html").symlink_to("tiny-g0002.html")
    (root / "warehouse" / "reports" / "tiny" / "folder.html").mkdir()
    os.mkfifo(root / "warehouse" / "reports" / "tiny" / "pipe.html")
    (root / "warehouse" / "reports" / "linked").symlink_to("other")
    (root / "warehouse" / "measurements" / "tiny" / "_delta_log").mkdir(parents=True)
    (root / "models").mkdir()
    text = (MODELS / "tiny.yaml").read_text()
    (root / "models" / "tiny.yaml").write_text(
        text.replace("Three thermometers", "Three <b>thermometers</b>")
    )
    (root / "models" / "other.yaml").write_text(text.replace("name: tiny", "name: other"))
    return root


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[TestClient]:
    """Airflow's API server in this process, with the plugin that its plugins folder has."""
    from airflow.api_fastapi.app import create_app, purge_cached_app

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KALMAN_WAREHOUSE", str(place / "warehouse"))
        patch.setenv("KALMAN_MODELS", str(place / "models"))
        patch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "0123456789abcdef" * 4)
        patch.setenv("AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS", ",".join(USERS))
        patch.setenv("AIRFLOW__CORE__AUTH_MANAGER", "tests.support.rights_by_dag.RightsByDag")
        purge_cached_app()
        # Airflow keeps this process's users; the pages follow no redirect to its log-in here.
        with TestClient(create_app(), follow_redirects=False) as client:
            yield client
        purge_cached_app()


def token(server: TestClient, user: str) -> dict[str, str]:
    """Log in as a user, and return the header that says so."""
    passwords = json.loads((HOME / "simple_auth_manager_passwords.json.generated").read_text())
    answer = server.post("/auth/token", json={"username": user, "password": passwords[user]})
    assert answer.status_code == 201, answer.text
    return {"Authorization": f"Bearer {answer.json()['access_token']}"}


@pytest.fixture(scope="module")
def admin(server: TestClient) -> dict[str, str]:
    """The header of an administrator."""
    return token(server, "admin")


def test_a_report_opens_for_who_may_read_its_dag(server: TestClient) -> None:
    reader = token(server, "tiny_reader")
    found = server.get("/kalman/reports/tiny/tiny-g0002.html", headers=reader)
    assert (found.status_code, found.text) == (200, "<p>the report of tiny</p>")
    # What data may have brought into a report cannot act with the reader's rights.
    assert "sandbox" in found.headers["content-security-policy"]
    assert "script" not in found.headers["content-security-policy"]
    assert found.headers["x-content-type-options"] == "nosniff"
    # The browser's cookie of the log-in is as good as the API's token.
    cookie = {"Cookie": f"_token={reader['Authorization'].removeprefix('Bearer ')}"}
    assert server.get("/kalman/reports/tiny/tiny-g0002.html", headers=cookie).status_code == 200


@pytest.mark.parametrize("path", ["/kalman/reports/tiny/tiny-g0002.html", "/kalman/models/tiny"])
def test_nobody_else_sees_it(server: TestClient, path: str) -> None:
    assert server.get(path, headers=token(server, "other_reader")).status_code == 403
    without = server.get(path)
    assert without.status_code == 307 and "/auth/login" in without.headers["location"]
    assert server.get(path, headers={"Authorization": "Bearer none"}).status_code == 403


@pytest.mark.parametrize(
    "name",
    [
        "../../secret.html",
        "..%2F..%2Fsecret.html",
        "%2e%2e/%2e%2e/secret.html",
        "..%5c..%5csecret.html",
        "link.html",
        "notes.txt",
        "none.html",
        ".html",
        "tiny-g0002.html%00.html",
        "%2Fetc%2Fpasswd",
    ],
)
def test_no_other_file_can_be_reached(server: TestClient, name: str) -> None:
    answer = server.get(f"/kalman/reports/tiny/{name}", headers=token(server, "admin"))
    # A path that leaves the pages is one of Airflow's own.
    assert answer.status_code == 404 or "a secret" not in answer.text, answer.text
    assert "a secret" not in answer.text


@pytest.mark.parametrize(
    "path",
    [
        "tiny/sibling.html",
        "tiny/folder.html",
        "tiny/pipe.html",
        "tiny/..%2Fother%2Fother-g0002.html",
        "tiny/%252e%252e%252fother%252fother-g0002.html",
        "linked/other-g0002.html",
        f"tiny/{'x' * 300}.html",
        f"{'x' * 300}/tiny-g0002.html",
    ],
    ids=lambda path: path[:30],
)
def test_a_link_and_a_name_that_no_report_has_are_no_report(server: TestClient, path: str) -> None:
    answer = server.get(f"/kalman/reports/{path}", headers=token(server, "admin"))
    assert answer.status_code == 404 and "the report of" not in answer.text, answer.text


def test_a_link_to_a_report_of_the_same_model_is_read(server: TestClient) -> None:
    found = server.get("/kalman/reports/tiny/own.html", headers=token(server, "tiny_reader"))
    assert (found.status_code, found.text) == (200, "<p>the report of tiny</p>")


NAMES = st.one_of(
    st.text(max_size=300),
    st.sampled_from(
        ["..", ".", "%2e%2e", "\0", "\u202e", "a\nb", "{{7*7}}", "<b>", "'--", "tiny;", "TINY", "x" * 400]
    ),
)


@given(
    model=NAMES | st.just("tiny"), name=NAMES, page=st.sampled_from(["models/{0}", "reports/{0}/{1}", "{0}"])
)
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_name_in_an_address_is_an_error_of_the_server(
    server: TestClient, admin: dict[str, str], model: str, name: str, page: str
) -> None:
    parts = (quote(one.encode(errors="surrogatepass"), safe="") for one in (model, f"{name}.html"))
    answer = server.get(f"/kalman/{page.format(*parts)}", headers=admin)
    assert answer.status_code < 500, answer.text
    assert "a secret" not in answer.text and "the report of other" not in answer.text


@pytest.mark.parametrize("header", ["Host", "X-Forwarded-Host"])
@pytest.mark.parametrize("path", ["models/tiny", "models/tiny/", "reports/tiny/tiny-g0002.html?a=b", ""])
def test_no_redirect_takes_its_host_from_a_header(server: TestClient, header: str, path: str) -> None:
    hostile = {header: "evil.example"}
    for who in (hostile, {**hostile, **token(server, "admin")}):
        answer = server.get(f"/kalman/{path}", headers=who)
        assert "evil.example" not in answer.headers.get("location", ""), answer.headers
    if not path.endswith("/"):
        answer = server.get(f"/kalman/{path}", headers=hostile)
        assert answer.headers["location"] == f"/auth/login?{urlencode({'next': f'/kalman/{path}'})}"


def test_names_are_texts_in_a_models_page() -> None:
    spec = load_spec("tiny", MODELS)

    def build(name: str) -> str:
        return build_model_page(
            spec.model_copy(update={"description": name}),
            {"live": name},
            [Dag("a__b", name, name, False)],
            [WaitingRun("a__b", "run", name, name, "task")],
            [],
            Intervals("a", "b", 1, ["c"]),
            "",
        )

    for name in HOSTILE:
        assert list_elements(build(name)) == list_elements(build("a")), name


def test_a_models_page_links_what_belongs_to_it(server: TestClient, place: Path) -> None:
    page = server.get("/kalman/models/tiny", headers=token(server, "tiny_reader")).text
    assert 'href="/kalman/reports/tiny/tiny-g0002.html"' in page and "notes.txt" not in page
    assert f"{place}/warehouse/measurements/tiny" in page
    options = f"--model tiny --warehouse {place}/warehouse --models {place}/models"
    assert f"kalman-pipeline status {options}</code>" in page
    assert f"kalman-pipeline quarantine list {options}</code>" in page
    assert "&lt;b&gt;thermometers" in page and "<b>thermometers" not in page
    assert server.get("/kalman/models/none", headers=token(server, "admin")).status_code == 404


def make_run(session: Session, verb: str, run_id: str, state: DagRunState, paused: bool = False) -> None:
    """Make a run of the model `tiny` in Airflow's database."""
    dag_id, now = f"kalman_{verb}__tiny", datetime.now(UTC)
    if session.get(DagModel, dag_id) is None:
        session.add(
            DagModel(dag_id=dag_id, bundle_name="pages", is_stale=False, is_paused=paused, fileloc="x")
        )
    session.flush()
    session.add(DagRun(dag_id, run_id=run_id, run_type=DagRunType.MANUAL, state=state, run_after=now))
    session.flush()


def make_task(session: Session, verb: str, run_id: str, state: str, pool: str) -> None:
    """Make the task of such a run."""
    values = {"dag_id": f"kalman_{verb}__tiny", "task_id": verb, "run_id": run_id, "state": state}
    session.execute(insert(TaskInstance).values(**values, id=uuid4(), pool=pool, pool_slots=1, map_index=-1))


@pytest.fixture
def waiting(server: TestClient) -> Iterator[None]:
    """Runs that wait: for their DAG, an earlier run, a full pool, a pool that is missing; and one that goes on."""
    with create_session() as session:
        session.merge(DagBundleModel(name="pages"))
        session.merge(Pool(pool="kalman_stream__tiny", slots=1, include_deferred=True))
        session.flush()
        make_run(session, "verify", "asleep", DagRunState.QUEUED, paused=True)
        make_run(session, "stream", "holder", DagRunState.RUNNING)
        make_task(session, "stream", "holder", "deferred", "kalman_stream__tiny")
        make_run(session, "stream", "second", DagRunState.QUEUED)
        make_run(session, "upgrade", "blocked", DagRunState.RUNNING)
        make_task(session, "upgrade", "blocked", "scheduled", "kalman_stream__tiny")
        make_run(session, "monitor", "lost", DagRunState.RUNNING)
        make_task(session, "monitor", "lost", "scheduled", "kalman_monitor__tiny")
        make_run(session, "export", "fine", DagRunState.QUEUED)
    yield
    with create_session() as session:
        for table in (TaskInstance, DagRun, DagModel):
            session.execute(delete(table).where(table.dag_id.endswith("__tiny")))
        session.execute(delete(Pool).where(Pool.pool == "kalman_stream__tiny"))


def test_a_run_that_waits_says_why_and_what_to_do(server: TestClient, waiting: None) -> None:
    page = server.get("/kalman/models/tiny", headers=token(server, "admin")).text
    section = page.partition("Runs that wait")[2].partition("</section>")[0].replace("<wbr>", "")
    rows = [re.findall("<td[^>]*>(.*?)</td>", row) for row in section.split("<tr>")[2:]]
    found = {re.sub("<.*?>", "", verb): (reason, remedy) for verb, reason, remedy in rows}
    assert found == {
        "verify": ("its DAG is paused", "Switch the DAG on."),
        "stream": ("an earlier run of its DAG goes on", "Wait for that run, or end it."),
        "upgrade": (
            "its task upgrade needs a slot of the full pool kalman_stream__tiny",
            "Wait for kalman_stream__tiny, or end its run.",
        ),
        "monitor": (
            "there is no pool kalman_monitor__tiny",
            "airflow pools set kalman_monitor__tiny 1 &#x27;&#x27; --include-deferred",
        ),
    }
    assert 'href="/dags/kalman_verify__tiny/runs/asleep"' in section


def test_a_run_that_waits_for_a_person_links_its_question(server: TestClient, waiting: None) -> None:
    with create_session() as session:
        for verb, state in (
            ("rollback", "awaiting_input"),
            ("promote", "deferred"),
            ("maintain", "deferred"),
        ):
            make_run(session, verb, "asks", DagRunState.RUNNING)
            make_task(session, verb, "asks", state, "default_pool")
        task = select(TaskInstance.id).where(TaskInstance.task_id == "promote")
        options = {"ti_id": session.scalar(task), "options": ["Approve"], "subject": "Promote?"}
        session.add(HITLDetail(**options))
    page = server.get("/kalman/models/tiny", headers=token(server, "admin")).text
    section = page.partition("Runs that wait")[2].partition("</section>")[0].replace("<wbr>", "")
    for verb in ("rollback", "promote"):
        run = f"/dags/kalman_{verb}__tiny/runs/asks"
        assert f"its task {verb} waits for a person" in section
        assert f'<a href="{run}/tasks/{verb}/required_actions" target="_top">Answer it</a>' in section
    # A task that is deferred for another reason asks nobody.
    assert "its task maintain waits" not in section


def test_a_page_without_waiting_runs_says_nothing_of_them(server: TestClient) -> None:
    assert "Runs that wait" not in server.get("/kalman/models/tiny", headers=token(server, "admin")).text


def test_a_models_page_shows_the_live_version_its_lag_and_what_to_do(server: TestClient, place: Path) -> None:
    reader = token(server, "tiny_reader")
    assert "nothing: " in server.get("/kalman/models/tiny", headers=reader).text
    tables = Tables(str(place / "warehouse"))
    tables.create("generations", GENERATIONS)
    start = {"source": "delta", "table": "measurements/tiny", "version": 0}
    live = Generation(
        "tiny-g0001", "tiny", 0, "f", "s", "c", start_position=start, partitions=1, blocks=1, status=LIVE
    )
    put_rows(tables, "generations", ("generation",), lambda there: [build_generation_row(live)])
    page = server.get("/kalman/models/tiny", headers=reader).text
    assert "version 0 (generation tiny-g0001)" in page
    assert "version 1 of tiny is deployed, and version 0 is live until" in page
    assert f"kalman-pipeline upgrade --model tiny --warehouse {place}/warehouse --models" in page
    assert ">lag</td>" in page and ">driver</td>" in page
    assert "version 0 (generation tiny-g0001)" in server.get("/kalman/", headers=reader).text


def test_a_command_in_a_sentence_is_completed_with_all_of_its_words() -> None:
    text = _complete(
        "see `kalman-pipeline versions`, then `kalman-pipeline promote --model tiny --force` at once"
    )
    assert "kalman-pipeline versions</code>, then <code>" in text
    assert re.search(
        r"kalman-pipeline promote --model tiny --warehouse \S+ --models \S+ --force</code> at once", text
    )


def test_the_list_has_the_models_that_one_may_read(server: TestClient) -> None:
    mine = server.get("/kalman/", headers=token(server, "tiny_reader")).text
    assert 'href="/kalman/models/tiny"' in mine and "models/other" not in mine
    everything = server.get("/kalman/", headers=token(server, "admin")).text
    assert "models/tiny" in everything and "models/other" in everything


BROKEN = {
    "no yaml": ("broken.yaml", "name: ["),
    "an escape beyond all numbers": ("broken.yaml", 'name: broken\ndescription: "\\UFFFFFFFF"\n'),
    "a name that no model has": ("Not A Model.yaml", "name: ["),
    "a name that is no text": (os.fsdecode(b"\xff.yaml"), "name: ["),
}


@pytest.mark.parametrize(("name", "text"), BROKEN.values(), ids=BROKEN)
def test_a_broken_spec_takes_down_no_page(server: TestClient, place: Path, name: str, text: str) -> None:
    (place / "models" / name).write_text(text)
    try:
        for page in ("/kalman/", "/kalman/models/tiny"):
            answer = server.get(page, headers=token(server, "admin"))
            assert answer.status_code == 200 and "tiny" in answer.text
    finally:
        (place / "models" / name).unlink()


def test_airflows_menu_has_the_pages(server: TestClient) -> None:
    found = server.get("/api/v2/plugins", headers=token(server, "admin")).json()["plugins"]
    (ours,) = [one for one in found if one["name"] == "kalman_pages"]
    assert [view["href"] for view in ours["external_views"]] == ["/kalman/"]
    assert [one["url_prefix"] for one in ours["fastapi_apps"]] == ["/kalman"]
    errors = server.get("/api/v2/plugins/importErrors", headers=token(server, "admin")).json()
    assert errors["import_errors"] == []
