# SPDX-License-Identifier: Apache-2.0
"""A Prometheus of its own for one run: deploy/prometheus's files with this run's addresses, and what it answers."""
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import yaml

from _dashboard.panels import ROOT
from vllm_pd.bench.servers import HOST, Server
from vllm_pd.errors import PDError
from vllm_pd.ops.client import fetch

CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
SCRAPE_S = 2
RATE_INTERVAL = "16s"  # twice what Grafana takes for this scrape interval: few requests come in a run
ANSWER_S = 30.0


@dataclass(frozen=True)
class PanelSeries:
    """A time series that an expression gave. Times are those of `time.time()`; what is not a number is left out."""
    labels: Mapping[str, str]
    at_s: tuple[float, ...]
    values: tuple[float, ...]

    def with_gaps(self) -> tuple[list[float], list[float]]:
        """Times and values to draw: where samples are missing a NaN ends the line."""
        times, values = [], []
        for at_s, value in zip(self.at_s, self.values, strict=True):
            if times and at_s - times[-1] > 1.5 * SCRAPE_S:
                times.append(at_s)
                values.append(math.nan)
            times.append(at_s)
            values.append(value)
        return times, values

    def mean(self, begun_s: float, ended_s: float) -> float | None:
        """Over this time; None where it has no sample then."""
        found = [value for at_s, value in zip(self.at_s, self.values, strict=True) if begun_s <= at_s < ended_s]
        return sum(found) / len(found) if found else None


def find_prometheus(named: str | None) -> str:
    """The program. Raises PDError where there is none."""
    found = shutil.which(named or "prometheus")
    if found is None:
        raise PDError(f"there is no {named or 'prometheus'}: apt-get install prometheus, or name it with --prometheus")
    return found


def write_config(folder: Path, targets: Mapping[str, Sequence[str]]) -> Path:
    """Writes the configuration with these targets (job -> host:port). Raises KeyError for a job without any."""
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s",
                        "evaluation_interval": f"{SCRAPE_S}s"}
    config["rule_files"] = [str(CONFIG.with_name(name)) for name in config["rule_files"]]
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": list(targets[job["job_name"]])}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def command(program: str, config: Path, port: int) -> list[str]:
    """What starts it."""
    return [program, f"--config.file={config}", f"--storage.tsdb.path={config.parent / 'data'}",
            f"--web.listen-address={HOST}:{port}", "--log.level=warn"]


def is_ready(server: Server) -> bool:
    """Whether it answers queries."""
    try:
        return fetch(server.url, "/-/ready", ANSWER_S)[0] == 200
    except OSError:
        return False


def version(url: str) -> str:
    """Its version. Raises OSError without an answer."""
    return json.loads(fetch(url, "/api/v1/status/buildinfo", ANSWER_S)[1])["data"]["version"]


def ask_range(url: str, expression: str, begun_s: float, ended_s: float) -> list[PanelSeries]:
    """What the expression gave in this time. Raises PDError where it is refused, OSError without an answer."""
    status, text = fetch(url, f"/api/v1/query_range?query={quote(expression)}&start={begun_s:.3f}&end={ended_s:.3f}"
                         f"&step={SCRAPE_S}", ANSWER_S)
    reply = json.loads(text)
    if status != 200:
        raise PDError(f"{expression}: {reply.get('error', status)}")
    found = []
    for series in reply["data"]["result"]:
        samples = [(at_s, float(value)) for at_s, value in series["values"] if math.isfinite(float(value))]
        if samples:
            found.append(PanelSeries(series["metric"], *zip(*samples, strict=True)))
    return found
