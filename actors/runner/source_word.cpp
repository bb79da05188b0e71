#include "troupe/actors/runner/source_word.hpp"

#include <optional>
#include <utility>

#include "troupe/kvcache/overloaded.hpp"

namespace troupe::actors {

source_word::source_word(source_word_options options)
    : link_{std::move(options.link)},
      transfer_{options.transfer},
      verb_{options.verb},
      request_{std::move(options.request)},
      life_{options.life} {}

void source_word::begin(session_surroundings& around) {
  around_ = &around;
  ask_link(*around_, link_, attach_session{transfer_, around_->this_session()});
  ask();
}

void source_word::handle(session_event& event) {
  std::visit(overloaded{[this](session_message& x) { on_session_message(x); },
                        [](transport::completion&) {}, [](transfer_fenced&) {},
                        [this](link_is_lost& x) { end(std::move(x.why)); },
                        [this](link_is_back& x) { on_link_is_back(x); }, [](source_progress&) {},
                        [](source_blocks&) {}, [](source_sealed&) {},
                        [this](abort_session& x) { on_abort_session(x); }, [](deadline_reached&) {},
                        [this](receive_is_whole&) { on_receive_is_whole(); }},
             event.what);
}

void source_word::ask() {
  if (verb_ == source_verb::release) {
    ask_link(*around_, link_, say{transfer_forget{transfer_, request_, life_}, {}});
  } else {
    ask_link(*around_, link_, say{transfer_hold{transfer_, request_, life_}, {}});
  }
}

void source_word::end(std::optional<troupe::error> failure) {
  if (std::exchange(ended_, true)) return;
  ask_link(*around_, link_, detach_session{transfer_});
  around_->tell_runner(runner_event{session_concluded{transfer_, std::move(failure), {}, 0}});
  around_->tell_runner(runner_event{session_unpinned{transfer_}});
  around_->finish();
}

void source_word::let_go(const troupe::error& why) {
  if (ended_ || verb_ != source_verb::hold) return;
  ask_link(*around_, link_, say{make_abort(transfer_, why), {}});
}

void source_word::on_session_message(session_message& message) {
  if (const auto* abort = std::get_if<transfer_abort>(&message)) {
    end(troupe::error{abort->code, abort->reason});
  } else if (std::holds_alternative<transfer_release>(message)) {
    end(std::nullopt);
  }
}

void source_word::on_link_is_back(const link_is_back& back) {
  if (back.epoch <= link_.epoch) return;
  link_.epoch = back.epoch;
  ask();
}

void source_word::on_abort_session(abort_session& abort) {
  let_go(abort.why);
  end(std::move(abort.why));
}

void source_word::on_receive_is_whole() {
  let_go({errc::aborted, "it was asked for"});
  end(std::nullopt);
}

}  // namespace troupe::actors
