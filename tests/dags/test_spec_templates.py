"""No text of a spec reaches what Airflow's templates reach: its variables, connections and files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from airflow.sdk.execution_time.context import ConnectionAccessor, MacrosAccessor, VariableAccessor

from jobs.specs.airflow import Airflow
from jobs.specs.loading import load_spec
from jobs.specs.model_spec import SpecError
from kalman_dags.specs import read_specs
from tests.dags.conftest import MODELS, load_bag
from tests.dags.test_follower_dags import SECTIONS

pytestmark = pytest.mark.airflow

SMTP = "airflow.providers.smtp.notifications.smtp.SmtpNotifier"
FILE = "tests.support.file_notifier.FileNotifier"
SECRETS = ("planted-variable", "planted-password")
PLANTED = "{{ var.value.secret }}{{ conn.x.password }}"
AT = datetime(2024, 5, 1, tzinfo=UTC)
AIRFLOW: dict[str, Any] = {
    "owner": "weather",
    "tags": ["one"],
    "ingest": {"path": "landing/a.csv", "schedule": "@daily"},
    "pretrain": {"schedule": "on-landing"},
    "estimate": {"schedule": "@daily"},
    "stream": {"schedule": "@continuous", "trigger": "30s"},
    "monitor": {"schedule": "@continuous", "trigger": "30s"},
    "skill": {"schedule": "@continuous", "trigger": "30s"},
    "forecast": {"schedule": "@daily", "future": "future.csv"},
    "export": {"schedule": "@daily"},
    "upgrade": {"schedule": "@daily", "assigned_users": ["ada"], "notifiers": {}},
    "verify": {"schedule": "@daily", "share": "1%"},
    "maintain": {"schedule": "@daily"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A models folder, and an Airflow with a secret variable and a secret connection."""
    monkeypatch.setenv("KALMAN_MODELS", str(tmp_path))
    monkeypatch.setenv("KALMAN_NOTIFIERS", "airflow.providers.* tests.support.file_notifier")
    monkeypatch.setenv("AIRFLOW_VAR_SECRET", SECRETS[0])
    monkeypatch.setenv("AIRFLOW_CONN_X", json.dumps({"conn_type": "http", "password": SECRETS[1]}))
    return tmp_path


def build_spec(folder: Path) -> dict[str, Any]:
    """Return a spec with every text of the section `airflow`, a monitor, forecasts, learning and a source."""
    spec = yaml.safe_load((MODELS / "tiny.yaml").read_text())
    for section in SECTIONS.values():
        spec |= yaml.safe_load(section)
    spec |= {"learn": {"parameters": ["R"], "window": "30d"}, "airflow": deepcopy(AIRFLOW)}
    spec["airflow"]["upgrade"]["notifiers"] = {
        FILE: {"path": str(folder / "told.txt"), "text": "it waits", "more": {"a": ["b"]}},
        SMTP: {"to": ["ops@example.org"], "from_email": "a@example.org", "subject": "s", "html_content": "h"},
    }
    return spec


def list_texts(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every text in a spec."""
    if isinstance(value, str):
        yield place
    elif isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from list_texts(value[key], (*place, key))


def plant(spec: dict[str, Any], place: tuple[Any, ...], text: str = PLANTED) -> dict[str, Any]:
    """Return a spec with a template at the end of a text."""
    spec = deepcopy(spec)
    inner: Any = spec
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] += text
    return spec


def write(folder: Path, spec: dict[str, Any]) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def is_valid(path: Path) -> bool:
    try:
        load_spec(path)
    except SpecError:
        return False
    return True


def render_all(told: Path) -> str:
    """Render the fields of every task, and send every notification, as Airflow does; return all of their texts."""
    bag = load_bag()
    assert bag.import_errors == {} and len(bag.dags) >= 13
    found = []
    for dag in bag.dags.values():
        run = SimpleNamespace(
            data_interval_start=AT, data_interval_end=AT, run_after=AT, run_type="manual", run_id="manual__1"
        )
        for task in dag.tasks:
            ti = SimpleNamespace(xcom_pull=lambda **_: None, log_url="http://log", try_number=1, task_id="t")
            context: Any = {
                **{
                    "dag": dag,
                    "task": task,
                    "ti": ti,
                    "dag_run": run,
                    "run_id": "manual__1",
                    "ds": "2024-05-01",
                },
                **{"params": {**dict(dag.params), "input": None}, "triggering_asset_events": {}},
                **{"data_interval_start": AT, "data_interval_end": AT, "logical_date": AT},
                **{"var": {"value": VariableAccessor(False)}, "conn": ConnectionAccessor()},
                **{"macros": MacrosAccessor()},
            }
            task.render_template_fields(context)
            found += [repr(getattr(task, field, None)) for field in task.template_fields]
            for notifier in getattr(task, "notifiers", ()):
                notifier._update_context(context)
                notifier.render_template_fields(context)
                found += [repr(getattr(notifier, field, None)) for field in notifier.template_fields]
                if hasattr(notifier, "path"):
                    notifier.notify(context)
    return "\n".join(found) + (told.read_text() if told.exists() else "")


def test_the_spec_has_every_text_of_the_section_airflow() -> None:
    texts = {
        f"{name}.{field}" if inner else name
        for name, section in Airflow.model_fields.items()
        for inner in [getattr(section.annotation, "model_fields", None)]
        for field, info in (inner or {name: section}).items()
        if "str" in str(info.annotation)
    }
    assert texts == {
        ".".join(str(part) for part in (name, *([field] if isinstance(value, dict) else [])))
        for name, value in AIRFLOW.items()
        for field in (value if isinstance(value, dict) else [name])
    }


TEMPLATED = {"airflow.ingest.path", "airflow.forecast.future", "airflow.upgrade.notifiers"}


def test_no_text_of_a_spec_reads_a_variable_or_a_connection(folder: Path) -> None:
    spec = build_spec(folder)
    assert is_valid(write(folder, spec)) and read_specs()[1] == []
    valid = [place for place in list_texts(spec) if is_valid(write(folder, plant(spec, place)))]
    assert len(valid) >= 12
    refused, planted = set(), spec
    for place in valid:
        write(folder, plant(spec, place))
        problems = read_specs()[1]
        refused |= {problem.field for problem in problems}
        planted = planted if problems else plant(planted, place)
    write(folder, planted)
    rendered = render_all(folder / "told.txt")
    assert "it waits" in rendered and "landing/a.csv" in rendered and "future.csv" in rendered
    assert not [secret for secret in SECRETS if secret in rendered]
    assert refused >= TEMPLATED


def test_a_name_that_the_owner_lists_is_rendered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = build_spec(folder)
    spec = plant(spec, ("airflow", "ingest", "path"), "{{ var.value.secret }}")
    spec = plant(spec, ("airflow", "upgrade", "notifiers", FILE, "text"), "{{ conn.x.password }}")
    write(folder, spec)
    assert {problem.field for problem in read_specs()[1]} == {
        "airflow.ingest.path",
        "airflow.upgrade.notifiers",
    }
    monkeypatch.setenv("KALMAN_TEMPLATES", "var.value.secret, conn.x.*")
    rendered = render_all(folder / "told.txt")
    assert "landing/a.csvplanted-variable" in rendered and "it waitsplanted-password" in rendered


RENDERED = {
    "{{ data_interval_start | ds }}": "2024-05-01",
    "{{ logical_date.strftime('%Y/%m') }}": "2024/05",
    "{{ macros.ds_add(ds, -1) }}": "2024-04-30",
    "{{- ds -}}": "2024-05-01",
    "{{ task.task_id }} {{ ti.log_url }} {{ run_id }}": "approve http://log manual__1",
    "{{ ds ~ '-' + ds if ds else ts }}": "2024-05-01-2024-05-01",
    "100 % {of} $x } %} }}": "100 % {of} $x } %} }}",
}


def test_a_template_of_named_fields_is_rendered(folder: Path) -> None:
    text = "".join(f"[{one}]" for one in RENDERED)
    write(folder, plant(build_spec(folder), ("airflow", "upgrade", "notifiers", FILE, "text"), text))
    rendered = render_all(folder / "told.txt")
    assert f"it waits{''.join(f'[{one}]' for one in RENDERED.values())}\n" in rendered


@pytest.mark.parametrize(
    "text",
    [
        "{{ var.json.x }}",
        "{{ ti.get_template_context() }}",
        "{{ dag_run.conf }}",
        "{{ ds.__class__ }}",
        "{{ ds['__class__'] }}",
        "{{ 'a' * 9999999999 }}",
        "{{ ds | center(9999999999) }}",
        "{{ ''.join(ds) }}",
        "{{ macros.json.codecs.open('/etc/passwd') }}",
        "{% for x in ds %}{{ x }}{% endfor %}",
        "{% include 'x' %}",
        "{% set ds = var %}{{ ds }}",
        "{{ {ds: var} }}",
        "{{ ds if var else ds }}",
        "{{ {% ",
        "{% endif %}{{ var }}",
        "{{ '{{ conn.x.password }}' }}",
        "{% raw %}{{ conn.x.password }}{% endraw %}",
        "{{ ds }}{",
    ],
)
@pytest.mark.parametrize("field", sorted(TEMPLATED))
def test_any_other_template_is_a_problem_of_its_spec(folder: Path, field: str, text: str) -> None:
    spec = build_spec(folder)
    place = ("airflow", "upgrade", "notifiers", FILE, "more", "a", 0)
    write(folder, plant(spec, place if field.endswith("notifiers") else tuple(field.split(".")), text))
    sound, problems = read_specs()
    assert sound == [] and {problem.field for problem in problems} == {field}
    assert re.search("in KALMAN_TEMPLATES|is not a template|may not use", str(problems[0]))


def test_the_remedy_of_a_refused_template_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = ("airflow", "ingest", "path")
    for text, names in (
        ("{{ ds | replace('-', '') }}", "replace"),
        ("{{ params['x'] }}{{ params.y }}", "params.*"),
        ("{{ params.__class__ }}", ""),
    ):
        write(folder, plant(build_spec(folder), place, text))
        monkeypatch.delenv("KALMAN_TEMPLATES", raising=False)
        [problem] = read_specs()[1]
        assert ("KALMAN_TEMPLATES" in str(problem)) is bool(names), problem
        monkeypatch.setenv("KALMAN_TEMPLATES", names or "params.*")
        assert (read_specs()[1] == []) is bool(names)


@pytest.mark.parametrize("argument", ["files", "template", "attach", "config"])
def test_a_notifier_is_given_no_file_of_airflows_machine(folder: Path, argument: str) -> None:
    (folder / "evil.html").write_text(PLANTED)
    spec = build_spec(folder)
    spec["airflow"]["upgrade"]["notifiers"][SMTP] = {
        "to": "a@example.org",
        argument: str(folder / "evil.html"),
    }
    write(folder, spec)
    [problem] = read_specs()[1]
    assert f"{argument} names a file" in problem.problem


def test_the_owner_lists_the_notifiers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, build_spec(folder))
    monkeypatch.setenv("KALMAN_NOTIFIERS", "airflow.providers.smtp")
    [problem] = read_specs()[1]
    assert (
        FILE in problem.problem and "list tests.support.file_notifier in KALMAN_NOTIFIERS" in problem.problem
    )
    monkeypatch.delenv("KALMAN_NOTIFIERS")
    assert FILE in read_specs()[1][0].problem
