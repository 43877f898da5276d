/* The words of random.py's streams, and the fractions in them: word number `offset` of step s of a
   stream is mixed(key + (s WORDS_PER_STEP + offset) gamma). */

#include <stdint.h>

#define WORDS_PER_STEP 65536
#define UNIT 5.9604644775390625e-8f  /* 2^-24 */

static inline uint64_t mixed(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* In [0, 1), of a word's high 53 bits. */
static inline double fraction(uint64_t word) { return (double)(int64_t)(word >> 11) * 0x1p-53; }
