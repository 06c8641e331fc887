/* Regions of ids, by which ranks send them to their owners. */
#include <stdint.h>

#include "mix64.h"

/* A feature of a batch; native.py fills it in this order. */
typedef struct {
    int64_t num_ids;
    uint64_t seed;
    int64_t region_bits;
    int64_t region_rows; /* 0: ids are row numbers */
} Feature;

/* Write a row of the region of each hashed id, and the id itself for other features. */
void recsys_region_rows(const Feature *features, int64_t num_features, const int64_t *ids,
                        int64_t *rows)
{
    for (int64_t i = 0; i < num_features; i++) {
        const Feature f = features[i];
        for (int64_t j = 0; j < f.num_ids; j++) {
            uint64_t region = mix64((uint64_t)ids[j] ^ f.seed) >> 1 >> (63 - f.region_bits);
            rows[j] = f.region_rows ? (int64_t)region * f.region_rows : ids[j];
        }
        ids += f.num_ids;
        rows += f.num_ids;
    }
}
