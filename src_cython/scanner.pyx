"""The scanner: reads a pickle stream and fills the tables of nodes.pxd. It executes and imports nothing.

A pickle is a program for a stack machine. The scanner runs it with *places in the stream* in the stack's slots instead
of objects: `Item.start` says where the value began. An opcode that builds something consumes the topmost items, which
are neighbours in the stream, so that the span of what it builds begins where the first of them begins and ends where
the opcode ends. Spans therefore nest, and the tree of spans is the tree of what was written where.

Ints, floats, None, booleans and empty tuples never get a node: their bytes fold into the node that consumes them.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy, memset

from nodes cimport *
from opcodes cimport *

from typing import NamedTuple

from fastcap.errors import PayloadError

# Where a scanner can be told to pause: after the BUILD of one of joblib's array wrappers, behind whose opcodes the array's
# bytes stand; after a BINPERSID, which names something that is kept outside the pickle; after a STOP.
PAUSE_ARRAY, PAUSE_PERSISTENT, PAUSE_STOP = 1, 2, 4

cdef enum Tag:
    TAG_ATOM = 0
    TAG_NODE = 1  # id: node
    TAG_REF = 2   # id: node that the memo reference leads to

cdef enum:
    # Arguments up to this size stay in the skeleton whole; of longer text the first TEXT_KEPT bytes stay, of longer
    # bytes nothing does, so that the pages of a big buffer are never touched.
    WHOLE_KEPT = 512
    TEXT_KEPT = 256
    # Memo indices up to this are kept in an array that is as long as the largest of them; MEMOIZE and every pickler
    # count upwards, so a larger one than this with few entries comes from a hostile stream and goes to a dict.
    DENSE_SLACK = 65536
    # Bits of `Scanner.pauses`
    AT_ARRAY = 1
    AT_PERSISTENT = 2
    AT_STOP = 4

cdef struct Item:
    uint64_t start  # bytes, net offset where the value begins
    uint32_t id     # see Tag
    uint32_t what   # Tag | opcode that pushed it << 8

cdef struct Mark:
    uint64_t start    # bytes, net offset of the MARK
    uint32_t depth    # stack depth below which nothing may be popped until the mark is
    uint32_t orphans  # discarded nodes that wait for an owner: a ring, see `join`

cdef struct Lane:             # the fast lane's copies of what the scanner's attributes say; see `enter`
    uint64_t room             # opcodes that may run before the stack or the nodes might be full; 0 unless inside a
                              # pickle of protocol 2 or more with nothing discarded
    Node* nodes               # borrowed, like all pointers here
    uint32_t node_count
    Item* top                 # one past the topmost item
    Item* fence               # lowest item that may be popped
    Mark* mark                # one past the topmost mark
    Mark* mark_end            # one past the last for which there is memory
    uint32_t* memo
    uint32_t memo_capacity    # entries
    uint32_t memoized
    Ref* ref                  # one past the last reference
    uint64_t ref_room         # references for which there is memory

cdef enum:
    LONGEST_HEADER = 9  # opcode and 8-byte length
    LANE_ROOM = 1024    # items and nodes: what the fast lane wants to have room for when it is entered

cdef uint64_t LARGEST_CLAIM = 1ULL << 62  # bytes; a longer argument cannot exist and would overflow offsets

cdef OpInfo OPS[256]
fill_op_table(OPS)


cdef enum:
    # Freed blocks kept for the next scan. First use of a page costs more than all that a scan does with it (0.3 to 1.5 us
    # per 4 KiB, where an opcode takes 4 ns), so that scanning into fresh memory takes two to three times as long.
    CACHED_BLOCKS = 6
    SMALLEST_CACHED = 1 << 18  # bytes
    LARGEST_CACHED = 1 << 26   # bytes, all cached blocks together
    # What may be reserved ahead for a chunk, in bytes of the chunk. Memory that is never written is never made real.
    LARGEST_FORESEEN = 1 << 24

cdef struct Chunk:
    char* data            # owned; NULL if the slot is free
    Py_ssize_t capacity   # bytes; 0 if the slot is free

cdef Chunk CACHE[CACHED_BLOCKS]  # guarded by the GIL
memset(CACHE, 0, sizeof(CACHE))


@cython.final
cdef class Block:
    """Memory that the scanner filled, lent to others through the buffer protocol (unsigned bytes).

    It is read-only, but for one consumer: the first that asks for a writable buffer may change it in place.
    """

    cdef char* data           # owned; NULL if empty
    cdef Py_ssize_t size      # bytes in use
    cdef Py_ssize_t capacity  # bytes allocated
    cdef bint claimed         # somebody may write

    def __dealloc__(self):
        cdef Py_ssize_t total
        cdef int i, smallest
        if SMALLEST_CACHED <= self.capacity <= LARGEST_CACHED:
            # keep it in place of smaller ones
            while True:
                smallest = 0
                total = self.capacity
                for i in range(CACHED_BLOCKS):
                    total += CACHE[i].capacity
                    if CACHE[i].capacity < CACHE[smallest].capacity:
                        smallest = i
                if CACHE[smallest].capacity == 0 and total <= LARGEST_CACHED:
                    CACHE[smallest].data = self.data
                    CACHE[smallest].capacity = self.capacity
                    return
                smallest = -1
                for i in range(CACHED_BLOCKS):
                    if CACHE[i].capacity and (smallest < 0 or CACHE[i].capacity < CACHE[smallest].capacity):
                        smallest = i
                if CACHE[smallest].capacity >= self.capacity:
                    break
                PyMem_RawFree(CACHE[smallest].data)
                CACHE[smallest].data = NULL
                CACHE[smallest].capacity = 0
        PyMem_RawFree(self.data)

    def __len__(self):
        return self.size

    def __getbuffer__(self, Py_buffer* view, int flags):
        cdef bint writable = (flags & PyBUF_WRITABLE) == PyBUF_WRITABLE
        if writable and self.claimed:
            raise BufferError("these tables belong to a graph already")
        # A non-NULL pointer even when empty: PyBuffer_FillInfo passes it on, and consumers may test it.
        PyBuffer_FillInfo(view, self, self.data if self.data != NULL else <char*>&self.size, self.size,
                          not writable, flags)
        self.claimed = self.claimed or writable

    cdef int reserve(self, Py_ssize_t more) except -1:
        """Make room for `more` further bytes. May move the data."""
        cdef Py_ssize_t wanted = self.size + more
        cdef Py_ssize_t capacity
        cdef int i, best = -1
        cdef char* data
        if wanted <= self.capacity:
            return 0
        if wanted >= SMALLEST_CACHED:
            for i in range(CACHED_BLOCKS):
                if CACHE[i].data != NULL and CACHE[i].capacity >= wanted \
                        and (best < 0 or CACHE[i].capacity < CACHE[best].capacity):
                    best = i
            if best >= 0:
                data = CACHE[best].data
                capacity = CACHE[best].capacity
                CACHE[best].data = NULL
                CACHE[best].capacity = 0
                if self.size:
                    memcpy(data, self.data, self.size)
                PyMem_RawFree(self.data)
                self.data = data
                self.capacity = capacity
                return 0
        capacity = max(wanted, self.capacity * 2, 4096)
        data = <char*>PyMem_RawRealloc(self.data, capacity)
        if data == NULL:
            raise MemoryError()
        self.data = data
        self.capacity = capacity
        return 0


class Tables(NamedTuple):
    """What a scan found, for `fastcap._native.graph.Graph`. The first five are buffers of the structs in nodes.pxd."""

    nodes: object            # Node, in preorder
    references: object       # Ref, in the order of the opcodes that took them from the stack; the graph may reorder them
    skeleton: object         # the stream's bytes without overhead and without long arguments
    holes: object            # Hole
    overheads: object        # Overhead
    buffer_sizes: list       # bytes of each out-of-band buffer
    stream_size: int         # bytes
    protocol: int
    pickle_count: int
    memo_missed: bool        # a further pickle refers to a memo entry it does not set: try ``shared_memo``
    tail: str                # why the bytes after the last pickle are no pickle; "" if there are none


@cython.final
cdef class Scanner:
    """A file-like object that a pickle stream is written to, in chunks of any size; `finish` returns its `Tables`.

    ``buffer_sizes`` are the sizes, in bytes, of the out-of-band buffers that belong to the stream (PEP 574); more can
    be announced with `add_buffer`. With ``max_nodes``, a stream with more nodes than that, or far more open
    marks, is refused.

    `write` raises `fastcap.PayloadError` where the bytes are not a pickle stream; after that the scanner is unusable.
    Several pickles may follow one another; with ``shared_memo`` they were written by one pickler that kept its memo.
    What comes after a complete pickle and is not another one is kept as raw bytes, as torch's legacy files have it, and
    `Tables.tail` says why it is not a pickle.

    ``pauses`` is a sum of `PAUSE_ARRAY`, `PAUSE_PERSISTENT` and `PAUSE_STOP`: after such an opcode `write` returns, with
    `paused` set, and the reader may look at what has been built (`top`, `span`) and add to it (`raw`, `attach_buffer`).
    """

    cdef Block nodes, refs, skeleton, holes, overheads
    cdef uint32_t node_count, ref_count, max_nodes
    cdef bint shared_memo       # the memo lives on from pickle to pickle
    cdef bint memo_missed       # a pickle that is not the first one refers to a memo entry it has not set
    cdef bint nodes_sorted      # created in preorder so far
    cdef Item* stack            # owned
    cdef Py_ssize_t depth, stack_capacity
    cdef Mark* marks            # owned
    cdef Py_ssize_t mark_count, mark_capacity
    cdef Py_ssize_t fence       # stack depth at the topmost mark
    cdef uint32_t* memo         # owned; memo index -> node, NO_INDEX for a gap
    cdef Py_ssize_t memo_used, memo_capacity  # entries: one past the largest index, allocated
    cdef uint32_t memoized      # entries in the memo: the index that MEMOIZE takes
    cdef dict sparse_memo       # indices far beyond `memoized`
    cdef uint32_t bottom_orphans  # like Mark.orphans, for the bottom of the stack
    cdef uint32_t discarded     # ring of the nodes popped by the last opcodes, not owned by anyone yet
    cdef uint64_t discard_start # bytes, net offset where the first of them begins
    cdef bint discarding        # the last opcode was a POP
    cdef uint64_t taken         # bytes of the stream consumed before the current chunk or carry
    cdef uint64_t overhead      # bytes of PROTO, FRAME and STOP so far
    cdef uint64_t pending_bytes # bytes of the current argument still to come
    cdef uint64_t pending_kept  # of those, the first so many go into the skeleton
    cdef Block carry            # an opcode whose header is not complete yet
    cdef int lines_missing      # newlines that the carried opcode still needs
    cdef uint64_t pickle_start  # bytes, net offset where the current pickle began
    cdef bint inside            # a pickle has begun and not seen STOP
    cdef uint64_t frame_end     # bytes of the stream that a FRAME has claimed
    cdef uint8_t protocol       # largest PROTO argument
    cdef uint8_t implied        # largest protocol of an opcode seen while there was no PROTO
    cdef list roots             # node of each complete pickle
    cdef list buffer_sizes
    cdef uint32_t buffers_used
    cdef uint8_t pauses         # bits: which opcodes make `write` return
    cdef readonly int paused    # the one of them after which it has just returned; 0 otherwise
    cdef set wrapper_classes    # nodes that look up a class of joblib's array wrappers
    cdef set wrapper_args       # tuples that begin with such a class: arguments of copyreg._reconstructor (protocols 0, 1)
    cdef set wrappers           # what was made from those
    cdef uint32_t attached      # buffers that `attach_buffer` added since the last STOP
    cdef bint broken            # an error was raised: nothing more is accepted
    cdef str tail               # why the rest of the stream is raw; "" while it is not
    # what `become_raw` goes back to: the state after the last STOP
    cdef uint32_t safe_nodes, safe_refs, safe_buffers
    cdef Py_ssize_t safe_skeleton, safe_holes, safe_overheads
    cdef uint64_t safe_net, safe_overhead

    def __init__(self, buffer_sizes=None, *, max_nodes=0xFFFFFFFE, shared_memo=False, expected_size=0, pauses=0):
        if self.nodes is not None:
            raise TypeError("Scanner.__init__ may be called only once")
        self.nodes, self.refs, self.skeleton, self.holes, self.overheads, self.carry = (
            Block(), Block(), Block(), Block(), Block(), Block())
        self.buffer_sizes = []
        for size in buffer_sizes or ():
            self.add_buffer(size)
        self.max_nodes = min(max_nodes, 0xFFFFFFFE)
        self.shared_memo = shared_memo
        self.pauses = pauses
        self.wrapper_classes, self.wrapper_args, self.wrappers = set(), set(), set()
        self.foresee(min(expected_size, LARGEST_FORESEEN))
        self.nodes_sorted = True
        self.bottom_orphans = self.discarded = NO_INDEX
        self.roots = []
        self.tail = ""

    def __dealloc__(self):
        PyMem_RawFree(self.stack)
        PyMem_RawFree(self.marks)
        PyMem_RawFree(self.memo)

    # ---- the file-like face -----------------------------------------------------------------------------------------

    @property
    def pending(self):
        """Bytes of the current opcode's argument still to come; the reader may `skip` them instead of writing them."""
        return self.pending_bytes - self.pending_kept if not self.tail else 0

    @property
    def wanted(self):
        """Bytes that have to be written before the `pending` ones may be skipped: what labels show of a long text."""
        return self.pending_kept

    @property
    def position(self):
        """Bytes of the stream taken so far."""
        return self.taken + self.carry.size if self.carry is not None else 0

    @property
    def pickle_count(self):
        """Complete pickles so far."""
        return len(self.roots) if self.roots is not None else 0

    def add_buffer(self, size):
        """Announce the next out-of-band buffer, in the order of the stream; ``size`` in bytes."""
        if size < 0 or size > LARGEST_CLAIM:
            raise ValueError(f"a buffer of {size} bytes")
        self.buffer_sizes.append(size)

    def write(self, data):
        """Take the next bytes of the stream (anything with a contiguous buffer); returns how many were taken.

        That is all of them, unless the scanner pauses. The payload of a long argument is only counted, never read.
        """
        cdef Py_buffer view
        cdef Py_ssize_t size
        if self.broken or self.nodes is None:
            raise ValueError("write to a scanner that has failed or finished")
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            self.broken = True  # until the whole chunk is taken: an exception leaves the tables half-built
            self.paused = 0
            size = self.feed(<const uint8_t*>view.buf, view.len)
            self.broken = False
            return size
        finally:
            PyBuffer_Release(&view)

    def skip(self, count):
        """Take ``count`` bytes of the pending argument without seeing them; at most `pending`."""
        cdef uint64_t n = count
        if self.broken or n > self.pending:
            raise ValueError(f"cannot skip {count} bytes: {self.pending} are pending")
        if self.pending_kept:
            raise ValueError("the beginning of this argument has to be written")
        self.pending_bytes -= n
        self.taken += n

    def raw(self, count):
        """Take ``count`` bytes that stand in the stream but are no opcodes, such as the array data of joblib's files.

        They belong to the object that was built last. They need not be seen: a reader may skip them in its file.
        """
        cdef uint64_t size = count
        cdef uint64_t net
        cdef uint32_t owner, index
        if self.broken or self.nodes is None or self.carry.size or self.pending_bytes or self.tail:
            raise ValueError("raw bytes in the middle of an opcode, or of a scanner that has failed or finished")
        net = self.taken - self.overhead
        owner = self.owner(size, net)
        index = self.new_node(0, net, net + size)
        self.adopt(owner, index, place_of(ROLE_RAW, 0))
        (<Node*>self.nodes.data)[owner].end = net + size
        if size:
            self.add_hole(net, size)
        self.taken += size

    def attach_buffer(self, size):
        """The object that was built last has ``size`` bytes in a place of their own, such as a tensor's storage.

        They count as an out-of-band buffer.
        """
        cdef uint64_t net
        cdef uint32_t owner, index
        if self.broken or self.nodes is None or self.carry.size or self.pending_bytes or self.tail:
            raise ValueError("a buffer in the middle of an opcode, or of a scanner that has failed or finished")
        net = self.taken - self.overhead
        owner = self.owner(size, net)
        index = self.new_node(OP_NEXT_BUFFER, net, net)
        (<Node*>self.nodes.data)[index].arg = self.buffers_used
        self.adopt(owner, index, place_of(ROLE_RAW, 0))
        (<Node*>self.nodes.data)[owner].end = net
        self.buffer_sizes.insert(self.buffers_used, size)
        self.buffers_used += 1
        self.attached += 1

    cdef uint32_t owner(self, object size, uint64_t net) except? 0xFFFFFFFF:
        """The node of the object that was built last, to which further bytes will belong."""
        if self.discarding:
            self.settle(net)
        if not 0 <= size <= LARGEST_CLAIM or self.depth <= self.fence:
            self.fail(f"{size:,} raw or buffered bytes with no object that they could belong to", self.taken)
        return self.promote(self.stack + self.depth - 1, net)

    @property
    def top(self):
        """(net offset, net offset one past) of the object that was built last; None if there is none."""
        if self.nodes is None or self.depth <= self.fence:
            return None
        return self.span_of(&self.stack[self.depth - 1])

    def span(self, memo_index):
        """(net offset, net offset one past) of what a memo entry stands for; None if there is no such entry."""
        cdef uint64_t index = memo_index
        cdef uint32_t node = NO_INDEX
        if self.nodes is None:
            return None
        if index < <uint64_t>self.memo_capacity and self.memo != NULL:
            node = self.memo[index]
        elif self.sparse_memo is not None:
            node = self.sparse_memo.get(index, NO_INDEX)
        if node == NO_INDEX:
            return None
        return (<Node*>self.nodes.data)[node].start, (<Node*>self.nodes.data)[node].end

    cdef object span_of(self, Item* item):
        if item.what & 0xFF == TAG_ATOM:
            return item.start, self.taken - self.overhead
        return (<Node*>self.nodes.data)[item.id].start, (<Node*>self.nodes.data)[item.id].end

    def code(self, start, end):
        """The stream's bytes, without overhead, between two net offsets; None if some of them have not been kept."""
        cdef Py_ssize_t at = self.kept(start, end)
        return self.skeleton.data[at:at + (end - start)] if at >= 0 else None

    cdef Py_ssize_t kept(self, uint64_t first, uint64_t last) noexcept:
        """Where the bytes between two net offsets are in the skeleton; -1 if some of them are not there."""
        cdef Hole* holes = <Hole*>self.holes.data
        cdef Py_ssize_t count = self.holes.size // sizeof(Hole)
        cdef Py_ssize_t low = 0
        cdef Py_ssize_t high = count
        cdef Py_ssize_t middle
        cdef uint64_t missing
        while low < high:  # the first hole that ends after `first`
            middle = (low + high) // 2
            missing = holes[middle].missing - (holes[middle - 1].missing if middle else 0)
            if holes[middle].at + missing <= first:
                low = middle + 1
            else:
                high = middle
        missing = holes[low - 1].missing if low else 0
        if first > last or (low < count and holes[low].at < last) or last - missing > <uint64_t>self.skeleton.size:
            return -1
        return <Py_ssize_t>(first - missing)

    def finish(self):
        """End of the stream: its `Tables`. `PayloadError` if it stops in the middle of a pickle or is empty."""
        cdef Node* node
        cdef uint32_t root, index
        if self.broken or self.nodes is None:
            raise ValueError("finish of a scanner that has failed or finished")
        self.broken = True
        if not self.tail and (self.inside or self.carry.size or self.pending_bytes):
            at = self.taken + self.carry.size
            if self.pending_bytes:
                what = f"the stream ends in the middle of an argument, {self.pending_bytes:,} bytes before its end"
            else:
                what = "the stream ends before its STOP opcode"
            if not self.roots or self.attached:
                raise PayloadError(what, at)
            self.become_raw(f"{what} (at byte {at:,})")
        if not self.roots:
            raise PayloadError("the stream is empty", 0)
        if self.frame_end > self.taken and not self.tail:
            raise PayloadError(
                f"a FRAME claims {self.frame_end - self.taken:,} bytes more than the stream has", self.taken)
        if self.buffers_used < len(self.buffer_sizes):
            raise ValueError(
                f"{len(self.buffer_sizes)} out-of-band buffers were given, the stream uses {self.buffers_used}")
        if len(self.roots) > 1 or self.tail:
            root = self.new_node(0, 0, self.taken - self.overhead)
            for position, index in enumerate(self.roots):
                self.adopt(root, index, place_of(ROLE_PICKLE, position))
            if self.tail:
                index = self.new_node(0, self.safe_net, self.taken - self.overhead)
                self.adopt(root, index, place_of(ROLE_RAW, 0))
            (<Node*>self.nodes.data)[root].arg = len(self.roots)
            self.nodes_sorted = False
        else:
            root = self.roots[0]
        PyMem_RawFree(self.stack)
        PyMem_RawFree(self.marks)
        PyMem_RawFree(self.memo)
        self.stack = NULL
        self.marks = NULL
        self.memo = NULL
        self.sparse_memo = None
        if not self.nodes_sorted or root != 0:
            self.sort_nodes(root)
        (<Node*>self.nodes.data)[0].place = 0  # it counted items
        return Tables(self.nodes, self.refs, self.skeleton, self.holes, self.overheads, self.buffer_sizes,
                      self.taken, max(self.protocol, self.implied), len(self.roots), self.memo_missed, self.tail)

    cdef int foresee(self, Py_ssize_t size) except -1:
        """Reserve for that many bytes of stream; a dense one has about a node and a reference for 20 of them."""
        if size >= SMALLEST_CACHED:
            self.skeleton.reserve(size)
            self.nodes.reserve(size // 20 * sizeof(Node))
            self.refs.reserve(size // 20 * sizeof(Ref))
        return 0

    # ---- chunks -----------------------------------------------------------------------------------------------------

    cdef Py_ssize_t feed(self, const uint8_t* p, Py_ssize_t size) except -1:
        cdef const uint8_t* end = p + size
        cdef const uint8_t* newline
        cdef Py_ssize_t n, need
        cdef uint64_t taken
        if not self.pending_bytes:
            self.foresee(min(size, LARGEST_FORESEEN))
        while p < end and not self.paused:
            if self.tail:
                self.taken += end - p
                return size
            if self.pending_bytes:
                taken = min(self.pending_bytes, <uint64_t>(end - p))
                n = min(self.pending_kept, taken)
                if n:
                    self.keep(p, n)
                    self.pending_kept -= n
                self.pending_bytes -= taken
                self.taken += taken
                p += taken
                continue
            if self.carry.size:
                if self.lines_missing:
                    newline = <const uint8_t*>memchr(p, 10, end - p)
                    need = end - p
                    if newline != NULL:
                        need = newline + 1 - p
                        self.lines_missing -= 1
                else:
                    need = min(OPS[<uint8_t>self.carry.data[0]].header - self.carry.size, end - p)
                self.carry.reserve(need)
                memcpy(self.carry.data + self.carry.size, p, need)
                self.carry.size += need
                p += need
                if self.lines_missing == 0 and self.carry.size >= OPS[<uint8_t>self.carry.data[0]].header:
                    n = self.carry.size
                    self.carry.size = 0
                    self.consume_or_become_raw(<const uint8_t*>self.carry.data, n)
                continue
            n = self.consume_or_become_raw(p, end - p)
            p += n
            if p < end and not self.pending_bytes and not self.tail and not self.paused:
                # the opcode's header, or a line of its argument, goes on in the next chunk
                n = end - p
                if OPS[p[0]].kind == ARG_LINE:
                    self.lines_missing = 1
                elif OPS[p[0]].kind == ARG_TWO_LINES:
                    self.lines_missing = 1 if memchr(p + 1, 10, n - 1) != NULL else 2
                self.carry.reserve(n)
                memcpy(self.carry.data, p, n)
                self.carry.size = n
                p = end
        return size - (end - p)

    cdef Py_ssize_t consume_or_become_raw(self, const uint8_t* p, Py_ssize_t size) except -1:
        """`consume`, where bytes that follow a complete pickle may turn out to be none."""
        cdef uint64_t before = self.taken
        try:
            return self.consume(p, size)
        except PayloadError as error:
            if not self.roots or self.attached:
                raise
            self.become_raw(str(error))
            self.taken = before + size
            return size

    cdef int become_raw(self, str why) except -1:
        """What follows the last complete pickle is not one: forget what was read of it and only count its bytes."""
        self.taken += self.carry.size
        self.carry.size = 0
        self.node_count = self.safe_nodes
        self.nodes.size = self.node_count * sizeof(Node)
        self.ref_count = self.safe_refs
        self.refs.size = self.ref_count * sizeof(Ref)
        self.skeleton.size = self.safe_skeleton
        self.holes.size = self.safe_holes
        self.overheads.size = self.safe_overheads
        self.overhead = self.safe_overhead
        self.buffers_used = self.safe_buffers
        self.pending_bytes = self.pending_kept = self.frame_end = 0
        self.inside = False
        self.tail = why or "unknown"
        return 0

    cdef int fail(self, str message, uint64_t at) except -1:
        raise PayloadError(message, at)

    # ---- growing tables ---------------------------------------------------------------------------------------------

    cdef int keep(self, const uint8_t* p, Py_ssize_t size) except -1:
        if size == 0:
            return 0
        self.skeleton.reserve(size)
        memcpy(self.skeleton.data + self.skeleton.size, p, size)
        self.skeleton.size += size
        return 0

    cdef int add_hole(self, uint64_t at, uint64_t size) except -1:
        cdef Hole* hole
        cdef uint64_t before = 0
        if self.holes.size:
            before = (<Hole*>(self.holes.data + self.holes.size) - 1).missing
        self.holes.reserve(sizeof(Hole))
        hole = <Hole*>(self.holes.data + self.holes.size)
        hole.at = at
        hole.missing = before + size
        self.holes.size += sizeof(Hole)
        return 0

    cdef int add_overhead(self, uint64_t at, uint64_t size) except -1:
        cdef Overhead* entry
        self.overhead += size
        self.overheads.reserve(sizeof(Overhead))
        entry = <Overhead*>(self.overheads.data + self.overheads.size)
        entry.at = at
        entry.total = self.overhead
        self.overheads.size += sizeof(Overhead)
        return 0

    cdef inline uint32_t new_node(self, uint8_t op, uint64_t start, uint64_t end) except? 0xFFFFFFFF:
        cdef Node* node
        cdef uint32_t index = self.node_count
        if self.nodes.size + <Py_ssize_t>sizeof(Node) > self.nodes.capacity:
            self.nodes.reserve(sizeof(Node))
        if index >= self.max_nodes:
            self.fail(f"the stream has more than {self.max_nodes:,} nodes", start + self.overhead)
        node = <Node*>self.nodes.data + index
        fill_node(node, op, start, end)
        self.nodes.size += sizeof(Node)
        self.node_count = index + 1
        return index

    cdef inline void adopt(self, uint32_t parent, uint32_t child, uint32_t place) noexcept:
        cdef Node* node = <Node*>self.nodes.data + child
        node.parent = parent
        node.place = place

    cdef void adopt_ring(self, uint32_t parent, uint32_t ring) noexcept:
        """Own every node of a ring of discarded ones."""
        cdef Node* nodes = <Node*>self.nodes.data
        cdef uint32_t node, following
        if ring == NO_INDEX:
            return
        node = nodes[ring].count
        nodes[ring].count = NO_INDEX
        while node != NO_INDEX:
            following = nodes[node].count
            nodes[node].count = 0
            self.adopt(parent, node, place_of(ROLE_DISCARD, 0))
            node = following

    cdef inline int add_ref(self, uint32_t source, uint32_t target, uint32_t place) except -1:
        cdef Ref* ref
        if self.refs.size + <Py_ssize_t>sizeof(Ref) > self.refs.capacity:
            self.refs.reserve(sizeof(Ref))
        if self.ref_count == NO_INDEX - 1:
            self.fail("the stream has more than 4 billion memo references", self.taken)
        ref = <Ref*>self.refs.data + self.ref_count
        ref.source = source
        ref.target = target
        ref.place = place
        (<Node*>self.nodes.data)[source].flags |= FLAG_REFERS
        self.refs.size += sizeof(Ref)
        self.ref_count += 1
        return 0

    cdef inline int attach(self, uint32_t parent, Item* item, uint32_t place) except -1:
        """Make a stack item part of `parent`."""
        if item.what & 0xFF == TAG_NODE:
            self.adopt(parent, item.id, place)
        elif item.what & 0xFF == TAG_REF:
            self.add_ref(parent, item.id, place)
        return 0

    cdef inline int push(self, uint8_t tag, uint8_t op, uint32_t id, uint64_t start) except -1:
        cdef Item* item
        cdef Py_ssize_t capacity
        if self.depth == self.stack_capacity:
            capacity = max(2 * LANE_ROOM, self.stack_capacity * 2)
            item = <Item*>PyMem_RawRealloc(self.stack, capacity * sizeof(Item))
            if item == NULL:
                raise MemoryError()
            self.stack = item
            self.stack_capacity = capacity
        item = self.stack + self.depth
        item.start = start
        item.id = id
        item.what = tag | <uint32_t>op << 8
        self.depth += 1
        return 0

    cdef inline int push_node(self, uint8_t op, uint64_t start, uint64_t end) except -1:
        return self.push(TAG_NODE, op, self.new_node(op, start, end), start)

    cdef int push_mark(self, uint64_t start) except -1:
        cdef Mark* mark
        cdef Py_ssize_t capacity
        if self.mark_count == self.mark_capacity:
            # Every mark ends in a node, or is popped. Asked only where marks need more memory: that is what counts.
            if self.mark_count >= <Py_ssize_t>self.max_nodes:
                self.fail(f"the stream has more than {self.max_nodes:,} open marks", start + self.overhead)
            capacity = max(64, self.mark_capacity * 2)
            mark = <Mark*>PyMem_RawRealloc(self.marks, capacity * sizeof(Mark))
            if mark == NULL:
                raise MemoryError()
            self.marks = mark
            self.mark_capacity = capacity
        if self.depth >= NO_INDEX:
            raise MemoryError()
        mark = self.marks + self.mark_count
        mark.start = start
        mark.depth = self.depth
        mark.orphans = NO_INDEX
        self.mark_count += 1
        self.fence = self.depth
        return 0

    cdef inline void drop_mark(self) noexcept:
        self.mark_count -= 1
        self.fence = self.marks[self.mark_count - 1].depth if self.mark_count else 0

    cdef uint32_t promote(self, Item* item, uint64_t end) except? 0xFFFFFFFF:
        """The node behind a stack item; an atom or a memo reference that something sticks to becomes one."""
        cdef uint32_t target = item.id
        cdef uint32_t index
        cdef Node* node
        if item.what & 0xFF == TAG_NODE:
            return item.id
        index = self.new_node(<uint8_t>(item.what >> 8), item.start, end)
        if index and (<Node*>self.nodes.data)[index - 1].start >= item.start:
            self.nodes_sorted = False
        if item.what & 0xFF == TAG_REF:
            node = <Node*>self.nodes.data + index
            node.flags |= FLAG_ALIAS
            node.arg = target
            self.add_ref(index, target, place_of(ROLE_OPERAND, 0))
        item.what = item.what & 0xFF00 | TAG_NODE
        item.id = index
        return index

    # ---- the memo ---------------------------------------------------------------------------------------------------

    cdef int put(self, uint64_t index, uint64_t end, uint64_t at) except -1:
        """PUT: the topmost item is memoized under `index`; the opcode's bytes belong to it."""
        cdef Item* top
        cdef uint32_t node
        if self.depth <= self.fence:
            self.fail("a memo opcode with nothing to memoize", at)
        top = self.stack + self.depth - 1
        if top.what & 0xFF == TAG_REF:
            node = top.id
        else:
            node = self.promote(top, end)
            (<Node*>self.nodes.data)[node].end = end
            (<Node*>self.nodes.data)[node].memo = <uint32_t>index if index < NO_INDEX else NO_INDEX
        if index < <uint64_t>self.memo_capacity or index <= <uint64_t>self.memoized + DENSE_SLACK:
            self.put_dense(<Py_ssize_t>index, node)
        else:
            if self.sparse_memo is None:
                self.sparse_memo = {}
            if index not in self.sparse_memo:
                self.memoized += 1
            self.sparse_memo[index] = node
        return 0

    cdef inline int put_dense(self, Py_ssize_t index, uint32_t node) except -1:
        cdef uint32_t* memo
        cdef Py_ssize_t capacity, i
        if index >= self.memo_capacity:
            capacity = max(1024, index + 1, self.memo_capacity * 2)
            memo = <uint32_t*>PyMem_RawRealloc(self.memo, capacity * sizeof(uint32_t))
            if memo == NULL:
                raise MemoryError()
            self.memo = memo
            for i in range(self.memo_capacity, capacity):
                memo[i] = NO_INDEX
            self.memo_capacity = capacity
            if self.sparse_memo:
                # the array now covers indices that were put aside
                for old in [key for key in self.sparse_memo if key < capacity]:
                    memo[<Py_ssize_t>old] = self.sparse_memo.pop(old)
        if self.memo[index] == NO_INDEX:
            self.memoized += 1
        self.memo[index] = node
        if index >= self.memo_used:
            self.memo_used = index + 1
        return 0

    cdef inline int get(self, uint8_t op, uint64_t index, uint64_t start, uint64_t end, uint64_t at) except -1:
        """GET: push a memo reference; nodes popped just before belong to it (see `discard`)."""
        cdef uint32_t node = NO_INDEX
        if index < <uint64_t>self.memo_capacity:
            node = self.memo[index]
        elif self.sparse_memo is not None:
            node = self.sparse_memo.get(index, NO_INDEX)
        if node == NO_INDEX:
            self.memo_missed = len(self.roots) > 0
            self.fail(f"memo entry {index} is used before it is set", at)
        if self.discarding and self.discards_setter():
            self.settle(start)
        if self.discarding:
            self.push(TAG_REF, op, node, self.discard_start)
            self.discarding = False
            if self.discarded != NO_INDEX:
                node = self.promote(self.stack + self.depth - 1, end)
                self.adopt_ring(node, self.discarded)
                self.discarded = NO_INDEX
            return 0
        return self.push(TAG_REF, op, node, start)

    # ---- discarded values -------------------------------------------------------------------------------------------
    # Pickles throw values away in two idioms. `state_setter(obj, state)` ends in REDUCE POP: its bytes belong to the
    # item below. A recursive tuple or reduce value is popped again once its contents have put it into the memo, and a GET
    # follows: its bytes belong to that GET. Popped nodes are therefore put on a list until the next opcode tells.

    cdef inline uint32_t join(self, uint32_t ring, uint32_t other) noexcept:
        """One ring of two. A ring is known by one of its nodes (NO_INDEX: empty); `count` leads to the next one."""
        cdef Node* nodes = <Node*>self.nodes.data
        cdef uint32_t following
        if ring == NO_INDEX:
            return other
        if other != NO_INDEX:
            following = nodes[ring].count
            nodes[ring].count = nodes[other].count
            nodes[other].count = following
        return ring

    cdef void discard(self, Item* item) noexcept:
        if item.what & 0xFF == TAG_NODE:
            (<Node*>self.nodes.data)[item.id].count = item.id
            self.discarded = self.join(self.discarded, item.id)
        self.discarding = True
        self.discard_start = item.start

    cdef void pop_mark(self) noexcept:
        """POP of a mark: its byte, and the nodes waiting with it, are discarded."""
        cdef Mark mark = self.marks[self.mark_count - 1]
        self.drop_mark()
        self.discarded = self.join(self.discarded, mark.orphans)
        self.discarding = True
        self.discard_start = mark.start

    cdef bint discards_setter(self) noexcept:
        """Whether what was popped is `state_setter(obj, state)`, obj being the item below, and so not the GET's."""
        cdef Node* nodes = <Node*>self.nodes.data
        cdef Ref* refs = <Ref*>self.refs.data
        cdef uint32_t call = self.discarded
        cdef uint32_t i
        if call == NO_INDEX or nodes[call].count != call or nodes[call].op != OP_REDUCE or self.depth <= self.fence:
            return False
        if self.stack[self.depth - 1].what & 0xFF == TAG_ATOM:
            return False
        # The arguments were put together just before the call: their references are among the last ones.
        for i in range(min(self.ref_count, 4)):
            ref = refs[self.ref_count - 1 - i]
            if (ref.target == self.stack[self.depth - 1].id and ref.place == place_of(ROLE_OPERAND, 0)
                    and nodes[ref.source].parent == call):
                return True
        return False

    cdef int settle(self, uint64_t net) except -1:
        """No GET followed: what was popped belongs to the item below, or waits with the mark below for its owner."""
        cdef uint32_t owner
        cdef uint32_t ring = self.discarded
        self.discarding = False
        self.discarded = NO_INDEX
        if self.depth > self.fence:
            if ring != NO_INDEX or self.stack[self.depth - 1].what & 0xFF == TAG_NODE:
                owner = self.promote(self.stack + self.depth - 1, net)
                (<Node*>self.nodes.data)[owner].end = net
                self.adopt_ring(owner, ring)
        elif self.mark_count:
            self.marks[self.mark_count - 1].orphans = self.join(self.marks[self.mark_count - 1].orphans, ring)
        else:
            self.bottom_orphans = self.join(self.bottom_orphans, ring)
        return 0

    # ---- building ---------------------------------------------------------------------------------------------------

    cdef inline uint32_t compose(self, uint8_t op, Py_ssize_t base, uint64_t start, uint64_t end) except? 0xFFFFFFFF:
        """A node made of the stack items from `base` up, as operands; takes their place on the stack."""
        cdef Py_ssize_t i
        cdef uint32_t index = self.new_node(op, start, end)
        if index and (<Node*>self.nodes.data)[index - 1].start >= start:
            self.nodes_sorted = False
        (<Node*>self.nodes.data)[index].arg = <uint32_t>(self.depth - base)
        for i in range(base, self.depth):
            self.attach(index, self.stack + i, place_of(ROLE_OPERAND, i - base))
        self.depth = base
        self.push(TAG_NODE, op, index, start)
        return index

    cdef inline uint32_t compose_mark(self, uint8_t op, uint64_t end, uint64_t at) except? 0xFFFFFFFF:
        """`compose` of everything above the topmost mark, which goes too."""
        cdef Mark mark
        cdef uint32_t index
        if self.mark_count == 0:
            self.fail("an opcode that needs a MARK, and there is none", at)
        mark = self.marks[self.mark_count - 1]
        self.drop_mark()
        index = self.compose(op, mark.depth, mark.start, end)
        self.adopt_ring(index, mark.orphans)
        return index

    cdef inline int call(self, uint8_t op, Py_ssize_t base, uint64_t start, uint64_t end) except -1:
        """`compose` for a call: the node remembers its callable, the item at `base`."""
        cdef uint32_t callee = node_of(self.stack + base)
        cdef uint32_t index = self.compose(op, base, start, end)
        (<Node*>self.nodes.data)[index].arg = callee
        return 0

    cdef inline int extend(self, Py_ssize_t base, uint32_t role, uint64_t end, uint64_t at) except -1:
        """Add the stack items from `base` up to the container below them."""
        cdef Py_ssize_t i
        cdef Py_ssize_t n = self.depth - base
        cdef uint32_t index, first
        cdef Node* node
        if base - 1 < (self.fence if self.mark_count else 0):
            self.fail("items with no container below them", at)
        if role == ROLE_PAIR and n & 1:
            self.fail("a key without a value", at)
        index = self.promote(self.stack + base - 1, end)
        node = <Node*>self.nodes.data + index
        node.end = end
        first = node.place
        node.place = first + <uint32_t>(n >> 1 if role == ROLE_PAIR else n)
        if is_container(node.op):
            node.arg = node.place
        if role == ROLE_PAIR:
            first = first * 2 if first <= POSITION_MASK >> 1 else POSITION_MASK - 1
        for i in range(n):
            self.attach(index, self.stack + base + i, place_of(role, first + <uint64_t>i))
        self.depth = base
        return 0

    cdef inline int extend_mark(self, uint32_t role, uint64_t end, uint64_t at) except -1:
        cdef Mark mark
        if self.mark_count == 0:
            self.fail("an opcode that needs a MARK, and there is none", at)
        mark = self.marks[self.mark_count - 1]
        self.drop_mark()
        self.extend(mark.depth, role, end, at)
        self.adopt_ring(self.stack[self.depth - 1].id, mark.orphans)
        return 0

    cdef int stop(self, uint64_t net, uint64_t at) except -1:
        """STOP: the topmost item is the pickle's root; anything below it on the stack becomes part of it."""
        cdef uint32_t root
        cdef Py_ssize_t i
        cdef Node* node
        cdef uint32_t place = place_of(ROLE_DISCARD, 0)
        if self.depth == 0 or self.depth <= self.fence:
            self.fail("STOP with nothing to return", at)
        root = self.promote(self.stack + self.depth - 1, net)
        for i in range(self.depth - 1):
            self.attach(root, self.stack + i, place)
        for i in range(self.mark_count):
            self.adopt_ring(root, self.marks[i].orphans)
        self.adopt_ring(root, self.bottom_orphans)
        node = <Node*>self.nodes.data + root
        if node.start != self.pickle_start or self.depth > 1:
            self.nodes_sorted = False
        node.start = self.pickle_start
        node.end = net
        self.depth = self.mark_count = self.fence = 0
        self.bottom_orphans = NO_INDEX
        if not self.shared_memo:
            for i in range(self.memo_used):
                self.memo[i] = NO_INDEX
            self.memo_used = 0
            self.memoized = 0
            self.sparse_memo = None
        self.inside = False
        self.roots.append(root)
        return 0

    # ---- the opcodes ------------------------------------------------------------------------------------------------
    # `consume` finds where each opcode ends and runs it, in one of two ways. The fast lane keeps the tables' ends in local
    # variables and handles the dozen opcodes that make up nearly all of a stream, in their usual case; whatever it does
    # not take (first occurrences, errors, anything odd) goes to `execute`, which knows every opcode and every case.

    cdef Py_ssize_t consume(self, const uint8_t* data, Py_ssize_t size) except -1:
        """Run the opcodes of data[:size]; returns how many bytes were taken. Stops in front of an incomplete opcode.

        A long argument may reach beyond the chunk: `pending_bytes` of it then remain to come.
        """
        cdef const uint8_t* p = data
        cdef const uint8_t* end = data + size
        cdef const uint8_t* kept_to = data  # the skeleton has everything before this
        cdef const uint8_t* q               # one past the opcode and as much of its argument as is here
        cdef uint64_t shift = self.taken - self.overhead - <uint64_t>data  # net offset of p is shift + p
        cdef uint64_t net, after, n, kept, here
        cdef uint8_t op
        cdef OpInfo* info
        # Before this, the fast lane has room: each opcode takes a byte at least, and one item and one node at most; and
        # every header is here whole.
        cdef const uint8_t* lane_end
        # the fast lane's copies of the tables' ends, see `enter`; those changed at every opcode as plain variables
        cdef Lane lane
        cdef Item* top
        cdef uint32_t node_count
        cdef Item* item
        cdef Node* node
        cdef Ref* ref
        cdef uint32_t index, place, step
        self.enter(&lane)
        top, node_count = lane.top, lane.node_count
        lane_end = p + min(lane.room, <uint64_t>max(0, end - p - LONGEST_HEADER))
        while p < end:
            op = p[0]
            info = &OPS[op]
            q = p + info.header
            net = shift + <uint64_t>p
            if p < lane_end:
                if info.lane == LANE_ATOM:
                    top.start = net
                    top.what = TAG_ATOM | <uint32_t>op << 8
                    top += 1
                    p = q
                    continue
                if info.lane == LANE_GET:
                    index = p[1] if op == OP_BINGET else read_u32(p + 1)
                    if index < lane.memo_capacity:
                        index = lane.memo[index]
                        if index != NO_INDEX:
                            top.start = net
                            top.id = index
                            top.what = TAG_REF | <uint32_t>op << 8
                            top += 1
                            p = q
                            continue
                elif info.lane == LANE_LEAF or info.lane == LANE_EMPTY:
                    n = 0
                    if info.lane == LANE_LEAF:
                        n = p[1] if info.kind == ARG_COUNT1 else read_u32(p + 1)
                    if n <= WHOLE_KEPT and n <= <uint64_t>(end - q) and node_count < self.max_nodes:
                        q += n
                        node = lane.nodes + node_count
                        fill_node(node, op, net, shift + <uint64_t>q)
                        # nearly always memoized at once
                        if q < end and q[0] == OP_MEMOIZE and lane.memoized < lane.memo_capacity \
                                and lane.memo[lane.memoized] == NO_INDEX:
                            q += 1
                            node.end += 1
                            node.memo = lane.memoized
                            lane.memo[lane.memoized] = node_count
                            lane.memoized += 1
                        top.start = net
                        top.id = node_count
                        top.what = TAG_NODE | <uint32_t>op << 8
                        top += 1
                        node_count += 1
                        p = q
                        continue
                elif info.lane == LANE_MEMOIZE:
                    item = top - 1
                    if item >= lane.fence and item.what & 0xFF == TAG_NODE and lane.memoized < lane.memo_capacity \
                            and lane.memo[lane.memoized] == NO_INDEX:
                        node = lane.nodes + item.id
                        node.end = shift + <uint64_t>q
                        node.memo = lane.memoized
                        lane.memo[lane.memoized] = item.id
                        lane.memoized += 1
                        p = q
                        continue
                elif info.lane == LANE_MARK:
                    if lane.mark < lane.mark_end:
                        lane.mark.start = net
                        lane.mark.depth = <uint32_t>(top - self.stack)
                        lane.mark.orphans = NO_INDEX
                        lane.mark += 1
                        lane.fence = top
                        p = q
                        continue
                elif info.lane == LANE_EXTEND and lane.mark > self.marks:
                    # APPENDS or SETITEMS; the usual case is a list or dict right below its mark
                    item = lane.fence - 1
                    n = <uint64_t>(top - lane.fence)
                    step = 2 if op == OP_SETITEMS else 1
                    if (lane.mark - 1).orphans == NO_INDEX \
                            and item >= self.stack + ((lane.mark - 2).depth if lane.mark - 1 > self.marks else 0) \
                            and item.what & 0xFF == TAG_NODE and is_container(<uint8_t>(item.what >> 8)) \
                            and n <= lane.ref_room and lane.nodes[item.id].arg < POSITION_MASK >> 2 \
                            and (step == 1 or not n & 1):
                        index = item.id
                        node = lane.nodes + index
                        node.end = shift + <uint64_t>q
                        place = place_of(ROLE_PAIR if step == 2 else ROLE_ITEM, node.arg * step)
                        node.arg += <uint32_t>(n >> (step - 1))
                        node.place = node.arg
                        ref = lane.ref
                        item = lane.fence
                        while item < top:
                            if item.what & 0xFF == TAG_REF:
                                ref.source = index
                                ref.target = item.id
                                ref.place = place
                                ref += 1
                            elif item.what & 0xFF == TAG_NODE:
                                lane.nodes[item.id].parent = index
                                lane.nodes[item.id].place = place
                            place += 1
                            item += 1
                        if ref != lane.ref:
                            node.flags |= FLAG_REFERS
                        lane.ref_room -= <uint64_t>(ref - lane.ref)
                        lane.ref = ref
                        top = lane.fence
                        lane.mark -= 1
                        lane.fence = self.stack + ((lane.mark - 1).depth if lane.mark > self.marks else 0)
                        p = q
                        continue

            # not for the fast lane
            if info.kind == ARG_FIXED:
                if q > end:
                    break
            elif info.kind == ARG_LINE or info.kind == ARG_TWO_LINES:
                q = <const uint8_t*>memchr(p + 1, 10, end - p - 1)
                if q != NULL and info.kind == ARG_TWO_LINES:
                    q = <const uint8_t*>memchr(q + 1, 10, end - q - 1)
                if q == NULL:
                    break
                q += 1
                n = <uint64_t>(q - p)
                if n > WHOLE_KEPT and info.kind == ARG_LINE:
                    self.keep(kept_to, p + TEXT_KEPT - kept_to)
                    self.add_hole(net + TEXT_KEPT, n - TEXT_KEPT)
                    kept_to = q
            elif info.kind != ARG_INVALID:
                if q > end:
                    break
                if info.kind == ARG_COUNT1:
                    n = p[1]
                elif info.kind == ARG_COUNT4:
                    n = read_u32(p + 1)
                    if n > 0x7FFFFFFF and (op == OP_BINSTRING or op == OP_LONG4):  # a signed count, see pickletools
                        self.fail(f"{opname(op)} with a negative length", self.taken + <uint64_t>(p - data))
                else:
                    n = read_u64(p + 1)
                    if n > LARGEST_CLAIM:
                        self.fail(f"{opname(op)} claims {n:,} bytes", self.taken + <uint64_t>(p - data))
                kept = n if n <= WHOLE_KEPT else (TEXT_KEPT if is_text(op) else 0)
                here = min(n, <uint64_t>(end - q))
                if kept < n or here < n:
                    # cut the argument: what is kept of it now, what of the rest is kept later, what is missing
                    if kept < n:
                        self.add_hole(net + info.header + kept, n - kept)
                    self.keep(kept_to, q - kept_to + <Py_ssize_t>min(kept, here))
                    self.pending_kept = kept - min(kept, here)
                    self.pending_bytes = n - here
                    kept_to = q + here
                q += here
            else:
                self.fail(f"byte 0x{op:02x} is not a pickle opcode" if self.inside or self.roots
                          else f"not a pickle: it begins with byte 0x{op:02x}", self.taken + <uint64_t>(p - data))
            lane.top, lane.node_count = top, node_count
            self.leave(&lane)
            if op == OP_STACK_GLOBAL and self.pauses & AT_ARRAY:
                self.keep(kept_to, p - kept_to)  # `note_class` reads the names
                kept_to = p
            if op == OP_FRAME or op == OP_PROTO or op == OP_STOP:
                self.keep(kept_to, p - kept_to)
                kept_to = q
                self.add_overhead(net, info.header)
                shift -= info.header
            self.execute(op, p, q, net, shift + <uint64_t>q + self.pending_bytes, self.taken + <uint64_t>(p - data))
            self.make_room()
            self.enter(&lane)
            top, node_count = lane.top, lane.node_count
            p = q
            lane_end = p + min(lane.room, <uint64_t>max(0, end - p - LONGEST_HEADER))
            if self.pending_bytes or self.paused:
                break
        lane.top, lane.node_count = top, node_count
        self.leave(&lane)
        self.keep(kept_to, p - kept_to)
        self.taken += p - data
        return p - data

    cdef void enter(self, Lane* lane) noexcept:
        """Load the fast lane's variables."""
        lane.nodes = <Node*>self.nodes.data
        lane.node_count = self.node_count
        lane.top = self.stack + self.depth
        lane.fence = self.stack + self.fence
        lane.mark = self.marks + self.mark_count
        lane.mark_end = self.marks + self.mark_capacity
        lane.memo = self.memo
        lane.memo_capacity = <uint32_t>min(self.memo_capacity, <Py_ssize_t>0xFFFFFFFEu)
        lane.memoized = self.memoized
        lane.ref = <Ref*>(self.refs.data + self.refs.size)
        lane.ref_room = min(<uint64_t>(self.refs.capacity - self.refs.size) // sizeof(Ref), NO_INDEX - 1 - self.ref_count)
        lane.room = 0
        if self.inside and self.protocol >= 2 and not self.discarding:
            lane.room = min(<uint64_t>(self.stack_capacity - self.depth),
                            <uint64_t>(self.nodes.capacity - self.nodes.size) // sizeof(Node))

    cdef void leave(self, Lane* lane) noexcept:
        """Store the fast lane's variables back."""
        self.node_count = lane.node_count
        self.nodes.size = self.node_count * sizeof(Node)
        self.depth = lane.top - self.stack
        self.fence = lane.fence - self.stack
        self.mark_count = lane.mark - self.marks
        if lane.memoized > self.memoized:
            # only MEMOIZE counts in the lane, and only into gaps right behind the last entry
            self.memo_used = max(self.memo_used, <Py_ssize_t>lane.memoized)
        self.memoized = lane.memoized
        self.refs.size = <char*>lane.ref - self.refs.data
        self.ref_count = <uint32_t>(self.refs.size // sizeof(Ref))

    cdef int make_room(self) except -1:
        """Room for some stack items and nodes, so that the fast lane can go on."""
        cdef Item* stack
        cdef Py_ssize_t capacity
        if self.stack_capacity - self.depth < LANE_ROOM:
            capacity = max(2 * LANE_ROOM, self.stack_capacity * 2)
            stack = <Item*>PyMem_RawRealloc(self.stack, capacity * sizeof(Item))
            if stack == NULL:
                raise MemoryError()
            self.stack = stack
            self.stack_capacity = capacity
        self.nodes.reserve(LANE_ROOM * sizeof(Node))
        return 0

    cdef int execute(self, uint8_t op, const uint8_t* p, const uint8_t* q, uint64_t net, uint64_t after,
                     uint64_t at) except -1:
        """Run one opcode that stands at p and ends before q: net offsets `net` to `after`, stream offset `at`."""
        cdef uint64_t n
        cdef uint32_t index, callee
        cdef Item* top
        cdef int i
        cdef bint is_wrapper
        if not self.inside:
            self.inside = True
            self.pickle_start = net
        if self.protocol < 2 and OPS[op].protocol > self.implied and op != OP_PROTO:
            self.implied = OPS[op].protocol
        if self.discarding and not (op == OP_POP or op == OP_POP_MARK or op == OP_GET or op == OP_BINGET
                                    or op == OP_LONG_BINGET or op == OP_FRAME):
            self.settle(net)

        if op == OP_BINGET:
            self.get(op, p[1], net, after, at)
        elif op == OP_MEMOIZE:
            self.put(self.memoized, after, at)
        elif op == OP_SHORT_BINUNICODE or op == OP_BINUNICODE or op == OP_SHORT_BINBYTES or op == OP_BINBYTES \
                or op == OP_BINUNICODE8 or op == OP_BINBYTES8 or op == OP_BYTEARRAY8 or op == OP_SHORT_BINSTRING \
                or op == OP_BINSTRING or op == OP_STRING or op == OP_UNICODE or op == OP_EMPTY_LIST \
                or op == OP_EMPTY_DICT or op == OP_EMPTY_SET or op == OP_GLOBAL or op == OP_PERSID \
                or op == OP_EXT1 or op == OP_EXT2 or op == OP_EXT4 or op == OP_LONG4:
            self.push_node(op, net, after)
            if op == OP_GLOBAL and self.pauses & AT_ARRAY and names_wrapper_class(<const char*>p + 1, q - p - 2):
                self.wrapper_classes.add(self.node_count - 1)
        elif op == OP_BININT1 or op == OP_BININT or op == OP_BININT2 or op == OP_NONE or op == OP_NEWTRUE \
                or op == OP_NEWFALSE or op == OP_BINFLOAT or op == OP_EMPTY_TUPLE or op == OP_LONG1 \
                or op == OP_INT or op == OP_LONG or op == OP_FLOAT:
            self.push(TAG_ATOM, op, NO_INDEX, net)
        elif op == OP_MARK:
            self.push_mark(net)
        elif op == OP_SETITEMS:
            self.extend_mark(ROLE_PAIR, after, at)
        elif op == OP_APPENDS or op == OP_ADDITEMS:
            self.extend_mark(ROLE_ITEM, after, at)
        elif op == OP_LONG_BINGET:
            self.get(op, read_u32(p + 1), net, after, at)
        elif op == OP_BINPUT:
            self.put(p[1], after, at)
        elif op == OP_LONG_BINPUT:
            self.put(read_u32(p + 1), after, at)
        elif op == OP_TUPLE1 or op == OP_TUPLE2 or op == OP_TUPLE3:
            i = op - OP_TUPLE1 + 1
            if self.depth - i < self.fence:
                self.fail(f"{opname(op)} with too few items on the stack", at)
            callee = node_of(self.stack + self.depth - i)
            index = self.compose(op, self.depth - i, self.stack[self.depth - i].start, after)
            if self.wrapper_classes and callee in self.wrapper_classes:
                self.wrapper_args.add(index)
        elif op == OP_TUPLE or op == OP_FROZENSET:
            callee = node_of(self.stack + self.fence) if self.depth > self.fence else NO_INDEX
            index = self.compose_mark(op, after, at)
            if self.wrapper_classes and callee in self.wrapper_classes:
                self.wrapper_args.add(index)
        elif op == OP_REDUCE or op == OP_NEWOBJ or op == OP_NEWOBJ_EX:
            i = 3 if op == OP_NEWOBJ_EX else 2
            if self.depth - i < self.fence:
                self.fail(f"{opname(op)} with too few items on the stack", at)
            callee = node_of(self.stack + self.depth - 1)
            self.call(op, self.depth - i, self.stack[self.depth - i].start, after)
            if op == OP_REDUCE and self.wrapper_args and callee in self.wrapper_args:
                self.wrappers.add(self.stack[self.depth - 1].id)
        elif op == OP_STACK_GLOBAL:
            if self.depth - 2 < self.fence:
                self.fail("STACK_GLOBAL with too few items on the stack", at)
            is_wrapper = self.pauses & AT_ARRAY and self.names_wrapper(self.stack + self.depth - 2)
            index = self.compose(op, self.depth - 2, self.stack[self.depth - 2].start, after)
            if is_wrapper:
                self.wrapper_classes.add(index)
        elif op == OP_BUILD:
            if self.depth - 2 < self.fence:
                self.fail("BUILD with too few items on the stack", at)
            index = self.promote(self.stack + self.depth - 2, after)
            (<Node*>self.nodes.data)[index].end = after
            self.attach(index, self.stack + self.depth - 1, place_of(ROLE_STATE, 0))
            self.depth -= 1
            if self.wrapper_classes and self.is_new_wrapper(<Node*>self.nodes.data + index, index):
                (<Node*>self.nodes.data)[index].flags |= FLAG_WRAPPER
                self.paused = AT_ARRAY
        elif op == OP_SETITEM:
            if self.depth - 3 < self.fence:
                self.fail("SETITEM with too few items on the stack", at)
            self.extend(self.depth - 2, ROLE_PAIR, after, at)
        elif op == OP_APPEND:
            if self.depth - 2 < self.fence:
                self.fail("APPEND with too few items on the stack", at)
            self.extend(self.depth - 1, ROLE_ITEM, after, at)
        elif op == OP_FRAME:
            n = read_u64(p + 1)
            if n > LARGEST_CLAIM:
                self.fail(f"FRAME claims {n:,} bytes", at)
            # The unpickler reads a frame as a whole: it has to be there, whatever of it is used.
            if at + LONGEST_HEADER + n > self.frame_end:
                self.frame_end = at + LONGEST_HEADER + n
        elif op == OP_PROTO:
            if p[1] > 5:
                self.fail(f"protocol {p[1]} is not known (0 to 5 are)", at)
            self.protocol = max(self.protocol, p[1])
        elif op == OP_STOP:
            self.stop(net, at)
            self.safe_nodes = self.node_count
            self.safe_refs = self.ref_count
            self.safe_skeleton = self.skeleton.size
            self.safe_holes = self.holes.size
            self.safe_overheads = self.overheads.size
            self.safe_overhead = self.overhead
            self.safe_net = net
            self.safe_buffers = self.buffers_used
            self.attached = 0
            self.paused = self.pauses & AT_STOP
        elif op == OP_POP:
            if self.depth > self.fence:
                self.depth -= 1
                self.discard(self.stack + self.depth)
            elif self.mark_count:
                self.pop_mark()
            else:
                self.fail("POP from an empty stack", at)
        elif op == OP_POP_MARK:
            if self.mark_count == 0:
                self.fail("POP_MARK without a MARK", at)
            while self.depth > self.fence:
                self.depth -= 1
                self.discard(self.stack + self.depth)
            self.pop_mark()
        elif op == OP_DUP:
            if self.depth <= self.fence:
                self.fail("DUP with nothing to duplicate", at)
            top = self.stack + self.depth - 1
            if top.what & 0xFF == TAG_ATOM:
                self.push(TAG_ATOM, <uint8_t>(top.what >> 8), NO_INDEX, net)
            else:
                self.push(TAG_REF, op, top.id, net)
        elif op == OP_GET or op == OP_PUT:
            n = parse_index(p + 1, q - 1)
            if n > 0xFFFFFFFFULL:
                self.fail(f"{opname(op)} with something that is no memo index", at)
            if op == OP_GET:
                self.get(op, n, net, after, at)
            else:
                self.put(n, after, at)
        elif op == OP_LIST:
            index = self.compose_mark(op, after, at)
            (<Node*>self.nodes.data)[index].place = (<Node*>self.nodes.data)[index].arg
        elif op == OP_DICT:
            index = self.compose_mark(op, after, at)
            if (<Node*>self.nodes.data)[index].arg & 1:
                self.fail("DICT with a key without a value", at)
            (<Node*>self.nodes.data)[index].arg >>= 1
            (<Node*>self.nodes.data)[index].place = (<Node*>self.nodes.data)[index].arg
        elif op == OP_OBJ:
            if self.mark_count == 0 or self.depth <= self.fence:
                self.fail("OBJ without a MARK and a class", at)
            top = self.stack + self.fence
            callee = node_of(top)
            index = self.compose_mark(op, after, at)
            (<Node*>self.nodes.data)[index].arg = callee
        elif op == OP_INST:
            self.compose_mark(op, after, at)
        elif op == OP_BINPERSID:
            if self.depth <= self.fence:
                self.fail("BINPERSID with nothing on the stack", at)
            self.compose(op, self.depth - 1, self.stack[self.depth - 1].start, after)
            self.paused = self.pauses & AT_PERSISTENT
        elif op == OP_NEXT_BUFFER:
            self.push_node(op, net, after)
            (<Node*>self.nodes.data)[self.node_count - 1].arg = self.buffers_used
            self.buffers_used += 1
        elif op == OP_READONLY_BUFFER:
            if self.depth <= self.fence:
                self.fail("READONLY_BUFFER with nothing on the stack", at)
            top = self.stack + self.depth - 1
            if top.what & 0xFF == TAG_NODE:
                (<Node*>self.nodes.data)[top.id].end = after
        else:
            self.fail(f"opcode {opname(op)} is not handled", at)
        return 0

    # ---- joblib's array wrappers ------------------------------------------------------------------------------------

    cdef bint is_new_wrapper(self, Node* node, uint32_t index) except? -1:
        """Whether BUILD has just completed an instance of one of the wrappers, for the first time."""
        if node.flags & FLAG_WRAPPER or not is_call(node.op):
            return False
        return node.arg in self.wrapper_classes or index in self.wrappers

    cdef bint names_wrapper(self, Item* operands) noexcept:
        """Whether two operands are the module and the name of a wrapper's class."""
        cdef Py_ssize_t module_size = 0
        cdef Py_ssize_t name_size = 0
        cdef const char* module = self.text_of(operands, &module_size)
        cdef const char* name = self.text_of(operands + 1, &name_size)
        return module != NULL and name != NULL and is_wrapper_class(module, module_size, name, name_size)

    cdef const char* text_of(self, Item* item, Py_ssize_t* size) noexcept:
        """A string on the stack, borrowed from the skeleton; NULL if it is something else, or long."""
        cdef Node* node
        cdef const uint8_t* p
        cdef Py_ssize_t at, header
        if item.what & 0xFF == TAG_ATOM:
            return NULL
        node = <Node*>self.nodes.data + item.id
        if node.op != OP_SHORT_BINUNICODE and node.op != OP_BINUNICODE:
            return NULL
        header = OPS[node.op].header
        at = self.kept(node.start, node.end)
        if at < 0 or node.end - node.start < <uint64_t>header:
            return NULL
        p = <const uint8_t*>self.skeleton.data + at
        size[0] = p[1] if node.op == OP_SHORT_BINUNICODE else read_u32(p + 1)
        return <const char*>p + header if <uint64_t>size[0] <= node.end - node.start - header else NULL

    # ---- preorder ---------------------------------------------------------------------------------------------------

    cdef int sort_nodes(self, uint32_t root) except -1:
        """Put the nodes into preorder and renumber everything that names one.

        Siblings were created in stream order, so one pass gives each parent the list of its children, last first; a walk
        that takes the last child first and numbers a node when it leaves it, counting down, numbers in preorder.
        """
        cdef Node* nodes = <Node*>self.nodes.data
        cdef Ref* refs = <Ref*>self.refs.data
        cdef uint32_t n = self.node_count
        cdef uint32_t i, node, parent, number
        cdef Node held, other
        cdef uint32_t* order = <uint32_t*>PyMem_RawMalloc(n * sizeof(uint32_t))    # creation number -> preorder number
        cdef uint32_t* previous = <uint32_t*>PyMem_RawMalloc(n * sizeof(uint32_t)) # sibling before
        if order == NULL or previous == NULL:
            PyMem_RawFree(order)
            PyMem_RawFree(previous)
            raise MemoryError()
        with nogil:
            for i in range(n):
                nodes[i].count = NO_INDEX  # last child
            for i in range(n):
                parent = nodes[i].parent
                previous[i] = NO_INDEX
                if parent != NO_INDEX:
                    previous[i] = nodes[parent].count
                    nodes[parent].count = i
            node = root
            number = n
            while True:
                while nodes[node].count != NO_INDEX:
                    i = nodes[node].count
                    nodes[node].count = NO_INDEX
                    node = i
                # leave `node`: everything right of it and below it has its number
                number -= 1
                order[node] = number
                if node == root:
                    break
                node = previous[node] if previous[node] != NO_INDEX else parent_of(nodes, node)
            if number == 0:
                for i in range(n):
                    nodes[i].count = 0
                    if nodes[i].parent != NO_INDEX:
                        nodes[i].parent = order[nodes[i].parent]
                    if is_call(nodes[i].op) or nodes[i].flags & FLAG_ALIAS:
                        if nodes[i].arg != NO_INDEX:
                            nodes[i].arg = order[nodes[i].arg]
                for i in range(self.ref_count):
                    refs[i].source = order[refs[i].source]
                    refs[i].target = order[refs[i].target]
                # in-place permutation, cycle by cycle; order[i] == i marks a node that is home
                for i in range(n):
                    while order[i] != i:
                        number = order[i]
                        held = nodes[number]
                        nodes[number] = nodes[i]
                        nodes[i] = held
                        order[i] = order[number]
                        order[number] = number
                number = 0
        PyMem_RawFree(order)
        PyMem_RawFree(previous)
        if number != 0:
            raise SystemError(f"fastcap: {number} nodes of a scan are not reachable from its root")
        return 0


cdef inline void fill_node(Node* node, uint8_t op, uint64_t start, uint64_t end) noexcept nogil:
    node.start = start
    node.end = end
    node.parent = NO_INDEX
    node.count = 0  # while discarded: see `join`
    node.place = 0  # until it is attached: items and pairs so far
    node.arg = 0
    node.memo = NO_INDEX
    node.op = op
    node.flags = 0
    node.unused = 0


cdef inline uint32_t place_of(uint32_t role, uint64_t position) noexcept nogil:
    return (role << ROLE_SHIFT) | (<uint32_t>position if position < POSITION_MASK else POSITION_MASK)


cdef inline uint32_t parent_of(Node* nodes, uint32_t index) noexcept nogil:
    return nodes[index].parent


cdef inline uint32_t node_of(const Item* item) noexcept nogil:
    """The node that a stack item is or refers to; NO_INDEX for an atom, whose `id` says nothing."""
    return NO_INDEX if item.what & 0xFF == TAG_ATOM else item.id


cdef bint ends_with(const char* text, Py_ssize_t size, const char* end, Py_ssize_t end_size) noexcept nogil:
    return size >= end_size and memcmp(text + size - end_size, end, end_size) == 0


cdef bint is_wrapper_class(const char* module, Py_ssize_t module_size, const char* name, Py_ssize_t name_size) noexcept nogil:
    """Whether a global is one of the classes that joblib writes in place of arrays, whichever package holds the copy."""
    return ends_with(name, name_size, b"ArrayWrapper", 12) and (
        ends_with(module, module_size, b"joblib.numpy_pickle", 19)
        or ends_with(module, module_size, b"joblib.numpy_pickle_compat", 26))


cdef bint names_wrapper_class(const char* names, Py_ssize_t size) noexcept nogil:
    """`is_wrapper_class` of GLOBAL's argument: module and name with a newline between them."""
    cdef const char* newline = <const char*>memchr(names, 10, size)
    return newline != NULL and is_wrapper_class(names, newline - names, newline + 1, names + size - newline - 1)


cdef inline bint is_container(uint8_t op) noexcept nogil:
    return op == OP_EMPTY_LIST or op == OP_EMPTY_DICT or op == OP_EMPTY_SET or op == OP_LIST or op == OP_DICT


cdef inline bint is_text(uint8_t op) noexcept nogil:
    return op == OP_BINUNICODE or op == OP_BINUNICODE8 or op == OP_BINSTRING or op == OP_SHORT_BINSTRING


cdef uint64_t parse_index(const uint8_t* p, const uint8_t* end) noexcept nogil:
    """A decimal memo index; more than 2**32 - 1 if it is none."""
    cdef uint64_t value = 0
    if p == end:
        return 1ULL << 32
    while p < end:
        if not 48 <= p[0] <= 57:
            return 1ULL << 32
        value = value * 10 + (p[0] - 48)
        if value > 0xFFFFFFFFULL:
            return 1ULL << 32
        p += 1
    return value


cdef str opname(uint8_t op):
    """Name of an opcode for messages (not hot; pickletools is imported on the first error only)."""
    import pickletools
    found = pickletools.code2op.get(chr(op))
    return found.name if found is not None else f"0x{op:02x}"
