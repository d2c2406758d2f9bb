"""Find settings that read texts in which no usual format reads a time, for the sentence that refuses them.

Nothing here decides how rows are read: a text that fits none of the usual formats stays refused until a format is
named. Formats are never made from a text: those that may be named are combined from known dates, joins and times of
day, and have been tried on the texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import tzinfo
from itertools import product
from typing import NamedTuple

from jobs.core.redaction import show_name
from jobs.core.time_readings import USUAL_FORMATS, TimeReading, find_forms
from jobs.core.times import TimeParser, load_zone

ENOUGH = 0.95
"""The minimum share of texts that a setting must read."""
_MOST = 3
"""Maximum number of settings that a sentence names."""
_DATES = (
    *"%d/%m/%Y %m/%d/%Y %d.%m.%Y %Y-%m-%d %Y/%m/%d %d-%m-%Y %m-%d-%Y".split(),
    *"%d/%m/%y %m/%d/%y %d.%m.%y %y-%m-%d %y/%m/%d %d-%m-%y %m-%d-%y".split(),
    *("%d. %m. %Y", "%d-%b-%Y", "%d %b %Y", "%d. %b %Y", "%b %d, %Y", "%b %d %Y", "%a, %d %b %Y"),
)
_PERIODS = (
    *("%b %Y", "KW %V/%G", "KW %V %G", "%G KW %V", "%G Woche %V", "Woche %V %G", "%G Week %V", "Week %V %G"),
    *("%q. Quartal %Y", "%qQ%Y", "%qQ %Y"),
)
"""Dates without a time of day."""
_JOINS = (" ", "T", ", ", "; ", " at ", " um ", " @ ")
_CLOCKS = (
    *"%H:%M %H:%M:%S %Hh%M %Hh%Mm %Hh %H.%M %H.%M.%S %I:%M%p %I:%M:%S%p %I%p".split(),
    *("%H:%M Uhr", "%H Uhr", "%I:%M %p", "%I:%M:%S %p", "%I %p"),
)
"""Times of day; those with a full point may be dates after a comma or a semicolon."""
_DOUBTFUL = re.compile(
    r"[0-9](?:[:.hH][0-9]{0,2}|\s*[AaPp][.]?[Mm][.]?)\s*-\s*(?![0-9]{4}$)[0-9]"
    r"|(?<![0-9.:])(?:[0-9]{1,2}[.][0-9]|0[.][0-9]+)(?![0-9.])"
)
"""Pattern of two times of day, of which the second may look like an offset, and of hours with a fraction."""
_ABBREVIATION = re.compile("[A-Z]{3,5}$")
_ZONES = (
    "Europe/Berlin Europe/Helsinki Europe/Lisbon Europe/London Europe/Dublin Europe/Moscow America/New_York "
    "America/Chicago America/Denver America/Los_Angeles America/Anchorage America/Halifax America/St_Johns "
    "Pacific/Honolulu Asia/Shanghai Asia/Kolkata Asia/Jerusalem Asia/Tokyo Asia/Seoul Asia/Hong_Kong Asia/Karachi "
    "Asia/Jakarta Asia/Manila Africa/Johannesburg Africa/Nairobi Africa/Lagos Australia/Sydney Australia/Adelaide "
    "Australia/Perth Pacific/Auckland"
).split()
"""Time zones whose abbreviations are tried."""
_MONTHS = {
    "Jan": "jän(ner)?|januar|janv(ier)?|ene(ro)?|gen(naio)?|janeiro",
    "Feb": "februar|f[ée]v(r(ier)?)?|febrero|febbraio|fevereiro",
    "Mar": "märz?|mrz|maerz|mars|marzo|março|maart",
    "Apr": "avr(il)?|abr(il)?|aprile",
    "May": "mai|mayo|mag(gio)?|maio|mei",
    "Jun": "juni|juin|junio|giu(gno)?|junho",
    "Jul": "juli|juil(let)?|julio|lug(lio)?|julho",
    "Aug": "août|aout|ago(sto)?|augustus",
    "Sep": "septiembre|septembre|set(t(embre)?|embro)?",
    "Oct": "okt(ober)?|out(ubro)?|ott(obre)?|octobre|octubre",
    "Nov": "novembre|noviembre|novembro",
    "Dec": "dez(ember|embro)?|d[ée]c(embre)?|dic(iembre|embre)?",
}
_REWRITTEN = (
    (r"\s", " "),
    (r"\\?/Date\((-?[0-9]+)(?:[+-][0-9]{4})?\)\\?/", r"\1"),
    (r"(?<=[0-9])(?:st|nd|rd|th|er|º)(?![A-Za-z])", ""),
    (r"(?i)\b([ap])[.]?\s+m\b[.]?", r"\1m"),
    (r"\bME(S?)Z\b", r"CE\1T"),
    (r"^(?=[0-9][-/]\s+[0-9](?![0-9]))", "0"),
    (r"(?<=[0-9][-/:])\s+(?=[0-9](?![0-9]))", "0"),
    *((rf"(?i)(?<![^\W\d_])(?:{words})(?![^\W\d_])[.]?", name) for name, words in _MONTHS.items()),
)
"""Notations that no format has: what they are replaced by."""


class _Setting(NamedTuple):
    """A format and, if the texts need it, a time zone; and the time that the first text then means."""

    form: str | None
    zone: str | None
    reading: TimeReading


def explain_texts(
    texts: Sequence[str], zone: tzinfo, write: Callable[[str | None, str | None], str]
) -> str | None:
    """Return how to read texts that no usual format reads; None if they do not look like times.

    A text that may not be shown as it is, because it is long or may hold a secret, gets no advice.

    Args:
        texts: texts that are not blank.
        zone: time zone of times without an offset.
        write: function that returns the words for a format (None: ISO 8601) and a time zone (None: unchanged).
    """
    texts = [text.strip() for text in texts]
    written = texts
    for pattern, by in _REWRITTEN:
        written = [re.sub(pattern, by, text) for text in written]
    place = next((place for place, text in enumerate(texts) if text != written[place]), None)
    shown = [re.sub(r"\s", " ", text) for text in (texts[0], texts[place or 0])]
    if any(show_name(text) != text for text in shown) or any(map(_DOUBTFUL.search, texts)):
        return None
    if place is not None:
        written = [written[place], *written[:place], *written[place + 1 :]]
        if ways := _describe_ways(written, zone, USUAL_FORMATS, write):
            return f"no format reads this notation; if it is written as '{written[0]}', {ways}"
    return _describe_ways(texts, zone, (), write)


def _describe_ways(
    texts: Sequence[str],
    zone: tzinfo,
    usual: Sequence[str],
    write: Callable[[str | None, str | None], str],
) -> str | None:
    """Return the settings that read texts, in words; None if there are none."""
    first = texts[0]
    number = float(first) if re.fullmatch("-?[0-9]{9,19}", first) else None
    forms = [None, *usual, *_list_forms(first)] if number is None else find_forms(number, number)[:1]
    found = _find_settings(texts, zone, forms)
    if not found:
        return None
    ways = " or ".join(f"{write(one.form, one.zone)} ({one.reading})" for one in found[:_MOST])
    others = " or others" * (len(found) > _MOST)
    return f"{ways}{others} reads it" + "; only its source can say which is right" * (len(found) > 1)


def _find_settings(texts: Sequence[str], zone: tzinfo, forms: Sequence[str | None]) -> list[_Setting]:
    """Return the formats that read nearly all texts, each with the time zones that know an abbreviation in them."""
    found: list[_Setting] = []
    zones: dict[str | None, tzinfo] = {None: zone}
    if _ABBREVIATION.search(texts[0]):
        zones |= {name: load_zone(name) for name in _ZONES}
    for form in dict.fromkeys(forms):
        named = zones if form is None or "%Z" in form else (None,)
        for name in named:
            parser = TimeParser(form, zones[name])
            micros = parser(texts[0])
            if micros is None or sum(parser(text) is not None for text in texts) < ENOUGH * len(texts):
                continue
            found.append(_Setting(form, name, TimeReading(form or "", micros)))
            if name is None:
                break
        if form is None and found:
            break
    return found


def _list_forms(text: str) -> Iterator[str]:
    """Yield the formats whose literal characters are all in a text."""
    text = re.sub(" +", " ", text)
    dates, joins, clocks = (
        [form for form in forms if all(literal in text for literal in re.split("%[A-Za-z]", form))]
        for forms in (_DATES, _JOINS, _CLOCKS)
    )
    yield from (*dates, *_PERIODS)
    zone = "%Z" if _ABBREVIATION.search(text) else "%z"
    for date, join, clock in product(dates, joins, clocks):
        if "." in clock and join in (", ", "; "):
            continue
        ends = ("", zone, f" {zone}") if "%M" in clock or "%p" in clock else ("",)
        yield from (f"{date}{join}{clock}{end}" for end in ends)
        if clock == "%Hh%M" and join == " ":
            yield f"{clock}{join}{date}"
