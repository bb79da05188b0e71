#include "troupe/transport/rdma/port_record.hpp"

namespace troupe::transport::rdma {

bool port_record::note(ibv_event_type what, clock::time_point now) {
  const std::lock_guard lock{mutex_};
  switch (what) {
    case IBV_EVENT_PORT_ERR:
      if (!view_.up) return false;
      view_.up = false;
      ++view_.downs;
      went_down_ = now;
      return true;
    case IBV_EVENT_PORT_ACTIVE:
      if (view_.up) return false;
      view_.up = true;
      return true;
    case IBV_EVENT_GID_CHANGE:
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_PKEY_CHANGE: ++view_.changes; return true;
    default: return false;
  }
}

port_record::view port_record::now() const {
  const std::lock_guard lock{mutex_};
  return view_;
}

std::string port_record::trouble_since(clock::time_point since, clock::time_point now) const {
  const std::lock_guard lock{mutex_};
  if (!went_down_ || (view_.up && *went_down_ < since)) return {};
  const auto ms = std::to_string((now - *went_down_) / std::chrono::milliseconds{1});
  return view_.up ? "down " + ms + " ms ago and up again" : "down for " + ms + " ms";
}

std::string port_event_text(ibv_event_type what) {
  switch (what) {
    case IBV_EVENT_PORT_ERR: return "went down";
    case IBV_EVENT_PORT_ACTIVE: return "is up again";
    case IBV_EVENT_GID_CHANGE: return "has other addresses (GIDs)";
    case IBV_EVENT_LID_CHANGE: return "has another LID";
    case IBV_EVENT_PKEY_CHANGE: return "has other partition keys";
    default: return {};
  }
}

}  // namespace troupe::transport::rdma
