#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/troupe.h"

#include "command.hpp"
#include "refused.hpp"

/// Helpers shared by the tests of the C ABI.
namespace troupe::testing {

inline constexpr std::uint32_t tokens = 10;
inline constexpr std::uint32_t sent_blocks[] = {5, 0, 2};
inline constexpr std::uint32_t received_blocks[] = {1, 7, 3};

/// A deployment with a prefill and a decode stage, whose engines are the user's own.
[[nodiscard]] std::string deployment_text(std::uint16_t supervisor_port);
/// A deployment with a single stage, open to engines that no file names.
[[nodiscard]] std::string open_deployment_text(std::uint16_t supervisor_port);

/// A supervisor that listens as long as this object lives.
class own_supervisor {
 public:
  explicit own_supervisor(const std::string& deployment = deployment_text(0));
  /// 0 if it did not start.
  [[nodiscard]] std::uint16_t port() const { return port_; }

 private:
  deployment_on_disk file_;
  command up_;
  std::uint16_t port_{0};
};

struct free_layout {
  void operator()(troupe_layout* layout) const { troupe_layout_free(layout); }
};
using layout_handle = std::unique_ptr<troupe_layout, free_layout>;
/// 8 blocks of 4 tokens.
[[nodiscard]] troupe_cache_geometry geometry_of(const char* dtype);
/// Two layers of two heads of 8 elements, 4 tokens a block, 8 blocks: one region.
[[nodiscard]] layout_handle small_layout();

/// `text` must outlive them.
[[nodiscard]] troupe_cluster_options cluster_options_of(const std::string& text);
/// A send of `sent_blocks`.
[[nodiscard]] troupe_send_spec send_of(const char* request);
/// A receive of all tokens from one node into `received_blocks`. `source` must outlive it.
[[nodiscard]] troupe_receive_spec receive_of(const char* request, const char* const* source);

/// An engine with a small cache of its own.
class own_engine {
 public:
  own_engine(std::uint16_t supervisor_port, const std::string& name, std::uint32_t flags = 0);
  /// Joins the open stage.
  own_engine(std::uint16_t supervisor_port, const troupe_announcement& join,
             std::uint32_t flags = 0);
  ~own_engine();
  own_engine(const own_engine&) = delete;
  own_engine& operator=(const own_engine&) = delete;

  [[nodiscard]] troupe_engine* get() const { return engine_; }
  std::vector<unsigned char> memory;

 private:
  /// Adds the cache and the deployment to `options`, and starts.
  void start(const std::string& deployment, troupe_engine_options options);

  troupe_engine* engine_{nullptr};
};

/// Expects each head of each received token to equal the sent one.
void expect_same_cache(const own_engine& sent, const own_engine& received);

}  // namespace troupe::testing
