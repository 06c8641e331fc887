/* Finalizer of SplitMix64, the hash of ids. */
#ifndef RECSYS_MIX64_H
#define RECSYS_MIX64_H
#include <stdint.h>

static inline uint64_t mix64(uint64_t x)
{
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

#endif
