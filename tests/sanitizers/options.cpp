// What the sanitizers do and what they ignore, linked into every executable of a sanitizer build,
// so that a program started by hand or by another program behaves as it does under ctest. The names
// are the sanitizers' own. NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming)

extern "C" {
const char* __asan_default_options();
const char* __lsan_default_options();
const char* __lsan_default_suppressions();
const char* __tsan_default_options();
const char* __tsan_default_suppressions();
const char* __ubsan_default_options();
const char* __ubsan_default_suppressions();
}

const char* __asan_default_options() {
  return "detect_stack_use_after_return=1:strict_string_checks=1:detect_leaks=1";
}

const char* __lsan_default_options() {
  return "print_suppressions=0";
}

// Nothing leaks. A line here needs a comment that says why it may.
const char* __lsan_default_suppressions() {
  return "";
}

const char* __tsan_default_options() {
  return "halt_on_error=1:second_deadlock_stack=1";
}

// Nothing races. A line here needs a comment that says why it may.
const char* __tsan_default_suppressions() {
  return "";
}

const char* __ubsan_default_options() {
  return "halt_on_error=1:print_stacktrace=1";
}

// CAF 0.17 describes the types of config options through a reference made from a null pointer that
// it never reads. Nothing of ours is in that file.
const char* __ubsan_default_suppressions() {
  return "null:init_fun_factory.hpp\n";
}

// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
