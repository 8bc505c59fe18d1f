// The workspace of a merge of attention states, and the answer of a build without CUDA.
#include "attention/merge/merge_states.h"

namespace minfer {

size_t merge_attention_states_workspace(AttentionMerge const& merge) {
  return merge.count <= attention::kMergedStates ? 0 : attention::MergeWorkspace(merge).bytes();
}

#if !MINFER_WITH_CUDA
Status merge_attention_states(AttentionMerge const&, void*, size_t, bool, Stream) {
  return Status::failure(StatusCode::kNotCompiled, "this build has no CUDA code");
}
#endif

}  // namespace minfer
