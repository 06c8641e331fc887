/* Initial weights of rows that got a new id.
 *
 * Value `c` of an id's row is half `c % 2` of word `c / 2 + 1` of SplitMix64, started at a hash of
 * seed and id, as a number from `low` on; embedding_init.py has the same in PyTorch. Results are
 * equal bit for bit, so the compiler must not contract products and sums (-ffp-contract=off). */
#include <stdint.h>

#include "mix64.h"

_Static_assert(sizeof(void *) == 8, "native.py passes pointers as 64-bit numbers");
enum { WORDS = 64, AHEAD = 6, LINE_VALUES = 16 };
/* WORDS: of a row that are computed at once. AHEAD: rows between a prefetch and its use. */

/* New rows of a table; native.py fills it in this order. */
typedef struct {
    int64_t num_rows;
    int64_t first_column; /* of the shard */
    uint64_t seed;
    double low, scale;
} NewRows;

/* Fill `n` values, at most 2 * WORDS, from an even column on. */
static void fill_values(float *values, int64_t n, uint64_t start, int64_t column, float low,
                        float scale)
{
    uint32_t halves[2 * WORDS];
    for (int64_t i = 0; i < (n + 1) / 2; i++) {
        uint64_t state = start + (uint64_t)(column / 2 + i + 1) * 0x9e3779b97f4a7c15u;
        uint64_t word = mix64(state);
        halves[2 * i] = (uint32_t)word;
        halves[2 * i + 1] = (uint32_t)(word >> 32);
    }
    for (int64_t i = 0; i < n; i++)
        values[i] = (float)(int32_t)(halves[i] >> 8) * scale + low;
}

static void fill_row(float *row, int64_t dim, int64_t id, const NewRows *t)
{
    float low = (float)t->low, scale = (float)t->scale;
    uint64_t start = mix64((uint64_t)id ^ t->seed);
    int64_t column = t->first_column, end = column + dim;
    if (column % 2 && dim > 0) {
        float both[2];
        fill_values(both, 2, start, column++ - 1, low, scale);
        *row++ = both[1];
    }
    while (column < end) {
        int64_t n = end - column < 2 * WORDS ? end - column : 2 * WORDS;
        fill_values(row, n, start, column, low, scale);
        row += n;
        column += n;
    }
}

/* Write initial weights.
 *
 * weights: a matrix of `dim` columns that all tables share. rows: rows of the matrix, ordered by
 * table. ids: their ids. */
void recsys_init_rows(const NewRows *tables, int64_t num_tables, float *weights, int64_t dim,
                      const int64_t *rows, const int64_t *ids)
{
    int64_t num_rows = 0, next = 0;
    for (int64_t i = 0; i < num_tables; i++)
        num_rows += tables[i].num_rows;
    for (int64_t i = 0; i < num_tables; i++)
        for (int64_t end = next + tables[i].num_rows; next < end; next++) {
            if (next + AHEAD < num_rows) {
                const float *later = weights + rows[next + AHEAD] * dim;
                for (int64_t c = 0; c < dim; c += LINE_VALUES)
                    __builtin_prefetch(later + c, 1);
            }
            fill_row(weights + rows[next] * dim, dim, ids[next], &tables[i]);
        }
}
