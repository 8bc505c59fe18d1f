"""Attention with a function of scores and a mask for sm_90a: TMA + WGMMA, warp specialised. After FlashAttention-3 (Shah et
al., 2024); the function and the mask are FlexAttention's (Dong et al., 2024).

Warp roles. Warp 0 of warpgroup 0 is the producer (attention_producer.py): it publishes tiles of queries and loads their queries, finds out
which tiles of keys they visit (attention_key_tiles.py), loads these keys and values, and writes each tile's number and kinds beside its
keys. The other warpgroups are consumers, of 64 rows each (attention_consumer.py). CTAs stay and take tiles of queries by turns, or by a
counter (attention_tiles.py).
Pipelines and shared memory: attention_shared.py.
Main loop. A consumer's scores (attention_scores.py) get the function of scores and the mask (attention_functions.py), the softmax
(attention_softmax.py, attention_soft_cap.py) makes probabilities of them, and the output is stored at the end (attention_epilogue.py).
Registers. Values of the function that depend on the row alone are computed once for a tile of queries, those that depend on the column
alone once for both of a thread's rows (attention_grid.py).
Packed heads. With few queries, rows are the query heads of a KV head next to each other, query after query: they share loads of K and V.
The consumers load them themselves.
Paged. Keys lie in pages of a cache, in boxes of rows that a page holds one after the other; boxes behind the end are zeros, values behind
the end within a box are set to zero before they are multiplied, since 0 * NaN is NaN.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute

from ..artifact import Artifact
from ..attention_config import AttentionConfig, parameters
from ..graph import Graph
from .attention_consumer import Consumer
from .attention_kernel import AttentionKernel, attention_parameter_types
from .attention_producer import Producer
from .attention_shared import SharedMemory
from .build import compile_kernel


class HopperAttention(AttentionKernel):
    def place(self) -> None:
        self.thread = cute.arch.thread_idx()[0]
        self.warp = cute.arch.make_warp_uniform(self.thread // 32)
        self.lane = self.thread % 32
        self.group = cute.arch.make_warp_uniform(self.thread // 128) - 1  # the consumer warpgroup
        self.shared = SharedMemory(self.config)

    @cute.jit
    def run(self):
        c = self.config
        self.place()
        if self.thread == 0:
            for name in ("k_map", "v_map") if c.packed else ("q_map", "k_map", "v_map"):
                cute.arch.inline_ptx("prefetch.tensormap [{$r0}];", read_only_args=[self.get(name)])
            for stage in cutlass.range_constexpr(c.stages):
                cute.arch.mbarrier_init(self.shared.full_k(stage), 1)
                cute.arch.mbarrier_init(self.shared.full_v(stage), 1)
                cute.arch.mbarrier_init(self.shared.empty_k(stage), 4 * c.consumers)
                cute.arch.mbarrier_init(self.shared.empty_v(stage), 4 * c.consumers)
            for stage in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(self.shared.full_q(stage), 1)
                cute.arch.mbarrier_init(self.shared.empty_q(stage), 4 * c.consumers)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        self.total = self.tiles.count()
        if self.group < 0:
            if cutlass.const_expr(c.consumers > 1):
                cute.arch.setmaxregister_decrease(40 if c.consumers == 2 else 32)
            if self.warp == 0:
                Producer(self).produce()
        else:
            if cutlass.const_expr(c.consumers > 1):
                cute.arch.setmaxregister_increase(232 if c.consumers == 2 else 160)
            Consumer(self).consume()


def build(graph: Graph, config: dict[str, Any], *, name: str, architecture: str) -> Artifact:
    c = AttentionConfig(**config)

    def body(values: list[Any]) -> None:
        HopperAttention(graph, c, dict(zip(parameters(graph, c), values, strict=True))).run()

    return compile_kernel(
        body, attention_parameter_types(graph, c), name=name, architecture=architecture, block=c.block, shared_bytes=c.shared_bytes
    )
