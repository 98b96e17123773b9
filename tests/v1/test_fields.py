# SPDX-License-Identifier: Apache-2.0
"""B42, B80, B98: every field of eleven classes of vLLM's configuration (`CONFIGURATIONS`) and of requests was looked at
once (`reviewed_fields.py`). The other classes in `VllmConfig` were looked at as a whole.

What is refused, what is in the fingerprint, and which requests stay local are lists of what was known when they were
written. A release brings fields that are in none of them. Read what a new one does before you enter it: KV of a prompt
must not depend on a field that is in no fingerprint and not refused.
"""
import collections
import dataclasses

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.v1.reviewed_fields import CONFIGURATIONS, REQUESTS
from vllm_pd.model.store_checks import STORE_FEATURES, STORE_LIMITS
from vllm_pd.v1.claim import V1_FEATURES, V1_LIMITS

LIST = "tests/v1/reviewed_fields.py"
WORDS = {"digest", "refused", "used", "rounding", "local", "derived", "absent"}


def fields_of(kind: type) -> set[str]:
    """The names of all fields that the installed release has. What a configuration only makes others of is none."""
    if kind is SamplingParams:
        return set(SamplingParams.__struct_fields__)
    if kind is Request:
        return set(vars(Request("a", [1], SamplingParams(), None)))
    return {field.name for field in dataclasses.fields(kind)}


def names(reviewed: dict[str, str]) -> list[str]:
    return [name for group in reviewed.values() for name in group.split()]


@pytest.mark.parametrize("kind", [*CONFIGURATIONS, *REQUESTS], ids=lambda kind: kind.__name__)
def test_every_field_was_looked_at(kind):
    """B42, B80, B98"""
    reviewed = names({**CONFIGURATIONS, **REQUESTS}[kind])
    found, known = fields_of(kind), {name.rstrip("?") for name in reviewed}
    assert sorted(found - known) == [], f"new in this release: read what each does, then enter it in {LIST}"
    gone = [name for name in reviewed if not name.endswith("?") and name not in found]
    assert gone == [], f"take them out of {LIST}, or mark what another supported release still has"
    assert [name for name, count in collections.Counter(reviewed).items() if count > 1] == [], "in two groups"


def test_each_group_is_one_of_those_that_are_explained():
    assert all(set(groups) <= WORDS for groups in CONFIGURATIONS.values())
    assert all(set(groups) <= WORDS | {"stays", "sampled", "state"} for groups in REQUESTS.values())


def test_b80_what_is_refused_is_in_the_list_as_that():
    """B80: but for the sizes, of which some are refused and others used."""
    refused = {name for groups in CONFIGURATIONS.values() for name in groups.get("refused", "").split()}
    used = {name for groups in CONFIGURATIONS.values() for word in ("used", "digest") for name in
            groups.get(word, "").split()}
    properties = {"attention_chunk_size"}  # of ModelConfig
    assert {*V1_FEATURES, *STORE_FEATURES} - properties <= refused
    assert {*V1_LIMITS, *STORE_LIMITS} <= refused | used
