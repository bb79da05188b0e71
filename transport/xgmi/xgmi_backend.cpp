#include "troupe/transport/xgmi/xgmi_backend.hpp"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "troupe/transport/link_check.hpp"
#include "troupe/transport/shm/shm_listener.hpp"
#include "troupe/transport/xgmi/xgmi_link.hpp"

namespace troupe::transport {

namespace {

using xgmi::gpu_side;
using xgmi::xgmi_link;

class xgmi_backend final : public backend {
 public:
  xgmi_backend(backend_context& context, std::shared_ptr<xgmi::gpu_site> site)
      : context_{context},
        gpus_{std::make_shared<gpu_side>(context.options.xgmi, std::move(site))} {
    if (auto here = gpus_->site->runtime->state(); !here.usable) {
      why_not_ = std::move(here.reason);
      return;
    }
    if (auto started = shm::shm_listener::start(context)) {
      listener_ = std::move(*started);
    } else {
      why_not_ = std::move(started).error().message;
    }
    removals_ = context.regions.on_removed([this](region_id region) { region_removed(region); });
  }

  ~xgmi_backend() override {
    if (removals_ != 0) context_.regions.forget_listener(removals_);
    if (listener_) listener_->stop();
  }

  [[nodiscard]] backend_kind kind() const noexcept override { return backend_kind::xgmi; }

  [[nodiscard]] usability probe() const override {
    if (!listener_) return {false, why_not_};
    return gpus_->site->runtime->state();
  }

  [[nodiscard]] usability reaches(const host_identity& peer) const override;

  [[nodiscard]] result<std::shared_ptr<link>> open(const link_options& options,
                                                   std::shared_ptr<link_sink> sink) override {
    if (auto here = probe(); !here.usable) {
      return fail(errc::backend_unavailable, "xgmi: " + here.reason);
    }
    if (auto ok = check_options(options, sink.get()); !ok) return fail(std::move(ok).error());
    auto made = std::make_shared<xgmi_link>(context_, listener_, gpus_, options, std::move(sink));
    made->expect_dialer();
    const std::lock_guard lock{mutex_};
    std::erase_if(links_, [](const auto& link) { return link.expired(); });
    links_.push_back(made);
    return std::shared_ptr<link>{std::move(made)};
  }

 private:
  void region_removed(region_id region) {
    gpus_->forget(region);
    std::vector<std::shared_ptr<xgmi_link>> links;
    {
      const std::lock_guard lock{mutex_};
      for (const auto& candidate : links_) {
        if (auto link = candidate.lock()) links.push_back(std::move(link));
      }
    }
    for (const auto& link : links) link->region_removed(region);
  }

  backend_context& context_;
  const std::shared_ptr<gpu_side> gpus_;
  std::uint64_t removals_{0};
  std::shared_ptr<shm::shm_listener> listener_;
  std::string why_not_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<xgmi_link>> links_;
};

usability xgmi_backend::reaches(const host_identity& peer) const {
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
  if (peer.gpus.empty()) return {false, "same host, but the peer names no GPU of its own"};
  const auto& runtime = *gpus_->site->runtime;
  std::string unseen;
  for (const auto& gpu : peer.gpus) {
    const auto theirs = gpus_->site->index_of(gpu);
    if (!theirs) {
      unseen = gpu;
      continue;
    }
    for (std::uint32_t ours = 0; ours < runtime.devices().size(); ++ours) {
      if (ours == *theirs) continue;
      if (runtime.reaches(ours, *theirs)) {
        return {true, "same host; GPU " + runtime.devices()[ours].bus_id + " reaches GPU " + gpu};
      }
    }
    return {true, "same host, and the same GPU " + gpu};
  }
  return {false, "same host, but this process does not see the peer's GPU " + unseen +
                     "; let it see both (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES)"};
}

}  // namespace

std::unique_ptr<backend> make_xgmi_backend(backend_context& context,
                                           std::shared_ptr<xgmi::gpu_site> site) {
  return std::make_unique<xgmi_backend>(context, std::move(site));
}

}  // namespace troupe::transport
