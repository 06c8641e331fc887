// Requests that wait for one device, and the batches that are made of them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "call.h"

namespace recsys::triton {

using Calls = std::vector<std::unique_ptr<Call>>;

// A predictor and the calls that wait for it. The instances on its device share it.
class Queue {
 public:
  // Opens a version of a package. Throws std::runtime_error with the message of the predictor.
  Queue(const std::string& version, const recsys_options& options);
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // Checks a call and adds it. Refuses a bad one. Waits while the next batch is full, so that
  // Triton's own queue holds all later requests and its limits apply.
  void add(TRITONBACKEND_ModelInstance* instance, std::unique_ptr<Call> call);

  // Runs batches until `stop` is called for this instance.
  void run(TRITONBACKEND_ModelInstance* instance, const bool& is_stopping);

  // Has `run` return; sets the flag that it was called with.
  void stop(bool& is_stopping);

 private:
  Calls take(const bool& is_stopping);
  void run_batch(TRITONBACKEND_ModelInstance* instance, const Calls& calls);
  void log_refused_delta();

  recsys_predictor* predictor_ = nullptr;
  std::int64_t max_rows_ = 0;

  std::mutex mutex_;
  std::condition_variable has_calls_;
  std::condition_variable has_room_;
  std::deque<std::unique_ptr<Call>> waiting_;
  std::int64_t waiting_rows_ = 0;

  std::mutex delta_mutex_;
  std::uint64_t delta_time_ = 0;  // of the last look
  std::string delta_error_;
};

}  // namespace recsys::triton
