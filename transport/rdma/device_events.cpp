#include "troupe/transport/rdma/device_events.hpp"

namespace troupe::transport::rdma {

event_meaning meaning_of(ibv_event_type what) {
  using about = event_subject;
  using effect = event_effect;
  switch (what) {
    case IBV_EVENT_QP_FATAL:
      return {about::queue_pair, effect::ends, "IBV_EVENT_QP_FATAL",
              "gave a queue pair up after an error of its own"};
    case IBV_EVENT_QP_REQ_ERR:
      return {about::queue_pair, effect::ends, "IBV_EVENT_QP_REQ_ERR",
              "ended a queue pair, since it found a request of the peer's invalid"};
    case IBV_EVENT_QP_ACCESS_ERR:
      return {
          about::queue_pair, effect::ends, "IBV_EVENT_QP_ACCESS_ERR",
          "refused an access of the peer's, and ended the queue pair: its grant was taken back, "
          "or the key or the range was wrong"};
    case IBV_EVENT_CQ_ERR:
      return {about::completion_queue, effect::ends, "IBV_EVENT_CQ_ERR",
              "lost completions: their queue overflowed or could not be written"};
    case IBV_EVENT_DEVICE_FATAL:
      return {about::device, effect::ends, "IBV_EVENT_DEVICE_FATAL", "failed"};
    // A link has one path and stays on it.
    case IBV_EVENT_PATH_MIG: return {about::queue_pair, effect::told, "IBV_EVENT_PATH_MIG"};
    case IBV_EVENT_PATH_MIG_ERR: return {about::queue_pair, effect::told, "IBV_EVENT_PATH_MIG_ERR"};
    case IBV_EVENT_COMM_EST: return {about::queue_pair, effect::none, "IBV_EVENT_COMM_EST"};
    case IBV_EVENT_SQ_DRAINED: return {about::queue_pair, effect::none, "IBV_EVENT_SQ_DRAINED"};
    case IBV_EVENT_QP_LAST_WQE_REACHED:
      return {about::queue_pair, effect::none, "IBV_EVENT_QP_LAST_WQE_REACHED"};
    // See `port_record`.
    case IBV_EVENT_PORT_ACTIVE: return {about::port, effect::told, "IBV_EVENT_PORT_ACTIVE"};
    case IBV_EVENT_PORT_ERR: return {about::port, effect::told, "IBV_EVENT_PORT_ERR"};
    case IBV_EVENT_LID_CHANGE: return {about::port, effect::told, "IBV_EVENT_LID_CHANGE"};
    case IBV_EVENT_PKEY_CHANGE: return {about::port, effect::told, "IBV_EVENT_PKEY_CHANGE"};
    case IBV_EVENT_GID_CHANGE: return {about::port, effect::told, "IBV_EVENT_GID_CHANGE"};
    // A new subnet manager changes nothing by itself; each change that it makes has its own event.
    case IBV_EVENT_SM_CHANGE: return {about::other, effect::none, "IBV_EVENT_SM_CHANGE"};
    case IBV_EVENT_CLIENT_REREGISTER:
      return {about::other, effect::none, "IBV_EVENT_CLIENT_REREGISTER"};
    case IBV_EVENT_SRQ_ERR: return {about::other, effect::told, "IBV_EVENT_SRQ_ERR"};
    case IBV_EVENT_SRQ_LIMIT_REACHED:
      return {about::other, effect::told, "IBV_EVENT_SRQ_LIMIT_REACHED"};
    case IBV_EVENT_WQ_FATAL: return {about::other, effect::told, "IBV_EVENT_WQ_FATAL"};
  }
  return {about::other, effect::told, "an event of an unknown kind"};
}

}  // namespace troupe::transport::rdma
