#include <algorithm>
#include <cctype>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/context/node_place.hpp"
#include "troupe/actors/link/peer_link.hpp"

namespace troupe::actors::links {

namespace {

/// A bus id looks like "0000:1b:00.0". Any other text is refused, since it is printed in sentences.
bool is_bus_id(std::string_view text) {
  constexpr std::size_t longest = 32;
  return !text.empty() && text.size() <= longest && std::ranges::all_of(text, [](unsigned char c) {
    return std::isxdigit(c) != 0 || c == ':' || c == '.';
  });
}

/// Why xgmi cannot move this node's own cache.
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

/// Why xgmi cannot move the cache of a peer that names no GPUs for it.
troupe::error not_on_gpus(const node_info& peer) {
  return {errc::backend_unavailable, "the cache of " + peer.name +
                                         " is in memory of the host, all or a part of it, which "
                                         "xgmi does not move"};
}

/// The longest reason taken from a peer, in bytes.
constexpr std::size_t max_reason = 2048;

}  // namespace

/// The peer's host identity with the GPUs that it names.
transport::host_identity peer_link::peer_with(const std::vector<std::string>& gpus) const {
  auto peer = place_of(peer_);
  peer.gpus = gpus;
  return peer;
}

link_reply peer_link::refuse(troupe::error why) {
  link_reply reply;
  reply.failed = static_cast<std::uint8_t>(why.code);
  reply.sentence = why.message;
  if (broke_) {
    // The peer may try again, or try another backend.
    phase_ = phase::dialling;
    drop_transport();
    wait_for_dialler();
  } else {
    end_link(std::move(why));
  }
  return reply;
}

/// Prepares for the repeated request of the peer's end. Returns the refusal; empty if it may go on.
std::optional<link_reply> peer_link::prepare_again(const link_request& request) {
  link_reply no;
  no.failed = static_cast<std::uint8_t>(errc::peer_lost);
  if (around_.sender() != other_end_ || request.from.incarnation != peer_.incarnation ||
      request.to_incarnation != context_->self.incarnation) {
    no.failed = static_cast<std::uint8_t>(errc::unauthorized);
    no.sentence = "this link belongs to another peer";
    return no;
  }
  if (phase_ == phase::up) {
    break_link({errc::link_broken, peer_.name + " says that it broke"});
  }
  if (phase_ == phase::ending) {
    no.sentence = why_ended_;
    return no;
  }
  drop_transport();
  on_process_answered();
  ++tries_;
  wait_for_dialler();
  return std::nullopt;
}

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

result<void> peer_link::adopt_layout(const bytes& encoded) {
  if (encoded.empty()) return {};
  auto layout = kvcache::decode(from_bytes(encoded));
  if (!layout) return fail(layout.error());
  if (context_->layout) {
    if (auto fits = kvcache::check_compatible(*context_->layout, *layout); !fits) return fits;
  }
  peer_layout_ = std::make_shared<const kvcache::cache_layout>(std::move(*layout));
  return {};
}

std::vector<std::string> cache_gpus(const node_context& context) {
  if (!context.cache_gpu) return {};
  auto seen = context.endpoint->identity().gpus;
  if (*context.cache_gpu >= seen.size()) return {};
  return {std::move(seen[*context.cache_gpu])};
}

result<void> peer_link::adopt_gpus(const std::vector<std::string>& named) {
  if (named.size() > max_cache_gpus || !std::ranges::all_of(named, is_bus_id)) {
    return fail(errc::out_of_range, peer_.name + " names invalid GPUs, or more than " +
                                        std::to_string(max_cache_gpus) +
                                        "; it must run this release of Troupe");
  }
  peer_on_gpu_ = !named.empty();
  return {};
}

std::optional<troupe::error> peer_link::why_unusable(transport::backend_kind kind) const {
  const auto& here = *context_;
  if (transport::joins_one_host_only(kind)) {
    auto apart = transport::why_apart(here.endpoint->identity(), place_of(peer_));
    if (apart) return troupe::error{errc::backend_unavailable, std::move(*apart)};
  }
  if (kind != transport::backend_kind::xgmi) return std::nullopt;
  if (!here.cache_gpu) return not_on_gpus(here);
  if (peer_on_gpu_ && !*peer_on_gpu_) return not_on_gpus(peer_);
  return std::nullopt;
}

result<void> peer_link::judge(const std::vector<std::string>& gpus) const {
  if (auto why = why_unusable(choice_.kind)) return fail(std::move(*why));
  auto chosen = context_->endpoint->choose(peer_with(gpus), choice_.kind);
  if (!chosen) return fail(std::move(chosen).error());
  return {};
}

link_reply peer_link::accept(const link_request& request) {
  if (other_end_) {
    if (auto no = prepare_again(request)) return *no;
  } else {
    meet(around_.sender());
  }
  const auto kind = transport::backend_kind_from(request.backend);
  if (!kind) {
    return refuse({errc::backend_unavailable,
                   "there is no backend number " + std::to_string(request.backend) +
                       "; run the same release of Troupe on every host"});
  }
  // Set before any refusal, so that both sides name the same backend.
  choice_ = {*kind, printable(request.reason, max_reason)};
  chose_ = true;
  if (auto known = adopt_gpus(request.gpus); !known) return refuse(known.error());
  if (auto joins = judge(request.gpus); !joins) return refuse(joins.error());
  if (auto fits = adopt_layout(request.layout); !fits) return refuse(fits.error());
  if (auto opened = open_transport(); !opened) return refuse(opened.error());
  const transport::link_offer offer{*kind, incarnation{request.from.incarnation},
                                    from_bytes(request.offer)};
  link_reply reply;
  reply.offer = to_bytes(link_->offer().payload);
  reply.layout = to_bytes(context_->encoded_layout);
  reply.gpus = cache_gpus(*context_);
  phase_ = phase::connecting;
  if (auto started = link_->connect(offer); !started) return refuse(started.error());
  return reply;
}

}  // namespace troupe::actors::links
