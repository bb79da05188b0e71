#include <algorithm>
#include <cctype>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/context/node_place.hpp"
#include "troupe/actors/link/link_parts.hpp"

namespace troupe::actors::link_parts {

namespace {

/// "0000:1b:00.0". It is printed in sentences, so it is nothing else either.
bool is_bus_id(std::string_view text) {
  constexpr std::size_t longest = 32;
  return !text.empty() && text.size() <= longest && std::ranges::all_of(text, [](unsigned char c) {
    return std::isxdigit(c) != 0 || c == ':' || c == '.';
  });
}

/// Why xgmi does not move this node's own cache.
troupe::error not_on_gpus(const node_context& here) {
  if (here.cache_in_both.empty()) {
    return {errc::backend_unavailable, "the cache of " + here.self.name +
                                           " is in memory of the host, which xgmi does not move"};
  }
  return {errc::backend_unavailable,
          "the cache of " + here.self.name + " has " + here.cache_in_both +
              ", and xgmi moves only what is all on GPUs: register each region in memory of a GPU, "
              "or use shm, rdma or tcp"};
}

/// The same of a peer that names no GPUs for its cache.
troupe::error not_on_gpus(const node_info& peer) {
  return {errc::backend_unavailable, "the cache of " + peer.name +
                                         " is in memory of the host, all or a part of it, which "
                                         "xgmi does not move"};
}

/// Of a reason that a peer gives, in bytes.
constexpr std::size_t max_reason = 2048;

/// The peer, with the GPUs that it names.
transport::host_identity peer_with(const link_state& st, const std::vector<std::string>& gpus) {
  auto peer = place_of(st.peer);
  peer.gpus = gpus;
  return peer;
}

link_reply refusal(self_pointer self, troupe::error why) {
  link_reply reply;
  reply.failed = static_cast<std::uint8_t>(why.code);
  reply.sentence = why.message;
  auto& st = self->state;
  if (st.broke) {
    // The peer may try again, or another backend.
    st.now = link_state::phase::dialling;
    retire_transport(st);
    wait_for_dialler(self);
  } else {
    end_link(self, std::move(why));
  }
  return reply;
}

/// The peer's end asks again. Empty: it may.
std::optional<link_reply> prepare_again(self_pointer self, const link_request& request) {
  auto& st = self->state;
  link_reply no;
  no.failed = static_cast<std::uint8_t>(errc::peer_lost);
  if (self->current_sender() != caf::actor_cast<caf::strong_actor_ptr>(st.other_end) ||
      request.from.incarnation != st.peer.incarnation ||
      request.to_incarnation != st.context->self.incarnation) {
    no.failed = static_cast<std::uint8_t>(errc::unauthorized);
    no.sentence = "this link belongs to another peer";
    return no;
  }
  if (st.now == link_state::phase::up) {
    break_link(self, {errc::link_broken, st.peer.name + " says that it broke"});
  }
  if (st.now == link_state::phase::ending) {
    no.sentence = st.why_ended;
    return no;
  }
  retire_transport(st);
  heard_besides(st);
  ++st.tries;
  wait_for_dialler(self);
  return std::nullopt;
}

}  // namespace

bytes to_bytes(std::span<const std::byte> from) {
  bytes to(from.size());
  std::ranges::transform(from, to.begin(),
                         [](std::byte b) { return std::to_integer<std::uint8_t>(b); });
  return to;
}

std::vector<std::byte> from_bytes(const bytes& from) {
  std::vector<std::byte> to(from.size());
  std::ranges::transform(from, to.begin(), [](std::uint8_t b) { return std::byte{b}; });
  return to;
}

result<void> adopt_layout(link_state& st, const bytes& encoded) {
  if (encoded.empty()) return {};
  auto layout = kvcache::decode(from_bytes(encoded));
  if (!layout) return fail(layout.error());
  if (st.context->layout) {
    if (auto fits = kvcache::check_compatible(*st.context->layout, *layout); !fits) return fits;
  }
  st.peer_layout = std::make_shared<const kvcache::cache_layout>(std::move(*layout));
  return {};
}

std::vector<std::string> cache_gpus(const node_context& context) {
  if (!context.cache_gpu) return {};
  auto seen = context.endpoint->identity().gpus;
  if (*context.cache_gpu >= seen.size()) return {};
  return {std::move(seen[*context.cache_gpu])};
}

result<void> adopt_gpus(link_state& st, const std::vector<std::string>& named) {
  if (named.size() > max_cache_gpus || !std::ranges::all_of(named, is_bus_id)) {
    return fail(errc::out_of_range, st.peer.name + " names GPUs that are none, or more than " +
                                        std::to_string(max_cache_gpus) +
                                        "; it must run this release of Troupe");
  }
  st.peer_on_gpu = !named.empty();
  return {};
}

std::optional<troupe::error> in_the_way(const link_state& st, transport::backend_kind kind) {
  const auto& here = *st.context;
  if (transport::joins_one_host_only(kind)) {
    auto apart = transport::why_apart(here.endpoint->identity(), place_of(st.peer));
    if (apart) return troupe::error{errc::backend_unavailable, std::move(*apart)};
  }
  if (kind != transport::backend_kind::xgmi) return std::nullopt;
  if (!here.cache_gpu) return not_on_gpus(here);
  if (st.peer_on_gpu && !*st.peer_on_gpu) return not_on_gpus(st.peer);
  return std::nullopt;
}

result<void> judge(const link_state& st, const std::vector<std::string>& gpus) {
  if (auto why = in_the_way(st, st.choice.kind)) return fail(std::move(*why));
  auto chosen = st.context->endpoint->choose(peer_with(st, gpus), st.choice.kind);
  if (!chosen) return fail(std::move(chosen).error());
  return {};
}

link_reply accept(self_pointer self, const link_request& request) {
  auto& st = self->state;
  if (st.other_end) {
    if (auto no = prepare_again(self, request)) return *no;
  } else {
    meet(self, self->current_sender());
  }
  const auto kind = transport::backend_kind_from(request.backend);
  if (!kind) {
    return refusal(self, {errc::backend_unavailable,
                          "there is no backend number " + std::to_string(request.backend) +
                              "; run the same release of Troupe on every host"});
  }
  // Before it may be refused, so that both sides name the same backend.
  st.choice = {*kind, printable(request.reason, max_reason)};
  st.chose = true;
  if (auto known = adopt_gpus(st, request.gpus); !known) return refusal(self, known.error());
  if (auto joins = judge(st, request.gpus); !joins) return refusal(self, joins.error());
  if (auto fits = adopt_layout(st, request.layout); !fits) return refusal(self, fits.error());
  if (auto opened = open_transport(self); !opened) return refusal(self, opened.error());
  const transport::link_offer offer{*kind, incarnation{request.from.incarnation},
                                    from_bytes(request.offer)};
  link_reply reply;
  reply.offer = to_bytes(st.link->offer().payload);
  reply.layout = to_bytes(st.context->encoded_layout);
  reply.gpus = cache_gpus(*st.context);
  st.now = link_state::phase::connecting;
  if (auto started = st.link->connect(offer); !started) return refusal(self, started.error());
  return reply;
}

}  // namespace troupe::actors::link_parts
