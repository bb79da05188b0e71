#include "troupe/transport/shm/shm_backend.hpp"

#include <algorithm>
#include <fstream>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "troupe/transport/link_check.hpp"
#include "troupe/transport/shm/shm_link.hpp"
#include "troupe/transport/shm/shm_listener.hpp"

namespace troupe::transport {

namespace {

using shm::shm_link;
using shm::shm_listener;

/// What an operator should know about memory that the engine allocated itself.
std::string about_engine_memory() {
  std::ifstream file{"/proc/sys/kernel/yama/ptrace_scope"};
  int scope = 0;
  if (file >> scope && scope != 0) {
    return "; memory of the engine may be out of reach (ptrace_scope is " + std::to_string(scope) +
           "): regions that the endpoint allocates are not";
  }
  return "";
}

class shm_backend final : public backend {
 public:
  explicit shm_backend(backend_context& context) : context_{context} {
    if (auto started = shm_listener::start(context)) {
      listener_ = std::move(*started);
    } else {
      why_not_ = std::move(started).error().message;
    }
    removals_ = context.regions.on_removed([this](region_id region) { region_removed(region); });
  }

  ~shm_backend() override {
    context_.regions.forget_listener(removals_);
    if (listener_) listener_->stop();
  }

  [[nodiscard]] backend_kind kind() const noexcept override { return backend_kind::shm; }

  [[nodiscard]] usability probe() const override {
    if (!listener_) return {false, why_not_};
    return {true, "memfd and unix sockets work here"};
  }

  [[nodiscard]] usability reaches(const host_identity& peer) const override {
    const auto& self = context_.identity;
    if (self.boot_id.empty() || peer.boot_id != self.boot_id) return {false, "another host"};
    if (peer.network_namespace != self.network_namespace) {
      return {false, "same host, another network namespace: its unix socket cannot be reached"};
    }
    if (peer.pid_namespace != self.pid_namespace) {
      return {false, "same host, another pid namespace: its process cannot be watched"};
    }
    if (peer.uid != self.uid) {
      return {false, "same host, user " + std::to_string(peer.uid) + " there and " +
                         std::to_string(self.uid) + " here: memory is shared within one user only"};
    }
    return {true, "same host, namespaces and user" + about_engine_memory()};
  }

  [[nodiscard]] result<std::shared_ptr<link>> open(const link_options& options,
                                                   std::shared_ptr<link_sink> sink) override {
    if (!listener_) return fail(errc::backend_unavailable, "shm: " + why_not_);
    if (auto ok = check_options(options, sink.get()); !ok) return fail(std::move(ok).error());
    auto made = std::make_shared<shm_link>(context_, listener_, options, std::move(sink));
    made->expect_dialer();
    const std::lock_guard lock{mutex_};
    std::erase_if(links_, [](const auto& link) { return link.expired(); });
    links_.push_back(made);
    return std::shared_ptr<link>{std::move(made)};
  }

 private:
  void region_removed(region_id region) {
    std::vector<std::shared_ptr<shm_link>> links;
    {
      const std::lock_guard lock{mutex_};
      for (const auto& candidate : links_) {
        if (auto link = candidate.lock()) links.push_back(std::move(link));
      }
    }
    for (const auto& link : links) link->region_removed(region);
  }

  backend_context& context_;
  std::uint64_t removals_{0};
  std::shared_ptr<shm_listener> listener_;
  std::string why_not_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<shm_link>> links_;
};

}  // namespace

std::unique_ptr<backend> make_shm_backend(backend_context& context) {
  return std::make_unique<shm_backend>(context);
}

}  // namespace troupe::transport
