"""The section `source`: each kind has its own fields, and what is missing or too much is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.core.errors import UserError
from jobs.specs.loading import load_spec
from jobs.specs.model_spec import ModelSpec
from tests.jobs.support.pipeline import random_walk_spec


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ({"kind": "kafka"}, "source.topic: is missing"),
        ({"kind": "kafka", "topic": "a", "pattern": "b"}, "source.topic: is not alone"),
        ({"kind": "kafka", "topics": ["a", "a"]}, "source.topics: names a topic twice"),
        ({"kind": "kafka", "topics": ["a"], "partitions": [0]}, "source.partitions: is for a single topic"),
        ({"kind": "delta", "topic": "a", "table": "b"}, "source.topic: is for kind: kafka"),
        ({"kind": "delta"}, "source.table: is missing"),
        ({"kind": "rate", "rate": {"every": "often"}}, "source.rate.every"),
    ],
)
def test_a_source_that_is_none_is_refused(tmp_path: Path, source: dict[str, Any], told: str) -> None:
    (tmp_path / "walk.yaml").write_text(yaml.safe_dump(random_walk_spec(source=source)))
    with pytest.raises(UserError, match=told):
        load_spec("walk", tmp_path)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ({"kind": "kafka", "topic": "a", "partitions": [1, 0]}, "kafka"),
        ({"kind": "kafka", "topics": ["a", "b"]}, "delta"),
        ({"kind": "kafka", "pattern": "a.*"}, "delta"),
        ({"kind": "delta", "table": "/a/b"}, "delta"),
        ({"kind": "rate"}, "delta"),
    ],
)
def test_one_topic_is_streamed_and_all_else_lands_and_a_manifest_keeps_it(
    source: dict[str, Any], kind: str
) -> None:
    spec = ModelSpec.model_validate(random_walk_spec(source=source))
    assert spec.source_kind == kind and spec.speaks_to_kafka == (source["kind"] == "kafka")
    again = ModelSpec.model_validate(spec.model_dump(mode="json", by_alias=True))
    assert again.source == spec.source and again.fingerprint() == spec.fingerprint()
