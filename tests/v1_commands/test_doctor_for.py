# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd doctor --for`: what an engine would say at its start, from its command line and a config.json alone."""
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.v1_commands.recipe_models import write_models
from vllm_pd.errors import ConfigError
from vllm_pd.ops.finding import Finding
from vllm_pd.ops.for_command import CommandLine, examine_lines, judge_line, judge_lines, preview_lines
from vllm_pd.settings.engine import PDConfig
from vllm_pd.v1.preview import Preview, stays_here

BROKER = "tcp://127.0.0.1:5700"
ROOT = Path(__file__).parents[2]
MOST_CPU_S = 40  # 12 s for two lines, of which vLLM's import takes 8
WATCH = '''
import os, sys
def note(event, arguments):
    if event in ("socket.bind", "socket.connect", "socket.sendto", "socket.getaddrinfo") or (
            event == "open" and str(arguments[0]).endswith((".safetensors", ".bin", ".pt", ".pth"))):
        with open(os.environ["WATCHED"], "a") as file:
            file.write(f"{event} {arguments[0] if event in ('open', 'socket.getaddrinfo') else arguments[1]}\\n")
sys.addaudithook(note)
'''
WITHOUT_DEVICE = '''
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: version(name).replace("+cpu", "") if name == "vllm" else version(name)
'''


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


def line(model: Path | str, role: str = "kv_consumer", flags: str = "", extra: Mapping[str, object] | None = None,
         **more: object) -> str:
    """A command line without its first two words, as `--for` also takes it."""
    transfer = {"kv_connector": "PDConnector", "kv_role": role,
                "kv_connector_extra_config": {"broker": BROKER, **(extra or {})}, **more}
    return f"{model} --kv-transfer-config {shlex.quote(json.dumps(transfer))} {flags}"


def preview(*lines: str) -> list[Preview]:
    return preview_lines([CommandLine.parse(one) for one in lines])


def cpu_of_children() -> float:
    """In seconds, of all that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def doctor(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "vllm_pd.cli", "doctor", *arguments], cwd=ROOT, capture_output=True,
                          text=True, timeout=300, env=os.environ | env)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # all lines together
class TestLines:
    """All that can share a program do."""

    CASES: dict[str, Callable[[dict[str, Path]], str]] = {
        **{role: lambda models, role=role: line(models["llama"], role)
           for role in ("kv_consumer", "kv_producer", "kv_both")},
        "store": lambda models: line(models["llama"], "kv_both", extra={"store": {}}),
        "store alone": lambda models: f"{models['llama']} --kv-transfer-config " + shlex.quote(json.dumps(
            {"kv_connector": "PDStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"})),
        "pipeline": lambda models: line(models["llama"], flags="--pipeline-parallel-size 5"),
        "heads": lambda models: line(models["llama"], flags="--tensor-parallel-size 16 --hf-overrides "
                                     '\'{"num_key_value_heads": 3, "num_attention_heads": 48}\''),
        "feature": lambda models: line(models["llama"], flags='--weight-transfer-config \'{"backend": "nccl"}\''),
        "nodes": lambda models: line(models["llama"], flags="--tensor-parallel-size 2 --nnodes 2"),
        "limit": lambda models: line(models["llama"], extra={"store": {}}, flags="--tensor-parallel-size 2 --nnodes 2"),
        "window": lambda models: line(models["llama"], flags="--hf-overrides '{\"sliding_window\": 128}'"),
        "index": lambda models: line(models["glm-dsa"], flags="--kv-cache-dtype fp8_ds_mla"),
        "index and store": lambda models: line(models["glm-dsa"], "kv_both", extra={"store": {}}),
        "compressed": lambda models: line(models["deepseek-v4"], flags="--disable-hybrid-kv-cache-manager"),
        "dtype of the cache": lambda models: line(models["llama"], flags="--kv-cache-dtype int8_per_token_head"),
        "offloading": lambda models: line(models["llama"], flags="--kv-offloading-size 4"),
        "states elsewhere": lambda models: line(models["nemotron-h"], flags="--use-replayssm"),
        "hybrid": lambda models: line(models["llama"], extra={"store": {}},
                                      flags="--no-disable-hybrid-kv-cache-manager"),
        "scheduler": lambda models: line(models["llama"], flags="--scheduler-cls my.Scheduler"),
        "policy": lambda models: line(models["llama"], kv_load_failure_policy="fail"),
        "key": lambda models: line(models["llama"], extra={"heartbeat": 1}),
        "role": lambda models: line(models["llama"], "kv_none"),
        "transport": lambda models: line(models["llama"], extra={"transport": "carrier-pigeon"}),
        "no broker": lambda models: f"{models['llama']} --kv-transfer-config " + shlex.quote(json.dumps(
            {"kv_connector": "PDConnector", "kv_role": "kv_both"})),
        "several": lambda models: f"{models['llama']} --kv-transfer-config " + shlex.quote(json.dumps(
            {"kv_connector": "NixlConnector", "kv_role": "kv_both"})),
        "none": lambda models: str(models["llama"]),
        "load format": lambda models: line(models["llama"], flags="--load-format tensorizer"),
        "missing": lambda models: line("nobody/nothing-here"),
        "missing folder": lambda models: line(models["llama"].parent / "nothing"),
        "no config": lambda models: line(models["llama"].parent),
        "stock": lambda models: line(models["llama"], flags="--max-model-len 99999999"),
        "elsewhere": lambda models: line(models["llama"], extra={
            "bind": "tcp://192.0.2.7:0", "keys": str(models["llama"].parent / "cluster.key")}),
        "no keys": lambda models: line(models["llama"], extra={"keys": "/nowhere/cluster.key"}),
        "media": lambda models: line(models["llama"], flags="--enable-prompt-embeds"),
        "auto": lambda models: line(models["llama"], extra={"max_local_prefill_tokens": "auto"}),
        "unknown flag": lambda models: line(models["llama"], flags="--bogus 3"),
        "unknown value": lambda models: line(models["llama"], flags="--dtype complex"),
        "unfinished": lambda models: f"{models['llama']} --kv-transfer-config '{{\"kv_connector\": '",
        "help": lambda models: "--help",
    }

    @pytest.fixture(scope="class")
    def found(self, models) -> dict[str, Preview]:
        from vllm_pd.rpc.keys import Keys
        Keys.make(models["llama"].parent / "cluster.key")
        lines = [make(models) for make in self.CASES.values()]
        return dict(zip(self.CASES, preview(*lines), strict=True))

    @pytest.mark.parametrize("role", ["kv_consumer", "kv_producer", "kv_both"])
    def test_each_role_is_accepted(self, found, role):
        (first, *others) = judge_line(3, found[role])
        assert first.ok and first.lines == [
            f"ok   line 3    accepted on cpu: {role}, LlamaForCausalLM, bfloat16, TP 1, PP 1; broker {BROKER}"]
        stays = [one.fact for one in others if "by itself" in one.fact]
        assert len(stays) == (role != "kv_producer"), "a prefill engine hands nothing over"
        weights = others[-1]
        assert weights.ok and "no .safetensors" in weights.hint and "without weights" in weights.fact

    def test_b101_an_index_beside_mla_is_accepted(self, found):
        first, *_ = judge_line(1, found["index"])
        assert first.ok and ": kv_consumer, GlmMoeDsaForCausalLM, bfloat16, TP 1, PP 1" in first.fact
        assert found["index"].member.fingerprint.kv_dtype == "fp8_ds_mla"

    def test_several_nodes_are_accepted(self, found):
        assert next(judge_line(1, found["nodes"])).lines == [
            f"ok   line 1    accepted on cpu: kv_consumer, LlamaForCausalLM, bfloat16, TP 2, PP 1; broker {BROKER}"]

    def test_what_stays(self, found):
        (stays, ) = [one.fact for one in judge_line(1, found["kv_consumer"]) if "by itself" in one.fact]
        for kind in ("up to 1000 tokens that are not cached", "prompt_logprobs", "read no prefix cache",
                     "cache_salt", "streaming"):
            assert kind in stays
        assert "plain" not in stays and "embeddings" not in stays and "images" not in stays
        assert any("embeddings" in one for one in found["media"].stays)
        assert found["auto"].stays[0].endswith("(max_local_prefill_tokens auto)")

    @pytest.mark.parametrize("case, fact, cure", [
        ("pipeline", "pipeline_parallel_size=5 can't be used", "use at most 4, the layers of the model"),
        ("heads", "tensor_parallel_size=16 can't be used", "choose one that divides the model's 3 KV heads"),
        ("feature", "weight_transfer_config=WeightTransferConfig(backend=", "restart engines for new weights"),
        ("limit", "nnodes=2 can't be used", "tensor-parallel ranks of one host only"),
        ("window", "sliding_window=128 can't be used", "--disable-sliding-window"),
        ("index and store", "store=True can't be used", "leave it out: the store keeps KV, and not the index"),
        ("compressed", "disable_hybrid_kv_cache_manager=True can't be used", "needs groups of its own"),
        ("dtype of the cache", "kv_cache_dtype='int8_per_token_head' can't be used", "use one of"),
        ("offloading", "kv_offloading_size='4' can't be used", "remove --kv-transfer-config"),
        ("states elsewhere", "use_replayssm=True can't be used", "recurrent states"),
        ("hybrid", "disable_hybrid_kv_cache_manager=False can't be used", "leave --no-disable"),
        ("scheduler", "scheduler_cls='my.Scheduler' can't be used", "remove it"),
        ("policy", "kv_load_failure_policy='fail' can't be used", "remove it"),
        ("key", "heartbeat=1 can't be used", "did you mean heartbeat_s?"),
        ("transport", "transport='carrier-pigeon' can't be used", "nixl"),
        ("no broker", "broker=None can't be used", "vllm-pd broker"),
        ("several", "kv_connector='NixlConnector' can't be used", '"kv_connector": "PDConnector"'),
        ("none", "kv_connector=None can't be used", '"kv_connector": "PDConnector"'),
        ("load format", "load_format='tensorizer' can't be used", "model's own files"),
        ("missing", "model='nobody/nothing-here' can't be used", "hf download nobody/nothing-here config.json"),
        ("no keys", "keys='/nowhere/cluster.key' can't be used", ""),
    ])
    def test_a_refusal_is_the_engine_s_own(self, found, case, fact, cure):
        (finding, ) = judge_line(1, found[case])
        assert not finding.ok and finding.fact.startswith(fact) and finding.fact.endswith("can't be used")
        assert cure in finding.cure and finding.check == "line 1"

    @pytest.mark.parametrize("case, words", [
        ("stock", "max_model_len"), ("no config", "config.json")])
    def test_what_vllm_itself_refuses_is_said_to_be_its_own(self, found, case, words):
        (finding, ) = judge_line(1, found[case])
        assert finding.fact.startswith("vllm refuses it: ") and words in finding.fact and "\n" not in finding.fact
        assert "vLLM's own error" in finding.cure and "Traceback" not in finding.fact

    def test_a_folder_that_is_not_there(self, found):
        assert "no such folder here" in found["missing folder"].refusal.cure

    def test_what_this_machine_lacks_is_said_and_the_rest_is_judged(self, found):
        accepted, *_, here, weights = judge_line(2, found["elsewhere"])
        assert accepted.ok and not here.ok and weights.ok
        assert here.fact == "on this machine bind='tcp://192.0.2.7:0' can't be used"
        assert "address of its own" in here.cure

    @pytest.mark.parametrize("case", ["store", "store alone"])
    def test_the_store_by_its_own_rules(self, found, case):
        (first, *_) = judge_line(1, found[case])
        assert first.ok, first

    @pytest.mark.parametrize("case, words", [
        ("unknown flag", "vllm: error: unrecognized arguments: --bogus 3"), ("unknown value", "--dtype"),
        ("unfinished", "--kv-transfer-config"), ("help", "says something with that"), ("role", "kv_role")])
    def test_what_is_no_command_line_of_vllm(self, found, case, words):
        """In vLLM's words, in one line."""
        assert words in found[case].usage and "\n" not in found[case].usage


@pytest.mark.parametrize("goes", [True, False])
def test_what_stays_is_what_the_binding_says(monkeypatch, goes):
    """It is asked about a request of each kind that the model can have. No list of our own says which of them go."""
    asked = []
    monkeypatch.setattr("vllm_pd.v1.features.can_go_remote", lambda request, *books: asked.append(request) or goes)
    config = SimpleNamespace(lora_config=None, model_config=SimpleNamespace(is_multimodal_model=True,
                                                                            enable_prompt_embeds=True,
                                                                            multimodal_config=None))
    kinds = list(stays_here(config, PDConfig.parse("kv_both", {"broker": BROKER})))[1:]
    assert len(asked) == 8 and len(kinds) == (0 if goes else 8)
    assert goes or {"plain prompts", "prompts with images, audio or video"} <= set(kinds)
    monkeypatch.undo()
    kinds = list(stays_here(config, PDConfig.parse("kv_both", {"broker": BROKER})))[1:]
    assert "plain prompts" not in kinds and "prompts with images, audio or video" in kinds and len(kinds) == 7


@pytest.mark.parametrize("goes", [True, False])
def test_images_stay_without_the_key_media(monkeypatch, goes):
    monkeypatch.setattr("vllm_pd.v1.media.encoder_name", lambda config: "0" * 16)
    config = SimpleNamespace(lora_config=None, model_config=SimpleNamespace(is_multimodal_model=True,
                                                                            enable_prompt_embeds=False))
    kinds = list(stays_here(config, PDConfig.parse("kv_both", {"broker": BROKER, "media": goes})))
    assert ("prompts with images, audio or video" not in kinds) is goes
    assert "prompts with more than 24 MiB of images, audio or video" in kinds


@pytest.mark.slow
@pytest.mark.timeout(1200)  # all lines together
class TestPairs:

    CASES: dict[str, tuple[str, str]] = {
        "other block size": ("--block-size 32", "--block-size 64"),
        "other dtype": ("--dtype bfloat16", "--dtype float32"),
        "other type of the cache": ("", "--kv-cache-dtype fp8"),
        "other layers": ("", "--hf-overrides '{\"num_hidden_layers\": 5}'"),
        "ranks that share no heads": ("--tensor-parallel-size 2", "--tensor-parallel-size 3 --hf-overrides "
                                      '\'{"num_key_value_heads": 6, "num_attention_heads": 6}\''),
        "ranks": ("--tensor-parallel-size 4", "--tensor-parallel-size 2"),
        "stages": ("--pipeline-parallel-size 2", ""),
        "other drafter": ("", "--speculative-config DRAFTER"),
        "ngram": ("", "--speculative-config '{\"method\": \"ngram\", \"num_speculative_tokens\": 2}'"),
    }

    @pytest.fixture(scope="class")
    def found(self, models) -> dict[str, list[Finding]]:
        drafter = shlex.quote(json.dumps({"method": "draft_model", "model": str(models["llama"]),
                                          "num_speculative_tokens": 2}))
        wide = "--hf-overrides '{\"num_key_value_heads\": 6, \"num_attention_heads\": 6}'"
        lines = []
        for name, (prefill, decode) in self.CASES.items():
            prefill += f" {wide}" if "share no heads" in name else ""
            lines += [line(models["llama"], "kv_producer", prefill),
                      line(models["llama"], "kv_consumer", decode.replace("DRAFTER", drafter))]
        lines += [line(models["nemotron-h"], role, f"--enable-prefix-caching --tensor-parallel-size {ranks}")
                  for role, ranks in (("kv_producer", 1), ("kv_consumer", 2))]
        lines += [line(models["nemotron-h"], role, "--speculative-config "
                       f"'{{\"method\": \"ngram\", \"num_speculative_tokens\": {tokens}}}'")
                  for role, tokens in (("kv_producer", 1), ("kv_consumer", 2))]
        lines += [line(models["gpt-oss"], role, flag) for role, flag in (
            ("kv_producer", ""), ("kv_consumer", "--disable-hybrid-kv-cache-manager"))]
        lines += [line(models["llama"], "kv_producer"), line(models["qwen3"], "kv_consumer")]
        lines += [line(models["llama"], "kv_producer"), line(models["llama"], "kv_producer")]
        lines += [line(models["llama"], "kv_both", extra={"broker": f"tcp://127.0.0.1:{port}"})
                  for port in (5700, 5701)]
        lines += [line(models["llama"], "kv_producer", "--pipeline-parallel-size 5"), line(models["llama"])]
        lines += [line(models["llama"], "kv_producer", extra={"transport": "torch"}), line(models["llama"])]
        names = [*self.CASES, "ranks of states", "drafts after states", "groups", "other model", "P and P", "brokers",
                 "refused", "transports"]
        previews = preview(*lines)
        return {name: list(judge_lines(pair)) for name, pair in zip(
            names, zip(previews[::2], previews[1::2], strict=True), strict=True)}

    @pytest.mark.parametrize("case", ["ranks", "stages", "ngram"])
    def test_engines_that_fit(self, found, case):
        (finding, ) = found[case]
        assert finding.lines == ["ok   peers     decode line 2 and prefill line 1 fit each other"]

    @pytest.mark.parametrize("case, words", [
        ("other block size", "differ in block_size: 64 and 32"),
        ("other dtype", "differ in dtype: 'float32' and 'bfloat16'"),
        ("other type of the cache", "differ in kv_dtype: 'fp8' and 'bfloat16'"),
        ("other layers", "differ in model: 'LlamaForCausalLM:"),
        ("ranks that share no heads", "differ in tp: 3 and 2"),
        ("other drafter", " with draft_model:"),
        ("ranks of states", "differ in tp: 2 and 1"),
        ("drafts after states", "differ in states: 'recurrent, num_speculative_tokens 2' and 'recurrent, num_"),
        ("groups", "differ in windows: () and (0, 128)"),
        ("other model", "differ in model: 'Qwen3ForCausalLM:"),
        ("transports", "differ in transport: 'nixl' and 'torch'"),
    ])
    def test_engines_that_do_not(self, found, case, words):
        """By the words of `vllm-pd doctor --broker`, which sees the same in engines that run."""
        (finding, ) = found[case]
        assert not finding.ok and words in finding.fact and finding.fact.startswith("decode line 2 and prefill line 1")
        assert finding.cure.startswith("start both with the same")

    def test_two_prefill_engines_have_nobody_to_prefill_for(self, found):
        (finding, ) = found["P and P"]
        assert finding.fact == "no decode engine is there" and '"kv_role": "kv_consumer"' in finding.cure

    def test_engines_of_two_brokers_never_meet(self, found):
        *pairs, brokers = found["brokers"]
        assert all(one.ok and "fit each other" in one.fact for one in pairs) and len(pairs) == 2
        assert "2 brokers: tcp://127.0.0.1:5700, tcp://127.0.0.1:5701" in brokers.fact and brokers.hint

    def test_a_line_that_is_refused_is_not_compared(self, found):
        (finding, ) = found["refused"]
        assert "not compared with others: line 1" in finding.fact and finding.hint


@pytest.mark.slow
def test_nothing_listens_or_is_read_and_it_takes_seconds(models, tmp_path):
    """The command as it is called, with a hook that notes sockets and weights. Probes of vLLM's and of ours bind port
    0 of an address and let go of it; nothing is bound that was named, nothing connected, nothing of weights opened."""
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    (models["qwen3"] / "model.safetensors").write_bytes(b"no weights: whoever reads this fails")
    lines = [f"vllm serve {line(models['qwen3'], role)}" for role in ("kv_producer", "kv_consumer")]
    began = cpu_of_children()
    done = doctor("--for", lines[0], "--for", lines[1], PYTHONPATH=str(tmp_path), WATCHED=str(tmp_path / "watched"))
    (models["qwen3"] / "model.safetensors").unlink()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fit each other" in done.stdout and "not asked: free ports" in done.stdout and "Traceback" not in done.stderr
    assert 1 < cpu_of_children() - began < MOST_CPU_S
    watched = (tmp_path / "watched").read_text().splitlines()
    assert watched, "the hook sees nothing"
    assert set(watched) <= {"socket.bind ('127.0.0.1', 0)", "socket.bind ('::1', 0)", "socket.getaddrinfo 127.0.0.1",
                            "socket.getaddrinfo localhost", "socket.getaddrinfo None"}


@pytest.mark.slow
@pytest.mark.heavy
def test_without_a_device_it_says_so(models, tmp_path):
    """As beside a vLLM that is built for a GPU that is not there."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_DEVICE)
    done = doctor("--for", line(models["llama"]), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--   device    vllm finds none here" in done.stdout and "accepted on cpu" in done.stdout


@pytest.mark.slow
@pytest.mark.heavy
def test_environment_variables_in_front_are_the_engine_s(models):
    plain, named = line(models["llama"], "kv_producer"), line(models["llama"], "kv_consumer")
    found = preview(plain, f"VLLM_KV_CACHE_LAYOUT=NHD vllm serve {named} --tensor-parallel-size 2",
                    f"VLLM_PLUGINS= vllm serve {named}")
    (finding, ) = judge_lines(found[:2])
    assert "differ in layout: 'kv-tokens-first' and 'kv-heads-first'" in finding.fact
    assert found[2].refusal is not None and "PDConnector" in found[2].refusal.fact, "the plugin is not loaded"


@pytest.mark.slow
def test_a_model_of_the_hub_is_known_by_name_and_commit(models, tmp_path):
    """Its config.json must be in the cache. Two models with the same configuration are two models."""
    commits = {"org/one": "1" * 40, "org/two": "2" * 40}
    for name, commit in commits.items():
        folder = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(commit)
        shutil.copytree(models["llama"], folder / "snapshots" / commit)
    one, other, same = preview(*(f"HF_HOME={tmp_path} {line(name, role)}" for name, role in (
        ("org/one", "kv_producer"), ("org/two", "kv_consumer"), ("org/one", "kv_consumer"))))
    assert one.weights is None, "a start downloads them"
    (differ, ) = judge_lines([one, other])
    assert "differ in model: 'LlamaForCausalLM:" in differ.fact
    assert f"of org/two at {commits['org/two']}'" in differ.fact
    (fits, ) = judge_lines([one, same])
    assert fits.ok and "fit each other" in fits.fact


@pytest.mark.slow
def test_status_and_words_of_the_command(models):
    two_hosts = line(models["llama"], flags="--tensor-parallel-size 2 --nnodes 2", extra={"store": {}})
    bad = doctor("--for", two_hosts)
    assert bad.returncode == 1 and "BAD  line 1    nnodes=2 can't be used" in bad.stdout and "-> use 1:" in bad.stdout
    unknown = doctor("--for", line(models["llama"], flags="--bogus"))
    assert unknown.returncode == 2 and unknown.stdout == "" and len(unknown.stderr.splitlines()) == 1
    assert "vllm: error: unrecognized arguments: --bogus" in unknown.stderr


@pytest.mark.parametrize("text, words", [
    ("vllm serve m --x 'y", "no closing quotation.*cat FILE"),
    ("vllm serve m | tee log", "is the shell's"), ("vllm serve m && vllm serve m", "is the shell's"),
    ("vllm serve $MODEL", r"value in the place of '\$MODEL'"), ("vllm serve `cat m`", "value in the place of"),
    ("vllm bench m", "write `vllm serve"), ("vllm-pd up m", "write `vllm serve"), ("", "write `vllm serve"),
    ("python -m vllm.entrypoints.openai.api_server", "write `vllm serve"), ("A=1 B=2", "write `vllm serve")])
def test_what_is_no_line_is_refused_with_a_cure(text, words):
    with pytest.raises(ConfigError, match=f"(?s)--for=.*{words}"):
        CommandLine.parse(text)


def test_a_line_as_a_shell_would_get_it():
    assert CommandLine.parse("A=1 B='x y' /usr/bin/vllm serve m \\\n --x '{\"y\": 1}'") == CommandLine(
        (("A", "1"), ("B", "x y")), ("m", "--x", '{"y": 1}'))


def test_too_many_lines():
    with pytest.raises(ConfigError, match="at most 64"):
        examine_lines(["vllm serve m"] * 65)


def test_what_a_shell_would_leave_as_it_is():
    assert CommandLine.parse("vllm serve m --x '{\"$defs\": \"`\"}'").words == ("m", "--x", '{"$defs": "`"}')


def test_an_error_shows_no_variable_in_front():
    with pytest.raises(ConfigError) as caught:
        CommandLine.parse("VLLM_API_KEY='my secret' OTHER=\"two\" vllm serve m | tee log")
    assert "secret" not in str(caught.value) and "two" not in str(caught.value) and "vllm serve m" in str(caught.value)
