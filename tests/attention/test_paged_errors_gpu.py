"""attention_paged on a GPU: calls that cannot be right, operands of another device, and kernels by name that do not fit the call."""

import minfer
import pytest
import torch

from tests.attention.cases import bad_paged_calls
from tests.attention.kv_cache_cases import KV_FORMATS
from tests.attention.paged_cases import CODES, DEVICE, DTYPE_OF, KERNELS, PREFILL, format_of, formats_of, make
from tests.gemm.cases import DTYPES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", bad_paged_calls())
def test_calls_that_cannot_be_right(name):
    message, args, options = bad_paged_calls(DEVICE)[name]
    with pytest.raises(RuntimeError, match=f"minfer::attention_paged: .*{message}"):
        minfer.attention_paged(*args, **options)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_operands_of_another_device(kv_format):
    call = make([5, 70], kv_format, (4, 2), (64, 64), torch.float16)
    args, options = (call.q, call.cache.k, call.cache.v, call.seq_lens), call.arguments()
    for i, name in enumerate(("k_cache", "v_cache", "seq_lens"), 1):
        with pytest.raises(RuntimeError, match=f"minfer::attention_paged: {name} must be on"):
            minfer.attention_paged(*args[:i], args[i].cpu(), *args[i + 1 :], **options)
    for name, x in (options | dict(sinks=torch.zeros(4, device=DEVICE).half())).items():
        if isinstance(x, torch.Tensor):
            with pytest.raises(RuntimeError, match=f"minfer::attention_paged: {name} must be on"):
                minfer.attention_paged(*args, **options | {name: x.cpu()})


def test_kernels_that_do_not_fit():
    """A kernel by name for another format, other head dimensions or another type is refused, not run."""
    refused = lambda why: pytest.raises(RuntimeError, match=f"minfer::attention_paged: .*{why}")  # noqa: E731
    for name, kernel in KERNELS.items():
        dtype, kv_format = DTYPE_OF[kernel["ab_type"]], format_of(kernel)
        other = DTYPES[1 - DTYPES.index(dtype)]
        with refused("another element type"):
            make([70], kv_format, (2, 2), (64, 64), other).run(kernel=name)
        if kernel["tile_k"] < 256:
            with refused("head dimensions are smaller"):
                make([70], kv_format, (2, 2), (256, 64), dtype).run(kernel=name)
        for other_format in KV_FORMATS:
            if other_format != kv_format:
                with refused("another cache format"):
                    make([70], other_format, (2, 2), (64, 64), dtype).run(kernel=name)
        x = torch.zeros(1, 5, 2, 64, device=DEVICE, dtype=dtype)
        with pytest.raises(RuntimeError, match="minfer::attention: .*reads keys and values from a cache"):
            minfer.attention(x, x, x, kernel=name)
    for name, kernel in PREFILL.items():
        dtype = DTYPE_OF[kernel["ab_type"]]
        with refused("does not split the keys"):
            make([70], "16bit", (2, 2), (64, 64), dtype).run(kernel=name, num_splits=2)
        for kv_format in KV_FORMATS[1:]:
            with refused("another cache format"):
                make([70], kv_format, (2, 2), (64, 64), dtype).run(kernel=name)
    with refused("is not in the registry"):
        make([70], "16bit", (2, 2), (64, 64), torch.float16).run(kernel="attention_sm90_f16_d64_int3_decode")


@pytest.mark.parametrize("name", CODES)
def test_tiles_over_codes_that_cannot_be(name):
    dtype = DTYPE_OF[CODES[name]["ab_type"]]
    with pytest.raises(RuntimeError, match="does not split the keys"):
        make([70], formats_of(CODES[name])[0], (2, 2), (64, 64), dtype, queries=40).run(kernel=name, num_splits=2)
    for kv_format in {*KV_FORMATS} - {*formats_of(CODES[name])}:
        with pytest.raises(RuntimeError, match="another cache format"):
            make([70], kv_format, (2, 2), (64, 64), dtype, queries=40).run(kernel=name)
    x = torch.zeros(1, 5, 2, 64, device=DEVICE, dtype=dtype)
    with pytest.raises(RuntimeError, match="minfer::attention: .*reads keys and values from a cache"):
        minfer.attention(x, x, x, kernel=name)
