/* Copies whose bytes nobody reads soon: they are stored past the caches where the processor has such stores.
 *
 * An ordinary store first reads the line that it replaces, and drives from the cache what was just hashed; with stores
 * past the cache memory moves two bytes for each one copied, not three. copying.py does the same without a compiler.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
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

static PyObject *copy_each(PyObject *self, PyObject *args) {
    PyObject *rows;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &rows))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(rows);
    unsigned long long(*each)[3] = PyMem_RawMalloc(sizeof *each * (size_t)(count > 0 ? count : 1));
    if (each == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!PyArg_ParseTuple(PyList_GET_ITEM(rows, i), "KKK", &each[i][0], &each[i][1], &each[i][2])) {
            PyMem_RawFree(each);
            return NULL;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++)
        copy_past((uint8_t *)(uintptr_t)each[i][0], (const uint8_t *)(uintptr_t)each[i][1], (size_t)each[i][2]);
    Py_END_ALLOW_THREADS
    PyMem_RawFree(each);
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"copy", copy, METH_VARARGS, "copy(target, source): buffers of one size that do not overlap"},
    {"copy_each", copy_each, METH_VARARGS, "copy_each([(target, source, nbytes), ...]): addresses, not checked"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_copying", "Copies past the caches.", 0, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__copying(void) { return PyModuleDef_Init(&MODULE); }
