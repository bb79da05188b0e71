#include "troupe/transport/tcp/frame_decoder.hpp"

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace troupe::transport::tcp {

namespace {

std::vector<std::byte> bytes_of(std::size_t size, unsigned seed) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(seed + i * 7);
  return bytes;
}

void append(std::vector<std::byte>& to, std::span<const std::byte> bytes) {
  const auto before = to.size();
  to.resize(before + bytes.size());
  if (!bytes.empty()) std::memcpy(to.data() + before, bytes.data(), bytes.size());
}

std::vector<std::byte> write_frame(std::vector<std::uint32_t> lengths, std::size_t session,
                                   unsigned seed) {
  std::uint32_t data = 0;
  for (const auto length : lengths) data += length;
  std::vector<std::byte> out(header_size + lengths.size() * entry_size);
  encode(frame_header{.type = frame_type::write,
                      .flags = flag_last,
                      .entries = static_cast<std::uint16_t>(lengths.size()),
                      .parts = 1,
                      .status = 0,
                      .data_size = data,
                      .session_size = static_cast<std::uint32_t>(session),
                      .batch = seed},
         out.data());
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    encode(wire_entry{.offset = i, .stride = 0, .length = lengths[i], .count = 1, .index = 0},
           out.data() + header_size + i * entry_size);
  }
  append(out, bytes_of(session, seed));
  append(out, bytes_of(data, seed + 1));
  std::array<std::byte, trailer_size> trailer{};
  encode_trailer(0, trailer.data());
  append(out, trailer);
  return out;
}

// The decoded frames of a stream, one string per frame.
struct heard {
  std::vector<std::string> frames;
  bool malformed{false};
};

// Feeds the decoder as a receiver does. Now and then takes data past the decoder, like a receiver
// that reads in place.
heard listen(std::span<const std::byte> stream, std::mt19937& random, std::size_t largest) {
  heard out;
  frame_decoder decoder;
  std::vector<std::byte> buffer;
  std::string frame;
  std::size_t at = 0;
  while (at < stream.size()) {
    if (decoder.data_left() > 0 && buffer.empty() && random() % 2 == 0) {
      const auto step = std::min({decoder.data_left(), stream.size() - at, 1 + random() % largest});
      frame.append(reinterpret_cast<const char*>(stream.data() + at), step);
      decoder.took_data(step);
      at += step;
    } else {
      const auto step = std::min<std::size_t>(stream.size() - at, 1 + random() % largest);
      append(buffer, stream.subspan(at, step));
      at += step;
    }
    while (true) {
      std::span<const std::byte> in{buffer};
      const auto event = decoder.next(in);
      if (event.what == frame_decoder::kind::session || event.what == frame_decoder::kind::data) {
        frame.append(reinterpret_cast<const char*>(event.bytes.data()), event.bytes.size());
      }
      if (event.what == frame_decoder::kind::begin) {
        frame = "batch " + std::to_string(decoder.header().batch) + " table " +
                std::to_string(event.bytes.size()) + " ";
      }
      if (event.what == frame_decoder::kind::end) out.frames.push_back(frame);
      buffer = std::vector<std::byte>(in.begin(), in.end());
      if (event.what == frame_decoder::kind::malformed) {
        out.malformed = true;
        return out;
      }
      if (event.what == frame_decoder::kind::need_more) break;
      if (decoder.data_left() > 0 && buffer.empty()) break;
    }
  }
  return out;
}

TEST(frame_decoder_test, a_stream_means_the_same_however_it_is_cut) {
  std::vector<std::byte> stream;
  append(stream, write_frame({100, 1, 3000}, 40, 1));
  append(stream, write_frame({}, 0, 2));
  append(stream, write_frame({}, 5000, 3));
  std::array<std::byte, header_size> cancel{};
  encode(frame_header{.type = frame_type::cancel, .batch = 4}, cancel.data());
  append(stream, cancel);
  append(stream, write_frame(std::vector<std::uint32_t>(max_entries, 64), 0, 5));
  std::mt19937 random{1};
  const auto whole = listen(stream, random, stream.size());
  ASSERT_EQ(whole.frames.size(), 5U);
  EXPECT_FALSE(whole.malformed);
  for (int round = 0; round < 500; ++round) {
    const auto cut = listen(stream, random, 1 + random() % 700);
    ASSERT_EQ(cut.frames, whole.frames) << "round " << round;
  }
  EXPECT_EQ(listen(stream, random, 1).frames, whole.frames);
}

TEST(frame_decoder_test, a_table_that_contradicts_its_header_is_malformed) {
  for (const std::uint32_t claimed : {0U, 99U, 101U}) {
    auto frame = write_frame({100}, 0, 1);
    frame_header header{.type = frame_type::write,
                        .flags = 0,
                        .entries = 1,
                        .parts = 1,
                        .status = 0,
                        .data_size = claimed};
    encode(header, frame.data());
    std::mt19937 random{1};
    EXPECT_TRUE(listen(frame, random, 5000).malformed) << claimed;
  }
}

TEST(frame_decoder_test, sizes_that_would_wrap_are_malformed) {
  auto frame = write_frame({1, 1}, 0, 1);
  for (std::size_t i = 0; i < 2; ++i) {
    encode(
        wire_entry{
            .offset = 0, .stride = 0, .length = 0xffff'ffff, .count = 0xffff'ffff, .index = 0},
        frame.data() + header_size + i * entry_size);
  }
  std::mt19937 random{1};
  EXPECT_TRUE(listen(frame, random, 5000).malformed);
}

TEST(frame_decoder_test, once_malformed_it_stays_so) {
  frame_decoder decoder;
  const std::vector<std::byte> garbage(200, std::byte{0xff});
  std::span<const std::byte> in{garbage};
  EXPECT_EQ(decoder.next(in).what, frame_decoder::kind::malformed);
  const auto good = write_frame({10}, 0, 1);
  in = good;
  EXPECT_EQ(decoder.next(in).what, frame_decoder::kind::malformed);
  EXPECT_FALSE(decoder.reason().empty());
}

TEST(frame_decoder_test, a_head_that_needs_the_whole_buffer_fits_into_it) {
  const auto frame = write_frame(std::vector<std::uint32_t>(max_entries, 1), 0, 1);
  frame_decoder decoder;
  std::span<const std::byte> in = std::span{frame}.first(max_head - 1);
  EXPECT_EQ(decoder.next(in).what, frame_decoder::kind::need_more);
  EXPECT_EQ(in.size(), max_head - 1);
  in = std::span{frame}.first(max_head);
  EXPECT_EQ(decoder.next(in).what, frame_decoder::kind::begin);
}

}  // namespace

}  // namespace troupe::transport::tcp
