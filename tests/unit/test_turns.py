# SPDX-License-Identifier: Apache-2.0
"""Steps without prefills, for groups whose prompt has come from a peer (B32)."""
import itertools

from vllm_pd.v0.turns import DecodeTurns


def test_nothing_is_held_while_nobody_resumes():
    turns = DecodeTurns()
    for prefills in (0, 3, 1):
        assert turns.allows_prefills()
        turns.scheduled(prefills)


def test_b32_every_sequence_of_events_keeps_both_bounds():
    """A resumed group decodes in the next step or the one after it, and prefills are never held twice in a row,
    whatever comes when: all 4^6 sequences of (a group resumes, prompts wait)."""
    for events in itertools.product([(False, False), (False, True), (True, False), (True, True)], repeat=6):
        turns, waited, held_before = DecodeTurns(), None, False
        for resumes, prompts in events:
            if resumes:
                turns.resume()
                waited = waited or 0
            allowed = turns.allows_prefills()
            assert allowed or not held_before
            held_before = not allowed
            prefills = int(allowed and prompts)
            turns.scheduled(prefills)
            if not prefills:
                waited = None
            elif waited is not None:
                waited += 1
                assert waited <= 1
