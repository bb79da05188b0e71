#include "troupe/actors/runtime/network_dialler.hpp"

#include <algorithm>
#include <utility>

#include <caf/sec.hpp>
#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/messages/types.hpp"
#include "troupe/actors/runtime/crash.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/kvcache/or_undo.hpp"
#include "troupe/transport/os_error.hpp"

namespace troupe::actors {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using transport::owned_fd;
using self_pointer = network_actor::stateful_pointer<dialler_state>;
/// How much later than the door an asker is answered: the door, given the same time, knows the
/// reason better.
constexpr milliseconds spare{20};
/// Pauses before a peer that hangs up is dialled again: the first, and the last, each four times
/// the one before.
constexpr milliseconds first_pause{20}, last_pause{320};
using attempt_map = std::map<std::uint64_t, dialler_state::attempt>;

std::string text_of(const dialler_state::endpoint& to) {
  return to.first + ":" + std::to_string(to.second);
}

/// The time from a handler that failed for lack of memory to the next look.
constexpr milliseconds next_look{100};

void answer(dialler_state::asker& asker, troupe::error why) {
  asker.answer(reached{std::move(why), nullptr});
}

void answer_that_it_crashed(dialler_state::asker& asker) {
  answer(asker, {errc::internal,
                 "the network of this process has crashed, which its log says; start it again"});
}

void answer(const self_pointer& self, dialler_state::asker& asker,
            const dialler_state::endpoint& at, const dialler_state::known_actor& found) {
  if (!found.actor || !self->system().assignable(found.messages, asker.messages)) {
    answer(asker, {errc::version_mismatch,
                   "what answers at " + text_of(at) +
                       " is not the kind of node that was expected there; check the address, and "
                       "that every host runs the same release"});
    return;
  }
  asker.answer(reached{std::nullopt, found.actor});
}

troupe::error too_late(const dialler_state::endpoint& at, milliseconds timeout) {
  return {errc::deadline, "something listens at " + text_of(at) + " but did not answer within " +
                              time_text(timeout) + "; it is frozen, or not a Troupe node"};
}

void cut(const dialler_state::attempt& attempt) {
  if (attempt.line) ::shutdown(attempt.line->get(), SHUT_RDWR);
}

/// Runs a handler. A handler that runs out of memory must not end the actor, without which this
/// process reaches no peer: it looks again soon, so that deadlines hold.
template <class Handler>
void with_what_memory_there_is(self_pointer self, Handler&& handle) {
  try {
    handle();
  } catch (const std::bad_alloc&) {
    send_with_patience([&] { self->delayed_send(self, next_look, tick_atom::value); });
  }
}

/// Runs a step of an attempt. A step that runs out of memory drops the attempt, which nothing would
/// end otherwise: the next asker begins a new one.
template <class Step>
void step_of(self_pointer self, std::uint64_t attempt, Step&& step) {
  or_undo(std::forward<Step>(step), [&] { self->state.attempts.erase(attempt); });
}

void begin(self_pointer self, dialler_state::attempt attempt);

/// Begins the attempt after its pause.
void begin_later(self_pointer self, dialler_state::attempt attempt, troupe::error why) {
  attempt.rests.emplace(steady_clock::now() + attempt.pause, std::move(why));
  self->delayed_send(self, attempt.pause, tick_atom::value);
  self->state.attempts.emplace(++self->state.last_attempt, std::move(attempt));
}

/// The attempt is over and found nothing: answers its askers, or tries again for those that can
/// wait.
void fail_attempt(self_pointer self, attempt_map::iterator which, const troupe::error& why) {
  auto ended = std::move(which->second);
  self->state.attempts.erase(which);
  ended.line.reset();
  const bool hung_up = why.code == errc::link_broken;
  const auto next_pause = hung_up ? std::max(first_pause, 4 * ended.pause) : milliseconds{0};
  const bool again = hung_up ? next_pause <= last_pause : why.code == errc::deadline;
  const auto soonest = steady_clock::now() + next_pause + spare;
  const troupe::error told{hung_up ? errc::peer_unreachable : why.code, why.message};
  std::vector<dialler_state::asker> patient;
  for (auto& asker : ended.askers) {
    if (again && asker.deadline > soonest) {
      patient.push_back(std::move(asker));
    } else {
      answer(asker, told);
    }
  }
  if (patient.empty()) return;
  ended.askers = std::move(patient);
  ended.pause = next_pause;
  if (hung_up) {
    begin_later(self, std::move(ended), told);
  } else {
    begin(self, std::move(ended));
  }
}

void begin(self_pointer self, dialler_state::attempt attempt) {
  auto& st = self->state;
  attempt.rests.reset();
  attempt.deadline =
      std::ranges::max_element(attempt.askers, {}, &dialler_state::asker::deadline)->deadline;
  const auto number = ++st.last_attempt;
  const auto where = attempt.to;
  const auto until = attempt.deadline;
  const auto which = st.attempts.emplace(number, std::move(attempt)).first;
  std::optional<troupe::error> failed;
  step_of(self, number, [&] { failed = st.dial(number, where.first, where.second, until); });
  if (failed) fail_attempt(self, which, *failed);
}

void found(self_pointer self, std::uint64_t number, const dialler_state::endpoint& at,
           dialler_state::known_actor actor) {
  auto& st = self->state;
  std::vector<dialler_state::asker> askers;
  if (const auto it = st.attempts.find(number); it != st.attempts.end()) {
    askers = std::move(it->second.askers);
    st.attempts.erase(it);
  }
  if (actor.actor) {
    self->monitor(actor.actor);
    st.known.insert_or_assign(at, actor);
  }
  for (auto& asker : askers) answer(self, asker, at, actor);
}

void greeting_failed(self_pointer self, std::uint64_t number, const caf::error& why) {
  auto& st = self->state;
  const auto it = st.attempts.find(number);
  if (it == st.attempts.end()) return;
  const auto& where = it->second.to;
  const bool silent = why == caf::sec::request_timeout || why == caf::sec::connection_timeout;
  fail_attempt(
      self, it,
      silent ? troupe::error{errc::deadline, text_of(where) + " did not answer"}
             : troupe::error{errc::peer_unreachable, "cannot connect to " + text_of(where) + ": " +
                                                         self->system().render(why) +
                                                         "; is a node of Troupe running there?"});
}

/// The door has opened; next comes CAF's own handshake.
void greet(self_pointer self, std::uint64_t number, const std::shared_ptr<const owned_fd>& socket) {
  auto& st = self->state;
  auto& attempt = st.attempts.at(number);
  attempt.line = socket;
  owned_fd own{::fcntl(socket->get(), F_DUPFD_CLOEXEC, 3)};
  if (!own) {
    fail_attempt(self, st.attempts.find(number),
                 {errc::peer_unreachable, "cannot connect to " + text_of(attempt.to) + ": " +
                                              transport::what_errno(errno) +
                                              "; raise the limit of open files"});
    return;
  }
  const auto left = std::chrono::ceil<milliseconds>(attempt.deadline - steady_clock::now());
  self->request(st.broker, std::max(left, milliseconds{1}), caf::connect_atom::value,
                st.streams->open(self->system(), std::move(own), open_streams::side::dialled),
                attempt.to.second)
      .then(
          [self, number, to = attempt.to](const caf::node_id&, caf::strong_actor_ptr& actor,
                                          std::set<std::string>& messages) {
            with_what_memory_there_is(self, [&] {
              found(self, number, to, {std::move(actor), std::move(messages)});
            });
          },
          [self, number](const caf::error& why) {
            const auto it = self->state.attempts.find(number);
            if (it != self->state.attempts.end() && why == caf::sec::request_timeout) {
              cut(it->second);
            }
            with_what_memory_there_is(
                self, [&] { step_of(self, number, [&] { greeting_failed(self, number, why); }); });
          });
}

/// Answers the askers whose deadline has come, and restarts the attempts whose pause is over.
void look_at_the_clock(self_pointer self) {
  auto& attempts = self->state.attempts;
  const auto now = steady_clock::now();
  std::vector<dialler_state::attempt> rested;
  for (auto it = attempts.begin(); it != attempts.end();) {
    auto& [number, attempt] = *it;
    auto& askers = attempt.askers;
    for (auto& asker : askers) {
      if (asker.deadline > now) continue;
      answer(asker, attempt.rests ? attempt.rests->why : too_late(attempt.to, asker.timeout));
    }
    std::erase_if(askers, [now](const auto& asker) { return asker.deadline <= now; });
    const bool waits = !askers.empty();
    const bool is_due = waits && attempt.rests && attempt.rests->until <= now;
    if (!waits) cut(attempt);
    if (is_due) rested.push_back(std::move(attempt));
    it = !waits || is_due ? attempts.erase(it) : std::next(it);
  }
  for (auto& attempt : rested) begin(self, std::move(attempt));
}

void take(self_pointer self, const dialled& outcome) {
  auto& st = self->state;
  const auto it = st.attempts.find(outcome.attempt);
  if (it == st.attempts.end()) return;  // nobody waits; `outcome` closes the socket
  if (outcome.failed) {
    fail_attempt(self, it, *outcome.failed);
  } else {
    greet(self, outcome.attempt, outcome.socket);
  }
}

void connect(self_pointer self, dialler_state::asker asker, dialler_state::endpoint to) {
  auto& st = self->state;
  if (!st.broker) {
    answer_that_it_crashed(asker);
    return;
  }
  if (const auto it = st.known.find(to); it != st.known.end()) {
    answer(self, asker, to, it->second);
    return;
  }
  self->delayed_send(self, asker.timeout + spare, tick_atom::value);
  const auto running =
      std::ranges::find_if(st.attempts, [&to](const auto& entry) { return entry.second.to == to; });
  if (running == st.attempts.end()) {
    dialler_state::attempt fresh{std::move(to), {}, {}, {}, {}, nullptr};
    fresh.askers.push_back(std::move(asker));
    begin(self, std::move(fresh));
    return;
  }
  auto& attempt = running->second;
  attempt.pause = {};
  attempt.askers.push_back(std::move(asker));
  if (!attempt.rests) return;
  auto rested = std::move(attempt);
  st.attempts.erase(running);
  begin(self, std::move(rested));
}

/// CAF's broker is gone: nothing can be reached any more.
void end_network(self_pointer self, const caf::error& why) {
  auto& st = self->state;
  st.broker = nullptr;
  st.known.clear();
  auto attempts = std::exchange(st.attempts, {});
  if (crashed(why)) {
    logger("network")->error(
        "internal: CAF's broker crashed ({}): no message leaves this process any more, nor comes",
        self->system().render(why));
  }
  for (auto& [number, attempt] : attempts) {
    cut(attempt);
    for (auto& asker : attempt.askers) answer_that_it_crashed(asker);
  }
}

}  // namespace

dialler_state::asker::asker(promise reply, std::set<std::string> knows, milliseconds patience)
    : messages{std::move(knows)},
      timeout{patience},
      deadline{steady_clock::now() + patience},
      reply_{std::move(reply)} {}

dialler_state::asker::~asker() {
  if (!reply_.pending()) return;
  send_with_patience([this] {
    reply_.deliver(reached{
        {{errc::internal,
          "the attempt to connect was given up: this process is short of memory, or its network "
          "has crashed, which its log says"}},
        nullptr});
  });
}

network_actor::behavior_type network_dialler(self_pointer self, caf::actor broker,
                                             std::shared_ptr<open_streams> streams,
                                             dial_function dial) {
  set_log_handlers(*self, "network");
  self->state.broker = std::move(broker);
  self->state.streams = std::move(streams);
  self->state.dial = std::move(dial);
  self->monitor(self->state.broker);
  self->set_down_handler([self](const caf::down_msg& down) {
    if (self->state.broker && down.source == self->state.broker.address()) {
      with_what_memory_there_is(self, [&] { end_network(self, down.reason); });
      return;
    }
    std::erase_if(self->state.known, [&down](const auto& entry) {
      return caf::actor_cast<caf::actor_addr>(entry.second.actor) == down.source;
    });
  });
  self->set_exit_handler([self](caf::exit_msg& order) {
    for (auto& [number, attempt] : self->state.attempts) {
      for (auto& asker : attempt.askers)
        answer(asker, {errc::aborted, "the network of this process is being shut down"});
    }
    self->state.attempts.clear();
    self->quit(std::move(order.reason));
  });
  return {
      [self](caf::connect_atom, std::string& host, std::uint16_t port,
             std::set<std::string>& messages, caf::timespan timeout) {
        auto reply = self->make_response_promise<reached>();
        with_what_memory_there_is(self, [&] {
          connect(self, {reply, std::move(messages), std::chrono::ceil<milliseconds>(timeout)},
                  {std::move(host), port});
        });
        return reply;
      },
      [self](const dialled& outcome) {
        with_what_memory_there_is(
            self, [&] { step_of(self, outcome.attempt, [&] { take(self, outcome); }); });
      },
      [self](tick_atom) { with_what_memory_there_is(self, [&] { look_at_the_clock(self); }); },
  };
}

}  // namespace troupe::actors
