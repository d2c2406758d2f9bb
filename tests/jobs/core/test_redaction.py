"""Secrets that a file has in its header or rows are not in what commands say of it, and long names are cut."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.core.errors import UserError, extract_first_line, show
from jobs.core.redaction import HIDDEN, redact_secrets, show_name, show_names
from jobs.core.report import Report
from jobs.landing.csv_parquet import read
from jobs.landing.values.rejected import _shorten_value

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
    "a key after a dash": ("id-AKIAIOSFODNN7EXAMPLE", "IOSFODNN7"),
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
    "a password of a database": ("DBPASS=hunter22", "hunter22"),
    "a token by its short name": ("GITHUB_PAT=hunter22", "hunter22"),
    "a signature of Azure": ("AZURE_STORAGE_SAS=sv-2022", "2022"),
    "a connection of Airflow": ("AIRFLOW_CONN_DB=hunter22", "hunter22"),
    "a connection string": ("AZURE_STORAGE_CONNECTION_STRING=hunter22", "hunter22"),
    "a password with a slash": ("postgresql+psycopg2://airflow:ab/cd12XY@postgres/airflow", "cd12XY"),
    "a token without a user": ("https://hunter22@host/x", "hunter22"),
    "a token as a user": ("https://hunter22:x-oauth-basic@host/x", "hunter22"),
    "a cookie": ("Set-Cookie: session=hunter22; b=hunter22", "hunter22"),
    "an option of a command": ("mysql --password hunter22 -h db", "hunter22"),
    "an option in a list": ("['mysql', '--password', 'hunter22']", "hunter22"),
    "JSON within a text": (r"'{\"password\": \"hunter22\"}'", "hunter22"),
    "a password after a line break of a repr": (r"'a\npwd=hunter22'", "hunter22"),
    "a key after a line break of a repr": (r"'a\nAKIAIOSFODNN7EXAMPLE'", "IOSFODNN7"),
    "a header after a line break of a repr": (r"'a\nBearer hunter22'", "hunter22"),
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
    "http://localhost:8080?user=me@x.org",
    "http://localhost:8080/users/me@x.org and http://[::1]:8080/me@x.org",
    "https://h:80,c@d",
    "tokenizer=whitespace, secretary=Miller, bandpass=1000",
    "abfss://container@account.dfs.core.windows.net/x, ssh://git@host/x",
    "postgresql://airflow@db/airflow",
]


@pytest.mark.parametrize("what", SECRET)
def test_what_looks_like_a_secret_is_hidden(what: str) -> None:
    text, part = SECRET[what]
    for shown in (redact_secrets(f"before {text} after"), show_name(text), show_names(["at", text])):
        assert part not in shown and HIDDEN in shown


def test_only_the_password_of_an_address_is_hidden() -> None:
    text = '{"a":"x://u:hunter2pw@h","mail":"me@x.org"}'
    assert redact_secrets(text) == text.replace("hunter2pw", HIDDEN)
    text = "amqp://u:hunter2@h/x?mail=me@x.org,amqp://u:hunter3@h"
    assert redact_secrets(text) == text.replace("hunter2", HIDDEN).replace("hunter3", HIDDEN)


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


@pytest.mark.parametrize(
    "part",
    ["a", "x.", "token", "token:", "a-token=", "x://a:b", "x://a", "cookie:", "--token ", "a=",
     "token=hunter22 ", "\\n", "Basic ", "eyJ-",
     "-----BEGIN PRIVATE KEY-----x", "at the station: value=12, see https://host/x.\n"],
)  # fmt: skip
def test_the_time_to_hide_secrets_does_not_grow_with_the_square_of_a_text(part: str) -> None:
    began = time.process_time()
    redact_secrets(part * (300_000 // len(part)))
    assert time.process_time() - began < 2


@pytest.mark.parametrize("part", ["token", "a=hunter22 ", "-----BEGIN PRIVATE KEY-----x"])
def test_of_a_huge_value_only_the_beginning_is_read(part: str) -> None:
    value = part * (5_000_000 // len(part))
    began = time.process_time()
    for shown in (show_name(value), _shorten_value(value).strip("'")):
        assert len(shown) <= 60 and shown.endswith("...")
    assert time.process_time() - began < 0.1


@pytest.mark.parametrize("start", [4_080, 4_090, 4_100, 5_000])
def test_a_secret_at_the_end_of_what_is_read_is_not_shown(start: int) -> None:
    body = "-----BEGIN PRIVATE KEY-----" + "M" * (start - 60) + "-----END PRIVATE KEY-----"
    shown = show_name(f"{body} ghp_{'a1' * 18}" + "x" * 5_000)
    assert "a1" not in shown and shown in (HIDDEN, "...")


NAMES = ["API_KEY", "OPENAI_APIKEY", "AWS_KEY", "STORAGE_ACCOUNT_KEY", "SIGNING_KEY", "SMTP_PASS", "MYSQL_PWD",
         "GIT_TOKEN", "DB_CREDENTIAL", "KEY_PASSPHRASE", "AWS_SECRET_ACCESS_KEY", "DBPASS", "KEY", "JWT", "GITHUB_PAT",
         "AZURE_STORAGE_SAS", "SENTRY_DSN", "AZURE_STORAGE_CONNECTION_STRING", "AIRFLOW_CONN_DB"]  # fmt: skip
OPEN_NAMES = [
    "PWD",
    "OLDPWD",
    "KEYBOARD",
    "MONKEY",
    "BYPASS",
    "COMPASS_URL",
    "KALMAN_MODELS",
    "TOKENIZER",
    "PATTERN",
]


@pytest.mark.parametrize("value", ["minioadmin", "Zq8#x/v+1", "0123456789abcdef0123"])
@pytest.mark.parametrize("name", NAMES)
def test_the_value_of_a_variable_that_is_named_like_a_secret_is_hidden(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    for text in (
        value, f"'{value}'", f'"{value}"', f"say {value}.", f"({value}, x)", f"user={value};", f"id: {value}\n",
        f"https://me:{value}@host/x", f"https://{value}@host", f"[{value}]", f"?id={value}&x=1",
        repr(f"a\n{value}\nb"), repr(f"a\r{value}\tb"),
    ):  # fmt: skip
        shown = redact_secrets(text)
        assert value not in shown and HIDDEN in shown, text


@pytest.mark.parametrize("value", ["Zq'8#x/v", 'Zq"8#x/v', "Zq'\"8\\x v", "Zq\n8#\u00e4xyz", "Zq8\udcffxyz"])
def test_a_secret_is_hidden_as_other_notations_write_it(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DB_PASSWORD", value)
    monkeypatch.setenv("DB_URL", f"x://me:{value}@host/x")
    both = f"'\"{value}"
    quoted = [quote(value, safe, errors="surrogateescape") for safe in ("", "/")]
    for text in (
        repr(value),
        repr(both),
        json.dumps(value),
        *quoted,
        f"x://u:{value}@h",
    ):
        assert "8" not in redact_secrets(text) and HIDDEN in redact_secrets(text), text


def test_the_parts_of_a_secret_variable_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_A", json.dumps({"conn_type": "http", "password": "hunter22"}))
    monkeypatch.setenv("AIRFLOW_CONN_B", "http://me:ab/cd12XY@h/?x=1")
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING", "AccountName=river;AccountKey=Zq8xv1+/==;Suffix=core"
    )
    shown = f"401 for {HIDDEN}, {HIDDEN}, {HIDDEN} of river"
    assert redact_secrets("401 for hunter22, ab/cd12XY, Zq8xv1+/== of river") == shown


def test_a_port_in_the_address_of_a_variable_is_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("X_URL", "http://localhost:8080?user=me@x.org")
    text = "cannot reach http://localhost:8080?user=me@x.org"
    assert redact_secrets(text) == text


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
@pytest.mark.parametrize("password", ["hunter22", "p%40ss%2Fword", "x@y", "Zq8#v+1", "abc", "ab/cd12XY"])
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
