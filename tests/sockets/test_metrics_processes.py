# SPDX-License-Identifier: Apache-2.0
"""The metrics of an engine's process on the page of its front end's."""
import os
import subprocess
import sys

from vllm_pd.admin.scrape import parse


def test_engine_process_reaches_the_front_end(tmp_path):
    engine = ("from vllm_pd.metrics import PDMetrics\n"
              "m = PDMetrics('m'); m.attempt('done'); m.parked_blocks.set(5); m.handover('queue', 0.5)\n")
    front_end = ("import prometheus_client as p\nfrom prometheus_client import multiprocess\n"
                 "r = p.CollectorRegistry(); multiprocess.MultiProcessCollector(r)\n"
                 "print(p.generate_latest(r).decode())\n")
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", engine], env=env, check=True, timeout=300)
    shown = subprocess.run([sys.executable, "-c", front_end], env=env, check=True, timeout=300, capture_output=True,
                           text=True).stdout
    seen = parse(shown)
    assert seen.value("vllm:pd_attempts_total", outcome="done") == 1
    assert seen.value("vllm:pd_parked_blocks") == 5
    assert seen.value("vllm:pd_handover_seconds_sum", stage="queue") == 0.5
