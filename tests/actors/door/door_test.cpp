// The door between nodes that share credentials and nodes that nearly do: modes open and secret.
#include <algorithm>
#include <stdexcept>

#include <sys/wait.h>

#include "troupe/actors/door/door_loop.hpp"
#include "troupe/actors/door/door_resolver.hpp"
#include "troupe/actors/secrets/door_files.hpp"

#include "door_fixture.hpp"
#include "fails_with.hpp"

namespace troupe::actors {
namespace {

using namespace testing;
using ::testing::HasSubstr;
using troupe::testing::fails_with;
using mode = door_security::mode;

const std::string one_secret(40, 'a');
const std::string another_secret(40, 'b');

door_options with_secret(const std::string& path) {
  door_options options;
  options.security.how = mode::secret;
  options.security.secret = path;
  return options;
}

std::unique_ptr<door> dialler(door_options options = {}) {
  auto made = door::create(std::move(options));
  EXPECT_TRUE(made) << to_string(made.error());
  return made ? std::move(*made) : nullptr;
}

TEST(door, connects_nodes_without_secret_and_carries_what_they_say) {
  listening_door at;
  const auto from = dialler();
  const auto here = connect_from(*from, at.port);
  ASSERT_TRUE(here) << to_string(here.error());
  const auto there = at.admitted();
  ASSERT_TRUE(there);
  EXPECT_TRUE(talk(here->get(), there.get()));
  for (const int fd : {here->get(), there.get()}) {
    EXPECT_NE(::fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
    EXPECT_NE(::fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
  }
  const auto counted = at.it->count();
  EXPECT_EQ(counted.admitted, 1u);
  EXPECT_EQ(counted.refused, 0u);
  EXPECT_EQ(counted.strangers, 0u);
}

TEST(door, connects_nodes_that_have_one_secret) {
  const scratch files;
  // Surrounding blanks, as editors leave them, are ignored.
  listening_door at{with_secret(files.write("a", "  " + one_secret + " \r\n\n"))};
  const auto from = dialler(with_secret(files.write("b", one_secret)));
  const auto here = connect_from(*from, at.port);
  ASSERT_TRUE(here) << to_string(here.error());
  const auto there = at.admitted();
  ASSERT_TRUE(there);
  EXPECT_TRUE(talk(here->get(), there.get()));
}

TEST(door, refuses_another_secret_whoever_of_both_dials) {
  const scratch files;
  const auto a = files.write("a", one_secret);
  const auto b = files.write("b", another_secret);
  listening_door at_a{with_secret(a)};
  listening_door at_b{with_secret(b)};
  for (const auto& [from, to] : {std::pair{&at_a, &at_b}, std::pair{&at_b, &at_a}}) {
    const auto tried = connect_from(*from->it, to->port);
    ASSERT_THAT(tried,
                fails_with(errc::unauthorized, HasSubstr("127.0.0.1:" + std::to_string(to->port))));
    EXPECT_NE(tried.error().message.find("the peer has another secret"), std::string::npos);
    EXPECT_TRUE(to->noticed("the peer has another secret"));
    EXPECT_FALSE(to->admits_another());
    EXPECT_TRUE(comes_true([&, to = to] { return to->it->count().refused == 1; }));
    EXPECT_EQ(to->it->count().admitted, 0u);
  }
}

TEST(door, refuses_another_mode_and_names_both) {
  const scratch files;
  listening_door open;
  listening_door secret{with_secret(files.write("a", one_secret))};
  const auto asked = connect_from(*open.it, secret.port);
  ASSERT_THAT(asked,
              fails_with(errc::unauthorized, HasSubstr("security.mode is secret, ours is none")));
  const auto other = connect_from(*secret.it, open.port);
  ASSERT_FALSE(other);
  EXPECT_NE(other.error().message.find("security.mode is none, ours is secret"), std::string::npos)
      << other.error().message;
}

TEST(door, does_not_open_with_a_secret_that_is_none) {
  const scratch files;
  const auto refusal = [](const std::string& path) {
    const auto made = door::create(with_secret(path));
    EXPECT_FALSE(made);
    if (made) return std::string{};
    EXPECT_EQ(made.error().code, errc::invalid_config);
    EXPECT_NE(made.error().message.find(path), std::string::npos) << made.error().message;
    return made.error().message;
  };
  EXPECT_NE(refusal(files.write("readable", one_secret, 0644)).find("chmod 600"),
            std::string::npos);
  EXPECT_NE(refusal(files.write("group", one_secret, 0640)).find("chmod 600"), std::string::npos);
  EXPECT_NE(refusal(files.write("short", std::string(31, 'x') + "   \n")).find("31 characters"),
            std::string::npos);
  EXPECT_NE(refusal(files.write("empty", " \n\n")).find("empty"), std::string::npos);
  EXPECT_NE(refusal(files.path("missing")).find("No such file"), std::string::npos);
  EXPECT_NE(refusal("/dev/null").find("not a regular file"), std::string::npos);
}

/// The error about a file in a process that runs as another user than the tests.
std::string said_to_another_user(const std::string& path) {
  int ends[2]{-1, -1};
  EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const owned_fd in{ends[0]};
  owned_fd out{ends[1]};
  const auto child = ::fork();
  if (child == 0) {
    constexpr uid_t nobody = 65534;
    if (::geteuid() == 0 && ::setuid(nobody) != 0) ::_exit(1);
    const auto text = read_private_file("secret", path);
    const auto said = text ? std::string{"it can be read"} : text.error().message;
    ::_exit(::write(out.get(), said.data(), said.size()) > 0 ? 0 : 1);
  }
  out.reset();
  std::string said;
  char piece[512];
  for (ssize_t n = 0; (n = ::read(in.get(), piece, sizeof piece)) > 0;)
    said.append(piece, static_cast<std::size_t>(n));
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  return said;
}

TEST(door, says_how_to_mend_a_file_that_it_may_not_open_and_not_to_make_it_anew) {
  const scratch files;
  const auto path = files.write("secret", one_secret, ::geteuid() == 0 ? 0600 : 0000);
  const auto closed = said_to_another_user(path);
  EXPECT_NE(closed.find(path + ": it cannot be read: Permission denied"), std::string::npos)
      << closed;
  EXPECT_NE(closed.find("chown -R USER FOLDER"), std::string::npos) << closed;
  EXPECT_NE(closed.find("run as the user that they belong to"), std::string::npos) << closed;
  EXPECT_EQ(closed.find("certs init"), std::string::npos) << closed;

  const auto missing = read_private_file("secret", files.path("nowhere/secret"));
  ASSERT_FALSE(missing);
  EXPECT_NE(missing.error().message.find("`troupe certs init DIR` makes"), std::string::npos);
  const auto below_a_file = read_private_file("secret", path + "/secret");
  ASSERT_FALSE(below_a_file);
  EXPECT_NE(below_a_file.error().message.find("`troupe certs init DIR` makes"), std::string::npos);
  ASSERT_EQ(::symlink("loop", files.path("loop").c_str()), 0);
  const auto loop = read_private_file("secret", files.path("loop"));
  ASSERT_FALSE(loop);
  EXPECT_TRUE(
      loop.error().message.ends_with("it cannot be read: Too many levels of symbolic links"))
      << loop.error().message;
}

TEST(door, takes_a_new_secret_over_while_it_is_open) {
  const scratch files;
  const auto a = files.write("a", one_secret);
  const auto b = files.write("b", one_secret);
  listening_door at{with_secret(a)};
  std::atomic<int> renewed{0};
  auto options = with_secret(b);
  options.credentials.renewed = [&renewed](const std::string&) { ++renewed; };
  const auto from = dialler(std::move(options));
  const auto before = connect_from(*from, at.port);
  ASSERT_TRUE(before);
  const auto there = at.admitted();

  // The rotation order that keeps all connected: append everywhere, put it first everywhere, remove
  // the old one.
  files.write("a", one_secret + "\n" + another_secret);
  EXPECT_TRUE(comes_true([&] { return at.renewed == 1; }));
  EXPECT_TRUE(connect_from(*from, at.port));
  EXPECT_TRUE(at.admitted());
  files.write("b", another_secret + "\n" + one_secret);
  EXPECT_TRUE(comes_true([&] { return renewed == 1; }));
  EXPECT_TRUE(connect_from(*from, at.port));
  EXPECT_TRUE(at.admitted());

  // An invalid file: the old secret stays in force, and one sentence reports it.
  files.write("a", "short");
  std::this_thread::sleep_for(1100ms);
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(connect_from(*from, at.port));
    EXPECT_TRUE(at.admitted());
    std::this_thread::sleep_for(1100ms);
  }
  EXPECT_TRUE(comes_true([&] { return !at.alarms().empty(); }));
  ASSERT_EQ(at.alarms().size(), 1u);
  EXPECT_NE(at.alarms().front().find("the old ones stay in force"), std::string::npos);
  EXPECT_NE(at.alarms().front().find(a), std::string::npos);
  EXPECT_TRUE(talk(before->get(), there.get()));
}

TEST(door, says_why_it_cannot_listen) {
  listening_door at;
  const auto other = dialler();
  const auto nothing = [](door_socket fd) { ::close(fd); };
  const auto taken = other->listen("127.0.0.1", at.port, nothing);
  ASSERT_FALSE(taken);
  EXPECT_EQ(taken.error().code, errc::already_exists);
  const auto elsewhere = other->listen("192.0.2.1", 0, nothing);
  ASSERT_THAT(elsewhere,
              fails_with(errc::invalid_config, HasSubstr("not an address of this machine")));
  const auto nowhere = other->listen("no.such.host.invalid", 0, nothing);
  ASSERT_FALSE(nowhere);
  EXPECT_EQ(nowhere.error().code, errc::invalid_config);
}

TEST(door, without_tls_it_neither_listens_to_nor_dials_other_machines) {
  const scratch files;
  const auto nothing = [](door_socket fd) { ::close(fd); };
  for (const auto& options : {door_options{}, with_secret(files.write("a", one_secret))}) {
    const auto made = dialler(options);
    for (const auto* everywhere : {"", "0.0.0.0", "::"}) {
      const auto refused = made->listen(everywhere, 0, nothing);
      ASSERT_THAT(refused, fails_with(errc::invalid_config, HasSubstr("security.mode: tls")))
          << everywhere;
    }
    const auto dialled = connect_from(*made, 7400, "192.0.2.1");
    ASSERT_THAT(dialled, fails_with(errc::invalid_config,
                                    HasSubstr("give a command the deployment's file")));
    EXPECT_TRUE(made->listen("127.0.0.2", 0, nothing));
  }
}

TEST(door, has_one_listener_of_a_number) {
  listening_door at;
  const auto again = at.it->listen("127.0.0.2", at.port, [](door_socket fd) { ::close(fd); });
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code, errc::already_exists);
  const auto from = dialler();
  EXPECT_TRUE(connect_from(*from, at.port));
  EXPECT_TRUE(at.admitted()) << "the first one is untouched";
  at.it->close(at.port);
  EXPECT_TRUE(at.it->listen("127.0.0.2", at.port, [](door_socket fd) { ::close(fd); }));
}

TEST(door, a_secret_cannot_be_passed_on_by_who_listens_at_another_port) {
  const scratch files;
  listening_door at{with_secret(files.write("a", one_secret))};
  const auto from = dialler(with_secret(files.path("a")));
  // A relay that forwards bytes to the node and back.
  const owned_fd ear{*transport::tcp::listen_on("127.0.0.1", 0)};
  std::thread between{[&] {
    if (!readable(ear.get())) return;
    const owned_fd victim{::accept4(ear.get(), nullptr, nullptr, SOCK_CLOEXEC)};
    const auto node = dial_raw(at.port);
    (void)comes_true([&] {
      for (const auto& [left, right] :
           {std::pair{victim.get(), node.get()}, std::pair{node.get(), victim.get()}}) {
        char piece[256];
        const auto n = ::recv(left, piece, sizeof piece, MSG_DONTWAIT);
        if (n > 0) send_all(right, {piece, static_cast<std::size_t>(n)});
        if (n == 0 || (n < 0 && errno != EAGAIN)) return true;  // one of them hung up
      }
      return false;
    });
  }};
  const auto passed_on = connect_from(*from, transport::tcp::bound_port(ear.get()));
  between.join();
  ASSERT_FALSE(passed_on);
  EXPECT_EQ(passed_on.error().code, errc::unauthorized) << passed_on.error().message;
  EXPECT_EQ(at.it->count().admitted, 0u);
  EXPECT_TRUE(connect_from(*from, at.port));
}

TEST(door_resolver, ends_at_once_while_a_lookup_is_stuck_and_answers_nobody_then) {
  std::promise<void> stuck;
  std::promise<void> asked;
  const auto lookup = [&, until = stuck.get_future().share()](const std::string&, std::uint16_t) {
    asked.set_value();
    until.wait();
    return result<std::vector<socket_address>>{std::vector<socket_address>{}};
  };
  std::atomic<bool> answered{false};
  auto token = std::make_shared<int>(0);  // released with the query
  std::weak_ptr<int> question = token;
  {
    door_resolver resolver{lookup};
    ASSERT_TRUE(resolver.look_up("a.name", 1, end_of_wait(),
                                 [&answered, token](const auto&) { answered = true; }));
    token.reset();
    asked.get_future().wait();
  }
  stuck.set_value();
  EXPECT_TRUE(comes_true([&] { return question.expired(); }));
  EXPECT_FALSE(answered);
}

TEST(door_loop, goes_on_after_a_call_that_threw) {
  const auto loop = door_loop::create();
  ASSERT_TRUE(loop);
  std::vector<std::string> told;
  (*loop)->on_exception([&](const std::string& what) { told.push_back(what); });
  (*loop)->post([] { throw std::runtime_error{"in a post"}; });
  (void)(*loop)->call_at(clock::now(), [] { throw std::runtime_error{"in a timer"}; });
  (void)(*loop)->call_at(clock::now() + 20ms, [&] { (*loop)->stop(); });
  (*loop)->run();
  std::ranges::sort(told);
  EXPECT_EQ(told, (std::vector<std::string>{"in a post", "in a timer"}));
}

TEST(door, says_why_it_cannot_connect) {
  const auto from = dialler();
  std::uint16_t free_port = 0;
  {
    listening_door gone;
    free_port = gone.port;
  }
  const auto refused = connect_from(*from, free_port);
  ASSERT_THAT(refused, fails_with(errc::peer_unreachable, HasSubstr("nothing listens there")));

  const auto unknown = connect_from(*from, 7400, "no.such.host.invalid", 10s);
  ASSERT_FALSE(unknown);
  EXPECT_TRUE(unknown.error().code == errc::peer_unreachable ||
              unknown.error().code == errc::deadline);
}

/// A listener that is not a door: takes one connection, sends some bytes, and may hang up.
class other_server {
 public:
  explicit other_server(std::string says, bool hang_up)
      : fd_{*transport::tcp::listen_on("127.0.0.1", 0)} {
    port = transport::tcp::bound_port(fd_.get());
    thread_ = std::thread{[this, says = std::move(says), hang_up] {
      if (!readable(fd_.get())) return;
      owned_fd peer{::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC)};
      if (!says.empty()) send_all(peer.get(), says);
      if (!hang_up) (void)hangs_up(peer.get());
    }};
  }
  ~other_server() { thread_.join(); }
  std::uint16_t port{0};

 private:
  owned_fd fd_;
  std::thread thread_;
};

TEST(door, tells_other_servers_from_nodes_of_its_cluster) {
  const auto from = dialler();
  {
    other_server http{"HTTP/1.1 400 Bad Request\r\n\r\n", true};
    const auto tried = connect_from(*from, http.port);
    ASSERT_FALSE(tried);
    EXPECT_EQ(tried.error().code, errc::version_mismatch) << tried.error().message;
  }
  {
    other_server silent{"", false};
    const auto began = clock::now();
    const auto tried = connect_from(*from, silent.port, "127.0.0.1", 300ms);
    ASSERT_FALSE(tried);
    EXPECT_EQ(tried.error().code, errc::deadline) << tried.error().message;
    EXPECT_GE(clock::now() - began, 300ms);
  }
  {
    other_server shy{"", true};
    const auto tried = connect_from(*from, shy.port);
    ASSERT_FALSE(tried);
    EXPECT_EQ(tried.error().code, errc::link_broken) << tried.error().message;
  }
}

TEST(door, looks_names_up_and_tries_each_address) {
  listening_door at;  // listens on 127.0.0.1 only; localhost may resolve to ::1 first
  const auto from = dialler();
  const auto here = connect_from(*from, at.port, "localhost");
  ASSERT_TRUE(here) << to_string(here.error());
  EXPECT_TRUE(at.admitted());
}

TEST(door, names_that_do_not_resolve_hold_up_nobody) {
  listening_door at;
  auto from = dialler();
  std::atomic<int> ended{0};
  for (int i = 0; i < 50; ++i) {
    const auto time = i % 2 == 0 ? 300ms : std::chrono::milliseconds{10 * wait_limit};
    from->connect("no-such-host-" + std::to_string(i) + ".invalid", 1, clock::now() + time,
                  [&ended](result<door_socket> how) {
                    EXPECT_FALSE(how);
                    ++ended;
                  });
  }
  EXPECT_TRUE(connect_from(*from, at.port));
  EXPECT_TRUE(comes_true([&] { return ended >= 25; })) << "however long their look-ups take";
  from.reset();
  EXPECT_EQ(ended, 50);
}

TEST(door, closes_a_port_and_leaves_its_connections) {
  listening_door at;
  const auto from = dialler();
  const auto here = connect_from(*from, at.port);
  ASSERT_TRUE(here);
  const auto there = at.admitted();
  const auto stranger = dial_raw(at.port);
  ASSERT_TRUE(comes_true([&] { return at.it->count().strangers == 1; }));

  at.it->close(at.port);
  EXPECT_EQ(at.it->count().strangers, 0u);
  EXPECT_TRUE(hangs_up(stranger.get()));
  const auto late = connect_from(*from, at.port);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, errc::peer_unreachable);
  EXPECT_TRUE(talk(here->get(), there.get()));
  // The port is free again at once.
  const auto again = at.it->listen("127.0.0.1", at.port, [](door_socket fd) { ::close(fd); });
  EXPECT_TRUE(again) << to_string(again.error());
}

TEST(door, serves_several_ports_and_calls_from_its_own_thread) {
  listening_door at;
  std::atomic<int> second{0};
  const auto other = at.it->listen("127.0.0.1", 0, [&](door_socket fd) {
    ::close(fd);
    ++second;
  });
  ASSERT_TRUE(other);
  std::promise<errc> closed;
  // From within a callback: make another connection, and close a port.
  at.it->connect("127.0.0.1", at.port, end_of_wait(), [&](result<door_socket> how) {
    ASSERT_TRUE(how);
    ::close(*how);
    at.it->connect("127.0.0.1", *other, end_of_wait(), [&](result<door_socket> next) {
      ASSERT_TRUE(next);
      ::close(*next);
      at.it->close(*other);
      at.it->connect("127.0.0.1", *other, end_of_wait(), [&](result<door_socket> last) {
        closed.set_value(last ? errc::internal : last.error().code);
      });
    });
  });
  EXPECT_EQ(closed.get_future().get(), errc::peer_unreachable);
  EXPECT_TRUE(comes_true([&] { return second == 1; }));
}

TEST(door, many_nodes_connect_at_once) {
  door_options options;
  options.max_strangers = 1024;
  listening_door at{options};
  const auto from = dialler();
  std::atomic<int> connected{0};
  for (int i = 0; i < 200; ++i) {
    from->connect("127.0.0.1", at.port, end_of_wait(), [&](result<door_socket> how) {
      if (how) {
        ::close(*how);
        ++connected;
      }
    });
  }
  EXPECT_TRUE(comes_true([&] { return connected == 200; }));
  EXPECT_TRUE(comes_true([&] { return at.it->count().admitted == 200; }));
}

TEST(door, ends_in_every_state_and_tells_who_waits) {
  const auto descriptors = open_descriptors();
  for (int round = 0; round < 30; ++round) {
    listening_door at;
    other_server silent{"", false};
    std::atomic<int> told{0};
    std::atomic<int> aborted{0};
    {
      const auto from = dialler();
      const auto count = [&](result<door_socket> how) {
        ++told;
        if (how) {
          ::close(*how);
        } else if (how.error().code == errc::aborted) {
          ++aborted;
        }
      };
      from->connect("127.0.0.1", silent.port, end_of_wait(), count);
      from->connect("127.0.0.1", at.port, end_of_wait(), count);
      from->connect("192.0.2.1", 9, end_of_wait(), count);  // no answer, or no route
      from->connect("localhost", at.port, end_of_wait(), count);
      const auto stranger = dial_raw(at.port);
      std::this_thread::sleep_for(std::chrono::microseconds{round * 100});
      if (round % 3 == 0) at.it.reset();
    }
    EXPECT_EQ(told, 4);
    EXPECT_GE(aborted, 1);
  }
  EXPECT_TRUE(comes_true([&] { return open_descriptors() == descriptors; }));
}

}  // namespace
}  // namespace troupe::actors
