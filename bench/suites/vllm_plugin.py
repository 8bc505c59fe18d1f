"""A decode step of vLLM's own layers with minfer's plug-in, beside the same step by vLLM's kernels.

`python -m bench.suites.vllm_plugin --out bench/results/<device>/vllm_plugin.json`

A dense model of a published shape with random weights, layer by layer as a worker of vLLM 0.32 has it: RMSNorm with the residual, the
product of q, k and v, rotary embedding, storing in pages of 16, attention, the projection, RMSNorm, gate and up, SwiGLU, down; the head in
16 bits and argmax. The layers are vLLM's classes, chosen and loaded by vLLM; the whole step is one CUDA graph. The peer is
:mod:`bench.peers.vllm_step`. Formats: weights, and after "-kv8" an ``int8_per_token_head`` cache, which the peer reads in 16 bits: vLLM's
own kernels for it are slower.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from minfer.measure import benchmarking, models
from torch import Tensor

from bench.peers.vllm_step import VllmStep, replay_ms

FORMATS = {"w4a16": ("w4a16", "auto"), "w4a16-kv8": ("w4a16", "int8_per_token_head"), "fp8": ("fp8", "auto"), "bf16": ("bf16", "auto")}
PAGE = 16
PROTOCOL = "a CUDA graph of the whole step, median of replays; random weights; vLLM 0.32's layers with minfer's plug-in"


@contextmanager
def vllm_process() -> Iterator[None]:
    """One rank, custom ops on, minfer's plug-in loaded."""
    import tempfile

    from minfer.integrations.vllm import register
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.kernels import linear as registry
    from vllm.platforms.interface import PlatformEnum

    found = register()
    if not torch.cuda.is_available():  # vLLM chooses among the CPU's kernels there
        for table in (registry._POSSIBLE_KERNELS, registry._POSSIBLE_FP8_KERNELS):
            table[PlatformEnum.CPU] = table[PlatformEnum.CUDA][:1]
    missing = {name: part.note for name, part in found.items() if not part.active}
    if missing:
        raise SystemExit(f"bench.suites.vllm_plugin: not registered: {missing}")
    with (
        tempfile.TemporaryDirectory() as folder,
        set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))),
    ):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, backend="gloo")
        parallel_state.initialize_model_parallel(1)
        if torch.cuda.is_available():
            from vllm.v1.worker.workspace import init_workspace_manager

            init_workspace_manager(torch.device("cuda", 0))
        yield


def _linear(n: int, k: int, weights: str, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A linear layer of vLLM's with random weights; the kernel is the one that vLLM chooses."""
    from minfer.integrations.vllm import linear as kernels
    from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16 import CompressedTensorsWNA16
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys

    layer = torch.nn.Module()
    if weights == "bf16":
        weight = torch.randn(n, k, dtype=dtype, device=device) / k**0.5
        return lambda x: F.linear(x, weight)
    if weights == "fp8":
        kernel = init_fp8_linear_kernel(keys.kFp8DynamicTokenSym, keys.kFp8StaticChannelSym, dtype, dtype, (n, k))
        values = {"weight": (torch.randn(n, k, device=device) * 16).to(torch.float8_e4m3fn).t()}
        values["weight_scale"] = torch.full((n, 1), 1 / 16 / k**0.5, device=device)
        for name, x in values.items():
            layer.register_parameter(name, torch.nn.Parameter(x, requires_grad=False))
        assert type(kernel) is kernels.MinferFp8LinearKernel, kernel
        return lambda x: kernel.apply_weights(layer, x)
    method = CompressedTensorsWNA16("group", 4, 128, True)
    with torch.device(device):
        method.create_weights(layer, n, k, [n], k, dtype, lambda *_: None)
    assert type(method.kernel) is kernels.MinferPackedLinearKernel, method.kernel
    layer.weight_packed.data.random_(-(2**31), 2**31 - 1)
    layer.weight_scale.data.fill_(0.2 / k**0.5)
    method.process_weights_after_loading(layer)
    return lambda x: method.apply_weights(layer, x, None)


class PluginStep:
    """The step of ``batch`` sequences of ``context`` tokens each; config and form as in :class:`bench.peers.vllm_step.VllmStep`."""

    def __init__(self, config: Any, batch: int, context: int, form: str, dtype: torch.dtype, device: torch.device):
        from minfer.integrations.vllm import attention
        from vllm.model_executor.layers.activation import SiluAndMul
        from vllm.model_executor.layers.layernorm import RMSNorm
        from vllm.model_executor.layers.rotary_embedding import get_rope
        from vllm.v1.attention.backend import CommonAttentionMetadata
        from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

        weights, kv = FORMATS[form]
        hidden, inter = config.hidden_size, config.intermediate_size
        self.heads, self.heads_kv = config.num_attention_heads, config.num_key_value_heads
        self.size = getattr(config, "head_dim", None) or hidden // self.heads
        wide, length = (self.heads + 2 * self.heads_kv) * self.size, context + 1
        pages, stored = -(-length // PAGE), dtype if kv == "auto" else torch.int8
        spec = FullAttentionSpec(
            block_size=PAGE, num_kv_heads=self.heads_kv, head_size=self.size, dtype=stored, kv_quant_mode=get_kv_quant_mode(kv)
        )
        spec = attention.MinferAttentionBackend.customize_spec(spec)
        content = spec.state_content_size_bytes // stored.itemsize
        with torch.device(device):
            self.norm = RMSNorm(hidden, eps=config.rms_norm_eps, dtype=dtype)
            self.rope = get_rope(self.size, max(length, 2048), True, {"rope_type": "default", "rope_theta": 5e5}, dtype)
            self.embedding = torch.randn(config.vocab_size, hidden, dtype=dtype)
            self.head = torch.randn(config.vocab_size, hidden, dtype=dtype) / hidden**0.5
            self.ids = torch.randint(0, config.vocab_size, (batch,))
            self.positions = torch.full((batch,), context, dtype=torch.int64)
            table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
            rows = torch.arange(batch + 1, dtype=torch.int32)
            lengths = torch.full((batch,), length, dtype=torch.int32)
        self.silu_and_mul = SiluAndMul()
        self.layers = []
        for _ in range(config.num_hidden_layers):
            shapes = ((wide, hidden), (hidden, self.heads * self.size), (2 * inter, hidden), (hidden, inter))
            impl = attention.MinferAttentionImpl(self.heads, self.size, self.size**-0.5, self.heads_kv, kv_cache_dtype=kv)
            cache = torch.zeros(batch * pages, PAGE, self.heads_kv, content, dtype=stored, device=device).transpose(1, 2)
            self.layers.append(([_linear(n, k, weights, dtype, device) for n, k in shapes], impl, cache))
        builder = attention.MinferAttentionMetadataBuilder(spec, [], SimpleNamespace(), device)
        self.metadata = builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=rows,
                query_start_loc_cpu=rows.cpu(),
                seq_lens=lengths,
                num_reqs=batch,
                num_actual_tokens=batch,
                max_query_len=1,
                max_seq_len=length,
                block_table_tensor=table,
                slot_mapping=table[:, -1].long() * PAGE + context % PAGE,
            ),
        )

    def step(self) -> Tensor:
        q_size, kv_size, layer = self.heads * self.size, self.heads_kv * self.size, SimpleNamespace()
        x = F.embedding(self.ids, self.embedding)
        residual = torch.zeros_like(x)
        for (qkv, output, gate_up, down), impl, cache in self.layers:
            x, residual = self.norm.forward_cuda(x, residual)
            q, k, v = qkv(x).split([q_size, kv_size, kv_size], -1)
            q, k = self.rope.forward_cuda(self.positions, q, k)
            q, k, v = (y.unflatten(-1, (-1, self.size)) for y in (q, k, v))
            impl.do_kv_cache_update(layer, k, v, cache, self.metadata.slot_mapping)
            y = impl.forward(layer, q, k, v, cache, self.metadata, torch.empty_like(x[:, :1].expand(-1, q_size)))
            x = output(y)
            x, residual = self.norm.forward_cuda(x, residual)
            x = down(self.silu_and_mul.forward_cuda(gate_up(x)))
        x, residual = self.norm.forward_cuda(x, residual)
        return F.linear(x, self.head).argmax(-1)


def row_of(shape: dict[str, Any], ms: float, peer: float | None) -> dict[str, Any]:
    timing = benchmarking.Timing(ms * 1e3, ms * 1e3, ms * 1e3, ())
    facts = {"suite": "vllm_step", "op": "decode", "kernel": "", "dtype": shape["format"], "floor_us": 0.0, "rel_err": 0.0}
    theirs = {"peer": "none", "peer_us": 0.0} if peer is None else {"peer": "vllm_ops", "peer_us": peer * 1e3}
    return benchmarking.result_row(shape=shape, timing=timing, **facts, **theirs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="llama-3.1-8b", help="comma separated")
    parser.add_argument("--formats", default="w4a16,w4a16-kv8,fp8", help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--batch", default="1,16,64", help="comma separated")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, help="of each model; default: all")
    parser.add_argument("--alone", action="store_true", help="without the peer; on a CPU one step, not timed")
    parser.add_argument("--out", type=Path, help="results file, bench/results/<device>/vllm_plugin.json")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if cuda else "cpu"), torch.bfloat16
    facts = benchmarking.run_facts() | {"protocol": PROTOCOL} | ({"commit": args.commit} if args.commit else {})
    rows: list[dict[str, Any]] = []
    with vllm_process(), torch.inference_mode():
        for name in args.models.split(","):
            changes = {} if args.layers is None else {"num_hidden_layers": args.layers}
            config = models.config_of(name, **changes)
            for form in args.formats.split(","):
                for batch in (int(x) for x in args.batch.split(",")):
                    step = PluginStep(config, batch, args.context, form, dtype, device)
                    if not cuda:
                        print(f"{name} {form} batch {batch}: {step.step().tolist()}", flush=True)
                        continue
                    ms = replay_ms(step.step, args.steps)
                    del step
                    peer = None if args.alone else VllmStep(config, batch, args.context, FORMATS[form][0], dtype).ms(args.steps)
                    torch.cuda.empty_cache()
                    theirs = "" if peer is None else f", vLLM's kernels {peer:.3f} ms: {peer / ms:.2f}x"
                    print(f"{name} {form} batch {batch}: {ms:.3f} ms{theirs}", flush=True)
                    rows.append(row_of({"model": name, "format": form, "batch": batch, "context": args.context}, ms, peer))
                    if args.out is not None:
                        benchmarking.write_results(args.out, rows, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
