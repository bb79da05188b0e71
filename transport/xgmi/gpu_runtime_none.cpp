#include "troupe/transport/xgmi/gpu_runtime.hpp"

namespace troupe::transport::xgmi {

namespace {

constexpr const char* not_built =
    "not built; configure the build with -DTROUPE_GPU=auto where nvcc or hipcc is";

unexpected absent() {
  return fail(errc::backend_unavailable, not_built);
}

class no_runtime final : public gpu_runtime {
 public:
  [[nodiscard]] const char* kind() const noexcept override { return "none"; }
  [[nodiscard]] usability state() const override { return {false, not_built}; }
  [[nodiscard]] const std::vector<gpu_device>& devices() const override { return devices_; }
  [[nodiscard]] std::optional<gpu_allocation> find(const void* /*at*/) const override {
    return std::nullopt;
  }
  [[nodiscard]] result<std::byte*> allocate(std::uint32_t /*device*/,
                                            std::uint64_t /*size*/) override {
    return absent();
  }
  void release(std::uint32_t /*device*/, std::byte* /*base*/) noexcept override {}
  [[nodiscard]] result<void> copy_now(std::byte* /*to*/, const std::byte* /*from*/,
                                      std::uint64_t /*bytes*/) override {
    return absent();
  }
  [[nodiscard]] result<memory_handle> export_memory(const gpu_allocation& /*of*/) override {
    return absent();
  }
  [[nodiscard]] result<exported_memory> export_dmabuf(
      const gpu_allocation& /*of*/, std::span<const std::byte> /*memory*/) override {
    return absent();
  }
  [[nodiscard]] result<std::byte*> open_memory(std::uint32_t /*device*/,
                                               const memory_handle& /*handle*/) override {
    return absent();
  }
  void close_memory(std::uint32_t /*device*/, std::byte* /*base*/) noexcept override {}
  [[nodiscard]] result<pinned_memory> allocate_pinned(std::uint32_t /*device*/,
                                                      std::size_t /*size*/) override {
    return absent();
  }
  void release_pinned(const pinned_memory& /*memory*/) noexcept override {}
  [[nodiscard]] result<pinned_memory> pin(std::uint32_t /*device*/,
                                          std::span<std::byte> /*memory*/) override {
    return absent();
  }
  void unpin(const pinned_memory& /*memory*/) noexcept override {}
  [[nodiscard]] bool reaches(std::uint32_t /*device*/, std::uint32_t /*peer*/) const override {
    return false;
  }
  [[nodiscard]] usability reaches_unseen(std::uint32_t /*device*/,
                                         const std::string& /*bus_id*/) const override {
    return {false, not_built};
  }
  [[nodiscard]] result<void> enable(std::uint32_t /*device*/, std::uint32_t /*peer*/) override {
    return absent();
  }
  [[nodiscard]] result<gpu_stream> make_stream(std::uint32_t /*device*/) override {
    return absent();
  }
  void release_stream(gpu_stream /*stream*/) noexcept override {}
  [[nodiscard]] result<gpu_event> make_event(std::uint32_t /*device*/) override { return absent(); }
  [[nodiscard]] result<gpu_event> open_event(std::uint32_t /*device*/,
                                             const event_handle& /*handle*/) override {
    return absent();
  }
  void release_event(gpu_event /*event*/) noexcept override {}
  [[nodiscard]] result<void> copy(gpu_stream /*on*/, std::uint64_t /*to*/, std::uint64_t /*from*/,
                                  std::uint64_t /*bytes*/) override {
    return absent();
  }
  [[nodiscard]] result<void> launch(gpu_stream /*on*/, const copy_launch& /*what*/) override {
    return absent();
  }
  [[nodiscard]] result<void> record(gpu_event /*event*/, gpu_stream /*on*/) override {
    return absent();
  }
  [[nodiscard]] result<bool> happened(gpu_event /*event*/) override { return absent(); }
  [[nodiscard]] result<void> wait_for(gpu_stream /*on*/, void* /*event*/) override {
    return absent();
  }
  [[nodiscard]] result<std::vector<gpu_word>> make_words(std::uint32_t /*device*/) override {
    return absent();
  }
  [[nodiscard]] result<void> wait_at(gpu_stream /*on*/, const gpu_word& /*word*/,
                                     std::uint32_t /*value*/) override {
    return absent();
  }
  [[nodiscard]] result<void> ring_after(gpu_stream /*on*/,
                                        std::shared_ptr<bell> /*what*/) override {
    return absent();
  }

 private:
  std::vector<gpu_device> devices_;
};

}  // namespace

std::unique_ptr<gpu_runtime> make_gpu_runtime() {
  return std::make_unique<no_runtime>();
}

}  // namespace troupe::transport::xgmi
