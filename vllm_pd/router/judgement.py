# SPDX-License-Identifier: Apache-2.0
"""What a choice of a worker stands on: who the workers are, whether they work, what they hold and how loaded they are.

The router asks it for each request that it forwards, the endpoint picker (`vllm_pd.picker`) for each request that a
gateway forwards. It joins the parts: discovery and registry add workers, probes take them up and out, a worker that
came up joins its model's family, and then its events are read. The placer has the rest.
"""
import logging
import os
import random
import ssl
from typing import Any

import msgspec

from vllm_pd.extras import require_extra
from vllm_pd.router import descriptors
from vllm_pd.router.discovery import Discovery
from vllm_pd.router.membership import Membership
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.placing import Placer
from vllm_pd.router.policy import Policy, RoutingPolicyConfig
from vllm_pd.router.probe import GenerationProbes
from vllm_pd.router.subscriptions import EventSubscriptions
from vllm_pd.router.tokenizer import LIBRARY
from vllm_pd.router.tokens import TokenPool
from vllm_pd.router.worker_session import WorkerSession
from vllm_pd.router.workers import RouterWorker, Workers
from vllm_pd.rpc.nats_address import NatsAddress


def prepare_process(options: RouterOptions) -> None:
    """What a process that makes a judgement does first. Raises MissingPackage for a broker that needs the extra `nats`.
    """
    if options.broker is not None and NatsAddress.is_url(options.broker):
        require_extra("nats")
    for name, value in LIBRARY.items():
        os.environ.setdefault(name, value)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    descriptors.raise_limit()


class Judgement:
    """See the module. `options` are checked ones. It may be made anywhere; all else belongs to one event loop."""

    def __init__(self, options: RouterOptions, policy: RoutingPolicyConfig, metrics: RouterMetrics) -> None:
        self._options = options
        self._metrics = metrics
        self.policy = msgspec.structs.replace(policy.check(), policy=Policy(policy.policy))
        self.workers = Workers(metrics, options.max_in_flight)
        self.discovery = Discovery(options, self.workers, metrics, lambda: self.membership.unwanted)

    def begin(self, via: bytes, rng: random.Random | None = None) -> None:
        """Make the parts that need the event loop. `via`: the value of the header Via of requests to workers; ties are
        drawn from `rng`."""
        options, metrics = self._options, self._metrics
        self.tls = ssl.create_default_context()
        self.session = WorkerSession(options.connect_timeout_s, self.tls)  # for requests of our own
        self.pool = TokenPool(options)
        self.placer = Placer(options, self.policy, self.workers, self.pool, metrics,
                             lambda url: self.subscriptions.load_of(url), rng)
        self.subscriptions = EventSubscriptions(self.placer, self.session, options)
        self.probes = GenerationProbes(options, self.session, self._came_up,
                                       lambda url, outcome: metrics.of(url, metrics.probes, outcome).inc(),
                                       lambda url: self.subscriptions.progress_of(url), via)
        self.membership = Membership(options, self.workers, metrics)
        self.workers.on_join.append(self.probes.watch)
        self.workers.on_leave.append(self.subscriptions.unsubscribe)
        self.workers.on_end.append(self.probes.forget)
        self.membership.on_update.append(self.discovery.apply)

    def start(self) -> None:
        """After `begin`: add the workers, and follow them."""
        self.membership.start()
        self.discovery.start()

    async def close(self) -> None:
        """Stop everything that `begin` and `start` began."""
        await self.discovery.close()
        await self.membership.close()
        await self.probes.close()
        await self.subscriptions.close()
        self.placer.close()
        self.pool.close()

    def about(self) -> dict[str, Any]:
        """What an operator sees of it besides the workers."""
        return {"policy": self.policy.policy.value, "registry": self.membership.problem or "ok",
                "discovery": self.discovery.as_json(),
                "tokenizer": self.pool.problem or ("ok" if self.pool.loaded else "not loaded")}

    def workers_json(self) -> list[dict[str, Any]]:
        """Each worker's entry in /workers."""
        events = self.subscriptions.as_json()
        return [{**worker.as_json(), "events": events.get(worker.url)} for worker in self.workers]

    def _came_up(self, worker: RouterWorker) -> None:
        if self.placer.families.has_changed_model(worker):
            self.subscriptions.unsubscribe(worker)
        family = self.placer.families.join(worker)
        if self.policy.policy is Policy.KV:
            self.pool.load_for(family.name, worker.root)
        if self.policy.policy in (Policy.KV, Policy.LEAST_LOAD):
            self.subscriptions.subscribe(worker)
