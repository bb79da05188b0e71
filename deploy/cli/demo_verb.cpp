#include <algorithm>
#include <iostream>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "troupe/config/deployment.hpp"
#include "troupe/deploy/cli/backends.hpp"
#include "troupe/deploy/cli/verbs.hpp"
#include "troupe/deploy/demo.hpp"

namespace troupe::deploy::cli {

namespace {

/// Checks that the demo can use the backend before it starts anything.
result<void> look_at(const std::string& backend) {
  if (backend == "auto") return {};
  const auto all = backends_here();
  if (!all) return fail(all.error());
  const auto found = std::ranges::find(*all, backend, &actors::backend_report::name);
  if (found != all->end() && found->usable == 0) {
    return fail(errc::backend_unavailable, "--backend " + backend + ": " + verdict_text(*found));
  }
  if (backend == "xgmi") {
    return fail(errc::backend_unavailable,
                "--backend xgmi moves caches between GPUs, but the demo keeps its caches in host "
                "memory; see deploy/examples/gpu.yaml");
  }
  return {};
}

}  // namespace

void add_demo(CLI::App& app, exit_code& code) {
  auto* verb = app.add_subcommand(
      "demo",
      "Start a supervisor, a prefill and a decode process on this machine, send prompts through a\n"
      "small transformer, and compare each text with what a single process computes.");
  const auto given = std::make_shared<demo_options>();
  static const auto limit = std::to_string(max_prompt_bytes) + " bytes";
  verb->add_option("--prompt", given->prompt,
                   "Text to continue, at most " + limit +
                       "; thousands take minutes on few cores (default: a built-in text)")
      ->check([](const std::string& text) {
        return text.size() <= max_prompt_bytes
                   ? std::string{}
                   : "takes at most " + limit + ", found " + std::to_string(text.size());
      });
  verb->add_option("--mode", given->mode, "Who moves the bytes: write (prefill), read (decode)")
      ->check(CLI::IsMember({"write", "read"}))
      ->capture_default_str();
  verb->add_option("--backend", given->backend, "How the bytes move")
      ->check(CLI::IsMember(config::backend_words()))
      ->capture_default_str();
  verb->add_option("--requests", given->requests, "Prompts, one after the other")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  verb->add_option("--max-tokens", given->max_tokens, "Tokens of each text")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  verb->callback([given, &code] {
    if (const auto usable = look_at(given->backend); !usable) {
      std::cerr << "troupe demo: " << to_string(usable.error()) << "\n";
      code = exit_code::usage;
      return;
    }
    code = static_cast<exit_code>(run_demo(*given, std::cout, std::cerr));  // its codes are ours
  });
}

}  // namespace troupe::deploy::cli
