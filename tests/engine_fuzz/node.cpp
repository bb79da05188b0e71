#include "node.hpp"

#include "blocks.hpp"
#include "cache_model.hpp"
#include "transfers.hpp"
#include "values.hpp"
#include "waiting.hpp"
#include "watch_judge.hpp"
#include "wrong_calls.hpp"

namespace troupe::engine_fuzz {

namespace {

class local_node final : public fuzz_node {
 public:
  local_node(const scenario& s, std::uint32_t node)
      : s_{s}, node_{node}, its_{s.side_of(node)}, dice_{s.seed * 1000 + node} {}
  ~local_node() override { stop(); }

  bool start(int supervisor_port) override {
    const auto deployment = deployment_of(s_, supervisor_port);
    if (!deployment) return found(to_string(deployment.error()));
    engine_options options;
    if (!its_.pooled) options = options_with(s_.layout_of(node_), memory_);
    if (its_.allocated) {
      options.regions.clear();
      options.allocate.emplace();
    }
    options.polling = its_.polling;
    options.watch = joins();
    try_other_rank(*deployment);
    if (joins()) try_wrong_announcements(*deployment);
    auto started = engine::start(*deployment, name_to_start(), std::move(options));
    if (!started) return found("does not start: " + to_string(started.error()));
    engine_ = std::move(*started);
    if (auto in = engine_->wait_registered(testing::wait_limit); !in)
      return found("is not taken in: " + to_string(in.error()));
    if (joins() && engine_->report().node.name != s_.name_of(node_))
      return found("is called " + engine_->report().node.name);
    std::vector<std::span<std::byte>> regions;
    for (std::size_t i = 0;; ++i) {
      auto region = engine_->region(i);
      if (!region) break;
      regions.push_back(*region);
    }
    model_ = std::make_unique<cache_model>(engine_->layout(), regions, s_.seed * 77 + node_);
    const finder finds = [this](const std::string& what) { found(what); };
    blocks_ = std::make_unique<cache_blocks>(s_, node_, *engine_, *model_, finds, dice_);
    transfers_ = std::make_unique<node_transfers>(s_, node_, *engine_, *model_, *blocks_, ended_,
                                                  finds, counts_);
    values_ = std::make_unique<value_stories>(s_, node_, *engine_, finds, counts_,
                                              [this] { return blocks_->lend(); });
    wrong_calls_ = std::make_unique<wrong_calls>(s_, node_, *engine_, finds, counts_, dice_);
    if (engine_->layout().blocks != its_.blocks) {
      return found("has " + std::to_string(engine_->layout().blocks) + " blocks, not " +
                   std::to_string(its_.blocks));
    }
    return true;
  }

  void begin_round(std::uint32_t index) override {
    if (round_ == nullptr && joins()) meet_the_others();
    round_index_ = index;
    round_ = &s_.rounds[index];
    ended_.clear();
    transfers_->begin_round(index);
    values_->begin_round(*round_);
    blocks_->begin_round(*round_);
  }

  void carry_out(std::uint32_t act_index) override {
    const auto& one = round_->acts[act_index];
    switch (one.what) {
      case act_kind::send: transfers_->send(one.request); break;
      case act_kind::compute: transfers_->compute(one); break;
      case act_kind::seal: transfers_->seal(one.request); break;
      case act_kind::receive: transfers_->receive(one.request, part::receive); break;
      case act_kind::receive_again: transfers_->receive_again(one.request); break;
      case act_kind::receive_late: transfers_->receive(one.request, part::receive_late); break;
      case act_kind::abort_send: transfers_->abort(one.request, part::send); break;
      case act_kind::abort_receive: transfers_->abort(one.request, part::receive); break;
      case act_kind::hold: transfers_->tell_sources(one.request, part::hold); break;
      case act_kind::release: transfers_->tell_sources(one.request, part::release); break;
      case act_kind::call_wrongly: wrong_calls_->make(one.a, transfers_->some_live_send()); break;
      case act_kind::put:
        values_->put(s_.name_of(round_->puts[one.a].peer),
                     "v" + std::to_string(round_index_) + "-" + std::to_string(one.a),
                     round_->puts[one.a]);
        break;
      case act_kind::wait_for_outcome:
      case act_kind::wait_for_sends:
      case act_kind::break_links:
      case act_kind::pause:
      case act_kind::die:
      case act_kind::stand:
      case act_kind::wake: break;
    }
  }

  void give_up(std::uint32_t request) override {
    if (!ended_.contains({request, part::send})) transfers_->abort(request, part::send);
  }

  void hear_of_wake() override { values_->hear_of_wake(); }

  void pump() override {
    if (its_.polling) {
      for (int i = 0; i < 4; ++i) (void)engine_->poll();
    }
    for (auto& e : engine_->take()) {
      if (const auto* m = std::get_if<event_member>(&e.what)) {
        take_member(*m);
        continue;
      }
      ++progress_;
      if (!values_->take(e)) transfers_->take(e);
    }
    values_->pump();
  }

  bool idle() override { return transfers_->empty() && values_->empty(); }
  bool settled() override { return values_->settled() && transfers_->settled(); }
  std::uint64_t progress() override { return progress_; }
  int port() override { return engine_->report().node.port; }

  void audit() override {
    blocks_->end_round();
    if (auto wrong = model_->audit(); !wrong.empty()) found(wrong);
    counts_.bytes += model_->compared() - compared_before_;
    compared_before_ = model_->compared();
    if (auto wrong = blocks_->what_is_missing(); !wrong.empty()) found(wrong);
    const auto links = engine_->report().links;
    if (s_.is_aside(node_) && !links.empty()) found("has a link with " + links.front().peer);
    // Soft-RoCE may lose more packets than a link survives.
    if (s_.may_break || s_.may_freeze || s_.backend == "rdma") return;
    for (const auto& link : links) {
      if (link.rebuilds > 0 || !link.last_break.empty())
        found("the link with " + link.peer + " broke: " + link.last_break);
    }
  }

  std::string open_operations() override {
    auto all = transfers_->open() + values_->open();
    const auto report = engine_->report();
    for (const auto& t : report.transfers)
      all += "; " + t.side + " of " + t.request + " with " + t.peer + " " + t.state;
    for (const auto& link : report.links)
      all += "; link with " + link.peer + " " + link.state + " " + link.last_break;
    return all;
  }

  void stop() override {
    if (engine_) engine_->stop();
    engine_.reset();
  }

 private:
  using region_memory = std::vector<std::vector<std::byte>>;

  /// Whether the node itself announces its identity, since no file names it.
  [[nodiscard]] bool joins() const { return s_.is_open() && !s_.is_aside(node_); }
  [[nodiscard]] std::string name_to_start() const { return joins() ? "" : s_.name_of(node_); }
  [[nodiscard]] announcement its_announcement() const {
    return {s_.stage_of(node_), s_.replica_name_of(node_), s_.rank_of(node_), its_.ranks, {}};
  }

  /// Waits until the supervisor has told this node of all others. Before that a receive from one of them may fail
  /// with `not_found`: as far as this node knows, that one never joined.
  void meet_the_others() {
    const auto knows_all = [this] {
      pump();
      for (std::uint32_t n = 0; n < s_.joined_nodes(); ++n)
        if (n != node_ && !others_.there().contains(s_.name_of(n))) return false;
      return true;
    };
    if (!testing::comes_true(knows_all)) found("is not told of every other node");
  }

  void take_member(const event_member& m) {
    if (const auto wrong = others_.hear(m); !wrong.empty()) found("is told of a member: " + wrong);
    for (std::uint32_t n = 0; n < s_.nodes(); ++n)
      if (n != node_ && s_.name_of(n) == m.node) return;
    found("is told of " + m.node + ", which is no other node");
  }

  /// The options of a node that brings its cache.
  engine_options options_with(kvcache::cache_layout layout, region_memory& memory) const {
    engine_options options;
    for (const auto bytes : kvcache::region_sizes(layout)) memory.emplace_back(bytes);
    for (auto& one : memory) options.regions.emplace_back(one);
    options.layout = std::move(layout);
    if (joins()) options.join = its_announcement();
    return options;
  }

  /// A layout must be refused if its rank differs from the one that the deployment gives the node,
  /// or that the node announces.
  void try_other_rank(const config::deployment& deployment) {
    if (its_.pooled || its_.ranks == 1) return;
    const auto rank = s_.rank_of(node_);
    region_memory memory;
    auto options = options_with(s_.layout_of(node_ - rank + (rank + 1) % its_.ranks), memory);
    expect_no_start("with the layout of another rank", deployment, name_to_start(),
                    std::move(options), joins() ? errc::invalid_config : errc::layout_mismatch);
  }

  /// A node whose announcement no supervisor would accept does not start.
  void try_wrong_announcements(const config::deployment& deployment) {
    const auto refused = [&](const char* how, errc code, const std::string& name, auto change) {
      engine_options options;
      options.join = its_announcement();
      change(options);
      expect_no_start(how, deployment, name, std::move(options), code);
    };
    refused("named and announced", errc::invalid_config, s_.name_of(node_), [](auto&) {});
    refused("neither named nor announced", errc::not_found, "", [](auto& o) { o.join.reset(); });
    refused("into a stage that is not there", errc::not_found, "",
            [](auto& o) { o.join->stage = "nowhere"; });
    refused("as a replica by no name", errc::invalid_config, "",
            [](auto& o) { o.join->replica = "P.0"; });
    refused("as one rank of more than may join", errc::invalid_config, "",
            [](auto& o) { o.join->ranks = most_nodes_of_open_stage + 1; });
  }

  void expect_no_start(const std::string& how, const config::deployment& deployment,
                       const std::string& name, engine_options options, errc code) {
    const auto started = engine::start(deployment, name, std::move(options));
    if (started) {
      found("starts " + how);
    } else if (started.error().code != code) {
      found(how + ": " + to_string(started.error()));
    } else {
      ++counts_.wrong_calls;
    }
  }

  bool found(const std::string& what) {
    findings_.push_back(s_.name_of(node_) + ": " + what);
    return false;
  }

  const scenario& s_;
  std::uint32_t node_;
  const side& its_;
  dice dice_;
  region_memory memory_;
  std::unique_ptr<engine> engine_;
  std::unique_ptr<cache_model> model_;
  std::unique_ptr<cache_blocks> blocks_;
  std::unique_ptr<node_transfers> transfers_;
  std::unique_ptr<value_stories> values_;
  std::unique_ptr<wrong_calls> wrong_calls_;
  testing::watch_judge others_;  ///< at a node that joins
  const round* round_{nullptr};
  std::uint32_t round_index_{0};
  std::uint64_t progress_{0};
  std::uint64_t compared_before_{0};
};

}  // namespace

std::unique_ptr<fuzz_node> make_local_node(const scenario& s, std::uint32_t node) {
  return std::make_unique<local_node>(s, node);
}

}  // namespace troupe::engine_fuzz
