"""The operators, a file a family: each declared once, with its signature, its documentation, its checks and its reference."""

from . import (
    attention,
    decoder_block,
    fused,
    gemm,
    grouped_gemm,
    grouped_quantized_gemm,
    grouped_scaled_gemm,
    kv_cache,
    moe_routing,
    norm_gemm,
    quantized_gemm,
    quantized_scaled_gemm,
    sampling,
    scaled_gemm,
)

__all__ = [
    *attention.__all__,
    *decoder_block.__all__,
    *fused.__all__,
    *gemm.__all__,
    *grouped_gemm.__all__,
    *grouped_quantized_gemm.__all__,
    *grouped_scaled_gemm.__all__,
    *kv_cache.__all__,
    *moe_routing.__all__,
    *norm_gemm.__all__,
    *quantized_gemm.__all__,
    *quantized_scaled_gemm.__all__,
    *sampling.__all__,
    *scaled_gemm.__all__,
]

# From here on gemm and attention are the operators of these names, as they are in minfer; the modules are imported by their whole names.
# ruff: noqa: E402, F403
from .attention import *
from .decoder_block import *
from .fused import *
from .fused import quantize  # noqa: F401  not of minfer itself, where the name is a package's
from .gemm import *
from .grouped_gemm import *
from .grouped_quantized_gemm import *
from .grouped_scaled_gemm import *
from .kv_cache import *
from .moe_routing import *
from .norm_gemm import *
from .quantized_gemm import *
from .quantized_scaled_gemm import *
from .sampling import *
from .scaled_gemm import *
