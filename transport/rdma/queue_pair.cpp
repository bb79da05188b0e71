#include "troupe/transport/rdma/queue_pair.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>

#include "troupe/transport/os_error.hpp"
#include "troupe/transport/random.hpp"

namespace troupe::transport::rdma {

namespace {

/// Enough to fill any wire; more outstanding reads would only cost the responder memory.
constexpr int most_reads = 16;

/// How long the device retries before it gives up, as text.
std::string patience(const rdma_options& options) {
  const auto once = 4.096e-3 * static_cast<double>(1ULL << options.timeout);
  return std::to_string(static_cast<long>(once * (options.retry_count + 1))) + " ms";
}

}  // namespace

// -- completions

queue_owner owner_of(const ibv_cq& queue) noexcept {
  return reinterpret_cast<std::uintptr_t>(queue.cq_context);
}

queue_owner owner_of(const ibv_qp& pair) noexcept {
  return reinterpret_cast<std::uintptr_t>(pair.qp_context);
}

result<std::unique_ptr<completion_queue>> completion_queue::create(std::shared_ptr<device> on,
                                                                   std::uint32_t entries,
                                                                   queue_owner owner) {
  static_assert(sizeof owner == sizeof(void*));
  std::unique_ptr<completion_queue> made{new completion_queue{std::move(on)}};
  const auto& where = *made->device_;
  made->channel_ = ::ibv_create_comp_channel(where.context());
  if (made->channel_ == nullptr) {
    return fail(errc::overloaded,
                where.name() + " gives no completion channel: " + what_errno(errno));
  }
  const int flags = ::fcntl(made->channel_->fd, F_GETFL);
  ::fcntl(made->channel_->fd, F_SETFL, flags | O_NONBLOCK);
  made->queue_ =
      ::ibv_create_cq(where.context(), static_cast<int>(entries),
                      reinterpret_cast<void*>(owner),  // NOLINT(performance-no-int-to-ptr)
                      made->channel_, 0);
  if (made->queue_ == nullptr) {
    return fail(errc::overloaded, where.name() + " gives no completion queue of " +
                                      std::to_string(entries) + " entries (it takes " +
                                      std::to_string(where.limits().max_cqe) +
                                      "): " + what_errno(errno));
  }
  return made;
}

completion_queue::~completion_queue() {
  if (queue_ != nullptr) ::ibv_destroy_cq(queue_);
  if (channel_ != nullptr) ::ibv_destroy_comp_channel(channel_);
}

void completion_queue::take_event() noexcept {
  ibv_cq* which = nullptr;
  void* context = nullptr;
  while (::ibv_get_cq_event(channel_, &which, &context) == 0) ::ibv_ack_cq_events(which, 1);
}

// -- queue pairs

queue_pair_offer queue_pair::offer(std::uint8_t rail) const noexcept {
  queue_pair_offer out;
  out.number = pair_->qp_num;
  out.first_packet = first_packet_;
  out.rail = rail;
  return out;
}

rail_offer offer_of(const device& on) {
  const auto address = on.address();
  rail_offer out;
  std::ranges::copy(address.gid.raw, out.gid.begin());
  out.lid = address.lid;
  out.mtu = address.mtu;
  out.ethernet = on.port_limits().link_layer == IBV_LINK_LAYER_ETHERNET ? 1 : 0;
  return out;
}

result<std::unique_ptr<queue_pair>> queue_pair::create(std::shared_ptr<device> on,
                                                       completion_queue& completions,
                                                       const queue_lengths& wanted) {
  std::unique_ptr<queue_pair> made{new queue_pair{std::move(on)}};
  const auto& where = *made->device_;
  ibv_qp_init_attr attributes{};
  attributes.qp_context = completions.get()->cq_context;
  attributes.send_cq = completions.get();
  attributes.recv_cq = completions.get();
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap.max_send_wr = wanted.sends;
  attributes.cap.max_recv_wr = wanted.receives;
  attributes.cap.max_send_sge = wanted.pieces;
  attributes.cap.max_recv_sge = 1;
  // A device does not report its inline limit; it only refuses a request for too much.
  for (auto inline_bytes = wanted.inline_bytes;; inline_bytes /= 2) {
    attributes.cap.max_inline_data = inline_bytes;
    made->pair_ = ::ibv_create_qp(where.domain(), &attributes);
    if (made->pair_ != nullptr || inline_bytes == 0) break;
  }
  if (made->pair_ == nullptr) {
    return fail(errc::overloaded,
                where.name() + " gives no queue pair of " + std::to_string(wanted.sends) +
                    " sends and " + std::to_string(wanted.receives) + " receives (it takes " +
                    std::to_string(where.limits().max_qp_wr) + "): " + what_errno(errno));
  }
  made->inline_bytes_ = attributes.cap.max_inline_data;
  made->depth_ = wanted.sends;
  made->pieces_ = wanted.pieces;
  made->first_packet_ = static_cast<std::uint32_t>(random_id()) & 0xffffff;
  return made;
}

queue_pair::~queue_pair() {
  if (pair_ != nullptr) ::ibv_destroy_qp(pair_);
}

result<void> queue_pair::reset(const rdma_options& options) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RESET;
  if (const int bad = ::ibv_modify_qp(pair_, &attributes, IBV_QP_STATE); bad != 0) {
    return fail(errc::internal,
                device_->name() + " does not reset a queue pair: " + what_errno(bad));
  }
  attributes = {};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.pkey_index = options.pkey_index;
  attributes.port_num = device_->port();
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  if (const int bad = ::ibv_modify_qp(
          pair_, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
      bad != 0) {
    return fail(errc::internal, device_->name() + " does not set up a queue pair (pkey_index " +
                                    std::to_string(options.pkey_index) + "): " + what_errno(bad));
  }
  return {};
}

result<void> queue_pair::join(const far_end& peer, const rdma_options& options) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = static_cast<ibv_mtu>(std::min<int>(device_->address().mtu, peer.rail.mtu));
  attributes.dest_qp_num = peer.pair.number;
  attributes.rq_psn = peer.pair.first_packet;
  attributes.max_dest_rd_atomic = outstanding_reads(*device_);
  attributes.min_rnr_timer = 1;  // 10 us: buffers are posted again at once
  auto& way = attributes.ah_attr;
  way.port_num = device_->port();
  way.sl = options.service_level;
  way.dlid = peer.rail.lid;
  way.is_global = 1;
  std::memcpy(way.grh.dgid.raw, peer.rail.gid.data(), peer.rail.gid.size());
  way.grh.sgid_index = static_cast<std::uint8_t>(device_->gid_index());
  way.grh.hop_limit = options.hop_limit;
  way.grh.traffic_class = options.traffic_class;
  if (const int bad =
          ::ibv_modify_qp(pair_, &attributes,
                          IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                              IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
      bad != 0) {
    return fail(errc::peer_unreachable, device_->name() + " finds no way to the peer's GID " +
                                            gid_text(peer.rail.gid) + ": " + what_errno(bad) +
                                            "; are both in one network, and is gid_index right?");
  }
  attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.sq_psn = first_packet_;
  attributes.timeout = options.timeout;
  attributes.retry_cnt = options.retry_count;
  attributes.rnr_retry = 7;  // for ever: credits ensure that the peer has posted receives
  attributes.max_rd_atomic =
      std::max<std::uint8_t>(1, std::min(outstanding_reads(*device_), peer.outstanding_reads));
  if (const int bad =
          ::ibv_modify_qp(pair_, &attributes,
                          IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                              IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
      bad != 0) {
    return fail(errc::internal,
                device_->name() + " does not let a queue pair send: " + what_errno(bad));
  }
  return {};
}

void queue_pair::stop() noexcept {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  ::ibv_modify_qp(pair_, &attributes, IBV_QP_STATE);  // a failed pair is already in this state
}

result<void> queue_pair::expect_notice(std::uint64_t work_id) {
  ibv_recv_wr work{};  // an immediate has no bytes
  work.wr_id = work_id;
  ibv_recv_wr* bad = nullptr;
  if (const int why = ::ibv_post_recv(pair_, &work, &bad); why != 0) {
    return fail(errc::link_broken,
                device_->name() + " refused to make room for a notice: " + what_errno(why));
  }
  return {};
}

std::uint8_t outstanding_reads(const device& on) noexcept {
  const auto& limits = on.limits();
  return static_cast<std::uint8_t>(
      std::clamp(std::min(limits.max_qp_rd_atom, limits.max_qp_init_rd_atom), 1, most_reads));
}

troupe::error meaning_of(ibv_wc_status status, const rdma_options& options) {
  const auto say = [&](errc code, const std::string& sentence) {
    return troupe::error{code, sentence + " (" + ::ibv_wc_status_str(status) + ")"};
  };
  switch (status) {
    case IBV_WC_RETRY_EXC_ERR:
      return say(errc::peer_lost, "the peer's NIC has not answered for " + patience(options) +
                                      ": its process ended, its host or the wire is down, a "
                                      "firewall or another MTU is between, or gid_index is of "
                                      "another network");
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return say(errc::link_broken, "the peer has no buffer posted for what we send");
    case IBV_WC_REM_ACCESS_ERR:
      return say(errc::link_broken,
                 "the peer's NIC refused the access: the grant was taken back under it, the "
                 "peer's memory is not registered any more, or the key was wrong");
    case IBV_WC_REM_INV_REQ_ERR:
      return say(
          errc::link_broken,
          "the peer's NIC found the request invalid: too long for its buffer, or another MTU");
    case IBV_WC_REM_OP_ERR:
      return say(errc::link_broken, "the peer's NIC could not carry the operation out");
    case IBV_WC_REM_ABORT_ERR:
    case IBV_WC_BAD_RESP_ERR:
      return say(errc::link_broken, "the peer's NIC broke off, or sent an invalid response");
    case IBV_WC_LOC_QP_OP_ERR:
      return say(errc::link_broken, "our NIC could not carry the request out; is its port down?");
    case IBV_WC_MW_BIND_ERR:
      return say(errc::link_broken,
                 "our NIC says that it has memory windows and did not bind one; links that are "
                 "opened from now on do without");
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_LEN_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
      return say(errc::internal, "our NIC refused our own memory; please report this");
    case IBV_WC_WR_FLUSH_ERR:
      return say(errc::link_broken,
                 "the queue pair is in the error state: the peer's operation was refused here, or "
                 "the device failed");
    case IBV_WC_FATAL_ERR: return say(errc::link_broken, "the NIC failed");
    default: return say(errc::link_broken, "the NIC ended the operation");
  }
}

}  // namespace troupe::transport::rdma
