// Tells the thread sanitizer what CAF orders. The packaged library is not instrumented: its mutexes
// are seen, since they are the C library's, but not the atomics of its mailboxes and reference
// counts. Without them every message looks like a race between its sender and its receiver.
//
// Each function below stands before one of CAF 0.17's of the same name (the linker lets a program's
// symbol win over a library's, also for calls inside the library), says what the original's atomics
// order, and mostly calls it. A function that another CAF does not have is never called.
// - enqueue: what was done before a message was sent,
// - activate, reactivate: is done before it is received; so is one turn of an actor before its
// next.
// - cleanup: the same for the last turn, which the scheduler may take at its own end. It throws
// away
//   what nobody received, which may come to the mailbox while it does: that is not looked at.
// - mailbox_visitor: the receiving side of a scoped actor.
// - intrusive_ptr_release, deref: what a holder did before it let go is done before the last one
//   destroys; and what was sent to an actor, before the actor is destroyed with it. These do not call
//   the originals, they stand for them.
// The atomics order no less than that, so what is reported is right. What is reported is every race
// over something that is neither in a message nor an actor's own; planted_race.cpp tries it out.
//
// Compiled into troupe_actors in the thread sanitizer's build only.

#include <atomic>
#include <cstddef>

#include <caf/actor_control_block.hpp>
#include <caf/ref_counted.hpp>
#include <dlfcn.h>

// CAF's functions as the linker knows them.
#define ORDERED_ENQUEUE \
  "7enqueueESt10unique_ptrINS_15mailbox_elementENS_6detail8disposerEEPNS_14execution_unitE"
#define SCHEDULED_ENQUEUE "_ZN3caf15scheduled_actor" ORDERED_ENQUEUE
#define BLOCKING_ENQUEUE "_ZN3caf14blocking_actor" ORDERED_ENQUEUE
#define ACTIVATE "_ZN3caf15scheduled_actor8activateEPNS_14execution_unitE"
#define ACTIVATE_WITH \
  "_ZN3caf15scheduled_actor8activateEPNS_14execution_unitERNS_15mailbox_elementE"
#define REACTIVATE "_ZN3caf15scheduled_actor10reactivateERNS_15mailbox_elementE"
#define CLEANUP "_ZN3caf15scheduled_actor7cleanupEONS_5errorEPNS_14execution_unitE"
#define BLOCKING_VISIT "_ZN3caf14blocking_actor15mailbox_visitorclERNS_15mailbox_elementE"
#define RELEASE "_ZN3caf21intrusive_ptr_releaseEPNS_19actor_control_blockE"
#define RELEASE_WEAK "_ZN3caf26intrusive_ptr_release_weakEPNS_19actor_control_blockE"
#define DEREF "_ZNK3caf11ref_counted5derefEv"

extern "C" {
void __tsan_acquire(void* address);  // NOLINT(bugprone-reserved-identifier)
void __tsan_release(void* address);  // NOLINT(bugprone-reserved-identifier)
void __tsan_ignore_thread_begin();   // NOLINT(bugprone-reserved-identifier)
void __tsan_ignore_thread_end();     // NOLINT(bugprone-reserved-identifier)

// As the ABI passes them: `this` first; references, and what is not trivially copied, as pointers.
void scheduled_enqueue(void* self, void* element, void* unit) __asm__(SCHEDULED_ENQUEUE);
void blocking_enqueue(void* self, void* element, void* unit) __asm__(BLOCKING_ENQUEUE);
bool activate(void* self, void* unit) __asm__(ACTIVATE);
int activate_with(void* self, void* unit, void* element) __asm__(ACTIVATE_WITH);
int reactivate(void* self, void* element) __asm__(REACTIVATE);
bool cleanup(void* self, void* error, void* unit) __asm__(CLEANUP);
int blocking_visit(void** visitor, void* element) __asm__(BLOCKING_VISIT);
void intrusive_release(caf::actor_control_block* control) __asm__(RELEASE);
void intrusive_release_weak(caf::actor_control_block* control) __asm__(RELEASE_WEAK);
void deref(caf::ref_counted* counted) __asm__(DEREF);

/// For options.cpp, by its address: the options are asked for before any instrumented function may
/// run.
extern const char troupe_caf_is_here;
const char troupe_caf_is_here = 1;
}

namespace {

/// CAF's own function of the name.
template <class Function>
Function* original(Function* /*ours*/, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

/// How many hold what CAF counts.
struct counter : caf::ref_counted {
  static std::atomic<std::size_t>& of(caf::ref_counted& counted) {
    return counted.*(&counter::rc_);
  }
};

/// One turn of an actor.
class turn {
 public:
  explicit turn(void* actor) : actor_{actor} { __tsan_acquire(actor_); }
  ~turn() { __tsan_release(actor_); }
  turn(const turn&) = delete;
  turn& operator=(const turn&) = delete;

 private:
  void* actor_;
};

}  // namespace

// -- messages and turns

void scheduled_enqueue(void* self, void* element, void* unit) {
  static auto* const caf = original(scheduled_enqueue, SCHEDULED_ENQUEUE);
  __tsan_release(self);
  caf(self, element, unit);
}

void blocking_enqueue(void* self, void* element, void* unit) {
  static auto* const caf = original(blocking_enqueue, BLOCKING_ENQUEUE);
  __tsan_release(self);
  caf(self, element, unit);
}

bool activate(void* self, void* unit) {
  static auto* const caf = original(activate, ACTIVATE);
  const turn one{self};
  return caf(self, unit);
}

int activate_with(void* self, void* unit, void* element) {
  static auto* const caf = original(activate_with, ACTIVATE_WITH);
  const turn one{self};
  return caf(self, unit, element);
}

int reactivate(void* self, void* element) {
  static auto* const caf = original(reactivate, REACTIVATE);
  const turn one{self};
  return caf(self, element);
}

bool cleanup(void* self, void* error, void* unit) {
  static auto* const caf = original(cleanup, CLEANUP);
  const turn one{self};
  __tsan_ignore_thread_begin();
  const bool done = caf(self, error, unit);
  __tsan_ignore_thread_end();
  return done;
}

int blocking_visit(void** visitor, void* element) {
  static auto* const caf = original(blocking_visit, BLOCKING_VISIT);
  const turn one{*visitor};  // whose first member is the actor
  return caf(visitor, element);
}

// -- references

// Counted here and not by CAF: the count's own atomic orders every holder's last use before the end, also
// where two holders let go at once. An acquire and release around CAF's function would leave a gap between them.

void intrusive_release(caf::actor_control_block* control) {
  if (control->strong_refs.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  __tsan_acquire(control->get());
  control->data_dtor(control->get());
  caf::intrusive_ptr_release_weak(control);
}

void intrusive_release_weak(caf::actor_control_block* control) {
  if (control->weak_refs.fetch_sub(1, std::memory_order_acq_rel) == 1) control->block_dtor(control);
}

void deref(caf::ref_counted* counted) {
  if (counter::of(*counted).fetch_sub(1, std::memory_order_acq_rel) == 1)
    counted->request_deletion(true);
}
