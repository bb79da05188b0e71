#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "troupe/actors/door/door.hpp"
#include "troupe/actors/door/door_loop.hpp"
#include "troupe/io/agent.hpp"
#include "troupe/io/control_channel.hpp"
#include "troupe/io/memory_table.hpp"
#include "troupe/io/notice_account.hpp"
#include "troupe/io/plans.hpp"
#include "troupe/io/wire.hpp"
#include "troupe/transport/endpoint.hpp"

namespace troupe::io {

/// Clamps a wait so that it is not negative and adding it to a time point cannot overflow.
[[nodiscard]] std::chrono::milliseconds bounded(std::chrono::milliseconds wait) noexcept;

/// The pause after a failed attempt to reach a peer; doubles with each failure up to
/// `longest_pause`.
inline constexpr std::chrono::milliseconds longest_pause{1000};
[[nodiscard]] std::chrono::milliseconds pause_after(std::uint32_t failures) noexcept;

/// An event that `agent::take` has not returned yet.
using event_ref = std::list<event>::iterator;

/// One posting of a transfer, from `post` to its end. Links use the number of the posting as
/// transfer and batch id.
///
/// | stage    | on                                      | becomes                             |
/// | -------- | --------------------------------------- | ----------------------------------- |
/// | idle     | post                                    | waiting, or posted at once          |
/// | waiting  | link and grants are available           | posted                              |
/// | waiting  | cancel, deadline, no link possible      | idle: ended                         |
/// | posted   | completion                              | idle: ended                         |
/// | posted   | cancel, deadline, memory deregistered   | stopping: the link fences it        |
/// | stopping | completion, and the fence has completed | idle: ended with the stop's outcome |
struct agent_transfer {
  enum class stage : std::uint8_t { idle, waiting, posted, stopping };

  transfer_handle id;
  transport::direction dir{transport::direction::write};
  peer_id who;
  std::shared_ptr<const planned_batch> moves;

  status outcome;  ///< valid while active, too
  stage at{stage::idle};
  std::uint64_t run{0};   ///< the number of the posting
  std::uint64_t link{0};  ///< the link it was posted on
  /// The batch as one link has checked it, kept from the second posting on that link.
  std::shared_ptr<const transport::prepared_batch> prepared{};
  std::uint64_t prepared_on{0}, first_on{0};  ///< link numbers
  std::optional<std::chrono::steady_clock::time_point> until{};
  std::vector<std::byte> note;
  bool has_note{false};
  /// How far the grants to `moves->remote_memories` have come, in their order: these many are there,
  /// and questions were asked for these many. Valid while `epoch` is that of the peer's grants.
  struct {
    std::uint64_t epoch{0};
    std::size_t there{0}, asked{0};
  } grants{};
  std::uint32_t lost_links{0};           ///< links that broke while it waited for its grants
  std::optional<troupe::error> stop_as;  ///< in stage `stopping`
  bool stop_is_cancel{false};
  bool completed{false}, quiescent{false};  ///< in stage `stopping`
  std::optional<event_ref> end_event;       ///< the `transfer_ended` event
  std::list<event> next_end;  ///< that event of this posting, made before so that it cannot fail
};

/// What this agent knows of one life of another agent.
///
/// | phase       | on                                        | becomes                     |
/// | ----------- | ----------------------------------------- | --------------------------- |
/// | idle        | a link is wanted                          | dialling                    |
/// | dialling    | connected                                 | greeting                    |
/// | greeting    | welcome                                   | introducing                 |
/// | introducing | accepted                                  | greeted                     |
/// | greeted     | a link is wanted                          | linking                     |
/// | linking     | the link is up                            | up                          |
/// | linking     | link refused, broken or late              | linking (next backend), or  |
/// |             |                                           | greeted if none is left     |
/// | up          | the link breaks                           | greeted                     |
/// | up          | a memory needs another backend            | linking                     |
/// | any         | the connection ends, or cannot be made    | idle                        |
/// | greeting    | the peer is another life                  | gone, for good              |
struct remote_agent {
  enum class phase : std::uint8_t {
    idle,
    dialling,
    greeting,
    introducing,
    greeted,
    linking,
    up,
    gone
  };

  peer_id id;
  descriptor known;  ///< without memories
  std::map<std::uint64_t, described_memory> memories;
  std::vector<std::uint64_t> in_order;  ///< memory numbers in the order of description
  address_index by_address;
  bool is_self{false};
  bool added{false};  ///< added by the program; otherwise known from its greeting
  bool removed{false};

  // Our connection to the peer.
  phase now{phase::idle};
  std::shared_ptr<control_channel> channel;
  control_nonce challenged{}, nonce{};
  transport::host_identity where;
  std::uint32_t attempt{0};
  std::vector<transport::backend_kind> excluded;
  /// Consecutive attempts that failed. A link that breaks while work waits for it is one, unless
  /// something has moved over it.
  std::uint32_t failures{0};
  control_channel::clock::time_point next_try{};
  bool try_set{false};      ///< a timer for `next_try` is set
  std::uint64_t failed{0};  ///< how often no link could be made
  std::optional<troupe::error> last_error;
  std::optional<event_ref> loss_event;  ///< the `peer_lost` event
  std::uint64_t link{0};                ///< the link that is up or being made; 0: none
  bool answered{false};                 ///< the peer has answered for `link`
  transport::backend_kind kind{transport::backend_kind::tcp};  ///< of `link`
  std::string reason;
  std::uint32_t links{0};  ///< how many links have come up

  struct memory_grants {
    bool asked{false};
    std::vector<std::shared_ptr<const transport::remote_grant>> parts;
  };
  std::unordered_map<std::uint64_t, memory_grants> grants;  ///< on `link`, by memory
  std::uint64_t grants_epoch{1};                            ///< changes when any of `grants` goes
  struct grant_question {
    std::uint64_t memory{0};
    std::chrono::steady_clock::time_point asked{};
  };
  std::vector<grant_question> questions;  ///< unanswered on `link`, oldest first
  /// When the peer last answered the question that was then the oldest.
  std::chrono::steady_clock::time_point answered_in_turn{};
  bool questions_watched{false};  ///< a timer is set, or about to be set
  std::list<std::shared_ptr<agent_transfer>> waiting;
  notice_account account;
  struct waiting_note {
    std::vector<std::byte> frame;
    std::size_t bytes{0};  ///< of the notice in it
  };
  std::list<waiting_note> notes;         ///< of `notify`, waiting for a link
  std::uint64_t unsure_notes{0};         ///< sent over `link`, arrival not confirmed by the peer
  std::optional<event_ref> notes_event;  ///< the `notices_lost` event
  bool sending_notes{false};
  bool note_in_hand{false};  ///< the sending thread holds one of `notes`, which was not dropped
  bool notes_later{false};   ///< a timer will send `notes`
  bool connecting{false};    ///< a caller waits in `agent::connect`
  /// A notice was refused, and only the next link can tell how many are unread.
  bool wants_count{false};

  [[nodiscard]] bool wants_link() const noexcept {
    return connecting || wants_count || !waiting.empty() || !notes.empty();
  }
  void drop_grants() noexcept {
    grants.clear();
    questions.clear();
    ++grants_epoch;
  }
  /// Drops the state of our link, which is no longer up.
  void leave_link() noexcept {
    link = 0;
    drop_grants();
    account.doubt();
    account.forget_question();
  }

  // The peer's connection to us.
  std::shared_ptr<control_channel> guest;
  std::uint64_t guest_link{0};
  std::map<std::uint64_t, std::vector<transport::remote_grant>>
      given;                         ///< on `guest_link`, by memory
  std::set<std::uint64_t> granting;  ///< memories that the peer asks for on `guest_link`
  notice_count received, taken;
  notice_count told_taken;
};

/// Threads: the callers', the progress threads of the endpoint, the door's, and two of our own. `loop_`
/// runs connections, timers and link setup; `work_` runs slow work (grants and first posts, which
/// register memory with devices).
///
/// Locks: `mutex_` guards all state except members marked as a thread's own. It is never held
/// across a call to the endpoint, a link, the door or a channel, because those call back.
class agent_core final : public agent {
 public:
  explicit agent_core(agent_options options);
  ~agent_core() override;
  [[nodiscard]] result<void> begin();

  // -- memory (agent_memory.cpp)
  [[nodiscard]] result<memory_id> register_memory(std::span<std::byte> bytes, std::string name,
                                                  transport::access rights) override;
  [[nodiscard]] result<memory_id> allocate(std::uint64_t size, std::string name,
                                           transport::access rights) override;
  [[nodiscard]] result<std::span<std::byte>> bytes(memory_id of) const override;
  [[nodiscard]] result<void> deregister(memory_id of, std::chrono::milliseconds wait) override;
  [[nodiscard]] result<std::vector<std::byte>> describe(
      std::span<const memory_id> only) const override;

  // -- peers (agent_peers.cpp)
  [[nodiscard]] result<peer_id> add_peer(std::span<const std::byte> bytes) override;
  [[nodiscard]] result<void> remove_peer(peer_id who) override;
  [[nodiscard]] result<transport::backend_kind> connect(peer_id who,
                                                        std::chrono::milliseconds wait) override;
  [[nodiscard]] result<std::vector<remote_memory>> remote_memories(peer_id who) const override;
  [[nodiscard]] agent_report report() const override;

  // -- plans (agent_plans.cpp)
  [[nodiscard]] result<plan_id> prepare(std::span<const piece> local) override;
  [[nodiscard]] result<plan_id> prepare(std::span<const entry> local) override;
  [[nodiscard]] result<plan_id> prepare(peer_id who, std::span<const entry> remote) override;
  [[nodiscard]] result<plan_id> session(memory_id local, peer_id who,
                                        std::uint64_t remote) override;
  [[nodiscard]] result<void> release(plan_id which) override;
  [[nodiscard]] result<transfer_handle> make(transport::direction dir, plan_id local,
                                             std::span<const std::uint32_t> local_index,
                                             plan_id remote,
                                             std::span<const std::uint32_t> remote_index,
                                             merge_entries merge) override;
  [[nodiscard]] result<transfer_handle> move(transport::direction dir, plan_id over,
                                             std::span<const segment> segments,
                                             std::span<const std::byte> note_bytes,
                                             std::chrono::milliseconds deadline) override;

  // -- transfers (agent_transfers.cpp)
  using agent::post;
  [[nodiscard]] result<void> post(transfer_handle which, std::span<const std::byte> note_bytes,
                                  std::chrono::milliseconds deadline, then caller) override;
  [[nodiscard]] result<status> status_of(transfer_handle which) const override;
  std::size_t wait(std::span<const transfer_handle> which, wait_for how_many,
                   std::chrono::milliseconds limit) override;
  [[nodiscard]] result<void> cancel(transfer_handle which) override;
  [[nodiscard]] result<void> release(transfer_handle which) override;

  // -- notices (agent_notices.cpp)
  [[nodiscard]] result<void> notify(peer_id who, std::span<const std::byte> bytes) override;
  [[nodiscard]] std::vector<notice> take_notices(std::size_t max) override;
  bool wait_for_notices(std::chrono::milliseconds limit) override;
  [[nodiscard]] std::vector<event> take(std::size_t max) override;
  [[nodiscard]] int event_fd() const override { return events_fd_.get(); }
  bool poll() override { return place_->poll(); }

  // -- called by links, on any thread that makes progress
  void on_up(std::uint64_t link);
  void on_completion(std::uint64_t link, transport::completion done);
  void on_frame(std::uint64_t link, std::span<const std::byte> bytes);
  void on_quiescent(std::uint64_t link, transfer_id of);
  void on_broken(std::uint64_t link, troupe::error why);
  void on_thread_lost(const troupe::error& why);

 private:
  using lock_type = std::unique_lock<std::mutex>;
  using peer_ptr = std::shared_ptr<remote_agent>;
  using transfer_ptr = std::shared_ptr<agent_transfer>;
  using link_ptr = std::shared_ptr<transport::link>;

  struct prepared_list {
    placed_list places;
    peer_id who;  ///< the owner of the places; 0: this agent
    /// For a session: the local and the remote memory that offsets are relative to.
    std::optional<std::pair<described_memory, described_memory>> session;
  };
  struct link_entry {
    peer_ptr of;
    bool guest{false};
    bool up{false};
    bool ending{false};  ///< the peer has given the link up
    link_ptr wire;
    std::optional<troupe::error> closed_for;  ///< why we closed it
  };

  // -- under the lock, unless said otherwise
  [[nodiscard]] result<peer_ptr> find_peer(peer_id who) const;
  [[nodiscard]] result<transfer_ptr> find_transfer(transfer_handle which) const;
  [[nodiscard]] result<std::shared_ptr<const prepared_list>> find_plan(plan_id which) const;
  [[nodiscard]] link_ptr wire_of(std::uint64_t link) const;
  event_ref put_event(event what);
  event_ref tell_of_event();
  /// Withdraws an event that `take` has not returned.
  void drop_event(std::optional<event_ref>& what);
  void calm_event_fd();
  void wake_waiters() { changed_.notify_all(); }
  /// Waits until `done` holds, making progress if the endpoint has no threads. Returns whether
  /// `done` held in time.
  bool wait_until(lock_type& lock, std::chrono::steady_clock::time_point until,
                  const std::function<bool()>& done);

  // -- memory
  [[nodiscard]] result<memory_id> add_memory(std::span<std::byte> bytes, std::string name,
                                             transport::access rights);
  [[nodiscard]] result<memory_id> add_with_regions(std::span<std::byte> bytes, std::string name,
                                                   transport::access rights,
                                                   std::vector<region_id>& made);
  void forget_regions(std::span<const region_id> those);
  [[nodiscard]] descriptor own_descriptor() const;
  struct revocation {
    std::uint64_t link{0};
    link_ptr wire;
    transport::remote_grant grant;
    memory_id of;
  };
  /// Under the lock, and the same hold in which the grants leave `given`: from now on `deregister`
  /// waits for these.
  void begin_revoking(const std::vector<revocation>& those);
  void revoke(std::uint64_t link, const link_ptr& wire,
              const transport::remote_grant& grant);  ///< without the lock
  void revoke(const std::vector<revocation>& those);  ///< without the lock
  using revoking_grants =
      std::map<std::pair<std::uint64_t, std::uint64_t>, memory_id>;  ///< by link, transfer

  // -- peers and our connections to them; on the loop's thread unless said otherwise (agent_dial.cpp)
  [[nodiscard]] result<peer_ptr> take_in(descriptor said);  ///< any thread, under the lock
  void forget_one_that_left();                              ///< any thread, under the lock
  [[nodiscard]] static bool has_left(const remote_agent& who) noexcept;  ///< under the lock
  void forget(const peer_ptr& who);  ///< any thread, under the lock
  [[nodiscard]] static troupe::error removed_error(const remote_agent& who);
  void want_link(const peer_ptr& who);  ///< any thread, without the lock
  void part_from(const peer_ptr& who);
  void make_way(const peer_ptr& who);
  void try_later(const peer_ptr& who);
  void dial(const peer_ptr& who);
  void on_dialled(const peer_ptr& who, actors::owned_fd fd);
  void on_answer(const peer_ptr& who, control_message said);
  void greet(const peer_ptr& who, const challenge& said);
  void on_welcome(const peer_ptr& who, const welcome& said);
  void on_accepted(const peer_ptr& who, const accepted& said);
  void lose(const peer_ptr& who, const troupe::error& why, bool for_good);
  /// Under the lock. Returns whether any notice was dropped, or is if its sending fails.
  [[nodiscard]] static bool drop_notes(remote_agent& who);
  void tell_of_loss(remote_agent& who);        ///< under the lock
  void tell_of_lost_notes(remote_agent& who);  ///< under the lock

  // -- links (agent_links.cpp); on the loop's thread unless said otherwise
  void make_link(const peer_ptr& who);
  void watch_answer(const peer_ptr& who, std::uint64_t link);
  void watch_link(const peer_ptr& who, std::uint64_t link);
  void on_link_answer(const peer_ptr& who, const link_answer& said);
  void link_failed(const peer_ptr& who, const troupe::error& why);
  void count_lost_link(const peer_ptr& who, const troupe::error& why);  ///< under the lock
  void no_way(const peer_ptr& who, const troupe::error& why);
  [[nodiscard]] std::shared_ptr<transport::link_sink> sink_of(std::uint64_t link);
  /// The batches of one link: as many as transfers are allowed.
  [[nodiscard]] std::uint32_t max_batches() const noexcept;
  void link_came_up(std::uint64_t link);
  void use_link(const peer_ptr& who, std::uint64_t link);
  void link_went(std::uint64_t link, const troupe::error& why);
  void close_link(std::uint64_t link, const troupe::error& why);
  [[nodiscard]] result<std::pair<transport::backend_kind, std::string>> choose_backend(
      const transport::host_identity& where,
      const std::vector<transport::backend_kind>& excluded) const;

  // -- peers that dial us; on the loop's thread (agent_guests.cpp)
  struct newcomer {
    std::shared_ptr<control_channel> channel;
    control_nonce nonce{};
    incarnation life;  ///< set once the dialer has proved that it has our descriptor
    peer_ptr who;      ///< set once the dialer has introduced itself
  };
  void let_in(actors::owned_fd fd);
  void on_guest_message(const std::shared_ptr<newcomer>& from, control_message said);
  void on_hello(const std::shared_ptr<newcomer>& from, const hello& said);
  void on_introduction(const std::shared_ptr<newcomer>& from, const introduction& said);
  [[nodiscard]] static result<descriptor> check_introduction(const newcomer& from,
                                                             const introduction& said);
  void send_away(const std::shared_ptr<newcomer>& from, const troupe::error& why);
  void on_link_wanted(const peer_ptr& who, const link_wanted& said);
  void on_guest_end(const std::shared_ptr<newcomer>& from, const troupe::error& why);
  [[nodiscard]] std::uint64_t guest_left(const std::shared_ptr<newcomer>& from,
                                         const troupe::error& why);
  void let_link_end(std::uint64_t link, const troupe::error& why);

  // -- grants (agent_grants.cpp); on any thread that makes progress unless said otherwise
  void on_grant_wanted(std::uint64_t link, const peer_ptr& who, std::uint64_t memory);
  void grant_to(std::uint64_t link, std::uint64_t memory);     ///< on the work thread
  void find_answer(std::uint64_t link, std::uint64_t memory);  ///< on the work thread
  void answer_question(std::uint64_t link, const link_ptr& wire, const link_frame& answer);
  [[nodiscard]] result<bool> make_grants(std::uint64_t link, const link_ptr& wire,
                                         const described_memory& what, grants& made,
                                         std::vector<revoking_grants::node_type>& room);
  [[nodiscard]] bool keep_grants(std::uint64_t link, std::uint64_t memory,
                                 const std::vector<transport::remote_grant>& given);
  void take_back(std::uint64_t link, const link_ptr& wire, memory_id of,
                 const std::vector<transport::remote_grant>& given,
                 std::vector<revoking_grants::node_type>& room);
  /// Memories to request grants for on a link.
  struct grant_questions {
    std::uint64_t link{0};
    std::vector<std::uint64_t> memories{};
  };
  [[nodiscard]] static bool has_grants(remote_agent& who, agent_transfer& which,
                                       grant_questions& ask);  ///< under the lock
  void ask_for_grants(lock_type& lock, const peer_ptr& who, const grant_questions& ask);
  void on_grants(std::uint64_t link, const peer_ptr& who, grants said);
  void on_grants_refused(std::uint64_t link, const peer_ptr& who, grants_refused said);
  void find_other_way(std::uint64_t link, const peer_ptr& who,
                      const grants_refused& said);                       ///< on the loop's thread
  void refuse_waiting(const peer_ptr& who, const grants_refused& said);  ///< under the lock
  void watch_questions(const peer_ptr& who);                             ///< under the lock
  void look_at_questions(const peer_ptr& who);                           ///< on the loop's thread
  static void end_question(remote_agent& who, std::uint64_t memory);     ///< under the lock
  void go_on_elsewhere(std::uint64_t link, const peer_ptr& who);
  static void forget_memory(remote_agent& who, std::uint64_t number);  ///< under the lock

  // -- transfers
  [[nodiscard]] result<transfer_handle> add_transfer(transport::direction dir, peer_id who,
                                                     planned_batch moves);  ///< takes the lock
  void start(lock_type& lock, const peer_ptr& who, const transfer_ptr& which, then caller);
  void go_on(lock_type& lock, const peer_ptr& who);
  /// Posts a transfer that has its link and its grants. Releases the lock meanwhile.
  void hand_to_link(lock_type& lock, const peer_ptr& who, const transfer_ptr& which, then caller);
  [[nodiscard]] static std::optional<std::vector<transport::piece>> pieces_of(
      remote_agent& who, const agent_transfer& which);
  void stop(lock_type& lock, const transfer_ptr& which, troupe::error why, bool is_cancel);
  void finish_stopped(const transfer_ptr& which);
  void finish(const transfer_ptr& which, std::optional<troupe::error> why, std::uint64_t bytes,
              std::vector<std::uint32_t> bad_entries);
  void refuse(remote_agent& who, const transfer_ptr& which, troupe::error why);
  void set_deadline(const transfer_ptr& which, std::chrono::milliseconds after);
  void look_at_deadlines();
  void fail_waiting(const peer_ptr& who, const troupe::error& why);

  // -- copies between memories of this agent (agent_copies.cpp)
  void copy_within(lock_type& lock, const transfer_ptr& which);
  [[nodiscard]] result<std::vector<own_memory*>> own_memories_of(const agent_transfer& which);
  [[nodiscard]] result<void> copy_groups(const planned_batch& moves,
                                         transport::direction dir) const;

  // -- notices
  void tell_of_notices();
  void put_in_inbox(remote_agent& from, notice what);  ///< under the lock
  [[nodiscard]] bool inbox_takes(std::size_t bytes) const noexcept;
  void drop_notes_of_those_that_left();  ///< under the lock
  [[nodiscard]] result<void> look_for_room(lock_type& lock, const peer_ptr& who, std::size_t bytes);
  void put_own_note(remote_agent& self, std::span<const std::byte> bytes);  ///< under the lock
  void on_note(std::uint64_t link, const peer_ptr& from, std::span<const std::byte> bytes);
  void send_notes(const peer_ptr& who);                      ///< without the lock
  void send_notes_in(lock_type& lock, const peer_ptr& who);  ///< releases the lock meanwhile
  void send_notes_later(const peer_ptr& who);
  [[nodiscard]] bool counts_are_due(const remote_agent& who) const;
  void send_counts(const peer_ptr& who, std::uint64_t answers);  ///< without the lock
  void ask_for_count(lock_type& lock, const peer_ptr& who);
  void on_taken(std::uint64_t link, const peer_ptr& who, const taken& said);

  const agent_options options_;
  const incarnation life_;
  agent_token token_{};
  std::uint16_t port_{0};

  std::unique_ptr<transport::endpoint> place_;
  std::unique_ptr<actors::door_loop> loop_, work_;
  std::unique_ptr<actors::door> door_;
  std::thread loop_thread_, work_thread_;
  std::vector<std::shared_ptr<newcomer>> newcomers_;  ///< the loop thread's own

  std::mutex registering_;  ///< one registration at a time; before `mutex_`
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool ending_{false};
  memory_table memories_;
  std::map<std::uint64_t, peer_ptr> peers_;
  std::unordered_map<std::uint64_t, peer_ptr> by_life_;
  std::unordered_map<std::uint64_t, std::shared_ptr<const prepared_list>> plans_;
  std::unordered_map<std::uint64_t, transfer_ptr> transfers_;
  std::unordered_map<std::uint64_t, transfer_ptr> runs_;  ///< active, by the number of the posting
  std::unordered_map<std::uint64_t, link_entry> links_;
  revoking_grants revoking_;
  std::uint64_t last_id_{0};
  std::uint64_t last_run_{0};
  std::uint64_t last_link_{0};
  std::set<std::pair<std::chrono::steady_clock::time_point, std::uint64_t>> deadlines_;
  actors::door_loop::id deadline_timer_{0};  ///< the loop thread's own
  std::deque<notice> inbox_;
  std::uint64_t inbox_bytes_{0};
  std::uint64_t notices_dropped_{0};
  std::list<event> events_;
  bool notices_told_{false};  ///< a `notices_wait` event is queued
  actors::owned_fd events_fd_;
};

}  // namespace troupe::io
