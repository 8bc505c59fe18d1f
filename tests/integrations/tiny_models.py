"""Random models of every architecture, small enough for a CPU, and how far their logits are from exact ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MOE = ("qwen3_moe", "mixtral", "gpt_oss")

_SIZES: dict[str, Any] = dict(
    vocab_size=160,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)


def _llama3() -> Any:
    from transformers import LlamaConfig

    scaling = dict(
        rope_type="llama3",
        rope_theta=10000.0,
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    return LlamaConfig(**_SIZES, rope_parameters=scaling)


def _mistral() -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_SIZES, head_dim=32, sliding_window=7)


def _qwen2() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1)


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_SIZES, head_dim=32)


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**_SIZES, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[1])


def _mixtral() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    rope = dict(
        rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=64, truncate=False
    )
    return GptOssConfig(**_SIZES, head_dim=32, num_local_experts=8, num_experts_per_tok=2, sliding_window=8, rope_parameters=rope)


def _gemma2() -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(**_SIZES, head_dim=32, sliding_window=8, query_pre_attn_scalar=24)


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **_SIZES, head_dim=32, sliding_window=8, query_pre_attn_scalar=24, layer_types=["sliding_attention"] * 2 + ["full_attention"]
    )


def _phi3() -> Any:
    from transformers import Phi3Config

    return Phi3Config(
        **_SIZES, rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5), sliding_window=None
    )


def _gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=160, n_embd=64, n_layer=3, n_head=4, n_positions=512, initializer_range=0.3, pad_token_id=0, eos_token_id=2
    )


CONFIGS = {
    "llama": _llama3,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
}


def tiny_model(name: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0, device: str = "cpu", **changes: Any) -> Any:
    """A causal language model in eval mode, all of its parameters random."""
    from transformers import AutoModelForCausalLM

    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms, biases and sinks begin as ones and zeros
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).to(device)


def exact_model(model: Any) -> Any:
    """The same weights in float32, by transformers' eager code on the CPU: thousands of times nearer than 16 bits come."""
    exact = copy.deepcopy(model).to("cpu", torch.float32)
    exact.set_attn_implementation("eager")
    if getattr(exact.config, "_experts_implementation", None) is not None:
        exact.set_experts_implementation("eager")
    return exact


def errors(logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """||error|| / ||truth|| of each token's logits."""
    truth = truth.double().cpu()
    return (logits.double().cpu() - truth).norm(dim=-1) / truth.norm(dim=-1)


def assert_as_good(ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor) -> None:
    """The rule of the project: at most twice the error of the same computation by torch, and one rounding.

    Of mixtures of experts a token may get other experts than exact logits would give it, from either model: so it is the median token's
    error.
    """
    own, other = errors(ours, truth).median(), errors(theirs, truth).median()
    assert torch.isfinite(own), own
    assert own <= 2 * other + torch.finfo(torch.bfloat16).eps, (own, other)


def random_tokens(rows: int, length: int, seed: int = 0, vocabulary: int = 160, first: int = 3) -> torch.Tensor:
    return torch.randint(first, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
