// A CUDA device that computes nothing, for fake tensors in any build of torch.
//
// Besides kernels, which fake tensors do without, torch asks a backend for a guard (current device and stream, events)
// and for hooks (number of devices, generators). Operations on streams and events are logged; pangu/dryrun/device.py
// reads them with `pangu_stream_log`.
#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

namespace {
using namespace c10;

thread_local StreamId current = 0;  // autograd has a thread of its own for a device
std::atomic<int64_t> num_streams{0}, num_events{0};

enum Kind : int64_t { RECORD, BLOCK, SYNCHRONIZE_STREAM, SYNCHRONIZE_DEVICE, SYNCHRONIZE_EVENT };
struct Entry {
  int64_t kind, event, stream;
};
std::mutex writing;
std::vector<Entry> entries;

void note(Kind kind, const void* event, StreamId stream) {
  std::lock_guard<std::mutex> lock(writing);
  entries.push_back({kind, reinterpret_cast<int64_t>(event), stream});
}

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  DeviceCapability getDeviceCapability(Device) const override { return DeviceCapability(); }
  Stream stream(StreamId id) const { return Stream(Stream::UNSAFE, getDevice(), id); }
  Stream getStream(Device) const override { return stream(current); }
  Stream getDefaultStream(Device) const override { return stream(0); }
  Stream getNewStream(Device, int) const override { return stream(++num_streams); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(++num_streams); }
  Stream exchangeStream(Stream to) const override { return stream(std::exchange(current, to.id())); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& of) const override { note(SYNCHRONIZE_STREAM, nullptr, of.id()); }
  void synchronizeDevice(DeviceIndex) const override { note(SYNCHRONIZE_DEVICE, nullptr, 0); }
  void record(void** event, const Stream& of, DeviceIndex, EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(++num_events);
    note(RECORD, *event, of.id());
  }
  void block(void* event, const Stream& of) const override { note(BLOCK, event, of.id()); }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override { note(SYNCHRONIZE_EVENT, event, 0); }
  double elapsedTime(void*, void*, DeviceIndex) const override { return 0; }
};

struct Numbers final : GeneratorImpl {
  Numbers() : GeneratorImpl(Device(DeviceType::CUDA, 0), DispatchKeySet(DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t value) override { seed_ = value; }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { return seed_; }
  void set_state(const TensorImpl&) override {}
  intrusive_ptr<TensorImpl> get_state() const override { TORCH_CHECK(false, "this device draws no numbers"); }
  GeneratorImpl* clone_impl() const override { return new Numbers(); }
  uint64_t seed_ = 0;
};
}  // namespace

namespace at {
struct CUDAHooks final : CUDAHooksInterface {  // torch looks for this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  Generator getNewGenerator(DeviceIndex) const override { return Generator(make_intrusive<Numbers>()); }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    static const Generator numbers = getNewGenerator(0);
    return numbers;
  }
};
// A CUDA build registers its own under this name later, at the default priority, and torch keeps those that it gets first.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}  // namespace at

extern "C" {
// Registers the guard; the last one that is registered counts.
void pangu_register_guard() { c10::impl::DeviceGuardImplRegistrar(DeviceType::CUDA, new Guard); }

// The current stream of the calling thread.
int64_t pangu_current_stream() { return current; }

// Moves the oldest entries, at most `room`, to `into` (kind, event, stream of each); returns their number.
int64_t pangu_stream_log(int64_t* into, int64_t room) {
  std::lock_guard<std::mutex> lock(writing);
  const int64_t number = std::min<int64_t>(room, entries.size());
  for (int64_t i = 0; i < number; ++i) {
    into[3 * i] = entries[i].kind;
    into[3 * i + 1] = entries[i].event;
    into[3 * i + 2] = entries[i].stream;
  }
  entries.erase(entries.begin(), entries.begin() + number);
  return number;
}
}
