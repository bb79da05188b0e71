#pragma once

namespace troupe::actors {

/// Held while a foreign thread (one that is not the actor system's own) spawns actors in it, has a
/// `caf::scoped_actor` of it, makes it or runs its actors. CAF lets each thread keep the logger of
/// the system that it used last, and the destruction of a system waits until no thread has its
/// logger: a thread that asked one question and lives on would block it for ever.
class caf_thread_scope {
 public:
  caf_thread_scope() = default;
  ~caf_thread_scope();
  caf_thread_scope(const caf_thread_scope&) = delete;
  caf_thread_scope& operator=(const caf_thread_scope&) = delete;
};

}  // namespace troupe::actors
