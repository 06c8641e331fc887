/* Lookup of ids in hash indexes: the rows of embedding tables by any 64-bit id.
 *
 * index.py describes the arrays, twin.py the rules; results equal those of twin.py bit for bit.
 * No global state and no threads: calls on different indexes may run at the same time. Calls that
 * do not train only read: they need `ids` and `digests`, without a time to live no other array.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "mix64.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

_Static_assert(sizeof(void *) == 8, "native.py passes pointers as 64-bit numbers");
enum { WAYS = 16, LINE = 64 };
enum { EVICT_NONE, EVICT_LRU, EVICT_LFU, EVICT_DISTANCE_LFU };
enum { ADMIT_ALWAYS, ADMIT_AT_LEAST, ADMIT_PROBABILITY };
enum { FRACTION = 256, BLOCK = 128, AHEAD = 8, GROUPS = 1024 };
/* FRACTION: a count of 1 of eviction "lfu". BLOCK: ids whose data fit into the fastest cache.
 * AHEAD: unknown ids between a prefetch and its place. GROUPS: of lines, to sort unknown ids. */

/* One shard; native.py fills it in this order. */
typedef struct {
    int64_t *ids;
    int32_t *last_used;
    int32_t *seen;
    uint8_t *digests;
    uint8_t *sketch;
    uint64_t seed;
    int64_t region_bits, first_region;
    int64_t num_regions; /* of the shard */
    int64_t lines;       /* of a region */
    int64_t eviction, half_life, exponent, ttl, admission, admission_value, is_shared;
    int64_t num_ids;                                   /* of the batch */
    int64_t hits, admitted, evicted, refused, unknown; /* results */
} Table;

typedef struct {
    int64_t step, pin;
    int64_t oldest; /* rows last used before this step are expired */
    int is_training;
} Moment;

typedef struct {
    int64_t id;
    uint32_t line;
    uint32_t position; /* in the table's part of the batch */
} Miss;

typedef struct { int64_t *rows, *new_rows, *new_ids, *old; } Output; /* `old` may be NULL */

/* -- places of ids ----------------------------------------------------------------------------- */

/* Place of an id: line << 16 | home << 8 | digest. A line of another shard is out of range. */
static inline uint64_t locate(const Table *t, int64_t id)
{
    uint64_t hash = mix64((uint64_t)id ^ t->seed);
    uint64_t region = hash >> 1 >> (63 - t->region_bits);
    uint64_t line = (hash << t->region_bits >> 32) * (uint64_t)t->lines >> 32;
    uint64_t home = hash >> (30 - t->region_bits) & 3;
    uint64_t digest = ((hash & 0xffff) * 255 >> 16) + 1;
    region -= (uint64_t)t->first_region;
    return (region * (uint64_t)t->lines + line) << 16 | home << 8 | digest;
}

static inline int64_t line_of(uint64_t spot) { return (int64_t)(spot >> 16); }
static inline unsigned home_of(uint64_t spot) { return spot >> 8 & 3; }
static inline uint8_t digest_of(uint64_t spot) { return (uint8_t)spot; }

static inline int64_t shared_row(const Table *t, uint64_t spot)
{
    return line_of(spot) / t->lines * t->lines * LINE;
}

/* -- digests of a line ------------------------------------------------------------------------- */

/* Bit i of the result: whether digest i of the line equals `digest`. */
static inline uint64_t match_line(const uint8_t *line, uint8_t digest)
{
#if defined(__AVX512BW__) && !defined(RECSYS_PORTABLE)
    __m512i ways = _mm512_loadu_si512((const void *)line);
    return _mm512_cmpeq_epi8_mask(ways, _mm512_set1_epi8((char)digest));
#elif defined(__SSE2__) && !defined(RECSYS_PORTABLE)
    __m128i wanted = _mm_set1_epi8((char)digest);
    uint64_t mask = 0;
    for (int bucket = 3; bucket >= 0; bucket--) {
        __m128i ways = _mm_loadu_si128((const __m128i *)(const void *)(line + bucket * WAYS));
        mask = mask << WAYS | (uint64_t)_mm_movemask_epi8(_mm_cmpeq_epi8(ways, wanted));
    }
    return mask;
#else
    const uint64_t low = 0x7f7f7f7f7f7f7f7fu;
    uint64_t mask = 0;
    for (int i = 0; i < LINE; i += 8) {
        uint64_t word;
        memcpy(&word, line + i, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        word = __builtin_bswap64(word);
#endif
        word ^= digest * 0x0101010101010101u; /* its equal bytes are 0 */
        word = ~(((word & low) + low) | word | low) >> 7;
        mask |= (word * 0x0102040810204080u >> 56) << i;
    }
    return mask;
#endif
}

/* Rotate a line's mask so that the home bucket comes first. */
static inline uint64_t from_home(uint64_t mask, unsigned home)
{
    unsigned bits = home * WAYS;
    return mask >> bits | mask << (-bits & 63);
}

/* Row offset in the line of the first bit of a mask that was rotated; any if there is none. */
static inline int64_t first_way(uint64_t mask, unsigned home)
{
    return ((unsigned)__builtin_ctzll(mask | (uint64_t)1 << 63) + home * WAYS) & (LINE - 1);
}

/* Rows of the id's line that have its digest, the home bucket first. */
static inline uint64_t candidates(const Table *t, uint64_t spot)
{
    uint64_t mask = match_line(t->digests + line_of(spot) * LINE, digest_of(spot));
    return from_home(mask, home_of(spot));
}

/* -- known ids --------------------------------------------------------------------------------- */

/* Count of eviction "lfu", halved for each half-life since the last use. */
static inline int64_t decayed(const Table *t, int64_t row, const Moment *now)
{
    int64_t seen = t->seen[row], age = now->step - t->last_used[row];
    if (t->half_life == 0 || age < t->half_life)
        return seen;
    int64_t halvings = age / t->half_life;
    return seen >> (halvings < 31 ? halvings : 31);
}

static inline void touch(const Table *t, int64_t row, const Moment *now)
{
    if (t->eviction >= EVICT_LFU) { /* without a branch on `last_used`: half of the ids repeat */
        int64_t seen = t->seen[row];
        int64_t more = t->eviction == EVICT_LFU ? decayed(t, row, now) + FRACTION : seen + 1;
        more = more < INT32_MAX ? more : INT32_MAX;
        t->seen[row] = (int32_t)(t->last_used[row] == now->step ? seen : more);
    }
    t->last_used[row] = (int32_t)now->step;
}

/* Return the row of an id, expired or not; -1: none. `mask` has its candidates. */
static inline int64_t row_of(const Table *t, uint64_t spot, int64_t id, uint64_t mask)
{
    for (; mask; mask &= mask - 1) {
        int64_t row = line_of(spot) * LINE + first_way(mask, home_of(spot));
        if (t->ids[row] == id)
            return row;
    }
    return -1;
}

/* First pass for a block of ids: find them, and record the use of their rows.
 *
 * Each loop reads memory that the loop before requests, so that the requests overlap. Almost all
 * ids are in the first row whose digest matches; `others` gets the positions of the others. */
static int64_t find_block(const Table *t, const Moment *now, const int64_t *ids,
                          const uint64_t *spots, int64_t n, int64_t *rows, int64_t *others)
{
    int64_t num_others = 0;
    int reads_use = now->is_training || now->oldest > 0;
    int counts_use = now->is_training && t->eviction >= EVICT_LFU;
    for (int64_t i = 0; i < n; i++)
        __builtin_prefetch(t->digests + line_of(spots[i]) * LINE);
    for (int64_t i = 0; i < n; i++) {
        rows[i] = line_of(spots[i]) * LINE + first_way(candidates(t, spots[i]), home_of(spots[i]));
        __builtin_prefetch(t->ids + rows[i]);
        if (reads_use)
            __builtin_prefetch(t->last_used + rows[i]);
        if (counts_use)
            __builtin_prefetch(t->seen + rows[i]);
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t row = rows[i];
        int is_known = t->ids[row] == ids[i] && t->digests[row] == digest_of(spots[i]);
        if (now->oldest > 0)
            is_known = is_known && t->last_used[row] >= now->oldest;
        others[num_others] = i;
        num_others += !is_known;
        if (is_known && now->is_training)
            touch(t, row, now);
    }
    return num_others;
}

/* First pass. Rows of unknown ids are the shared row or -1. Return the number of misses. */
static int64_t find_known(const Table *t, const Moment *now, const int64_t *ids,
                          const uint64_t *spots, int64_t *rows, Miss *misses)
{
    int64_t num_misses = 0, others[BLOCK];
    for (int64_t first = 0; first < t->num_ids; first += BLOCK) {
        int64_t n = t->num_ids - first < BLOCK ? t->num_ids - first : BLOCK;
        int64_t num_others =
            find_block(t, now, ids + first, spots + first, n, rows + first, others);
        for (int64_t j = 0; j < num_others; j++) {
            int64_t i = first + others[j];
            int64_t row = row_of(t, spots[i], ids[i], candidates(t, spots[i]));
            if (row < 0 || (now->oldest > 0 && t->last_used[row] < now->oldest)) {
                row = t->is_shared ? shared_row(t, spots[i]) : -1;
                misses[num_misses++] = (Miss){ids[i], (uint32_t)line_of(spots[i]), (uint32_t)i};
            } else if (now->is_training) {
                touch(t, row, now);
            }
            rows[i] = row;
        }
    }
    return num_misses;
}

/* -- order of unknown ids ---------------------------------------------------------------------- */

static inline int is_before(const Miss *a, const Miss *b)
{
    return a->line != b->line ? a->line < b->line : a->id < b->id;
}

static void insertion_sort(Miss *items, int64_t n)
{
    for (int64_t i = 1; i < n; i++)
        for (int64_t j = i; j > 0 && is_before(&items[j], &items[j - 1]); j--) {
            Miss item = items[j];
            items[j] = items[j - 1];
            items[j - 1] = item;
        }
}

/* Merge sort by line, then id. `spare` has space for n / 2 items. */
static void merge_sort(Miss *items, int64_t n, Miss *spare)
{
    if (n <= 16) {
        insertion_sort(items, n);
        return;
    }
    int64_t half = n / 2, left = 0, right = half, out = 0;
    merge_sort(items, half, spare);
    merge_sort(items + half, n - half, spare);
    memcpy(spare, items, (size_t)half * sizeof *items);
    while (left < half && right < n)
        items[out++] = is_before(&items[right], &spare[left]) ? items[right++] : spare[left++];
    memcpy(items + out, spare + left, (size_t)(half - left) * sizeof *items);
}

/* Sort by line, then id. Return the sorted items, in `items` or in `spare`, which has space for n.
 *
 * Lines come from a hash, so groups of lines have about equally many items. If they do not, since
 * ids were chosen so, merge sort is as fast as without groups. */
static Miss *sort_misses(Miss *items, int64_t n, Miss *spare, int64_t num_lines)
{
    int64_t starts[GROUPS + 1] = {0};
    int shift = 0;
    if (n <= 16) {
        insertion_sort(items, n);
        return items;
    }
    while ((num_lines - 1) >> shift >= GROUPS)
        shift++;
    for (int64_t i = 0; i < n; i++)
        starts[(items[i].line >> shift) + 1]++;
    for (int64_t group = 0; group < GROUPS; group++)
        starts[group + 1] += starts[group];
    for (int64_t i = 0; i < n; i++) /* moves the start of a group to its end */
        spare[starts[items[i].line >> shift]++] = items[i];
    for (int64_t group = 0, start = 0; group < GROUPS; start = starts[group++])
        merge_sort(spare + start, starts[group] - start, items);
    return spare;
}

/* -- admission and placement ------------------------------------------------------------------- */

/* Count an id in the sketch of its home bucket; see `admit_by_count` in twin.py. */
static int is_counted_often(const Table *t, uint64_t spot, uint64_t hash)
{
    uint8_t *cells = t->sketch + (line_of(spot) * 4 + home_of(spot)) * LINE;
    uint64_t mixed = mix64(hash);
    int lowest = 255, total = 0;
    for (int group = 0; group < 4; group++) {
        uint8_t *cell = cells + 16 * group + (mixed >> 4 * group & 15);
        if (*cell < 255)
            ++*cell;
        lowest = *cell < lowest ? *cell : lowest;
    }
    for (int i = 0; i < LINE; i++)
        total += cells[i];
    if (total > 32 * t->admission_value)
        for (int i = 0; i < LINE; i++)
            cells[i] >>= 1;
    return lowest >= t->admission_value;
}

static int is_admitted(const Table *t, uint64_t spot, int64_t id, const Moment *now)
{
    if (t->admission == ADMIT_ALWAYS)
        return 1;
    uint64_t hash = mix64((uint64_t)id ^ t->seed);
    if (t->admission == ADMIT_AT_LEAST)
        return is_counted_often(t, spot, hash);
    uint64_t mixed = mix64(hash + (uint64_t)now->step * 0x9e3779b97f4a7c15u);
    return (int64_t)(mixed >> 32) < t->admission_value;
}

/* Score of a row that is not pinned, for evictions that count; the lowest is evicted. */
static inline int64_t score(const Table *t, int64_t row, const Moment *now)
{
    if (t->eviction == EVICT_LFU)
        return decayed(t, row, now) * ((int64_t)1 << 31) + t->last_used[row];
    double distance = (double)(now->step - t->last_used[row]), power = distance;
    for (int64_t i = 1; i < t->exponent; i++)
        power *= distance;
    double share = t->seen[row] / power;
    int64_t bits; /* doubles that are not negative have the order of their bits */
    memcpy(&bits, &share, sizeof bits);
    return bits;
}

/* Return the way of a home bucket to evict for a new id; -1: all are pinned.
 *
 * `first` is the bucket's row, `start` 1 if its first way belongs to no id. */
static int64_t lowest_way(const Table *t, int64_t first, int64_t start, const Moment *now)
{
    int64_t lowest = INT64_MAX, way = -1;
    if (t->eviction == EVICT_NONE)
        return -1;
    if (t->eviction == EVICT_LRU) { /* without branches, which would be mispredicted */
        for (int64_t i = start; i < WAYS; i++) {
            int64_t used = t->last_used[first + i];
            int64_t found = used < now->pin ? used * WAYS + i : INT64_MAX;
            lowest = found < lowest ? found : lowest;
        }
        return lowest == INT64_MAX ? -1 : lowest % WAYS;
    }
    for (int64_t i = start; i < WAYS; i++) {
        if (t->last_used[first + i] >= now->pin)
            continue;
        int64_t found = score(t, first + i, now);
        if (found < lowest) {
            lowest = found;
            way = i;
        }
    }
    return way;
}

/* Return the row of a new id; -1: none is free or can be evicted. */
static int64_t choose_row(const Table *t, uint64_t spot, int64_t id, const Moment *now)
{
    int64_t line = line_of(spot) * LINE;
    unsigned home = home_of(spot);
    int64_t reserved = line_of(spot) % t->lines == 0; /* ways of the line that belong to no id */
    uint64_t available = match_line(t->digests + line, 0);
    if (t->ttl) {
        int64_t row = row_of(t, spot, id, candidates(t, spot));
        if (row >= 0)
            return row;
        for (int way = 0; way < LINE; way++)
            available |= (uint64_t)(t->last_used[line + way] < now->oldest) << way;
    }
    available &= ~(uint64_t)reserved;
    if (available)
        return line + first_way(from_home(available, home), home);
    int64_t first = line + home * WAYS;
    int64_t way = lowest_way(t, first, home == 0 ? reserved : 0, now);
    return way < 0 ? -1 : first + way;
}

/* Give an unknown id a row; -1: none. `old` or NULL: the id that lost it, and 1; or two zeros. */
static int64_t place(Table *t, uint64_t spot, int64_t id, const Moment *now, int64_t *old)
{
    if (!is_admitted(t, spot, id, now))
        return -1;
    int64_t row = choose_row(t, spot, id, now);
    if (row < 0) {
        t->refused++;
        return -1;
    }
    t->admitted++;
    int is_taken = t->digests[row] != 0 && !(t->ttl && t->ids[row] == id);
    t->evicted += is_taken;
    if (old)
        memcpy(old, (int64_t[]){is_taken ? t->ids[row] : 0, is_taken}, 2 * sizeof *old);
    t->ids[row] = id;
    t->digests[row] = digest_of(spot);
    t->last_used[row] = (int32_t)now->step;
    if (t->eviction >= EVICT_LFU)
        t->seen[row] = t->eviction == EVICT_LFU ? FRACTION : 1;
    return row;
}

static inline void prefetch_place(const Table *t, uint64_t spot)
{
    int64_t line = line_of(spot) * LINE;
    __builtin_prefetch(t->digests + line);
    __builtin_prefetch(t->last_used + line + home_of(spot) * WAYS);
    if (t->eviction >= EVICT_LFU)
        __builtin_prefetch(t->seen + line + home_of(spot) * WAYS);
}

/* Second pass: place each unknown id once. Return the misses left. */
static int64_t place_unknown(Table *t, const Moment *now, const uint64_t *spots, Miss *misses,
                             int64_t num_misses, Output out)
{
    int64_t left = 0;
    misses = sort_misses(misses, num_misses, misses + num_misses, t->num_regions * t->lines);
    for (int64_t i = 0; i < num_misses;) {
        if (i + AHEAD < num_misses)
            prefetch_place(t, spots[misses[i + AHEAD].position]);
        int64_t id = misses[i].id, row = place(t, spots[misses[i].position], id, now, out.old);
        if (row >= 0) {
            *out.new_rows++ = row;
            *out.new_ids++ = id;
            out.old += out.old ? 2 : 0;
        }
        for (; i < num_misses && misses[i].id == id; i++)
            if (row >= 0)
                out.rows[misses[i].position] = row;
            else
                left++;
    }
    return left;
}

/* -- all tables of a group --------------------------------------------------------------------- */

/* Fill `spots`. Return 0, or 1 + the number of a table that has an id of another shard. */
static int64_t locate_all(const Table *tables, int64_t num_tables, const int64_t *ids,
                          uint64_t *spots)
{
    for (int64_t table = 0; table < num_tables; table++) {
        const Table t = tables[table]; /* a copy, which the loop's writes cannot change */
        uint64_t limit = (uint64_t)(t.num_regions * t.lines) << 16;
        uint64_t num_foreign = 0;
        for (int64_t i = 0; i < t.num_ids; i++) {
            spots[i] = locate(&t, ids[i]);
            num_foreign += spots[i] >= limit;
        }
        if (num_foreign)
            return table + 1;
        ids += t.num_ids;
        spots += t.num_ids;
    }
    return 0;
}

static void map_table(Table *t, int64_t step, int64_t pin, int is_training, const int64_t *ids,
                      const uint64_t *spots, Miss *misses, Output out)
{
    int64_t alive = step - t->ttl;
    Moment now = {step, pin, t->ttl ? (alive < pin ? alive : pin) : 0, is_training};
    t->admitted = t->evicted = t->refused = 0;
    int64_t num_misses = find_known(t, &now, ids, spots, out.rows, misses);
    t->hits = t->num_ids - num_misses;
    t->unknown = num_misses;
    if (is_training && num_misses)
        t->unknown = place_unknown(t, &now, spots, misses, num_misses, out);
}

/* Map a batch of ids to rows; see `map_ids` in index.py.
 *
 * ids and rows: those of all tables. new_rows and new_ids: space for one item of each id; used in
 * training only. old: space for two numbers of each id, or NULL. Return 0; -1: no memory; or 1 +
 * the number of a table that has an id of another shard, and nothing is written. */
int64_t recsys_map_ids(Table *tables, int64_t num_tables, const int64_t *ids, int64_t step,
                       int64_t pin, int64_t is_training, int64_t *rows, int64_t *new_rows,
                       int64_t *new_ids, int64_t *old)
{
    size_t num_ids = 0, most = 0;
    for (int64_t i = 0; i < num_tables; i++) {
        size_t n = (size_t)tables[i].num_ids;
        num_ids += n;
        most = n > most ? n : most;
    }
    uint64_t *spots = malloc((num_ids + 1) * sizeof *spots);
    Miss *misses = malloc((2 * most + 1) * sizeof *misses);
    int64_t result = spots && misses ? locate_all(tables, num_tables, ids, spots) : -1;
    const uint64_t *next = spots;
    Output out = {rows, new_rows, new_ids, old};
    for (Table *t = tables; t < tables + num_tables && result == 0; t++) {
        map_table(t, step, pin, is_training != 0, ids, next, misses, out);
        ids += t->num_ids;
        next += t->num_ids;
        out.rows += t->num_ids;
        out.new_rows += t->admitted;
        out.new_ids += t->admitted;
        out.old += old ? 2 * t->admitted : 0;
    }
    free(spots);
    free(misses);
    return result;
}
