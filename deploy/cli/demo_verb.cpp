#include <iostream>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "troupe/config/deployment.hpp"
#include "troupe/deploy/cli/verbs.hpp"
#include "troupe/deploy/demo.hpp"

namespace troupe::deploy::cli {

void add_demo(CLI::App& app, exit_code& code) {
  auto* verb = app.add_subcommand(
      "demo",
      "Start a supervisor, a prefill and a decode process on this machine, send prompts through a\n"
      "small transformer, and compare each text with what one process alone computes.");
  const auto given = std::make_shared<demo_options>();
  static const auto limit = std::to_string(max_prompt_bytes) + " bytes";
  verb->add_option("--prompt", given->prompt,
                   "Text to continue, at most " + limit +
                       "; thousands take minutes on few cores (a text of its own)")
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
    code = static_cast<exit_code>(run_demo(*given, std::cout, std::cerr));  // its codes are ours
  });
}

}  // namespace troupe::deploy::cli
