#include "troupe/transport/endpoint.hpp"

#include <algorithm>
#include <array>
#include <mutex>
#include <thread>

#include <unistd.h>

#include "troupe/transport/backend_context.hpp"
#include "troupe/transport/staging/staging_pool.hpp"
#ifdef TROUPE_WITH_TCP
#include "troupe/transport/tcp/tcp_backend.hpp"
#endif
#ifdef TROUPE_WITH_SHM
#include "troupe/transport/shm/shm_backend.hpp"
#endif
#ifdef TROUPE_WITH_RDMA
#include "troupe/transport/rdma/rdma_backend.hpp"
#endif
#include "troupe/transport/xgmi/compute_watch.hpp"
#include "troupe/transport/xgmi/stream_gates.hpp"
#include "troupe/transport/xgmi/xgmi_backend.hpp"

namespace troupe::transport {

namespace {

// DESIGN.md section 5: the order in which `auto` chooses.
constexpr std::array preference{backend_kind::xgmi, backend_kind::shm, backend_kind::rdma,
                                backend_kind::tcp};

/// How often `withdraw` checks whether the region is at rest.
constexpr std::chrono::microseconds between_looks{200};

/// Why there is no such backend.
std::string_view not_built(backend_kind kind) {
  if (kind == backend_kind::rdma)
    return "not built: libibverbs-dev was not there when this was built";
  if (kind == backend_kind::tcp) return "not built: nettle-dev was not there when this was built";
  return "not in this release";
}

host_identity identity_with(const xgmi::gpu_site& gpus) {
  auto self = host_identity::of_this_process();
  self.gpus = gpus.bus_ids();
  return self;
}

class local_endpoint final : public endpoint {
 public:
  explicit local_endpoint(endpoint_options options)
      : options_{std::move(options)},
        gpus_{options_.xgmi.site ? options_.xgmi.site : xgmi::gpu_site::of_process()},
        gates_{gpus_},
        identity_{identity_with(*gpus_)},
        regions_{options_.max_regions} {}

  ~local_endpoint() override {
    // Nothing may call into a backend or a link that is being destroyed.
    local_endpoint::stop();
    backends_.clear();
  }

  [[nodiscard]] result<void> start();

  [[nodiscard]] result<region_id> allocate(std::uint64_t size, std::string name) override {
    return regions_.allocate(size, std::move(name));
  }
  [[nodiscard]] result<allocated_regions> allocate(std::span<const std::uint64_t> sizes,
                                                   const std::string& name,
                                                   const host_memory_options& how) override {
    return regions_.allocate(sizes, name, how);
  }
  [[nodiscard]] result<region_id> allocate_on_gpu(std::uint32_t gpu, std::uint64_t size,
                                                  std::string name) override;
  [[nodiscard]] result<region_id> register_memory(std::span<std::byte> bytes,
                                                  std::string name) override {
    const auto found = find_on_gpu(bytes.data());
    if (!found) return regions_.add(bytes, std::move(name));
    return add_of_gpu(*found, bytes, std::move(name), {});
  }
  [[nodiscard]] result<region_id> register_memory(std::span<std::byte> bytes, std::string name,
                                                  const exported_memory& as) override {
    const auto found = gpus_->runtime->find(bytes.data());
    return regions_.add(bytes, std::move(name), as,
                        found ? std::optional{found->device} : std::nullopt);
  }
  [[nodiscard]] result<void> deregister(region_id id) override { return regions_.remove(id); }
  [[nodiscard]] result<void> withdraw(region_id region, std::chrono::milliseconds wait) override;
  [[nodiscard]] result<std::span<std::byte>> bytes(region_id id) const override {
    return regions_.bytes(id);
  }

  [[nodiscard]] std::vector<backend_status> backends() const override;
  [[nodiscard]] host_identity identity() const override { return identity_; }
  [[nodiscard]] result<backend_choice> choose(
      const host_identity& peer, std::optional<backend_kind> wanted,
      std::span<const backend_kind> excluded) const override;
  [[nodiscard]] result<std::shared_ptr<link>> open(backend_kind kind, const link_options& options,
                                                   std::shared_ptr<link_sink> sink) override;

  bool poll() override { return progress_->poll(); }
  [[nodiscard]] std::optional<std::uint32_t> gpu_of(region_id region) const override {
    const auto memory = bytes(region);
    const auto found = memory ? find_on_gpu(memory->data()) : std::nullopt;
    return found ? std::optional{found->device} : std::nullopt;
  }
  [[nodiscard]] result<std::optional<std::vector<std::byte>>> copy_of_gpu(
      std::span<const std::byte> bytes) const override;
  [[nodiscard]] result<void> after_compute(
      const compute_point& point, std::uint64_t line,
      std::function<void(std::optional<troupe::error>)> then) override {
    return compute_->after(point, line, std::move(then));
  }
  [[nodiscard]] result<std::shared_ptr<stream_gate>> hold(const compute_stream& stream) override {
    return gates_.hold(stream);
  }
  void stop() override {
    // Gates first: a thread that ends, or memory that is freed, may wait for a GPU that waits at a
    // gate.
    gates_.close();
    if (progress_) progress_->stop();
    if (compute_) compute_->close();
  }
  bool drive(std::chrono::steady_clock::time_point until, int wake_fd,
             const std::function<bool()>& done) override {
    return progress_->drive(until, wake_fd, done);
  }
  [[nodiscard]] std::uint16_t data_port() const override { return tcp_port_; }

 private:
  [[nodiscard]] backend* find(backend_kind kind) const {
    for (const auto& candidate : backends_) {
      if (candidate->kind() == kind) return candidate.get();
    }
    return nullptr;
  }
  /// The GPU allocation that holds `at`; empty for host memory.
  [[nodiscard]] std::optional<xgmi::gpu_allocation> find_on_gpu(const std::byte* at) const {
    auto found = gpus_->runtime->find(at);
    return found && !found->on_host ? found : std::nullopt;
  }
  [[nodiscard]] result<region_id> add_of_gpu(const xgmi::gpu_allocation& of,
                                             std::span<std::byte> bytes, std::string name,
                                             std::shared_ptr<void> owner);
  [[nodiscard]] std::vector<std::shared_ptr<link>> links();
  /// Whether `kind` can join us with `peer` now, and why (not).
  [[nodiscard]] usability judge(backend_kind kind, const host_identity& peer,
                                std::span<const backend_kind> excluded) const;

  const endpoint_options options_;
  const std::shared_ptr<xgmi::gpu_site> gpus_;
  xgmi::stream_gates gates_;
  const host_identity identity_;
  region_table regions_;
  std::unique_ptr<progress_pool> progress_;
  std::shared_ptr<xgmi::compute_watch> compute_;
  std::unique_ptr<backend_context> context_;
  std::vector<std::unique_ptr<backend>> backends_;
  std::uint16_t tcp_port_{0};
  std::mutex links_mutex_;
  std::vector<std::weak_ptr<link>> links_;  ///< all opened links that are still held
};

result<std::optional<std::vector<std::byte>>> local_endpoint::copy_of_gpu(
    std::span<const std::byte> bytes) const {
  const auto found = bytes.empty() ? std::nullopt : find_on_gpu(bytes.data());
  if (!found) return std::optional<std::vector<std::byte>>{};
  const auto left = static_cast<std::uint64_t>(found->base + found->size - bytes.data());
  if (bytes.size() > left) {
    return fail(errc::out_of_range, std::to_string(bytes.size()) + " bytes of GPU " +
                                        std::to_string(found->device) + " where " +
                                        std::to_string(left) + " are left of their allocation");
  }
  std::optional<std::vector<std::byte>> copy{std::in_place, bytes.size()};
  auto copied = gpus_->runtime->copy_now(copy->data(), bytes.data(), bytes.size());
  if (!copied) return fail(std::move(copied).error());
  return copy;
}

result<region_id> local_endpoint::allocate_on_gpu(std::uint32_t gpu, std::uint64_t size,
                                                  std::string name) {
  if (size == 0) {
    return fail(errc::invalid_config,
                "region '" + name + "': its size is 0; ask for at least 1 byte");
  }
  auto memory = gpus_->runtime->allocate(gpu, size);
  if (!memory) {
    return fail(memory.error().code, "region '" + name + "': " + memory.error().message);
  }
  std::shared_ptr<void> owner{*memory, [site = gpus_, gpu](void* base) {
                                site->runtime->release(gpu, static_cast<std::byte*>(base));
                              }};
  const auto found = gpus_->runtime->find(*memory);
  if (!found) return regions_.add_of_gpu({*memory, size}, std::move(name), gpu, std::move(owner));
  return add_of_gpu(*found, {*memory, size}, std::move(name), std::move(owner));
}

std::vector<std::shared_ptr<link>> local_endpoint::links() {
  std::vector<std::shared_ptr<link>> held;
  const std::lock_guard lock{links_mutex_};
  for (const auto& known : links_) {
    if (auto one = known.lock()) held.push_back(std::move(one));
  }
  return held;
}

result<void> local_endpoint::withdraw(region_id region, std::chrono::milliseconds wait) {
  if (auto ok = regions_.withdraw(region); !ok) return ok;
  const auto until = std::chrono::steady_clock::now() + wait;
  while (true) {
    // In each round: a batch or a grant that took the region before it was withdrawn may reach its
    // link only now.
    for (const auto& one : links()) {
      for (const auto transfer : one->users_of(region)) one->fence(transfer);
    }
    auto removed = regions_.remove(region);
    if (removed || removed.error().code != errc::overloaded) return removed;
    if (std::chrono::steady_clock::now() >= until) {
      return fail(errc::deadline, removed.error().message + " after " +
                                      std::to_string(wait.count()) +
                                      " ms; it stays withdrawn, so call again");
    }
    // The last use ends under some link's lock, where no notification is possible: poll.
    if (options_.num_workers == 0) {
      poll();
    } else {
      std::this_thread::sleep_for(between_looks);
    }
  }
}

/// NICs register GPU memory as a dma-buf. If its driver exports none, they are given its address,
/// which works if the driver has told the kernel of its memory (nvidia-peermem, amdgpu).
result<region_id> local_endpoint::add_of_gpu(const xgmi::gpu_allocation& of,
                                             std::span<std::byte> bytes, std::string name,
                                             std::shared_ptr<void> owner) {
  const auto* nics = find(backend_kind::rdma);
  if (nics != nullptr && nics->probe().usable) {
    const auto exported = gpus_->runtime->export_dmabuf(of, bytes);
    if (exported) {
      auto made = regions_.add(bytes, std::move(name), *exported, of.device, std::move(owner));
      ::close(exported->dmabuf);  // the region holds a duplicate
      return made;
    }
    if (options_.notice) {
      options_.notice("region '" + name + "': " + exported.error().message +
                      "; NICs are given its address");
    }
  }
  return regions_.add_of_gpu(bytes, std::move(name), of.device, std::move(owner));
}

result<void> local_endpoint::start() {
  auto pool = progress_pool::create({.own_thread = options_.num_workers != 0,
                                     .spin = options_.spin,
                                     .after_progress = options_.after_progress,
                                     .on_thread_lost = options_.on_thread_lost},
                                    options_.num_workers);
  if (!pool) return fail(std::move(pool).error());
  progress_ = std::move(*pool);
  compute_ = std::make_shared<xgmi::compute_watch>(gpus_, progress_->next());
  context_ =
      std::make_unique<backend_context>(backend_context{options_, identity_, regions_, *progress_});
  const auto staging = std::make_shared<staging::staging_pool>(gpus_, options_.xgmi);
#ifdef TROUPE_WITH_SHM
  backends_.push_back(make_shm_backend(*context_, staging));
#endif
  backends_.push_back(make_xgmi_backend(*context_, gpus_));
#ifdef TROUPE_WITH_RDMA
  backends_.push_back(make_rdma_backend(*context_));
#endif
#ifdef TROUPE_WITH_TCP
  auto tcp = make_tcp_backend(*context_, staging);
  if (!tcp) return fail(std::move(tcp).error());
  tcp_port_ = (*tcp)->port();
  backends_.push_back(std::move(*tcp));
#endif
  return {};
}

std::vector<backend_status> local_endpoint::backends() const {
  std::vector<backend_status> all;
  for (const auto kind : preference) {
    const auto* found = find(kind);
    all.push_back(
        {kind, found != nullptr ? found->probe() : usability{false, std::string{not_built(kind)}}});
  }
  return all;
}

usability local_endpoint::judge(backend_kind kind, const host_identity& peer,
                                std::span<const backend_kind> excluded) const {
  if (std::find(excluded.begin(), excluded.end(), kind) != excluded.end()) {
    return {false, "excluded: it failed before"};
  }
  const auto* found = find(kind);
  if (found == nullptr) return {false, std::string{not_built(kind)}};
  if (auto here = found->probe(); !here.usable) return here;
  return found->reaches(peer);
}

result<backend_choice> local_endpoint::choose(const host_identity& peer,
                                              std::optional<backend_kind> wanted,
                                              std::span<const backend_kind> excluded) const {
  std::string passed_over;  // "xgmi: not built; shm: another host"
  for (const auto kind : preference) {
    if (wanted && kind != *wanted) continue;
    const auto verdict = judge(kind, peer, excluded);
    if (verdict.usable) {
      auto reason = wanted ? "asked for; " + verdict.reason : verdict.reason;
      if (!passed_over.empty()) reason += "; " + passed_over;
      return backend_choice{kind, std::move(reason)};
    }
    if (!passed_over.empty()) passed_over += "; ";
    passed_over += std::string{to_string(kind)} + ": " + verdict.reason;
  }
  return fail(errc::backend_unavailable,
              "no backend can join this node with the peer: " +
                  (passed_over.empty() ? "none was allowed" : passed_over));
}

result<std::shared_ptr<link>> local_endpoint::open(backend_kind kind, const link_options& options,
                                                   std::shared_ptr<link_sink> sink) {
  auto* const found = find(kind);
  if (found == nullptr) {
    return fail(errc::backend_unavailable,
                "backend " + std::string{to_string(kind)} + ": " + std::string{not_built(kind)});
  }
  auto made = found->open(options, std::move(sink));
  if (!made) return made;
  const std::lock_guard lock{links_mutex_};
  std::erase_if(links_, [](const auto& known) { return known.expired(); });
  links_.push_back(*made);
  return made;
}

}  // namespace

std::vector<std::string> describe_rdma_devices() {
#ifdef TROUPE_WITH_RDMA
  return rdma::describe_devices();
#else
  return {};
#endif
}

result<std::unique_ptr<endpoint>> endpoint::create(endpoint_options options) {
  if (options.self.value == 0) {
    return fail(errc::invalid_config, "endpoint: the incarnation must not be 0; draw one");
  }
  auto made = std::make_unique<local_endpoint>(std::move(options));
  if (auto ok = made->start(); !ok) return fail(std::move(ok).error());
  return std::unique_ptr<endpoint>{std::move(made)};
}

}  // namespace troupe::transport
