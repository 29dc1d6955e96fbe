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
#define INLINE static inline __attribute__((always_inline))

enum { NONE, XOR, FLOAT_DIFFERENCE, INT_DIFFERENCE };

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

static PyObject *weigh(PyObject *self, PyObject *args) {
    Py_buffer planes = {0}, weights = {0};
    PyObject *found = NULL;
    int rows;
    if (!PyArg_ParseTuple(args, "y*iy*", &planes, &rows, &weights))
        return NULL;
    if (rows > 0 && planes.len % rows == 0 && weights.len / 8 > planes.len / rows) {
        Py_ssize_t n = planes.len / rows;
        found = PyList_New(rows);
        for (int row = 0; found != NULL && row < rows; row++) {
            const uint8_t *from = (const uint8_t *)planes.buf + row * n;
            uint32_t counts[256] = {0};
            long long sum = 0;
            int values = 0;
            for (Py_ssize_t i = 0; i < n; i++)
                counts[from[i]]++;
            for (int byte = 0; byte < 256; byte++) {
                sum += (long long)load64(weights.buf, counts[byte]);
                values += counts[byte] != 0;
            }
            PyObject *one = Py_BuildValue("(LiI)", sum, values, counts[0]);
            if (one == NULL)
                Py_CLEAR(found);
            else
                PyList_SET_ITEM(found, row, one);
        }
    } else {
        PyErr_SetString(PyExc_ValueError, "weights for other counts");
    }
    PyBuffer_Release(&planes);
    PyBuffer_Release(&weights);
    return found;
}

static PyMethodDef METHODS[] = {
    {"split", split, METH_VARARGS, "split(new, base, transform, item, grouped, out): fill out with the planes"},
    {"join", join, METH_VARARGS, "join(planes, base, transform, item, grouped, out): inverse of split"},
    {"thin", thin, METH_VARARGS, "thin(plane, map, values): where bytes are not zero, and these; how many"},
    {"fill", fill, METH_VARARGS, "fill(map, values, plane): inverse of thin; False if they do not fit"},
    {"weigh", weigh, METH_VARARGS, "weigh(planes, rows, weights): per row, of the counts of its bytes"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_kernel", "Loops of the codec.", 0, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&MODULE); }
