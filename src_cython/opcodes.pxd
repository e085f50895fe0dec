# Pickle opcodes by their names in pickletools. Source: CPython Lib/pickletools.py, PEP 307, PEP 3154, PEP 574.
from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef enum Op:
    OP_MARK = 40
    OP_EMPTY_TUPLE = 41
    OP_STOP = 46
    OP_POP = 48
    OP_POP_MARK = 49
    OP_DUP = 50
    OP_BINBYTES = 66
    OP_SHORT_BINBYTES = 67
    OP_FLOAT = 70
    OP_BINFLOAT = 71
    OP_INT = 73
    OP_BININT = 74
    OP_BININT1 = 75
    OP_LONG = 76
    OP_BININT2 = 77
    OP_NONE = 78
    OP_PERSID = 80
    OP_BINPERSID = 81
    OP_REDUCE = 82
    OP_STRING = 83
    OP_BINSTRING = 84
    OP_SHORT_BINSTRING = 85
    OP_UNICODE = 86
    OP_BINUNICODE = 88
    OP_EMPTY_LIST = 93
    OP_APPEND = 97
    OP_BUILD = 98
    OP_GLOBAL = 99
    OP_DICT = 100
    OP_APPENDS = 101
    OP_GET = 103
    OP_BINGET = 104
    OP_INST = 105
    OP_LONG_BINGET = 106
    OP_LIST = 108
    OP_OBJ = 111
    OP_PUT = 112
    OP_BINPUT = 113
    OP_LONG_BINPUT = 114
    OP_SETITEM = 115
    OP_TUPLE = 116
    OP_SETITEMS = 117
    OP_EMPTY_DICT = 125
    OP_PROTO = 128
    OP_NEWOBJ = 129
    OP_EXT1 = 130
    OP_EXT2 = 131
    OP_EXT4 = 132
    OP_TUPLE1 = 133
    OP_TUPLE2 = 134
    OP_TUPLE3 = 135
    OP_NEWTRUE = 136
    OP_NEWFALSE = 137
    OP_LONG1 = 138
    OP_LONG4 = 139
    OP_SHORT_BINUNICODE = 140
    OP_BINUNICODE8 = 141
    OP_BINBYTES8 = 142
    OP_EMPTY_SET = 143
    OP_ADDITEMS = 144
    OP_FROZENSET = 145
    OP_NEWOBJ_EX = 146
    OP_STACK_GLOBAL = 147
    OP_MEMOIZE = 148
    OP_FRAME = 149
    OP_BYTEARRAY8 = 150
    OP_NEXT_BUFFER = 151
    OP_READONLY_BUFFER = 152

# How an opcode's arguments are laid out in the stream.
cdef enum ArgKind:
    ARG_INVALID = 0   # not an opcode
    ARG_FIXED = 1     # opcode and argument have a fixed size
    ARG_LINE = 2      # argument ends with a newline
    ARG_TWO_LINES = 3
    ARG_COUNT1 = 4    # 1-byte length, then that many bytes
    ARG_COUNT4 = 5    # 4-byte length
    ARG_COUNT8 = 6    # 8-byte length

# Opcodes that the scanner's fast lane takes, by what they do.
cdef enum FastLane:
    LANE_NONE = 0
    LANE_ATOM = 1     # push an atom
    LANE_GET = 2      # push a memo reference
    LANE_MEMOIZE = 3
    LANE_LEAF = 4     # push a node without children that has a 1- or 4-byte count
    LANE_EMPTY = 5    # push an empty container
    LANE_MARK = 6
    LANE_EXTEND = 7   # APPENDS, SETITEMS, ADDITEMS

cdef struct OpInfo:
    unsigned char lane      # FastLane
    unsigned char kind      # ArgKind
    unsigned char header    # bytes of opcode and fixed argument or length; 1 for lines
    unsigned char protocol  # first protocol that has it

cdef inline void set_op(OpInfo* table, int op, int kind, int header, int protocol) noexcept nogil:
    table[op].lane = LANE_NONE
    table[op].kind = kind
    table[op].header = header
    table[op].protocol = protocol

cdef inline void fill_op_table(OpInfo* table) noexcept:
    """Fill 256 entries; the facts are pickletools' (checked against it in tests/test_scanner.py)."""
    cdef int op
    for op in range(256):
        set_op(table, op, ARG_INVALID, 1, 0)
    set_op(table, OP_MARK, ARG_FIXED, 1, 0)
    set_op(table, OP_STOP, ARG_FIXED, 1, 0)
    set_op(table, OP_POP, ARG_FIXED, 1, 0)
    set_op(table, OP_DUP, ARG_FIXED, 1, 0)
    set_op(table, OP_NONE, ARG_FIXED, 1, 0)
    set_op(table, OP_REDUCE, ARG_FIXED, 1, 0)
    set_op(table, OP_APPEND, ARG_FIXED, 1, 0)
    set_op(table, OP_BUILD, ARG_FIXED, 1, 0)
    set_op(table, OP_DICT, ARG_FIXED, 1, 0)
    set_op(table, OP_LIST, ARG_FIXED, 1, 0)
    set_op(table, OP_SETITEM, ARG_FIXED, 1, 0)
    set_op(table, OP_TUPLE, ARG_FIXED, 1, 0)
    set_op(table, OP_EMPTY_TUPLE, ARG_FIXED, 1, 1)
    set_op(table, OP_POP_MARK, ARG_FIXED, 1, 1)
    set_op(table, OP_BINPERSID, ARG_FIXED, 1, 1)
    set_op(table, OP_EMPTY_LIST, ARG_FIXED, 1, 1)
    set_op(table, OP_APPENDS, ARG_FIXED, 1, 1)
    set_op(table, OP_OBJ, ARG_FIXED, 1, 1)
    set_op(table, OP_SETITEMS, ARG_FIXED, 1, 1)
    set_op(table, OP_EMPTY_DICT, ARG_FIXED, 1, 1)
    set_op(table, OP_NEWOBJ, ARG_FIXED, 1, 2)
    set_op(table, OP_TUPLE1, ARG_FIXED, 1, 2)
    set_op(table, OP_TUPLE2, ARG_FIXED, 1, 2)
    set_op(table, OP_TUPLE3, ARG_FIXED, 1, 2)
    set_op(table, OP_NEWTRUE, ARG_FIXED, 1, 2)
    set_op(table, OP_NEWFALSE, ARG_FIXED, 1, 2)
    set_op(table, OP_EMPTY_SET, ARG_FIXED, 1, 4)
    set_op(table, OP_ADDITEMS, ARG_FIXED, 1, 4)
    set_op(table, OP_FROZENSET, ARG_FIXED, 1, 4)
    set_op(table, OP_NEWOBJ_EX, ARG_FIXED, 1, 4)
    set_op(table, OP_STACK_GLOBAL, ARG_FIXED, 1, 4)
    set_op(table, OP_MEMOIZE, ARG_FIXED, 1, 4)
    set_op(table, OP_NEXT_BUFFER, ARG_FIXED, 1, 5)
    set_op(table, OP_READONLY_BUFFER, ARG_FIXED, 1, 5)
    set_op(table, OP_FLOAT, ARG_LINE, 1, 0)
    set_op(table, OP_INT, ARG_LINE, 1, 0)
    set_op(table, OP_LONG, ARG_LINE, 1, 0)
    set_op(table, OP_PERSID, ARG_LINE, 1, 0)
    set_op(table, OP_STRING, ARG_LINE, 1, 0)
    set_op(table, OP_UNICODE, ARG_LINE, 1, 0)
    set_op(table, OP_GET, ARG_LINE, 1, 0)
    set_op(table, OP_PUT, ARG_LINE, 1, 0)
    set_op(table, OP_GLOBAL, ARG_TWO_LINES, 1, 0)
    set_op(table, OP_INST, ARG_TWO_LINES, 1, 0)
    set_op(table, OP_BINFLOAT, ARG_FIXED, 9, 1)
    set_op(table, OP_BININT, ARG_FIXED, 5, 1)
    set_op(table, OP_BININT1, ARG_FIXED, 2, 1)
    set_op(table, OP_BININT2, ARG_FIXED, 3, 1)
    set_op(table, OP_BINGET, ARG_FIXED, 2, 1)
    set_op(table, OP_LONG_BINGET, ARG_FIXED, 5, 1)
    set_op(table, OP_BINPUT, ARG_FIXED, 2, 1)
    set_op(table, OP_LONG_BINPUT, ARG_FIXED, 5, 1)
    set_op(table, OP_PROTO, ARG_FIXED, 2, 2)
    set_op(table, OP_EXT1, ARG_FIXED, 2, 2)
    set_op(table, OP_EXT2, ARG_FIXED, 3, 2)
    set_op(table, OP_EXT4, ARG_FIXED, 5, 2)
    set_op(table, OP_FRAME, ARG_FIXED, 9, 4)
    set_op(table, OP_SHORT_BINSTRING, ARG_COUNT1, 2, 1)
    set_op(table, OP_BINSTRING, ARG_COUNT4, 5, 1)
    set_op(table, OP_BINUNICODE, ARG_COUNT4, 5, 1)
    set_op(table, OP_LONG1, ARG_COUNT1, 2, 2)
    set_op(table, OP_LONG4, ARG_COUNT4, 5, 2)
    set_op(table, OP_SHORT_BINBYTES, ARG_COUNT1, 2, 3)
    set_op(table, OP_BINBYTES, ARG_COUNT4, 5, 3)
    set_op(table, OP_SHORT_BINUNICODE, ARG_COUNT1, 2, 4)
    set_op(table, OP_BINUNICODE8, ARG_COUNT8, 9, 4)
    set_op(table, OP_BINBYTES8, ARG_COUNT8, 9, 4)
    set_op(table, OP_BYTEARRAY8, ARG_COUNT8, 9, 5)
    for op in range(256):
        table[op].lane = lane_of(op)

cdef inline unsigned char lane_of(int op) noexcept:
    if (op == OP_NONE or op == OP_NEWTRUE or op == OP_NEWFALSE or op == OP_BININT or op == OP_BININT1 or op == OP_BININT2
            or op == OP_BINFLOAT or op == OP_EMPTY_TUPLE):
        return LANE_ATOM
    if op == OP_BINGET or op == OP_LONG_BINGET:
        return LANE_GET
    if op == OP_MEMOIZE:
        return LANE_MEMOIZE
    if op == OP_SHORT_BINUNICODE or op == OP_BINUNICODE or op == OP_SHORT_BINBYTES or op == OP_BINBYTES:
        return LANE_LEAF
    if op == OP_EMPTY_LIST or op == OP_EMPTY_DICT or op == OP_EMPTY_SET:
        return LANE_EMPTY
    if op == OP_MARK:
        return LANE_MARK
    if op == OP_APPENDS or op == OP_SETITEMS or op == OP_ADDITEMS:
        return LANE_EXTEND
    return LANE_NONE


# Arguments are little-endian, but for BINFLOAT's.
cdef inline uint32_t read_u32(const uint8_t* p) noexcept nogil:
    return p[0] | (<uint32_t>p[1] << 8) | (<uint32_t>p[2] << 16) | (<uint32_t>p[3] << 24)


cdef inline uint64_t read_u64(const uint8_t* p) noexcept nogil:
    return read_u32(p) | (<uint64_t>read_u32(p + 4) << 32)


cdef inline uint64_t read_number(const uint8_t* p, int count) noexcept nogil:
    """A number of so many bytes, 8 at most."""
    cdef uint64_t value = 0
    cdef int i
    for i in range(count - 1, -1, -1):
        value = value << 8 | p[i]
    return value
