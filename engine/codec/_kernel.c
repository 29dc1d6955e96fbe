/* The loops of the codec, each of which planes.py also has in numpy, with the same result, where no compiler was found.
 *
 * Every function takes buffers and checks their sizes; those that work on whole chunks let other threads run meanwhile.
 * Words are little-endian.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bytes are taken as little-endian words"
#endif

#define TILE 2048 /* items that are worked on at once: they stay in the first cache */
#define ITEM_MAX 8

/* Compiled twice where the loader can choose: what every machine has, and twice as wide. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define WIDE __attribute__((target_clones("avx2", "default")))
#endif
#endif
#ifndef WIDE
#define WIDE
#endif
/* What takes classes apart is compiled twice, too, and chosen by hand, as it also says how eight lanes go at once. */
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define FAST __attribute__((target("avx2,bmi,bmi2,lzcnt,popcnt")))
static int is_fast; /* whether the machine has these */
#if __GNUC__ >= 8 && !defined(__clang__)
#define WIDEST                                                                                                         \
    __attribute__((target("avx2,bmi,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,"                    \
                          "prefer-vector-width=512")))
static int is_widest; /* and these */
#endif
#endif
#define INLINE static inline __attribute__((always_inline))

enum { NONE, XOR, FLOAT_DIFFERENCE, INT_DIFFERENCE, FLOAT_CLASSES = 5, INT_CLASSES };

/* For words of W bits: `forward` turns those of the new chunk into what is stored, `backward` is its inverse, `spread`
 * and `gather` go between words and planes. Written as single loops without branches, for compilers to vectorize. */
#define DEFINE(W)                                                                                                      \
    typedef uint##W##_t u##W;                                                                                          \
    INLINE u##W load##W(const uint8_t *from, Py_ssize_t i) {                                                           \
        u##W word;                                                                                                     \
        memcpy(&word, from + i * (W / 8), sizeof word);                                                                \
        return word;                                                                                                   \
    }                                                                                                                  \
    INLINE void store##W(uint8_t *to, Py_ssize_t i, u##W word) { memcpy(to + i * (W / 8), &word, sizeof word); }       \
    INLINE u##W signs##W(u##W word) { return (u##W)(0 - (u##W)(word >> (W - 1))); }                                    \
    INLINE u##W ordered##W(u##W word) { return (u##W)(word ^ (signs##W(word) >> 1)); }                                 \
    INLINE u##W folded##W(u##W word) { return (u##W)((u##W)(word << 1) ^ signs##W(word)); }                            \
    INLINE u##W unfolded##W(u##W word) { return (u##W)((word >> 1) ^ (u##W)(0 - (u##W)(word & 1))); }                  \
    INLINE void forward##W(const uint8_t *new, const uint8_t *base, int transform, Py_ssize_t n,                       \
                           uint8_t *restrict words) {                                                                  \
        Py_ssize_t i;                                                                                                  \
        if (transform == XOR)                                                                                          \
            for (i = 0; i < n; i++)                                                                                    \
                store##W(words, i, (u##W)(load##W(new, i) ^ load##W(base, i)));                                        \
        else if (transform == FLOAT_DIFFERENCE)                                                                        \
            for (i = 0; i < n; i++)                                                                                    \
                store##W(words, i,                                                                                     \
                         folded##W((u##W)(ordered##W(load##W(new, i)) - ordered##W(load##W(base, i)))));               \
        else                                                                                                           \
            for (i = 0; i < n; i++)                                                                                    \
                store##W(words, i, folded##W((u##W)(load##W(new, i) - load##W(base, i))));                             \
    }                                                                                                                  \
    INLINE void backward##W(const uint8_t *restrict words, const uint8_t *base, int transform, Py_ssize_t n,           \
                            uint8_t *out) {                                                                            \
        Py_ssize_t i;                                                                                                  \
        if (transform == XOR)                                                                                          \
            for (i = 0; i < n; i++)                                                                                    \
                store##W(out, i, (u##W)(load##W(words, i) ^ load##W(base, i)));                                        \
        else if (transform == FLOAT_DIFFERENCE)                                                                        \
            for (i = 0; i < n; i++)                                                                                    \
                store##W(out, i,                                                                                       \
                         ordered##W((u##W)(unfolded##W(load##W(words, i)) + ordered##W(load##W(base, i)))));           \
        else                                                                                                           \
            for (i = 0; i < n; i++)                                                                                    \
                store##W(out, i, (u##W)(unfolded##W(load##W(words, i)) + load##W(base, i)));                           \
    }                                                                                                                  \
    INLINE void bytes_at##W(const uint8_t *base, Py_ssize_t n, int shift, uint8_t *restrict bytes) {                   \
        for (Py_ssize_t i = 0; i < n; i++)                                                                             \
            bytes[i] = (uint8_t)(load##W(base, i) >> shift);                                                           \
    }                                                                                                                  \
    INLINE void keys##W(const uint8_t *base, Py_ssize_t n, uint8_t *restrict keys) {                                   \
        for (Py_ssize_t i = 0; i < n; i++)                                                                             \
            keys[i] = (uint8_t)(load##W(base, i) >> (W == 64 ? 52 : W == 32 ? 23 : W == 16 ? 7 : 0));                  \
    }                                                                                                                  \
    INLINE void spread##W(const uint8_t *words, Py_ssize_t n, uint8_t *const *planes, Py_ssize_t at) {                 \
        for (int plane = 0; plane < W / 8; plane++) {                                                                  \
            uint8_t *restrict to = planes[plane] + at;                                                                 \
            for (Py_ssize_t i = 0; i < n; i++)                                                                         \
                to[i] = (uint8_t)(load##W(words, i) >> (8 * plane));                                                   \
        }                                                                                                              \
    }                                                                                                                  \
    INLINE void scatter##W(const uint8_t *words, Py_ssize_t n, const uint8_t *keys, uint32_t *next, uint8_t *all) {    \
        for (Py_ssize_t i = 0; i < n; i++)                                                                             \
            store##W(all, next[keys[i]]++, load##W(words, i));                                                         \
    }                                                                                                                  \
    INLINE void collect##W(uint8_t *words, Py_ssize_t n, const uint8_t *keys, uint32_t *next, const uint8_t *all) {    \
        for (Py_ssize_t i = 0; i < n; i++)                                                                             \
            store##W(words, i, load##W(all, next[keys[i]]++));                                                         \
    }

DEFINE(8)
DEFINE(16)
DEFINE(32)
DEFINE(64)

INLINE void gather8(const uint8_t *const *from, Py_ssize_t n, uint8_t *restrict words) { memcpy(words, from[0], n); }

INLINE void gather16(const uint8_t *const *from, Py_ssize_t n, uint8_t *restrict words) {
    const uint8_t *a = from[0], *b = from[1];
    for (Py_ssize_t i = 0; i < n; i++)
        store16(words, i, (u16)(a[i] | (b[i] << 8)));
}

INLINE void gather32(const uint8_t *const *from, Py_ssize_t n, uint8_t *restrict words) {
    const uint8_t *a = from[0], *b = from[1], *c = from[2], *d = from[3];
    for (Py_ssize_t i = 0; i < n; i++)
        store32(words, i, (u32)a[i] | (u32)b[i] << 8 | (u32)c[i] << 16 | (u32)d[i] << 24);
}

INLINE void gather64(const uint8_t *const *from, Py_ssize_t n, uint8_t *restrict words) {
    uint8_t halves[2][TILE * 4];
    gather32(from, n, halves[0]);
    gather32(from + 4, n, halves[1]);
    for (Py_ssize_t i = 0; i < n; i++)
        store64(words, i, (u64)load32(halves[0], i) | (u64)load32(halves[1], i) << 32);
}

#define OF(item, name, ...)                                                                                            \
    (item == 1 ? name##8(__VA_ARGS__) : item == 2 ? name##16(__VA_ARGS__)                                              \
     : item == 4 ? name##32(__VA_ARGS__) : name##64(__VA_ARGS__))

/* Where the items of each group begin, if they are put one group behind the other, in the order of the keys. */
INLINE void begin_groups(const uint8_t *base, int item, Py_ssize_t n, uint32_t *begins) {
    uint8_t keys[TILE];
    uint32_t counts[4][256] = {{0}}, sum = 0; /* four of them: equal neighbours need not wait for each other */
    for (Py_ssize_t at = 0; at < n; at += TILE) {
        Py_ssize_t some = n - at < TILE ? n - at : TILE;
        OF(item, keys, base + at * item, some, keys);
        Py_ssize_t i = 0;
        for (; i + 4 <= some; i += 4) {
            counts[0][keys[i]]++;
            counts[1][keys[i + 1]]++;
            counts[2][keys[i + 2]]++;
            counts[3][keys[i + 3]]++;
        }
        for (; i < some; i++)
            counts[0][keys[i]]++;
    }
    for (int key = 0; key < 256; key++) {
        begins[key] = sum;
        sum += counts[0][key] + counts[1][key] + counts[2][key] + counts[3][key];
    }
}

/* `room` is as large as `new`, where items are grouped. */
WIDE static void split_all(const uint8_t *new, const uint8_t *base, int transform, int item, Py_ssize_t n, uint8_t *out,
                           uint8_t *room) {
    uint8_t words[TILE * ITEM_MAX], *planes[ITEM_MAX];
    uint8_t keys[TILE];
    uint32_t next[256];
    for (int plane = 0; plane < item; plane++)
        planes[plane] = out + plane * n;
    if (room != NULL)
        begin_groups(base, item, n, next);
    for (Py_ssize_t at = 0; at < n; at += TILE) {
        Py_ssize_t some = n - at < TILE ? n - at : TILE;
        const uint8_t *from = new + at * item;
        if (transform != NONE) {
            OF(item, forward, from, base + at * item, transform, some, words);
            from = words;
        }
        if (room != NULL) {
            OF(item, keys, base + at * item, some, keys);
            OF(item, scatter, from, some, keys, next, room);
        } else {
            OF(item, spread, from, some, planes, at);
        }
    }
    for (Py_ssize_t at = 0; room != NULL && at < n; at += TILE)
        OF(item, spread, room + at * item, n - at < TILE ? n - at : TILE, planes, at);
}

/* A plane that is NULL is the byte `equal` of it throughout. `room` as above. */
WIDE static void join_all(const uint8_t *const *planes, const uint8_t *equal, const uint8_t *base, int transform,
                          int item, Py_ssize_t n, uint8_t *out, uint8_t *room) {
    uint8_t words[TILE * ITEM_MAX], filled[ITEM_MAX][TILE];
    uint8_t keys[TILE];
    uint32_t next[256];
    const uint8_t *from[ITEM_MAX];
    for (int plane = 0; plane < item; plane++)
        if (planes[plane] == NULL)
            memset(filled[plane], equal[plane], TILE);
    for (Py_ssize_t at = 0; at < n; at += TILE) {
        Py_ssize_t some = n - at < TILE ? n - at : TILE;
        uint8_t *to = room != NULL ? room + at * item : transform == NONE ? out + at * item : words;
        for (int plane = 0; plane < item; plane++)
            from[plane] = planes[plane] == NULL ? filled[plane] : planes[plane] + at;
        OF(item, gather, from, some, to);
        if (room == NULL && transform != NONE)
            OF(item, backward, words, base + at * item, transform, some, out + at * item);
    }
    if (room == NULL)
        return;
    begin_groups(base, item, n, next);
    for (Py_ssize_t at = 0; at < n; at += TILE) {
        Py_ssize_t some = n - at < TILE ? n - at : TILE;
        OF(item, keys, base + at * item, some, keys);
        OF(item, collect, words, some, keys, next, room);
        OF(item, backward, words, base + at * item, transform, some, out + at * item);
    }
}

/* ------------------------------------------------------------------------------------------------ classes
 *
 * A difference d is a class (one byte: sign, place of the highest bit, `steps` bits below it) and the bits below those.
 * Classes are coded by rANS, each with the counts of its context, which the base's number tells; bits lie one behind the
 * other. FORMAT.md has the arithmetic.
 */
#define CLASSES 256
#define CONTEXTS_MAX 16
#define LANES_MAX 256
#define SCALE_BITS 12
#define SCALE (1u << SCALE_BITS)
#define STATE_LOW (1u << 15)

INLINE int steps_of(int item) { return item == 8 ? 1 : item == 4 ? 2 : 3; }

/* Where the contexts of a number's neighbours come from. */
typedef struct {
    int item, transform, shift, low, contexts;
} Setting;

/* Number of the highest bit set; of 0 it is less than any that counts. */
INLINE int highest32(uint32_t u) {
    float f = (float)(int32_t)(u & ~(u >> 24)); /* what would round up to the next power is cleared */
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (int)(bits >> 23 & 255) - 127;
}

/* Of a tile: marks (context << 8 | class), numbers of bits below, and these. */
#define DEFINE_CLASSES(W, REST, HIGHEST)                                                                               \
    INLINE void classify##W(const uint8_t *new, const uint8_t *base, const Setting *set, int transform, Py_ssize_t n,  \
                            uint16_t *restrict marks, REST *restrict lengths, REST *restrict rest) {                   \
        const int steps = steps_of(W / 8), shift = set->shift, low = set->low + 8, top = set->contexts - 9;            \
        for (Py_ssize_t i = 0; i < n; i++) {                                                                           \
            u##W a = load##W(new, i), b = load##W(base, i), d, u;                                                      \
            d = transform == FLOAT_CLASSES ? (u##W)(ordered##W(a) - ordered##W(b)) : (u##W)(a - b);                    \
            u = (u##W)((u##W)(d ^ signs##W(d)) - signs##W(d));                                                         \
            int high = HIGHEST;                                                                                        \
            int length = (high > steps ? high : steps) - steps;                                                        \
            int place = (int8_t)(uint8_t)((int)(b >> shift) - low);                                                    \
            place = place < -8 ? -8 : place > top ? top : place;                                                       \
            marks[i] = (uint16_t)((place + 8) << 8 |                                                                   \
                                  (int)((((REST)length << steps) + ((REST)u >> length)) << 1 | (REST)(d >> (W - 1)))); \
            lengths[i] = (REST)length;                                                                                 \
            rest[i] = (REST)u & (((REST)1 << length) - 1);                                                             \
        }                                                                                                              \
    }                                                                                                                  \
    INLINE void declassify##W(const uint8_t *restrict classes, const REST *restrict rest, const uint8_t *base,         \
                              int transform, Py_ssize_t n, uint8_t *out) {                                             \
        const int steps = steps_of(W / 8);                                                                             \
        for (Py_ssize_t i = 0; i < n; i++) {                                                                           \
            REST code = classes[i] >> 1, over = code >> steps;                                                         \
            REST length = over > 1 ? over - 1 : 0;                                                                     \
            u##W u = (u##W)(((code - (length << steps)) << length) | rest[i]);                                         \
            u##W sign = (u##W)(0 - (u##W)(classes[i] & 1)), b = load##W(base, i);                                      \
            u##W d = (u##W)((u##W)(u ^ sign) - sign);                                                                  \
            store##W(out, i, transform == FLOAT_CLASSES ? ordered##W((u##W)(ordered##W(b) + d)) : (u##W)(b + d));      \
        }                                                                                                              \
    }                                                                                                                  \
    INLINE void contexts##W(const uint8_t *base, Py_ssize_t n, const Setting *set, uint16_t *restrict contexts) {      \
        const int8_t top = (int8_t)(set->contexts - 9);                                                                \
        const uint8_t low = (uint8_t)(set->low + 8);                                                                   \
        for (Py_ssize_t i = 0; i < n; i++) {                                                                           \
            int8_t place = (int8_t)(uint8_t)((uint8_t)(load##W(base, i) >> set->shift) - low);                         \
            place = place < -8 ? -8 : place;                                                                           \
            place = place > top ? top : place;                                                                         \
            contexts[i] = (uint16_t)((uint8_t)(place + 8) << 8);                                                       \
        }                                                                                                              \
    }
DEFINE_CLASSES(8, uint32_t, highest32(u))
DEFINE_CLASSES(16, uint32_t, highest32(u))
DEFINE_CLASSES(32, uint32_t, highest32(u))
DEFINE_CLASSES(64, uint64_t, u ? 63 - __builtin_clzll(u) : 0)

/* Bits below the classes, from the lowest of the first byte on. */
typedef struct {
    uint8_t *to;
    uint64_t word;
    unsigned have;
} BitsOut;

INLINE void put_bits(BitsOut *out, uint64_t bits, unsigned length) {
    out->word |= bits << out->have;
    out->have += length;
    memcpy(out->to, &out->word, 8);
    out->to += out->have >> 3;
    out->word >>= out->have & 56;
    out->have &= 7;
}

#define PUT_BITS 56 /* what can be put at once: with up to seven bits before it, it has to be less than a word */

/* Neighbours are put together; there are `pairs` of them. */
INLINE void merge(const uint64_t *bits, const uint64_t *lengths, Py_ssize_t pairs, uint64_t *restrict both,
                  uint64_t *restrict sums) {
    for (Py_ssize_t i = 0; i < pairs; i++) {
        both[i] = bits[2 * i] | bits[2 * i + 1] << lengths[2 * i];
        sums[i] = lengths[2 * i] + lengths[2 * i + 1];
    }
}

/* The longest pair of neighbours. */
INLINE uint64_t longest(const uint64_t *lengths, Py_ssize_t pairs) {
    uint64_t most = 0;
    for (Py_ssize_t i = 0; i < pairs; i++) {
        uint64_t sum = lengths[2 * i] + lengths[2 * i + 1];
        most = most > sum ? most : sum;
    }
    return most;
}

/* As `put_bits` of each of `n` numbers of 29 bits at most, of which there are at most TILE, with room for seven more:
 * two, four or eight neighbours, as they fit, are put together first. */
INLINE void put_groups(BitsOut *to, uint32_t *rest, uint32_t *lengths, Py_ssize_t n) {
    uint64_t room[2][2][TILE / 2];
    uint64_t *bits = room[0][0], *sums = room[0][1], most = 0;
    Py_ssize_t count = (n + 7) / 8 * 4;
    memset(rest + n, 0, 7 * sizeof *rest);
    memset(lengths + n, 0, 7 * sizeof *lengths);
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t both, length;
        memcpy(&both, rest + 2 * i, 8);
        memcpy(&length, lengths + 2 * i, 8);
        bits[i] = (both & UINT32_MAX) | both >> 32 << (length & 63);
        sums[i] = (length & 63) + (length >> 32);
        most = most > sums[i] ? most : sums[i];
    }
    if (most > PUT_BITS) {
        for (Py_ssize_t i = 0; i < n; i++)
            put_bits(to, rest[i], lengths[i]);
        return;
    }
    for (int step = 1; step <= 2 && longest(sums, count / 2) <= PUT_BITS; step++) {
        count /= 2;
        merge(bits, sums, count, room[step & 1][0], room[step & 1][1]);
        bits = room[step & 1][0];
        sums = room[step & 1][1];
    }
    BitsOut out = *to; /* where nothing else can point to */
    for (Py_ssize_t i = 0; i < count; i++)
        put_bits(&out, bits[i], (unsigned)sums[i]);
    *to = out;
}

/* Classes, contexts and bits of `new` beside `base`: counts[context][class] go up, `marks` gets context << 8 | class. The
 * number of bits is returned. `bits` has room for all of the numbers and 16 bytes more. */
INLINE uint64_t classify_some(const uint8_t *new, const uint8_t *base, const Setting *set, Py_ssize_t n,
                              uint32_t *counts, uint16_t *marks, uint8_t *bits) {
    union {
        uint32_t narrow[TILE + 7];
        uint64_t wide[TILE];
    } rest, lengths;
    uint32_t room[CONTEXTS_MAX * CLASSES], *again = counts;
    BitsOut out = {bits, 0, 0};
    const int item = set->item;
    if (n > TILE) { /* equal neighbours need not wait for each other */
        again = room;
        memset(room, 0, sizeof room);
    }
    for (Py_ssize_t at = 0; at < n; at += TILE) {
        Py_ssize_t some = n - at < TILE ? n - at : TILE, i;
        const uint8_t *mine = new + at * item, *other = base + at * item;
        if (item == 8)
            classify64(mine, other, set, set->transform, some, marks + at, lengths.wide, rest.wide);
        else if (item == 4 && set->transform == FLOAT_CLASSES)
            classify32(mine, other, set, FLOAT_CLASSES, some, marks + at, lengths.narrow, rest.narrow);
        else if (item == 4)
            classify32(mine, other, set, INT_CLASSES, some, marks + at, lengths.narrow, rest.narrow);
        else if (item == 2 && set->transform == FLOAT_CLASSES)
            classify16(mine, other, set, FLOAT_CLASSES, some, marks + at, lengths.narrow, rest.narrow);
        else if (item == 2)
            classify16(mine, other, set, INT_CLASSES, some, marks + at, lengths.narrow, rest.narrow);
        else
            classify8(mine, other, set, set->transform, some, marks + at, lengths.narrow, rest.narrow);
        for (i = 0; i + 16 <= some; i += 16) {
            __builtin_prefetch(mine + (TILE + i) * item); /* the next tile comes meanwhile */
            __builtin_prefetch(other + (TILE + i) * item);
            for (int j = 0; j < 16; j += 2) {
                counts[marks[at + i + j]]++;
                again[marks[at + i + j + 1]]++;
            }
        }
        for (; i < some; i++)
            counts[marks[at + i]]++;
        for (i = 0; item == 8 && i < some; i++) {
            unsigned length = (unsigned)lengths.wide[i], low = length < 32 ? length : 32;
            put_bits(&out, rest.wide[i] & ~(~(uint64_t)0 << low), low);
            put_bits(&out, rest.wide[i] >> 16 >> 16, length - low);
        }
        if (item < 8)
            put_groups(&out, rest.narrow, lengths.narrow, some);
    }
    for (int i = 0; again != counts && i < set->contexts * CLASSES; i++)
        counts[i] += again[i];
    return (uint64_t)(out.to - bits) * 8 + out.have;
}

/* The highest class that occurs in any context. */
INLINE int highest_class(const uint32_t *counts, int contexts) {
    uint32_t any[CLASSES] = {0};
    int most = CLASSES - 1;
    for (int context = 0; context < contexts; context++)
        for (int i = 0; i < CLASSES; i++)
            any[i] |= counts[context * CLASSES + i];
    while (most > 0 && any[most] == 0)
        most--;
    return most;
}

/* Of each context, counts of the first `width` classes as weights of one byte (0: never), which are classes of sixteen
 * bits. The quotient of numbers of 48 and 32 bits has the right whole part as a float, too. */
INLINE void weights_some(const uint32_t *counts, int contexts, int width, uint8_t *restrict weights) {
    for (int context = 0; context < contexts; context++, counts += CLASSES, weights += width) {
        int64_t sum = 0;
        for (int i = 0; i < width; i++)
            sum += counts[i];
        const double all = (double)(sum ? sum : 1);
        for (int i = 0; i < width; i++) {
            int share = (int)((double)((int64_t)counts[i] << 16) / all);
            share += (counts[i] != 0) & (share == 0);
            int high = highest32((uint32_t)share), length = (high > 2 ? high : 2) - 2;
            weights[i] = (uint8_t)((length << 2) + (share >> length));
        }
    }
}

/* Of each context: frequencies that sum up to SCALE, or none at all. Quotients as above. */
INLINE void frequencies_some(const uint8_t *weights, int contexts, int width, uint16_t *frequencies) {
    for (int context = 0; context < contexts; context++, weights += width, frequencies += CLASSES) {
        uint32_t shares[CLASSES];
        int sum = 0, used = 0, given = 0, most = 0, end = width;
        while (end > 0 && weights[end - 1] == 0)
            end--;
        for (int i = 0; i < end; i++) {
            int over = (weights[i] & 63) >> 2, length = over > 1 ? over - 1 : 0;
            shares[i] = ((uint32_t)((weights[i] & 63) - (length << 2)) << length) + ((1u << length) >> 1);
            sum += (int)shares[i];
            used += shares[i] != 0;
        }
        memset(frequencies, 0, CLASSES * sizeof *frequencies);
        for (int i = 0; i < end; i++) {
            if (shares[i] == 0)
                continue;
            int part = (int)((double)((int64_t)shares[i] * ((int)SCALE - used)) / (double)sum);
            frequencies[i] = (uint16_t)(part ? part : 1);
            given += frequencies[i];
            most = frequencies[i] > frequencies[most] ? i : most;
        }
        if (used)
            frequencies[most] = (uint16_t)(frequencies[most] + ((int)SCALE - given));
    }
}

/* By mark of a class that occurs: frequency, and, above its 16 bits, the first slot. */
INLINE void steps_of_all(const uint16_t *frequencies, int contexts, uint32_t *steps) {
    for (int context = 0; context < contexts; context++) {
        uint32_t start = 0;
        for (int i = 0; i < CLASSES; i++, start += *frequencies++)
            *steps++ = *frequencies | start << 16;
    }
}

#ifdef FAST
static uint64_t PLACES[256]; /* by the set of lanes that need a word: which of the next ones each gets */
static uint64_t LEAVERS[256]; /* by the set of lanes that leave a word: these in order, as the last of eight */
static uint8_t WORDS[256][16]; /* as above, byte by byte of their words */

static void fill_tables(void) {
    for (int set = 0; set < 256; set++) {
        int left = 8 - __builtin_popcount(set);
        for (int lane = 0; lane < 8; lane++) {
            PLACES[set] |= (uint64_t)__builtin_popcount(set & ((1 << lane) - 1)) << 8 * lane;
            if (set >> lane & 1) {
                WORDS[set][2 * left] = (uint8_t)(2 * lane);
                WORDS[set][2 * left + 1] = (uint8_t)(2 * lane + 1);
                LEAVERS[set] |= (uint64_t)lane << 8 * left++;
            }
        }
    }
}

/* One whole row, as below; there is room for eight words that are none. */
FAST static uint16_t *encode_row_eight(const uint16_t *marks, int lanes, const uint32_t *steps, uint16_t *to,
                                       uint32_t *states) {
    const __m256i low = _mm256_set1_epi32(0xffff), scale = _mm256_set1_epi32(SCALE);
    for (int lane = lanes - 8; lane >= 0; lane -= 8) {
        __m256i state = _mm256_loadu_si256((const __m256i *)(states + lane));
        __m256i mark = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(marks + lane)));
        __m256i step = _mm256_i32gather_epi32((const int *)steps, mark, 4);
        __m256i frequency = _mm256_and_si256(step, low);
        __m256i stays = _mm256_cmpgt_epi32(frequency, _mm256_srli_epi32(state, 19));
        int set = 255 & ~_mm256_movemask_ps(_mm256_castsi256_ps(stays));
        __m256i leavers = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)LEAVERS[set]));
        __m256i words = _mm256_permutevar8x32_epi32(_mm256_and_si256(state, low), leavers);
        words = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
        _mm_storeu_si128((__m128i *)(to - 8), _mm256_castsi256_si128(words));
        to -= __builtin_popcount(set);
        state = _mm256_blendv_epi8(_mm256_srli_epi32(state, 16), state, stays);
        /* States have 31 bits, frequencies 13: as floats of 53 bits their quotient has the right whole part. */
        __m128i first = _mm256_cvttpd_epi32(_mm256_div_pd(_mm256_cvtepi32_pd(_mm256_castsi256_si128(state)),
                                                          _mm256_cvtepi32_pd(_mm256_castsi256_si128(frequency))));
        __m128i last = _mm256_cvttpd_epi32(_mm256_div_pd(_mm256_cvtepi32_pd(_mm256_extracti128_si256(state, 1)),
                                                         _mm256_cvtepi32_pd(_mm256_extracti128_si256(frequency, 1))));
        __m256i times = _mm256_inserti128_si256(_mm256_castsi128_si256(first), last, 1);
        times = _mm256_mullo_epi32(times, _mm256_sub_epi32(scale, frequency));
        state = _mm256_add_epi32(_mm256_add_epi32(state, _mm256_srli_epi32(step, 16)), times);
        _mm256_storeu_si256((__m256i *)(states + lane), state);
    }
    return to;
}
#endif

/* The marks, from the last to the first, as words, which are written from the room's end on; how many. `states` has one
 * for each lane. */
INLINE Py_ssize_t encode_some(const uint16_t *marks, Py_ssize_t n, int lanes, const uint32_t *steps, uint16_t *room,
                              uint32_t *states, int fast) {
    uint16_t *to = room + n;
    for (int lane = 0; lane < lanes; lane++)
        states[lane] = STATE_LOW;
    Py_ssize_t row = n > 0 ? (n - 1) / lanes * lanes : 0;
    for (Py_ssize_t end = n; end > 0; end = row, row -= lanes) {
#ifdef FAST
        if (fast && end - row == lanes) {
            to = encode_row_eight(marks + row, lanes, steps, to, states);
            continue;
        }
#endif
        for (Py_ssize_t i = end - 1; i >= row; i--) {
            uint32_t state = states[i - row], step = steps[marks[i]], frequency = step & 0xffff;
            if (state >> 19 >= frequency) {
                *--to = (uint16_t)state;
                state >>= 16;
            }
            states[i - row] = state + (step >> 16) + state / frequency * (SCALE - frequency);
        }
    }
    return room + n - to;
}

#ifdef WIDEST
/* By mark of a class that occurs, for the rows below: the frequency's inverse (32 bits), SCALE less it (12), the first
 * slot (12), and how far products with the inverse are shifted (6). With as many bits as are left of it, a state, less
 * than 2^19 frequencies, has a quotient that is too large by less than one part in the frequency: rounded down, it is
 * right. */
WIDEST static void inverses_all(const uint32_t *steps, int contexts, uint64_t *inverses) {
    for (int mark = 0; mark < contexts * CLASSES; mark++) {
        uint32_t frequency = steps[mark] & 0xffff;
        if (frequency == 0)
            continue;
        unsigned shift = 19 + 2 * (frequency > 1 ? 32 - (unsigned)__builtin_clz(frequency - 1) : 0);
        inverses[mark] = (((uint64_t)1 << shift) / frequency + 1) | (uint64_t)(SCALE - frequency) << 32 |
                         (uint64_t)(steps[mark] >> 16) << 44 | (uint64_t)shift << 58;
    }
}

/* As above, with states of 64 bits. */
WIDEST static uint16_t *encode_row_widest(const uint16_t *marks, int lanes, const uint64_t *inverses, uint16_t *to,
                                          uint64_t *states) {
    const __m512i slots = _mm512_set1_epi64(SCALE - 1), scale = _mm512_set1_epi64(SCALE);
    for (int lane = lanes - 8; lane >= 0; lane -= 8) {
        const uint16_t *of = marks + lane;
#define PAIR(i)                                                                                                        \
    _mm_castpd_si128(_mm_loadh_pd(_mm_load_sd((const double *)(inverses + of[i])),                                     \
                                  (const double *)(inverses + of[i + 1])))
        __m256i first = _mm256_inserti128_si256(_mm256_castsi128_si256(PAIR(0)), PAIR(2), 1);
        __m256i last = _mm256_inserti128_si256(_mm256_castsi128_si256(PAIR(4)), PAIR(6), 1);
#undef PAIR
        __m512i step = _mm512_inserti64x4(_mm512_castsi256_si512(first), last, 1);
        __m512i rest = _mm512_and_si512(_mm512_srli_epi64(step, 32), slots);
        __m512i state = _mm512_loadu_si512(states + lane);
        __mmask8 set = _mm512_cmpge_epu64_mask(_mm512_add_epi64(_mm512_srli_epi64(state, 19), rest), scale);
        __m128i words = _mm512_cvtepi64_epi16(state);
        words = _mm_shuffle_epi8(words, _mm_loadu_si128((const __m128i *)WORDS[set]));
        _mm_storeu_si128((__m128i *)(to - 8), words);
        to -= __builtin_popcount(set);
        state = _mm512_mask_srli_epi64(state, set, state, 16);
        __m512i times = _mm512_srlv_epi64(_mm512_mul_epu32(state, step), _mm512_srli_epi64(step, 58));
        __m512i slot = _mm512_and_si512(_mm512_srli_epi64(step, 44), slots);
        state = _mm512_add_epi64(_mm512_add_epi64(state, slot), _mm512_mul_epu32(times, rest));
        _mm512_storeu_si512(states + lane, state);
    }
    return to;
}

/* As `encode_some`. */
WIDEST static Py_ssize_t encode_widest(const uint16_t *marks, Py_ssize_t n, int lanes, const uint32_t *steps,
                                       int contexts, uint16_t *room, uint32_t *states) {
    uint64_t inverses[CONTEXTS_MAX * CLASSES], wide[LANES_MAX];
    Py_ssize_t whole = n / lanes * lanes;
    Py_ssize_t over = encode_some(marks + whole, n - whole, lanes, steps, room + whole, states, 0);
    uint16_t *to = room + n - over;
    inverses_all(steps, contexts, inverses);
    for (int lane = 0; lane < lanes; lane++)
        wide[lane] = states[lane];
    for (Py_ssize_t row = whole - lanes; row >= 0; row -= lanes)
        to = encode_row_widest(marks + row, lanes, inverses, to, wide);
    for (int lane = 0; lane < lanes; lane++)
        states[lane] = (uint32_t)wide[lane];
    return room + n - to;
}
#endif

/* What becomes of a block: how many bits, the highest class, how many words. */
typedef struct {
    uint64_t bits;
    int most;
    Py_ssize_t words;
} Found;

/* All of a block as classes. `weights` gets those of the classes up to the highest one, by context. The words are at the
 * end of `room`, which is as `marks`. */
INLINE Found code_some(const uint8_t *new, const uint8_t *base, const Setting *set, Py_ssize_t n, int lanes,
                       uint8_t *weights, uint16_t *marks, uint8_t *bits, uint16_t *room, uint32_t *states, int speed) {
    uint32_t counts[CONTEXTS_MAX * CLASSES], steps[CONTEXTS_MAX * CLASSES];
    uint16_t frequencies[CONTEXTS_MAX * CLASSES];
    memset(counts, 0, (size_t)set->contexts * CLASSES * sizeof *counts);
    Found found = {classify_some(new, base, set, n, counts, marks, bits), 0, 0};
    found.most = highest_class(counts, set->contexts);
    weights_some(counts, set->contexts, found.most + 1, weights);
    frequencies_some(weights, set->contexts, found.most + 1, frequencies);
    steps_of_all(frequencies, set->contexts, steps);
#ifdef WIDEST
    if (speed == 2) {
        found.words = encode_widest(marks, n, lanes, steps, set->contexts, room, states);
        return found;
    }
#endif
    found.words = encode_some(marks, n, lanes, steps, room, states, speed);
    return found;
}

/* A sample, looked at as a block of classes: how many bits are below them; counts[context][class]. */
INLINE uint64_t count_some(const uint8_t *new, const uint8_t *base, const Setting *set, Py_ssize_t n,
                           uint32_t *counts) {
    uint16_t marks[TILE];
    uint8_t bits[TILE * ITEM_MAX + 16];
    return classify_some(new, base, set, n, counts, marks, bits);
}

#define DEFINE_SPEED(NAME, SPEED, TARGET)                                                                              \
    TARGET static Found code_##NAME(const uint8_t *new, const uint8_t *base, const Setting *set, Py_ssize_t n,         \
                                    int lanes, uint8_t *weights, uint16_t *marks, uint8_t *bits, uint16_t *room,       \
                                    uint32_t *states) {                                                                \
        return code_some(new, base, set, n, lanes, weights, marks, bits, room, states, SPEED);                         \
    }                                                                                                                  \
    TARGET static uint64_t count_##NAME(const uint8_t *new, const uint8_t *base, const Setting *set, Py_ssize_t n,     \
                                        uint32_t *counts) {                                                            \
        return count_some(new, base, set, n, counts);                                                                  \
    }
DEFINE_SPEED(any, 0, )
#ifdef FAST
DEFINE_SPEED(fast, 1, FAST)
#else
#define is_fast 0
#define code_fast code_any
#define count_fast count_any
#endif
#ifdef WIDEST
DEFINE_SPEED(widest, 2, WIDEST)
#else
#define is_widest 0
#define code_widest code_fast
#define count_widest count_fast
#endif

/* What classes are decoded by. `symbols` has, by context and slot, the class: few enough bytes for the first cache.
 * `steps` has by mark of a class that occurs: class, frequency less one (12 bits), first slot (12 bits). Contexts without
 * frequencies have zeros in both. */
typedef struct {
    const uint8_t *symbols;
    const uint32_t *steps;
} Model;

static void model_all(const uint16_t *frequencies, int contexts, uint8_t *symbols, uint32_t *steps) {
    for (int context = 0; context < contexts; context++, symbols += SCALE) {
        uint32_t start = 0;
        for (uint32_t class = 0; class < CLASSES; class++) {
            uint32_t frequency = *frequencies++;
            *steps++ = frequency ? class | (frequency - 1) << 8 | start << 20 : 0;
            if (frequency)
                memset(symbols + start, (int)class, frequency);
            start += frequency;
        }
        if (start == 0)
            memset(symbols, 0, SCALE);
    }
}

/* What is being decoded: words and bits that are left. */
typedef struct {
    const uint8_t *words, *words_end, *bits;
    uint64_t bit, bits_end;
} Streams;

/* One row of lanes, or the beginning of one; contexts are as in marks. Whether there were words enough. */
static int decode_row(Streams *from, const uint16_t *contexts, Py_ssize_t n, const Model *model, uint32_t *states,
                      uint8_t *classes) {
    for (Py_ssize_t i = 0; i < n; i++) {
        uint32_t state = states[i], slot = state & (SCALE - 1);
        uint32_t step = model->steps[contexts[i] | model->symbols[(uint32_t)contexts[i] << 4 | slot]];
        classes[i] = (uint8_t)step;
        /* A step of 0 is that of class 0 where it has the first slot alone, or of a context without frequencies. */
        state = ((step >> 8 & (SCALE - 1)) + 1) * (state >> SCALE_BITS) + (step ? slot - (step >> 20) : 0);
        if (state < STATE_LOW) {
            if (from->words == from->words_end)
                return 0;
            state = state << 16 | load16(from->words, 0);
            from->words += 2;
        }
        states[i] = state;
    }
    return 1;
}

/* The steps of a row of lanes, an even number: one by one, for gathers are no faster. Two places are read at once. */
INLINE void find_steps(const uint16_t *contexts, int lanes, const Model *model, const uint32_t *states,
                       uint32_t *restrict found) {
    const uint8_t *symbols = model->symbols;
    const uint32_t *steps = model->steps;
    uint32_t at[LANES_MAX];
    for (int lane = 0; lane < lanes; lane++)
        at[lane] = (uint32_t)contexts[lane] << 4 | (states[lane] & (SCALE - 1));
#pragma GCC unroll 4
    for (size_t lane = 0; lane < (size_t)lanes; lane += 2) {
        uint64_t both;
        memcpy(&both, at + lane, 8);
        found[lane] = steps[(size_t)contexts[lane] | symbols[(uint32_t)both]];
        found[lane + 1] = steps[(size_t)contexts[lane + 1] | symbols[both >> 32]];
    }
}

#ifdef FAST
/* As `decode_row`, of a whole row of lanes, a multiple of eight, with as many words and eight more to be read. */
FAST static void decode_row_eight(Streams *from, const uint16_t *contexts, int lanes, const Model *model,
                                  uint32_t *states, uint8_t *classes) {
    const __m256i low = _mm256_set1_epi32(SCALE - 1), one = _mm256_set1_epi32(1), zero = _mm256_setzero_si256();
    const __m256i bytes = _mm256_set1_epi32(0x0c080400);
    const uint8_t *words = from->words;
    uint32_t found[LANES_MAX];
    find_steps(contexts, lanes, model, states, found);
    for (int lane = 0; lane < lanes; lane += 8) {
        __m256i state = _mm256_loadu_si256((const __m256i *)(states + lane));
        __m256i step = _mm256_loadu_si256((const __m256i *)(found + lane));
        __m256i frequency = _mm256_add_epi32(_mm256_and_si256(_mm256_srli_epi32(step, 8), low), one);
        __m256i place = _mm256_sub_epi32(_mm256_and_si256(state, low), _mm256_srli_epi32(step, 20));
        place = _mm256_andnot_si256(_mm256_cmpeq_epi32(step, zero), place);
        state = _mm256_add_epi32(_mm256_mullo_epi32(frequency, _mm256_srli_epi32(state, SCALE_BITS)), place);
        __m256i needs = _mm256_cmpeq_epi32(_mm256_srli_epi32(state, 15), zero);
        int set = _mm256_movemask_ps(_mm256_castsi256_ps(needs));
        __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)words));
        __m256i places = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)PLACES[set]));
        next = _mm256_or_si256(_mm256_slli_epi32(state, 16), _mm256_permutevar8x32_epi32(next, places));
        _mm256_storeu_si256((__m256i *)(states + lane), _mm256_blendv_epi8(state, next, needs));
        words += 2 * __builtin_popcount(set);
        step = _mm256_shuffle_epi8(step, bytes);
        uint32_t halves[2] = {(uint32_t)_mm256_extract_epi32(step, 0), (uint32_t)_mm256_extract_epi32(step, 4)};
        memcpy(classes + lane, halves, 8);
    }
    from->words = words;
}
#endif

#ifdef WIDEST
/* As above, of a multiple of sixteen lanes. */
WIDEST static void decode_row_sixteen(Streams *from, const uint16_t *contexts, int lanes, const Model *model,
                                      uint32_t *states, uint8_t *classes) {
    const __m512i low = _mm512_set1_epi32(SCALE - 1), one = _mm512_set1_epi32(1);
    const __m512i least = _mm512_set1_epi32(STATE_LOW);
    const uint8_t *words = from->words;
    uint32_t found[LANES_MAX];
    find_steps(contexts, lanes, model, states, found);
    for (int lane = 0; lane < lanes; lane += 16) {
        __m512i state = _mm512_loadu_si512(states + lane), step = _mm512_loadu_si512(found + lane);
        __m512i frequency = _mm512_add_epi32(_mm512_and_si512(_mm512_srli_epi32(step, 8), low), one);
        __m512i place = _mm512_maskz_sub_epi32(_mm512_test_epi32_mask(step, step), _mm512_and_si512(state, low),
                                               _mm512_srli_epi32(step, 20));
        state = _mm512_add_epi32(_mm512_mullo_epi32(frequency, _mm512_srli_epi32(state, SCALE_BITS)), place);
        __mmask16 set = _mm512_cmplt_epu32_mask(state, least);
        __m512i next = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)words));
        next = _mm512_maskz_expand_epi32(set, next);
        state = _mm512_mask_or_epi32(state, set, _mm512_slli_epi32(state, 16), next);
        _mm512_storeu_si512(states + lane, state);
        words += 2 * __builtin_popcount(set);
        _mm_storeu_si128((__m128i *)(classes + lane), _mm512_cvtepi32_epi8(step));
    }
    from->words = words;
}
#endif

/* The classes of a tile. Whether there were words enough. */
INLINE int decode_some(Streams *from, const uint16_t *contexts, Py_ssize_t n, int lanes, const Model *model,
                       uint32_t *states, uint8_t *classes, int speed) {
    for (Py_ssize_t row = 0; row < n; row += lanes) {
        int whole = n - row >= lanes;
#ifdef FAST
        if (speed && whole && from->words_end - from->words >= 2 * lanes + 16) {
#ifdef WIDEST
            if (speed == 2 && lanes >= 16) {
                decode_row_sixteen(from, contexts + row, lanes, model, states, classes + row);
                continue;
            }
#endif
            decode_row_eight(from, contexts + row, lanes, model, states, classes + row);
            continue;
        }
#endif
        if (!decode_row(from, contexts + row, whole ? lanes : n - row, model, states, classes + row))
            return 0;
    }
    return 1;
}

INLINE uint64_t take_bits(Streams *from, unsigned length) {
    uint64_t window = 0;
    Py_ssize_t at = (Py_ssize_t)(from->bit >> 3), left = (Py_ssize_t)(from->bits_end >> 3) - at;
    if (left >= 8)
        memcpy(&window, from->bits + at, 8);
    else if (left > 0)
        memcpy(&window, from->bits + at, (size_t)left);
    window >>= from->bit & 7;
    from->bit += length;
    return window & (((uint64_t)1 << length) - 1);
}

INLINE unsigned length_of(uint8_t class, int steps) {
    unsigned over = (unsigned)class >> 1 >> steps;
    return over > 1 ? over - 1 : 0;
}

/* Numbers of a tile, or the rest of one, from their classes and bits. */
INLINE void numbers_some(Streams *from, const uint8_t *classes, const uint8_t *base, int item, int transform,
                         Py_ssize_t n, uint8_t *out) {
    union {
        uint32_t narrow[TILE];
        uint64_t wide[TILE];
    } rest;
    const int steps = steps_of(item);
    if (item == 8) {
        for (Py_ssize_t i = 0; i < n; i++) {
            unsigned length = length_of(classes[i], steps), low = length < 32 ? length : 32;
            rest.wide[i] = take_bits(from, low);
            rest.wide[i] |= take_bits(from, length - low) << low;
        }
        declassify64(classes, rest.wide, base, transform, n, out);
        return;
    }
    uint8_t lengths[TILE];
    uint32_t needed = 64; /* a window of so many bits is read for each */
    for (Py_ssize_t i = 0; i < n; i++)
        needed += lengths[i] = (uint8_t)length_of(classes[i], steps);
    if (from->bit + needed <= from->bits_end) {
        const uint8_t *bits = from->bits;
        uint64_t bit = from->bit;
        for (Py_ssize_t i = 0; i < n; i++) {
            uint64_t window;
            memcpy(&window, bits + (bit >> 3), 8);
            rest.narrow[i] = (uint32_t)(window >> (bit & 7)) & (((uint32_t)1 << lengths[i]) - 1);
            bit += lengths[i];
        }
        from->bit = bit;
    } else {
        for (Py_ssize_t i = 0; i < n; i++)
            rest.narrow[i] = (uint32_t)take_bits(from, lengths[i]);
    }
    if (item == 4 && transform == FLOAT_CLASSES)
        declassify32(classes, rest.narrow, base, FLOAT_CLASSES, n, out);
    else if (item == 4)
        declassify32(classes, rest.narrow, base, INT_CLASSES, n, out);
    else if (item == 2)
        declassify16(classes, rest.narrow, base, transform, n, out);
    else
        declassify8(classes, rest.narrow, base, transform, n, out);
}

#ifdef WIDEST
/* As above, of numbers of 16 or 32 bits, sixteen at once; how many of them. Lengths are 30 bits at most: with up to 31
 * bits before them, those of sixteen numbers lie in one register. */
WIDEST static inline __attribute__((always_inline)) Py_ssize_t
numbers_sixteen(Streams *from, const uint8_t *classes, const uint8_t *base, int item, int transform, Py_ssize_t n,
                uint8_t *out) {
    const __m512i zero = _mm512_setzero_si512(), one = _mm512_set1_epi32(1), word = _mm512_set1_epi32(32);
    const __m512i most = _mm512_set1_epi32(INT32_MAX);
    const unsigned steps = (unsigned)steps_of(item);
    const __m512i top = _mm512_set1_epi32(1 << steps), below = _mm512_set1_epi32((1 << steps) - 1);
    const Py_ssize_t end = (Py_ssize_t)(from->bits_end >> 3);
    uint64_t bit = from->bit;
    Py_ssize_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512i class = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(classes + i)));
        __m512i code = _mm512_srli_epi32(class, 1);
        __m512i length = _mm512_subs_epu16(_mm512_srli_epi32(class, steps + 1), one);
        __m512i ends = _mm512_add_epi32(length, _mm512_alignr_epi32(length, zero, 15));
        ends = _mm512_add_epi32(ends, _mm512_alignr_epi32(ends, zero, 14));
        ends = _mm512_add_epi32(ends, _mm512_alignr_epi32(ends, zero, 12));
        ends = _mm512_add_epi32(ends, _mm512_alignr_epi32(ends, zero, 8));
        __m512i begins = _mm512_add_epi32(_mm512_sub_epi32(ends, length), _mm512_set1_epi32((int)(bit & 31)));
        Py_ssize_t at = (Py_ssize_t)(bit >> 5) * 4, left = end - at;
        __m512i window = zero;
        if (left >= 64)
            window = _mm512_loadu_si512(from->bits + at);
        else if (left > 0)
            window = _mm512_maskz_loadu_epi8(((uint64_t)1 << left) - 1, from->bits + at);
        bit += (unsigned)_mm_cvtsi128_si32(_mm512_castsi512_si128(_mm512_alignr_epi32(ends, ends, 15)));
        __m512i which = _mm512_srli_epi32(begins, 5), shift = _mm512_and_si512(begins, _mm512_set1_epi32(31));
        __m512i low = _mm512_srlv_epi32(_mm512_permutexvar_epi32(which, window), shift);
        __m512i high = _mm512_permutexvar_epi32(_mm512_add_epi32(which, one), window);
        __m512i rest = _mm512_or_si512(low, _mm512_sllv_epi32(high, _mm512_sub_epi32(word, shift)));
        /* Shifts are what there is least room for: products and masks instead. */
        __m512i power = _mm512_sllv_epi32(one, length);
        __m512i head = _mm512_mask_ternarylogic_epi32(code, _mm512_cmpge_epu32_mask(code, top), below, top, 0xea);
        rest = _mm512_and_si512(rest, _mm512_sub_epi32(power, one));
        __m512i u = _mm512_or_si512(_mm512_mullo_epi32(head, power), rest);
        __m512i d = _mm512_mask_sub_epi32(u, _mm512_test_epi32_mask(class, one), zero, u), b;
        if (item == 4)
            b = _mm512_loadu_si512(base + 4 * i);
        else { /* numbers of 16 bits are worked on as the upper halves of those of 32: below them all may happen */
            b = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(base + 2 * i))), 16);
            d = _mm512_slli_epi32(d, 16);
        }
        if (transform == FLOAT_CLASSES)
            b = _mm512_mask_xor_epi32(b, _mm512_movepi32_mask(b), b, most);
        b = _mm512_add_epi32(b, d);
        if (transform == FLOAT_CLASSES)
            b = _mm512_mask_xor_epi32(b, _mm512_movepi32_mask(b), b, most);
        if (item == 4)
            _mm512_storeu_si512(out + 4 * i, b);
        else
            _mm256_storeu_si256((__m256i *)(out + 2 * i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(b, 16)));
        __builtin_prefetch(base + (TILE + i) * item); /* the next tile comes meanwhile */
    }
    from->bit = bit;
    return i;
}

WIDEST static Py_ssize_t numbers_widest(Streams *from, const uint8_t *classes, const uint8_t *base, int item,
                                        int transform, Py_ssize_t n, uint8_t *out) {
    if (item == 4 && transform == FLOAT_CLASSES)
        return numbers_sixteen(from, classes, base, 4, FLOAT_CLASSES, n, out);
    if (item == 4)
        return numbers_sixteen(from, classes, base, 4, INT_CLASSES, n, out);
    if (item == 2 && transform == FLOAT_CLASSES)
        return numbers_sixteen(from, classes, base, 2, FLOAT_CLASSES, n, out);
    return item == 2 ? numbers_sixteen(from, classes, base, 2, INT_CLASSES, n, out) : 0;
}
#endif

/* Whether streams are exactly those of as many numbers as `out` holds. */
INLINE int declassify_some(Streams *from, const uint8_t *base, const Setting *set, int lanes, const Model *model,
                           uint32_t *states, Py_ssize_t n, uint8_t *out, int speed) {
    const int item = set->item, transform = set->transform;
    for (Py_ssize_t at = 0; at < n; at += TILE) {
        Py_ssize_t some = n - at < TILE ? n - at : TILE, done = 0;
        const uint8_t *other = base + at * item;
        uint8_t *to = out + at * item, classes[TILE];
        uint16_t contexts[TILE];
        OF(item, contexts, other, some, set, contexts);
        if (!decode_some(from, contexts, some, lanes, model, states, classes, speed))
            return 0;
#ifdef WIDEST
        if (speed == 2)
            done = numbers_widest(from, classes, other, item, transform, some, to);
#endif
        if (done < some)
            numbers_some(from, classes + done, other + done * item, item, transform, some - done, to + done * item);
    }
    int good = from->words == from->words_end && from->bit <= from->bits_end && from->bits_end - from->bit < 8;
    for (int lane = 0; lane < lanes; lane++)
        good &= states[lane] == STATE_LOW;
    return good;
}

#define DEFINE_DECLASSIFY(NAME, SPEED, TARGET)                                                                         \
    TARGET static int declassify_##NAME(Streams *from, const uint8_t *base, const Setting *set, int lanes,             \
                                        const Model *model, uint32_t *states, Py_ssize_t n, uint8_t *out) {            \
        return declassify_some(from, base, set, lanes, model, states, n, out, SPEED);                                  \
    }
DEFINE_DECLASSIFY(any, 0, )
#ifdef FAST
DEFINE_DECLASSIFY(fast, 1, FAST)
#else
#define declassify_fast declassify_any
#endif
#ifdef WIDEST
DEFINE_DECLASSIFY(widest, 2, WIDEST)
#else
#define declassify_widest declassify_fast
#endif

static int is_item(int item) { return item == 1 || item == 2 || item == 4 || item == 8; }

/* Whether sizes and numbers fit each other; an exception is set where they do not. Groups need a transform. */
static int fits(int item, int transform, int grouped, const Py_buffer *whole, const Py_buffer *base) {
    if (is_item(item) && transform >= NONE && transform <= INT_DIFFERENCE && (transform != NONE || !grouped) &&
        whole->len % item == 0 && whole->len / item <= UINT32_MAX &&
        (transform == NONE || (base->obj != NULL && base->len == whole->len)))
        return 1;
    PyErr_SetString(PyExc_ValueError, "sizes, item and transform do not fit");
    return 0;
}

/* Room for the items in groups; without groups NULL. *good is cleared if there is none to be had. Twice what is needed:
 * should another process write to the base between its two readings, no group grows beyond that. */
static uint8_t *room_for(int grouped, Py_ssize_t nbytes, int *good) {
    uint8_t *room = grouped && *good ? PyMem_RawMalloc(2 * (size_t)nbytes) : NULL;
    if (grouped && *good && room == NULL) {
        PyErr_NoMemory();
        *good = 0;
    }
    return room;
}

static PyObject *split(PyObject *self, PyObject *args) {
    Py_buffer new = {0}, base = {0}, out = {0};
    int transform, item, grouped, good;
    if (!PyArg_ParseTuple(args, "y*z*iipw*", &new, &base, &transform, &item, &grouped, &out))
        return NULL;
    good = fits(item, transform, grouped, &new, &base);
    if (good && out.len != new.len) {
        PyErr_SetString(PyExc_ValueError, "room of another size");
        good = 0;
    }
    uint8_t *room = room_for(grouped, new.len, &good);
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        split_all(new.buf, base.buf, transform, item, new.len / item, out.buf, room);
        Py_END_ALLOW_THREADS
    }
    PyMem_RawFree(room);
    PyBuffer_Release(&new);
    if (base.obj != NULL)
        PyBuffer_Release(&base);
    PyBuffer_Release(&out);
    if (!good)
        return NULL;
    Py_RETURN_NONE;
}

/* Fill views and bytes from a sequence of `item` planes of n bytes; how many views are held is in *held. */
static int planes_of(PyObject *sequence, int item, Py_ssize_t n, Py_buffer *views, const uint8_t **planes,
                     uint8_t *equal, int *held) {
    PyObject *fast = PySequence_Fast(sequence, "planes are a sequence");
    int good = fast != NULL;
    if (good && PySequence_Fast_GET_SIZE(fast) != item) {
        PyErr_SetString(PyExc_ValueError, "as many planes as an item has bytes");
        good = 0;
    }
    for (int plane = 0; good && plane < item; plane++) {
        PyObject *one = PySequence_Fast_GET_ITEM(fast, plane);
        planes[plane] = NULL;
        if (PyLong_Check(one)) {
            long value = PyLong_AsLong(one);
            equal[plane] = (uint8_t)value;
            good = value >= 0 && value < 256;
            if (!good && !PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a byte is 0 to 255");
        } else if (PyObject_GetBuffer(one, &views[*held], PyBUF_SIMPLE) < 0) {
            good = 0;
        } else {
            planes[plane] = views[*held].buf;
            good = views[(*held)++].len == n;
            if (!good)
                PyErr_SetString(PyExc_ValueError, "a plane of another size");
        }
    }
    Py_XDECREF(fast);
    return good;
}

static PyObject *join(PyObject *self, PyObject *args) {
    Py_buffer base = {0}, out = {0}, views[ITEM_MAX];
    const uint8_t *planes[ITEM_MAX];
    uint8_t equal[ITEM_MAX];
    PyObject *sequence;
    int transform, item, grouped, held = 0, good;
    if (!PyArg_ParseTuple(args, "Oz*iipw*", &sequence, &base, &transform, &item, &grouped, &out))
        return NULL;
    good = fits(item, transform, grouped, &out, &base) &&
           planes_of(sequence, item, out.len / item, views, planes, equal, &held);
    uint8_t *room = room_for(grouped, out.len, &good);
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        join_all(planes, equal, base.buf, transform, item, out.len / item, out.buf, room);
        Py_END_ALLOW_THREADS
    }
    PyMem_RawFree(room);
    while (held)
        PyBuffer_Release(&views[--held]);
    if (base.obj != NULL)
        PyBuffer_Release(&base);
    PyBuffer_Release(&out);
    if (!good)
        return NULL;
    Py_RETURN_NONE;
}

/* 64 bits of a map of n, those behind its end as zeros. */
static inline uint64_t bits_at(const uint8_t *map, Py_ssize_t at, Py_ssize_t n) {
    uint64_t bits = 0;
    if (n - at >= 64) {
        memcpy(&bits, map + at / 8, 8);
    } else {
        memcpy(&bits, map + at / 8, (n - at + 7) / 8);
        bits &= ~(uint64_t)0 >> (64 - (n - at));
    }
    return bits;
}

/* The map first, without branches; then from one set bit to the next: guesses go wrong once in 64 bytes, not in 8. */
static Py_ssize_t thin_all(const uint8_t *plane, Py_ssize_t n, uint8_t *restrict map, uint8_t *restrict values) {
    const uint64_t low = 0x7f7f7f7f7f7f7f7f;
    Py_ssize_t count = 0, at = 0;
    for (; at + 8 <= n; at += 8) {
        uint64_t word = load64(plane, at / 8);
        uint64_t filled = ((((word & low) + low) | word) & ~low) >> 7;
        map[at / 8] = (uint8_t)((filled * 0x0102040810204080) >> 56);
    }
    if (at < n)
        map[at / 8] = 0;
    for (; at < n; at++)
        map[at / 8] |= (uint8_t)((plane[at] != 0) << (at % 8));
    for (at = 0; at < n; at += 64)
        for (uint64_t bits = bits_at(map, at, n); bits; bits &= bits - 1)
            values[count++] = plane[at + __builtin_ctzll(bits)];
    return count;
}

static PyObject *thin(PyObject *self, PyObject *args) {
    Py_buffer plane = {0}, map = {0}, values = {0};
    Py_ssize_t count = -1;
    if (!PyArg_ParseTuple(args, "y*w*w*", &plane, &map, &values))
        return NULL;
    if (map.len == (plane.len + 7) / 8 && values.len == plane.len) {
        Py_BEGIN_ALLOW_THREADS
        count = thin_all(plane.buf, plane.len, map.buf, values.buf);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_SetString(PyExc_ValueError, "room of another size");
    }
    PyBuffer_Release(&plane);
    PyBuffer_Release(&map);
    PyBuffer_Release(&values);
    return count < 0 ? NULL : PyLong_FromSsize_t(count);
}

/* Whether there are as many values as bits are set; none is read that is not there. */
static int fill_all(const uint8_t *map, const uint8_t *values, Py_ssize_t have, Py_ssize_t n, uint8_t *restrict plane) {
    Py_ssize_t count = 0;
    memset(plane, 0, n);
    for (Py_ssize_t at = 0; at < n; at += 64) {
        uint64_t bits = bits_at(map, at, n);
        if (__builtin_popcountll(bits) > have - count)
            return 0;
        for (; bits; bits &= bits - 1)
            plane[at + __builtin_ctzll(bits)] = values[count++];
    }
    return count == have;
}

static PyObject *fill(PyObject *self, PyObject *args) {
    Py_buffer map = {0}, values = {0}, plane = {0};
    int good;
    if (!PyArg_ParseTuple(args, "y*y*w*", &map, &values, &plane))
        return NULL;
    good = map.len == (plane.len + 7) / 8;
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        good = fill_all(map.buf, values.buf, values.len, plane.len, plane.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&map);
    PyBuffer_Release(&values);
    PyBuffer_Release(&plane);
    return PyBool_FromLong(good);
}

/* Where items differ: a bit for each, from the lowest of the first byte on; how many do. */
#define DEFINE_ITEMS(W)                                                                                                \
    INLINE Py_ssize_t changed##W(const uint8_t *new, const uint8_t *base, Py_ssize_t n, uint8_t *restrict map) {       \
        Py_ssize_t count = 0, at = 0;                                                                                  \
        for (; at + 8 <= n; at += 8) {                                                                                 \
            unsigned bits = 0;                                                                                         \
            if (memcmp(new + at *(W / 8), base + at *(W / 8), W) != 0)                                                 \
                for (int i = 0; i < 8; i++)                                                                            \
                    bits |= (unsigned)(load##W(new, at + i) != load##W(base, at + i)) << i;                            \
            map[at / 8] = (uint8_t)bits;                                                                               \
            count += __builtin_popcount(bits);                                                                         \
        }                                                                                                              \
        if (at < n)                                                                                                    \
            map[at / 8] = 0;                                                                                           \
        for (; at < n; at++) {                                                                                         \
            unsigned bit = load##W(new, at) != load##W(base, at);                                                      \
            map[at / 8] |= (uint8_t)(bit << at % 8);                                                                   \
            count += bit;                                                                                              \
        }                                                                                                              \
        return count;                                                                                                  \
    }                                                                                                                  \
    INLINE Py_ssize_t pick##W(const uint8_t *data, const uint8_t *map, Py_ssize_t n, uint8_t *restrict out,            \
                              Py_ssize_t room) {                                                                       \
        Py_ssize_t count = 0;                                                                                          \
        for (Py_ssize_t at = 0; at < n; at += 64) {                                                                    \
            uint64_t bits = bits_at(map, at, n);                                                                       \
            if (__builtin_popcountll(bits) > room - count)                                                             \
                return -1;                                                                                             \
            for (; bits; bits &= bits - 1)                                                                             \
                store##W(out, count++, load##W(data, at + __builtin_ctzll(bits)));                                     \
        }                                                                                                              \
        return count;                                                                                                  \
    }                                                                                                                  \
    INLINE Py_ssize_t place##W(const uint8_t *items, const uint8_t *map, Py_ssize_t n, uint8_t *restrict out,          \
                               Py_ssize_t have) {                                                                      \
        Py_ssize_t count = 0;                                                                                          \
        for (Py_ssize_t at = 0; at < n; at += 64) {                                                                    \
            uint64_t bits = bits_at(map, at, n);                                                                       \
            if (__builtin_popcountll(bits) > have - count)                                                             \
                return -1;                                                                                             \
            for (; bits; bits &= bits - 1)                                                                             \
                store##W(out, at + __builtin_ctzll(bits), load##W(items, count++));                                    \
        }                                                                                                              \
        return count;                                                                                                  \
    }
DEFINE_ITEMS(8)
DEFINE_ITEMS(16)
DEFINE_ITEMS(32)
DEFINE_ITEMS(64)

static PyObject *changed(PyObject *self, PyObject *args) {
    Py_buffer new = {0}, base = {0}, map = {0};
    Py_ssize_t count = -1;
    int item;
    if (!PyArg_ParseTuple(args, "y*y*iw*", &new, &base, &item, &map))
        return NULL;
    if (is_item(item) && new.len % item == 0 && base.len == new.len && map.len == (new.len / item + 7) / 8) {
        Py_BEGIN_ALLOW_THREADS
        count = OF(item, changed, new.buf, base.buf, new.len / item, map.buf);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_SetString(PyExc_ValueError, "room of another size");
    }
    PyBuffer_Release(&new);
    PyBuffer_Release(&base);
    PyBuffer_Release(&map);
    return count < 0 ? NULL : PyLong_FromSsize_t(count);
}

/* Both ways between all items and those that a map has: whether there are as many as bits are set. */
static PyObject *between(PyObject *args, int placing) {
    Py_buffer from = {0}, map = {0}, to = {0};
    int item, good;
    if (!PyArg_ParseTuple(args, "y*y*iw*", &from, &map, &item, &to))
        return NULL;
    const Py_buffer *all = placing ? &to : &from, *some = placing ? &from : &to;
    good = is_item(item) && all->len % item == 0 && some->len % item == 0 && map.len == (all->len / item + 7) / 8;
    if (good) {
        Py_ssize_t n = all->len / item, m = some->len / item, count;
        Py_BEGIN_ALLOW_THREADS
        count = placing ? OF(item, place, from.buf, map.buf, n, to.buf, m)
                        : OF(item, pick, from.buf, map.buf, n, to.buf, m);
        Py_END_ALLOW_THREADS
        good = count == m;
    }
    PyBuffer_Release(&from);
    PyBuffer_Release(&map);
    PyBuffer_Release(&to);
    return PyBool_FromLong(good);
}

static PyObject *pick(PyObject *self, PyObject *args) { return between(args, 0); }

static PyObject *place(PyObject *self, PyObject *args) { return between(args, 1); }

/* Of the bytes of each row: the sum of the weights of their counts, how many values there are, how many zeros. */
static PyObject *weighed(const uint8_t *planes, int rows, Py_ssize_t n, const uint8_t *weights) {
    PyObject *found = PyList_New(rows);
    for (int row = 0; found != NULL && row < rows; row++) {
        const uint8_t *from = planes + row * n;
        uint32_t counts[256] = {0};
        long long sum = 0;
        int values = 0;
        for (Py_ssize_t i = 0; i < n; i++)
            counts[from[i]]++;
        for (int byte = 0; byte < 256; byte++) {
            sum += (long long)load64(weights, counts[byte]);
            values += counts[byte] != 0;
        }
        PyObject *one = Py_BuildValue("(LiI)", sum, values, counts[0]);
        if (one == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, row, one);
    }
    return found;
}

static PyObject *weigh(PyObject *self, PyObject *args) {
    Py_buffer planes = {0}, weights = {0};
    PyObject *found = NULL;
    int rows;
    if (!PyArg_ParseTuple(args, "y*iy*", &planes, &rows, &weights))
        return NULL;
    if (rows > 0 && planes.len % rows == 0 && weights.len / 8 > planes.len / rows)
        found = weighed(planes.buf, rows, planes.len / rows, weights.buf);
    else
        PyErr_SetString(PyExc_ValueError, "weights for other counts");
    PyBuffer_Release(&planes);
    PyBuffer_Release(&weights);
    return found;
}

static int is_setting(const Setting *set) {
    return is_item(set->item) && (set->transform == FLOAT_CLASSES || set->transform == INT_CLASSES) &&
           set->shift >= 0 && set->shift < 8 * set->item && set->low >= 0 && set->low < 256 && set->contexts > 0 &&
           set->contexts <= CONTEXTS_MAX;
}

static int is_lanes(int lanes) { return lanes >= 8 && lanes <= LANES_MAX && (lanes & (lanes - 1)) == 0; }

static PyObject *code(PyObject *self, PyObject *args) {
    Py_buffer new = {0}, base = {0}, weights = {0}, marks = {0}, room = {0}, out = {0};
    Setting set;
    Found found = {0, 0, 0};
    Py_ssize_t bits = 0;
    int lanes, good;
    if (!PyArg_ParseTuple(args, "y*y*iiiiiiw*w*w*w*", &new, &base, &set.transform, &set.item, &set.shift, &set.low,
                          &set.contexts, &lanes, &weights, &marks, &room, &out))
        return NULL;
    good = is_setting(&set) && is_lanes(lanes) && new.len % set.item == 0 && base.len == new.len &&
           weights.len == set.contexts * CLASSES && marks.len == new.len / set.item * 2 && room.len == marks.len &&
           out.len == new.len + 16 + 4 * lanes + room.len;
    if (good) {
        uint32_t states[LANES_MAX];
        Py_ssize_t n = new.len / set.item;
        Py_BEGIN_ALLOW_THREADS
        found = (is_widest ? code_widest : is_fast ? code_fast : code_any)(
            new.buf, base.buf, &set, n, lanes, weights.buf, marks.buf, out.buf, room.buf, states);
        bits = (Py_ssize_t)((found.bits + 7) / 8);
        uint8_t *to = (uint8_t *)out.buf + bits;
        memcpy(to, states, 4 * (size_t)lanes);
        memcpy(to + 4 * lanes, (const uint16_t *)room.buf + n - found.words, 2 * (size_t)found.words);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_SetString(PyExc_ValueError, "sizes, item, lanes and transform do not fit");
    }
    PyBuffer_Release(&new);
    PyBuffer_Release(&base);
    PyBuffer_Release(&weights);
    PyBuffer_Release(&marks);
    PyBuffer_Release(&room);
    PyBuffer_Release(&out);
    return good ? Py_BuildValue("(ini)", found.most, bits, (int)(4 * lanes + 2 * found.words)) : NULL;
}

static PyObject *frequencies(PyObject *self, PyObject *args) {
    Py_buffer weights = {0}, out = {0};
    int good;
    if (!PyArg_ParseTuple(args, "y*w*", &weights, &out))
        return NULL;
    good = weights.len % CLASSES == 0 && out.len == 2 * weights.len;
    if (good)
        frequencies_some(weights.buf, (int)(weights.len / CLASSES), CLASSES, out.buf);
    else
        PyErr_SetString(PyExc_ValueError, "room of another size");
    PyBuffer_Release(&weights);
    PyBuffer_Release(&out);
    if (!good)
        return NULL;
    Py_RETURN_NONE;
}

/* Whether the frequencies of each context sum up to SCALE, or are none. */
static int are_frequencies(const Py_buffer *given) {
    const uint16_t *of = given->buf;
    if (given->len <= 0 || given->len % (2 * CLASSES) || given->len / (2 * CLASSES) > CONTEXTS_MAX)
        return 0;
    for (Py_ssize_t at = 0; at < given->len / 2; at += CLASSES) {
        uint32_t sum = 0;
        for (int i = 0; i < CLASSES; i++)
            sum += of[at + i];
        if (sum != 0 && sum != SCALE)
            return 0;
    }
    return 1;
}

/* The lowest of as many neighbouring keys as there are contexts that have the most items. */
static int window(const uint8_t *base, int item, Py_ssize_t n, int shift) {
    uint8_t keys[TILE];
    Py_ssize_t counts[256] = {0}, have = 0, most = -1;
    int low = 0;
    OF(item, bytes_at, base, n, shift, keys);
    for (Py_ssize_t i = 0; i < n; i++)
        counts[keys[i]]++;
    for (int key = 0; key < 256; key++) {
        have += counts[key] - (key < CONTEXTS_MAX ? 0 : counts[key - CONTEXTS_MAX]);
        if (have > most) {
            most = have;
            low = key < CONTEXTS_MAX ? 0 : key - CONTEXTS_MAX + 1;
        }
    }
    return low;
}

/* (lowest context, bits below the classes, what their counts leave open in the unit of the weights, counts that are not
 * zero, by context their sums) of a sample. */
static PyObject *counted(const uint8_t *new, const uint8_t *base, Py_ssize_t n, Setting *set, const uint8_t *weights) {
    uint32_t counts[CONTEXTS_MAX * CLASSES] = {0};
    long long left = 0;
    int values = 0;
    if (set->transform == FLOAT_CLASSES)
        set->low = window(base, set->item, n, set->shift);
    uint64_t bits = (is_widest ? count_widest : is_fast ? count_fast : count_any)(new, base, set, n, counts);
    PyObject *sums = PyList_New(set->contexts);
    for (int context = 0; sums != NULL && context < set->contexts; context++) {
        const uint32_t *count = counts + context * CLASSES;
        uint32_t all = 0;
        for (int i = 0; i < CLASSES; i++) {
            left -= (long long)load64(weights, count[i]);
            values += count[i] != 0;
            all += count[i];
        }
        left += (long long)load64(weights, all);
        PyObject *sum = PyLong_FromUnsignedLong(all);
        if (sum == NULL)
            Py_CLEAR(sums);
        else
            PyList_SET_ITEM(sums, context, sum);
    }
    return sums != NULL ? Py_BuildValue("(iKLiN)", set->low, bits, left, values, sums) : NULL;
}

/* So many runs of so many items, spread over the data; all of it where it is no longer. How many. */
static Py_ssize_t sample(const uint8_t *data, Py_ssize_t items, int item, Py_ssize_t runs, Py_ssize_t each,
                         uint8_t *to) {
    if (items <= runs * each) {
        memcpy(to, data, (size_t)(items * item));
        return items;
    }
    for (Py_ssize_t run = 0; run < runs; run++)
        memcpy(to + run * each * item, data + items / runs * item * run, (size_t)(each * item));
    return runs * each;
}

/* What a sample of a block tells: (items in it, how many are not the base's, how many neighbours in one byte of the map
 * of these are unlike, `weigh` of its planes, and `counted`, or None where the transform is none of classes). */
static PyObject *look(PyObject *self, PyObject *args) {
    Py_buffer new = {0}, base = {0}, weights = {0};
    Setting set;
    Py_ssize_t runs, each;
    PyObject *found = NULL;
    if (!PyArg_ParseTuple(args, "y*y*iiiinny*", &new, &base, &set.transform, &set.item, &set.shift, &set.contexts,
                          &runs, &each, &weights))
        return NULL;
    set.low = 0;
    if (is_item(set.item) && (set.transform == NONE || is_setting(&set)) && new.len % set.item == 0 &&
        base.len == new.len && runs > 0 && each > 0 && runs <= TILE && runs * each <= TILE &&
        weights.len / 8 > (new.len / set.item < runs * each ? new.len / set.item : runs * each)) {
        uint8_t mine[TILE * ITEM_MAX], other[TILE * ITEM_MAX], planes[TILE * ITEM_MAX], map[TILE / 8];
        Py_ssize_t n = sample(new.buf, new.len / set.item, set.item, runs, each, mine);
        sample(base.buf, base.len / set.item, set.item, runs, each, other);
        Py_ssize_t changed = OF(set.item, changed, mine, other, n, map);
        int unlike = 0;
        for (Py_ssize_t i = 0; i < (n + 7) / 8; i++)
            unlike += __builtin_popcount((map[i] ^ map[i] >> 1) & 127);
        split_all(mine, NULL, NONE, set.item, n, planes, NULL);
        PyObject *rows = weighed(planes, set.item, n, weights.buf);
        PyObject *classes = Py_None;
        if (set.transform == NONE)
            Py_INCREF(classes);
        else
            classes = counted(mine, other, n, &set, weights.buf);
        if (rows != NULL && classes != NULL)
            found = Py_BuildValue("(nniOO)", n, changed, unlike, rows, classes);
        Py_XDECREF(rows);
        Py_XDECREF(classes);
    } else {
        PyErr_SetString(PyExc_ValueError, "sizes, item, transform and weights do not fit");
    }
    PyBuffer_Release(&new);
    PyBuffer_Release(&base);
    PyBuffer_Release(&weights);
    return found;
}

static PyObject *declassify(PyObject *self, PyObject *args) {
    Py_buffer words = {0}, bits = {0}, of = {0}, base = {0}, symbols = {0}, out = {0};
    Setting set;
    int lanes, good, whole = 0;
    if (!PyArg_ParseTuple(args, "y*iy*y*y*iiiiiw*w*", &words, &lanes, &bits, &of, &base, &set.transform, &set.item,
                          &set.shift, &set.low, &set.contexts, &symbols, &out))
        return NULL;
    good = is_lanes(lanes) && is_setting(&set) && are_frequencies(&of) && of.len == set.contexts * CLASSES * 2 &&
           out.len % set.item == 0 && base.len == out.len && words.len >= 4 * lanes && words.len % 2 == 0 &&
           symbols.len == CONTEXTS_MAX * (Py_ssize_t)SCALE;
    if (!good) {
        PyErr_SetString(PyExc_ValueError, "streams, frequencies and room do not fit");
    } else {
        uint32_t states[LANES_MAX], steps[CONTEXTS_MAX * CLASSES];
        Py_BEGIN_ALLOW_THREADS
        memcpy(states, words.buf, 4 * (size_t)lanes);
        Streams from = {(const uint8_t *)words.buf + 4 * lanes, (const uint8_t *)words.buf + words.len, bits.buf, 0,
                        (uint64_t)bits.len * 8};
        model_all(of.buf, set.contexts, symbols.buf, steps);
        Model model = {symbols.buf, steps};
        whole = (is_widest ? declassify_widest : is_fast ? declassify_fast : declassify_any)(
            &from, base.buf, &set, lanes, &model, states, out.len / set.item, out.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&symbols);
    PyBuffer_Release(&words);
    PyBuffer_Release(&bits);
    PyBuffer_Release(&of);
    PyBuffer_Release(&base);
    PyBuffer_Release(&out);
    return good ? PyBool_FromLong(whole) : NULL;
}

static PyMethodDef METHODS[] = {
    {"split", split, METH_VARARGS, "split(new, base, transform, item, grouped, out): fill out with the planes"},
    {"join", join, METH_VARARGS, "join(planes, base, transform, item, grouped, out): inverse of split"},
    {"thin", thin, METH_VARARGS, "thin(plane, map, values): where bytes are not zero, and these; how many"},
    {"fill", fill, METH_VARARGS, "fill(map, values, plane): inverse of thin; False if they do not fit"},
    {"changed", changed, METH_VARARGS, "changed(new, base, item, map): how many items differ, and which"},
    {"pick", pick, METH_VARARGS, "pick(all, map, item, some): those of the map; False if they are not as many"},
    {"place", place, METH_VARARGS, "place(some, map, item, all): inverse of pick, the others stay"},
    {"weigh", weigh, METH_VARARGS, "weigh(planes, rows, weights): per row, of the counts of its bytes"},
    {"look", look, METH_VARARGS,
     "look(new, base, transform, item, shift, contexts, runs, each, weights): what a sample tells"},
    {"code", code, METH_VARARGS,
     "code(new, base, transform, item, shift, low, contexts, lanes, weights, marks, room, out): the highest class, how many "
     "bytes of bits and, behind them, of words"},
    {"frequencies", frequencies, METH_VARARGS, "frequencies(weights, out): of each context"},
    {"declassify", declassify, METH_VARARGS,
     "declassify(words, lanes, bits, frequencies, base, transform, item, shift, low, contexts, symbols, out): whether they fit"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_kernel", "Loops of the codec.", 0, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void) {
#ifdef FAST
    __builtin_cpu_init();
    is_fast = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
              __builtin_cpu_supports("lzcnt") && __builtin_cpu_supports("popcnt");
    fill_tables();
#endif
#ifdef WIDEST
    is_widest = is_fast && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512vl");
#endif
    return PyModuleDef_Init(&MODULE);
}
