# SPDX-License-Identifier: Apache-2.0
"""Whether engines have given back all that requests had: blocks set aside, blocks in use, requests."""

import time

from vllm_pd.bench.load import GenerationRequest, ask
from vllm_pd.model.installation import World, find_installation
from vllm_pd.ops.scrape import scrape

SETTLE_S = 15.0
USAGE = "vllm:kv_cache_usage_perc" if find_installation().world is World.PLUGIN else "vllm:gpu_cache_usage_perc"
MUST_BE_ZERO = ("vllm:pd_parked_blocks", "vllm:pd_quarantined_blocks", "vllm:pd_sending_blocks",
                "vllm:num_requests_running", "vllm:num_requests_waiting", USAGE)


def left_over(urls: dict[str, str], model: str) -> list[str]:
    """One line for each gauge of each engine that is not back at 0. Empty where nothing leaks. `urls`: by the engines'
    names.

    An engine updates its gauges in a step, so each gets one last short question first.
    """
    for url in urls.values():
        ask(url, model, GenerationRequest("The end.", max_tokens=2))
    deadline = time.monotonic() + SETTLE_S
    while (leaks := leaks_now(urls)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return leaks


def leaks_now(urls: dict[str, str]) -> list[str]:
    """The gauges that are not zero at this moment."""
    pages = {name: scrape(url) for name, url in urls.items()}
    return [f"{name} engine: {gauge} is {page.value(gauge):g}, not 0"
            for name, page in pages.items() for gauge in MUST_BE_ZERO if page.value(gauge) != 0]
