#pragma once

/// What one seed says: a deployment of two replicas of engines, or three, and what those engines do, step by
/// step. Pure: no clock, no node.

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
  /// The same, where each power of two is as likely as every other.
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

/// Who says which nodes there are.
enum class naming : std::uint8_t {
  file,
  open,  ///< each joins a stage that is open: one to those that prefill, one to those that decode
  open_both,  ///< all of them join one, which does both
};

/// How one stage keeps its caches.
struct side {
  std::uint32_t ranks{1};
  std::uint32_t replicas{1};
  bool pooled{false};   ///< the node's pool; else memory of the engine's own
  bool unnamed{false};  ///< own memory in an arrangement that has no name, with gaps
  bool polling{false};
  kvcache::arrangement how;
  bool on_gpu{false};       ///< its pool: memory of a double of a GPU
  bool allocated{false};    ///< own memory, which Troupe allocates
  std::uint32_t blocks{0};  ///< of each rank; with groups of layers of each pool
  /// Of each group of layers the first one that lies over the same bytes: blocks of those are of one pool.
  std::vector<std::uint32_t> pools;
};

/// What goes wrong with one request on purpose.
enum class mishap : std::uint8_t {
  none,
  decode_aborts,    ///< one rank of the first decode replica
  prefill_aborts,   ///< one rank
  short_seal,       ///< the prefill has fewer tokens than the decode ranks want
  decode_deadline,  ///< one rank's passes before the prefill begins
  prefill_dies,     ///< SIGKILL of the process of one rank
  decode_dies,
  prefill_stands,  ///< SIGSTOP of the process of one rank, later SIGCONT
  decode_stands,
  short_window,  ///< one decode rank keeps tokens of a group of layers that the prefill does not
  released,      ///< nobody receives it: the first decode rank gives its sources back
};
[[nodiscard]] std::string_view to_string(mishap what) noexcept;

/// From which token on a request has the tokens of one group of layers: the first one of a block.
struct window {
  std::uint32_t held{0};   ///< at the side that sends it
  std::uint32_t kept{0};   ///< at the side that receives it
  std::uint32_t asked{0};  ///< by the receive that is refused; of any other request as `kept`
};

/// One request, the same for all ranks that take part.
struct request_plan {
  std::uint64_t seed{0};  ///< of its bytes
  std::uint32_t source_tokens{0};
  std::uint32_t tokens{0};
  std::uint32_t prefix{0};
  std::uint32_t aux_bytes{0};
  std::uint32_t slot{0};  ///< of its state, at every rank of prefill; of decode: `slot + 1`
  bool shares{false};     ///< it begins with the prefix of its round: prefill shares those blocks
  bool shared_there{
      false};               ///< decode has that prefix too, and its blocks are shared there as well
  bool names_blocks{true};  ///< decode: else the pool allocates
  bool frees_early{false};  ///< pooled: blocks are given back while they move
  bool two_replicas{false};           ///< both decode replicas take it, the second after the first
  bool decode_again{false};           ///< the decode rank that failed asks once more
  bool asked_late{false};             ///< one decode rank asks once more when all is over
  std::vector<std::uint32_t> chunks;  ///< token ends, ascending; empty: only the seal tells
  mishap what{mishap::none};
  std::uint32_t rank{0};  ///< whose mishap it is
  /// A decode replica sends it and the prefill replica receives it: words of `decode` and `prefill` are
  /// of the sides of the request, not of the replicas.
  bool back{false};
  std::vector<window> windows;  ///< of each group of layers

  /// Decode ranks hold its sources before they ask them.
  [[nodiscard]] bool is_held() const { return what != mishap::released && seed / 1152 % 12 >= 8; }
  [[nodiscard]] std::string name(std::uint64_t scenario, std::uint32_t index) const;
};

/// Whose memory a value is put from.
enum class value_memory : std::uint8_t {
  pages,  ///< mapped for this put
  slab,   ///< where other values were put from before
  block,  ///< of the cache
};
/// What the engine does to it as soon as the put has its outcome.
enum class memory_end : std::uint8_t { overwritten, unreadable, unmapped };
enum class given_up : std::uint8_t { never, at_once, soon };

struct put_plan {
  std::uint64_t seed{0};  ///< of its bytes
  std::uint32_t peer{0};
  std::uint32_t bytes{0};  ///< from a block: as many as lie there in one piece
  value_memory memory{value_memory::pages};
  memory_end end{memory_end::overwritten};
  given_up when{given_up::never};
  std::uint32_t soon_us{0};
  std::uint32_t ttl_ms{0};  ///< 0: no end
  bool again{false};        ///< once it has failed: other bytes under its key

  /// From a block of a pool: it is given back as soon as the put has begun.
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
  call_wrongly,      ///< a: which wrong call
  put,               ///< a: which of the round's
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

/// What happens between two moments at which nothing is live.
struct round {
  std::vector<request_plan> requests;
  std::vector<put_plan> puts;
  std::uint32_t shared_blocks{0};  ///< of the prefix that some of its requests begin with
  std::uint64_t shared_seed{0};    ///< of its bytes
  bool shared_freed{false};        ///< pooled: given back once nobody is to share it any more
  std::vector<act> acts;
};

struct scenario {
  std::uint64_t seed{0};
  processes where{processes::one};
  naming named_by{naming::file};
  kvcache::cache_shape model;  ///< `blocks`, `tp_rank` and `tp_size` are open
  std::uint64_t packed{0};  ///< bit l: of layer l only the engine understands the bytes of a block
  /// Layers with block tables of their own; none: one table serves all. Each says its `block_tokens`.
  std::vector<kvcache::layer_group> groups;
  /// Of each state what it is made of, in bytes of the whole replica; none of one that is one piece.
  std::vector<std::vector<kvcache::state_part>> parts;
  side prefill, decode;
  bool has_aside{false};  ///< a node more, which no edge touches
  side aside;
  std::string backend;
  bool reads{false};
  std::uint32_t lanes{1};
  bool retries{false};                         ///< `limits.retry_window` is long
  bool may_break{false};                       ///< some act breaks links
  bool may_freeze{false};                      ///< some process is killed or stopped
  std::uint32_t default_deadline_ms{600'000};  ///< of values; transfers name theirs
  std::vector<round> rounds;

  /// Of the edge; the one aside comes behind them.
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
  /// No file names its nodes, but the one aside.
  [[nodiscard]] bool is_open() const { return named_by != naming::file; }
  /// Each replica may send to each other.
  [[nodiscard]] bool is_mutual() const { return named_by == naming::open_both; }
  [[nodiscard]] std::string stage_of(std::uint32_t node) const;
  /// As a node that joins announces it.
  [[nodiscard]] std::string replica_name_of(std::uint32_t node) const;
  [[nodiscard]] kvcache::cache_layout layout_of(std::uint32_t node) const;
  [[nodiscard]] std::vector<kvcache::state_part> parts_of(std::size_t state) const {
    return state < parts.size() ? parts[state] : std::vector<kvcache::state_part>{};
  }

  // -- who takes part in a request

  /// The decode replica that takes part; the first of them where both do.
  [[nodiscard]] std::uint32_t decode_replica_of(const request_plan& r) const {
    return r.two_replicas || decode.replicas == 1
               ? 0
               : static_cast<std::uint32_t>(r.seed % decode.replicas);
  }
  /// The nodes that send it, rank by rank.
  [[nodiscard]] std::vector<std::uint32_t> sources_of(const request_plan& r) const;
  /// The nodes that receive it, rank by rank; of the first replica where it is for two.
  [[nodiscard]] std::vector<std::uint32_t> takers_of(const request_plan& r) const;
  /// Whether a node that takes part is one that sends.
  [[nodiscard]] bool sends(const request_plan& r, std::uint32_t node) const {
    return is_prefill(node) != r.back;
  }

  /// A model that a deployment file can describe.
  [[nodiscard]] bool has_model() const { return prefill.pooled || decode.pooled; }
  [[nodiscard]] bool has_gpus() const { return prefill.on_gpu || decode.on_gpu; }
  /// How long a value may take.
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
  /// The fewest tokens that are whole blocks of each, and of the model's.
  [[nodiscard]] std::uint32_t tokens_of_whole_blocks() const;
};

/// `most_bytes`: of all caches of all nodes.
[[nodiscard]] scenario draw(std::uint64_t seed, const std::vector<std::string>& backends,
                            std::uint64_t most_bytes);

/// The story in lines for a person.
enum class detail : std::uint8_t { requests, acts };
[[nodiscard]] std::string describe(const scenario& s, detail much = detail::acts);
[[nodiscard]] std::string describe(const scenario& s, const act& one);

/// How many wrong calls there are for `call_wrongly`, and how many more that are about groups of layers.
inline constexpr std::uint32_t wrong_call_count = 25;
inline constexpr std::uint32_t wrong_group_call_count = 8;

}  // namespace troupe::engine_fuzz
