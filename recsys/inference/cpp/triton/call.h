// One request of a client, from its arrival to its response.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../recsys_predictor.h"
#include "triton_api.h"

namespace recsys::triton {

// An error of a function of Triton, as an exception.
class ApiError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws ApiError if a function of Triton failed.
void check(TRITONSERVER_Error* error);

// Writes a line to the server's log.
void log(triton_enum level, const std::string& message);

// Nanoseconds of the clock that Triton's statistics use.
std::uint64_t now();

// When a batch started, and when its program ran.
struct Times {
  std::uint64_t start = 0;
  std::uint64_t compute_start = 0;
  std::uint64_t compute_end = 0;
};

// Owns a request; every call must be finished by answer or refuse, which release the request.
class Call {
 public:
  explicit Call(TRITONBACKEND_Request* request) : request_(request) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Reads the inputs. Data in one aligned buffer are not copied. Throws ApiError.
  void read();

  // The request for the predictor; valid until the call is finished.
  recsys_request view() const {
    return {tensors_.data(), static_cast<std::int32_t>(tensors_.size())};
  }

  // Sends the outputs that the client wants, of one of the responses.
  void answer(TRITONBACKEND_ModelInstance* instance, recsys_responses* responses,
              std::int32_t index, const Times& times);

  // Sends an error: HTTP 400 for RECSYS_BAD_REQUEST, else 500.
  void refuse(TRITONBACKEND_ModelInstance* instance, recsys_code code, const std::string& message,
              const Times& times);

  std::int64_t num_rows = 0;

 private:
  void send_outputs(TRITONBACKEND_Response* response, recsys_responses* responses,
                    std::int32_t index) const;
  void release(TRITONBACKEND_ModelInstance* instance, bool success, const Times& times);

  TRITONBACKEND_Request* request_;
  std::vector<recsys_tensor> tensors_;
  std::vector<std::unique_ptr<std::uint64_t[]>> copies_;
  std::vector<std::vector<recsys_text>> texts_;  // refer to the copies, or to the request
};

}  // namespace recsys::triton
