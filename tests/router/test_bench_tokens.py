# SPDX-License-Identifier: Apache-2.0
"""`scripts/lab/bench_tokens.py` compares the same ids; how fast is not for a test to say."""
import json
import os

import bench_tokens as bench
import pytest

SMALL = ["--conversations", "3", "--turns", "2", "--system-prompts", "2", "--system-words", "5",
         "--question-words", "4", "--answer-words", "6", "--rounds", "2"]


def arguments(*more: str) -> list[str]:
    return ["--tokenizer", os.environ["VLLM_PD_TINY_MODEL"], *SMALL, *more]


def test_each_turn_is_measured_both_ways(tmp_path, capsys):
    assert bench.main(arguments("--output", str(tmp_path / "tokens.json"))) == 0
    found = json.loads((tmp_path / "tokens.json").read_text())
    assert found["turn"] == [1, 2] and 0 < found["tokens"][0] < found["tokens"][1]
    assert len(found["whole_ms"]) == len(found["pieces_ms"]) == 2
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_other_ids_than_the_librarys_are_no_measurement(monkeypatch):
    monkeypatch.setattr(bench.TokenCache, "ids", lambda self, text: [1, 2, 3])
    with pytest.raises(RuntimeError, match="turn 0: the ids differ"):
        bench.main(arguments())
