# SPDX-License-Identifier: Apache-2.0
"""What `vllm-pd bench serve` says of its engines' own figures: bytes, steps, blocks kept over time."""
import pytest

from vllm_pd.bench.serve import report
from vllm_pd.bench.serve.watch import EngineReading, handover_figures, needed
from vllm_pd.protocol.messages import Role

PAGE = """# HELP vllm:pd_transfer_bytes_total KV bytes of completed hand-overs.
# TYPE vllm:pd_transfer_bytes_total counter
vllm:pd_transfer_bytes_total{{engine="0",model_name="m"}} {moved}
vllm:pd_transfer_bytes_created{{engine="0",model_name="m"}} 1.7e9
vllm:iteration_tokens_total_bucket{{engine="0",le="1.0",model_name="m"}} 3.0
vllm:iteration_tokens_total_count{{engine="0",model_name="m"}} {steps}
vllm:num_requests_running{{engine="0",model_name="m"}} 1.0
vllm:pd_held_blocks{{engine="0",model_name="m"}} {held}
vllm:pd_held_blocks{{engine="1",model_name="m"}} {held}
vllm:pd_sending_blocks{{engine="0",model_name="m"}} {sending}
"""


def reading(at_s: float, role: Role, moved: float = 0, steps: float = 0, held: float = 0, sending: float = 0
            ) -> EngineReading:
    return EngineReading(at_s, role, needed(PAGE.format(moved=moved, steps=steps, held=held, sending=sending)))


def test_only_the_lines_that_are_used_are_kept():
    assert [line.split("{")[0] for line in reading(0, Role.DECODE).lines.splitlines()] == [
        "vllm:pd_transfer_bytes_total", "vllm:iteration_tokens_total_count", "vllm:pd_held_blocks",
        "vllm:pd_held_blocks", "vllm:pd_sending_blocks"]


def test_bytes_and_steps_are_the_decode_engines_and_kept_blocks_the_prefill_engines():
    """What was counted before the load, as in the warm-up, does not count."""
    turns = [[reading(at, Role.PREFILL, 9e9 * at, 900 * at, held, sending),
              reading(at, Role.DECODE, 5e6 + moved, 10 + steps, 77, 77), reading(at, Role.DECODE, 1e6, 1)]
             for at, moved, steps, held, sending in ((0, 0, 0, 0, 0), (1, 1e6, 4, 6, 2), (2, 2.5e6, 9, 0, 4))]
    assert handover_figures([turns[0], [], *turns[1:]]) == {
        "bytes": 2_500_000, "megabytes": 2.5, "decode_steps": 9, "kept_blocks": {"mean": 6, "max": 14},
        "kept_over_time": [[0, 0], [1, 14], [2, 4]]}


@pytest.mark.parametrize("turns", [[], [[]] * 3, [[], [reading(0, Role.DECODE)], []]])
def test_engines_that_did_not_answer_have_no_figures(turns):
    assert handover_figures(turns) == {}


def test_the_summary_and_the_table_have_both_orders_side_by_side():
    def arm(megabytes: float, kept: float) -> dict:
        return {"where": "core 0", "rounds": [{"round": 0, "points": [{"label": "2 streams", "handover": {
            "megabytes": megabytes, "decode_steps": 300, "kept_blocks": {"mean": kept, "max": 2 * kept}}}]}]}

    found = {"settings": {"load": {"load": "chat+long"}, "compare": "tokens"}, "failed": {}, "different": [],
             "compared": 1, "arms": {"pd": arm(120.4, 3), "pd-first": arm(1340, 12.5), "single": {
                 "where": "core 0", "rounds": [{"round": 0, "points": [{"label": "2 streams", "handover": {}}]}]}}}
    assert report.summary(found)[:3] == [
        "2 streams, pd: 120 MB handed over, 300 steps of decode engines, 3.0 blocks kept at prefill engines "
        "(6 at most)",
        "2 streams, pd-first: 1,340 MB handed over, 300 steps of decode engines, 12.5 blocks kept at prefill engines "
        "(25 at most)", "2 streams, single: "]
    rows = list(zip(*(column.cells for column in report.table(found, "2 streams").columns), strict=True))
    assert rows == [("KV handed over, MB", "120", "1,340", "-"), ("steps of decode engines", "300", "300", "-"),
                    ("blocks kept at prefill engines, mean", "3.0", "12.5", "-"),
                    ("blocks kept at prefill engines, max", "6", "25", "-")]
