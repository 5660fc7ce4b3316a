// An accelerator without hardware, for torch's device type PrivateUse1. It has one device, one stream, no
// memory and no kernels: enough for fake tensors, whose operators compute shapes alone.

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_cpu_dispatch.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);
const c10::Stream kStream(c10::Stream::DEFAULT, kDevice);

// autograd switches devices and streams around each operator of a backward pass, and waits by events
struct OneStream final : c10::impl::NoOpDeviceGuardImpl<kType> {
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return kStream; }
  c10::Stream getDefaultStream(c10::Device) const override { return kStream; }
  c10::Stream getNewStream(c10::Device, int) const override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return kStream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

// dropout seeds a generator of the device for each mask; a fake mask draws nothing from it
struct SeedOnly final : c10::GeneratorImpl {
  SeedOnly() : c10::GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { return seed_; }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl&) override { TORCH_CHECK(false, "no state"); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { TORCH_CHECK(false, "no state"); }
  SeedOnly* clone_impl() const override { return new SeedOnly(); }
  uint64_t seed_ = 0;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override { storage.set_nbytes(n); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<SeedOnly>(); }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

// fused attention where the CPU has one; torch would compute it by scores on a device that it does not know
int64_t as_on_the_cpu(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask,
    double dropout, bool causal, std::optional<double> scale, bool grouped) {
  return at::cpu::_fused_sdp_choice(q, k, v, mask, dropout, causal, scale, grouped);
}

} // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &as_on_the_cpu)
}
C10_REGISTER_GUARD_IMPL(PrivateUse1, OneStream)
