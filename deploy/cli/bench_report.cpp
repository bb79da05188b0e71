#include "troupe/deploy/cli/bench_report.hpp"

#include <ostream>

#include <nlohmann/json.hpp>

#include "troupe/deploy/cli/text_table.hpp"
#include "troupe/deploy/report_json.hpp"

namespace troupe::deploy::cli {

namespace {

double seconds(std::chrono::nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}
double microseconds(std::chrono::duration<double, std::nano> time) {
  return std::chrono::duration<double, std::micro>(time).count();
}
double per_second(double amount, std::chrono::nanoseconds time) {
  return time.count() > 0 ? amount / seconds(time) : 0.0;
}

std::string latency_text(std::chrono::nanoseconds time) {
  const auto us = microseconds(time);
  if (us < 1000.0) return fixed_text(us, 1) + " us";
  return us < 1e6 ? fixed_text(us / 1e3, 2) + " ms" : fixed_text(us / 1e6, 2) + " s";
}

}  // namespace

std::string throughput_text(const bench_outcome& outcome) {
  return fixed_text(per_second(static_cast<double>(outcome.bytes), outcome.elapsed) / 1e9, 3) +
         " GB/s";
}

void print_head(const bench_report& planned, std::ostream& out) {
  const auto& options = planned.options;
  const auto blocks = blocks_per_request(options);
  out << "supervisor  " << planned.supervisor << "; meanwhile: troupe status " << planned.supervisor
      << "\n"
      << "cache       " << options.layers << " layers, " << options.kv_heads << " KV heads of "
      << options.head_dim << ", " << options.dtype << ", blocks of " << options.block_tokens
      << " tokens\n"
      << "transfer    " << (options.blocks == 0 ? options.tokens : blocks * options.block_tokens)
      << " tokens in " << blocks << " blocks "
      << (options.contiguous ? "side by side" : "dealt out at random") << ": "
      << bytes_text(planned.request_bytes) << "; " << options.concurrency << " at once, "
      << options.mode << " mode, " << (options.polling ? "polling" : "event-driven") << ", "
      << (options.in_process ? "both engines in this process"
                             : "the prefill engine in a process "
                               "of its own")
      << std::endl;
}

void print_results(const bench_report& report, std::ostream& out) {
  const auto& o = report.outcome;
  if (!report.link.peer.empty())
    out << "link        " << report.link.backend << ", " << report.link.lanes
        << (report.link.lanes == 1 ? " lane: " : " lanes: ") << printable(report.link.reason)
        << "\n";
  out << "throughput  " << throughput_text(o) << "  ("
      << fixed_text(per_second(static_cast<double>(o.transfers), o.elapsed), 1) << " transfers/s, "
      << o.transfers << " in " << fixed_text(seconds(o.elapsed), 2) << " s)\n"
      << "latency     p50 " << latency_text(o.latency.percentile(0.50)) << "   p90 "
      << latency_text(o.latency.percentile(0.90)) << "   p99 "
      << latency_text(o.latency.percentile(0.99)) << "   max " << latency_text(o.latency.max())
      << "\n";
  if (report.options.verify)
    out << "verified    every byte of " << o.verified << " transfers, in rounds of "
        << report.options.concurrency << "; writing and comparing took "
        << fixed_text(seconds(o.lasted - o.elapsed), 2) << " s, which do not count\n";
  out << std::flush;
}

std::string to_json(const bench_report& report) {
  const auto& o = report.outcome;
  const auto& options = report.options;
  auto out = nlohmann::json::object();
  out["version"] = TROUPE_VERSION;
  out["supervisor"] = report.supervisor;
  out["load"] = {{"layers", options.layers},
                 {"kv_heads", options.kv_heads},
                 {"head_dim", options.head_dim},
                 {"dtype", options.dtype},
                 {"block_tokens", options.block_tokens},
                 {"blocks_per_transfer", blocks_per_request(options)},
                 {"bytes_per_transfer", report.request_bytes},
                 {"concurrency", options.concurrency},
                 {"mode", options.mode},
                 {"polling", options.polling},
                 {"in_process", options.in_process},
                 {"contiguous", options.contiguous},
                 {"warm_up", warm_up_of(options)}};
  out["link"] = {{"backend", report.link.backend},
                 {"asked_for", options.backend},
                 {"reason", report.link.reason},
                 {"lanes", report.link.lanes}};
  out["transfers"] = o.transfers;
  out["bytes"] = o.bytes;
  out["seconds"] = seconds(o.elapsed);
  out["bytes_per_second"] = per_second(static_cast<double>(o.bytes), o.elapsed);
  out["transfers_per_second"] = per_second(static_cast<double>(o.transfers), o.elapsed);
  out["latency_us"] = {{"mean", microseconds(o.latency.mean())},
                       {"p50", microseconds(o.latency.percentile(0.50))},
                       {"p90", microseconds(o.latency.percentile(0.90))},
                       {"p99", microseconds(o.latency.percentile(0.99))},
                       {"max", microseconds(o.latency.max())}};
  out["verified"] = options.verify ? nlohmann::json(o.verified) : nlohmann::json{};
  out["verify_seconds"] =
      options.verify ? nlohmann::json(seconds(o.lasted - o.elapsed)) : nlohmann::json{};
  out["interrupted"] = o.interrupted;
  return text_of(out, 2);
}

}  // namespace troupe::deploy::cli
