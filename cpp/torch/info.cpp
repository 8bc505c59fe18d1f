// Private operators that say what the build holds and what a device is, as JSON texts, and two that tests and tools need.
#include "core/device.h"
#include "core/json.h"
#include "core/operators.h"
#include "core/torch_calls.h"
#include "minfer/gemm.h"
#include "minfer/registry.h"

namespace minfer::torch_binding {

namespace {

std::string build_info() {
  int64_t count = 0, compiled = 0;
  KernelInfo const* kernels = registry(&count);
  for (int64_t i = 0; i < count; ++i) compiled += kernels[i].launch != nullptr;
  Json json;
  json.open('{').key("version").value(MINFER_VERSION).key("cuda").value(bool(MINFER_WITH_CUDA)).key("archs").value(build_archs());
  json.key("cutlass").value(build_cutlass_version()).key("stable_abi_target").value("2.10");
  json.key("kernels_total").value(count).key("kernels_compiled").value(compiled).close('}');
  return json.text();
}

std::string kernels(std::string const& family) {
  int64_t count = 0;
  KernelInfo const* all = registry(&count);
  Json json;
  json.open('[');
  for (int64_t i = 0; i < count; ++i) {
    KernelInfo const& k = all[i];
    if (!family.empty() && family != k.family) continue;
    json.open('{')
        .key("name")
        .value(k.name)
        .key("family")
        .value(k.family)
        .key("arch")
        .value(int64_t(k.arch))
        .key("arch_exact")
        .value(k.arch_exact);
    json.key("ab_type").value(name_of(k.ab_type)).key("a_major").value(k.a_major == Major::kK ? "k" : "mn");
    json.key("b_major").value(k.b_major == Major::kK ? "k" : "mn").key("swap").value(k.swap);
    json.key("column_step").value(int64_t(k.column_step));
    json.key("b_format").value(name_of(k.b_format)).key("group_multiple").value(int64_t(k.group_multiple));
    json.key("tile_m").value(int64_t(k.tile_m)).key("tile_n").value(int64_t(k.tile_n)).key("tile_k").value(int64_t(k.tile_k));
    json.key("head_dim_v").value(int64_t(k.head_dim_v));
    json.key("cluster_m")
        .value(int64_t(k.cluster_m))
        .key("cluster_n")
        .value(int64_t(k.cluster_n))
        .key("schedule")
        .value(name_of(k.schedule));
    json.key("stages").value(int64_t(k.stages)).key("threads").value(int64_t(k.threads)).key("smem_bytes").value(int64_t(k.smem_bytes));
    json.key("ctas_per_sm").value(int64_t(k.ctas_per_sm)).key("operation").value(k.operation);
    json.key("alignment")
        .value(int64_t(k.alignment))
        .key("sums")
        .value(k.sums)
        .key("invariant_only")
        .value(k.invariant_only)
        .key("in_place_ranges")
        .value(k.in_place_ranges)
        .key("note")
        .value(k.note)
        .key("compiled")
        .value(k.launch != nullptr)
        .close('}');
  }
  return json.close(']').text();
}

std::string device_properties_json(int64_t index) {
  DeviceProperties const& p = device_properties("minfer::_device_properties", index);
  Json json;
  json.open('{')
      .key("name")
      .value(p.name)
      .key("compute_major")
      .value(int64_t(p.compute_major))
      .key("compute_minor")
      .value(int64_t(p.compute_minor));
  json.key("sm_count").value(int64_t(p.sm_count)).key("max_clusters").open('[');
  for (int32_t clusters : p.max_clusters) json.value(int64_t(clusters));
  json.close(']');
  json.key("smem_per_block").value(int64_t(p.smem_per_block)).key("l2_bytes").value(p.l2_bytes);
  json.key("read_bandwidth").value(p.read_bandwidth).key("matrix_rate").value(p.matrix_rate);
  int64_t rows = 0;
  shipped_gemm_rows(p.name, &rows);
  json.key("shipped_rows").value(rows).close('}');
  return json.text();
}

std::string device_file_name_text(std::string const& device_name) { return device_file_name(device_name.c_str()).text; }

/// Allocates as operators do, so that tests see what is said when there is no memory.
Tensor allocate_for_tests(Tensor const& like, std::vector<int64_t> const& shape, std::string const& what) {
  return allocate("minfer::_allocate", like, shape, like.scalar_type(), what, " beside ", like);
}

/// event: the handle of a CUDA event.
bool is_done(int64_t event) {
  bool done = false;
  Status const status = query_event(reinterpret_cast<void*>(event), &done);
  if (!status.ok()) fail("minfer::_is_done: ", status.message);
  return done;
}

constexpr Operator kOperators[] = {
    {"_build_info() -> str", boxed<&build_info>},
    {"_kernels(str family) -> str", boxed<&kernels>},
    {"_device_properties(int index) -> str", boxed<&device_properties_json>},
    {"_device_file_name(str device_name) -> str", boxed<&device_file_name_text>},
    {"_is_done(int event) -> bool", boxed<&is_done>},
    {"_allocate(Tensor like, int[] shape, str what) -> Tensor", boxed<&allocate_for_tests>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CompositeExplicitAutograd, m) { implement(m, kOperators); }

}  // namespace

}  // namespace minfer::torch_binding
