"""The architectures of llama.cpp that quantd reads, and how each differs from its Hugging Face form.

Source: llama.cpp's converters (conversion/*.py). A family says which HF model it is, which tensors go by
another name, and what the converter did to their values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# HF suffix -> GGUF suffix inside one layer: `model.layers.{i}.` + key, `blk.{i}.` + value.
COMMON_LAYER: dict[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_LEVEL: dict[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
GEMMA_LAYER: dict[str, str] = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
FUSED_LAYER: dict[str, str] = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}


@dataclass(frozen=True)
class Family:
    """One llama.cpp architecture.

    permuted: the rows of q and k of each head are stored in interleaved order (GGML's rotary layout).
    norm_offset: what the converter added to every norm weight.
    layer_names: rows of COMMON_LAYER that differ here. optional_numbers: config field -> GGUF key.
    """

    model_type: str
    model_class: str
    permuted: bool = False
    norm_offset: float = 0.0
    activation: tuple[str, str] = ("hidden_act", "silu")
    layer_names: dict[str, str] = field(default_factory=dict)
    optional_numbers: dict[str, str] = field(default_factory=dict)

    @property
    def layer_table(self) -> dict[str, str]:
        """HF suffix -> GGUF suffix within a layer; a GGUF name given away here leaves its common row."""
        taken = set(self.layer_names.values())
        kept = {hf: gguf for hf, gguf in COMMON_LAYER.items() if gguf not in taken}
        return kept | self.layer_names


GEMMA_ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")
SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
MULTIPLIERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", permuted=True),
    "mistral": Family("mistral", "MistralForCausalLM", permuted=True),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", permuted=True),
    "granite": Family("granite", "GraniteForCausalLM", permuted=True, optional_numbers=MULTIPLIERS),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM"),
    "phi3": Family("phi3", "Phi3ForCausalLM", layer_names=FUSED_LAYER),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", False, 1.0, GEMMA_ACTIVATION, GEMMA_LAYER, SOFTCAPS),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", False, 1.0, GEMMA_ACTIVATION, GEMMA_LAYER, SOFTCAPS),
}
