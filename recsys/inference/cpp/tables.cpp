#include "tables.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <stdexcept>

#include "error.h"
#include "files.h"

namespace recsys {
namespace {

// Rows that are written while readers wait: about 50 us.
constexpr std::int64_t kChunkRows = 512;

std::shared_ptr<void> reserve(const Buffer& buffer) {
  const auto bytes = static_cast<std::size_t>(buffer.bytes);
  if (bytes == 0) {
    return nullptr;
  }
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    fail(RECSYS_BAD_PACKAGE, "Memory of ", bytes, " bytes for ", buffer.name,
         " must be available; ", std::strerror(errno), ".");
  }
  return std::shared_ptr<void>(memory, [bytes](void* mapped) { munmap(mapped, bytes); });
}

void map_table(const Table& table, const std::string& path, char* buffer) {
  const auto bytes = static_cast<std::size_t>(table.rows * table.row_bytes);
  if (bytes == 0) {
    return;
  }
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  void* mapped = MAP_FAILED;
  if (fd >= 0) {
    mapped = mmap(buffer + table.offset, bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd, 0);
  }
  const int error = errno;
  if (fd >= 0) {
    close(fd);
  }
  if (mapped == MAP_FAILED) {
    fail(RECSYS_BAD_PACKAGE, "'", path, "' must be a readable file; ", std::strerror(error), ".");
  }
  madvise(mapped, bytes, MADV_RANDOM);  // no reading ahead of rows that nobody asked for
}

}  // namespace

ReadWriteLock::ReadWriteLock() {
  pthread_rwlockattr_t attributes;
  pthread_rwlockattr_init(&attributes);
  // otherwise updates would wait as long as calls overlap
  pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
  pthread_rwlock_init(&lock_, &attributes);
  pthread_rwlockattr_destroy(&attributes);
}

ReadWriteLock::~ReadWriteLock() { pthread_rwlock_destroy(&lock_); }

Tables::Tables(const Manifest& manifest, const std::string& version) {
  for (const Buffer& buffer : manifest.buffers) {
    memory_[buffer.name] = reserve(buffer);
  }
  for (const Table& table : manifest.tables) {
    map_table(table, (std::filesystem::path(version) / table.file).string(),
              static_cast<char*>(memory_[table.buffer].get()));
    tables_[table.name] = table;
    if (table.index.has_value()) {
      indexes_.insert({table.name, HashIndex(table, version)});
    }
  }
}

const Table& Tables::table(const std::string& name) const {
  const auto found = tables_.find(name);
  if (found == tables_.end()) {
    fail(RECSYS_BAD_DELTA, "An update must name a table of the package; received '", name, "'.");
  }
  return found->second;
}

void Tables::check(const TableUpdate& update) const {
  const Table& table = this->table(update.table);
  if (update.row_bytes != table.row_bytes) {
    fail(RECSYS_BAD_DELTA, "Rows of table '", table.name, "' must have ", table.row_bytes,
         " bytes; received ", update.row_bytes, ".");
  }
  for (std::int64_t i = 0; i < update.num_ids; ++i) {
    if (update.ids[i] < 0 || update.ids[i] >= table.rows) {
      fail(RECSYS_BAD_DELTA, "Row ids of table '", table.name, "' must be from 0 to ",
           table.rows - 1, "; received ", update.ids[i], " at position ", i, ".");
    }
  }
}

void Tables::check_hashed(const TableUpdate& update) const {
  const bool is_hashed = indexes_.count(update.table) > 0;
  if (update.num_ids > 0 && is_hashed != (update.hashed_ids != nullptr)) {
    fail(RECSYS_BAD_DELTA, "A delta must have hashed ids for the tables with hashed ids; table '",
         update.table, "' has ", is_hashed ? "none" : "some", ".");
  }
}

void Tables::map_ids(const IdSpan& ids) const {
  indexes_.at(ids.table).map_ids(ids.ids, ids.count);
}

void Tables::write(const TableUpdate& update) {
  const Table& table = this->table(update.table);
  const auto index = indexes_.find(update.table);
  const auto row_bytes = static_cast<std::size_t>(table.row_bytes);
  char* first = static_cast<char*>(memory_[table.buffer].get()) + table.offset;
  const char* rows = static_cast<const char*>(update.rows);
  for (std::int64_t start = 0; start < update.num_ids; start += kChunkRows) {
    const std::int64_t count = std::min(kChunkRows, update.num_ids - start);
    const std::int64_t* ids = update.ids + start;
    const char* chunk = rows + static_cast<std::size_t>(start) * row_bytes;
    const std::unique_lock<ReadWriteLock> guard(lock_);
    for (std::int64_t i = 0; i < count; ++i) {
      std::memcpy(first + static_cast<std::size_t>(ids[i]) * row_bytes,
                  chunk + static_cast<std::size_t>(i) * row_bytes, row_bytes);
    }
    if (copy_rows) {
      copy_rows(table, ids, count, chunk);
    }
    if (update.hashed_ids != nullptr && index != indexes_.end()) {
      index->second.write(ids, count, update.hashed_ids + start, update.digests + start);
    }
  }
}

namespace {

std::string metadata(const Safetensors& file, const char* key) {
  const auto found = file.metadata.find(key);
  if (found == file.metadata.end()) {
    throw std::invalid_argument(text_of("its metadata has no '", key, "'"));
  }
  return found->second;
}

// The checksum of a delta covers the file with zeros in place of the checksum.
std::string checksum_of(const void* data, std::size_t bytes, const std::string& checksum) {
  std::string contents(static_cast<const char*>(data), bytes);
  const std::size_t at = contents.find(checksum);
  if (checksum.size() == 64 && at != std::string::npos) {
    contents.replace(at, checksum.size(), checksum.size(), '0');
  }
  return sha256(contents.data(), contents.size());
}

Delta parse_delta(const std::shared_ptr<void>& data, std::size_t bytes, const std::string& base) {
  Safetensors file = parse_safetensors(data, bytes);
  if (metadata(file, "format") != "recsys.delta/1") {
    throw std::invalid_argument(
        text_of("its format is '", metadata(file, "format"), "' instead of 'recsys.delta/1'"));
  }
  const std::string checksum = metadata(file, "checksum");
  if (checksum_of(data.get(), bytes, checksum) != checksum) {
    throw std::invalid_argument("it does not match its checksum");
  }
  if (metadata(file, "base") != base) {
    throw std::invalid_argument(text_of("it belongs to the version with manifest ",
                                        metadata(file, "base"), ", and this version has ", base));
  }
  Delta delta;
  std::size_t num_tensors = 0;
  delta.sequence = std::stoll(metadata(file, "sequence"));
  delta.data = data;
  for (auto& [name, ids] : file.tensors) {
    if (name.size() < 4 || name.compare(name.size() - 4, 4, ".ids") != 0) {
      continue;
    }
    const std::string table = name.substr(0, name.size() - 4);
    const auto rows = file.tensors.find(table + ".rows");
    num_tensors += 2;
    if (rows == file.tensors.end() || ids.dtype != RECSYS_INT64 || ids.shape.size() != 1 ||
        rows->second.dtype != RECSYS_UINT8 || rows->second.shape.size() != 2 ||
        rows->second.shape[0] != ids.shape[0]) {
      throw std::invalid_argument(
          text_of("table '", table, "' must have int64 ids [n] and uint8 rows [n, bytes]"));
    }
    delta.updates.push_back({table, static_cast<const std::int64_t*>(ids.data.get()),
                             ids.shape[0], rows->second.data.get(), rows->second.shape[1]});
    const auto hashed = file.tensors.find(table + ".hashed_ids");
    if (hashed != file.tensors.end()) {
      const auto digests = file.tensors.find(table + ".digests");
      if (digests == file.tensors.end() || hashed->second.dtype != RECSYS_INT64 ||
          hashed->second.shape != ids.shape || digests->second.dtype != RECSYS_UINT8 ||
          digests->second.shape != ids.shape) {
        throw std::invalid_argument(
            text_of("table '", table, "' must have int64 hashed_ids [n] and uint8 digests [n]"));
      }
      delta.updates.back().hashed_ids = static_cast<std::int64_t*>(hashed->second.data.get());
      delta.updates.back().digests = static_cast<std::uint8_t*>(digests->second.data.get());
      num_tensors += 2;
    }
  }
  if (num_tensors != file.tensors.size()) {
    throw std::invalid_argument("each table must have ids and rows");
  }
  // copies of unaligned tensors live as long as the delta
  auto kept = std::make_shared<Safetensors>(std::move(file));
  delta.data = std::shared_ptr<void>(kept, data.get());
  return delta;
}

}  // namespace

Delta Delta::read(const std::string& path, const std::string& base) {
  try {
    const std::size_t bytes = std::filesystem::file_size(path);
    // a private copy: another process may truncate the file
    Tensor contents = allocate(RECSYS_UINT8, {static_cast<std::int64_t>(bytes)});
    const std::string text = read_file(path);
    if (text.size() != bytes) {
      throw std::invalid_argument("it changed while it was read");
    }
    std::memcpy(contents.data.get(), text.data(), bytes);
    return parse_delta(contents.data, bytes, base);
  } catch (const std::exception& error) {
    fail(RECSYS_BAD_DELTA, "'", path, "' must be a delta of this version; ", error.what(), ".");
  }
}

std::string delta_name(std::int64_t sequence) {
  char name[32];
  std::snprintf(name, sizeof name, "%012lld.delta", static_cast<long long>(sequence));
  return name;
}

}  // namespace recsys
