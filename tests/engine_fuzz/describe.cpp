#include <sstream>

#include "scenario.hpp"

namespace troupe::engine_fuzz {

std::string_view to_string(mishap what) noexcept {
  switch (what) {
    case mishap::none: return "nothing goes wrong";
    case mishap::decode_aborts: return "a decode rank aborts";
    case mishap::prefill_aborts: return "a prefill rank aborts";
    case mishap::short_seal: return "sealed with fewer tokens than are wanted";
    case mishap::decode_deadline: return "the deadline of a decode rank passes";
    case mishap::prefill_dies: return "the process of a prefill rank is killed";
    case mishap::decode_dies: return "the process of a decode rank is killed";
    case mishap::prefill_stands: return "the process of a prefill rank is stopped";
    case mishap::decode_stands: return "the process of a decode rank is stopped";
    case mishap::short_window:
      return "a decode rank first asks for tokens that prefill holds no more";
    case mishap::released: return "decode gives it back unread";
  }
  return "?";
}

namespace {

std::string words_of(const scenario& s, const put_plan& put) {
  static constexpr const char* memories[] = {"pages", "memory used before", "a block"};
  static constexpr const char* ends[] = {"overwritten", "made unreadable", "unmapped"};
  std::ostringstream out;
  out << put.bytes << " bytes in " << memories[static_cast<std::size_t>(put.memory)] << " at "
      << s.name_of(put.peer) << ", then " << ends[static_cast<std::size_t>(put.end)];
  if (put.ttl_ms > 0) out << ", for " << put.ttl_ms << " ms";
  if (put.when == given_up::at_once) out << ", given up at once";
  if (put.when == given_up::soon) out << ", given up after " << put.soon_us << " us";
  if (put.again) out << ", put again where it failed";
  if (put.frees_early()) out << ", freed early where it is of a pool";
  return out.str();
}

/// What one side keeps of each group of layers, and what the other side has of it.
std::string words_of(const std::vector<window>& windows) {
  std::ostringstream out;
  for (const auto& w : windows) {
    out << (&w == windows.data() ? "" : ", ") << w.kept;
    if (w.held != w.kept) out << " (held from " << w.held << ")";
    if (w.asked != w.kept) out << " (asked from " << w.asked << ")";
  }
  return out.str();
}

std::string words_of(const request_plan& r) {
  std::ostringstream out;
  if (r.back) out << "back to prefill, ";
  out << r.tokens << " tokens";
  if (r.source_tokens != r.tokens) out << " (" << r.source_tokens << " there)";
  if (r.shares) out << ", shares the prefix" << (r.shared_there ? " at both sides" : "");
  if (r.prefix > 0) out << ", prefix " << r.prefix;
  if (r.aux_bytes > 0) out << ", aux " << r.aux_bytes;
  if (!r.names_blocks) out << ", blocks of the pool's choice";
  if (r.frees_early) out << ", freed early";
  if (r.two_replicas) out << ", for two replicas";
  if (!r.windows.empty()) out << ", groups from tokens " << words_of(r.windows);
  out << "; " << to_string(r.what);
  if (r.what != mishap::none) out << " (rank " << r.rank << ")";
  if (r.decode_again) out << ", asked again";
  if (r.asked_late) out << ", asked once more at the end";
  if (r.is_held()) out << ", held before it is received";
  return out.str();
}

std::string words_of(const side& its) {
  std::ostringstream out;
  out << its.ranks << (its.ranks == 1 ? " rank" : " ranks");
  if (its.replicas > 1) out << " x " << its.replicas;
  out << ", "
      << (its.on_gpu      ? "pool of a GPU"
          : its.pooled    ? "pool"
          : its.allocated ? "allocated memory"
                          : "own memory")
      << " of " << its.blocks << " blocks, ";
  if (!its.pools.empty()) {
    out << "groups over bytes";
    for (const auto pool : its.pools) out << " " << pool;
  } else if (its.unnamed) {
    out << "with gaps";
  } else {
    out << (its.how.order == kvcache::block_order::layers_first   ? "layers first"
            : its.how.order == kvcache::block_order::blocks_first ? "blocks first"
                                                                  : "interleaved")
        << (its.how.kv == kvcache::kv_placement::together ? ", K and V together"
                                                          : ", K and V apart")
        << (its.how.inner == kvcache::block_inner::token_major ? ", tokens" : ", heads")
        << " outermost"
        << (its.how.regions == kvcache::region_use::per_layer ? ", a region per layer" : "");
  }
  return out.str() + (its.polling ? ", polling" : "");
}

}  // namespace

std::string describe(const scenario& s, const act& one) {
  static constexpr const char* words[] = {"send",
                                          "compute",
                                          "seal",
                                          "receive",
                                          "receive again",
                                          "receive late",
                                          "abort the send",
                                          "abort the receive",
                                          "wait for the receive's outcome",
                                          "wait for the sends' outcomes",
                                          "call wrongly",
                                          "put",
                                          "break the links",
                                          "pause",
                                          "kill",
                                          "stop",
                                          "wake",
                                          "hold",
                                          "release"};
  std::ostringstream out;
  out << (one.what == act_kind::pause || one.what == act_kind::break_links ? std::string{"all"}
                                                                           : s.name_of(one.node))
      << ": " << words[static_cast<std::size_t>(one.what)];
  switch (one.what) {
    case act_kind::compute:
      out << " layers " << one.a << ".." << one.b << " of chunk " << one.c << " of request "
          << one.request;
      break;
    case act_kind::call_wrongly: out << " #" << one.a; break;
    case act_kind::put: out << " value " << one.a; break;
    case act_kind::pause: out << " " << one.a << " us"; break;
    case act_kind::break_links:
    case act_kind::die:
    case act_kind::stand:
    case act_kind::wake: break;
    default: out << " request " << one.request;
  }
  return out.str();
}

namespace {

std::string words_of(const kvcache::layer_group& group) {
  std::ostringstream out;
  for (std::size_t i = 0; i < group.layers.size() && i < 6; ++i)
    out << (i == 0 ? "" : ",") << group.layers[i];
  out << (group.layers.size() > 6 ? ",..." : "") << " in blocks of " << group.block_tokens;
  return out.str();
}

std::string words_of(const std::vector<kvcache::state_part>& parts) {
  std::ostringstream out;
  for (const auto& part : parts) {
    out << (&part == parts.data() ? " (" : " + ") << part.bytes
        << (part.sharding == kvcache::state_sharding::sliced ? " sliced" : " replicated");
  }
  out << ")";
  return out.str();
}

std::string_view words_of(naming by) {
  switch (by) {
    case naming::file: return "";
    case naming::open: return ", nodes join open stages";
    case naming::open_both: return ", nodes join one open stage";
  }
  return "?";
}

}  // namespace

std::string describe(const scenario& s, detail much) {
  std::ostringstream out;
  out << "seed " << s.seed << ": " << (s.where == processes::one ? "one process" : "processes")
      << ", " << s.backend << (s.reads ? ", read mode, " : ", write mode, ") << s.lanes << " lanes"
      << (s.retries ? ", retry window" : "") << words_of(s.named_by)
      << (s.has_aside ? ", a node that no edge touches" : "");
  if (s.values_expire()) out << ", values have " << s.default_deadline_ms << " ms";
  out << "\n  model: " << s.model.layers.size() << " layers of " << s.model.dtype << ", blocks of "
      << s.model.block_tokens << " tokens;";
  std::size_t shown = 0;
  for (const auto& layer : s.model.layers) {
    if (++shown > 6) {
      out << " ...";
      break;
    }
    out << " " << kvcache::to_string(layer.kind) << " " << layer.kv_heads << "x" << layer.head_dim
        << (s.is_packed(static_cast<std::uint32_t>(shown - 1)) ? " packed" : "");
  }
  for (std::size_t i = 0; i < s.model.states.size(); ++i) {
    const auto& state = s.model.states[i];
    const bool sliced = state.sharding == kvcache::state_sharding::sliced;
    out << "; " << state.name << " " << state.bytes;
    if (const auto parts = s.parts_of(i); !parts.empty()) {
      out << words_of(parts);
    } else {
      out << (sliced ? " sliced" : " replicated");
    }
  }
  for (std::size_t g = 0; g < s.groups.size(); ++g)
    out << "\n  group " << g << ": layers " << words_of(s.groups[g]);
  out << "\n  prefill: " << words_of(s.prefill) << "\n  decode: " << words_of(s.decode) << "\n";
  for (std::size_t n = 0; n < s.rounds.size(); ++n) {
    const auto& now = s.rounds[n];
    out << "  round " << n << "\n";
    if (now.shared_blocks > 0) {
      out << "    a prefix of " << now.shared_blocks << " blocks is shared"
          << (now.shared_freed ? ", and freed early" : "") << "\n";
    }
    for (std::size_t i = 0; i < now.requests.size(); ++i)
      out << "    request " << i << ": " << words_of(now.requests[i]) << "\n";
    for (std::size_t i = 0; i < now.puts.size(); ++i)
      out << "    value " << i << ": " << words_of(s, now.puts[i]) << "\n";
    if (much == detail::requests) continue;
    for (const auto& one : now.acts) out << "      " << describe(s, one) << "\n";
  }
  return out.str();
}

}  // namespace troupe::engine_fuzz
