#include "troupe/transport/rdma/rdma_backend.hpp"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "troupe/transport/link_check.hpp"
#include "troupe/transport/rdma/device_watch.hpp"
#include "troupe/transport/rdma/rdma_link.hpp"

namespace troupe::transport {

namespace {

using rdma::device;
using rdma::device_watch;
using rdma::fabric;
using rdma::rdma_link;

class verbs_backend final : public backend {
 public:
  explicit verbs_backend(backend_context& context) : context_{context} {
    state_ = open_devices();
    if (!state_.usable) return;
    fabric_.options = context.options.rdma;
    fabric_.keys = std::make_shared<rdma::memory_keys>(
        fabric_.rails,
        rdma::registration_options{.max_piece = fabric_.options.max_registration,
                                   .relaxed_ordering = fabric_.options.relaxed_ordering,
                                   .notice = context.options.notice});
    const bool windows =
        fabric_.options.memory_windows &&
        std::ranges::all_of(fabric_.rails, [](const auto& rail) { return rail->has_windows(); });
    fabric_.windows = std::make_shared<std::atomic<bool>>(windows);
    if (windows) {
      state_.reason += ", grants through memory windows";
    } else {
      state_.reason +=
          fabric_.options.memory_windows ? ", no memory windows" : ", memory_windows: off";
      state_.reason += ": a grant opens its whole region to the peer";
    }
    state_.reason += ", " + fabric_.keys->ordering();
    if (const auto most = fabric_.options.max_registration; most != 0) {
      state_.reason +=
          ", memory in pieces of at most " + std::to_string(most >> 10) + " KiB (max_registration)";
    }
    listener_ = context.regions.on_removed(
        [keys = fabric_.keys](region_id region) { keys->forget(region); });
    watch_ = std::make_shared<device_watch>(fabric_.rails, context.progress.next(),
                                            context.options.notice);
    watch_->start(watch_);
  }

  ~verbs_backend() override {
    if (!watch_) return;
    watch_->stop();
    context_.regions.forget_listener(listener_);
  }

  [[nodiscard]] backend_kind kind() const noexcept override { return backend_kind::rdma; }
  [[nodiscard]] usability probe() const override {
    // A link uses all devices of its endpoint, and so does its peer: no device may be missing.
    for (const auto& rail : fabric_.rails) {
      if (auto why = rail->failure()) {
        return {false, *why +
                           "; start this node again once it works, or without it in "
                           "transport.device"};
      }
    }
    return state_;
  }

  [[nodiscard]] usability reaches(const host_identity&) const override {
    auto here = probe();
    if (!here.usable) return here;
    return {true, "an RDMA device is here, and the peer offers one: " + here.reason};
  }

  [[nodiscard]] result<std::shared_ptr<link>> open(const link_options& options,
                                                   std::shared_ptr<link_sink> sink) override {
    if (auto ok = check_usable(); !ok) return fail(std::move(ok).error());
    static_assert(max_link_lanes <= rdma::max_lanes);
    if (auto ok = check_options(options, sink.get()); !ok) return fail(std::move(ok).error());
    auto made = rdma_link::open(context_, fabric_, options, std::move(sink));
    if (!made) return fail(std::move(made).error());
    watch_->add(*made);
    // A device may have failed before the link was registered.
    if (auto ok = check_usable(); !ok) {
      (*made)->close();
      return fail(std::move(ok).error());
    }
    return std::shared_ptr<link>{std::move(*made)};
  }

 private:
  [[nodiscard]] result<void> check_usable() const {
    const auto here = probe();
    if (!here.usable) return fail(errc::backend_unavailable, "rdma: " + here.reason);
    return {};
  }

  /// Never fatal: an endpoint without an RDMA device still has its other backends.
  usability open_devices() {
    const auto& wanted = context_.options.rdma;
    const auto memory =
        wanted.gpu.empty() ? rdma::memory_of_this_process() : rdma::memory_of_gpu(wanted.gpu);
    const auto devices = rdma::look_at_devices(memory);
    auto places = rdma::choose_places(wanted, devices);
    if (!places) return {false, places.error().message};
    if (const auto& notice = context_.options.notice) {
      for (const auto& why : rdma::passed_over(wanted, devices)) {
        notice(why + " (" + places->front().device + " is used)");
      }
    }
    std::string names;
    for (const auto& place : *places) {
      if (fabric_.rails.size() == rdma::max_rails) {
        return {false,
                "transport.device names more than " + std::to_string(rdma::max_rails) + " devices"};
      }
      auto opened = device::open(place);
      if (!opened) return {false, opened.error().message};
      if (!names.empty()) names += ", ";
      names += place.device + " port " + std::to_string(place.port) + " gid " +
               std::to_string(place.gid_index);
      fabric_.rails.push_back(std::move(*opened));
    }
    return {true, names};
  }

  backend_context& context_;
  fabric fabric_;
  usability state_;
  std::shared_ptr<device_watch> watch_;
  std::uint64_t listener_{0};
};

}  // namespace

std::unique_ptr<backend> make_rdma_backend(backend_context& context) {
  return std::make_unique<verbs_backend>(context);
}

std::vector<std::string> rdma::describe_devices() {
  std::vector<std::string> lines;
  for (const auto& device : rdma::look_at_devices()) lines.push_back(rdma::describe(device));
  return lines;
}

}  // namespace troupe::transport
