#pragma once

#include <string>
#include <string_view>

namespace troupe::deploy::cli {

/// What `ps -e`, `top` and `pgrep troupe` show of the process of a node: "troupe:" and its name. The
/// kernel keeps 15 characters, so the word in front is cut and the numbers stay: "troupe:prefil-0",
/// "troupe:de-0-tp3".
[[nodiscard]] std::string process_name(std::string_view node);

}  // namespace troupe::deploy::cli
