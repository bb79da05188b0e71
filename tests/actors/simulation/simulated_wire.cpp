#include "simulated_wire.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "troupe/kvcache/segment.hpp"

namespace troupe::actors::link_simulation {

void mailbox::put(wire_world& wires, const std::shared_ptr<process>& at, std::function<void()> what,
                  microseconds pause) {
  const auto takes = pause + wires.between(microseconds{0}, microseconds{200});
  last_ = std::max(last_, wires.time.now() + takes);
  wires.time.at(last_, [&wires, at, what = std::move(what)] { wires.in(at, what); });
}

std::span<std::byte> process::bytes_of(region_id region) {
  if (const auto found = later.find(region.value); found != later.end()) return found->second.bytes;
  if (region.value == 0 || region.value > memory.size()) return {};
  return memory[region.value - 1];
}

wire::wire(wire_world& in, registry& all, std::shared_ptr<process> at, transport::backend_kind kind,
           const transport::link_options& options, std::shared_ptr<transport::link_sink> sink)
    : world_{in},
      all_{all},
      at_{std::move(at)},
      kind_{kind},
      options_{options},
      sink_{std::move(sink)},
      token_{in.chance.next()} {
  stats_.lanes = 1;
}

void wire::report(microseconds after, std::function<void()> what) {
  last_reported_ = std::max(last_reported_, world_.time.now() + after);
  world_.time.at(last_reported_, [self = shared_from_this(), what = std::move(what)] {
    self->world_.in(self->at_, [self, what] { what(); });
  });
}

// -- making it

transport::link_offer wire::offer() const {
  transport::link_offer out;
  out.kind = kind_;
  out.owner = incarnation{at_->incarnation};
  out.payload.resize(sizeof token_);
  std::memcpy(out.payload.data(), &token_, sizeof token_);
  all_[token_] = std::const_pointer_cast<wire>(shared_from_this());
  return out;
}

result<void> wire::connect(const transport::link_offer& peer) {
  std::uint64_t token = 0;
  if (state_ != state::opened || peer.payload.size() != sizeof token) {
    return fail(errc::invalid_config, "a malformed offer, or a link in use");
  }
  std::memcpy(&token, peer.payload.data(), sizeof token);
  state_ = state::connecting;
  const auto self = shared_from_this();
  world_.time.after(options_.connect_timeout, [self] {
    if (self->state_ == state::connecting) self->see_break(errc::deadline, "nobody connected");
  });
  if (options_.role == transport::link_role::acceptor) return {};
  const auto takes = world_.between(microseconds{50}, milliseconds{3});
  const auto there = all_[token].lock();
  world_.time.at(arrival(takes, there ? *there->at_ : *at_), [self, token] {
    const auto other = self->all_[token].lock();
    if (!other || !other->at_->alive || self->state_ != state::connecting ||
        other->state_ != state::connecting || other->kind_ != self->kind_) {
      return;
    }
    self->come_up(other);
    other->come_up(self);
  });
  return {};
}

void wire::come_up(const std::shared_ptr<wire>& with) {
  peer_ = with;
  there_ = with->at_;
  state_ = state::up;
  report(world_.between(microseconds{10}, milliseconds{2}), [self = shared_from_this()] {
    if (self->state_ != state::closed) self->sink_->on_up();
  });
}

// -- its end

void wire::breaks(std::optional<microseconds> seen_after) {
  cut_ = true;
  if (!seen_after) return;
  world_.time.after(*seen_after, [self = shared_from_this()] {
    self->see_break(errc::link_broken, "the wire broke");
  });
}

void wire::see_break(errc code, const std::string& why) {
  if (state_ != state::up && state_ != state::connecting) return;
  state_ = state::broken;
  end_flights(errc::link_broken, why);
  report(microseconds{0}, [self = shared_from_this(), code, why] {
    if (self->state_ != state::closed) self->sink_->on_broken({code, why});
  });
}

void wire::close() {
  if (state_ == state::closed) return;
  const bool was_up = state_ == state::up;
  state_ = state::closed;
  end_flights(errc::aborted, "the link was closed");
  const auto other = peer_.lock();
  if (!was_up || !other || cut_ || world_.chance.one_in(10)) return;
  // What was sent before arrives first.
  const auto seen =
      std::max(last_sent_, arrival(world_.between(microseconds{100}, milliseconds{50})));
  world_.time.at(seen, [other] { other->see_break(errc::link_broken, "closed by the peer"); });
}

void wire::end_flights(errc code, const std::string& why) {
  for (const auto& [number, one] : std::map{flights_}) {
    // A NIC goes on for a while.
    if (world_.chance.one_in(2)) {
      const bool moves = !one.pieces.empty();
      const auto part = moves ? world_.chance.upto(8) : 0;
      const auto most = milliseconds{moves ? 400 : 20};
      world_.time.after(world_.between(microseconds{0}, most),
                        [self = shared_from_this(), work = one, part] { self->move(work, part); });
    }
    complete(number, troupe::error{code, why});
  }
}

// -- frames

moment wire::arrival(microseconds takes, const process& there) const {
  return std::max({world_.time.now() + takes, silent_until_, world_.apart_until(*at_, there)});
}

result<void> wire::send_frame(std::span<const std::byte> frame) {
  if (state_ != state::up) return fail(errc::link_broken, "the link is not up");
  if (!world_.calm && world_.chance.one_in(300))
    return fail(errc::overloaded, "the queue of frames is full");
  ++stats_.frames_out;
  last_sent_ = std::max(last_sent_, arrival(world_.between(microseconds{20}, milliseconds{2})));
  if (cut_) return {};
  world_.time.at(last_sent_, [self = shared_from_this(),
                              bytes = std::vector<std::byte>{frame.begin(), frame.end()}] {
    if (self->cut_) return;
    if (const auto other = self->peer_.lock()) other->hear(bytes);
  });
  return {};
}

void wire::hear(std::vector<std::byte> frame) {
  if (state_ != state::up) return;
  ++stats_.frames_in;
  report(microseconds{0}, [self = shared_from_this(), frame = std::move(frame)] {
    if (self->state_ != state::closed) self->sink_->on_frame(frame);
  });
}

// -- bytes

result<transport::remote_grant> wire::grant(region_id region, byte_set permitted,
                                            transport::access rights,
                                            transport::grant_scope scope) {
  if (state_ != state::up) return fail(errc::link_broken, "the link is not up");
  if (world_.chance.one_in(6)) return fail(errc::overloaded, "no room for another grant");
  const auto known = at_->later.find(region.value);
  if (kind_ == transport::backend_kind::shm && known != at_->later.end() && !known->second.given &&
      world_.chance.one_in(2)) {
    return fail(errc::backend_unavailable, "the peer may not look into memory of this process");
  }
  transport::remote_grant out;
  out.id = world_.chance.next();
  out.region = region;
  out.owner = incarnation{at_->incarnation};
  out.transfer = scope.transfer;
  out.rights = rights;
  out.region_size = at_->memory.empty() ? 4096 : at_->bytes_of(region).size();
  out.permitted = std::move(permitted);
  if (auto within = out.permitted.check_within(out.region_size); !within) {
    return fail(within.error());
  }
  given_.emplace(out.id, out);
  return out;
}

result<void> wire::post(transport::batch work) {
  if (state_ != state::up) return fail(errc::link_broken, "the link is not up");
  if (fencing_.contains(work.transfer) || fenced_.contains(work.transfer)) {
    return fail(errc::grant_revoked, "this transfer was fenced here");
  }
  // The bytes are at risk when a wire breaks that they are under way on.
  if (!work.pieces.empty() && !world_.calm && world_.chance.one_in(60)) {
    breaks(world_.between(microseconds{0}, milliseconds{10}));
    if (const auto other = peer_.lock()) {
      other->breaks(world_.between(microseconds{0}, milliseconds{100}));
    }
  }
  const auto number = ++posted_;
  ++stats_.batches_posted;
  flights_.emplace(number, std::move(work));
  world_.time.at(arrival(world_.between(microseconds{50}, milliseconds{5})),
                 [self = shared_from_this(), number] { self->land(number); });
  return {};
}

std::string wire::wrong_with(const transport::batch& work, const wire& other) const {
  const auto wanted =
      work.dir == transport::direction::write ? transport::access::write : transport::access::read;
  for (const auto& one : work.pieces) {
    const auto& remote = one.remote;
    if (!remote) return "it has no grant";
    if (remote->owner.value != other.at_->incarnation) return "its grant is of another life";
    if (auto fits = check_local(one.segments, at_->bytes_of(one.local).size()); !fits) {
      return fits.error().message;
    }
    if (other.at_->bytes_of(remote->region).empty()) return "its grant is on memory that is gone";
    // The peer believes its own record of the grant alone.
    const auto known = other.given_.find(remote->id);
    if (known == other.given_.end()) return "its grant was never given";
    const auto& given = known->second;
    if (!given.serves(work.transfer)) return "its grant is for another transfer";
    if (!permits(given.rights, wanted)) return "its grant does not permit that direction";
    for (const auto& s : one.segments) {
      const extent range{s.remote_offset, s.length, s.remote_stride, s.count};
      if (!given.permitted.covers(range)) return "its grant does not permit these bytes";
    }
  }
  return {};
}

void wire::copy(const transport::piece& from, const segment& what, const transport::batch& of,
                wire& other) {
  const bool writes = of.dir == transport::direction::write;
  const auto here = from.local, there = from.remote->region;
  for (std::uint32_t i = 0; i < what.count; ++i) {
    const auto local = what.local_offset + i * what.local_stride;
    const auto remote = what.remote_offset + i * what.remote_stride;
    world_.touched(*at_, of.transfer, {here.value - 1U, local, what.length, !writes});
    world_.touched(*other.at_, of.transfer, {there.value - 1U, remote, what.length, writes});
    auto* ours = at_->bytes_of(here).data() + local;
    auto* theirs = other.at_->bytes_of(there).data() + remote;
    std::memcpy(writes ? theirs : ours, writes ? ours : theirs, what.length);
  }
}

bool wire::uses(region_id region) const {
  const auto is_given = [&](const auto& one) { return one.second.region == region; };
  const auto flies = [&](const auto& one) {
    return std::ranges::any_of(one.second.pieces,
                               [&](const auto& piece) { return piece.local == region; });
  };
  return std::ranges::any_of(given_, is_given) || std::ranges::any_of(flights_, flies);
}

bool wire::move(const transport::batch& work, std::size_t segments) {
  const auto other = peer_.lock();
  if (!other || !other->at_->alive || fenced_.contains(work.transfer)) return false;
  if (other->fenced_.contains(work.transfer)) {
    world_.refused();
    return false;
  }
  stats_.bytes_out += 4096;
  other->stats_.bytes_in += 4096;
  world_.landed(*at_, *other->at_, work.transfer);
  if (work.pieces.empty() || !at_->alive) return true;
  if (const auto what = wrong_with(work, *other); !what.empty()) {
    world_.wrong("a batch of " + at_->name + " is wrong: " + what);
    return false;
  }
  for (const auto& one : work.pieces) {
    for (const auto& what : one.segments) {
      if (segments == 0) return true;
      --segments;
      copy(one, what, work, *other);
    }
  }
  return true;
}

void wire::land(std::uint64_t number) {
  const auto found = flights_.find(number);
  const auto other = peer_.lock();
  if (found == flights_.end() || cut_ || state_ != state::up || !other) return;
  if (other->state_ != state::up) return;  // this end will see that
  const auto& work = found->second;
  if (!move(work, std::numeric_limits<std::size_t>::max())) {
    complete(number, troupe::error{errc::grant_revoked, "the peer has fenced the transfer"});
    return;
  }
  if (!work.frame.empty()) other->hear(work.frame);
  complete(number, std::nullopt);
}

void wire::complete(std::uint64_t number, std::optional<troupe::error> failure) {
  const auto node = flights_.extract(number);
  ++stats_.batches_completed;
  transport::completion done{node.mapped().id, node.mapped().transfer, std::move(failure), 0, {}};
  if (!done.failure) {
    for (const auto& one : node.mapped().pieces) done.bytes += total_bytes(one.segments);
  }
  report(world_.between(microseconds{10}, microseconds{500}),
         [self = shared_from_this(), done = std::move(done)] { self->sink_->on_completion(done); });
}

transport::fence_state wire::fence(transfer_id transfer) {
  if (fenced_.contains(transfer)) return transport::fence_state::quiescent;
  if (!fencing_.insert(transfer).second) return transport::fence_state::pending;
  const auto ends = [transfer](wire& at) {
    for (const auto& [number, one] : std::map{at.flights_}) {
      if (one.transfer != transfer) continue;
      at.complete(number, troupe::error{errc::aborted, "the transfer was fenced here"});
    }
    std::erase_if(at.given_, [&](const auto& one) { return one.second.transfer == transfer; });
    at.fencing_.erase(transfer);
    at.fenced_.insert(transfer);
  };
  if (world_.chance.one_in(3)) {
    ends(*this);
    return transport::fence_state::quiescent;
  }
  // An end that cannot reach its peer waits until nothing of the peer can arrive any more.
  const auto most = milliseconds{state_ != state::up && world_.chance.one_in(3) ? 600U : 30U};
  auto over = world_.time.now() + world_.between(microseconds{100}, most);
  // A peer that reaches into this memory by itself has to let go by itself.
  if (kind_ == transport::backend_kind::shm && there_) over = std::max(over, there_->frozen_until);
  world_.time.at(over, [self = shared_from_this(), ends, transfer] {
    ends(*self);
    self->report(microseconds{0}, [self, transfer] { self->sink_->on_quiescent(transfer); });
  });
  return transport::fence_state::pending;
}

// -- the data plane of a process

result<std::span<std::byte>> wire_endpoint::bytes(region_id region) const {
  const auto at = at_.lock();
  const auto found = at ? at->bytes_of(region) : std::span<std::byte>{};
  if (found.empty()) return fail(errc::unknown_region, "no such region");
  return found;
}

result<region_id> wire_endpoint::allocate(std::uint64_t size, std::string /*name*/) {
  const auto at = at_.lock();
  // Much memory is hard to find.
  const bool much = size > (1U << 20U) && world_.chance.one_in(2);
  if (!at || much || (!world_.calm && world_.chance.one_in(30))) {
    return fail(errc::pool_exhausted, "no memory is left");
  }
  const std::shared_ptr<void> given{std::calloc(size, 1), std::free};
  at->later[++last_region_] = {{static_cast<std::byte*>(given.get()), size}, given};
  return region_id{last_region_};
}

result<region_id> wire_endpoint::register_memory(std::span<std::byte> bytes, std::string /*name*/) {
  const auto at = at_.lock();
  if (!at || bytes.empty()) return fail(errc::invalid_config, "no memory");
  if (!world_.calm && world_.chance.one_in(40)) return fail(errc::overloaded, "too many regions");
  for (const auto& [number, known] : at->later) {
    const auto* const end = known.bytes.data() + known.bytes.size();
    if (bytes.data() < end && known.bytes.data() < bytes.data() + bytes.size()) {
      return fail(errc::already_exists, "it overlaps region " + std::to_string(number));
    }
  }
  at->later[++last_region_] = {bytes, {}};
  return region_id{last_region_};
}

result<void> wire_endpoint::deregister(region_id region) {
  const auto at = at_.lock();
  if (!at || at->later.erase(region.value) == 0)
    return fail(errc::unknown_region, "no such region");
  for (const auto& weak : opened_) {
    const auto known = weak.lock();
    if (known && known->uses(region)) {
      world_.wrong(at->name + " deregisters memory that may still be touched");
    }
  }
  return {};
}

bool wire_endpoint::usable(transport::backend_kind kind) const {
  const auto found = unusable_until_.find(kind);
  return found == unusable_until_.end() || world_.time.now() >= found->second;
}

std::vector<transport::backend_status> wire_endpoint::backends() const {
  std::vector<transport::backend_status> all;
  for (const auto kind : {transport::backend_kind::rdma, transport::backend_kind::tcp}) {
    all.push_back({kind, {usable(kind), usable(kind) ? "simulated" : "its device failed"}});
  }
  return all;
}

transport::host_identity wire_endpoint::identity() const {
  return place_;
}

result<transport::backend_choice> wire_endpoint::choose(
    const transport::host_identity&, std::optional<transport::backend_kind> wanted,
    std::span<const transport::backend_kind>) const {
  const auto kind = wanted.value_or(transport::backend_kind::tcp);
  if (!usable(kind)) return fail(errc::backend_unavailable, "its device failed");
  return transport::backend_choice{kind, "simulated"};
}

result<std::shared_ptr<transport::link>> wire_endpoint::open(
    transport::backend_kind kind, const transport::link_options& options,
    std::shared_ptr<transport::link_sink> sink) {
  if (!usable(kind)) return fail(errc::no_device, "its device failed");
  if (!world_.calm && world_.chance.one_in(60))
    return fail(errc::internal, "no descriptor is left");
  auto made = std::make_shared<wire>(world_, all_, at_.lock(), kind, options, std::move(sink));
  std::erase_if(opened_, [](const auto& one) { return one.expired(); });
  opened_.push_back(made);
  return std::shared_ptr<transport::link>{std::move(made)};
}

}  // namespace troupe::actors::link_simulation
