"""The answers of a comparison of two versions, and their words. Airflow imports it: no NumPy."""

from __future__ import annotations

from enum import StrEnum


class Answer(StrEnum):
    """The answer of a comparison."""

    BETTER = "better"
    NOT_WORSE = "not worse"
    WORSE = "worse"
    UNKNOWN = "not enough to tell"


ANSWERS: dict[str, str] = {
    Answer.BETTER: "the new version predicts better",
    Answer.NOT_WORSE: "the new version predicts no worse than is allowed",
    Answer.WORSE: "the new version predicts worse",
    Answer.UNKNOWN: "not enough to tell whether the new version predicts better or worse",
}
