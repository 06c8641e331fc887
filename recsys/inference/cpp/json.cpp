#include "json.h"

#include <clocale>
#include <cmath>
#include <cstdlib>
#include <set>
#include <stdexcept>
#include <string_view>

#include <locale.h>

#include "error.h"

namespace recsys {
namespace {

std::size_t num_digits(std::string_view text, std::size_t at) {
  std::size_t end = at;
  while (end < text.size() && text[end] >= '0' && text[end] <= '9') {
    ++end;
  }
  return end - at;
}

// Returns the number of characters of a number at the start of a text; 0 if there is none.
std::size_t size_of_number(std::string_view text, bool& is_integer) {
  std::size_t at = !text.empty() && text[0] == '-';
  const std::size_t whole = num_digits(text, at);
  if (whole == 0 || (whole > 1 && text[at] == '0')) {
    return 0;
  }
  at += whole;
  is_integer = true;
  if (at < text.size() && text[at] == '.' && num_digits(text, at + 1) > 0) {
    at += 1 + num_digits(text, at + 1);
    is_integer = false;
  }
  if (at < text.size() && (text[at] == 'e' || text[at] == 'E')) {
    const bool has_sign = at + 1 < text.size() && (text[at + 1] == '+' || text[at + 1] == '-');
    const std::size_t first = at + 1 + has_sign;
    if (num_digits(text, first) > 0) {
      at = first + num_digits(text, first);
      is_integer = false;
    }
  }
  return at;
}

// The same in all locales of the process; a number below the range of double is 0 or denormal.
double to_double(const std::string& digits) {
  static const locale_t plain = newlocale(LC_ALL_MASK, "C", static_cast<locale_t>(nullptr));
  return strtod_l(digits.c_str(), nullptr, plain);
}

}  // namespace

class JsonParser {
 public:
  explicit JsonParser(const std::string& text) : text_(text) {}

  Json document() {
    Json value = parse_value(0);
    skip_space();
    if (at_ != text_.size()) {
      refuse("the end of the text");
    }
    return value;
  }

 private:
  static constexpr int kMaxDepth = 64;  // the parser is recursive

  [[noreturn]] void refuse(const char* wanted) const {
    throw std::invalid_argument(text_of("JSON must have ", wanted, " at byte ", at_));
  }

  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' ||
                                  text_[at_] == '\t')) {
      ++at_;
    }
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  bool take(char wanted) {
    skip_space();
    if (peek() != wanted) {
      return false;
    }
    ++at_;
    return true;
  }

  bool take_word(const char* word) {
    const std::string wanted(word);
    if (text_.compare(at_, wanted.size(), wanted) != 0) {
      return false;
    }
    at_ += wanted.size();
    return true;
  }

  Json parse_value(int depth) {
    if (depth > kMaxDepth) {
      refuse("fewer nested values");
    }
    skip_space();
    Json found;
    if (peek() == '{') {
      found.value_ = parse_object(depth);
    } else if (peek() == '[') {
      found.value_ = parse_array(depth);
    } else if (peek() == '"') {
      found.value_ = parse_text();
    } else if (take_word("true")) {
      found.value_ = true;
    } else if (take_word("false")) {
      found.value_ = false;
    } else if (!take_word("null")) {
      parse_number(found);
    }
    return found;
  }

  Json::Object parse_object(int depth) {
    Json::Object found;
    std::set<std::string> keys;
    take('{');
    if (take('}')) {
      return found;
    }
    do {
      skip_space();
      if (peek() != '"') {
        refuse("a key");
      }
      std::string key = parse_text();
      if (!keys.insert(key).second) {
        refuse("each key once");
      }
      if (!take(':')) {
        refuse("a colon");
      }
      found.emplace_back(std::move(key), parse_value(depth + 1));
    } while (take(','));
    if (!take('}')) {
      refuse("a comma or the end of an object");
    }
    return found;
  }

  Json::Array parse_array(int depth) {
    Json::Array found;
    take('[');
    if (take(']')) {
      return found;
    }
    do {
      found.push_back(parse_value(depth + 1));
    } while (take(','));
    if (!take(']')) {
      refuse("a comma or the end of an array");
    }
    return found;
  }

  void parse_number(Json& found) {
    bool is_integer = true;
    const std::size_t size = size_of_number(std::string_view(text_).substr(at_), is_integer);
    if (size == 0) {
      refuse("a value");
    }
    const std::string digits = text_.substr(at_, size);
    const double number = to_double(digits);
    if (!std::isfinite(number)) {
      refuse("a finite number");
    }
    found.value_ = number;
    if (is_integer) {
      try {
        found.value_ = static_cast<std::int64_t>(std::stoll(digits));
      } catch (const std::out_of_range&) {  // it stays a number that is no integer of 64 bits
      }
    }
    at_ += size;
  }

  std::string parse_text() {
    std::string found;
    ++at_;
    while (peek() != '"') {
      if (at_ >= text_.size()) {
        refuse("the end of a string");
      }
      if (static_cast<unsigned char>(peek()) < 0x20) {
        refuse("an escape in place of a control character");
      }
      if (peek() == '\\') {
        ++at_;
        parse_escape(found);
      } else {
        found += text_[at_++];
      }
    }
    ++at_;
    return found;
  }

  void parse_escape(std::string& found) {
    const char c = peek();
    ++at_;
    switch (c) {
      case '"': case '\\': case '/': found += c; break;
      case 'b': found += '\b'; break;
      case 'f': found += '\f'; break;
      case 'n': found += '\n'; break;
      case 'r': found += '\r'; break;
      case 't': found += '\t'; break;
      case 'u': append_utf8(found, parse_code_point()); break;
      default: refuse("an escape");
    }
  }

  unsigned parse_code_unit() {
    unsigned found = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char c = peek();
      if (c >= '0' && c <= '9') {
        found = found * 16 + static_cast<unsigned>(c - '0');
      } else if ((c | 32) >= 'a' && (c | 32) <= 'f') {
        found = found * 16 + static_cast<unsigned>((c | 32) - 'a' + 10);
      } else {
        refuse("four hexadecimal digits");
      }
    }
    return found;
  }

  unsigned parse_code_point() {
    const unsigned first = parse_code_unit();
    if (first < 0xD800 || first > 0xDFFF) {
      return first;
    }
    if (first > 0xDBFF || !take_word("\\u")) {
      refuse("both halves of a surrogate pair");
    }
    const unsigned second = parse_code_unit();
    if (second < 0xDC00 || second > 0xDFFF) {
      refuse("both halves of a surrogate pair");
    }
    return 0x10000 + ((first - 0xD800) << 10) + (second & 0x3FF);
  }

  static void append_utf8(std::string& text, unsigned code) {
    const auto more = [&](int shift) {
      text += static_cast<char>(0x80 | ((code >> shift) & 0x3F));
    };
    if (code < 0x80) {
      text += static_cast<char>(code);
    } else if (code < 0x800) {
      text += static_cast<char>(0xC0 | (code >> 6));
      more(0);
    } else if (code < 0x10000) {
      text += static_cast<char>(0xE0 | (code >> 12));
      more(6);
      more(0);
    } else {
      text += static_cast<char>(0xF0 | (code >> 18));
      more(12);
      more(6);
      more(0);
    }
  }

  const std::string& text_;
  size_t at_ = 0;
};

Json Json::parse(const std::string& text) { return JsonParser(text).document(); }

namespace {

template <typename T, typename Variant>
const T& as(const Variant& value, const char* kind) {
  const T* found = std::get_if<T>(&value);
  if (found == nullptr) {
    throw std::invalid_argument(text_of("a JSON value must be ", kind));
  }
  return *found;
}

}  // namespace

bool Json::boolean() const { return as<bool>(value_, "true or false"); }

std::int64_t Json::integer() const { return as<std::int64_t>(value_, "an integer"); }

double Json::number() const {
  const auto* whole = std::get_if<std::int64_t>(&value_);
  return whole != nullptr ? static_cast<double>(*whole) : as<double>(value_, "a number");
}

const std::string& Json::text() const { return as<std::string>(value_, "a string"); }

const Json::Array& Json::array() const { return as<Array>(value_, "an array"); }

const Json::Object& Json::object() const { return as<Object>(value_, "an object"); }

const Json* Json::find(const std::string& key) const {
  for (const auto& [name, value] : object()) {
    if (name == key) {
      return &value;
    }
  }
  return nullptr;
}

const Json& Json::at(const std::string& key) const {
  const Json* found = find(key);
  if (found == nullptr) {
    throw std::invalid_argument(text_of("the key '", key, "' is missing"));
  }
  return *found;
}

}  // namespace recsys
