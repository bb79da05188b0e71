#pragma once

/// The session messages that two nodes exchange over a link about one transfer or one keyed value,
/// and their frames byte by byte. No CAF here: the same code is fuzzed and runs in simulations.
///
/// A frame is little-endian: `u16 version` (`session_version`), `u16 type` (the index of the
/// alternative in `session_message`, counted from 1), then the fields in the order of the struct.
/// Integers have their own width; a string or byte list is `u32 length` and its bytes; a list is
/// `u32 count` and its items; an enum is its number and must be in range; `std::optional` is `u8
/// 0|1` and the value. A frame ends with its last field: left-over bytes are an error.
///
/// A list of blocks is `u32 count` and its runs. Each run is a number of 1 to 5 bytes (LEB128:
/// seven bits a byte, the lowest first, the highest bit set where more follow) and, if that number
/// is odd, a second one, the number of blocks less two. The first number is twice the distance from
/// the block behind the last run (from block 0), folded to keep small distances of both signs small
/// (0, -1, 1, -2, ... become 0, 1, 2, 3, ...). A block of a shuffled pool of half a million takes
/// three bytes.
///
/// The grants of a transfer travel without the bytes that they permit. Both sides derive these: the
/// bytes of the tokens, in the blocks that the message names, in the layout that its sender has
/// shown in the handshake, of the layers and states that both sides hold. The list has one grant
/// for each region of that layout, in order.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "troupe/actors/cache_slice.hpp"
#include "troupe/config/transfer_mode.hpp"
#include "troupe/kvcache/block_list.hpp"
#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/transport/types.hpp"

namespace troupe::actors {

inline constexpr std::uint16_t session_version = 6;

using troupe::transfer_mode;

/// The block table of one group of layers. If a layout has groups, a message has one table for each
/// group, in their order, and names no other blocks.
struct group_table {
  std::uint32_t group{0};
  /// The decode side keeps no token before this one, which is the first of a block.
  std::uint32_t token_begin{0};
  /// The blocks of those of the message's tokens that are kept.
  std::vector<kvcache::block_run> blocks{};
  friend bool operator==(const group_table&, const group_table&) = default;
};

// -- one transfer

/// What has landed at the decode side when it asks again over a link that was rebuilt.
struct transfer_progress {
  /// Write mode: per layer that both sides hold, the first token that has not landed. Read mode: empty.
  std::vector<std::uint32_t> here;
  bool state{false};  ///< the state tensors have landed
  friend bool operator==(const transfer_progress&, const transfer_progress&) = default;
};
/// decode -> prefill, first message of a transfer: the tokens wanted and where to write them.
/// Repeated, with new grants, over each link that replaces a broken one.
struct transfer_request {
  transfer_id transfer;
  std::string request;  ///< the id that both engines know; 1 to 256 bytes
  transfer_mode mode{transfer_mode::write};
  std::uint32_t rank{0}, ranks{1};  ///< of the decode side's replica, of all its parts
  std::uint32_t token_begin{0};     ///< the decode side already has the prefix before this token
  std::uint32_t token_end{0};  ///< tokens of the prompt; token_begin == token_end: nothing to move
  /// Write mode: the destination of tokens [token_begin, token_end), from the block of token_begin on.
  std::vector<kvcache::block_run> blocks;
  std::vector<std::uint32_t> state_slots;       ///< destination slots of per-request state tensors
  std::vector<transport::remote_grant> grants;  ///< write mode: one per destination region
  std::uint32_t deadline_ms{0};                 ///< time left until the deadline
  std::optional<transfer_progress> progress;    ///< only in a repeated request
  /// The supervisor that placed the request and the epoch of the placement; 0: not placed.
  std::uint64_t placed_by{0}, placed_at{0};
  std::vector<group_table> groups{};
  std::uint64_t life{0};  ///< incarnation of the intended source; 0: any
  /// Time left to wait for a source that is not offered yet; empty: until the deadline.
  std::optional<std::uint32_t> park_ms{};
  /// What the sealed `aux` must begin with, before anything is offered or called complete.
  std::vector<std::byte> expect{};
  bool again{false};  ///< do not answer merely that the request was delivered before
  friend bool operator==(const transfer_request&, const transfer_request&) = default;
};
/// prefill -> decode, read mode: all layers are ready and may be read.
struct transfer_offer {
  transfer_id transfer;
  std::uint32_t token_end{0};
  /// The source of the request's tokens up to token_end, from the block of its token_begin on.
  std::vector<kvcache::block_run> blocks;
  std::vector<std::uint32_t> state_slots;
  std::vector<transport::remote_grant> grants;
  std::vector<std::byte> aux;  ///< small data of the engine (first token, logits), see `max_aux`
  std::vector<group_table> groups{};
  friend bool operator==(const transfer_offer&, const transfer_offer&) = default;
};
/// The contents of a seal that travels with the notice of the last batch.
struct seal_notice {
  std::uint32_t token_end{0};
  std::uint32_t batches{0};
  std::vector<std::byte> aux;
  friend bool operator==(const seal_notice&, const seal_notice&) = default;
};
/// prefill -> decode, write mode, behind the bytes of a batch: these layers have landed.
struct layers_landed {
  transfer_id transfer;
  cache_slice slice;
  bool state{false};  ///< the state tensors came with this batch; the slice may then be empty
  std::optional<seal_notice> seal;  ///< of the last batch, if it was posted behind the seal
  friend bool operator==(const layers_landed&, const layers_landed&) = default;
};
/// prefill -> decode, write mode: everything has been posted, in `batches` batches, and the last
/// one was posted before the engine sealed. Both modes: the answer to a request with nothing to
/// move, with no batches.
struct transfer_sealed {
  transfer_id transfer;
  std::uint32_t token_end{0};
  std::uint32_t batches{0};
  std::vector<std::byte> aux;
  friend bool operator==(const transfer_sealed&, const transfer_sealed&) = default;
};
/// decode -> prefill: all bytes are here and verified complete; the source may be freed.
struct transfer_release {
  transfer_id transfer;
  friend bool operator==(const transfer_release&, const transfer_release&) = default;
};
/// either -> other: this side failed the transfer, and why.
struct transfer_abort {
  transfer_id transfer;
  errc code{errc::aborted};
  std::string reason;  ///< at most `max_sentence` bytes, see `make_abort`
  /// The receive wants something that a source does not have. Nothing failed at the prefill side:
  /// its source stays available to other receives and to a repeated request. The source in question
  /// sets this, and the decode side sets it towards the other sources.
  bool refused{false};
  friend bool operator==(const transfer_abort&, const transfer_abort&) = default;
};
/// decode -> prefill, first message of its own route: keep the source of that request for me, I shall
/// ask for it. Answered when the source has ended: by `transfer_release` if it was delivered, else
/// by `transfer_abort`, also if there is no source. The decode side ends the hold by
/// `transfer_abort`.
struct transfer_hold {
  transfer_id transfer;
  std::string request;    ///< 1 to 256 bytes
  std::uint64_t life{0};  ///< as `transfer_request::life`
  friend bool operator==(const transfer_hold&, const transfer_hold&) = default;
};
/// decode -> prefill, first message of its own route: nobody wants that request any more. Answered by
/// `transfer_release` once its source has ended, or if it had ended before; a source that has not
/// been sent yet ends when it is. Answered by `transfer_abort`, with the reason, if it goes on.
struct transfer_forget {
  transfer_id transfer;
  std::string request;    ///< 1 to 256 bytes
  std::uint64_t life{0};  ///< as `transfer_request::life`
  friend bool operator==(const transfer_forget&, const transfer_forget&) = default;
};
/// either -> other: in answer to an abort, nothing of mine can touch your memory any more.
struct transfer_quiescent {
  transfer_id transfer;
  friend bool operator==(const transfer_quiescent&, const transfer_quiescent&) = default;
};

// -- keyed values

// A put has two phases, lest a put be stored after its caller was told that it failed: `store_put`
// -> `store_held`, when all bytes have arrived and nothing reads the caller's memory any more;
// `store_commit` -> `store_reply`; `store_release`. The caller gives up by `store_release` instead
// of `store_commit`; later it cannot.

/// A value of at most `max_inline` bytes travels in the frame; a larger one is read through the
/// grant.
struct store_put {
  std::uint64_t op{0};
  std::string key;  ///< 1 to 512 bytes
  std::uint64_t size{0};
  std::uint64_t ttl_ms{0};  ///< 0: no end
  std::vector<std::byte> value;
  std::optional<transport::remote_grant> source;
  friend bool operator==(const store_put&, const store_put&) = default;
};
struct store_get {
  std::uint64_t op{0};
  std::string key;
  std::uint64_t max_size{0};  ///< a larger value is refused with `out_of_range`
  friend bool operator==(const store_get&, const store_get&) = default;
};
struct store_query {
  std::uint64_t op{0};
  std::string key;
  friend bool operator==(const store_query&, const store_query&) = default;
};
struct store_remove {
  std::uint64_t op{0};
  std::string key;
  friend bool operator==(const store_remove&, const store_remove&) = default;
};
/// All bytes of a put are here.
struct store_held {
  std::uint64_t op{0};
  friend bool operator==(const store_held&, const store_held&) = default;
};
/// Makes the put visible. If it arrives too long after `store_held`, the store answers `store_held`
/// once more and does not store the value: by then the peer may have counted its link as lost.
struct store_commit {
  std::uint64_t op{0};
  friend bool operator==(const store_commit&, const store_commit&) = default;
};
/// The answer to a refused put, to `store_commit`, and to a get, query or remove. `failed` is 0 or
/// an `errc`.
struct store_reply {
  std::uint64_t op{0};
  std::uint8_t failed{0};
  std::string sentence;
  std::uint64_t size{0};
  std::uint64_t ttl_ms{0};
  std::vector<std::byte> value;
  std::optional<transport::remote_grant> source;  ///< pinned until `store_release`
  friend bool operator==(const store_reply&, const store_reply&) = default;
};
/// Nothing more is wanted for the operation: the reader has the bytes, the caller of a put knows
/// that they are stored, or the caller has given up.
struct store_release {
  std::uint64_t op{0};
  friend bool operator==(const store_release&, const store_release&) = default;
};

using session_message =
    std::variant<transfer_request, transfer_offer, layers_landed, transfer_sealed, transfer_release,
                 transfer_abort, transfer_quiescent, store_put, store_get, store_query,
                 store_remove, store_reply, store_release, store_held, store_commit, transfer_hold,
                 transfer_forget>;

inline constexpr std::size_t max_request_id = 256;
inline constexpr std::size_t max_key = 512;
inline constexpr std::size_t max_aux = 64u << 10;
inline constexpr std::size_t max_expect = 64;
inline constexpr std::size_t max_groups = 64;
inline constexpr std::size_t max_inline = 32u << 10;
/// Bytes of an abort's reason and of a reply's sentence.
inline constexpr std::size_t max_sentence = 4096;

/// `out_of_range` when a field exceeds its bound or the frame `transport::link::max_frame`, naming
/// the field.
[[nodiscard]] result<std::vector<std::byte>> encode(const session_message& message);
/// `version_mismatch`, or `out_of_range` naming type and field. Allocates no more than the frame's
/// own bytes account for.
[[nodiscard]] result<session_message> decode(std::span<const std::byte> frame);

/// The abort that tells a peer of `why`; a longer sentence is cut to `max_sentence` bytes at a
/// character.
[[nodiscard]] transfer_abort make_abort(transfer_id transfer, const error& why);
/// Like `make_abort`, with `refused` set.
[[nodiscard]] transfer_abort make_refusal(transfer_id transfer, const error& why);

/// The key that routes a message on its link: its transfer, or the operation of a keyed value.
[[nodiscard]] transfer_id route_of(const session_message& message) noexcept;
/// Whether the message ends its transfer or operation, or its sender's part in it: a release, an
/// abort, the answer to an abort, the reply to an operation that brings no value. Repeating it
/// changes nothing.
[[nodiscard]] bool is_final_message(const session_message& message) noexcept;
/// "transfer_request", for logs.
[[nodiscard]] std::string_view type_name(const session_message& message) noexcept;

}  // namespace troupe::actors
