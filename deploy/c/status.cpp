#include "troupe/deploy/c/status.hpp"

#include <cstdlib>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/deploy/c/arguments.hpp"

namespace troupe::c {

namespace {

thread_local std::string
    last_sentence;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)
thread_local const char* shown_sentence =
    "";  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)

}  // namespace

troupe_status refuse(troupe_status code, std::string_view sentence) noexcept {
  try {
    last_sentence = sentence;
    shown_sentence = last_sentence.c_str();
  } catch (...) {
    shown_sentence = "there is no memory left for the sentence";
  }
  return code;
}

troupe_status refuse(const error& why) noexcept {
  return refuse(code_of(why.code), why.message);
}

unexpected bad_argument(std::string sentence) {
  return fail(errc::invalid_config, std::move(sentence));
}

}  // namespace troupe::c

using namespace troupe;

const char* troupe_last_error(void) {
  return c::shown_sentence;
}

const char* troupe_status_name(troupe_status status) {
  if (status == TROUPE_OK) return "ok";
  if (status == TROUPE_TIMED_OUT) return "timed_out";
  if (status < 0 || status > 255 || !is_errc(static_cast<std::uint8_t>(status))) return "unknown";
  return to_string(static_cast<errc>(status)).data();  // literals, so NUL-terminated
}

const char* troupe_version(void) {
  return TROUPE_VERSION;
}

uint32_t troupe_protocol_version(void) {
  return actors::protocol_version;
}

void troupe_free(void* memory) {
  std::free(memory);
}

troupe_status troupe_log(const troupe_log_options* options) {
  return c::guarded([&]() -> result<void> {
    const auto given = c::read(options, "options");
    if (!given) return fail(given.error());
    if (given->reserved != 0) return c::bad_argument("`options.reserved` is not 0");
    actors::log_options log;
    if (given->level) log.level = given->level;
    if (given->node) log.node = given->node;
    if (given->file) log.file = given->file;
    return actors::init_logging(log);
  });
}
