// CUDA implementations of the tensor ops, registered through torch's stable ABI. Schemas live in pdkernels/ops.
//
// The namespace and the dispatch key are macros because the tests build this very file against a CPU runtime for CUDA
// sources and register it beside the real ops.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "kernels.h"
#include "unpack.h"

#ifndef PDKERNELS_OPS_NAMESPACE
#define PDKERNELS_OPS_NAMESPACE pdkernels
#define PDKERNELS_OPS_KEY CUDA
#endif

// Weak: a CPU build of torch lacks the symbol, and this library loads there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace {

using namespace pdkernels::bindings;
using Tensors = std::vector<Tensor>;

void check(cudaError_t status) {
  STD_TORCH_CHECK(status == cudaSuccess, "pdkernels: CUDA launch failed: ", cudaGetErrorString(status));
}

// Makes the tensor's device current and names its stream for as long as it lives.
class Launch {
 public:
#ifdef PDKERNELS_CUDASIM
  explicit Launch(const Tensor&) {}
#else
  explicit Launch(const Tensor& t) : guard_(t.get_device_index()) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "pdkernels: this build of torch has no CUDA support");
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
    this->stream = static_cast<cudaStream_t>(stream);
  }
#endif
  cudaStream_t stream = nullptr;

#ifndef PDKERNELS_CUDASIM
 private:
  torch::stable::accelerator::DeviceGuard guard_;
#endif
};

void kv_append(Tensors k_cache, Tensors v_cache, Tensors k_new, Tensors v_new, Tensor lengths, OptionalTensor counts,
               OptionalTensor block_table) {
  const Launch launch(lengths);
  append(k_cache, v_cache, k_new, v_new, lengths, counts, block_table,
         [&](const pdkernels::AppendArgs& args) { check(pdkernels::cuda::kv_append(args, launch.stream)); });
}

void kv_commit(Tensors k_cache, Tensors v_cache, Tensor lengths, Tensor counts, OptionalTensor source_index,
               OptionalTensor block_table) {
  const Launch launch(lengths);
  commit(k_cache, v_cache, lengths, counts, source_index, block_table,
         [&](const pdkernels::CommitArgs& args) { check(pdkernels::cuda::kv_commit(args, launch.stream)); });
}

void kv_trim(Tensor lengths, Tensor new_lengths) {
  const Launch launch(lengths);
  trim(lengths, new_lengths, [&](const pdkernels::IndexView& old, const pdkernels::IndexView& wanted, int64_t batch) {
    check(pdkernels::cuda::kv_trim(old, wanted, batch, launch.stream));
  });
}

Verdict verify_draft(Tensor draft, Tensor predictions, OptionalTensor draft_lengths, OptionalTensor end_tokens,
                     OptionalTensor refill) {
  const Launch launch(draft);
  VerdictTensors out(draft);
  check(pdkernels::cuda::verify_draft(verify_args(draft, predictions, draft_lengths, end_tokens, refill, out), launch.stream));
  return out.tuple();
}

}  // namespace

// One more expansion, so that the namespace and key given as macros are replaced by their values first.
#define PDK_LIBRARY_IMPL(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)

PDK_LIBRARY_IMPL(PDKERNELS_OPS_NAMESPACE, PDKERNELS_OPS_KEY, m) {
  m.impl("kv_append_", TORCH_BOX(&kv_append));
  m.impl("kv_commit_", TORCH_BOX(&kv_commit));
  m.impl("kv_trim_", TORCH_BOX(&kv_trim));
  m.impl("verify_draft", TORCH_BOX(&verify_draft));
}
