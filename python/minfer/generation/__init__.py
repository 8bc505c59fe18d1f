"""From prompts to tokens: continuous batching over a paged cache, decoding in CUDA graphs.

minfer.generate(model, ["Once upon a time"], SamplingParams(max_new_tokens=64, temperature=0.8), tokenizer=tokenizer)
"""

from .api import engine_of, generate
from .engine import Engine, Token
from .params import Completion, SamplingParams

__all__ = ["Completion", "Engine", "SamplingParams", "Token", "engine_of", "generate"]
