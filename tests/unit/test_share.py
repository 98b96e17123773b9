# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench share`: which files it reads, what it refuses, and its figures."""
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_pd import cli
from vllm_pd.bench.share import counting, records
from vllm_pd.bench.share.counting import counted, unit_count
from vllm_pd.bench.share.measure import measure, summary
from vllm_pd.bench.share.options import ShareBench
from vllm_pd.bench.share.records import TraceRecord, read_records
from vllm_pd.bench.share.requests import Skip, TraceRequest, requests_of
from vllm_pd.bench.simulation import oracle
from vllm_pd.bench.simulation.trace import TraceConfig, make
from vllm_pd.errors import ConfigError
from vllm_pd.protocol.hashes import pack_tokens
from vllm_pd.router.tokenizer import Prompt

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "benchmarks.md").read_text()
HELLO = {"role": "user", "content": "Hello"}
TEXTS = st.text(max_size=5)
VALUES = st.recursive(st.none() | st.integers() | TEXTS, lambda inner: st.lists(inner, max_size=3)
                      | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8)


@pytest.fixture
def trace(tmp_path):
    """Writes a trace: lines of text, or values."""
    def write(*lines) -> ShareBench:
        path = tmp_path / "trace.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return ShareBench(path, block_size=2, min_tokens=1)
    return write


def quietly(bench: ShareBench, **changes) -> dict:
    return measure(ShareBench(**{**vars(bench), **changes}), lambda line: None)


def test_the_figures_of_a_small_trace(trace):
    prompts = [[1, 2, 3, 4], [1, 2, 3, 9], [5, 5], [1, 2, 3, 4, 5, 6]]
    found = quietly(trace(*({"token_ids": prompt} for prompt in prompts)), cache_blocks=(1, 2, 100), engines=2)
    assert (found["requests"], found["prompt_tokens"], found["answers"], found["unit"]) == (4, 16, 0, "tokens")
    assert found["distinct_blocks"] == 5
    assert found["repeated_share"] == (3 + 4) / 16
    assert found["pruned"]["prefixes"][0] == {"tokens": 3, "own_tokens": 3, "uses": 3, "line": 1, "saved_share": 6 / 16}
    small, middle, large = found["caches"]
    assert [each["bound"] for each in found["caches"]] == [4 / 16, 6 / 16, 6 / 16]
    assert small["one_engine"]["d"] == 2 / 16, "the first block of the second prompt; [5, 5] evicts it"
    assert large["one_engine"] == {"d": 6 / 16, "p_adds": 0, "imbalance": 1}
    assert large["round_robin"]["d"] == 2 / 16 and large["round_robin"]["p_adds"] == 2 / 16 + 2 / 16
    assert large["prefix"]["d"] == large["fleet_bound"] == 6 / 16
    assert large["router_adds"] == 4 / 16


def test_answers_are_in_the_cache_of_d_but_not_in_that_of_p(trace):
    bench = trace({"token_ids": [1, 2], "answer": [3, 4, 5]}, {"token_ids": [1, 2, 3, 4, 6]},
                  {"token_ids": [1, 2, 3, 4]})
    found = quietly(bench, cache_blocks=(10,), engines=3)
    assert found["answers"] == 1 and found["repeated_share"] == (2 + 4) / 11
    [each] = found["caches"]
    assert each["one_engine"] == {"d": 8 / 11, "p_adds": 0, "imbalance": 1}
    assert each["round_robin"] == {"d": 0, "p_adds": (2 + 4) / 11, "imbalance": 6 / 5}, "each D is new to its prompt"
    assert each["bound"] == 8 / 11


def test_the_bound_is_that_of_the_simulation(trace):
    arrivals = make(TraceConfig(conversations=12, system_tokens=50, document_tokens=60))
    found = quietly(trace(*({"token_ids": each.prompt, "answer": each.answer} for each in arrivals)),
                    cache_blocks=(40, ), block_size=8, engines=3)
    assert found["caches"][0]["bound"] == pytest.approx(oracle.bound(arrivals, 8, 40))
    assert found["caches"][0]["fleet_bound"] == pytest.approx(oracle.bound(arrivals, 8, 120))
    assert found["distinct_blocks"] == oracle.footprint_blocks(arrivals, 8)


@pytest.mark.parametrize("value, prompts", [
    ({"prompt": "a b"}, ["a b"]),
    ({"prompt": ["a", "b"]}, ["a", "b"]),
    ({"prompt": [1, 2]}, [[1, 2]]),
    ({"prompt": [[1], [2]], "model": "m"}, [[1], [2]]),
    ({"token_ids": [1, 2], "prompt": "the same as text"}, [[1, 2]]),
    ({"request_body": '{"prompt": "a"}', "status": "200"}, ["a"]),
    ({"request_body": {"prompt": "a"}, "status": "-"}, ["a"]),
    ({"request_body": {"prompt": "a"}, "status": 399}, ["a"]),
])
def test_prompts(value, prompts):
    assert [request.prompt.prompt for request in requests_of(value)] == prompts


def test_a_chat_keeps_what_its_template_needs():
    [request] = requests_of({"messages": [HELLO], "answer": "Hi", "tools": [{"type": "function"}], "temperature": 1})
    assert request == TraceRequest(Prompt(messages=[HELLO], tools=[{"type": "function"}]), "Hi")


def test_each_turn_of_a_sharegpt_conversation_is_a_request():
    said = [("system", "S"), ("human", "q1"), ("gpt", "a1"), ("human", "q2"), ("gpt", "a2"), ("human", "q3")]
    found = requests_of({"id": "x", "conversations": [{"from": who, "value": text} for who, text in said]})
    assert [request.answer for request in found] == ["a1", "a2", None]
    assert [[message["content"] for message in request.prompt.messages] for request in found] == [
        ["S", "q1"], ["S", "q1", "a1", "q2"], ["S", "q1", "a1", "q2", "a2", "q3"]]
    assert [message["role"] for message in found[1].prompt.messages] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize("value, reason", [
    ({"conversations": []}, Skip.EMPTY),
    ({"conversations": [{"from": "gpt", "value": "a"}]}, Skip.EMPTY),
    ({"request_body": ""}, Skip.NO_BODY), ({"request_body": "-"}, Skip.NO_BODY), ({"request_body": None}, Skip.NO_BODY),
    ({"request_body": "{\"prompt\": \"cut o"}, Skip.NO_PROMPT), ({"request_body": '{"input": "x"}'}, Skip.NO_PROMPT),
    ({"request_body": "7"}, Skip.NO_PROMPT), ({"request_body": '{"messages": "x"}'}, Skip.NO_PROMPT),
    ({"request_body": '{"prompt": "a"}', "status": "503"}, Skip.FAILED),
    ({"request_body": '{"prompt": "a"}', "status": 400}, Skip.FAILED),
    ({"request_body": "[" * 100_000}, Skip.NO_PROMPT), ({"request_body": "\ud800"}, Skip.NO_PROMPT),
])
def test_what_a_trace_may_have_beside_prompts(value, reason):
    assert requests_of(value) is reason


def test_a_log_says_what_it_skipped(trace):
    found = quietly(trace({"request_body": "-"}, {"request_body": {"prompt": "a b"}}, {"request_body": {"prompt": ""}},
                          "", {"request_body": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}}))
    assert found["skipped"] == {"no_body": 1, "empty": 1, "no_text": 1} and found["requests"] == 1
    assert "1 empty, 1 no_body, 1 no_text" in summary(found)


@pytest.mark.parametrize("lines, where, value, cure", [
    (["# a text"], "line 1", "# a text", "give JSON lines"),
    ([{"prompt": "a"}, "", '{"prompt": "b"'], "line 3", '{"prompt": "b"', "give JSON lines"),
    ([{"prompt": "a"}, [1]], "line 2", "[1]", "write an object with prompt"),
    ([{"text": "a"}], "line 1", "['text']", "one of the keys prompt, messages"),
    ([{"prompt": 5}], "line 1", "5", "text or as a list of token ids"),
    ([{"prompt": [True]}], "line 1", "[True]", "text or as a list of token ids"),
    ([{"prompt": [[1], "a"]}], "line 1", "[[1], 'a']", "text or as a list of token ids"),
    ([{"prompt": [["a"]]}], "line 1", "[['a']]", "text or as a list of token ids"),
    ([{"token_ids": [1, -1]}], "line 1", "[1, -1]", "integers from 0"),
    ([{"messages": []}], "line 1", "[]", "as a list of"),
    ([{"messages": [{"content": "a"}]}], "line 1", "[{'content': 'a'}]", "as a list of"),
    ([{"prompt": "a", "answer": [1]}], "line 1", "[1]", "as the prompt is"),
    ([{"prompt": ["a", "b"], "answer": "c"}], "line 1", "c", "beside one prompt"),
    ([{"conversations": "a"}], "line 1", "a", "\"conversations\" as a list"),
    ([{"conversations": [{"from": "bot", "value": "a"}]}], "line 1", "{'from': 'bot', 'value': 'a'}", "one of human"),
    (["[", '{"prompt": "a"},', "{'prompt': 1}]"], "line 3", "{'prompt': 1}]", "give JSON lines"),
    (["[", '{"prompt": "a"}', '{"prompt": "b"}]'], "line 3", '{"prompt": "b"}]', "expected , or ]"),
    (['[{"prompt": "a"}]', "more"], "line 2", "more", "nothing may come after the list"),
    (['[{"prompt": "a"},'], "line 2", "", "give JSON lines"),
    (["\x7fELF"], "line 1", "ELF", "give JSON lines"),
    (["[" * 100_000], "line 1", "[[[[", "nested too deeply"),
    (["{\"a\":" * 100_000], "line 1", "{\"a\":", "give JSON lines"),
])
def test_b80_what_is_no_trace_is_named(trace, lines, where, value, cure):
    with pytest.raises(ConfigError) as caught:
        quietly(trace(*lines))
    assert caught.value.key.endswith(f"trace.jsonl, {where}")
    assert str(caught.value.value).strip().startswith(value) or value in caught.value.value
    assert cure in caught.value.cure and len(str(caught.value.value)) < 100


def test_b80_files_without_a_prompt(tmp_path, trace):
    for text, cure in (("", "it is empty"), ("[]", "it is empty"), ('{"request_body": ""}', "1 no_body")):
        with pytest.raises(ConfigError, match=cure) as caught:
            quietly(ShareBench(trace(text).file))
        assert caught.value.key == "FILE"
    with pytest.raises(ConfigError, match="No such file"):
        quietly(ShareBench(tmp_path / "nowhere"))
    (tmp_path / "bad.json").write_bytes(b'[{"prompt": "a"}, {"prompt": "\xff"}]')
    with pytest.raises(ConfigError, match="line 1.*UTF-8"):
        quietly(ShareBench(tmp_path / "bad.json"))
    (tmp_path / "bad.json").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ConfigError, match="line 1.*utf-8"):
        quietly(ShareBench(tmp_path / "bad.json"))


@pytest.mark.parametrize("changes, key", [
    ({"block_size": 0}, "--block-size"), ({"engines": 0}, "--engines"), ({"min_count": 0}, "--min-count"),
    ({"min_tokens": 0}, "--min-tokens"), ({"max_tokens": 0}, "--max-tokens"), ({"prefixes": -1}, "--prefixes"),
    ({"cache_blocks": (4, 0)}, "--cache-blocks"),
    ({"unit": "letters"}, "--unit"), ({"unit": "words", "tokenizer": "m"}, "--unit"),
    ({"max_tokens": 1}, "--max-tokens"),
])
def test_b80_impossible_settings(trace, changes, key):
    with pytest.raises(ConfigError) as caught:
        quietly(trace({"prompt": "a b"}), **changes)
    assert caught.value.key == key


def test_b80_a_tokenizer_that_is_none(trace, tmp_path, monkeypatch):
    def fail(name: str) -> None:
        raise OSError(f"{name} has no tokenizer.json")

    monkeypatch.setattr(counting, "Tokenizer", fail)
    with pytest.raises(ConfigError, match="--tokenizer=.*no tokenizer.json: give the folder of a model"):
        quietly(trace({"prompt": "a"}), tokenizer=str(tmp_path))


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUES, max_size=4), st.integers(1, 9), st.sampled_from([None, 1]))
def test_a_list_is_read_in_pieces(tmp_path_factory, values, chunk, indent):
    path = tmp_path_factory.mktemp("lists") / "list.json"
    text = "\n" + json.dumps(values, indent=indent)
    path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "CHUNK_CHARS", max(chunk, 2))
        found = list(read_records(path))
    assert [record.value for record in found] == values
    assert [record.line for record in found] == sorted(record.line for record in found)
    for record in found:
        if isinstance(record.value, str):
            assert json.dumps(record.value) in text.splitlines()[record.line - 1]


def test_a_value_that_is_too_long_is_refused(trace, monkeypatch):
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 50)
    monkeypatch.setattr(records, "CHUNK_CHARS", 20)
    for line in ('{"prompt": "' + "a" * 50 + '"}', '[{"prompt": "' + "a" * 500 + '"}]'):
        with pytest.raises(ConfigError, match="line 1"):
            quietly(trace(line))


def test_a_byte_order_mark_is_no_part_of_a_trace(tmp_path):
    for text in ('[{"prompt": "a"}]', '{"prompt": "a"}'):
        (tmp_path / "t").write_text(text, encoding="utf-8-sig")
        assert list(read_records(tmp_path / "t")) == [TraceRecord(1, {"prompt": "a"})]


def test_reading_ends_at_the_limit(trace):
    bench = trace(*({"prompt": "a b c d"} for _ in range(5)))
    found = quietly(bench, max_tokens=11)
    assert (found["requests"], found["prompt_tokens"], found["stopped_line"]) == (2, 8, 3)
    assert "read up to line 3" in summary(found)
    assert quietly(bench, max_tokens=20)["stopped_line"] is None


def test_answers_count_for_the_limit(trace):
    bench = trace(*({"prompt": [1, 2, 3], "answer": [4, 5, 6]} for _ in range(5)))
    found = quietly(bench, max_tokens=14)
    assert (found["requests"], found["prompt_tokens"], found["stopped_line"]) == (2, 6, 3), "all but an answer's last"
    assert quietly(bench, max_tokens=25)["stopped_line"] is None
    with pytest.raises(ConfigError, match="--max-tokens=4 .*in line 1, has 5 tokens with its answer"):
        quietly(bench, max_tokens=4)


def test_progress_is_shown(trace, monkeypatch):
    monkeypatch.setattr("vllm_pd.bench.share.measure.SHOW_EVERY_TOKENS", 4)
    shown = []
    measure(trace(*({"prompt": "a b"} for _ in range(6))), shown.append)
    assert [line for line in shown if line.startswith("line")] == [
        "line 2: 1 prompts, 2 tokens", "line 4: 3 prompts, 6 tokens", "line 6: 5 prompts, 10 tokens"]
    assert any(line.startswith("replaying 6 prompts") for line in shown)


def test_words_and_bytes():
    words, in_bytes = unit_count("words"), unit_count("bytes")
    text = Prompt(prompt="a  b\na b ")
    assert len(words(text)) == 4 and words(text)[:2] == words(Prompt(prompt="a  b"))
    assert words(text)[1] != words(text)[3] == words(Prompt(prompt=" b"))[0]
    assert list(in_bytes(Prompt(prompt="aé"))) == [97, 0xC3, 0xA9]
    chat = Prompt(messages=[HELLO, {"role": "assistant", "content": "Hi"}])
    assert bytes(in_bytes(chat)) == b"user: Hello\nassistant: Hi\n"
    tools = Prompt(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}], tools=[{"a": 1}])
    assert bytes(in_bytes(tools)) == b'[{"a":1}]\nuser: x\n'
    assert words(Prompt(prompt=" " * 400_000)) == []


def test_what_an_engine_has_computed_when_an_answer_ends():
    count = unit_count("bytes")
    text = counted(TraceRequest(Prompt(prompt="ab"), "cd"), count)
    assert text == (pack_tokens(list(b"ab")), pack_tokens(list(b"abc")))
    ids = counted(TraceRequest(Prompt(prompt=[1, 2]), [3, 4]), count)
    assert ids == (pack_tokens([1, 2]), pack_tokens([1, 2, 3]))
    chat = counted(TraceRequest(Prompt(messages=[HELLO]), "Hi"), count)
    assert chat == (pack_tokens(list(b"user: Hello\n")), pack_tokens(list(b"user: Hello\nassistant: Hi")))
    joined = counted(TraceRequest(Prompt(prompt="one tw"), "o three"), unit_count("words"))
    assert joined.computed == joined.prompt, "the last word of the prompt has become another one"
    assert counted(TraceRequest(Prompt(prompt="a")), lambda prompt: None) is None


def test_what_the_tokenizer_refuses_is_skipped_and_said(trace, monkeypatch):
    class Picky:
        def __init__(self, name: str) -> None:
            assert name == "model"

        def tokens(self, prompt: Prompt) -> list[int]:
            if prompt.messages[0]["role"] == "system":
                raise ValueError("roles must alternate")
            return list(prompt.messages[0]["content"].encode())

    monkeypatch.setattr(counting, "Tokenizer", Picky)
    refused = {"messages": [{"role": "system", "content": "S"}]}
    shown = []
    found = measure(ShareBench(trace(refused, {"messages": [HELLO]}, refused).file, tokenizer="model"), shown.append)
    assert found["skipped"] == {"refused": 2} and (found["prompt_tokens"], found["unit"]) == (5, "tokens")
    assert [line for line in shown if "roles" in line] == ["line 1: skipped, ValueError: roles must alternate"]


def test_the_documented_figures_are_those_of_the_record():
    """Also that what this computes is close to the simulation with real allocators and the real policy."""
    found = json.loads((ROOT / "docs/results/share.json").read_text())["caches"]
    runs = [run for run in json.loads((ROOT / "docs/results/router_hits.json").read_text())["runs"] if run["seed"] == 0]
    pairs = list(zip(found, [run["results"] for run in runs], strict=True))
    assert [each["fleet_bound"] for each in found] == pytest.approx([run["bound"] for run in runs])
    for title, ours, theirs in (("round robin: this command / simulation", "round_robin", "round-robin"),
                                ("by prefix: this command / simulation, policy `kv`", "prefix", "kv")):
        shares = [(100 * each[ours]["d"], 100 * results[theirs]["hit_share"]) for each, results in pairs]
        assert all(abs(mine - simulated) < 1 for mine, simulated in shares)
        cells = " | ".join(f"{mine:.1f} / {simulated:.1f}" for mine, simulated in shares)
        assert f"| {title} | {cells} |" in DOCUMENT
    adds = " | ".join(f"{100 * each['round_robin']['p_adds']:.1f} / {100 * each['prefix']['p_adds']:.1f}"
                      for each in found)
    assert f"| P adds, round robin / by prefix | {adds} |" in DOCUMENT
    bounds = " | ".join(f"{100 * each['fleet_bound']:.1f}" for each in found)
    assert f"| best of any cache of all four | {bounds} |" in DOCUMENT


def test_the_error_names_a_section_that_is_there():
    assert "## How repetitive is my traffic?" in DOCUMENT and "How repetitive is my traffic?" in records.FORMATS


def test_the_command_writes_json_and_then_its_tables(trace, tmp_path):
    bench, output = trace(*({"prompt": "the same words again"} for _ in range(4))), tmp_path / "out.json"
    result = CliRunner().invoke(cli.app, ["bench", "share", str(bench.file), "--block-size", "2", "--min-tokens", "2",
                                          "--cache-blocks", "1", "--cache-blocks", "8", "--output", str(output)])
    assert result.exit_code == 0, result.output
    found = json.loads(output.read_text())
    assert [each["cache_blocks"] for each in found["caches"]] == [1, 8] and found["repeated_share"] == 0.75
    assert "75.0% of the words repeat" in result.output
    last = [line for line in result.output.splitlines() if line.strip()][-1]
    assert last.split()[-2:] == ["75.0%", "75.0%"] and "best of any cache of 2 engines" in last


def test_b80_numbers_of_blocks_are_numbers(trace, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vllm-pd", "bench", "share", str(trace("").file), "--cache-blocks", "many"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err.startswith("error: --cache-blocks='many' can't be used: write numbers of blocks")
