#pragma once

/// The calls of a frontend to the reference engine, as JSON in the payload of a `call`. Fields that
/// are left out have the defaults below; times are milliseconds, clock readings nanoseconds of
/// CLOCK_MONOTONIC.
///
///     method   payload                          reply
///     prefill  prefill_call                     prefill_reply, when the cache was handed over
///     decode   decode_call                      decode_reply, when the text is complete
///     text     {"request": ID}                  text_reply: as far as decode has come; `not_found`
///                                               when no such request lives here
///     abort    {"request": ID}                  {} ; `not_found` as well
///     model    {}                               model_reply

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/config/transfer_mode.hpp"
#include "troupe/deploy/reference_engine/generation.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::reference {

inline constexpr std::uint32_t max_prompt_tokens = 100'000;
inline constexpr std::uint32_t max_new_tokens = 100'000;

/// Computes the prompt's cache and hands it to the decode ranks that ask for the request.
struct prefill_call {
  std::string request;        ///< 1 to 256 bytes
  std::vector<token> prompt;  ///< token numbers
  std::uint32_t chunk{0};     ///< tokens computed at a time; 0: the whole prompt
  sampling how;
  std::uint32_t consumers{0};           ///< decode ranks that will take it; 0: their parallel size
  std::uint32_t deadline_ms{0};         ///< 0: the deployment's
  std::vector<std::string> held_for{};  ///< decode nodes it is for; optional
};
struct prefill_reply {
  std::uint32_t prompt_tokens{0};
  token first_token{0};
  std::uint64_t bytes{0};  ///< handed over by this rank
  std::int64_t started_ns{0}, computed_ns{0}, done_ns{0};
};

/// Takes the cache from `sources` and continues the text. `decode_at` makes it from a placement.
struct decode_call {
  std::string request;
  std::vector<std::string> sources;  ///< nodes of the prefill replica, in rank order
  std::vector<std::string>
      replica;  ///< nodes of this replica, in rank order; may be empty with one rank
  transfer_mode mode{transfer_mode::write};
  std::vector<token> prompt;
  std::uint32_t max_tokens{1};  ///< of the text, including the prefill's first token
  sampling how;
  bool reuse_prefix{false};  ///< reuse the cache of a finished request, and keep this one's
  std::uint32_t deadline_ms{0};
  std::uint64_t placed_by{0}, placed_at{0};  ///< of the placement, if there was one
};
/// The call of a placed request without its text: id, nodes, mode, and by whom and when it was
/// placed.
[[nodiscard]] decode_call decode_at(const actors::placement& where);
struct decode_reply {
  generation text;         ///< empty from ranks other than 0, which hand their heads to rank 0
  std::uint64_t bytes{0};  ///< arrived at this rank
  std::uint32_t prefix_tokens{0};  ///< reused, not moved
  std::int64_t started_ns{0}, received_ns{0}, done_ns{0};
  std::int64_t computed_ns{0};  ///< the prefill side's clock when it had computed everything
  /// Share of the moved cache that had landed before `computed_ns`, 0 to 1. Means something when
  /// both processes have one clock: on one host.
  double landed_early{0.0};
};

/// The aux data with which the prefill side seals.
struct handoff {
  generation text;  ///< the first token
  std::int64_t computed_ns{0};
};

/// A text that is being written.
struct text_reply {
  std::vector<token> tokens;
};

struct model_reply {
  model_config model;
  std::string dtype;
  std::uint32_t block_tokens{0}, blocks{0};
};

using payload = std::vector<std::uint8_t>;

[[nodiscard]] payload to_json(const prefill_call& call);
[[nodiscard]] payload to_json(const prefill_reply& reply);
[[nodiscard]] payload to_json(const decode_call& call);
[[nodiscard]] payload to_json(const decode_reply& reply);
[[nodiscard]] payload to_json(const model_reply& reply);
[[nodiscard]] payload to_json(const text_reply& reply);
/// Also the payload of `text`.
[[nodiscard]] payload abort_to_json(const std::string& request);
[[nodiscard]] std::vector<std::byte> to_aux(const handoff& what);

/// `invalid_config` naming what is wrong; returned values are within the bounds above.
[[nodiscard]] result<prefill_call> prefill_call_from(std::span<const std::uint8_t> json);
[[nodiscard]] result<prefill_reply> prefill_reply_from(std::span<const std::uint8_t> json);
[[nodiscard]] result<decode_call> decode_call_from(std::span<const std::uint8_t> json);
[[nodiscard]] result<decode_reply> decode_reply_from(std::span<const std::uint8_t> json);
[[nodiscard]] result<model_reply> model_reply_from(std::span<const std::uint8_t> json);
[[nodiscard]] result<text_reply> text_reply_from(std::span<const std::uint8_t> json);
[[nodiscard]] result<std::string> abort_from(std::span<const std::uint8_t> json);
[[nodiscard]] result<handoff> handoff_from(std::span<const std::byte> aux);

}  // namespace troupe::reference
