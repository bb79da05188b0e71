#include "troupe/transport/xgmi/gpu_site.hpp"

namespace troupe::transport::xgmi {

std::vector<std::string> gpu_site::bus_ids() const {
  std::vector<std::string> ids;
  if (!runtime->state().usable) return ids;
  for (const auto& device : runtime->devices()) ids.push_back(device.bus_id);
  return ids;
}

std::optional<std::uint32_t> gpu_site::index_of(const std::string& bus_id) const {
  const auto& devices = runtime->devices();
  for (std::uint32_t i = 0; i < devices.size(); ++i) {
    if (devices[i].bus_id == bus_id) return i;
  }
  return std::nullopt;
}

usability gpu_site::reaches(std::uint32_t device, const std::string& bus_id) const {
  const auto& ours = runtime->devices()[device].bus_id;
  if (ours == bus_id) return {true, "the same GPU " + bus_id};
  if (const auto theirs = index_of(bus_id)) {
    if (runtime->reaches(device, *theirs)) return {true, "GPU " + ours + " reaches GPU " + bus_id};
    return {false, "GPU " + ours + " does not reach the peer's GPU " + bus_id +
                       ": no link between them, or the driver forbids it"};
  }
  auto unseen = runtime->reaches_unseen(device, bus_id);
  if (unseen.usable) {
    return {true, "GPU " + ours + " reaches GPU " + bus_id + ", which this process does not see"};
  }
  return {false, "this process does not see the peer's GPU " + bus_id + ", and " + unseen.reason};
}

namespace {
std::function<std::shared_ptr<gpu_site>()>& maker() {
  static std::function<std::shared_ptr<gpu_site>()> make;
  return make;
}
}  // namespace

std::shared_ptr<gpu_site> gpu_site::of_process() {
  static const auto site = maker() ? maker()() : std::make_shared<gpu_site>(make_gpu_runtime());
  return site;
}

void gpu_site::set_maker(std::function<std::shared_ptr<gpu_site>()> make) {
  maker() = std::move(make);
}

}  // namespace troupe::transport::xgmi
