#include "hash_index.h"

#include <algorithm>
#include <filesystem>
#include <new>
#include <vector>

#include "files.h"

namespace recsys {
namespace {

// `Table` of recsys/kernels/hashed/hash_index.c, whose members all have 64 bits.
struct CTable {
  void* ids;
  void* last_used = nullptr;
  void* seen = nullptr;
  void* digests;
  void* sketch = nullptr;
  std::int64_t seed, region_bits, first_region, num_regions, lines;
  std::int64_t eviction = 0, half_life = 0, exponent = 1, ttl = 0, admission = 0;
  std::int64_t admission_value = 0, is_shared = 1;
  std::int64_t num_ids;
  std::int64_t results[5] = {};
};

extern "C" std::int64_t recsys_map_ids(CTable* tables, std::int64_t num_tables,
                                       const std::int64_t* ids, std::int64_t step,
                                       std::int64_t pin, std::int64_t is_training,
                                       std::int64_t* rows, std::int64_t* new_rows,
                                       std::int64_t* new_ids, std::int64_t* old);

std::shared_ptr<void> map_part(const std::string& version, const std::string& file,
                               std::int64_t bytes) {
  return map_private((std::filesystem::path(version) / file).string(),
                     static_cast<std::size_t>(bytes));
}

}  // namespace

HashIndex::HashIndex(const Table& table, const std::string& version)
    : files_(*table.index),
      rows_(table.rows),
      ids_(map_part(version, files_.ids, 8 * rows_)),
      digests_(map_part(version, files_.digests, rows_)) {}

void HashIndex::map_ids(std::int64_t* ids, std::int64_t count) const {
  std::int64_t region_bits = 0;
  while (std::int64_t{1} << region_bits < files_.regions) {
    ++region_bits;
  }
  CTable table;
  table.ids = ids_.get();
  table.digests = digests_.get();
  table.seed = files_.seed;
  table.region_bits = region_bits;
  table.first_region = 0;
  table.num_regions = files_.regions;
  table.lines = rows_ / (files_.regions * kLineRows);
  table.num_ids = count;
  std::vector<std::int64_t> rows(static_cast<std::size_t>(count));
  if (recsys_map_ids(&table, 1, ids, 1, 1, 0, rows.data(), nullptr, nullptr,
                     nullptr) != 0) {
    throw std::bad_alloc();
  }
  std::copy(rows.begin(), rows.end(), ids);
}

void HashIndex::write(const std::int64_t* rows, std::int64_t count, const std::int64_t* ids,
                      const std::uint8_t* digests) {
  for (std::int64_t i = 0; i < count; ++i) {
    static_cast<std::int64_t*>(ids_.get())[rows[i]] = ids[i];
    static_cast<std::uint8_t*>(digests_.get())[rows[i]] = digests[i];
  }
}

}  // namespace recsys
