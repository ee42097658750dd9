// The device that the bindings are compiled for: how kernels run, and where ops are registered. The bindings of both
// devices are linked into one library, so device-dependent code is in a namespace per device.
//
//   const Launch launch(x);                   makes the device of `x` current
//   launch(PDK_DEVICE::unmask, args);         runs a kernel
//   launch(PDK_VECTOR(silu_and_mul), args);   a kernel without values to check: on the CPU, that of the vector level
//   PDK_IMPL("unmask_", unmask)               registers a function as an op of this device
#pragma once

#include <torch/csrc/stable/library.h>

#include "aliasing.h"
#include "structure.h"
#include "unpack.h"

// Tests register other builds of the bindings next to the real ops.
#ifndef PDKERNELS_OPS_NAMESPACE
#define PDKERNELS_OPS_NAMESPACE pdkernels
#endif

// Expands macros among the arguments first.
#define PDK_REGISTER(ns, key, name, function) \
  STABLE_TORCH_LIBRARY_IMPL(ns, key, m) { m.impl(name, &function); }

#ifdef PDKERNELS_DEVICE_CUDA

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#ifndef PDKERNELS_OPS_KEY
#define PDKERNELS_OPS_KEY CUDA
#endif
#define PDK_DEVICE cuda
#define PDK_VECTOR(kernel) ::pdkernels::cuda::kernel

// Weak: a CPU build of torch lacks the symbol, and this library has to load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace pdkernels::cuda::bindings {

// Makes the tensor's device current during its lifetime, and provides the stream.
class Launch {
 public:
#ifdef PDKERNELS_CUDASIM
  explicit Launch(const torch::stable::Tensor&) {}
#else
  explicit Launch(const torch::stable::Tensor& t) : guard_(t.get_device_index()) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                    "pdkernels: this build of torch has no CUDA support");
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
#endif
  template <class Args>
  void operator()(cudaError_t (*kernel)(const Args&, cudaStream_t), const Args& args) const {
    const cudaError_t status = kernel(args, stream_);
    STD_TORCH_CHECK(status == cudaSuccess, "pdkernels: CUDA launch failed: ", cudaGetErrorString(status));
  }

 private:
  cudaStream_t stream_ = nullptr;
#ifndef PDKERNELS_CUDASIM
  torch::stable::accelerator::DeviceGuard guard_;
#endif
};

}  // namespace pdkernels::cuda::bindings

#else

#include "simd/dispatch.h"

#ifndef PDKERNELS_OPS_KEY
#define PDKERNELS_OPS_KEY CPU
#endif
#define PDK_DEVICE cpu
#define PDK_VECTOR(kernel) [](const auto& args) { PDK_DISPATCH(kernel, args) }

namespace pdkernels::cpu::bindings {

struct Launch {
  explicit Launch(const torch::stable::Tensor&) {}
  template <class Kernel, class Args>
  void operator()(const Kernel& kernel, const Args& args) const {
    kernel(args);
  }
};

}  // namespace pdkernels::cpu::bindings

#endif

#define PDK_IMPL(name, function) \
  PDK_REGISTER(PDKERNELS_OPS_NAMESPACE, PDKERNELS_OPS_KEY, name, ::pdkernels::bindings::Checked<&function>::boxed)

namespace pdkernels::PDK_DEVICE::bindings {
using namespace pdkernels::bindings;
using Tensors = std::vector<Tensor>;
}  // namespace pdkernels::PDK_DEVICE::bindings
