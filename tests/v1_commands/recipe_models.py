# SPDX-License-Identifier: Apache-2.0
"""The models of docs/recipes.md in tiny: a folder for each, with nothing in it but its config.json. Architecture, kinds
of layers and what the checks look at are those of the real one; the sizes are not."""
import json
from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 131072, "dtype": "bfloat16",
    "tie_word_embeddings": False}
LATENT: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_key_value_heads": 128, "num_attention_heads": 128}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "layer_types": 3 * ["linear_attention"] + ["full_attention"]}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": {**BASE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "gpt-oss": {**BASE, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "sliding_window": 128,
                "layer_types": 2 * ["sliding_attention", "full_attention"], "num_local_experts": 4,
                "num_experts_per_tok": 2},
    "gpt-oss-eagle3": {**BASE, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
                       "num_hidden_layers": 1, "draft_vocab_size": 512},
    "deepseek-v3": {**BASE, **LATENT, **EXPERTS, "architectures": ["DeepseekV3ForCausalLM"],
                    "model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
    "deepseek-v4": {**BASE, **LATENT, **EXPERTS, "architectures": ["DeepseekV4ForCausalLM"],
                    "model_type": "deepseek_v4", "num_nextn_predict_layers": 1, "compress_ratios": [1, 4, 1, 4],
                    "index_topk": 64, "index_n_heads": 8, "index_head_dim": 32, "sliding_window": 128},
    "glm-dsa": {**BASE, **LATENT, **EXPERTS, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
                "index_topk": 64, "index_n_heads": 8, "index_head_dim": 32, "num_nextn_predict_layers": 1},
    "qwen3-next": {**BASE, **QWEN_EXPERTS, **LINEAR, "architectures": ["Qwen3NextForCausalLM"],
                   "model_type": "qwen3_next", "num_nextn_predict_layers": 1},
    "nemotron-h": {**BASE, "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
                   "hybrid_override_pattern": "M-M*", "mamba_num_heads": 16, "mamba_head_dim": 32, "ssm_state_size": 16,
                   "n_groups": 8, "conv_kernel": 4, "chunk_size": 16, "num_nextn_predict_layers": 1,
                   "mtp_hybrid_override_pattern": "*"},
    "kimi-k3": {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
                "text_config": {**BASE, **LATENT, "model_type": "kimi_linear", "linear_attn_config": {
                    "full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 16, "head_dim": 32,
                    "short_conv_kernel_size": 4}},
                "vision_config": {}},
}


def write_models(folder: Path) -> dict[str, Path]:
    """The folder of each, by its name."""
    for name, config in MODELS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config, indent=1))
    return {name: folder / name for name in MODELS}
