"""No key, name or unit, whatever its characters, ends a picture or a page, or is more than a text in it."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib").use("Agg")

from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.text import Text  # noqa: E402

from jobs import plot  # noqa: E402
from jobs.choosing import picture  # noqa: E402
from jobs.choosing.columns import Wishes  # noqa: E402
from jobs.choosing.model_finding import ModelFinding, find  # noqa: E402
from jobs.core import html_page  # noqa: E402
from jobs.core.settings import Settings  # noqa: E402
from jobs.insight import pictures  # noqa: E402
from jobs.insight.comparison_page import build_page  # noqa: E402
from jobs.insight.health import Health, Reason, gather  # noqa: E402
from jobs.insight.health_page import build_health_page  # noqa: E402
from jobs.insight.index import IndexEntry, build_index  # noqa: E402
from jobs.offline import plots  # noqa: E402
from jobs.offline.estimate_pictures import draw  # noqa: E402
from jobs.offline.estimate_series import DrawnSeries, KeySeries, QuantityEstimates  # noqa: E402
from jobs.specs.model_spec import ModelSpec  # noqa: E402
from tests.jobs.insight.test_comparison import content  # noqa: E402
from tests.jobs.insight.test_health import SPEC, warehouse  # noqa: E402
from tests.support.hostile import HOSTILE, list_elements  # noqa: E402

Names = Callable[[], str]
Build = Callable[[Iterator[str]], list[str]]
LONGEST_LINE = 130
UNFIT = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Small pictures, which are drawn quickly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plots.STYLE, "figure.dpi", 30)
        yield


@pytest.fixture(scope="module")
def health(tmp_path_factory: pytest.TempPathFactory) -> Health:
    """The health of a model with two generations, flags, learned parameters and quarantined rows."""
    root = tmp_path_factory.mktemp("health")
    warehouse(root)
    return gather(str(root), "rooms", None)


@pytest.fixture(scope="module")
def finding(tmp_path_factory: pytest.TempPathFactory) -> ModelFinding:
    """A model that `init` has found for three short series."""
    path = tmp_path_factory.mktemp("init") / "walk.csv"
    level = np.random.default_rng(1).normal(size=(60, 3)).cumsum(axis=0)
    rows = [
        f"2024-01-{1 + n // 24:02d}T{n % 24:02d}:00Z,k{k},{level[n, k]}" for n in range(60) for k in range(3)
    ]
    path.write_text("\n".join(["at,key,value", *rows]) + "\n")
    return find(str(path), Wishes(keys=3, rows=60, structure="level"))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every text that is drawn; a missing glyph is an error."""
    texts: list[str] = []
    real = Text.draw

    def note(self: Text, *args: Any, **options: Any) -> Any:
        texts.append(self.get_text())
        return real(self, *args, **options)

    monkeypatch.setattr(Text, "draw", note)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Glyph|findfont|.*mathtext")
        yield texts


def build_health(health: Health, name: Names) -> str:
    """Return the health page of a model, in which every name that data may choose is one of `name`."""
    keys = health.keys._replace(key=[name() for _ in health.keys.key])
    examples = [one._replace(key=name(), quantity=name()) for one in islice(cycle(health.examples), 4)]
    rows = [{**row, "key": name()} for row in health.learned]
    parameters, labels = (f"{name()}a", f"{name()}b"), (name(), name())
    shared = {"scope": "group", "outcome": "converged", "standard_errors": dict.fromkeys(parameters[1:], 0.1)}
    rows = [
        {**row, "parameters": {parameters[0]: 1.0 + n, f"{parameters[0]}2": 10.0**n}}
        for n, row in enumerate(rows)
    ]
    rows += [{**shared, "key_group": label, "parameters": {parameters[1]: 1.0}} for label in labels]
    flags = next(iter(health.over_time.flags.values()))
    specs = {
        generation: spec.model_copy(update={"states": [name() for _ in spec.states]})
        for generation, spec in health.specs.items()
    }
    return build_health_page(
        health._replace(
            description=name().replace("`", ""),
            keys=keys,
            examples=examples,
            fates=[Reason(name(), status, 2) for status in ("held", "replayed")],
            learned=rows,
            over_time=health.over_time._replace(flags={f"{name()}a": flags, f"{name()}b": flags}),
            specs=specs,
        )
    )


def build_comparison(name: Names) -> str:
    whole = content()
    return build_page(
        whole._replace(
            description=name(),
            keys=[name() for _ in whole.keys],
            examples=[one._replace(key=name(), why=name(), quantity=name()) for one in whole.examples],
            old={**whole.old, "snapshot": name()},
        )
    )


def build_plot(folder: Path, name: Names) -> str:
    rng = np.random.default_rng(3)
    time = np.datetime64("2024-01-01T00:00:00", "us") + np.arange(20) * np.timedelta64(1, "h")
    lines = [QuantityEstimates(rng.normal(size=(3, 20)), np.ones((3, 20))) for _ in range(2)]
    series = [
        KeySeries(
            name(),
            time,
            lines,
            rng.chisquare(1, 20),
            np.arange(20) == 3,
            rng.normal(size=(1, 20)),
            time.astype(int),
        )
        for _ in range(2)
    ]
    spec = ModelSpec.model_validate(SPEC).model_copy(update={"measurement": [name()]})
    draw(
        folder / "plot.html",
        DrawnSeries(spec, [*spec.measurement, name(), name()], 2, series, 2),
        name(),
        [name()],
    )
    return (folder / "plot.html").read_text(encoding="utf-8")


def draw_finding(folder: Path, finding: ModelFinding, name: Names) -> None:
    names = [name() for _ in finding.names]
    roles = finding.roles._replace(measurements=[one._replace(name=name()) for one in finding.measurements])
    picture.draw(folder / "init.png", name(), replace(finding, names=names, roles=roles))


def build_reports(name: Names) -> str:
    return build_index([IndexEntry(name(), name(), 1, None, 0, [f"{name()}.html"]) for _ in range(3)])


@pytest.fixture(scope="module")
def build(health: Health, finding: ModelFinding, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The function that builds every page and picture with names from an iterator, and returns the pages."""
    folder = tmp_path_factory.mktemp("pages")

    def build_all(made: Iterator[str]) -> list[str]:
        def name() -> str:
            return next(made)

        draw_finding(folder, finding, name)
        return [
            build_health(health, name), build_comparison(name), build_plot(folder, name), build_reports(name)
        ]  # fmt: skip

    return build_all


@pytest.fixture(scope="module")
def elements(build: Build) -> list[list[object]]:
    """The elements of every page with harmless names; the pictures are not drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FigureCanvasAgg, "print_png", lambda *_: None)
        patch.setattr(Figure, "savefig", lambda *_, **__: None)
        return [list_elements(page) for page in build(f"a{number}" for number in count())]


def check(build: Build, elements: list[list[object]], drawn: list[str], names: list[str]) -> None:
    """Check that names are texts in every page and picture, and nothing else."""
    drawn.clear()
    pages = build(cycle(names))
    lines = [line for text in drawn for line in text.split("\n")]
    assert all(len(line) <= LONGEST_LINE and line.isprintable() for line in lines), max(lines, key=len)
    assert not any("\\mathdefault" in line for line in lines)
    for page, expected in zip(pages, elements, strict=True):
        assert list_elements(page) == expected and not UNFIT.search(page)


def test_every_page_and_picture_is_drawn_with_hostile_names(
    build: Build, elements: list[list[object]], drawn: list[str]
) -> None:
    check(build, elements, drawn, HOSTILE)
    whole = "\n".join(drawn)
    assert any(name in whole for name in HOSTILE[:2])
    assert "$\\frac{$" in whole and "%s %(x)s {x} ${x}" in whole and "caf\u00e9" in whole


def test_a_legend_has_a_flag_that_begins_with_an_underscore(health: Health, drawn: list[str]) -> None:
    flags = {"_hidden": health.over_time.rows}
    pictures.draw_rows(health._replace(over_time=health.over_time._replace(flags=flags)))
    assert " _hidden" in drawn


@pytest.mark.slow
@given(names=st.lists(st.text(max_size=60) | st.sampled_from(HOSTILE), min_size=1, max_size=20))
@settings(
    max_examples=5,
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_page_and_picture_is_drawn_with_any_names(
    build: Build, elements: list[list[object]], drawn: list[str], names: list[str]
) -> None:
    check(build, elements, drawn, names)


@given(name=st.text(max_size=80) | st.sampled_from(HOSTILE), most=st.integers(10, 130))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_name_is_one_line_of_glyphs_and_a_text_of_a_page(name: str, most: int) -> None:
    shown = plots.shorten_name(name, most)
    assert len(shown) <= most and shown.isprintable() and not shown.startswith("_")
    assert {ord(one) for one in shown} <= plots._list_glyphs() | {ord("\u2026")}
    page = html_page.format_page(
        name, html_page.format_table([name], [[name]]), html_page.format_half_picture("", name)
    )
    harmless = html_page.format_page(
        "", html_page.format_table([""], [[""]]), html_page.format_half_picture("", "")
    )
    assert list_elements(page) == list_elements(harmless) and not UNFIT.search(page)


def test_a_long_name_is_cut_and_one_without_glyphs_is_escaped() -> None:
    assert plots.shorten_name("x" * 10_000) == "x" * 27 + "\u2026"
    assert plots.shorten_name("\u6771") == "\\u6771" and plots.shorten_name("a\nb") == "a\\nb"


def test_numbers_of_logarithmic_axes_are_no_mathematics(drawn: list[str]) -> None:
    import matplotlib.pyplot as plt

    plots.render_for_page(lambda ax: plots.draw_nis(ax, np.random.default_rng(1).chisquare(1, 50), 1))()
    assert {"0.001", "0.01", "0.1", "1"} <= set(drawn)

    def draw_title(ax: Any) -> None:
        ax.set_title("$\\frac{$")

    with plt.rc_context({"text.usetex": True, "text.parse_math": True}):
        plots.render_for_page(draw_title)()
    assert "$\\frac{$" in drawn


def test_plot_draws_a_file_with_hostile_keys_and_a_hostile_name(tmp_path: Path) -> None:
    import yaml

    from jobs import filter as offline

    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "rooms.yaml").write_text(yaml.safe_dump({**SPEC, "measurement": ["$\\frac{$"]}))
    told = Settings.load(str(tmp_path / "warehouse"), str(tmp_path / "models"), None)
    keys = ["$\\frac{$", "<b>", "_x", "\U0001f600"]
    rows = [f'2024-01-01T0{n}:00Z,"{key}",{n}' for n in range(4) for key in keys]
    (tmp_path / "in.csv").write_text("\n".join(["at,room,$\\frac{$", *rows]) + "\n", encoding="utf-8")
    out = tmp_path / "$\\frac{\udcff<b>.csv"
    offline.run(told, "rooms", str(tmp_path / "in.csv"), str(tmp_path / "out.csv"))
    (tmp_path / "out.csv").rename(out)
    page = tmp_path / "page.html"
    done = plot.run(told, "rooms", str(page), str(out), keys=4)
    assert sorted(done.data["keys"]) == sorted(keys)
    text = page.read_text(encoding="utf-8")
    assert "<b>" not in text and "&lt;b&gt;" in text and "$\\frac{$" in text and io.StringIO(text)
