// Files: contents, checksums, mapped memory, and safetensors.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tensor.h"

namespace recsys {

// The contents of a file. Throws std::system_error that names it.
std::string read_file(const std::string& path);

// A whole file in memory, read-only and shared with other processes.
std::shared_ptr<void> map_file(const std::string& path, std::size_t bytes);

// A whole file in memory, whose pages are read at first use; writes do not change the file.
std::shared_ptr<void> map_private(const std::string& path, std::size_t bytes);

// SHA-256 as 64 hexadecimal digits.
std::string sha256(const void* data, std::size_t bytes);
std::string sha256_of_file(const std::string& path);

// A safetensors file: a header with names, dtypes, shapes and metadata, then the tensors' bytes.
struct Safetensors {
  std::map<std::string, std::string> metadata;
  std::map<std::string, Tensor> tensors;  // copies if their bytes are not aligned
};

// Reads a file's contents. Throws std::invalid_argument if they are not a safetensors file.
Safetensors parse_safetensors(std::shared_ptr<void> data, std::size_t bytes);

// A private folder for the files of one process. The destructor removes it. Folders of processes
// that were killed are removed when the next folder is made.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int lock_ = -1;  // of the open folder: the process is alive
};

}  // namespace recsys
