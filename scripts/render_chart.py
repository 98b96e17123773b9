#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write deploy/kubernetes/base: what the chart gives with its default values and the release name "vllm-pd".

    python scripts/render_chart.py    after a change of deploy/kubernetes/chart; in the environment of scripts/env.sh

It is Helm's own engine, and asks no cluster.
"""
import os
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "kubernetes"
CHART, BASE = FOLDER / "chart", FOLDER / "base"
NAME, NAMESPACE = "vllm-pd", "inference"
PROGRAMS = os.environ.get("VLLM_PD_KUBERNETES", "")  # the folder with Helm and more (requirements/kubernetes.txt)
if PROGRAMS:
    sys.path.append(PROGRAMS)


def render(values: dict[str, Any] | None = None) -> dict[str, str]:
    """The name of each file of the chart that gives something, and what. Raises ImportError, and Helm's errors for
    values that the chart refuses."""
    from helm_python import Chart
    with Chart.load(CHART) as chart:
        files = chart.render(values, name=NAME, namespace=NAMESPACE)
    return {Path(name).name: text.strip() + "\n" for name, text in sorted(files.items()) if text.strip()}


def main() -> None:
    for name, text in render().items():
        (BASE / name).write_text(text)
        print(BASE / name)


if __name__ == "__main__":
    main()
