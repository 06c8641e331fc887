// Latency of calls while rows of tables are updated, beside the same calls without updates.
//
//     row_updates VERSION ROWS_PER_SECOND CALLS_PER_RUN RUNS FEATURES TABLES TABLE_ROWS ROW_BYTES
//
// One thread scores one row at half of the rate that it could reach; another one updates random rows
// of the tables t0, t1, ... in updates of 4,000 rows. Runs with and without updates take turns.
// Prints JSON: medians over the runs of the latencies in microseconds and of their ratios.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "recsys_predictor.h"

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

namespace {

void check(recsys_code code) {
  if (code != RECSYS_OK) {
    std::fprintf(stderr, "row_updates: %s\n", recsys_last_error());
    std::_Exit(1);  // another thread may run
  }
}

double at_share(std::vector<double> values, double share) {
  const auto place = values.begin() + static_cast<long>(share * (values.size() - 1));
  std::nth_element(values.begin(), place, values.end());
  return *place;
}

// Scores a row with random ids.
class Client {
 public:
  Client(recsys_predictor* predictor, long features, long table_rows)
      : predictor_(predictor), ids_(features), table_rows_(table_rows) {
    for (long f = 0; f < features; ++f) {
      names_.push_back("f" + std::to_string(f));
    }
  }

  double call() {
    static const std::int64_t kDense[] = {1, 13}, kIds[] = {1};
    for (std::int64_t& id : ids_) {
      id = static_cast<std::int64_t>(generator_() % static_cast<std::uint64_t>(table_rows_));
    }
    std::vector<recsys_tensor> tensors = {
        {"dense_features", RECSYS_FLOAT32, 2, kDense, nullptr, dense_}};
    for (std::size_t f = 0; f < ids_.size(); ++f) {
      tensors.push_back({names_[f].c_str(), RECSYS_INT64, 1, kIds, nullptr, &ids_[f]});
    }
    const recsys_request request{tensors.data(), static_cast<std::int32_t>(tensors.size())};
    const auto start = Clock::now();
    recsys_responses* responses = nullptr;
    check(recsys_run(predictor_, &request, 1, &responses));
    check(recsys_response_code(responses, 0));
    recsys_responses_free(responses);
    return Seconds(Clock::now() - start).count() * 1e6;
  }

 private:
  recsys_predictor* predictor_;
  std::vector<std::string> names_;
  std::vector<std::int64_t> ids_;
  long table_rows_;
  float dense_[13] = {};
  std::mt19937_64 generator_{0};
};

// Updates random rows at a rate until it is stopped; returns the rows per second.
double update(recsys_predictor* predictor, double rate, long tables, long table_rows,
              long row_bytes, const std::atomic<bool>& stops) {
  constexpr long kRows = 4000;
  std::mt19937_64 generator(1);
  std::vector<std::int64_t> ids(kRows);
  const std::vector<char> rows(static_cast<std::size_t>(kRows * row_bytes), 0);
  const auto start = Clock::now();
  long written = 0;
  while (!stops) {
    for (std::int64_t& id : ids) {
      id = static_cast<std::int64_t>(generator() % static_cast<std::uint64_t>(table_rows));
    }
    const std::string table = "t" + std::to_string(written / kRows % tables);
    check(recsys_update(predictor, table.c_str(), ids.data(), kRows, rows.data(), row_bytes));
    written += kRows;
    std::this_thread::sleep_until(start + std::chrono::duration_cast<Clock::duration>(
                                              Seconds(static_cast<double>(written) / rate)));
  }
  return static_cast<double>(written) / Seconds(Clock::now() - start).count();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 9) {
    std::fprintf(stderr, "row_updates VERSION ROWS_PER_SECOND CALLS_PER_RUN RUNS FEATURES TABLES "
                         "TABLE_ROWS ROW_BYTES\n");
    return 1;
  }
  const double rate = std::atof(argv[2]);
  const long calls = std::atol(argv[3]), runs = std::atol(argv[4]);
  const long features = std::atol(argv[5]), tables = std::atol(argv[6]);
  const long table_rows = std::atol(argv[7]), row_bytes = std::atol(argv[8]);
  recsys_options options;
  recsys_default_options(&options);
  options.num_threads = 1;
  options.verify_tables = 0;
  recsys_predictor* predictor = nullptr;
  check(recsys_open(argv[1], &options, &predictor));
  Client client(predictor, features, table_rows);
  std::vector<double> warm;
  for (int i = 0; i < 2000; ++i) {
    warm.push_back(client.call());
  }
  const Seconds period(2e-6 * at_share(warm, 0.5));
  const auto one_run = [&](bool with_updates, double& rows_per_second) {
    std::atomic<bool> stops{false};
    std::thread updater;
    if (with_updates) {
      updater = std::thread([&] {
        rows_per_second = update(predictor, rate, tables, table_rows, row_bytes, stops);
      });
    }
    std::vector<double> times;
    auto next = Clock::now();
    for (long i = 0; i < calls; ++i) {
      times.push_back(client.call());
      next += std::chrono::duration_cast<Clock::duration>(period);
      std::this_thread::sleep_until(next);
    }
    stops = true;
    if (updater.joinable()) {
      updater.join();
    }
    return times;
  };
  double reached = 0;
  one_run(true, reached);  // the first update of a page copies it
  std::vector<double> p50, p99, p50_with, p99_with, ratio_50, ratio_99, rates;
  for (long run = 0; run < runs; ++run) {
    const std::vector<double> without = one_run(false, reached), with = one_run(true, reached);
    p50.push_back(at_share(without, 0.5));
    p99.push_back(at_share(without, 0.99));
    p50_with.push_back(at_share(with, 0.5));
    p99_with.push_back(at_share(with, 0.99));
    ratio_50.push_back(p50_with.back() / p50.back());
    ratio_99.push_back(p99_with.back() / p99.back());
    rates.push_back(reached);
  }
  recsys_close(predictor);
  std::printf("{\"rows_per_second\": %.0f, \"p50_us\": %.1f, \"p50_with_us\": %.1f, "
              "\"p50_ratio\": %.3f, \"p99_us\": %.1f, \"p99_with_us\": %.1f, "
              "\"p99_ratio\": %.3f}\n",
              at_share(rates, 0.5), at_share(p50, 0.5), at_share(p50_with, 0.5),
              at_share(ratio_50, 0.5), at_share(p99, 0.5), at_share(p99_with, 0.5),
              at_share(ratio_99, 0.5));
  return 0;
}
