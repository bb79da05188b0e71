#pragma once

#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/transport/rdma/device.hpp"
#include "troupe/transport/rdma/message_channel.hpp"
#include "troupe/transport/rdma/queue_pair.hpp"
#include "troupe/transport/rdma/small_batch.hpp"
#include "troupe/transport/rdma/wire.hpp"

#include "open_device.hpp"
#include "waiting.hpp"

namespace troupe::transport::rdma {

/// A peer that follows the protocol only as far as it likes and posts what it likes: it owns the
/// queue pairs itself and uses no link of ours. It does not confirm revocations, or lies about
/// them.
class hostile_peer {
 public:
  static constexpr std::size_t lanes = 2;
  static constexpr std::uint32_t memory_bytes = std::uint32_t{1} << 20;

  hostile_peer(const std::string& device_name, incarnation self) : self_{self} {
    device_ = open_device(device_name);
    completions_ = completion_queue::create(device_, 2048).value();
    messages_ = message_channel::create(device_, *completions_).value();
    for (auto& pair : pairs_) {
      pair = queue_pair::create(device_, *completions_, {.sends = 64, .receives = 64}).value();
    }
    memory.assign(memory_bytes, std::byte{0xbb});
    registered_ =
        ::ibv_reg_mr(device_->domain(), memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE);
    EXPECT_NE(registered_, nullptr);
  }
  ~hostile_peer() {
    for (auto& pair : pairs_) pair.reset();
    if (registered_ != nullptr) ::ibv_dereg_mr(registered_);
  }
  hostile_peer(const hostile_peer&) = delete;
  hostile_peer& operator=(const hostile_peer&) = delete;

  [[nodiscard]] link_offer offer() const {
    offer_body body;
    body.link = 0xbad;
    body.message_buffers = message_channel::buffers;
    body.buffer_bytes = message_channel::buffer_bytes;
    body.notices = 64;
    body.outstanding_reads = outstanding_reads(*device_);
    body.rails = 1;
    body.lanes = lanes;
    body.rail[0] = offer_of(*device_);
    body.messages = messages_->pair().offer();
    for (std::size_t i = 0; i < lanes; ++i) body.lane[i] = pairs_[i]->offer();
    return {.kind = backend_kind::rdma, .owner = self_, .payload = body.encode()};
  }

  /// Says hello as a dialer does.
  void join(const link_offer& theirs) {
    const auto peer = offer_body::decode(theirs.payload).value();
    for (std::size_t i = 0; i < lanes; ++i) {
      const queue_pair::far_end far{peer.rail[0], peer.lane[i], peer.outstanding_reads};
      join_lane(i, far);
    }
    const queue_pair::far_end far{peer.rail[0], peer.messages, peer.outstanding_reads};
    ASSERT_TRUE(messages_->start(far, peer.message_buffers, options_));
    messages_->put(message_kind::hello, peer.secret);
    ASSERT_TRUE(messages_->flush({}));
  }

  /// Joins a single queue pair, to any far end.
  void join_lane(std::size_t lane, const queue_pair::far_end& far) {
    ASSERT_TRUE(pairs_[lane]->reset(options_));
    ASSERT_TRUE(pairs_[lane]->join(far, options_));
  }

  /// Processes what has come. Call often.
  void look() {
    std::array<ibv_wc, 16> done{};
    const int count =
        ::ibv_poll_cq(completions_->get(), static_cast<int>(done.size()), done.data());
    for (int i = 0; i < count; ++i) take(done[static_cast<std::size_t>(i)]);
  }

  void post(ibv_wr_opcode what, std::size_t lane, std::uint64_t address, std::uint32_t key,
            std::uint32_t bytes) {
    ibv_sge piece{reinterpret_cast<std::uintptr_t>(memory.data()), bytes, registered_->lkey};
    ibv_send_wr work{};
    work.wr_id = work_id(work_kind::data, static_cast<std::uint8_t>(lane), ++posted);
    work.sg_list = &piece;
    work.num_sge = 1;
    work.opcode = what;
    work.send_flags = IBV_SEND_SIGNALED;
    work.wr.rdma.remote_addr = address;
    work.wr.rdma.rkey = key;
    ibv_send_wr* bad = nullptr;
    if (::ibv_post_send(pairs_[lane]->get(), &work, &bad) != 0)
      statuses.push_back(IBV_WC_FATAL_ERR);
  }

  /// Posts one request and waits for its outcome.
  ibv_wc_status run(ibv_wr_opcode what, std::size_t lane, std::uint64_t address, std::uint32_t key,
                    std::uint32_t bytes) {
    const auto before = statuses.size();
    post(what, lane, address, key, bytes);
    const auto last = testing::end_of_wait();
    while (statuses.size() == before && std::chrono::steady_clock::now() < last) look();
    EXPECT_GT(statuses.size(), before) << "no completion";
    return statuses.size() > before ? statuses.back() : IBV_WC_GENERAL_ERR;
  }

  /// Sends a message of any kind at once.
  void say(message_kind kind, std::span<const std::byte> payload,
           const message_counts& counts = {}) {
    messages_->put(kind, payload);
    static_cast<void>(messages_->flush(counts));
  }

  std::vector<std::byte> memory;
  std::map<std::uint64_t, grant_keys> keys;  ///< by grant
  std::vector<ibv_wc_status> statuses;       ///< of what was posted, in the order of completion
  std::uint64_t posted{0};
  std::size_t revocations{0};
  bool confirms{false};                ///< revocations, at once, whatever it does afterwards
  std::uint32_t landed{0};             ///< small batches that the victim has answered, ...
  std::vector<troupe::error> refused;  ///< ... and the answers that were refusals

 private:
  void take(const ibv_wc& done) {
    if (kind_of(done.wr_id) == work_kind::data) {
      statuses.push_back(done.status);
      return;
    }
    if (done.status != IBV_WC_SUCCESS) return;
    if (kind_of(done.wr_id) == work_kind::message_send) {
      messages_->sent_until(number_of(done.wr_id));
      return;
    }
    const auto buffer = static_cast<std::uint32_t>(number_of(done.wr_id));
    const auto message = messages_->received(buffer, done.byte_len).value();
    static_cast<void>(messages_->take_credits(message.header.credits, 65'535));
    landed = message.header.landed;
    switch (static_cast<message_kind>(message.header.kind)) {
      case message_kind::keys: {
        auto said = grant_keys::decode(message.payload).value();
        keys.emplace(said.grant, said);
        break;
      }
      case message_kind::revoke:
        ++revocations;
        if (confirms) say(message_kind::revoked, message.payload);
        break;
      case message_kind::refused: refused.push_back(decode_refusal(message.payload).value()); break;
      default: break;
    }
    static_cast<void>(messages_->release({&buffer, 1}));
    static_cast<void>(messages_->flush({}));
  }

  const incarnation self_;
  rdma_options options_;
  std::shared_ptr<device> device_;
  std::unique_ptr<completion_queue> completions_;
  std::unique_ptr<message_channel> messages_;
  std::array<std::unique_ptr<queue_pair>, lanes> pairs_;
  ibv_mr* registered_{nullptr};
};

}  // namespace troupe::transport::rdma
