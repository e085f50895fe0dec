# The tables that a scan fills and a graph reads. Header only: structs and constants.
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from *:
    """
    #include <stdint.h>
    #define FASTCAP_NO_INDEX ((uint32_t)0xFFFFFFFFu)
    """
    const uint32_t NO_INDEX "FASTCAP_NO_INDEX"  # "none" in every uint32_t index below

cdef enum:
    # `place` of a node or memo reference: what it is to its parent in the upper three bits, which one in the rest.
    ROLE_SHIFT = 29
    POSITION_MASK = (1 << 29) - 1

cdef enum Role:
    ROLE_OPERAND = 0   # consumed by the opcode that made the parent: callable 0, arguments 1, tuple members 0..n-1
    ROLE_ITEM = 1      # list or set member; position in the container
    ROLE_PAIR = 2      # dict (or SETITEMS) entry: key at 2 i, value at 2 i + 1
    ROLE_STATE = 3     # BUILD's operand; position counts BUILDs
    ROLE_DISCARD = 4   # popped off again: state_setter calls, the thrown-away copy of a recursive tuple
    ROLE_PICKLE = 5    # one of several pickles in a file
    ROLE_RAW = 6       # bytes between or inside pickles that are not opcodes (joblib's arrays)

cdef enum NodeFlag:
    # The node was made from a memo reference: it only holds bytes that belong to a GET (see scanner.pyx, `discard`).
    FLAG_ALIAS = 1
    # The node holds memo references: only then is it worth looking for them.
    FLAG_REFERS = 2
    # An array wrapper of joblib that the scanner has paused at: it does so once.
    FLAG_WRAPPER = 4
    # Memo references lead to the node; the graph fills it in.
    FLAG_REFERRED = 8

# "Net" offsets count stream bytes without overhead (PROTO, FRAME, STOP): sizes never have to be corrected for frames.
# In pkl files a node's span is [start, end) in net offsets; `Graph.stream_offset` turns them into file positions.
cdef struct Node:
    uint64_t start    # bytes, net offset of the first byte of the span
    uint64_t end      # bytes, net offset one past the span
    uint32_t parent   # index of the parent; NO_INDEX for the root
    uint32_t count    # nodes in the subtree, itself included; the graph fills it in
    uint32_t place    # Role << ROLE_SHIFT | position in the parent
    uint32_t arg      # containers: number of items or pairs; calls (REDUCE, NEWOBJ, NEWOBJ_EX, OBJ): index of the callable or
                      # NO_INDEX; tuples and STACK_GLOBAL: operands; NEXT_BUFFER: number of the buffer; aliases: the target
    uint32_t memo     # memo index of the last PUT on it; NO_INDEX if never memoized
    uint8_t op        # opcode that made it (its byte); 0 for a file of several pickles and for raw bytes
    uint8_t flags     # NodeFlag bits
    uint16_t unused   # 0; named so that no uninitialised byte is ever handed out

# A GET: the node `source` refers to what `target` memoized. `place` is as in Node.
cdef struct Ref:
    uint32_t source   # index of the node that holds the reference
    uint32_t target   # index of the node referred to
    uint32_t place    # Role << ROLE_SHIFT | position in the source

# Net offset `at` in the skeleton is followed by a hole: `missing` bytes of the stream, in total up to and with this
# hole, are not kept in the skeleton. Sorted by `at`.
cdef struct Hole:
    uint64_t at       # bytes, net offset of the first byte left out
    uint64_t missing  # bytes left out up to and including this hole

# Overhead: `total` bytes of PROTO, FRAME and STOP lie before net offset `at` up to and including this one. Sorted.
cdef struct Overhead:
    uint64_t at       # bytes, net offset at which the overhead opcode stands
    uint64_t total    # bytes of overhead up to and including this opcode

cdef inline Py_ssize_t holes_before(const Hole* holes, Py_ssize_t count, uint64_t net) noexcept nogil:
    """How many of the holes begin before the net offset."""
    cdef Py_ssize_t low = 0
    cdef Py_ssize_t high = count
    cdef Py_ssize_t middle
    while low < high:
        middle = (low + high) // 2
        if holes[middle].at < net:
            low = middle + 1
        else:
            high = middle
    return low

cdef inline uint64_t missing_before(const Hole* holes, Py_ssize_t hole) noexcept nogil:
    """Bytes left out in all holes before this one."""
    return holes[hole - 1].missing if hole else 0

cdef inline uint64_t hole_size(const Hole* holes, Py_ssize_t hole) noexcept nogil:
    """Bytes left out in this one."""
    return holes[hole].missing - missing_before(holes, hole)

cdef inline bint is_call(uint8_t op) noexcept nogil:
    """REDUCE, OBJ, NEWOBJ, NEWOBJ_EX: opcodes whose node remembers its callable in `arg`."""
    return op == 82 or op == 111 or op == 129 or op == 146
