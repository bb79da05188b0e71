// The table of transfer failures: each row many times over, in real processes.

#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/time.h>

#include "rows_fixture.hpp"

namespace troupe::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

/// The error text for the loss of a peer that only its silence has shown.
const auto is_told_by_silence = HasSubstr("silent for ");

// -- processes

TEST_P(row, prefill_node_dies_and_its_request_is_lost_at_once_and_placed_on_another) {
  for (int round = 0; round < fault_rounds(); ++round) {
    SCOPED_TRACE(round);
    const auto t = next();
    auto taken = hand_over("prefill-0", "decode-0", t);
    std::this_thread::sleep_for(10ms + within(90ms));
    const auto died = cluster->pid("prefill-0");
    cluster->kill("prefill-0");
    EXPECT_THAT(in_words(taken.get()),
                AllOf(AnyOf(StartsWith("peer_lost: "), StartsWith("peer_unreachable: ")),
                      Not(is_told_by_silence)));
    actors::placement_request wanted;
    wanted.request = t.request + " again";
    wanted.timeout_ms = static_cast<std::uint32_t>(milliseconds{wait_limit}.count());
    // The supervisor may hear of the death after the decode node: like a user, the test places it
    // again.
    auto where = client->place(wanted);
    const auto is_elsewhere = [&] {
      if (where && static_cast<pid_t>(where->prefill.at(0).pid) != died) return true;
      where = client->place(wanted);
      return false;
    };
    ASSERT_TRUE(comes_true(is_elsewhere, 5ms))
        << (where ? "on the dead" : to_string(where.error()));
    expect_served(where->prefill.at(0).name, where->decode.at(0).name);
    (void)client->finished(wanted.request);
    cluster->start("prefill-0");
    settle();
  }
}

class kept_source : public row {
 protected:
  kept_source() { shape.limits_more = ", retry_window: 5s"; }
};

TEST_P(kept_source, whose_decode_node_dies_serves_another_without_a_second_prefill) {
  for (int round = 0; round < fault_rounds(); ++round) {
    SCOPED_TRACE(round);
    const auto t = next();
    auto taken = hand_over("prefill-0", "decode-0", t);
    std::this_thread::sleep_for(10ms + within(90ms));
    cluster->kill("decode-0");
    EXPECT_FALSE(taken.get());
    EXPECT_EQ(in_words(take("decode-1", "prefill-0", t).get()), "done");
    EXPECT_EQ(outcome("prefill-0", t), "done");
    cluster->start("decode-0");
    settle();
  }
}

TEST_P(row, decode_node_dies_and_its_sender_is_told_at_once) {
  for (int round = 0; round < fault_rounds(); ++round) {
    SCOPED_TRACE(round);
    auto t = next();
    t.per_layer = 400ms;
    auto taken = hand_over("prefill-0", "decode-0", t);
    wait_until_it_moves("prefill-0", "decode-0");
    std::this_thread::sleep_for(within(100ms));
    cluster->kill("decode-0");
    EXPECT_THAT(outcome("prefill-0", t), AllOf(StartsWith("peer_lost: "), Not(is_told_by_silence)));
    EXPECT_FALSE(taken.get());
    cluster->start("decode-0");
    settle();
  }
}

TEST_P(row, supervisor_dies_and_what_runs_goes_on_and_all_are_back_when_it_is) {
  for (int round = 0; round < fault_rounds(); ++round) {
    SCOPED_TRACE(round);
    auto t = next();
    t.per_layer = 240ms;
    auto taken = hand_over("prefill-0", "decode-0", t);
    // A node that has not found its peer yet asks the supervisor.
    wait_until_it_moves("prefill-0", "decode-0");
    std::this_thread::sleep_for(within(150ms));
    cluster->kill("supervisor");
    EXPECT_EQ(in_words(taken.get()), "done");
    cluster->start("supervisor");
    settle();
    EXPECT_EQ(outcome("prefill-0", t), "done");
    expect_served("prefill-1", "decode-0");
  }
}

// -- engines and clocks

TEST_P(row, abort_by_either_engine_ends_both_sides_with_aborted) {
  for (int round = 0; round < fault_rounds(); ++round) {
    SCOPED_TRACE(round);
    auto t = next();
    t.per_layer = 2s;  // long enough to be given up before it is over
    auto taken = hand_over("prefill-0", "decode-0", t);
    // Before the request is made, only one side exists.
    wait_until_it_moves("prefill-0", "decode-0");
    std::this_thread::sleep_for(within(100ms));
    ASSERT_TRUE(call(round % 2 == 0 ? "prefill-0" : "decode-0", "abort",
                     {t.request.begin(), t.request.end()}));
    EXPECT_THAT(in_words(taken.get()), StartsWith("aborted: "));
    EXPECT_THAT(outcome("prefill-0", t), StartsWith("aborted: "));
  }
}

TEST_P(row, deadline_passes_and_both_sides_say_so) {
  for (int round = 0; round < fault_rounds(); ++round) {
    SCOPED_TRACE(round);
    auto t = next();
    t.per_layer = 2s;
    t.deadline = 200ms + within(300ms);
    auto taken = hand_over("prefill-0", "decode-0", t);
    EXPECT_THAT(in_words(taken.get()), StartsWith("deadline: "));
    EXPECT_THAT(outcome("prefill-0", t), StartsWith("deadline: "));
  }
}

class full_pool : public row {
 protected:
  full_pool() { shape.pool = "4MiB"; }  // 128 blocks, enough for two of these requests
};

TEST_P(full_pool, lets_requests_wait_in_line_and_refuses_at_once_who_will_not) {
  for (int round = 0; round < fault_rounds(); ++round) {
    SCOPED_TRACE(round);
    std::vector<transfer> all;
    std::vector<std::future<call_outcome>> taken;
    for (int i = 0; i < 4; ++i) {
      auto t = next();
      t.tokens = 1000;
      t.use = 600ms;
      t.per_layer = 0ms;
      const auto* prefill = i % 2 == 0 ? "prefill-0" : "prefill-1";
      taken.push_back(hand_over(prefill, "decode-0", t));
      std::this_thread::sleep_for(20ms);
    }
    auto impatient = next();
    impatient.tokens = 1000;
    impatient.fail_when_full = true;
    EXPECT_THAT(in_words(take("decode-0", "prefill-0", impatient).get()),
                StartsWith("pool_exhausted: "));
    for (auto& t : taken) EXPECT_EQ(in_words(t.get()), "done");
  }
}

class other_model : public row {
 protected:
  other_model() { shape.decode_block_tokens = 32; }
};

TEST_P(other_model, of_the_decode_nodes_is_a_mismatch_that_names_the_field_and_both_values) {
  for (int round = 0; round < fault_rounds(); ++round) {
    SCOPED_TRACE(round);
    const auto t = next();
    const auto why = in_words(hand_over("prefill-0", "decode-0", t).get());
    EXPECT_THAT(why, StartsWith("layout_mismatch: "));
    EXPECT_THAT(why, AllOf(HasSubstr("block_tokens"), HasSubstr("16"), HasSubstr("32")));
    ASSERT_TRUE(call("prefill-0", "abort", {t.request.begin(), t.request.end()}));
  }
}

// -- the network

class wire : public row {
 protected:
  void SetUp() override {
    if (const auto why = network::missing()) GTEST_SKIP() << "no partitions here: " << *why;
    row::SetUp();
  }
};

TEST_P(wire, cut_for_a_moment_in_the_middle_of_a_transfer_costs_it_nothing) {
  for (int round = 0; round < fault_rounds(); ++round) {
    SCOPED_TRACE(round);
    auto t = next();
    t.per_layer = 60ms;
    auto taken = hand_over("prefill-0", "decode-0", t);
    std::this_thread::sleep_for(10ms + within(150ms));
    net->cut("prefill-0", "decode-0");
    std::this_thread::sleep_for(within(150ms));
    net->mend("prefill-0", "decode-0");
    EXPECT_EQ(in_words(taken.get()), "done");
    EXPECT_EQ(outcome("prefill-0", t), "done");
  }
}

class broken_wire : public wire {
 protected:
  broken_wire() { notice_silence(); }
};

TEST_P(broken_wire, cut_in_the_middle_of_a_transfer_gives_each_side_one_outcome_and_serves_again) {
  const auto reason = AnyOf(StartsWith("link_broken: "), StartsWith("peer_lost: "),
                            StartsWith("peer_unreachable: "));
  for (int round = 0; round < fault_rounds(); ++round) {
    SCOPED_TRACE(round);
    const auto t = next();
    auto taken = hand_over("prefill-0", "decode-0", t);
    std::this_thread::sleep_for(10ms + within(100ms));
    net->cut("prefill-0", "decode-0");
    std::this_thread::sleep_for(400ms + within(800ms));
    net->mend("prefill-0", "decode-0");
    const auto receiver = in_words(taken.get());
    const auto sender = outcome("prefill-0", t);
    EXPECT_THAT(receiver, AnyOf("done", reason));
    if (receiver == "done") {
      EXPECT_THAT(sender, AnyOf("done", reason));
    } else {
      EXPECT_NE(sender, "done") << "and the receiver: " << receiver;
      (void)call("prefill-0", "abort", {t.request.begin(), t.request.end()});
    }
    expect_served("prefill-0", "decode-0");
  }
}

TEST_P(broken_wire,
       cut_for_longer_than_a_deadline_fails_both_sides_with_a_reason_and_serves_again) {
  for (int round = 0; round < fault_rounds(); ++round) {
    SCOPED_TRACE(round);
    auto t = next();
    t.deadline = 4s;
    t.per_layer = 1200ms;
    auto taken = hand_over("prefill-0", "decode-0", t);
    std::this_thread::sleep_for(20ms + within(180ms));
    net->cut("prefill-0", "decode-0");
    const auto reason = AnyOf(StartsWith("deadline: "), StartsWith("link_broken: "),
                              StartsWith("peer_lost: "), StartsWith("peer_unreachable: "));
    EXPECT_THAT(in_words(taken.get()), reason);
    EXPECT_THAT(outcome("prefill-0", t), reason);
    // Meanwhile the other nodes serve each other.
    expect_served("prefill-0", "decode-1");
    expect_served("prefill-1", "decode-0");
    net->mend("prefill-0", "decode-0");
    expect_served("prefill-0", "decode-0");
  }
}

class missed_wire : public wire {
 protected:
  missed_wire() { notice_missing_heartbeats(); }
};

TEST_P(missed_wire, from_the_supervisor_to_half_of_the_nodes_is_no_matter_to_what_runs_among_them) {
  for (int round = 0; round < (fault_rounds() + 1) / 2; ++round) {
    SCOPED_TRACE(round);
    auto inside = next();
    auto outside = next();
    inside.per_layer = outside.per_layer = 200ms + within(1000ms);
    auto among_the_cut = hand_over("prefill-0", "decode-0", inside);
    auto among_the_others = hand_over("prefill-1", "decode-1", outside);
    std::this_thread::sleep_for(50ms);
    net->cut("supervisor", "prefill-0");
    net->cut("supervisor", "decode-0");
    std::this_thread::sleep_for(500ms + within(heartbeats_missed + 1500ms));
    EXPECT_EQ(in_words(among_the_cut.get()), "done");
    EXPECT_EQ(in_words(among_the_others.get()), "done");
    net->mend("supervisor", "prefill-0");
    net->mend("supervisor", "decode-0");
    settle();
    expect_served("prefill-0", "decode-1");
    expect_served("prefill-1", "decode-0");
  }
}

TEST_P(missed_wire,
       that_parts_a_node_from_its_supervisor_does_not_keep_it_from_ending_or_returning) {
  for (int round = 0; round < (fault_rounds() + 4) / 5; ++round) {
    SCOPED_TRACE(round);
    net->cut("supervisor", "decode-1");
    // Long enough for it to notice, and to ask again and again.
    std::this_thread::sleep_for(heartbeats_missed + 1500ms + within(1000ms));
    cluster->ask_to_end("decode-1");
    EXPECT_TRUE(comes_true([&] { return cluster->gone("decode-1"); }, 10ms)) << "it did not end";
    cluster->kill("decode-1");
    // Its next life starts while it is cut off, and is accepted once the wire is mended.
    cluster->start("decode-1");
    std::this_thread::sleep_for(3s);
    net->mend("supervisor", "decode-1");
    settle();
  }
}

/// Connects, sends the bytes, and waits a moment for an answer.
void say_to(const std::string& host, std::uint16_t port, const std::string& bytes) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(port);
  ::inet_pton(AF_INET, host.c_str(), &at.sin_addr);
  const timeval limit{0, 50'000};
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at) == 0) {
    char answer[512];
    (void)::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    (void)::recv(fd, answer, sizeof answer, 0);
  }
  ::close(fd);
}

TEST_P(wire, that_brings_garbage_to_every_port_of_a_node_changes_nothing) {
  expect_served("prefill-0", "decode-0");
  for (int round = 0; round < fault_rounds(); ++round) {
    SCOPED_TRACE(round);
    const auto name = cluster->nodes()[dice() % cluster->nodes().size()];
    const auto before = cluster->pid(name);
    const auto resident = resident_bytes_of(name);
    const auto ports = ports_of(name);
    ASSERT_GE(ports.size(), 2u) << "its cluster port and its data port";
    for (const auto port : ports) {
      std::string bytes(1 + dice() % 4096, '\0');
      for (auto& byte : bytes) byte = static_cast<char>(dice());
      say_to(net->address(name), port, bytes);
      // Lengths of nearly 2 GiB and of zero, at the place of a header's length field.
      say_to(net->address(name), port, std::string(512, '\x7F'));
      say_to(net->address(name), port, std::string(512, '\0'));
      say_to(net->address(name), port, "");
    }
    EXPECT_TRUE(cluster->revive().empty()) << name;
    EXPECT_EQ(cluster->pid(name), before);
    if (!sanitized) {
      EXPECT_LT(resident_bytes_of(name), resident + (64U << 20U));
    }
    expect_served("prefill-0", "decode-0");
    expect_served("prefill-1", "decode-1");
  }
}

// -- frozen peers

class silent_row : public row {
 protected:
  silent_row() {
    notice_silence();
    notice_missing_heartbeats();
  }
};

TEST_P(silent_row, frozen_peer_is_lost_and_what_it_does_when_it_wakes_lands_nowhere) {
  for (int round = 0; round < (fault_rounds() + 1) / 2; ++round) {
    SCOPED_TRACE(round);
    const std::string frozen = round % 2 == 0 ? "prefill-0" : "decode-0";
    auto t = next();
    t.per_layer = 2s;  // the last layer is not in flight when the peer is frozen
    auto taken = hand_over("prefill-0", "decode-0", t);
    wait_until_it_moves("prefill-0", "decode-0");
    std::this_thread::sleep_for(within(60ms));
    cluster->freeze(frozen);
    const auto down = std::chrono::steady_clock::now() + heartbeats_missed + 600ms;
    if (frozen == "prefill-0") {
      EXPECT_THAT(in_words(taken.get()),
                  AnyOf(StartsWith("peer_lost: "), StartsWith("link_broken: ")));
    }
    // Its blocks are given to others while it is frozen.
    expect_served("prefill-1", "decode-1");
    if (frozen == "prefill-0") {
      expect_served("prefill-1", "decode-0");
    } else {
      expect_served("prefill-0", "decode-1");
    }
    std::this_thread::sleep_until(down);
    cluster->thaw(frozen);
    settle();
    if (frozen == "decode-0") {
      EXPECT_FALSE(taken.get());
    }
    EXPECT_NE(outcome("prefill-0", t), "done");
    expect_served("prefill-0", "decode-0");
  }
}

const auto modes = ::testing::Values("write", "read");
const auto mode_name = [](const auto& tested) { return tested.param; };
INSTANTIATE_TEST_SUITE_P(mode, row, modes, mode_name);
INSTANTIATE_TEST_SUITE_P(mode, kept_source, modes, mode_name);
INSTANTIATE_TEST_SUITE_P(mode, full_pool, modes, mode_name);
INSTANTIATE_TEST_SUITE_P(mode, other_model, modes, mode_name);
INSTANTIATE_TEST_SUITE_P(mode, wire, modes, mode_name);
INSTANTIATE_TEST_SUITE_P(mode, broken_wire, modes, mode_name);
INSTANTIATE_TEST_SUITE_P(mode, missed_wire, modes, mode_name);
INSTANTIATE_TEST_SUITE_P(mode, silent_row, modes, mode_name);

}  // namespace
}  // namespace troupe::testing
