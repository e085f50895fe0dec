"""The encoder: CPython's pickle machine with a work stack of its own.

Byte for byte what the C pickler of the running Python writes (Modules/_pickle.c; the functions here keep its names and
its order, so that both files can be laid side by side), with three differences that do not show in the bytes:

- nested objects go onto a stack of `Frame`s instead of the C stack, so depth is bounded by memory alone;
- an instance whose class uses object's own reduce protocol is written without the detour through
  `object.__reduce_ex__`, `copyreg` and a reduce value (see `inspect_type` for when that is allowed);
- big payloads go to `file.write` by reference.

User code runs in many places (reducers, `persistent_id`, `file.write`, finalizers). The rules that keep this safe:
a frame owns what it works on; no slot number, no item pointer without a reference and no type information that was not
checked again is used after a call that may have run user code; a pickler that is already dumping refuses to start again.
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo, PyBuffer_IsContiguous
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject, PyTypeObject
from libc.stdint cimport uint64_t
from libc.string cimport memcpy, memmove, memset

from buffer cimport (
    BUFFER_SLACK, FRAME_HEADER_SIZE, FRAME_SIZE_MIN, FRAME_SIZE_TARGET, Buffer, put_bytes, put_u16, put_u32, put_u64,
)
from memo cimport (
    AddressLog, Memo, log_add, log_free, log_has, memo_add, memo_find, memo_free_arrays, memo_full, memo_grow, memo_init,
    memo_label, memo_truncate, memo_zero,
)
from opcodes cimport *
from pages cimport populate_pages, prefer_huge_pages, whole_huge_pages

import _compat_pickle
import collections
import copyreg
import pickle
import sys
from _codecs import encode as codecs_encode
from functools import partial

cdef extern from *:
    """
    /* What differs between CPython 3.10 and 3.13. */
    #if PY_VERSION_HEX < 0x030D0000
    #define fastcap_lookup_attr(obj, name, result) _PyObject_LookupAttr(obj, name, result)
    #define fastcap_long_bytes(v, p, n) _PyLong_AsByteArray((PyLongObject *)(v), p, n, 1, 1)
    #else
    #define fastcap_lookup_attr(obj, name, result) PyObject_GetOptionalAttr(obj, name, result)
    #define fastcap_long_bytes(v, p, n) _PyLong_AsByteArray((PyLongObject *)(v), p, n, 1, 1, 1)
    /* Moved to an internal header in 3.13, still exported. Borrowed references, set order. */
    PyAPI_FUNC(int) _PySet_NextEntry(PyObject *, Py_ssize_t *, PyObject **, Py_hash_t *);
    #endif

    /* The version of everything a type's attribute lookups depend on, unique per process; 0: not known.
       PyType_Modified (Objects/typeobject.c) takes it away from the type and all its subclasses. */
    static inline unsigned int fastcap_type_version(PyTypeObject *type) {
    #if PY_VERSION_HEX < 0x030D0000
        return (type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG) ? type->tp_version_tag : 0;
    #else
        return type->tp_version_tag;
    #endif
    }

    /* The value of an int that fits a C int32, else false. */
    static inline int fastcap_small_int(PyObject *obj, long *value) {
    #if PY_VERSION_HEX >= 0x030C0000
        if (PyUnstable_Long_IsCompact((PyLongObject *)obj)) {
            *value = (long)PyUnstable_Long_CompactValue((PyLongObject *)obj);
            return 1;
        }
    #else
        Py_ssize_t size = Py_SIZE(obj);
        if (size == 0) { *value = 0; return 1; }
        if (size == 1) { *value = (long)((PyLongObject *)obj)->ob_digit[0]; return 1; }
        if (size == -1) { *value = -(long)((PyLongObject *)obj)->ob_digit[0]; return 1; }
    #endif
        int overflow;
        long v = PyLong_AsLongAndOverflow(obj, &overflow);
        if (overflow || v > 0x7fffffffL || v < -0x7fffffffL - 1) return 0;
        *value = v;
        return 1;
    }

    /* Strings made by the pre-PEP 393 API (3.10, 3.11) may lack their canonical form. */
    #if PY_VERSION_HEX < 0x030C0000
    #define fastcap_unicode_ready(s) PyUnicode_READY(s)
    #else
    #define fastcap_unicode_ready(s) 0
    #endif

    static inline int fastcap_set_has_weakrefs(PyObject *set) { return ((PySetObject *)set)->weakreflist != NULL; }
    static inline PyObject **fastcap_list_items(PyObject *list) { return ((PyListObject *)list)->ob_item; }
    static inline PyObject **fastcap_tuple_items(PyObject *tuple) { return ((PyTupleObject *)tuple)->ob_item; }

    static inline void fastcap_pack_double(PyObject *obj, char *out) {
        double x = PyFloat_AS_DOUBLE(obj);
        unsigned long long bits;
        unsigned char big[8];
        int i;
        memcpy(&bits, &x, 8);   /* IEEE 754 assumed, as CPython 3.11+ does */
        for (i = 0; i < 8; i++) big[i] = (unsigned char)(bits >> (56 - 8 * i));     /* compilers make it one swap */
        memcpy(out, big, 8);
    }
    """
    int fastcap_lookup_attr(PyObject*, PyObject*, PyObject**) except -1
    int fastcap_long_bytes(PyObject*, unsigned char*, size_t) except -1
    unsigned int fastcap_type_version(PyTypeObject*) noexcept
    bint fastcap_small_int(PyObject*, long*) noexcept
    int fastcap_unicode_ready(PyObject*) except -1
    void fastcap_pack_double(PyObject*, char*) noexcept
    bint fastcap_set_has_weakrefs(PyObject*) noexcept
    PyObject** fastcap_list_items(PyObject*) noexcept
    PyObject** fastcap_tuple_items(PyObject*) noexcept
    bint _PySet_NextEntry(PyObject*, Py_ssize_t*, PyObject**, Py_hash_t*) noexcept

cdef extern from "Python.h":
    int PY_VERSION_HEX
    long PyLong_AsLong(PyObject*) except? -1
    Py_ssize_t PyLong_AsSsize_t(PyObject*) except? -1
    PyTypeObject PyUnicode_Type, PyLong_Type, PyBool_Type, PyFloat_Type, PyBytes_Type, PyByteArray_Type, PyDict_Type
    PyTypeObject PyList_Type, PyTuple_Type, PySet_Type, PyFrozenSet_Type, PyType_Type, PyFunction_Type
    PyTypeObject PyPickleBuffer_Type
    PyObject* Py_None
    PyObject* Py_True
    PyObject* Py_False
    PyObject* Py_NotImplemented
    void incref "Py_INCREF" (PyObject*) noexcept
    void decref "Py_DECREF" (PyObject*) noexcept
    void xdecref "Py_XDECREF" (PyObject*) noexcept
    Py_ssize_t refcount "Py_REFCNT" (PyObject*) noexcept
    PyTypeObject* type_of "Py_TYPE" (PyObject*) noexcept
    bint PyType_IsSubtype(PyTypeObject*, PyTypeObject*) noexcept
    bint PyUnicode_Check(PyObject*) noexcept
    bint PyUnicode_IS_ASCII(PyObject*) noexcept
    bint PyUnicode_IS_COMPACT(PyObject*) noexcept
    bint PyUnicode_IS_COMPACT_ASCII(PyObject*) noexcept
    int PyUnicode_KIND(PyObject*) noexcept
    void* PyUnicode_DATA(PyObject*) noexcept
    Py_ssize_t PyUnicode_GET_LENGTH(PyObject*) noexcept
    unsigned int PyUnicode_READ(int, void*, Py_ssize_t) noexcept
    bint PyTuple_Check(PyObject*) noexcept
    bint PyType_Check(PyObject*) noexcept
    bint PyDict_Check(PyObject*) noexcept
    bint PyList_Check(PyObject*) noexcept
    bint PyDict_CheckExact(PyObject*) noexcept
    bint PyList_CheckExact(PyObject*) noexcept
    bint PyCallable_Check(PyObject*) noexcept
    bint PyIter_Check(PyObject*) noexcept
    Py_ssize_t tuple_size "PyTuple_GET_SIZE" (PyObject*) noexcept
    PyObject* tuple_item "PyTuple_GET_ITEM" (PyObject*, Py_ssize_t) noexcept
    Py_ssize_t list_size "PyList_GET_SIZE" (PyObject*) noexcept
    PyObject* list_item "PyList_GET_ITEM" (PyObject*, Py_ssize_t) noexcept
    Py_ssize_t dict_size "PyDict_Size" (PyObject*) noexcept
    Py_ssize_t set_size "PySet_GET_SIZE" (PyObject*) noexcept
    bint PyDict_Next(PyObject*, Py_ssize_t*, PyObject**, PyObject**) noexcept
    PyObject* PyDict_GetItemWithError(PyObject*, PyObject*) except? NULL
    PyObject* _PyDict_GetItem_KnownHash(PyObject*, PyObject*, Py_hash_t) except? NULL
    PyObject* PyIter_Next(PyObject*) except? NULL
    PyObject* PyObject_GetIter(PyObject*) except NULL
    PyObject* PyObject_CallOneArg(PyObject*, PyObject*) except NULL
    PyObject* PyObject_CallNoArgs(PyObject*) except NULL
    PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...) except NULL
    PyObject* PyObject_GetItem(PyObject*, PyObject*)
    PyObject* PyObject_GenericGetDict(PyObject*, void*) except NULL
    PyObject* PyTuple_GetSlice(PyObject*, Py_ssize_t, Py_ssize_t) except NULL
    PyObject* PyObject_Repr(PyObject*) except NULL
    PyObject* PyUnicode_AsEncodedString(PyObject*, const char*, const char*) except NULL
    const char* PyUnicode_AsUTF8AndSize(PyObject*, Py_ssize_t*) except NULL
    PyObject* PyImport_Import(PyObject*)
    PyObject* PyImport_GetModule(PyObject*) except? NULL
    PyObject* PyErr_Occurred() noexcept
    void PyErr_Clear() noexcept
    bint PyErr_ExceptionMatches(PyObject*) noexcept
    PyObject* PyExc_KeyError
    PyObject* PyExc_AttributeError
    int _PyBytes_Resize(PyObject**, Py_ssize_t) except -1
    char* bytes_data "PyBytes_AS_STRING" (PyObject*) noexcept
    Py_ssize_t bytes_size "PyBytes_GET_SIZE" (PyObject*) noexcept
    char* bytearray_data "PyByteArray_AS_STRING" (PyObject*) noexcept
    Py_ssize_t bytearray_size "PyByteArray_GET_SIZE" (PyObject*) noexcept
    PyObject* new_bytes "PyBytes_FromStringAndSize" (const char*, Py_ssize_t) except NULL
    const Py_buffer* PyPickleBuffer_GetBuffer(PyObject*) except NULL
    size_t _PyLong_NumBits(PyObject*) except? <size_t>-1
    int _PyLong_Sign(PyObject*) noexcept
    char* PyOS_double_to_string(double, char, int, int, int*) except NULL
    double PyFloat_AS_DOUBLE(PyObject*) noexcept
    int Py_DTSF_ADD_DOT_0
    PyObject* _PyType_Lookup(PyTypeObject*, PyObject*) noexcept
    ctypedef PyObject* (*getattrofunc)(PyObject*, PyObject*)
    PyObject* PyObject_GenericGetAttr(PyObject*, PyObject*)
    bint PyMethod_Check(PyObject*) noexcept
    PyObject* PyMethod_GET_SELF(PyObject*) noexcept
    PyObject* PyMethod_GET_FUNCTION(PyObject*) noexcept

cdef extern from *:
    # Slots of a type that Cython's own declaration of PyTypeObject lacks.
    """
    /* Whether a callable's __name__ may be "__newobj__" or "__newobj_ex__", without making a string of it and without
       running code. A class name is tp_name, or what comes after its last dot (type_name in Objects/typeobject.c); the
       __name__ of these three is a data descriptor, which nothing of their own hides. */
    static inline int fastcap_may_be_newobj(PyObject *f) {
        if (Py_TYPE(f) == &PyType_Type) return strstr(((PyTypeObject *)f)->tp_name, "__newobj") != NULL;
        if (PyCFunction_CheckExact(f)) return strstr(((PyCFunctionObject *)f)->m_ml->ml_name, "__newobj") != NULL;
        if (Py_TYPE(f) == &PyFunction_Type) {
            PyObject *name = ((PyFunctionObject *)f)->func_name;
            /* Of an empty name this reads the 0 at its end; one that is not compact may not be ready. */
            return !PyUnicode_IS_COMPACT(name) || PyUnicode_READ_CHAR(name, 0) == '_';
        }
        return 1;
    }
    static inline int fastcap_is_method_descriptor(PyObject *d) { return Py_TYPE(d) == &PyMethodDescr_Type; }
    static inline int fastcap_generic_getattr(PyTypeObject *t) { return t->tp_getattro == PyObject_GenericGetAttr; }
    static inline int fastcap_has_new(PyTypeObject *t) { return t->tp_new != NULL; }
    static inline Py_ssize_t fastcap_item_size(PyTypeObject *t) { return t->tp_itemsize; }
    static inline int fastcap_is_heap_type(PyTypeObject *t) { return PyType_HasFeature(t, Py_TPFLAGS_HEAPTYPE); }
    static inline Py_ssize_t fastcap_basic_size(PyTypeObject *t) { return t->tp_basicsize; }
    static inline int fastcap_has_weakrefs(PyTypeObject *t) { return t->tp_weaklistoffset != 0; }
    #if PY_VERSION_HEX >= 0x030C0000
    #define FASTCAP_INLINE_DICT(t) ((t)->tp_flags & Py_TPFLAGS_MANAGED_DICT)
    #define FASTCAP_INLINE_WEAKREFS(t) ((t)->tp_flags & Py_TPFLAGS_MANAGED_WEAKREF)
    #elif PY_VERSION_HEX >= 0x030B0000
    #define FASTCAP_INLINE_DICT(t) ((t)->tp_flags & Py_TPFLAGS_MANAGED_DICT)
    #define FASTCAP_INLINE_WEAKREFS(t) 0
    #else
    #define FASTCAP_INLINE_DICT(t) 0
    #define FASTCAP_INLINE_WEAKREFS(t) 0
    #endif
    static inline int fastcap_has_dict(PyTypeObject *t) { return t->tp_dictoffset != 0 || FASTCAP_INLINE_DICT(t); }
    /* The size object_getstate_default (Objects/typeobject.c) compares tp_basicsize with, without the slots. */
    static inline Py_ssize_t fastcap_plain_size(PyTypeObject *t) {
        Py_ssize_t size = PyBaseObject_Type.tp_basicsize;
        if (t->tp_dictoffset != 0 && !FASTCAP_INLINE_DICT(t)) size += sizeof(PyObject *);
        if (t->tp_weaklistoffset > 0 && !FASTCAP_INLINE_WEAKREFS(t)) size += sizeof(PyObject *);
        return size;
    }
    """
    bint fastcap_may_be_newobj(PyObject*) noexcept
    bint fastcap_is_method_descriptor(PyObject*) noexcept
    bint fastcap_generic_getattr(PyTypeObject*) noexcept
    bint fastcap_has_new(PyTypeObject*) noexcept
    Py_ssize_t fastcap_item_size(PyTypeObject*) noexcept
    bint fastcap_is_heap_type(PyTypeObject*) noexcept
    Py_ssize_t fastcap_basic_size(PyTypeObject*) noexcept
    bint fastcap_has_dict(PyTypeObject*) noexcept
    Py_ssize_t fastcap_plain_size(PyTypeObject*) noexcept


# The very objects that CPython's C pickler holds on to as well (PickleState in Modules/_pickle.c).
cdef object PicklingError = pickle.PicklingError
cdef dict copyreg_table = copyreg.dispatch_table
cdef dict extension_registry = copyreg._extension_registry
cdef dict name_mapping = _compat_pickle.REVERSE_NAME_MAPPING
cdef dict import_mapping = _compat_pickle.REVERSE_IMPORT_MAPPING
cdef object ChainMap = collections.ChainMap
cdef object find_slotnames = copyreg._slotnames
cdef object builtin_getattr = getattr
cdef object NoneType = type(None)
cdef object EllipsisType = type(...)
cdef object NotImplementedType = type(NotImplemented)
cdef tuple EMPTY = ()
cdef int DEFAULT_PROTOCOL = pickle.DEFAULT_PROTOCOL
cdef int HIGHEST_PROTOCOL = 5
cdef bint SINCE_311 = PY_VERSION_HEX >= 0x030B0000
cdef bint SINCE_313 = PY_VERSION_HEX >= 0x030D0000

# What object's own reduce protocol is made of; `inspect_type` compares a class's attributes with these.
cdef object object_reduce_ex = object.__dict__["__reduce_ex__"]
cdef object object_reduce = object.__dict__["__reduce__"]
cdef object object_getstate = object.__dict__.get("__getstate__")   # None before 3.11
cdef object object_class = object.__dict__["__class__"]

cdef str S_reduce_ex = sys.intern("__reduce_ex__")
cdef str S_reduce = sys.intern("__reduce__")
cdef str S_getstate = sys.intern("__getstate__")
cdef str S_getnewargs = sys.intern("__getnewargs__")
cdef str S_getnewargs_ex = sys.intern("__getnewargs_ex__")
cdef str S_class = sys.intern("__class__")
cdef str S_name = sys.intern("__name__")
cdef str S_qualname = sys.intern("__qualname__")
cdef str S_module = sys.intern("__module__")
cdef str S_new = sys.intern("__new__")
cdef str S_newobj = sys.intern("__newobj__")
cdef str S_newobj_ex = sys.intern("__newobj_ex__")
cdef str S_slotnames = sys.intern("__slotnames__")
cdef str S_write = sys.intern("write")
cdef str S_persistent_id = sys.intern("persistent_id")
cdef str S_reducer_override = sys.intern("reducer_override")
cdef str S_native_reduce = sys.intern("_native_reduce")
cdef str S_dispatch_table = sys.intern("dispatch_table")
cdef str S_items = sys.intern("items")
cdef str S_maps = sys.intern("maps")
cdef Py_hash_t hash_reduce_ex = hash(S_reduce_ex)
cdef Py_hash_t hash_getstate = hash(S_getstate)

cdef enum:
    BATCH_SIZE = 1000           # items between MARK and APPENDS, SETITEMS, ADDITEMS (BATCHSIZE in _pickle.c)
    FIRST_BUFFER = 4096         # bytes
    FRAME_BUFFER = 73728        # bytes: a frame and what may follow it
    MOVED_BLOCK = 33554432      # bytes
    BYTES_OVERHEAD = 64         # bytes that a bytes object and malloc add to its payload, or a few more
    SHORT_RUN = 64              # items that are noted one by one in compact mode
    CHUNK_FRAMES = 256          # frames in one chunk of the work stack
    TYPE_SLOTS = 64             # entries of a pickler's type table; a power of two
    FAST_NESTING_LIMIT = 50     # FAST_NESTING_LIMIT of _pickle.c
    FAST_CYCLE_DEPTH = 5000     # depth from which fast mode looks for cycles through anything but lists and dicts
    MAX_REDUCE_DEPTH = 250000   # nested reduce values and persistent ids; an endless supply of new ones stops here

cdef enum Kind:
    K_LIST          # obj: list
    K_DICT          # obj: dict; a, b: value and key being saved
    K_TUPLE         # obj: tuple
    K_SET           # obj: set
    K_FROZENSET     # obj: frozenset
    K_BATCH_LIST    # a: iterator; b: the item after the one being saved
    K_BATCH_DICT    # a: iterator; b: the pair after the one being saved; obj: the pair being saved
    K_REDUCE        # obj: what the reduce value stands for, or NULL; a: reduce value; b: arguments of NEWOBJ or partial
    K_GLOBAL        # obj: class or function; a: module name; b: name
    K_NESTED        # obj: class or function; a: list of (module name, name) and the names below it
    K_INSTANCE      # obj: instance; a: its state or NULL
    K_BUILD         # obj: state being saved
    K_PERSID        # obj: persistent id

cdef struct Frame:
    int kind            # Kind
    int step            # where to go on; each kind has its own steps
    int batch           # items since the last MARK
    int flags           # F_*
    Py_ssize_t pos      # next position in obj
    Py_ssize_t size     # size of a dict or set when its saving began
    PyObject* obj       # owned, may be NULL
    PyObject* a         # owned, may be NULL
    PyObject* b         # owned, may be NULL

cdef enum:
    F_SINGLE = 1        # one item without MARK
    F_BUILD = 2         # write BUILD after the end
    F_GUARDED = 4       # obj's address is in `fast_memo`
    F_ALONE = 8         # compact mode: nothing but its owner refers to obj, which stays out of the memo
    F_TEMPORARY = 16    # compact mode: what obj holds alone dies with it

cdef enum:
    # How many references to an object the pickler holds beside its owner when it calls save; see `alone`.
    OWN_UNKNOWN = -1000     # the object may come up again whatever its reference count says
    OWN_TEMPORARY = 1 << 20 # a bit: the owner was made by a reducer and dies before the dump ends

cdef enum:
    # What `alone` answers.
    ALONE = 1
    ALONE_TEMPORARY = 2     # and its owner dies before the dump ends: it cannot be found again

cdef struct Run:
    # Compact mode: all strings and bytes objects among some items of a container that are not in the memo were left out.
    PyObject* container     # owned list or dict
    Py_ssize_t start        # position of the first item; in a dict that of PyDict_Next
    Py_ssize_t end          # one past the last

cdef struct TypeInfo:
    PyTypeObject* type          # borrowed, compared only; a dead type's version never comes back
    unsigned int version        # of type, when it was inspected; 0: the entry is free
    unsigned int meta_version   # of type's metaclass; not looked at where that is `type`
    int plain                   # 1: instances can be written by save_instance; 0: not
    int hooked                  # 1: the native reducer may want instances
    uint64_t epoch              # when the dispatch table was last asked and had nothing
    PyObject* slotnames         # owned list of slots to save, or NULL


@cython.final
@cython.internal
cdef class TextView:
    """Lends the UTF-8 bytes of an ASCII string as a buffer, so that they need not be copied to be written."""
    cdef object text

    def __getbuffer__(self, Py_buffer* view, int flags):
        cdef PyObject* text = <PyObject*>self.text
        if self.text is None:
            raise BufferError("no text")
        PyBuffer_FillInfo(view, self, PyUnicode_DATA(text), PyUnicode_GET_LENGTH(text), 1, flags)

    def __releasebuffer__(self, Py_buffer* view):
        pass


@cython.final
cdef class PicklerMemoProxy:
    """What `Pickler.memo` gives: the memo as a black box that can be cleared, copied and assigned."""
    cdef Pickler pickler        # None only for an instance made behind our back with object.__new__

    def __init__(self):
        raise TypeError("cannot create 'PicklerMemoProxy' instances")

    def clear(self):
        """Remove all items from the memo."""
        if self.pickler is not None:
            clear_memo(self.pickler)

    def copy(self):
        """Return {id(object): (memo index, object)}."""
        cdef Py_ssize_t position
        result = {}
        if self.pickler is not None:
            for position, obj in enumerate(memo_list(self.pickler)):
                result[<size_t><PyObject*>obj] = (memo_label(&self.pickler.memo_table, position), obj)
        return result

    def __reduce__(self):
        return dict, (self.copy(),)

    __hash__ = None


cdef class Pickler:
    """Pickler(file, protocol=None, fix_imports=True, buffer_callback=None, *, compact=False)

    Writes pickles to *file*, whose `write` gets bytes objects or memoryviews; drop-in for `pickle.Pickler`, byte for byte.
    Payloads of 64 KiB and more are handed to `write` without a copy. Subclasses may define `persistent_id`,
    `reducer_override` and `dispatch_table` as with `pickle.Pickler`.

    With *compact*, objects that nothing else can reach are left out of the memo, and torch tensors are written as plain
    buffers: loading gives an equal graph with the same sharing from a smaller stream. Nothing is written before the dump
    has succeeded. Should a reducer bring up an object that was left out, the dump starts again without leaving anything
    out, so reducers may be called twice (`buffer_callback` is not). Sharing is kept within one dump; a second dump with
    the same memo finds only what is memoized. Objects that user code moves about during the dump may come out as copies.

    `_native_reduce`, set on the instance or as a class attribute, is a callable f(pickler, obj) called where
    `reducer_override` would be, for functions, classes and objects whose `__class__` is not their type's. A
    `reducer_override` defined in a class nearer to the instance's class takes precedence.
    """
    cdef Buffer out
    cdef Memo memo_table
    cdef Frame** chunks             # owned array of owned chunks of CHUNK_FRAMES frames; frames never move
    cdef Py_ssize_t chunk_count     # chunks in use or kept for use
    cdef Frame* top                 # the uppermost frame, NULL when the stack is empty
    cdef Py_ssize_t depth           # frames on the stack
    cdef Py_ssize_t reduce_depth    # K_REDUCE and K_PERSID frames among them
    cdef TypeInfo types[TYPE_SLOTS]
    cdef uint64_t epoch             # grows whenever user code may have run
    cdef int proto
    cdef int bin_                   # the protocol is 1 or higher
    cdef int fast_                  # do not memoize
    cdef bint fix_imports
    cdef bint ready                 # __init__ has run
    cdef bint busy                  # a dump is under way
    cdef bint in_memory             # no file: the result stays in `out`
    cdef bint framing
    cdef bint compact
    cdef bint thrifty               # compact, and no object that was left out has been found again in this dump
    cdef bint opaque                # user code has run in this dump that may have got hold of any object
    cdef AddressLog left_out        # compact mode: objects that are not in the memo
    cdef Run* runs                  # owned array: more of them, not yet in left_out
    cdef Py_ssize_t run_count       # entries of runs
    cdef Py_ssize_t run_room        # entries it has room for
    cdef Py_ssize_t runs_entered    # entries that are in left_out by now
    cdef list delayed               # compact mode: what is to be written to the file when the dump has succeeded
    cdef list answers               # compact mode: what buffer_callback has answered, in order
    cdef Py_ssize_t answer          # how many of them have been used again
    cdef object rebuild_tensor      # compact mode: torch._utils._rebuild_tensor_v2 where torch is loaded, else None
    cdef dict storages              # address of a torch storage's data -> StorageParts, this attempt
    cdef dict extents               # address of a torch storage's data -> (first byte, end) that tensors reach
    cdef bint extents_grew          # a tensor reached beyond what had been written of its storage
    cdef bint has_pers
    cdef bint has_dispatch
    cdef bint pers_bound            # pers_func is a function to be called with the pickler as its first argument
    cdef bint has_override
    cdef bint has_native
    cdef object write
    cdef object buffer_callback     # None: in-band
    cdef object pers_func
    cdef object pers_attribute      # 3.13+: what was assigned to the instance's persistent_id, or MISSING
    cdef object dispatch
    cdef object override            # bound reducer_override, only while dumping: it refers back to the pickler
    cdef object native              # the native reducer in force, only while dumping
    cdef object native_slot         # what was assigned to the instance's _native_reduce
    cdef object on_unpicklable      # None, or called with (object, exception) in the place of raising
    cdef bint fatal                 # the dump has to end: the file failed, or nesting has no end
    cdef set fast_memo              # addresses of the objects on the stack, fast mode only
    cdef dict replacements          # None, or address of an object -> reduce value to write in its place
    cdef dict recorded              # None, or address of an object -> (object, reduce value), to be used again
    cdef bint careful               # there are persistent ids or replacements: each object is looked up first

    def __cinit__(self, *args, **kwargs):
        memo_zero(&self.memo_table)
        memset(&self.out, 0, sizeof(Buffer))
        memset(&self.left_out, 0, sizeof(AddressLog))
        self.out.frame = -1
        self.epoch = 1
        self.pers_attribute = MISSING

    def __init__(self, file, protocol=None, fix_imports=True, buffer_callback=None, *, compact=False):
        if self.busy:
            raise RuntimeError("Pickler.__init__() called while the pickler is dumping")
        if self.ready:
            reset(self)
        set_protocol(self, protocol, fix_imports)
        write = lookup(file, S_write)
        if write is MISSING:
            raise TypeError("file must have a 'write' attribute")
        self.write = write
        set_buffer_callback(self, buffer_callback)
        self.compact = compact
        prepare(self)

    def __dealloc__(self):
        cdef Py_ssize_t i
        while self.depth:
            pop(self)
        for i in range(self.chunk_count):
            PyMem_Free(self.chunks[i])
        PyMem_Free(self.chunks)
        for i in range(TYPE_SLOTS):
            xdecref(self.types[i].slotnames)
        if self.memo_table.objects != NULL:
            memo_free_arrays(&self.memo_table)
        forget_left_out(self)
        xdecref(self.out.owner)

    def dump(self, obj, /):
        """Write a pickled representation of obj to the open file."""
        if not self.ready:
            raise PicklingError(f"Pickler.__init__() was not called by {type_name(self)}.__init__()")
        start_dump(self)
        try:
            dump_object(self, <PyObject*>obj)
            flush(self)
            write_delayed(self)
        except BaseException as error:
            note_path(self, error)
            raise
        finally:
            end_dump(self)

    def clear_memo(self):
        """Clears the pickler's "memo".

        The memo is the data structure that remembers which objects the pickler has already seen, so that shared or
        recursive objects are pickled by reference and not by value.
        """
        clear_memo(self)

    def _memo_objects(self):
        """The memoized objects as a list in the order of their memo indices."""
        return memo_list(self)

    def __sizeof__(self):
        cdef size_t size = fastcap_basic_size(type_of(<PyObject*>self))
        size += (self.memo_table.mask + 1) * sizeof(uint64_t) + self.memo_table.room * sizeof(PyObject*)
        size += self.chunk_count * CHUNK_FRAMES * sizeof(Frame)
        if self.out.owner != NULL:
            size += sys.getsizeof(<object>self.out.owner)
        return size

    @property
    def bin(self):
        return self.bin_

    @bin.setter
    def bin(self, int value):
        self.bin_ = value

    @property
    def fast(self):
        return self.fast_

    @fast.setter
    def fast(self, int value):
        self.fast_ = value

    @property
    def memo(self):
        proxy = <PicklerMemoProxy>PicklerMemoProxy.__new__(PicklerMemoProxy)
        (<PicklerMemoProxy>proxy).pickler = self
        return proxy

    @memo.setter
    def memo(self, value):
        set_memo(self, value)

    @memo.deleter
    def memo(self):
        raise TypeError("attribute deletion is not supported")

    @property
    def dispatch_table(self):
        if not self.has_dispatch:
            raise AttributeError(f"'{type_name(self)}' object has no attribute 'dispatch_table'")
        return self.dispatch

    @dispatch_table.setter
    def dispatch_table(self, value):
        self.dispatch = value
        self.has_dispatch = True
        self.epoch += 1

    @dispatch_table.deleter
    def dispatch_table(self):
        if not self.has_dispatch:
            raise AttributeError("dispatch_table")
        self.dispatch = None
        self.has_dispatch = False
        self.epoch += 1

    @property
    def persistent_id(self):
        # Up to 3.12 a property of the C pickler that is unset by default; since 3.13 a method that returns None.
        if SINCE_313:
            return self._no_persistent_id if self.pers_attribute is MISSING else self.pers_attribute
        if not self.has_pers:
            raise AttributeError("persistent_id")
        if self.pers_bound:
            return self.pers_func.__get__(self)
        return self.pers_func

    @persistent_id.setter
    def persistent_id(self, value):
        if SINCE_313:
            if type(self) is Pickler:
                raise AttributeError(f"'{type_name(self)}' object attribute 'persistent_id' is read-only")
            self.pers_attribute = value
            return
        if not callable(value):
            raise TypeError("persistent_id must be a callable taking one argument")
        self.pers_func = value
        self.pers_bound = False
        self.has_pers = True
        self.careful = True

    @persistent_id.deleter
    def persistent_id(self):
        if not SINCE_313:
            raise TypeError("attribute deletion is not supported")
        if self.pers_attribute is MISSING:
            raise AttributeError("persistent_id")
        self.pers_attribute = MISSING

    def _no_persistent_id(self, obj, /):
        """The persistent id of an object that has none."""
        return None

    @property
    def _native_reduce(self):
        return self.native_slot

    @_native_reduce.setter
    def _native_reduce(self, value):
        self.native_slot = value

    @property
    def _on_unpicklable(self):
        """None, or a callable f(object, exception) that is told of objects that fail, and returns a number for each.

        In the place of such an object goes a call of `fastcap.findings.Unpicklable` with the number, and the dump goes
        on: its result is for those who analyse it. An iterator of items that fails midway ends with such a call.
        """
        return self.on_unpicklable

    @_on_unpicklable.setter
    def _on_unpicklable(self, value):
        self.on_unpicklable = value

    @property
    def _replacements(self):
        """None, or a dict from the ids of objects to the reduce values that are written in their place.

        Objects of every type are looked up, but for None, numbers, strings and bytes objects of at most 255 bytes, and
        the state of an instance that has no reducer of its own. Whoever sets it keeps the objects alive.
        """
        return self.replacements

    @_replacements.setter
    def _replacements(self, value):
        self.replacements = value

    @property
    def _recorded(self):
        """None, or a dict that remembers the reduce value of each object, by the object's id.

        Objects that are in it are not asked again. So two dumps that share the dict meet the same temporary objects.
        """
        return self.recorded

    @_recorded.setter
    def _recorded(self, value):
        self.recorded = value


# The base class's own descriptors, to tell whether a subclass has others.
cdef object base_persistent_id = Pickler.__dict__["persistent_id"]
cdef object base_native_reduce = Pickler.__dict__["_native_reduce"]


def dumps(obj, protocol=None, *, fix_imports=True, buffer_callback=None, compact=False, dispatch_table=None,
          native_reduce=None):
    """Return the pickle of *obj* as bytes. *dispatch_table* and *native_reduce*: as the attributes of a Pickler."""
    cdef Pickler self = <Pickler>Pickler.__new__(Pickler)
    set_protocol(self, protocol, fix_imports)
    set_buffer_callback(self, buffer_callback)
    self.compact = compact
    self.in_memory = True
    self.native_slot = native_reduce
    if dispatch_table is not None:
        self.dispatch = dispatch_table
        self.has_dispatch = True
    prepare(self)
    return dump_to_bytes(self, obj)


# ---- starting and ending ----------------------------------------------------------------------------------------------

cdef object MISSING = object()


cdef object lookup(object obj, str name):
    """obj.name, or MISSING where there is no such attribute."""
    cdef PyObject* result = NULL
    fastcap_lookup_attr(<PyObject*>obj, <PyObject*>name, &result)
    if result == NULL:
        return MISSING
    value = <object>result
    decref(result)
    return value


cdef str type_name(object obj):
    """The tp_name of an object's type, cut at 200 bytes as in CPython's messages."""
    cdef const char* name = type_of(<PyObject*>obj).tp_name
    return name[:200].decode("utf-8", "replace") if len(name) > 200 else name.decode("utf-8", "replace")


cdef int set_protocol(Pickler self, object protocol, bint fix_imports) except -1:
    cdef long proto = DEFAULT_PROTOCOL
    if protocol is not None:
        proto = PyLong_AsLong(<PyObject*>protocol)
        if proto < 0:
            proto = HIGHEST_PROTOCOL
        elif proto > HIGHEST_PROTOCOL:
            raise ValueError(f"pickle protocol must be <= {HIGHEST_PROTOCOL}")
    self.proto = <int>proto
    self.bin_ = proto > 0
    self.fix_imports = fix_imports and proto < 3
    return 0


cdef int set_buffer_callback(Pickler self, object buffer_callback) except -1:
    if buffer_callback is not None and self.proto < 5:
        raise ValueError("buffer_callback needs protocol >= 5")
    self.buffer_callback = buffer_callback
    return 0


cdef int reset(Pickler self) except -1:
    """Forget everything an earlier __init__ has set."""
    self.ready = False
    self.write = None
    self.pers_func = None
    self.has_pers = False
    self.dispatch = None
    self.has_dispatch = False
    self.buffer_callback = None
    clear_memo(self)
    return 0


cdef int prepare(Pickler self) except -1:
    """The end of __init__: memo, buffer, and the hooks that CPython looks up there."""
    if self.memo_table.slots == NULL and not memo_init(&self.memo_table):
        raise MemoryError
    self.fast_ = 0
    self.fast_memo = None
    if type(self) is not Pickler:
        if not SINCE_313:
            look_up_persistent_id(self)
        if not self.has_dispatch:
            table = lookup(self, S_dispatch_table)
            if table is not MISSING:
                self.dispatch = table
                self.has_dispatch = True
    self.ready = True
    return 0


cdef int look_up_persistent_id(Pickler self) except -1:
    """Find the hook as init_method_ref (to 3.12) or dump (3.13) of Modules/_pickle.c do."""
    cdef PyObject* found = _PyType_Lookup(type_of(<PyObject*>self), <PyObject*>S_persistent_id)
    if found == <PyObject*>base_persistent_id:
        function = self.pers_attribute
    else:
        function = lookup(self, S_persistent_id)
    if function is MISSING:
        return 0
    self.has_pers = True
    # A bound method of ours would make a reference cycle.
    if PyMethod_Check(<PyObject*>function) and PyMethod_GET_SELF(<PyObject*>function) == <PyObject*>self:
        self.pers_func = <object>PyMethod_GET_FUNCTION(<PyObject*>function)
        self.pers_bound = True
    else:
        self.pers_func = function
        self.pers_bound = False
    return 0


cdef int look_up_reducers(Pickler self) except -1:
    """Set `override` or `native` for this dump."""
    cdef PyObject* raw
    native = self.native_slot
    self.has_override = False
    if type(self) is not Pickler:
        raw = _PyType_Lookup(type_of(<PyObject*>self), <PyObject*>S_native_reduce)
        override = lookup(self, S_reducer_override)
        if raw != NULL and raw != <PyObject*>base_native_reduce:
            if native is None:
                native = <object>raw
            if override is not MISSING and not overrides_native(self):
                override = MISSING
        if override is not MISSING:
            self.override = override
            self.has_override = True
            native = None
    self.native = native
    self.has_native = native is not None
    return 0


cdef bint overrides_native(Pickler self) except -1:
    """Whether reducer_override is defined nearer to the pickler than the class attribute _native_reduce."""
    if S_reducer_override in self.__dict__:
        return True
    for cls in type(self).__mro__:
        namespace = cls.__dict__
        if S_native_reduce in namespace:
            return False
        if S_reducer_override in namespace:
            return True
    return True


cdef int start_dump(Pickler self) except -1:
    if self.busy:
        raise RuntimeError("the pickler is already dumping (called again from a callback or from another thread)")
    self.busy = True
    self.fatal = False
    return 0


cdef int end_dump(Pickler self) except -1:
    """Leave the pickler ready for the next dump, whatever happened in this one."""
    while self.depth:
        pop(self)
    self.framing = False
    self.out.next = self.out.start
    self.out.frame = -1
    self.override = None
    self.has_override = False
    self.native = None
    self.has_native = False
    self.fast_memo = None
    self.delayed = None
    self.answers = None
    self.rebuild_tensor = None
    self.storages = None
    self.extents = None
    forget_left_out(self)
    if SINCE_313:
        self.pers_func = None
        self.has_pers = False
    self.busy = False
    return 0


cdef bytes dump_to_bytes(Pickler self, object obj):
    start_dump(self)
    try:
        dump_object(self, <PyObject*>obj)
        return take_bytes(self)
    except BaseException as error:
        note_path(self, error)
        raise
    finally:
        end_dump(self)


class FoundAgain(Exception):
    """Compact mode: a reducer has brought up an object that was left out of the memo. Never leaves the pickler."""


cdef int dump_object(Pickler self, PyObject* obj) except -1:
    cdef Py_ssize_t memoized = self.memo_table.count
    cdef uint64_t generation = self.memo_table.generation
    cdef int attempt
    self.opaque = False
    self.thrifty = self.compact and not self.fast_
    self.rebuild_tensor = find_rebuild_tensor() if self.thrifty and self.proto >= 5 else None
    if not self.thrifty:
        return dump_once(self, obj)
    self.answers = None if self.buffer_callback is None else []
    self.extents = {}
    # An attempt that turns out to rest on a wrong guess is thrown away. Reducers are asked again then, but buffers are
    # not handed out twice.
    for attempt in range(4):
        self.answer = 0
        self.delayed = None if self.in_memory else []
        self.storages = {}
        self.extents_grew = False
        try:
            dump_once(self, obj)
            if not self.extents_grew:
                return 0
        except FoundAgain:
            self.thrifty = False        # memoize everything
        while self.depth:
            pop(self)
        forget_left_out(self)
        # Where a callback has cleared or replaced the memo, what it left is all there is to go on from.
        if self.memo_table.generation == generation and not memo_truncate(&self.memo_table, memoized):
            raise MemoryError
        generation = self.memo_table.generation
        if attempt == 2:
            self.rebuild_tensor = None  # tensors that come up in other forms each time are left to torch
    raise PicklingError("compact mode: the reducers give other objects each time they are asked")


cdef int write_delayed(Pickler self) except -1:
    if self.delayed is not None:
        chunks = self.delayed
        self.delayed = None
        for chunk in chunks:
            write_chunk(self, chunk)
    return 0


cdef int dump_once(Pickler self, PyObject* obj) except -1:
    self.epoch += 1
    if self.out.owner == NULL:
        self.out.owner = new_bytes(NULL, FIRST_BUFFER)
        self.out.start = bytes_data(self.out.owner)
        self.out.end = self.out.start + FIRST_BUFFER
    self.out.next = self.out.start
    self.out.frame = -1
    self.framing = False
    if SINCE_313 and type(self) is not Pickler:
        look_up_persistent_id(self)
    look_up_reducers(self)
    self.careful = self.has_pers or self.replacements is not None
    if self.proto >= 2:
        put(self, OP_PROTO)
        put(self, self.proto)
        if self.proto >= 4:
            self.framing = True
    begin_frame(self)
    if save(self, obj, OWN_UNKNOWN):
        run(self)
    reserve(self, 1)
    put(self, OP_STOP)
    commit_frame(self)
    return 0


cdef int run(Pickler self) except -1:
    """Work on the uppermost frame until the stack is empty."""
    cdef Frame* f
    cdef int kind
    cdef int pushed
    while True:
        # Frames that end write a few bytes without an opcode boundary in between.
        if self.out.end - self.out.next < BUFFER_SLACK:
            grow(self, 0)
        f = self.top
        kind = f.kind
        if kind == K_DICT:
            pushed = step_dict(self, f)
        elif kind == K_LIST:
            pushed = step_list(self, f)
        elif kind == K_TUPLE:
            pushed = step_tuple(self, f)
        elif kind == K_REDUCE:
            pushed = step_reduce(self, f)
        elif kind == K_INSTANCE:
            pushed = step_instance(self, f)
        elif kind == K_SET:
            pushed = step_set(self, f)
        elif kind == K_FROZENSET:
            pushed = step_frozenset(self, f)
        elif kind == K_BATCH_LIST or kind == K_BATCH_DICT:
            pushed = step_batch(self, f)
        elif kind == K_GLOBAL:
            pushed = step_global(self, f)
        elif kind == K_NESTED:
            pushed = step_nested(self, f)
        elif kind == K_BUILD:
            put(self, OP_BUILD)
            pushed = 0
        else:
            put(self, OP_BINPERSID)
            pushed = 0
        if not pushed:
            pop(self)
            if self.depth == 0:
                return 0


cdef inline Frame* push(Pickler self, int kind, PyObject* obj) except NULL:
    """A new uppermost frame that works on `obj` (may be NULL), of which it takes a reference of its own."""
    cdef Py_ssize_t chunk = self.depth // CHUNK_FRAMES
    cdef Frame* f
    if chunk == self.chunk_count or self.fast_ or kind >= K_REDUCE:
        return push_checked(self, kind, obj)
    f = &self.chunks[chunk][self.depth % CHUNK_FRAMES]
    memset(f, 0, sizeof(Frame))
    f.kind = kind
    f.obj = obj
    if obj != NULL:
        incref(obj)
    self.depth += 1
    self.top = f
    return f


cdef Frame* push_checked(Pickler self, int kind, PyObject* obj) except NULL:
    """push where there is more to do: room for frames, the depth of reduce values, cycles in fast mode."""
    cdef Py_ssize_t chunk = self.depth // CHUNK_FRAMES
    cdef Frame** chunks
    cdef Frame* f
    if chunk == self.chunk_count:
        chunks = <Frame**>PyMem_Realloc(self.chunks, (chunk + 1) * sizeof(Frame*))
        if chunks == NULL:
            raise MemoryError
        self.chunks = chunks
        chunks[chunk] = <Frame*>PyMem_Malloc(CHUNK_FRAMES * sizeof(Frame))
        if chunks[chunk] == NULL:
            raise MemoryError
        self.chunk_count = chunk + 1
    f = &self.chunks[chunk][self.depth % CHUNK_FRAMES]
    memset(f, 0, sizeof(Frame))
    f.kind = kind
    f.obj = obj
    if kind == K_REDUCE or kind == K_PERSID:
        if self.reduce_depth >= MAX_REDUCE_DEPTH:
            self.fatal = True
            raise RecursionError("maximum recursion depth exceeded while pickling an object")
    if self.fast_ and obj != NULL:
        guard_cycle(self, f)
    if kind == K_REDUCE or kind == K_PERSID:
        self.reduce_depth += 1
    if obj != NULL:
        incref(obj)
    self.depth += 1
    self.top = f
    return f


cdef int pop(Pickler self) except -1:
    """Drop the uppermost frame. Dropping references may run finalizers, so it comes last."""
    cdef Frame* f = self.top
    cdef PyObject* obj = f.obj
    cdef PyObject* a = f.a
    cdef PyObject* b = f.b
    self.depth -= 1
    if self.depth:
        self.top = &self.chunks[(self.depth - 1) // CHUNK_FRAMES][(self.depth - 1) % CHUNK_FRAMES]
    else:
        self.top = NULL
    if f.flags & F_GUARDED:
        if self.fast_memo is not None:
            self.fast_memo.discard(<size_t>obj)
    if f.kind == K_REDUCE or f.kind == K_PERSID:
        self.reduce_depth -= 1
        self.epoch += 1
    xdecref(obj)
    xdecref(a)
    xdecref(b)
    return 0


cdef int guard_cycle(Pickler self, Frame* f) except -1:
    """fast_save_enter of _pickle.c. Where CPython's other kinds of objects run into the recursion limit, so do they here."""
    cdef bint checked = f.kind == K_LIST or f.kind == K_DICT or f.kind == K_FROZENSET
    if self.depth + 1 < (FAST_NESTING_LIMIT if checked else FAST_CYCLE_DEPTH):
        return 0
    if self.fast_memo is None:
        self.fast_memo = set()
    address = <size_t>f.obj
    if address in self.fast_memo:
        if checked:
            raise ValueError(f"fast mode: can't pickle cyclic objects including object type "
                             f"{type_name(<object>f.obj)} at {address:#x}")
        raise RecursionError("maximum recursion depth exceeded while pickling an object")
    self.fast_memo.add(address)
    f.flags |= F_GUARDED
    return 0


# ---- output -----------------------------------------------------------------------------------------------------------

cdef inline void put(Pickler self, int byte) noexcept:
    self.out.next[0] = <char>byte
    self.out.next += 1


cdef inline int reserve(Pickler self, Py_ssize_t size) except -1:
    """Make sure that `size` bytes and the usual slack fit."""
    if self.out.end - self.out.next < size + BUFFER_SLACK:
        return grow(self, size)
    return 0


cdef int grow(Pickler self, Py_ssize_t size) except -1:
    """Enlarge the buffer. Pages that are never touched take no memory, and what is left over is given back in the end.

    malloc copies a block that it cannot enlarge in its place, until the block is so big that the kernel moves it
    (mremap; always from 32 MiB on, M_MMAP_THRESHOLD in mallopt(3)): few steps lead there.
    """
    cdef Py_ssize_t used = self.out.next - self.out.start
    cdef Py_ssize_t room = self.out.end - self.out.start
    cdef Py_ssize_t least = used + size + 2 * BUFFER_SLACK
    if size >= FRAME_SIZE_TARGET:
        # What comes after a big payload is often small: room for it now saves moving the payload soon after.
        resize(self, max(room, least + FRAME_SIZE_TARGET))
        populate_pages(self.out.next, size)
        return 0
    if room < FRAME_BUFFER:
        room = FRAME_BUFFER
    elif self.in_memory and room < MOVED_BLOCK:
        room *= 4 if room == FRAME_BUFFER else 16 if room < MOVED_BLOCK // 16 else 8
    else:
        room *= 2
    resize(self, max(room, least))
    if used >= MOVED_BLOCK // 8:
        prefer_huge_pages(self.out.owner, self.out.end - self.out.start)
    return 0


cdef int resize(Pickler self, Py_ssize_t room) except -1:
    """Change the buffer's size, to `room` bytes or some more."""
    cdef Py_ssize_t used = self.out.next - self.out.start
    cdef PyObject* owner = self.out.owner
    self.out.owner = NULL
    self.out.start = self.out.next = self.out.limit = self.out.end = NULL
    room = whole_huge_pages(room + BYTES_OVERHEAD) - BYTES_OVERHEAD
    _PyBytes_Resize(&owner, room)       # frees the old block and raises MemoryError where it fails
    self.out.owner = owner
    self.out.start = bytes_data(owner)
    self.out.next = self.out.start + used
    self.out.end = self.out.start + room
    set_limit(self)
    return 0


cdef void set_limit(Pickler self) noexcept:
    cdef char* limit = self.out.end - BUFFER_SLACK
    cdef char* frame_limit
    if self.out.frame >= 0:
        frame_limit = self.out.start + self.out.frame + (FRAME_HEADER_SIZE + FRAME_SIZE_TARGET)
    elif not self.in_memory:
        frame_limit = self.out.start + FRAME_SIZE_TARGET
    else:
        frame_limit = limit
    self.out.limit = frame_limit if frame_limit < limit else limit


cdef int begin_frame(Pickler self) except -1:
    """Leave room for a FRAME. CPython does so before the first byte of a frame; commit_frame takes an unused one back."""
    reserve(self, FRAME_HEADER_SIZE)
    if self.framing:
        self.out.frame = self.out.next - self.out.start
        self.out.next += FRAME_HEADER_SIZE
    set_limit(self)
    return 0


cdef int commit_frame(Pickler self) except -1:
    cdef char* header
    cdef Py_ssize_t size
    if self.out.frame < 0:
        return 0
    header = self.out.start + self.out.frame
    size = self.out.next - header - FRAME_HEADER_SIZE
    if size >= FRAME_SIZE_MIN:
        header[0] = <char>OP_FRAME
        put_u64(header + 1, size)
    else:
        memmove(header, header + FRAME_HEADER_SIZE, size)
        self.out.next -= FRAME_HEADER_SIZE
    self.out.frame = -1
    return 0


cdef int boundary(Pickler self) except -1:
    """_Pickler_OpcodeBoundary: close a full frame; also the place where the buffer grows or goes to the file."""
    cdef bint full
    if self.out.frame >= 0:
        full = self.out.next - self.out.start - self.out.frame - FRAME_HEADER_SIZE >= FRAME_SIZE_TARGET
    else:
        full = not self.in_memory and self.out.next - self.out.start >= FRAME_SIZE_TARGET
    if full:
        commit_frame(self)
        if not self.in_memory:
            flush(self)
        begin_frame(self)
    return reserve(self, 0)


cdef int flush(Pickler self) except -1:
    """Hand what is in the buffer to the file. No frame is open."""
    cdef Py_ssize_t size = self.out.next - self.out.start
    cdef Py_ssize_t room = self.out.end - self.out.start
    cdef PyObject* owner
    if size == 0:
        return 0
    if size < FRAME_SIZE_TARGET // 2:
        chunk = PyBytes_FromStringAndSize(self.out.start, size)
        self.out.next = self.out.start
    else:
        # The writer may keep what it gets, so it gets the block itself, and a new one takes its place.
        owner = self.out.owner
        self.out.owner = new_bytes(NULL, room)
        self.out.start = self.out.next = bytes_data(self.out.owner)
        self.out.end = self.out.start + room
        _PyBytes_Resize(&owner, size)
        chunk = <object>owner
        decref(owner)
    set_limit(self)
    write_chunk(self, chunk)
    return 0


cdef int write_chunk(Pickler self, object chunk) except -1:
    if self.delayed is not None:
        # A view keeps a bytearray from being resized until it is written.
        self.delayed.append(memoryview(chunk) if type(chunk) is bytearray else chunk)
        return 0
    write = self.write
    self.fatal = True
    write(chunk)
    self.fatal = False
    self.epoch += 1
    return 0


cdef bytes take_bytes(Pickler self):
    """The result of an in-memory dump, in a bytes object of just its size."""
    cdef Py_ssize_t size = self.out.next - self.out.start
    cdef PyObject* owner
    if size < FRAME_SIZE_TARGET // 2:
        return PyBytes_FromStringAndSize(self.out.start, size)
    owner = self.out.owner
    self.out.owner = NULL
    self.out.start = self.out.next = self.out.limit = self.out.end = NULL
    _PyBytes_Resize(&owner, size)
    result = <bytes>owner
    decref(owner)
    return result


cdef int put_payload(Pickler self, const char* header, Py_ssize_t header_size, const char* data, Py_ssize_t size,
                     PyObject* payload) except -1:
    """_Pickler_write_bytes: a big payload lies outside of frames and goes to the file as the object `payload`."""
    if size < FRAME_SIZE_TARGET:
        reserve(self, header_size + size)
        memcpy(self.out.next, header, header_size)
        self.out.next = put_bytes(self.out.next + header_size, data, size)
        return 0
    commit_frame(self)
    reserve(self, header_size + (size if self.in_memory else 0))
    memcpy(self.out.next, header, header_size)
    self.out.next += header_size
    if self.in_memory:
        memcpy(self.out.next, data, size)
        self.out.next += size
    else:
        incref(payload)
        try:
            flush(self)
            write_chunk(self, <object>payload)
        finally:
            decref(payload)
    return begin_frame(self)


# ---- memo -------------------------------------------------------------------------------------------------------------

cdef int clear_memo(Pickler self) except -1:
    """Drop all entries. Finalizers may run meanwhile, and use the pickler: it has its new memo by then."""
    cdef Memo old = self.memo_table
    if old.slots == NULL:
        return 0
    memo_zero(&self.memo_table)
    if not memo_init(&self.memo_table):
        self.memo_table = old
        raise MemoryError
    self.memo_table.generation = old.generation + 1
    memo_free_arrays(&old)
    return 0


cdef list memo_list(Pickler self):
    cdef Py_ssize_t position
    cdef list result = []
    for position in range(self.memo_table.count):
        result.append(<object>self.memo_table.objects[position])
    return result


cdef int set_memo(Pickler self, object value) except -1:
    """Assign to Pickler.memo: a memo proxy (copied) or {anything: (memo index, object)}."""
    cdef Memo memo
    cdef Memo old
    cdef Memo* source
    cdef Py_ssize_t position
    cdef list entries = []
    if isinstance(value, PicklerMemoProxy) and (<PicklerMemoProxy>value).pickler is not None:
        source = &(<PicklerMemoProxy>value).pickler.memo_table
        for position in range(source.count):
            entries.append((memo_label(source, position), <object>source.objects[position]))
    elif isinstance(value, dict):
        for entry in list((<dict>value).values()):
            if not isinstance(entry, tuple) or len(<tuple>entry) != 2:
                raise TypeError("'memo' values must be 2-item tuples")
            position = PyLong_AsSsize_t(tuple_item(<PyObject*>entry, 0))
            entries.append((position, (<tuple>entry)[1]))
    else:
        raise TypeError(f"'memo' attribute must be a PicklerMemoProxy object or dict, "
                        f"not {type_name(value)}")
    memo_zero(&memo)
    if not memo_init(&memo):
        raise MemoryError
    try:
        fill_memo(&memo, entries)
    except BaseException:
        memo_free_arrays(&memo)
        raise
    old = self.memo_table
    memo.generation = old.generation + 1
    self.memo_table = memo
    memo_free_arrays(&old)
    return 0


cdef int fill_memo(Memo* memo, list entries) except -1:
    """Fill a new memo with (memo index, object) pairs; labels where the indices are not 0, 1, 2..."""
    cdef Py_ssize_t position
    cdef Py_ssize_t index
    cdef size_t slot
    cdef bint labelled
    # Later entries win, as in PyMemoTable_Set.
    entries = list({id(obj): (label, obj) for label, obj in entries}.values())
    entries.sort(key=first_of)
    labelled = [label for label, obj in entries] != list(range(len(entries)))
    if labelled:
        memo.labels = <Py_ssize_t*>PyMem_Malloc(len(entries) * sizeof(Py_ssize_t))
        if memo.labels == NULL:
            raise MemoryError
    for position, (label, obj) in enumerate(entries):
        if memo_full(memo) and not memo_grow(memo):
            raise MemoryError
        memo_find(memo, <PyObject*>obj, &slot)
        memo_add(memo, <PyObject*>obj, slot)
        if labelled:
            index = label
            memo.labels[position] = index
            memo.label_count = position + 1
    return 0


cdef object first_of(tuple entry):
    return entry[0]


cdef inline int put_get(Pickler self, Py_ssize_t position) except -1:
    """memo_get: fetch a memoized object."""
    cdef char* p = self.out.next
    if position < 256 and self.bin_ and self.memo_table.labels == NULL:
        p[0] = <char>OP_BINGET
        p[1] = <char>position
        self.out.next = p + 2
        return 0
    return put_long_get(self, memo_label(&self.memo_table, position))


cdef int put_long_get(Pickler self, Py_ssize_t index) except -1:
    cdef char* p = self.out.next
    if not self.bin_:
        return put_text(self, OP_GET, index)
    if index < 256:
        p[0] = <char>OP_BINGET
        p[1] = <char>index
        self.out.next = p + 2
    else:
        if <size_t>index > 0xffffffffu:
            raise PicklingError("memo id too large for LONG_BINGET")
        p[0] = <char>OP_LONG_BINGET
        self.out.next = put_u32(p + 1, index)
    return 0


cdef int put_text(Pickler self, int op, Py_ssize_t number) except -1:
    """A text opcode of protocol 0 with a decimal argument."""
    cdef bytes text = b"%d\n" % number
    put(self, op)
    self.out.next = put_bytes(self.out.next, text, len(text))
    return 0


cdef inline int memoize_at(Pickler self, PyObject* obj, size_t slot) except -1:
    """memo_put for an object that memo_find has just missed at `slot`."""
    if self.fast_:
        return 0
    if memo_full(&self.memo_table):
        if self.memo_table.count >= 0xfffffffe:
            raise PicklingError("memo id too large for LONG_BINPUT")
        if not memo_grow(&self.memo_table):
            raise MemoryError
        memo_find(&self.memo_table, obj, &slot)
    memo_add(&self.memo_table, obj, slot)
    if self.proto >= 4:
        put(self, OP_MEMOIZE)
        return 0
    return put_put(self, self.memo_table.count - 1)


cdef int put_put(Pickler self, Py_ssize_t index) except -1:
    cdef char* p = self.out.next
    if self.proto >= 4:
        put(self, OP_MEMOIZE)
        return 0
    if not self.bin_:
        return put_text(self, OP_PUT, index)
    if index < 256:
        p[0] = <char>OP_BINPUT
        p[1] = <char>index
        self.out.next = p + 2
    else:
        p[0] = <char>OP_LONG_BINPUT
        self.out.next = put_u32(p + 1, index)
    return 0


cdef int memoize(Pickler self, PyObject* obj) except -1:
    """memo_put for an object that may be in the memo already."""
    cdef size_t slot
    cdef Py_ssize_t position
    if self.fast_:
        return 0
    position = memo_find(&self.memo_table, obj, &slot)
    if position < 0:
        return memoize_at(self, obj, slot)
    # CPython gives the object the next index without counting it, so the object after it gets the same one.
    relabel(&self.memo_table, position)
    return put_put(self, self.memo_table.count)


cdef int relabel(Memo* memo, Py_ssize_t position) except -1:
    cdef Py_ssize_t i
    cdef Py_ssize_t* labels = <Py_ssize_t*>PyMem_Realloc(memo.labels, memo.count * sizeof(Py_ssize_t))
    if labels == NULL:
        raise MemoryError
    memo.labels = labels
    for i in range(memo.label_count, memo.count):
        labels[i] = i
    memo.label_count = memo.count
    labels[position] = memo.count
    return 0


# ---- save: every function from here returns 0 when the object is written, 1 when a frame was pushed -------------------

cdef inline int save(Pickler self, PyObject* obj, int own) except -1:
    """Save `obj`, a reference the caller may lose as soon as user code runs; `own` is explained at `alone`."""
    if self.out.next >= self.out.limit or self.careful:
        return save_carefully(self, obj, own)
    return save_object(self, obj, own)


cdef inline char* put_leaf(Pickler self, char* p, PyObject* obj, bint sparing) except? NULL:
    """Write an object of the simplest kinds at `p`, which is below the limit; NULL (and nothing written) for all others.

    What goes through items asks this first: most of them are leaves, and need neither a reference nor a frame. No user
    code runs in here. With `sparing`, a string that has no other reference than its container's is not memoized; it is
    the caller's task to note it (`note_run`).
    """
    cdef PyTypeObject* t = type_of(obj)
    cdef Py_ssize_t size
    cdef long value
    if t == &PyUnicode_Type:
        size = PyUnicode_GET_LENGTH(obj)
        if PyUnicode_IS_COMPACT_ASCII(obj) and size <= 255:
            if sparing and refcount(obj) == 1:
                p[0] = <char>OP_SHORT_BINUNICODE
                p[1] = <char>size
                return put_bytes(p + 2, <const char*>PyUnicode_DATA(obj), size)
            return put_leaf_data(self, p, obj, OP_SHORT_BINUNICODE, <const char*>PyUnicode_DATA(obj), size, 0)
        return put_leaf_text(self, p, obj, size, sparing)
    if t == &PyLong_Type:
        return put_int(p, value) if fastcap_small_int(obj, &value) else NULL
    if obj == Py_None:
        p[0] = <char>OP_NONE
        return p + 1
    if t == &PyFloat_Type:
        p[0] = <char>OP_BINFLOAT
        fastcap_pack_double(obj, p + 1)
        return p + 9
    if t == &PyBool_Type:
        p[0] = <char>(OP_NEWTRUE if obj == Py_True else OP_NEWFALSE)
        return p + 1
    if t == &PyBytes_Type:
        size = bytes_size(obj)
        if size > 255:
            return NULL
        return put_leaf_data(self, p, obj, OP_SHORT_BINBYTES, bytes_data(obj), size, sparing)
    return NULL


cdef char* put_leaf_data(Pickler self, char* p, PyObject* obj, int op, const char* data, Py_ssize_t size,
                         bint sparing) except? NULL:
    """A string or bytes object of at most 255 bytes."""
    cdef size_t slot = 0
    cdef Py_ssize_t position
    cdef bint single = sparing and refcount(obj) == 1
    if not single:
        position = memo_find(&self.memo_table, obj, &slot)
        if position >= 0:
            self.out.next = p
            put_get(self, position)
            return self.out.next
        if wary(self):
            return NULL
    p[0] = <char>op
    p[1] = <char>size
    p = put_bytes(p + 2, data, size)
    if single:
        return p
    self.out.next = p
    memoize_at(self, obj, slot)
    return self.out.next


cdef char* put_leaf_text(Pickler self, char* p, PyObject* obj, Py_ssize_t size, bint sparing) except? NULL:
    """A string of `size` characters that is in the memo, or has less than 64 of them."""
    cdef size_t slot = 0
    cdef Py_ssize_t position
    cdef char* end
    cdef bint single = sparing and refcount(obj) == 1
    if not PyUnicode_IS_COMPACT(obj):       # may not be ready
        return NULL
    if not single:
        position = memo_find(&self.memo_table, obj, &slot)
        if position >= 0:
            self.out.next = p
            put_get(self, position)
            return self.out.next
        if wary(self):
            return NULL
    if size > 255 // 4:     # UTF-8 has up to four bytes a character
        return NULL
    end = put_utf8(p + 2, obj)
    p[0] = <char>OP_SHORT_BINUNICODE
    p[1] = <char>(end - p - 2)
    if single:
        return end
    self.out.next = end
    memoize_at(self, obj, slot)
    return self.out.next


cdef inline bint has_leaves(Pickler self) noexcept:
    """Whether put_leaf may be used at all."""
    return not self.has_pers and self.proto >= 4


cdef inline bint spares(Pickler self, int own) noexcept:
    """What to pass on to put_leaf for items of which the pickler holds no reference; `own` is explained at `alone`."""
    return self.thrifty and own >= 0


cdef inline int save_leaf(Pickler self, PyObject* obj, int own) except -1:
    """Save an object of the simplest kinds; 0 (and nothing written) for all others."""
    cdef char* p
    cdef bint sparing = spares(self, own)
    if self.out.next >= self.out.limit or not has_leaves(self):
        return 0
    p = put_leaf(self, self.out.next, obj, sparing)
    if p == NULL:
        return 0
    self.out.next = p
    if sparing and not own & OWN_TEMPORARY:
        note_leaf(self, obj)
    return 1


cdef Py_ssize_t save_leaves(Pickler self, PyObject** items, Py_ssize_t count, int own) except -1:
    """Save the first leaves of some items, and return their number. No user code runs in here."""
    cdef char* p = self.out.next
    cdef char* limit = self.out.limit
    cdef char* end
    cdef Py_ssize_t i = 0
    cdef bint sparing = spares(self, own)
    if not has_leaves(self):
        return 0
    while i < count and p < limit:
        end = put_leaf(self, p, items[i], sparing)
        if end == NULL:
            break
        p = end
        i += 1
    self.out.next = p
    return i


cdef Py_ssize_t save_pairs(Pickler self, PyObject* obj, Py_ssize_t* position, Py_ssize_t count, int own,
                           PyObject** key, PyObject** value, bint* halfway) except -1:
    """Save the first pairs of leaves of a dict from `position` on, up to `count`, and return their number.

    What ends them is put into *key* and *value*, borrowed: NULL at the end of the dict or of the count. `halfway` tells
    that this key is written. No user code runs in here.
    """
    cdef char* p = self.out.next
    cdef char* end
    cdef char* limit = self.out.limit
    cdef Py_ssize_t start = position[0]
    cdef Py_ssize_t written = 0
    cdef bint sparing = spares(self, own)
    cdef bint leaves = has_leaves(self)
    cdef bint noting = sparing and count < SHORT_RUN and not own & OWN_TEMPORARY
    halfway[0] = False
    while True:
        if written == count or not PyDict_Next(obj, position, key, value):
            key[0] = value[0] = NULL
            break
        if not leaves or p >= limit:
            break
        end = put_leaf(self, p, key[0], sparing)
        if end == NULL:
            break
        p = end
        if noting:
            note_leaf(self, key[0])
        halfway[0] = True
        if p >= limit:
            break
        end = put_leaf(self, p, value[0], sparing)
        if end == NULL:
            break
        p = end
        if noting:
            note_leaf(self, value[0])
        halfway[0] = False
        written += 1
    self.out.next = p
    if sparing and not noting:
        # The last pair has the position before the next one. A note too many, of its value, does no harm.
        note_run(self, obj, start, position[0] if halfway[0] or key[0] == NULL else position[0] - 1, own)
    return written


cdef int save_carefully(Pickler self, PyObject* obj, int own) except -1:
    """An opcode boundary that may write to the file, a replacement, the persistent id."""
    incref(obj)
    try:
        if self.out.next >= self.out.limit:
            boundary(self)
        if self.replacements is not None:
            value = self.replacements.get(<size_t>obj)
            if value is not None:
                return save_replacement(self, value, obj)
        if self.has_pers:
            return save_pers(self, obj, own + 1)
        return save_object(self, obj, own + 1)
    finally:
        decref(obj)


cdef int save_replacement(Pickler self, object value, PyObject* obj) except -1:
    """Write `value` for `obj`, the first time: after that it is in the memo, whatever compact mode thinks of it."""
    cdef size_t slot
    cdef Py_ssize_t position = memo_find(&self.memo_table, obj, &slot)
    if position >= 0:
        return put_get(self, position)
    if not isinstance(value, tuple):
        raise PicklingError(f"the replacement of an object must be a tuple, not {type_name(value)}")
    return begin_reduce(self, <PyObject*>value, obj)


cdef int save_pers(Pickler self, PyObject* obj, int own) except -1:
    if self.pers_bound:
        pid = self.pers_func(self, <object>obj)
    else:
        pid = self.pers_func(<object>obj)
    called(self)
    if pid is None:
        return save_object(self, obj, own)
    if self.bin_:
        push(self, K_PERSID, <PyObject*>pid)
        if self.out.next >= self.out.limit:
            boundary(self)
        if save_object(self, <PyObject*>pid, OWN_UNKNOWN):
            return 1
        put(self, OP_BINPERSID)
        pop(self)
        return 0
    text = str(pid)
    if not PyUnicode_IS_ASCII(<PyObject*>text):
        raise PicklingError("persistent IDs in protocol 0 must be ASCII strings")
    data = text.encode("ascii")
    reserve(self, len(data))
    put(self, OP_PERSID)
    self.out.next = put_bytes(self.out.next, data, len(data))
    put(self, c'\n')
    return 0


cdef inline void called(Pickler self) noexcept:
    """User code has run that may have got hold of any object."""
    self.epoch += 1
    self.opaque = True


cdef inline int alone(Pickler self, PyObject* obj, int own) noexcept:
    """Compact mode: whether nothing but its one owner refers to an object, which is then met only once.

    The owner is the container, the instance or the iterator's result being saved, and is itself met only once: it is
    memoized, or alone in turn. `own` is the number of references that the pickler holds beside the owner's (or
    OWN_UNKNOWN). An object that is alone is not in the memo, because the memo would hold a reference to it.
    """
    if not self.thrifty or refcount(obj) - (own & ~OWN_TEMPORARY) > 1:
        return 0
    return ALONE_TEMPORARY if own & OWN_TEMPORARY else ALONE


cdef inline int leave_out(Pickler self, PyObject* obj, int single) except -1:
    """Note an object that is alone, instead of memoizing it. `single` is what `alone` has answered.

    Temporaries are not noted: other objects will soon have their addresses.
    """
    if single == ALONE and not log_add(&self.left_out, obj):
        raise MemoryError
    return 0


cdef inline int items_own(int flags) noexcept:
    """What to pass to save for an item that an object in a frame with these flags holds."""
    return OWN_TEMPORARY if flags & F_TEMPORARY else 0


cdef inline int alone_flags(int single) noexcept:
    if single == 0:
        return 0
    return F_ALONE if single == ALONE else F_ALONE | F_TEMPORARY


cdef inline int note_leaf(Pickler self, PyObject* item) except -1:
    """Note an item that put_leaf has written with `sparing`, if it was alone."""
    if refcount(item) == 1 and (type_of(item) == &PyUnicode_Type or type_of(item) == &PyBytes_Type):
        if not log_add(&self.left_out, item):
            raise MemoryError
    return 0


cdef inline int note_items(Pickler self, PyObject** items, Py_ssize_t count, int own) except -1:
    """note_leaf for the first `count` items, which save_leaves has just written."""
    cdef Py_ssize_t i
    if spares(self, own) and not own & OWN_TEMPORARY:
        for i in range(count):
            note_leaf(self, items[i])
    return 0


cdef int note_run(Pickler self, PyObject* container, Py_ssize_t start, Py_ssize_t end, int own) except -1:
    """The same for the items of a list or dict between two positions, without looking at them yet.

    The notes cost more than the strings otherwise, and are hardly ever read. By the time they are, user code may have
    moved items out of the container: then those may come out as copies.
    """
    cdef Run* run
    cdef Py_ssize_t room
    if start == end or own & OWN_TEMPORARY:
        return 0
    if self.run_count > self.runs_entered:
        run = &self.runs[self.run_count - 1]
        if run.container == container and run.end == start:
            run.end = end
            return 0
    if end - start < SHORT_RUN:
        return enter_run(self, container, start, end, False)
    if self.run_count == self.run_room:
        room = self.run_room * 2 if self.run_room else 16
        run = <Run*>PyMem_Realloc(self.runs, room * sizeof(Run))
        if run == NULL:
            raise MemoryError
        self.runs = run
        self.run_room = room
    run = &self.runs[self.run_count]
    run.container = container
    run.start = start
    run.end = end
    incref(container)
    self.run_count += 1
    return 0


cdef int enter_run(Pickler self, PyObject* container, Py_ssize_t start, Py_ssize_t end, bint late) except -1:
    """note_leaf for the items between two positions; `late`: some may have got other references since."""
    cdef PyObject* key
    cdef PyObject* value
    cdef Py_ssize_t i
    if PyList_CheckExact(container):
        for i in range(start, min(end, list_size(container))):
            note_item(self, list_item(container, i), late)
    else:
        while start < end and PyDict_Next(container, &start, &key, &value):
            note_item(self, key, late)
            note_item(self, value, late)
    return 0


cdef inline int note_item(Pickler self, PyObject* item, bint late) except -1:
    cdef size_t slot
    if not late or refcount(item) == 1:
        return note_leaf(self, item)
    if type_of(item) == &PyUnicode_Type or type_of(item) == &PyBytes_Type:
        if memo_find(&self.memo_table, item, &slot) < 0 and not log_add(&self.left_out, item):
            raise MemoryError
    return 0


cdef int enter_runs(Pickler self) except -1:
    """Enter all runs into `left_out`. Their references are kept: dropping them may run finalizers."""
    cdef Run* run
    while self.runs_entered < self.run_count:
        run = &self.runs[self.runs_entered]
        self.runs_entered += 1
        enter_run(self, run.container, run.start, run.end, True)
    return 0


cdef int drop_runs(Pickler self) except -1:
    """Forget the runs. Dropping references may run finalizers, so it comes last."""
    cdef Run* runs = self.runs
    cdef Py_ssize_t count = self.run_count
    cdef Py_ssize_t i
    self.runs = NULL
    self.run_count = self.run_room = self.runs_entered = 0
    for i in range(count):
        decref(runs[i].container)
    PyMem_Free(runs)
    return 0


cdef int forget_left_out(Pickler self) except -1:
    log_free(&self.left_out)
    drop_runs(self)
    return 0


cdef inline bint wary(Pickler self) noexcept:
    """Whether an object that is not alone and not in the memo may have been left out; check_first tells."""
    return self.thrifty and self.opaque and (self.left_out.count or self.run_count)


cdef int check_first(Pickler self, PyObject* obj) except -1:
    """An object that is not alone and not in the memo: if a reducer has brought it up, it may have been left out."""
    cdef int found
    enter_runs(self)
    found = log_has(&self.left_out, obj)
    if found < 0:
        raise MemoryError
    if found:
        raise FoundAgain
    return 0


cdef int save_object(Pickler self, PyObject* obj, int own) except -1:
    cdef PyTypeObject* t = type_of(obj)
    cdef size_t slot = 0
    cdef Py_ssize_t position
    cdef int single
    if t == &PyUnicode_Type:
        return save_unicode(self, obj, own)
    if t == &PyLong_Type:
        return save_long(self, obj)
    if obj == Py_None:
        put(self, OP_NONE)
        return 0
    if t == &PyBool_Type:
        return save_bool(self, obj)
    if t == &PyFloat_Type:
        return save_float(self, obj)
    single = alone(self, obj, own)
    if not single:
        position = memo_find(&self.memo_table, obj, &slot)
        if position >= 0:
            return put_get(self, position)
        if wary(self):
            check_first(self, obj)
    if t == &PyDict_Type:
        return save_dict(self, obj, slot, single)
    if t == &PyTuple_Type:
        return save_tuple(self, obj, single)
    if t == &PyList_Type:
        return save_list(self, obj, slot, single)
    if t == &PyBytes_Type:
        return save_bytes(self, obj, single)
    if t == &PySet_Type:
        return save_set(self, obj, single)
    if t == &PyFrozenSet_Type:
        return save_frozenset(self, obj, single)
    if t == &PyByteArray_Type:
        return save_bytearray(self, obj, single)
    if self.on_unpicklable is not None:
        return save_or_stand_in(self, obj, t)
    if t == &PyPickleBuffer_Type:
        return save_picklebuffer(self, obj)
    return save_other(self, obj, t)


cdef int save_bool(Pickler self, PyObject* obj) except -1:
    cdef char* p = self.out.next
    if self.proto >= 2:
        put(self, OP_NEWTRUE if obj == Py_True else OP_NEWFALSE)
        return 0
    # Not opcodes of their own: ints to readers that know no bools.
    memcpy(p, <const char*>b"I01\n" if obj == Py_True else <const char*>b"I00\n", 4)
    self.out.next = p + 4
    return 0


cdef inline int save_long(Pickler self, PyObject* obj) except -1:
    cdef long value
    if not self.bin_ or not fastcap_small_int(obj, &value):
        return save_big_long(self, obj)
    self.out.next = put_int(self.out.next, value)
    return 0


cdef inline char* put_int(char* p, long value) noexcept:
    """An int of 32 bits with the shortest binary opcode."""
    if value & ~0xffff:
        p[0] = <char>OP_BININT
        return put_u32(p + 1, <unsigned int>value)
    if value & 0xff00:
        p[0] = <char>OP_BININT2
        return put_u16(p + 1, <unsigned int>value)
    p[0] = <char>OP_BININT1
    p[1] = <char>value
    return p + 2


cdef int save_big_long(Pickler self, PyObject* obj) except -1:
    """Ints beyond 32 bits, and all ints of protocol 0."""
    cdef long value
    cdef int sign
    cdef size_t size
    cdef unsigned char* data
    cdef bytes text
    if fastcap_small_int(obj, &value):
        return put_text(self, OP_INT, value)
    if self.proto < 2:
        text = repr(<object>obj).encode("ascii")
        reserve(self, len(text))
        put(self, OP_LONG)
        self.out.next = put_bytes(self.out.next, text, len(text))
        self.out.next = put_bytes(self.out.next, b"L\n", 2)
        return 0
    sign = _PyLong_Sign(obj)
    size = (_PyLong_NumBits(obj) >> 3) + 1
    if size > 0x7fffffff:
        raise OverflowError("int too large to pickle")
    reserve(self, size + 5)
    # Two's complement, little-endian; a negative number may have a redundant last byte, which is dropped.
    data = <unsigned char*>self.out.next + (2 if size < 256 else 5)
    fastcap_long_bytes(obj, data, size)
    if sign < 0 and size > 1 and data[size - 1] == 0xff and data[size - 2] & 0x80:
        size -= 1
        if size == 255:
            memmove(self.out.next + 2, data, size)
    if size < 256:
        put(self, OP_LONG1)
        put(self, <int>size)
    else:
        put(self, OP_LONG4)
        self.out.next = put_u32(self.out.next, size)
    self.out.next += size
    return 0


cdef int save_float(Pickler self, PyObject* obj) except -1:
    cdef char* text
    cdef Py_ssize_t size
    if self.bin_:
        put(self, OP_BINFLOAT)
        fastcap_pack_double(obj, self.out.next)
        self.out.next += 8
        return 0
    text = PyOS_double_to_string(PyFloat_AS_DOUBLE(obj), c'r', 0, Py_DTSF_ADD_DOT_0, NULL)
    put(self, OP_FLOAT)
    size = len(<const char*>text)
    self.out.next = put_bytes(self.out.next, text, size)
    put(self, c'\n')
    PyMem_Free(text)
    return 0


# -- strings and bytes

cdef inline int save_unicode(Pickler self, PyObject* obj, int own) except -1:
    cdef size_t slot = 0
    cdef Py_ssize_t size
    cdef Py_ssize_t position
    cdef char* p
    cdef int single = alone(self, obj, own)
    if not single:
        position = memo_find(&self.memo_table, obj, &slot)
        if position >= 0:
            return put_get(self, position)
        if wary(self):
            check_first(self, obj)
    if not PyUnicode_IS_ASCII(obj) or not self.bin_:
        return save_other_text(self, obj, single)
    size = PyUnicode_GET_LENGTH(obj)
    if size > 255 or self.proto < 4:
        return save_long_text(self, obj, size, single)
    if self.out.end - self.out.next < size + BUFFER_SLACK:
        grow(self, size)
    p = self.out.next
    p[0] = <char>OP_SHORT_BINUNICODE
    p[1] = <char>size
    self.out.next = put_bytes(p + 2, <const char*>PyUnicode_DATA(obj), size)
    if single:
        return leave_out(self, obj, single)
    return memoize_at(self, obj, slot)


cdef Py_ssize_t text_header(Pickler self, char* header, Py_ssize_t size) except -1:
    if size <= 0xff and self.proto >= 4:
        header[0] = <char>OP_SHORT_BINUNICODE
        header[1] = <char>size
        return 2
    if <size_t>size <= 0xffffffffu:
        header[0] = <char>OP_BINUNICODE
        put_u32(header + 1, size)
        return 5
    if self.proto >= 4:
        header[0] = <char>OP_BINUNICODE8
        put_u64(header + 1, size)
        return 9
    raise OverflowError("serializing a string larger than 4 GiB requires pickle protocol 4 or higher")


cdef int save_long_text(Pickler self, PyObject* obj, Py_ssize_t size, int single) except -1:
    """ASCII text of any size."""
    held = <object>obj          # the writer may drop the caller's reference
    cdef char header[9]
    cdef Py_ssize_t header_size = text_header(self, header, size)
    cdef TextView view
    if size < FRAME_SIZE_TARGET or self.in_memory:
        put_payload(self, header, header_size, <const char*>PyUnicode_DATA(obj), size, NULL)
    else:
        view = <TextView>TextView.__new__(TextView)
        view.text = <object>obj
        payload = memoryview(view)
        put_payload(self, header, header_size, <const char*>PyUnicode_DATA(obj), size, <PyObject*>payload)
    return leave_out(self, obj, single) if single else memoize(self, obj)


cdef int save_other_text(Pickler self, PyObject* obj, int single) except -1:
    """Text that is not ASCII, and all text in protocol 0."""
    held = <object>obj
    cdef char header[9]
    cdef Py_ssize_t header_size
    cdef Py_ssize_t size
    fastcap_unicode_ready(obj)
    if not self.bin_:
        put_escaped(self, obj)
        return leave_out(self, obj, single) if single else memoize(self, obj)
    size = utf8_size(obj)
    header_size = text_header(self, header, size)
    if size < FRAME_SIZE_TARGET:
        reserve(self, header_size + size)
        memcpy(self.out.next, header, header_size)
        self.out.next = put_utf8(self.out.next + header_size, obj)
    elif self.in_memory:
        commit_frame(self)
        reserve(self, header_size + size)
        memcpy(self.out.next, header, header_size)
        self.out.next = put_utf8(self.out.next + header_size, obj)
        begin_frame(self)
    else:
        data = PyBytes_FromStringAndSize(NULL, size)
        put_utf8(bytes_data(<PyObject*>data), obj)
        put_payload(self, header, header_size, bytes_data(<PyObject*>data), size, <PyObject*>data)
    return leave_out(self, obj, single) if single else memoize(self, obj)


cdef Py_ssize_t utf8_size(PyObject* text) noexcept:
    """Bytes of the UTF-8 form with surrogates passed through, as CPython writes it."""
    cdef Py_ssize_t count = PyUnicode_GET_LENGTH(text)
    cdef Py_ssize_t size = count
    cdef int kind = PyUnicode_KIND(text)
    cdef void* data = PyUnicode_DATA(text)
    cdef Py_ssize_t i
    cdef unsigned int c
    if kind == 1:
        for i in range(count):
            size += (<unsigned char*>data)[i] >> 7
        return size
    for i in range(count):
        c = PyUnicode_READ(kind, data, i)
        size += (c >= 0x80) + (c >= 0x800) + (c >= 0x10000)
    return size


cdef char* put_utf8(char* p, PyObject* text) noexcept:
    cdef Py_ssize_t count = PyUnicode_GET_LENGTH(text)
    cdef int kind = PyUnicode_KIND(text)
    cdef void* data = PyUnicode_DATA(text)
    cdef Py_ssize_t i
    cdef unsigned int c
    for i in range(count):
        c = PyUnicode_READ(kind, data, i)
        if c < 0x80:
            p[0] = <char>c
            p += 1
        elif c < 0x800:
            p[0] = <char>(0xc0 | (c >> 6))
            p[1] = <char>(0x80 | (c & 0x3f))
            p += 2
        elif c < 0x10000:
            p[0] = <char>(0xe0 | (c >> 12))
            p[1] = <char>(0x80 | ((c >> 6) & 0x3f))
            p[2] = <char>(0x80 | (c & 0x3f))
            p += 3
        else:
            p[0] = <char>(0xf0 | (c >> 18))
            p[1] = <char>(0x80 | ((c >> 12) & 0x3f))
            p[2] = <char>(0x80 | ((c >> 6) & 0x3f))
            p[3] = <char>(0x80 | (c & 0x3f))
            p += 4
    return p


cdef int put_escaped(Pickler self, PyObject* text) except -1:
    """UNICODE of protocol 0: raw_unicode_escape of _pickle.c, a line of Latin-1 with the troublesome characters escaped."""
    cdef Py_ssize_t count = PyUnicode_GET_LENGTH(text)
    cdef int kind = PyUnicode_KIND(text)
    cdef void* data = PyUnicode_DATA(text)
    cdef const char* digits = b"0123456789abcdef"
    cdef Py_ssize_t i
    cdef int shift
    cdef unsigned int c
    cdef char* p
    reserve(self, 10 * count)
    p = self.out.next
    p[0] = <char>OP_UNICODE
    p += 1
    for i in range(count):
        c = PyUnicode_READ(kind, data, i)
        if c >= 0x10000:
            p[0] = c'\\'
            p[1] = c'U'
            for shift in range(8):
                p[2 + shift] = digits[(c >> (28 - 4 * shift)) & 0xf]
            p += 10
        elif c >= 256 or c == c'\\' or c == 0 or c == c'\n' or c == c'\r' or c == 0x1a:
            p[0] = c'\\'
            p[1] = c'u'
            for shift in range(4):
                p[2 + shift] = digits[(c >> (12 - 4 * shift)) & 0xf]
            p += 6
        else:
            p[0] = <char>c
            p += 1
    p[0] = c'\n'
    self.out.next = p + 1
    return 0


cdef int save_bytes(Pickler self, PyObject* obj, int single) except -1:
    data = <bytes>obj
    if self.proto >= 3:
        return save_bytes_data(self, obj, bytes_data(obj), bytes_size(obj), obj, single)
    # Readable as str by Python 2: codecs.encode(text, 'latin1').
    if not data:
        value = (bytes, EMPTY)
    else:
        value = (codecs_encode, (data.decode("latin-1"), "latin1"))
    return begin_reduce(self, <PyObject*>value, obj)


cdef int save_bytes_data(Pickler self, PyObject* obj, const char* data, Py_ssize_t size, PyObject* payload,
                         int single) except -1:
    cdef char header[9]
    cdef Py_ssize_t header_size
    if size <= 0xff:
        header[0] = <char>OP_SHORT_BINBYTES
        header[1] = <char>size
        header_size = 2
    elif <size_t>size <= 0xffffffffu:
        header[0] = <char>OP_BINBYTES
        put_u32(header + 1, size)
        header_size = 5
    elif self.proto >= 4:
        header[0] = <char>OP_BINBYTES8
        put_u64(header + 1, size)
        header_size = 9
    else:
        raise OverflowError("serializing a bytes object larger than 4 GiB requires pickle protocol 4 or higher")
    put_payload(self, header, header_size, data, size, payload)
    return leave_out(self, obj, single) if single else memoize(self, obj)


cdef int save_bytearray_data(Pickler self, PyObject* obj, const char* data, Py_ssize_t size,
                             PyObject* payload, int single) except -1:
    cdef char header[9]
    header[0] = <char>OP_BYTEARRAY8
    put_u64(header + 1, size)
    put_payload(self, header, 9, data, size, payload)
    return leave_out(self, obj, single) if single else memoize(self, obj)


cdef int save_bytearray(Pickler self, PyObject* obj, int single) except -1:
    held = <object>obj
    if self.proto >= 5:
        return save_bytearray_data(self, obj, bytearray_data(obj), bytearray_size(obj), obj, single)
    if bytearray_size(obj) == 0:
        value = (bytearray, EMPTY)
    else:
        value = (bytearray, (bytes(held),))
    return begin_reduce(self, <PyObject*>value, obj)


cdef bint ask_buffer_callback(Pickler self, object buffer) except -1:
    """Whether the buffer goes in-band. A second attempt (see dump_object) gets the answers of the first one."""
    cdef bint in_band
    if self.answers is not None and self.answer < len(self.answers):
        in_band = self.answers[self.answer]
    else:
        in_band = bool(self.buffer_callback(buffer))
        called(self)
        if self.answers is not None:
            self.answers.append(in_band)
    self.answer += 1
    return in_band


cdef int save_picklebuffer(Pickler self, PyObject* obj) except -1:
    cdef const Py_buffer* view
    cdef bint readonly
    buffer = <object>obj
    if self.proto < 5:
        raise PicklingError("PickleBuffer can only be pickled with protocol >= 5" if SINCE_313
                            else "PickleBuffer can only pickled with protocol >= 5")
    view = PyPickleBuffer_GetBuffer(obj)
    if view.suboffsets != NULL or not PyBuffer_IsContiguous(<Py_buffer*>view, c'A'):
        raise PicklingError("PickleBuffer can not be pickled when pointing to a non-contiguous buffer")
    readonly = view.readonly
    if self.buffer_callback is not None:
        in_band = ask_buffer_callback(self, buffer)
        if not in_band:
            put(self, OP_NEXT_BUFFER)
            if readonly:
                put(self, OP_READONLY_BUFFER)
            return 0
        view = PyPickleBuffer_GetBuffer(obj)        # the callback may have released it
    # A flat view: writers ask for C-contiguous bytes, whatever the shape and order of the exporter.
    payload = buffer.raw() if view.len >= FRAME_SIZE_TARGET and not self.in_memory else buffer
    if readonly:
        return save_bytes_data(self, obj, <const char*>view.buf, view.len, <PyObject*>payload, 0)
    return save_bytearray_data(self, obj, <const char*>view.buf, view.len, <PyObject*>payload, 0)


# -- containers

cdef int save_tuple(Pickler self, PyObject* obj, int single) except -1:
    cdef Py_ssize_t size = tuple_size(obj)
    cdef Py_ssize_t position
    # A tuple is memoized after its items. If it contains itself it is met again before that, and its items with it.
    cdef int own = items_own(alone_flags(single)) if single else OWN_UNKNOWN
    cdef Frame* f
    if size == 0:
        if self.proto:
            put(self, OP_EMPTY_TUPLE)
        else:
            put(self, OP_MARK)
            put(self, OP_TUPLE)
        return 0
    if size > 3 or self.proto < 2:
        put(self, OP_MARK)
    position = save_leaves(self, fastcap_tuple_items(obj), size, own)
    note_items(self, fastcap_tuple_items(obj), position, own)
    if position == size and not self.fast_:
        # No user code has run: it is neither in the memo by now nor shared.
        put(self, OP_TUPLE if size > 3 else OP_TUPLE1 - 1 + size)
        return leave_out(self, obj, single) if single else memoize(self, obj)
    f = push(self, K_TUPLE, obj)
    f.pos = position
    f.flags |= alone_flags(single)
    return 1


cdef int step_tuple(Pickler self, Frame* f) except -1:
    cdef PyObject* obj = f.obj
    cdef Py_ssize_t size = tuple_size(obj)
    cdef Py_ssize_t position
    cdef Py_ssize_t count
    cdef Py_ssize_t i
    cdef size_t slot
    cdef int own = items_own(f.flags) if f.flags & F_ALONE else OWN_UNKNOWN     # see save_tuple
    while f.pos < size:
        count = save_leaves(self, fastcap_tuple_items(obj) + f.pos, size - f.pos, own)
        note_items(self, fastcap_tuple_items(obj) + f.pos, count, own)
        f.pos += count
        if f.pos < size:
            f.pos += 1
            if save(self, tuple_item(obj, f.pos - 1), own):
                return 1
    if f.flags & F_ALONE and refcount(obj) <= 2:
        put(self, OP_TUPLE if size > 3 or self.proto < 2 else OP_TUPLE1 - 1 + size)
        leave_out(self, obj, ALONE_TEMPORARY if f.flags & F_TEMPORARY else ALONE)
        return 0
    # A tuple that is in the memo by now contains itself: throw its items away and fetch it.
    position = memo_find(&self.memo_table, obj, &slot)
    if position >= 0:
        if size <= 3 and self.proto >= 2:
            for i in range(size):
                put(self, OP_POP)
        elif self.bin_:
            put(self, OP_POP_MARK)
        else:
            reserve(self, size + 1)
            for i in range(size + 1):
                put(self, OP_POP)
        put_get(self, position)
        return 0
    if size > 3 or self.proto < 2:
        put(self, OP_TUPLE)
    else:
        put(self, OP_TUPLE1 - 1 + size)
    memoize_at(self, obj, slot)
    return 0


cdef int save_list(Pickler self, PyObject* obj, size_t slot, int single) except -1:
    cdef Frame* f
    cdef Py_ssize_t size
    cdef Py_ssize_t position = 0
    if self.fast_:
        # guard_cycle must speak before anything is written.
        f = push(self, K_LIST, obj)
    else:
        f = NULL
    if self.bin_:
        put(self, OP_EMPTY_LIST)
    else:
        put(self, OP_MARK)
        put(self, OP_LIST)
    if single:
        leave_out(self, obj, single)
    else:
        memoize_at(self, obj, slot)
    size = list_size(obj)
    if size == 0:
        if f != NULL:
            pop(self)
        return 0
    if self.proto == 0:
        if f == NULL:
            push(self, K_LIST, obj)
        items = iter(<object>obj)
        push_batch(self, K_BATCH_LIST, <PyObject*>items)
        return 1
    if size > 1:
        put(self, OP_MARK)
    if size < BATCH_SIZE:
        # Leaves up to the first other item need no frame, and often there is no other item.
        position = save_list_leaves(self, obj, 0, size, items_own(alone_flags(single)))
        if position == size:
            put(self, OP_APPENDS if size > 1 else OP_APPEND)
            if f != NULL:
                pop(self)
            return 0
    if f == NULL:
        f = push(self, K_LIST, obj)
    f.pos = position
    f.batch = <int>position
    if size == 1:
        f.flags |= F_SINGLE
    f.flags |= alone_flags(single)
    return 1


cdef inline Py_ssize_t save_list_leaves(Pickler self, PyObject* obj, Py_ssize_t position, Py_ssize_t count,
                                        int own) except -1:
    """Save the first leaves among `count` items of a list, and return their number."""
    cdef Py_ssize_t written = save_leaves(self, fastcap_list_items(obj) + position, count, own)
    if not spares(self, own):
        return written
    if written < SHORT_RUN and list_size(obj) < SHORT_RUN:
        note_items(self, fastcap_list_items(obj) + position, written, own)
    else:
        note_run(self, obj, position, position + written, own)
    return written


cdef int push_batch(Pickler self, int kind, PyObject* iterator) except -1:
    cdef Frame* f = push(self, kind, NULL)
    f.a = iterator
    incref(iterator)
    if self.proto == 0:
        f.step = 4
    return 0


cdef int step_list(Pickler self, Frame* f) except -1:
    """batch_list_exact: MARK item ... item APPENDS. The list may change while its items are saved."""
    cdef PyObject* obj = f.obj
    cdef Py_ssize_t count
    cdef Py_ssize_t written
    if self.proto == 0:
        return 0        # a K_BATCH_LIST has done it
    while True:
        if f.step:
            # The item at pos was pushed and is written by now.
            f.step = 0
            written = 1
        else:
            count = min(list_size(obj) - f.pos, <Py_ssize_t>(BATCH_SIZE - f.batch))
            if count <= 0:
                break
            written = save_list_leaves(self, obj, f.pos, count, items_own(f.flags))
            if written == 0:
                if save(self, list_item(obj, f.pos), items_own(f.flags)):
                    f.step = 1
                    return 1
                written = 1
        f.pos += written
        if f.flags & F_SINGLE:
            put(self, OP_APPEND)
            return 0
        f.batch += <int>written
        if f.batch == BATCH_SIZE:
            if f.pos >= list_size(obj):
                break
            put(self, OP_APPENDS)
            put(self, OP_MARK)
            f.batch = 0
    put(self, OP_APPENDS)
    return 0


cdef int save_dict(Pickler self, PyObject* obj, size_t slot, int single) except -1:
    cdef Frame* f = NULL
    if self.fast_:
        f = push(self, K_DICT, obj)
    if self.bin_:
        put(self, OP_EMPTY_DICT)
    else:
        put(self, OP_MARK)
        put(self, OP_DICT)
    if single:
        leave_out(self, obj, single)
    else:
        memoize_at(self, obj, slot)
    if dict_size(obj) == 0:
        if f != NULL:
            pop(self)
        return 0
    if self.proto == 0:
        if f == NULL:
            push(self, K_DICT, obj)
        items = iter((<object>obj).items())
        push_batch(self, K_BATCH_DICT, <PyObject*>items)
        return 1
    return save_items(self, obj, f, alone_flags(single))


cdef int save_items(Pickler self, PyObject* obj, Frame* f, int flags) except -1:
    """The items of a dict that is not empty; in its frame `f`, where it has one already, with `flags`."""
    cdef Py_ssize_t size = dict_size(obj)
    cdef Py_ssize_t position = 0
    cdef PyObject* key = NULL
    cdef PyObject* value = NULL
    cdef bint halfway = False
    cdef Py_ssize_t count = 0
    if size == 1:
        flags |= F_SINGLE
    else:
        put(self, OP_MARK)
    if size < BATCH_SIZE:
        # Leaves up to the first other value need no frame, and often there is no other value.
        count = save_pairs(self, obj, &position, size, items_own(flags), &key, &value, &halfway)
        if count == size:
            put(self, OP_SETITEM if flags & F_SINGLE else OP_SETITEMS)
            if flags & F_BUILD:
                put(self, OP_BUILD)
            if f != NULL:
                pop(self)
            return 0
    if f == NULL:
        f = push(self, K_DICT, obj)
    f.flags |= flags
    f.size = size
    f.pos = position
    f.batch = <int>count
    hold_pair(f, key, value, halfway)
    return 1


cdef inline void hold_pair(Frame* f, PyObject* key, PyObject* value, bint halfway) noexcept:
    """User code may run while the pair is saved: key and value must survive that."""
    if key != NULL:
        incref(key)
        incref(value)
        f.a = value
        f.b = key
        f.step = 2 if halfway else 1


cdef int step_dict(Pickler self, Frame* f) except -1:
    """batch_dict_exact: MARK key value ... SETITEMS.

    Step 0 saves what pairs of leaves come next, 1 the key of another pair, 2 its value, and 3 comes after that.
    """
    cdef PyObject* obj = f.obj
    cdef PyObject* key
    cdef PyObject* value
    cdef Py_ssize_t count
    cdef bint halfway
    if self.proto == 0:
        return 0        # a K_BATCH_DICT has done it
    while True:
        if f.step == 0:
            count = save_pairs(self, obj, &f.pos, BATCH_SIZE - f.batch, items_own(f.flags), &key, &value, &halfway)
            f.batch += <int>count
            hold_pair(f, key, value, halfway)
            if f.step == 0 and f.batch < BATCH_SIZE:
                break
        if f.step == 1:
            f.step = 2
            if save(self, f.b, 1 | items_own(f.flags)):
                return 1
        if f.step == 2:
            f.step = 3
            if save(self, f.a, 1 | items_own(f.flags)):
                return 1
        if f.step == 3:
            key = f.b
            value = f.a
            f.a = f.b = NULL
            decref(key)
            decref(value)
            f.step = 0
            f.batch += 1
        if f.batch == BATCH_SIZE:
            put(self, OP_SETITEMS)
            if check_size(self, f, dict_size(obj)):
                break
            # CPython opens another batch even where nothing is left.
            put(self, OP_MARK)
            f.batch = 0
        elif f.flags & F_SINGLE:
            break
    put(self, OP_SETITEM if f.flags & F_SINGLE else OP_SETITEMS)
    if not f.flags & F_SINGLE and check_size(self, f, dict_size(obj)):
        put(self, OP_SETITEMS)
    if f.flags & F_BUILD:
        put(self, OP_BUILD)
    return 0


cdef inline int check_size(Pickler self, Frame* f, Py_ssize_t size) except -1:
    return size_changed(self, f) if size != f.size else 0


cdef int size_changed(Pickler self, Frame* f) except -1:
    """Raise; or put a stand-in into a batch that the caller closes, and return 1."""
    error = RuntimeError("dictionary changed size during iteration" if f.kind == K_DICT
                         else "set changed size during iteration")
    if self.on_unpicklable is None:
        raise error
    if f.kind == K_DICT:
        f.size = dict_size(f.obj)
    else:
        f.size = set_size(f.obj)
    put(self, OP_MARK)
    put_stand_in(self, report_failure(self, <object>f.obj, error))
    if f.kind == K_DICT:
        put(self, OP_NONE)
    return 1


cdef int save_set(Pickler self, PyObject* obj, int single) except -1:
    cdef Frame* f
    if self.proto < 4:
        held = <object>obj
        value = (set, (list(held),))
        return begin_reduce(self, <PyObject*>value, obj)
    put(self, OP_EMPTY_SET)
    if single and not fastcap_set_has_weakrefs(obj):
        leave_out(self, obj, single)
    else:
        memoize(self, obj)
    if set_size(obj) == 0:
        return 0
    put(self, OP_MARK)
    f = push(self, K_SET, obj)
    f.size = set_size(obj)
    f.flags |= alone_flags(single)
    return 1


cdef int step_set(Pickler self, Frame* f) except -1:
    cdef PyObject* obj = f.obj
    cdef PyObject* item
    cdef Py_hash_t hash_
    cdef int pushed
    while True:
        if f.step:
            f.step = 0
        else:
            if not _PySet_NextEntry(obj, &f.pos, &item, &hash_):
                break
            if not save_leaf(self, item, items_own(f.flags)) and save(self, item, items_own(f.flags)):
                f.step = 1
                return 1
        f.batch += 1
        if f.batch == BATCH_SIZE:
            put(self, OP_ADDITEMS)
            if check_size(self, f, set_size(obj)):
                break
            put(self, OP_MARK)
            f.batch = 0
    put(self, OP_ADDITEMS)
    if check_size(self, f, set_size(obj)):
        put(self, OP_ADDITEMS)
    return 0


cdef int save_frozenset(Pickler self, PyObject* obj, int single) except -1:
    cdef Frame* f
    if self.proto < 4:
        held = <object>obj
        value = (frozenset, (list(held),))
        return begin_reduce(self, <PyObject*>value, obj)
    f = push(self, K_FROZENSET, obj)
    if not fastcap_set_has_weakrefs(obj):
        f.flags |= alone_flags(single)
    put(self, OP_MARK)
    return 1


cdef int step_frozenset(Pickler self, Frame* f) except -1:
    cdef PyObject* obj = f.obj
    cdef PyObject* item
    cdef Py_hash_t hash_
    cdef size_t slot
    cdef Py_ssize_t position
    cdef int own = items_own(f.flags) if f.flags & F_ALONE else OWN_UNKNOWN     # see save_tuple
    while _PySet_NextEntry(obj, &f.pos, &item, &hash_):
        if not save_leaf(self, item, own) and save(self, item, own):
            return 1
    if f.flags & F_ALONE and refcount(obj) <= 2 and not fastcap_set_has_weakrefs(obj):
        put(self, OP_FROZENSET)
        leave_out(self, obj, ALONE_TEMPORARY if f.flags & F_TEMPORARY else ALONE)
        return 0
    position = memo_find(&self.memo_table, obj, &slot)
    if position >= 0:
        put(self, OP_POP_MARK)
        put_get(self, position)
        return 0
    put(self, OP_FROZENSET)
    memoize_at(self, obj, slot)
    return 0


cdef int step_batch(Pickler self, Frame* f) except -1:
    """batch_list and batch_dict: the items or pairs of an iterator; obj is the one to be saved, pos what of a pair is.

    Step 0 opens a batch, 1 ends a single item, 2 comes after the first of several items and 3 after each later one;
    protocol 0 knows no batches: step 4 fetches an item, 5 appends it.
    """
    cdef bint pairs = f.kind == K_BATCH_DICT
    cdef PyObject* item
    while True:
        if f.obj != NULL:
            item = f.obj
            if pairs:
                while f.pos < 2:
                    f.pos += 1
                    if save(self, tuple_item(item, f.pos - 1), OWN_TEMPORARY if refcount(item) == 1 else OWN_UNKNOWN):
                        return 1
                f.pos = 0
                f.obj = NULL
                decref(item)
            else:
                f.obj = NULL
                if save_owned(self, item):
                    return 1
        if f.step == 0:
            if not take_item(f, next_item(self, f)):
                return 0
            f.b = next_item(self, f)
            if f.b == NULL:
                f.step = 1
            else:
                f.step = 2
                f.batch = 1
                put(self, OP_MARK)
        elif f.step == 1:
            put(self, OP_SETITEM if pairs else OP_APPEND)
            return 0
        elif f.step == 2:
            item = f.b
            f.b = NULL
            f.step = 3
            take_item(f, item)
        elif f.step == 3:
            f.batch += 1
            if f.batch == BATCH_SIZE:
                put(self, OP_SETITEMS if pairs else OP_APPENDS)
                f.step = 0
            elif not take_item(f, next_item(self, f)):
                put(self, OP_SETITEMS if pairs else OP_APPENDS)
                return 0
        elif f.step == 4:
            if not take_item(f, next_item(self, f)):
                return 0
            f.step = 5
        else:
            put(self, OP_SETITEM if pairs else OP_APPEND)
            f.step = 4


cdef inline bint take_item(Frame* f, PyObject* item) except -1:
    """Let a frame own an iterator's item, and save it next; False for NULL. What has to be a pair is checked."""
    f.obj = item
    if item != NULL and f.kind == K_BATCH_DICT:
        check_pair(item)
    return item != NULL


cdef inline PyObject* next_item(Pickler self, Frame* f) except? NULL:
    called(self)
    if self.on_unpicklable is not None:
        return next_or_stand_in(self, f)
    return PyIter_Next(f.a)


cdef int save_owned(Pickler self, PyObject* obj) except -1:
    """Save an object and drop the caller's reference to it."""
    try:
        return save(self, obj, OWN_TEMPORARY)      # the iterator's reference, now ours, is the owner's
    finally:
        decref(obj)


cdef int check_pair(PyObject* pair) except -1:
    if not PyTuple_Check(pair) or tuple_size(pair) != 2:
        raise TypeError("dict items iterator must return 2-tuples")
    return 0


# -- stand-ins for what cannot be pickled

@cython.final
@cython.internal
cdef class StandIn:
    """Takes the place of items that an iterator could not give."""
    cdef int number


cdef int report_failure(Pickler self, object obj, object error) except -1:
    """Tell `_on_unpicklable`; returns its number."""
    cdef long number
    function = self.on_unpicklable
    self.fatal = True
    answer = function(obj, error)
    number = PyLong_AsLong(<PyObject*>answer)
    if number < 0 or number > 0x7fffffff:
        raise ValueError(f"_on_unpicklable returned {number}")
    self.fatal = False
    called(self)
    return <int>number


cdef int put_stand_in(Pickler self, int number) except -1:
    """fastcap.findings.Unpicklable(number), in opcodes that need neither memo nor work stack."""
    cdef bytes name = b"cfastcap.findings\nUnpicklable\n"
    reserve(self, len(name) + 32)
    self.out.next = put_bytes(self.out.next, name, len(name))
    if self.proto < 2:
        put(self, OP_MARK)
    if self.bin_:
        put(self, OP_BININT)
        self.out.next = put_u32(self.out.next, <unsigned int>number)
    else:
        put_text(self, OP_INT, number)
    put(self, OP_TUPLE1 if self.proto >= 2 else OP_TUPLE)
    put(self, OP_REDUCE)
    return 0


cdef int save_or_stand_in(Pickler self, PyObject* obj, PyTypeObject* t) except -1:
    """Save what is neither container nor plain value, or put a stand-in where that fails.

    Whatever may fail does so before the first byte that counts: what there is of a name (put_global) is taken back.
    Once bytes have left or the memo has grown, only a file can fail, or memory.
    """
    cdef Py_ssize_t depth = self.depth
    cdef Py_ssize_t used = self.out.next - self.out.start
    cdef Py_ssize_t frame = self.out.frame
    cdef Py_ssize_t count = self.memo_table.count
    held = <object>obj
    if type(held) is StandIn:
        return put_stand_in(self, (<StandIn>held).number)
    try:
        if t == &PyPickleBuffer_Type:
            return save_picklebuffer(self, obj)
        return save_other(self, obj, t)
    except MemoryError:
        raise
    except Exception as error:
        if self.fatal or self.memo_table.count != count or self.out.frame != frame:
            raise
        if self.out.next - self.out.start < used:
            raise
        while self.depth > depth:
            pop(self)
        self.out.next = self.out.start + used
        put_stand_in(self, report_failure(self, held, error))
    return memoize(self, obj)


cdef PyObject* next_or_stand_in(Pickler self, Frame* f) except? NULL:
    """An iterator's next item. Where it fails: a stand-in, after which there is nothing more."""
    cdef PyObject* item
    cdef PyObject* below = self.chunks[(self.depth - 2) // CHUNK_FRAMES][(self.depth - 2) % CHUNK_FRAMES].obj
    cdef StandIn stand_in
    try:
        item = PyIter_Next(f.a)
        if item == NULL or f.kind == K_BATCH_LIST:
            return item
        try:
            check_pair(item)
        except:
            decref(item)
            raise
        return item
    except MemoryError:
        raise
    except Exception as error:
        stand_in = <StandIn>StandIn.__new__(StandIn)
        stand_in.number = report_failure(self, None if below == NULL else <object>below, error)
    nothing = iter(EMPTY)
    item = f.a
    f.a = <PyObject*>nothing
    incref(f.a)
    decref(item)
    last = stand_in if f.kind == K_BATCH_LIST else (stand_in, None)
    incref(<PyObject*>last)
    return <PyObject*>last


# -- globals

cdef int save_type(Pickler self, PyObject* obj) except -1:
    """Types of singletons have no importable name."""
    cls = <object>obj
    if cls is NoneType:
        value = (type, (None,))
    elif cls is EllipsisType:
        value = (type, (...,))
    elif cls is NotImplementedType:
        value = (type, (NotImplemented,))
    else:
        return save_global(self, <object>obj, None)
    return begin_reduce(self, <PyObject*>value, obj)


cdef object dotted_path(object name):
    """The parts of a qualified name; AttributeError for one that leads through a function's locals."""
    if not isinstance(name, str):
        raise TypeError(f"must be str, not {type_name(name)}")
    path = str.split(name, ".")
    if "<locals>" in path:
        raise AttributeError(f"Can't get local object {name!r}" if SINCE_313 else f"Can't pickle local object {name!r}")
    return path


cdef object deep_attribute(object obj, list path, list parent):
    """obj.a.b.c, or MISSING; *parent* gets the object that has the last part."""
    cdef PyObject* found
    for name in path:
        parent[0] = obj
        found = NULL
        fastcap_lookup_attr(<PyObject*>obj, <PyObject*>name, &found)
        if found == NULL:
            return MISSING
        obj = <object>found
        decref(found)
    return obj


cdef object which_module(Pickler self, object obj, list path):
    """The module an object says it is from, else the first one in sys.modules that has it under its name."""
    cdef PyObject* found = NULL
    fastcap_lookup_attr(<PyObject*>obj, <PyObject*>S_module, &found)
    self.epoch += 1
    if found != NULL:
        module_name = <object>found
        decref(found)
        if module_name is not None:
            return module_name
    modules = sys.modules
    # A copy: an attribute look-up may import something.
    for module_name, module in list(modules.items()):
        if module is None or module_name == "__main__":
            continue
        if deep_attribute(module, path, [None]) is obj:
            return module_name
    return "__main__"


cdef object loaded_module(object name):
    """The module in sys.modules, or None. Ten times as fast as an import that finds it there."""
    cdef PyObject* module = PyImport_GetModule(<PyObject*>name)
    if module == NULL:
        return None
    result = <object>module
    decref(module)
    return result


cdef object import_module(object name):
    """The module, from sys.modules where it is there; None where the import fails."""
    cdef PyObject* module = PyImport_Import(<PyObject*>name)
    if module == NULL:
        PyErr_Clear()
        return None
    result = <object>module
    decref(module)
    return result


cdef int save_global(Pickler self, object obj, object name) except -1:
    cdef Frame* f
    cdef list parent = [None]
    cdef list path
    if name is None:
        name = lookup(obj, S_qualname)
        if name is MISSING:
            name = obj.__name__
    path = dotted_path(name)
    module_name = which_module(self, obj, path)
    module = loaded_module(module_name)
    found = MISSING
    if module is not None:
        try:
            found = deep_attribute(module, path, parent)
        except Exception:
            found = MISSING
    if found is not obj:
        # Not there, or still being imported by another thread: an import waits for that.
        module = import_module(module_name)
        if module is None:
            raise PicklingError(f"Can't pickle {obj!r}: import of module {module_name!r} failed")
        try:
            found = deep_attribute(module, path, parent)
        except Exception:
            found = MISSING
    self.epoch += 1
    if found is MISSING:
        raise PicklingError(f"Can't pickle {obj!r}: attribute lookup {name!s} on {module_name!s} failed")
    if found is not obj:
        raise PicklingError(f"Can't pickle {obj!r}: it's not the same object as {module_name!s}.{name!s}")
    if self.proto >= 2 and extension_registry:
        code = extension_registry.get((module_name, name), MISSING)
        if code is not MISSING:
            return put_extension(self, obj, code)
    if parent[0] is module:
        name = path[len(path) - 1]
    if self.proto >= 4:
        f = push(self, K_GLOBAL, <PyObject*>obj)
        f.a = <PyObject*>module_name
        incref(f.a)
        f.b = <PyObject*>name
        incref(f.b)
        if step_global(self, f):
            return 1
        pop(self)
        return 0
    if SINCE_313 and parent[0] is not module:
        path[0] = (module_name, path[0])
        f = push(self, K_NESTED, <PyObject*>obj)
        f.a = <PyObject*>path
        incref(f.a)
        return 1
    if parent[0] is not module:
        # A nested name: getattr(parent, name), and then the object's memo entry.
        f = push(self, K_GLOBAL, <PyObject*>obj)
        f.step = 2
        value = (builtin_getattr, (parent[0], path[len(path) - 1]))
        return begin_reduce(self, <PyObject*>value, NULL)
    put_global(self, module_name, name)
    return memoize(self, <PyObject*>obj)


cdef int put_global(Pickler self, object module_name, object name) except -1:
    put(self, OP_GLOBAL)
    if self.fix_imports:
        module_name, name = fixed_names(module_name, name)
    put_line(self, module_name, "module")
    put_line(self, name, "global")
    return 0


cdef int step_nested(Pickler self, Frame* f) except -1:
    """Protocols up to 3 since 3.13: getattr(getattr(top, name), name), no intermediate object in the memo.

    Steps: 0 saves a getattr for each part but the first, then comes the first one; 1 saves a part's name.
    """
    cdef list path = <list>f.a
    while f.step == 0:
        if f.pos and self.proto < 2:
            put(self, OP_MARK)
        f.pos += 1
        if f.pos == len(path):
            put_global(self, (<tuple>path[0])[0], (<tuple>path[0])[1])
            f.step = 1
            f.pos = 0
        elif save(self, <PyObject*>builtin_getattr, OWN_UNKNOWN):
            return 1
    while True:
        if f.pos:
            put(self, OP_TUPLE2 if self.proto >= 2 else OP_TUPLE)
            put(self, OP_REDUCE)
        f.pos += 1
        if f.pos == len(path):
            memoize(self, f.obj)
            return 0
        name = path[f.pos]
        if save(self, <PyObject*>name, OWN_UNKNOWN):
            return 1


cdef int step_global(Pickler self, Frame* f) except -1:
    if f.step == 0:
        f.step = 1
        if save(self, f.a, OWN_UNKNOWN):
            return 1
    if f.step == 1:
        f.step = 2
        if save(self, f.b, OWN_UNKNOWN):
            return 1
    if f.a != NULL:
        put(self, OP_STACK_GLOBAL)
    memoize(self, f.obj)
    return 0


cdef int put_extension(Pickler self, object obj, object code) except -1:
    cdef long number
    cdef char* p
    if not SINCE_313 and not isinstance(code, int):
        raise PicklingError(f"Can't pickle {obj!r}: extension code {code!r} isn't an integer")
    number = PyLong_AsLong(<PyObject*>code)
    if number <= 0 or number > 0x7fffffff:
        if SINCE_313:
            raise RuntimeError(f"extension code {number} is out of range")
        raise PicklingError(f"Can't pickle {obj!r}: extension code {number} is out of range")
    p = self.out.next
    if number <= 0xff:
        p[0] = <char>OP_EXT1
        p[1] = <char>number
        self.out.next = p + 2
    elif number <= 0xffff:
        p[0] = <char>OP_EXT2
        self.out.next = put_u16(p + 1, <unsigned int>number)
    else:
        p[0] = <char>OP_EXT4
        self.out.next = put_u32(p + 1, number)
    return 0


cdef object fixed_names(object module_name, object name):
    """Names as Python 2 had them (fix_imports of _pickle.c)."""
    item = name_mapping.get((module_name, name), MISSING)
    if item is not MISSING:
        if not isinstance(item, tuple) or len(<tuple>item) != 2:
            raise RuntimeError(f"_compat_pickle.REVERSE_NAME_MAPPING values should be 2-tuples, "
                               f"not {type_name(item)}")
        module_name, name = item
        if not isinstance(module_name, str) or not isinstance(name, str):
            raise RuntimeError(f"_compat_pickle.REVERSE_NAME_MAPPING values should be pairs of str, "
                               f"not ({type_name(module_name)}, {type_name(name)})")
        return module_name, name
    item = import_mapping.get(module_name, MISSING)
    if item is not MISSING:
        if not isinstance(item, str):
            raise RuntimeError(f"_compat_pickle.REVERSE_IMPORT_MAPPING values should be strings, "
                               f"not {type_name(item)}")
        module_name = item
    return module_name, name


cdef int put_line(Pickler self, object name, str what) except -1:
    """An argument of GLOBAL; protocol 3 is the first whose readers understand UTF-8."""
    cdef bytes data
    try:
        data = name.encode("utf-8" if self.proto == 3 else "ascii")
    except UnicodeEncodeError:
        data = None
    if data is None:
        raise PicklingError(f"can't pickle {what} identifier '{name!s}' using pickle protocol {self.proto}")
    reserve(self, len(data) + 1)
    self.out.next = put_bytes(self.out.next, data, len(data))
    put(self, c'\n')
    return 0


# -- everything else

cdef int save_other(Pickler self, PyObject* obj, PyTypeObject* t) except -1:
    """Instances, functions, classes: reducer hooks, dispatch table, the object's own reduce protocol, in this order."""
    cdef TypeInfo* info
    cdef int written
    incref(obj)
    try:
        info = type_info(self, t)
        if info.plain and not self.has_override and not self.has_pers and self.proto >= 2:
            written = save_instance(self, obj, t, info)
            if written != 2:
                return written
        return save_reducible(self, obj, t, info.hooked)
    finally:
        decref(obj)


cdef int save_reducible(Pickler self, PyObject* obj, PyTypeObject* t, bint hooked) except -1:
    """The general way: get a reduce value for `obj`, of which the caller has a reference."""
    value = None
    function = None
    if self.recorded is not None:
        value = recall(self, obj)
        if value is not None:
            return save_value(self, value, obj)
    if self.has_override:
        value = self.override(<object>obj)
        called(self)
        if value is not NotImplemented:
            return save_value(self, value, obj)
    elif self.has_native and hooked:
        native = self.native
        value = native(self, <object>obj)
        called(self)
        if value is not NotImplemented:
            return save_value(self, value, obj)
    if t == &PyType_Type:
        return save_type(self, obj)
    if t == &PyFunction_Type:
        return save_global(self, <object>obj, None)
    function = dispatched(self, t)
    if function is not MISSING:
        value = function(<object>obj)
    elif PyType_IsSubtype(t, &PyType_Type):
        return save_global(self, <object>obj, None)
    else:
        function = reduce_ex_of(obj, t)
        if function is not None:
            value = function(<object>obj, self.proto)
        elif (function := lookup(<object>obj, S_reduce_ex)) is not MISSING:
            value = function(self.proto)
        else:
            function = lookup(<object>obj, S_reduce)
            if function is MISSING:
                raise PicklingError(f"can't pickle '{type_name(<object>obj)}' object: {<object>obj!r}")
            value = function()
    called(self)
    return save_value(self, value, obj)


cdef object reduce_ex_of(PyObject* obj, PyTypeObject* t):
    """__reduce_ex__ of an object's class, to be called with the object first, where obj.__reduce_ex__ is a method in C.

    Anything else is None. Saves making the bound method.
    """
    cdef PyObject* found
    if not fastcap_generic_getattr(t) or fastcap_has_dict(t):
        return None
    found = _PyType_Lookup(t, <PyObject*>S_reduce_ex)
    return <object>found if found != NULL and fastcap_is_method_descriptor(found) else None


cdef int save_value(Pickler self, object value, PyObject* obj) except -1:
    """Save `obj` by its reduce value."""
    if isinstance(value, str):
        return save_global(self, <object>obj, value)
    if not isinstance(value, tuple):
        raise PicklingError("__reduce__ must return a string or tuple")
    if self.recorded is not None:
        value = remember(self, <tuple>value, obj)
    if self.rebuild_tensor is not None and len(<tuple>value) == 2 and (<tuple>value)[0] is self.rebuild_tensor:
        value = compact_tensor(self, <tuple>value)
    return begin_reduce(self, <PyObject*>value, obj)


cdef object recall(Pickler self, PyObject* obj):
    """The reduce value that an object has given before, with new iterators over its items; None if there is none."""
    entry = self.recorded.get(<size_t>obj)
    if entry is None:
        return None
    _, value = entry
    if not isinstance(value, tuple):
        raise PicklingError(f"a recorded reduce value must be a tuple, not {type_name(value)}")
    if len(<tuple>value) > 3:
        return (*value[:3], *[iter(part) if type(part) is list else part for part in value[3:5]], *value[5:])
    return value


cdef tuple remember(Pickler self, tuple value, PyObject* obj):
    """Note the reduce value of an object, its items in lists; returns one to go on with."""
    cdef dict recorded = self.recorded
    if (<size_t>obj) in recorded:
        return value
    kept = value
    if len(value) > 3:
        # Asking for the items may run code that does anything, also to `self.recorded`.
        kept = (*value[:3], *[list(part) if PyIter_Check(<PyObject*>part) else part for part in value[3:5]], *value[5:])
        value = (*kept[:3], *[iter(part) if type(part) is list else part for part in kept[3:5]], *kept[5:])
    recorded[<size_t>obj] = (<object>obj, kept)
    return value


cdef object dispatched(Pickler self, PyTypeObject* t):
    """The reducer registered for a type, or MISSING."""
    cdef PyObject* found
    if not self.has_dispatch:
        found = PyDict_GetItemWithError(<PyObject*>copyreg_table, <PyObject*>t)
        return <object>found if found != NULL else MISSING
    table = self.dispatch
    if PyDict_CheckExact(<PyObject*>table):
        found = PyDict_GetItemWithError(<PyObject*>table, <PyObject*>t)
        return <object>found if found != NULL else MISSING
    if type(table) is ChainMap:
        # cloudpickle's: look into its dicts without its Python code.
        maps = lookup(table, S_maps)
        if type(maps) is list:
            for mapping in <list>maps:
                if not PyDict_CheckExact(<PyObject*>mapping):
                    break
                found = PyDict_GetItemWithError(<PyObject*>mapping, <PyObject*>t)
                if found != NULL:
                    return <object>found
            else:
                return MISSING
    self.epoch += 1
    found = PyObject_GetItem(<PyObject*>table, <PyObject*>t)
    if found == NULL:
        if not PyErr_ExceptionMatches(PyExc_KeyError):
            reraise()
        PyErr_Clear()
        return MISSING
    function = <object>found
    decref(found)
    return function


cdef extern from *:
    # Turns an exception that is already set into one Cython knows of.
    """
    static inline int fastcap_pending_error(void) { return -1; }
    """
    int reraise "fastcap_pending_error" () except -1


# -- torch tensors

cdef class Stand:
    """Stands for an object of the stream that does not exist here; reduces to what makes it."""
    cdef tuple value

    def __reduce__(self):
        return self.value


cdef class StorageParts:
    """What has been written of a torch storage: bytes [start, end) as one buffer, and storages of some types upon it."""
    cdef object storage         # keeps the storage, and with it its address, alive
    cdef Py_ssize_t start       # bytes
    cdef Py_ssize_t end         # bytes
    cdef Stand data             # a one-dimensional uint8 tensor
    cdef dict typed             # dtype -> Stand for a TypedStorage


cdef object find_rebuild_tensor():
    module = sys.modules.get("torch._utils")
    return getattr(module, "_rebuild_tensor_v2", None) if "torch" in sys.modules else None


cdef tuple compact_tensor(Pickler self, tuple value):
    """The reduce value of a dense tensor in memory with its storage written as one buffer, instead of by torch.save.

    The stream holds only functions of torch: Tensor._typed_storage of a tensor upon a bytearray (torch.frombuffer) takes
    the place of the storage that torch's own reduce value has. Tensors that share a storage share it again; of the
    storage, only the bytes between the first and the last that any tensor reaches are written. How far they reach is
    known at the end, so a tensor that reaches further than those before it makes for another attempt.
    """
    cdef Py_ssize_t width, first, low, high, number, step
    cdef StorageParts parts
    cdef tuple args
    torch = sys.modules["torch"]
    args = value[1]
    if len(args) < 4 or type(args[0]) is not torch.storage.TypedStorage:
        return value
    storage = args[0]._untyped_storage
    if type(storage) is not torch.UntypedStorage or storage.device.type != "cpu":
        return value
    dtype = args[0].dtype
    width = dtype.itemsize
    first = args[1]
    low = first * width
    high = low + width
    for number, step in zip(args[2], args[3]):
        if number == 0:
            return value
        high += (number - 1) * step * width
    if low < 0 or high > storage.nbytes():
        return value
    address = storage.data_ptr()
    parts = self.storages.get(address)
    if parts is None:
        parts = write_storage(self, torch, storage, address, low, high)
    elif low < parts.start or high > parts.end:
        before = self.extents[address]
        self.extents[address] = (min(low, before[0]), max(high, before[1]))
        self.extents_grew = True
        low = parts.start       # what is written now will be thrown away
    if (parts.end - parts.start) % width:
        return value
    typed = parts.typed.get(dtype)
    if typed is None:
        viewed = parts.data if dtype is torch.uint8 else stand((torch.Tensor.view, (parts.data, dtype)))
        typed = parts.typed[dtype] = stand((torch.Tensor._typed_storage, (viewed,)))
    return value[0], (typed, (low - parts.start) // width, *args[2:])


cdef StorageParts write_storage(Pickler self, object torch, object storage, object address, Py_ssize_t low,
                                Py_ssize_t high):
    """Plan to write as much of a storage as is known to be needed, in units of 16 bytes, the widest element."""
    cdef StorageParts parts = StorageParts.__new__(StorageParts)
    if address in self.extents:
        low, high = self.extents[address]
    self.extents[address] = (low, high)
    parts.storage = storage
    parts.start = low - low % 16
    parts.end = min(high + 15 - (high + 15) % 16, <Py_ssize_t>storage.nbytes())
    data = torch.empty(0, dtype=torch.uint8).set_(storage)[parts.start:parts.end].numpy()
    from_buffer = partial(torch.frombuffer, dtype=torch.uint8)
    parts.data = stand((from_buffer, (pickle.PickleBuffer(data),)))
    parts.typed = {}
    self.storages[address] = parts
    return parts


cdef Stand stand(tuple value):
    cdef Stand made = Stand.__new__(Stand)
    made.value = value
    return made


# -- reduce values

cdef enum ReduceStep:
    R_NEWOBJ_CLASS = 0
    R_NEWOBJ_ARGS
    R_NEWOBJ
    R_NEWOBJ_EX_CLASS
    R_NEWOBJ_EX_ARGS
    R_NEWOBJ_EX_KWARGS
    R_NEWOBJ_EX
    R_CALLABLE
    R_ARGS
    R_REDUCE
    R_MEMO
    R_LISTITEMS
    R_DICTITEMS
    R_STATE
    R_BUILD
    R_SETTER_OBJECT
    R_SETTER_STATE
    R_SETTER
    R_DONE


cdef inline PyObject* part(PyObject* value, Py_ssize_t i) noexcept:
    """An item of a reduce value, NULL where it is missing or None."""
    cdef PyObject* item
    if i >= tuple_size(value):
        return NULL
    item = tuple_item(value, i)
    return NULL if item == Py_None else item


cdef int begin_reduce(Pickler self, PyObject* value, PyObject* obj) except -1:
    """save_reduce up to its first byte: check the reduce value and put it on the stack. `obj` may be NULL."""
    cdef Py_ssize_t size = tuple_size(value)
    cdef PyObject* function
    cdef PyObject* arguments
    cdef PyObject* item
    cdef PyObject* cls
    cdef Frame* f
    cdef int step = R_CALLABLE
    if size < 2 or size > 6:
        raise PicklingError("tuple returned by __reduce__ must contain 2 through 6 elements")
    function = tuple_item(value, 0)
    arguments = tuple_item(value, 1)
    if not PyCallable_Check(function):
        raise PicklingError("first item of the tuple returned by __reduce__ must be callable")
    if not PyTuple_Check(arguments):
        raise PicklingError("second item of the tuple returned by __reduce__ must be a tuple")
    item = part(value, 3)
    if item != NULL and not PyIter_Check(item):
        raise PicklingError(f"fourth element of the tuple returned by __reduce__ must be an iterator, "
                            f"not {type_name(<object>item)}")
    item = part(value, 4)
    if item != NULL and not PyIter_Check(item):
        raise PicklingError(f"fifth element of the tuple returned by __reduce__ must be an iterator, "
                            f"not {type_name(<object>item)}")
    item = part(value, 5)
    if item != NULL and not PyCallable_Check(item):
        raise PicklingError(f"sixth element of the tuple returned by __reduce__ must be a function, "
                            f"not {type_name(<object>item)}")
    f = push(self, K_REDUCE, obj)
    f.a = value
    incref(value)
    if self.proto >= 2 and fastcap_may_be_newobj(function):
        name = lookup(<object>function, S_name)
        self.epoch += 1
        if isinstance(name, str):
            if name == S_newobj_ex:
                step = check_newobj_ex(self, f, <tuple>arguments)
            elif name == S_newobj:
                step = R_NEWOBJ_CLASS
                if tuple_size(arguments) < 1:
                    raise PicklingError("__newobj__ arglist is empty")
                cls = tuple_item(arguments, 0)
                if not PyType_Check(cls):
                    raise PicklingError("args[0] from __newobj__ args is not a type")
                if obj != NULL:
                    obj_class = lookup(<object>obj, S_class)
                    if obj_class is MISSING:
                        obj_class = type(<object>obj)
                    if <PyObject*>obj_class != cls:
                        raise PicklingError("args[0] from __newobj__ args has the wrong class")
    f.step = step
    return 1


cdef int check_newobj_ex(Pickler self, Frame* f, tuple arguments) except -1:
    """NEWOBJ_EX and its stand-in before protocol 4, partial(cls.__new__, cls, *args, **kwargs)()."""
    if len(arguments) != 3:
        raise PicklingError(f"length of the NEWOBJ_EX argument tuple must be exactly 3, not {len(arguments)}")
    cls, args, kwargs = arguments
    if not PyType_Check(<PyObject*>cls):
        raise PicklingError(f"first item from NEWOBJ_EX argument tuple must be a class, "
                            f"not {type_name(cls)}")
    if not isinstance(args, tuple):
        raise PicklingError(f"second item from NEWOBJ_EX argument tuple must be a tuple, "
                            f"not {type_name(args)}")
    if not isinstance(kwargs, dict):
        raise PicklingError(f"third item from NEWOBJ_EX argument tuple must be a dict, "
                            f"not {type_name(kwargs)}")
    if self.proto >= 4:
        return R_NEWOBJ_EX_CLASS
    stand_in = partial(cls.__new__, cls, *args, **kwargs)
    f.b = <PyObject*>stand_in
    incref(f.b)
    return R_CALLABLE


cdef int step_reduce(Pickler self, Frame* f) except -1:
    cdef PyObject* value = f.a
    cdef PyObject* arguments = tuple_item(value, 1)
    cdef PyObject* item
    cdef size_t slot
    cdef Py_ssize_t position
    cdef int step
    # A reduce value that its reducer has kept may come up again, and its items with it.
    cdef int own = OWN_TEMPORARY if refcount(value) == 1 else OWN_UNKNOWN
    while True:
        step = f.step
        f.step = step + 1
        if step == R_NEWOBJ_CLASS:
            if save(self, tuple_item(arguments, 0), OWN_UNKNOWN):
                return 1
        elif step == R_NEWOBJ_ARGS:
            f.b = PyTuple_GetSlice(arguments, 1, tuple_size(arguments))
            if save(self, f.b, OWN_TEMPORARY):
                return 1
        elif step == R_NEWOBJ:
            put(self, OP_NEWOBJ)
            f.step = R_MEMO
        elif step == R_NEWOBJ_EX_CLASS or step == R_NEWOBJ_EX_ARGS or step == R_NEWOBJ_EX_KWARGS:
            if save(self, tuple_item(arguments, step - R_NEWOBJ_EX_CLASS), OWN_UNKNOWN):
                return 1
        elif step == R_NEWOBJ_EX:
            put(self, OP_NEWOBJ_EX)
            f.step = R_MEMO
        elif step == R_CALLABLE:
            if save(self, f.b if f.b != NULL else tuple_item(value, 0), OWN_UNKNOWN):
                return 1
        elif step == R_ARGS:
            if save(self, <PyObject*>EMPTY if f.b != NULL else arguments, own):
                return 1
        elif step == R_REDUCE:
            put(self, OP_REDUCE)
        elif step == R_MEMO:
            if f.obj != NULL:
                position = memo_find(&self.memo_table, f.obj, &slot)
                if position >= 0:
                    # The object contains itself in its arguments: throw this copy away and fetch the finished one.
                    put(self, OP_POP)
                    put_get(self, position)
                    return 0
                memoize_at(self, f.obj, slot)
        elif step == R_LISTITEMS or step == R_DICTITEMS:
            item = part(value, 3 if step == R_LISTITEMS else 4)
            if item != NULL:
                push_batch(self, K_BATCH_LIST if step == R_LISTITEMS else K_BATCH_DICT, item)
                return 1
        elif step == R_STATE:
            item = part(value, 2)
            if item == NULL:
                return 0
            if part(value, 5) != NULL:
                # state_setter(obj, state), whose result is thrown away.
                f.step = R_SETTER_OBJECT
                item = part(value, 5)
            if save(self, item, own):
                return 1
        elif step == R_BUILD:
            put(self, OP_BUILD)
            return 0
        elif step == R_SETTER_OBJECT:
            if f.obj == NULL:
                raise SystemError("a state setter needs an object")
            if save(self, f.obj, OWN_UNKNOWN):
                return 1
        elif step == R_SETTER_STATE:
            if save(self, tuple_item(value, 2), own):
                return 1
        else:
            put(self, OP_TUPLE2)
            put(self, OP_REDUCE)
            put(self, OP_POP)
            return 0


# -- plain instances

cdef TypeInfo* type_info(Pickler self, PyTypeObject* t) except NULL:
    """What is known of a type, inspected again when the type, its bases or its metaclass have changed."""
    cdef TypeInfo* info = &self.types[((<size_t>t) >> 5) & (TYPE_SLOTS - 1)]
    cdef PyTypeObject* meta
    if info.type == t and info.version != 0 and info.version == fastcap_type_version(t):
        meta = type_of(<PyObject*>t)
        if meta == &PyType_Type or info.meta_version == fastcap_type_version(meta):
            return info
    inspect_type(self, info, t)
    return info


cdef int inspect_type(Pickler self, TypeInfo* info, PyTypeObject* t) except -1:
    """Find out whether instances are exactly what object.__reduce_ex__(2 or higher) makes of them.

    Laid beside object___reduce_ex___impl, reduce_newobj and object_getstate_default (Objects/typeobject.c): the class
    overrides none of the methods they look up, is no list, dict or class with items, can be made by its __new__ and
    has no C fields of its own.
    """
    cdef PyTypeObject* meta = type_of(<PyObject*>t)
    cdef bint generic = fastcap_generic_getattr(t)
    cdef bint own_class = _PyType_Lookup(t, <PyObject*>S_class) == <PyObject*>object_class
    cdef PyObject* found
    cdef PyObject* old = info.slotnames
    cdef bint plain
    cdef object slotnames = None
    info.type = NULL
    info.version = 0
    info.slotnames = NULL
    xdecref(old)
    plain = generic and own_class and fastcap_has_new(t) and fastcap_item_size(t) == 0
    plain = plain and not PyType_IsSubtype(t, &PyList_Type) and not PyType_IsSubtype(t, &PyDict_Type)
    plain = plain and not PyType_IsSubtype(t, &PyType_Type)
    plain = plain and _PyType_Lookup(t, <PyObject*>S_reduce_ex) == <PyObject*>object_reduce_ex
    plain = plain and _PyType_Lookup(t, <PyObject*>S_reduce) == <PyObject*>object_reduce
    plain = plain and _PyType_Lookup(t, <PyObject*>S_getnewargs) == NULL
    plain = plain and _PyType_Lookup(t, <PyObject*>S_getnewargs_ex) == NULL
    if plain:
        found = _PyType_Lookup(t, <PyObject*>S_getstate)
        plain = found == (<PyObject*>object_getstate if SINCE_311 else NULL)
    if plain and meta != &PyType_Type:
        # `cls.__reduce__` is asked of the class as an object: a metaclass could answer.
        plain = (_PyType_Lookup(meta, <PyObject*>S_reduce) == <PyObject*>object_reduce
                 and fastcap_type_getattro(meta))
    # copyreg leaves __slotnames__ in the class, where it would show when the class goes by value. CPython gets there only
    # for an object that no hook and no reducer has taken, so a class that one may take is not asked.
    plain = plain and not self.has_override and not self.has_pers and dispatched(self, t) is MISSING
    if plain:
        # copyreg cannot store its answer in a static type, and would give the same one each time.
        slotnames = slots_of(<object>t) if fastcap_is_heap_type(t) else []
        plain = (type(slotnames) is list
                 and fastcap_basic_size(t) <= fastcap_plain_size(t)
                 + <Py_ssize_t>sizeof(void*) * len(<list>slotnames))
        # The look-ups above gave the type its version; finding the slots may have changed the type.
        _PyType_Lookup(t, <PyObject*>S_reduce_ex)
        if meta != &PyType_Type:
            _PyType_Lookup(meta, <PyObject*>S_reduce)
    info.plain = plain
    info.hooked = (not own_class or not generic or PyType_IsSubtype(t, &PyType_Type) or t == &PyFunction_Type)
    if plain and len(<list>slotnames):
        info.slotnames = <PyObject*>slotnames
        incref(info.slotnames)
    info.epoch = 0
    info.type = t
    info.version = fastcap_type_version(t)
    info.meta_version = fastcap_type_version(meta)
    return 0


cdef object slots_of(object cls):
    """cls.__slotnames__ as _PyType_GetSlotNames finds it: the slots to save, from the cache or from copyreg."""
    slotnames = cls.__dict__.get(S_slotnames)
    if slotnames is None:
        slotnames = find_slotnames(cls)
    return slotnames


cdef extern from *:
    """
    static inline int fastcap_type_getattro(PyTypeObject *meta) { return meta->tp_getattro == PyType_Type.tp_getattro; }
    """
    bint fastcap_type_getattro(PyTypeObject*) noexcept


cdef int save_instance(Pickler self, PyObject* obj, PyTypeObject* t, TypeInfo* info) except -1:
    """save_reduce(copyreg.__newobj__, (cls,), state) without making the reduce value. Returns 2 if that is not allowed.

    The caller has a reference of `obj`.
    """
    cdef PyObject* state = NULL
    cdef size_t slot
    cdef Py_ssize_t position
    cdef Frame* f
    cdef bint plain
    if info.epoch != self.epoch:
        if dispatched(self, t) is not MISSING:
            return 2
        if info.type != t:      # a mapping of Python code may have made us inspect other types
            return 2
        info.epoch = self.epoch
    if fastcap_has_dict(t):
        state = PyObject_GenericGetDict(obj, NULL)
        try:
            plain = PyDict_CheckExact(state) and not has_own_protocol(state)
        except:
            decref(state)
            raise
        if not plain:
            decref(state)
            return 2
        if dict_size(state) == 0:
            decref(state)
            state = NULL
    if info.slotnames != NULL:
        state = state_with_slots(self, obj, state, info.slotnames)
    position = memo_find(&self.memo_table, <PyObject*>t, &slot)
    if position < 0:
        f = push(self, K_INSTANCE, obj)
        f.a = state
        return 1
    put_get(self, position)
    if self.out.next >= self.out.limit:
        try:
            boundary(self)
        except:
            xdecref(state)
            raise
    put(self, OP_EMPTY_TUPLE)
    put(self, OP_NEWOBJ)
    memo_find(&self.memo_table, obj, &slot)
    memoize_at(self, obj, slot)
    if state == NULL:
        return 0
    return save_state(self, state)


cdef bint has_own_protocol(PyObject* state) except -1:
    """Whether an instance's dict hides the methods of its class that object's reduce protocol calls."""
    if _PyDict_GetItem_KnownHash(state, <PyObject*>S_reduce_ex, hash_reduce_ex) != NULL:
        return True
    return _PyDict_GetItem_KnownHash(state, <PyObject*>S_getstate, hash_getstate) != NULL


cdef PyObject* state_with_slots(Pickler self, PyObject* obj, PyObject* state, PyObject* slotnames) except? NULL:
    """(state, slots) where any slot is filled; takes over the reference `state`, which may be NULL."""
    cdef dict slots = {}
    cdef PyObject* value
    dict_state = None
    if state != NULL:
        dict_state = <object>state
        decref(state)
    for name in list(<object>slotnames):
        value = NULL
        fastcap_lookup_attr(obj, <PyObject*>name, &value)
        if value != NULL:
            slots[name] = <object>value
            decref(value)
    called(self)       # a slot may be hidden by a property
    if slots:
        dict_state = (dict_state, slots)
    if dict_state is None:
        return NULL
    incref(<PyObject*>dict_state)
    return <PyObject*>dict_state


cdef inline int state_own(PyObject* state) noexcept:
    """What to pass to save for a state: the instance's own dict, or what state_with_slots has made."""
    return 1 if PyDict_CheckExact(state) else OWN_TEMPORARY


cdef int save_state(Pickler self, PyObject* state) except -1:
    """Write a state and BUILD; takes over the reference `state`."""
    cdef size_t slot = 0
    cdef Py_ssize_t position
    cdef int single
    cdef Frame* f
    try:
        if self.out.next >= self.out.limit:
            boundary(self)
        if PyDict_CheckExact(state) and not self.fast_:
            # Owned by the instance, and by us.
            single = alone(self, state, 1)
            position = -1 if single else memo_find(&self.memo_table, state, &slot)
            if position >= 0:
                put_get(self, position)
            else:
                if not single and wary(self):
                    check_first(self, state)
                put(self, OP_EMPTY_DICT)
                if single:
                    leave_out(self, state, single)
                else:
                    memoize_at(self, state, slot)
                if dict_size(state):
                    return save_items(self, state, NULL, F_BUILD)
            put(self, OP_BUILD)
            return 0
        push(self, K_BUILD, NULL)
        if save_object(self, state, state_own(state)):
            return 1
        put(self, OP_BUILD)
        pop(self)
        return 0
    finally:
        decref(state)


cdef int step_instance(Pickler self, Frame* f) except -1:
    """An instance whose class was not memoized when its saving began. Step 0 saves the class, 1 the rest, 2 BUILD."""
    cdef size_t slot
    cdef Py_ssize_t position
    cdef PyObject* state
    if f.step == 0:
        f.step = 1
        if save(self, <PyObject*>type_of(f.obj), OWN_UNKNOWN):
            return 1
    if f.step == 1:
        if self.out.next >= self.out.limit:
            boundary(self)
        put(self, OP_EMPTY_TUPLE)
        put(self, OP_NEWOBJ)
        position = memo_find(&self.memo_table, f.obj, &slot)
        if position >= 0:
            # The class refers to this very instance.
            put(self, OP_POP)
            put_get(self, position)
            return 0
        memoize_at(self, f.obj, slot)
        if f.a == NULL:
            return 0
        f.step = 2
        if save(self, f.a, state_own(f.a)):
            return 1
    put(self, OP_BUILD)
    return 0


# ---- errors -----------------------------------------------------------------------------------------------------------

cdef int note_path(Pickler self, object error) except -1:
    """Tell, in a note of the exception (3.11+), which object failed: what the work stack was doing."""
    cdef Py_ssize_t level
    cdef Frame* f
    cdef list parts = []
    cdef Py_ssize_t skipped
    if not SINCE_311 or not isinstance(error, Exception) or self.depth == 0:
        return 0
    skipped = self.depth - 60
    for level in range(self.depth):
        if skipped > 0 and level == 30:
            parts.append(" ... ")
        if skipped > 0 and 30 <= level < 30 + skipped:
            continue
        f = &self.chunks[level // CHUNK_FRAMES][level % CHUNK_FRAMES]
        text = describe(f, level and saves_state(&self.chunks[(level - 1) // CHUNK_FRAMES][(level - 1) % CHUNK_FRAMES]))
        if text:
            parts.append(text)
    path = "".join(parts)
    try:
        error.add_note(f"while pickling obj{path}")
    except Exception:
        pass    # an exception class that refuses notes; its own message matters more
    return 0


cdef bint saves_state(Frame* f) noexcept:
    return (f.kind == K_INSTANCE and f.step == 2) or (f.kind == K_REDUCE and f.step == R_BUILD) or f.kind == K_BUILD


cdef str describe(Frame* f, bint is_state):
    """The step of a path that a frame stands for; the items of a state are attributes."""
    cdef int kind = f.kind
    if kind == K_LIST or kind == K_BATCH_LIST:
        return f"[{f.pos}]" if kind == K_LIST else "[...]"
    if kind == K_TUPLE:
        return f"[{f.pos - 1}]"
    if kind == K_DICT:
        if f.b == NULL:
            return ""
        key = <object>f.b
        if type(key) is str and (is_state or f.flags & F_BUILD) and key.isidentifier():
            return f".{key}"
        return f"[{short(key)}]"
    if kind == K_BATCH_DICT:
        if f.obj == NULL or not PyTuple_Check(f.obj):
            return "[...]"
        return f"[{short((<tuple>f.obj)[0])}]"
    if kind == K_SET or kind == K_FROZENSET:
        return "<item>"
    if kind == K_INSTANCE and f.step == 1:
        return "<class>"
    if kind == K_PERSID:
        return "<persistent id>"
    if kind == K_REDUCE:
        if f.step == R_NEWOBJ_ARGS or f.step == R_NEWOBJ_EX_ARGS:
            return "<class>"
        if f.step == R_ARGS:
            return "<reducer>"
        if f.step == R_REDUCE or f.step == R_NEWOBJ:
            return "<args>"
        if f.step == R_SETTER:
            return "<state>"
    return ""


cdef str short(object key):
    if type(key) is str or type(key) is int or type(key) is bytes:
        text = repr(key[:40] if type(key) is not int else key)
        return text if len(text) <= 60 else text[:57] + "..."
    return f"<{type_name(key)}>"
