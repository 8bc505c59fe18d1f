"""Linear layers of vLLM's own quantisation methods, whose choice of a kernel falls on minfer's: weights in the form of the checkpoint, the
layer's result against float64."""

from __future__ import annotations

import pytest
import torch

vllm = pytest.importorskip("vllm")

from minfer.integrations.vllm import linear as kernels  # noqa: E402
from vllm.model_executor.kernels import linear as registry  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.platforms.interface import PlatformEnum  # noqa: E402

from .cases import packed  # noqa: E402

TABLES = {
    "_POSSIBLE_KERNELS": kernels.MinferPackedLinearKernel,
    "_POSSIBLE_FP8_KERNELS": kernels.MinferFp8LinearKernel,
    "_POSSIBLE_FP8_BLOCK_KERNELS": kernels.MinferFp8BlockLinearKernel,
    "_POSSIBLE_INT8_KERNELS": kernels.MinferInt8LinearKernel,
}
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def chosen_first(monkeypatch, process_group):
    """On the CPU, too."""
    for name, kernel in TABLES.items():
        table, platform = getattr(registry, name), current_platform._enum
        monkeypatch.setitem(table, platform, [kernel, *table.get(platform, [])])


def test_registered_in_front(monkeypatch, adapter):
    for name in TABLES:
        monkeypatch.setitem(getattr(registry, name), PlatformEnum.CUDA, list(getattr(registry, name)[PlatformEnum.CUDA]))
    adapter.register_linear()
    adapter.register_linear()  # as in a process that loads plug-ins twice
    for name, kernel in TABLES.items():
        own = getattr(registry, name)[PlatformEnum.CUDA]
        assert own[0] is kernel and own.count(kernel) == 1


def layer_of(method, k: int, widths: list[int], dtype: torch.dtype, **more) -> torch.nn.Module:
    """A layer with the method's parameters, which hold nothing yet."""
    layer = torch.nn.Module()
    layer.logical_widths = widths
    method.create_weights(
        layer,
        input_size_per_partition=k,
        output_partition_sizes=widths,
        input_size=k,
        output_size=sum(widths),
        params_dtype=dtype,
        weight_loader=lambda *_: None,
        **more,
    )
    return layer


def close(have: torch.Tensor, want: torch.Tensor) -> None:
    error = (have.double() - want).norm() / want.norm()
    assert have.isfinite().all() and error < 4e-3, error


def make_codes(n: int, k: int, bits: int, group: int, dtype: torch.dtype):
    groups = 1 if group == -1 else k // group
    codes = torch.randint(0, 2**bits, (n, k))
    scales = ((0.5 + torch.rand(n, groups)) * 0.05).to(dtype)
    zeros = torch.randint(0, 2**bits, (n, groups))
    return codes, scales, zeros


def weight_of(codes, scales, zeros) -> torch.Tensor:
    columns = codes.shape[1] // scales.shape[1]
    spread = [x.double().repeat_interleave(columns, 1) for x in (scales, zeros)]
    return (codes.double() - spread[1]) * spread[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits, symmetric, group", [(4, True, 128), (4, True, -1), (4, False, 64), (8, True, 128), (8, True, -1)])
def test_compressed_tensors(bits, symmetric, group, dtype):
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16 import CompressedTensorsWNA16

    torch.manual_seed(0)
    n, k = 192, 256
    codes, scales, zeros = make_codes(n, k, bits, group, dtype)
    strategy = "channel" if group == -1 else "group"
    method = CompressedTensorsWNA16(strategy, bits, None if group == -1 else group, symmetric)
    layer = layer_of(method, k, [128, 64], dtype)
    assert type(method.kernel) is kernels.MinferPackedLinearKernel
    layer.weight_packed.data.copy_(packed(codes, bits, 1))
    layer.weight_scale.data.copy_(scales)
    if symmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    else:
        layer.weight_zero_point.data.copy_(packed(zeros, bits, 0))
    method.process_weights_after_loading(layer)
    assert layer.weight_packed is None
    x, bias = torch.randn(2, 5, k).to(dtype), torch.randn(n).to(dtype)
    want = x.double() @ weight_of(codes, scales, zeros).t()
    close(method.apply_weights(layer, x, None), want)
    close(method.apply_weights(layer, x, bias), want + bias.double())


def test_awq():
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig, AutoAWQMarlinLinearMethod

    torch.manual_seed(1)
    n, k, group, dtype = 128, 256, 128, torch.float16
    codes, scales, zeros = make_codes(n, k, 4, group, dtype)
    config = AutoAWQConfig.from_config({"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "lm_head": False})
    method = AutoAWQMarlinLinearMethod(config)
    layer = layer_of(method, k, [n], dtype)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # nibble i of a word holds its column order[i]
    in_words = [x.t().unflatten(1, (-1, 8))[..., order].flatten(1) for x in (codes, zeros)]
    layer.qweight.data.copy_(packed(in_words[0], 4, 1))
    layer.qzeros.data.copy_(packed(in_words[1], 4, 1))
    layer.scales.data.copy_(scales.t())
    method.process_weights_after_loading(layer)
    x = torch.randn(7, k).to(dtype)
    close(method.apply(layer, x, None), x.double() @ weight_of(codes, scales, zeros).t())


@pytest.mark.parametrize("group, bits", [(128, 4), (-1, 4)])  # of 8 bits vLLM asks a GPU for Marlin first
def test_gptq(group, bits):
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig, AutoGPTQLinearMethod

    torch.manual_seed(2)
    n, k, dtype = 128, 256, torch.bfloat16
    codes, scales, _ = make_codes(n, k, bits, group, dtype)
    config = AutoGPTQConfig.from_config({"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True})
    method = AutoGPTQLinearMethod(config)
    layer = layer_of(method, k, [n], dtype)
    layer.qweight.data.copy_(packed(codes.t(), bits, 0))
    layer.scales.data.copy_(scales.t())
    method.process_weights_after_loading(layer)
    x = torch.randn(3, k).to(dtype)
    close(method.apply(layer, x, None), x.double() @ weight_of(codes, scales, torch.full_like(scales, 2 ** (bits - 1))).t())


def quantised(x: torch.Tensor, block: int | None) -> torch.Tensor:
    """What the codes of tokens say, with a scale of each, or of each ``block`` of one."""
    parts = x.double() if block is None else x.double().unflatten(-1, (-1, block))
    scale = parts.abs().amax(-1, keepdim=True) / 448
    said = (parts / scale).float().to(FP8).double() * scale
    return said if block is None else said.flatten(-2)


def fp8_layer(weight: torch.Tensor, **scales: torch.Tensor) -> torch.nn.Module:
    layer = torch.nn.Module()
    for name, x in {"weight": weight, **scales}.items():
        layer.register_parameter(name, torch.nn.Parameter(x, requires_grad=False))
    return layer


@pytest.mark.parametrize("per_channel", [True, False])
def test_fp8(per_channel, config):
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys

    torch.manual_seed(3)
    n, k, dtype = 192, 256, torch.bfloat16
    weight, scale = torch.randn(n, k).to(FP8), (0.5 + torch.rand(n, 1)) if per_channel else torch.tensor([0.7])
    method = registry.init_fp8_linear_kernel(
        keys.kFp8DynamicTokenSym if per_channel else keys.kFp8StaticTensorSym,
        keys.kFp8StaticChannelSym if per_channel else keys.kFp8StaticTensorSym,
        dtype,
        dtype,
        (n, k),
    )
    assert type(method) is kernels.MinferFp8LinearKernel
    given = None if per_channel else torch.tensor([0.02])
    layer = fp8_layer(weight.t(), weight_scale=scale) if per_channel else fp8_layer(weight.t(), weight_scale=scale, input_scale=given)
    x, bias = torch.randn(6, k).to(dtype), torch.randn(n).to(dtype)
    tokens = quantised(x, None) if per_channel else (x.float() / given).clamp(-448, 448).to(FP8).double() * given.double()
    want = tokens @ (weight.double() * scale.double()).t() + bias.double()
    close(method.apply_weights(layer, x, bias), want)


def test_fp8_blocks(config):
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys

    torch.manual_seed(4)
    n, k, dtype = 256, 384, torch.bfloat16
    weight, scale = torch.randn(n, k).to(FP8), 0.5 + torch.rand(n // 128, k // 128)
    method = registry.init_fp8_linear_kernel(keys.kFp8Dynamic128Sym, keys.kFp8Static128BlockSym, dtype, dtype, (n, k))
    assert type(method) is kernels.MinferFp8BlockLinearKernel
    layer = fp8_layer(weight, weight_scale_inv=scale)
    method.process_weights_after_loading(layer)
    x = torch.randn(6, k).to(dtype)
    spread = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    close(method.apply_weights(layer, x), quantised(x, 128) @ (weight.double() * spread).t())


@pytest.mark.parametrize("case", ["dynamic", "static", "static with zero points"])
def test_int8(case):
    torch.manual_seed(5)
    n, k, dtype, widths = 192, 256, torch.bfloat16, [128, 64]
    static, zero_points = case != "dynamic", case.endswith("points")
    method = registry.init_int8_linear_kernel(False, static, not zero_points, "test")
    assert type(method) is kernels.MinferInt8LinearKernel
    weight, scale = torch.randint(-128, 128, (n, k), dtype=torch.int8), torch.tensor([[0.01], [0.02]])
    layer = fp8_layer(weight, weight_scale=scale, bias=torch.randn(n).to(dtype))
    layer.logical_widths = widths
    given = {"input_scale": torch.tensor([0.03, 0.02]) if static else None}
    given["input_zero_point"] = torch.tensor([7, -20], dtype=torch.int8) if zero_points else None
    for name, tensor in given.items():
        layer.register_parameter(name, None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False))
    bias = layer.bias
    method.process_weights_after_loading(layer)
    x = torch.randn(6, k).to(dtype)
    if not static:
        of_token = x.double().abs().amax(-1, keepdim=True) / 127
        tokens = (x.double() / of_token).round() * of_token
    else:
        s, z = layer.minfer.input_scale.double(), 0
        if zero_points:
            z = int(layer.minfer.input_zero)
            # As far as both of the joined ranges reach.
            assert float(s * (127 - z)) >= 0.03 * 119.9 and float(s * (-128 - z)) <= -0.03 * 134.9 + float(s)
        tokens = ((x.double() / s).round() + z).clamp(-128, 127).sub(z) * s
    want = tokens @ (weight.double() * scale.double().repeat_interleave(torch.tensor(widths), 0)).t() + bias.double()
    error = (method.apply_weights(layer, x, bias).double() - want).norm() / want.norm()
    assert error < 6e-3, error


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"group_size": 48}, "groups of 48"),
        ({"act_type": torch.float32}, "activations"),
        ({"partition_weight_shape": (256, 100)}, "multiples of 8"),
        ({"partition_weight_shape": (192, 128)}, "end within a group"),
    ],
)
def test_what_it_leaves_to_others(changes, reason):
    from vllm.scalar_type import scalar_types

    base = dict(full_weight_shape=(512, 128), partition_weight_shape=(256, 128), weight_type=scalar_types.uint4b8, act_type=torch.bfloat16)
    config = registry.MPLinearLayerConfig(**(base | {"group_size": 128, "zero_points": False} | changes))
    can, why = kernels.MinferPackedLinearKernel.can_implement(config)
    assert not can and reason in why


@pytest.mark.parametrize("form", ["w4a16", "fp8", "int8"])
def test_compiled_whole(form, config):
    """vLLM compiles a model as one graph: nothing of the kernels may break it."""
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16 import CompressedTensorsWNA16
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys

    torch.manual_seed(6)
    n, k, dtype = 128, 256, torch.bfloat16
    if form == "w4a16":
        method = CompressedTensorsWNA16("group", 4, 128, True)
        layer = layer_of(method, k, [n], dtype)
        layer.weight_packed.data.random_(-(2**31), 2**31 - 1)
        layer.weight_scale.data.fill_(0.01)
    elif form == "fp8":
        method = registry.init_fp8_linear_kernel(keys.kFp8DynamicTokenSym, keys.kFp8StaticChannelSym, dtype, dtype, (n, k))
        layer = fp8_layer(torch.randn(n, k).to(FP8).t(), weight_scale=torch.full((n, 1), 0.02))
    else:
        method = registry.init_int8_linear_kernel(True, False, True, "test")
        layer = fp8_layer(torch.randint(-128, 128, (n, k), dtype=torch.int8), weight_scale=torch.full((n, 1), 0.02))
        layer.logical_widths = [n]
    method.process_weights_after_loading(layer)
    call = torch.compile(lambda x: method.apply_weights(layer, x, None), fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for tokens in (3, 7):
            x = torch.randn(tokens, k).to(dtype)
            assert torch.equal(call(x), method.apply_weights(layer, x, None))
