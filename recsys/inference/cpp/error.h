// Errors of the predictor, each with its code of the C API.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "recsys_predictor.h"

namespace recsys {

class Error : public std::runtime_error {
 public:
  Error(recsys_code code, const std::string& message)
      : std::runtime_error(message), code(code) {}

  const recsys_code code;
};

// Joins the parts of a message.
template <typename... Parts>
std::string text_of(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <typename... Parts>
[[noreturn]] void fail(recsys_code code, const Parts&... parts) {
  throw Error(code, text_of(parts...));
}

}  // namespace recsys
