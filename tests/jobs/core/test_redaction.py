"""Secrets that a file has in its header or rows are not in what commands say of it, and long names are cut."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.core.errors import HIDDEN, UserError, redact_secrets, show, show_name, show_names
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
