# SPDX-License-Identifier: Apache-2.0
"""B105 to B108: a fleet over three machines whose network, power, addresses and broker fail again and again, while
prompts come. None gets a wrong answer, none stays unfinished, no block is lost."""
import os
import random
import time

from tests.hosts.chaos import Chaos

REQUESTS = 500
LASTS_S = 300.0  # at most


def test_b105_b106_b107_b108_no_fault_of_a_network_costs_an_answer_or_a_block(rack):
    """B105, B106, B107, B108. HOSTS_SEED repeats a run, as far as time allows."""
    seed = int(os.environ.get("HOSTS_SEED", random.randrange(1 << 32)))
    print(f"HOSTS_SEED={seed}")
    chaos = Chaos(rack, seed)
    begin = time.monotonic()
    chaos.run(REQUESTS, LASTS_S)
    print(f"{chaos.requests} prompts, {dict(chaos.ends)}, the longest {chaos.longest_s:.1f} s, {dict(chaos.counts)}, "
          f"{time.monotonic() - begin:.0f} s")
