// Log lines name levels in the same way as options.

#include "troupe/actors/logging.hpp"

#include <filesystem>

#include <gmock/gmock.h>
#include <spdlog/spdlog.h>

#include "scratch_folder.hpp"
#include "text_of.hpp"

namespace troupe::actors {
namespace {

using ::testing::MatchesRegex;

class log_lines : public ::testing::Test {
 protected:
  troupe::testing::scratch_folder scratch{"log"};
  const std::filesystem::path folder{scratch.path()};

  void TearDown() override {
    ASSERT_TRUE(init_logging({}));  // closes the file
  }
  /// The lines that a log at that level keeps, from one message of each level.
  std::string of(const std::string& level) {
    const auto file = folder / (level + ".log");
    log_options options;
    options.level = level;
    options.node = "node%1";
    options.file = file.string();
    EXPECT_TRUE(init_logging(options));
    const auto log = logger("link");
    log->trace("a");
    log->debug("b");
    log->info("c");
    log->warn("d");
    log->error("e");
    log->flush();
    return troupe::testing::text_of(file);
  }
};

TEST_F(log_lines, name_each_level_as_options_do_and_stand_in_columns) {
  const std::string time = "[0-9]+-[0-9]+-[0-9]+T[0-9:.]+ ";
  EXPECT_THAT(of("trace"), MatchesRegex(time + "trace node%1 link: a\n" +  //
                                        time + "debug node%1 link: b\n" +  //
                                        time + "info  node%1 link: c\n" +  //
                                        time + "warn  node%1 link: d\n" +  //
                                        time + "error node%1 link: e\n"));
  EXPECT_THAT(of("warn"), MatchesRegex(time + "warn  node%1 link: d\n" + time + "error .*\n"));
}

}  // namespace
}  // namespace troupe::actors
