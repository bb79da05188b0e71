#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "reference_cluster.hpp"

/// The reference engine's two roles in processes of their own, moving real caches: tokens, and
/// every bit of every logit, equal those of a single process.
namespace troupe::reference {
namespace {

using ::testing::HasSubstr;

const sampling sampled{1.0f, 5, false};

enum class first { prefill, decode };

struct job {
  std::string id;
  std::string mode{"write"};
  std::uint32_t tokens{19};
  std::uint32_t chunk{0};
  first order{first::prefill};
  std::uint32_t max_tokens{8};
  bool reuse_prefix{false};
  std::uint64_t prompt_seed{1};
  /// The id was used before. The decode side must not ask before the prefill side has offered the
  /// new request, or it is told how the former one ended.
  bool again{false};
};

class engines {
 public:
  explicit engines(const cluster_shape& shape) : nodes{shape} {
    const auto reply = nodes.model();
    model_ = transformer::create(reply.model).value();
    dtype_ = reply.dtype;
    block_tokens_ = reply.block_tokens;
  }

  prefill_call prefill_of(const job& what) const {
    return {what.id, a_prompt(what.tokens, what.prompt_seed), what.chunk, sampled, 0, 0};
  }
  decode_call decode_of(const job& what) const {
    decode_call call;
    call.request = what.id;
    call.sources = nodes.prefill();
    call.replica = nodes.decode();
    call.mode = transfer_mode_of(what.mode).value();
    call.prompt = a_prompt(what.tokens, what.prompt_seed);
    call.max_tokens = what.max_tokens;
    call.how = sampled;
    call.reuse_prefix = what.reuse_prefix;
    return call;
  }

  /// Starts all calls of a request. The answer of the decode side's rank 0 comes first in the list.
  std::vector<std::future<result<payload>>> start(const job& what) {
    std::vector<std::future<result<payload>>> answers;
    const auto start_decode = [&] {
      for (const auto& node : nodes.decode())
        answers.push_back(nodes.call_later(node, "decode", to_json(decode_of(what))));
    };
    const auto start_prefill = [&] {
      for (const auto& node : nodes.prefill())
        answers.push_back(nodes.call_later(node, "prefill", to_json(prefill_of(what))));
    };
    if (what.order == first::decode) start_decode();
    if (what.order == first::prefill) start_prefill();
    if (what.again) nodes.wait_until_it_holds_blocks(nodes.prefill().front());
    // Usually long enough to establish the order; the test must pass in either order.
    std::this_thread::sleep_for(std::chrono::milliseconds{30});
    if (what.order == first::decode) {
      start_prefill();
    } else {
      start_decode();
      std::rotate(answers.begin(),
                  answers.begin() + static_cast<std::ptrdiff_t>(nodes.prefill().size()),
                  answers.end());
    }
    return answers;
  }

  decode_reply finish(const job& what, std::vector<std::future<result<payload>>> answers) {
    decode_reply first_reply;
    for (std::size_t i = 0; i < answers.size(); ++i) {
      const auto answer = answers[i].get();
      EXPECT_TRUE(answer) << what.id << ": " << to_string(answer.error());
      if (answer && i == 0) first_reply = decode_reply_from(*answer).value();
    }
    EXPECT_EQ(first_reply.text, alone(what)) << what.id;
    return first_reply;
  }

  decode_reply run(const job& what) { return finish(what, start(what)); }

  generation alone(const job& what) const {
    return generate_alone(*model_, a_prompt(what.tokens, what.prompt_seed), what.max_tokens,
                          sampled, dtype_, block_tokens_)
        .value();
  }

  cluster nodes;

 private:
  std::shared_ptr<const transformer> model_;
  std::string dtype_;
  std::uint32_t block_tokens_{0};
};

// -- every variant

std::vector<cluster_shape> shapes() {
  const std::string other = "{order: blocks_first, kv: separate, inner: head_major}";
  const std::string interleaved = "{order: block_interleaved}";
  const std::string fp16 = "{layers: 3, kv_heads: 2, head_dim: 8, dtype: fp16, block_tokens: 4}";
  const std::string mla = "{layers: 3, mla: {latent_dim: 24}, dtype: fp32, block_tokens: 4}";
  const std::string state =
      "{layers: 2, kv_heads: 2, head_dim: 8, dtype: fp8, block_tokens: 4, "
      "state: {bytes: 96B, slots: 3}}";
  std::vector<cluster_shape> all;
  for (const std::string backend : {"shm", "tcp"}) {
    all.push_back({.name = backend + "_same", .backend = backend});
    all.push_back({.name = backend + "_nhd_to_hnd", .backend = backend, .decode_layout = other});
    all.push_back({.name = backend + "_interleaved_to_layers",
                   .backend = backend,
                   .model = fp16,
                   .prefill_layout = interleaved,
                   .decode_layout = "{kv: separate}"});
    all.push_back({.name = backend + "_latent",
                   .backend = backend,
                   .model = mla,
                   .decode_layout = "{order: blocks_first}"});
    all.push_back({.name = backend + "_state", .backend = backend, .model = state});
    all.push_back(
        {.name = backend + "_own_memory_per_layer", .backend = backend, .cache = "per_layer"});
    all.push_back({.name = backend + "_own_memory_hybrid", .backend = backend, .cache = "hybrid"});
    all.push_back({.name = backend + "_ranks_2_to_1", .backend = backend, .prefill_ranks = 2});
    all.push_back({.name = backend + "_ranks_1_to_2",
                   .backend = backend,
                   .decode_layout = other,
                   .decode_ranks = 2});
  }
  all.push_back(
      {.name = "tcp_ranks_2_to_4", .backend = "tcp", .prefill_ranks = 2, .decode_ranks = 4});
  all.push_back({.name = "auto", .backend = "auto"});
  return all;
}

class every_variant : public ::testing::TestWithParam<cluster_shape> {};
INSTANTIATE_TEST_SUITE_P(shapes, every_variant, ::testing::ValuesIn(shapes()),
                         [](const ::testing::TestParamInfo<cluster_shape>& p) {
                           return p.param.name;
                         });

TEST_P(every_variant, continues_a_moved_cache_as_one_process_alone_would) {
  int number = 0;
  for (const std::string mode : {"write", "read"}) {
    auto shape = GetParam();
    shape.mode = mode;
    engines e{shape};
    for (const auto order : {first::prefill, first::decode})
      for (const std::uint32_t chunk : {0u, 5u}) {
        job what;
        what.id = mode + std::to_string(++number);
        what.mode = mode;
        what.order = order;
        what.chunk = chunk;
        what.prompt_seed = static_cast<std::uint64_t>(number);
        // One token, a whole number of blocks, and a number in between.
        what.tokens =
            std::vector<std::uint32_t>{19, 1, 16, 33}[static_cast<std::size_t>(number) % 4];
        const auto reply = e.run(what);
        EXPECT_GT(reply.bytes, 0u);
      }
    if (shape.cache.empty()) e.nodes.expect_nothing_is_held();
  }
}

// -- many requests, prefixes, ends

class many_requests : public ::testing::TestWithParam<cluster_shape> {};
// A token has 192 bytes: 16 KiB are 21 blocks, and a request needs 5 at one side and 7 at the
// other.
INSTANTIATE_TEST_SUITE_P(
    shapes, many_requests,
    ::testing::Values(
        cluster_shape{.name = "shm_small_prefill_pool", .backend = "shm", .prefill_pool = "16KiB"},
        cluster_shape{.name = "shm_small_decode_pool",
                      .backend = "shm",
                      .decode_pool = "16KiB",
                      .mode = "read"},
        cluster_shape{.name = "tcp_small_prefill_pool",
                      .backend = "tcp",
                      .prefill_pool = "16KiB",
                      .mode = "read"},
        cluster_shape{.name = "tcp_small_decode_pool", .backend = "tcp", .decode_pool = "16KiB"}),
    [](const ::testing::TestParamInfo<cluster_shape>& p) { return p.param.name; });

TEST_P(many_requests, share_one_link_and_a_pool_that_holds_a_few_of_them) {
  engines e{GetParam()};
  std::vector<job> jobs;
  std::vector<std::vector<std::future<result<payload>>>> answers;
  for (int i = 0; i < 24; ++i) {
    job what;
    what.id = "many" + std::to_string(i);
    what.mode = GetParam().mode;
    what.chunk = i % 3 == 0 ? 4 : 0;
    what.max_tokens = i % 4 == 0 ? 1 : 8;
    what.prompt_seed = static_cast<std::uint64_t>(i);
    jobs.push_back(what);
  }
  for (const auto& what : jobs) {
    answers.emplace_back();
    answers.back().push_back(e.nodes.call_later("decode-0", "decode", to_json(e.decode_of(what))));
    answers.back().push_back(
        e.nodes.call_later("prefill-0", "prefill", to_json(e.prefill_of(what))));
  }
  for (std::size_t i = 0; i < jobs.size(); ++i) e.finish(jobs[i], std::move(answers[i]));
  e.nodes.expect_nothing_is_held();
}

TEST(a_prefix_at_the_decode_side, is_not_moved_again) {
  engines e{{.name = "prefix", .backend = "shm"}};
  job what{.id = "a", .tokens = 32, .reuse_prefix = true};
  const auto whole = e.run(what);
  EXPECT_EQ(whole.prefix_tokens, 0u);
  what.id = "b";
  what.tokens = 45;
  const auto longer = e.run(what);
  EXPECT_EQ(longer.prefix_tokens, 32u);
  EXPECT_EQ(longer.bytes * 32, whole.bytes * 13);
  what.id = "c";  // all of it is cached: nothing moves, and the text is still right
  const auto nothing = e.run(what);
  EXPECT_EQ(nothing.prefix_tokens, 45u);
  EXPECT_EQ(nothing.bytes, 0u);
  what.id = "d";  // nothing moves even before the prefill side can tell the first token
  what.order = first::decode;
  const auto early = e.run(what);
  EXPECT_EQ(early.prefix_tokens, 45u);
  EXPECT_EQ(early.bytes, 0u);
  engines reading{{.name = "prefix_read", .backend = "shm", .mode = "read"}};
  what.mode = "read";
  what.order = first::prefill;
  reading.run(what);
  what.id = "e";
  what.tokens = 50;
  const auto read = reading.run(what);
  EXPECT_EQ(read.prefix_tokens, 45u);
  EXPECT_EQ(read.bytes * 32, whole.bytes * 5);
}

TEST(a_request, that_one_side_gives_up_ends_at_both_and_leaves_nothing_behind) {
  for (const std::string mode : {"write", "read"}) {
    engines e{{.name = "abort", .backend = "tcp", .mode = mode}};
    for (const std::string who : {"prefill-0", "decode-0"}) {
      // Only one side has the request, and waits for the other when it is given up.
      job what{.id = mode + who, .mode = mode};
      const bool prefill = who == "prefill-0";
      auto answer =
          e.nodes.call_later(who, prefill ? "prefill" : "decode",
                             prefill ? to_json(e.prefill_of(what)) : to_json(e.decode_of(what)));
      e.nodes.wait_until_it_holds_blocks(who);
      // Otherwise the next source of that name would meet this receive, and end with it.
      if (!prefill) e.nodes.wait_until_it_is_asked("prefill-0");
      // It takes its blocks a moment before it can be given up.
      EXPECT_TRUE(
          comes_true([&] { return bool{e.nodes.call(who, "abort", abort_to_json(what.id))}; }));
      const auto ended = answer.get();
      ASSERT_FALSE(ended);
      EXPECT_EQ(ended.error().code, errc::aborted) << to_string(ended.error());
      e.nodes.expect_nothing_is_held();
      // The same id works afterwards.
      what.order = first::prefill;
      what.again = true;
      e.run(what);
    }
    e.nodes.expect_nothing_is_held();
  }
}

TEST(a_request, whose_other_half_never_comes_ends_at_its_deadline) {
  engines e{{.name = "deadline", .backend = "shm"}};
  auto prefill = e.prefill_of({.id = "p"});
  prefill.deadline_ms = 300;
  auto decode = e.decode_of({.id = "d"});
  decode.deadline_ms = 300;
  auto alone = e.nodes.call_later("prefill-0", "prefill", to_json(prefill));
  const auto answer = e.nodes.call("decode-0", "decode", to_json(decode));
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code, errc::deadline) << to_string(answer.error());
  const auto other = alone.get();
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, errc::deadline) << to_string(other.error());
  e.nodes.expect_nothing_is_held();
}

TEST(a_call, that_makes_no_sense_is_refused_with_a_sentence) {
  engines e{{.name = "calls", .backend = "shm", .prefill_pool = "16KiB"}};
  const auto message = [&](const std::string& node, const std::string& method,
                           const std::string& text) {
    const auto answer = e.nodes.call(node, method, {text.begin(), text.end()});
    return answer ? "accepted" : to_string(answer.error());
  };
  EXPECT_THAT(message("prefill-0", "sing", "{}"), HasSubstr("not sing"));
  EXPECT_THAT(message("prefill-0", "decode", "{}"), HasSubstr("prefill-0 is a prefill node"));
  EXPECT_THAT(message("prefill-0", "prefill", "{"), HasSubstr("invalid_config: prefill"));
  EXPECT_THAT(message("prefill-0", "prefill", "[]"), HasSubstr("JSON object"));
  EXPECT_THAT(message("prefill-0", "prefill", R"({"request": 7})"), HasSubstr("invalid_config"));
  EXPECT_THAT(message("prefill-0", "prefill", R"({"request": "a"})"), HasSubstr("`prompt`"));
  EXPECT_THAT(message("prefill-0", "prefill", R"({"request": "a", "prompt": [300]})"),
              HasSubstr("token 300"));
  EXPECT_THAT(message("decode-0", "decode", R"({"request": "a", "prompt": [1]})"),
              HasSubstr("`sources`"));
  EXPECT_THAT(message("decode-0", "decode",
                      R"({"request": "a", "prompt": [1], "sources": ["x"], "mode": "push"})"),
              HasSubstr("`mode`"));
  EXPECT_THAT(
      message("decode-0", "decode", R"({"request": "a", "prompt": [1], "sources": ["nobody"]})"),
      HasSubstr("nobody"));
  EXPECT_THAT(message("decode-0", "abort", R"({"request": "a"})"), HasSubstr("not_found"));
  const auto huge = e.prefill_of({.id = "huge", .tokens = 5'000});
  const auto answer = e.nodes.call("prefill-0", "prefill", to_json(huge));
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code, errc::pool_exhausted);
  e.run({.id = "and_it_still_works"});
}

}  // namespace
}  // namespace troupe::reference
