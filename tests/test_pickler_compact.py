"""Compact mode loads to an equal graph with the same sharing, and is never larger than exact mode."""

import collections
import datetime
import gc
import io
import pickle
import pickletools
import weakref

import corpus
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from fastcap._native import pickler as native

PROTOCOLS = corpus.PROTOCOLS


class Node:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Giving:
    """Reduces to what a function finds at that time."""

    def __init__(self, find):
        self.find = find

    def __reduce__(self):
        return Node, (), {"found": self.find()}


def memoized(data):
    return sum(opcode.name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT") for opcode, _, _ in pickletools.genops(data))


def assert_compact(obj, protocol=5, **options):
    """Dump in both modes; return what compact mode loads to."""
    exact = native.dumps(obj, protocol, **options)
    compact = native.dumps(obj, protocol, compact=True, **options)
    file = io.BytesIO()
    pickler = native.Pickler(file, protocol, compact=True)
    pickler.dump(obj)
    assert len(compact) <= len(exact)
    loaded = pickle.loads(compact)
    if b"torch" in compact:
        # torch's own reducers lose the sharing of storages, which compact mode keeps.
        assert strategies.difference(loaded, obj) is None
    else:
        assert memoized(compact) <= memoized(exact)
        assert strategies.difference(loaded, pickle.loads(exact)) is None
    if not options:
        assert strategies.difference(pickle.loads(file.getvalue()), loaded) is None
    return loaded


@pytest.mark.kinds(lambda kind: kind.plain and kind.loads)
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_corpus_kind(kind, protocol):
    if protocol >= kind.protocol:
        obj = kind.make()
        if native.dumps(obj, protocol) != native.dumps(obj, protocol):
            pytest.skip("holds an iterator, which can be dumped only once")
        assert_compact(obj, protocol)
        assert_compact([obj, obj], protocol)


@given(strategies.graphs(), st.sampled_from(PROTOCOLS))
def test_graphs(obj, protocol):
    try:
        pickle.loads(native.dumps(obj, protocol))
    except Exception:
        with pytest.raises(Exception):  # noqa: B017 - whatever exact mode gives
            pickle.loads(native.dumps(obj, protocol, compact=True))
        return
    assert_compact(obj, protocol)


def fresh(n):
    """Containers of every kind that nothing else refers to."""
    return [
        [f"a{n}", [f"b{n}"], (f"c{n}", [n]), {f"d{n}": [f"e{n}"]}, {f"f{n}"}, frozenset([f"g{n}"]), f"é{n}".encode(),
         bytearray(f"h{n}".encode()), f"é{n}", "x" * (300 + n), (f"i{n}", 1, 2, 3, 4)]
        for n in range(n)
    ]


@pytest.mark.parametrize("protocol", [4, 5])
def test_what_is_alone_is_not_memoized(protocol):
    data = native.dumps(fresh(50), protocol, compact=True)
    # The root, whose other references are not known, and before protocol 5 what bytearrays are made of.
    assert memoized(data) == 1 if protocol == 5 else 1 + 50 * 4
    instances = [Node(x=[n], y=f"y{n}") for n in range(50)]
    data = native.dumps(instances, protocol, compact=True)
    assert memoized(data) == 1 + 50 + len([__name__, "Node", Node, "x", "y"])


def test_pickler_memo_holds_what_the_stream_memoizes():
    pickler = native.Pickler(io.BytesIO(), 5, compact=True)
    obj = fresh(3)
    pickler.dump(obj)
    assert pickler._memo_objects() == [obj]
    pickler.dump(obj)  # whoever dumps again with the same memo gets the root from it
    assert len(pickler._memo_objects()) == 1


def test_sharing_is_kept():
    shared, word, pair, plain = ["shared"], "a word" * 3, (1, "two"), Node(x=1)
    loaded = assert_compact([shared, [shared], {"k": shared}, word, (word,), pair, [pair], plain, [plain]])
    assert loaded[0] is loaded[1][0] is loaded[2]["k"]
    assert loaded[3] is loaded[4][0]
    assert loaded[5] is loaded[6][0]
    assert loaded[7] is loaded[8][0]


def test_cycles():
    for make in (corpus.recursive_list, corpus.recursive_dict, corpus.recursive_tuple, corpus.recursive_long_tuple,
                 corpus.recursive_frozenset, corpus.recursive_instance):
        assert_compact(make())


def test_weakly_referenced_sets():
    """A weak reference is no reference to be counted, and can bring its object up again."""
    for protocol in (4, 5):
        box = [{1, 2}, frozenset([3, 4]), [5]]
        by_set, by_frozenset = weakref.ref(box[0]), weakref.ref(box[1])
        loaded = assert_compact([box, Giving(by_set), Giving(by_frozenset)], protocol)
        assert loaded[1].found is loaded[0][0]
        assert loaded[2].found is loaded[0][1]


FINDERS = {
    "list": lambda holder: holder.value[0],
    "dict": lambda holder: holder.value[1],
    "tuple": lambda holder: holder.value[2],
    "bytearray": lambda holder: holder.value[3],
    "string": lambda holder: holder.value[4],
    "bytes": lambda holder: holder.value[5],
    "set": lambda holder: holder.value[6],
    "frozenset": lambda holder: holder.value[7],
    "state": lambda holder: holder.__dict__,
    "collector": lambda holder: next(obj for obj in gc.get_objects() if type(obj) is list and obj[:1] == ["needle"]),
}


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("what", FINDERS)
def test_reducers_that_bring_up_what_was_left_out(what, protocol):
    """The object has one reference when it is written; a reducer that comes later hands it out again."""
    n = protocol
    holder = Node(value=[["needle", n], {"k": n}, ([n], n), bytearray([n]), f"text {n}", f"{n}".encode(), {(n,)},
                         frozenset([(n,)])])
    loaded = assert_compact([holder, Giving(lambda: FINDERS[what](holder)), [n]], protocol)
    if what == "collector":
        assert loaded[1].found is loaded[0].value[0]
    elif what != "state":  # BUILD copies a state into the instance's own dict
        assert loaded[1].found is FINDERS[what](loaded[0])


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("between", [None, 1.5, ["list"]], ids=["run", "runs", "single items"])
def test_reducers_that_bring_up_items_of_long_containers(between, protocol):
    """Of long runs of strings only the ends are noted, until someone asks."""
    words = [text for n in range(3000) for text in (f"word {n}", f"\u00e9{n}", b"bytes %d" % n)]
    table = {f"key {n}": f"value {n}" for n in range(3000)}
    if between is not None:
        step = 500 if between == 1.5 else 2
        for position in range(0, len(words), step):
            words[position] = between
        for n in range(0, 3000, step):
            table[f"key {n}"] = between
    holder = Node(words=words, table=table)
    positions = [1, 4, 65, 998, 1001, 2999, 4444, 8999]
    givers = [Giving(lambda position=position: holder.words[position]) for position in positions]
    keys = [Giving(lambda n=n: list(holder.table)[n]) for n in (1, 66, 1001, 2999)]
    values = [Giving(lambda n=n: holder.table[f"key {n}"]) for n in (1, 67, 1001, 2999)]
    loaded, givers, keys, values = assert_compact([holder, givers, keys, values], protocol)
    assert all(giver.found is loaded.words[position] for giver, position in zip(givers, positions, strict=True))
    assert all(giver.found is list(loaded.table)[n] for giver, n in zip(keys, (1, 66, 1001, 2999), strict=True))
    assert all(giver.found is loaded.table[f"key {n}"] for giver, n in zip(values, (1, 67, 1001, 2999), strict=True))


def test_long_containers_that_change_meanwhile():
    """What was noted as a run is looked for in a container that is not what it was."""

    class Changing:
        def __init__(self, change):
            self.change = change

        def __reduce__(self):
            self.change()
            return list, ([*words[:3], *table, "new"],)

    for change in (lambda: words.clear(), lambda: words.__delitem__(slice(0, 500)), lambda: words.extend("abc" * 500),
                   lambda: table.clear(), lambda: table.update(dict.fromkeys(range(5000)))):
        words, table = [f"word {n}" for n in range(700)], {f"key {n}": f"value {n}" for n in range(700)}
        expected = [[*words], {**table}]
        loaded = pickle.loads(native.dumps([words, table, Changing(change), Changing(lambda: None)], compact=True))
        assert loaded[:2] == expected
        words, table = [f"word {n}" for n in range(700)], {f"key {n}": f"value {n}" for n in range(700)}
        words.append(Changing(change))
        table["changing"] = Changing(lambda: None)
        loaded = pickle.loads(native.dumps([table, words], compact=True))
        assert list(loaded[0])[:700] == list(expected[1])
        assert loaded[1][:700] == expected[0]


def test_states_of_slots_are_temporary():
    """They die with their addresses: what a reducer makes there later has not been left out."""

    class Slotted:
        __slots__ = ("a", "b")

        def __init__(self, n):
            self.a, self.b = n, [n]

    class Counted:
        def __reduce__(self):
            calls.append(self)
            kept.append({"number": len(kept)})
            return Node, (), kept[-1]

    calls, kept = [], []
    native.dumps([item for n in range(300) for item in (Slotted(n), Counted())], compact=True,
                 native_reduce=lambda pickler, obj: (str, ("Slotted",)) if obj is Slotted else NotImplemented)
    assert len(calls) == 300


def test_persistent_ids_that_bring_up_what_was_left_out():
    holder = Node(value=["inner"])

    class Persistent(native.Pickler):
        def persistent_id(self, obj):
            return [holder.value] if obj == "give" else None

    class Loading(pickle.Unpickler):
        def persistent_load(self, given):
            return given[0]

    file = io.BytesIO()
    Persistent(file, 5, compact=True).dump([holder, "give"])
    file.seek(0)
    loaded = Loading(file).load()
    assert loaded[1] is loaded[0].value


def test_iterators_that_repeat_their_items():
    class Repeating:
        def __reduce__(self):
            item = ["item"]
            return list, (), None, iter([item, item, ["other"]]), None

    class Forgetful:
        """Gives the same list again and again and holds no other reference to it meanwhile."""

        def __reduce__(self):
            return list, (), None, (row for row in [["a"], ["b"]])

    class Pairs:
        def __reduce__(self):
            pair = ("key", ["value"])
            return dict, (), None, None, iter([pair, pair, (1, pair[1])])

    loaded = assert_compact([Repeating(), Forgetful(), Pairs()])
    assert loaded[0][0] is loaded[0][1]
    assert loaded[2]["key"] is loaded[2][1]


def test_reduce_values_that_are_kept():
    """The same reduce value comes twice: its arguments and its state are shared."""
    kept = (Node, (), {"state": ["kept"]})

    class Keeping:
        def __reduce__(self):
            return kept

    class Arguments:
        def __reduce__(self):
            return keeping_list

    keeping_list = (list, (("argument", ["inner"]),))
    loaded = assert_compact([Keeping(), Keeping(), Arguments(), Arguments()])
    assert loaded[0].state is loaded[1].state
    assert loaded[2][1] is loaded[3][1]


def test_temporaries_at_reused_addresses():
    class Maker:
        def __init__(self, n):
            self.n = n

        def __reduce__(self):
            inner = [self.n]
            return list, ([inner, inner, [str(self.n)], {"n": self.n}, (self.n,)],)

    loaded = assert_compact([Maker(n) for n in range(3000)])
    assert all(value[0] is value[1] for value in loaded)


def test_a_second_attempt_hands_out_no_buffer_twice():
    holder = Node(value=["inner"])
    buffers = [bytes([n]) * 10 for n in range(3)]
    obj = [holder, *map(pickle.PickleBuffer, buffers), Giving(lambda: holder.value), pickle.PickleBuffer(b"last")]
    given, answers = [], iter([False, True, False, False, True, True])

    def callback(buffer):
        given.append(buffer)
        return next(answers)

    data = native.dumps(obj, 5, buffer_callback=callback, compact=True)
    assert [bytes(buffer) for buffer in given] == [*buffers, b"last"]
    loaded = pickle.loads(data, buffers=[given[0], given[2], given[3]])
    assert loaded[4].found is loaded[0].value
    assert [bytes(part) for part in (*loaded[1:4], loaded[5])] == [*buffers, b"last"]


def test_a_second_attempt_starts_from_the_memo_of_the_dump_before():
    file = io.BytesIO()
    pickler = native.Pickler(file, 5, compact=True)
    first, holder = ["first"], Node(value=["inner"])
    pickler.dump([first, first])
    position = file.tell()
    pickler.dump([holder, Giving(lambda: holder.value), first])
    file.seek(0)
    unpickler = pickle.Unpickler(file)
    one = unpickler.load()
    assert file.tell() == position
    two = unpickler.load()
    assert two[2] is one[0]
    assert two[1].found is two[0].value


def test_nothing_is_written_before_the_end():
    """A second attempt must not find the first one in the file."""
    holder = Node(value=["inner"], big=bytes(200_000), array=bytearray(100_000), words=[f"w{i}" for i in range(20_000)])
    chunks = []
    writer = type("Writer", (), {"write": staticmethod(chunks.append)})()
    native.Pickler(writer, 5, compact=True).dump([holder, Giving(lambda: holder.value)])
    loaded = pickle.loads(b"".join(chunks))
    assert loaded[1].found is loaded[0].value
    assert any(chunk is holder.big for chunk in chunks)
    chunks.clear()
    with pytest.raises(TypeError):
        native.Pickler(writer, 5, compact=True).dump([holder, (x for x in ())])
    assert chunks == []


def test_errors_leave_a_usable_pickler():
    file = io.BytesIO()
    pickler = native.Pickler(file, 5, compact=True)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            pickler.dump([["a"], Giving(lambda: 1 / 0)])
    pickler.clear_memo()
    pickler.dump([["a"]])
    assert pickle.loads(file.getvalue()) == [["a"]]


def test_library_containers():
    stamp = datetime.datetime(2020, 1, 2)
    assert_compact([collections.OrderedDict(a=[1]), collections.deque([[1], [2]]),
                    collections.defaultdict(list, {"a": [1]}), collections.Counter("abca"), stamp, stamp,
                    [datetime.date(2020, 1, n) for n in range(1, 20)]])


# ---- torch


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="needs torch")


def test_tensors(torch):
    matrix = torch.arange(24.0).reshape(4, 6)
    tensors = [
        matrix, matrix.T, matrix[1:3], matrix[:, ::2], matrix[2, 3], matrix.view(torch.int32), torch.tensor(5),
        torch.randn(3, requires_grad=True), torch.nn.Parameter(torch.randn(2, 2)), torch.zeros(3).expand(4, 3),
        torch.nn.Parameter(torch.arange(3), requires_grad=False), torch.empty(0), torch.empty(0, 5),
        torch.empty(3, 0)[1:],
        torch.arange(5, dtype=torch.int8)[1:], torch.arange(7, dtype=torch.uint8)[3:],
    ]
    tensors += [torch.ones(3, dtype=getattr(torch, name)) for name in
                ("bfloat16", "float16", "float64", "bool", "int16", "int64", "complex64", "complex128")]
    tensors += [torch.ones(3, dtype=torch.complex64).conj(), torch.ones(2, 2).to_sparse(), torch.nn.Linear(3, 4)]
    for tensor in tensors:
        assert_compact(tensor)
    loaded = assert_compact(tensors)
    assert loaded[0].data_ptr() == loaded[1].data_ptr() == loaded[5].data_ptr()
    loaded[0][1, 0] = 99
    assert loaded[2][0, 0] == 99
    for tensor, original in zip(loaded, tensors):
        if isinstance(original, torch.Tensor) and not original.is_sparse:
            assert (tensor.dtype, tensor.stride(), tensor.requires_grad, tensor.is_leaf) == (
                original.dtype, original.stride(), original.requires_grad, original.is_leaf)


def test_streams_of_tensors_hold_nothing_but_torch(torch):
    data = native.dumps([torch.arange(9.0), torch.nn.Parameter(torch.ones(2))], 5, compact=True)
    modules = {arg.split(" ")[0] if " " in arg else arg for opcode, arg, _ in pickletools.genops(data)
               if "UNICODE" in opcode.name}
    assert not any("fastcap" in module for module in modules)


def test_a_view_writes_what_it_reaches(torch):
    base = torch.arange(1_000_000.0)
    assert len(native.dumps(base[10:20], 5, compact=True)) < 1000
    assert len(native.dumps([base[500:510], base[10:20], base[505:515]], 5, compact=True)) < 600 * 4 + 1500
    assert_compact([base[500:510], base[10:20], base[505:515]])
    loaded = assert_compact([base[100:110], base])
    assert loaded[0].data_ptr() == loaded[1].data_ptr() + 400
    grid = base.view(1000, 1000)
    assert_compact([grid[5, 5:8], grid[:, 7], grid[3]])


def test_tensors_go_out_of_band(torch):
    tensor = torch.arange(1000.0)
    buffers = []
    data = native.dumps([tensor, tensor[5:]], 5, buffer_callback=buffers.append, compact=True)
    assert len(data) < 1000
    assert len(buffers) == 1
    loaded = pickle.loads(data, buffers=[bytearray(buffer) for buffer in buffers])
    assert torch.equal(loaded[0], tensor)
    assert loaded[1].data_ptr() == loaded[0].data_ptr() + 20


def test_tensors_before_protocol_5(torch):
    for protocol in range(2, 5):
        assert torch.equal(pickle.loads(native.dumps(torch.arange(9.0), protocol, compact=True)), torch.arange(9.0))


def test_tensors_that_are_made_while_pickling(torch):
    """A reducer makes other tensors each time it is asked, and reaches further each time."""
    base, reach = torch.arange(1000.0), iter(range(10, 1000, 10))

    class Growing:
        def __reduce__(self):
            return Node, (), {"parts": [base[:5], base[: next(reach)]]}

    loaded = pickle.loads(native.dumps([Growing()], 5, compact=True))
    assert torch.equal(loaded[0].parts[0], base[:5])
    assert len(loaded[0].parts[1]) >= 10


def test_fast_mode_stays_fast():
    file = io.BytesIO()
    pickler = native.Pickler(file, 5, compact=True)
    pickler.fast = True
    pickler.dump(fresh(2))
    assert memoized(file.getvalue()) == 0


def test_nothing_leaks():
    import sys

    holder = Node(value=["inner"])
    objs = [fresh(5), [holder, Giving(lambda: holder.value)], [Node(x=[1]), {1: {2: (3,)}}]]

    def dump_all():
        for obj in objs:
            native.dumps(obj, 5, compact=True)
            native.Pickler(io.BytesIO(), 5, compact=True).dump(obj)

    for _ in range(5):
        dump_all()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(200):
        dump_all()
    gc.collect()
    assert sys.getallocatedblocks() - before < 200  # after 1,200 dumps
