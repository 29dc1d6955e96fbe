/* Copies whose bytes nobody reads soon: they are stored past the caches where the processor has such stores.
 *
 * An ordinary store first reads the line that it replaces, and drives from the cache what was just hashed; with stores
 * past the cache memory moves two bytes for each one copied, not three. copying.py does the same without a compiler.
 *
 * And the hash that proves chunks before they are copied (XXH3, 128 bits, of more than 240 bytes), so that many chunks
 * are proved and copied in one call, which needs the interpreter's lock for none of them.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define WIDE __attribute__((target("avx2")))
static int is_wide; /* whether the machine has it */
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#define LINE 64
#define PAST_FROM 4096 /* below, the ends of lines cost more than is saved */

static void copy_past(uint8_t *to, const uint8_t *from, size_t nbytes) {
#ifdef __SSE2__
    if (nbytes >= PAST_FROM) {
        size_t head = (size_t)(-(uintptr_t)to % LINE);
        memcpy(to, from, head);
        to += head, from += head, nbytes -= head;
        for (; nbytes >= LINE; to += LINE, from += LINE, nbytes -= LINE) {
            __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)from + 1);
            __m128i c = _mm_loadu_si128((const __m128i *)from + 2), d = _mm_loadu_si128((const __m128i *)from + 3);
            _mm_stream_si128((__m128i *)to, a);
            _mm_stream_si128((__m128i *)to + 1, b);
            _mm_stream_si128((__m128i *)to + 2, c);
            _mm_stream_si128((__m128i *)to + 3, d);
        }
        memcpy(to, from, nbytes);
        _mm_sfence(); /* such stores are in no order with later ones, a slot's state word among them */
        return;
    }
#endif
    memcpy(to, from, nbytes);
}

static PyObject *copy(PyObject *self, PyObject *args) {
    Py_buffer to = {0}, from = {0};
    int fits;
    if (!PyArg_ParseTuple(args, "w*y*", &to, &from))
        return NULL;
    fits = to.len == from.len;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        copy_past(to.buf, from.buf, (size_t)from.len);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_Format(PyExc_ValueError, "%zd bytes into %zd", from.len, to.len);
    }
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    if (!fits)
        return NULL;
    Py_RETURN_NONE;
}

/* Bytes [begin, end) of what the sources are when they lie one behind the other. */
static void copy_some(const uint64_t *to, const uint64_t *from, const uint64_t *sizes, Py_ssize_t count, uint64_t begin,
                      uint64_t end) {
    uint64_t at = 0;
    for (Py_ssize_t i = 0; i < count && at < end; at += sizes[i++]) {
        uint64_t low = begin > at ? begin - at : 0, high = end - at < sizes[i] ? end - at : sizes[i];
        if (low < high)
            copy_past((uint8_t *)(uintptr_t)(to[i] + low), (const uint8_t *)(uintptr_t)(from[i] + low), high - low);
    }
}

static PyObject *copy_range(PyObject *self, PyObject *args) {
    Py_buffer to = {0}, from = {0}, sizes = {0};
    unsigned long long begin, end;
    if (!PyArg_ParseTuple(args, "y*y*y*KK", &to, &from, &sizes, &begin, &end))
        return NULL;
    int fits = to.len == from.len && to.len == sizes.len && to.len % (Py_ssize_t)sizeof(uint64_t) == 0;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        copy_some(to.buf, from.buf, sizes.buf, sizes.len / (Py_ssize_t)sizeof(uint64_t), begin, end);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_SetString(PyExc_ValueError, "as many targets as sources and sizes are needed, 8 bytes each");
    }
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    PyBuffer_Release(&sizes);
    if (!fits)
        return NULL;
    Py_RETURN_NONE;
}

/* ----------------------------------------------------------------------------------------------------- what is due */

typedef struct {
    Py_buffer target;
    Py_ssize_t to, at, nbytes; /* bytes `at` of the piece on go `to` the target's */
} Row;

/* Of rows in order, the bytes of one chunk, which was proved: what is still to be copied of it. */
typedef struct {
    const Row *rows;
    Py_ssize_t count, next; /* the row after the present one */
    const uint8_t *piece;
    Py_ssize_t begin, end; /* the chunk, in the piece */
    uint8_t *to;           /* the rest of the present row's part */
    const uint8_t *from;
    size_t left;
    int past; /* whether it is large enough to pass by the caches */
} Due;

/* Whether anything is left; the present row is one of which there is. */
static int has_due(Due *due) {
    while (due->left == 0 && due->next < due->count && due->rows[due->next].at < due->end) {
        const Row *row = due->rows + due->next++;
        Py_ssize_t low = row->at > due->begin ? row->at : due->begin, stop = row->at + row->nbytes;
        Py_ssize_t high = stop < due->end ? stop : due->end;
        if (low < high) {
            due->to = (uint8_t *)row->target.buf + row->to + (low - row->at);
            due->from = due->piece + low;
            due->left = (size_t)(high - low);
            due->past = due->left >= PAST_FROM;
        }
    }
    return due->left > 0;
}

static void move_on(Due *due, size_t nbytes) { due->to += nbytes, due->from += nbytes, due->left -= nbytes; }

static void copy_due(Due *due) {
    while (has_due(due)) {
        copy_past(due->to, due->from, due->left);
        due->left = 0;
    }
}

/* ------------------------------------------------------------------------------------------------------ hashing */

#define STRIPE 64
#define SECRET 192
#define STRIPES 16 /* of a block: the secret moves on by 8 bytes with each */
#define BLOCK (STRIPE * STRIPES)
#define LONG_FROM 241 /* shorter texts have other formulas */
#define HASH 16

static const uint8_t secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static const uint32_t P32_1 = 0x9E3779B1U, P32_2 = 0x85EBCA77U, P32_3 = 0xC2B2AE3DU;
static const uint64_t P64_1 = 0x9E3779B185EBCA87U, P64_2 = 0xC2B2AE3D27D4EB4FU, P64_3 = 0x165667B19E3779F9U,
                      P64_4 = 0x85EBCA77C2B2AE63U, P64_5 = 0x27D4EB2F165667C5U;

static inline uint64_t word(const uint8_t *at) {
    uint64_t found;
    memcpy(&found, at, sizeof found);
    return found;
}

/* `stripes` stripes, each with its own place of the secret. */
static void add_stripes(uint64_t *acc, const uint8_t *from, const uint8_t *key, size_t stripes) {
    for (; stripes > 0; stripes--, from += STRIPE, key += 8) {
        for (int lane = 0; lane < 8; lane++) {
            uint64_t value = word(from + 8 * lane), mixed = value ^ word(key + 8 * lane);
            acc[lane ^ 1] += value;
            acc[lane] += (mixed & 0xFFFFFFFFU) * (mixed >> 32);
        }
    }
}

static void scramble(uint64_t *acc, const uint8_t *key) {
    for (int lane = 0; lane < 8; lane++)
        acc[lane] = (acc[lane] ^ (acc[lane] >> 47) ^ word(key + 8 * lane)) * P32_1;
}

static void add_blocks(uint64_t *acc, const uint8_t *from, size_t blocks) {
    for (; blocks > 0; blocks--, from += BLOCK) {
        add_stripes(acc, from, secret, STRIPES);
        scramble(acc, secret + SECRET - STRIPE);
    }
}

#ifdef WIDE
/* The same, four lanes at once; and with `to`, as many bytes of `past` are copied there meanwhile, past the caches, so that
 * memory is read and written at once. `to` begins a line. */
WIDE static inline __attribute__((always_inline)) void blocks_wide(uint64_t *acc, const uint8_t *from, size_t blocks,
                                                                   uint8_t *to, const uint8_t *past) {
    const __m256i prime = _mm256_set1_epi32((int)P32_1);
    const __m256i *last = (const __m256i *)(secret + SECRET - STRIPE);
    __m256i low = _mm256_loadu_si256((__m256i *)acc), high = _mm256_loadu_si256((__m256i *)acc + 1);
    for (; blocks > 0; blocks--) {
        const uint8_t *key = secret;
        for (int stripe = 0; stripe < STRIPES; stripe++, from += STRIPE, key += 8) {
            _mm_prefetch((const char *)from + 1024, _MM_HINT_T0);
            __m256i a = _mm256_loadu_si256((const __m256i *)from), b = _mm256_loadu_si256((const __m256i *)from + 1);
            if (to != NULL) {
                _mm256_stream_si256((__m256i *)to, _mm256_loadu_si256((const __m256i *)past));
                _mm256_stream_si256((__m256i *)to + 1, _mm256_loadu_si256((const __m256i *)past + 1));
                to += LINE, past += LINE;
            }
            __m256i x = _mm256_xor_si256(a, _mm256_loadu_si256((const __m256i *)key));
            __m256i y = _mm256_xor_si256(b, _mm256_loadu_si256((const __m256i *)key + 1));
            x = _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32));
            y = _mm256_mul_epu32(y, _mm256_srli_epi64(y, 32));
            low = _mm256_add_epi64(_mm256_add_epi64(low, x), _mm256_shuffle_epi32(a, _MM_SHUFFLE(1, 0, 3, 2)));
            high = _mm256_add_epi64(_mm256_add_epi64(high, y), _mm256_shuffle_epi32(b, _MM_SHUFFLE(1, 0, 3, 2)));
        }
        __m256i *lanes[2] = {&low, &high};
        for (int half = 0; half < 2; half++) {
            __m256i now = *lanes[half];
            now = _mm256_xor_si256(now, _mm256_srli_epi64(now, 47));
            now = _mm256_xor_si256(now, _mm256_loadu_si256(last + half));
            __m256i upper = _mm256_mul_epu32(_mm256_srli_epi64(now, 32), prime);
            *lanes[half] = _mm256_add_epi64(_mm256_mul_epu32(now, prime), _mm256_slli_epi64(upper, 32));
        }
    }
    _mm256_storeu_si256((__m256i *)acc, low);
    _mm256_storeu_si256((__m256i *)acc + 1, high);
}

WIDE static void add_blocks_wide(uint64_t *acc, const uint8_t *from, size_t blocks) {
    blocks_wide(acc, from, blocks, NULL, NULL);
}

WIDE static void add_blocks_copying(uint64_t *acc, const uint8_t *from, size_t blocks, uint8_t *to,
                                    const uint8_t *past) {
    blocks_wide(acc, from, blocks, to, past);
}
#endif

/* Blocks that can be copied beside hashing now, once what goes before them is done (about a block of it at a time). */
static size_t blocks_due(Due *due) {
    for (size_t done = 0; done < BLOCK && has_due(due);) {
        size_t some = due->left;
        if (due->past && some >= BLOCK + LINE) {
            some = (size_t)(-(uintptr_t)due->to % LINE);
            if (some == 0)
                return due->left / BLOCK;
        }
        memcpy(due->to, due->from, some);
        done += some;
        move_on(due, some);
    }
    return 0;
}

/* Add all blocks, and copy of what is `due` as much meanwhile. */
static void add_all_blocks(uint64_t *acc, const uint8_t *from, size_t blocks, Due *due) {
#ifdef WIDE
    while (is_wide && blocks > 0) {
        size_t some = blocks_due(due);
        if (some > 0) {
            some = some < blocks ? some : blocks;
            add_blocks_copying(acc, from, some, due->to, due->from);
            move_on(due, some * BLOCK);
        } else {
            some = has_due(due) ? 1 : blocks;
            add_blocks_wide(acc, from, some);
        }
        from += some * BLOCK, blocks -= some;
    }
#endif
    if (blocks > 0) {
        copy_due(due); /* while a cache has it */
        add_blocks(acc, from, blocks);
    }
}

static uint64_t merged(const uint64_t *acc, const uint8_t *key, uint64_t sum) {
    for (int pair = 0; pair < 4; pair++) {
        unsigned __int128 product = (unsigned __int128)(acc[2 * pair] ^ word(key + 16 * pair)) *
                                    (acc[2 * pair + 1] ^ word(key + 16 * pair + 8));
        sum += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    sum ^= sum >> 37;
    sum *= 0x165667919E3779F9U;
    return sum ^ (sum >> 32);
}

static void put(uint8_t *to, uint64_t value) {
    for (int i = 0; i < 8; i++)
        to[i] = (uint8_t)(value >> (56 - 8 * i));
}

/* The hash of `nbytes` >= LONG_FROM bytes, most significant byte first; of what is `due` some is copied meanwhile. */
static void hash(uint8_t *to, const uint8_t *from, size_t nbytes, Due *due) {
    uint64_t acc[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    size_t blocks = (nbytes - 1) / BLOCK, done = blocks * BLOCK;
    add_all_blocks(acc, from, blocks, due);
    add_stripes(acc, from + done, secret, (nbytes - 1 - done) / STRIPE);
    add_stripes(acc, from + nbytes - STRIPE, secret + SECRET - STRIPE - 7, 1);
    put(to, merged(acc, secret + SECRET - STRIPE - 11, ~((uint64_t)nbytes * P64_2)));
    put(to + 8, merged(acc, secret + 11, (uint64_t)nbytes * P64_1));
}

static PyObject *digest(PyObject *self, PyObject *args) {
    Py_buffer from = {0};
    uint8_t found[HASH];
    Due none = {0};
    if (!PyArg_ParseTuple(args, "y*", &from))
        return NULL;
    if (from.len < LONG_FROM) {
        PyErr_Format(PyExc_ValueError, "%zd bytes, not %d or more", from.len, LONG_FROM);
        PyBuffer_Release(&from);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    hash(found, from.buf, (size_t)from.len, &none);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&from);
    return PyBytes_FromStringAndSize((char *)found, HASH);
}

/* ---------------------------------------------------------------------------------------------- proving and copying */

enum { FAILED, STRIDED, READY };

/* One read (plan/reads.py): entry, rank, image, image_offset, nbytes, dest_offset, runs, ... */
static int fill_row(Row *row, PyObject *read, PyObject *targets, Py_ssize_t offset, Py_ssize_t nbytes) {
    if (!PyTuple_Check(read) || PyTuple_GET_SIZE(read) < 7) {
        PyErr_SetString(PyExc_TypeError, "not a read");
        return FAILED;
    }
    Py_ssize_t numbers[4];
    for (int i = 0; i < 4; i++) {
        numbers[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(read, 3 + i));
        if (numbers[i] == -1 && PyErr_Occurred())
            return FAILED;
    }
    if (numbers[3] != 1)
        return STRIDED;
    row->at = numbers[0] - offset, row->nbytes = numbers[1], row->to = numbers[2];
    PyObject *target = PyObject_GetItem(targets, PyTuple_GET_ITEM(read, 0));
    if (target == NULL)
        return FAILED;
    int fits = PyObject_GetBuffer(target, &row->target, PyBUF_WRITABLE) == 0;
    Py_DECREF(target);
    if (!fits)
        return FAILED;
    if (row->nbytes < 0 || row->at < 0 || row->at > nbytes - row->nbytes || row->to < 0 ||
        row->to > row->target.len - row->nbytes) {
        PyErr_SetString(PyExc_ValueError, "a read outside of its piece or its target");
        PyBuffer_Release(&row->target);
        return FAILED;
    }
    return READY;
}

/* Hash each chunk, and copy what is read of it if its hash is the expected one; the hashes found go to `found`. A chunk is
 * copied while the next one is hashed: a second level cache has it. */
static void prove_chunks(const uint8_t *piece, Py_ssize_t nbytes, Py_ssize_t chunk, const uint8_t *expected,
                         uint8_t *found, const Row *rows, Py_ssize_t count) {
    Due due = {.rows = rows, .count = count, .piece = piece};
    Py_ssize_t first = 0; /* of the rows that do not end before the chunk */
    for (Py_ssize_t begin = 0; begin < nbytes; begin += chunk, expected += HASH, found += HASH) {
        Py_ssize_t end = nbytes - begin > chunk ? begin + chunk : nbytes;
        if (end - begin >= LONG_FROM)
            hash(found, piece + begin, (size_t)(end - begin), &due);
        copy_due(&due);
        int good = memcmp(found, expected, HASH) == 0;
        due.begin = begin, due.end = end, due.next = good ? first : count;
        while (first < count && rows[first].at + rows[first].nbytes <= end)
            first++;
    }
    copy_due(&due);
#ifdef __SSE2__
    _mm_sfence(); /* as in copy_past() */
#endif
}

static PyObject *prove_and_copy(PyObject *self, PyObject *args) {
    Py_buffer piece = {0}, expected = {0}, brief = {0};
    PyObject *reads, *targets, *result = NULL;
    Py_ssize_t offset, chunk, count = 0;
    Row *rows = NULL;
    int state = FAILED;
    if (!PyArg_ParseTuple(args, "y*nny*y*O!O", &piece, &offset, &chunk, &expected, &brief, &PyList_Type, &reads,
                          &targets))
        return NULL;
    Py_ssize_t chunks = chunk > 0 ? (piece.len + chunk - 1) / chunk : 0, total = PyList_GET_SIZE(reads);
    Py_ssize_t tail = chunks > 0 ? piece.len - (chunks - 1) * chunk : 0;
    int is_brief = chunks > 0 && tail < LONG_FROM;
    if (chunk < LONG_FROM || expected.len != chunks * HASH || brief.len != (is_brief ? HASH : 0)) {
        PyErr_SetString(PyExc_ValueError, "chunks and hashes do not fit together");
        goto end;
    }
    rows = PyMem_Malloc(sizeof *rows * (size_t)(total > 0 ? total : 1));
    result = PyBytes_FromStringAndSize(NULL, chunks * HASH);
    if (rows == NULL || result == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    state = READY;
    while (count < total && state == READY) {
        state = fill_row(rows + count, PyList_GET_ITEM(reads, count), targets, offset, piece.len);
        count += state == READY;
        if (count > 1 && state == READY && rows[count - 1].at < rows[count - 2].at)
            state = STRIDED; /* left to whoever takes them one by one */
    }
    if (state == READY) {
        uint8_t *found = (uint8_t *)PyBytes_AS_STRING(result);
        if (is_brief)
            memcpy(found + (chunks - 1) * HASH, brief.buf, HASH);
        Py_BEGIN_ALLOW_THREADS
        prove_chunks(piece.buf, piece.len, chunk, expected.buf, found, rows, count);
        Py_END_ALLOW_THREADS
    }
end:
    for (Py_ssize_t i = 0; i < count; i++)
        PyBuffer_Release(&rows[i].target);
    PyMem_Free(rows);
    PyBuffer_Release(&piece);
    PyBuffer_Release(&expected);
    PyBuffer_Release(&brief);
    if (state != READY)
        Py_CLEAR(result);
    if (state == STRIDED)
        Py_RETURN_NONE;
    return result;
}

static PyMethodDef METHODS[] = {
    {"copy", copy, METH_VARARGS, "copy(target, source): buffers of one size that do not overlap"},
    {"copy_range", copy_range, METH_VARARGS,
     "copy_range(targets, sources, sizes, begin, end): arrays of addresses, not checked, and of sizes"},
    {"digest", digest, METH_VARARGS, "digest(data): 16 bytes, of 241 bytes at least"},
    {"prove_and_copy", prove_and_copy, METH_VARARGS,
     "prove_and_copy(piece, offset, chunk_bytes, expected, brief, reads, targets): hashes found, None for strided reads"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_copying", "Copies past the caches, of bytes that are proved.", 0, METHODS, NULL, NULL, NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__copying(void) {
#ifdef WIDE
    __builtin_cpu_init();
    is_wide = __builtin_cpu_supports("avx2");
#endif
    return PyModuleDef_Init(&MODULE);
}
