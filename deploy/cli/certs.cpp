#include <array>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <system_error>

#include <CLI/CLI.hpp>

#include "troupe/actors/door/certificates.hpp"
#include "troupe/config/name_rule.hpp"
#include "troupe/deploy/cli/text_table.hpp"
#include "troupe/deploy/cli/verbs.hpp"

namespace troupe::deploy::cli {

namespace {

using actors::certificate_files;

constexpr unsigned default_days = 365;

struct certs_arguments {
  std::string folder;
  std::string cluster;
  unsigned days{default_days};
};

void complain_of_certs(const std::string& sentence) {
  std::cerr << "troupe certs: " << sentence << "\n";
}

/// Deployment files need absolute paths.
std::string absolute(const std::string& path) {
  std::error_code ignored;
  const auto whole = std::filesystem::absolute(path, ignored).lexically_normal();
  const auto text = (whole.has_filename() ? whole : whole.parent_path()).string();
  return text.empty() ? path : text;
}

std::string date(actors::certificate_time time) {
  const auto seconds = std::chrono::system_clock::to_time_t(time);
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  std::array<char, 32> text{};
  const auto size = std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M UTC", &parts);
  return {text.data(), size};
}

result<actors::certificate_facts> facts_in(const std::string& path) {
  std::ifstream in{path};
  if (!in) return fail(errc::not_found, path + " cannot be read; `troupe certs init` makes it");
  auto facts = actors::facts_of({std::istreambuf_iterator<char>{in}, {}});
  if (!facts) return fail(facts.error().code, path + ": " + facts.error().message);
  return facts;
}

/// Prints a section that can be appended to a deployment file as it is.
void print_section(const certificate_files& files) {
  std::cout << "security:\n  mode: tls\n  secret: " << files.secret
            << "\n  certificate: " << files.certificate << "\n  key: " << files.key
            << "\n  ca: " << files.ca << std::endl;
}

exit_code run_init(const certs_arguments& given) {
  const auto files = actors::init_certificates(absolute(given.folder), given.cluster, given.days);
  if (!files) {
    complain_of_certs(to_string(files.error()));
    return exit_code::failed;
  }
  std::cout
      << "# Made for cluster " << given.cluster << ", good for " << given.days
      << " days (`troupe certs renew`). Copy cluster.secret, node.crt, node.key and ca.crt to\n"
         "# every host of the cluster, to this place; ca.key stays here: anyone who has it can "
         "make\n# nodes of the cluster. If nodes run as another user than you, as services do, "
         "run there:\n"
         "#   chown -R USER "
      << absolute(given.folder) << "\n";
  print_section(*files);
  return exit_code::ok;
}

/// The note about an authority that expires before the certificate that was asked of it.
std::string cut_short(const actors::certificate_facts& made, unsigned days) {
  const auto wanted = std::chrono::system_clock::now() + std::chrono::days{days};
  if (made.life.until + std::chrono::hours{1} > wanted) return {};
  return " instead of " + std::to_string(days) +
         " days, because their authority expires then (append a new one to security.ca on every "
         "host before that)";
}

exit_code run_renew(const certs_arguments& given) {
  const auto files = actors::renew_certificates(absolute(given.folder), given.days);
  if (!files) {
    complain_of_certs(to_string(files.error()));
    return exit_code::failed;
  }
  const auto facts = facts_in(files->certificate);
  if (!facts) {
    complain_of_certs(to_string(facts.error()));
    return exit_code::failed;
  }
  std::cout << files->key << " and " << files->certificate << " were renewed and are valid until "
            << date(facts->life.until) << cut_short(*facts, given.days)
            << "; copy them to the other hosts of the cluster, the key first. Nodes take them over "
               "without a restart."
            << std::endl;
  return exit_code::ok;
}

exit_code run_show(const certs_arguments& given) {
  const auto files = actors::certificate_files_in(absolute(given.folder));
  const auto node = facts_in(files.certificate);
  const auto ca = facts_in(files.ca);
  for (const auto* one : {&node, &ca}) {
    if (*one) continue;
    complain_of_certs(to_string(one->error()));
    return exit_code::failed;
  }
  const auto life = [](const actors::certificate_facts& of) {
    return date(of.life.from) + " to " + date(of.life.until);
  };
  std::cout << "cluster     " << (node->cluster.empty() ? "(none)" : printable(node->cluster))
            << "\nnode.crt    " << life(*node) << "\nca.crt      " << life(*ca) << std::endl;
  const auto now = std::chrono::system_clock::now();
  if (now <= node->life.until && now <= ca->life.until) return exit_code::ok;
  complain_of_certs(
      now > ca->life.until
          ? "the authority has expired; make a new one in another folder (`troupe certs init`)"
          : "the certificate has expired; run `troupe certs renew " + given.folder + "`");
  return exit_code::failed;
}

std::string wrong_cluster(const std::string& name) {
  const auto& rule = config::cluster_name;
  return rule.allows(name) ? std::string{}
                           : "takes " + rule.text() + ": `cluster` of the deployment file";
}

}  // namespace

void add_certs(CLI::App& app, exit_code& code) {
  auto* verb = app.add_subcommand(
      "certs",
      "Make and renew what `security: {mode: tls}` needs: an authority of the cluster, a "
      "certificate\nthat serves all of its nodes, and its secret. Needs no running cluster.");
  verb->require_subcommand(1);
  const auto given = std::make_shared<certs_arguments>();
  const auto folder = [given](CLI::App* of) {
    of->footer(exit_codes_text);
    of->add_option("DIR", given->folder, "The folder that holds the files")->required();
    return of;
  };
  const auto days = [given](CLI::App* of) {
    of->add_option("--days", given->days, "Days for which the certificate is valid, 1 to 3650")
        ->check(CLI::Range(1u, 3650u))
        ->capture_default_str();
  };
  auto* init = folder(verb->add_subcommand(
      "init",
      "Make DIR with ca.crt, ca.key, node.crt, node.key and cluster.secret, readable by their "
      "owner\n"
      "only, and print the section for the deployment file. Overwrites nothing."));
  init->add_option("--cluster", given->cluster, "`cluster` of the deployment file")
      ->required()
      ->check(wrong_cluster);
  days(init);
  init->callback([given, &code] { code = run_init(*given); });
  auto* renew = folder(verb->add_subcommand("renew",
                                            "Replace node.crt and node.key by new ones of the same "
                                            "authority. Nodes take them over\n"
                                            "without a restart; existing connections stay."));
  days(renew);
  renew->callback([given, &code] { code = run_renew(*given); });
  auto* show = folder(verb->add_subcommand(
      "show", "Print the cluster and the dates; fails when the certificate has expired."));
  show->callback([given, &code] { code = run_show(*given); });
}

}  // namespace troupe::deploy::cli
