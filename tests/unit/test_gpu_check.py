# SPDX-License-Identifier: Apache-2.0
"""scripts/lab/gpu_check.py: budgets, verdicts and command lines, without a process."""
import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from _gpu_check import engines
from _gpu_check.child import PartRun
from _gpu_check.deaths import judge_death
from _gpu_check.engines import EngineVariant, judge_engines, judge_pair, judge_serve, memory
from _gpu_check.harness import STOP_S, CheckSettings, GpuPart, grant_s
from _gpu_check.results import PartFailed, PartOutcome, PartResult, PartSkipped, exit_status, read_result, write_json
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd.bench.serve import choices
from vllm_pd.bench.serve.arms import Arm, ArmKind, FleetSettings, plan_arm
from vllm_pd.ops.launch.plan import STARTING_AT_ONCE, starting_at_once

PASSED, FAILED, SKIPPED, TIMED_OUT = (PartResult(one) for one in (
    PartOutcome.PASSED, PartOutcome.FAILED, PartOutcome.SKIPPED, PartOutcome.TIMED_OUT))


@given(deadline=st.floats(1, 1000), least=st.floats(0.1, 1000), left=st.floats(-100, 2000))
def test_what_is_granted_fits_into_the_budget_and_is_enough(deadline, least, left):
    granted = grant_s(GpuPart("a", "", "", deadline, least), left)
    if granted is None:
        assert min(deadline, left - STOP_S) < least
    else:
        assert least <= granted <= deadline and granted + STOP_S <= left


@pytest.mark.parametrize("results, status", [
    ([PASSED], 0), ([PASSED, SKIPPED], 0), ([SKIPPED, SKIPPED], 2), ([], 2),
    ([PASSED, FAILED], 1), ([PASSED, TIMED_OUT, PASSED], 1), ([SKIPPED, FAILED], 1),
])
def test_exit_status(results, status):
    assert exit_status({"about": PASSED, **{f"part {n}": one for n, one in enumerate(results)}}, "about") == status


def test_a_machine_that_can_not_be_described_is_a_failure():
    assert exit_status({"about": FAILED, "a": PASSED}, "about") == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"outcome": "won", "reason": "", "figures": {}}',
                                  '{"outcome": "passed", "reason": "", "figures": 3}', '{"outcome": "passed"'])
def test_half_a_result_is_none(tmp_path, text):
    file = tmp_path / "part.json"
    assert read_result(file) is None
    file.write_text(text)
    assert read_result(file) is None


def test_a_result_is_read_as_it_was_written(tmp_path):
    result = PartResult(PartOutcome.FAILED, "why", {"blocks": [1, 2]})
    write_json(tmp_path / "part.json", asdict(result))
    assert read_result(tmp_path / "part.json") == result
    assert [path.name for path in tmp_path.iterdir()] == ["part.json"]


def test_a_value_that_is_no_json_leaves_the_file_as_it_was(tmp_path):
    file = tmp_path / "part.json"
    write_json(file, 1)
    with pytest.raises(TypeError):
        write_json(file, object())
    assert json.loads(file.read_text()) == 1


def failing(said: str) -> contextlib.AbstractContextManager:
    """Inside the block PartFailed is raised that says so; with "" nothing is."""
    return pytest.raises(PartFailed, match=said) if said else contextlib.nullcontext()


@pytest.mark.parametrize("wrong, remote, leaks, said", [
    ([], 5, [], ""), ([2], 5, [], r"1 of 5 answers differ.*prompts \[2\]"), ([], 4, [], "4 of 5 prompts"),
    ([], 6, [], "6 of 5 prompts"), ([], 5, ["decode engine: blocks is 3, not 0"], "blocks is 3"),
])
def test_a_pair_of_engines_is_judged(wrong, remote, leaks, said):
    with failing(said):
        judge_pair(5, wrong, remote, leaks)


@pytest.fixture
def run(tmp_path) -> PartRun:
    return PartRun(CheckSettings("cuda", str(tmp_path)), tmp_path / "part.json", 60.0)


@pytest.mark.parametrize("variant, said", [
    (EngineVariant(needs={"layout": "kv-heads-first", "engine": "FLASHINFER"}), ""),
    (EngineVariant(needs={"layout": "kv-tokens-first"}), "decode: layout is 'kv-heads-first', not 'kv-tokens-first'"),
    (EngineVariant(needs={"engine": "FLASH_ATTN"}), "prefill: engine is 'vllm 0.32 FLASHINFER'"),
    (EngineVariant(lines=("Using V2", )), ""),
    (EngineVariant(lines=("Graph capturing", )), "^prefill has not said 'Graph capturing'$"),
    (EngineVariant(never=("V1 Model", )), ""),
    (EngineVariant(never=("V2 Model", )), "decode 0 has said 'INFO Using V2 Model Runner'"),
])
def test_engines_of_another_kind_than_asked_for_are_found(run, variant, said):
    about = {"layout": "kv-heads-first", "engine": "vllm 0.32 FLASHINFER"}
    run.note(engines={"decode": about, "prefill": about})
    lines = [("decode 0", "INFO Using V2 Model Runner"), ("prefill 0", "INFO Using V2 Model Runner"),
             ("decode 0", "GGraph capturinging finished in 3 secs"), ("broker", "GGraph capturinged")]
    with failing(said):
        judge_engines(run, variant, lines)


def serve_report(**changes) -> dict:
    point = {"requests": 9, "failed": 0, "short": {"itl_ms": {"p99": 3}, "ttft_ms": {}}, "long": {"ttft_ms": {}},
             "answer_tokens_per_s": 5.0}
    return {"arms": {"pd": {"where": "on GPU 0", "rounds": [{"points": [point | changes.pop("point", {})]}]}},
            "failed": {}, "different": [], "compared": 4} | changes


@pytest.mark.parametrize("device, changes, said", [
    ("cpu", {}, ""), ("cuda", {"different": ["request 1"]}, ""), ("cpu", {"different": ["request 1"]}, "request 1"),
    ("cuda", {"failed": {"mixed-rr": "no memory"}}, "mixed-rr: no memory"),
    ("cuda", {"arms": {}}, "no arm was measured"), ("cuda", {"point": {"failed": 2}}, "pd: 2 requests failed"),
])
def test_a_report_of_bench_serve_is_judged(tmp_path, device, changes, said):
    one = PartRun(CheckSettings(device, str(tmp_path)), tmp_path / "part.json", 60.0)
    if said:
        with pytest.raises(PartFailed, match=said):
            judge_serve(one, serve_report(**changes))
    else:
        judge_serve(one, serve_report(**changes))
        assert one.figures["arms"]["pd"]["itl_ms"] == {"p99": 3} and one.figures["compared"] == 4


def test_parts_with_engines_say_what_is_missing(run, monkeypatch):
    with pytest.raises(PartSkipped, match="it is for a GPU: FlashInfer"):
        engines.check_flashinfer(PartRun(CheckSettings("cpu", run.settings.out), run.file, 60.0))
    monkeypatch.setattr(engines, "NEEDS", ("no_such_module", ))
    for check in (engines.ask_stock, engines.check_b1, engines.check_runner, engines.check_layers_first,
                  engines.check_flashinfer, engines.check_serve):
        with pytest.raises(PartSkipped, match="not installed here: no_such_module"):
            check(run)


@pytest.mark.parametrize("there, v1, usable, said", [
    ((), True, True, "no nvcc, no ninja, and flashinfer-jit-cache is not"), ((), False, True, "no nvcc, no ninja"),
    (("bin/nvcc", ), True, True, "here: no ninja, and"), (("bin/ninja", ), True, True, "here: no nvcc, and"),
    (("bin/nvcc", "bin/ninja"), True, True, ""), (("flashinfer_jit_cache.py", ), True, True, ""),
    (("flashinfer/data/aot/kernel.so", ), True, True, ""),
    (("flashinfer_jit_cache.py", ), True, False, "has_flashinfer.*flashinfer-cubin, or nvcc and ninja"),
    (("flashinfer_jit_cache.py", ), False, False, ""),
])
def test_flashinfer_is_left_out_where_it_has_no_kernels(run, monkeypatch, tmp_path, there, v1, usable, said):
    checked = []
    for name in ("flashinfer/__init__.py", *there):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch(0o755)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "vllm.utils.flashinfer", SimpleNamespace(has_flashinfer=lambda: usable))
    monkeypatch.setattr(engines, "prepare", lambda run: v1)
    monkeypatch.setattr(engines, "check_pair", lambda *arguments: checked.append(arguments))
    if said:
        with pytest.raises(PartSkipped, match=said):
            engines.check_flashinfer(run)
    else:
        engines.check_flashinfer(run)
    assert bool(checked) == (not said)


@pytest.fixture
def no_ports(monkeypatch):
    """Plans are made without asking the kernel for ports."""
    for name in ("bench.serve.arms.require_free", "bench.serve.arms.take_free_run", "bench.serve.arms.take_free"):
        monkeypatch.setattr(f"vllm_pd.{name}", lambda *_: 9000)
    for name in ("require_free", "take_free"):
        monkeypatch.setattr(f"vllm_pd.ops.launch.plan.{name}", lambda *_: 9100)


@pytest.mark.usefixtures("no_ports")
@pytest.mark.parametrize("arguments, at_once", [
    (lambda run: memory(run, "0.40"), 1), (lambda run: memory(run, "0.40", "1000"), STARTING_AT_ONCE)])
def test_engines_that_share_a_gpu_and_measure_its_memory_start_one_at_a_time(run, arguments, at_once):
    settings = FleetSettings("m", serve_args=arguments(run), gpus=(0, ), v1=True)
    for kind in (ArmKind.PD, ArmKind.MIXED):
        plan = plan_arm(Arm("arm", kind), settings)
        assert starting_at_once(plan.engines) == at_once
        for engine in plan.engines:
            assert engine.command.count("--gpu-memory-utilization") == 1


@pytest.mark.usefixtures("no_ports")
def test_engines_with_gpus_or_cores_of_their_own_start_together():
    for devices in ({"gpus": (0, 1)}, {"cores": (0, 1)}):
        assert starting_at_once(plan_arm(Arm("pd", ArmKind.PD), FleetSettings("m", **devices)).engines) == 2


@pytest.mark.usefixtures("no_ports")
def test_engines_get_the_gpu_that_the_check_was_given(run, monkeypatch):
    plans = []

    @contextlib.contextmanager
    def running(plan, say, timeout_s):
        plans.append(plan)
        yield SimpleNamespace(pids=())

    def serve(bench, *_):
        monkeypatch.setattr(choices, "engines_run_on_cpu", lambda: False)
        plans.append(plan_arm(Arm("pd", ArmKind.PD), choices.fleet(bench)))
        write_json(Path(run.settings.out) / "serve_bench.json", serve_report())

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5d,GPU-77")
    monkeypatch.setattr("vllm_pd.bench.serve.fleets.running", running)
    monkeypatch.setattr("vllm_pd.bench.serve.command.run", serve)
    monkeypatch.setattr(engines, "prepare", lambda run: False)
    with engines.started(run, Arm("pd", ArmKind.PD), ()):
        pass
    engines.check_serve(run)
    assert [engine.env["CUDA_VISIBLE_DEVICES"] for plan in plans for engine in plan.engines] == ["GPU-5d"] * 4


def test_on_the_cpu_no_memory_of_a_gpu_is_asked_for(run):
    assert memory(PartRun(CheckSettings("cpu", ""), run.file, 1.0), "0.40", "1000") == ()


def test_side_by_side_engines_ask_for_a_small_share(run):
    at_once = PartRun(CheckSettings("cuda", "", at_once=True), run.file, 1.0)
    assert memory(at_once, "0.40", "1000") == ("--gpu-memory-utilization", "0.10", "--kv-cache-memory-bytes", "1000")
    assert memory(at_once, "0.40") == ("--gpu-memory-utilization", "0.40")


@pytest.mark.parametrize("wrong, leaks, interrupted, said", [
    ([], [], 1, ""), ([4], [], 1, "1 of 9 answers"), ([], ["decode engine: 3 blocks"], 2, "3 blocks"),
    ([], [], 0, "nothing was under way"),
])
def test_a_death_is_judged(wrong, leaks, interrupted, said):
    with failing(said):
        judge_death(9, wrong, leaks, interrupted)
