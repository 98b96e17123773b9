# SPDX-License-Identifier: Apache-2.0
"""Who leaves by the answers of a source, and what the router's options for sources accept."""
import pytest

from vllm_pd.errors import ConfigError
from vllm_pd.router.discovery import SourceView
from vllm_pd.router.options import DnsSource, RouterOptions, parse_dns, parse_dns_server, parse_worker_lines

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


def test_two_answers_in_a_row_without_a_worker_take_it_out():
    assert views([(0, {A, B}), (5, {A}), (10, {A, C}), (15, {B})], misses=2) == [{A, B}, {A, B}, {A, C}, {A, B, C}]


def test_answers_that_alternate_lose_nobody():
    """A resolver that answers with a part of the addresses each time."""
    assert views([(at_s, {A, B} if at_s % 2 else {B, C}) for at_s in range(20)], misses=2)[1:] == [{A, B, C}] * 19


def test_answers_without_anybody_take_effect_after_the_grace():
    empty = [(at_s, set()) for at_s in (5, 10, 34.9)]
    assert views([(0, {A}), *empty, (35, set())], misses=2, empty_grace_s=30) == [{A}] * 4 + [set()]
    assert views([(0, {A}), *empty, (34.95, {A}), (40, set()), (69, set()), (70, set())], misses=2,
                 empty_grace_s=30) == [{A}] * 7 + [set()], "the grace begins anew"
    assert views([(0, {A, B}), (5, set()), (10, set()), (15, {A})], misses=2, empty_grace_s=30)[-1] == {A}
    assert views([(0, set()), (50, set()), (100, {A})], misses=2, empty_grace_s=30) == [set(), set(), {A}]


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
