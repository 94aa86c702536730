// A GPU's guard that does nothing, so that fake tensors may be on "cuda:0" in a torch without CUDA. Preloaded, so that
// torch's backward, too, takes "cuda" for its accelerator.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

static const c10::Stream stream(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CUDA, 0));

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Stream getStream(c10::Device) const noexcept override { return stream; }
  c10::Stream getDefaultStream(c10::Device) const override { return stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};

static Guard guard;
static bool simulated = false;

extern "C" void simulate(bool on) {
  simulated = on;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(on ? &guard : nullptr);
}

std::optional<c10::DeviceType> at::accelerator::getAccelerator(bool) {
  return simulated ? std::optional(c10::DeviceType::CUDA) : std::nullopt;
}

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
} // namespace at
