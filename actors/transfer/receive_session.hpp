#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "troupe/actors/transfer/session_actions.hpp"

namespace troupe::actors {

/// The decode side of one transfer, from the request to the release. Plain class, not thread-safe.
///
///   state       event                           next       actions
///   ----------  ------------------------------  ---------  -------
///   idle        start                           requested  send transfer_request
///   idle        start, nothing to move          requested  send transfer_request: the source must
///                                                          be released
///   idle        local_abort, link_lost, expire  fencing    conclude(failure), fence_transfer: the
///                                                          request may hold grants
///   requested,  landed (write mode)             receiving  tell_layers
///   receiving
///   requested,  sealed (write mode), also as    receiving  none while batches are missing
///   receiving   part of landed, after it
///   requested,  sealed and all its batches      fencing    fence_transfer
///   receiving   landed, slice covered
///   requested   sealed or offer, either mode,   fencing    fence_transfer
///               nothing to move
///   requested   offer (read mode)               receiving  post_slice per layers, a bounded number
///   receiving   batch_completed (read mode)     receiving  tell_layers; after the last: fence
///   requested,  link_back                       requested  send transfer_request again, with what
///   receiving                                              has landed; unfinished pulls are
///                                                          repeated after the next offer
///   any live    peer_abort, local_abort,        fencing    transfer_abort unless the peer told us
///               link_lost, expire, batch                   or is gone, conclude(failure),
///               failure, nonsense of the peer              fence_transfer
///   any live    peer_refused,                   fencing    as peer_abort and local_abort; the outcome
///               refused_elsewhere                          and the transfer_abort say `refused`
///   receiving   batch failure grant_revoked     receiving  none: the peer's abort says why, or its
///                                                          end of the link broke first: link_back
///   fencing,    peer_abort, local_abort,        fencing    transfer_abort unless the peer told us
///   not told    expire                                     or is gone, conclude(failure)
///   fencing     link_lost, anything else        fencing    none
///   fencing,    quiescent                       arrived    conclude(done)
///   not told
///   fencing     quiescent                       finished   transfer_quiescent in answer to a
///                                                          peer's abort, unpin
///   arrived     received_whole                  finished   send transfer_release, unpin
///   arrived     local_abort                     finished   transfer_abort, unpin
///   arrived     peer_abort                      arrived    transfer_quiescent
///   arrived     anything else                   arrived    none
///   finished    anything                        finished   none
///
/// Success is concluded only after the fence: from then on only the engine writes to the blocks.
/// The source is released only when neither its transfer nor the whole receive, which may have
/// other sources, can fail any more; until then another receive can still have the whole source. A
/// success that was not yet told becomes `deadline` if the fence stays pending past the deadline,
/// and becomes the abort if an abort of either side crosses the fence. The loss of the link does
/// not change it, since all bytes have arrived. The peer's messages are checked: slices lie within
/// the request and its layers within the layout, no token of a layer comes twice, the transfer is
/// sealed or offered once, and nothing is missing when every sealed batch has landed; else the
/// transfer fails with `out_of_range`. Batches may land in any order; layers are told in token
/// order.
class receive_session {
 public:
  struct options {
    std::uint32_t layers{0};
    std::uint32_t layers_per_batch{
        0};  ///< read mode: at most so many layers in one pull; 0: no bound
    std::uint32_t max_in_flight{8};
    bool has_state{false};
    time_point deadline;
  };
  enum class state : std::uint8_t { idle, requested, receiving, fencing, arrived, finished };

  receive_session(options opts, transfer_request request);

  [[nodiscard]] session_actions start();
  [[nodiscard]] session_actions landed(const layers_landed& message);
  [[nodiscard]] session_actions sealed(const transfer_sealed& message);
  [[nodiscard]] session_actions offered(const transfer_offer& message);
  [[nodiscard]] session_actions batch_completed(transport::batch_id id,
                                                const std::optional<troupe::error>& failure);
  [[nodiscard]] session_actions peer_aborted(troupe::error why);
  /// The source does not have what the request wants, and stays available to others.
  [[nodiscard]] session_actions peer_refused(troupe::error why);
  [[nodiscard]] session_actions local_abort(troupe::error why);
  /// Another source of the receive refused the request: nothing failed at this one.
  [[nodiscard]] session_actions refused_elsewhere(troupe::error why);
  [[nodiscard]] session_actions link_lost(troupe::error why);
  /// The link broke and was rebuilt: no event of the former one follows.
  [[nodiscard]] session_actions link_back();
  [[nodiscard]] session_actions quiescent();
  /// The bytes of all other sources of the receive have arrived too, and the engine knows.
  [[nodiscard]] session_actions received_whole();
  [[nodiscard]] session_actions expire(time_point now);

  [[nodiscard]] state current() const noexcept { return state_; }
  /// Whether an offer would be taken. If not, its contents are ignored.
  [[nodiscard]] bool expects_offer() const noexcept {
    return state_ == state::requested && request_.mode == transfer_mode::read && !empty();
  }
  [[nodiscard]] transfer_id id() const noexcept { return request_.transfer; }

 private:
  struct pull {
    transport::batch_id id;
    cache_slice slice;
    bool state{false};
  };

  [[nodiscard]] bool goes_on() const noexcept;
  [[nodiscard]] bool empty() const noexcept;
  [[nodiscard]] session_actions batch_landed(const layers_landed& message);
  [[nodiscard]] std::optional<error> check(const cache_slice& slice, bool with_state) const;
  [[nodiscard]] std::optional<error> take(std::uint32_t layer, const cache_slice& slice);
  [[nodiscard]] session_actions pull_more();
  [[nodiscard]] session_actions complete_if_all_landed(session_actions before);
  [[nodiscard]] session_actions succeed(session_actions before);
  [[nodiscard]] session_actions fence_with(error why, bool tell);
  [[nodiscard]] session_actions nonsense(std::string what);
  [[nodiscard]] session_actions overturn(error why, bool tell);
  [[nodiscard]] session_actions finish_with(session_message last_word);
  [[nodiscard]] transfer_abort abort_for(const error& why) const;

  options options_;
  state state_{state::idle};
  transfer_request request_;
  std::vector<std::byte> aux_;
  // write mode
  std::vector<std::uint32_t> here_;  ///< per layer, the first token that has not landed
  /// Landed ahead of a gap: (layer, first token) -> end token.
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint32_t> ahead_;
  std::uint32_t landed_batches_{0};
  std::optional<std::uint32_t> sealed_batches_;
  bool state_here_{false};
  // read mode
  std::vector<pull> in_flight_;
  std::vector<pull> again_;  ///< pulls to repeat, which a broken link did not complete
  std::uint32_t next_layer_{0};
  std::uint32_t pulls_{0};
  bool state_pulled_{false};
  bool revoked_{false};  ///< the peer fenced; its reason is on the way

  bool told_{false};     ///< the outcome was concluded
  bool refused_{false};  ///< the request was refused, here or by another source
  bool peer_gone_{false};
  bool owes_quiescent_{false};  ///< the peer aborted and waits for `transfer_quiescent`
};

[[nodiscard]] std::string_view to_string(receive_session::state s) noexcept;

}  // namespace troupe::actors
