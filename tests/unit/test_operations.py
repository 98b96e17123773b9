# SPDX-License-Identifier: Apache-2.0
"""docs/operations.md names every figure that an engine shows. A new one without a word there fails."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from vllm_pd.decisions.policy import Reason
from vllm_pd.events.metrics import EventFamilies
from vllm_pd.handover import metrics
from vllm_pd.peer.agent import ControlAgent
from vllm_pd.peer.degraded import DegradedReason
from vllm_pd.peer.liveness.process import local_member
from vllm_pd.protocol.actions import AttemptEnd, FallbackReason
from vllm_pd.protocol.messages import PROTOCOL, DenyReason, Fingerprint, Role
from vllm_pd.rpc.codec import FrameFault
from vllm_pd.settings.engine import PDConfig
from vllm_pd.store.metrics import (
    BLOCK_EVENTS,
    FAR_EVENTS,
    FAR_FAILURES,
    FAR_OUTCOMES,
    FAR_REFUSALS,
    LOAD_OUTCOMES,
    StoreFamilies,
)

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "operations.md").read_text()
TICKED = set(re.findall(r"`([^`]+)`", DOCUMENT))


def literals(node: ast.AST) -> set[str]:
    """The strings that an argument may be."""
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def dropped(path: str, prefix: str, counter: str = "dropped") -> set[str]:
    """What a module counts as dropped, by the words of its source. `counter`: the attribute that it counts in."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "_drop":
            found |= literals(node.args[0])
        if isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") == counter:
            found |= literals(node.slice)
    found -= {"claim_", "hold_"}  # and a reason
    assert found, path
    return {f"{prefix}_{name}" for name in found}


def figures() -> set[str]:
    described = [*metrics.HandoverFamilies().describe(), *EventFamilies().describe(), *StoreFamilies().describe()]
    names = {family.name for family in described}
    totals = {f"{family.name}_total" for family in described if family.type == "counter"}
    return {name for name in names if f"{name}_total" not in totals} | totals


def test_every_family_is_described():
    """Gauges, counters and times of metrics.py, by the name that /metrics shows."""
    assert len(figures()) >= 8
    assert figures() <= TICKED


def test_b97_every_family_of_upstreams_is_described():
    """What it means on D and on P."""
    source = Path(importlib.util.find_spec("vllm").origin).with_name("engine") / "metrics.py"
    families = set(re.findall(r'name="(vllm:\w+)"', source.read_text()))
    section = DOCUMENT.partition("## Upstream's own families")[2].partition("\n## ")[0]
    assert len(families) > 20
    assert families == set(re.findall(r"`(vllm:(?!pd_)\w+)`", section.partition("\nBeside them")[0]))


@pytest.mark.parametrize("words", [Reason, FallbackReason, AttemptEnd, metrics.STAGES, DegradedReason, BLOCK_EVENTS,
                                   LOAD_OUTCOMES, FAR_EVENTS, FAR_OUTCOMES, FAR_FAILURES, FAR_REFUSALS], ids=str)
def test_every_label_is_described(words):
    """Each value that a label takes."""
    assert {getattr(word, "value", word) for word in words} <= TICKED


def test_every_drop_is_described():
    """Each kind of a message that changed nothing."""
    kinds = (dropped("vllm_pd/protocol/decode.py", "decode") | dropped("vllm_pd/protocol/prefill.py", "prefill")
             | dropped("vllm_pd/protocol/peering.py", "prefill") | dropped("vllm_pd/protocol/hold_reads.py", "decode")
             | dropped("vllm_pd/protocol/holds.py", "prefill")
             | dropped("vllm_pd/peer/thread.py", "link", "counters")
             | {f"link_frame_{fault.value}" for fault in FrameFault}
             | {f"decode_claim_{reason.value}" for reason in DenyReason if reason is not DenyReason.TOKENS}
             | {f"prefill_hold_{reason}" for reason in ("unknown", "taken", "tokens")})
    assert len(kinds) > 30
    assert kinds <= TICKED, sorted(kinds - TICKED)


def test_every_gauge_of_the_control_thread_is_described():
    """What /pd/status shows."""
    config = PDConfig.parse("kv_both", {"broker": "tcp://127.0.0.1:9"})
    member = local_member(Role.BOTH, Fingerprint(PROTOCOL, "m", "f", "f", 16, 1, 1, 8, "l"))
    agent = ControlAgent(config, member, b"", wake=lambda: None)
    gauges = agent.counts().keys() | agent.protocol.state.gauges().keys()
    assert len(gauges) >= 10 and gauges <= TICKED


def test_every_link_leads_somewhere():
    """Headings of the document, files beside it, and their headings."""
    for target in re.findall(r"\]\(([^)]+)\)", DOCUMENT):
        file, _, anchor = target.partition("#")
        path = ROOT / "docs" / (file or "operations.md")
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text()), target


def anchors(document: str) -> set[str]:
    """By which links reach its headings."""
    return {re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
            for line in document.splitlines() if line.startswith("#")}
