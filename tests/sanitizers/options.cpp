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
extern const char troupe_caf_is_here __attribute__((weak));  // caf_order.cpp
}

const char* __asan_default_options() {
  return "detect_stack_use_after_return=1:strict_string_checks=1:detect_leaks=1";
}

const char* __lsan_default_options() {
  return "print_suppressions=0";
}

// No leak is expected. A line here needs a comment that says why it may leak.
//
// CAF 0.17 never closes the mailbox of its network broker (abstract_broker::cleanup omits what
// scheduled_actor::cleanup does). The broker sends itself a tick every heartbeat. A tick that comes
// between the broker's end and the clock's stays in the mailbox and names the broker as its sender,
// which keeps the broker and its other messages, once per actor system that ends in that moment.
// Any other owner of the broker is still reported: only what the broker itself reaches is
// suppressed. Nor does CAF's multiplexer release a connection that it accepted, or a listener that
// it was given, while it was being stopped (once in some thousands of tests, on a busy machine):
// such an object keeps itself alive.
const char* __lsan_default_suppressions() {
  return "leak:caf::actor_system::spawn_impl<caf::io::basp_broker\n"
         "leak:caf::io::network::default_multiplexer::new_scribe\n"
         "leak:caf::io::network::default_multiplexer::new_doorman\n";
}

// CAF is not instrumented, so the C library calls that it makes must not be judged.
const char* __tsan_default_options() {
  return &troupe_caf_is_here != nullptr
             ? "halt_on_error=1:second_deadlock_stack=1:ignore_noninstrumented_modules=1"
             : "halt_on_error=1:second_deadlock_stack=1";
}

// No race is expected. A line here needs a comment that says why it may happen.
const char* __tsan_default_suppressions() {
  return "";
}

const char* __ubsan_default_options() {
  return "halt_on_error=1:print_stacktrace=1";
}

// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
