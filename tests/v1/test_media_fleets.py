# SPDX-License-Identifier: Apache-2.0
"""B115 in fleets whose engines are of two releases: prompts with images go to prefill engines that take them, and are
prefilled locally where there is none. Every answer is that of one engine which sees the same images."""
import collections
import functools
import os

import pytest
from simulation.storms import storm

from tests.v1.fleet_engine import V1FleetEngine, virtual_time
from tests.v1.media import ENCODER, MediaEngine, image, patterns, with_images
from tests.v1.test_scopes import GrantsToAll, MixedFleet, OldPrefill
from vllm_pd.protocol.scope import SALT, media_scope
from vllm_pd.v1.media import MediaBook

SEEDS = int(os.environ.get("VLLM_PD_SEEDS", "480")) // 24
LENGTH, IMAGES = 5, 3  # of an image, in tokens, and how many there are
pytestmark = pytest.mark.timeout(1200)


class MediaFleetEngine(V1FleetEngine):
    """Its clients all begin alike, and two of three have one of a few images, behind the first token. An old one knows
    of none in jobs, neither as P nor as D."""

    def engine_type(self):
        is_old = isinstance(self.node.protocol.prefill, OldPrefill)
        return functools.partial(MediaEngine, book=MediaBook() if is_old else MediaBook(ENCODER, 0, patterns()))

    def client_asks(self, request_id, token_ids, max_tokens):
        number, tokens = int(request_id[1:]), [7, *token_ids[1:]]
        images = [image(1, LENGTH, number % IMAGES)] if number % 3 and len(tokens) > LENGTH + 1 else []
        self.simulated.add(request_id, with_images(tokens, images), max_tokens,
                           mm_features=[one.feature for one in images])
        self.wake()


class MediaFleet(MixedFleet):
    """Every second prefill engine takes no images, and the registry knows that."""

    reads = (SALT, media_scope("image", ENCODER))


class OldFleet(MediaFleet):
    """No prefill engine takes them."""

    def is_old(self, role):
        return role.prefills


class SilentFleet(MediaFleet):
    """As if its broker offered any job to anybody."""

    confessed = False


class GrantsWithoutImages(GrantsToAll):
    """An old engine does not see those that are in a grant."""

    def _on_claim(self, now, sender, message):
        record = self._records.get(message.attempt)
        if record is not None and not message.scope:
            record.media = ()
        return super()._on_claim(now, sender, message)


def run(folder, in_flight, seed, fleet_type, **variant):
    """The outcome; how many jobs had images and how many had none; how many claims were denied."""
    fleet = fleet_type(seed, storm(seed, **variant), lambda node, post: MediaFleetEngine(
        node, post, folder=folder, in_flight=in_flight, blocks=40, caching=True, chunk=64))
    with virtual_time(fleet.kernel):
        outcome = fleet.run()
    engines = (*fleet.engines.values(), *fleet._gone)
    found = collections.Counter(bool(scope.media) for engine in engines
                                for scope in engine.simulated.protocol.scopes.values())
    return outcome, found, sum(engine.node.decode.dropped["claim_avoided"] for engine in fleet.engines.values())


@pytest.mark.search
@pytest.mark.parametrize("fleet_type", [MediaFleet, OldFleet, SilentFleet])
def test_b115_b20_images_and_engines_of_two_releases(model_folder, in_flight, fleet_type, caplog):
    """B115, B20: and where no prefill engine takes images, prompts without any go there all the same."""
    caplog.set_level("CRITICAL", logger="vllm.pd")
    done, found, denials = 0, collections.Counter(), 0
    for seed in range(SEEDS):
        outcome, jobs, denied = run(model_folder, in_flight, seed, fleet_type)
        assert not outcome.broken, f"seed {seed}: {outcome.broken}"
        done += outcome.done_remotely
        found.update(jobs)
        denials += denied
    assert done >= SEEDS and found[False] >= SEEDS
    assert (found[True] >= SEEDS) is (fleet_type is not OldFleet)
    assert fleet_type is not SilentFleet or denials >= SEEDS // 2


def test_b115_a_grant_to_one_that_takes_no_images_is_found(model_folder, caplog):
    caplog.set_level("CRITICAL", logger="vllm.pd")
    assert any(run(model_folder, 1, seed, SilentFleet, decode_type=GrantsWithoutImages)[0].broken for seed in range(40))
