#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "troupe/actors/transfer/session_actions.hpp"

namespace troupe::actors {

/// The prefill side of one transfer, from the decode side's request to the release. One per
/// (request, decode rank). Plain class, not thread-safe.
///
///   state      event                          next       actions
///   ---------  -----------------------------  ---------  -------
///   idle       start                          streaming  as below, at once for what is ready
///   idle       local_abort, link_lost,        finished   conclude(failure), unpin
///              peer_abort, expire
///   streaming  start / source_ready / sealed  streaming  post_slice per ready range (write mode),
///                                                        up to `max_in_flight`; waiting ranges
///                                                        merge
///   streaming  batch_completed                streaming  post_slice for ranges that waited
///   streaming  everything posted, sealed      draining   write mode: the seal goes with the last
///                                                        post_slice if that is posted now, else
///                                                        send transfer_sealed
///   streaming  sealed (read mode)             draining   send_offer
///   streaming  sealed, nothing to move        draining   send transfer_sealed of no batches, in
///                                                        either mode
///   streaming  peer_release                   fencing    as a failure: nothing was sealed yet
///   draining   peer_release                   fencing    conclude(done), fence_transfer
///   streaming, link_back                      the same,  none: nothing is posted or sent until the
///   draining                                  held       decode side has asked again
///   held       asked_again                    streaming  as start, without what has landed
///   any live   peer_abort, local_abort,       fencing    transfer_abort unless the peer told us or
///              link_lost, expire, batch                  is gone, conclude(failure),
///              failure, request not servable             fence_transfer
///   any live   batch failure grant_revoked    the same   none: the peer fenced and says why, or its
///                                                        end of the link broke first: link_back
///   any live   peer_refused                   fencing    as peer_abort; the outcome says `refused`
///   fencing    peer_abort                     fencing    none; answered when quiescent
///   fencing    quiescent                      finished   transfer_quiescent in answer to a peer's
///                                                        abort, unpin
///   fencing    anything else                  fencing    none
///   finished   anything                       finished   none
///
/// A release that arrives while batches are unacknowledged counts as their acknowledgement. `done`
/// is concluded as soon as the release arrives: the fence only guards the pins.
///
/// A peer that gives up sends its abort and then fences. That fence may refuse a batch of ours, and
/// the refusal may be seen before the abort is read. So `grant_revoked` is not an outcome: no more
/// batches are posted, and the abort, the loss of the link, the next link or the deadline tells
/// what happened.
///
/// After a rebuild of the link only the decode side knows which batches have landed. It asks again,
/// with new grants, and everything that it lacks is posted once more. The seal counts the batches
/// since then.
///
/// Per-request state is final only when the engine has sealed. It goes with the last batch posted
/// after the seal, which has an empty slice if all tokens were posted before.
class send_session {
 public:
  struct options {
    std::uint32_t layers{0};            ///< of the local cache
    std::uint32_t layers_per_batch{0};  ///< at most so many in one batch; 0: no bound
    std::uint32_t max_in_flight{8};     ///< batches
    bool has_state{false};              ///< the layout has per-request state tensors
    time_point deadline;
    /// Tokens that move together, per layer: ready ranges are rounded down to a multiple of them
    /// until the source is sealed. Empty: one token.
    std::vector<std::uint32_t> tokens_at_once{};
  };
  enum class state : std::uint8_t { idle, streaming, draining, fencing, finished };

  explicit send_session(options opts);

  /// Takes the request and the present progress of the source: `ready[layer]` is the first token
  /// that is not yet computed in that layer; `sealed_tokens` is set once the engine sealed. Fails
  /// at both sides with `out_of_range` if the request wants more tokens than the sealed source has,
  /// and with `layout_mismatch` if it expects another beginning of `aux`.
  [[nodiscard]] session_actions start(const transfer_request& request,
                                      std::span<const std::uint32_t> ready,
                                      std::optional<std::uint32_t> sealed_tokens,
                                      std::vector<std::byte> aux);
  /// The engine computed layers [layer_begin, layer_end) up to `token_end` (exclusive). A smaller
  /// `token_end` than before is ignored.
  [[nodiscard]] session_actions source_ready(std::uint32_t layer_begin, std::uint32_t layer_end,
                                             std::uint32_t token_end);
  /// The source is complete. All layers must be ready up to `tokens`, else the transfer fails with
  /// `invalid_config` naming the layer. `out_of_range` if the request wants more. A second call is
  /// ignored.
  [[nodiscard]] session_actions sealed(std::uint32_t tokens, std::vector<std::byte> aux);
  [[nodiscard]] session_actions batch_completed(transport::batch_id id,
                                                const std::optional<troupe::error>& failure);
  [[nodiscard]] session_actions peer_released();
  [[nodiscard]] session_actions peer_aborted(troupe::error why);
  /// The decode side gives up because another source of its receive refused.
  [[nodiscard]] session_actions peer_refused(troupe::error why);
  [[nodiscard]] session_actions local_abort(troupe::error why);
  [[nodiscard]] session_actions link_lost(troupe::error why);
  /// The link broke and was rebuilt: no event of the former one follows.
  [[nodiscard]] session_actions link_back();
  /// The repeated request, over the new link. Ignored unless the link is back.
  [[nodiscard]] session_actions asked_again(const transfer_request& request);
  [[nodiscard]] session_actions quiescent();
  /// Fails with `deadline` once the deadline of the options has passed.
  [[nodiscard]] session_actions expire(time_point now);

  [[nodiscard]] state current() const noexcept { return state_; }
  /// Whether a repeated request would be taken. If not, its contents are ignored.
  [[nodiscard]] bool waits_to_be_asked() const noexcept { return goes_on() && held_; }
  [[nodiscard]] transfer_id id() const noexcept { return transfer_; }

 private:
  [[nodiscard]] bool goes_on() const noexcept;
  [[nodiscard]] std::optional<error> seal(std::uint32_t tokens, std::vector<std::byte> aux);
  [[nodiscard]] std::optional<error> skip_landed(const transfer_request& request);
  [[nodiscard]] session_actions advance();
  [[nodiscard]] std::optional<cache_slice> next_range() const;
  [[nodiscard]] post_slice post(cache_slice slice);
  [[nodiscard]] session_actions fence_with(error why, bool tell);

  options options_;
  state state_{state::idle};
  bool refused_{false};  ///< the request was refused, here or by another source
  transfer_id transfer_;
  transfer_mode mode_{transfer_mode::write};
  std::uint32_t token_begin_{0}, token_end_{0};
  std::vector<std::uint32_t> ready_;   ///< per layer, the first token that is not computed
  std::vector<std::uint32_t> posted_;  ///< per layer, the first token that no batch has taken
  std::vector<transport::batch_id> in_flight_;
  std::uint32_t batches_{0};         ///< posted so far, and the last id
  std::uint32_t batches_before_{0};  ///< how many of them were posted over links that broke
  std::vector<std::byte> aux_;
  std::vector<std::byte> expect_;  ///< what `aux_` must begin with
  bool sealed_{false};
  bool state_due_{false};  ///< the state tensors are still to be posted
  bool revoked_{false};    ///< the peer fenced; its reason is on the way
  bool held_{false};       ///< the link was rebuilt, and the decode side has not asked again
  bool peer_gone_{false};
  bool owes_quiescent_{false};  ///< the peer aborted and waits for `transfer_quiescent`
};

[[nodiscard]] std::string_view to_string(send_session::state s) noexcept;

/// `layout_mismatch` unless the prefill engine's `aux` begins with the bytes that the decode engine
/// expects.
[[nodiscard]] std::optional<error> check_expected(std::span<const std::byte> expected,
                                                  std::span<const std::byte> aux);

}  // namespace troupe::actors
