#include "troupe/transport/xgmi/xgmi_backend.hpp"

#include <string>
#include <utility>

#include "troupe/transport/shm/mapped_backend.hpp"
#include "troupe/transport/xgmi/xgmi_link.hpp"

namespace troupe::transport {

namespace {

using xgmi::gpu_side;

class xgmi_backend final : public shm::mapped_backend {
 public:
  xgmi_backend(backend_context& context, std::shared_ptr<xgmi::gpu_site> site)
      : mapped_backend{context},
        gpus_{std::make_shared<gpu_side>(context.options.xgmi, std::move(site))} {
    if (auto here = gpus_->site->runtime->state(); here.usable) {
      start();
    } else {
      why_not_ = std::move(here.reason);
    }
  }
  ~xgmi_backend() override { close(); }

  [[nodiscard]] backend_kind kind() const noexcept override { return backend_kind::xgmi; }

  [[nodiscard]] usability probe() const override {
    if (!listener_) return {false, why_not_};
    return gpus_->site->runtime->state();
  }

  [[nodiscard]] usability reaches(const host_identity& peer) const override;

 protected:
  [[nodiscard]] std::shared_ptr<shm::mapped_link> make(const link_options& options,
                                                       std::shared_ptr<link_sink> sink) override {
    return std::make_shared<xgmi::xgmi_link>(context_, listener_, gpus_, options, std::move(sink));
  }
  void on_removed(region_id region) override { gpus_->forget(region); }

 private:
  const std::shared_ptr<gpu_side> gpus_;
};

usability xgmi_backend::reaches(const host_identity& peer) const {
  if (auto why = why_apart(context_.identity, peer)) return {false, std::move(*why)};
  if (peer.gpus.empty()) return {false, "same host, but the peer names no GPU of its own"};
  // The GPUs that hold registered regions; before any is registered, all GPUs that this process
  // sees.
  auto own = context_.regions.gpus();
  if (own.empty()) {
    for (std::uint32_t i = 0; i < gpus_->site->runtime->devices().size(); ++i) own.insert(i);
  }
  std::string why_not;
  for (const auto& gpu : peer.gpus) {
    if (const auto theirs = gpus_->site->index_of(gpu); theirs && own.contains(*theirs)) {
      return {true, "same host, and the same GPU " + gpu};
    }
    for (const auto ours : own) {
      auto reached = gpus_->site->reaches(ours, gpu);
      if (reached.usable) return {true, "same host; " + reached.reason};
      why_not = std::move(reached.reason);
    }
  }
  return {false, "same host, but " + why_not};
}

}  // namespace

std::unique_ptr<backend> make_xgmi_backend(backend_context& context,
                                           std::shared_ptr<xgmi::gpu_site> site) {
  return std::make_unique<xgmi_backend>(context, std::move(site));
}

}  // namespace troupe::transport
