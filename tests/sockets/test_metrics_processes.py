# SPDX-License-Identifier: Apache-2.0
"""The metrics of an engine's process on the page of its front end's."""
import os
import subprocess
import sys

from vllm_pd.ops.scrape import parse


def test_engine_process_reaches_the_front_end(tmp_path):
    engine = ("from vllm_pd.handover.metrics import PDMetrics\n"
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


def test_the_processes_of_one_front_end_share_an_engines_figures(tmp_path):
    """V1: each gets a part of what an engine has counted. A gauge's value is what was set last, in any process."""
    part = ("from vllm_pd.handover.metrics import PDMetrics\n"
            "m = PDMetrics('m', {engine}); m.attempt('done'); m.parked_blocks.set({blocks})\n"
            "m.engine_state('kv_both', {draining}, False)\n")
    front_end = ("import prometheus_client as p\nfrom prometheus_client import multiprocess\n"
                 "r = p.CollectorRegistry(); multiprocess.MultiProcessCollector(r)\n"
                 "print(p.generate_latest(r).decode())\n")
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for engine, blocks, draining in ((0, 5, False), (1, 4, False), (0, 0, True)):
        program = part.format(engine=engine, blocks=blocks, draining=draining)
        subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=300)
    shown = subprocess.run([sys.executable, "-c", front_end], env=env, check=True, timeout=300, capture_output=True,
                           text=True).stdout
    seen = parse(shown)
    assert seen.by("vllm:pd_attempts_total", "engine", "outcome")["0", "done"] == 2
    assert seen.by("vllm:pd_parked_blocks", "engine") == {("0", ): 0, ("1", ): 4}
    assert seen.by("vllm:pd_draining", "engine") == {("0", ): 1, ("1", ): 0}
