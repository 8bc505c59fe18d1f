// Fills in what a launch of prefill or decode passes to its kernel about sequences and pages.
#pragma once

#include <algorithm>

#include "attention/shared/launch.h"
#include "attention/shared/sequences.cuh"

namespace minfer::attention {

inline void set_sequences(AttentionLaunchArguments const& arguments, Sequences* sequences, PageTable* pages) {
  AttentionProblem const& p = *arguments.problem;
  AttentionOperands const& o = *arguments.operands;
  sequences->cu_seqlens_q = o.cu_seqlens_q;
  sequences->cu_seqlens_k = o.cu_seqlens_k;
  sequences->seq_lens = o.seq_lens;
  sequences->batch = int32_t(p.batch);
  sequences->tokens_q = int32_t(p.tokens_q);
  sequences->tokens_k = int32_t(p.tokens_k);
  sequences->seqlen_q = int32_t(p.seqlen_q);
  sequences->seqlen_k = int32_t(p.tokens_k > 0 ? std::min(p.seqlen_k, kMaxCount) : 0);
  pages->block_table = o.block_table;
  pages->block_table_stride = o.block_table_stride;
  pages->pages = int32_t(p.pages);
  pages->page_size = int32_t(p.page_size);
  pages->by_page = cutlass::FastDivmod(int(std::max<int64_t>(p.page_size, 1)));
}

}  // namespace minfer::attention
