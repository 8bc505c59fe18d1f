"""Experts of 4-bit codes in vLLM's layer: by minfer's plug-in, beside the same layer by vLLM's Marlin.

`python -m bench.suites.vllm_experts --out bench/results/<device>/vllm_experts.json`

A compressed-tensors checkpoint's layer (groups of 128) with random codes, made, loaded and run by vLLM's own quantisation method, which
chooses minfer's experts, and with ``moe_backend`` "marlin" vLLM's. A call is what follows the router: both products, the activation, and
the sum of a token's experts. Calls of a graph have other tokens and experts each; both layers have the same weights, and the outputs are
compared first.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from minfer.measure.benchmarking import result_row
from torch import Tensor

from bench import harness
from bench.suites.moe import MATRIX_RATE, MODELS, READ_RATE, routed
from bench.suites.vllm_plugin import vllm_process

GROUP = 128
PEER = "vllm_marlin"
CALLS = 16  # of a graph: routings that differ, for the codes of one would stay in L2
BOUND = 0.02  # of the relative difference between two kernels that round bf16


class Layer(torch.nn.Module):
    """What vLLM's methods read of a layer."""

    expert_map, apply_router_weight_on_input, input_dtype = None, False, None
    _loaded_expert_biases: frozenset[str] = frozenset()

    def __init__(self, config: Any):
        super().__init__()
        self.moe_config, self.activation = config, config.activation
        self.global_num_experts = config.num_experts
        self.intermediate_size_per_partition = config.intermediate_size_per_partition

    def _expert_routing_tables(self) -> None:
        return None


class Experts:
    """A layer of a model's shape. ``backend``: "auto", which the plug-in answers, or vLLM's name of another."""

    def __init__(self, model: str, backend: str, device: torch.device):
        from compressed_tensors.quantization import QuantizationArgs
        from vllm.model_executor.layers.fused_moe import config as moe_configs
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import compressed_tensors_moe_wna16

        experts, top_k, hidden, inter = MODELS[model]
        config = moe_configs.FusedMoEConfig(
            num_experts=experts,
            experts_per_token=top_k,
            hidden_dim=hidden,
            intermediate_size=inter,
            num_local_experts=experts,
            num_logical_experts=experts,
            activation=MoEActivation.SILU,
            device=device,
            routing_method=moe_configs.RoutingMethodType.Default,
            moe_parallel_config=moe_configs.FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=torch.bfloat16,
            moe_backend=backend,
        )
        codes = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP)
        self.method = compressed_tensors_moe_wna16.CompressedTensorsWNA16MoEMethod(codes, None, config)
        self.layer = Layer(config)
        with torch.device(device):
            self.method.create_weights(self.layer, experts, hidden, inter, torch.bfloat16, weight_loader=lambda *_: None)
            torch.manual_seed(0)
            for name, k in (("w13", hidden), ("w2", inter)):
                getattr(self.layer, f"{name}_weight_packed").data.random_(-(2**31), 2**31 - 1)
                getattr(self.layer, f"{name}_weight_scale").data.uniform_(0.1 / k**0.5, 0.3 / k**0.5)
            self.method.process_weights_after_loading(self.layer)

    @property
    def kernel(self) -> str:
        return self.method.experts_cls.__name__

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return self.method.apply(self.layer, x, weights, ids, None, None)


def measure(model: str, layers: dict[str, Experts], tokens: int, rounds: int, results: harness.Results) -> None:
    experts, top_k, hidden, inter = MODELS[model]
    torch.manual_seed(tokens)
    calls = []
    for _ in range(CALLS if tokens * top_k < 4 * experts else 2):
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        weights = torch.rand(tokens, top_k, device="cuda").softmax(-1)
        calls.append((x, weights, routed(experts, top_k, tokens, "uniform").int()))
    outs = {name: layer(*calls[0]).double() for name, layer in layers.items()}
    error = 0.0
    if PEER in outs:
        error = float((outs["minfer"] - outs[PEER]).norm() / outs[PEER].norm())
        if not error < BOUND:
            raise ArithmeticError(f"{model}, {tokens} tokens: the two differ by {error}")
    fns = {name: (lambda i, layer=layer: layer(*calls[i])) for name, layer in layers.items()}
    timings, failed = harness.measure(fns, len(calls), rounds=rounds)
    if failed:
        raise RuntimeError(f"{model}, {tokens} tokens: {failed}")
    ids = calls[0][2]
    active, rows = ids.unique().numel(), ids.numel()
    floor = max(active * 3 * hidden * inter * (0.5 + 2 / GROUP) / READ_RATE, 6.0 * rows * hidden * inter / MATRIX_RATE)
    peer = timings.get(PEER)
    row = result_row(
        suite="vllm_experts", op="moe_ffn_w4a16", kernel="", dtype="bf16", timing=timings["minfer"], floor_us=floor, rel_err=error,
        shape=dict(model=model, format="compressed-tensors", m=tokens, experts=experts, top_k=top_k, n=inter, k=hidden),
        peer=PEER if peer else "none", peer_us=peer.us if peer else 0.0,
    )  # fmt: skip
    results.add(row)
    theirs = f", by vLLM's Marlin {peer.us:.1f} us: {peer.us / row['us']:.2f}x" if peer else ""
    print(f"{model}, {tokens} tokens: {row['us']:.1f} us by the plug-in{theirs}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="qwen3-30b-a3b,mixtral-8x7b", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--tokens", default="1,4,16,64,256,1024,4096", help="comma separated")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--alone", action="store_true", help="without vLLM's Marlin")
    parser.add_argument("--out", type=Path, help="results file, bench/results/<device>/vllm_experts.json")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    args = parser.parse_args()
    results = harness.Results(args.out, args.commit)
    device = torch.device("cuda")
    try:
        with vllm_process(), torch.inference_mode():
            for model in args.models.split(","):
                layers = {"minfer": Experts(model, "auto", device)}
                if not args.alone:
                    layers[PEER] = Experts(model, "marlin", device)
                print(model, {name: layer.kernel for name, layer in layers.items()}, flush=True)
                for tokens in (int(t) for t in args.tokens.split(",")):
                    measure(model, layers, tokens, args.rounds, results)
    finally:
        results.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
