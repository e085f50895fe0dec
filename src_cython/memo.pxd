# The pickler's memo: object address -> memo index, and memo index -> object.
#
# Objects are kept in a dense array in index order; the hash table holds only 8-byte slots (32 bits of index, 32 bits of
# hash), so that a miss - the usual case - touches one slot and no object. Slots of one cache line are searched first;
# then the search jumps like CPython's set (Objects/setobject.c), so that arenas which fall onto each other do no harm.
# The hash is the address without its alignment bits: objects allocated in a row sit in a row of slots.
from cpython.ref cimport PyObject
from libc.stdint cimport uint64_t
from libc.string cimport memcpy, memset

from pages cimport prefer_huge_pages

cdef extern from "Python.h":
    void memo_incref "Py_INCREF" (PyObject*) noexcept
    void memo_decref "Py_DECREF" (PyObject*) noexcept
    void* memo_malloc "PyMem_Malloc" (size_t) noexcept
    void* memo_realloc "PyMem_Realloc" (void*, size_t) noexcept
    void memo_free "PyMem_Free" (void*) noexcept

cdef enum:
    MEMO_LINE = 8           # slots in one 64-byte cache line
    MEMO_FIRST_SLOTS = 64
    MEMO_FIRST_OBJECTS = 32

cdef extern from *:
    """
    #define MEMO_POSITION 0xffffffffull     /* the bits of a slot that hold the position + 1 */
    """
    uint64_t MEMO_POSITION

cdef struct Memo:
    uint64_t* slots         # owned; hash << 32 | (position + 1), 0 is a free slot
    size_t mask             # number of slots - 1; the number is a power of two, at least MEMO_LINE
    PyObject** objects      # owned array of strong references, in memo order
    Py_ssize_t count        # objects in it
    Py_ssize_t room         # objects it has room for
    Py_ssize_t* labels      # owned; memo indices of the first `label_count` objects where a user's memo was assigned
                            # whose indices are not 0, 1, 2...; NULL otherwise
    Py_ssize_t label_count  # entries of labels
    uint64_t generation     # grows whenever objects leave the memo


cdef inline void memo_zero(Memo* memo) noexcept:
    memset(memo, 0, sizeof(Memo))


cdef inline bint memo_init(Memo* memo) noexcept:
    """Give an empty memo its first arrays; false when there is no memory."""
    memo.slots = <uint64_t*>memo_malloc(MEMO_FIRST_SLOTS * sizeof(uint64_t))
    memo.objects = <PyObject**>memo_malloc(MEMO_FIRST_OBJECTS * sizeof(PyObject*))
    if memo.slots == NULL or memo.objects == NULL:
        memo_free(memo.slots)
        memo_free(memo.objects)
        memo.slots = NULL
        memo.objects = NULL
        return False
    memset(memo.slots, 0, MEMO_FIRST_SLOTS * sizeof(uint64_t))
    memo.mask = MEMO_FIRST_SLOTS - 1
    memo.count = 0
    memo.room = MEMO_FIRST_OBJECTS
    memo.labels = NULL
    memo.label_count = 0
    return True


cdef inline Py_ssize_t memo_find(Memo* memo, PyObject* key, size_t* slot) noexcept:
    """Position of `key`, or -1 and in *slot the free slot where it belongs (valid until the memo changes)."""
    cdef size_t h = (<size_t>key) >> 4
    cdef size_t perturb = h
    cdef size_t i = h & memo.mask
    cdef size_t j
    cdef uint64_t entry
    cdef uint64_t tag = (<uint64_t>h) << 32
    slot[0] = 0
    while True:
        j = i
        while True:
            entry = memo.slots[j]
            if entry == 0:
                slot[0] = j
                return -1
            # Compare the upper halves; equal tags of different objects are possible, hence the look at the object.
            if ((entry ^ tag) >> 32) == 0 and memo.objects[(entry & MEMO_POSITION) - 1] == key:
                return <Py_ssize_t>(entry & MEMO_POSITION) - 1
            j = (j & ~<size_t>(MEMO_LINE - 1)) | ((j + 1) & (MEMO_LINE - 1))
            if j == i:
                break
        perturb >>= 5
        i = (i * 5 + 1 + perturb) & memo.mask


cdef inline Py_ssize_t memo_label(Memo* memo, Py_ssize_t position) noexcept:
    """The index that stands in the stream for the object at `position`."""
    if memo.labels != NULL and position < memo.label_count:
        return memo.labels[position]
    return position


cdef inline bint memo_rehash(Memo* memo, size_t slot_count) noexcept:
    cdef uint64_t* slots = <uint64_t*>memo_malloc(slot_count * sizeof(uint64_t))
    cdef uint64_t* old = memo.slots
    cdef Py_ssize_t position
    cdef size_t slot
    cdef size_t h
    cdef size_t perturb
    cdef size_t i
    cdef size_t j
    if slots == NULL:
        return False
    prefer_huge_pages(slots, slot_count * sizeof(uint64_t))
    memset(slots, 0, slot_count * sizeof(uint64_t))
    memo.slots = slots
    memo.mask = slot_count - 1
    for position in range(memo.count):
        h = (<size_t>memo.objects[position]) >> 4
        perturb = h
        i = h & memo.mask
        j = i
        while slots[j] != 0:
            j = (j & ~<size_t>(MEMO_LINE - 1)) | ((j + 1) & (MEMO_LINE - 1))
            if j == i:
                perturb >>= 5
                i = (i * 5 + 1 + perturb) & memo.mask
                j = i
        slots[j] = (<uint64_t>h) << 32 | <uint64_t>(position + 1)
    memo_free(old)
    return True


cdef inline bint memo_crowded(Memo* memo) noexcept:
    """Whether the table needs more slots: half full, or two thirds where the slots of a half would cost megabytes."""
    if memo.mask < (1 << 17):
        return <size_t>memo.count * 2 > memo.mask
    return <size_t>memo.count * 3 > memo.mask * 2


cdef inline bint memo_grow(Memo* memo) noexcept:
    """Make room for one more object; false when there is no memory. Slot numbers from memo_find become stale."""
    cdef Py_ssize_t room
    cdef PyObject** objects
    cdef size_t slot_count = memo.mask + 1
    if memo.count == memo.room:
        room = memo.room * 2 if memo.room < (1 << 16) else memo.room + memo.room // 2
        objects = <PyObject**>memo_realloc(memo.objects, <size_t>room * sizeof(PyObject*))
        if objects == NULL:
            return False
        prefer_huge_pages(objects, <size_t>room * sizeof(PyObject*))
        memo.objects = objects
        memo.room = room
    if memo_crowded(memo):
        return memo_rehash(memo, slot_count * (4 if slot_count < (1 << 13) else 2))
    return True


cdef inline bint memo_full(Memo* memo) noexcept:
    """True when memo_grow must run before the next memo_add."""
    return memo.count == memo.room or memo_crowded(memo)


cdef inline void memo_add(Memo* memo, PyObject* key, size_t slot) noexcept:
    """Append `key`, which memo_find has just missed at `slot`; takes a reference of its own."""
    memo_incref(key)
    memo.objects[memo.count] = key
    memo.count += 1
    memo.slots[slot] = (<uint64_t>((<size_t>key) >> 4)) << 32 | <uint64_t>memo.count


cdef inline void memo_free_arrays(Memo* memo) noexcept:
    """Drop a memo that nobody can reach any more. The references go last: dropping them may run user code."""
    cdef PyObject** objects = memo.objects
    cdef Py_ssize_t count = memo.count
    cdef Py_ssize_t position
    memo_free(memo.slots)
    memo_free(memo.labels)
    memo_zero(memo)
    for position in range(count):
        memo_decref(objects[position])
    memo_free(objects)


# Compact mode leaves objects that nothing else can reach out of the memo, and only writes their addresses down. Should a
# reducer bring up an object later on, the log tells whether it is one of them. It becomes a hash set at the first question.
cdef struct AddressLog:
    PyObject** entries      # owned array of addresses, which are compared and never followed
    Py_ssize_t count        # entries
    Py_ssize_t room         # entries it has room for
    size_t* slots           # owned open-addressing set of the first `hashed` entries, 0 is free; NULL before its first use
    size_t mask             # number of slots - 1, a power of two less one
    Py_ssize_t hashed       # entries in the set


cdef inline bint log_add(AddressLog* log, PyObject* address) noexcept:
    """Append; false when there is no memory."""
    cdef Py_ssize_t room
    cdef PyObject** entries
    if log.count == log.room:
        room = log.room * 2 if log.room else 256
        entries = <PyObject**>memo_realloc(log.entries, <size_t>room * sizeof(PyObject*))
        if entries == NULL:
            return False
        prefer_huge_pages(entries, <size_t>room * sizeof(PyObject*))
        log.entries = entries
        log.room = room
    log.entries[log.count] = address
    log.count += 1
    return True


cdef inline size_t log_slot(AddressLog* log, size_t address) noexcept:
    """The slot that holds `address`, or the free one where it belongs."""
    cdef size_t h = address >> 4
    cdef size_t perturb = h
    cdef size_t i = h & log.mask
    while log.slots[i] != 0 and log.slots[i] != address:
        perturb >>= 5
        i = (i * 5 + 1 + perturb) & log.mask
    return i


cdef inline int log_has(AddressLog* log, PyObject* address) noexcept:
    """1: was written down; 0: was not; -1: no memory."""
    cdef size_t slot_count = log.mask + 1 if log.slots != NULL else 512
    cdef size_t* slots
    if log.slots == NULL or <size_t>log.count * 2 > slot_count:
        while <size_t>log.count * 2 > slot_count:
            slot_count *= 4
        slots = <size_t*>memo_malloc(slot_count * sizeof(size_t))
        if slots == NULL:
            return -1
        memset(slots, 0, slot_count * sizeof(size_t))
        memo_free(log.slots)
        log.slots = slots
        log.mask = slot_count - 1
        log.hashed = 0
    while log.hashed < log.count:
        log.slots[log_slot(log, <size_t>log.entries[log.hashed])] = <size_t>log.entries[log.hashed]
        log.hashed += 1
    return log.slots[log_slot(log, <size_t>address)] != 0


cdef inline void log_free(AddressLog* log) noexcept:
    memo_free(log.entries)
    memo_free(log.slots)
    memset(log, 0, sizeof(AddressLog))


cdef inline bint memo_truncate(Memo* memo, Py_ssize_t count) noexcept:
    """Drop all objects after the first `count`; false when there is no memory. Drops references last."""
    cdef Py_ssize_t last = memo.count
    cdef Py_ssize_t i
    cdef PyObject** dropped
    if count >= last:
        return True
    dropped = <PyObject**>memo_malloc(<size_t>(last - count) * sizeof(PyObject*))
    if dropped == NULL:
        return False
    memcpy(dropped, memo.objects + count, <size_t>(last - count) * sizeof(PyObject*))
    memo.count = count
    if not memo_rehash(memo, memo.mask + 1):
        memo.count = last
        memo_free(dropped)
        return False
    memo.generation += 1
    for i in range(last - count):
        memo_decref(dropped[i])
    memo_free(dropped)
    return True
