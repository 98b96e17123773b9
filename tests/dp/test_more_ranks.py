# SPDX-License-Identifier: Apache-2.0
"""Four ranks; ranks with front ends of their own; a rank on a head-less node."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from dp_children import ENDED
from dp_loads import BOUND_S, END_S, LOCKSTEP, MAX_TOKENS, PROMPTS, at_rest, forwards

from vllm_pd.bench.dp.group import ENGINE, MEETINGS, GroupError
from vllm_pd.rpc.ports import take_free, take_free_run

NETWORK = {"dp_sync": {"shared_memory": False}}

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_b70_four_ranks_give_the_tokens_of_one(quad, expected):
    """B70: DP 4 without expert parallelism, load 6:2:1:1."""
    quad.ready().start_probe()
    loads = [0, 0, 1, 0, 0, 2, 0, 1, 0, 3]
    asked = [quad.generate(prompt, rank=loads[number % 10], max_tokens=most)
             for number, (prompt, most) in enumerate(zip(PROMPTS, MAX_TOKENS, strict=True))]  # fmt: skip
    assert quad.tokens(asked) == expected
    probes = at_rest(quad)
    assert forwards(probes)[0] > 20 and not any(probe["collectives"] for probe in probes)


def test_b73_rank_0_dies_while_all_step(quad):
    """B73: the process of rank 0 is killed in the middle of a request of rank 2: an error, in time. Ends the group."""
    quad.ready().start_probe()
    asked = quad.generate(PROMPTS[0], rank=2, max_tokens=480 - len(PROMPTS[0]))
    while not all(forwards(quad.take_probe())) and not asked.done():
        time.sleep(0.01)
    os.kill(quad.pids["EngineCore_0"], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(GroupError):
        while time.monotonic() < began + END_S:  # it may have ended before the kill
            asked.result(END_S)
            asked = quad.generate(PROMPTS[0], rank=2, max_tokens=3)
    assert time.monotonic() < began + END_S


@pytest.fixture
def meeting() -> dict:
    """Where the processes of one group meet."""
    return {"data_parallel_address": "127.0.0.1", "data_parallel_rpc_port": take_free("127.0.0.1")}


def test_b72_first_request_on_a_headless_node_54762(moe, logs, meeting, expected, forks, start_group):
    """B72: rank 1 runs without a front end, as on another machine, and gets the very first request: served.
    The ranks talk over the network, as two machines would."""
    arguments = {**ENGINE, **meeting, "data_parallel_size": 2, "data_parallel_size_local": 1}
    options = [f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}")
               for key, value in arguments.items()]  # fmt: skip
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((logs / "headless.log").open("ab"))
        node = forks.script(
            "vllm.entrypoints.cli.main", ["serve", str(moe), "--headless", *options, "--data-parallel-start-rank=1",
                                          '--additional-config={"dp_sync": {"shared_memory": false}}',
                                          "--enable-expert-parallel"], Path(log.name), log.fileno())  # fmt: skip
        stack.callback(node.wait, BOUND_S)
        stack.callback(node.terminate)
        head = stack.enter_context(start_group(moe, 2, log=logs / "head.log", data_parallel_size_local=1, **meeting,
                                               additional_config=NETWORK, enable_expert_parallel=True))  # fmt: skip
        asked = [head.generate(prompt, rank=1 - number % 2, max_tokens=most)
                 for number, (prompt, most) in enumerate(zip(PROMPTS[:20], MAX_TOKENS[:20], strict=True))]  # fmt: skip
        assert asked[0].result(BOUND_S)["tokens"] == expected[0]
        assert head.call("collective_rpc", "probe_collective", timeout_s=BOUND_S) == [[2], [2]]  # in the middle of them
        assert head.tokens(asked) == expected[:20]


@pytest.mark.heavy
def test_each_rank_with_a_front_end_of_its_own(dense, logs, meeting, tmp_path, start_group):
    """External load balancing of ranks in lockstep: no front end knows of another rank, and no coordinator process is
    there to tell it. An adapter (LoRA) that is loaded and used on one rank only does not disturb the other."""
    adapter = ["adapter", 1, str(_adapter(tmp_path, dense))]
    with contextlib.ExitStack() as stack:
        fronts = [start_group(dense, 2, log=logs / f"front{rank}.log", ranks=[rank], data_parallel_rank=rank,
                              additional_config=LOCKSTEP, enable_lora=True, max_loras=1, **meeting)
                  for rank in (0, 1)]  # fmt: skip
        for front in fronts:
            stack.callback(front.close)
        for front in fronts:
            front.ready().start_probe()
        plain = [fronts[rank].generate(PROMPTS[1], max_tokens=12).result(BOUND_S)["tokens"] for rank in (1, 0)]
        assert plain[0] == plain[1]
        busy = fronts[0].generate(PROMPTS[2], max_tokens=150)
        assert fronts[1].call("add_lora", adapter) == [True]
        changed = fronts[1].generate(PROMPTS[1], max_tokens=12, adapter=adapter).result(BOUND_S)["tokens"]
        assert changed != plain[0] and len(busy.result(BOUND_S)["tokens"]) == 150
        for front in fronts:
            front.call("remove_lora", 1)  # upstream's dummy batches may have removed it before
        assert fronts[0].generate(PROMPTS[1], max_tokens=12, adapter=adapter).result(BOUND_S)["tokens"] == changed
        steps = [forwards(at_rest(front))[0] for front in fronts]
        assert steps[0] == steps[1]
        # B73: one server is told to end. The other one's /health says so before any request comes.
        assert fronts[0].submit("health").result(BOUND_S)
        fronts[1].close()
        until = time.monotonic() + END_S
        with pytest.raises(GroupError, match="Dead"):
            while time.monotonic() < until:
                fronts[0].submit("health").result(BOUND_S)
                time.sleep(0.1)


@pytest.mark.heavy
def test_an_offline_rank_that_ends_early_leaves_the_others_their_group(moe, logs, forks):
    """`LLM` in a process per rank: rank 0 has one short prompt and ends; rank 1 calls `generate` again seconds later
    and goes on for long. Before that both make a call with a collective in it, one while the other generates."""
    port = take_free_run("127.0.0.1", MEETINGS)
    said, ranks = [logs / f"offline{rank}.txt" for rank in (0, 1)], []
    for rank, tokens in ((0, 2), (1, 300)):
        env = {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank), "VLLM_DP_SIZE": "2",
               "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port)}  # fmt: skip
        with said[rank].open("wb") as output:
            other = [str(said[0])] if rank else []
            ranks.append(forks.script(str(Path(__file__).with_name("offline_rank.py")), [str(moe), str(tokens), *other],
                                      logs / f"offline{rank}.log", output.fileno(), **env))  # fmt: skip
    for rank in ranks:
        rank.wait(2 * BOUND_S)
    assert [text.read_text().splitlines()[-2:] for text in said] == [["called [2] served 2", ENDED],
                                                                     ["called [2] served 300", ENDED]]  # fmt: skip


def _adapter(folder: Path, model: Path) -> Path:
    """A random adapter of rank 8 on the query and value projections of a Llama."""
    import torch
    from safetensors.torch import save_file

    shape = json.loads((model / "config.json").read_text())
    hidden, size = shape["hidden_size"], shape["head_dim"]
    out = {"q_proj": shape["num_attention_heads"] * size, "v_proj": shape["num_key_value_heads"] * size}
    torch.manual_seed(1)
    weights = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, width in out.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(8, hidden) * 0.3
            weights[f"{at}.lora_B.weight"] = torch.randn(width, 8) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(out), "bias": "none"}))  # fmt: skip
    return folder
