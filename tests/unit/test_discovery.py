# SPDX-License-Identifier: Apache-2.0
"""Who leaves by the answers of a source, and what the router's options for sources accept."""
import random

import pytest

from vllm_pd.errors import ConfigError
from vllm_pd.router.discovery import ABSENT_S, MISSES, PARTIAL_S, SourceView, _url_of_address
from vllm_pd.router.options import (
    MAX_SHOWN_CHARS,
    DnsSource,
    RouterOptions,
    parse_dns,
    parse_dns_server,
    parse_worker,
    parse_worker_lines,
)

A, B, C = "http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.3:8000"


def views(answers: list[tuple[float, set[str]]], **settings) -> list[set[str]]:
    """The workers after each answer at a time."""
    view, after = SourceView(**settings), []
    for at_s, urls in answers:
        view.answered(urls, at_s)
        after.append(set(view.urls))
    return after


def test_one_answer_without_a_worker_takes_nobody_out():
    assert views([(0, {A, B}), (5, {A}), (10, {A, B}), (15, {A})], misses=2) == [{A, B}] * 4


def test_answers_in_a_row_without_a_worker_take_it_out():
    assert views([(0, {A, B}), (5, {A}), (10, {A, C}), (15, {B})], misses=2) == [{A, B}, {A, B}, {A, C}, {A, B, C}]
    times = [(at_s, {A}) for at_s in (5, 10, 15, 34.9, 35)]
    assert views([(0, {A, B}), *times], misses=2, absent_s=30) == [{A, B}] * 5 + [{A}]
    assert views([(0, {A, B}), (40, {A}), (80, {A}), (120, {A})], misses=3, absent_s=30)[-2:] == [{A, B}, {A}]


def test_answers_without_anybody_take_effect_after_the_same_time():
    empty = [(at_s, set()) for at_s in (5, 10, 34.9)]
    assert views([(0, {A}), *empty, (35, set())], misses=2, absent_s=30) == [{A}] * 4 + [set()]
    assert views([(0, {A}), *empty, (34.95, {A}), (40, set()), (69, set()), (70, set())], misses=2,
                 absent_s=30) == [{A}] * 7 + [set()], "the time begins anew"
    assert views([(0, set()), (50, set()), (100, {A})], misses=2, absent_s=30) == [set(), set(), {A}]


ENGINES = [f"http://10.0.0.{number}:8000" for number in range(1, 10)]
HOUR = 3600


def losses(answers, lives=lambda url: True) -> list[tuple[float, str]]:
    """When a worker left, by these answers of DNS."""
    view, lost = SourceView(MISSES, ABSENT_S, lives), []
    for at_s, urls in answers:
        before = view.urls
        view.answered(urls, at_s)
        lost += [(at_s, url) for url in before - view.urls]
    return lost


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("named, of", [(3, 6), (8, 9), (1, 3)])
def test_a_resolver_that_names_some_at_random_takes_no_living_engine_out(seed, named, of):
    """Consul names three where a question has no EDNS, and others eight at most."""
    draw = random.Random(seed)
    assert not losses((at_s, set(draw.sample(ENGINES[:of], named))) for at_s in range(0, 2 * HOUR, 5))


def test_parts_that_are_cached_for_a_minute_take_each_living_engine_out_once_at_most():
    """The first part lacks one for longer than ABSENT_S. When it is named again, it is clear why."""
    draw = random.Random(1)
    parts = ((at_s, set(draw.sample(ENGINES, 8))) for at_s in range(0, 2 * HOUR, 60))
    answers = ((at_s + step, part) for at_s, part in parts for step in range(0, 60, 5))
    lost = losses(answers)
    assert len(lost) <= 2 and all(at_s < 300 for at_s, _ in lost)


def test_a_dead_engine_leaves_though_answers_are_partial():
    draw, alive, dead = random.Random(1), set(ENGINES[:6]), ENGINES[0]

    def answers():
        for at_s in range(0, HOUR, 5):
            if at_s == 600:
                alive.remove(dead)
            yield at_s, set(draw.sample(ENGINES[:6], 3)) & alive

    [(at_s, url)] = losses(answers(), alive.__contains__)
    assert url == dead and 600 <= at_s < 700


def test_whole_answers_take_out_an_engine_that_lives():
    """As one whose record is removed, or that is not ready for Kubernetes."""
    assert losses((at_s, {A, B} if at_s < 100 else {A}) for at_s in range(0, 300, 5)) == [(130, B)]
    flaps = [(at_s, {A, B} if at_s != 50 and at_s < 100 else {A}) for at_s in range(0, HOUR, 5)]
    assert losses(flaps) == [(55 + PARTIAL_S, B)], "after one answer that lacked it"
    empty = [(at_s, set() if at_s == 50 else {A, B} if at_s < 100 else {A}) for at_s in range(0, HOUR, 5)]
    assert losses(empty) == [(130, B)], "an answer without anybody is no part"


def test_one_answer_is_enough_without_a_grace():
    assert views([(0, {A, B}), (1, {B})]) == [{A, B}, {B}]


@pytest.mark.parametrize("text, source", [
    ("engines:8000", ("engines", 8000, "http")),
    ("Engines.Default.svc.cluster.local.:80", ("engines.default.svc.cluster.local.", 80, "http")),
    ("srv:_http._tcp.engines.default", ("_http._tcp.engines.default", None, "http")),
    ("srv:_pd-8._tcp.e.", ("_pd-8._tcp.e.", None, "http")),
    ("srv:_HTTPS._TCP.e", ("_https._tcp.e", None, "https"))])
def test_names_to_look_up(text, source):
    assert parse_dns("key", text) == DnsSource(text, *source)


@pytest.mark.parametrize("text, words", [
    ("engines", "it needs a port"), ("", "it needs a port"), ("engines:", "it needs a port"), ("e:0", "1 to 65535"),
    ("e:65536", "1 to 65535"), ("e:http", "it needs a port"), ("http://e:80", "write it like"),
    (":80", "write it like"),
    ("10.0.0.1:80", "is an address: write --worker http://10.0.0.1:80"), ("e e:80", "write it like"),
    ("[fd00::5]:80", "write it like"), ("fd00::5:80", "write --worker"), ("-e:80", "write it like"),
    ("e..f:80", "write it like"), ("_e:80", "write it like"), (f"{'a' * 64}:80", "write it like"),
    (".".join(["a" * 60] * 5) + ":80", "write it like"), ("ä.test:80", "write it like"),
    ("srv:engines", "write it like"), ("srv:_http._udp.e", "write it like"), ("srv:_http._tcp.", "write it like"),
    ("srv:_http._tcp.e:80", "write it like"), ("srv:_http._tcp.10.0.0.1", "write it like")])
def test_what_is_no_name_is_refused(text, words):
    with pytest.raises(ConfigError, match="^--worker-dns=") as refused:
        RouterOptions(worker_dns=(text, )).checked()
    assert words in str(refused.value)


@pytest.mark.parametrize("text, where", [("10.96.0.10", ("10.96.0.10", 53)), ("127.0.0.1:8600", ("127.0.0.1", 8600)),
                                         ("fd00::a", ("fd00::a", 53)), ("[fd00::a]", ("fd00::a", 53)),
                                         ("[fd00::a]:5353", ("fd00::a", 5353))])
def test_name_servers(text, where):
    assert parse_dns_server("key", text) == where


@pytest.mark.parametrize("text", [
    "", "consul", "consul:53", "10.0.0.1:0", "10.0.0.1:70000", "[10.0.0.1]:53", "[x]", ":53"])
def test_what_is_no_name_server_is_refused(text):
    with pytest.raises(ConfigError, match="^--dns-server=.*write an address"):
        RouterOptions(worker_dns=("e:80", ), dns_server=text).checked()


@pytest.mark.parametrize("options, words", [
    ({"worker_dns": ("e:80", "e:80")}, "given twice"),
    ({"worker_dns": tuple(f"e{number}:80" for number in range(17))}, "write 16 names at most"),
    ({"dns_server": "10.0.0.1"}, "add --worker-dns"),
    ({"worker_dns": ("srv:_http._tcp.e", ), "broker": "tcp://127.0.0.1:5700"}, "leave out --broker or this name")])
def test_sources_that_don_t_go_together(options, words):
    with pytest.raises(ConfigError, match=words):
        RouterOptions(**options).checked()
    RouterOptions(worker_dns=("e:80", ), broker="tcp://127.0.0.1:5700", workers_file="/f", workers=(A, )).checked()


def test_lines_of_a_file():
    text = f"# engines\n\n  {A}/ # the first\r\n{B}\n{A}\n#{C}\nhttps://h/path#x"
    with pytest.raises(ConfigError, match="^file, line 7='https://h/path#x' can't be used: write it like"):
        parse_worker_lines("file", text)
    assert parse_worker_lines("file", text.replace("#x", " #x")) == (A, B, "https://h:443/path")
    assert parse_worker_lines("file", "") == ()


@pytest.mark.parametrize("url, name", [
    ("http://[fd00:0::1]", "http://[fd00::1]:80"), (" HTTP://H:8000/ ", "http://h:8000"),
    ("http://[::ffff:10.0.0.1]:80", "http://10.0.0.1:80"), ("https://[FD00:0:0::a]/x/", "https://[fd00::a]:443/x")])
def test_a_worker_has_one_name(url, name):
    assert parse_worker("key", url) == name == parse_worker("key", name)


@pytest.mark.parametrize("url, words", [
    ("http://h:80/x y", "a blank or a control"), ("http://a b:80", "a blank or a control"),
    ("http://h:80/x\ty", "a blank or a control"), ("http://h\n:80", "a blank or a control"),
    ("http://h:80/\x1b[2J", "a blank or a control"), ("http://h\u00a0:80", "a blank or a control"),
    ("http://h:0", "write it like"), ("http://[fd00::x]:80", "write it like"), ("http://fd00::1:80", "in brackets"),
    ("x" * 1_000_000, "longer than 2048 characters: write it like"), ("http://" + "h" * 2000 + ":x", "write it like"),
    ("http://h:" + "9" * 2000, "write it like"), ("y" * 2000 + "://a:b:c", "write it like"),
    ("http://a:b:" + "c" * 2000, "in brackets")])
def test_what_is_no_url_of_a_worker_is_refused_briefly(url, words):
    with pytest.raises(ConfigError, match="^key=") as refused:
        parse_worker("key", url)
    assert words in str(refused.value) and len(str(refused.value)) < 3 * MAX_SHOWN_CHARS + 200


@pytest.mark.parametrize("address, url", [
    ("10.0.0.1", "http://10.0.0.1:80"), ("fd00:0::1", "http://[fd00::1]:80"), ("::ffff:10.0.0.1", "http://10.0.0.1:80"),
    ("64:ff9b::10.0.0.1", "http://[64:ff9b::a00:1]:80"), ("0.0.0.0", None), ("0.1.2.3", None), ("240.0.0.1", None),
    ("255.255.255.255", None), ("224.0.0.1", None), ("169.254.169.254", None), ("fe80::1", None), ("::", None),
    ("ff02::1", None), ("::ffff:169.254.169.254", None), ("64:ff9b::169.254.169.254", None),
    ("64:ff9b::0.0.0.0", None)])
def test_addresses_that_an_engine_can_have(address, url):
    assert _url_of_address(address, 80, "http") == url
