#pragma once

#include <array>
#include <string_view>
#include <utility>

#include "troupe/config/deployment.hpp"

/// The words of the file for each enum, in one place for parser, printer and messages.
namespace troupe::config {

template <typename Enum>
struct words;

template <>
struct words<role> {  // without `supervisor`, which no stage can have; `to_string` handles it
  static constexpr std::array<std::pair<role, std::string_view>, 4> all{{{role::prefill, "prefill"},
                                                                         {role::decode, "decode"},
                                                                         {role::store, "store"},
                                                                         {role::both, "both"}}};
};
template <>
struct words<placement_policy> {
  static constexpr std::array<std::pair<placement_policy, std::string_view>, 3> all{
      {{placement_policy::random, "random"},
       {placement_policy::round_robin, "round-robin"},
       {placement_policy::least_queue_length, "least-queue-length"}}};
};
template <>
struct words<pool_full> {
  static constexpr std::array<std::pair<pool_full, std::string_view>, 2> all{
      {{pool_full::wait, "wait"}, {pool_full::fail, "fail"}}};
};
template <>
struct words<engine_kind> {  // without `none`: a store leaves the key out
  static constexpr std::array<std::pair<engine_kind, std::string_view>, 2> all{
      {{engine_kind::reference, "reference"}, {engine_kind::external, "external"}}};
};
template <>
struct words<backend_kind> {
  static constexpr std::array<std::pair<backend_kind, std::string_view>, 5> all{
      {{backend_kind::automatic, "auto"},
       {backend_kind::shm, "shm"},
       {backend_kind::tcp, "tcp"},
       {backend_kind::rdma, "rdma"},
       {backend_kind::xgmi, "xgmi"}}};
};
template <>
struct words<transfer_mode> {
  static constexpr std::array<std::pair<transfer_mode, std::string_view>, 2> all{
      {{transfer_mode::write, troupe::to_string(transfer_mode::write)},
       {transfer_mode::read, troupe::to_string(transfer_mode::read)}}};
};
template <>
struct words<restart_policy> {
  static constexpr std::array<std::pair<restart_policy, std::string_view>, 2> all{
      {{restart_policy::never, "never"}, {restart_policy::on_failure, "on-failure"}}};
};
template <>
struct words<feature_use> {
  static constexpr std::array<std::pair<feature_use, std::string_view>, 2> all{
      {{feature_use::automatic, "auto"}, {feature_use::off, "off"}}};
};
template <>
struct words<security_mode> {
  static constexpr std::array<std::pair<security_mode, std::string_view>, 3> all{
      {{security_mode::none, "none"},
       {security_mode::secret, "secret"},
       {security_mode::tls, "tls"}}};
};
template <>
struct words<block_order> {
  static constexpr std::array<std::pair<block_order, std::string_view>, 3> all{
      {{block_order::layers_first, "layers_first"},
       {block_order::blocks_first, "blocks_first"},
       {block_order::block_interleaved, "block_interleaved"}}};
};
template <>
struct words<kv_placement> {
  static constexpr std::array<std::pair<kv_placement, std::string_view>, 2> all{
      {{kv_placement::together, "together"}, {kv_placement::separate, "separate"}}};
};
template <>
struct words<block_inner> {
  static constexpr std::array<std::pair<block_inner, std::string_view>, 2> all{
      {{block_inner::token_major, "token_major"}, {block_inner::head_major, "head_major"}}};
};

struct dtype_word {
  std::string_view name;
  std::uint32_t size;  ///< bytes of one element
};
inline constexpr std::array<dtype_word, 5> dtypes{
    {{"fp32", 4}, {"fp16", 2}, {"bf16", 2}, {"fp8", 1}, {"int8", 1}}};

}  // namespace troupe::config
