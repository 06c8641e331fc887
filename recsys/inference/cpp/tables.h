// Embedding tables of a version: mapped files, and updates of their rows.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <shared_mutex>
#include <string>
#include <vector>

#include "batch.h"
#include "hash_index.h"
#include "manifest.h"

namespace recsys {

// Rows to write: one call, or one table of a delta.
struct TableUpdate {
  std::string table;
  const std::int64_t* ids = nullptr;
  std::int64_t num_ids = 0;
  const void* rows = nullptr;  // [num_ids, row_bytes], quantized
  std::int64_t row_bytes = 0;
  // of a table with hashed ids: the id of each row, and its digest; null: they stay
  const std::int64_t* hashed_ids = nullptr;
  const std::uint8_t* digests = nullptr;
};

// A lock for many readers or one writer; a waiting writer is next.
class ReadWriteLock {
 public:
  ReadWriteLock();
  ~ReadWriteLock();
  ReadWriteLock(const ReadWriteLock&) = delete;
  ReadWriteLock& operator=(const ReadWriteLock&) = delete;

  void lock() { pthread_rwlock_wrlock(&lock_); }
  void unlock() { pthread_rwlock_unlock(&lock_); }
  void lock_shared() { pthread_rwlock_rdlock(&lock_); }
  void unlock_shared() { pthread_rwlock_unlock(&lock_); }

 private:
  pthread_rwlock_t lock_;
};

// Copies rows to another device: a table, ids [n], and rows [n, row_bytes].
using CopyRows = std::function<void(const Table&, const std::int64_t*, std::int64_t, const char*)>;

// The buffers of a program, with each table's file mapped at its offset. Pages are read from the
// files at first use, and shared with other processes until an update writes to them. Files are
// never written.
class Tables {
 public:
  Tables(const Manifest& manifest, const std::string& version);

  // Memory of a buffer, of the manifest's size.
  const std::map<std::string, std::shared_ptr<void>>& buffers() const { return memory_; }

  // Throws Error(RECSYS_BAD_DELTA) unless an update fits.
  void check(const TableUpdate& update) const;

  // Throws Error(RECSYS_BAD_DELTA) unless an update has hashed ids just for a table with them.
  void check_hashed(const TableUpdate& update) const;

  // Replaces hashed ids by rows. The caller holds the lock.
  void map_ids(const IdSpan& ids) const;

  // Writes rows, in chunks between which readers run. The update must have been checked.
  void write(const TableUpdate& update);

  // Calls of the program hold this lock, shared.
  ReadWriteLock& lock() { return lock_; }

  // A program on a GPU sets this: rows are written to its memory, too.
  CopyRows copy_rows;

 private:
  const Table& table(const std::string& name) const;

  std::map<std::string, Table> tables_;
  std::map<std::string, HashIndex> indexes_;
  std::map<std::string, std::shared_ptr<void>> memory_;
  ReadWriteLock lock_;
};

// A delta: a file with new rows of tables.
struct Delta {
  std::int64_t sequence = 0;
  std::vector<TableUpdate> updates;
  std::shared_ptr<void> data;

  // Reads a file and compares its checksum. Throws Error(RECSYS_BAD_DELTA).
  static Delta read(const std::string& path, const std::string& base);
};

// The name of a delta in its folder, such as "000000000007.delta".
std::string delta_name(std::int64_t sequence);

}  // namespace recsys
