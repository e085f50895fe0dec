"""Digests of big blocks of memory at about the speed of memory: two XXH64 hashes with different seeds, in one pass.

XXH64 is Yann Collet's (its specification is in the xxHash project, doc/xxhash_spec.md): four lanes of 64 bits that each
take every fourth word, multiplied and rotated, and a final mix. 128 bits of two seeds tell any number of blocks apart
that chance, or a broken disk, brings about. They are no protection against somebody who makes two blocks with the same
digest on purpose.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from *:
    """
    #include <stdint.h>
    #define FASTCAP_PRIME_1 0x9E3779B185EBCA87ULL
    #define FASTCAP_PRIME_2 0xC2B2AE3D27D4EB4FULL
    #define FASTCAP_PRIME_3 0x165667B19E3779F9ULL
    #define FASTCAP_PRIME_4 0x85EBCA77C2B2AE63ULL
    #define FASTCAP_PRIME_5 0x27D4EB2F165667C5ULL
    #define FASTCAP_SECOND_SEED 0x9E3779B97F4A7C15ULL
    static inline uint64_t fastcap_rotate(uint64_t x, int count) { return (x << count) | (x >> (64 - count)); }
    /* Words are little-endian, as on every machine that fastcap is built for. */
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    #define fastcap_little_64(x) __builtin_bswap64(x)
    #define fastcap_little_32(x) __builtin_bswap32(x)
    #else
    #define fastcap_little_64(x) (x)
    #define fastcap_little_32(x) (x)
    #endif
    """
    const uint64_t PRIME_1 "FASTCAP_PRIME_1"
    const uint64_t PRIME_2 "FASTCAP_PRIME_2"
    const uint64_t PRIME_3 "FASTCAP_PRIME_3"
    const uint64_t PRIME_4 "FASTCAP_PRIME_4"
    const uint64_t PRIME_5 "FASTCAP_PRIME_5"
    const uint64_t SECOND_SEED "FASTCAP_SECOND_SEED"
    uint64_t rotate "fastcap_rotate" (uint64_t x, int count) noexcept nogil
    uint64_t little_64 "fastcap_little_64" (uint64_t x) noexcept nogil
    uint32_t little_32 "fastcap_little_32" (uint32_t x) noexcept nogil

cdef enum:
    BLOCK = 1 << 14     # bytes that are copied at once: few enough to be in the cache when they are hashed


def digest(data, /):
    """The digest of a contiguous buffer: 16 bytes, XXH64 with seed 0 and with seed 0x9E3779B97F4A7C15, big-endian each.

    The GIL is released meanwhile; if another thread changes the memory, the digest is that of any mixture.
    """
    cdef Py_buffer view
    cdef uint64_t first, second
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            hash_both(<const uint8_t*>view.buf, NULL, <size_t>view.len, &first, &second)
    finally:
        PyBuffer_Release(&view)
    return to_bytes(first, second)


def copy_digest(source, target, /):
    """Copy a contiguous buffer to the beginning of another one, and return the digest of the copy.

    The GIL is released meanwhile; whatever another thread does to ``source``, the digest is that of what was copied.
    ValueError if the target is too small. The two must not overlap.
    """
    cdef Py_buffer source_view, target_view
    cdef uint64_t first, second
    PyObject_GetBuffer(source, &source_view, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(target, &target_view, PyBUF_SIMPLE | PyBUF_WRITABLE)
        try:
            if target_view.len < source_view.len:
                raise ValueError(f"{source_view.len} bytes do not fit into {target_view.len}")
            with nogil:
                hash_both(<const uint8_t*>source_view.buf, <uint8_t*>target_view.buf, <size_t>source_view.len, &first,
                          &second)
        finally:
            PyBuffer_Release(&target_view)
    finally:
        PyBuffer_Release(&source_view)
    return to_bytes(first, second)


cdef bytes to_bytes(uint64_t first, uint64_t second):
    return int(first).to_bytes(8, "big") + int(second).to_bytes(8, "big")


cdef inline uint64_t read_64(const uint8_t* p) noexcept nogil:
    cdef uint64_t word
    memcpy(&word, p, 8)
    return little_64(word)


cdef inline uint64_t read_32(const uint8_t* p) noexcept nogil:
    cdef uint32_t word
    memcpy(&word, p, 4)
    return little_32(word)


cdef inline uint64_t mix(uint64_t lane, uint64_t word) noexcept nogil:
    """One round, of which `word` has been multiplied with PRIME_2 already: both hashes need that."""
    return rotate(lane + word, 31) * PRIME_1


cdef inline uint64_t merge(uint64_t hashed, uint64_t lane) noexcept nogil:
    return (hashed ^ mix(0, lane * PRIME_2)) * PRIME_1 + PRIME_4


cdef uint64_t join(uint64_t a, uint64_t b, uint64_t c, uint64_t d) noexcept nogil:
    cdef uint64_t hashed = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18)
    return merge(merge(merge(merge(hashed, a), b), c), d)


cdef uint64_t finish(uint64_t hashed, const uint8_t* p, size_t size) noexcept nogil:
    """The last bytes, fewer than 32, and the final mix."""
    while size >= 8:
        hashed = rotate(hashed ^ mix(0, read_64(p) * PRIME_2), 27) * PRIME_1 + PRIME_4
        p += 8
        size -= 8
    if size >= 4:
        hashed = rotate(hashed ^ (read_32(p) * PRIME_1), 23) * PRIME_2 + PRIME_3
        p += 4
        size -= 4
    while size:
        hashed = rotate(hashed ^ (p[0] * PRIME_5), 11) * PRIME_1
        p += 1
        size -= 1
    hashed = (hashed ^ (hashed >> 33)) * PRIME_2
    hashed = (hashed ^ (hashed >> 29)) * PRIME_3
    return hashed ^ (hashed >> 32)


cdef void hash_both(const uint8_t* source, uint8_t* target, size_t size, uint64_t* first,
                    uint64_t* second) noexcept nogil:
    """Hash `size` bytes of `source` or, if `target` is not NULL, of the copy that is made of them there."""
    cdef const uint8_t* p = source if target == NULL else target
    cdef size_t rest = size
    cdef size_t copied = 0      # bytes
    cdef size_t block
    cdef size_t words           # groups of four in this block
    cdef uint64_t word
    cdef uint64_t a = PRIME_1 + PRIME_2, b = PRIME_2, c = 0, d = 0 - PRIME_1
    cdef uint64_t e = SECOND_SEED + PRIME_1 + PRIME_2, f = SECOND_SEED + PRIME_2, g = SECOND_SEED
    cdef uint64_t h = SECOND_SEED - PRIME_1
    if size < 32:
        if target != NULL:
            memcpy(target, source, size)
        first[0] = finish(PRIME_5 + size, p, size)
        second[0] = finish(SECOND_SEED + PRIME_5 + size, p, size)
        return
    while rest >= 32:
        block = min(rest, <size_t>BLOCK)
        if target != NULL:
            memcpy(target + copied, source + copied, block)
            copied += block
        words = block // 32
        rest -= words * 32
        while words:
            word = read_64(p) * PRIME_2
            a = mix(a, word)
            e = mix(e, word)
            word = read_64(p + 8) * PRIME_2
            b = mix(b, word)
            f = mix(f, word)
            word = read_64(p + 16) * PRIME_2
            c = mix(c, word)
            g = mix(g, word)
            word = read_64(p + 24) * PRIME_2
            d = mix(d, word)
            h = mix(h, word)
            p += 32
            words -= 1
    if target != NULL and copied < size:
        memcpy(target + copied, source + copied, size - copied)
    first[0] = finish(join(a, b, c, d) + size, p, rest)
    second[0] = finish(join(e, f, g, h) + size, p, rest)
