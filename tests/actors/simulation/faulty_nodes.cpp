#include "faulty_nodes.hpp"

#include <algorithm>
#include <iostream>
#include <optional>
#include <regex>
#include <utility>

#include "troupe/actors/context/node_place.hpp"

namespace troupe::actors::link_simulation {

std::string kind_of(const std::string& violation) {
  // The name of a node may be at the beginning.
  const auto out = std::regex_replace(violation, std::regex{"^\\S+: |-[0-9]+"}, "");
  return std::regex_replace(out.substr(0, out.find(": ")), std::regex{"[0-9]+"}, "N");
}

faulty_nodes::faulty_nodes(const fault_options& of, std::vector<seat> seats)
    : chance_{of.seed},
      given_{of},
      seats_{std::move(seats)},
      end_of_faults_{time_.now() + of.faults_for},
      wires_{time_,
             chance_,
             [this](const std::shared_ptr<process>& where, const std::function<void()>& what) {
               in(where, what);
             },
             [this](const process& from, const process& to, transfer_id transfer) {
               landed(from, to, transfer);
             },
             [this](const process& of_whom, transfer_id transfer, const touch& what) {
               touched(of_whom, transfer, what);
             },
             [this](const std::string& what) { violate(what); },
             [this] { refused(); },
             [this](const process& one, const process& another) {
               return apart_until(number_of(one), number_of(another));
             },
             false},
      lives_(seats_.size()) {}

faulty_nodes::~faulty_nodes() {
  for (const auto& node : nodes_) node->take_apart();
}

void faulty_nodes::violate(const std::string& what) {
  if (told_.violation.empty()) told_.violation = what;
}

void faulty_nodes::note(const std::string& what) {
  if (!given_.traced) return;
  std::cout << std::chrono::duration_cast<microseconds>(time_.now().time_since_epoch()).count() -
                   3'600'000'000
            << " " << what << "\n";
}

void faulty_nodes::run_until(moment end, const std::function<std::uint64_t()>& salt) {
  while (told_.violation.empty() && time_.now() < end && time_.step()) {
    ++told_.events;
    const auto now = static_cast<std::uint64_t>(time_.now().time_since_epoch().count());
    told_.digest = (told_.digest ^ now ^ salt()) * 0x100000001B3U;
  }
}

// -- processes

std::size_t faulty_nodes::number_of(const std::string& name) const {
  const auto found = std::ranges::find(seats_, name, &seat::name);
  return static_cast<std::size_t>(found - seats_.begin());
}

void faulty_nodes::start(std::size_t which) {
  const auto made = new_node();
  made->name = seats_[which].name;
  made->incarnation = chance_.next() | 1U;
  node_settings settings;
  settings.cluster = "simulated";
  settings.self.name = made->name;
  settings.self.host = "10.0.0." + std::to_string(1 + which);
  settings.self.boot_id = std::string{"0"} + "abcdef"[which];
  settings.self.incarnation = made->incarnation;
  settings.backend = transport::backend_kind::rdma;
  settings.fallback = {transport::backend_kind::tcp};
  settings.lanes = 1;
  settings.max_operations = 16;
  furnish(which, settings);
  made->context = std::make_shared<node_context>(std::move(settings));
  auto endpoint =
      std::make_unique<wire_endpoint>(wires_, all_wires_, made, place_of(made->context->self));
  made->endpoint = endpoint.get();
  made->context->endpoint = std::move(endpoint);
  nodes_.push_back(made);
  lives_[which] = made;
  leaving_.erase(which);
  note(made->name + " starts");
  started(which);
}

void faulty_nodes::in(const std::shared_ptr<process>& where, const std::function<void()>& what) {
  if (!where->alive) return;
  if (time_.now() < where->frozen_until || !where->held_up.empty()) {
    where->held_up.push_back(what);
  } else {
    what();
  }
}

void faulty_nodes::freeze(std::size_t which, microseconds time) {
  const auto who = lives_[which];
  who->frozen_until = std::max(who->frozen_until, time_.now() + time);
  time_.at(who->frozen_until, [this, who] { wake(who); });
}

void faulty_nodes::wake(const node_ptr& who) {
  while (who->alive && !who->held_up.empty() && time_.now() >= who->frozen_until) {
    // It stays in the queue meanwhile, so that what it causes at once comes behind the others.
    const auto next = who->held_up.front();
    next();
    if (!who->held_up.empty()) who->held_up.pop_front();
  }
}

void faulty_nodes::die(std::size_t which) {
  const auto who = lives_[which];
  if (!who->alive) return;
  note(who->name + " dies");
  who->alive = false;
  who->held_up.clear();
  // Nothing of it runs any more, and its descriptors are closed.
  time_.after(microseconds{0}, [who] { who->take_apart(); });
  for (const auto& weak : who->endpoint->opened()) {
    const auto wire = weak.lock();
    if (!wire) continue;
    if (const auto there = wire->peer()) {
      there->breaks(wires_.between(milliseconds{1}, milliseconds{3000}));
    }
    wire->process_died();
  }
  for (const auto& survivor : lives_) {
    for (const auto& end : std::vector{survivor->ends}) {
      if (end->peer() != who) continue;
      time_.after(wires_.between(milliseconds{1}, milliseconds{3000}),
                  [this, end] { in(end->at(), [end] { end->peer_process_died(); }); });
      time_.after(wires_.between(milliseconds{100}, milliseconds{6000}), [this, end] {
        in(end->at(), [end] { end->order({peer_left{{errc::peer_lost, "it is down"}}}); });
      });
    }
  }
  died(which, who);
  time_.after(wires_.between(milliseconds{500}, milliseconds{4000}),
              [this, which] { start(which); });
}

/// The process ends in good order: its links first, then itself.
void faulty_nodes::leave(std::size_t which) {
  if (!lives_[which]->alive || !leaving_.insert(which).second) return;
  note(lives_[which]->name + " leaves");
  in(lives_[which], [this, which] { stops(which); });
  time_.after(milliseconds{2000}, [this, which, who = lives_[which]] {
    if (lives_[which] == who) die(which);
  });
}

void faulty_nodes::stops(std::size_t which) {
  end_links(which);
}

void faulty_nodes::end_links(std::size_t which) {
  for (const auto& end : std::vector{lives_[which]->ends}) {
    end->order({leave_link{{errc::peer_lost, "this node stops"}}});
  }
}

// -- faults

std::vector<std::shared_ptr<wire>> faulty_nodes::wires_up() const {
  std::vector<std::shared_ptr<wire>> up;
  for (const auto& here : lives_) {
    for (const auto& weak : here->endpoint->opened()) {
      if (const auto wire = weak.lock(); wire && wire->is_up()) up.push_back(wire);
    }
  }
  return up;
}

void faulty_nodes::next_fault() {
  const auto which = told_.drawn_faults.size();
  const auto length = chance_.upto(1000) / 1000.0;
  auto when = end_of_faults_;
  if (given_.drawn_faults) {
    if (which < given_.drawn_faults->size()) when = (*given_.drawn_faults)[which].when;
  } else if (given_.faults_per_second > 0) {
    const auto mean = 1e6 / given_.faults_per_second;
    when = time_.now() + microseconds{static_cast<std::int64_t>(mean * 2 * length)};
  }
  time_.at(when, [this, which] {
    told_.drawn_faults.push_back({time_.now(), chance_});
    auto& drawn = told_.drawn_faults.back();
    if (time_.now() >= end_of_faults_) {
      drawn.happens = false;
      wires_.calm = true;
      return;
    }
    if (given_.drawn_faults) {
      drawn = (*given_.drawn_faults)[which];
      repeat(drawn);
    } else {
      fault();
      for (auto before = drawn.chance; before != chance_; ++drawn.draws) before.next();
    }
    next_fault();
  });
}

/// The dice of the run go on as if the fault had drawn from them, also if it is left out.
void faulty_nodes::repeat(const drawn_fault& what) {
  auto others = std::exchange(chance_, what.chance);
  if (what.happens) fault();
  for (std::uint32_t i = 0; i < what.draws; ++i) others.next();
  chance_ = others;
}

/// Nothing passes between that host and one of the other side, or all of them.
void faulty_nodes::cut_off(std::size_t which) {
  const auto until = time_.now() + wires_.between(milliseconds{10}, milliseconds{2500});
  std::vector<std::size_t> others;
  for (std::size_t i = 0; i < seats_.size(); ++i) {
    if (i != which) others.push_back(i);
  }
  if (others.size() > 1 && chance_.one_in(2)) others = {others[chance_.next() % others.size()]};
  for (const auto one : others) {
    auto& apart = apart_until(which, one);
    apart = std::max(apart, until);
  }
}

void faulty_nodes::fault() {
  const auto which = chance_.upto(static_cast<std::uint32_t>(seats_.size() - 1));
  const auto happens = [this](const std::string& what) {
    ++told_.faults[what];
    note("fault: " + what);
  };
  const auto up = wires_up();
  switch (chance_.upto(12)) {
    case 0:
    case 1:
    case 2:
    case 3: {
      if (up.empty()) return;
      const auto hit = up[chance_.upto(static_cast<std::uint32_t>(up.size() - 1))];
      const auto peer = hit->peer();
      const bool one_sided = !peer || chance_.one_in(3);
      happens(one_sided ? "one end of a wire breaks" : "a wire breaks");
      hit->breaks(wires_.between(microseconds{0}, milliseconds{100}));
      if (peer) {
        peer->breaks(one_sided ? std::nullopt
                               : std::optional{wires_.between(microseconds{0}, milliseconds{300})});
      }
      return;
    }
    case 4:
    case 5: {
      if (up.empty()) return;
      const auto hit = up[chance_.upto(static_cast<std::uint32_t>(up.size() - 1))];
      happens("a wire falls silent");
      const auto until = time_.now() + wires_.between(milliseconds{50}, milliseconds{100'000});
      hit->falls_silent(until);
      if (const auto peer = hit->peer(); peer && chance_.one_in(2)) peer->falls_silent(until);
      return;
    }
    case 6:
    case 7:
      happens("a process freezes");
      return freeze(which, wires_.between(milliseconds{1}, milliseconds{3000}));
    case 8: happens("nothing passes between the hosts"); return cut_off(which);
    case 9:
    case 10:
      happens("a backend fails");
      lives_[which]->endpoint->fails(
          chance_.one_in(3) ? transport::backend_kind::tcp : transport::backend_kind::rdma,
          time_.now() + wires_.between(milliseconds{10}, milliseconds{4000}));
      return;
    case 11:
      if (!chance_.one_in(2)) return;
      happens("a process dies");
      return die(which);
    default:
      if (!chance_.one_in(2)) return;
      happens("a process leaves");
      return leave(which);
  }
}

// -- the network of the actors

void faulty_nodes::mail(const node_ptr& from, const node_ptr& to, std::function<void()> what) {
  const std::pair way{number_of(*from), number_of(*to)};
  auto& last = last_mail_[way];
  last = std::max({last, time_.now() + wires_.between(microseconds{50}, milliseconds{3}),
                   apart_until(way.first, way.second)});
  time_.at(last, [this, to, what = std::move(what)] { in(to, what); });
}

// -- links

end_ptr faulty_nodes::make_end(const node_ptr& at, const node_ptr& peer, transport::link_role role,
                               std::uint64_t asked) {
  at->ends.push_back(std::make_shared<link_end>(*this, at, peer, role, ++links_, asked));
  return at->ends.back();
}

void faulty_nodes::dial(const node_ptr& at, const node_ptr& peer, std::uint64_t asked) {
  const auto made = make_end(at, peer, transport::link_role::initiator, asked);
  note("link " + std::to_string(links_) + " is dialled");
  in(at, [made] { made->handle(nullptr, [&] { made->link().begin(); }); });
}

}  // namespace troupe::actors::link_simulation
