#include <memory>
#include <optional>
#include <stop_token>
#include <utility>

#include "troupe/deploy/c/cluster_handle.hpp"
#include "troupe/deploy/c/placements.hpp"

using namespace troupe;
using namespace troupe::c;

struct troupe_stop {
  std::stop_source source;
};

struct troupe_call_draft {
  actors::call_request request;
};

struct troupe_carried {
  actors::carried_outcome outcome;
};

namespace {

/// The callbacks of one request. A callback that fails gives the request up.
class callbacks {
 public:
  explicit callbacks(const troupe_carried_request& given) : given_{given} {}

  [[nodiscard]] actors::carried_call of(troupe_carried_call function, const char* name) {
    return
        [this, function, name](const actors::carried_attempt& now, const actors::node_info& node) {
          const troupe_placement where{now.where};
          const troupe_attempt attempt{
              sizeof attempt, 0, &where, now.source.c_str(),
              static_cast<uint64_t>(std::max<std::int64_t>(0, now.left.count()))};
          const auto labels = labels_of(node);
          const auto seen = node_of(node, labels);
          troupe_call_draft draft;
          const auto status = function(given_.user, &attempt, &seen, &draft);
          if (status != TROUPE_OK && !failure_) {
            std::string why{"`request."};
            why.append(name).append("` of node ").append(node.name).append(" returned ");
            failure_ = error{errc::aborted, why.append(std::to_string(status))};
            stop_.request_stop();
          }
          return draft.request;
        };
  }
  [[nodiscard]] std::stop_token stopped() const { return stop_.get_token(); }
  void stop() { stop_.request_stop(); }
  [[nodiscard]] const std::optional<error>& failure() const noexcept { return failure_; }

 private:
  const troupe_carried_request& given_;
  std::stop_source stop_;
  std::optional<error> failure_;  // the callbacks are called on one thread
};

result<actors::carried_request> request_of(const troupe_carried_request& given, callbacks& calls) {
  actors::carried_request out;
  auto request = text(given.request, "request.request");
  if (!request) return fail(request.error());
  auto from = text(given.from, "request.from");
  if (!from) return fail(from.error());
  auto to = text(given.to, "request.to");
  if (!to) return fail(to.error());
  auto affinity = optional_text(given.affinity, "request.affinity");
  if (!affinity) return fail(affinity.error());
  if (auto flag = in_range(given.source_is_kept, 0, 1, "request.source_is_kept"); !flag)
    return fail(flag.error());
  if (!given.prefill) return bad_argument("`request.prefill` is NULL");
  if (!given.decode) return bad_argument("`request.decode` is NULL");
  out.request = std::move(*request);
  out.from = std::move(*from);
  out.to = std::move(*to);
  out.affinity = std::move(*affinity);
  if (given.deadline_ms != 0) out.deadline = milliseconds(given.deadline_ms);
  out.source_is_kept = given.source_is_kept != 0;
  out.prefill = calls.of(given.prefill, "prefill");
  out.decode = calls.of(given.decode, "decode");
  if (given.abort) out.abort = calls.of(given.abort, "abort");
  out.stop = calls.stopped();
  return out;
}

}  // namespace

namespace troupe::c {

result<actors::call_request> call_of(const char* method, const void* payload,
                                     std::size_t payload_size) {
  auto name = text(method, "method");
  if (!name) return fail(name.error());
  const auto given = bytes(payload, payload_size, "payload");
  if (!given) return fail(given.error());
  if (payload_size > actors::max_call_bytes)
    return fail(errc::out_of_range, "`payload` has more than 1 MiB");
  const auto* first = reinterpret_cast<const std::uint8_t*>(given->data());
  return actors::call_request{std::move(*name), {first, first + given->size()}, 0};
}

}  // namespace troupe::c

troupe_status troupe_stop_new(troupe_stop** stop) {
  return guarded([&]() -> result<void> {
    if (auto out = present(stop, "stop"); !out) return out;
    *stop = new troupe_stop;
    return {};
  });
}

troupe_status troupe_stop_request(troupe_stop* stop) {
  return guarded([&]() -> result<void> {
    if (auto given = present(stop, "stop"); !given) return given;
    stop->source.request_stop();
    return {};
  });
}

void troupe_stop_free(troupe_stop* stop) {
  delete stop;
}

troupe_status troupe_call_draft_set(troupe_call_draft* draft, const char* method,
                                    const void* payload, size_t payload_size) {
  return guarded([&]() -> result<void> {
    if (auto given = present(draft, "draft"); !given) return given;
    auto request = call_of(method, payload, payload_size);
    if (!request) return fail(request.error());
    draft->request = std::move(*request);
    return {};
  });
}

troupe_status troupe_cluster_carry(troupe_cluster* cluster, const troupe_carried_request* request,
                                   troupe_carried** outcome) {
  return on_cluster(cluster, [&](cluster_core& core) -> result<void> {
    if (auto out = present(outcome, "outcome"); !out) return out;
    const auto given = read(request, "request");
    if (!given) return fail(given.error());
    callbacks calls{*given};
    const auto what = request_of(*given, calls);
    if (!what) return fail(what.error());
    const auto stopped = given->stop ? given->stop->source.get_token() : std::stop_token{};
    const std::stop_callback pass_on{stopped, [&] { calls.stop(); }};
    auto room = std::make_unique<troupe_carried>();  // before the request, whose outcome comes once
    auto ended = core.carrier->carry(*what);
    if (calls.failure()) return fail(*calls.failure());
    if (!ended) return fail(ended.error());
    room->outcome = std::move(*ended);
    *outcome = room.release();
    return {};
  });
}

troupe_status troupe_carried_read(const troupe_carried* outcome, troupe_carried_info* info) {
  return guarded([&]() -> result<void> {
    if (auto given = present(outcome, "outcome"); !given) return given;
    if (auto out = writable(info, "info"); !out) return out;
    const auto& known = outcome->outcome;
    write({0, known.attempts, known.prefills, static_cast<uint32_t>(known.prefill.size()),
           static_cast<uint32_t>(known.decode.size()), 0},
          info);
    return {};
  });
}

troupe_status troupe_carried_answer(const troupe_carried* outcome, uint32_t side, uint32_t index,
                                    const void** answer, size_t* answer_size) {
  return guarded([&]() -> result<void> {
    if (auto given = present(outcome, "outcome"); !given) return given;
    if (auto known = in_range(side, TROUPE_PREFILL, TROUPE_DECODE, "side"); !known) return known;
    if (auto out = present({{answer, "answer"}, {answer_size, "answer_size"}}); !out) return out;
    const auto& answers =
        side == TROUPE_PREFILL ? outcome->outcome.prefill : outcome->outcome.decode;
    if (index >= answers.size())
      return fail(errc::out_of_range, "`index` is not that of a rank that answered");
    *answer = answers[index].data();
    *answer_size = answers[index].size();
    return {};
  });
}

troupe_status troupe_carried_placement(const troupe_carried* outcome,
                                       troupe_placement** placement) {
  return guarded([&]() -> result<void> {
    if (auto out = present({{outcome, "outcome"}, {placement, "placement"}}); !out) return out;
    *placement = new troupe_placement{outcome->outcome.where};
    return {};
  });
}

void troupe_carried_free(troupe_carried* outcome) {
  delete outcome;
}
