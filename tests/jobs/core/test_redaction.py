"""Secrets that a file has in its header or rows are not in what commands say of it, and long names are cut."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.core.errors import (
    HIDDEN,
    UserError,
    extract_first_line,
    redact_secrets,
    show,
    show_name,
    show_names,
)
from jobs.core.report import Report
from jobs.landing.csv_parquet import read

KEY = "Zm9vYmFyYmF6cXV4Zm9vYmFyYmF6cXV4Zm9vYmFyYm8"  # as long as a key of Fernet, which ends with =
# What a careful person would not want to see in a log, and the part of it that must go.
SECRET = {
    "a variable of the environment": ("AIRFLOW__CORE__FERNET_KEY=short-one", "short-one"),
    "a key of Fernet without a name": (f"x,{KEY}=,y", KEY),
    "a password in JSON": ('{"password": "hunter22"}', "hunter22"),
    "a password of YAML": ("db_password: Hunter-2", "Hunter-2"),
    "the client secret of a form": ("client_secret=abcdef&x=1", "abcdef"),
    "an address with a password": ("postgresql+psycopg2://airflow:s3cret@db/airflow", "s3cret"),
    "a header of HTTP": ("Authorization: Bearer abcdefgh12345", "abcdefgh12345"),
    "a token of the web": ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0abc.c2lnbmF0dXJl", "c2lnbmF0dXJl"),
    "a key of AWS": ("AKIAIOSFODNN7EXAMPLE", "IOSFODNN7"),
    "a key of Google": ("AIza" + "a1" * 17 + "b", "a1a1"),
    "a token of GitHub": ("ghp_" + "a1" * 18, "a1a1"),
    "a token of Slack": ("xoxb-123456789012-abcdef", "123456789012"),
    "a private key": ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "MIIE"),
    "a password with a slash's neighbour": ("amqp://me:p@ss@host:5672/x", "p@ss"),
    "a short name of a password": ("SMTP_PASS=hunter22", "hunter22"),
    "a password of a connection string": ("Server=db;Uid=me;Pwd=hunter22;", "hunter22"),
    "a password named as MySQL names it": ("MYSQL_PWD=hunter22", "hunter22"),
    "a passphrase": ("passphrase=hunter22", "hunter22"),
    "a key of a storage account": ("storage_key=hunter22", "hunter22"),
    "a key of an API": ("X-APIKEY: Hunter22", "Hunter22"),
    "the beginning of a private key": ("-----BEGIN PRIVATE KEY-----\nMIIE", "MIIE"),
}
PLAIN = [
    "at, sensor, value",
    "there is no column 'token'; columns are token_count, password_age",
    "unknown token: expected a number",
    "SHA-256 0123456789abcdef",
    "set AWS_SECRET_ACCESS_KEY in the environment",
    "s3a://bucket/folder, http://localhost:8081/path, kafka1:9092",
    "station=17;line=4",
    "2024-01-01T00:00:00Z",
    "the secret: a file of its owner's",
    "PWD=/work/models, OLDPWD=/work/data",
    "bypass=nothing, compass=north",
    "source.message_key=river, the key=12345",
]


@pytest.mark.parametrize("what", SECRET)
def test_what_looks_like_a_secret_is_hidden(what: str) -> None:
    text, part = SECRET[what]
    for shown in (redact_secrets(f"before {text} after"), show_name(text), show_names(["at", text])):
        assert part not in shown and HIDDEN in shown


@pytest.mark.parametrize("text", PLAIN)
def test_plain_text_stays(text: str) -> None:
    assert redact_secrets(text) == text


@given(
    st.sampled_from(
        ["API_KEY", "smtp_password", "X-Auth-Token", "aws_secret_access_key", "SQL_ALCHEMY_CONN"]
    ),
    st.sampled_from(["=", '="', "='"]),
    st.text("abcdefghijklmnopqrstuvwxyzABCDEF0123456789+/._-", min_size=6, max_size=50),
)
def test_any_value_of_a_secret_name_is_hidden(name: str, between: str, value: str) -> None:
    assert redact_secrets(f"{name}{between}{value} rest") == f"{name}{between}{HIDDEN} rest"


@given(st.lists(st.text(max_size=300), min_size=1, max_size=100))
def test_names_of_columns_are_few_short_and_in_one_line(names: list[str]) -> None:
    shown = show_names(names)
    assert len(shown) <= 12 * 62 + 30 and shown.isprintable()
    assert len(names) <= 12 or shown.endswith(f", ... ({len(names)} in all)")


def test_an_environment_as_a_header_is_not_printed(tmp_path: Path) -> None:
    header = "\0".join(
        [f"AIRFLOW__CORE__FERNET_KEY={KEY}=", "HOME=/home/me", *(f"V{i}={'x' * 100}" for i in range(40))]
    )
    (tmp_path / "p.csv").write_text(",".join([*header.split("\0")]) + "\n1\n")
    with pytest.raises(UserError) as refused:
        read(tmp_path / "p.csv", ["at", "value"])
    assert KEY not in refused.value.message and "x" * 61 not in refused.value.message
    assert len(refused.value.message) < 1200
    out = io.StringIO()
    show(refused.value, False, out)
    assert KEY not in out.getvalue()


def test_a_report_hides_secrets_from_a_person_and_gives_a_program_its_data() -> None:
    out = io.StringIO()
    report = Report(["rejected password=hunter22"], {"value": "password=hunter22"})
    report.show(False, out)
    assert out.getvalue() == f"rejected password={HIDDEN}\n"
    out = io.StringIO()
    report.show(True, out)
    assert json.loads(out.getvalue()) == {"value": "password=hunter22"}


@pytest.mark.parametrize("part", ["a", "x.", "token", "token:", "a-token="])
def test_the_time_to_hide_secrets_does_not_grow_with_the_square_of_a_text(part: str) -> None:
    began = time.process_time()
    redact_secrets(part * (20_000 // len(part)))
    assert time.process_time() - began < 2


NAMES = ["API_KEY", "OPENAI_APIKEY", "AWS_KEY", "STORAGE_ACCOUNT_KEY", "SIGNING_KEY", "SMTP_PASS", "MYSQL_PWD",
         "GIT_TOKEN", "DB_CREDENTIAL", "KEY_PASSPHRASE", "AWS_SECRET_ACCESS_KEY"]  # fmt: skip
OPEN_NAMES = ["PWD", "OLDPWD", "KEYBOARD", "MONKEY", "BYPASS", "COMPASS_URL", "KALMAN_MODELS"]


@pytest.mark.parametrize("value", ["minioadmin", "Zq8#x/v+1", "0123456789abcdef0123"])
@pytest.mark.parametrize("name", NAMES)
def test_the_value_of_a_variable_that_is_named_like_a_secret_is_hidden(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    for text in (
        value, f"'{value}'", f'"{value}"', f"say {value}.", f"({value}, x)", f"user={value};", f"id: {value}\n",
        f"https://me:{value}@host/x", f"https://{value}@host", f"[{value}]", f"?id={value}&x=1",
    ):  # fmt: skip
        shown = redact_secrets(text)
        assert value not in shown and HIDDEN in shown, text


@pytest.mark.parametrize("name", OPEN_NAMES)
def test_other_values_stay(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "estimates")
    assert redact_secrets("no estimates there") == "no estimates there"


@pytest.mark.parametrize("value", ["kalman", "minioadmin", "pipeline", "kalman-pipeline-access"])
def test_a_secret_that_is_a_word_changes_no_path_and_no_other_word(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", value)
    for text in (
        f"/tmp/{value}-x1.log", f"/tmp/x-{value}.log", f'File "/home/{value}/jobs/core.py", line 3', f"{value}s",
        f"s3a://bucket/{value}/x", f"my_{value}", f"{value}.yaml", f"/home/{value}", f"{value}/x.csv", f"un{value}",
        f"C:\\{value}\\x",
    ):  # fmt: skip
        assert redact_secrets(text) == text


def test_the_file_of_a_traceback_is_named_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "token=abcdefgh1234"  # a folder that looks like a secret
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "kalman-pipeline")
    out = io.StringIO()
    show(ValueError("the key kalman-pipeline is wrong"), False, out)
    named = out.getvalue().partition("traceback in ")[2].partition(";")[0]
    assert Path(named).parent == folder and "kalman-pipeline is wrong" not in out.getvalue()
    assert "the key *** is wrong" in Path(named).read_text()


@pytest.mark.parametrize(
    "name", ["AWS_ENDPOINT_URL", "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "HTTPS_PROXY", "X"]
)
@pytest.mark.parametrize("password", ["hunter22", "p%40ss%2Fword", "x@y", "Zq8#v+1", "abc"])
def test_a_password_in_the_address_of_any_variable_is_hidden(
    monkeypatch: pytest.MonkeyPatch, name: str, password: str
) -> None:
    monkeypatch.setenv(name, f"https://me:{password}@host:9000/path?x=1")
    assert password not in redact_secrets(f"cannot reach https://me:{password}@host:9000/path?x=1 now")
    if len(password) >= 6:  # a shorter one is hidden in its address alone
        assert redact_secrets(f"401 for '{password}'") == f"401 for '{HIDDEN}'"
        assert redact_secrets(f"401 for {unquote(password)}") == f"401 for {HIDDEN}"


@pytest.mark.parametrize("before", range(270, 310, 3))
def test_a_message_is_cut_after_its_secrets_are_hidden(monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    monkeypatch.setenv("DB_PASSWORD", "Zq8hunter22xyzAB")
    said = extract_first_line(ValueError("x" * (before - 1) + " Zq8hunter22xyzAB and more"))
    assert "Zq8" not in said and len(said) <= 300


def test_a_path_is_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "key.json").touch()
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/absent")
    text = f"{tmp_path}/key.json and /var/run/absent are not readable"
    assert redact_secrets(text) == text
