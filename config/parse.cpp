#include "troupe/config/parse.hpp"

#include <cerrno>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>
#include <utility>

#include "troupe/config/checks.hpp"
#include "troupe/config/printable.hpp"
#include "troupe/config/reader.hpp"
#include "troupe/config/sections.hpp"
#include "troupe/config/syntax.hpp"

namespace troupe::config {
namespace {

parse_outcome unreadable(const std::string& path, std::string why) {
  issue what;
  what.file = path;
  what.message = std::move(why);
  return {std::nullopt, {std::move(what)}};
}

/// Returns an exception of `read` (out of memory) as an issue.
template <class Read>
parse_outcome or_issue(const std::string& path, const Read& read) {
  try {
    return read();
  } catch (const std::exception& why) {
    return unreadable(path, std::string{"cannot be read: "} + why.what());
  }
}

parse_outcome parse_text(std::string_view text, std::string file_name) {
  auto tree = read_yaml(text, file_name);
  if (!tree.root) return {std::nullopt, {*std::move(tree.wrong)}};
  findings into{std::move(file_name)};
  deployment value = read_deployment(into, *tree.root);
  check_deployment(into, value);
  auto issues = into.take();
  if (!issues.empty()) return {std::nullopt, std::move(issues)};
  return {std::move(value), {}};
}

parse_outcome load_file(const std::string& path) {
  std::error_code unknown;
  if (std::filesystem::is_fifo(path, unknown)) {
    return unreadable(path,
                      "is a pipe, which can be read once; every node reads the file again, "
                      "so save it as one");
  }
  errno = 0;
  std::ifstream file{path, std::ios::binary};
  if (!file) return unreadable(path, "cannot be read: " + std::string{std::strerror(errno)});
  // Reads one byte more than accepted, to tell a file that is too large from one that just fits.
  std::string text(max_file_bytes + 1, '\0');
  errno = 0;
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad() || (errno != 0 && file.gcount() == 0)) {
    return unreadable(path, "cannot be read: " + std::string{std::strerror(errno)});
  }
  text.resize(static_cast<std::size_t>(file.gcount()));
  return parse_text(text, path);
}

}  // namespace

std::string to_string(const issue& what) {
  std::string text = what.file;
  if (what.line > 0) text.append(":").append(std::to_string(what.line));
  text += ": ";
  if (!what.key.empty()) text.append("key `").append(what.key).append("`: ");
  std::string said;
  if (!what.found.empty()) said.append("found ").append(what.found);
  if (!what.expected.empty()) {
    said.append(said.empty() ? "expected " : ", expected ").append(what.expected);
  }
  if (!what.message.empty()) said.append(said.empty() ? "" : "; ").append(what.message);
  return printable(text + said);
}

std::string to_string(const std::vector<issue>& issues) {
  std::string text;
  for (const auto& what : issues) text += to_string(what) + "\n";
  return text;
}

parse_outcome parse(std::string_view text, std::string file_name) {
  return or_issue(file_name, [&] { return parse_text(text, file_name); });
}

parse_outcome load(const std::string& path) {
  return or_issue(path, [&] { return load_file(path); });
}

}  // namespace troupe::config
