"""Writes a pickle anew with parts of it left out or replaced. It executes and imports nothing.

`Program` is a stream as a scan left it: its opcodes (the skeleton), where its values begin and end (the nodes), and
which value each memo entry is. `Rewriter` copies the opcodes of one program, but for ranges that are cut, and numbers
the memo anew. Opcodes come from the skeleton, which was checked by the scan and cannot change under us; only the long
arguments that a skeleton leaves out are read again.

A memo reference whose value has not been written yet, because it stood in a range that was cut, is where that value is
written: the opcodes of its span take the place of the reference. Values inside of it that have been written meanwhile
become references in turn. A tuple or reduce value that contains itself may come up again while its parts are being
written; then it is written there, and the parts it began with are popped again in favour of a reference, which is what
`pickle` does with them (Lib/pickle.py, `save_tuple`).
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy, memset

from buffer cimport FRAME_HEADER_SIZE, FRAME_SIZE_MIN, FRAME_SIZE_TARGET, put_u32, put_u64
from nodes cimport *
from opcodes cimport *

from fastcap.errors import EditError

# What a slot holds.
ATOM, CHILD, REFERENCE = 0, 1, 2

cdef enum SlotKind:
    SLOT_ATOM = 0       # a number, None, a bool, an empty tuple: no node
    SLOT_CHILD = 1      # a node written here
    SLOT_REFERENCE = 2  # a memo reference
    SLOT_SELF = 3       # while walking: the node itself

cdef enum:
    # Bytes of a string up to which a path has it whole (see fastcap.paths).
    SHORT_TEXT = 60

cdef uint64_t NOWHERE = 0xFFFFFFFFFFFFFFFFULL  # no offset

cdef OpInfo OPS[256]
fill_op_table(OPS)

cdef struct Cursor:         # a place between two opcodes of a program
    uint64_t net            # bytes, net offset
    Py_ssize_t at           # bytes, where that is in the skeleton
    Py_ssize_t hole         # first hole at or after it

cdef struct Opcode:         # an opcode as it was decoded
    uint8_t op
    Py_ssize_t kept         # bytes of it that stand in the skeleton
    uint64_t hole           # bytes that follow them and are not there
    uint64_t argument       # memo index of GET and PUT

cdef struct Slot:           # a value that the opcodes of a node itself consume
    uint64_t start          # bytes, net offset of its first byte
    uint64_t end            # bytes, net offset one past its last byte
    uint32_t place          # as in Node
    uint32_t target         # the child, or the node referred to; NO_INDEX for an atom
    uint32_t consumer       # number of the opcode that takes it off the stack
    uint8_t kind            # SlotKind
    uint8_t op              # opcode of an atom or reference

cdef struct Consumer:       # an opcode that takes values off the stack
    uint64_t mark           # bytes, net offset of its MARK; NOWHERE if it has none
    uint64_t at             # bytes, net offset of the opcode
    uint32_t first          # its first slot
    uint32_t count          # slots
    uint8_t op

cdef struct OpenMark:
    uint64_t net            # bytes, net offset of the MARK
    Py_ssize_t depth        # values below it

cdef struct Cut:            # a range of the program that is not copied; they nest, but never overlap
    uint64_t start          # bytes, net offsets
    uint64_t end
    uint32_t piece          # number of what is written in its place; NO_INDEX: nothing
    uint32_t node           # the node that the piece replaces wherever it is referred to; NO_INDEX: only here

cdef struct Visit:          # a range of a program that is being written
    Cursor cursor
    uint64_t end            # bytes, net offset at which it ends
    uint32_t piece          # NO_INDEX: the program itself; else the number of the piece
    uint32_t node           # next node that may begin where the cursor is, in preorder
    uint32_t last_node      # one past the last one in the range; `node` == `last_node`: none is looked for
    uint32_t event          # next PUT
    Py_ssize_t cut          # next cut
    uint64_t own_start      # span of the node that is written, which cuts of references to it do not concern
    uint64_t own_end
    uint32_t own            # that node; NO_INDEX for a whole program
    uint32_t memoize        # node whose memo entry the piece gets at the end; NO_INDEX: none


cdef void* grown(void* block, Py_ssize_t count, Py_ssize_t* capacity, size_t size) except NULL:
    """A block with room for `count` entries and at least one more."""
    cdef Py_ssize_t wanted
    cdef void* moved
    if block != NULL and count < capacity[0]:
        return block
    wanted = max(<Py_ssize_t>64, 2 * capacity[0])
    moved = PyMem_RawRealloc(block, <size_t>wanted * size)
    if moved == NULL:
        raise MemoryError()
    capacity[0] = wanted
    return moved


@cython.final
cdef class Program:
    """The opcodes of one complete pickle, from the tables of its scan. ``graph`` is the graph that was built on them.

    Raises `fastcap.EditError` for what no pickler writes and a rewriter cannot follow: DUP, and memo entries that are
    set twice.
    """

    cdef Py_buffer nodes_view, skeleton_view, holes_view, overheads_view
    cdef int view_count          # how many of those are held
    cdef const Node* nodes       # borrowed from nodes_view, likewise below
    cdef const uint8_t* skeleton
    cdef const Hole* holes
    cdef const Overhead* overheads
    cdef uint32_t n              # nodes
    cdef Py_ssize_t skeleton_size, hole_count, overhead_count
    cdef uint64_t size           # bytes of the stream without overhead
    cdef uint64_t* put_at        # owned; net offset of each PUT, rising
    cdef uint32_t* put_node      # owned; the node that it memoizes
    cdef Py_ssize_t put_count, put_capacity
    cdef uint32_t* memo          # owned; memo index -> node, NO_INDEX for a gap
    cdef uint64_t memo_size      # entries of `memo`
    cdef readonly bint framed    # it has frames
    cdef readonly int protocol
    cdef uint8_t memo_op         # MEMOIZE, BINPUT or PUT, as the stream has it

    def __init__(self, graph, tables):
        if self.view_count:
            raise TypeError("Program.__init__ may be called only once")
        if tables.tail or tables.pickle_count != 1:
            raise EditError("only a file that holds one pickle and nothing else can be edited")
        graph.node(0)  # checks the tables and fills in the counts
        for field, source in enumerate((tables.nodes, tables.skeleton, tables.holes, tables.overheads)):
            PyObject_GetBuffer(source, self.view(field), PyBUF_SIMPLE)
            self.view_count += 1
        self.nodes = <const Node*>self.nodes_view.buf
        self.skeleton = <const uint8_t*>self.skeleton_view.buf
        self.holes = <const Hole*>self.holes_view.buf
        self.overheads = <const Overhead*>self.overheads_view.buf
        self.n = <uint32_t>(self.nodes_view.len // sizeof(Node))
        self.skeleton_size = self.skeleton_view.len
        self.hole_count = self.holes_view.len // sizeof(Hole)
        self.overhead_count = self.overheads_view.len // sizeof(Overhead)
        self.protocol = tables.protocol
        overhead = self.overheads[self.overhead_count - 1].total if self.overhead_count else 0
        self.size = tables.stream_size - overhead
        self.memo_op = OP_MEMOIZE if self.protocol >= 4 else OP_BINPUT if self.protocol else OP_PUT
        self.read_overheads()
        self.read_memo()

    def __dealloc__(self):
        for field in range(self.view_count):
            PyBuffer_Release(self.view(field))
        PyMem_RawFree(self.put_at)
        PyMem_RawFree(self.put_node)
        PyMem_RawFree(self.memo)

    cdef Py_buffer* view(self, int field) noexcept:
        if field == 0:
            return &self.nodes_view
        if field == 1:
            return &self.skeleton_view
        if field == 2:
            return &self.holes_view
        return &self.overheads_view

    cdef int read_overheads(self) except -1:
        """Frames are told by their size: PROTO takes 2 bytes, STOP 1."""
        cdef Py_ssize_t i
        cdef uint64_t before = 0
        for i in range(self.overhead_count):
            if self.overheads[i].total - before == FRAME_HEADER_SIZE:
                self.framed = True
            before = self.overheads[i].total
        return 0

    cdef int read_memo(self) except -1:
        """Which node each memo entry is, and where it is set."""
        cdef Cursor cursor
        cdef Opcode code
        cdef uint64_t index
        cdef uint32_t i, node
        cdef Py_ssize_t event = 0, room
        cdef uint64_t largest = 0
        # No more entries than bytes; a stream whose PUTs were thinned out keeps their numbers.
        cdef uint64_t most = self.size + 65536
        for i in range(self.n):
            if self.nodes[i].memo != NO_INDEX and self.nodes[i].memo > largest:
                largest = self.nodes[i].memo
        if largest > most:
            raise EditError(f"memo entry {largest} is out of all proportion to the stream: no pickler writes that")
        self.memo_size = largest + 1
        self.memo = <uint32_t*>PyMem_RawMalloc(self.memo_size * sizeof(uint32_t))
        if self.memo == NULL:
            raise MemoryError()
        memset(self.memo, 0xFF, self.memo_size * sizeof(uint32_t))
        for i in range(self.n):
            if self.nodes[i].memo != NO_INDEX:
                if self.memo[self.nodes[i].memo] != NO_INDEX:
                    raise EditError(f"memo entry {self.nodes[i].memo} is set twice: no pickler does that")
                self.memo[self.nodes[i].memo] = i
        self.seek(&cursor, 0)
        while cursor.net < self.size:
            self.decode(&cursor, &code)
            if code.op == OP_DUP:
                raise EditError(f"DUP at net offset {cursor.net}: no pickler writes that")
            if code.op == OP_MEMOIZE or code.op == OP_BINPUT or code.op == OP_LONG_BINPUT or code.op == OP_PUT:
                index = <uint64_t>self.put_count if code.op == OP_MEMOIZE else code.argument
                node = self.memo[index] if index < self.memo_size else NO_INDEX
                if node == NO_INDEX or not self.nodes[node].start < cursor.net < self.nodes[node].end:
                    raise EditError(f"memo entry {index} is a second name of something: no pickler does that")
                room = self.put_capacity
                self.put_at = <uint64_t*>grown(self.put_at, self.put_count, &room, sizeof(uint64_t))
                self.put_node = <uint32_t*>grown(self.put_node, self.put_count, &self.put_capacity, sizeof(uint32_t))
                self.put_at[self.put_count] = cursor.net
                self.put_node[self.put_count] = node
                self.put_count += 1
                if code.op != OP_MEMOIZE and self.memo_op != OP_PUT and self.protocol < 4:
                    self.memo_op = OP_BINPUT if code.op != OP_PUT else OP_PUT
            self.pass_by(&cursor, &code)
        return 0

    # ---- opcodes ----------------------------------------------------------------------------------------------------

    cdef int seek(self, Cursor* cursor, uint64_t net) except -1:
        """Go to an offset that no hole contains."""
        cdef Py_ssize_t hole = holes_before(self.holes, self.hole_count, net)
        cdef uint64_t missing = missing_before(self.holes, hole)
        if net > self.size or missing > net or <uint64_t>self.skeleton_size < net - missing:
            raise IndexError(f"net offset {net} of {self.size}")
        cursor.net = net
        cursor.at = <Py_ssize_t>(net - missing)
        cursor.hole = hole
        return 0

    cdef int decode(self, Cursor* cursor, Opcode* code) except -1:
        """The opcode at the cursor. Everything is within the skeleton, or it is an error."""
        cdef const uint8_t* p = self.skeleton + cursor.at
        cdef Py_ssize_t left = self.skeleton_size - cursor.at
        cdef uint64_t before_hole = NOWHERE  # bytes of the skeleton in front of the next hole
        cdef uint64_t size
        cdef const uint8_t* q
        cdef OpInfo* info
        cdef int lines
        if left <= 0:
            self.damaged(cursor)
        if cursor.hole < self.hole_count:
            before_hole = self.holes[cursor.hole].at - cursor.net
        info = &OPS[p[0]]
        code.op = p[0]
        code.hole = 0
        code.argument = 0
        if info.header > left:
            self.damaged(cursor)
        if info.kind == ARG_FIXED:
            code.kept = info.header
            if code.op == OP_BINGET or code.op == OP_BINPUT:
                code.argument = p[1]
            elif code.op == OP_LONG_BINGET or code.op == OP_LONG_BINPUT:
                code.argument = read_u32(p + 1)
            return 0
        if info.kind == ARG_LINE or info.kind == ARG_TWO_LINES:
            q = p
            for lines in range(1 if info.kind == ARG_LINE else 2):
                q = <const uint8_t*>memchr(q + 1, 10, left - (q + 1 - p)) if q + 1 - p < left else NULL
                if q == NULL:
                    break
            if before_hole != NOWHERE and (q == NULL or before_hole <= <uint64_t>(q - p)):
                if before_hole > <uint64_t>left:
                    self.damaged(cursor)
                code.kept = <Py_ssize_t>before_hole
                code.hole = hole_size(self.holes, cursor.hole)
                return 0
            if q == NULL:
                self.damaged(cursor)
            code.kept = q + 1 - p
            if code.op == OP_GET or code.op == OP_PUT:
                for lines in range(1, code.kept - 1):
                    code.argument = code.argument * 10 + (p[lines] - 48) if code.argument < NO_INDEX else NO_INDEX
            return 0
        if info.kind == ARG_INVALID:
            self.damaged(cursor)
        size = read_number(p + 1, info.header - 1)
        if size > self.size:
            self.damaged(cursor)
        size += info.header
        if before_hole < size:
            code.hole = hole_size(self.holes, cursor.hole)
            code.kept = <Py_ssize_t>before_hole
            if before_hole + code.hole != size or before_hole < info.header:
                self.damaged(cursor)
        else:
            code.kept = <Py_ssize_t>size
        if code.kept > left:
            self.damaged(cursor)
        return 0

    cdef int damaged(self, Cursor* cursor) except -1:
        raise ValueError(f"the tables of the scan do not fit the stream at net offset {cursor.net}")

    cdef inline void pass_by(self, Cursor* cursor, const Opcode* code) noexcept:
        cursor.net += <uint64_t>code.kept + code.hole
        cursor.at += code.kept
        if code.hole:
            cursor.hole += 1

    cdef uint64_t stream_offset(self, uint64_t net) noexcept:
        """Position in the stream of the byte at a net offset."""
        cdef Py_ssize_t low = 0
        cdef Py_ssize_t high = self.overhead_count
        cdef Py_ssize_t middle
        while low < high:
            middle = (low + high) // 2
            if self.overheads[middle].at <= net:
                low = middle + 1
            else:
                high = middle
        return net + (self.overheads[low - 1].total if low else 0)

    cdef uint32_t event_at(self, uint64_t net) noexcept:
        """Number of the first PUT at or after an offset."""
        cdef Py_ssize_t low = 0
        cdef Py_ssize_t high = self.put_count
        cdef Py_ssize_t middle
        while low < high:
            middle = (low + high) // 2
            if self.put_at[middle] < net:
                low = middle + 1
            else:
                high = middle
        return <uint32_t>low

    # ---- slots ------------------------------------------------------------------------------------------------------

    def slots(self, index):
        """What the opcodes of a node itself consume: its `Slots`. Raises `fastcap.EditError` where they are odd."""
        if not 0 <= index < self.n:
            raise IndexError(f"node {index} of {self.n}")
        cdef Slots found = Slots.__new__(Slots)
        found.program = self
        found.walk(index)
        return found


@cython.final
cdef class Slots:
    """The values of one node, in the order in which they are consumed."""

    cdef Program program
    cdef uint32_t node
    cdef Slot* slots             # owned
    cdef Py_ssize_t count, capacity
    cdef Consumer* consumers     # owned
    cdef Py_ssize_t consumer_count, consumer_capacity
    cdef Slot* stack             # owned; values not consumed yet
    cdef Py_ssize_t depth, stack_capacity
    cdef OpenMark* marks         # owned
    cdef Py_ssize_t mark_count, mark_capacity
    cdef uint32_t placed         # items and pairs so far
    cdef Py_ssize_t shift        # number less position of the slot that was looked up last

    def __dealloc__(self):
        PyMem_RawFree(self.slots)
        PyMem_RawFree(self.consumers)
        PyMem_RawFree(self.stack)
        PyMem_RawFree(self.marks)

    def __len__(self):
        return self.count

    def slot(self, number):
        """(role, position, start, end, target, kind, opcode, consumer); ``target`` is -1 for an atom."""
        if not 0 <= number < self.count:
            raise IndexError(f"slot {number} of {self.count}")
        cdef Slot* slot = self.slots + <Py_ssize_t>number
        return (slot.place >> ROLE_SHIFT, slot.place & POSITION_MASK, slot.start, slot.end,
                -1 if slot.target == NO_INDEX else <object>slot.target, slot.kind, slot.op, slot.consumer)

    def consumer(self, number):
        """(net offset of its MARK or -1, its net offset, first slot, slots, opcode)."""
        if not 0 <= number < self.consumer_count:
            raise IndexError(f"consumer {number} of {self.consumer_count}")
        cdef Consumer* consumer = self.consumers + <Py_ssize_t>number
        return (-1 if consumer.mark == NOWHERE else <object>consumer.mark, consumer.at, consumer.first, consumer.count,
                consumer.op)

    def at(self, role, position):
        """Number of the first slot at a place, -1 if there is none."""
        cdef uint32_t place = (<uint32_t>role << ROLE_SHIFT) | <uint32_t>position
        cdef Py_ssize_t i = <Py_ssize_t>position + self.shift
        if 0 <= i < self.count and self.slots[i].place == place:
            return i
        for i in range(self.count):
            if self.slots[i].place == place:
                self.shift = i - <Py_ssize_t>position
                return i
        return -1

    def candidates(self, text, number):
        """Numbers of the slots that a look-up by name has to look at: those of dict entries with another key are not.

        ``text`` is the key in UTF-8, ``number`` the key as an int; None for either: no such key can be meant. Keys that
        are long, odd or private (there may be more to what is under them) count as candidates, too.
        """
        cdef Py_ssize_t i, size
        cdef Slot* slot
        cdef Slot* key
        cdef const uint8_t* p
        cdef bint wants_text = text is not None
        cdef bytes wanted = text or b""
        cdef object value
        cdef list found = []
        for i in range(self.count):
            slot = self.slots + i
            if slot.place >> ROLE_SHIFT == ROLE_PAIR:
                key = slot if not slot.place & 1 else slot - 1 if i else slot
                if key.kind == SLOT_ATOM:
                    if key == slot:
                        continue
                    value = self.small_int(key)
                    if value is not None and value != number:
                        continue
                else:
                    p = self.short_text(key, &size)
                    if p != NULL and (key == slot or (size and p[0] != 95 and not (
                            wants_text and size == len(wanted) and memcmp(p, <const char*>wanted, size) == 0))):
                        continue
            found.append(i)
        return found

    cdef object small_int(self, Slot* slot):
        """The int that an atom is, if its opcode is one of the short ones."""
        cdef Cursor cursor
        cdef Opcode code
        cdef const uint8_t* p
        if slot.op != OP_BININT1 and slot.op != OP_BININT2 and slot.op != OP_BININT:
            return None
        self.program.seek(&cursor, slot.start)
        self.program.decode(&cursor, &code)
        p = self.program.skeleton + cursor.at + 1
        return <int32_t>read_u32(p) if slot.op == OP_BININT else <object>read_number(p, code.kept - 1)

    cdef const uint8_t* short_text(self, Slot* slot, Py_ssize_t* size) except? NULL:
        """The characters of a string that can stand in a path as it is, borrowed; NULL if it is something else."""
        cdef Cursor cursor
        cdef Opcode code
        cdef const Node* node
        size[0] = 0
        if slot.target >= self.program.n:
            return NULL
        node = self.program.nodes + slot.target
        if node.op != OP_SHORT_BINUNICODE and node.op != OP_BINUNICODE:
            return NULL
        self.program.seek(&cursor, node.start)
        self.program.decode(&cursor, &code)
        size[0] = code.kept - OPS[node.op].header
        if code.op != node.op or code.hole or not 0 < size[0] <= SHORT_TEXT:
            return NULL
        return self.program.skeleton + cursor.at + OPS[node.op].header

    cdef int odd(self, uint64_t net) except -1:
        raise EditError(f"the opcodes at net offset {net} are put together as no pickler does it")

    cdef int push(self, uint8_t kind, uint8_t op, uint32_t target, uint64_t start, uint64_t end) except -1:
        cdef Slot* slot
        self.stack = <Slot*>grown(self.stack, self.depth, &self.stack_capacity, sizeof(Slot))
        slot = self.stack + self.depth
        slot.start = start
        slot.end = end
        slot.place = 0
        slot.target = target
        slot.consumer = NO_INDEX
        slot.kind = kind
        slot.op = op
        self.depth += 1
        return 0

    cdef int consume(self, uint8_t op, Py_ssize_t base, uint64_t mark, uint64_t at, uint32_t role, uint64_t first) except -1:
        """The stack's values from `base` up go to the opcode at `at`."""
        cdef Py_ssize_t i
        cdef Consumer* consumer
        cdef uint64_t position
        self.consumers = <Consumer*>grown(self.consumers, self.consumer_count, &self.consumer_capacity, sizeof(Consumer))
        consumer = self.consumers + self.consumer_count
        consumer.mark = mark
        consumer.at = at
        consumer.first = <uint32_t>self.count
        consumer.count = <uint32_t>(self.depth - base)
        consumer.op = op
        for i in range(base, self.depth):
            if self.stack[i].kind == SLOT_SELF:
                self.odd(at)
            self.slots = <Slot*>grown(self.slots, self.count, &self.capacity, sizeof(Slot))
            self.slots[self.count] = self.stack[i]
            position = first + <uint64_t>(i - base)
            if role == ROLE_DISCARD or role == ROLE_STATE:
                position = 0
            self.slots[self.count].place = (role << ROLE_SHIFT) | <uint32_t>min(position, <uint64_t>POSITION_MASK)
            self.slots[self.count].consumer = <uint32_t>self.consumer_count
            self.count += 1
        self.consumer_count += 1
        self.depth = base
        return 0

    cdef Py_ssize_t fence(self) noexcept:
        return self.marks[self.mark_count - 1].depth if self.mark_count else 0

    cdef uint64_t drop_mark(self, uint64_t net) except? 0xFFFFFFFFFFFFFFFF:
        if self.mark_count == 0:
            self.odd(net)
        self.mark_count -= 1
        return self.marks[self.mark_count].net

    cdef int walk(self, uint32_t index) except -1:
        """Run the opcodes of the node that do not belong to a node below it."""
        cdef const Node* nodes = self.program.nodes
        cdef const Node* node = nodes + index
        cdef uint32_t child = index + 1
        cdef uint32_t last, target
        cdef Cursor cursor
        cdef Opcode code
        cdef uint64_t after, mark
        cdef Py_ssize_t base, taken
        cdef uint8_t op
        cdef bint made = False
        self.node = index
        if node.count == 0 or node.count > self.program.n - index:
            raise IndexError(f"node {index} has {node.count} nodes")
        last = index + node.count
        self.program.seek(&cursor, node.start)
        while cursor.net < node.end:
            while child < last and nodes[child].end == nodes[child].start and nodes[child].start <= cursor.net:
                child += max(nodes[child].count, <uint32_t>1)
            if child < last and nodes[child].start == cursor.net:
                self.push(SLOT_CHILD, nodes[child].op, child, cursor.net, nodes[child].end)
                self.program.seek(&cursor, nodes[child].end)
                child += max(nodes[child].count, <uint32_t>1)
                continue
            self.program.decode(&cursor, &code)
            after = cursor.net + <uint64_t>code.kept + code.hole
            op = code.op
            if op == OP_MARK:
                self.marks = <OpenMark*>grown(self.marks, self.mark_count, &self.mark_capacity, sizeof(OpenMark))
                self.marks[self.mark_count].net = cursor.net
                self.marks[self.mark_count].depth = self.depth
                self.mark_count += 1
            elif op == OP_GET or op == OP_BINGET or op == OP_LONG_BINGET:
                target = self.program.memo[code.argument] if code.argument < self.program.memo_size else NO_INDEX
                if not made and op == node.op and node.flags & FLAG_ALIAS and target == node.arg:
                    self.push(SLOT_SELF, op, index, node.start, node.end)
                    made = True
                else:
                    self.push(SLOT_REFERENCE, op, target, cursor.net, after)
            elif op == OP_APPEND or op == OP_BUILD or op == OP_SETITEM:
                taken = 2 if op == OP_SETITEM else 1
                base = self.depth - taken
                if base - 1 < self.fence() or self.stack[base - 1].kind != SLOT_SELF:
                    self.odd(cursor.net)
                if op == OP_BUILD:
                    self.consume(op, base, NOWHERE, cursor.net, ROLE_STATE, 0)
                elif op == OP_APPEND:
                    self.consume(op, base, NOWHERE, cursor.net, ROLE_ITEM, self.placed)
                    self.placed += 1
                else:
                    self.consume(op, base, NOWHERE, cursor.net, ROLE_PAIR, 2 * <uint64_t>self.placed)
                    self.placed += 1
            elif op == OP_APPENDS or op == OP_ADDITEMS or op == OP_SETITEMS:
                base = self.fence()
                mark = self.drop_mark(cursor.net)
                if base == 0 or base - 1 < self.fence() or self.stack[base - 1].kind != SLOT_SELF:
                    self.odd(cursor.net)
                taken = self.depth - base
                if op == OP_SETITEMS:
                    self.consume(op, base, mark, cursor.net, ROLE_PAIR, 2 * <uint64_t>self.placed)
                    taken //= 2
                else:
                    self.consume(op, base, mark, cursor.net, ROLE_ITEM, self.placed)
                self.placed += <uint32_t>taken
            elif op == OP_POP and self.depth == self.fence():
                self.drop_mark(cursor.net)
            elif op == OP_POP:
                self.consume(op, self.depth - 1, NOWHERE, cursor.net, ROLE_DISCARD, 0)
            elif op == OP_POP_MARK:
                base = self.fence()
                mark = self.drop_mark(cursor.net)
                self.consume(op, base, mark, cursor.net, ROLE_DISCARD, 0)
            elif op == OP_MEMOIZE or op == OP_PUT or op == OP_BINPUT or op == OP_LONG_BINPUT or op == OP_READONLY_BUFFER:
                pass
            elif not made and op == node.op:
                taken = operands(op)
                if taken >= 0:
                    if self.depth - taken < self.fence():
                        self.odd(cursor.net)
                    if taken:
                        self.consume(op, self.depth - taken, NOWHERE, cursor.net, ROLE_OPERAND, 0)
                else:
                    base = self.fence()
                    mark = self.drop_mark(cursor.net)
                    taken = self.depth - base
                    self.consume(op, base, mark, cursor.net, ROLE_OPERAND, 0)
                    if op == OP_LIST or op == OP_DICT:
                        self.placed = <uint32_t>(taken if op == OP_LIST else taken // 2)
                self.push(SLOT_SELF, op, index, node.start, node.end)
                made = True
            elif is_atom(op):
                self.push(SLOT_ATOM, op, NO_INDEX, cursor.net, after)
            else:
                self.odd(cursor.net)
            self.program.pass_by(&cursor, &code)
        PyMem_RawFree(self.stack)
        PyMem_RawFree(self.marks)
        self.stack = NULL
        self.marks = NULL
        return 0


cdef inline int operands(uint8_t op) noexcept:
    """Values that an opcode takes off the stack to make one of them; -1: all that stand above the mark."""
    if op == OP_TUPLE or op == OP_LIST or op == OP_DICT or op == OP_FROZENSET or op == OP_OBJ or op == OP_INST:
        return -1
    if op == OP_TUPLE1 or op == OP_BINPERSID:
        return 1
    if op == OP_TUPLE2 or op == OP_REDUCE or op == OP_NEWOBJ or op == OP_STACK_GLOBAL:
        return 2
    if op == OP_TUPLE3 or op == OP_NEWOBJ_EX:
        return 3
    return 0


cdef inline bint is_atom(uint8_t op) noexcept:
    return (op == OP_NONE or op == OP_NEWTRUE or op == OP_NEWFALSE or op == OP_BININT or op == OP_BININT1
            or op == OP_BININT2 or op == OP_BINFLOAT or op == OP_EMPTY_TUPLE or op == OP_LONG1 or op == OP_INT
            or op == OP_LONG or op == OP_FLOAT)


@cython.final
cdef class Rewriter:
    """Writes a `Program` with cuts.

    ``cuts`` are tuples (start, end, piece, node) in net offsets: what stands between them is left out, and the piece of
    that number written in its place (-1: nothing). Each piece is bytes, which are opcodes without a memo, or a `Program`.
    With ``node``, the piece takes the place of this node, whose span the cut is, for all that refer to it as well; -1
    where it does so only here. Cuts may lie inside of one another.

    ``write(bytes)`` takes the output. ``read(piece, offset, size)`` gives a bytes-like object that begins with ``size``
    bytes of the stream of a piece (-1: of the program) from an offset on, and may have more; ``copy(piece, offset,
    size)`` adds so many of them to the output.
    """

    cdef Program program
    cdef list pieces
    cdef object write, read, copy
    cdef Cut* cuts               # owned; by start, the outer ones first
    cdef Py_ssize_t cut_count
    cdef uint32_t* numbers       # owned; node of the program -> its memo index in the output; NO_INDEX: not written
    cdef uint32_t* piece_numbers # owned; the same for the piece that is being written
    cdef uint32_t piece_nodes    # entries of `piece_numbers`
    cdef uint32_t numbered       # memo entries of the output
    cdef Visit* visits           # owned; a stack
    cdef Py_ssize_t visit_count, visit_capacity
    cdef char* out               # owned; output not handed over yet, with room for a frame's header in front
    cdef Py_ssize_t out_size, out_capacity
    cdef bint framed             # the output has frames
    cdef readonly uint64_t written  # bytes handed over
    cdef uint64_t piece_size     # bytes of all pieces that were written
    cdef bint begun, busy, done
    cdef readonly list moved     # the nodes written in place of references
    cdef readonly list buffers   # net offsets of the NEXT_BUFFERs that were written, in their order in the output
    cdef object window           # what `read` gave last
    cdef Py_buffer window_view
    cdef bint window_held
    cdef uint64_t window_at      # bytes, offset of the window in its stream
    cdef uint32_t window_piece

    def __init__(self, Program program not None, cuts, pieces, write, read, copy, *, framed):
        cdef Py_ssize_t i
        cdef uint64_t start, end
        if self.program is not None:
            raise TypeError("Rewriter.__init__ may be called only once")
        self.program = program
        self.pieces = [piece if isinstance(piece, Program) else bytes(piece) for piece in pieces]
        self.write, self.read, self.copy = write, read, copy
        self.framed = framed
        self.moved = []
        self.buffers = []
        ordered = sorted(cuts, key=cut_order)
        self.cuts = <Cut*>PyMem_RawMalloc(max(1, len(ordered)) * sizeof(Cut))
        self.numbers = <uint32_t*>PyMem_RawMalloc(<size_t>program.n * sizeof(uint32_t))
        if self.cuts == NULL or self.numbers == NULL:
            raise MemoryError()
        memset(self.numbers, 0xFF, <size_t>program.n * sizeof(uint32_t))
        for first, last, piece, node in ordered:
            if not (0 <= first < last <= program.size and -1 <= piece < len(self.pieces) and -1 <= node < program.n):
                raise ValueError(f"a cut of {first} to {last} with piece {piece} for node {node}")
            self.cuts[self.cut_count].start = first
            self.cuts[self.cut_count].end = last
            self.cuts[self.cut_count].piece = NO_INDEX if piece < 0 else <uint32_t>piece
            self.cuts[self.cut_count].node = NO_INDEX if node < 0 else <uint32_t>node
            self.cut_count += 1

    def __dealloc__(self):
        if self.window_held:
            PyBuffer_Release(&self.window_view)
        PyMem_RawFree(self.cuts)
        PyMem_RawFree(self.numbers)
        PyMem_RawFree(self.piece_numbers)
        PyMem_RawFree(self.visits)
        PyMem_RawFree(self.out)

    def step(self):
        """Go on until something has been written; False when all has been, from behind PROTO to STOP."""
        cdef uint64_t before = self.written
        if self.busy:
            raise ValueError("a Rewriter does one step at a time")
        if self.done:
            return False
        self.busy = True  # for good, if a step fails: the output is then of no use
        if not self.begun:
            self.begun = True
            self.visit(NO_INDEX, 0, self.program.size, NO_INDEX)
        while self.visit_count and self.written == before:
            self.proceed()
        if not self.visit_count:
            self.append(b".", 1)
            self.hand_over()
            self.done = True
        self.busy = False
        return True

    # ---- the output -------------------------------------------------------------------------------------------------

    cdef int reserve(self, Py_ssize_t more) except -1:
        cdef Py_ssize_t wanted = FRAME_HEADER_SIZE + self.out_size + more
        cdef char* moved
        if wanted <= self.out_capacity:
            return 0
        wanted = max(wanted, 2 * self.out_capacity, <Py_ssize_t>4096)
        moved = <char*>PyMem_RawRealloc(self.out, wanted)
        if moved == NULL:
            raise MemoryError()
        self.out = moved
        self.out_capacity = wanted
        return 0

    cdef int append(self, const void* data, Py_ssize_t size) except -1:
        if size:
            self.reserve(size)
            memcpy(self.out + FRAME_HEADER_SIZE + self.out_size, data, size)
            self.out_size += size
        return 0

    cdef int hand_over(self) except -1:
        """Write what has been gathered, at an opcode boundary, as a frame."""
        cdef Py_ssize_t size = self.out_size
        cdef bint framed = self.framed and size >= FRAME_SIZE_MIN
        if size == 0:
            return 0
        self.out_size = 0
        if framed:
            self.out[0] = <char>OP_FRAME
            put_u64(self.out + 1, <unsigned long long>size)
            data = PyBytes_FromStringAndSize(self.out, FRAME_HEADER_SIZE + size)
        else:
            data = PyBytes_FromStringAndSize(self.out + FRAME_HEADER_SIZE, size)
        self.written += <uint64_t>len(data)
        self.write(data)
        return 0

    cdef int put_get(self, uint32_t number, uint8_t style) except -1:
        """A memo reference; in text if `style`, an opcode for the memo, is."""
        cdef bint in_text = style == OP_PUT or style == OP_GET
        return self.put_numbered(number, OP_GET if in_text else 0, OP_BINGET, OP_LONG_BINGET)

    cdef int put_put(self, uint8_t style) except -1:
        """A memo entry for the value written last."""
        cdef uint8_t memoize = OP_MEMOIZE
        cdef uint32_t number = self.numbered
        if number == NO_INDEX:
            raise EditError("more than 4 billion memo entries")
        self.numbered += 1
        if style == OP_MEMOIZE:
            return self.append(&memoize, 1)
        return self.put_numbered(number, OP_PUT if style == OP_PUT else 0, OP_BINPUT, OP_LONG_BINPUT)

    cdef int put_numbered(self, uint32_t number, uint8_t in_text, uint8_t narrow, uint8_t wide) except -1:
        """The opcode `in_text` with a memo number, unless it is 0; then one of the other two, as the number is."""
        cdef char data[5]
        if in_text:
            text = b"%c%d\n" % (in_text, number)
            return self.append(<const char*>text, len(text))
        if number < 256:
            data[0] = <char>narrow
            data[1] = <char>number
            return self.append(data, 2)
        data[0] = <char>wide
        put_u32(data + 1, number)
        return self.append(data, 5)

    # ---- ranges -----------------------------------------------------------------------------------------------------

    cdef Program program_of(self, uint32_t piece):
        return self.program if piece == NO_INDEX else <Program>self.pieces[piece]

    cdef int visit(self, uint32_t piece, uint64_t start, uint64_t end, uint32_t own) except -1:
        """Begin to write a range; `own` is the node whose span it is, if it is not a whole program."""
        cdef Visit* visit
        cdef Program program = self.program_of(piece)
        if self.visit_count > 2 * <Py_ssize_t>self.program.n + 64:
            raise EditError("what refers into the parts that were dropped is too entangled to be kept")
        self.visits = <Visit*>grown(self.visits, self.visit_count, &self.visit_capacity, sizeof(Visit))
        visit = self.visits + self.visit_count
        program.seek(&visit.cursor, start)
        visit.end = end
        visit.piece = piece
        visit.node = visit.last_node = 0
        visit.event = program.event_at(start)
        visit.cut = self.cut_at(start) if piece == NO_INDEX else 0
        visit.own_start, visit.own_end, visit.own = start, end, own
        visit.memoize = NO_INDEX
        if own != NO_INDEX:
            visit.node = own + 1
            visit.last_node = own + max(program.nodes[own].count, <uint32_t>1)
            if visit.last_node > program.n:
                raise IndexError(f"node {own} has {program.nodes[own].count} nodes")
        self.visit_count += 1
        return 0

    cdef int jump(self, Visit* visit, uint64_t net) except -1:
        """Leave out everything up to an offset."""
        cdef Program program = self.program_of(visit.piece)
        cdef uint32_t middle
        cdef uint32_t high = visit.last_node
        program.seek(&visit.cursor, net)
        visit.event = program.event_at(net)
        if visit.piece == NO_INDEX:
            visit.cut = self.cut_at(net)
        while visit.node < high:  # nodes begin one after the other
            middle = visit.node + (high - visit.node) // 2
            if program.nodes[middle].start < net:
                visit.node = middle + 1
            else:
                high = middle
        return 0

    cdef Py_ssize_t cut_at(self, uint64_t net) noexcept:
        """Number of the first cut that begins at or after an offset."""
        cdef Py_ssize_t low = 0
        cdef Py_ssize_t high = self.cut_count
        cdef Py_ssize_t middle
        while low < high:
            middle = (low + high) // 2
            if self.cuts[middle].start < net:
                low = middle + 1
            else:
                high = middle
        return low

    cdef Cut* cut_here(self, Visit* visit) noexcept:
        """The outermost cut that begins at the cursor and concerns what is being written; NULL if there is none."""
        cdef Cut* cut
        while visit.cut < self.cut_count and self.cuts[visit.cut].start == visit.cursor.net:
            cut = self.cuts + visit.cut
            if cut.end <= visit.end and (cut.start != visit.own_start or cut.end != visit.own_end or visit.own == NO_INDEX
                                         or cut.node == visit.own):
                return cut
            visit.cut += 1
        return NULL

    cdef uint32_t written_here(self, Visit* visit, Program program, uint64_t least, bint or_equal) noexcept:
        """The outermost node that begins at the cursor, has been written elsewhere, and is longer than `least` bytes."""
        cdef const Node* nodes = program.nodes
        cdef uint32_t* numbers = self.numbers if visit.piece == NO_INDEX else self.piece_numbers
        cdef uint64_t size
        while visit.node < visit.last_node and nodes[visit.node].start < visit.cursor.net:
            visit.node += 1
        while visit.node < visit.last_node and nodes[visit.node].start == visit.cursor.net:
            size = nodes[visit.node].end - nodes[visit.node].start
            if size < least or (size == least and not or_equal):
                break
            if numbers[visit.node] != NO_INDEX and nodes[visit.node].end <= visit.end and size:
                return visit.node
            visit.node += 1
        return NO_INDEX

    cdef int apply(self, Cut* cut) except -1:
        """Write what takes the place of a cut; the topmost visit has gone on behind it."""
        cdef Program program
        cdef uint32_t node = cut.node
        if cut.piece == NO_INDEX:
            return 0
        piece = self.pieces[cut.piece]
        if isinstance(piece, Program):
            program = piece
            PyMem_RawFree(self.piece_numbers)
            self.piece_numbers = <uint32_t*>PyMem_RawMalloc(<size_t>program.n * sizeof(uint32_t))
            if self.piece_numbers == NULL:
                raise MemoryError()
            memset(self.piece_numbers, 0xFF, <size_t>program.n * sizeof(uint32_t))
            self.piece_size += program.size
            self.visit(cut.piece, 0, program.size, NO_INDEX)
            self.visits[self.visit_count - 1].memoize = node
        else:
            self.piece_size += <uint64_t>len(piece)
            self.append(<const char*>piece, len(piece))
            self.memoize(node)
        return 0

    cdef int memoize(self, uint32_t node) except -1:
        """The value written last takes the place of a node: what refers to that refers to it."""
        if node != NO_INDEX and self.program.nodes[node].memo != NO_INDEX and self.numbers[node] == NO_INDEX:
            self.numbers[node] = self.numbered
            self.put_put(self.program.memo_op)
        return 0

    cdef int proceed(self) except -1:
        """Go on with the topmost visit until it ends, another one begins or something has been handed over."""
        cdef Visit* visit = self.visits + self.visit_count - 1
        cdef Program program = self.program_of(visit.piece)
        cdef uint32_t* numbers = self.numbers if visit.piece == NO_INDEX else self.piece_numbers
        cdef const uint8_t* skeleton = program.skeleton
        cdef const uint8_t* run = skeleton + visit.cursor.at     # opcodes from here up to the cursor are copied as they are
        cdef Opcode code
        cdef Cut* cut
        cdef uint32_t node, number
        cdef bint moved = visit.own != NO_INDEX
        cdef uint64_t before = self.written
        while visit.cursor.net < visit.end:
            cut = NULL
            if visit.cut < self.cut_count and visit.piece == NO_INDEX and self.cuts[visit.cut].start == visit.cursor.net:
                cut = self.cut_here(visit)
            if moved:
                node = self.written_here(visit, program, 0 if cut == NULL else cut.end - cut.start,
                                         cut != NULL and cut.node != NO_INDEX)
                if node != NO_INDEX:
                    self.append(run, skeleton + visit.cursor.at - run)
                    self.put_get(numbers[node], program.memo_op)
                    self.jump(visit, program.nodes[node].end)
                    run = skeleton + visit.cursor.at
                    continue
            if cut != NULL:
                self.append(run, skeleton + visit.cursor.at - run)
                self.jump(visit, cut.end)
                self.apply(cut)
                if self.visit_count and self.visits + self.visit_count - 1 != visit:
                    return 0
                run = skeleton + visit.cursor.at
                continue
            program.decode(&visit.cursor, &code)
            if code.op == OP_BINGET or code.op == OP_LONG_BINGET or code.op == OP_GET:
                node = program.memo[code.argument] if code.argument < program.memo_size else NO_INDEX
                if node == NO_INDEX or node >= program.n:
                    program.damaged(&visit.cursor)
                number = numbers[node]
                if number != code.argument or number == NO_INDEX or (code.op == OP_LONG_BINGET and number < 256):
                    self.append(run, skeleton + visit.cursor.at - run)
                    program.pass_by(&visit.cursor, &code)
                    run = skeleton + visit.cursor.at
                    if number == NO_INDEX:
                        self.move(visit, program, node)
                        return 0
                    self.put_get(number, code.op)
                else:
                    program.pass_by(&visit.cursor, &code)
            elif code.op == OP_MEMOIZE or code.op == OP_BINPUT or code.op == OP_LONG_BINPUT or code.op == OP_PUT:
                if visit.event >= program.put_count or program.put_at[visit.event] != visit.cursor.net:
                    program.damaged(&visit.cursor)
                node = program.put_node[visit.event]
                visit.event += 1
                if numbers[node] != NO_INDEX:
                    # it was written once more meanwhile, by something it contains
                    self.append(run, skeleton + visit.cursor.at - run)
                    self.append(b"0", 1)
                    self.put_get(numbers[node], program.memo_op)
                    self.jump(visit, program.nodes[node].end)
                    run = skeleton + visit.cursor.at
                    continue
                numbers[node] = self.numbered
                if code.op == OP_MEMOIZE:
                    self.numbered += 1
                    program.pass_by(&visit.cursor, &code)
                else:
                    self.append(run, skeleton + visit.cursor.at - run)
                    self.put_put(code.op)
                    program.pass_by(&visit.cursor, &code)
                    run = skeleton + visit.cursor.at
            elif code.hole:
                self.append(run, skeleton + visit.cursor.at - run)
                self.put_long(visit, program, &code)
                run = skeleton + visit.cursor.at
            else:
                if code.op == OP_NEXT_BUFFER:
                    self.buffers.append(visit.cursor.net)
                program.pass_by(&visit.cursor, &code)
            if self.out_size + (skeleton + visit.cursor.at - run) >= FRAME_SIZE_TARGET:
                self.append(run, skeleton + visit.cursor.at - run)
                run = skeleton + visit.cursor.at
                self.hand_over()
            if self.written != before:
                break
        self.append(run, skeleton + visit.cursor.at - run)
        if visit.cursor.net < visit.end:
            return 0
        self.visit_count -= 1
        if visit.memoize != NO_INDEX:
            # A piece whose value has a memo entry of its own lends it: a second name would be one too many.
            if visit.piece != NO_INDEX and program.n and numbers[0] != NO_INDEX:
                if self.numbers[visit.memoize] == NO_INDEX:
                    self.numbers[visit.memoize] = numbers[0]
            else:
                self.memoize(visit.memoize)
        if self.out_size >= FRAME_SIZE_TARGET:
            self.hand_over()
        return 0

    cdef int move(self, Visit* visit, Program program, uint32_t node) except -1:
        """Write a node in place of a reference to it."""
        cdef const Node* target = program.nodes + node
        if visit.piece != NO_INDEX:
            raise SystemError("fastcap: a piece refers to what it has not written")
        if self.written + <uint64_t>self.out_size > 4 * program.size + self.piece_size + (1 << 20):
            raise EditError("what refers into the parts that were dropped is too entangled to be kept")
        self.moved.append(node)
        self.visit(NO_INDEX, target.start, target.end, node)
        return 0

    cdef int put_long(self, Visit* visit, Program program, Opcode* code) except -1:
        """An opcode whose argument is not in the skeleton, or not all of it."""
        cdef uint64_t offset = program.stream_offset(visit.cursor.net + <uint64_t>code.kept)
        cdef const uint8_t* head = program.skeleton + visit.cursor.at
        piece = -1 if visit.piece == NO_INDEX else <object>visit.piece
        if code.hole >= FRAME_SIZE_TARGET:
            # PEP 3154: what is this long stands outside of frames, so that readers need not put it together
            self.hand_over()
            data = PyBytes_FromStringAndSize(<const char*>head, code.kept)
            self.written += <uint64_t>code.kept + code.hole
            self.write(data)
            self.copy(piece, offset, code.hole)
        else:
            self.append(head, code.kept)
            self.append_from(visit.piece, offset, <Py_ssize_t>code.hole)
        program.pass_by(&visit.cursor, code)
        return 0

    cdef int append_from(self, uint32_t piece, uint64_t offset, Py_ssize_t size) except -1:
        if not (self.window_held and self.window_piece == piece and self.window_at <= offset
                and offset + <uint64_t>size <= self.window_at + <uint64_t>self.window_view.len):
            if self.window_held:
                self.window_held = False
                PyBuffer_Release(&self.window_view)
            self.window = self.read(-1 if piece == NO_INDEX else <object>piece, offset, size)
            PyObject_GetBuffer(self.window, &self.window_view, PyBUF_SIMPLE)
            self.window_held = True
            self.window_at = offset
            self.window_piece = piece
            if self.window_view.len < size:
                raise ValueError(f"the source gave {self.window_view.len} bytes where it had {size} before")
        return self.append(<const char*>self.window_view.buf + (offset - self.window_at), size)


def cut_order(cut):
    """Cuts by start, the outer ones first; of two that cut the same, the one that is about this place only."""
    return cut[0], -cut[1], cut[3] != -1
