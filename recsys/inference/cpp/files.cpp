#include "files.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <system_error>

#include "error.h"
#include "json.h"

namespace recsys {
namespace {

[[noreturn]] void fail_errno(const std::string& path) {
  throw std::system_error(errno, std::generic_category(), path);
}

class Descriptor {
 public:
  explicit Descriptor(const std::string& path) : fd(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (fd < 0) {
      fail_errno(path);
    }
  }
  ~Descriptor() { close(fd); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  const int fd;
};

class Digest {
 public:
  Digest() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr);
  }

  void add(const void* data, std::size_t bytes) {
    EVP_DigestUpdate(context_.get(), data, bytes);
  }

  std::string hex() {
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned int size = 0;
    EVP_DigestFinal_ex(context_.get(), digest, &size);
    std::string found;
    for (unsigned int i = 0; i < size; ++i) {
      found += "0123456789abcdef"[digest[i] >> 4];
      found += "0123456789abcdef"[digest[i] & 15];
    }
    return found;
  }

 private:
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

}  // namespace

std::string read_file(const std::string& path) {
  const Descriptor file(path);
  std::string found;
  char block[1 << 16];
  while (true) {
    const ssize_t size = read(file.fd, block, sizeof block);
    if (size < 0) {
      fail_errno(path);
    }
    if (size == 0) {
      return found;
    }
    found.append(block, static_cast<std::size_t>(size));
  }
}

std::shared_ptr<void> map_file(const std::string& path, std::size_t bytes) {
  const Descriptor file(path);
  if (bytes == 0) {
    return nullptr;
  }
  void* memory = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file.fd, 0);
  if (memory == MAP_FAILED) {
    fail_errno(path);
  }
  return std::shared_ptr<void>(memory, [bytes](void* mapped) { munmap(mapped, bytes); });
}

std::shared_ptr<void> map_private(const std::string& path, std::size_t bytes) {
  const Descriptor file(path);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                      file.fd, 0);
  if (memory == MAP_FAILED) {
    fail_errno(path);
  }
  return std::shared_ptr<void>(memory, [bytes](void* mapped) { munmap(mapped, bytes); });
}

std::string sha256(const void* data, std::size_t bytes) {
  Digest digest;
  digest.add(data, bytes);
  return digest.hex();
}

std::string sha256_of_file(const std::string& path) {
  const Descriptor file(path);
  Digest digest;
  std::vector<char> block(1 << 20);
  while (true) {
    const ssize_t size = read(file.fd, block.data(), block.size());
    if (size < 0) {
      fail_errno(path);
    }
    if (size == 0) {
      return digest.hex();
    }
    digest.add(block.data(), static_cast<std::size_t>(size));
  }
}

namespace {

recsys_dtype safetensors_dtype(const std::string& name) {
  static const std::map<std::string, recsys_dtype> kNames = {
      {"BOOL", RECSYS_BOOL}, {"U8", RECSYS_UINT8},    {"I32", RECSYS_INT32},
      {"I64", RECSYS_INT64}, {"F16", RECSYS_FLOAT16}, {"BF16", RECSYS_BFLOAT16},
      {"F32", RECSYS_FLOAT32}, {"F64", RECSYS_FLOAT64}};
  const auto found = kNames.find(name);
  if (found == kNames.end()) {
    throw std::invalid_argument(text_of("there is no dtype '", name, "'"));
  }
  return found->second;
}

Tensor tensor_of(const Json& entry, const std::shared_ptr<void>& data, std::size_t start,
                 std::size_t bytes) {
  Tensor tensor;
  tensor.dtype = safetensors_dtype(entry.at("dtype").text());
  std::uint64_t size = size_of(tensor.dtype);
  for (const Json& dim : entry.at("shape").array()) {
    tensor.shape.push_back(dim.integer());
    if (dim.integer() < 0 || __builtin_mul_overflow(size, dim.integer(), &size)) {
      throw std::invalid_argument("a shape has a bad size");
    }
  }
  const Json::Array& range = entry.at("data_offsets").array();
  if (range.size() != 2 || range[0].integer() < 0 || range[1].integer() < range[0].integer() ||
      static_cast<std::uint64_t>(range[1].integer()) > bytes - start ||
      static_cast<std::uint64_t>(range[1].integer() - range[0].integer()) != size) {
    throw std::invalid_argument("data_offsets do not match the shape and the file");
  }
  char* first = static_cast<char*>(data.get()) + start + range[0].integer();
  if (reinterpret_cast<std::uintptr_t>(first) % size_of(tensor.dtype) == 0) {
    tensor.data = std::shared_ptr<void>(data, first);
  } else {
    Tensor copy = allocate(tensor.dtype, tensor.shape);
    std::memcpy(copy.data.get(), first, size);
    tensor = std::move(copy);
  }
  return tensor;
}

}  // namespace

Safetensors parse_safetensors(std::shared_ptr<void> data, std::size_t bytes) {
  std::uint64_t header = 0;
  if (bytes < sizeof header) {
    throw std::invalid_argument("the file is too short");
  }
  std::memcpy(&header, data.get(), sizeof header);
  if (header > bytes - sizeof header) {
    throw std::invalid_argument("the file is too short for its header");
  }
  const std::size_t start = sizeof header + header;
  const Json names =
      Json::parse(std::string(static_cast<const char*>(data.get()) + sizeof header, header));
  Safetensors found;
  for (const auto& [name, entry] : names.object()) {
    if (name == "__metadata__") {
      for (const auto& [key, value] : entry.object()) {
        found.metadata[key] = value.text();
      }
    } else {
      found.tensors[name] = tensor_of(entry, data, start, bytes);
    }
  }
  return found;
}

namespace {

std::filesystem::path temporary_root() { return std::filesystem::temp_directory_path(); }

std::string temporary_prefix() { return text_of("recsys-predictor-", getuid(), "-"); }

// Opens and locks a folder; -1 if it has gone or another process has locked it.
int lock_folder(const std::string& path, bool waits) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) {
    return -1;
  }
  struct stat opened, named;
  if (flock(fd, waits ? LOCK_EX : LOCK_EX | LOCK_NB) == 0 && fstat(fd, &opened) == 0 &&
      stat(path.c_str(), &named) == 0 && opened.st_ino == named.st_ino) {
    return fd;
  }
  close(fd);
  return -1;
}

void remove_abandoned() {
  std::error_code ignored;
  const std::string prefix = temporary_prefix();
  for (const auto& entry : std::filesystem::directory_iterator(temporary_root(), ignored)) {
    if (entry.path().filename().string().rfind(prefix, 0) == 0) {
      const int lock = lock_folder(entry.path().string(), /*waits=*/false);
      if (lock >= 0) {
        std::filesystem::remove_all(entry.path(), ignored);
        close(lock);
      }
    }
  }
}

}  // namespace

TemporaryFolder::TemporaryFolder() {
  remove_abandoned();
  const std::string pattern = (temporary_root() / (temporary_prefix() + "XXXXXX")).string();
  // another process may take a new folder for an abandoned one before it is locked
  while (lock_ < 0) {
    std::vector<char> name(pattern.begin(), pattern.end());
    name.push_back('\0');
    if (mkdtemp(name.data()) == nullptr) {
      fail_errno(pattern);
    }
    path_ = name.data();
    lock_ = lock_folder(path_, /*waits=*/true);
  }
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
  close(lock_);
}

}  // namespace recsys
