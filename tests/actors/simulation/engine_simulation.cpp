#include "engine_simulation.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "troupe/actors/context/node_place.hpp"
#include "troupe/actors/messages/member_list.hpp"

namespace troupe::actors::engine_simulation {

namespace {

using link_simulation::decode;
using link_simulation::end_ptr;
using link_simulation::node_ptr;
using link_simulation::prefill;
using link_simulation::process;
using link_simulation::seat;
using link_simulation::side;

/// After the last fault: when transfers begin that must succeed, and when nothing is left.
constexpr milliseconds trial{40'000}, judged{60'000};
constexpr milliseconds patience{2000};  ///< a retry window
constexpr milliseconds news_delay{300};

/// How the two replicas of a run are divided.
std::array<division, 2> divided_by(const options& of) {
  dice chance{~of.seed};
  std::array<division, 2> all;
  for (const auto role : {decode, prefill}) {
    auto& one = all[role];
    one.ranks = 1 + chance.upto(1);
    if (of.ranks) one.ranks = (*of.ranks)[role];
    one.parts = one.ranks > 1 && chance.one_in(3);
  }
  return all;
}

std::vector<seat> seats_of(const std::array<division, 2>& divided) {
  std::vector<seat> all;
  for (const auto role : {decode, prefill}) {
    const std::string name = role == decode ? "decode" : "prefill";
    const auto ranks = divided[role].ranks;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      all.push_back({ranks == 1 ? name : name + "-" + std::to_string(rank), role});
    }
  }
  return all;
}

/// A life of a node and what only this simulation knows of it.
struct life {
  struct wanted_link {
    actors::need_link order;
    moment since;
  };
  engine_node_ptr node;
  std::unique_ptr<simulated_engine> engine;
  std::shared_ptr<const membership> view{std::make_shared<membership>()};
  std::map<std::string, wanted_link> wanted;  ///< by the peer
};

/// A request as the frontend made it.
struct request {
  /// The latest receive of a decode rank.
  struct asked {
    engine_node_ptr at;
    operation_id operation;
    bool had{false};  ///< this life has received the request, some time
    std::uint32_t tries{0};
  };
  std::string id;
  std::uint32_t tokens{0};
  transfer_mode mode{transfer_mode::write};
  bool trial{false};
  std::uint32_t attempt{0};
  std::map<std::size_t, asked> receives{};       ///< by the node
  std::map<std::size_t, operation_id> probed{};  ///< its sends, if it is a probe
};
using request_ptr = std::shared_ptr<request>;

class world final : public link_simulation::faulty_nodes, public node_world {
 public:
  explicit world(const options& of) : faulty_nodes{of, seats_of(divided_by(of))} {
    ledger_.divided = divided_by(of);
    for (std::size_t i = 0; i < seats().size(); ++i) nodes_of_[seats()[i].role].push_back(i);
    ledger_.sources = names_of(prefill);
    ledger_.violate = [this](const std::string& what) { violate(what); };
    ledger_.note = [this](const std::string& what) { note(what); };
    ledger_.values.now = [this] { return time_.now(); };
    ledger_.values.violate = ledger_.violate;
    ledger_.values.note = ledger_.note;
    if (chance_.one_in(4)) backend_ = transport::backend_kind::shm;
    retry_window_ = chance_.one_in(2) ? milliseconds{0} : patience;
    source_lease_ = milliseconds{2000 + chance_.upto(8000)};
    default_deadline_ = milliseconds{4000 + chance_.upto(6000)};
    max_operations_ = chance_.one_in(4) ? 6 : 64;
    ledger_.retry_window = retry_window_;
  }

  report run();

  // -- end_world

  end_ptr make_acceptor(const node_ptr& at, const link_request& request) override;
  void to_runner(const end_ptr& of, runner_event event) override;
  void to_session(const end_ptr& of, transfer_id transfer, session_event event) override;
  void ended(const end_ptr& of) override { engine_at(of->at()).link_ended(of->id()); }

  // -- node_world

  wire_world& transports() override { return wires_; }
  void need_link(engine_node& of, actors::need_link order) override;
  void events_came(engine_node& of) override {
    if (auto& here = life_of(of); here.node.get() == &of) here.engine->take_events();
  }
  void said(const engine_node& of, const std::string& what) override {
    if (given().traced) note(of.name + ": transfer " + what);
  }
  void last_word_of_put(const std::string& store) override;

 private:
  // -- faulty_nodes
  node_ptr new_node() override { return std::make_shared<engine_node>(*this); }
  void furnish(std::size_t which, node_settings& settings) override;
  void started(std::size_t which) override;
  void died(std::size_t which, const node_ptr& who) override;
  void stops(std::size_t which) override;
  void landed(const process& /*from*/, const process& /*to*/, transfer_id /*of*/) override {}
  void touched(const process& of, transfer_id transfer,
               const link_simulation::touch& what) override;
  void refused() override { ++told_.refused; }
  // -- the supervisor
  void take_in(std::size_t which, std::uint64_t life, node_state as, const std::string& why);
  void publish();
  void adopt(std::size_t which, const std::shared_ptr<const membership>& news);
  void heartbeat(std::size_t which, const engine_node_ptr& of);
  // -- links
  static engine_node& engine_at(const node_ptr& at) { return static_cast<engine_node&>(*at); }
  void make_links(life& at);
  static void answer_gone(life& at, const actors::need_link& order, const std::string& why);
  [[nodiscard]] bool make_link(life& at, const life::wanted_link& wanted);
  void look_again(std::size_t which, const engine_node_ptr& of);
  // -- values
  [[nodiscard]] simulated_values& values_of(std::size_t which) {
    return lives_[which].engine->values();
  }
  [[nodiscard]] std::size_t any_node() {
    return chance_.upto(static_cast<std::uint32_t>(seats().size() - 1));
  }
  void next_values();
  void try_values(std::size_t which);
  void check_links(std::size_t which);
  // -- requests
  void next_request();
  void begin(bool must_arrive, transfer_mode mode);
  void say_words(const request_ptr& of, std::size_t which);
  void offer(const request_ptr& of, milliseconds longest);
  void send(const request_ptr& of, std::size_t which, std::uint32_t attempt, std::uint32_t tokens,
            send_spec terms, std::uint32_t seal_at);
  void compute(const request_ptr& of, const engine_node_ptr& at, operation_id send,
               std::uint32_t seal_at);
  void ask(const request_ptr& of, std::size_t which);
  void maybe_abort(std::size_t which, operation_id what);
  void maybe_crash(std::size_t which);
  [[nodiscard]] bool has(const request_ptr& of, std::size_t which) const;
  [[nodiscard]] std::vector<std::string> names_of(side role) const;
  [[nodiscard]] life& life_of(const engine_node& of) { return lives_[number_of(of)]; }
  [[nodiscard]] bool runs(std::size_t which) const { return at(which)->alive && !leaves(which); }
  void soon(std::size_t which, milliseconds most, std::function<void()> what);
  void look_around();
  void probe_retry(bool again);
  void check_probe(const request_ptr& of, bool goes_on);

  report told_;
  engine_ledger ledger_;
  milliseconds retry_window_{}, source_lease_{}, default_deadline_{};
  std::uint32_t max_operations_{0};
  transport::backend_kind backend_{transport::backend_kind::rdma};
  std::array<std::vector<std::size_t>, 2> nodes_of_;  ///< by side, by rank
  std::vector<life> lives_{seats().size()};
  membership members_{.cluster = "simulated", .supervisor_incarnation = 77, .members = {}};
  std::vector<request_ptr> trials_;
};

// -- nodes

void world::furnish(std::size_t which, node_settings& settings) {
  const std::string stages[] = {"decode", "prefill"};
  for (const auto role : {decode, prefill}) {
    const auto ranks = ledger_.divided[role].ranks;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      const auto node = nodes_of_[role][rank];
      settings.nodes[seats()[node].name] = {stages[role], 0, rank, ranks};
      if (node == which) settings.self.rank = rank;
    }
  }
  const auto role = seats()[which].role;
  settings.self.stage = stages[role];
  settings.self.ranks = ledger_.divided[role].ranks;
  settings.edges = {{{"prefill", "decode"}, transfer_mode::write},
                    {{"prefill", "decode"}, transfer_mode::read}};
  settings.retry_window = retry_window_;
  settings.source_lease = source_lease_;
  settings.default_deadline = default_deadline_;
  settings.max_operations = max_operations_;
  settings.backend = backend_;
  // Memory is shared within one host only.
  if (backend_ == transport::backend_kind::shm) {
    transport::host_identity host;
    host.boot_id = "00";
    host.network_namespace = host.pid_namespace = host.user_namespace = 1;
    settings.self = placed_at(std::move(settings.self), host);
  }
}

void world::started(std::size_t which) {
  const auto made = std::static_pointer_cast<engine_node>(at(which));
  simulated_engine::furnish(*made, ledger_.divided[seats()[which].role], given().seed, chance_);
  auto& here = lives_[which];
  here = life{};
  here.node = made;
  made->open();
  here.engine = std::make_unique<simulated_engine>(*made, ledger_);
  time_.after(wires_.between(milliseconds{1}, milliseconds{200}), [this, which, made] {
    if (!made->alive) return;
    take_in(which, made->incarnation, node_state::up, {});
    made->context->registration.taken_in({members_.supervisor_incarnation, members_.epoch});
    made->context->registration.set(true, {});
    heartbeat(which, made);
  });
}

void world::died(std::size_t which, const node_ptr& who) {
  const auto seen = chance_.one_in(4) ? wires_.between(milliseconds{2000}, milliseconds{12'000})
                                      : wires_.between(milliseconds{200}, milliseconds{3000});
  time_.after(seen, [this, which, life = who->incarnation] {
    take_in(which, life, node_state::down, "it was not heard of");
  });
}

/// As `engine::stop` does: first the operations, then the links.
void world::stops(std::size_t which) {
  lives_[which].engine->stop();
  take_in(which, at(which)->incarnation, node_state::leaving, {});
  const auto until = time_.now() + milliseconds{1000};
  const auto look = std::make_shared<std::function<void()>>();
  *look = [this, which, until, weak = std::weak_ptr{look}, who = lives_[which].node] {
    const auto& counters = who->context->counters;
    const bool copies = counters.local_copies != 0;
    const bool over = counters.runner_stops && counters.active_transfers == 0 && !copies;
    if (counters.runner_stops && who->report().transfers.empty() && !copies) {
      require(who->context->operations.open() == lives_[which].engine->open(),
              "an operation of a runner that has stopped has no outcome");
    }
    if (over || time_.now() >= until) return end_links(which);
    who->here(milliseconds{2}, [next = weak.lock()] { (*next)(); });
  };
  (*look)();
}

void world::touched(const process& of, transfer_id transfer, const link_simulation::touch& what) {
  auto& here = lives_[number_of(of)];
  if (here.node.get() == &of && of.alive) here.engine->touched(transfer, what);
}

// -- the supervisor

void world::take_in(std::size_t which, std::uint64_t life, node_state as, const std::string& why) {
  const auto& info = at(which)->context->self;
  auto& all = members_.members;
  const auto known =
      std::ranges::find_if(all, [&](const member& m) { return m.node.name == info.name; });
  if (as == node_state::up) {
    if (known != all.end()) all.erase(known);
    all.push_back({info, static_cast<std::uint8_t>(as), {}, {}, ++members_.epoch});
  } else {
    if (known == all.end() || known->node.incarnation != life) return;
    known->state = static_cast<std::uint8_t>(as);
    known->reason = why;
    ++members_.epoch;
  }
  publish();
}

void world::publish() {
  const auto news = std::make_shared<const membership>(members_);
  for (std::size_t which = 0; which < lives_.size(); ++which) {
    if (!lives_[which].node) continue;
    const auto late = chance_.one_in(6) ? wires_.between(milliseconds{500}, milliseconds{8000})
                                        : wires_.between(milliseconds{1}, milliseconds{250});
    time_.after(
        late, [this, which, news] { in(at(which), [this, which, news] { adopt(which, news); }); });
  }
}

void world::adopt(std::size_t which, const std::shared_ptr<const membership>& news) {
  auto& here = lives_[which];
  if (news->epoch < here.view->epoch) return;
  here.view = news;
  here.node->hear(node_notice{membership_changed{news}});
  for (const auto& end : std::vector{here.node->ends}) {
    const auto* shown = find_member(*news, end->peer()->name);
    if (shown == nullptr) continue;
    // A list that is older than the peer shows its former life.
    const bool replaced =
        shown->node.incarnation != end->peer()->incarnation && !is_latest(end->peer());
    const bool lost = shown->node.incarnation == end->peer()->incarnation && is_lost(*shown);
    if (replaced || lost) end->order({peer_left{{errc::peer_lost, "it is gone"}}});
  }
  make_links(here);
}

void world::heartbeat(std::size_t which, const engine_node_ptr& of) {
  of->here(wires_.between(milliseconds{900}, milliseconds{1100}), [this, which, of] {
    const auto asked = time_.now();
    const auto epoch = members_.epoch;
    if (!chance_.one_in(5)) {
      of->here(wires_.between(milliseconds{1}, milliseconds{50}), [this, of, asked, epoch] {
        of->hear(node_notice{heartbeat_answered{members_.supervisor_incarnation, epoch, asked}});
      });
    }
    // An answer names the epoch; a list that was lost is sent again.
    if (lives_[which].node == of && lives_[which].view->epoch < epoch && chance_.one_in(2)) {
      adopt(which, std::make_shared<const membership>(members_));
    }
    heartbeat(which, of);
  });
}

// -- links

end_ptr world::make_acceptor(const node_ptr& at, const link_request& request) {
  const auto which = number_of(*at);
  const auto peer = this->at(number_of(request.from.name));
  if (request.to_incarnation != at->incarnation || request.from.incarnation != peer->incarnation ||
      leaves(which)) {
    return nullptr;
  }
  for (const auto& end : std::vector{at->ends}) {
    if (end->peer()->name != peer->name || end->peer() == peer) continue;
    end->order({peer_left{{errc::peer_lost, "it was restarted"}}});
  }
  return make_end(at, peer, transport::link_role::acceptor, 0);
}

void world::to_runner(const end_ptr& of, runner_event event) {
  if (const auto* ready = std::get_if<link_ready>(&event.what)) {
    told_.rebuilt += ready->link.epoch > 1 ? 1 : 0;
    note(of->at()->name + ": link " + std::to_string(of->id()) + " is ready, epoch " +
         std::to_string(ready->link.epoch));
  } else if (const auto* gone = std::get_if<link_gone>(&event.what)) {
    note(of->at()->name + ": link " + std::to_string(of->id()) +
         " is gone: " + to_string(gone->why));
  } else if (const auto* stray = std::get_if<unrouted_message>(&event.what)) {
    said(engine_at(of->at()), std::to_string(route_of(stray->message).value) +
                                  " is spoken of: " + std::string{type_name(stray->message)});
  }
  engine_at(of->at()).hear(std::move(event));
}

void world::to_session(const end_ptr& of, transfer_id transfer, session_event event) {
  engine_at(of->at()).hear_of_session(of, transfer, std::move(event));
}

void world::need_link(engine_node& of, actors::need_link order) {
  const auto which = number_of(of);
  auto& here = lives_[which];
  if (here.node.get() != &of) return;
  auto& wanted =
      here.wanted.try_emplace(order.peer, life::wanted_link{{}, time_.now()}).first->second;
  wanted.order = std::move(order);
  make_links(here);
  look_again(which, here.node);
}

void world::look_again(std::size_t which, const engine_node_ptr& of) {
  of->here(news_delay, [this, which, of] {
    auto& here = lives_[which];
    if (here.node != of || here.wanted.empty()) return;
    make_links(here);
    look_again(which, of);
  });
}

void world::make_links(life& at) {
  std::erase_if(at.wanted, [&](const auto& one) { return make_link(at, one.second); });
}

void world::answer_gone(life& at, const actors::need_link& order, const std::string& why) {
  at.node->hear(runner_event{link_gone{order.peer, 0, 0, order.ask, {errc::peer_lost, why}}});
}

/// Returns true if a link is being made or was refused, as `node_core::make_link` does.
bool world::make_link(life& here, const life::wanted_link& wanted) {
  const auto& order = wanted.order;
  const bool early = time_.now() < wanted.since + news_delay;
  const auto* shown = find_member(*here.view, order.peer);
  if (shown == nullptr) return false;
  const auto peer = at(number_of(order.peer));
  if (shown->state == static_cast<std::uint8_t>(node_state::down)) {
    if (early) return false;
    answer_gone(here, order, "it is down");
    return true;
  }
  if (early && shown->node.incarnation == order.former_life) return false;
  if (shown->node.incarnation != peer->incarnation) {
    // Another process listens there by now, or none.
    answer_gone(here, order, "another life listens there");
    return true;
  }
  dial(here.node, peer, order.ask);
  return true;
}

// -- values

/// Does something with a key of a store, or many things at once.
void world::next_values() {
  time_.after(wires_.between(milliseconds{5}, milliseconds{300}), [this] {
    if (time_.now() >= end_of_faults() + milliseconds{2000}) return;
    const auto store = seats()[any_node()].name;
    const auto key = simulated_values::key(chance_.upto(simulated_values::keys - 1));
    const auto most = milliseconds{1 + chance_.upto(chance_.one_in(2) ? 10 : 500)};
    for (auto left = chance_.one_in(3) ? 1 + chance_.upto(4) : 1; left > 0; --left) {
      const auto by = any_node();
      if (asks()) soon(by, most, [this, by, store, key] { values_of(by).ask(store, key); });
    }
    const auto by = any_node();
    if (chance_.one_in(30)) soon(by, most, [this, by] { values_of(by).expire(); });
    next_values();
  });
}

/// Values must come through, once what is stored is removed. Their deadlines are after `judged`, so
/// only an end in good order leaves nothing there.
void world::try_values(std::size_t which) {
  for (std::uint32_t i = 0; i < simulated_values::keys; ++i) {
    values_of(which).remove(seats()[which].name, simulated_values::key(i));
  }
  const auto store = (which + 1) % seats().size();
  for (const bool large : {false, true}) {
    time_.after(milliseconds{1000}, [this, which, store, large] {
      values_of(which).begin_trial(seats()[store].name, large ? "large" : "small", large);
    });
  }
}

/// If the store is not heard of from now on, it is not known whether the value is stored.
void world::last_word_of_put(const std::string& store) {
  if (wires_.calm || !chance_.one_in(20)) return;
  time_.after(wires_.between(microseconds{0}, milliseconds{2}), [this, which = number_of(store)] {
    freeze(which, wires_.between(milliseconds{2000}, milliseconds{12'000}));
  });
}

/// Two nodes have the same links with each other: more than one if both have dialled at once.
void world::check_links(std::size_t which) {
  const auto links = [this](std::size_t one, std::size_t another) {
    return std::ranges::count(lives_[one].node->ends, at(another),
                              &link_simulation::link_end::peer);
  };
  for (std::size_t peer = 0; peer < lives_.size(); ++peer) {
    const auto here = links(which, peer);
    const bool some = here != 0 || seats()[which].role == seats()[peer].role;
    require(some && here == links(peer, which),
            seats()[which].name + " has other links with " + seats()[peer].name + " than that");
  }
}

// -- requests

void world::soon(std::size_t which, milliseconds most, std::function<void()> what) {
  time_.after(wires_.between(microseconds{0}, most), [this, which, what = std::move(what)] {
    if (!runs(which)) return;
    in(at(which), [this, which, what] {
      if (runs(which)) what();
    });
  });
}

void world::next_request() {
  time_.after(wires_.between(milliseconds{5}, milliseconds{300}), [this] {
    if (time_.now() >= end_of_faults() + milliseconds{2000}) return;
    if (asks()) begin(false, chance_.one_in(2) ? transfer_mode::write : transfer_mode::read);
    next_request();
  });
}

std::vector<std::string> world::names_of(side role) const {
  std::vector<std::string> all;
  for (const auto node : nodes_of_[role]) all.push_back(seats()[node].name);
  return all;
}

void world::begin(bool must_arrive, transfer_mode mode) {
  const auto made = std::make_shared<request>();
  made->id = "r" + std::to_string(++told_.requests);
  made->tokens = 1 + chance_.upto(must_arrive || !chance_.one_in(5) ? 15 : 29);
  made->mode = mode;
  made->trial = must_arrive;
  if (must_arrive) trials_.push_back(made);
  const auto longest = must_arrive || !chance_.one_in(8) ? milliseconds{200} : milliseconds{4000};
  offer(made, longest);
  for (const auto which : nodes_of_[decode]) {
    if (must_arrive || !chance_.one_in(10)) {
      soon(which, longest, [this, made, which] { ask(made, which); });
    }
    if (!must_arrive) say_words(made, which);
  }
}

void world::say_words(const request_ptr& of, std::size_t which) {
  if (chance_.one_in(10)) {
    soon(which, milliseconds{1000}, [this, of, which] {
      const auto held = lives_[which].engine->word(source_verb::hold, of->id);
      if (!held) return;
      maybe_abort(which, *held);
      // A hold has no end of its own.
      lives_[which].node->here(milliseconds{8000}, [this, which, at = lives_[which].node, held] {
        if (lives_[which].node == at) lives_[which].engine->abort(*held);
      });
    });
  }
  if (chance_.one_in(15)) {
    soon(which, milliseconds{1500},
         [this, of, which] { (void)lives_[which].engine->word(source_verb::release, of->id); });
  }
}

/// Another attempt, of all prefill ranks. Some requests are sent once more after that: after they
/// failed, or though they were delivered.
void world::offer(const request_ptr& of, milliseconds longest) {
  const auto attempt = ++of->attempt;
  send_spec terms;
  auto seal_at = of->tokens, tokens = of->tokens;
  if (!of->trial) {
    const auto takers = names_of(decode);
    if (chance_.one_in(4)) terms.held_for = takers;
    if (takers.size() > 1 && chance_.one_in(12)) terms.held_for = {takers.back()};
    if (chance_.one_in(5)) terms.consumers = static_cast<std::uint32_t>(takers.size());
    if (chance_.one_in(3)) terms.deadline = milliseconds{50 + chance_.upto(14'000)};
    if (chance_.one_in(20)) seal_at = chance_.upto(of->tokens);
    if (chance_.one_in(20)) tokens = 1 + of->tokens / 2;
  }
  for (const auto which : nodes_of_[prefill]) {
    if (!of->trial && chance_.one_in(12)) continue;
    soon(which, longest, [this, of, which, attempt, tokens, terms, seal_at] {
      send(of, which, attempt, tokens, terms, seal_at);
    });
  }
  if (of->trial || attempt > 3 || !chance_.one_in(3)) return;
  time_.after(longest + wires_.between(milliseconds{50}, milliseconds{5000}), [this, of] {
    offer(of, milliseconds{200});
    for (const auto which : nodes_of_[decode]) {
      soon(which, milliseconds{500}, [this, of, which] { ask(of, which); });
    }
  });
}

void world::send(const request_ptr& of, std::size_t which, std::uint32_t attempt,
                 std::uint32_t tokens, send_spec terms, std::uint32_t seal_at) {
  const auto& here = lives_[which];
  const auto send = here.engine->send(of->id, attempt, tokens, std::move(terms), chance_.one_in(5));
  if (!send) return;
  compute(of, here.node, *send, seal_at);
  if (of->trial) return;
  maybe_abort(which, *send);
  maybe_crash(which);
}

void world::compute(const request_ptr& of, const engine_node_ptr& at, operation_id send,
                    std::uint32_t seal_at) {
  at->here(wires_.between(microseconds{100}, milliseconds{of->trial ? 10U : 40U}),
           [this, of, at, send, seal_at] {
             const auto& here = life_of(*at);
             if (here.node != at) return;
             if (here.engine->compute(send, seal_at)) compute(of, at, send, seal_at);
           });
}

bool world::has(const request_ptr& of, std::size_t which) const {
  const auto found = of->receives.find(which);
  return found != of->receives.end() && found->second.at == lives_[which].node &&
         lives_[which].engine->delivered(found->second.operation);
}

void world::ask(const request_ptr& of, std::size_t which) {
  auto& engine = *lives_[which].engine;
  auto& last = of->receives[which];
  if (last.at != lives_[which].node) last = {nullptr, {}, false, last.tries};
  if (last.at && engine.is_open(last.operation)) return;
  last.had |= has(of, which);
  receive_spec terms;
  terms.request = of->id;
  terms.sources = ledger_.sources;
  terms.mode = of->mode;
  terms.tokens = of->tokens;
  const auto two = terms.sources.size() > 1;
  // Only this tells attempts of two sources apart.
  const auto attempt = two || chance_.one_in(3) ? of->attempt : 0;
  if (attempt != 0) terms.expect = simulated_engine::aux_of(attempt);
  if (!of->trial) {
    if (chance_.one_in(25)) terms.tokens += 1 + chance_.upto(8);
    if (chance_.one_in(4)) terms.prefix_tokens = chance_.upto(of->tokens - 1);
    if (chance_.one_in(3)) terms.deadline = milliseconds{50 + chance_.upto(14'000)};
    if (chance_.one_in(5)) terms.park = milliseconds{chance_.upto(2000)};
    if (chance_.one_in(4)) {
      for (const auto node : nodes_of_[prefill]) terms.lives.push_back(at(node)->incarnation);
    }
    if (chance_.one_in(4)) terms.fail_when_full = true;
    if (chance_.one_in(3)) {
      terms.placed_by = members_.supervisor_incarnation;
      terms.placed_at = members_.epoch;
    }
    terms.again = last.had;
  }
  const auto made = engine.receive(std::move(terms), attempt, !of->trial && chance_.one_in(2));
  if (made) {
    last.at = lives_[which].node;
    last.operation = *made;
  }
  if (of->trial) return;
  if (made) maybe_abort(which, *made);
  maybe_crash(which);
  // A rank that fails alone, or has no room, asks again.
  if (last.tries++ >= 3) return;
  soon(which, milliseconds{made ? 1500 : 500}, [this, of, which] {
    if (!has(of, which)) ask(of, which);
  });
}

void world::maybe_abort(std::size_t which, operation_id what) {
  if (!chance_.one_in(7)) return;
  lives_[which].node->here(
      wires_.between(microseconds{0}, milliseconds{chance_.one_in(2) ? 50U : 3000U}),
      [this, which, of = lives_[which].node, what] {
        if (lives_[which].node == of) lives_[which].engine->abort(what);
      });
}

/// A session of the node crashes while it works for what has just begun, or for something else.
void world::maybe_crash(std::size_t which) {
  if (!chance_.one_in(50)) return;
  lives_[which].node->here(
      wires_.between(microseconds{0}, milliseconds{chance_.one_in(2) ? 50U : 500U}),
      [this, of = lives_[which].node] { told_.crashed += of->crash_a_session(chance_) ? 1 : 0; });
}

void world::look_around() {
  for (const auto which : nodes_of_[prefill]) {
    if (!at(which)->alive) continue;
    for (const auto& one : lives_[which].node->report().parked) told_.parked += one.receives;
  }
  for (const auto& here : lives_) {
    if (here.node->alive && chance_.one_in(4)) here.engine->values().check();
  }
  time_.after(milliseconds{200}, [this] { look_around(); });
}

/// All decode ranks take a source, and one gives up while the others wait. With a retry window the
/// source waits that long for it to ask again; without one it ends for all.
void world::probe_retry(bool again) {
  const auto made = std::make_shared<request>();
  made->id = "r" + std::to_string(++told_.requests);
  made->tokens = 1 + chance_.upto(15);
  made->trial = true;
  made->attempt = 1;
  for (const auto which : nodes_of_[prefill]) {
    soon(which, milliseconds{200}, [this, made, which] {
      const auto send = lives_[which].engine->send(made->id, 1, made->tokens, {}, false);
      if (send) made->probed[which] = *send;
    });
  }
  for (const auto which : nodes_of_[decode]) {
    soon(which, milliseconds{200}, [this, made, which] { ask(made, which); });
  }
  const auto quits = nodes_of_[decode].back();
  time_.after(milliseconds{1000}, [this, made, quits] {
    lives_[quits].engine->abort(made->receives[quits].operation);
  });
  const bool waits = retry_window_.count() > 0;
  time_.after(milliseconds{2000}, [this, made, quits, again, waits] {
    check_probe(made, waits);
    if (!again || !waits) return;
    ask(made, quits);
    for (const auto& [which, send] : made->probed) {
      compute(made, lives_[which].node, send, made->tokens);
    }
  });
  time_.after(milliseconds{1500} + patience, [this, made, again, waits] {
    check_probe(made, false);
    for (const auto which : nodes_of_[decode]) {
      require(has(made, which) == (again && waits),
              "a rank that asks again in time does not get " + made->id + ", or another does");
    }
  });
}

void world::check_probe(const request_ptr& of, bool goes_on) {
  for (const auto which : nodes_of_[prefill]) {
    require(of->probed.contains(which), "a probe is not sent");
    require(lives_[which].engine->goes_on(of->probed[which]) == goes_on,
            "after a rank gave " + of->id + " up, its source at " + seats()[which].name +
                (goes_on ? " has ended" : " goes on"));
  }
}

report world::run() {
  for (std::size_t which = 0; which < seats().size(); ++which) start(which);
  next_fault();
  next_request();
  next_values();
  look_around();
  for (std::uint32_t i = 0; i < 4; ++i) {
    time_.at(end_of_faults() + trial + i * milliseconds{500},
             [this, i] { begin(true, i % 2 == 0 ? transfer_mode::write : transfer_mode::read); });
  }
  for (std::size_t which = 0; which < seats().size(); ++which) {
    time_.at(end_of_faults() + judged - milliseconds{5000}, [this, which] { try_values(which); });
  }
  for (const bool again : {true, false}) {
    time_.at(end_of_faults() + trial + milliseconds{3000}, [this, again] { probe_retry(again); });
  }
  time_.at(end_of_faults() + judged, [this] {
    for (const auto& one : trials_) {
      for (const auto which : nodes_of_[decode]) {
        require(has(one, which), "request " + one->id + " is not delivered to " +
                                     seats()[which].name + " long after the last fault");
      }
    }
    for (std::size_t which = 0; which < lives_.size(); ++which) {
      const auto& here = lives_[which];
      const auto left = here.node->leftovers();
      require(left.empty(), "long after its end there is left at " + here.node->name + ": " + left);
      require(here.engine->open() == 0, "an operation of " + here.node->name + " never ends");
      here.engine->check_memory();
      for (const auto& weak : here.node->endpoint->opened()) {
        const auto wire = weak.lock();
        require(!wire || !wire->is_up() || !wire->gives(),
                here.node->name + " has left a grant of a transfer that it never fenced");
      }
      const auto values = here.engine->values().leftovers();
      require(values.empty(), here.node->name + " has left of its values: " + values);
      const auto& counted = here.node->context->counters;
      require(counted.links_up == here.node->ends.size() && counted.links_broken == 0,
              here.node->name + " counts other links than the ones that are up");
      check_links(which);
    }
  });
  run_until(end_of_faults() + judged + milliseconds{1}, [this] { return told_.requests; });
  static_cast<link_simulation::fault_report&>(told_) = outcome();
  told_.engines = ledger_.totals;
  told_.ranks = {ledger_.divided[decode].ranks, ledger_.divided[prefill].ranks};
  told_.values = ledger_.values.counts;
  return told_;
}

}  // namespace

report run(const options& of) {
  return world{of}.run();
}

troupe::testing::shrinkable<options, report> whole() {
  auto all = link_simulation::of_nodes(run, "requests");
  all.take_apart = [nodes = all.take_apart](options& of, const report& first) {
    of.ranks = first.ranks;
    auto parts = nodes(of, first);
    parts.push_back({"second ranks", first.ranks.size(), [](options& from, std::size_t i) {
                       return std::exchange((*from.ranks)[i], 1U) > 1;
                     }});
    return parts;
  };
  return all;
}

}  // namespace troupe::actors::engine_simulation
