# The pickler's output buffer: the payload of one bytes object, so that it can be handed over without a copy.
#
# Opcodes are written through a bare pointer. `limit` is the only thing that is compared on the way: below it there are
# at least BUFFER_SLACK bytes of room, enough for any opcode with its argument (text forms and strings of 255 bytes
# included) and the PUT, APPEND or BUILD that follow; and the open frame has not reached the size at which PEP 3154's framing closes it.
from cpython.ref cimport PyObject
from libc.string cimport memcpy, memmove

cdef enum:
    BUFFER_SLACK = 512          # bytes
    FRAME_SIZE_MIN = 4          # bytes: shorter frames get no FRAME opcode (Modules/_pickle.c)
    FRAME_SIZE_TARGET = 65536   # bytes: a frame of this size ends at the next opcode boundary (Modules/_pickle.c)
    FRAME_HEADER_SIZE = 9       # bytes: FRAME and its 8-byte length

cdef struct Buffer:
    PyObject* owner         # owned bytes object whose payload is the buffer; NULL before the first use
    char* start             # first byte of the payload
    char* next              # where the next opcode goes
    char* limit             # see above; an opcode boundary at or above it needs attention
    char* end               # one past the last byte of the payload
    Py_ssize_t frame        # offset of the open frame's header from `start`; -1: no frame is open


cdef inline char* put_u16(char* p, unsigned int value) noexcept nogil:
    """Little-endian, like every number in a pickle but BINFLOAT's."""
    p[0] = <char>(value & 0xff)
    p[1] = <char>((value >> 8) & 0xff)
    return p + 2


cdef inline char* put_u32(char* p, unsigned long long value) noexcept nogil:
    p[0] = <char>(value & 0xff)
    p[1] = <char>((value >> 8) & 0xff)
    p[2] = <char>((value >> 16) & 0xff)
    p[3] = <char>((value >> 24) & 0xff)
    return p + 4


cdef inline char* put_u64(char* p, unsigned long long value) noexcept nogil:
    put_u32(p, value)
    put_u32(p + 4, value >> 32)
    return p + 8


cdef inline char* put_bytes(char* p, const char* data, Py_ssize_t size) noexcept nogil:
    """Copy; sizes that names have go through overlapping word moves, which beat a call of memcpy."""
    if 16 <= size <= 32:
        memcpy(p, data, 16)
        memcpy(p + size - 16, data + size - 16, 16)
    elif size < 16:
        if size >= 8:
            memcpy(p, data, 8)
            memcpy(p + size - 8, data + size - 8, 8)
        elif size >= 4:
            memcpy(p, data, 4)
            memcpy(p + size - 4, data + size - 4, 4)
        elif size > 0:
            p[0] = data[0]
            p[size >> 1] = data[size >> 1]
            p[size - 1] = data[size - 1]
    else:
        memcpy(p, data, size)
    return p + size
