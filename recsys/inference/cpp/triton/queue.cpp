#include "queue.h"

#include <stdexcept>
#include <utility>

#include "../error.h"
#include "../json.h"

namespace recsys::triton {

Queue::Queue(const std::string& version, const recsys_options& options) {
  if (recsys_open(version.c_str(), &options, &predictor_) != RECSYS_OK) {
    throw std::runtime_error(recsys_last_error());
  }
  max_rows_ = Json::parse(recsys_manifest(predictor_)).at("limits").at("max_rows").integer();
}

Queue::~Queue() { recsys_close(predictor_); }

void Queue::add(TRITONBACKEND_ModelInstance* instance, std::unique_ptr<Call> call) {
  const std::uint64_t start = now();
  recsys_code code = RECSYS_BAD_REQUEST;
  std::string message;
  try {
    call->read();
    const recsys_request view = call->view();
    code = recsys_check(predictor_, &view, &call->num_rows);
    if (code != RECSYS_OK) {
      message = recsys_last_error();
    }
  } catch (const std::exception& error) {
    message = error.what();
  }
  if (code != RECSYS_OK) {
    call->refuse(instance, code, message, {start, start, start});
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  has_room_.wait(lock, [&] { return waiting_rows_ < max_rows_; });
  waiting_rows_ += call->num_rows;
  waiting_.push_back(std::move(call));
  lock.unlock();
  has_calls_.notify_one();
}

Calls Queue::take(const bool& is_stopping) {
  Calls calls;
  std::unique_lock<std::mutex> lock(mutex_);
  has_calls_.wait(lock, [&] { return !waiting_.empty() || is_stopping; });
  std::int64_t num_rows = 0;
  while (!waiting_.empty()) {
    num_rows += waiting_.front()->num_rows;
    if (!calls.empty() && num_rows > max_rows_) {
      break;
    }
    waiting_rows_ -= waiting_.front()->num_rows;
    calls.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
  const bool has_more = !waiting_.empty();
  lock.unlock();
  has_room_.notify_all();
  if (has_more) {
    has_calls_.notify_one();
  }
  return calls;
}

void Queue::run(TRITONBACKEND_ModelInstance* instance, const bool& is_stopping) {
  for (Calls calls = take(is_stopping); !calls.empty(); calls = take(is_stopping)) {
    run_batch(instance, calls);
    log_refused_delta();
  }
}

void Queue::stop(bool& is_stopping) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_stopping = true;
  }
  has_calls_.notify_all();
}

void Queue::run_batch(TRITONBACKEND_ModelInstance* instance, const Calls& calls) {
  Times times;
  times.start = now();
  std::vector<recsys_request> requests;
  requests.reserve(calls.size());
  for (const auto& call : calls) {
    requests.push_back(call->view());
  }
  times.compute_start = times.start;
  recsys_responses* responses = nullptr;
  const recsys_code failure = recsys_run(predictor_, requests.data(),
                                         static_cast<std::int32_t>(requests.size()), &responses);
  const std::string message = failure == RECSYS_OK ? "" : recsys_last_error();
  times.compute_end = now();
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const auto index = static_cast<std::int32_t>(i);
    const recsys_code code =
        failure == RECSYS_OK ? recsys_response_code(responses, index) : failure;
    if (code == RECSYS_OK) {
      calls[i]->answer(instance, responses, index, times);
    } else {
      calls[i]->refuse(instance, code,
                       failure == RECSYS_OK ? recsys_response_message(responses, index) : message,
                       times);
    }
  }
  if (failure == RECSYS_OK) {
    recsys_responses_free(responses);
  }
  TRITONSERVER_Error* error = TRITONBACKEND_ModelInstanceReportBatchStatistics(
      instance, calls.size(), times.start, times.compute_start, times.compute_end, now());
  if (error != nullptr) {
    TRITONSERVER_ErrorDelete(error);
  }
}

void Queue::log_refused_delta() {
  constexpr std::uint64_t kInterval = 1'000'000'000;
  const std::lock_guard<std::mutex> lock(delta_mutex_);
  if (now() - delta_time_ < kInterval) {
    return;
  }
  delta_time_ = now();
  const std::string error = recsys_delta_error(predictor_);
  if (error != delta_error_ && !error.empty()) {
    log(TRITON_LOG_ERROR, error);
  }
  delta_error_ = error;
}

}  // namespace recsys::triton
