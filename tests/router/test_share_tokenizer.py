# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench share` with a model's tokenizer and chat template."""
import json
import os

from transformers import AutoTokenizer

from vllm_pd.bench.share.measure import measure
from vllm_pd.bench.share.options import ShareBench

SAID = [("human", "Where does the night train to Lisbon leave?"), ("gpt", "From platform four, at ten past nine."),
        ("human", "And when does it arrive?"), ("gpt", "At seven in the morning."), ("human", "Thank you.")]


def test_a_conversation_is_tokenised_as_the_engines_do(tmp_path):
    (tmp_path / "talks.json").write_text(json.dumps(
        [{"conversations": [{"from": who, "value": text} for who, text in SAID]}], indent=1))
    model = os.environ["VLLM_PD_TINY_MODEL"]
    bench = ShareBench(tmp_path / "talks.json", tokenizer=model, block_size=1, engines=1, cache_blocks=(10_000, ))
    found = measure(bench, lambda line: None)

    library = AutoTokenizer.from_pretrained(model)
    roles = {"human": "user", "gpt": "assistant"}
    chat = [{"role": roles[who], "content": text} for who, text in SAID]
    prompts = [library.apply_chat_template(chat[:end], add_generation_prompt=True) for end in (1, 3, 5)]
    assert found["prompt_tokens"] == sum(map(len, prompts)) and found["answers"] == 2
    # the generation prompt is the beginning of the answer in the next prompt
    assert found["repeated_share"] == (len(prompts[0]) + len(prompts[1])) / sum(map(len, prompts))
    # D has cached each answer, too, but for its last token
    computed = [library.apply_chat_template(chat[:end])[:-1] for end in (2, 4)]
    hits = sum(len(os.path.commonprefix(pair)) for pair in zip(computed, prompts[1:], strict=True))
    [each] = found["caches"]
    assert each["one_engine"]["d"] == each["bound"] == hits / sum(map(len, prompts)) > found["repeated_share"]
