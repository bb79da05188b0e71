#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "troupe/transport/xgmi/gpu_runtime.hpp"
#include "troupe/transport/xgmi/gpu_site.hpp"

/// GPU doubles. Their memory is shared memory of the host, which other processes open as they open
/// a GPU's; their streams are threads. The whole backend runs on them, except the driver and the
/// kernels.
namespace troupe::transport::xgmi {

class gpu_double : public gpu_runtime {
 public:
  /// Bus ids of the GPUs that this process sees.
  explicit gpu_double(std::vector<std::string> bus_ids = {"0000:0a:00.0", "0000:0b:00.0"});
  ~gpu_double() override;

  // -- controls for tests

  /// From now on every launch and every event fails as on a GPU that fell off its bus.
  void lose();
  /// Calls that a driver may refuse without losing the GPU.
  enum class call : std::uint8_t { launch, copy, record, query };
  /// Refuses the next `times` calls as invalid.
  void refuse(call what, int times) { refused_[static_cast<std::size_t>(what)] = times; }
  /// Stops all streams, or lets them continue.
  void hold(bool still);
  /// From now on only this much more host memory can be pinned.
  void pin_at_most(std::size_t bytes) { may_pin_ = bytes; }
  [[nodiscard]] std::uint64_t pinned_now() const { return pinned_now_; }  ///< bytes
  [[nodiscard]] std::uint64_t launches() const { return launches_; }
  /// Launched items since the start, by way.
  [[nodiscard]] std::uint64_t launched(copy_way way) const;
  [[nodiscard]] std::uint64_t engine_copies() const { return engine_copies_; }
  [[nodiscard]] std::uint64_t open_now() const { return open_now_; }
  /// Whether memory that `allocate` made at `base` is not released yet.
  [[nodiscard]] bool holds(const std::byte* base) const {
    const auto found = find(base);
    return found && found->base == base;
  }
  /// How many regions were exported for NICs. The descriptors are no dma-bufs, and kernels say so.
  [[nodiscard]] std::uint64_t exported() const { return exported_; }
  /// An event that other processes can open, as workers of an engine make it, and the handle that
  /// they open it by.
  [[nodiscard]] gpu_event make_shared_event(std::uint32_t device);
  [[nodiscard]] event_handle export_event(gpu_event event) const;
  [[nodiscard]] std::uint64_t events_open_now() const { return events_open_now_; }
  [[nodiscard]] std::uint64_t events_opened_ever() const { return events_opened_ever_; }
  /// Events of other processes that were closed before a stream had reached them.
  [[nodiscard]] std::uint64_t events_closed_early() const { return events_closed_early_; }
  /// Streams that wait at a word now, and do nothing until it has risen.
  [[nodiscard]] std::uint64_t standing() const { return standing_; }
  /// From now on no stream of its GPUs can wait at a word.
  void never_waits() { waits_ = false; }
  /// Makes a pair of GPUs unable to reach each other.
  void cut(std::uint32_t device, std::uint32_t peer);
  /// Brings these GPUs, which the process does not see, within reach.
  void reach(const std::vector<std::string>& bus_ids);

  // -- gpu_runtime
  [[nodiscard]] const char* kind() const noexcept override { return "double"; }
  [[nodiscard]] usability state() const override;
  [[nodiscard]] const std::vector<gpu_device>& devices() const override { return devices_; }
  [[nodiscard]] std::optional<gpu_allocation> find(const void* at) const override;
  [[nodiscard]] result<std::byte*> allocate(std::uint32_t device, std::uint64_t size) override;
  void release(std::uint32_t device, std::byte* base) noexcept override;
  [[nodiscard]] result<void> copy_now(std::byte* to, const std::byte* from,
                                      std::uint64_t bytes) override;
  [[nodiscard]] result<memory_handle> export_memory(const gpu_allocation& of) override;
  [[nodiscard]] result<exported_memory> export_dmabuf(const gpu_allocation& of,
                                                      std::span<const std::byte> memory) override;
  [[nodiscard]] result<std::byte*> open_memory(std::uint32_t device,
                                               const memory_handle& handle) override;
  void close_memory(std::uint32_t device, std::byte* base) noexcept override;
  [[nodiscard]] result<pinned_memory> allocate_pinned(std::uint32_t device,
                                                      std::size_t size) override;
  void release_pinned(const pinned_memory& memory) noexcept override;
  [[nodiscard]] result<pinned_memory> pin(std::uint32_t device,
                                          std::span<std::byte> memory) override;
  void unpin(const pinned_memory& memory) noexcept override;
  [[nodiscard]] bool reaches(std::uint32_t device, std::uint32_t peer) const override;
  [[nodiscard]] usability reaches_unseen(std::uint32_t device,
                                         const std::string& bus_id) const override;
  [[nodiscard]] result<void> enable(std::uint32_t device, std::uint32_t peer) override;
  [[nodiscard]] result<gpu_stream> make_stream(std::uint32_t device) override;
  void release_stream(gpu_stream stream) noexcept override;
  [[nodiscard]] result<gpu_event> make_event(std::uint32_t device) override;
  [[nodiscard]] result<gpu_event> open_event(std::uint32_t device,
                                             const event_handle& handle) override;
  void release_event(gpu_event event) noexcept override;
  [[nodiscard]] result<void> copy(gpu_stream on, std::uint64_t to, std::uint64_t from,
                                  std::uint64_t bytes) override;
  [[nodiscard]] result<void> launch(gpu_stream on, const copy_launch& what) override;
  [[nodiscard]] result<void> record(gpu_event event, gpu_stream on) override;
  [[nodiscard]] result<bool> happened(gpu_event event) override;
  [[nodiscard]] result<void> wait_for(gpu_stream on, void* event) override;
  [[nodiscard]] result<std::vector<gpu_word>> make_words(std::uint32_t device) override;
  [[nodiscard]] result<void> wait_at(gpu_stream on, const gpu_word& word,
                                     std::uint32_t value) override;
  [[nodiscard]] result<void> ring_after(gpu_stream on, std::shared_ptr<bell> what) override;

 private:
  class stream;
  class event;
  struct known_memory {
    gpu_allocation about;
    int fd{-1};
    bool opened{false};
  };
  void give(gpu_stream on, std::function<void()> work);
  [[nodiscard]] bool refuses(call what);

  std::vector<gpu_device> devices_;
  mutable std::mutex mutex_;
  std::map<const std::byte*, known_memory> memory_;
  std::vector<std::unique_ptr<std::uint32_t[]>> words_;  ///< outlive the streams
  std::map<void*, std::shared_ptr<stream>> streams_;
  std::map<void*, std::uint32_t> device_of_;  ///< of streams
  std::map<std::pair<std::uint32_t, std::uint32_t>, bool> cut_;
  std::set<std::string> unseen_;  ///< within reach
  std::uint64_t last_id_{0};
  std::atomic<bool> lost_{false};
  std::atomic<bool> still_{false};
  std::atomic<bool> waits_{true};
  std::array<std::atomic<int>, 4> refused_{};
  std::array<std::atomic<std::uint64_t>, 4> launched_{};
  std::atomic<std::size_t> may_pin_{SIZE_MAX};
  std::atomic<std::uint64_t> pinned_now_{0}, launches_{0};
  std::atomic<std::uint64_t> engine_copies_{0}, open_now_{0}, exported_{0};
  std::atomic<std::uint64_t> events_open_now_{0}, events_opened_ever_{0}, events_closed_early_{0};
  std::atomic<std::uint64_t> standing_{0};
};

/// One for the process, as the real ones are.
[[nodiscard]] std::shared_ptr<gpu_site> double_site();

}  // namespace troupe::transport::xgmi
