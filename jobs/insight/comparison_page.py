"""The report on two generations: a self-contained HTML page and a JSON file with its data, in the warehouse."""

from __future__ import annotations

import json

from jobs.core.html_page import (
    NO_PICTURES,
    Card,
    can_draw,
    format_cards,
    format_page,
    format_paragraph,
    format_pictures,
    format_section,
    format_table,
    place_side_by_side,
)
from jobs.core.report import convert_to_json, format_count, format_number
from jobs.insight.comparison import ComparisonContent, gather
from jobs.insight.index import report_files
from jobs.lineage.catalog import Catalog
from jobs.lineage.generations import Generation
from jobs.specs.migration import Answer
from jobs.specs.model_spec import ModelSpec
from jobs.storage.files import REPORTS
from jobs.storage.warehouse import Tables
from jobs.upgrades.decision import VersionComparison, answer_text, format_gain

if can_draw():
    from jobs.insight import pictures as drawing
else:
    drawing = None


def compare(
    warehouse: Tables, spec: ModelSpec, old: Generation, new: Generation
) -> tuple[VersionComparison, str]:
    """Compare two generations, write the report, and return the comparison and the path of the page."""
    spec = Catalog(warehouse).read_specs(spec.name, spec).get(new.generation, spec)
    # The old generation's first micro-batch whose rows the new generation has too.
    first = new.parent_batch + 1 if new.parent == old.generation and new.parent_batch is not None else 0
    content = gather(warehouse, spec, old, new, first)
    return content.comparison, write_report(warehouse, content)


def write_report(warehouse: Tables, content: ComparisonContent) -> str:
    """Write the JSON file and the page, each atomically, and return the path of the page."""
    files, (data_name, page_name) = report_files(warehouse, content.model, content.new["generation"])
    data = json.dumps(convert_to_json(content.data()), indent=2, allow_nan=False)
    files.write(data_name, data.encode())
    files.write(page_name, build_page(content).encode())
    return f"{warehouse.path(REPORTS)}/{content.model}/{page_name}"


def build_page(content: ComparisonContent) -> str:
    """Return the report as HTML, without pictures if matplotlib is not installed."""
    title = f"{content.model}: version {content.new['version']} against {content.old['version']}"
    good = content.comparison.good
    verdict = (
        "By the thresholds of its spec the new version may become live."
        if good
        else "The new version is not good enough: " + "; ".join(content.comparison.reasons) + "."
    )
    return format_page(
        title,
        format_paragraph(_describe_subject(content)),
        format_paragraph(verdict, f"verdict {_choose_colour(content)}"),
        format_paragraph(_describe_answer(content)),
        _build_cards(content),
        _show_thresholds(content),
        *_show_pictures(content),
        _show_keys(content),
        _show_generations(content),
    )


def _choose_colour(content: ComparisonContent) -> str:
    """Return the verdict's colour; it is neutral if the only objection to the new version is that there are too few
    rows.
    """
    if content.comparison.good:
        return "good"
    only_unknown = content.comparison.answer == Answer.UNKNOWN and len(content.comparison.reasons) == 1
    return "neutral" if only_unknown else "bad"


def _describe_subject(content: ComparisonContent) -> str:
    numbers = content.comparison.numbers
    return (
        f"{content.description} Both versions have estimated the same {format_count(numbers['rows'], 'row')} of "
        f"{format_count(numbers['keys'], 'key')}; compared is how well each predicted them."
    ).strip()


def _describe_answer(content: ComparisonContent) -> str:
    """Return the sentences with the answer and with the interval of the gain."""
    comparison = content.comparison
    answer, gain = answer_text(comparison), format_gain(comparison)
    return (
        f"{answer[0].upper()}{answer[1:]}. {gain[0].upper()}{gain[1:]}. The interval allows for autocorrelation and "
        "for keys that change together."
    )


def _build_cards(content: ComparisonContent) -> str:
    numbers = content.comparison.numbers
    gain = numbers["gain"]
    interval = (
        "no interval: too few rows"
        if gain["low"] is None
        else f"from {gain['low']:+.4f} to {gain['high']:+.4f} (95 %); above 0 the new version predicts better"
    )
    keys = numbers["keys"]
    some = [
        Card(format_number(gain["mean"], "+.4f"), "log-likelihood gained per row", interval),
        Card(
            format_number(numbers["keys_better"] / keys if keys else None, ".0%"),
            "of the keys predicted better",
            f"{numbers['keys_worse']:,} worse",
        ),
    ]
    if "unequal_rows" in numbers:
        count = numbers["unequal_rows"]
        verb = "differs" if count == 1 else "differ"
        some.append(
            Card(f"{count:,}", f"row{'s'[: count != 1]} {verb}", "it is the same model: none may differ")
        )
    return format_cards(some)


def _show_thresholds(content: ComparisonContent) -> str:
    """Return the table of the statistics that decide, with the values of both versions and the thresholds."""
    numbers, limits = content.comparison.numbers, content.limits
    keys = numbers["keys"]
    worse = None if not keys else numbers["keys_worse"] / keys

    def both(name: str, form: str) -> tuple[str, str]:
        return format_number(numbers[name]["old"], form), format_number(numbers[name]["new"], form)

    def limit(name: str) -> str:
        most = limits[name]
        return f"any (upgrade.{name})" if most is None else f"at most {most:.1%} (upgrade.{name})"

    rows: list[tuple[str, str, str, str]] = [
        ("rows compared", "", f"{numbers['rows']:,}", f"at least {limits['rows']:,} (upgrade.rows)"),
        ("keys compared", "", f"{keys:,}", f"at least {limits['keys']:,} (upgrade.keys)"),
        (
            "log-likelihood per row",
            *both("log_likelihood_a_row", ".6g"),
            f"at most {limits['loss']:g} less than the old, beyond the noise (upgrade.loss)",
        ),
        (
            "keys predicted worse",
            "",
            format_number(worse, ".1%"),
            limit("keys_worse"),
        ),
        ("NIS per component", *both("nis_a_component", ".4f"), "1 is expected"),
        ("keys with NIS outside their 95 % bounds", *both("nis_outside", ".1%"), limit("nis_outside")),
        ("mean normalised innovation", *both("bias", "+.4f"), "0 is expected"),
        (
            "keys with a mean innovation outside its 95 % bounds",
            *both("bias_outside", ".1%"),
            limit("bias_outside"),
        ),
        ("flagged rows", *both("flagged", ","), "no more than the old"),
    ]
    return format_section(
        "Thresholds",
        "Of an exactly right model, 95 % of the keys would lie within the bounds.",
        format_table(("", "old", "new", "allowed"), rows),
    )


def _show_pictures(content: ComparisonContent) -> list[str]:
    """Return the sections with pictures, or a section with the reason why there are no pictures."""
    if not content.comparison.numbers["rows"]:
        return [format_section("Nothing to draw", "The two have no row in common yet.")]
    if drawing is None:
        return [format_section("Pictures", NO_PICTURES)]
    sections = [
        *_draw_examples(content),
        format_section(
            "Which predicts better",
            "The predictive log-likelihood is that of each measurement before the filter has seen it. First: the new "
            "version's gain over the old one, cumulated over event time. Then: each key's gain per row.",
            format_pictures(
                [
                    (drawing.draw_gain(content), "Log-likelihood gained, over time"),
                    (drawing.draw_gain_by_key(content), "Log-likelihood gained, by key"),
                ]
            ),
        ),
        format_section(
            "Which is better calibrated",
            "The normalised innovation squared (NIS) averages to the number of measured components if a filter's "
            "covariances are right; above, they are too small, below, too large. Each dot is a key.",
            format_pictures(
                [
                    *(
                        (drawing.draw_nis_by_key(content, side), f"NIS per component by key, {side}")
                        for side in content.by_key
                    ),
                    (drawing.draw_nis(drawing.make_version_nis(content)), "NIS per component over time"),
                ]
            ),
        ),
    ]
    drawn = [
        (drawing.draw_bias(content, side), f"Mean innovation by key, {side}")
        for side in drawing.list_biased(content)
    ]
    text = (
        "The mean of a key's normalised innovations. In a correct model it differs from zero only by chance."
    )
    if not drawn:
        text = "Not judged: it needs each row's innovation, which outputs: {innovation: true} in the spec writes."
    return [*sections, format_section("Bias", text, format_pictures(drawn) if drawn else "")]


def _draw_examples(content: ComparisonContent) -> list[str]:
    """Return the section with both versions' estimates of some keys, if there are such keys."""
    if drawing is None or not content.examples:
        return []
    text = (
        "Both versions' estimates with their 95 % bands, over the measurements: first of the keys whose newest "
        "estimate moves most, in standard deviations of the old one, then of keys by rows and gain."
    )
    lines = drawing.list_lines(content)
    drawn = [(drawing.draw_example(one, lines), f"Estimates of {one.key}") for one in content.examples]
    return [format_section("What a promotion changes", text, format_pictures(drawn))]


def _show_keys(content: ComparisonContent) -> str:
    data = content.data()
    parts = []
    for name, title in (("keys_worst", "lose most"), ("keys_best", "gain most")):
        rows = [
            (
                one["key"],
                f"{one['rows']:,}",
                f"{one['gain_a_row']:+.4f}",
                format_number(one["nis_a_component_old"], ".3f"),
                format_number(one["nis_a_component_new"], ".3f"),
            )
            for one in data[name][:8]
        ]
        parts.append(format_table((f"keys that {title}", "rows", "gain per row", "NIS old", "NIS new"), rows))
    text = "By log-likelihood gained per row; the JSON file beside this one has more of them."
    return format_section("Keys", text, place_side_by_side(*parts))


def _show_generations(content: ComparisonContent) -> str:
    rows = [
        (side, *(str(one[name]) for name in ("generation", "version", "status", "snapshot")))
        for side, one in (("old", content.old), ("new", content.new))
    ]
    return format_section(
        "Generations",
        "The new generation starts after a micro-batch of the old one; rows before that are not compared.",
        format_table(("", "generation", "version", "status", "started from"), rows),
    )
