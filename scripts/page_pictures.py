"""Take the pictures of our pages in a real browser: `python scripts/page_pictures.py [FOLDER]` (docs/pictures).

Chromium renders each report at the width of a desktop and of a phone. A real Prometheus answers the queries of the
Grafana dashboard, and this script draws the answers: `apt install chromium prometheus`. FOLDER has the warehouse of
scripts/sample_warehouse.py; without it the script makes a warehouse (some minutes).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import matplotlib.pyplot as plt
import numpy as np
import yaml
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jobs import report  # noqa: E402
from jobs.core.settings import Settings  # noqa: E402
from jobs.insight.comparison_page import build_page  # noqa: E402
from jobs.offline.plots import STYLE  # noqa: E402
from jobs.supervision.metrics import Metrics, write_verification  # noqa: E402
from scripts.grafana_dashboard import PANELS  # noqa: E402
from scripts.sample_warehouse import make  # noqa: E402
from tests.jobs.insight.test_comparison import content  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
DESK, PHONE, LONG = 1120, 390, 9000
BROWSER = [
    *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--disable-background-networking", "--hide-scrollbars"),
]
UNITS = {"short": "", "percentunit": " (share)", "rowsps": " (rows/s)"}
SECONDS, PORT, SCRAPED = 60, 19090, 19108


def shown(page: Path, width: int) -> Image.Image:
    """Return a picture of the whole page at a width. A window of Chromium is never as narrow as a phone, so the page is
    in a frame.

    Raises:
        FileNotFoundError: the page does not exist; Chromium would show an error page.
        ValueError: the page is empty, or longer than the picture.
    """
    page = page.resolve(strict=True)
    with tempfile.TemporaryDirectory() as folder:
        frame, picture = Path(folder, "frame.html"), Path(folder, "picture.png")
        frame.write_text(
            f'<body style="margin:0;background:#000"><iframe src="{page.as_uri()}" '
            f'style="border:0;width:{width}px;height:{LONG}px"></iframe>'
        )
        size = f"--window-size={max(width, 600)},{LONG}"
        command = [
            *BROWSER,
            "--allow-file-access-from-files",
            size,
            f"--screenshot={picture}",
            f"file://{frame}",
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        whole = Image.open(picture).convert("RGB").crop((0, 0, width, LONG))
    rows = np.asarray(whole)
    drawn = np.flatnonzero((rows != rows[-1, :1]).any(axis=(1, 2)))
    if not len(drawn) or drawn[-1] > LONG - 24:
        raise ValueError(f"{page}: is empty, or longer than {LONG:,} pixels")
    return whole.crop((0, 0, width, int(drawn[-1]) + 24))


def columns(tall: Image.Image, height: int) -> Image.Image:
    """Return a tall picture cut into adjacent columns."""
    count = -(-tall.height // height)
    wide = Image.new("RGB", ((tall.width + 20) * count - 20, height), "white")
    for place in range(count):
        part = tall.crop((0, place * height, tall.width, min((place + 1) * height, tall.height)))
        wide.paste(part, (place * (tall.width + 20), 0))
    return wide


def save(picture: Image.Image, name: str) -> None:
    """Save a picture with few colours, so that it is small."""
    picture.quantize(256).save(PICTURES / name, optimize=True)
    print(PICTURES / name, picture.size)


def pages(settings: Settings) -> None:
    """Write the reports and take their pictures; the comparison's content comes from its test."""
    health = Path(report.run(settings, "rooms").data["report"])
    index = Path(report.run(settings).data["report"])
    save(shown(health, DESK), "report-health.png")
    save(columns(shown(health, PHONE), 1700), "report-health-phone.png")
    save(shown(index, DESK), "report-index.png")
    page = health.with_name("comparison.html")
    page.write_text(build_page(content()), encoding="utf-8")
    save(shown(page, DESK), "report-comparison.png")
    save(columns(shown(page, PHONE), 1700), "report-comparison-phone.png")
    page.unlink()


def dashboard() -> None:
    """Let a real Prometheus scrape a made-up minute of a stream, and draw its answers to the dashboard's queries."""
    with tempfile.TemporaryDirectory() as folder:
        verified = Path(folder, "verify.prom")
        write_verification(str(verified), "rooms", "equal", {"compared": 5000, "rows": 5000}, 0)
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [
                {"job_name": "kalman", "static_configs": [{"targets": [f"127.0.0.1:{SCRAPED}"]}]}
            ],
        }
        Path(folder, "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
        ]
        command += [f"--web.listen-address=127.0.0.1:{PORT}", "--log.level=error"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        metrics = Metrics("rooms", "rooms-g0002", port=SCRAPED)
        try:
            _a_minute(metrics)
            draw([(one.title, one.unit, [answered(expr) for expr, _ in one.queries]) for one in PANELS])
        finally:
            metrics.close()
            process.terminate()
            process.wait(20)


def _a_minute(metrics: Metrics) -> None:
    rng = np.random.default_rng(1)
    for second in range(SECONDS):
        rows = int(rng.integers(900, 1100))
        behind = max(0, 40 * (second - 20)) if second < 35 else max(0, 600 - 60 * (second - 35))
        late = int(rng.poisson(8 + 60 * (20 < second < 35)))
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 0.8))
        metrics.take(
            [
                {"batch_id": second, "started_at": now, "seconds": 0.6 + 0.2 * rng.random(), "rows": rows,
                 "estimated": rows - late, "quarantined": late, "late": late, "bad_state": 0, "expired": 0,
                 "rows_per_second": rows / 0.7, "state_rows": 16 + second // 10, "state_bytes": 2.1e6 + 1e4 * second,
                 "lag_rows": behind, "lag_seconds": behind / 40}
            ]
        )  # fmt: skip
        time.sleep(1)


def answered(expr: str) -> list[tuple[dict[str, str], Any, Any]]:
    """Return Prometheus' answer to a query over the minute: labels, seconds and values of each series."""
    filled = expr.replace("$__rate_interval", "5s").replace("$model", ".*").replace("[15m]", "[10s]")
    filled = filled.replace("[5m]", "[10s]")
    end = time.time()
    asked = urlencode({"query": filled, "start": end - SECONDS, "end": end, "step": 1})
    with urlopen(f"http://127.0.0.1:{PORT}/api/v1/query_range?{asked}", timeout=10) as answer:
        found = json.load(answer)["data"]["result"]
    series = [(one["metric"], np.array(one["values"], float)) for one in found]
    return [(labels, values[:, 0] - end, values[:, 1]) for labels, values in series]


def draw(panels: list[tuple[str, str, list[Any]]]) -> None:
    """Draw the answers in the dashboard's panels, without panels that have no made-up data."""
    panels = [one for one in panels if any(one[2])]
    style = {**STYLE, "font.size": 8, "axes.titlesize": 9, "figure.dpi": 100}
    with plt.rc_context(style):
        figure, grid = plt.subplots(
            -(-len(panels) // 2), 2, figsize=(11, 2.0 * -(-len(panels) // 2)), layout="constrained"
        )
        for ax, (title, unit, answers) in zip(grid.flat, panels, strict=False):
            for labels, seconds, values in (one for some in answers for one in some):
                name = " ".join(labels[key] for key in ("generation", "model", "outcome") if key in labels)
                ax.plot(seconds, values, linewidth=1.1, label=name)
            ax.set_title(f"{title}{UNITS.get(unit, f' ({unit})')}")
            ax.set_ylim(bottom=0)
            ax.legend(loc="best", fontsize=6.5)
        figure.savefig(PICTURES / "grafana.png", facecolor="white")
    save(Image.open(PICTURES / "grafana.png").convert("RGB"), "grafana.png")


if __name__ == "__main__":
    import matplotlib

    matplotlib.use("Agg")
    PICTURES.mkdir(exist_ok=True)
    dashboard()
    if len(sys.argv) > 1:
        place = Path(sys.argv[1])
        pages(Settings.load(warehouse=str(place / "warehouse"), models=str(place / "models"), quiet=True))
    else:
        with tempfile.TemporaryDirectory() as made:
            pages(make(Path(made)))
