# SPDX-License-Identifier: Apache-2.0
"""A tiny random Idefics3, whose language model and tokenizer are those of the tiny Llama. Among the models that vLLM
computes without torchvision it is one with several images in a prompt, and tokens of a placeholder without embeddings.
"""
from pathlib import Path

PIXELS = 112  # of a side
PATCH = 14
SCALE = 2
TOKENS = (PIXELS // PATCH // SCALE)**2  # with an embedding, in place of an image
MARKS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")


def write_idefics(tiny: Path, folder: Path) -> int:
    """Make it in this folder; `tiny` is that of the tiny Llama. Returns the token id of an image in a prompt."""
    import torch
    from transformers import (
        AutoConfig,
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    image_token = tokenizer.convert_tokens_to_ids(MARKS[0])
    text = AutoConfig.from_pretrained(tiny)
    text.vocab_size = len(tokenizer)
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
              "image_size": PIXELS, "patch_size": PATCH}
    config = Idefics3Config(vision_config=vision, text_config=text.to_dict(), scale_factor=SCALE,
                            image_token_id=image_token, pad_token_id=text.pad_token_id, tie_word_embeddings=True)
    torch.manual_seed(7)
    model = Idefics3ForConditionalGeneration(config)
    for weight in model.parameters():
        if weight.dim() > 1:  # so large that an image decides the answer
            torch.nn.init.normal_(weight, std=0.08)
    model.save_pretrained(folder)
    size = {"longest_edge": PIXELS}
    Idefics3Processor(Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False), tokenizer,
                      image_seq_len=TOKENS).save_pretrained(folder)
    return image_token
