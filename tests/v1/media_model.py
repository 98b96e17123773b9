# SPDX-License-Identifier: Apache-2.0
"""A tiny random Llava, whose language model and tokenizer are those of the tiny Llama, and images for it."""
import json
import shutil
from pathlib import Path

PIXELS = 56  # of a side
PATCH = 14
TOKENS = (PIXELS // PATCH)**2  # in place of an image


def write_llava(tiny: Path, folder: Path) -> Path:
    """Make it in this folder; `tiny` is that of the tiny Llama."""
    import torch
    from transformers import (
        AutoConfig,
        AutoTokenizer,
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    text = AutoConfig.from_pretrained(tiny)
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    text.vocab_size = max(text.vocab_size, image_token + 1)
    vision = CLIPVisionConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                              image_size=PIXELS, patch_size=PATCH, projection_dim=64, initializer_range=0.5)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=image_token,
                         vision_feature_select_strategy="default", vision_feature_layer=-2,
                         image_seq_length=TOKENS)
    torch.manual_seed(7)
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that an image changes the answer
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.08)
    model.to(torch.float32).save_pretrained(folder)
    processor = CLIPImageProcessorPil(size={"height": PIXELS, "width": PIXELS},
                                      crop_size={"height": PIXELS, "width": PIXELS})
    LlavaProcessor(image_processor=processor, tokenizer=tokenizer, patch_size=PATCH,
                   vision_feature_select_strategy="default", num_additional_image_tokens=1,
                   image_token="<image>").save_pretrained(folder)
    return folder
