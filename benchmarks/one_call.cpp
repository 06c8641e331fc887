// Times one call of a predictor beside one call of a TorchScript program, in turn.
//
//     one_call VERSION SCRIPT ROWS ROUNDS FEATURES TABLE_ROWS
//
// Both get the same random ids, one per feature and row, and 13 dense values. Prints JSON: the
// median times in microseconds, and the median of the ratios of neighbours.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include "recsys_predictor.h"

using Clock = std::chrono::steady_clock;

namespace {

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void check(recsys_code code) {
  if (code != RECSYS_OK) {
    std::fprintf(stderr, "one_call: %s\n", recsys_last_error());
    std::exit(1);
  }
}

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "one_call VERSION SCRIPT ROWS ROUNDS FEATURES TABLE_ROWS\n");
    return 1;
  }
  at::set_num_threads(1);
  const long rows = std::atol(argv[3]), rounds = std::atol(argv[4]);
  const long features = std::atol(argv[5]), table_rows = std::atol(argv[6]);
  recsys_options options;
  recsys_default_options(&options);
  options.num_threads = 1;
  recsys_predictor* predictor = nullptr;
  check(recsys_open(argv[1], &options, &predictor));
  torch::jit::Module script = torch::jit::load(argv[2]);
  std::vector<std::string> names;
  for (long f = 0; f < features; ++f) {
    names.push_back("f" + std::to_string(f));
  }
  std::vector<double> ours, theirs, ratios;
  double largest = 0;
  for (long round = -20; round < rounds; ++round) {
    const c10::InferenceMode guard;
    const at::Tensor dense = at::rand({rows, 13});
    const at::Tensor ids = at::randint(table_rows, {features * rows}, at::kLong);
    const at::Tensor lengths = at::full({features * rows}, 1, at::kLong);
    const std::int64_t dense_shape[] = {rows, 13}, id_shape[] = {rows};
    double score = 0, wanted = 0;
    const auto run_ours = [&] {
      const auto start = Clock::now();
      std::vector<recsys_tensor> tensors = {
          {"dense_features", RECSYS_FLOAT32, 2, dense_shape, nullptr, dense.data_ptr()}};
      for (long f = 0; f < features; ++f) {
        tensors.push_back({names[f].c_str(), RECSYS_INT64, 1, id_shape, nullptr,
                           ids.data_ptr<std::int64_t>() + f * rows});
      }
      const recsys_request request{tensors.data(), static_cast<std::int32_t>(tensors.size())};
      recsys_responses* responses = nullptr;
      check(recsys_run(predictor, &request, 1, &responses));
      const recsys_tensor* outputs = nullptr;
      if (recsys_response_outputs(responses, 0, &outputs) != 1) {
        std::fprintf(stderr, "one_call: %s\n", recsys_response_message(responses, 0));
        std::exit(1);
      }
      score = static_cast<const float*>(outputs[0].data)[0];
      recsys_responses_free(responses);
      return microseconds_since(start);
    };
    const auto run_theirs = [&] {
      const auto start = Clock::now();
      wanted = script.forward({dense, ids, lengths}).toTensor().data_ptr<float>()[0];
      return microseconds_since(start);
    };
    double one = 0, other = 0;
    if (round % 2 == 0) {
      one = run_ours();
      other = run_theirs();
    } else {
      other = run_theirs();
      one = run_ours();
    }
    largest = std::max(largest, std::abs(score - wanted));
    if (round >= 0) {
      ours.push_back(one);
      theirs.push_back(other);
      ratios.push_back(one / other);
    }
  }
  recsys_close(predictor);
  std::printf("{\"rows\": %ld, \"us\": %.1f, \"torchscript_us\": %.1f, \"ratio\": %.3f, "
              "\"largest_difference\": %.2g}\n",
              rows, median(ours), median(theirs), median(ratios), largest);
  return 0;
}
