# SPDX-License-Identifier: Apache-2.0
"""Death as a fact where no process id can tell it: the pure judgement, the probes, and engines that really die."""
import contextlib
import os
import resource
import select
import signal
import socket
import statistics
import subprocess
import sys
import time

import pytest
from light_engine import WAIT_S

from vllm_pd.peer.liveness.lifeline import GREETING_BYTES, Lifeline, greeting
from vllm_pd.peer.liveness.monitor import LivenessMonitor
from vllm_pd.peer.liveness.probe import TcpProbes
from vllm_pd.peer.liveness.rules import GRACE_S, IDLE_RETRY_S, SILENT_S, LivenessRules
from vllm_pd.peer.liveness.rules import ProbeAnswer as Answer
from vllm_pd.protocol.messages import PROTOCOL, Fingerprint, Member, Role

ADDRESS = "tcp://10.0.0.1:5"


class Judge:
    """The rules and a clock."""

    def __init__(self, busy=True):
        self.now = 100.0
        self.rules = LivenessRules()
        self.look(busy)

    def look(self, busy=True):
        self.rules.watch(self.now, {"p": ADDRESS}, {"p"} if busy else set())

    def ask(self, answer):
        """Wait for the next probe, and answer it."""
        due = self.rules.next_timeout()
        assert due is not None
        waited, self.now = max(0.0, due - self.now), max(self.now, due)
        assert self.rules.due(self.now, 64) == [("p", ADDRESS)] and self.rules.due(self.now, 64) == []
        return self.rules.answered(self.now, "p", answer), waited


def test_b21_a_peer_that_greeted_and_is_refused_twice_is_dead():
    judge = Judge()
    assert judge.ask(Answer.GREETED) == (False, 0.0)
    dead, waited = judge.ask(Answer.REFUSED)
    assert not dead and waited == pytest.approx(SILENT_S)
    dead, waited = judge.ask(Answer.REFUSED)
    assert dead and waited == pytest.approx(GRACE_S), "the grace covers what was on its way"
    assert SILENT_S + GRACE_S < 1.0


def test_another_engine_at_its_port_is_as_good_as_a_refusal():
    judge = Judge()
    judge.ask(Answer.GREETED)
    assert [judge.ask(answer)[0] for answer in (Answer.OTHER, Answer.REFUSED)] == [False, True]


@pytest.mark.parametrize("answers", [
    [Answer.REFUSED] * 5, [Answer.OTHER] * 5, [Answer.NOTHING, Answer.REFUSED, Answer.REFUSED],
    [Answer.GREETED] + [Answer.NOTHING] * 5, [Answer.GREETED, Answer.REFUSED, Answer.NOTHING, Answer.REFUSED],
    [Answer.GREETED, Answer.REFUSED, Answer.GREETED, Answer.REFUSED],
], ids=lambda answers: " ".join(answer.value for answer in answers))
def test_b22_nothing_else_is_death(answers):
    """An address that never led to the peer says nothing about it; a stopped or unreachable peer may come back."""
    judge = Judge()
    assert not any(judge.ask(answer)[0] for answer in answers)


def test_a_word_by_other_ways_stands_against_a_refusal():
    judge = Judge()
    judge.ask(Answer.GREETED)
    judge.ask(Answer.REFUSED)
    judge.rules.heard(judge.now, "p")
    assert [judge.ask(Answer.REFUSED)[0] for _ in range(2)] == [False, True]


def test_only_a_silent_peer_that_matters_is_probed():
    judge = Judge(busy=False)
    assert judge.ask(Answer.NOTHING) == (False, 0.0)
    assert judge.ask(Answer.GREETED) == (False, IDLE_RETRY_S), "until it has been reached once"
    assert judge.rules.next_timeout() is None
    judge.look(busy=True)
    assert judge.rules.next_timeout() == judge.now + SILENT_S
    for _ in range(10):
        judge.now += SILENT_S / 2
        judge.rules.heard(judge.now, "p")
        assert judge.rules.due(judge.now, 64) == []
    judge.rules.watch(judge.now, {}, set())
    assert len(judge.rules) == 0 and judge.rules.next_timeout() is None
    assert not judge.rules.answered(judge.now, "p", Answer.REFUSED)


def test_probes_are_bounded_and_the_longest_due_come_first():
    rules = LivenessRules()
    for now in range(100):
        rules.watch(float(now), {f"p{number}": ADDRESS for number in range(now + 1)}, set())
    assert [name for name, _ in rules.due(100.0, 3)] == ["p0", "p1", "p2"]
    assert [name for name, _ in rules.due(100.0, 2)] == ["p3", "p4"]


# Sockets and processes.


def found(*arguments, **options):
    """What probes say in the end: one whose peer, or who itself, stands still for too long says nothing."""
    deadline = time.monotonic() + WAIT_S
    while (answer := probe(*arguments, **options)) is Answer.NOTHING:
        assert time.monotonic() < deadline
    return answer


def probe(address, incarnation="p", timeout_s=WAIT_S, serve=None):
    """One probe, from its beginning to its answer."""
    prober = TcpProbes()
    deadline = time.monotonic() + timeout_s
    try:
        prober.start(time.monotonic(), incarnation, address)
        while not (answers := prober.poll(time.monotonic())):
            assert time.monotonic() < deadline
            select.select([prober], [], [], 0.02)
            if serve is not None:
                serve.accept_waiting()
        assert prober.count_free() == 64 and answers[0][0] == incarnation
        return answers[0][1]
    finally:
        prober.close()


CHILD = """
import select, sys
from vllm_pd.peer.liveness.lifeline import Lifeline
line = Lifeline(sys.argv[1], "127.0.0.1")
print(line.address, flush=True)
while sys.argv[2] == "serving":
    select.select([line], [], [])
    line.accept_waiting()
sys.stdin.read()
"""


@pytest.fixture
def child():
    children = []

    def start(incarnation="p", kind="serving"):
        process = subprocess.Popen([sys.executable, "-c", CHILD, incarnation, kind], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, text=True)
        children.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in children:
        process.kill()
        process.communicate()


def test_a_process_that_lives_greets_and_one_that_was_killed_refuses(child):
    process, address = child()
    assert found(address) is Answer.GREETED
    assert found(address, "another") is Answer.OTHER
    process.kill()
    process.wait(60)
    assert found(address) is Answer.REFUSED


def test_b22_a_stopped_process_and_a_dead_thread_say_nothing(child):
    process, address = child()
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    for _ in range(3):
        assert probe(address) is Answer.NOTHING
    process.send_signal(signal.SIGCONT)
    assert found(address) is Answer.GREETED
    assert probe(child(kind="silent")[1]) is Answer.NOTHING


def test_a_child_that_was_forked_keeps_it_open():
    line = Lifeline("p", "127.0.0.1")
    go, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        os.read(go, 1)
        os._exit(0)
    os.close(go)
    line.close()
    assert probe(line.address) is Answer.NOTHING
    os.close(told)
    os.waitpid(pid, 0)
    assert found(line.address) is Answer.REFUSED


def test_b22_a_refusal_is_no_death_while_the_connection_stands():
    """A gateway may begin to refuse in the place of a peer that lives; it leaves the connections alone that stand."""
    fingerprint = Fingerprint(PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
    line, monitor = Lifeline("p", "127.0.0.1"), LivenessMonitor()
    peer = Member("p", Role.PREFILL, "", fingerprint, lifeline=line.address)
    probes = []

    def turns(connected, enough=lambda: False):
        dead, end = [], time.monotonic() + WAIT_S
        monitor.watch(time.monotonic(), {"p": peer}, {"p"})
        while not dead and not enough():
            assert time.monotonic() < end
            monitor.watch(time.monotonic(), {"p": peer}, {"p"})
            dead = monitor.poll_probes(time.monotonic(), lambda name: probes.append(name) or connected)
            if line.fileno() >= 0:
                line.accept_waiting()
            time.sleep(0.005)
        return dead

    assert turns(True, lambda: monitor.rules._peers["p"].reached) == []
    line.close()
    began = time.monotonic()
    assert turns(True, lambda: len(probes) == 4) == []
    assert time.monotonic() - began > 3 * GRACE_S, "asked again at a bounded rate"
    assert turns(False) == ["p"]
    monitor.close()


@pytest.mark.parametrize("words", [b"", b"SSH-2.0-x\r\n", greeting("p")[:-1], greeting("p") + b"x", b"\0" * 100_000])
def test_b81_what_is_no_greeting_is_no_answer(words):
    with socket.create_server(("127.0.0.1", 0)) as server:
        prober = TcpProbes()
        prober.start(time.monotonic(), "p", f"tcp://127.0.0.1:{server.getsockname()[1]}")
        guest, _ = server.accept()
        guest.setblocking(False)
        if words:
            guest.send(words)
        guest.close()
        answers = []
        deadline = time.monotonic() + WAIT_S
        while not answers and time.monotonic() < deadline:
            answers = prober.poll(time.monotonic())
        prober.close()
        assert answers == [("p", Answer.NOTHING)]


@pytest.mark.parametrize("address", ["tcp://nowhere.invalid:1", "tcp://1.2.3.4", "", "x://", "tcp://127.0.0.1:99999"])
def test_what_is_no_address_says_nothing(address):
    assert probe(address) is Answer.NOTHING


def test_b22_what_can_not_be_reached_says_nothing_and_nothing_waits_for_it():
    """Packets that get lost, as on the way to a host that is off: here in a full queue of connections."""
    with socket.socket() as server, contextlib.ExitStack() as stack:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            guest = stack.enter_context(socket.socket())
            guest.setblocking(False)
            guest.connect_ex(server.getsockname())
        times = []
        for _ in range(3):
            begun = time.monotonic()
            assert probe(f"tcp://127.0.0.1:{server.getsockname()[1]}") is Answer.NOTHING
            times.append(time.monotonic() - begun)
        assert 0.4 < min(times) < 2


def test_strangers_get_a_digest_and_are_bounded():
    line = Lifeline("secret name", "127.0.0.1")
    host, port = line.address.removeprefix("tcp://").split(":")
    guests = [socket.create_connection((host, int(port)), timeout=5) for _ in range(100)]
    for _ in range(2):
        line.accept_waiting()
    for guest in guests:
        said = guest.recv(1000)
        assert said == greeting("secret name") and len(said) == GREETING_BYTES and b"secret" not in said
        assert guest.recv(1) == b""
        guest.close()
    line.close()
    line.close()


# Engines.


@pytest.mark.parametrize("elsewhere", [False, True], ids=["seen by its process id", "by its lifeline only"])
def test_b21_prefill_engine_dies_and_the_prompt_falls_back_within_a_second(nursery, broker, elsewhere):
    """B21: wherever it runs; and the blocks are given back, for it can write no more."""
    decode = nursery.engine(Role.DECODE, broker)
    times = []
    for number in range(3):
        prefill = nursery.engine(Role.PREFILL, broker, work_s=600.0, elsewhere=elsewhere)
        decode.wait_for_peers(1)
        decode.ask("submit", [(f"r{number}", [number] * 40)])
        prefill.wait_until(lambda state: state["jobs"] == 1)
        if elsewhere:
            decode.wait_until(lambda state, name=prefill.member.incarnation: name in state["reached"])
        time.sleep(0.1 * number)
        begun = time.monotonic()
        prefill.kill()
        assert decode.wait_ended({f"r{number}"}) == {f"r{number}": "local"}
        times.append(time.monotonic() - begun)
        decode.at_rest()
    print(f"from death to fallback: median {statistics.median(times):.3f} s, longest {max(times):.3f} s")
    # The lease, of 60 s, is not waited for. The goal is 1 s; a machine that is busy with others may miss it at times.
    assert min(times) < 3.0 and max(times) < 30.0


def test_b23_decode_engine_dies_elsewhere_and_its_jobs_end(nursery, broker):
    """B23: also where the registry takes long to forget it."""
    patient = {"ttl_s": 600.0, "lease_s": 600.0}
    prefill = nursery.engine(Role.PREFILL, broker, patient, work_s=600.0)
    decode = nursery.engine(Role.DECODE, broker, patient, elsewhere=True)
    decode.wait_for_peers(1)
    decode.ask("submit", [("r", [1] * 40)])
    prefill.wait_until(lambda state: state["jobs"] == 1 and decode.member.incarnation in state["reached"])
    decode.kill()
    prefill.wait_until(lambda state: state["jobs"] == state["counts"]["peers"] == 0)
    prefill.at_rest()


def test_b22_prefill_engine_stopped_elsewhere_keeps_its_fence(nursery, broker):
    """B22: the prompt falls back with the lease; the blocks stay aside until P speaks again, or dies."""
    decode = nursery.engine(Role.DECODE, broker, {"lease_s": 4.0})
    prefill = nursery.engine(Role.PREFILL, broker, work_s=600.0, elsewhere=True)
    decode.wait_for_peers(1)
    decode.ask("submit", [("r", [1] * 40), ("s", [2] * 40)])
    prefill.wait_until(lambda state: state["jobs"] == 2)
    decode.wait_until(lambda state: prefill.member.incarnation in state["reached"])
    prefill.stop()
    assert decode.wait_ended({"r", "s"}) == {"r": "local", "s": "local"}
    time.sleep(1.5)
    assert decode.state()["counts"]["decode_fenced"] == 2
    prefill.send(signal.SIGCONT)
    decode.at_rest()
    prefill.at_rest()
    decode.wait_for_peers(1)
    decode.ask("submit", [("t", [3] * 40)])
    prefill.wait_until(lambda state: state["jobs"] == 1)
    prefill.stop()
    assert decode.wait_ended({"t"}) == {"t": "local"}
    prefill.kill()
    decode.at_rest()


def test_b22_a_decode_engine_that_lives_is_not_dead_because_its_lifeline_refuses(nursery, broker):
    """B22, B102: P has a connection of its own to it. While that stands the hold that D reads is kept, and the job goes
    on; also where D is stopped. When D is killed its connections end with it."""
    prefill = nursery.engine(Role.PREFILL, broker, {"ttl_s": 60.0}, work_s=600.0)
    decode = nursery.engine(Role.DECODE, broker, elsewhere=True)
    decode.wait_for_peers(1)
    tokens = list(range(40))
    decode.ask("read", "reads", prefill.ask("hold", tokens), tokens)
    decode.ask("submit", [("waits", [1] * 40)])
    prefill.wait_until(lambda state: state["claimed"] and state["jobs"] == 1
                       and decode.member.incarnation in state["reached"])
    decode.ask("refuse_probes")

    def nothing_ends(seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            state = prefill.state()
            assert state["claimed"] and state["counts"]["prefill_jobs"] == state["counts"]["peers"] == 1, state
            assert decode.member.incarnation in state["reached"], "it is watched"
            time.sleep(0.05)

    nothing_ends(2.0)
    assert found(decode.member.lifeline) is Answer.REFUSED
    decode.stop()
    nothing_ends(2.0)
    decode.kill()
    prefill.wait_until(lambda state: not state["claimed"] and state["jobs"] == state["counts"]["peers"] == 0)
    prefill.at_rest()


def test_b81_a_process_without_descriptors_turns_strangers_away():
    """B81: they may not keep the control thread awake."""
    line = Lifeline("p", "127.0.0.1")
    host, port = line.address.removeprefix("tcp://").split(":")
    guests = [socket.create_connection((host, int(port)), timeout=5) for _ in range(3)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, before[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in guests:
            line.accept_waiting()
        poller = select.poll()
        poller.register(line, select.POLLIN)
        assert poller.poll(0) == []
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert [guest.recv(100) for guest in guests] == [b""] * 3
    for guest in guests:
        guest.close()
    assert found(line.address, serve=line) is Answer.GREETED
    line.close()
