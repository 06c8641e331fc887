// Indexes of tables with hashed ids: the row of any 64-bit id.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "manifest.h"

namespace recsys {

// The index of one table; pages are read from the files at first use. Readers and one writer must
// not overlap.
class HashIndex {
 public:
  HashIndex(const Table& table, const std::string& version);

  // Replaces ids [count] by their rows; an unknown id by the first row of its region.
  void map_ids(std::int64_t* ids, std::int64_t count) const;

  // Writes the ids of rows, and their digests, which are 0 for a row without an id.
  void write(const std::int64_t* rows, std::int64_t count, const std::int64_t* ids,
             const std::uint8_t* digests);

 private:
  IndexFiles files_;
  std::int64_t rows_;
  std::shared_ptr<void> ids_;      // int64 [rows]
  std::shared_ptr<void> digests_;  // uint8 [rows]
};

}  // namespace recsys
