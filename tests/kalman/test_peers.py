"""filterpy and simdkalman on the benchmark's works: where they are right, the estimates are theirs."""

from __future__ import annotations

import pytest

pytest.importorskip("filterpy", reason="comes with the extra `bench`")
pytest.importorskip("simdkalman", reason="comes with the extra `bench`")

from benchmarks.suites.filters import check, works  # noqa: E402

WORKS = {work.name: work for work in works()}


@pytest.mark.parametrize("name", WORKS)
def test_peers_give_the_same_estimates(name):
    assert max(check(WORKS[name]).values()) < 1e-12
