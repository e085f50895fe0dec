"""The native graph: dominators against networkx, retained sizes against their definition, hostile tables."""

import concurrent.futures
import pickle
import random
import struct
import types

import networkx
import numpy as np
import pytest
import strategies
from hypothesis import given
from test_scanner import buffers_of, scan

from fastcap._native.graph import DISCARD, ITEM, OPERAND, PAIR, STATE, Edge, Graph
from fastcap._native.scanner import Scanner

NODE = np.dtype([("start", "u8"), ("end", "u8"), ("parent", "u4"), ("count", "u4"), ("place", "u4"), ("arg", "u4"),
                 ("memo", "u4"), ("op", "u1"), ("flags", "u1"), ("pad", "u2")])
REF = np.dtype([("source", "u4"), ("target", "u4"), ("place", "u4")])


def tables(nodes, references=(), **others):
    """Hand-made tables for Graph."""
    table = np.array(nodes, NODE)
    values = {"nodes": table, "references": np.array(list(references), REF), "skeleton": b"", "holes": b"",
              "overheads": b"", "buffer_sizes": [], "stream_size": int(table["end"][0]) if nodes else 0,
              "protocol": 4, "pickle_count": 1, "tail": ""}
    return types.SimpleNamespace(**{**values, **others})


def of_flow_graph(flow):
    """The tables of a FlowGraph: node i has its self size and, behind its children, one byte for each edge."""
    count = len(flow.parents)
    ends = flow.ends
    start, end = [0] * count, [0] * count
    at = 0
    closing: list[int] = []
    for node in range(count):
        while closing and ends[closing[-1]] <= node:
            end[closing.pop()] = at
        start[node] = at
        at += flow.sizes[node]
        closing.append(node)
    while closing:
        end[closing.pop()] = at
    none = 0xFFFFFFFF
    rows = [(start[i], end[i], flow.parents[i] if i else none, ends[i] - i, 0, 0, none, 0x5D, 0, 0)
            for i in range(count)]
    return tables(rows, [(source, target, 0) for source, target in sorted(flow.edges, key=lambda edge: edge[1])])


def networkx_dominators(graph):
    found = networkx.immediate_dominators(graph, 0)
    return [None, *(found[node] for node in range(1, graph.number_of_nodes()))]


def native_dominators(graph):
    """Found in both ways, of which large graphs of unusual shape need the second."""
    quickly = graph.dominators()
    assert graph.dominators(thoroughly=True) == quickly
    return [None if dominator == 0xFFFFFFFF else dominator for dominator in memoryview(quickly).cast("I")]


@given(strategies.flow_graphs())
def test_dominators_are_those_of_networkx(flow):
    graph = Graph(of_flow_graph(flow))
    expected = networkx_dominators(flow.to_networkx())
    assert native_dominators(graph) == expected
    retained = list(flow.sizes)
    for node in range(len(retained) - 1, 0, -1):
        retained[expected[node]] += retained[node]
    assert memoryview(graph.sizes()[2]).cast("Q").tolist() == retained
    for node in range(len(retained)):
        assert graph.node(node).retained_size == retained[node]
        below = [other for other in range(len(retained)) if expected[other] == node]
        assert sorted(graph.dominated(node)) == below
        assert graph.dominated(node, 10, 2) == sorted(
            (other for other in below if retained[other] >= 10), key=lambda other: (-retained[other], other))[:2]


@given(strategies.flow_graphs())
def test_a_pickled_flow_graph_scans_to_itself(flow):
    graph = Graph(scan(pickle.dumps(flow.to_object())))
    count = len(flow.parents)
    assert len(graph) == count
    assert [graph.node(i).parent for i in range(count)] == list(flow.parents)
    assert native_dominators(graph) == networkx_dominators(flow.to_networkx())


def edges_as_networkx(graph):
    result = networkx.DiGraph()
    result.add_nodes_from(range(len(graph)))
    result.add_edges_from((node, edge.target) for node in range(len(graph)) for edge in graph.edges(node))
    return result


def test_dominators_of_the_corpus_are_those_of_networkx(corpus_payloads):
    for payload in corpus_payloads:
        shared = payload.name.startswith("two dumps of one pickler")
        graph = Graph(scan(payload.stream, None, buffers_of(payload), shared_memo=shared))
        if len(graph) < 2000:
            assert native_dominators(graph) == networkx_dominators(edges_as_networkx(graph)), payload.name


def test_views_agree_with_the_tables(corpus_payloads):
    for payload in corpus_payloads:
        graph = Graph(scan(payload.stream, None, buffers_of(payload),
                           shared_memo=payload.name.startswith("two dumps of one pickler")))
        if len(graph) > 500:
            continue
        own, subtree, retained = (memoryview(sizes).cast("Q").tolist() for sizes in graph.sizes())
        incoming = [0] * len(graph)
        references = 0
        for index in range(len(graph)):
            view = graph.node(index)
            sizes = (view.self_size, view.subtree_size, view.retained_size)
            assert sizes == (own[index], subtree[index], retained[index])
            edges = graph.edges(index)
            assert all(isinstance(edge, Edge) for edge in edges)
            assert view.op == "FILE" or {edge.role for edge in edges} <= {OPERAND, ITEM, PAIR, STATE, DISCARD}
            children = [edge.target for edge in edges if not edge.is_reference]
            assert sorted(children) == [child for child in range(len(graph)) if graph.node(child).parent == index]
            assert [edge.target for edge in graph.edges(index, references=False)] == children
            assert graph.edges(index, limit=2) == edges[:2]
            for before, after in zip(sorted(children), sorted(children)[1:]):
                assert graph.next_sibling(before) == after
                assert graph.previous_sibling(after) == before
            if children:
                assert graph.next_sibling(max(children)) == -1
                assert graph.previous_sibling(min(children)) == -1
            for edge in edges:
                if edge.is_reference:
                    incoming[edge.target] += 1
                    references += 1
        assert references == graph.reference_count
        for index in range(len(graph)):
            assert graph.referrer_count(index) == incoming[index]
            assert len(graph.referrers(index, limit=10**6)) == incoming[index]


def test_code_gives_the_stream_back(corpus_payloads):
    for payload in corpus_payloads:
        graph = Graph(scan(payload.stream, None, buffers_of(payload),
                           shared_memo=payload.name.startswith("two dumps of one pickler")))
        end = graph.node(0).end
        holes = graph.holes(0, end)
        kept = graph.code(0, end)
        assert len(kept) + sum(length for _, length in holes) == end
        # what is there is what stands in the stream at that place
        position = 0
        for at, length in [*holes, (end, 0)]:
            part = graph.code(position, at)
            assert len(part) == at - position
            for offset in range(0, len(part), 97):
                place = graph.stream_offset(position + offset)
                assert payload.stream[place] == part[offset], payload.name
            position = at + length


def test_only_long_arguments_are_cut():
    graph = Graph(scan(pickle.dumps(["short", "l" * 1000, b"b" * 1000, b"s" * 100], 4)))
    lengths = [length for _, length in graph.holes(0, graph.node(0).end)]
    assert lengths == [1000 - 256, 1000]
    text = graph.node(2)
    assert graph.code(text.start, text.end) == b"X\xe8\x03\x00\x00" + b"l" * 256 + b"\x94"


def test_last_push_finds_the_key_in_front_of_a_child():
    graph = Graph(scan(pickle.dumps({1: 2, None: 3, 2**40: "value"}, 4)))
    value = graph.edges(0)[0].target
    at = graph.last_push(0, graph.node(value).start)
    assert graph.code(at, graph.node(value).start).startswith(b"\x8a\x06")
    assert graph.last_push(0, 0) == -1


def test_type_totals_close():
    shared = ["shared"] * 3
    graph = Graph(scan(pickle.dumps({"a": shared, "b": [1.5, complex(1, 2), complex(3, 4)], "c": shared}, 4)))
    keys = graph.type_keys()
    assert sum(size for _, size in graph.type_totals({}).values()) == graph.payload_size - graph.overhead
    names = {op: key for key, op, _ in keys}
    calls = [key for key, op, _ in keys if op == "REDUCE"]
    assert len(calls) == 1
    assert {graph.node(graph.node(example).arg).op for key, _, example in keys if key == calls[0]} == {"STACK_GLOBAL"}
    absorbed = graph.type_totals({names["EMPTY_LIST"]: 1})
    assert absorbed[names["EMPTY_LIST"]][0] == 2
    assert sum(size for _, size in absorbed.values()) == graph.payload_size - graph.overhead
    glued = graph.type_totals({names["TUPLE2"]: 2, names["STACK_GLOBAL"]: 2})
    assert names["TUPLE2"] not in glued
    assert glued[calls[0]][0] == 2
    with pytest.raises(ValueError, match="no type key"):
        graph.type_totals({10**6: 1})


# `count` is for the graph to fill in
GOOD = [(0, 10, 0xFFFFFFFF, 3, 0, 0, 0xFFFFFFFF, 0x5D, 0, 0), (1, 4, 0, 1, 0, 0, 0xFFFFFFFF, 0x5D, 0, 0),
        (5, 9, 0, 1, 0, 0, 0xFFFFFFFF, 0x5D, 0, 0)]


def changed(row, **fields):
    nodes = np.array(GOOD, NODE)
    for name, value in fields.items():
        nodes[name][row] = value
    return list(nodes.tolist())


@pytest.mark.parametrize("nodes", [
    [],
    changed(0, parent=0),
    changed(0, end=11),
    changed(0, start=1),
    changed(1, parent=1),
    changed(1, parent=2),
    changed(1, parent=0xFFFFFFFF),
    changed(1, start=4, end=3),
    changed(1, end=6),
    changed(2, end=11),
    changed(2, start=3),
    changed(1, op=ord("R"), arg=3),
    changed(1, flags=1, arg=7),
])
def test_tables_that_do_not_fit_are_refused(nodes):
    assert len(Graph(tables(GOOD))) == 3
    with pytest.raises(ValueError, match=r"graph of|does not fit|overhead"):
        Graph(tables(nodes, stream_size=10)).sizes()


@pytest.mark.parametrize("others", [

    {"overheads": struct.pack("QQ", 0, 11)},
    {"overheads": struct.pack("QQQQ", 5, 1, 4, 2)},
    {"holes": struct.pack("QQ", 8, 5)},
    {"holes": struct.pack("QQQQ", 1, 5, 2, 6)},
    {"holes": struct.pack("QQ", 1, 0)},
    {"skeleton": b"x" * 11},
    {"buffer_sizes": [4]},
])
def test_side_tables_that_do_not_fit_are_refused(others):
    for question in (Graph.sizes, lambda graph: graph.code(0, 1), lambda graph: graph.holes(0, 1),
                     lambda graph: graph.stream_offset(1), lambda graph: graph.last_push(0, 1), Graph.type_keys,
                     lambda graph: graph.select(b"]"), lambda graph: graph.edges(0), lambda graph: graph.dominated(0)):
        with pytest.raises(ValueError):
            question(Graph(tables(GOOD, **others)))


@pytest.mark.parametrize("reference", [(0, 3, 0), (3, 0, 0), (0xFFFFFFFF, 0, 0)])
def test_references_that_do_not_fit_are_refused_before_their_first_use(reference):
    for question in (Graph.dominators, Graph.sizes, lambda graph: graph.node(0), lambda graph: graph.referrers(0)):
        with pytest.raises(ValueError, match="reference 0 of 1"):
            question(Graph(tables(GOOD, [reference])))


def test_questions_out_of_range():
    graph = Graph(tables(GOOD))
    for question in (graph.node, graph.edges, graph.referrers, graph.referrer_count, graph.dominated,
                     graph.next_sibling, graph.previous_sibling):
        for index in (-1, 3, 2**40):
            with pytest.raises(IndexError):
                question(index)
    for span in ((-1, 3), (4, 3), (0, 11)):
        with pytest.raises(IndexError):
            graph.code(*span)
        with pytest.raises(IndexError):
            graph.last_push(*span)
    with pytest.raises(TypeError):
        graph.__init__(tables(GOOD))


def test_dominators_raised_late():
    # What `shared` refers to is lifted out of its parent only by a reference that comes after the one to `inner`.
    inner: list = []
    shared = [inner]
    middle = [shared]
    graph = Graph(scan(pickle.dumps([[shared, middle, inner], middle], 4)))
    assert native_dominators(graph) == networkx_dominators(edges_as_networkx(graph))


def test_threads_may_ask_in_any_order():
    leaves = [[i] for i in range(2000)]
    stream = pickle.dumps([leaves, [leaves[i * 7 % 2000] for i in range(20_000)], leaves[::3]], 4)
    expected = Graph(scan(stream))
    questions = [lambda graph: graph.dominators(), lambda graph: graph.sizes(),
                 lambda graph: [graph.referrers(node) for node in range(0, 2000, 97)],
                 lambda graph: [graph.edges(node) for node in range(0, 2000, 97)]]
    answers = [question(expected) for question in questions]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            graph = Graph(scan(stream))
            order = random.sample(range(len(questions)), len(questions)) * 2
            for which, answer in zip(order, pool.map(lambda which, graph=graph: questions[which](graph), order)):
                assert answer == answers[which]


def test_deep_chains_with_far_references_take_linear_time():
    # Semi-NCA's walk is quadratic here; Lengauer-Tarjan is not.
    depth = 200_000
    stream = b"\x80\x02]q\x00" + b"(" + b"]" * depth + b"".join(b"]q" + bytes([1 + i % 250]) for i in range(250))
    scanner = Scanner()
    scanner.write(stream)
    scanner.write(b"h\x01" * 200_000 + b"\x300" * 0 + b"t.")
    graph = Graph(scanner.finish())
    assert graph.node(0).retained_size == graph.payload_size - graph.overhead


def test_graph_needs_tables():
    with pytest.raises(AttributeError):
        Graph(None)
