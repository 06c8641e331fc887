/* Random calls of the hash index, for sanitizers: arrays have exactly the sizes that are needed.
 * Prints a checksum of all results and arrays. */
#include <stdio.h>

#include "hash_index.c"

static uint64_t state = 1;

static uint64_t draw(uint64_t below)
{
    state += 0x9e3779b97f4a7c15u;
    return mix64(state) % below;
}

static uint64_t checksum = 0;

static void add(const void *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        checksum = (checksum ^ ((const uint8_t *)bytes)[i]) * 0x100000001b3u;
}

static void *zeros(size_t size)
{
    void *bytes = calloc(size ? size : 1, 1);
    if (!bytes)
        exit(2);
    return bytes;
}

enum { NUM_TABLES = 3, MOST_IDS = 200 };

static size_t rows_of(const Table *t) { return (size_t)(t->num_regions * t->lines * LINE); }

static Table random_table(void)
{
    Table t = {0};
    t.region_bits = (int64_t)draw(4);
    t.first_region = (int64_t)draw((uint64_t)1 << t.region_bits);
    t.num_regions = (1 << t.region_bits) - t.first_region;
    t.lines = 1 + (int64_t)draw(3);
    t.seed = mix64(draw(1000));
    t.eviction = (int64_t)draw(4);
    t.half_life = (int64_t)draw(4);
    t.exponent = 1 + (int64_t)draw(4);
    t.ttl = (int64_t)draw(4);
    t.admission = (int64_t)draw(3);
    t.admission_value = t.admission == ADMIT_AT_LEAST ? 2 + (int64_t)draw(4) : 1ll << 31;
    t.is_shared = (int64_t)draw(2);
    size_t rows = rows_of(&t);
    t.ids = zeros(rows * 8);
    t.last_used = zeros(rows * 4);
    t.seen = t.eviction >= EVICT_LFU ? zeros(rows * 4) : NULL;
    t.digests = zeros(rows);
    t.sketch = t.admission == ADMIT_AT_LEAST ? zeros(rows * 4) : NULL;
    return t;
}

static void free_table(Table *t)
{
    size_t rows = rows_of(t);
    add(t->ids, rows * 8);
    add(t->last_used, rows * 4);
    add(t->digests, rows);
    free(t->ids);
    free(t->last_used);
    free(t->seen);
    free(t->digests);
    free(t->sketch);
}

/* A random id of the shard; sometimes of any region, which is refused. */
static int64_t random_id(const Table *t)
{
    uint64_t limit = (uint64_t)(t->num_regions * t->lines) << 16;
    int64_t id = (int64_t)(draw(300) * 0x123456789abcdefu - draw(2));
    while (locate(t, id) >= limit && draw(20000))
        id = (int64_t)mix64((uint64_t)id);
    return id;
}

static void call(Table *tables, int64_t step)
{
    size_t n = 0;
    for (int i = 0; i < NUM_TABLES; i++)
        n += (size_t)(tables[i].num_ids = (int64_t)draw(MOST_IDS));
    int64_t *ids = zeros(n * 8), *rows = zeros(n * 8);
    int64_t *new_rows = zeros(n * 8), *new_ids = zeros(n * 8);
    int64_t *old = draw(2) ? zeros(n * 16) : NULL;
    size_t position = 0;
    for (int i = 0; i < NUM_TABLES; i++)
        for (int64_t j = 0; j < tables[i].num_ids; j++)
            ids[position++] = random_id(&tables[i]);
    int64_t pin = step - (int64_t)draw(3);
    int64_t result = recsys_map_ids(tables, NUM_TABLES, ids, step, pin, draw(5) != 0, rows,
                                    new_rows, new_ids, old);
    add(&result, sizeof result);
    add(rows, n * 8);
    add(new_rows, n * 8);
    add(new_ids, n * 8);
    add(old, old ? n * 16 : 0);
    free(ids);
    free(rows);
    free(new_rows);
    free(new_ids);
    free(old);
}

int main(int argc, char **argv)
{
    long calls = argc > 1 ? strtol(argv[1], NULL, 10) : 100;
    Table tables[NUM_TABLES];
    for (int i = 0; i < NUM_TABLES; i++)
        tables[i] = random_table();
    int64_t step = 1;
    for (long i = 0; i < calls; i++) {
        if (i % 20 == 19) {
            int chosen = (int)draw(NUM_TABLES);
            free_table(&tables[chosen]);
            tables[chosen] = random_table();
        }
        step += (int64_t)draw(3);
        call(tables, step);
    }
    for (int i = 0; i < NUM_TABLES; i++)
        free_table(&tables[i]);
    printf("%016llx\n", (unsigned long long)checksum);
    return 0;
}
