#include "troupe/deploy/work_folder.hpp"

#include <filesystem>
#include <fstream>
#include <new>
#include <string>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "scratch_folder.hpp"

namespace troupe::deploy {
namespace {

namespace fs = std::filesystem;

/// The work folder of a process that was killed without a cleanup.
std::string abandoned(const std::string& base) {
  int ends[2];
  if (::pipe(ends) != 0) return {};
  const auto child = ::fork();
  if (child == 0) {
    auto folder = work_folder::make(base);
    const auto path = folder ? folder->file("") : std::string{};
    if (folder) std::ofstream{folder->file("prefill-0.log")} << "a line\n";
    const auto written = ::write(ends[1], path.data(), path.size());
    ::_exit(written > 0 ? 0 : 1);
  }
  ::close(ends[1]);
  std::string path(4096, '\0');
  const auto count = ::read(ends[0], path.data(), path.size());
  ::close(ends[0]);
  ::waitpid(child, nullptr, 0);
  path.resize(count > 0 ? static_cast<std::size_t>(count) : 0);
  return path;
}

TEST(work_folder, of_a_run_that_was_killed_is_removed_by_the_next) {
  const testing::scratch_folder base;
  const auto first = work_folder::make(base.path());
  ASSERT_TRUE(first);
  const auto left = abandoned(base.path());
  ASSERT_TRUE(fs::exists(left)) << left;
  EXPECT_TRUE(fs::exists(first->file(""))) << "that one is in use";
  auto next = work_folder::make(base.path());
  ASSERT_TRUE(next);
  EXPECT_FALSE(fs::exists(left));
  EXPECT_TRUE(fs::exists(first->file("")));
  EXPECT_TRUE(fs::exists(next->file("")));
  EXPECT_TRUE(next->remove());
  EXPECT_FALSE(fs::exists(next->file("")));
}

TEST(work_folder, of_a_run_that_an_exception_ends_is_removed) {
  const testing::scratch_folder base;
  try {
    const auto folder = work_folder::make(base.path());
    ASSERT_TRUE(folder);
    std::ofstream{folder->file("supervisor.log")} << "a line\n";
    throw std::bad_alloc{};
  } catch (const std::bad_alloc&) {
    EXPECT_TRUE(fs::is_empty(base.path()));
  }
}

TEST(work_folder, that_cannot_be_removed_is_named) {
  const testing::scratch_folder base;
  auto folder = work_folder::make(base.path());
  ASSERT_TRUE(folder);
  fs::create_directory(folder->file("not-a-file"));
  const auto removed = folder->remove();
  ASSERT_FALSE(removed);
  EXPECT_NE(removed.error().message.find(folder->file("").substr(0, folder->file("").size() - 1)),
            std::string::npos)
      << removed.error().message;
}

TEST(work_folder, that_is_kept_for_its_logs_stays) {
  const testing::scratch_folder base;
  std::string kept;
  {
    auto folder = work_folder::make(base.path());
    ASSERT_TRUE(folder);
    std::ofstream{folder->file("decode-0.log")} << "why it failed\n";
    folder->keep();
    kept = folder->file("decode-0.log");
  }
  ASSERT_TRUE(fs::exists(kept)) << kept;
  ASSERT_TRUE(work_folder::make(base.path()));
  EXPECT_TRUE(fs::exists(kept));
}

TEST(work_folder, removes_nothing_that_no_run_has_written) {
  const testing::scratch_folder base;
  const testing::scratch_folder elsewhere;
  std::ofstream{elsewhere.path() + "/work.log"} << "mine\n";
  const auto put = [&](const std::string& name) {
    fs::create_directory(base.path() + "/" + name);
    std::ofstream{base.path() + "/" + name + "/notes.txt"} << "mine\n";
  };
  put("troupe-demo-abcdef");
  put("troupe-demo-longer");
  put("troupe-demo-of-somebody");
  fs::create_directory_symlink(elsewhere.path(), base.path() + "/troupe-demo-linked");
  fs::create_directories(base.path() + "/troupe-demo-nested/troupe-demo-inside");
  std::ofstream{base.path() + "/troupe-demo-a-file"} << "mine\n";
  ASSERT_TRUE(work_folder::make(base.path()));
  for (const auto* name : {"troupe-demo-abcdef/notes.txt", "troupe-demo-longer/notes.txt",
                           "troupe-demo-of-somebody/notes.txt", "troupe-demo-linked/work.log",
                           "troupe-demo-nested/troupe-demo-inside", "troupe-demo-a-file"})
    EXPECT_TRUE(fs::exists(base.path() + "/" + name)) << name;
}

TEST(work_folder, that_cannot_be_made_says_where) {
  const auto made = work_folder::make("/nowhere/at/all");
  ASSERT_FALSE(made);
  EXPECT_NE(made.error().message.find("/nowhere/at/all"), std::string::npos);
  EXPECT_NE(made.error().message.find("TMPDIR"), std::string::npos);
}

}  // namespace
}  // namespace troupe::deploy
