"""cloudpickle's reducers for functions, classes and code, in native code.

A *flavor* is one copy of cloudpickle (the package itself, or the one that Ray, joblib or PySpark carry). ``Flavor``
reads that copy's module, recognises its functions by their shape, and gives the same reduce values as they do. A
function that it does not recognise -- a newer cloudpickle, a vendor's change, a monkeypatch -- is called instead of
replaced, so the copy, not this file, defines the semantics. The functions below keep cloudpickle's names, so that
both files can be laid side by side.

Facts about CPython that this file leans on:

* a dict's ``ma_version_tag`` changes with every change of the dict and is unique among all dicts (PEP 509; CPython
  up to 3.13). It tells whether a module was patched and whether ``sys.modules`` changed since the last look.
* ``co_extra`` (PEP 523) hangs our notes about a code object on the code object itself: no table, no weak references.
* ``co_code`` is free of specialised and instrumented opcodes and its inline caches read as zero
  (``_PyCode_GetCode`` in Objects/codeobject.c), so a linear walk over it finds what ``dis`` finds.
"""

from binascii import crc32
from libc.stdint cimport uint64_t

cimport cython

from collections import ChainMap

import abc
import enum
import opcode
import pickle
import sys
import types
from weakref import WeakKeyDictionary

cdef extern from *:
    """
    #if PY_VERSION_HEX < 0x030E0000
      /* The field is deprecated from 3.12 on, and is still kept up to date in 3.12 and 3.13 (PEP 699). */
      #if defined(__GNUC__)
        #define FC_NO_DEPRECATION _Pragma("GCC diagnostic push") \\
            _Pragma("GCC diagnostic ignored \\"-Wdeprecated-declarations\\"")
        #define FC_DEPRECATION _Pragma("GCC diagnostic pop")
      #else
        #define FC_NO_DEPRECATION
        #define FC_DEPRECATION
      #endif
      FC_NO_DEPRECATION
      static inline uint64_t fc_dict_version(PyObject *dict) { return ((PyDictObject *)dict)->ma_version_tag; }
      FC_DEPRECATION
    #else
      static inline uint64_t fc_dict_version(PyObject *dict) { (void)dict; return 0; }
    #endif

    #if PY_VERSION_HEX >= 0x030C0000
      #define fc_request_code_extra PyUnstable_Eval_RequestCodeExtraIndex
      #define fc_code_get_extra PyUnstable_Code_GetExtra
      #define fc_code_set_extra PyUnstable_Code_SetExtra
    #else
      #define fc_request_code_extra _PyEval_RequestCodeExtraIndex
      #define fc_code_get_extra _PyCode_GetExtra
      #define fc_code_set_extra _PyCode_SetExtra
    #endif
    /* Objects/codeobject.c hands NULL to the free function where a code object has an extra of another index only. */
    static void fc_release_extra(void *extra) { Py_XDECREF((PyObject *)extra); }

    #if PY_VERSION_HEX >= 0x030D0000
      #define fc_optional_attr PyObject_GetOptionalAttr
    #else
      #define fc_optional_attr _PyObject_LookupAttr
    #endif

    static inline PyObject *fc_func_name(PyObject *f) { return ((PyFunctionObject *)f)->func_name; }
    static inline PyObject *fc_func_qualname(PyObject *f) { return ((PyFunctionObject *)f)->func_qualname; }
    static inline PyObject *fc_func_doc(PyObject *f) { return ((PyFunctionObject *)f)->func_doc; }
    static inline PyObject *fc_func_module(PyObject *f) { return ((PyFunctionObject *)f)->func_module; }
    static inline PyObject *fc_func_dict(PyObject *f) { return ((PyFunctionObject *)f)->func_dict; }
    static inline PyObject *fc_func_code(PyObject *f) { return ((PyFunctionObject *)f)->func_code; }
    static inline PyObject *fc_func_globals(PyObject *f) { return ((PyFunctionObject *)f)->func_globals; }
    static inline PyObject *fc_func_defaults(PyObject *f) { return ((PyFunctionObject *)f)->func_defaults; }
    static inline PyObject *fc_func_kwdefaults(PyObject *f) { return ((PyFunctionObject *)f)->func_kwdefaults; }
    static inline PyObject *fc_func_closure(PyObject *f) { return ((PyFunctionObject *)f)->func_closure; }

    #if PY_VERSION_HEX >= 0x030B0000
      static inline PyObject *fc_code_code(PyObject *c) { return PyCode_GetCode((PyCodeObject *)c); }
      static inline PyObject *fc_code_varnames(PyObject *c) { return PyCode_GetVarnames((PyCodeObject *)c); }
      static inline PyObject *fc_code_freevars(PyObject *c) { return PyCode_GetFreevars((PyCodeObject *)c); }
      static inline PyObject *fc_code_cellvars(PyObject *c) { return PyCode_GetCellvars((PyCodeObject *)c); }
      static inline Py_ssize_t fc_code_free_count(PyObject *c) { return ((PyCodeObject *)c)->co_nfreevars; }
      static inline PyObject *fc_code_qualname(PyObject *c) { return ((PyCodeObject *)c)->co_qualname; }
      static inline PyObject *fc_code_exceptions(PyObject *c) { return ((PyCodeObject *)c)->co_exceptiontable; }
      #define FC_CODE_HAS_QUALNAME 1
    #else
      static inline PyObject *fc_code_code(PyObject *c) { return Py_NewRef(((PyCodeObject *)c)->co_code); }
      static inline PyObject *fc_code_varnames(PyObject *c) { return Py_NewRef(((PyCodeObject *)c)->co_varnames); }
      static inline PyObject *fc_code_freevars(PyObject *c) { return Py_NewRef(((PyCodeObject *)c)->co_freevars); }
      static inline PyObject *fc_code_cellvars(PyObject *c) { return Py_NewRef(((PyCodeObject *)c)->co_cellvars); }
      static inline Py_ssize_t fc_code_free_count(PyObject *c) {
          return PyTuple_GET_SIZE(((PyCodeObject *)c)->co_freevars);
      }
      static inline PyObject *fc_code_qualname(PyObject *c) { return NULL; }
      static inline PyObject *fc_code_exceptions(PyObject *c) { return NULL; }
      #define FC_CODE_HAS_QUALNAME 0
    #endif
    static inline PyObject *fc_code_name(PyObject *c) { return ((PyCodeObject *)c)->co_name; }
    static inline PyObject *fc_code_names(PyObject *c) { return ((PyCodeObject *)c)->co_names; }
    static inline PyObject *fc_code_consts(PyObject *c) { return ((PyCodeObject *)c)->co_consts; }
    static inline PyObject *fc_code_filename(PyObject *c) { return ((PyCodeObject *)c)->co_filename; }
    static inline PyObject *fc_code_linetable(PyObject *c) { return ((PyCodeObject *)c)->co_linetable; }
    static inline int fc_code_argcount(PyObject *c) { return ((PyCodeObject *)c)->co_argcount; }
    static inline int fc_code_posonly(PyObject *c) { return ((PyCodeObject *)c)->co_posonlyargcount; }
    static inline int fc_code_kwonly(PyObject *c) { return ((PyCodeObject *)c)->co_kwonlyargcount; }
    static inline int fc_code_nlocals(PyObject *c) { return ((PyCodeObject *)c)->co_nlocals; }
    static inline int fc_code_stacksize(PyObject *c) { return ((PyCodeObject *)c)->co_stacksize; }
    static inline int fc_code_flags(PyObject *c) { return ((PyCodeObject *)c)->co_flags; }
    static inline int fc_code_firstlineno(PyObject *c) { return ((PyCodeObject *)c)->co_firstlineno; }

    /* PyModule_GetDict asserts that there is a dict. */
    static inline PyObject *fc_module_dict(PyObject *m) {
        PyObject **slot = _PyObject_GetDictPtr(m);
        return slot == NULL ? NULL : *slot;
    }
    static inline int fc_plain_module(PyObject *m) {
        return PyModule_Check(m) && Py_TYPE(m)->tp_getattro == PyModule_Type.tp_getattro;
    }
    /* Borrowed, without an exception; the search along the MRO that `type.__getattribute__` starts with. */
    static inline PyObject *fc_type_lookup(PyObject *type, PyObject *name) {
        return _PyType_Lookup((PyTypeObject *)type, name);
    }

    /* 0 if the type has no version now. The version changes with every change of the type or of a base of it
       (PyType_Modified in Objects/typeobject.c); looking an attribute up gives a type a new one. */
    static inline unsigned int fc_type_version(PyObject *type) {
    #if PY_VERSION_HEX < 0x030C0000
        if (!PyType_HasFeature((PyTypeObject *)type, Py_TPFLAGS_VALID_VERSION_TAG)) {
            return 0;
        }
    #endif
        return ((PyTypeObject *)type)->tp_version_tag;
    }

    /* What `type.__dict__` of a class shows, as a new reference. */
    static inline PyObject *fc_type_dict(PyObject *type) {
    #if PY_VERSION_HEX >= 0x030C0000
        return PyType_GetDict((PyTypeObject *)type);
    #else
        return Py_NewRef(((PyTypeObject *)type)->tp_dict);
    #endif
    }

    static PyObject *fc_copy_string(PyObject *text) {
    #if PY_VERSION_HEX < 0x030C0000
        if (PyUnicode_READY(text) < 0) {
            return NULL;
        }
    #endif
        Py_ssize_t length = PyUnicode_GET_LENGTH(text);
        PyObject *copy = PyUnicode_New(length, PyUnicode_MAX_CHAR_VALUE(text));
        if (copy != NULL) {
            memcpy(PyUnicode_DATA(copy), PyUnicode_DATA(text), (size_t)length * PyUnicode_KIND(text));
        }
        return copy;
    }
    """
    ctypedef void (*freefunc)(void *)
    ctypedef struct PyTypeObject:
        pass
    uint64_t fc_dict_version(dict) noexcept
    Py_ssize_t fc_request_code_extra(freefunc) noexcept
    int fc_code_get_extra(object code, Py_ssize_t index, void **extra) except -1
    int fc_code_set_extra(object code, Py_ssize_t index, void *extra) except -1
    void fc_release_extra(void *extra) noexcept
    int fc_optional_attr(object obj, object name, PyObject **result) except -1
    PyObject *fc_func_name(object) noexcept
    PyObject *fc_func_qualname(object) noexcept
    PyObject *fc_func_doc(object) noexcept
    PyObject *fc_func_module(object) noexcept
    PyObject *fc_func_dict(object) noexcept
    PyObject *fc_func_code(object) noexcept
    PyObject *fc_func_globals(object) noexcept
    PyObject *fc_func_defaults(object) noexcept
    PyObject *fc_func_kwdefaults(object) noexcept
    PyObject *fc_func_closure(object) noexcept
    object fc_code_code(object)
    object fc_code_varnames(object)
    object fc_code_freevars(object)
    object fc_code_cellvars(object)
    Py_ssize_t fc_code_free_count(object) noexcept
    PyObject *fc_code_qualname(object) noexcept
    PyObject *fc_code_exceptions(object) noexcept
    bint FC_CODE_HAS_QUALNAME
    PyObject *fc_code_name(object) noexcept
    PyObject *fc_code_names(object) noexcept
    PyObject *fc_code_consts(object) noexcept
    PyObject *fc_code_filename(object) noexcept
    PyObject *fc_code_linetable(object) noexcept
    int fc_code_argcount(object) noexcept
    int fc_code_posonly(object) noexcept
    int fc_code_kwonly(object) noexcept
    int fc_code_nlocals(object) noexcept
    int fc_code_stacksize(object) noexcept
    int fc_code_flags(object) noexcept
    int fc_code_firstlineno(object) noexcept
    bint fc_plain_module(object) noexcept
    PyObject *fc_module_dict(object) noexcept
    PyObject *fc_type_lookup(object, object) noexcept
    unsigned int fc_type_version(object) noexcept
    object fc_type_dict(object)
    object fc_copy_string(object)

cdef extern from "Python.h":
    ctypedef struct PyObject:
        pass
    const Py_ssize_t PY_SSIZE_T_MAX
    bint PyFunction_Check(object) noexcept
    bint PyType_Check(object) noexcept
    bint PyCode_Check(object) noexcept
    bint PyDict_CheckExact(object) noexcept
    bint PyUnicode_CheckExact(object) noexcept
    bint PyCell_Check(object) noexcept
    PyObject *PyCell_GET(object) noexcept
    PyObject *PyDict_GetItemWithError(object, object) except? NULL
    PyObject *PyDict_SetDefault(object, object, object) except NULL
    object PyDict_Copy(object)
    list PyDict_Keys(object)
    object PyUnicode_Join(object, object)
    Py_ssize_t PyUnicode_GET_LENGTH(object) noexcept
    Py_ssize_t PyUnicode_FindChar(object, Py_UCS4, Py_ssize_t, Py_ssize_t, int) except -2
    Py_ssize_t PyUnicode_Tailmatch(object, object, Py_ssize_t, Py_ssize_t, int) except -1
    list PyUnicode_Split(object, object, Py_ssize_t)
    tuple PyTuple_New(Py_ssize_t)
    Py_ssize_t PyTuple_GET_SIZE(object) noexcept
    void PyTuple_SET_ITEM(object, Py_ssize_t, PyObject *) noexcept
    PyObject *PyTuple_GET_ITEM(object, Py_ssize_t) noexcept
    Py_ssize_t PySet_GET_SIZE(object) noexcept
    object PyWeakref_NewRef(object, PyObject *)
    void Py_INCREF(PyObject *) noexcept
    void Py_DECREF(PyObject *) noexcept
    int Py_EnterRecursiveCall(const char *) except -1
    void Py_LeaveRecursiveCall() noexcept
    PyObject *PyCell_New_c "PyCell_New"(PyObject *) except NULL

cdef object ModuleType = types.ModuleType
cdef object CodeType = types.CodeType
cdef object FunctionType = types.FunctionType
cdef object CellType = types.CellType
cdef object MappingProxyType = types.MappingProxyType
cdef object NoneType = type(None)
cdef object EllipsisType = type(Ellipsis)
cdef object NotImplementedType = type(NotImplemented)
cdef object ABCMeta = abc.ABCMeta
cdef object Enum = enum.Enum

# 3.14 changed dicts (no version tag), annotations and pickle._getattribute: there every function of the flavor is
# called as it is until this file has been checked against that version.
cdef bint CPYTHON_KNOWN = sys.implementation.name == "cpython" and sys.version_info < (3, 14)


# The functions of cloudpickle 3.0 to 3.1.3 and of the copies in Ray, joblib and PySpark: for each, the digests of the
# shapes (see `shape_digest`) that the native code reproduces, and the behaviour that belongs to each. A digest does not
# depend on the version of Python unless that is said. tests/test_reducers.py checks them against the installed copies.
SHAPES = {
    "_get_or_create_tracker_id": {0xD050E51F: "3.0"},
    "_is_registered_pickle_by_value": {0x7CDACBFE: "3.0"},
    "_whichmodule": {0xA59DB7F9: "3.0", 0xA13B5713: "3.1"},  # 3.1 skips __mp_main__
    # 3.0 and 3.1.0 use pickle._getattribute as it is; 3.13 gave that one more variable.
    "_getattribute": {0x2486B13E: "3.0", 0xBCEAA045: "3.0", 0x91834602: "3.1.1"},
    "_should_pickle_by_reference": {0x2FD618F8: "3.0"},
    "_lookup_module_and_qualname": {0x738E926E: "3.0", 0xFBB116DF: "3.1.1"},  # differ in the use of _getattribute
    "_extract_code_globals": {0xA564437F: "3.0"},
    "_find_imported_submodules": {0x4C9E86CA: "3.0"},
    "_walk_global_ops": {0xEE35BE0F: "3.0"},
    "_extract_class_dict": {0x557B9F50: "3.0", 0x03647024: "3.1"},  # 3.1 sorts, and copies the names
    "_get_cell_contents": {0x830C1615: "3.0"},
    "_make_empty_cell": {0x11680D4A: "3.0", 0x7FD514AA: "3.0"},  # 3.12 drops its dead code
    "_get_bases": {0xBAEFE584: "3.0"},
    "_class_getnewargs": {0x5B4FAE75: "3.0"},
    "_enum_getnewargs": {0xBCD1D622: "3.0"},
    "_function_getstate": {0x6F134278: "3.0", 0xB115EB54: "3.1"},  # 3.1 copies the names and __dict__
    "_class_getstate": {0x94EAB18A: "3.0", 0x294DC164: "3.1.2"},  # 3.1.2 differs on Python 3.14 only
    "_enum_getstate": {0xA4E67CA2: "3.0"},
    "_code_reduce": {0xEA9F93EC: "3.0", 0xC8931F22: "3.1", 0xBB068BDE: "3.1.3"},  # copies; hides the file's name
    "_cell_reduce": {0xEE60B369: "3.0"},
    "_dynamic_class_reduce": {0x8B5C6D1F: "3.0"},
    "_class_reduce": {0x277AF432: "3.0"},
    "Pickler._dynamic_function_reduce": {0xACF7C65A: "3.0"},
    "Pickler._function_reduce": {0x6D4B3726: "3.0"},
    "Pickler._function_getnewargs": {0x2E19F2D1: "3.0"},
    "Pickler.reducer_override": {0x4DEAD0B0: "3.0"},
    "Pickler.__init__": {0xE8D72026: "3.0"},
    "Pickler.dump": {0x21D11109: "3.0", 0x73D0B57C: "3.1.2"},  # which RecursionErrors become PicklingErrors
}


def shape_digest(function):
    """Checksum of what a Python function refers to: names, variables, text constants, defaults; nested code included.

    It is blind to docstrings, line numbers and opcodes, so it stays the same over versions of Python.
    """
    code = function.__code__
    names = set()
    variables = set()
    constants = set()
    pending = [(code, function.__doc__)]
    while pending:
        part, doc = pending.pop()
        names.update(part.co_names)
        variables.update(part.co_varnames, part.co_cellvars)
        for constant in part.co_consts:
            if isinstance(constant, CodeType):
                pending.append((constant, None))
            elif isinstance(constant, str) and constant != doc and "<locals>" not in constant:
                constants.add(constant)
            elif isinstance(constant, tuple):
                constants.add(repr(constant))
    variables.discard(".0")  # the hidden argument of a comprehension, which 3.12 compiles inline (PEP 709)
    shape = (code.co_argcount, code.co_kwonlyargcount, code.co_flags & 0x0C, function.__defaults__,
             sorted(names), sorted(variables), sorted(constants))
    return crc32(repr(shape).encode())


cdef class Flavor
cdef class Reducer


# ---- notes on code objects ---------------------------------------------------------------------------------------

cdef unsigned char LOAD_GLOBAL = opcode.opmap["LOAD_GLOBAL"]
cdef unsigned char STORE_GLOBAL = opcode.opmap["STORE_GLOBAL"]
cdef unsigned char DELETE_GLOBAL = opcode.opmap["DELETE_GLOBAL"]
cdef unsigned char EXTENDED_ARG = opcode.EXTENDED_ARG
# From 3.11 on the lowest bit of LOAD_GLOBAL's argument says whether to push a NULL (Python/bytecodes.c).
cdef int LOAD_GLOBAL_SHIFT = 1 if sys.version_info >= (3, 11) else 0
cdef Py_ssize_t extra_index = fc_request_code_extra(fc_release_extra)  # -1 when the interpreter has none left


@cython.final
@cython.no_gc  # holds strings only, so it cannot be part of a cycle
cdef class CodeInfo:
    """What the reducers want to know about one code object; lives in that object's ``co_extra``."""

    cdef tuple global_names         # names of globals that the code, or code nested in it, refers to; in order
    cdef uint64_t modules_version   # the version of sys.modules that `submodules` belongs to; 0: none
    cdef dict submodules            # "package." -> tuple of the submodules' names that the code can address; or None


cdef CodeInfo code_info(object code):
    """The notes on `code`, or None if only the flavor's own functions can deal with it (malformed code)."""
    cdef void *extra = NULL
    cdef CodeInfo info
    cdef dict found
    cdef object nested
    if extra_index >= 0:
        fc_code_get_extra(code, extra_index, &extra)
        if extra != NULL:
            return <CodeInfo>extra
    found = {}
    if not walk_global_ops(code, found):
        return None
    for nested in <object>fc_code_consts(code):
        if PyCode_Check(nested):
            Py_EnterRecursiveCall(b" while looking for global names in nested code")
            try:
                info = code_info(nested)
            finally:
                Py_LeaveRecursiveCall()
            if info is None:
                return None
            for name in info.global_names:
                found.setdefault(name, None)
    info = CodeInfo.__new__(CodeInfo)
    info.global_names = tuple(found)
    if extra_index >= 0:
        Py_INCREF(<PyObject *>info)
        try:
            fc_code_set_extra(code, extra_index, <void *>info)
        except BaseException:
            Py_DECREF(<PyObject *>info)
            raise
    return info


cdef bint walk_global_ops(object code, dict found) except -1:
    """Put the names of `code`'s own global instructions into `found`, in order. False: an argument is out of range."""
    cdef bytes content = fc_code_code(code)
    cdef const unsigned char *instructions = content
    cdef tuple names = <tuple>fc_code_names(code)
    cdef Py_ssize_t position, length = len(content) - 1
    cdef Py_ssize_t name_count = PyTuple_GET_SIZE(names)
    cdef unsigned char op
    cdef unsigned int argument, extended = 0
    for position in range(0, length, 2):
        op = instructions[position]
        argument = instructions[position + 1] | extended
        extended = argument << 8 if op == EXTENDED_ARG else 0
        if op == LOAD_GLOBAL:
            argument >>= LOAD_GLOBAL_SHIFT
        elif op != STORE_GLOBAL and op != DELETE_GLOBAL:
            continue
        if argument >= name_count:
            return False
        found[<object>PyTuple_GET_ITEM(names, argument)] = None
    return True


# ---- look-ups in sys.modules -------------------------------------------------------------------------------------

cdef dict indexed_modules = None        # the sys.modules that the index is about
cdef uint64_t indexed_version = 0       # its version at that time; 0: the index is void
cdef dict submodule_index = {}          # "package." -> [(name, (part, ...)), ...] in the order of sys.modules


cdef object sys_modules():
    """``sys.modules``, without the look-ups that an attribute of a module takes."""
    cdef PyObject *modules = PyDict_GetItemWithError(sys_namespace, "modules")
    return sys.modules if modules == NULL else <object>modules


cdef dict sys_namespace = sys.__dict__


cdef list submodules_below(dict modules, uint64_t version, str prefix):
    """[(name, parts below the prefix)] of all names in sys.modules that start with `prefix`; None: odd keys."""
    global indexed_modules, indexed_version, submodule_index
    cdef list below
    cdef object name
    cdef Py_ssize_t start = PyUnicode_GET_LENGTH(prefix)
    if version == 0 or version != indexed_version or modules is not indexed_modules:
        indexed_modules = modules
        indexed_version = version
        submodule_index = {}
    else:
        below = submodule_index.get(prefix)
        if below is not None:
            return below
    below = []
    for name in PyDict_Keys(modules):
        if not PyUnicode_CheckExact(name):
            if name is None:
                continue
            return None
        if PyUnicode_Tailmatch(name, prefix, 0, PY_SSIZE_T_MAX, -1):
            below.append((name, tuple(PyUnicode_Split((<str>name)[start:], ".", -1))))
    # The allocations above may have run a finalizer, or let another thread in, that imported something.
    if version != 0 and version == fc_dict_version(modules) and version == indexed_version:
        submodule_index[prefix] = below
    return below


cdef int find_imported_submodules(Flavor flavor, object code, CodeInfo info, object module, list found) except -1:
    """Append to `found` the imported submodules of `module` (any object) that `code` can address."""
    cdef object prefix, modules, name, parts, part
    cdef uint64_t version
    cdef list below, names
    cdef set attribute_names
    cdef tuple addressed = None
    if not isinstance(module, ModuleType) or not getattr(module, "__package__", None):
        return 0
    prefix = module.__name__ + "."
    modules = sys_modules()
    if not PyUnicode_CheckExact(prefix) or not PyDict_CheckExact(modules):
        found.extend(flavor.find_imported_submodules(code, [module]))
        return 0
    version = fc_dict_version(<dict>modules)
    if version != 0:
        if info.modules_version != version:
            info.submodules = None
            info.modules_version = version
        elif info.submodules is not None:
            addressed = info.submodules.get(prefix)
    if addressed is None:
        below = submodules_below(<dict>modules, version, <str>prefix)
        if below is None:
            found.extend(flavor.find_imported_submodules(code, [module]))
            return 0
        names = []
        attribute_names = set(<object>fc_code_names(code))
        for name, parts in below:
            for part in <tuple>parts:
                if part not in attribute_names:
                    break
            else:
                names.append(name)
        addressed = tuple(names)
        if version != 0 and info.modules_version == version == fc_dict_version(<dict>modules):
            if info.submodules is None:
                info.submodules = {}
            info.submodules[prefix] = addressed
    for name in addressed:
        found.append(modules[name])
    return 0


cdef object get_attribute(object module, object name):
    """``module.a.b.c`` for a dotted name as pickle._getattribute does it; `missing` where that raises AttributeError."""
    cdef object current = module
    cdef PyObject *value = NULL
    cdef object part
    if PyUnicode_FindChar(name, u".", 0, PyUnicode_GET_LENGTH(name), 1) < 0:
        if name == "<locals>":
            return missing
        return optional_attribute(module, name)
    for part in PyUnicode_Split(name, ".", -1):
        if part == "<locals>":
            return missing
        current = optional_attribute(current, part)
        if current is missing:
            return missing
    return current


cdef object optional_attribute(object owner, object name):
    """``getattr(owner, name, missing)``, without making the exception where the owner is a plain module."""
    cdef PyObject *value = NULL
    cdef PyObject *namespace
    if fc_plain_module(owner) and fc_type_lookup(type(owner), name) == NULL:
        # module_getattro in Objects/moduleobject.c: the dict, then a __getattr__ in the dict (PEP 562). There is no
        # dict in a module that was made without __init__.
        namespace = fc_module_dict(owner)
        if namespace != NULL:
            value = PyDict_GetItemWithError(<object>namespace, name)
            if value != NULL:
                return <object>value
            if PyDict_GetItemWithError(<object>namespace, "__getattr__") == NULL:
                return missing
        value = NULL
    if not fc_optional_attr(owner, name, &value):
        return missing
    result = <object>value
    Py_DECREF(value)
    return result


cdef object missing = object()


cdef object whichmodule(Flavor flavor, object obj, object name):
    """The module that `obj` says it belongs to, else the first in sys.modules that has it under `name`, else None."""
    cdef object module_name = fc_function_module(obj) if PyFunction_Check(obj) else getattr(obj, "__module__", None)
    cdef object modules, module
    if module_name is not None:
        return module_name
    modules = sys_modules()
    if not PyDict_CheckExact(modules) or not PyUnicode_CheckExact(name):
        return flavor.whichmodule(obj, name)
    # A copy, as in cloudpickle: modules run code, and import others, when they are asked for an attribute.
    for module_name, module in (<dict>PyDict_Copy(modules)).items():
        if (module_name == "__main__" or (flavor.skips_mp_main and module_name == "__mp_main__")
                or module is None or not isinstance(module, ModuleType)):
            continue
        try:
            if get_attribute(module, name) is obj:
                return module_name
        except Exception:
            pass
    return None


cdef object fc_function_module(object function):
    cdef PyObject *module = fc_func_module(function)
    return None if module == NULL else <object>module


cdef bint is_registered_pickle_by_value(Flavor flavor, object module) except -1:
    cdef object registry = flavor.by_value_modules
    cdef object name = optional_attribute(module, "__name__")
    cdef Py_ssize_t end
    if type(registry) is not set or not PyUnicode_CheckExact(name):
        return flavor.is_registered_pickle_by_value(module)
    if PySet_GET_SIZE(registry) == 0:
        return False
    end = PyUnicode_GET_LENGTH(name)
    while end >= 0:
        if (<str>name)[:end] in <set>registry:
            return True
        end = PyUnicode_FindChar(name, u".", 0, end, -1)
    return False


cdef bint should_pickle_by_reference(Flavor flavor, object obj) except -1:
    """The same for functions and classes as the flavor's ``_should_pickle_by_reference``."""
    cdef object name, module_name, module, modules
    cdef PyObject *value
    if not flavor.native_reference:
        return flavor.should_pickle_by_reference(obj)
    if PyFunction_Check(obj):
        name = <object>fc_func_qualname(obj)
    else:
        name = getattr(obj, "__qualname__", None)
        if name is None:
            name = getattr(obj, "__name__", None)
    if not PyUnicode_CheckExact(name):
        return flavor.should_pickle_by_reference(obj)
    module_name = whichmodule(flavor, obj, name)
    if module_name is None or module_name == "__main__":
        return False
    modules = sys_modules()
    if PyDict_CheckExact(modules):
        value = PyDict_GetItemWithError(modules, module_name)
        module = None if value == NULL else <object>value
    else:
        module = modules.get(module_name, None)
    if module is None or get_attribute(module, name) is not obj:
        return False
    return not is_registered_pickle_by_value(flavor, module)


# ---- functions and code ------------------------------------------------------------------------------------------

cdef object copy_text(object text):
    """``"".join(text)``: an equal string that shares no memo entry with the interned one."""
    # Objects/unicodeobject.c returns the very characters it was given for lengths 0 and 1.
    if PyUnicode_CheckExact(text) and PyUnicode_GET_LENGTH(text) > 1:
        return fc_copy_string(text)
    return PyUnicode_Join("", text)


cdef tuple copy_tuple(object items):
    """A tuple that is equal but not identical, unless it is empty."""
    cdef Py_ssize_t index, count = PyTuple_GET_SIZE(items)
    cdef tuple copied
    cdef PyObject *item
    if count == 0:
        return ()
    copied = PyTuple_New(count)
    for index in range(count):
        item = PyTuple_GET_ITEM(items, index)
        Py_INCREF(item)
        PyTuple_SET_ITEM(copied, index, item)
    return copied


cdef object or_none(PyObject *value):
    return None if value == NULL else <object>value


cdef tuple function_getnewargs(object func, object globals_ref):
    cdef object code = <object>fc_func_code(func)
    cdef object func_globals = <object>fc_func_globals(func)
    cdef object base_globals, key, closure = None
    cdef Py_ssize_t index, count
    cdef PyObject *value
    key = <size_t><void *>func_globals
    if type(globals_ref) is dict:
        base_globals = <object>PyDict_SetDefault(globals_ref, key, {})
    else:
        base_globals = globals_ref.setdefault(key, {})
    if not <dict>base_globals if type(base_globals) is dict else base_globals == {}:
        for key in ("__package__", "__name__", "__path__", "__file__"):
            if PyDict_CheckExact(func_globals):
                value = PyDict_GetItemWithError(func_globals, key)
                if value != NULL:
                    base_globals[key] = <object>value
            elif key in func_globals:
                base_globals[key] = func_globals[key]
    if fc_func_closure(func) != NULL:
        count = fc_code_free_count(code)
        closure = PyTuple_New(count)
        for index in range(count):
            PyTuple_SET_ITEM(closure, index, PyCell_New_c(NULL))
    return code, base_globals, None, None, closure


cdef tuple function_getstate(Flavor flavor, object func):
    cdef object code = <object>fc_func_code(func)
    cdef CodeInfo info = code_info(code)
    cdef object func_globals, closure, name, value, function_name, qualified_name, annotations
    cdef PyObject *item
    cdef dict slotstate, f_globals, attributes
    cdef list submodules, closure_values
    cdef object state
    if info is None:
        return flavor.function_getstate(func)
    closure = or_none(fc_func_closure(func))
    function_name, qualified_name = <object>fc_func_name(func), <object>fc_func_qualname(func)
    if flavor.copies_function_names:
        function_name, qualified_name = copy_text(function_name), copy_text(qualified_name)
    annotations = func.__annotations__

    func_globals = <object>fc_func_globals(func)
    f_globals = {}
    for name in info.global_names:
        if PyDict_CheckExact(func_globals):
            item = PyDict_GetItemWithError(func_globals, name)
            if item != NULL:
                f_globals[name] = <object>item
        elif name in func_globals:
            f_globals[name] = func_globals[name]

    closure_values = []
    if closure is not None:
        for value in <tuple>closure:
            item = PyCell_GET(value)
            if item != NULL:
                closure_values.append(<object>item)

    submodules = []
    for value in f_globals.values():
        find_imported_submodules(flavor, code, info, value, submodules)
    for value in closure_values:
        find_imported_submodules(flavor, code, info, value, submodules)
    slotstate = {
        "__name__": function_name,
        "__qualname__": qualified_name,
        "__annotations__": annotations,
        "__kwdefaults__": or_none(fc_func_kwdefaults(func)),
        "__defaults__": or_none(fc_func_defaults(func)),
        "__module__": or_none(fc_func_module(func)),
        "__doc__": or_none(fc_func_doc(func)),
        "__closure__": closure,
        "_cloudpickle_submodules": submodules,
        "__globals__": f_globals,
    }

    if flavor.copies_function_names:
        attributes = {}
        item = fc_func_dict(func)
        if item != NULL:
            for name, value in list((<object>item).items()):
                attributes[copy_text(name)] = value
        state = attributes
    else:
        state = func.__dict__
    return state, slotstate


cdef tuple code_reduce(Flavor flavor, object code):
    cdef object name = <object>fc_code_name(code)
    cdef object filename = <object>fc_code_filename(code)
    cdef object names = <object>fc_code_names(code)
    cdef object varnames = fc_code_varnames(code)
    cdef object freevars = fc_code_freevars(code)
    cdef object cellvars = fc_code_cellvars(code)
    if flavor.copies_code_names:
        name = copy_text(name)
        names = copy_tuple(names)
        varnames = copy_tuple(varnames)
        freevars = copy_tuple(freevars)
        cellvars = copy_tuple(cellvars)
    if flavor.hides_code_filename:
        filename = copy_text("<dynamic-code>")
    if FC_CODE_HAS_QUALNAME:
        return CodeType, (
            fc_code_argcount(code), fc_code_posonly(code), fc_code_kwonly(code), fc_code_nlocals(code),
            fc_code_stacksize(code), fc_code_flags(code), fc_code_code(code), <object>fc_code_consts(code),
            names, varnames, filename, name, <object>fc_code_qualname(code), fc_code_firstlineno(code),
            <object>fc_code_linetable(code), <object>fc_code_exceptions(code), freevars, cellvars,
        )
    return CodeType, (
        fc_code_argcount(code), fc_code_posonly(code), fc_code_kwonly(code), fc_code_nlocals(code),
        fc_code_stacksize(code), fc_code_flags(code), fc_code_code(code), <object>fc_code_consts(code),
        names, varnames, filename, name, fc_code_firstlineno(code), <object>fc_code_linetable(code),
        freevars, cellvars,
    )


# ---- classes -----------------------------------------------------------------------------------------------------

cdef object tracker_id(Flavor flavor, object cls):
    cdef PyObject *known
    # WeakKeyDictionary.get without its frames. A hit needs no lock: an entry is complete as soon as it can be seen.
    # A dead key cannot match a live class. New entries are left to the flavor, which takes its lock.
    table = flavor.trackers.data
    if type(table) is dict:
        known = PyDict_GetItemWithError(table, PyWeakref_NewRef(cls, NULL))
        if known != NULL and <object>known is not None:
            return <object>known
    return flavor.get_or_create_tracker_id(cls)


cdef object get_bases(object cls):
    if "__orig_bases__" in getattr(cls, "__dict__", {}):
        return cls.__orig_bases__
    return cls.__bases__


cdef tuple class_getnewargs(Flavor flavor, object cls):
    cdef dict type_kwargs = {}
    if "__module__" in cls.__dict__:
        type_kwargs["__module__"] = cls.__module__
    own_dict = cls.__dict__.get("__dict__", None)
    if isinstance(own_dict, property):
        type_kwargs["__dict__"] = own_dict
    return type(cls), cls.__name__, get_bases(cls), type_kwargs, tracker_id(flavor, cls), None


cdef dict enum_members(object cls):
    cdef dict members = {}
    for member in cls:
        name = member.name  # before the value, as a dict display does
        members[name] = member.value
    return members


cdef tuple enum_getnewargs(Flavor flavor, object cls):
    members = enum_members(cls)
    return (cls.__bases__, cls.__name__, cls.__qualname__, members, cls.__module__, tracker_id(flavor, cls), None)


cdef dict class_namespace(object cls):
    """A copy of ``cls.__dict__``."""
    if type(cls) is type:
        return <dict>PyDict_Copy(fc_type_dict(cls))
    namespace = cls.__dict__
    if type(namespace) is MappingProxyType:
        namespace = namespace.copy()
        if type(namespace) is dict:
            return <dict>namespace
    return dict(namespace)


cdef dict extract_class_dict(Flavor flavor, object cls):
    cdef dict own = class_namespace(cls)
    cdef dict kept
    cdef object bases = cls.__bases__
    cdef object name, value, base, inherited, key, namespace, base_value
    cdef list names
    cdef PyObject *item
    if flavor.sorts_class_dict:
        names = list(own)
        names.sort()
    else:
        names = list(own)
    kept = {}
    inherited = [fc_type_dict(base) if type(base) is type else base.__dict__ for base in bases]
    for name in names:
        value = own[name]
        key = copy_text(name) if flavor.sorts_class_dict else name
        for namespace in inherited:
            if PyDict_CheckExact(namespace):
                item = PyDict_GetItemWithError(namespace, name)
                base_value = missing if item == NULL else <object>item
            else:
                base_value = namespace.get(name, missing)
            if base_value is not missing:
                break
        else:
            kept[key] = value
            continue
        if base_value is not value:
            kept[key] = value
    return kept


cdef tuple class_getstate(Flavor flavor, object cls):
    cdef dict clsdict = extract_class_dict(flavor, cls)
    clsdict.pop("__weakref__", None)
    if issubclass(type(cls), ABCMeta):
        clsdict.pop("_abc_cache", None)
        clsdict.pop("_abc_negative_cache", None)
        clsdict.pop("_abc_negative_cache_version", None)
        registry = clsdict.pop("_abc_registry", None)
        if registry is None:
            clsdict.pop("_abc_impl", None)
            registry, _, _, _ = abc._get_dump(cls)
            clsdict["_abc_impl"] = [reference() for reference in registry]
        else:
            clsdict["_abc_impl"] = [registered for registered in registry]
    if "__slots__" in clsdict:
        if isinstance(cls.__slots__, str):
            clsdict.pop(cls.__slots__)
        else:
            for name in cls.__slots__:
                clsdict.pop(name, None)
    clsdict.pop("__dict__", None)
    return clsdict, {}


cdef tuple enum_getstate(Flavor flavor, object cls):
    clsdict, slotstate = class_getstate(flavor, cls)
    members = enum_members(cls)
    for name in ("_generate_next_value_", "_member_names_", "_member_map_", "_member_type_", "_value2member_map_"):
        (<dict>clsdict).pop(name, None)
    for name in members:
        (<dict>clsdict).pop(name)
    return clsdict, slotstate


cdef tuple dynamic_class_reduce(Flavor flavor, object cls):
    if issubclass(cls, Enum):
        return (flavor.make_skeleton_enum, enum_getnewargs(flavor, cls), enum_getstate(flavor, cls), None, None,
                flavor.class_setstate)
    return (flavor.make_skeleton_class, class_getnewargs(flavor, cls), class_getstate(flavor, cls), None, None,
            flavor.class_setstate)


cdef object class_reduce(Flavor flavor, object cls):
    if cls is NoneType:
        return type, (None,)
    if cls is EllipsisType:
        return type, (Ellipsis,)
    if cls is NotImplementedType:
        return type, (NotImplemented,)
    if cls in flavor.builtin_type_names:
        return flavor.builtin_type, (flavor.builtin_type_names[cls],)
    if should_pickle_by_reference(flavor, cls):
        return NotImplemented
    return dynamic_class_reduce(flavor, cls)


# ---- flavors -----------------------------------------------------------------------------------------------------

cdef tuple METHODS = (
    "reducer_override", "_function_reduce", "_dynamic_function_reduce", "_function_getnewargs", "__init__", "dump",
)


@cython.final
cdef class Flavor:
    """One copy of cloudpickle: its own functions, and which of them native code stands in for.

    ``module`` is the module that defines ``Pickler`` (``cloudpickle.cloudpickle``), ``pickler_class`` that class.
    Patches of the module or of the class are noticed at the next dump and win over the native code.
    """

    cdef readonly object module
    cdef readonly type pickler_class
    cdef dict namespace                 # module.__dict__
    cdef uint64_t namespace_version     # of `namespace` when the fields below were read; 0: read them again
    cdef object filename                # co_filename of the module's functions
    cdef dict variants                  # function -> behaviour, for those that were recognised
    cdef unsigned int class_version     # of `pickler_class` when `class_is_own` was found; 0: find it again
    cdef bint class_is_own              # nobody has patched how `pickler_class` pickles
    cdef bint class_is_in_place         # the module's Pickler is `pickler_class`
    cdef tuple combined                 # what `with_stand_ins` returned last, and its parts; None at first
    cdef readonly dict own_methods      # method name -> the function in the class when the flavor was made
    cdef readonly dict dispatch_stand_ins  # the module's function in a dispatch table -> native code that does the same
    cdef dict stand_ins                 # method name -> [fastcap's own functions that count as the flavor's]
    # Natively reproduced groups of functions, and the behaviours that differ between versions.
    cdef bint native_reference, native_newargs, native_state, native_class
    cdef bint skips_mp_main, copies_function_names, copies_code_names, hides_code_filename, sorts_class_dict
    # The module's globals that reduce values contain, or that the native code calls for what is not hot.
    cdef object make_function, function_setstate, make_empty_cell, make_cell
    cdef object make_skeleton_class, make_skeleton_enum, class_setstate, builtin_type, builtin_type_names
    cdef object whichmodule, should_pickle_by_reference, is_registered_pickle_by_value, by_value_modules
    cdef object find_imported_submodules, function_getstate, get_or_create_tracker_id, trackers
    cdef object class_reduce, code_reduce, cell_reduce

    def __init__(self, module, pickler_class):
        self.module = module
        self.pickler_class = pickler_class
        self.namespace = module.__dict__
        self.filename = module.register_pickle_by_value.__code__.co_filename
        self.variants = {}
        self.own_methods = {name: pickler_class.__dict__[name] for name in METHODS}
        self.class_version = 0
        self.stand_ins = {}
        self.namespace_version = 0
        self.read_module()
        # These are reached through dispatch tables, which hold the functions themselves: later patches of the module
        # do not matter.
        self.code_reduce = module._code_reduce
        self.cell_reduce = module._cell_reduce
        self.dispatch_stand_ins = {}
        code_variant = self.variant("_code_reduce", self.code_reduce)
        if code_variant is not None:
            self.copies_code_names = code_variant != "3.0"
            self.hides_code_filename = code_variant == "3.1.3"
            self.dispatch_stand_ins[self.code_reduce] = self.reduce_code
        if self.variant("_cell_reduce", self.cell_reduce) is not None:
            self.dispatch_stand_ins[self.cell_reduce] = self.reduce_cell

    cdef str variant(self, str name, object function):
        """The behaviour of a function of the flavor, or None if it is not one of those in `SHAPES`."""
        cdef str variant
        if not CPYTHON_KNOWN or type(function) is not FunctionType:
            return None
        if function in self.variants:
            return self.variants[function]
        if function is pickle._getattribute:
            variant = "3.0" if name == "_getattribute" else None
        elif function.__code__.co_filename != self.filename:
            variant = None
        else:
            variant = SHAPES[name].get(shape_digest(function))
        self.variants[function] = variant
        return variant

    cdef bint recognises(self, tuple names) except -1:
        for name in names:
            if self.variant(name, self.namespace.get(name)) is None:
                return False
        return True

    cdef int read_module(self) except -1:
        cdef dict namespace = self.namespace
        cdef uint64_t version = fc_dict_version(namespace)
        self.namespace_version = 0
        self.make_function = namespace["_make_function"]
        self.function_setstate = namespace["_function_setstate"]
        self.make_empty_cell = namespace["_make_empty_cell"]
        self.make_cell = namespace["_make_cell"]
        self.make_skeleton_class = namespace["_make_skeleton_class"]
        self.make_skeleton_enum = namespace["_make_skeleton_enum"]
        self.class_setstate = namespace["_class_setstate"]
        self.builtin_type = namespace["_builtin_type"]
        self.builtin_type_names = namespace["_BUILTIN_TYPE_NAMES"]
        self.whichmodule = namespace["_whichmodule"]
        self.should_pickle_by_reference = namespace["_should_pickle_by_reference"]
        self.is_registered_pickle_by_value = namespace["_is_registered_pickle_by_value"]
        self.by_value_modules = namespace["_PICKLE_BY_VALUE_MODULES"]
        self.find_imported_submodules = namespace["_find_imported_submodules"]
        self.function_getstate = namespace["_function_getstate"]
        self.get_or_create_tracker_id = namespace["_get_or_create_tracker_id"]
        self.trackers = namespace["_DYNAMIC_CLASS_TRACKER_BY_CLASS"]
        self.class_reduce = namespace["_class_reduce"]
        self.class_is_in_place = namespace.get("Pickler") is self.pickler_class
        standard = (namespace["sys"] is sys and namespace["types"] is types and namespace["abc"] is abc
                    and namespace["Enum"] is Enum)
        self.native_reference = standard and self.recognises((
            "_should_pickle_by_reference", "_lookup_module_and_qualname", "_whichmodule", "_getattribute",
            "_is_registered_pickle_by_value",
        )) and namespace.get("_pickle_getattribute", pickle._getattribute) is pickle._getattribute
        self.native_newargs = self.recognises(("_make_empty_cell",))
        self.native_state = standard and self.recognises((
            "_function_getstate", "_extract_code_globals", "_walk_global_ops", "_find_imported_submodules",
            "_get_cell_contents",
        )) and set(namespace["GLOBAL_OPS"]) == {LOAD_GLOBAL, STORE_GLOBAL, DELETE_GLOBAL}
        self.native_class = standard and self.recognises((
            "_class_reduce", "_dynamic_class_reduce", "_class_getnewargs", "_class_getstate", "_enum_getnewargs",
            "_enum_getstate", "_extract_class_dict", "_get_bases", "_get_or_create_tracker_id",
        )) and type(self.trackers) is WeakKeyDictionary
        self.skips_mp_main = self.variant("_whichmodule", self.whichmodule) != "3.0"
        self.copies_function_names = self.variant("_function_getstate", self.function_getstate) != "3.0"
        self.sorts_class_dict = self.variant("_extract_class_dict", namespace.get("_extract_class_dict")) != "3.0"
        self.namespace_version = version
        return 0

    cdef inline int refresh(self) except -1:
        """Take note of changes of the module's globals; 3 ns when there are none."""
        if self.namespace_version == 0 or self.namespace_version != fc_dict_version(self.namespace):
            self.read_module()
        return 0

    @property
    def native(self):
        """The names of the groups of reducers that run natively; the others are the module's own functions."""
        self.refresh()
        groups = {
            "reference": self.native_reference,
            "function arguments": self.native_newargs,
            "function state": self.native_state,
            "class": self.native_class,
            "code": self.code_reduce in self.dispatch_stand_ins,
            "cell": self.cell_reduce in self.dispatch_stand_ins,
        }
        return {name for name, native in groups.items() if native}

    def add_stand_in(self, name, function):
        """Let `function`, one of fastcap's own, count as the flavor's unchanged method `name`."""
        self.stand_ins.setdefault(name, []).append(function)

    cdef bint is_own_method(self, object owner, str name) except -1:
        """Whether ``owner.name`` is what this copy of cloudpickle defined, and not an override or a patch."""
        cdef PyObject *found = fc_type_lookup(owner, name)
        if found == NULL:
            return False
        function = <object>found
        for stand_in in self.stand_ins.get(name, ()):
            if function is stand_in:
                return True
        return self.variant("Pickler." + name, function) is not None

    def keeps_override(self, owner):
        """Whether class `owner` has this copy's own ``reducer_override``, so that native code may stand in for it."""
        return self.is_own_method(owner, "reducer_override")

    cpdef bint keeps_function_methods(self, owner) except -1:
        """Whether the methods with which class `owner` reduces functions are all this copy's own."""
        return (self.is_own_method(owner, "_function_reduce") and self.is_own_method(owner, "_dynamic_function_reduce")
                and self.is_own_method(owner, "_function_getnewargs"))

    cdef object function_reduce(self, object pickler, object globals_ref, object func):
        """``pickler._function_reduce(func)``, where that is this copy's own method."""
        if PyFunction_Check(func):
            if should_pickle_by_reference(self, func):
                return NotImplemented
            return self.dynamic_function_reduce(pickler, globals_ref, func)
        # An object whose __class__ says that it is a function, such as wrapt's proxies.
        if self.should_pickle_by_reference(func):
            return NotImplemented
        return pickler._dynamic_function_reduce(func)

    cdef object dynamic_function_reduce(self, object pickler, object globals_ref, object func):
        if self.native_newargs:
            newargs = function_getnewargs(func, globals_ref)
        else:
            newargs = self.own_methods["_function_getnewargs"](pickler, func)
        state = function_getstate(self, func) if self.native_state else self.function_getstate(func)
        return self.make_function, newargs, state, None, None, self.function_setstate

    def with_stand_ins(self, table):
        """The dispatch table, or one that gives the same answers with native code in place of recognised reducers.

        The tables share their entries, so that a reducer which is registered later on is seen.
        """
        cdef list maps, known
        cdef tuple combined = self.combined
        cdef object code_stand_in, cell_stand_in
        cdef dict stand_ins
        cdef Py_ssize_t index
        if type(table) is ChainMap:
            maps = list(table.maps)
        else:
            maps = [table]
        for index in range(len(maps)):
            if type(maps[index]) is not dict:
                return table
        code_stand_in = self.dispatch_stand_in(maps, CodeType)
        cell_stand_in = self.dispatch_stand_in(maps, CellType)
        if combined is not None and combined[2] is code_stand_in and combined[3] is cell_stand_in:
            known = combined[1]
            if len(known) == len(maps):
                for index in range(len(maps)):
                    if known[index] is not maps[index]:
                        break
                else:
                    return combined[0]
        stand_ins = {}
        if code_stand_in is not None:
            stand_ins[CodeType] = code_stand_in
        if cell_stand_in is not None:
            stand_ins[CellType] = cell_stand_in
        if not stand_ins:
            return table
        self.combined = combined = (ChainMap(stand_ins, *maps), maps, code_stand_in, cell_stand_in)
        return combined[0]

    cdef object dispatch_stand_in(self, list maps, object kind):
        """The native code for what a chain of dispatch tables has for a type, or None."""
        cdef Py_ssize_t index
        cdef PyObject *reducer
        for index in range(len(maps)):
            reducer = PyDict_GetItemWithError(maps[index], kind)
            if reducer != NULL:
                # Compared, not looked up: someone else's reducer need not be hashable.
                if reducer == <PyObject *>self.code_reduce or reducer == <PyObject *>self.cell_reduce:
                    return self.dispatch_stand_ins.get(<object>reducer)
                return None
        return None

    def hooks(self):
        """``(dispatch table, reducer)`` for one dump with a bare native pickler; None if `pickler_class` was patched."""
        cdef Reducer reducer
        self.refresh()
        if self.class_version == 0 or self.class_version != fc_type_version(self.pickler_class):
            self.read_class()
        if not self.class_is_own or not self.class_is_in_place:
            return None
        reducer = Reducer.__new__(Reducer)
        reducer.flavor = self
        reducer.target = None
        reducer.globals_ref = {}
        reducer.native_functions = True
        return self.with_stand_ins(self.pickler_class.dispatch_table), reducer.reduce

    cdef int read_class(self) except -1:
        cdef PyObject *persistent_id = fc_type_lookup(self.pickler_class, "persistent_id")
        # After a look-up, which makes a version, and before the rest: a patch in between shows at the next dump.
        cdef unsigned int version = fc_type_version(self.pickler_class)
        cdef bint own = persistent_id == fc_type_lookup(pickle.Pickler, "persistent_id")
        for name in METHODS:
            own = own and self.is_own_method(self.pickler_class, name)
        self.class_is_own = own
        self.class_version = version
        return 0

    def reduce_class(self, cls):
        """``_class_reduce(cls)``."""
        self.refresh()
        return class_reduce(self, cls) if self.native_class else self.class_reduce(cls)

    def reduce_code(self, code):
        """What the module's ``_code_reduce`` returns for a code object."""
        if PyCode_Check(code):
            return code_reduce(self, code)
        return self.code_reduce(code)

    def reduce_cell(self, cell):
        """What the module's ``_cell_reduce`` returns for a cell."""
        cdef PyObject *content
        if not PyCell_Check(cell):
            return self.cell_reduce(cell)
        self.refresh()
        content = PyCell_GET(cell)
        if content == NULL:
            return self.make_empty_cell, ()
        return self.make_cell, (<object>content,)


@cython.final
cdef class Reducer:
    """The reducers of one pickler: ``reduce(pickler, obj)`` is what its ``reducer_override(obj)`` would return.

    ``target`` is the object whose methods and ``globals_ref`` count, by default the pickler that asks. ``pickler_class``
    is the class of that object; its ``reducer_override`` must be the flavor's own.
    """

    cdef readonly Flavor flavor
    cdef object target
    cdef readonly object globals_ref    # None: the target's
    cdef bint native_functions          # the target's methods for functions are the flavor's own

    def __init__(self, Flavor flavor, pickler_class, target=None):
        self.flavor = flavor
        self.target = target
        self.globals_ref = None
        self.native_functions = flavor.keeps_function_methods(pickler_class)

    def reduce(self, pickler, obj):
        """A reduce value for a function or class that goes by value, else NotImplemented."""
        cdef Flavor flavor = self.flavor
        cdef object target
        flavor.refresh()
        if PyType_Check(obj):
            return class_reduce(flavor, obj) if flavor.native_class else flavor.class_reduce(obj)
        if not PyFunction_Check(obj) and not isinstance(obj, FunctionType):
            return NotImplemented
        if self.globals_ref is not None:
            return flavor.function_reduce(self, self.globals_ref, obj)
        target = pickler if self.target is None else self.target
        if not self.native_functions:
            return target._function_reduce(obj)
        return flavor.function_reduce(target, target.globals_ref, obj)

    # With a globals_ref of its own the reducer takes the pickler's place in the flavor's own methods.

    def _dynamic_function_reduce(self, func):
        return self.flavor.own_methods["_dynamic_function_reduce"](self, func)

    def _function_getnewargs(self, func):
        return self.flavor.own_methods["_function_getnewargs"](self, func)
