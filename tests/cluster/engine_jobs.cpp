#include "engine_jobs.hpp"

#include <utility>

#include <fcntl.h>
#include <unistd.h>

namespace troupe::testing {

namespace {

using std::chrono::milliseconds;

/// How much later than its deadline an outcome may come, since the tests run on busy machines. As
/// long as tests wait for anything that must come.
constexpr milliseconds outcome_slack{60'000};
constexpr std::uint64_t spoilt = 0x5EED'0BAD'5EED'0BADULL;

std::vector<std::byte> aux_of(const std::string& request) {
  const auto* first = reinterpret_cast<const std::byte*>(request.data());
  return {first, first + request.size()};
}

}  // namespace

// -- violations

violation_file::violation_file(const std::string& path, std::string node)
    : fd_{::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644)},
      node_{std::move(node)} {}

violation_file::~violation_file() {
  ::close(fd_);
}

void violation_file::say(const std::string& request, const std::string& what) const {
  const auto line =
      node_ + " (pid " + std::to_string(::getpid()) + "), request " + request + ": " + what + "\n";
  [[maybe_unused]] const auto written = ::write(fd_, line.data(), line.size());
}

// -- any job

job::job(job_surroundings& around, std::string request, std::uint64_t seed, milliseconds deadline)
    : around_{around}, request_{std::move(request)}, seed_{seed}, deadline_{deadline} {}

void job::begin(operation_id id) {
  id_ = id;
  late_ = job_clock::now() + deadline_ + outcome_slack;
  still_before_ = around_.stood_still;
  ++around_.counters.begun;
}

void job::violated(const std::string& what) {
  around_.violations.say(request_, what);
}

void job::hear(const event& e) {
  const bool had_outcome = done_ || failed_;
  if (unpinned_) violated("an event after it was unpinned");
  if (const auto* a = std::get_if<event_allocated>(&e.what)) {
    if (had_outcome) violated("blocks after the outcome");
    blocks_ = a->blocks;
    holds_ = true;
    allocated(a->blocks);
  } else if (const auto* d = std::get_if<event_done>(&e.what)) {
    if (had_outcome) violated("done after another outcome");
    done_ = *d;
    ++around_.counters.done;
    if (!had_outcome) conclude();
  } else if (const auto* f = std::get_if<event_failed>(&e.what)) {
    if (had_outcome) violated("failed after another outcome: " + to_string(f->why));
    if (f->why.message.empty()) violated("failed without a sentence");
    failed_ = f->why;
    ++around_.counters.failed;
    if (!had_outcome) conclude();
  } else if (std::get_if<event_unpinned>(&e.what) != nullptr) {
    if (!had_outcome) violated("unpinned without an outcome");
    unpinned_ = true;
    ++around_.counters.unpinned;
  }
}

void job::conclude() {
  around_.outcome(*this);
  ended();
}

bool job::advance(job_clock::time_point now) {
  if (!done_ && !failed_ && !called_late_ && now > late_ + (around_.stood_still - still_before_)) {
    violated("no outcome " + std::to_string(outcome_slack.count()) + " ms after its deadline");
    called_late_ = true;
  }
  return now < due_ || step(now);
}

void job::give_back() {
  if (!std::exchange(holds_, false)) return;
  if (auto freed = around_.node.free_blocks(blocks_.owner, blocks_.blocks); !freed)
    violated("its blocks were not taken back: " + to_string(freed.error()));
}

// -- prefill

namespace {

class prefill_job final : public job {
 public:
  prefill_job(job_surroundings& around, const prefill_order& order)
      : job{around, order.request, order.seed, order.deadline}, order_{order} {}

  result<void> start() {
    const auto block_tokens = around_.node.layout().block_tokens;
    auto got = around_.node.allocate_blocks((order_.tokens + block_tokens - 1) / block_tokens);
    if (!got) return fail(got.error());
    blocks_ = std::move(*got);
    holds_ = true;
    auto sent = around_.node.send({request_, blocks_.blocks, 0, order_.deadline, 0});
    if (!sent) {
      give_back();
      return fail(sent.error());
    }
    begin(*sent);
    return {};
  }

 private:
  void ended() override {
    due_ = {};
    if (frees_early()) give_back();
  }
  bool step(job_clock::time_point now) override {
    if (unpinned_) {
      // Spoil the blocks, so that a late reader gets wrong bytes.
      if (holds_) around_.cache.fill(blocks_.blocks, 0, layers(), 0, order_.tokens, seed_ ^ spoilt);
      give_back();
      return false;
    }
    if (done_ || failed_ || sealed_) return true;
    if (layer_ < layers()) {
      around_.cache.fill(blocks_.blocks, layer_, layer_ + 1, 0, order_.tokens, seed_);
      expect_taken(around_.node.layers_ready(id_, layer_, layer_ + 1, order_.tokens));
      ++layer_;
      due_ = now + order_.per_layer;
      return true;
    }
    sealed_ = true;
    expect_taken(around_.node.seal(id_, order_.tokens, aux_of(request_)));
    return true;
  }
  void expect_taken(const result<void>& said) {
    // `not_found`: the operation has ended, and its event is on its way.
    if (!said && said.error().code != errc::not_found) violated(to_string(said.error()));
  }
  [[nodiscard]] std::uint32_t layers() const {
    return static_cast<std::uint32_t>(around_.node.layout().layers.size());
  }

  prefill_order order_;
  std::uint32_t layer_{0};
  bool sealed_{false};
};

// -- decode

class decode_job final : public job {
 public:
  decode_job(job_surroundings& around, const decode_order& order, call_reply_to reply)
      : job{around, order.request, order.seed, order.deadline},
        order_{order},
        reply_{std::move(reply)} {}

  bool start() {
    receive_spec spec;
    spec.request = request_;
    spec.sources = {order_.source};
    spec.mode = transfer_mode_of(order_.mode).value_or(transfer_mode::write);
    spec.tokens = order_.tokens;
    spec.deadline = order_.deadline;
    spec.fail_when_full = order_.fail_when_full;
    spec.placed_by = order_.placed_by;
    spec.placed_at = order_.placed_at;
    auto asked = around_.node.receive(std::move(spec));
    if (!asked) {
      reply_(fail(asked.error()));
      return false;
    }
    begin(*asked);
    return true;
  }

 private:
  enum class stage { waiting, using_it, used, watching };

  void ended() override {
    due_ = {};
    if (failed_) {
      reply_(fail(*failed_));
      stage_ = stage::used;
      if (frees_early()) give_back();
      return;
    }
    if (!holds_) {
      violated("done, and no blocks were allocated");
      reply_(fail(errc::internal, "no blocks"));
      stage_ = stage::used;
      return;
    }
    right_ = looks_right("when it was done");
    if (done_->aux != aux_of(request_)) violated("the auxiliary bytes are not this request's");
    stage_ = stage::using_it;
    due_ = job_clock::now() + order_.use;
  }
  bool step(job_clock::time_point now) override {
    switch (stage_) {
      case stage::waiting: return true;
      case stage::using_it:
        right_ = looks_right("after it had been used") && right_;
        if (right_) {
          reply_(std::vector<std::uint8_t>{});
        } else {
          reply_(fail(errc::internal, "wrong bytes"));
        }
        if (frees_early()) give_back();
        stage_ = stage::used;
        return true;
      case stage::used:
        if (!unpinned_) return true;
        if (!holds_) return false;
        around_.cache.fill(blocks_.blocks, 0, layers(), 0, order_.tokens, seed_ ^ spoilt);
        stage_ = stage::watching;
        due_ = now + milliseconds{seed_ % 40};
        return true;
      case stage::watching:
        if (const auto wrong =
                around_.cache.differing(blocks_.blocks, 0, order_.tokens, seed_ ^ spoilt))
          violated(std::to_string(wrong) + " pieces were written after it was unpinned");
        give_back();
        return false;
    }
    return false;
  }
  bool looks_right(const char* when) {
    const auto wrong = around_.cache.differing(blocks_.blocks, 0, order_.tokens, seed_);
    if (wrong > 0) violated(std::to_string(wrong) + " pieces are wrong " + when);
    return wrong == 0;
  }
  [[nodiscard]] std::uint32_t layers() const {
    return static_cast<std::uint32_t>(around_.node.layout().layers.size());
  }

  decode_order order_;
  call_reply_to reply_;
  stage stage_{stage::waiting};
  bool right_{false};
};

}  // namespace

std::unique_ptr<job> begin_prefill(job_surroundings& around, const prefill_order& order,
                                   call_reply_to reply) {
  auto made = std::make_unique<prefill_job>(around, order);
  if (auto started = made->start(); !started) {
    reply(fail(started.error()));
    return nullptr;
  }
  reply(std::vector<std::uint8_t>{});
  return made;
}

std::unique_ptr<job> begin_decode(job_surroundings& around, const decode_order& order,
                                  call_reply_to reply) {
  auto made = std::make_unique<decode_job>(around, order, std::move(reply));
  if (!made->start()) return nullptr;
  return made;
}

}  // namespace troupe::testing
