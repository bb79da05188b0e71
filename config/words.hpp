#pragma once

#include <array>
#include <cstddef>
#include <string_view>
#include <utility>

#include "troupe/config/deployment.hpp"

/// The words of the file for each enum, in one place for parser, printer and messages.
namespace troupe::config {

template <typename Enum, std::size_t Size>
using word_list = std::array<std::pair<Enum, std::string_view>, Size>;

template <typename Enum>
struct enum_without_words;
template <typename Enum>
inline constexpr enum_without_words<Enum> words{};

// Without `supervisor`, which no stage can have; `to_string` handles it.
template <>
inline constexpr word_list<role, 4> words<role>{{{role::prefill, "prefill"},
                                                 {role::decode, "decode"},
                                                 {role::store, "store"},
                                                 {role::both, "both"}}};
template <>
inline constexpr word_list<placement_policy, 3> words<placement_policy>{
    {{placement_policy::random, "random"},
     {placement_policy::round_robin, "round-robin"},
     {placement_policy::least_queue_length, "least-queue-length"}}};
template <>
inline constexpr word_list<pool_full, 2> words<pool_full>{
    {{pool_full::wait, "wait"}, {pool_full::fail, "fail"}}};
// Without `none`: a store leaves the key out.
template <>
inline constexpr word_list<engine_kind, 2> words<engine_kind>{
    {{engine_kind::reference, "reference"}, {engine_kind::external, "external"}}};
template <>
inline constexpr word_list<backend_kind, 5> words<backend_kind>{{{backend_kind::automatic, "auto"},
                                                                 {backend_kind::shm, "shm"},
                                                                 {backend_kind::tcp, "tcp"},
                                                                 {backend_kind::rdma, "rdma"},
                                                                 {backend_kind::xgmi, "xgmi"}}};
template <>
inline constexpr word_list<transfer_mode, 2> words<transfer_mode>{
    {{transfer_mode::write, troupe::to_string(transfer_mode::write)},
     {transfer_mode::read, troupe::to_string(transfer_mode::read)}}};
template <>
inline constexpr word_list<restart_policy, 2> words<restart_policy>{
    {{restart_policy::never, "never"}, {restart_policy::on_failure, "on-failure"}}};
template <>
inline constexpr word_list<feature_use, 2> words<feature_use>{
    {{feature_use::automatic, "auto"}, {feature_use::off, "off"}}};
template <>
inline constexpr word_list<security_mode, 3> words<security_mode>{
    {{security_mode::none, "none"},
     {security_mode::secret, "secret"},
     {security_mode::tls, "tls"}}};
template <>
inline constexpr word_list<block_order, 3> words<block_order>{
    {{block_order::layers_first, "layers_first"},
     {block_order::blocks_first, "blocks_first"},
     {block_order::block_interleaved, "block_interleaved"}}};
template <>
inline constexpr word_list<kv_placement, 2> words<kv_placement>{
    {{kv_placement::together, "together"}, {kv_placement::separate, "separate"}}};
template <>
inline constexpr word_list<block_inner, 2> words<block_inner>{
    {{block_inner::token_major, "token_major"}, {block_inner::head_major, "head_major"}}};

struct dtype_word {
  std::string_view name;
  std::uint32_t size;  ///< bytes of one element
};
inline constexpr std::array<dtype_word, 5> dtypes{
    {{"fp32", 4}, {"fp16", 2}, {"bf16", 2}, {"fp8", 1}, {"int8", 1}}};

}  // namespace troupe::config
