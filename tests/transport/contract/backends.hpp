#pragma once

#include <cstdint>
#include <string>

#include <gtest/gtest.h>

#include "troupe/transport/types.hpp"

namespace troupe::transport::contract {

/// One way to run the suite.
struct variant {
  backend_kind kind;
  std::uint32_t lanes;
  std::uint32_t workers;  ///< 0: the test polls
};

inline std::string name_of(const ::testing::TestParamInfo<variant>& info) {
  return std::string{to_string(info.param.kind)} + "_lanes" + std::to_string(info.param.lanes) +
         (info.param.workers == 0 ? "_polled" : "_workers" + std::to_string(info.param.workers));
}

inline const auto all_variants =
    ::testing::Values(variant{backend_kind::tcp, 1, 1}, variant{backend_kind::tcp, 1, 0},
                      variant{backend_kind::tcp, 4, 2}, variant{backend_kind::tcp, 8, 1},
                      variant{backend_kind::shm, 1, 1}, variant{backend_kind::shm, 1, 0});

}  // namespace troupe::transport::contract
