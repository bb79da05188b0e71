#include "troupe/transport/xgmi/opened_events.hpp"

#include <utility>

namespace troupe::transport::xgmi {

result<std::shared_ptr<const opened_event>> opened_events::open(std::uint32_t gpu,
                                                                const event_handle& handle) {
  const std::lock_guard lock{mutex_};
  auto& [by_use, by_handle] = lines_[gpu];
  if (const auto known = by_handle.find(handle); known != by_handle.end()) {
    by_use.splice(by_use.begin(), by_use, known->second);
    return by_use.front().event;
  }
  auto event = runtime_->open_event(gpu, handle);
  if (!event) return fail(std::move(event).error());
  by_use.push_front({handle, std::make_shared<opened_event>(*runtime_, *event)});
  by_handle[handle] = by_use.begin();
  if (by_use.size() > per_gpu) {
    by_handle.erase(by_use.back().handle);
    by_use.pop_back();
  }
  return by_use.front().event;
}

void opened_events::leave(std::shared_ptr<const opened_event> event) {
  if (event == nullptr) return;
  const std::lock_guard lock{mutex_};
  left_.push_back(std::move(event));
}

}  // namespace troupe::transport::xgmi
