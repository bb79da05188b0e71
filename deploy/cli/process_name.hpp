#pragma once

#include <string>
#include <string_view>

namespace troupe::deploy::cli {

/// The name of a node's process in `ps -e`, `top` and `pgrep troupe`: "troupe:" and the node's
/// name. The kernel keeps 15 characters, so the leading word is cut and the numbers stay:
/// "troupe:prefil-0", "troupe:de-0-tp3".
[[nodiscard]] std::string process_name(std::string_view node);

}  // namespace troupe::deploy::cli
