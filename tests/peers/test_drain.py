# SPDX-License-Identifier: Apache-2.0
"""B43: engines that are told to stop, and engines that change their role, under load and with nothing failing."""
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest
from light_engine import WAIT_S, Light
from typer.testing import CliRunner

from tests.waiting import wait_for
from vllm_pd.broker.members import Access, list_members
from vllm_pd.broker.server import Broker
from vllm_pd.cli import app
from vllm_pd.errors import ConfigError, ControlError
from vllm_pd.ops.orders import EngineAddress, Operator, find_engine
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.messages import Role
from vllm_pd.rpc.keys import Keys


class Load:
    """Requests for decode engines, a few at a time, until `finish`."""

    def __init__(self, *decodes: Light):
        self.decodes = decodes
        self.open: dict[Light, set[str]] = {decode: set() for decode in decodes}
        self.ends: list[str] = []
        self.count = 0

    def go_on(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for decode in self.decodes:
                while len(self.open[decode]) < 6:
                    self.count += 1
                    name = f"r{self.count}"
                    self.open[decode].add(name)
                    decode.ask("submit", [(name, random.Random(name).choices(range(1000), k=40))])
                self._take(decode)
            time.sleep(0.02)

    def go_on_until(self, condition: Callable[[], object]) -> None:
        wait_for(condition, meanwhile=lambda: self.go_on(0.1))

    def finish(self) -> list[str]:
        """How all of them ended."""
        deadline = time.monotonic() + WAIT_S
        while any(self.open.values()):
            assert time.monotonic() < deadline, self.open
            for decode in self.decodes:
                self._take(decode)
            time.sleep(0.02)
        return self.ends

    def _take(self, decode: Light) -> None:
        for name, end in decode.ask("ended").items():
            self.open[decode].remove(name)
            self.ends.append(end)


def names(broker: str, access: Access | None = None) -> dict[str, m.Member]:
    return {member.incarnation: member for member in list_members(broker, WAIT_S, access).members}


def granted(light: Light) -> int:
    """How many jobs it has got."""
    return light.state()["totals"].get("prefill_granted", 0)


def test_b43_a_prefill_engine_is_drained_under_load(nursery, broker):
    """B43: what it has it finishes, it gets nothing new, it leaves; no request so much as falls back."""
    decode = nursery.engine(Role.DECODE, broker)
    leaving, staying = (nursery.engine(Role.PREFILL, broker, work_s=0.1) for _ in range(2))
    decode.wait_for_peers(2)
    load = Load(decode)
    load.go_on(0.5)
    load.go_on_until(lambda: granted(leaving))
    with Operator(find_engine(leaving.member.incarnation[:10], broker, Access(), WAIT_S), Access()) as operator:
        assert operator.tell(m.Status(), WAIT_S).gauges["drained"] == 0
        reply = operator.tell(m.Drain(), WAIT_S)
        assert reply.member.draining
        load.go_on(0.3)
        reply = operator.drain(WAIT_S)
        leaving.wait_until(lambda state: state["left"])
        before = granted(leaving)
        load.go_on(0.7)
        assert reply.gauges["drained"] == 1 and reply.gauges["running"] == 0
        assert granted(leaving) == before
    wait_for(lambda: leaving.member.incarnation not in names(broker))
    assert set(load.finish()) == {"remote"}
    for one in (decode, staying, leaving):
        one.at_rest()
    leaving.quit()
    assert decode.wait_for_peers(1)["totals"]["decode_done"] == len(load.ends)


def test_b43_a_decode_engine_is_drained_with_prompts_on_their_way(nursery, broker):
    """B43: parked prompts come back and are finished before it leaves; its P forgets it."""
    decode = nursery.engine(Role.DECODE, broker)
    prefill = nursery.engine(Role.PREFILL, broker, work_s=600.0)
    decode.wait_for_peers(1)
    asked = [(f"r{number}", [number] * 40) for number in range(6)]
    decode.ask("submit", asked)
    prefill.wait_until(lambda state: state["jobs"] > 0)
    prefill.stop()
    decode.ask("drain")
    time.sleep(0.3)
    assert not decode.state()["left"]
    prefill.send(signal.SIGCONT)
    prefill.ask("work", 0.0)
    assert set(decode.wait_ended({name for name, _ in asked}).values()) == {"remote"}
    decode.wait_until(lambda state: state["left"])
    wait_for(lambda: names(broker).keys() == {prefill.member.incarnation})
    prefill.wait_until(lambda state: state["counts"]["peers"] == 0)
    for one in (decode, prefill):
        one.at_rest()


def test_b43_an_engine_drains_without_a_broker(nursery):
    """B43: nobody is left to be told, so nobody is waited for."""
    broker = Broker("tcp://127.0.0.1:0", ttl_s=60.0)
    thread = threading.Thread(target=broker.run)
    thread.start()
    prefill = nursery.engine(Role.PREFILL, broker.address, {"heartbeat_s": 1.0})
    prefill.wait_until(lambda state: state["view"]["broker_up"])
    broker.stop()
    thread.join(60)
    prefill.wait_until(lambda state: not state["view"]["broker_up"])
    prefill.ask("drain")
    prefill.wait_until(lambda state: state["left"])


def test_b43_roles_change_under_load(nursery, broker):
    """B43 for a part of an engine: an engine of both roles becomes one, the other, and both again. What is under way
    ends as if nothing had changed, the registry shows the role, and new work goes by it."""
    settings = {"claim_retry_s": 1.0}
    first, second = (nursery.engine(Role.BOTH, broker, settings, work_s=0.05) for _ in range(2))
    for one in (first, second):
        one.wait_for_peers(1)
    load = Load(first, second)
    for role in (Role.DECODE, Role.BOTH, Role.PREFILL, Role.BOTH, Role.DECODE, Role.PREFILL, Role.BOTH):
        load.go_on(0.3)
        assert second.ask("role", role.value) == ""
        first.wait_until(lambda state, role=role: state["view"]["prefill_peers"] == role.prefills)
        wait_for(lambda role=role: names(broker)[second.member.incarnation].role is role)
        before = granted(second)
        load.go_on(0.3)
        if role is Role.PREFILL:
            load.go_on_until(lambda before=before: granted(second) > before)
    load.go_on_until(lambda: load.ends.count("remote") > 30)
    assert "wrong" not in load.finish()
    for one in (first, second):
        state = one.at_rest()
        assert state["totals"].get("decode_failed", 0) == state["totals"].get("decode_expired", 0) == 0


def test_b80_an_engine_of_one_role_keeps_it(nursery, broker):
    prefill = nursery.engine(Role.PREFILL, broker)
    prefill.wait_until(lambda state: state["view"]["broker_up"])
    with Operator(EngineAddress(prefill.member.address), Access()) as operator:
        with pytest.raises(ControlError, match="started as kv_producer.*start it as kv_both"):
            operator.tell(m.SetRole(Role.BOTH), WAIT_S)
        assert operator.tell(m.SetRole(Role.PREFILL), WAIT_S).problem == ""
    with pytest.raises(ConfigError, match=f"no such engine.*{prefill.member.incarnation[:12]}"):
        find_engine("nobody", broker, Access(), WAIT_S)


@pytest.mark.parametrize("order", [m.Status(), m.SetRole(Role.DECODE), m.Drain()])
def test_b43_an_order_for_an_engine_that_is_gone_changes_none_that_has_its_address(nursery, broker, order):
    engine = nursery.engine(Role.BOTH, broker)
    engine.wait_until(lambda state: state["view"]["broker_up"])
    with Operator(EngineAddress(engine.member.address, "another"), Access()) as operator, \
            pytest.raises(ControlError, match="another engine listens"):
        operator.tell(order, WAIT_S)
    with Operator(EngineAddress(engine.member.address), Access()) as operator:
        member = operator.tell(m.Status(), WAIT_S).member
    assert not member.draining and member.role is Role.BOTH


def test_b43_b82_the_commands_with_and_without_the_key(nursery, tmp_path):
    """B43, B82: an operator with the cluster's key is heard, one without is not."""
    keys = str(Keys.make(tmp_path))
    broker = Broker("tcp://127.0.0.1:0", ttl_s=60.0, keys=Keys.load(keys))
    thread = threading.Thread(target=broker.run)
    thread.start()
    engine = nursery.engine(Role.BOTH, broker.address, {"keys": keys})
    engine.wait_until(lambda state: state["view"]["broker_up"])
    name = engine.member.incarnation

    def run(*arguments):
        result = CliRunner().invoke(app, [*arguments, "--broker", broker.address])
        return result.exit_code, result.output + str(result.exception or "")

    try:
        assert run("status", name[:8])[0] != 0, "no key"
        code, said = run("status", "--keys", keys)
        assert code == 0 and name[:12] in said and "kv_both" in said
        code, said = run("role", name[:8], "kv_producer", "--keys", keys)
        assert code == 0 and "kv_producer, serving" in said
        assert run("role", name[:8], "decode", "--keys", keys)[0] != 0
        code, said = run("drain", name[:8], "--keys", keys)
        assert code == 0 and "drained" in said
        code, said = run("status", engine.member.address, "--keys", keys)
        assert code == 0 and "kv_producer, drained" in said
        with Operator(EngineAddress(engine.member.address), Access()) as stranger, pytest.raises(ControlError):
            stranger.tell(m.Drain(), timeout_s=1.0)
    finally:
        broker.stop()
        thread.join(60)
    engine.at_rest()
