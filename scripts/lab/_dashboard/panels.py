# SPDX-License-Identifier: Apache-2.0
"""What deploy/grafana/vllm-pd.json shows: its panels, and the variables in their expressions."""
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = ROOT / "deploy" / "grafana" / "vllm-pd.json"
INTERVAL = "__rate_interval"  # Grafana's own: at least four times as long as the time between two scrapes
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")


@dataclass(frozen=True)
class PanelLine:
    """One expression of a panel, and how its time series are named: `{{label}}` stands for a label's value."""
    expression: str
    legend: str

    def name(self, labels: Mapping[str, str]) -> str:
        """The name of the time series with these labels."""
        return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), self.legend)


@dataclass(frozen=True)
class DashboardPanel:
    """A panel. `row`: the title of the row that it is in. `unit` is Grafana's word."""
    row: str
    title: str
    description: str
    unit: str
    stacked: bool
    lines: tuple[PanelLine, ...]


def read_dashboard(path: Path = DASHBOARD) -> dict[str, Any]:
    """The file's content."""
    return json.loads(path.read_text())


def panels_of(dashboard: Mapping[str, Any]) -> list[DashboardPanel]:
    """The panels from the top to the bottom. Raises KeyError where one lacks what all have."""
    row, found = "", []
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
            continue
        defaults = panel["fieldConfig"]["defaults"]
        found.append(DashboardPanel(row, panel["title"], panel["description"], defaults["unit"],
                                    "stacking" in defaults["custom"],
                                    tuple(PanelLine(one["expr"], one["legendFormat"]) for one in panel["targets"])))
    return found


def variables_of(dashboard: Mapping[str, Any]) -> dict[str, str]:
    """Name -> query of each variable that expressions may have."""
    return {one["name"]: one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"}


def filled(expression: str, names: Mapping[str, str], interval: str) -> str:
    """The expression with everything chosen in each variable. Raises ValueError for one that is not in `names`."""
    def value(found: re.Match[str]) -> str:
        if found[1] == INTERVAL:
            return interval
        if found[1] not in names:
            raise ValueError(f"{expression}: the dashboard has no variable {found[1]}")
        return ".*"

    return _VARIABLE.sub(value, expression)
