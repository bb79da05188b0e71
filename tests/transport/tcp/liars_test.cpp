// A lying peer with a valid token: it uses ranges, grants and frames that it has no right to.

#include <random>
#include <span>
#include <utility>

#include "hostile_fixture.hpp"

namespace troupe::transport::tcp {

TEST_F(hostile, a_token_holders_bad_ranges_are_refused_before_memory_is_touched) {
  std::memset(victim.memory.data() + region_size / 2, 0x77, region_size / 2);
  auto l = become_peer(incarnation{99});
  const auto base = region_size / 2;
  const std::vector<wire_entry> lies{
      {.offset = base - 1, .stride = 0, .length = 100, .count = 1, .index = 0},
      {.offset = base + 4095, .stride = 0, .length = 2, .count = 1, .index = 0},
      {.offset = UINT64_MAX, .stride = 0, .length = 100, .count = 1, .index = 0},
      {.offset = UINT64_MAX - 50, .stride = 0, .length = 100, .count = 1, .index = 0},
      {.offset = std::uint64_t{1} << 31, .stride = 0, .length = 100, .count = 1, .index = 0},
      {.offset = std::uint64_t{1} << 63, .stride = 0, .length = 100, .count = 1, .index = 0},
      {.offset = base, .stride = std::uint64_t{1} << 63, .length = 10, .count = 10, .index = 0},
      {.offset = base, .stride = UINT64_MAX - 4, .length = 10, .count = 10, .index = 0},
      {.offset = base, .stride = 4096, .length = 10, .count = 10, .index = 0},
  };
  for (const auto& lie : lies) {
    const auto data = lie.length * lie.count;
    send(l.fd, write_frame(l.grant, {lie}, data, data));
    std::array<std::byte, trailer_size> trailer{};
    encode_trailer(0, trailer.data());
    send(l.fd, trailer);
    EXPECT_EQ(status_from(l.fd), static_cast<std::uint8_t>(errc::out_of_range));
  }
  auto of_another_link = l.grant;
  of_another_link.id = grant_->id;
  auto for_another_transfer = l.grant;
  for_another_transfer.transfer = transfer_id{10};
  const auto to_read =
      l.wire->grant(victim.region, {{base, 4096, 0, 1}}, access::read, transfer_id{9}).value();
  const std::vector<std::pair<remote_grant, errc>> misused{
      {of_another_link, errc::grant_revoked},
      {for_another_transfer, errc::unauthorized},
      {to_read, errc::unauthorized},
  };
  for (const auto& [grant, expected] : misused) {
    send(l.fd,
         write_frame(grant, {{.offset = base, .stride = 0, .length = 8, .count = 1, .index = 0}}, 8,
                     8));
    std::array<std::byte, trailer_size> trailer{};
    encode_trailer(0, trailer.data());
    send(l.fd, trailer);
    EXPECT_EQ(status_from(l.fd), static_cast<std::uint8_t>(expected));
  }
  for (std::size_t i = region_size / 2; i < region_size; ++i) {
    ASSERT_EQ(victim.memory[i], std::byte{0x77});
  }
  // An honest write on the same link still works.
  send(l.fd,
       write_frame(l.grant, {{.offset = base, .stride = 0, .length = 64, .count = 1, .index = 0}},
                   64, 64));
  std::array<std::byte, trailer_size> trailer{};
  encode_trailer(0, trailer.data());
  send(l.fd, trailer);
  EXPECT_EQ(status_from(l.fd), 0);
  EXPECT_EQ(victim.memory[base], std::byte{0x66});
  l.wire->close();
}

TEST_F(hostile, frames_against_the_protocol_break_only_the_liars_link) {
  const auto memory_before = resident_bytes();
  const auto patched = [](std::size_t at, std::uint32_t value) {
    std::vector<std::byte> bytes(header_size);
    encode(frame_header{.type = frame_type::session}, bytes.data());
    std::memcpy(bytes.data() + at, &value, sizeof value);
    return bytes;
  };
  std::vector<std::vector<std::byte>> attacks{
      patched(12, 0x8000'0000U),  // a session of 2 GiB
      patched(12, 0xffff'ffffU),  //
      patched(8, 0x8000'0000U),   // data of 2 GiB
      patched(4, 0xffff'ffffU),   // 65,535 entries
      patched(0, 0),              // no magic
      patched(2, 200),            // unknown type
      patched(40, 1),             // reserved
  };
  remote_grant none;
  attacks.push_back(write_frame(
      none, {{.offset = 0, .stride = 0, .length = 0xffff'ffffU, .count = 0xffff'ffffU, .index = 0}},
      100, 0));
  attacks.push_back(
      write_frame(none, {{.offset = 0, .stride = 0, .length = 10, .count = 1, .index = 0}}, 11, 0));
  std::uint64_t self = 1000;
  for (const auto& attack : attacks) {
    auto l = become_peer(incarnation{++self});
    send(l.fd, attack);
    EXPECT_TRUE(comes_true([&] { return l.sink->broken.load(); })) << "attack " << self - 1001;
    {
      const std::lock_guard lock{l.sink->mutex};
      EXPECT_EQ(l.sink->reason.code, errc::link_broken) << to_string(l.sink->reason);
    }
    l.wire->close();
  }
  if (!troupe::testing::sanitized) {
    EXPECT_LE(resident_bytes(), memory_before + (8U << 20U));
  }
}

TEST_F(hostile, a_truncated_frame_held_open_holds_up_nobody) {
  auto l = become_peer(incarnation{99});
  const auto base = region_size / 2;
  send(l.fd,
       write_frame(l.grant, {{.offset = base, .stride = 0, .length = 4096, .count = 1, .index = 0}},
                   4096, 100));
  const auto done = friend_sink_->completed.load();
  EXPECT_TRUE(comes_true([&] { return friend_sink_->completed > done + 20; }));
  // The fence does not wait for the rest of the frame, and the rest does not land.
  EXPECT_EQ(l.wire->fence(transfer_id{9}), fence_state::quiescent);
  std::memset(victim.memory.data() + base, 0x31, 4096);
  send(l.fd, std::vector<std::byte>(3996, std::byte{0x66}));
  std::array<std::byte, trailer_size> trailer{};
  encode_trailer(0, trailer.data());
  send(l.fd, trailer);
  EXPECT_EQ(status_from(l.fd), static_cast<std::uint8_t>(errc::grant_revoked));
  for (std::size_t i = 0; i < 4096; ++i) ASSERT_EQ(victim.memory[base + i], std::byte{0x31});
  l.wire->close();
}

TEST_F(hostile, what_the_target_cannot_name_whole_it_does_not_name_in_part) {
  auto l = become_peer(incarnation{99});
  const auto base = region_size / 2;
  const auto frame_of = [&](std::uint32_t index, std::uint32_t actually) {
    return write_frame(l.grant,
                       {{.offset = base, .stride = 0, .length = 64, .count = 1, .index = index}},
                       64, actually);
  };
  std::array<std::byte, trailer_size> trailer{};
  encode_trailer(0, trailer.data());
  // Refused as it begins: its table is at hand.
  const auto transfer = std::exchange(l.grant.transfer, transfer_id{10});
  send(l.fd, frame_of(5, 64));
  send(l.fd, trailer);
  EXPECT_EQ(word_from(l.fd).body.bad, std::vector{5U});
  l.grant.transfer = transfer;
  // The grant ends in the middle of the first of a batch's two frames: its table is no longer
  // there.
  auto first = frame_of(7, 10);
  first[3] = std::byte{0};  // not the last
  first[16] = std::byte{2};
  auto second = frame_of(8, 64);
  second[16] = std::byte{2};
  send(l.fd, first);
  const auto done = friend_sink_->completed.load();
  EXPECT_TRUE(comes_true([&] { return friend_sink_->completed > done + 20; }));
  EXPECT_EQ(l.wire->fence(transfer_id{9}), fence_state::quiescent);
  send(l.fd, std::vector<std::byte>(54, std::byte{0x66}));
  send(l.fd, trailer);
  send(l.fd, second);
  send(l.fd, trailer);
  const auto word = word_from(l.fd);
  EXPECT_EQ(word.status, static_cast<std::uint8_t>(errc::grant_revoked));
  EXPECT_EQ(word.body.bad, std::vector<std::uint32_t>{}) << "as if the first had arrived";
  l.wire->close();
}

TEST_F(hostile, random_frames_from_a_token_holder_never_touch_what_was_not_granted) {
  std::memset(victim.memory.data() + region_size / 2, 0x77, region_size / 2);
  std::mt19937_64 random{99};
  for (std::uint64_t round = 0; round < 100; ++round) {
    auto l = become_peer(incarnation{5000 + round});
    for (int i = 0; i < 20; ++i) {
      std::vector<std::byte> bytes(header_size + random() % 200);
      for (auto& b : bytes) b = static_cast<std::byte>(random());
      encode(frame_header{.type = static_cast<frame_type>(1 + random() % 9),
                          .flags = static_cast<std::uint8_t>(random() % 8),
                          .entries = static_cast<std::uint16_t>(random() % 3),
                          .parts = static_cast<std::uint8_t>(1 + random() % 3),
                          .data_size = static_cast<std::uint32_t>(random() % 64),
                          .session_size = static_cast<std::uint32_t>(random() % 64),
                          .batch = random() % 4,
                          .grant = random() % 2 == 0 ? l.grant.id : random(),
                          .transfer = 9},
             bytes.data());
      send(l.fd, bytes);
    }
    l.wire->close();
  }
  // The grant covers the first 4096 bytes of the half; everything else is unchanged.
  for (std::size_t i = region_size / 2 + 4096; i < region_size; ++i) {
    ASSERT_EQ(victim.memory[i], std::byte{0x77});
  }
}

TEST_F(hostile, a_peer_that_asks_for_more_reads_than_it_may_is_cut_off) {
  auto l = become_peer(incarnation{99});
  const auto readable =
      l.wire->grant(victim.region, {{0, region_size, 0, 1}}, access::read, transfer_id{10}).value();
  std::vector<std::byte> request(header_size + entry_size);
  encode(frame_header{.type = frame_type::read_request,
                      .flags = flag_last,
                      .entries = 1,
                      .batch = 1,
                      .grant = readable.id,
                      .transfer = 10},
         request.data());
  encode(wire_entry{.offset = 0, .stride = 0, .length = region_size, .count = 1, .index = 0},
         request.data() + header_size);
  for (int i = 0; i < 2000 && !l.sink->broken; ++i) send(l.fd, request);  // and reads nothing
  EXPECT_TRUE(comes_true([&] { return l.sink->broken.load(); }));
  l.wire->close();
}

TEST_F(hostile, a_peer_that_takes_no_acknowledgements_is_cut_off) {
  link_options impatient;
  impatient.max_queued_frame_bytes = 64u << 10;
  auto l = become_peer(incarnation{99}, impatient);
  std::vector<std::byte> writes;
  for (std::uint64_t id = 1; id <= 1000; ++id) {  // of nothing: each is answered with 48 bytes
    std::array<std::byte, header_size + trailer_size> one{};
    encode(frame_header{.type = frame_type::write, .flags = flag_last, .parts = 1, .batch = id},
           one.data());
    encode_trailer(0, one.data() + header_size);
    writes.insert(writes.end(), one.begin(), one.end());
  }
  // More than any socket's buffers hold. A victim that cuts the peer off stops reading, so a
  // blocking send would never end.
  std::size_t sent = 0;
  EXPECT_TRUE(comes_true([&] {
    const auto rest = std::span{writes}.subspan(sent);
    const auto taken = ::send(l.fd.get(), rest.data(), rest.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (taken > 0) sent = (sent + static_cast<std::size_t>(taken)) % writes.size();
    return l.sink->broken.load();
  }));
  l.wire->close();
}

TEST_F(hostile, a_part_that_is_acknowledged_twice_is_not_taken_for_the_whole_batch) {
  link_options two_lanes;
  two_lanes.lanes = 2;
  auto l = become_peer(incarnation{99}, two_lanes);
  const auto grant =
      std::make_shared<const remote_grant>(remote_grant{.id = 7,
                                                        .region = region_id{1},
                                                        .owner = incarnation{99},
                                                        .transfer = transfer_id{9},
                                                        .rights = access::write,
                                                        .region_size = region_size,
                                                        .permitted = {{0, region_size, 0, 1}},
                                                        .key = {}});
  batch work;
  work.id = batch_id{1};
  work.transfer = transfer_id{9};
  work.pieces.push_back({victim.region, grant, {{0, 0, region_size, 0, 0, 1}}});
  ASSERT_TRUE(l.wire->post(std::move(work)));
  std::array<std::byte, header_size> head{};
  ASSERT_EQ(::recv(l.fd.get(), head.data(), head.size(), MSG_WAITALL),
            static_cast<ssize_t>(header_size));
  const auto asked = decode_header(head).value();
  ASSERT_EQ(asked.parts, 2) << "the batch is not large enough for two lanes";
  encode(frame_header{.type = frame_type::completion, .flags = flag_last, .batch = asked.batch},
         head.data());
  send(l.fd, head);
  send(l.fd, head);
  ASSERT_TRUE(comes_true([&] { return l.sink->broken.load(); }));
  EXPECT_EQ(l.sink->completed, 1u);
  EXPECT_EQ(l.sink->failed, 1u) << "a batch is done of which nobody acknowledged the second half";
  l.wire->close();
}

TEST_F(hostile, batches_that_are_left_incomplete_are_bounded_in_number) {
  link_options two_lanes;
  two_lanes.lanes = 2;
  auto l = become_peer(incarnation{99}, two_lanes);
  // Reads the victim's answers, so that unread answers do not end the link.
  std::thread reads{[&] {
    std::array<char, 65'536> bytes{};
    while (::recv(l.fd.get(), bytes.data(), bytes.size(), 0) > 0) {
    }
  }};
  std::vector<std::byte> half(header_size + trailer_size);
  encode_trailer(0, half.data() + header_size);
  // Sends one half each of ever more batches: 65,536 are too many.
  for (std::uint64_t id = 1; id <= 70'000 && !l.sink->broken; ++id) {
    encode(frame_header{.type = frame_type::write, .flags = flag_last, .parts = 2, .batch = id},
           half.data());
    send(l.fd, half);
  }
  EXPECT_TRUE(comes_true([&] { return l.sink->broken.load(); }));
  l.wire->close();
  reads.join();
}

}  // namespace troupe::transport::tcp
