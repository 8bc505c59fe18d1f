"""Operands that the launch in front writes late: nothing may be read before the wait of a programmatic dependent launch.

A kernel of minfer's lets the next one begin at once (griddepcontrol.launch_dependents), so that a second minfer operator on the same stream
is running, up to its wait, while the first still computes. Whatever the second one reads before its wait, it reads stale. Torch's kernels
do not allow that; the writer must therefore be one of ours, and a slow one. It is ``minfer.gemm`` with ``out=`` over the operand's bytes,
taken as
float16: [content, 0] . [I; 0] with k of 32768, which few thread blocks add up in 100 us or so, while the other multiprocessors are free for
the operator under test. float16 numbers that are finite and not -0 come out of it bit by bit, so that codes, indices and float32 numbers
can
be written in the same way: contents that are others are changed a little first (:func:`writable`), which for any operand is still legal.

The operand holds other valid data before. Results must have the bits of a call whose operands were all there before it was made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import minfer
import torch
from torch import Tensor

from . import modes
from .arena import raw_bytes
from .draw import Data, Draw, Limits
from .family import Contents, Family, Parameters

# Every tensor argument of every operator; a test on the CPU compares it with what the families draw.
OPERANDS: dict[str, tuple[str, ...]] = {
    "attention": ("q", "k", "v", "sinks"),
    "attention_varlen": ("q", "k", "v", "sinks", "cu_seqlens_q", "cu_seqlens_k"),
    "attention_paged": (
        *("q", "k_cache", "v_cache", "seq_lens", "block_table", "cu_seqlens_q", "sinks"),
        *("k_scale", "v_scale", "k_residual", "v_residual"),
    ),
    "kv_cache_append": (
        *("k", "v", "k_cache", "v_cache", "slot_mapping", "cu_seqlens"),
        *("k_scale", "v_scale", "k_residual", "v_residual"),
    ),
    "qk_norm_rope_append": (
        *("qkv", "q_weight", "k_weight", "cos_sin", "positions", "k_cache", "v_cache", "slot_mapping", "cu_seqlens"),
        *("k_scale", "v_scale", "k_residual", "v_residual"),
    ),
    "merge_attention_states": ("out0", "lse0", "out1", "lse1"),
    "gemm": ("a", "b", "c", "bias", "scale"),
    "gemm_gated": ("a", "b", "bias", "scale"),
    "gemm_fp8": ("a", "b", "a_scale", "b_scale", "c", "bias", "out_scale"),
    "gemm_fp8_gated": ("a", "b", "a_scale", "b_scale", "bias", "out_scale"),
    "gemm_int8": ("a", "b", "a_scale", "b_scale", "a_zero", "b_sums", "c", "bias"),
    "gemm_int8_gated": ("a", "b", "a_scale", "b_scale", "a_zero", "b_sums", "bias"),
    "w4a16_gemm": ("a", "qweight", "scales", "zeros", "perm", "c", "bias", "scale"),
    "w4a16_gemm_gated": ("a", "qweight", "scales", "zeros", "perm", "bias", "scale"),
    "w8a16_gemm": ("a", "qweight", "scales", "zeros", "perm", "c", "bias", "scale"),
    "w8a16_gemm_gated": ("a", "qweight", "scales", "zeros", "perm", "bias", "scale"),
    "w4a8_gemm": ("a", "a_scale", "qweight", "scales", "c", "bias", "scale"),
    "w4a8_gemm_gated": ("a", "a_scale", "qweight", "scales", "bias", "scale"),
    "w4a16_pack": ("codes",),
    "w8a16_pack": ("codes",),
    "w4a16_dequantize": ("qweight", "scales", "zeros"),
    "w8a16_dequantize": ("qweight", "scales", "zeros"),
    "moe_router": ("logits", "correction_bias"),
    "moe_router_gemm": ("x", "w_gate", "correction_bias"),
    "moe_sort": ("ids", "weights"),
    "moe_combine": ("y", "inverse", "weights"),
    "grouped_gemm": ("a", "b", "offsets", "bias", "gather", "row_scale", "scale"),
    "grouped_gemm_masked": ("a", "b", "counts", "bias", "row_scale", "scale"),
    "grouped_w4a16_gemm": ("a", "qweight", "scales", "zeros", "offsets", "alpha", "bias", "gather", "row_scale", "scale"),
    "grouped_gemm_fp8": ("a", "b", "a_scale", "b_scale", "offsets", "bias", "gather", "row_scale", "out_scale"),
    "grouped_gemm_fp8_masked": ("a", "b", "a_scale", "b_scale", "counts", "bias", "row_scale", "out_scale"),
    "grouped_gemm_int8": ("a", "b", "a_scale", "b_scale", "offsets", "bias", "gather", "row_scale"),
    "grouped_gemm_int8_masked": ("a", "b", "a_scale", "b_scale", "counts", "bias", "row_scale"),
    "moe_ffn": ("x", "w13", "w2", "weights", "ids", "b13", "b2"),
    "moe_ffn_w4a16": (
        *("x", "w13", "w13_scales", "w13_zeros", "w2", "w2_scales", "w2_zeros"),
        *("weights", "ids", "alpha13", "alpha2", "b13", "b2"),
    ),
}
OPERANDS |= dict.fromkeys(
    ("moe_ffn_fp8", "moe_ffn_int8"), ("x", "w13", "w2", "w13_scale", "w2_scale", "weights", "ids", "x_scale", "b13", "b2")
)
OPERANDS |= {
    "rms_norm": ("x", "weight"),
    "rms_norm_quantized": ("x", "weight", "scale"),
    "add_rms_norm": ("x", "residual", "weight"),
    "add_rms_norm_quantized": ("x", "residual", "weight", "scale"),
    "layer_norm": ("x", "weight", "bias"),
    "softmax": ("x",),
    "log_softmax": ("x",),
    "activation": ("x", "bias"),
    "gated_activation": ("x",),
    "gated_activation_quantized": ("x", "scale"),
    "quantize": ("x", "scale"),
    "dequantize": ("q", "scales"),
    "hadamard": ("x",),
    "rope": ("q", "k", "cos_sin", "positions"),
    "embedding": ("ids", "weight"),
    "sample": (
        *("logits", "temperatures", "top_ks", "top_ps", "min_ps", "repetition_penalties", "presence_penalties", "frequency_penalties"),
        *("seeds", "offsets", "counts", "bias", "allowed"),
    ),
}
OPERANDS |= dict.fromkeys(("rms_norm_gemm", "rms_norm_gemm_gated"), ("x", "residual", "norm_weight", "b", "bias"))
OPERANDS |= dict.fromkeys(
    [f"rms_norm_w{bits}a16_gemm{gated}" for bits in (4, 8) for gated in ("", "_gated")],
    ("x", "residual", "norm_weight", "qweight", "scales", "zeros", "perm", "bias"),
)
OF_BLOCK = {
    op: tuple(f"{name}_{part}" for name in ("o", "gate_up", "down", "next") for part in parts)
    for op, parts in (
        ("decoder_block", ("weight",)),
        ("w4a16_decoder_block", ("qweight", "scales")),
        ("fp8_decoder_block", ("weight", "scale")),
    )
}
OPERANDS |= {op: ("a", "residual", "mlp_norm", "next_norm", *names, "o_bias", "down_bias", "next_bias") for op, names in OF_BLOCK.items()}
WEIGHTS = (
    "b",
    "qweight",
    "scales",
    "zeros",
    *(name for names in OF_BLOCK.values() for name in names),
)  # of which ``constant_weights`` says that nothing still writes them
LARGEST = 1 << 18  # bytes of an operand that is written: a few thread blocks, so that there is room beside them
SIZES = Limits(elements=1 << 16, work=1 << 26, scores=1 << 18, cuda=True)  # on the CPU what the CPU takes
DEPTH = 32768  # k of the writer's product
ROUNDS = 4  # of writing late, eagerly and from a graph


def writable(x: Tensor) -> Tensor:
    """x with those bits changed that no product can write: 16-bit words that, as float16, are infinite, NaN or -0 become numbers beside."""
    words = raw_bytes(x).clone()
    words = torch.nn.functional.pad(words, (0, -words.numel() % 2)).view(torch.int16)
    words = torch.where((words & 0x7C00) == 0x7C00, words & ~0x0400, words)
    words = torch.where(words == -0x8000, words + 1, words)
    whole = words.view(torch.uint8)[: x.numel() * x.element_size()]
    return whole.clone().view(x.dtype).view(x.shape) if x.numel() else x.clone()


def writing_kernel(device: torch.device) -> str | None:
    """A GEMM that computes a tile of D in one thread block, however large k is."""
    if device.type != "cuda":
        return None
    wanted = {"ab_type": "f16", "a_major": "k", "b_major": "k", "tile_m": 128, "tile_n": 128, "schedule": "cooperative"}
    for kernel in minfer.kernels("gemm"):
        clusters = (kernel["cluster_m"], kernel["cluster_n"])
        if (
            kernel["compiled"]
            and kernel["arch"] == 90
            and clusters == (1, 1)
            and all(kernel[key] == value for key, value in wanted.items())
        ):
            return f"{kernel['name']}@decomposition=persistent"
    return None


class Late:
    """An operand, and the product that writes it."""

    def __init__(self, content: Tensor, device: torch.device, depth: int = DEPTH):
        size = content.numel() * content.element_size()
        halves = -(-size // 2)
        self.columns = min(256, -(-halves // 8) * 8)
        self.rows = -(-halves // self.columns)
        self.out = torch.zeros(self.rows, self.columns, dtype=torch.float16, device=device)
        self.a = torch.zeros(self.rows, depth, dtype=torch.float16, device=device)
        self.b = torch.zeros(self.columns, depth, dtype=torch.float16, device=device)
        self.b[:, : self.columns] = torch.eye(self.columns, dtype=torch.float16, device=device)
        self.kernel = writing_kernel(device)
        self.bytes = self.out.view(-1).view(torch.uint8)
        self.view = self.bytes[:size].view(content.dtype).view(content.shape)
        self.content = writable(content)
        words = torch.zeros_like(self.bytes)
        words[:size] = raw_bytes(self.content)
        self.a[:, : self.columns] = words.view(torch.float16).view(self.rows, self.columns)

    def hold(self, content: Tensor) -> None:
        """At once, as torch does."""
        size = content.numel() * content.element_size()
        self.bytes[:size] = raw_bytes(content)

    def write(self) -> None:
        """Its content, in some 100 us."""
        minfer.gemm(self.a, self.b.t(), kernel=self.kernel, out=self.out)


@dataclass
class Case:
    """A call, its contents, and those of another that fits to the same tensors."""

    family: Family
    p: Parameters
    now: Contents
    before: Contents


def draw_case(family: Family, operand: str, draw: Draw, data: Data) -> Case | None:
    """A case that has the operand, with elements, and none that is too large."""
    limits = SIZES._replace(cuda=data.device.type == "cuda")
    for _ in range(400):
        p = family.draw(draw, limits)
        if not family.dense(p):
            continue
        now = family.fill(p, draw, data)
        x = now.tensors.get(operand)
        sizes = [y.numel() * y.element_size() for y in now.tensors.values() if y is not None]
        if x is not None and x.numel() > 0 and max(sizes) <= 16 * LARGEST and x.numel() * x.element_size() <= LARGEST:
            return Case(family, p, now, family.fill(p, draw, data))
    return None


def check(case: Case, operand: str, device: torch.device, depth: int = DEPTH) -> str | None:
    """Why the operator is wrong where ``operand`` is written late; "blind" where its old contents give the same results."""
    family, p = case.family, case.p | ({"constant": False} if operand in WEIGHTS else {})
    late = Late(case.now.tensors[operand], device, depth)
    old = writable(case.before.tensors[operand])
    fixed = {name: None if x is None else x.clone() for name, x in case.now.tensors.items()}
    tensors: dict[str, Tensor | None] = fixed | {operand: late.view}
    out = family.out(p)
    if out is not None and "out_is" not in p:
        tensors["out"] = torch.zeros(out[0], dtype=out[1], device=device)
    written = [name for name in family.written(p) if name not in ("out", operand)]
    start = {name: tensors[name].clone() for name in written}

    def set_up(content: Tensor) -> None:
        late.hold(content)
        for name in written:
            raw_bytes(tensors[name]).copy_(raw_bytes(start[name]))
        if "out" in tensors:
            tensors["out"].zero_()
        modes.synchronize(device)

    def call() -> dict[str, Tensor]:
        return family.call(p, tensors)

    set_up(late.content)
    want = modes.copies(call())
    set_up(old)
    try:
        if modes.difference(call(), want) is None:
            return "blind"
    except RuntimeError:  # old indices beside other operands: the CPU refuses them
        if device.type == "cuda":
            raise

    def rounds(what: str, run: Callable[[], dict[str, Tensor]]) -> str | None:
        for i in range(ROUNDS):
            set_up(old)
            have = run()
            modes.synchronize(device)
            text = modes.difference(have, want)
            if text:
                return f"{operand} written late, {what}, round {i}: {text}"
        return None

    def eager() -> dict[str, Tensor]:
        late.write()
        return call()

    text = rounds("eagerly", eager)
    if text or device.type != "cuda":
        return text
    set_up(old)
    recorded, results = modes.capture(device, eager)

    def replay() -> dict[str, Tensor]:
        recorded.replay()
        return results

    return rounds("in a graph", replay)


def late(call: modes.Call, contents: Contents, other: Contents, draw: Draw) -> str | None:
    """As a mode of the driver: one operand of the case, drawn, in tensors of its own."""
    fit = [
        name
        for name, x in contents.tensors.items()
        if x is not None and 0 < x.numel() * x.element_size() <= LARGEST and name in OPERANDS.get(call.family.name, ())
    ]
    if not fit or not call.family.dense(call.p):
        return None
    text = check(Case(call.family, call.p, contents, other), draw.choice(fit), call.arena.device)
    return None if text == "blind" else text
