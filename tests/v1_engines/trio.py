# SPDX-License-Identifier: Apache-2.0
"""A stock V1 engine, a prefill and a decode engine with the same arguments: what the latter two answer together is what
the stock one answers."""
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fakes.brokers import BrokerProcess
from tests.v1.real_engines import RealEngine
from tests.v1.test_real_engines import done, prompts
from tests.waiting import wait_for

SETTINGS = {"media": True, "attempt_deadline_s": 200.0, "lease_s": 10.0, "heartbeat_s": 2.0, "ttl_s": 20.0}


@contextlib.contextmanager
def stock_p_d(logs: Path, of_peers: dict[str, Any] | None = None, **arguments: Any) -> Iterator[list[RealEngine]]:
    """The three, ready, and a prompt has gone from D to P. `arguments`: of all, `of_peers`: of P and D alone."""
    broker, made = BrokerProcess(), []
    try:
        for role, name in ((None, "stock"), ("kv_producer", "p"), ("kv_consumer", "d")):
            made.append(RealEngine(role, logs / f"{name}.log", broker.url, SETTINGS, max_model_len=1024,
                                   **{**arguments, **(of_peers or {} if role else {})}))
        for one in made:
            one.ready()
        d = made[-1]
        wait_for(lambda: d.generate(prompts(0, (300, ))) and done(d), "nothing goes remote")
        yield made
    finally:
        for one in made:
            one.stop()
        broker.stop()
