#pragma once

#include <string>
#include <string_view>

#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// The text of a file of the section `security`, at most 256 KiB. `what`: its key there, for the
/// sentence. `invalid_config` naming the file: missing, unreadable, no plain file, too large.
[[nodiscard]] result<std::string> read_public_file(std::string_view what, const std::string& path);
/// As that, and refused when others than its owner may read or write it.
[[nodiscard]] result<std::string> read_private_file(std::string_view what, const std::string& path);
/// `invalid_config`: "security.WHAT: PATH: SENTENCE"
[[nodiscard]] unexpected bad_file(std::string_view what, const std::string& path,
                                  const std::string& sentence);

/// Writes all of the text into an empty file, which from then on only its owner can read, and onto the
/// disk. Returns 0, or the errno of what failed.
[[nodiscard]] int write_private(int fd, std::string_view text);
/// Makes the names in a folder outlast a machine that stops, where its file system can do that. Returns
/// 0, or the errno of what failed.
[[nodiscard]] int flush_folder(const std::string& path);
/// A line for a file of secrets: 256 random bits in hexadecimal.
[[nodiscard]] std::string fresh_secret();

}  // namespace troupe::actors
