"""The graph of one payload: sizes, memo references and dominators, on the tables that a scan filled.

The tables are checked once, before the first look at them (`Graph.ready`); everything after that trusts them. Nodes
stand in stream order, which is a depth-first preorder of the tree of spans, and also of the whole graph: a memo
reference leads to something that was written before it, hence to an ancestor, to a node further left, or (seen from a
node whose span goes on) to a descendant, never to a node further right. Dominators are therefore found on the table as
it is, see `need_dominators`.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
cimport cython
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcpy, memset

from nodes cimport *
from opcodes cimport *

import heapq
import pickletools
import threading
from typing import NamedTuple

from fastcap._native.scanner import Block

OPERAND, ITEM, PAIR, STATE, DISCARD, PICKLE, RAW = range(7)

cdef OpInfo OPS[256]
fill_op_table(OPS)
cdef list OP_NAMES = [None] * 256
for _op in pickletools.opcodes:
    OP_NAMES[ord(_op.code)] = _op.name


class NodeView(NamedTuple):
    """One node; sizes in bytes, offsets net (without PROTO, FRAME and STOP). See graph.pyi for each field."""

    index: int
    op: str
    start: int
    end: int
    parent: int
    role: int
    position: int
    arg: int
    memo: int
    count: int
    self_size: int
    subtree_size: int
    retained_size: int
    dominator: int


class Edge(NamedTuple):
    """A child, or a memo reference, of a node."""

    role: int
    position: int
    target: int
    is_reference: bool


@cython.final
cdef class Graph:
    """Array of the nodes of one payload, in stream order; node 0 is the root.

    ``tables`` is what `Scanner.finish` returns, or anything with the same attributes: every index and span in it is
    checked before the first look at the nodes, and ``ValueError`` says what does not fit. Sizes and dominators are
    computed when they are first asked for.
    """

    cdef Py_buffer nodes_view, refs_view, skeleton_view, holes_view, overheads_view
    cdef int view_count                 # how many of those are held
    cdef Node* nodes                    # borrowed from nodes_view, likewise below
    cdef Ref* refs                      # borrowed, but ours alone to reorder
    cdef object order                   # lock on the order of `refs` until they are grouped, which they stay
    cdef bint refs_checked              # the references lead from nodes to nodes, see `need_references`
    cdef bint refs_grouped              # by target, in rising order
    cdef const uint8_t* skeleton
    cdef const Hole* hole_table
    cdef const Overhead* overheads
    cdef bint checked                   # the tables have been found sound, see `ready`
    cdef uint32_t n                     # nodes
    cdef uint32_t ref_count
    cdef Py_ssize_t hole_count, overhead_count
    cdef uint64_t* buffers              # owned; bytes of each out-of-band buffer
    cdef uint32_t buffer_count
    cdef uint64_t* buffered             # owned; bytes of the buffers inside each subtree; NULL if there are no buffers
    cdef uint32_t* first_out            # owned; node -> where its own references begin in `outgoing`; n + 1 entries,
                                        # or NULL until asked for
    cdef uint32_t* outgoing             # owned; reference numbers grouped by source
    cdef uint32_t* idom                 # owned; immediate dominators; NULL until asked for
    cdef uint64_t* retained             # owned; bytes; NULL until asked for
    cdef uint32_t* big                  # owned; nodes of at least `big_least` bytes, see `need_retained`; NULL until asked for
    cdef uint32_t big_count
    cdef uint64_t big_least             # bytes
    cdef uint32_t* kind_of              # owned; node -> number of its kind, see `need_kinds`; NULL until asked for
    cdef list examples                  # kind -> first node of it
    cdef readonly object stream_size    # bytes of the stream
    cdef readonly object buffer_size    # bytes of all out-of-band buffers
    cdef readonly object overhead       # bytes of PROTO, FRAME and STOP opcodes
    cdef readonly int protocol
    cdef readonly object pickle_count
    cdef readonly str tail              # why the bytes behind the last pickle are not one

    def __init__(self, tables):
        cdef uint32_t i
        if self.view_count:
            raise TypeError("Graph.__init__ may be called only once")
        self.order = threading.RLock()
        for field, source in enumerate((tables.nodes, tables.references, tables.skeleton, tables.holes, tables.overheads)):
            # nodes and references are worked on in place, see `check` and `need_grouped`
            if field < 2 and not isinstance(source, Block) and memoryview(source).readonly:
                source = bytearray(source)
            PyObject_GetBuffer(source, self.view(field), PyBUF_WRITABLE if field < 2 else PyBUF_SIMPLE)
            self.view_count += 1
        self.nodes = <Node*>self.nodes_view.buf
        self.refs = <Ref*>self.refs_view.buf
        self.skeleton = <const uint8_t*>self.skeleton_view.buf
        self.hole_table = <const Hole*>self.holes_view.buf
        self.overheads = <const Overhead*>self.overheads_view.buf
        node_count = self.nodes_view.len // sizeof(Node)
        reference_count = self.refs_view.len // sizeof(Ref)
        if not 0 < node_count < 0xFFFFFFFF or reference_count >= 0xFFFFFFFF:
            raise ValueError(f"a graph of {node_count} nodes and {reference_count} references")
        self.n = node_count
        self.ref_count = reference_count
        self.hole_count = self.holes_view.len // sizeof(Hole)
        self.overhead_count = self.overheads_view.len // sizeof(Overhead)
        sizes = list(tables.buffer_sizes)
        self.buffers = <uint64_t*>allocate(max(1, len(sizes)) * sizeof(uint64_t))
        for size in sizes:
            self.buffers[self.buffer_count] = size
            self.buffer_count += 1
        self.stream_size = tables.stream_size
        self.buffer_size = sum(sizes)
        self.overhead = self.overheads[self.overhead_count - 1].total if self.overhead_count else 0
        self.protocol = tables.protocol
        self.pickle_count = tables.pickle_count
        self.tail = tables.tail

    def __dealloc__(self):
        for field in range(self.view_count):
            PyBuffer_Release(self.view(field))
        PyMem_RawFree(self.buffers)
        PyMem_RawFree(self.buffered)
        PyMem_RawFree(self.first_out)
        PyMem_RawFree(self.outgoing)
        PyMem_RawFree(self.idom)
        PyMem_RawFree(self.retained)
        PyMem_RawFree(self.kind_of)
        PyMem_RawFree(self.big)

    cdef Py_buffer* view(self, int field) noexcept:
        if field == 0:
            return &self.nodes_view
        if field == 1:
            return &self.refs_view
        if field == 2:
            return &self.skeleton_view
        if field == 3:
            return &self.holes_view
        return &self.overheads_view

    cdef int ready(self) except -1:
        """Check the tables before the first look at them. Who asks for the size of the payload only never pays for it."""
        cdef uint32_t i
        cdef uint64_t* buffered
        if self.checked:
            return 0
        self.check()
        if self.buffer_count:
            buffered = <uint64_t*>PyMem_RawCalloc(self.n, sizeof(uint64_t))
            if buffered == NULL:
                raise MemoryError()
            for i in range(self.n - 1, -1, -1):
                if self.nodes[i].op == OP_NEXT_BUFFER and self.nodes[i].arg < self.buffer_count:
                    buffered[i] += self.buffers[self.nodes[i].arg]
                if i:
                    buffered[self.nodes[i].parent] += buffered[i]
            if buffered[0] != self.buffer_size:
                PyMem_RawFree(buffered)
                raise ValueError("an out-of-band buffer is used twice or not at all")
            if self.checked:  # another thread was faster while the GIL was released
                PyMem_RawFree(buffered)
                return 0
            self.buffered = buffered
        self.checked = True
        return 0

    cdef int check(self) except -1:
        """Everything that later code relies on but the references, see `need_references`. The tables may come from anywhere.

        Fills in `Node.count`: a node's subtree ends where the first node begins that is not below it.
        """
        cdef Node* nodes = self.nodes
        cdef Node* node = nodes
        cdef uint32_t n = self.n
        cdef uint32_t i
        cdef uint32_t inner = 0     # innermost node whose subtree may go on
        cdef uint32_t bad = NO_INDEX
        cdef uint64_t net_size
        cdef Py_ssize_t h
        cdef uint64_t missing = 0
        if self.stream_size < self.overhead:
            raise ValueError("more overhead than stream")
        net_size = self.stream_size - self.overhead
        with nogil:
            if node.parent != NO_INDEX or node.start != 0 or node.end != net_size or names_no_node(node, n):
                bad = 0
            for i in range(1, n):
                node = &nodes[i]
                while node.parent != inner and inner != 0 and nodes[inner].end <= node.start:
                    nodes[inner].count = i - inner
                    inner = nodes[inner].parent
                if (node.parent != inner or node.start < nodes[inner].start or node.end > nodes[inner].end
                        or node.start > node.end or names_no_node(node, n)):
                    bad = i
                    break
                inner = i
            while bad == NO_INDEX and inner != 0:
                nodes[inner].count = n - inner
                inner = nodes[inner].parent
            nodes[0].count = n
        if bad != NO_INDEX:
            raise ValueError(f"node {bad} of {self.n} does not fit into the tree: {nodes[bad]}")
        for h in range(self.hole_count):
            if (self.hole_table[h].missing <= missing or self.hole_table[h].at + (self.hole_table[h].missing - missing) > net_size
                    or (h and self.hole_table[h].at < self.hole_table[h - 1].at + hole_size(self.hole_table, h - 1))):
                raise ValueError(f"hole {h} of {self.hole_count} does not fit")
            missing = self.hole_table[h].missing
        if missing + <uint64_t>self.skeleton_view.len > net_size:
            raise ValueError("the skeleton is longer than the stream")
        for h in range(1, self.overhead_count):
            if (self.overheads[h].at < self.overheads[h - 1].at
                    or self.overheads[h].total <= self.overheads[h - 1].total):
                raise ValueError(f"overhead {h} of {self.overhead_count} does not fit")
        return 0

    # ---- sizes and dominators ---------------------------------------------------------------------------------------

    cdef inline uint64_t subtree_size(self, uint32_t i) noexcept nogil:
        return size_of(self.nodes, self.buffered, i)

    cdef uint64_t self_size(self, uint32_t i) noexcept nogil:
        cdef uint64_t size = self.subtree_size(i)
        cdef uint32_t child = i + 1
        cdef uint32_t end = i + self.nodes[i].count
        while child < end:
            size -= self.subtree_size(child)
            child += self.nodes[child].count
        return size

    cdef int need_references(self) except -1:
        """Check that the references lead from nodes to nodes, and mark the nodes that they lead to."""
        cdef uint32_t i
        cdef const Ref* ref
        if self.refs_checked:
            return 0
        self.ready()
        for i in range(self.ref_count):
            ref = &self.refs[i]
            if ref.source >= self.n or ref.target >= self.n:
                raise ValueError(f"reference {i} of {self.ref_count} does not fit: {ref[0]}")
            if not self.nodes[ref.target].flags & FLAG_REFERRED:
                self.nodes[ref.target].flags |= FLAG_REFERRED
        self.refs_checked = True
        return 0

    cdef int need_grouped(self) except -1:
        """Group the references by target, in place: a stream can have several times as many of them as nodes."""
        if self.refs_grouped:
            return 0
        self.need_references()
        with self.order:
            if not self.refs_grouped:
                self.group_references()
        return 0

    cdef int group_references(self) except -1:
        """"American flag" sort with one bucket a node (McIlroy, Bostic and McIlroy, Engineering radix sort, 1993)."""
        cdef Ref held, other
        cdef Ref* refs = self.refs
        cdef uint32_t n = self.n
        cdef uint32_t i, target, last
        cdef uint32_t* start   # where the group of a target begins; n + 1 entries
        cdef uint32_t* free    # where its next reference goes
        start = <uint32_t*>allocate((2 * <size_t>n + 1) * sizeof(uint32_t))
        free = start + n + 1
        memset(start, 0, (<size_t>n + 1) * sizeof(uint32_t))
        for i in range(self.ref_count):
            start[refs[i].target + 1] += 1
        for i in range(n):
            start[i + 1] += start[i]
            free[i] = start[i]
        for i in range(n):
            last = start[i + 1]
            while free[i] < last:
                held = refs[free[i]]
                while held.target != i:
                    target = held.target
                    other = refs[free[target]]
                    refs[free[target]] = held
                    free[target] += 1
                    held = other
                refs[free[i]] = held
                free[i] += 1
        PyMem_RawFree(start)
        self.refs_grouped = True
        return 0

    cdef int need_outgoing(self) except -1:
        """Group the references by source (counting sort)."""
        cdef uint32_t* first
        cdef uint32_t* grouped
        cdef uint32_t i, source
        self.need_grouped()
        if self.first_out != NULL:
            return 0
        first = <uint32_t*>allocate((<size_t>self.n + 2) * sizeof(uint32_t))
        grouped = <uint32_t*>PyMem_RawMalloc((<size_t>self.ref_count + 1) * sizeof(uint32_t))
        if grouped == NULL:
            PyMem_RawFree(first)
            raise MemoryError()
        with nogil:
            # first[s + 2] counts, then becomes where s + 1 begins; filling group s moves first[s + 1] to where it ends
            memset(first, 0, (<size_t>self.n + 2) * sizeof(uint32_t))
            for i in range(self.ref_count):
                first[self.refs[i].source + 2] += 1
            for i in range(2, self.n + 2):
                first[i] += first[i - 1]
            for i in range(self.ref_count):
                source = self.refs[i].source
                grouped[first[source + 1]] = i
                first[source + 1] += 1
        if self.first_out != NULL:  # another thread was faster while the GIL was released
            PyMem_RawFree(first)
            PyMem_RawFree(grouped)
            return 0
        self.outgoing = grouped
        self.first_out = first
        return 0

    cdef int order_outgoing(self, uint32_t i) except -1:
        """Put the references of one node into the order of their places."""
        cdef uint32_t r
        cdef uint32_t first = self.first_out[i]
        cdef uint32_t end = self.first_out[i + 1]
        for r in range(first + 1, end):
            if self.refs[self.outgoing[r]].place < self.refs[self.outgoing[r - 1]].place:
                break
        else:
            return 0
        numbers = [(self.refs[self.outgoing[r]].place, self.outgoing[r]) for r in range(first, end)]
        numbers.sort()
        for r in range(first, end):
            self.outgoing[r] = numbers[r - first][1]
        return 0

    cdef uint32_t first_ref(self, uint32_t target) noexcept:
        """Number of the first reference whose target is not before this node."""
        return lower_bound(self.refs, self.ref_count, target)

    cdef int need_dominators(self) except -1:
        """Raise dominators until they fit, which payloads of any usual shape do at once; if that takes long, start anew.

        What is raised is as good as what Lengauer and Tarjan's algorithm finds, and takes no other memory and no sorting
        of the references; but on long chains with far references it is quadratic.
        """
        if self.idom != NULL:
            return 0
        self.need_references()
        with self.order:
            if self.idom == NULL:
                self.idom = self.compute_dominators(False)
        return 0

    cdef uint32_t* compute_dominators(self, bint thoroughly) except NULL:
        """A new array of them; `thoroughly` does without the short cut."""
        cdef uint32_t* work
        cdef bint found = False
        cdef uint32_t* idom = <uint32_t*>allocate(self.n * sizeof(uint32_t))
        if not thoroughly:
            with nogil:
                found = raise_dominators(self.nodes, self.refs, self.ref_count, self.n, idom)
        if not found:
            try:
                self.need_grouped()
                work = <uint32_t*>allocate(3 * <size_t>self.n * sizeof(uint32_t))
            except MemoryError:
                PyMem_RawFree(idom)
                raise
            with nogil:
                find_dominators(self.nodes, self.refs, self.ref_count, self.n, idom,
                                work, work + self.n, work + 2 * <size_t>self.n)
            PyMem_RawFree(work)
        return idom

    cdef int need_retained(self) except -1:
        """Add up what every node dominates.

        On the way note the nodes whose subtree is at least 1/2000 of the whole: what is asked is nearly always about these.
        """
        cdef uint64_t* retained
        cdef uint32_t* big
        cdef uint32_t* moved
        cdef uint32_t big_count = 0
        cdef uint32_t capacity = 1024
        cdef uint64_t size, least
        cdef uint32_t i
        cdef const Node* nodes = self.nodes
        cdef const uint64_t* buffered
        cdef const uint32_t* idom
        if self.retained != NULL:
            return 0
        self.need_dominators()
        buffered = self.buffered
        idom = self.idom
        least = max(1, self.subtree_size(0) // 2000)
        retained = <uint64_t*>PyMem_RawCalloc(self.n, sizeof(uint64_t))
        big = <uint32_t*>PyMem_RawMalloc(capacity * sizeof(uint32_t))
        with nogil:
            # When it is i's turn, its children have taken their sizes off it and what it dominates has been added.
            i = self.n if retained != NULL and big != NULL else 0
            while i > 0:
                i -= 1
                size = size_of(nodes, buffered, i)
                if size >= least:
                    if big_count == capacity:
                        moved = <uint32_t*>PyMem_RawRealloc(big, 2 * <size_t>capacity * sizeof(uint32_t))
                        if moved == NULL:
                            PyMem_RawFree(big)
                            big = NULL
                            break
                        big = moved
                        capacity *= 2
                    big[big_count] = i
                    big_count += 1
                if i == 0:
                    retained[0] += size
                elif idom[i] == nodes[i].parent:  # what its parent loses comes back to it
                    retained[idom[i]] += retained[i]
                    retained[i] += size
                else:
                    retained[i] += size
                    retained[nodes[i].parent] -= size
                    retained[idom[i]] += retained[i]
            for i in range(big_count // 2):  # into stream order
                big[i], big[big_count - 1 - i] = big[big_count - 1 - i], big[i]
        if retained == NULL or big == NULL or self.retained != NULL:
            failed = self.retained == NULL  # else another thread was faster while the GIL was released
            PyMem_RawFree(retained)
            PyMem_RawFree(big)
            if failed:
                raise MemoryError()
            return 0
        self.big = big
        self.big_count = big_count
        self.big_least = least
        self.retained = retained
        return 0

    cdef uint32_t first_big(self, uint32_t node) noexcept nogil:
        """Number of the first big node that is not before this one."""
        cdef uint32_t low = 0
        cdef uint32_t high = self.big_count
        cdef uint32_t middle
        while low < high:
            middle = low + (high - low) // 2
            if self.big[middle] < node:
                low = middle + 1
            else:
                high = middle
        return low

    cdef uint32_t next_of_size(self, uint32_t node, uint32_t end, uint64_t least) noexcept nogil:
        """The first of `node`, its next siblings and so on (before `end`) whose subtree has `least` bytes; `end` if none."""
        cdef uint32_t number
        if least >= self.big_least:
            number = self.first_big(node)
            while number < self.big_count and self.big[number] < end:
                if self.subtree_size(self.big[number]) >= least:
                    return self.big[number]
                number += 1
            return end
        while node < end and self.subtree_size(node) < least:
            node += self.nodes[node].count
        return node

    # ---- questions --------------------------------------------------------------------------------------------------

    def __len__(self):
        return self.n

    @property
    def reference_count(self):
        """Memo references in the stream."""
        return self.ref_count

    @property
    def payload_size(self):
        """Bytes of the stream and of its out-of-band buffers."""
        return self.stream_size + self.buffer_size

    cdef uint32_t index(self, object number) except? 0xFFFFFFFF:
        if not 0 <= number < self.n:
            raise IndexError(f"node {number} of a graph with {self.n}")
        self.ready()
        return number

    cdef str op_name(self, uint32_t i):
        if self.nodes[i].op:
            return OP_NAMES[self.nodes[i].op]
        return "RAW" if self.nodes[i].place >> ROLE_SHIFT == ROLE_RAW else "FILE"

    def node(self, number):
        """The node with this index as a `NodeView`."""
        cdef uint32_t i = self.index(number)
        cdef const Node* node = &self.nodes[i]
        self.need_retained()
        return NodeView(
            i, self.op_name(i), node.start, node.end, signed(node.parent), node.place >> ROLE_SHIFT, node.place & POSITION_MASK,
            signed(node.arg), signed(node.memo), node.count, self.self_size(i), self.subtree_size(i),
            self.retained[i], signed(self.idom[i]),
        )

    def edges(self, number, min_size=0, limit=-1, references=True):
        """Children of at least ``min_size`` bytes and memo references of a node, by role and position.

        At most ``limit`` of them (all if negative), the first ones.
        """
        cdef uint32_t i = self.index(number)
        cdef uint32_t child = i + 1
        cdef uint32_t end = i + self.nodes[i].count
        cdef uint32_t ref = 0
        cdef uint32_t ref_end = 0
        cdef uint64_t least = min_size
        cdef Py_ssize_t most = limit
        cdef list result = []
        cdef const Ref* edge
        if references and self.nodes[i].flags & FLAG_REFERS:
            self.need_outgoing()
            self.order_outgoing(i)
            ref, ref_end = self.first_out[i], self.first_out[i + 1]
        self.need_retained()
        while most < 0 or len(result) < most:
            child = self.next_of_size(child, end, least)
            edge = &self.refs[self.outgoing[ref]] if ref < ref_end else NULL
            if child < end and (edge == NULL or self.nodes[child].place <= edge.place):
                result.append(Edge(self.nodes[child].place >> ROLE_SHIFT, self.nodes[child].place & POSITION_MASK,
                                   child, False))
                child += self.nodes[child].count
            elif edge != NULL:
                result.append(Edge(edge.place >> ROLE_SHIFT, edge.place & POSITION_MASK, edge.target, True))
                ref += 1
            else:
                break
        return result

    def next_sibling(self, number):
        """The next node with the same parent, -1 if there is none."""
        cdef uint32_t i = self.index(number)
        cdef uint32_t following = i + self.nodes[i].count
        if i == 0 or following >= self.nodes[i].parent + self.nodes[self.nodes[i].parent].count:
            return -1
        return following

    def previous_sibling(self, number):
        """The node before this one with the same parent, -1 if there is none."""
        cdef uint32_t i = self.index(number)
        cdef uint32_t before
        if i == 0 or self.nodes[i].parent == i - 1:
            return -1
        before = i - 1
        while self.nodes[before].parent != self.nodes[i].parent:
            before = self.nodes[before].parent
        return before

    def referrers(self, number, limit=10):
        """Nodes that hold a memo reference to this one, in stream order, at most ``limit``; one for each reference."""
        cdef uint32_t i = self.index(number)
        cdef uint32_t ref
        self.need_references()
        if not self.nodes[i].flags & FLAG_REFERRED:
            return []
        self.need_grouped()
        ref = self.first_ref(i)
        return heapq.nsmallest(limit, [self.refs[r].source for r in range(ref, self.first_ref(i + 1))])

    def referrer_count(self, number):
        """How many memo references lead to this node."""
        cdef uint32_t i = self.index(number)
        self.need_references()
        if not self.nodes[i].flags & FLAG_REFERRED:
            return 0
        self.need_grouped()
        return self.first_ref(i + 1) - self.first_ref(i)

    def dominated(self, number, min_size=0, limit=-1):
        """Nodes whose immediate dominator is this one and that retain ``min_size`` bytes or more, biggest first."""
        cdef uint32_t i = self.index(number)
        cdef uint32_t j
        cdef uint32_t end = i + self.nodes[i].count
        cdef uint64_t least = min_size
        cdef list found = []
        self.need_retained()
        # A node dominated by i lies in i's subtree: every path from the root leads through i, the tree path too.
        j = self.next_of_size(i + 1, end, least)
        while j < end:
            if self.retained[j] >= least and self.idom[j] == i:
                found.append((-<object>self.retained[j], j))
            j = self.next_of_size(j + 1, end, least)
        found.sort()
        if limit >= 0:
            del found[limit:]
        return [pair[1] for pair in found]

    def dominators(self, thoroughly=False):
        """The immediate dominator of every node, as native uint32; 0xFFFFFFFF for the root.

        ``thoroughly`` finds them once more, in the way that is linear on any graph; see `need_dominators`.
        """
        cdef uint32_t* idom
        if thoroughly:
            self.need_references()
            with self.order:
                idom = self.compute_dominators(True)
            try:
                return PyBytes_FromStringAndSize(<char*>idom, self.n * sizeof(uint32_t))
            finally:
                PyMem_RawFree(idom)
        self.need_dominators()
        return PyBytes_FromStringAndSize(<char*>self.idom, self.n * sizeof(uint32_t))

    def sizes(self):
        """(self, subtree, retained) sizes of every node in bytes, each as native uint64."""
        cdef bytes own = PyBytes_FromStringAndSize(NULL, self.n * sizeof(uint64_t))
        cdef bytes subtree = PyBytes_FromStringAndSize(NULL, self.n * sizeof(uint64_t))
        cdef uint64_t* a = <uint64_t*><char*>own
        cdef uint64_t* b = <uint64_t*><char*>subtree
        cdef uint32_t i
        self.need_retained()
        for i in range(self.n):
            a[i] = b[i] = self.subtree_size(i)
            if i:
                a[self.nodes[i].parent] -= a[i]
        return own, subtree, PyBytes_FromStringAndSize(<char*>self.retained, self.n * sizeof(uint64_t))

    # ---- the stream's bytes -----------------------------------------------------------------------------------------

    cdef Py_ssize_t skeleton_offset(self, uint64_t net) noexcept nogil:
        """Where the byte at a net offset is in the skeleton; for one in a hole, where the hole is."""
        cdef Py_ssize_t h = holes_before(self.hole_table, self.hole_count, net)
        cdef uint64_t missing = missing_before(self.hole_table, h)
        cdef uint64_t hole_end
        cdef Py_ssize_t offset
        if h:
            hole_end = self.hole_table[h - 1].at + hole_size(self.hole_table, h - 1)
            if net < hole_end:
                missing -= hole_end - net
        offset = <Py_ssize_t>(net - missing)
        return offset if offset < self.skeleton_view.len else self.skeleton_view.len

    def code(self, start, end):
        """The stream's bytes between two net offsets; what `holes` says is missing is simply not there."""
        cdef Py_ssize_t first, last
        self.ready()
        if not 0 <= start <= end <= self.nodes[0].end:
            raise IndexError(f"bytes {start} to {end} of {self.nodes[0].end}")
        first = self.skeleton_offset(start)
        last = self.skeleton_offset(end)
        return PyBytes_FromStringAndSize(<const char*>self.skeleton + first, last - first)

    def holes(self, start, end):
        """(net offset, length in bytes) of everything between two net offsets that `code` leaves out."""
        cdef Py_ssize_t h
        cdef uint64_t first = start
        cdef uint64_t last = end
        cdef uint64_t hole_end
        cdef list result = []
        self.ready()
        h = max(0, holes_before(self.hole_table, self.hole_count, start) - 1)
        while h < self.hole_count and self.hole_table[h].at < last:
            hole_end = self.hole_table[h].at + hole_size(self.hole_table, h)
            if hole_end > first:
                result.append((max(first, self.hole_table[h].at), min(last, hole_end) - max(first, self.hole_table[h].at)))
            h += 1
        return result

    def stream_offset(self, net):
        """Position in the stream of the byte at a net offset."""
        cdef Py_ssize_t low = 0
        cdef Py_ssize_t high = self.overhead_count
        cdef Py_ssize_t middle
        self.ready()
        while low < high:
            middle = (low + high) // 2
            if self.overheads[middle].at <= net:
                low = middle + 1
            else:
                high = middle
        return net + (self.overheads[low - 1].total if low else 0)

    def last_push(self, start, end):
        """Net offset of the last opcode that pushes a value between two net offsets with no node in between.

        -1 if there is none. Used to read the atom or memo reference in front of a child.
        """
        cdef uint64_t at, stop
        cdef int64_t found = -1
        cdef const uint8_t* p
        cdef const uint8_t* limit = self.skeleton + self.skeleton_view.len
        cdef uint64_t size
        self.ready()
        if not 0 <= start <= end <= self.nodes[0].end:
            raise IndexError(f"bytes {start} to {end} of {self.nodes[0].end}")
        at, stop = start, end
        with nogil:
            p = self.skeleton + self.skeleton_offset(at)
            while at < stop and p < limit:
                size = atom_size(p, limit)
                if size == 0:
                    break
                if is_push(p[0]):
                    found = at
                at += size
                p += size
                if self.hole_count and at < stop:
                    p = self.skeleton + self.skeleton_offset(at)
        return found

    # ---- totals by type ---------------------------------------------------------------------------------------------

    cdef int need_kinds(self) except -1:
        """Number the kinds of node: nodes made by calls of one callable are of one kind, else those of one opcode."""
        cdef uint32_t* kind_of
        cdef uint32_t* of_callee    # kind + 1 of the calls of each node; calloc: only pages that are used become real
        cdef uint32_t of_op[256]    # kind + 1 of each opcode
        cdef uint32_t i, callee
        cdef uint32_t* kind
        cdef list examples = []
        if self.kind_of != NULL:
            return 0
        self.ready()
        kind_of = <uint32_t*>allocate(self.n * sizeof(uint32_t))
        of_callee = <uint32_t*>PyMem_RawCalloc(self.n, sizeof(uint32_t))
        if of_callee == NULL:
            PyMem_RawFree(kind_of)
            raise MemoryError()
        memset(of_op, 0, sizeof(of_op))
        for i in range(self.n):
            kind = &of_op[self.nodes[i].op]
            if is_call(self.nodes[i].op) and self.nodes[i].arg != NO_INDEX:
                callee = self.nodes[i].arg
                if self.nodes[callee].flags & FLAG_ALIAS:
                    callee = self.nodes[callee].arg
                kind = &of_callee[callee]
            if kind[0] == 0:
                examples.append(i)
                kind[0] = <uint32_t>len(examples)
            kind_of[i] = kind[0] - 1
        PyMem_RawFree(of_callee)
        self.kind_of = kind_of
        self.examples = examples
        return 0

    def select(self, opcodes, min_size=0, limit=-1, min_arg=0):
        """The nodes that one of these opcodes (their bytes) made, of at least so many bytes and items, in stream order."""
        cdef bytes wanted = bytes(opcodes)
        cdef uint64_t least = min_size
        cdef uint64_t least_arg = min_arg
        cdef Py_ssize_t room = limit
        cdef bint chosen[256]
        cdef bint occurs = False
        cdef bint only_big
        cdef uint32_t i, number
        cdef list found = []
        self.need_kinds()
        self.need_retained()
        memset(chosen, 0, sizeof(chosen))
        for opcode in wanted:
            chosen[<uint8_t>opcode] = True
        for example in self.examples:
            occurs = occurs or chosen[self.nodes[<uint32_t>example].op]
        if not occurs:
            return found
        only_big = least >= self.big_least
        for number in range(self.big_count if only_big else self.n):
            i = self.big[number] if only_big else number
            if not chosen[self.nodes[i].op] or self.subtree_size(i) < least:
                continue
            if least_arg and (self.nodes[i].arg == NO_INDEX or self.nodes[i].arg < least_arg):
                continue
            if room == 0:
                break
            room -= 1
            found.append(i)
        return found

    def select_kinds(self, keys, min_size=0, limit=-1):
        """The nodes of some of the kinds of `type_keys`, of at least so many bytes, in stream order."""
        cdef uint64_t least = min_size
        cdef Py_ssize_t room = limit
        cdef uint8_t* chosen
        cdef uint32_t i
        cdef list found = []
        self.need_kinds()
        chosen = <uint8_t*>PyMem_RawCalloc(len(self.examples), 1)
        if chosen == NULL:
            raise MemoryError()
        try:
            for key in keys:
                if not 0 <= key < len(self.examples):
                    raise ValueError(f"{key} is no type key of this graph")
                chosen[<uint32_t>key] = 1
            for i in range(self.n):
                if not chosen[self.kind_of[i]] or self.subtree_size(i) < least:
                    continue
                if room == 0:
                    break
                room -= 1
                found.append(i)
        finally:
            PyMem_RawFree(chosen)
        return found

    def type_keys(self):
        """(key, op, example) for every distinct kind of node, in stream order; ``example`` is the first such node.

        Nodes made by calls (REDUCE, OBJ, NEWOBJ, NEWOBJ_EX) of one callable are of one kind, else those of one opcode.
        """
        self.need_kinds()
        return [(key, self.op_name(example), example) for key, example in enumerate(self.examples)]

    def type_totals(self, meanings):
        """key -> (number of nodes, bytes), for the keys of `type_keys`.

        ``meanings[key]`` is 0 for a type with a row of its own, 1 for one that takes in all that is written below it, 2
        for glue whose own bytes count with its parent. The bytes add up to the payload without its overhead.
        """
        cdef uint32_t i, key, above
        cdef uint32_t kinds
        cdef uint64_t* bytes_of = NULL
        cdef uint64_t* count_of
        cdef uint8_t* meaning
        cdef uint32_t* row = NULL  # node -> kind that its bytes count with; not set inside what is taken in
        cdef uint64_t size
        cdef uint32_t n = self.n
        cdef const Node* nodes = self.nodes
        cdef const uint64_t* buffered
        cdef const uint32_t* kind_of
        self.need_kinds()
        kind_of = self.kind_of
        buffered = self.buffered
        kinds = <uint32_t>len(self.examples)
        for number in meanings:
            if not 0 <= number < kinds:
                raise ValueError(f"{number} is no type key of this graph")
        row = <uint32_t*>allocate(self.n * sizeof(uint32_t))
        bytes_of = <uint64_t*>PyMem_RawCalloc(kinds, 2 * sizeof(uint64_t) + 1)
        if bytes_of == NULL:
            PyMem_RawFree(row)
            raise MemoryError()
        count_of = bytes_of + kinds
        meaning = <uint8_t*>(count_of + kinds)
        try:
            for number, value in meanings.items():
                meaning[<uint32_t>number] = value
            with nogil:
                key = kind_of[0]
                row[0] = key
                count_of[key] = 1
                bytes_of[key] = self.subtree_size(0)
                i = n if meaning[key] == 1 else 1
                while i < n:
                    key = kind_of[i]
                    above = row[nodes[i].parent]
                    if meaning[key] == 2:
                        key = above  # the size is neither here nor there
                    else:
                        count_of[key] += 1
                        size = size_of(nodes, buffered, i)
                        bytes_of[key] += size
                        bytes_of[above] -= size
                    row[i] = key
                    i += nodes[i].count if meaning[kind_of[i]] == 1 else 1
            return {key: (count_of[key], bytes_of[key]) for key in range(kinds) if count_of[key]}
        finally:
            PyMem_RawFree(row)
            PyMem_RawFree(bytes_of)


cdef void* allocate(size_t size) except NULL:
    cdef void* memory = PyMem_RawMalloc(size)
    if memory == NULL:
        raise MemoryError()
    return memory


# Loops over all nodes keep the tables in local variables, which the compiler then knows that they do not write to.
cdef inline uint64_t size_of(const Node* nodes, const uint64_t* buffered, uint32_t i) noexcept nogil:
    """Bytes of the subtree of a node."""
    return nodes[i].end - nodes[i].start + (buffered[i] if buffered != NULL else 0)


cdef inline object signed(uint32_t index):
    return -1 if index == NO_INDEX else index


cdef inline bint names_no_node(const Node* node, uint32_t n) noexcept nogil:
    """Whether `arg` should be the index of a node and is not."""
    return node.arg >= n and node.arg != NO_INDEX and (is_call(node.op) or node.flags & FLAG_ALIAS)


cdef uint64_t atom_size(const uint8_t* p, const uint8_t* limit) noexcept nogil:
    """Bytes of the opcode at p with its argument; 0 if it does not end before `limit` or is none."""
    cdef OpInfo* info = &OPS[p[0]]
    cdef uint64_t size = info.header
    cdef const uint8_t* line
    if size > <uint64_t>(limit - p):
        return 0
    if info.kind == ARG_FIXED:
        return size
    if info.kind == ARG_COUNT1:
        return size + p[1]
    if info.kind == ARG_COUNT4:
        return size + read_u32(p + 1)
    if info.kind == ARG_LINE:
        line = <const uint8_t*>memchr(p, 10, limit - p)
        return <uint64_t>(line + 1 - p) if line != NULL else 0
    return 0


cdef inline bint is_push(uint8_t op) noexcept nogil:
    """Opcodes that push an atom or a memo reference."""
    return (op == OP_BININT or op == OP_BININT1 or op == OP_BININT2 or op == OP_INT or op == OP_LONG or op == OP_LONG1
            or op == OP_NONE or op == OP_NEWTRUE or op == OP_NEWFALSE or op == OP_FLOAT or op == OP_BINFLOAT
            or op == OP_EMPTY_TUPLE or op == OP_GET or op == OP_BINGET or op == OP_LONG_BINGET or op == OP_DUP)


cdef uint32_t lower_bound(const Ref* refs, uint32_t count, uint32_t target) noexcept nogil:
    """How many of the first `count` references, grouped by target, lead to nodes before this one."""
    cdef uint32_t low = 0
    cdef uint32_t middle
    while low < count:
        middle = low + (count - low) // 2
        if refs[middle].target < target:
            low = middle + 1
        else:
            count = middle
    return low


# ---- dominators -----------------------------------------------------------------------------------------------------

cdef inline uint32_t common_ancestor(const uint32_t* above, uint32_t a, uint32_t b, int64_t* patience) noexcept nogil:
    """The nearest, where `above` has smaller numbers always. Takes off the steps; of no use once they are below 0."""
    while a != b and patience[0] >= 0:
        patience[0] -= 1
        if a > b:
            a = above[a]
        else:
            b = above[b]
    return a


cdef bint raise_dominators(const Node* nodes, const Ref* refs, uint32_t ref_count, uint32_t n, uint32_t* idom) noexcept nogil:
    """Immediate dominators by iteration, after Cooper, Harvey and Kennedy (A simple, fast dominance algorithm, 2001).

    Starts with the tree of spans, in which the dominators of a node are among its ancestors, and lifts the target of a
    reference until all that leads to it, its place in the stream included, is below the node that it hangs from; when
    nothing moves any more, the ancestors are exactly the dominators. What a node hangs from always has the smaller number,
    so that the nearest common ancestor of two nodes is found by lifting the greater one. Going backwards through the
    stream, later references have mostly lifted what an earlier one depends on, and the second round only confirms. Gives
    up (False) after a number of steps that is linear in the table.
    """
    cdef int64_t patience = 4 * (<int64_t>n + ref_count) + 1000
    cdef uint32_t i, r, target, a
    cdef bint moved = True
    cdef bint relied = True     # on a node below the root: what hangs from the root stays there
    for i in range(n):
        idom[i] = nodes[i].parent
    idom[0] = 0
    while moved and relied:
        moved = relied = False
        patience -= ref_count
        for r in range(ref_count, 0, -1):
            target = refs[r - 1].target
            a = idom[target]
            if a == 0:  # below the root already
                continue
            a = common_ancestor(idom, a, refs[r - 1].source, &patience)
            a = common_ancestor(idom, a, nodes[target].parent, &patience)
            if patience < 0:
                return False
            relied = relied or a != 0
            if a != idom[target]:
                idom[target] = a
                moved = True
    idom[0] = NO_INDEX
    return True


cdef uint32_t evaluate(uint32_t v, uint32_t linked, uint32_t* ancestor, uint32_t* label, const uint32_t* semi) noexcept nogil:
    """The node with the smallest semidominator on the path from v up to, but without, the root of its tree in the forest.

    The forest holds the nodes above `linked` (in number), each linked to its parent. Compresses the path: first up,
    turning the pointers round, then down again.
    """
    cdef uint32_t x = v
    cdef uint32_t below = NO_INDEX
    cdef uint32_t above, root, best
    if ancestor[v] <= linked:
        return label[v]
    while ancestor[x] > linked:
        above = ancestor[x]
        ancestor[x] = below
        below = x
        x = above
    root = ancestor[x]
    best = label[x]
    while below != NO_INDEX:
        x = below
        below = ancestor[x]
        ancestor[x] = root
        if semi[best] < semi[label[x]]:
            label[x] = best
        else:
            best = label[x]
    return label[v]


cdef void find_dominators(const Node* nodes, const Ref* refs, uint32_t ref_count, uint32_t n, uint32_t* idom,
                          uint32_t* semi, uint32_t* label, uint32_t* ancestor) noexcept nogil:
    """Immediate dominators, after Lengauer and Tarjan (TOPLAS 1, 1979), in O(m log n) whatever the graph.

    A node that nothing but its parent refers to has its parent as semidominator and as dominator: only the others are
    evaluated. `idom` serves as the buckets in the meantime: before v is processed, idom[v] is the head of v's bucket;
    while v is in a bucket, it is the next node in there.
    """
    cdef uint32_t v, u, best, parent, w, following
    cdef uint32_t r = ref_count  # the references to v end before this one
    memset(idom, 0xFF, n * sizeof(uint32_t))  # NO_INDEX
    for v in range(n - 1, 0, -1):
        parent = nodes[v].parent
        label[v] = v
        ancestor[v] = parent
        if r == 0 or refs[r - 1].target != v:
            semi[v] = parent
            idom[v] = parent
        else:
            best = parent
            while r > 0 and refs[r - 1].target == v:
                r -= 1
                u = refs[r].source
                if u > v:
                    u = semi[evaluate(u, v, ancestor, label, semi)]
                if u < best:
                    best = u
                    if best == 0:  # cannot be beaten
                        r = lower_bound(refs, r, v)
            semi[v] = best
            idom[v] = idom[best]
            idom[best] = v
        # v is linked from here on (evaluate with linked < v sees it); the bucket of its parent can be resolved
        w = idom[parent]
        idom[parent] = NO_INDEX
        while w != NO_INDEX:
            following = idom[w]
            u = evaluate(w, parent, ancestor, label, semi)
            idom[w] = u if semi[u] < semi[w] else parent
            w = following
    for v in range(1, n):
        if idom[v] != semi[v]:
            idom[v] = idom[idom[v]]
    idom[0] = NO_INDEX
