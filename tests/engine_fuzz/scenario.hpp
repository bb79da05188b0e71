#pragma once

/// The story of one seed: a deployment of two or three replicas of engines, and what those engines
/// do, step by step. Pure: no clock, no node.

#include <cstdint>
#include <string>
#include <vector>

#include "troupe/kvcache/layout.hpp"

namespace troupe::engine_fuzz {

/// Seeded numbers, the same on every machine.
class dice {
 public:
  explicit dice(std::uint64_t seed) : state_{seed} {}
  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15ULL;
    auto z = state_;
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31U);
  }
  /// From `low` to `high`, both included.
  std::uint32_t roll(std::uint32_t low, std::uint32_t high) {
    return low + static_cast<std::uint32_t>(next() % (std::uint64_t{high} - low + 1));
  }
  /// Like `roll`, but each power of two is equally likely.
  std::uint32_t roll_log(std::uint32_t low, std::uint32_t high);
  bool one_in(std::uint32_t n) { return roll(1, n) == 1; }
  template <class T>
  T pick(std::initializer_list<T> of) {
    return *(of.begin() + roll(0, static_cast<std::uint32_t>(of.size()) - 1));
  }

 private:
  std::uint64_t state_;
};

enum class processes : std::uint8_t { one, several };

/// How the nodes of a deployment are named.
enum class naming : std::uint8_t {
  file,
  open,       ///< each node joins an open stage: one stage prefills, the other decodes
  open_both,  ///< all nodes join one stage, which does both
};

/// How one stage keeps its caches.
struct side {
  std::uint32_t ranks{1};
  std::uint32_t replicas{1};
  bool pooled{false};   ///< in the node's pool; else in the engine's own memory
  bool unnamed{false};  ///< own memory in an unnamed arrangement, with gaps
  bool polling{false};
  kvcache::arrangement how;
  bool on_gpu{false};       ///< its pool is in the memory of a GPU double
  bool allocated{false};    ///< own memory that Troupe allocates
  std::uint32_t blocks{0};  ///< of each rank; with groups of layers, of each pool
  /// For each group of layers, the first group over the same bytes: the blocks of these groups are
  /// one pool.
  std::vector<std::uint32_t> pools;
};

/// A deliberate failure of one request.
enum class mishap : std::uint8_t {
  none,
  decode_aborts,    ///< one rank of the first decode replica
  prefill_aborts,   ///< one rank
  short_seal,       ///< the prefill has fewer tokens than the decode ranks want
  decode_deadline,  ///< the deadline of one rank passes before the prefill begins
  prefill_dies,     ///< SIGKILL of the process of one rank
  decode_dies,
  prefill_stands,  ///< SIGSTOP of the process of one rank, later SIGCONT
  decode_stands,
  short_window,  ///< one decode rank keeps tokens of a group of layers that the prefill does not
  released,      ///< not received at all: the first decode rank releases its sources
};
[[nodiscard]] std::string_view to_string(mishap what) noexcept;

/// The first token that a request has in one group of layers, always the first one of a block.
struct window {
  std::uint32_t held{0};   ///< at the sending side
  std::uint32_t kept{0};   ///< at the receiving side
  std::uint32_t asked{0};  ///< by the receive that is refused; equals `kept` in any other request
};

/// One request, the same for all ranks that take part.
struct request_plan {
  std::uint64_t seed{0};  ///< of its bytes
  std::uint32_t source_tokens{0};
  std::uint32_t tokens{0};
  std::uint32_t prefix{0};
  std::uint32_t aux_bytes{0};
  std::uint32_t slot{0};  ///< of its state, at every rank of prefill; of decode: `slot + 1`
  bool shares{false};     ///< begins with the prefix of its round, whose blocks prefill shares
  bool shared_there{
      false};               ///< decode has that prefix too, and its blocks are shared there as well
  bool names_blocks{true};  ///< decode names its blocks; else the pool allocates them
  bool frees_early{false};  ///< pooled: blocks are given back while they move
  bool two_replicas{false};           ///< both decode replicas receive it, one after the other
  bool decode_again{false};           ///< the decode rank that failed asks once more
  bool asked_late{false};             ///< one decode rank asks again after everything has ended
  std::vector<std::uint32_t> chunks;  ///< token ends, ascending; empty: only the seal says
  mishap what{mishap::none};
  std::uint32_t rank{0};  ///< the rank that the mishap is about
  /// A decode replica sends and the prefill replica receives. The words `decode` and `prefill` then
  /// mean the sides of the request, not the replicas.
  bool back{false};
  std::vector<window> windows;  ///< of each group of layers

  /// Whether decode ranks hold its sources before they receive from them.
  [[nodiscard]] bool is_held() const { return what != mishap::released && seed / 1152 % 12 >= 8; }
  [[nodiscard]] std::string name(std::uint64_t scenario, std::uint32_t index) const;
};

/// The memory that a value is put from.
enum class value_memory : std::uint8_t {
  pages,  ///< mapped for this put
  slab,   ///< where other values were put from before
  block,  ///< of the cache
};
/// What the engine does to the memory as soon as the put has its outcome.
enum class memory_end : std::uint8_t { overwritten, unreadable, unmapped };
enum class given_up : std::uint8_t { never, at_once, soon };

struct put_plan {
  std::uint64_t seed{0};  ///< of its bytes
  std::uint32_t peer{0};
  std::uint32_t bytes{0};  ///< from a block: as many as are contiguous there
  value_memory memory{value_memory::pages};
  memory_end end{memory_end::overwritten};
  given_up when{given_up::never};
  std::uint32_t soon_us{0};
  std::uint32_t ttl_ms{0};  ///< 0: never expires
  bool again{false};        ///< after a failure, other bytes under the same key

  /// Whether a block of a pool is given back as soon as the put has begun.
  [[nodiscard]] bool frees_early() const {
    return memory == value_memory::block && seed / 1024 % 2 == 1;
  }
};

enum class act_kind : std::uint8_t {
  send,
  compute,  ///< layers [a, b) of chunk c, then `layers_ready`
  seal,
  receive,
  receive_again,
  receive_late,
  abort_send,
  abort_receive,
  wait_for_outcome,  ///< of the receive of `request` at node `a`
  wait_for_sends,    ///< of all sends of `request`
  call_wrongly,      ///< a: the number of the wrong call
  put,               ///< a: the index of the put in the round
  break_links,
  pause,  ///< a: microseconds
  die,
  stand,
  wake,
  hold,
  release,
};

struct act {
  act_kind what{act_kind::pause};
  std::uint32_t node{0};
  std::uint32_t request{0};
  std::uint32_t a{0}, b{0}, c{0};
};

/// The acts between two moments at which nothing is live.
struct round {
  std::vector<request_plan> requests;
  std::vector<put_plan> puts;
  std::uint32_t shared_blocks{0};  ///< of the prefix that some of its requests begin with
  std::uint64_t shared_seed{0};    ///< of its bytes
  bool shared_freed{false};        ///< pooled: given back once no more requests are to share it
  std::vector<act> acts;
};

struct scenario {
  std::uint64_t seed{0};
  processes where{processes::one};
  naming named_by{naming::file};
  kvcache::cache_shape model;  ///< `blocks`, `tp_rank` and `tp_size` are open
  std::uint64_t packed{0};  ///< bit l: only the engine understands the bytes of a block of layer l
  /// Layers with block tables of their own; empty: one table serves all. Each group has its
  /// `block_tokens`.
  std::vector<kvcache::layer_group> groups;
  /// The parts of each state, in bytes of the whole replica; empty for a state of one piece.
  std::vector<std::vector<kvcache::state_part>> parts;
  side prefill, decode;
  bool has_aside{false};  ///< one more node, which no edge touches
  side aside;
  std::string backend;
  bool reads{false};
  std::uint32_t lanes{1};
  bool retries{false};                         ///< `limits.retry_window` is long
  bool may_break{false};                       ///< some act breaks links
  bool may_freeze{false};                      ///< some process is killed or stopped
  std::uint32_t default_deadline_ms{600'000};  ///< of values; transfers name their own
  std::vector<round> rounds;

  /// The nodes of the edge. The node that no edge touches comes after them.
  [[nodiscard]] std::uint32_t joined_nodes() const {
    return prefill.ranks + decode.ranks * decode.replicas;
  }
  [[nodiscard]] std::uint32_t nodes() const { return joined_nodes() + (has_aside ? 1 : 0); }
  [[nodiscard]] bool is_prefill(std::uint32_t node) const { return node < prefill.ranks; }
  [[nodiscard]] bool is_aside(std::uint32_t node) const { return node == joined_nodes(); }
  [[nodiscard]] const side& side_of(std::uint32_t node) const {
    return is_aside(node) ? aside : is_prefill(node) ? prefill : decode;
  }
  [[nodiscard]] std::uint32_t rank_of(std::uint32_t node) const {
    return is_aside(node) ? 0 : is_prefill(node) ? node : (node - prefill.ranks) % decode.ranks;
  }
  [[nodiscard]] std::uint32_t replica_of(std::uint32_t node) const {
    return is_aside(node) || is_prefill(node) ? 0 : (node - prefill.ranks) / decode.ranks;
  }
  [[nodiscard]] std::uint32_t decode_node(std::uint32_t replica, std::uint32_t rank) const {
    return prefill.ranks + replica * decode.ranks + rank;
  }
  [[nodiscard]] std::string name_of(std::uint32_t node) const;
  [[nodiscard]] bool is_packed(std::uint32_t layer) const {
    return layer < 64 && (packed >> layer & 1U) != 0;
  }
  /// Whether no file names the nodes, except the one aside.
  [[nodiscard]] bool is_open() const { return named_by != naming::file; }
  /// Whether each replica may send to every other.
  [[nodiscard]] bool is_mutual() const { return named_by == naming::open_both; }
  [[nodiscard]] std::string stage_of(std::uint32_t node) const;
  /// The replica's name that a joining node announces.
  [[nodiscard]] std::string replica_name_of(std::uint32_t node) const;
  [[nodiscard]] kvcache::cache_layout layout_of(std::uint32_t node) const;
  [[nodiscard]] std::vector<kvcache::state_part> parts_of(std::size_t state) const {
    return state < parts.size() ? parts[state] : std::vector<kvcache::state_part>{};
  }

  // -- the nodes that take part in a request

  /// The decode replica that takes part; the first one if both do.
  [[nodiscard]] std::uint32_t decode_replica_of(const request_plan& r) const {
    return r.two_replicas || decode.replicas == 1
               ? 0
               : static_cast<std::uint32_t>(r.seed % decode.replicas);
  }
  /// The sending nodes, rank by rank.
  [[nodiscard]] std::vector<std::uint32_t> sources_of(const request_plan& r) const;
  /// The receiving nodes, rank by rank; those of the first replica if the request is for two.
  [[nodiscard]] std::vector<std::uint32_t> takers_of(const request_plan& r) const;
  /// Whether a participating node is a sender.
  [[nodiscard]] bool sends(const request_plan& r, std::uint32_t node) const {
    return is_prefill(node) != r.back;
  }

  /// Whether a deployment file can describe the model.
  [[nodiscard]] bool has_model() const { return prefill.pooled || decode.pooled; }
  [[nodiscard]] bool has_gpus() const { return prefill.on_gpu || decode.on_gpu; }
  /// Whether operations on values have a short deadline.
  [[nodiscard]] bool values_expire() const { return default_deadline_ms < 600'000; }
  [[nodiscard]] std::uint32_t shared_tokens(const round& in) const {
    return in.shared_blocks * model.block_tokens;
  }

  // -- block tables: one for each group of layers, or one

  [[nodiscard]] std::uint32_t tables() const {
    return groups.empty() ? 1 : static_cast<std::uint32_t>(groups.size());
  }
  [[nodiscard]] std::uint32_t table_of(std::uint32_t layer) const;
  [[nodiscard]] std::uint32_t block_tokens(std::uint32_t table) const {
    return groups.empty() ? model.block_tokens : groups[table].block_tokens;
  }
  [[nodiscard]] std::uint32_t blocks_of(std::uint32_t tokens, std::uint32_t table = 0) const {
    return (tokens + block_tokens(table) - 1) / block_tokens(table);
  }
  /// The smallest number of tokens that is a whole number of blocks of each group and of the model.
  [[nodiscard]] std::uint32_t tokens_of_whole_blocks() const;
};

/// `most_bytes`: the limit for all caches of all nodes together.
[[nodiscard]] scenario draw(std::uint64_t seed, const std::vector<std::string>& backends,
                            std::uint64_t most_bytes);

/// The story as lines for a person to read.
enum class detail : std::uint8_t { requests, acts };
[[nodiscard]] std::string describe(const scenario& s, detail much = detail::acts);
[[nodiscard]] std::string describe(const scenario& s, const act& one);

/// How many wrong calls there are for `call_wrongly`, and how many more that are about groups of layers.
inline constexpr std::uint32_t wrong_call_count = 25;
inline constexpr std::uint32_t wrong_group_call_count = 8;

}  // namespace troupe::engine_fuzz
