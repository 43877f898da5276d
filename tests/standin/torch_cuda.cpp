// What autograd asks of CUDA, for a torch that was built without: one device, whose streams and
// events are never waited for. Only fake tensors are on it.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {

struct StandInGuard final : DeviceGuardImplInterface {
    DeviceType type() const override { return DeviceType::CUDA; }
    Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
    Device exchangeDevice(Device) const override { return getDevice(); }
    void setDevice(Device) const override {}
    void uncheckedSetDevice(Device) const noexcept override {}
    DeviceIndex deviceCount() const noexcept override { return 1; }
    Stream getStream(Device) const override { return Stream(Stream::DEFAULT, getDevice()); }
    Stream exchangeStream(Stream stream) const override { return stream; }
    void record(void **, const Stream &, DeviceIndex, EventFlag) const override {}
    void block(void *, const Stream &) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, StandInGuard)

} // namespace c10::impl

namespace at {

struct CUDAHooks final : CUDAHooksInterface { // the name by which torch looks for it
    explicit CUDAHooks(CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return 1; }
    DeviceIndex getCurrentDevice() const override { return 0; }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

} // namespace at
