#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>
#include <unistd.h>

#include "troupe/transport/rdma/device.hpp"

// What a port's driver counts, and which of these counters are reported.
namespace troupe::transport::rdma {

namespace {

/// A folder like the kernel's sysfs.
class sysfs {
 public:
  sysfs() {
    std::filesystem::create_directories(folder_ / "rxe0/ports/1/hw_counters");
    std::filesystem::create_directories(folder_ / "rxe0/ports/1/counters");
  }
  ~sysfs() { std::filesystem::remove_all(folder_); }
  void counts(const std::string& name, const std::string& text,
              const std::string& kind = "hw_counters") const {
    std::ofstream{folder_ / "rxe0/ports/1" / kind / name} << text << "\n";
  }
  [[nodiscard]] const std::filesystem::path& folder() const noexcept { return folder_; }

 private:
  const std::filesystem::path folder_{std::filesystem::path{::testing::TempDir()} /
                                      ("troupe-sysfs-" + std::to_string(::getpid()))};
};

}  // namespace

TEST(device_counters, what_was_sent_again_or_refused_is_told_and_traffic_is_not) {
  const sysfs here;
  here.counts("sent_pkts", "12345");
  here.counts("completer_retry_err", "7");
  here.counts("retry_exceeded_err", "0");
  here.counts("out_of_seq_request", "2");
  here.counts("lifespan", "10");
  here.counts("rcvd_rnr_err", "none of your business");
  const auto found = trouble_of_port("rxe0", 1, here.folder());
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].name, "completer_retry_err");
  EXPECT_EQ(found[0].value, 7u);
  EXPECT_EQ(found[1].name, "out_of_seq_request");
  EXPECT_EQ(found[1].value, 2u);
}

TEST(device_counters, what_infiniband_asks_every_port_to_count_is_told_as_well) {
  const sysfs here;
  here.counts("link_downed", "3", "counters");
  here.counts("port_rcv_data", "99", "counters");
  here.counts("symbol_error", "0", "counters");
  const auto found = trouble_of_port("rxe0", 1, here.folder());
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].name, "link_downed");
  EXPECT_EQ(found[0].value, 3u);
}

TEST(device_counters, a_driver_that_counts_nothing_is_no_error) {
  const sysfs here;
  EXPECT_TRUE(trouble_of_port("rxe0", 2, here.folder()).empty());
  EXPECT_TRUE(trouble_of_port("nobody", 1, here.folder()).empty());
}

TEST(device_counters, what_makes_a_port_send_again_is_added_up_and_what_it_refuses_is_not) {
  const sysfs here;
  // Soft-RoCE. Each sequence error is followed by a retry, which is counted as a retry.
  here.counts("completer_retry_err", "7");
  here.counts("rcvd_rnr_err", "2");
  here.counts("rcvd_seq_err", "5");
  here.counts("duplicate_request", "11");
  here.counts("retry_exceeded_err", "1");
  EXPECT_EQ(retries_of_port("rxe0", 1, here.folder()), 9U);
}

TEST(device_counters, each_driver_has_its_own_names_for_it) {
  for (const auto* name : {"completer_retry_err", "local_ack_timeout_err", "rnr_nak_retry_err",
                           "to_retransmits", "seq_err_naks_rcvd", "tx_rdma_ack_timeout"}) {
    const sysfs here;
    here.counts(name, "3");
    EXPECT_EQ(retries_of_port("rxe0", 1, here.folder()), 3U) << name;
  }
}

TEST(device_counters, no_retry_is_another_answer_than_none_counted) {
  const sysfs here;
  here.counts("sent_pkts", "12345");
  EXPECT_EQ(retries_of_port("rxe0", 1, here.folder()), std::nullopt);
  EXPECT_EQ(retries_of_port("nobody", 1, here.folder()), std::nullopt);
  here.counts("completer_retry_err", "0");
  EXPECT_EQ(retries_of_port("rxe0", 1, here.folder()), 0U);
}

TEST(device_counters, what_came_since_a_link_was_opened_survives_a_driver_that_is_loaded_anew) {
  EXPECT_EQ(counted_since(7, 9), 2U);
  EXPECT_EQ(counted_since(7, 3), 3U);
  EXPECT_EQ(counted_since(7, std::nullopt), std::nullopt);
  EXPECT_EQ(counted_since(std::nullopt, 3), std::nullopt);
}

TEST(device_counters, the_line_of_a_device_ends_with_them) {
  device_view view;
  view.name = "rxe0";
  port_view port;
  port.number = 1;
  port.attributes.active_mtu = IBV_MTU_4096;
  port.trouble = {{"completer_retry_err", 7}};
  view.ports.push_back(port);
  EXPECT_TRUE(describe(view).ends_with("MTU 4096, completer_retry_err 7")) << describe(view);
}

}  // namespace troupe::transport::rdma
