// Eight threads that score, update, apply deltas and swap versions: run under ThreadSanitizer.
//
//     stress VERSION OTHER ROUNDS
//
// Rows of table `t` hold one byte eight times, so a row that is read while it is written shows. The
// caller writes deltas meanwhile, which give rows of `h` to other ids.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "recsys_predictor.h"

namespace {

std::atomic<long> num_calls{0};

void check(recsys_code code) {
  if (code != RECSYS_OK) {
    std::fprintf(stderr, "stress: %s\n", recsys_last_error());
    std::abort();
  }
}

void score(recsys_predictor* predictor, int rounds) {
  const float dense[] = {1, 2, 3, 4};
  const std::int64_t ids[] = {0, 1, 2, 3, 1, 0}, lengths[] = {4, 2};
  const std::int64_t dense_shape[] = {2, 2}, ids_shape[] = {6}, rows[] = {2};
  const std::int64_t bad_ids[] = {0, 1, 2, 3, 1, 99};
  for (int i = 0; i < rounds; ++i) {
    const recsys_tensor good[] = {
        {"dense", RECSYS_FLOAT32, 2, dense_shape, nullptr, dense},
        {"a", RECSYS_INT64, 1, ids_shape, nullptr, ids},
        {"a.lengths", RECSYS_INT64, 1, rows, nullptr, lengths},
        {"h", RECSYS_INT64, 1, ids_shape, nullptr, ids},
        {"h.lengths", RECSYS_INT64, 1, rows, nullptr, lengths}};
    recsys_tensor bad[] = {good[0], good[1], good[2]};
    bad[1].data = bad_ids;
    const recsys_request requests[] = {{good, 5}, {bad, 3}, {good, 5}};
    recsys_responses* responses = nullptr;
    check(recsys_run(predictor, requests, 3, &responses));
    if (recsys_response_code(responses, 1) != RECSYS_BAD_REQUEST) {
      std::abort();
    }
    for (const int request : {0, 2}) {
      const recsys_tensor* outputs = nullptr;
      if (recsys_response_outputs(responses, request, &outputs) != 3) {
        std::fprintf(stderr, "stress: %s\n", recsys_response_message(responses, request));
        std::abort();
      }
      const auto* bytes = static_cast<const unsigned char*>(outputs[1].data);
      for (int row = 0; row < 6; ++row) {
        for (int column = 1; column < 8; ++column) {
          if (bytes[8 * row + column] != bytes[8 * row]) {
            std::fprintf(stderr, "stress: a row was read while it was written\n");
            std::abort();
          }
        }
      }
    }
    recsys_responses_free(responses);
    ++num_calls;
  }
}

void update(recsys_predictor* predictor, int rounds) {
  const std::int64_t ids[] = {3, 0, 2, 1};
  for (int i = 0; i < rounds; ++i) {
    unsigned char rows[4 * 8];
    std::memset(rows, i, sizeof rows);
    check(recsys_update(predictor, "t", ids, 4, rows, 8));
  }
}

void swap(recsys_predictor* predictor, const char* first, const char* second, int rounds) {
  for (int i = 0; i < rounds; ++i) {
    check(recsys_swap(predictor, i % 2 == 0 ? second : first));
    recsys_manifest(predictor);
    recsys_sequence(predictor);
    recsys_delta_error(predictor);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc == 4 ? std::atoi(argv[3]) : 0;
  if (rounds < 1) {
    std::fprintf(stderr, "stress VERSION OTHER ROUNDS\n");
    return 1;
  }
  recsys_options options;
  recsys_default_options(&options);
  options.num_runners = 8;
  options.poll_ms = 1;
  recsys_predictor* predictor = nullptr;
  check(recsys_open(argv[1], &options, &predictor));
  std::vector<std::thread> threads;
  for (int i = 0; i < 5; ++i) {
    threads.emplace_back(score, predictor, rounds);
  }
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back(update, predictor, rounds);
  }
  threads.emplace_back(swap, predictor, argv[1], argv[2], rounds / 20 + 1);
  for (std::thread& thread : threads) {
    thread.join();
  }
  recsys_close(predictor);
  std::printf("%ld calls\n", num_calls.load());
  return 0;
}
