// A JSON document (RFC 8259), for manifests and the headers of safetensors files.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace recsys {

class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;  // in the order of the text

  Json() = default;  // null

  // Throws std::invalid_argument with the position of a mistake.
  static Json parse(const std::string& text);

  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  bool is_text() const { return std::holds_alternative<std::string>(value_); }

  // The following throw std::invalid_argument if the value has another type.
  bool boolean() const;
  double number() const;
  std::int64_t integer() const;
  const std::string& text() const;
  const Array& array() const;
  const Object& object() const;

  // The value of a key; find returns nullptr and at throws if there is none.
  const Json* find(const std::string& key) const;
  const Json& at(const std::string& key) const;

 private:
  friend class JsonParser;
  std::variant<std::monostate, bool, std::int64_t, double, std::string, Array, Object> value_;
};

}  // namespace recsys
