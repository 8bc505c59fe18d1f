"""minfer in Hugging Face transformers (5.19 to 5.24).

handle = minfer.integrations.transformers.optimize(model)                        # the whole model, reversibly
model.set_attn_implementation("minfer")                                          # its attention alone, after register()
model.generate(**inputs, past_key_values=paged_cache(model, kv_format="int4"))   # a cache alone
"""

from .cache import PagedLayer, paged_cache
from .optimize import OptimizedModel, optimize
from .quantizer import MinferConfig, load_quantized


def register() -> None:
    """Makes "minfer" an ``attn_implementation`` and an ``experts_implementation`` of transformers."""
    from . import attention, experts

    attention.register()
    experts.register()


__all__ = ["MinferConfig", "OptimizedModel", "PagedLayer", "load_quantized", "optimize", "paged_cache", "register"]
