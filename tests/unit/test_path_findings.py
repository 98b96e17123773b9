# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd doctor --from`: which paths there are between two engines, and what is said of each that is broken."""
import pytest

from vllm_pd.broker.members import Access
from vllm_pd.errors import ConfigError
from vllm_pd.ops import paths
from vllm_pd.ops.doctor import examine_paths
from vllm_pd.ops.orders import choose_engine
from vllm_pd.protocol.messages import AddressesTried, Fingerprint, Member, Role, Trial

FINGERPRINT = Fingerprint(3, "m", "float32", "auto", 16, 30, 3, 64, "ipex")
KV = {"p": "tcp://10.0.0.1:30000", "d": "tcp://10.0.0.2:30000", "q": "tcp://10.0.0.3:30000"}


def member(name: str, role: Role, number: int) -> Member:
    return Member(name, role, f"tcp://10.0.0.{number}:5702", FINGERPRINT, lifeline=f"tcp://10.0.0.{number}:5703")


P, D, Q = member("p", Role.PREFILL, 1), member("d", Role.DECODE, 2), member("q", Role.PREFILL, 3)


class Engines:
    """Stands for the engines of a fleet: all answer, unless they are `silent`, and all paths are open but those in
    `trials`, (who tries, address)."""

    def __init__(self) -> None:
        self.trials: dict[tuple[str, str], Trial] = {}
        self.silent: set[str] = set()
        self.faults: dict[str, dict[str, str]] = {}
        self.tried: list[tuple[str, str]] = []

    def ask(self, addresses: dict[str, tuple[str, ...]], timeout_s: float) -> dict[str, AddressesTried]:
        self.tried += [(name, one) for name, ones in addresses.items() for one in ones]
        return {name: AddressesTried({one: self.trials.get((name, one), Trial.OPEN) for one in ones}, (KV[name], ),
                                     self.faults.get(name, {}))
                for name, ones in addresses.items() if name not in self.silent}

    def lines(self) -> list[str]:
        """What is said of D and the others."""
        return [" ".join(" ".join(finding.lines).split()) for finding in paths.judge_paths(D, [P, Q], self.ask)]


@pytest.fixture
def engines():
    return Engines()


def test_all_paths_between_an_engine_and_its_peers_are_tried_both_ways(engines):
    first, second = engines.lines()
    assert first.startswith("ok") and "1 of control, 2 of lifeline, 2 of kv" in first and second.startswith("ok")
    assert set(engines.tried) == {
        *(("d", f"tcp://10.0.0.{number}:{port}") for number in (1, 3) for port in (5703, 30000)),
        *((p, f"tcp://10.0.0.2:{port}") for p in "pq" for port in (5702, 5703, 30000))}


@pytest.mark.parametrize("kind, address", [("control", D.address), ("lifeline", D.lifeline), ("kv", KV["d"])])
@pytest.mark.parametrize("trial, words", [
    (Trial.SILENT, "no answer -> a firewall drops"), (Trial.REFUSED, "is refused -> nothing listens there"),
    (Trial.NO_ROUTE, "else give 10.0.0.1 a route to 10.0.0.2"), (Trial.FAILED, "can't be tried")])
def test_b107_one_broken_path_is_named_with_its_cure(engines, kind, address, trial, words):
    engines.trials["p", address] = trial
    bad, good = sorted(engines.lines())
    assert bad.startswith(f"BAD {kind} from p (kv_producer at {P.address}) to {address} of d (kv_consumer")
    assert words in bad and good.startswith("ok") and "q (kv_producer" in good
    if trial is not Trial.FAILED:
        assert f"let 10.0.0.1 connect to port {address.rpartition(':')[2]} of 10.0.0.2" in bad


def test_who_can_not_be_asked_is_named_and_the_rest_is_tried(engines):
    engines.silent = {"p"}
    lines = sorted(engines.lines())
    assert "from here to p (kv_producer" in lines[0] and lines[1].startswith("ok") and "and q" in lines[1]
    assert len(lines) == 2, "nothing is said to be well that was not tried"
    assert ("d", P.lifeline) in engines.tried and ("d", KV["p"]) not in engines.tried


def test_who_stops_to_answer_is_not_well(engines):
    first = [True]

    def ask(addresses, timeout_s, known=engines.ask):
        answers = known(addresses, timeout_s)
        if not first:
            del answers["p"]
        first.clear()
        return answers

    engines.ask = ask
    assert sum("was not tried" in line for line in engines.lines()) == 3


def test_what_an_engine_knows_by_itself_is_said(engines):
    engines.faults["p"] = {"d": "it does not answer", "another": "x"}
    bad, good = sorted(engines.lines())
    assert "says of d" in bad and bad.startswith("BAD") and "it does not answer" in bad and good.startswith("ok")


def test_many_addresses_are_tried_in_several_orders(engines, monkeypatch):
    monkeypatch.setattr(paths.m, "MAX_TRIED", 2)
    assert all(line.startswith("ok") for line in engines.lines()) and len(engines.tried) == 10


def test_addresses_of_the_loopback_are_for_the_own_machine():
    near = Member("n", Role.PREFILL, "tcp://127.0.0.1:5702", FINGERPRINT)
    listens = ["tcp://127.0.0.1:30000", "tcp://10.0.0.2:30000"]
    assert [path.address for path in paths.paths(P, Q, listens) if path.kind == "kv"] == listens[1:]
    assert [path.address for path in paths.paths(near, Q, listens) if path.kind == "kv"] == listens


@pytest.mark.parametrize("address", ["tcp://[::1", "tcp://10.0.0.1:x", "{host}", ""])
def test_b82_whatever_an_engine_says_is_its_address(engines, address):
    path = paths.Path("control", P, D, address)
    assert f"to {address} of d" in path.judge(Trial.SILENT).fact


def test_engines_that_do_not_work_together_are_no_peers():
    both = [member(name, Role.BOTH, 1) for name in "bc"]
    assert paths.meet(P, D) and paths.meet(D, P) and paths.meet(*both)
    assert not paths.meet(P, Q) and not paths.meet(both[0], both[0])


def test_b80_an_engine_that_is_not_registered_is_refused():
    for engine in ("", "x"):
        with pytest.raises(ConfigError, match="write one of p "):
            choose_engine(engine, [P, D])
    assert choose_engine("p", [P, D]) is choose_engine(P.address, [P, D]) is P
    with pytest.raises(ConfigError, match="--from='d' can't be used: give --broker"):
        examine_paths("d", None, Access())
