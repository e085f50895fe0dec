"""The native scanner: what it accepts, what it refuses, and that neither depends on how the bytes arrive."""

import contextlib
import io
import pickle
import pickletools
import random
import struct
import sys
import tracemalloc

import corpus
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from fastcap import PayloadError
from fastcap._native.graph import Graph
from fastcap._native.scanner import PAUSE_ARRAY, PAUSE_PERSISTENT, PAUSE_STOP, Block, Scanner

CHUNKS = (1, 7, 4096, None)


def scan(stream, chunk=None, buffers=(), **options):
    scanner = Scanner([memoryview(buffer).nbytes for buffer in buffers], **options)
    for start in range(0, len(stream), chunk) if chunk else ():
        scanner.write(stream[start:start + chunk])
    if not chunk:
        scanner.write(stream)
    return scanner.finish()


def as_bytes(tables):
    return [bytes(table) if isinstance(table, Block) else table for table in tables]


def buffers_of(payload):
    return [buffer.raw() for buffer in payload.buffers or ()]


def test_any_chunks_give_the_same_tables(corpus_payloads):
    for payload in corpus_payloads:
        sizes = [buffer.nbytes for buffer in buffers_of(payload)]
        shared = payload.name.startswith("two dumps of one pickler")
        whole = as_bytes(scan(payload.stream, None, buffers_of(payload), shared_memo=shared))
        for chunk in CHUNKS:
            if chunk == 1 and len(payload.stream) > 50_000:
                continue
            scanner = Scanner(sizes, shared_memo=shared)
            for start in range(0, len(payload.stream), chunk or sys.maxsize):
                scanner.write(payload.stream[start:start + (chunk or sys.maxsize)])
            assert as_bytes(scanner.finish()) == whole, (payload.name, payload.protocol, chunk)


def test_sizes_close_over_the_corpus(corpus_payloads):
    for payload in corpus_payloads:
        shared = payload.name.startswith("two dumps of one pickler")
        graph = Graph(scan(payload.stream, None, buffers_of(payload), shared_memo=shared))
        assert graph.tail == ""
        own, subtree, retained = (memoryview(sizes).cast("Q").tolist() for sizes in graph.sizes())
        expected = len(payload.stream) + sum(buffer.nbytes for buffer in buffers_of(payload))
        assert graph.payload_size == expected
        assert sum(own) + graph.overhead == expected
        assert subtree[0] + graph.overhead == expected
        assert retained[0] == sum(own)
        assert all(a <= b <= c for a, b, c in zip(own, retained, subtree))


def overhead_by_genops(stream):
    position, total, file = 0, 0, io.BytesIO(stream)
    while file.tell() < len(stream):
        operations = list(pickletools.genops(file))
        for index, (op, _, position) in enumerate(operations):
            end = operations[index + 1][2] if index + 1 < len(operations) else file.tell()
            if op.name in ("PROTO", "FRAME", "STOP"):
                total += end - position
    return total


def test_overhead_is_that_of_pickletools(corpus_payloads):
    for payload in corpus_payloads:
        shared = payload.name.startswith("two dumps of one pickler")
        graph = Graph(scan(payload.stream, None, buffers_of(payload), shared_memo=shared))
        assert graph.overhead == overhead_by_genops(payload.stream)


def test_every_opcode_has_the_size_and_protocol_that_pickletools_gives_it(corpus_payloads):
    seen = set()
    for payload in corpus_payloads:
        file = io.BytesIO(payload.stream)
        highest = 0
        while file.tell() < len(payload.stream):
            for op, _, _ in pickletools.genops(file):
                seen.add(op.name)
                highest = max(highest, op.proto if not payload.stream.startswith(b"\x80") else 0)
        if not payload.stream.startswith(b"\x80"):
            tables = scan(payload.stream, shared_memo=payload.name.startswith("two dumps"))
            assert tables.protocol == highest, payload.name
    missing = {op.name for op in pickletools.opcodes} - seen - {"EXT4"}
    assert not missing


@pytest.mark.parametrize("data", [b"", b"hello", b"\x7fELF", b"{}", b"\x1f\x8b\x08"])
def test_what_is_no_pickle_is_refused_at_once(data):
    with pytest.raises(PayloadError) as error:
        scan(data)
    assert error.value.offset == 0


@pytest.mark.parametrize(("stream", "offset", "word"), [
    (b"\x80\x09N.", 0, "protocol 9"),
    (b"\x80\x04]e.", 3, "MARK"),
    (b"\x80\x04}(K\x01u.", 6, "key without a value"),
    (b"\x80\x04h\x07.", 2, "memo entry 7"),
    (b"\x80\x040.", 2, "POP"),
    (b"\x80\x04.", 2, "STOP"),
    (b"\x80\x04N\x85R.", 4, "REDUCE"),
    (b"\x80\x04N(K\x01R.", 6, "REDUCE"),
    (b"\x80\x04\x94.", 2, "memo"),
    (b"gx\n.", 0, "GET"),
    (b"\x80\x02T\xff\xff\xff\xff.", 2, "negative"),
    (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 63) + b".", 2, "claims"),
    (b"\x80\x04\xff.", 2, "0xff"),
    (b"\x80\x04]\x94", 4, "STOP"),
    (b"\x80\x04X\x05\x00\x00\x00ab", 9, "3 bytes before"),
    (b"\x80\x04\x95\x04\x00\x00\x00\x00\x00\x00\x00N.", 13, "FRAME claims 2 bytes more"),
    (b"\x80\x04\x95" + b"\xff" * 8 + b"N.", 2, "FRAME claims"),
])
def test_a_broken_stream_is_named_with_its_offset(stream, offset, word):
    for chunk in (1, None):
        with pytest.raises(PayloadError, match=word) as error:
            scan(stream, chunk)
        assert error.value.offset == offset


def test_a_failed_scanner_accepts_nothing_more():
    scanner = Scanner()
    with pytest.raises(PayloadError):
        scanner.write(b"\xff")
    with pytest.raises(ValueError, match="failed"):
        scanner.write(b"N.")
    with pytest.raises(ValueError, match="failed"):
        scanner.finish()
    with pytest.raises(TypeError):
        Scanner.__init__(scanner)


def test_bytes_after_the_last_pickle_are_raw():
    stream = pickle.dumps([1, 2]) + pickle.dumps("x") + b"\xff\xfejunk"
    for chunk in CHUNKS:
        tables = scan(stream, chunk)
        graph = Graph(tables)
        assert tables.pickle_count == 2
        assert "0xff" in graph.tail
        root = graph.node(0)
        assert root.op == "FILE"
        assert [graph.node(edge.target).op for edge in graph.edges(0)] == ["EMPTY_LIST", "SHORT_BINUNICODE", "RAW"]
        assert graph.node(graph.edges(0)[-1].target).self_size == 6
        own = memoryview(graph.sizes()[0]).cast("Q")
        assert sum(own) + graph.overhead == len(stream)


def test_a_second_pickle_that_is_cut_is_raw():
    stream = pickle.dumps(["a"]) + pickle.dumps(["b" * 1000])[:-200]
    tables = scan(stream)
    assert tables.pickle_count == 1
    assert "ends" in tables.tail
    assert Graph(tables).payload_size == len(stream)


def test_pickles_of_one_pickler_share_its_memo():
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    shared = ["shared"]
    pickler.dump([["first"], shared])
    pickler.dump({"again": shared})
    assert scan(file.getvalue()).memo_missed
    graph = Graph(scan(file.getvalue(), shared_memo=True))
    assert graph.tail == ""
    assert graph.pickle_count == 2
    (again,) = graph.referrers(graph.edges(graph.edges(0)[0].target)[1].target)
    assert graph.node(again).op == "EMPTY_DICT"


def test_state_setter_belongs_to_its_object_and_thrown_away_tuples_to_their_reference():
    loop: list = []
    recursive = (loop,)
    loop.append(recursive)
    graph = Graph(scan(pickle.dumps(recursive)))
    root = graph.node(0)
    assert root.op == "BINGET"
    assert graph.node(root.arg).op == "TUPLE1"
    assert [graph.node(edge.target).op for edge in graph.edges(0)] == ["TUPLE1", "EMPTY_LIST"]
    assert root.subtree_size == len(pickle.dumps(recursive)) - graph.overhead


def test_buffers_that_do_not_fit_the_stream_are_refused():
    buffers = []
    data = bytearray(b"x" * 100)
    stream = pickle.dumps(pickle.PickleBuffer(data), 5, buffer_callback=buffers.append)
    graph = Graph(scan(stream, None, [data]))
    assert (graph.buffer_size, graph.payload_size) == (100, 100 + len(stream))
    with pytest.raises(ValueError, match="2 out-of-band buffers were given, the stream uses 1"):
        scan(stream, None, [data, data])
    with pytest.raises(ValueError, match="-1 bytes"):
        Scanner([-1])
    assert Graph(scan(stream)).buffer_size == 0  # sizes unknown: a stream without its buffers


def test_long_arguments_are_counted_and_may_be_skipped():
    size = 10 << 20
    stream = pickle.dumps([bytes(size), "tail"], 4)
    scanner = Scanner()
    head = stream.index(struct.pack("<I", size)) + 4
    scanner.write(stream[:head])
    assert scanner.pending == size
    with pytest.raises(ValueError, match="pending"):
        scanner.skip(size + 1)
    scanner.skip(size)
    scanner.write(stream[head + size:])
    assert as_bytes(scanner.finish()) == as_bytes(scan(stream))


def test_raw_bytes_belong_to_the_object_built_last():
    head, rest = pickle.dumps(["a", ["b"], "c"], 2).split(b"X\x01\x00\x00\x00c")
    rest = b"X\x01\x00\x00\x00c" + rest
    scanner = Scanner()
    scanner.write(head)
    scanner.raw(1 << 40)
    scanner.write(rest)
    graph = Graph(scanner.finish())
    assert graph.stream_size == (1 << 40) + len(head) + len(rest)
    (raw,) = [graph.node(i) for i in range(len(graph)) if graph.node(i).op == "RAW"]
    assert (raw.self_size, graph.node(raw.parent).op) == (1 << 40, "EMPTY_LIST")
    assert raw.parent == graph.edges(0)[1].target
    assert sum(memoryview(graph.sizes()[0]).cast("Q")) + graph.overhead == graph.payload_size
    for stream, error in ((b"", PayloadError), (b"\x80\x04(", PayloadError), (b"\x80\x04X\x05", ValueError)):
        scanner = Scanner()
        scanner.write(stream)
        with pytest.raises(error, match="raw"):
            scanner.raw(1)


def test_a_claimed_length_is_not_an_allocation():
    tracemalloc.start()
    try:
        for stream in (
            b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60),
            b"\x80\x05\x96" + struct.pack("<Q", (1 << 62) - 1),
            b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N",
            b"\x80\x02]r\xff\xff\xff\x7f\x94r\xfe\xff\xff\xff",
            b"\x80\x02]r\x00\x00\x00\x80j\x00\x00\x00\x80a",
        ):
            with pytest.raises(PayloadError):
                scan(stream)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_ten_million_marks():
    stream = b"\x80\x04" + b"(" * 10**7
    with pytest.raises(PayloadError):
        scan(stream)


def test_discards_without_end_take_linear_time():
    count = 200_000
    for unit in (b"]0", b"](0", b"(]1", b"(]0N0"):
        stream = b"\x80\x04" + unit * count + b"N."
        tables = scan(stream)
        assert sum(memoryview(Graph(tables).sizes()[0]).cast("Q")) == len(stream) - 3
    nested = b"\x80\x04" + b"(" * count + b"]0N0" * count + b"0" * count + b"N."
    assert Graph(scan(nested)).payload_size == len(nested)


def test_more_nodes_than_allowed():
    with pytest.raises(PayloadError, match="more than 10 nodes"):
        scan(pickle.dumps([[] for _ in range(20)]), max_nodes=10)
    assert len(Graph(scan(pickle.dumps([[] for _ in range(9)]), max_nodes=10))) == 10


def check_error(error, stream):
    assert 0 <= error.offset <= len(stream)
    return str(error)


def outcome(stream, chunk=None):
    """What a scan gives: a checked graph's numbers, or the error."""
    try:
        tables = scan(stream, chunk)
    except PayloadError as error:
        return check_error(error, stream)
    graph = Graph(tables)
    own, subtree, retained = (memoryview(sizes).cast("Q").tolist() for sizes in graph.sizes())
    assert sum(own) + graph.overhead == graph.payload_size == len(stream)
    assert all(a <= b <= c for a, b, c in zip(own, retained, subtree))
    return own


def test_every_truncation_of_the_corpus_gives_a_graph_or_an_error(long_run):
    rng = random.Random(0)
    for stream in strategies.sample_streams():
        cuts = range(len(stream)) if long_run or len(stream) < 300 else rng.sample(range(len(stream)), 40)
        for cut in cuts:
            outcome(stream[:cut])


def test_flipped_bytes_give_a_graph_or_an_error(long_run):
    rng = random.Random(1)
    streams = strategies.sample_streams()
    for _ in range(100_000 if long_run else 10_000):
        stream = bytearray(rng.choice(streams))
        for _ in range(rng.choice((1, 1, 2, 5))):
            stream[rng.randrange(len(stream))] ^= 1 << rng.randrange(8)
        outcome(bytes(stream))


@given(strategies.broken_streams(), st.sampled_from((1, 3, 64)))
def test_broken_streams_end_the_same_way_in_whatever_chunks(stream, chunk):
    assert outcome(stream) == outcome(stream, chunk)


@given(strategies.objects(), st.integers(2, 5))
def test_sizes_close_for_random_objects(obj, protocol):
    import cloudpickle

    outcome(cloudpickle.dumps(obj, protocol))


def test_scanning_leaks_nothing():
    streams = [*[p.stream for p in corpus.raw_streams()][:20], b"\x80\x04]", b"\xff", b"\x80\x04N.junk"]

    def everything():
        for stream in streams:
            with contextlib.suppress(PayloadError):
                Graph(scan(stream)).sizes()

    for _ in range(20):
        everything()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(500):
        everything()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 20_000


def test_pauses_after_the_opcodes_that_were_asked_for():
    wrapper = b"\x8c\x13joblib.numpy_pickle\x8c\x11NumpyArrayWrapper\x93)\x81}b"
    stream = b"\x80\x04](" + wrapper + b"\x8c\x02idQ" + wrapper + b"e." + b"N."
    ends = {
        PAUSE_ARRAY: [4 + len(wrapper), len(stream) - 4],
        PAUSE_PERSISTENT: [4 + len(wrapper) + 5],
        PAUSE_STOP: [len(stream) - 2, len(stream)],
    }
    plain = as_bytes(scan(stream))
    for pauses in range(8):
        expected = sorted((end, kind) for kind, places in ends.items() if kind & pauses for end in places)
        for chunk in (1, 5, len(stream)):
            scanner = Scanner(pauses=pauses)
            taken, found = 0, []
            while taken < len(stream):
                taken += scanner.write(stream[taken:taken + chunk])
                if scanner.paused:
                    found.append((taken, scanner.paused))
                    assert scanner.position == taken
            assert found == expected, (pauses, chunk)
            assert as_bytes(scanner.finish())[1:] == plain[1:]


def test_a_pause_shows_what_has_been_built():
    scanner = Scanner(pauses=PAUSE_PERSISTENT)
    head = b"\x80\x02](X\x03\x00\x00\x00keyq\x07X\x02\x00\x00\x00ab\x86"
    stream = head + b"Qh\x07e."
    assert scanner.write(stream) == len(head) + 1
    start, end = scanner.top
    assert scanner.code(start, end) == stream[4:len(head) + 1]
    assert scanner.code(*scanner.span(7)) == b"X\x03\x00\x00\x00keyq\x07"
    assert (scanner.span(8), scanner.span(1 << 40), scanner.code(end, end + 1)) == (None, None, None)
    scanner.attach_buffer(1 << 40)
    scanner.write(stream[len(head) + 1:])
    graph = Graph(scanner.finish())
    assert (graph.buffer_size, graph.payload_size) == (1 << 40, (1 << 40) + len(stream))
    (buffer,) = [graph.node(i) for i in range(len(graph)) if graph.node(i).op == "NEXT_BUFFER"]
    assert (buffer.self_size, graph.node(buffer.parent).op) == (1 << 40, "BINPERSID")
    assert sum(memoryview(graph.sizes()[0]).cast("Q")) + graph.overhead == graph.payload_size


def test_buffers_are_attached_between_those_that_were_announced():
    scanner = Scanner([10, 20], pauses=PAUSE_PERSISTENT)
    stream = b"\x80\x05](\x97\x8c\x02idQ\x97e."
    taken = scanner.write(stream)
    scanner.attach_buffer(1000)
    scanner.write(stream[taken:])
    graph = Graph(scanner.finish())
    sizes = [graph.node(i).self_size for i in range(len(graph)) if graph.node(i).op == "NEXT_BUFFER"]
    assert sizes == [11, 1000, 21]  # with the opcodes of those that have one


def test_nothing_is_attached_where_there_is_no_object():
    for stream, error in ((b"", PayloadError), (b"\x80\x04(", PayloadError), (b"\x80\x04X\x05", ValueError)):
        scanner = Scanner()
        scanner.write(stream)
        with pytest.raises(error):
            scanner.attach_buffer(1)
    for size in (-1, 1 << 63):
        scanner = Scanner()
        scanner.write(b"\x80\x04]")
        with pytest.raises(PayloadError):
            scanner.attach_buffer(size)
