"""Rejected rows checked again with the current spec: texts, typed values and edited payloads. No Spark."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from jobs.core.errors import UserError
from jobs.landing.rejected.held import read_edited
from jobs.landing.rejected.replay import NOT_AN_OBJECT, recheck_payloads
from jobs.specs.model_spec import ModelSpec
from jobs.specs.row_order import QuarantineLimit
from jobs.storage.quarantine import build_refusal, is_over_limit
from tests.jobs.support.pipeline import random_walk_spec

MARCH = int(datetime(2024, 3, 1, tzinfo=UTC).timestamp() * 1e6)


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.model_validate(random_walk_spec(**changes))


def rechecked(payload: Any, key: str = "bigint", **changes: Any) -> tuple[str | None, Any]:
    text = payload if isinstance(payload, str) else json.dumps(payload)
    found = recheck_payloads(spec(**changes), {"id": key}, [text])
    landing = found.landings[0]
    return found.reasons[0], None if landing is None else json.loads(landing)


def test_texts_of_a_file_and_typed_values_land_the_same() -> None:
    wanted = {"id": 7, "at": MARCH, "a": 0.1, "b": -2.0}
    assert rechecked({"id": "7", "at": "2024-03-01", "a": " 0.1", "b": "-2", "more": "x"}) == (None, wanted)
    assert rechecked({"id": 7, "at": "2024-03-01T01:00:00+01:00", "a": 0.1, "b": -2}) == (None, wanted)
    assert rechecked({"id": 7.0, "at": "2024-03-01 00:00:00+00:00", "a": 0.1, "b": -2.0}) == (None, wanted)
    assert rechecked({"id": 7, "at": "2024-03-01"}, key="string") == (None, {"id": "7", "at": MARCH})


@pytest.mark.parametrize(("kind", "wanted"), [("bigint", 12345678901234567), ("string", "12345678901234567")])
def test_a_row_lands_with_the_id_that_identifies_duplicates(kind: str, wanted: Any) -> None:
    by_id = spec(duplicates={"id": "message", "within": "1h"})
    row = {"id": 7, "at": "2024-03-01"}
    texts = [
        json.dumps({**row, "message": one}) for one in (12345678901234567, "12345678901234567", None, "")
    ]
    found = recheck_payloads(by_id, {"id": "bigint", "message": kind}, texts)
    assert found.reasons == [None] * 4
    landed = [json.loads(landing or "") for landing in found.landings]
    assert [one.get("message") for one in landed] == [wanted, wanted, None, None]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({"id": "7", "at": "yesterday", "a": "1"}, "time at: not a time"),
        ({"id": "x", "at": "2024-03-01"}, "key id: not a whole number"),
        ({"at": "2024-03-01"}, "key id: missing"),
        ({"id": 7, "at": "2024-03-01", "a": True}, "measurement a: not a number"),
        ({"id": 7, "at": "2024-03-01", "a": [1]}, "measurement a: not a number"),
        ({"id": 7, "at": "2024-03-01", "a": "inf"}, "measurement a: not finite"),
        (
            {"id": 7, "at": "2024-03-01", "a": 1, "_corrupt": "7,2024-03-01"},
            "row: not as many fields as the header",
        ),
        ({"id": "\\xff", "at": "2024-03-01", "a": 1, "_bytes": "/ywy"}, "row: not UTF-8 text"),
        ("no json", NOT_AN_OBJECT),
        ("[1]", NOT_AN_OBJECT),
        ("", NOT_AN_OBJECT),
    ],
)
def test_a_row_that_is_still_rejected_has_its_reason(payload: Any, reason: str) -> None:
    assert rechecked(payload) == (reason, None)


def test_a_time_may_be_in_the_specs_format_or_iso_8601() -> None:
    form = {"time_format": "%d.%m.%Y"}
    for text in ("01.03.2024", "2024-03-01T00:00:00.000000Z"):
        assert rechecked({"id": 1, "at": text, "a": 1}, **form) == (None, {"id": 1, "at": MARCH, "a": 1.0})
    assert rechecked({"id": 1, "at": "soon"}, **form)[0] == "time at: not a time"


def test_rows_keep_their_places_and_numbers_their_bits() -> None:
    values = [0.1 + 0.2, 1e-310, -1.7976931348623157e308, 123456789.123456789]
    payloads = ["?", *(json.dumps({"id": i, "at": "2024-03-01", "a": v}) for i, v in enumerate(values)), "{}"]
    found = recheck_payloads(spec(), {"id": "bigint"}, payloads)
    assert [one is None for one in found.reasons] == [False, True, True, True, True, False]
    assert [json.loads(one)["a"] for one in found.landings[1:5] if one] == values


@pytest.mark.parametrize(
    ("rejected", "accepted", "fails"),
    [(0, 0, False), (10, 90, False), (11, 89, True), (1, 0, False), (2, 0, True), (2, 18, False)],
)
def test_the_limit_is_a_share_of_the_rows_from_a_minimum_on(
    rejected: int, accepted: int, fails: bool
) -> None:
    limit = QuarantineLimit(fail_above=0.1, fail_from=2)
    reasons = {"late": rejected} if rejected else {}
    assert is_over_limit(limit, reasons, accepted) is fails
    assert not is_over_limit(None, reasons, accepted)
    if fails:
        said = str(build_refusal(limit, reasons, accepted, "micro-batch 3"))
        assert said.startswith(
            f"micro-batch 3: {rejected} of {rejected + accepted} rows would go to quarantine"
        )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"id": "a"}\n', "1: each line is a JSON object"),
        ('{"id": "a", "payload": {}}\n\n{"id": "a", "payload": {}}\n', "3: row a appears twice"),
        ("[]\n", "1: each line"),
        ('{"id": 7, "payload": {}}\n', "1: each line"),
        ('{"id": ["a"], "payload": {}}\n', "1: each line"),
    ],
)
def test_a_malformed_file_of_edited_rows_is_refused_with_its_line(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        read_edited(str(path))
    with pytest.raises(UserError, match="cannot be read"):
        read_edited(str(tmp_path / "absent.jsonl"))


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x1e"])
def test_a_character_that_separates_lines_elsewhere_does_not_end_a_line_of_json(
    tmp_path: Path, separator: str
) -> None:
    """Texts come from files of users, and JSON leaves such characters in texts as they are."""
    payload = {"id": f"a{separator}b"}
    path = tmp_path / "rows.jsonl"
    lines = [{"id": one, "payload": payload} for one in ("1", "2")]
    path.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines), encoding="utf-8")
    assert {name: json.loads(text) for name, text in read_edited(str(path)).items()} == {
        "1": payload,
        "2": payload,
    }


def test_with_a_decimal_comma_only_numbers_change() -> None:
    files = {"decimal": ","}
    assert rechecked({"id": 7, "at": "2024-03-01", "a": 0.5, "b": "1,5"}, files=files) == (
        None,
        {"id": 7, "at": MARCH, "a": 0.5, "b": 1.5},
    )
