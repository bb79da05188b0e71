#pragma once

// The thread sanitizer does not see the order that a wire creates: when both ends are in one
// process, it cannot know that a byte was read here before the peer's answer arrived there.
// Accesses to region memory on behalf of the peer are therefore hidden from it; the rest of the
// transport stays visible.
#if defined(__SANITIZE_THREAD__)
#define TROUPE_HIDES_ACCESS 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TROUPE_HIDES_ACCESS 1
#endif
#endif

#ifdef TROUPE_HIDES_ACCESS
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace troupe::transport {

/// Marks a scope that touches region memory for the peer. Does nothing without the thread
/// sanitizer.
class wire_access {
 public:
#ifdef TROUPE_HIDES_ACCESS
  wire_access() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~wire_access() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  // Not trivial, since the compiler would warn of an unused variable of a trivial type.
  wire_access() {}   // NOLINT(modernize-use-equals-default)
  ~wire_access() {}  // NOLINT(modernize-use-equals-default)
#endif
  wire_access(const wire_access&) = delete;
  wire_access& operator=(const wire_access&) = delete;
};

}  // namespace troupe::transport
