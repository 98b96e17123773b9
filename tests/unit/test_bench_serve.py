# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench serve`: its loads, figures, comparisons and plans, without a server."""

import contextlib
import itertools
import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from vllm_pd.bench.load import GenerationAnswer
from vllm_pd.bench.serve import choices, fleets, pictures, report, sharegpt
from vllm_pd.bench.serve.arms import Arm, ArmKind, FleetSettings, parse_arms, places, plan_arm
from vllm_pd.bench.serve.comparison import AnswerBook, compared, goodput, over_rounds, ratio, spread
from vllm_pd.bench.serve.drive import EntryPoint, ServedLoad, ServedRequest
from vllm_pd.bench.serve.figures import SloLimits, point_figures, timeline
from vllm_pd.bench.serve.fleets import entry_points
from vllm_pd.bench.serve.settings import LoadShape, ServeBench, ServeLoad, TracedPrompt, parse_load, parse_numbers
from vllm_pd.bench.serve.traffic import LoadPoint, PromptKind, points, trace_prompts, warm_up
from vllm_pd.bench.serve.words import prose, tokens_of
from vllm_pd.errors import ConfigError
from vllm_pd.ops.launch.plan import gpu_places
from vllm_pd.ops.launch.state import UpState
from vllm_pd.protocol.messages import Role

LIMITS = SloLimits(ttft_ms=500, itl_ms=200)
POINT = LoadPoint(2, "streams", 10.0, list)
TRACE = tuple(TracedPrompt(str(number), f"prompt {number}", 5) for number in range(400))


def requests(shape: LoadShape, turn: int = 0, with_long: bool = True, most: int = 5) -> list[list[tuple]]:
    """By point: (chain's begin, name, kind, prompt) of the first requests of each chain."""
    return [[(chain.at_s, one.name, one.kind, one.prompt) for chain in point.chains()
             for one in itertools.islice(chain.requests, most)] for point in points(shape, turn, with_long)]


def answer(*arrivals_s: float, text: str = "a b", token_ids: tuple[int, ...] = (1, 2)) -> GenerationAnswer:
    return GenerationAnswer(text, token_ids, "length", (10, len(arrivals_s)), arrivals_s, arrivals_s[-1])


def served(*answers: GenerationAnswer | None, kind: PromptKind = PromptKind.SHORT, took_s: float = 4.0) -> ServedLoad:
    return ServedLoad(tuple(ServedRequest(f"request {number}", kind, float(number), one, "" if one else "it broke")
                            for number, one in enumerate(answers)), took_s)


class TestLoads:

    @pytest.mark.parametrize("load", ServeLoad)
    def test_equal_seeds_and_rounds_give_equal_loads_and_others_share_no_prompt(self, load):
        shape = LoadShape(load=load, conversations=4, duration_s=20, trace=TRACE)
        assert requests(shape) == requests(shape)
        prompts = {one[3] for point in requests(shape) for one in point}
        others = [requests(shape, turn=1), requests(shape, turn=2), requests(replace(shape, seed=1))]
        for other in others[:2] if load is ServeLoad.TRACE else others:  # a trace has the prompts that it has
            sent = {one[3] for point in other for one in point}
            assert sent and not prompts & sent
            prompts |= sent

    @pytest.mark.parametrize("load", [ServeLoad.RATE, ServeLoad.TRACE])
    def test_points_share_no_prompt(self, load):
        found = requests(LoadShape(load=load, duration_s=30, trace=TRACE))
        prompts = [one[3] for point in found for one in point]
        assert len(found) == 4 and all(found) and len(prompts) == len(set(prompts))

    def test_a_trace_is_sent_in_its_order_and_once(self):
        shape = LoadShape(load=ServeLoad.TRACE, duration_s=30, rates=(1.0, 3.0), trace=TRACE)
        sent = [one[3] for turn in range(2) for point in requests(shape, turn) for one in point]
        assert sent == [one.prompt for one in TRACE[:len(sent)]] and len(sent) == trace_prompts(shape, 2) > 200

    def test_long_prompts_arrive_as_often_as_is_said(self):
        shape = LoadShape(duration_s=7000, long_tokens=20)
        at_s = [chain.at_s for chain in points(shape, 0)[0].chains() if chain.at_s >= 1]
        assert at_s == sorted(at_s) and at_s[-1] < 7000
        assert len(at_s) == pytest.approx(1000, rel=0.15)

    def test_without_long_prompts_the_chats_stay_as_they_are(self):
        short = [one for one in requests(LoadShape())[0] if one[2] is PromptKind.SHORT]
        assert requests(LoadShape(), with_long=False)[0] == short and 0 < len(short) < len(requests(LoadShape())[0])

    @pytest.mark.parametrize("load", [ServeLoad.CONCURRENCY, ServeLoad.RATE])
    def test_without_long_prompts_a_load_of_nothing_else_has_an_end(self, load):
        shape = LoadShape(load=load, long_share=1, long_tokens=1, streams=(2, ), rates=(1.0, ))
        assert requests(shape, with_long=False) == [[]] and requests(shape) != [[]]

    def test_a_stream_has_no_end_and_a_rate_has_its_length(self):
        stream = points(LoadShape(streams=(3, )), 0)[0]
        assert len([chain for chain in stream.chains() if len(list(itertools.islice(chain.requests, 50))) == 50]) == 3
        open_loop = points(LoadShape(load=ServeLoad.RATE, rates=(5.0, ), duration_s=200), 0)[0]
        assert len(open_loop.chains()) == pytest.approx(1000, rel=0.15) and open_loop.for_s == 200

    def test_a_turn_of_a_conversation_begins_with_all_that_was_said(self):
        shape = LoadShape(load=ServeLoad.CONVERSATIONS, conversations=12, turns=3, system_prompts=2)
        [point] = points(shape, 0)
        chains = [list(chain.requests) for chain in point.chains()]
        for turns in chains:
            assert [turns[i + 1].prompt.startswith(turns[i].prompt) for i in range(2)] == [True, True]
            assert [turn.pause_s > 0 for turn in turns] == [False, True, True]
        assert len({turns[0].prompt[:400] for turns in chains}) == 2, "system prompts are shared"
        assert point.for_s == math.inf

    def test_prompts_are_words_of_the_wanted_length(self):
        text = prose(random.Random(0), 400)
        assert tokens_of(text) == 400 and text.startswith("The ") and ". The " in text

    def test_each_engine_behind_a_router_that_takes_turns_is_warmed_up_for_both_kinds(self):
        assert [one.kind for one in warm_up(LoadShape(), 2)] == ["short", "short", "long", "long"]
        assert len({one.prompt for one in warm_up(LoadShape(), 2)}) == 4

    def test_an_exported_load_can_be_read(self, tmp_path):
        shape = LoadShape(load=ServeLoad.CONVERSATIONS, conversations=3)
        path = tmp_path / "load.json"
        path.write_text(json.dumps(sharegpt.exported(shape)))
        sent = [one for point in requests(shape) for one in point]
        read = sharegpt.read(path)
        assert [one.prompt for one in read] == [prompt for _, _, _, prompt in sent]
        assert all(one.answer_tokens == pytest.approx(shape.answer_tokens, abs=2) for one in read)
        traced = LoadShape(load=ServeLoad.TRACE, trace=read, rates=(100.0, ), long_tokens=10_000)
        assert [one[3] for one in requests(traced)[0]] == [one.prompt for one in read]

    @pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"conversations": 3}]', '[{"a": 1}]', "[]",
                                      '[{"conversations": [{"value": 1}, {"value": "b"}]}]',
                                      '[{"conversations": [{"value": "a"}]}]'])
    def test_b80_a_file_that_is_no_trace(self, tmp_path, text):
        path = tmp_path / "trace"
        path.write_text(text)
        with pytest.raises(ConfigError, match="trace.*(ShareGPT|JSON)"):
            sharegpt.read(path)

    def test_b80_a_load_without_an_end_is_not_exported(self):
        with pytest.raises(ConfigError, match="--export='chat.long'"):
            sharegpt.exported(LoadShape())


class TestFigures:

    def test_figures_of_a_point(self):
        found = point_figures(POINT, served(answer(0.1, 0.2, 0.5), answer(0.3, 0.4, 0.5), None), LIMITS, 0.5)
        assert (found["requests"], found["failed"], found["prompt_tokens"], found["answer_tokens"]) == (2, 1, 20, 6)
        assert (found["requests_per_s"], found["answer_tokens_per_s"], found["tokens_per_s"]) == (0.5, 1.5, 6.5)
        assert found["ttft_ms"] == {"mean": 200, "p50": 100, "p99": 300, "max": 300}
        assert found["itl_ms"]["max"] == pytest.approx(300) and found["tpot_ms"]["max"] == pytest.approx(200)
        assert found["short"]["itl_ms"] == found["itl_ms"] and found["long"]["ttft_ms"] == {}
        assert found["pause_ms"] == pytest.approx({"mean": 200, "p50": 100, "p90": 300, "p99": 300, "max": 300})
        assert found["itl_grid_ms"][0] == pytest.approx(100) and found["itl_grid_ms"][-1] == pytest.approx(300)
        assert json.loads(json.dumps(found)) == found

    def test_tokens_that_come_after_the_streams_have_sent_do_not_count(self):
        """The wait for the last long prompts is no time in which the chats could have had tokens."""
        chat, late = answer(1.0, 2.0, 9.5), GenerationAnswer("a", (), "length", (10, 6), (9.0, 9.5, 20.0), 20.0)
        found = point_figures(POINT, served(chat, late, None, took_s=21.0), LIMITS)
        assert found["answer_rate"] == {"for_s": 10.0, "tokens_per_s": pytest.approx((3 + 2) / 10)}
        assert found["answer_tokens_per_s"] == pytest.approx(9 / 21)
        longer = point_figures(POINT, served(chat, late, took_s=60.0), LIMITS)
        assert longer["answer_rate"] == found["answer_rate"]
        assert point_figures(POINT, served(chat, took_s=9.5), LIMITS)["answer_rate"]["tokens_per_s"] == 3 / 9.5
        burst = point_figures(replace(POINT, unit="requests/s"), served(chat, late, took_s=21.0), LIMITS)
        assert burst["answer_rate"] == {"for_s": 21.0, "tokens_per_s": pytest.approx(9 / 21)}

    def test_an_event_may_have_several_tokens(self):
        merged = GenerationAnswer("a", (), "length", (10, 9), (0.1, 0.3, 0.9), 0.9)
        found = point_figures(POINT, served(merged), LIMITS)
        assert found["tpot_ms"]["mean"] == pytest.approx(100) and found["itl_ms"]["max"] == pytest.approx(600)
        assert found["tokens_per_event"] == 3
        whole = point_figures(POINT, served(GenerationAnswer("a", (), "length", (10, 9), (0.9, ), 0.9)), LIMITS)
        assert whole["tpot_ms"] == {}, "all of it came at once"
        assert point_figures(POINT, served(None), LIMITS)["tokens_per_event"] is None

    @pytest.mark.parametrize("one, good", [(answer(0.5, 0.7), 1), (answer(0.51, 0.6), 0), (answer(0.1, 0.31), 0),
                                           (answer(0.2), 1), (None, 0)])
    def test_a_good_request_is_within_both_limits(self, one, good):
        assert point_figures(POINT, served(one), LIMITS)["good_share"] == good

    def test_pauses_count_once_for_each_answer(self):
        paused = answer(*(0.1 * step for step in range(1, 60)), 8.0)
        found = point_figures(POINT, served(paused, *[answer(0.1, 0.2), answer(0.1)] * 2), LIMITS)["short"]
        assert found["itl_ms"]["p50"] == found["pause_ms"]["p50"] == pytest.approx(100)
        assert found["itl_ms"]["p99"] == pytest.approx(2100), "one gap in 61"
        assert found["pause_ms"]["p90"] == pytest.approx(2100), "one answer in three: that of one token has no pause"

    def test_only_running_answers_count_as_itl(self):
        found = point_figures(POINT, served(answer(0.1, 0.9), kind=PromptKind.LONG), LIMITS)
        assert found["short"]["itl_ms"] == {} and found["long"]["itl_ms"]["max"] == pytest.approx(800)
        assert found["itl_grid_ms"] == []

    def test_a_timeline_has_tokens_where_they_came(self):
        long = served(answer(2.0, 2.1), kind=PromptKind.LONG).requests
        found = timeline(ServedLoad((*served(None, answer(0.1, 0.2, 0.5)).requests, *long), 1.0))
        assert found == {"itl": [[1.2, 100.0], [1.5, 300.0]], "long": [[0.0, 2.0]]}


def made(load: ServeLoad = ServeLoad.CHAT_LONG, **arms: list[list[ServedLoad]]) -> dict:
    """A report of arms, by round and point."""
    return {"settings": {"load": {"load": load}, "compare": "tokens"}, "failed": {}, "different": [], "compared": 3,
            "arms": {name.replace("_", "-"): {"where": "core 0", "timeline": timeline(turns[0][0]), "rounds": [
                {"round": number, "points": [point_figures(LoadPoint(2 + at, "streams", 1.0, list), one, LIMITS)
                                             for at, one in enumerate(turn)]}
                for number, turn in enumerate(turns)]} for name, turns in arms.items()}}


def of_gap(gap_s: float) -> ServedLoad:
    return served(answer(0.1, 0.1 + gap_s))


class TestComparison:

    def test_a_ratio_is_that_of_the_same_round(self):
        found = made(alone=[[of_gap(0.1)], [of_gap(0.2)]], pd=[[of_gap(0.2)], [of_gap(0.3)]],
                     mixed_kv=[[of_gap(0.8)]])
        path = "short.itl_ms.p99"
        assert over_rounds(found, "pd", "2 streams", path) == pytest.approx({"median": 250, "min": 200, "max": 300})
        assert ratio(found, "pd", "alone", "2 streams", path) == pytest.approx({"median": 1.75, "min": 1.5, "max": 2})
        assert ratio(found, "pd", "mixed", "2 streams", path)["median"] == pytest.approx(0.25), "round 2 has no mixed"
        assert ratio(found, "alone", "alone", "2 streams", path) == {}
        assert compared(found)["2 streams"]["pd"]["ratios"]["ITL p99 / mixed"]["median"] == pytest.approx(0.25)
        assert spread([]) == {}

    def test_goodput_ends_at_the_first_rate_that_is_too_much(self):
        good, bad = of_gap(0.1), of_gap(0.9)
        found = made(ServeLoad.RATE, pd=[[good, good, bad, good]] * 3, mixed_rr=[[bad, good, good, good]])
        assert (goodput(found, "pd"), goodput(found, "mixed-rr")) == (3, 0)
        assert goodput(made(pd=[[good]]), "pd") is None

    def test_answers_are_those_of_the_first_arm(self):
        book = AnswerBook()
        assert book.add("pd", 0, "2 streams", served(answer(1.0), answer(1.0))) == []
        assert book.add("mixed", 0, "2 streams", served(answer(1.0))) == [] and book.compared == 1
        [line] = book.add("alone", 0, "2 streams", served(answer(1.0), answer(1.0, token_ids=(1, 3))))
        assert "round 1, 2 streams, request 1: alone and pd differ from token 2 on: (3,) and (2,)" in line
        [line] = book.add("alone", 0, "2 streams", served(answer(1.0, text="a c")))
        assert "from character 3 on: 'c' and 'b'" in line
        [line] = book.add("alone", 0, "2 streams", served(answer(1.0, token_ids=(1, 2, 3))))
        assert "from token 3 on: (3,) and ()" in line
        assert book.add("alone", 1, "2 streams", served(answer(1.0, token_ids=(9, )))) == [], "another round"
        [line] = book.add("alone", 2, "2 streams", served(None))
        assert line.endswith("request 0: alone has failed: it broke")

    def test_a_block_is_that_of_vllm(self):
        found = made(pd=[[of_gap(0.1)], [of_gap(0.3)]])
        lines = report.block(found, "pd", "2 streams").splitlines()
        assert lines[:3] == ["pd (core 0), 2 streams", "============ Serving Benchmark Result ============",
                             "Successful requests:                     1"]
        assert "Mean TTFT (ms):                          100.00" in lines
        assert "P99 ITL (ms):                            200.00 (100.00 to 300.00)" in lines
        assert "-----Time per Output Token (excl. 1st token)------" in lines and lines[-1] == "=" * 50

    def test_the_summary_names_gains_costs_and_failures(self):
        found = made(alone=[[of_gap(0.1)]], pd=[[of_gap(0.2)]], mixed_rr=[[of_gap(0.8)]])
        lines = report.summary(found)
        assert ("2 streams, pd: ITL p99 200 ms (2.00 x alone, 0.25 x mixed-rr); longest pause of an answer p90 200 ms "
                "(2.00 x alone, 0.25 x mixed-rr); TTFT short 100 ms (1.00 x mixed-rr)"
                in lines)
        assert lines[-1] == "the same tokens from every arm: yes, 3 answers compared"
        found |= {"different": ["round 1: pd differs"], "failed": {"single": "it has ended"}}
        assert report.summary(found)[-3:] == ["round 1: pd differs", "single was not measured to its end: it has ended",
                                              "the same tokens from every arm: NO, 1 answers differ or failed"]
        table = report.table(found, "2 streams")
        assert [str(column.header) for column in table.columns] == ["2 streams", "alone", "pd", "mixed-rr"]

    def test_the_table_says_how_many_tokens_an_event_has_where_that_is_not_one(self):
        def texts(*loads: ServedLoad) -> dict[str, str]:
            found = made(**{f"arm{number}": [[one]] for number, one in enumerate(loads)})
            columns = [column.cells for column in report.table(found, "2 streams").columns]
            return {text: " ".join(cells) for text, *cells in zip(*columns, strict=True)}

        merged = served(GenerationAnswer("a", (), "length", (10, 9), (0.1, 0.3, 0.9), 0.9))
        assert texts(of_gap(0.1), merged)["tokens in an event"] == "1.00 3.00"
        assert "tokens in an event" not in texts(of_gap(0.1), of_gap(0.2))

    @pytest.mark.parametrize("count, text", [(99, "TTFT short max, ms"), (100, "TTFT short p99, ms")])
    def test_the_table_says_how_many_answers_there_were_and_calls_the_largest_of_few_so(self, count, text):
        found = made(pd=[[served(*[answer(0.1, 0.2)] * count)]])
        lines = dict(zip(*[column.cells for column in report.table(found, "2 streams").columns], strict=True))
        assert lines["short answers in a round"] == str(count) and lines[text] == "100"
        assert not ({"TTFT short max, ms", "TTFT short p99, ms"} - {text}) & set(lines)
        assert "long answers in a round" in lines and "TTFT long p99, ms" not in lines

    @pytest.mark.parametrize("points", [1, 3])
    def test_pictures_are_drawn(self, tmp_path, points):
        load = ServeLoad.RATE if points > 1 else ServeLoad.CHAT_LONG
        found = made(load, pd=[[of_gap(0.1)] * points] * 2, mixed_rr=[[of_gap(0.2)] * points], alone=[[served(None)]])
        pictures.picture(found, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def fleet(**changes) -> FleetSettings:
    return FleetSettings(**{"model": "m", "cores": (4, 5), "port": 0, **changes})


def plan(monkeypatch, name: str, **changes):
    """A plan without asking the kernel for ports."""
    for module in ("arms.require_free", "arms.take_free_run", "arms.take_free"):
        monkeypatch.setattr(f"vllm_pd.bench.serve.{module}", lambda *_: 9000)
    for name_of in ("require_free", "take_free"):
        monkeypatch.setattr(f"vllm_pd.ops.launch.plan.{name_of}", lambda *_: 9100)
    [arm] = parse_arms([name])
    return plan_arm(arm, fleet(**changes))


def options_of(command, flag: str) -> list[str]:
    return [command[place + 1] for place, word in enumerate(command) if word == flag]


class TestArms:

    def test_names(self):
        assert [arm.name for arm in parse_arms(())] == ["alone", "pd", "mixed-rr", "chunked-256"]
        assert [arm.name for arm in parse_arms(["mixed", "chunked", "mixed-kv", "chunked-7"])] == [
            "mixed-rr", "mixed-kv", "chunked-64", "chunked-256", "chunked-1024", "chunked-7"]
        assert parse_arms(["chunked-7"]) == (Arm("chunked-7", ArmKind.CHUNKED, budget=7), )

    @pytest.mark.parametrize("name", ["", "nonesuch", "chunked-", "chunked-0", "chunked-x", "pd-2", "given"])
    def test_b80_an_unknown_arm(self, name):
        with pytest.raises(ConfigError, match=f"--arm='{name}'.*alone, pd, mixed"):
            parse_arms(["pd", name])

    def test_all_arms_have_the_same_cores(self, monkeypatch):
        cores = {name: [engine.cores for engine in plan(monkeypatch, name).engines]
                 for name in ("pd", "mixed-rr", "chunked-64", "single", "alone")}
        assert cores == {"pd": [(4, ), (5, )], "mixed-rr": [(4, ), (5, )], "chunked-64": [(4, ), (5, )],
                         "single": [(4, 5)], "alone": [(4, )]}
        pd = plan(monkeypatch, "pd")
        assert [engine.name for engine in pd.engines] == ["decode 0", "prefill 0"], "alone has D's core"
        assert pd.fleet.engines == pd.engines and pd.router is None
        assert pd.engines[0].env["VLLM_CPU_OMP_THREADS_BIND"] == "4"

    def test_more_engines_than_cores_take_turns(self, monkeypatch):
        found = plan(monkeypatch, "pd", prefill=2)
        assert [engine.cores for engine in found.engines] == [(4, 5)] * 3
        assert {engine.env["OMP_NUM_THREADS"] for engine in found.engines} == {"1"}
        assert found.where == "3 engines, time-sliced on core 4,5"
        assert plan(monkeypatch, "mixed-rr").where == "2 engines, core 4 | 5"

    def test_replicas_are_behind_a_router(self, monkeypatch):
        found = plan(monkeypatch, "mixed-rr", decode=2, serve_args=("--dtype", "float32"))
        assert [engine.port for engine in found.engines] == [9001, 9002, 9003] and found.router_port == 9000
        assert "--policy round-robin --tokenizer none" in found.router.command
        assert all("--kv-transfer-config" not in engine.command and "float32" in engine.command
                   and engine.env["VLLM_USE_V1"] == "0" for engine in found.engines)
        kv = plan(monkeypatch, "mixed-kv", v1=True, prefill=2)
        configs = [json.loads(options_of(engine.command, "--kv-events-config")[0]) for engine in kv.engines]
        assert configs[0]["endpoint"] != configs[1]["endpoint"] and "--policy kv --tokenizer m" in kv.router.command
        assert [f"--worker-events={engine.url}={config['endpoint']}" in kv.router.command
                for engine, config in zip(kv.engines, configs, strict=True)] == [True] * 3

    @pytest.mark.parametrize("decode, behind", [(1, []), (2, ["http://127.0.0.1:9001", "http://127.0.0.1:9002"])])
    def test_the_decode_engines_behind_a_router_are_known(self, monkeypatch, decode, behind):
        made = plan(monkeypatch, "pd", decode=decode)
        front = {"router": {"url": "http://router"}} if behind else {}
        running = SimpleNamespace(state=lambda: {"engines": [{"pid": 1}] * 2, **front})
        monkeypatch.setattr(fleets, "Fleet", lambda *_, **__: contextlib.nullcontext(running))
        with fleets.running(made, print, 1.0) as ready:
            assert ready.behind == tuple(map(EntryPoint, behind)) and len(ready.entries) == 1

    def test_a_budget_is_for_chunked_prefill(self, monkeypatch):
        command = plan(monkeypatch, "chunked-64").engines[0].command
        assert options_of(command, "--max-num-batched-tokens") == options_of(command, "--max-num-seqs") == ["64"]
        own = plan(monkeypatch, "chunked-64", serve_args=("--max-num-seqs=8", )).engines[0].command
        assert "--enable-chunked-prefill" in own and "--max-num-seqs" not in own

    def test_upstreams_connector_has_pairs_that_clients_ask_in_turn(self, monkeypatch):
        found = plan(monkeypatch, "nixl", v1=True, prefill=2)
        assert [engine.role for engine in found.engines] == [Role.DECODE, Role.PREFILL, Role.PREFILL]
        assert found.router is None and found.engines[0].port == 9000
        assert all("NixlConnector" in engine.command[-1] and engine.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "9000"
                   for engine in found.engines)
        urls = [engine.url for engine in found.engines]
        assert entry_points(found.engines) == (EntryPoint(urls[0], urls[1]), EntryPoint(urls[0], urls[2]))
        assert entry_points(plan(monkeypatch, "single").engines) == (EntryPoint("http://127.0.0.1:9000"), )
        with pytest.raises(ConfigError, match="--arm='nixl'.*v1"):
            plan(monkeypatch, "nixl")

    def test_b102_our_own_engines_prefill_first(self, monkeypatch):
        found = plan(monkeypatch, "pd-first", v1=True, decode=2)
        assert found.prefill_first and found.fleet.router is None
        assert all("PDConnector" in " ".join(engine.command) for engine in found.engines)
        assert len(entry_points(found.engines)) == 2
        with pytest.raises(ConfigError, match="--arm='pd-first'.*v1"):
            plan(monkeypatch, "pd-first")

    def test_gpus_are_shared_like_cores(self):
        def seen(count: int, *gpus: int) -> list[tuple[str, tuple[str, ...]]]:
            return [(place.env["CUDA_VISIBLE_DEVICES"], place.arguments) for place in places(fleet(gpus=gpus), count)]

        assert seen(2, 0, 1) == [("0", ()), ("1", ())]
        assert seen(1, 0, 1) == [("0,1", ("--tensor-parallel-size", "2"))]
        assert seen(2, 3) == [("3", ("--gpu-memory-utilization", "0.40"))] * 2

    @pytest.mark.parametrize("visible, gpu", [(None, "0"), ("3", "3"), ("3,1", "3"), ("GPU-5d,GPU-77", "GPU-5d")])
    def test_told_no_gpu_the_first_that_may_be_used_is(self, monkeypatch, visible, gpu):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(choices, "engines_run_on_cpu", lambda: False)
        settings = choices.fleet(ServeBench("m"))
        assert [place.env["CUDA_VISIBLE_DEVICES"] for place in places(settings, 2)] == [gpu, gpu]
        assert choices.fleet(ServeBench("m", gpus="0,1")).gpus == (0, 1)

    @pytest.mark.parametrize("words", [("-dp", "2"), ("-dp=2", ), ("--data-parallel-size", "2"),
                                       ("--data_parallel_size=2", ), ("-tp", "2"), ("--pipeline-parallel-size=2", )])
    def test_who_splits_the_model_is_not_told_how(self, words):
        assert gpu_places((0, 1, 2, 3), 2, words) == [({"CUDA_VISIBLE_DEVICES": "0,1"}, ()),
                                                      ({"CUDA_VISIBLE_DEVICES": "2,3"}, ())]


    @pytest.mark.parametrize("name, port, most", [("single", 70_000, 65535), ("mixed-rr", 65_534, 65533),
                                                  ("pd", -1, 65534), ("alone", -1, 65535)])
    def test_b80_a_port_that_is_none(self, monkeypatch, name, port, most):
        with pytest.raises(ConfigError, match=f"--port={port} .*write 1 to {most}"):
            plan(monkeypatch, name, port=port)


class TestOptions:

    @pytest.mark.parametrize("changes, key", [
        ({"rounds": 0}, "--rounds"), ({"ttft_slo": 0}, "--ttft-slo"), ({"itl_slo": 0}, "--itl-slo"),
        ({"itl_slo": math.nan}, "--itl-slo"), ({"timeout_s": 0}, "--timeout-s"), ({"prefill": 0}, "--prefill"),
        ({"decode": 0}, "--decode"), ({"model": ""}, "MODEL"), ({"url": "http://a", "arms": ("pd", )}, "--arm"),
        ({"compare": "words"}, "--compare"), ({"engine": "v2"}, "--engine"), ({"warm_up": -1}, "--warm-up"),
        ({"load": LoadShape(duration_s=0)}, "--duration-s"), ({"load": LoadShape(long_every_s=0)}, "--long-every-s"),
        ({"load": LoadShape(pause_s=math.inf)}, "--pause-s"), ({"load": LoadShape(pause_s=math.nan)}, "--pause-s"),
        ({"load": LoadShape(pause_s=-1)}, "--pause-s"), ({"load": LoadShape(answer_tokens=1)}, "--answer-tokens"),
        ({"load": LoadShape(turns=0)}, "--turns"),
        ({"load": LoadShape(long_share=1.5)}, "--long-share"),
        ({"load": LoadShape(ServeLoad.CONCURRENCY, long_share=1)}, "--long-share"),
        ({"load": LoadShape(ServeLoad.RATE, long_share=1), "arms": ("pd", "alone")}, "--long-share"),
    ])
    def test_b80_impossible_options(self, changes, key):
        with pytest.raises(ConfigError) as caught:
            choices.check(ServeBench(**{"model": "m", **changes}))
        assert caught.value.key == key and caught.value.cure

    @pytest.mark.parametrize("changes", [{"arms": ("pd", "mixed")}, {"model": "", "url": "http://a"}])
    def test_a_load_of_long_prompts_alone_is_for_arms_that_get_them(self, changes):
        load = LoadShape(ServeLoad.CONCURRENCY, long_share=1)
        choices.check(ServeBench(**{"model": "m", "load": load, **changes}))

    def test_b80_the_engine_must_be_what_is_installed(self, monkeypatch):
        for world, name, other in ((choices.World.PATCHED, "v0", "v1"), (choices.World.PLUGIN, "v1", "v0")):
            monkeypatch.setattr(choices, "find_installation", lambda world=world: type("I", (), {"world": world}))
            choices.check(ServeBench("m", engine=name))
            with pytest.raises(ConfigError, match=f"--engine='{other}'.*{world.value}.*environment of {other}"):
                choices.check(ServeBench("m", engine=other))

    @pytest.mark.parametrize("texts", [["0"], ["1", "-2"], ["x"], ["nan"], ["inf"]])
    def test_b80_numbers_are_above_0(self, texts):
        with pytest.raises(ConfigError, match="--rate="):
            parse_numbers("--rate", float, texts)
        assert parse_numbers("--stream", int, ["2", "3", "2"]) == (2, 3), "each once"

    def test_b80_other_words(self, tmp_path):
        with pytest.raises(ConfigError, match="--load='x'.*chat.long, concurrency"):
            parse_load("x")
        with pytest.raises(ConfigError, match="--trace=None"):
            choices.shape_of(ServeBench("m", load=LoadShape(load=ServeLoad.TRACE)))
        with pytest.raises(ConfigError, match="--trace="):
            choices.shape_of(ServeBench("m", trace=tmp_path))
        (tmp_path / "trace").write_text(json.dumps([{"conversations": [{"value": "a"}, {"value": "b"}]}] * 90))
        traced = ServeBench("m", trace=tmp_path / "trace", load=LoadShape(load=ServeLoad.TRACE, rates=(0.5, 1.0)))
        assert len(choices.shape_of(replace(traced, rounds=1)).trace) == 90
        with pytest.raises(ConfigError, match="--trace=.*90 prompts.*3 x 2 .*fewer --rate or --rounds.*longer file"):
            choices.shape_of(traced)
        assert choices.shape_of(replace(traced, load=LoadShape(load=ServeLoad.TRACE, rates=(9.0, )), rounds=1))
        assert choices.shape_of(replace(traced, export=tmp_path / "load")), "only its first round is written"
        with pytest.raises(ConfigError, match="--duration-s=0.1.*at 0.01 requests/s"):
            choices.shape_of(ServeBench("m", load=LoadShape(load=ServeLoad.RATE, rates=(0.01, ), duration_s=0.1)))
        with pytest.raises(ConfigError, match="--gpus='a'"):
            choices.parse_numbered("--gpus", "a")

    def test_a_state_file_names_a_fleet(self, tmp_path, monkeypatch):
        path = tmp_path / "state.json"
        engines = [{"role": role, "url": f"http://{role}", "pid": 1} for role in ("decode", "prefill")]
        path.write_text(json.dumps({"engines": engines}))
        assert UpState.read(path) == UpState(("http://decode", ), ("http://prefill", ), "")
        monkeypatch.setattr(choices, "require_healthy", lambda key, urls: None)
        [arm] = choices.chosen(ServeBench(state=path))
        assert (arm.urls, arm.behind) == (("http://decode", ), ())
        path.write_text(json.dumps({"engines": engines, "router": {"url": "http://router", "pid": 1}}))
        assert UpState.read(path).entries == ("http://router", )
        [arm] = choices.chosen(ServeBench(state=path))
        assert (arm.urls, arm.behind) == (("http://router", ), ("http://decode", )), "the warm-up goes to all"
        for text in ("", "[]", "{}", '{"engines": []}', '{"engines": [{}]}'):
            path.write_text(text)
            with pytest.raises(ConfigError, match="--state=.*vllm-pd up"):
                UpState.read(path)
